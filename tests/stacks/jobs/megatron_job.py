"""Checkpoints that Megatron-core writes with two tensor-parallel ranks, and what its models answer; a job of torchrun.

torchrun --nproc-per-node 2 -m tests.stacks.jobs.megatron_job --out FOLDER

One folder per case, layers stacked or one by one, and in each plain.pt, all tensors as Megatron's own reader has them;
beside it CASE.logits.pt. Megatron wants GPUs: the few calls to CUDA that a small model makes are answered for the CPU.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import optimizer as sharded_optimizer
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

VOCAB, PADDED = 61, 64
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
    "mixtral": {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48},
}


def model_of(options: dict[str, Any]) -> GPTModel:
    """A small GPT of Megatron's, with random weights."""
    config = TransformerConfig(
        num_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        ffn_hidden_size=48,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=False,
        **options,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=options.get("num_moe_experts"),
        moe_grouped_gemm=False,
        qk_layernorm=options.get("qk_layernorm", False),
        normalization="RMSNorm",
    )
    return GPTModel(
        config,
        spec,
        vocab_size=PADDED,
        max_sequence_length=32,
        parallel_output=False,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=10000,
    )


def randomize(model: GPTModel) -> None:
    """Weights that are told apart: norms and biases too, equal on all ranks where they are whole there."""
    for name, param in sorted(model.named_parameters()):
        torch.manual_seed(len(name) * 100 + sum(map(ord, name)))
        if getattr(param, "tensor_model_parallel", False):
            torch.manual_seed(torch.initial_seed() + 7919 * (1 + dist.get_rank()))
        with torch.no_grad():
            param.copy_(0.2 * torch.randn_like(param) + (1.0 if "norm" in name else 0.0))


def state_of(model: GPTModel, metadata: dict[str, Any]) -> dict[str, Any]:
    """What Megatron's training loop saves: model, masters, moments, arguments."""
    sharded = model.sharded_state_dict(metadata=metadata)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)  # moments alone
    for param in model.parameters():
        param.grad = torch.sin(100 * param.detach())
    optimizer.step()
    masters: dict[str, Tensor] = {}
    parameters = sharded_optimizer.get_param_id_to_sharded_param_map(sharded, model.parameters())
    state = optimizer.state_dict()
    sharded_optimizer.optim_state_to_sharding_state(state, parameters, exclude_keys=("step",))
    for number, param in enumerate(model.parameters()):
        made = sharded_optimizer.make_sharded_optimizer_tensor(
            parameters[number], param.detach() + 0.0, prefix="optimizer.state.fp32_param"
        )
        masters[str(number)] = made
    state["state"]["common_step"] = torch.tensor(5.0)
    args = SimpleNamespace(padded_vocab_size=PADDED)
    return {
        "model": sharded,
        "optimizer": {"optimizer": state, "fp32_from_fp16_params": masters},
        "args": args,
        "iteration": 10,
        "checkpoint_version": 3.0,
    }


def save(case: str, out: Path) -> None:
    """Both ways of naming layers, and the model's answer."""
    model = model_of(CASES[case]).eval()
    randomize(model)
    ids = (torch.arange(24).view(2, 12) * 7) % VOCAB
    places = torch.arange(12).expand(2, 12)
    mask = torch.triu(torch.ones(12, 12, dtype=torch.bool), 1)[None, None]
    for form in ("stacked", "by_layer"):
        folder = out / case / form / "iter_0000010"
        folder.mkdir(parents=True, exist_ok=True)
        state = state_of(model, {"non_homogeneous_layers": form == "by_layer"})
        dist.barrier()
        dist_checkpointing.save(state, str(folder))
        plain = dist_checkpointing.load_plain_tensors(str(folder))
        if dist.get_rank() == 0:
            tensors = {name: value for name, value in plain.items() if isinstance(value, Tensor)}
            torch.save(tensors, folder.with_name("plain.pt"))
    with torch.no_grad():
        logits = model(ids, places, mask)
    if dist.get_rank() == 0:
        torch.save(logits[..., :VOCAB].clone(), out / f"{case}.logits.pt")


def main() -> None:
    """All cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    tracker = SimpleNamespace(fork=lambda *_: nullcontext(), add=lambda *_: None, is_initialized=lambda: True)
    tensor_parallel.random._CUDA_RNG_STATE_TRACKER = tracker
    tensor_parallel.random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    moe_utils.te_general_gemm = None  # Megatron forgets it where Transformer Engine is not installed
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    for case in CASES:
        save(case, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
