"""transformers' `from_pretrained` straight into shards: values, bytes read, saving, merged experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.distributed import DistributedConfig

from examples.stacks.tiny_llm import tiny_llama
from tests.stacks.jobs.example_ranks import run_example, run_on_ranks
from vescale_fsdp import RaggedDTensor, Rows, Whole
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.conversion import HuggingFace
from vescale_fsdp.errors import UnsupportedOpError
from vescale_fsdp.integrations import as_fsdp2, installation
from vescale_fsdp.integrations import transformers as ours

MIXTRAL = MixtralConfig(
    vocab_size=67,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    use_cache=False,
)


class _Counted:
    """A tensor of the files that counts the bytes it is asked for."""

    def __init__(self, source: Any, read: list[int]) -> None:
        self._source, self._read = source, read

    def get_shape(self) -> Any:
        return self._source.get_shape()

    def __getitem__(self, where: Any) -> torch.Tensor:
        found: torch.Tensor = self._source[where]
        self._read.append(found.nbytes)
        return found


def _loads(folder: Path, granularity: Any) -> dict[str, Any]:
    """Load, run, save; how many bytes all ranks read of the files."""
    read: list[int] = []
    shard_tensor = ours._PieceOperation.shard_tensor

    def counted(self: Any, source: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert not isinstance(source, torch.Tensor)  # it is in the file yet
        return shard_tensor(self, _Counted(source, read), *args, **kwargs)

    ours._PieceOperation.shard_tensor = counted  # type: ignore[method-assign]
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    try:
        with as_fsdp2(granularity=granularity):
            model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    finally:
        ours._PieceOperation.shard_tensor = shard_tensor  # type: ignore[method-assign]
    kinds = {type(param.data) for param in model.parameters()}
    loss = model(input_ids=torch.arange(12).view(2, 6), labels=torch.arange(12).view(2, 6)).loss
    loss.backward()
    grads = [param.grad is not None for param in model.parameters()]
    model.save_pretrained(folder / f"saved_{dist.get_world_size()}")
    total = torch.tensor(sum(read))
    dist.all_reduce(total)
    return {
        "read": total.item(),
        "ragged": kinds == {RaggedDTensor},
        "loss": loss.item(),
        "grads": all(grads),
    }


def _check(model: nn.Module, folder: Path, granularity: Any) -> int:
    model.save_pretrained(folder)
    ids = torch.arange(12).view(2, 6)
    expected = model(input_ids=ids, labels=ids).loss.item()
    found = run_example(2, _loads, folder, granularity)

    assert found["ragged"] and found["grads"]
    assert abs(found["loss"] - expected) < 1e-6
    saved, start = (load_file(path / "model.safetensors") for path in (folder / "saved_2", folder))
    # transformers writes tied weights of a sharded model twice, stock FSDP2's too
    assert saved.keys() - start.keys() <= {"lm_head.weight"} and len(start) > 10
    assert all(torch.equal(saved[name], start[name]) for name in start)
    return found["read"]


def _nbytes(model: nn.Module) -> int:
    return sum(param.nbytes for param in model.parameters())


def test_a_dense_model(tmp_path: Path) -> None:
    """Each rank reads its own bytes and no others, at any granularity, tied embeddings too."""
    tied: LlamaForCausalLM = tiny_llama(tied=True)
    apart = tiny_llama()

    assert _check(apart, tmp_path / "elements", None) == _nbytes(apart)
    assert _check(tied, tmp_path / "rows", {"*mlp*": Rows(8), "*self_attn*": Whole()}) == _nbytes(tied)


def test_merged_experts(tmp_path: Path) -> None:
    """Experts that lie apart in the files are merged, then cut: on every rank all of them are read."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MIXTRAL)

    assert _check(model, tmp_path, None) > _nbytes(model)


def _imported_too_late(folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installation, "_stand_ins_of", lambda stacks: {})  # as if transformers came later
        with as_fsdp2(), pytest.raises(UnsupportedOpError) as refused:
            AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))
    return str(refused.value.todo)


def test_the_order_of_imports_is_said(tmp_path: Path) -> None:
    """An installation that transformers was not there for cannot serve its loader: it says so, on every rank."""
    tiny_llama().save_pretrained(tmp_path)

    for text in run_on_ranks(2, _imported_too_late, tmp_path):
        assert "transformers" in text


ODD = LlamaConfig(
    vocab_size=51,
    hidden_size=24,
    intermediate_size=37,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)


def _saves_distributed(folder: Path) -> str:
    """Save without a gather: refused for pieces of several boxes; then take each way that the error names."""
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    with as_fsdp2():
        model = LlamaForCausalLM.from_pretrained(folder, distributed_config=config)
    with pytest.raises(CheckpointException) as refused:
        model.save_pretrained(folder / "refused", distributed_checkpoint=True)
    model.save_pretrained(folder / "gathered")
    save(folder / "shards", {"model": model}, format=HuggingFace(assets=folder))
    with as_fsdp2(granularity="rows:1"):
        model = LlamaForCausalLM.from_pretrained(folder, distributed_config=config)
    model.save_pretrained(folder / "rows", distributed_checkpoint=True)
    return str(refused.value)


def test_a_save_without_a_gather(tmp_path: Path) -> None:
    """What transformers' distributed checkpoint would lose is refused, and the ways that are named keep every value."""
    model = LlamaForCausalLM(ODD)
    model.save_pretrained(tmp_path)

    for text in run_on_ranks(2, _saves_distributed, tmp_path):
        assert "model.embed_tokens.weight" in text and "HuggingFace" in text and "rows:1" in text
    assert not list((tmp_path / "refused").glob("*.safetensors"))
    for name in ("gathered", "shards", "rows"):
        loaded = LlamaForCausalLM(ODD)
        load(tmp_path / name, loaded)
        state = loaded.state_dict()
        assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items()), name
