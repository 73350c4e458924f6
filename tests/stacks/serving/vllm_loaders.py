"""Links from the loaders of vLLM's own model classes, on a CPU: `python -m tests.stacks.serving.vllm_loaders MODEL TP`.

With ``patch`` in place of TP: changed items are applied by vLLM's own code to a loaded model.

For each rank of an engine with tensor parallelism, under torch's fake process group, `links_from_loader` runs the
``load_weights`` of vLLM's class on the meta device. Then one transfer by these links fills all ranks' models, and each
must equal a model that was loaded with ``load_weights`` from the same tensors, bit for bit.

Of vLLM, nothing that loads is replaced: no operator, layer, parameter or loader. Replaced are packages of its servers,
if they are missing, the communicators of its groups, and the process in which it inspects a model class.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale_fsdp.integrations.weight_sync import ChangedItems, vllm_patches
from vescale_fsdp.transfer import Transfer, describe_states, links_from_loader, plan_transfer
from vescale_fsdp.transfer.description import named_tensors
from vescale_fsdp.transfer.links import Link

MISSING = 77  # exit status: a package that vLLM needs is not installed
# Packages of vLLM's servers, which its model classes import and do not use.
SERVERS = (
    "fastapi",
    "prometheus_fastapi_instrumentator",
    "xgrammar",
    "openai_harmony",
    "llguidance",
    "tiktoken",
)
SERVERS += ("mcp", "anthropic")

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
# For each model type: the class, and the config beside the sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_EXPERTS, "num_experts": 4, "decoder_sparse_step": 1}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **_EXPERTS,
            "num_key_value_heads": 8,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "rope_scaling": None,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            "intermediate_size": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "rope_scaling": None,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


class _Servers(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports empty modules in place of missing packages."""

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        found = name.partition(".")[0] in SERVERS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


def config_of(model_type: str) -> dict[str, Any]:
    """The config of a small model."""
    architecture, more = MODELS[model_type]
    return {
        **_SIZES,
        **more,
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
    }


def trained(model_type: str) -> dict[str, torch.Tensor]:
    """The state of transformers' model: what a trainer stores. Experts are fused."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {
        name: value
        for name, value in config_of(model_type).items()
        if name not in ("architectures", "torch_dtype")
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    torch.manual_seed(0)
    return {name: torch.randn(value.shape).to(value.dtype) for name, value in model.state_dict().items()}


def checkpoint_of(
    model_type: str, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the model's checkpoints, as views of transformers' tensors: each expert has its own."""
    names = ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in weights:
        name = name.replace(".mlp.", ".block_sparse_moe.") if model_type == "mixtral" else name
        folder, _, kind = name.rpartition(".")
        if model_type == "gpt_oss" or not folder.endswith(".experts"):
            yield name, tensor
            continue
        for expert, own in enumerate(tensor):
            parts = own.chunk(2) if kind == "gate_up_proj" else (own,)
            for part, of in zip(parts, names[: len(parts)] if len(parts) > 1 else names[2:], strict=True):
                yield f"{folder}.{expert}.{of}.weight", part


class Vllm:
    """vLLM as one rank of several: its config, and models."""

    def __init__(self, model_type: str, rank: int, ranks: int) -> None:
        import vllm.platforms
        from vllm.config import DeviceConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.model_executor.models import registry
        from vllm.platforms.cpu import CpuPlatform

        vllm.platforms._current_platform = CpuPlatform()
        registry._run_in_subprocess = lambda function: function()
        folder = tempfile.mkdtemp()
        Path(folder, "config.json").write_text(json.dumps(config_of(model_type)))
        model = ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True
        )
        parallel = ParallelConfig(tensor_parallel_size=ranks)
        self.config = VllmConfig(
            model_config=model, parallel_config=parallel, device_config=DeviceConfig(device="cpu")
        )
        self.current = lambda: set_current_vllm_config(self.config)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        new_group = dist.new_group
        dist.new_group = lambda ranks=None, **options: new_group(ranks, backend="fake")
        made = parallel_state.GroupCoordinator.__init__

        def without_communicator(*args: Any, **options: Any) -> None:
            given = inspect.signature(made).bind(*args, **options).arguments
            given |= {"use_device_communicator": False, "use_message_queue_broadcaster": False}
            made(**given)

        parallel_state.GroupCoordinator.__init__ = without_communicator
        parallel_state.in_the_same_node_as = lambda group, source_rank=0: [True] * group.size()
        try:
            with self.current():
                parallel_state.init_distributed_environment(ranks, rank, "env://", rank, "fake")
                parallel_state.initialize_model_parallel(ranks, backend="fake")
        finally:
            dist.new_group = new_group
            parallel_state.GroupCoordinator.__init__ = made

    def model(self, device: str) -> Any:
        """A new model of this rank; floats that are not on the meta device are 7."""
        from vllm.model_executor.model_loader.utils import initialize_model

        self.config.compilation_config.static_forward_context.clear()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.current(), torch.device(device):
                model = initialize_model(self.config)
        finally:
            torch.set_default_dtype(before)
        for _, tensor in named_tensors(model):
            if tensor.is_floating_point() and not tensor.is_meta:
                tensor.data.fill_(7)
        return model

    def close(self) -> None:
        """Leave the group."""
        from vllm.distributed import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        if dist.is_initialized():
            dist.destroy_process_group()


