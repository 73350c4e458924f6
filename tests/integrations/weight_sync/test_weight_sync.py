"""Weights for engines that take whole tensors or flat pieces: against doubles of their published interfaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute_stock

from tests.integrations.weight_sync.engine_doubles import (
    ParamMeta,
    ShardSpec,
    TrainerEngine,
    WeightSource,
    extract_weights,
    gather_flat,
)
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of
from vescale_fsdp.dtensor.ragged_dtensor import distribute_tensor
from vescale_fsdp.errors import CheckpointError, PlacementError
from vescale_fsdp.integrations.weight_sync import WholeTensors, shard_specs, weight_source
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.quantize import Fp8Blocks
from vescale_fsdp.torch_private import local_of
from vescale_fsdp.transfer import rank_transfers
from vescale_fsdp.transfer.links import codes, concatenate, scales

Full = dict[str, torch.Tensor]
State = dict[str, Any]


def trainer() -> tuple[Full, State]:
    """Tensors of every kind, and this rank's part of each."""
    mesh = cpu_mesh()
    full = {
        "q": torch.randn(6, 8),
        "k": torch.randn(6, 8),
        "norm": torch.randn(8),
        "rows": torch.randn(5, 3),
        "steps": torch.arange(3),
        "large": torch.randn(64, 64),
    }
    state: State = {
        name: distribute_tensor(full[name].clone(), mesh, [RaggedShard((0,), (1, 2))]) for name in "qk"
    }
    state["norm"] = distribute_tensor(full["norm"].clone(), mesh, [RaggedShard((0,), (1, 0))])
    state["large"] = distribute_tensor(full["large"].clone(), mesh, [RaggedShard((0, 1), (1000, 3096))])
    state["rows"] = distribute_stock(full["rows"].clone(), mesh, [Shard(0)])
    state["steps"] = full["steps"].clone()
    return full, state


def met(kind: type[Exception], work: Any) -> str:
    """What an error said."""
    with pytest.raises(kind) as raised:
        work()
    return str(raised.value)


def whole_tensors() -> list[int]:
    """Every tensor, made of others too, on all ranks and on one; a second pass plans nothing and sees new values."""
    full, state = trainer()
    codec = Fp8Blocks(4, 4)
    links = {"qk": concatenate("q", "k"), "norm": "norm", "large": "large"}
    links |= {"codes": codes("large", codec), "scale": scales("large", codec), "steps": "steps"}
    made = WholeTensors(state, links=links, dtype=torch.bfloat16, receivers=(1,), bucket_bytes=4096)
    every = WholeTensors(state, verify=True)
    assert [tensor.name for tensor in made.tensors] == list(links)
    assert {tensor.name for tensor in every.tensors} == set(full) and len(list(every.buckets())) == 1
    real = rank_transfers.shares_between
    sizes = []
    for step in range(2):
        for local in map(local_of, state.values()):
            local.mul_(-1 if step else 1)
        now = {name: -value if step else value for name, value in full.items()}
        quantized = codec.quantize(now["large"])
        wanted = {name: now[name].bfloat16() for name in ("norm", "large")} | {"steps": now["steps"]}
        wanted |= {"qk": torch.cat([now["q"], now["k"]]).bfloat16()}
        wanted |= {"codes": quantized.codes.view(torch.float8_e4m3fn), "scale": quantized.scales}
        got = dict(made)
        assert list(got) == list(links)
        for name, tensor in got.items():
            assert (tensor.dtype, tensor.shape) == (wanted[name].dtype, wanted[name].shape), name
            assert tensor.is_meta if dist.get_rank() == 0 else bytes_of(tensor).equal(bytes_of(wanted[name]))
        assert all(tensor.equal(now[name]) and tensor.any() for name, tensor in dict(every).items())
        sizes = [bucket.data.numel() for bucket in made.buckets()]
        rank_transfers.shares_between = None  # type: ignore[assignment]  # a second pass asks nothing of the plan
    rank_transfers.shares_between = real
    return sizes


