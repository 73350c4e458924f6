"""States for checkpoint tests: every kind of sharding, with values that tell where an element belongs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from vescale_fsdp import RaggedDTensor, RaggedShard
from vescale_fsdp.checkpoint.manifest.structure import dump_json
from vescale_fsdp.checkpoint.storage.checksums import hex_digest_of
from vescale_fsdp.layout import GroupLayout, TensorSpec, plan_group

SHAPES = {"w": (13, 10), "b": (7,), "stack": (3, 5, 4), "one": (1, 1), "wide": (2, 33)}


def full(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that differ between elements and between names."""
    numel = torch.Size(shape).numel()
    start = sum(map(ord, name)) % 97
    return (torch.arange(numel) * 3 + start).remainder(251).to(dtype).reshape(shape)


def ragged_group(
    mesh: DeviceMesh, *, block_rows: int = 1, prefix: str = "", axis: int = 0
) -> dict[str, RaggedDTensor]:
    """A group laid out by the planner, with blocks of whole rows; all its tensors carry their layout."""
    layout = planned(mesh.size(axis), block_rows)
    return {prefix + name: place(layout, name, mesh, axis, prefix) for name in SHAPES}


def planned(num_shards: int, block_rows: int = 1) -> GroupLayout:
    """The layout of `SHAPES` over a number of shards."""
    specs = [
        TensorSpec(name, shape, "float32", min(block_rows * shape[-1], torch.Size(shape).numel()))
        for name, shape in SHAPES.items()
    ]
    return plan_group(specs, num_shards, align_numel=1)


def place(layout: GroupLayout, name: str, mesh: DeviceMesh, axis: int = 0, prefix: str = "") -> RaggedDTensor:
    """One ragged tensor of a layout, with the values of `full`."""
    slot = layout.slot(name)
    placement = RaggedShard.from_piece_numels(slot.shape, layout.piece_numels(slot))
    start, stop = layout.piece(slot, mesh.get_local_rank(axis)).range
    local = full(prefix + name, slot.shape).reshape(-1)[start:stop].clone()
    placements = [placement if dim == axis else Replicate() for dim in range(mesh.ndim)]
    tensor = RaggedDTensor.from_local(local, mesh, placements, shape=slot.shape)
    tensor.layout_ref = (layout, name)
    return tensor


def stock_tensors(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Stock DTensors of every placement on a 1-D mesh, and plain tensors."""
    cases = {
        "shard0": ((11, 4), Shard(0)),
        "shard1": ((6, 9), Shard(1)),
        "shard2": ((2, 3, 10), Shard(2)),
        "replicate": ((40, 500), Replicate()),
        "small": ((3,), Replicate()),
    }
    found: dict[str, torch.Tensor] = {
        name: distribute_tensor(full(name, shape), mesh, [placement])
        for name, (shape, placement) in cases.items()
    }
    found["plain"] = full("plain", (5, 2), torch.bfloat16)
    found["scalar"] = torch.tensor(4.5)
    found["empty"] = torch.empty(0, 4)
    found["shared"] = found["plain"]
    return found


def mixed_state(block_rows: int = 1) -> dict[str, Any]:
    """A state with every kind of leaf on the ranks of the running call."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = ragged_group(mesh, block_rows=block_rows)
    optim: dict[str, Any] = {
        "state": {
            name: {"step": torch.tensor(3.0), "exp_avg": tensor + 1, "exp_avg_sq": tensor * 2}
            for name, tensor in model.items()
        },
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": list(model)}],
    }
    return {"model": model, "optim": optim, "stock": stock_tensors(mesh), "step": 7}


def erase(value: Any) -> None:
    """Overwrite every tensor of a state, and every number."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        local.fill_(0)
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, (int, float)):
                value[key] = -1
            erase(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            erase(item)


def plain(value: Any) -> Any:
    """A state with every DTensor gathered, for comparison. A collective."""
    if isinstance(value, RaggedDTensor) or hasattr(value, "full_tensor"):
        return value.full_tensor().clone()
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    return value


def assert_equal(expected: Any, found: Any, name: str = "") -> int:
    """Compare two plain states leaf by leaf; returns how many tensor elements were compared."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), name
        assert expected.dtype == found.dtype and expected.shape == found.shape, name
        assert torch.equal(expected, found), name
        return expected.numel()
    if isinstance(expected, dict):
        assert list(expected) == list(found), name
        return sum(assert_equal(expected[key], found[key], f"{name}/{key}") for key in expected)
    if isinstance(expected, (list, tuple)):
        assert len(expected) == len(found), name
        return sum(
            assert_equal(a, b, f"{name}/{i}") for i, (a, b) in enumerate(zip(expected, found, strict=True))
        )
    assert expected == found, name
    return 0


def sealed_manifest(data: dict[str, Any]) -> bytes:
    """A manifest's file with a checksum that fits."""
    content = dump_json({key: value for key, value in data.items() if key != "checksum"})
    return content[:-1] + f',"checksum":"{hex_digest_of(content)}"}}'.encode()