def loaded_by(model: Any, model_type: str, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load a model by vLLM's own code, from a trainer's tensors."""
    model.load_weights(checkpoint_of(model_type, weights))


def compare(model_type: str, ranks: int) -> int:
    """Load a model on all ranks by links, and by vLLM: return the number of equal tensors."""
    source = trained(model_type)
    links: dict[str, Link] = {}
    served: dict[str, dict[str, torch.Tensor]] = {}
    loaded: dict[str, Mapping[str, torch.Tensor]] = {}
    for rank in range(ranks):
        engine = Vllm(model_type, rank, ranks)
        traced, models = engine.model("meta"), [engine.model("cpu") for _ in range(2)]
        with engine.current():
            load = partial(loaded_by, traced, model_type)
            links |= links_from_loader(traced, load, source, prefix=f"{rank}.")
            # Copies: gpt-oss's loader sets biases to zero that another rank adds.
            loaded_by(models[1], model_type, {name: each.clone() for name, each in source.items()}.items())
        engine.close()
        tensors, loaded[str(rank)] = (dict(named_tensors(model)) for model in models)
        served[str(rank)] = {name: value.data for name, value in tensors.items() if f"{rank}.{name}" in links}
    plan = plan_transfer(*describe_states(source, served), links=links, cast=True)
    Transfer(plan, verify=True).run(source, served)
    for rank, tensors in served.items():
        for name, tensor in loaded[rank].items():
            if name in tensors:
                assert torch.equal(tensors[name], tensor), f"rank {rank}: {name}"
            else:  # what has no link was not loaded
                assert not tensor.is_floating_point() or bool((tensor == 7).all()), f"rank {rank}: {name}"
    return len(links)


def patch(model_type: str) -> int:
    """Patch a loaded model by vLLM's code, and load another by vLLM: return the number of changed items.

    vLLM's digests of all weights are compared, as its weight checker compares them.
    """
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )
    from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests

    source = trained(model_type)
    weights = dict(checkpoint_of(model_type, source.items()))  # views of the source
    before = {name: tensor.clone() for name, tensor in weights.items()}
    changed = ChangedItems(weights)
    for tensor in source.values():
        tensor.view(-1)[::50] += 1
    patches = [
        CheckpointWeightPatch(each.name, each.full_shape, each.values.dtype, each.values, each.indices)
        for each in vllm_patches(changed)
    ]
    engine = Vllm(model_type, 0, 1)
    with engine.current():
        patched, loaded = engine.model("cpu"), engine.model("cpu")
        patched.load_weights(iter(before.items()))
        load_checkpoint_weight_patches(patched, patches)
        loaded.load_weights(iter(weights.items()))
    engine.close()
    digests = compute_tensor_digests(patched)
    assert digests == compute_tensor_digests(loaded) and len(digests) > 10
    return sum(each.indices.numel() for each in patches)


if __name__ == "__main__":
    sys.path += [folder for folder in os.environ.get("ENGINE_PACKAGES", "").split(":") if folder]
    SERVERS = tuple(name for name in SERVERS if importlib.util.find_spec(name) is None)
    sys.meta_path.append(_Servers())
    try:
        importlib.import_module("vllm.model_executor.models.llama")
    except ModuleNotFoundError as missing:
        print(missing)
        sys.exit(MISSING)
    print(
        json.dumps(patch(sys.argv[1]) if sys.argv[2] == "patch" else compare(sys.argv[1], int(sys.argv[2])))
    )