def wrong_calls() -> None:
    """What cannot be made is listed at once, on all ranks; a state that changes midway is refused on all ranks."""
    _, state = trainer()
    said = met(
        PlacementError,
        lambda: WholeTensors(state, links={"a": "gone", "b": concatenate("q", "norm"), "c": "q"}),
    )
    assert "2 problems" in said and "no tensor 'gone'" in said and "cannot be concatenated" in said
    for receivers in ((2,), (), (0, 0)):
        assert "cannot receive" in met(PlacementError, lambda: WholeTensors(state, receivers=receivers))  # noqa: B023
    rank = dist.get_rank()
    assert "receivers" in met(CheckpointError, lambda: WholeTensors(state, receivers=(rank,)))
    pieces = iter(WholeTensors(state, bucket_bytes=256))
    next(pieces)
    if rank == 1:
        state["q"].add_(1)
    said = met(CheckpointError, lambda: list(pieces))
    assert "written to between two buckets" in said and "rank 1" in said


def vllm_and_checkpoint_engine() -> None:
    """A source of vLLM's class, called as its engine does, twice; buckets as checkpoint-engine's workers read them."""
    full, state = trainer()
    source = weight_source(WholeTensors(state, receivers=(0,), bucket_bytes=512), WeightSource, ParamMeta)
    engine = TrainerEngine(source, is_sender=dist.get_rank() == 0)
    for _ in range(2):
        received = engine.send_weights()
        assert set(received) == (set(full) if dist.get_rank() == 0 else set())
        assert all(tensor.equal(full[name]) for name, tensor in received.items())
    if dist.get_rank() == 0:
        list(source)
    else:  # who gets nothing must not be the sender: that is told from weights of zero
        names = [name for name, tensor in source if not tensor.is_meta]
        assert names == []
    with pytest.raises(TypeError):
        weight_source(WholeTensors(state), WeightSource, dict.fromkeys).metadata()
    shared = torch.empty(1 << 16, dtype=torch.uint8)
    seen: Full = {}
    for bucket in WholeTensors(state).buckets():
        shared[: bucket.data.numel()].copy_(bucket.data)
        for name, tensor in extract_weights([part._asdict() for part in bucket.parts], shared):
            seen[name] = tensor.clone()
    assert seen.keys() == full.keys() and all(tensor.equal(full[name]) for name, tensor in seen.items())


def two_ranks() -> list[int]:
    """All that two ranks can show."""
    sizes = whole_tensors()
    wrong_calls()
    vllm_and_checkpoint_engine()
    return sizes


def test_whole_tensors() -> None:
    """For vLLM and checkpoint-engine: the tensors themselves, no more than a bucket at a time, or all ranks raise."""
    sizes = run_ranks(2, two_ranks, timeout_s=120)[0]

    assert len(sizes) > 2 and sorted(sizes)[-2] <= 4096 < sum(sizes)  # the large one is a bucket of its own


def verl_specs() -> int:
    """Flat pieces of ragged tensors under replication, and what verl derives itself left to it."""
    mesh = cpu_mesh(2, 2, names=("replicas", "shards"))
    full = torch.randn(7, 3)
    units = RaggedShard((0, 1), (5, 16))
    tensors = {
        "ragged": distribute_tensor(full.clone(), mesh, [Replicate(), units]),
        "first": distribute_tensor(full.clone(), mesh["shards"], [RaggedShard((0,), (1, 0))]),
        "stock": distribute_stock(full.clone(), mesh, [Replicate(), Shard(0)]),
        "plain": full.clone(),
    }
    replica, shard = mesh.get_coordinate() or (0, 0)
    found = {name: (local, spec) for name, local, spec in shard_specs(tensors.items(), ShardSpec)}
    local, spec = found["ragged"]
    assert (spec.place, local.numel()) == ((5, 16) if shard else (0, 5)) and spec.contributes is (
        replica == 0
    )
    whole = gather_flat(local, spec)
    assert whole is None if shard else whole is not None
    if whole is not None:
        assert whole.equal(full) if replica == 0 else whole.isnan().all()
    whole = gather_flat(*found["first"])
    assert shard or (whole is not None and whole.equal(full))
    assert (
        found["stock"][1] == ShardSpec((7, 3), mesh, (Replicate(), Shard(0)))
        and found["plain"][1].mesh is None
    )
    with pytest.raises(TypeError):
        list(shard_specs([("ragged", tensors["ragged"])], dict.fromkeys))
    return local.numel()


def test_flat_pieces() -> None:
    """For verl: offsets from which the full tensor is put together again, each item by one rank."""
    assert run_ranks(4, verl_specs, timeout_s=120) == [5, 16, 5, 16]
