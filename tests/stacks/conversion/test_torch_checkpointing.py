"""torch_checkpointing: saves of ours and of FSDP2, read by both on other numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_metadata import DefaultShardingMetadata
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import Rows, fully_shard
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.integrations.torch_checkpointing import RaggedResharder, pieces, rejoin

SIZES = ((7, 5), (5, 6), (6, 3))
Values = dict[str, torch.Tensor]


def _gathered(self: DefaultMetadataManager, data: Any, process_group: Any = None) -> dict[int, Any]:
    """What 0.1.1 does through tensors on a GPU."""
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


def _manager(**spec: Any) -> CheckpointManager:
    DefaultMetadataManager._all_gather_pickled_data = _gathered
    spec = {"resharder": RaggedResharder()} | spec
    items = {"model": ItemSpec(**spec), "optimizer": ItemSpec(**spec)}
    plain = LocalFileSystemStorageConfig(use_direct_io=False)  # which temporary folders may lack
    return CheckpointManager.Config(
        items=items, save=SyncCheckpointSaverConfig(), storage_config=plain
    ).build()


def _model(shard: Callable[..., Any], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(*size) for size in SIZES))
    for layer in model:
        shard(layer, mesh=cpu_mesh())
    shard(model, mesh=cpu_mesh())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 / seed)


def _by_rows(module: nn.Module, **options: Any) -> None:
    fully_shard(module, granularity=Rows(2), **options)


SHARD = {"ours": fully_shard, "rows": _by_rows, "stock": torch_fully_shard}


def _full(model_state: Any, optimizer_state: Any) -> Values:
    tensors = dict(model_state)
    for name, each in optimizer_state["state"].items():
        tensors |= {f"{name} {kind}": value for kind, value in each.items()}
    found = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors.items()
    }
    return found | {"lr": torch.tensor(optimizer_state["param_groups"][0]["lr"])}


def _save(kinds: tuple[str, ...], out: Path) -> dict[str, Values]:
    written = {}
    for kind in kinds:
        model, optimizer = _model(SHARD[kind], seed=1)
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        state, optimizer_state = get_state_dict(model, optimizer)
        _manager().save(str(out / kind), {"model": pieces(state), "optimizer": pieces(optimizer_state)})
        written[kind] = {name: value.clone() for name, value in _full(state, optimizer_state).items()}
    return written


def _load(kinds: tuple[str, ...], out: Path) -> dict[str, tuple[Values, Values]]:
    """Before and after each load into another layout, on these ranks."""
    found = {}
    for source in kinds:
        for kind, shard in SHARD.items():
            model, optimizer = _model(shard, seed=2)
            state, optimizer_state = get_state_dict(model, optimizer)
            before = {name: value.clone() for name, value in _full(state, optimizer_state).items()}
            into = {"model": pieces(state), "optimizer": pieces(optimizer_state)}
            loaded = _manager().load(str(out / source), into=into, strict=True)
            set_optimizer_state_dict(model, optimizer, rejoin(optimizer_state, loaded["optimizer"]))
            found[f"{source} into {kind}"] = before, _full(*get_state_dict(model, optimizer))
    return found


def test_any_layout_on_other_ranks(tmp_path: Path) -> None:
    """2 -> 3 and 2 -> 2 ranks, between ours, ours by rows and FSDP2: weights, moments, steps and learning rates."""
    kinds = ("ours", "stock")
    written = run_ranks(2, _save, kinds, tmp_path)[0]

    for world_size in (2, 3):
        for found in run_ranks(world_size, _load, kinds, tmp_path):
            assert len(found) == 6
            for case, (before, after) in found.items():
                wanted = written[case.split()[0]]
                assert after.keys() == wanted.keys()
                for name, value in wanted.items():
                    assert torch.equal(after[name], value), (case, name)
                assert sum((before[name] != value).any() for name, value in wanted.items()) > 10


class _InTwoDims(RaggedResharder):
    """Another library's resharder: two boxes of a matrix, each at a place of its own in a 2D tensor."""

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[Any, Any]:
        offsets, sizes = ((0, 0), (2, 0)), ((2, 8), (3, 8))
        return {(name,): DefaultShardingMetadata((5, 8), offsets, offsets, sizes, "x") for name in item_value}


def _refused(out: Path) -> list[str]:
    model, optimizer = _model(fully_shard, seed=1)
    state, _ = get_state_dict(model, optimizer)
    said = []

    def refuse(act: Callable[[], Any]) -> None:
        with pytest.raises(CheckpointError) as caught:
            act()
        said.append(str(caught.value))

    empty: dict[str, Any] = {}
    refuse(lambda: _manager().save(str(out / "whole"), {"model": state, "optimizer": empty}))
    _manager(resharder=None).save(str(out / "silent"), {"model": pieces(state), "optimizer": empty})
    refuse(lambda: _manager().load(str(out / "silent"), into={"model": pieces(state), "optimizer": empty}))
    _manager().save(str(out / "good"), {"model": pieces(state), "optimizer": empty})
    other = {"0.weight": torch.zeros(5, 8)}
    refuse(lambda: _manager().load(str(out / "good"), into={"model": other, "optimizer": empty}))
    _manager(resharder=_InTwoDims()).save(str(out / "foreign"), {"model": other, "optimizer": empty})
    refuse(lambda: _manager().load(str(out / "foreign"), into={"model": other, "optimizer": empty}))
    return said


def test_what_is_refused(tmp_path: Path) -> None:
    """A ragged tensor as it is, a checkpoint that knows no places, another shape, and boxes side by side."""
    for whole, silent, shape, foreign in run_ranks(2, _refused, tmp_path):
        assert "pieces" in whole and "model." in whole
        assert "resharder" in silent
        assert "shape (5, 8)" in shape and "0.weight" in shape
        assert "resharder" in foreign and "0.weight" in foreign
