"""Whole tensors of a sharded state for engines: values, buckets, memory, and errors on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor as distribute_stock

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtype_zoo import same_bytes
from vescale_fsdp import RaggedShard, distribute_tensor
from vescale_fsdp.errors import CheckpointError, PlacementError, VescaleError
from vescale_fsdp.integrations.weight_sync import ChangedItems, WholeTensors
from vescale_fsdp.quantize import Fp8Blocks
from vescale_fsdp.torch_private import local_of
from vescale_fsdp.transfer import rank_transfers
from vescale_fsdp.transfer.links import codes, concatenate, permute, scales

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
        "empty": torch.ones(0, 3),
    }
    state: State = {
        name: distribute_tensor(full[name].clone(), mesh, [RaggedShard((0,), (1, 2))]) for name in "qk"
    }
    state["norm"] = distribute_tensor(full["norm"].clone(), mesh, [RaggedShard((0,), (1, 0))])
    state["large"] = distribute_tensor(full["large"].clone(), mesh, [RaggedShard((0, 1), (1000, 3096))])
    state["rows"] = distribute_stock(full["rows"].clone(), mesh, [Shard(0)])
    state["steps"] = full["steps"].clone()
    state["empty"] = full["empty"].clone()
    return full, state


def met(kind: type[VescaleError], work: Any) -> VescaleError:
    """The error that work ends in."""
    with pytest.raises(kind) as raised:
        work()
    return raised.value


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
    real = rank_transfers.copies_between
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
            assert tensor.is_meta if dist.get_rank() == 0 else same_bytes(tensor, wanted[name])
        assert all(
            tensor.equal(now[name]) and (tensor.any() or not tensor.numel())
            for name, tensor in dict(every).items()
        )
        sizes = [bucket.data.numel() for bucket in made.buckets()]
        rank_transfers.copies_between = None  # type: ignore[assignment]  # a second pass asks nothing of the plan
    rank_transfers.copies_between = real
    return sizes


def wrong_calls() -> None:
    """What cannot be made is listed at once, on all ranks; a state that changes midway is refused on all ranks."""
    _, state = trainer()
    refused = met(
        PlacementError,
        lambda: WholeTensors(state, links={"a": "gone", "b": concatenate("q", "norm"), "c": "q"}),
    )
    assert all(name in str(refused) for name in ("'gone'", "'b'")) and "'c'" not in str(refused)
    for receivers in ((2,), (), (0, 0)):
        refused = met(PlacementError, lambda: WholeTensors(state, receivers=receivers))  # noqa: B023
        assert refused.got == str(list(receivers))
    rank = dist.get_rank()
    assert "receivers" in str(met(CheckpointError, lambda: WholeTensors(state, receivers=(rank,))))
    pieces = iter(WholeTensors(state, bucket_bytes=256))
    next(pieces)
    if rank == 1:
        state["q"].add_(1)
    assert "rank 1" in str(met(CheckpointError, lambda: list(pieces)))


def extract_weights(payload: list[dict[str, Any]], buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Tensors of a shared buffer, as checkpoint-engine's worker reads them (its worker.py at 1f14a07fa749)."""
    tensors = []
    for item in payload:
        assert isinstance(item["shape"], torch.Size) and isinstance(item["dtype"], torch.dtype)
        stop = item["offset"] + item["dtype"].itemsize * item["shape"].numel()
        assert stop <= buffer.numel()
        tensors.append((item["name"], buffer[item["offset"] : stop].view(item["dtype"]).view(item["shape"])))
    return tensors


def one_sender_and_checkpoint_engine() -> None:
    """Tensors on one rank alone, twice, kept while the next ones come; buckets as checkpoint-engine reads them."""
    full, state = trainer()
    whole = WholeTensors(state, receivers=(0,), bucket_bytes=512)
    for _ in range(2):
        received = dict(whole)
        assert all(tensor.is_meta == (dist.get_rank() == 1) for tensor in received.values())
        if dist.get_rank() == 0:
            assert all(
                tensor.equal(full[name]) and tensor.is_contiguous() for name, tensor in received.items()
            )
    shared = torch.empty(1 << 16, dtype=torch.uint8)
    seen: Full = {}
    for bucket in WholeTensors(state).buckets():
        shared[: bucket.data.numel()].copy_(bucket.data)
        for name, tensor in extract_weights(bucket.metadata(), shared):
            seen[name] = tensor.clone()
    assert seen.keys() == full.keys() and all(tensor.equal(full[name]) for name, tensor in seen.items())


def chunks() -> None:
    """Chunks of the first dim that both ranks divide; whole tensors where there is none."""
    full, state = trainer()
    sharded = WholeTensors(state, sharded=True, bucket_bytes=256)
    dims = {tensor.name: tensor.shard_dim for tensor in sharded.tensors}
    assert dims == {"q": 0, "k": 0, "norm": 0, "rows": None, "steps": None, "large": 0, "empty": None}
    for name, tensor in sharded:
        dim = dims[name]
        wanted = full[name] if dim is None else full[name].chunk(2, dim)[dist.get_rank()]
        assert tensor.shape == wanted.shape and tensor.equal(wanted), name


def order_and_layout() -> None:
    """Tensors come in the order of the module; in a bucket there are no gaps, and each tensor is aligned."""
    model = torch.nn.Sequential()
    for place in range(11):
        model.add_module(
            f"layer{place}", torch.nn.Linear(3, 3, dtype=(torch.bfloat16, torch.float32)[place % 2])
        )
    model.register_buffer("codes", torch.arange(3, dtype=torch.int8))
    model.register_buffer("rates", torch.rand(5))
    model.register_buffer("scratch", torch.rand(2), persistent=False)
    model.add_module("tied", model[0])
    names = [name for name in model.state_dict() if "tied" not in name]
    parameters_first = [*dict(model.named_parameters()), "codes", "rates"]
    assert sorted(names) == sorted(parameters_first)
    (bucket,) = WholeTensors(model).buckets()
    assert [name for name, _ in bucket.tensors()] == parameters_first
    stop = 0
    for tensor, start in sorted(bucket.offsets.items(), key=lambda item: item[1]):
        assert start == stop and start % tensor.dtype.itemsize == 0
        stop = start + tensor.nbytes
    assert bucket.data.numel() == stop
    assert all(tensor.equal(model.state_dict()[name]) for name, tensor in bucket.tensors())


def two_ranks() -> list[int]:
    """All that two ranks can show."""
    order_and_layout()
    chunks()
    sizes = whole_tensors()
    wrong_calls()
    one_sender_and_checkpoint_engine()
    return sizes


def test_whole_tensors_come_a_bucket_at_a_time() -> None:
    """The tensors themselves, no more than a bucket at a time, or all ranks raise."""
    sizes = run_ranks(2, two_ranks, timeout_s=120)[0]

    assert len(sizes) > 2 and sorted(sizes)[-2] <= 4096 < sum(sizes)  # the large one is a bucket of its own


def changed_items() -> list[int]:
    """Applied to whole tensors, changes give what a gather gives, at every step; returns how many there were."""
    _, state = trainer()
    state["bits"] = torch.zeros(2500, dtype=torch.bfloat16)  # on every rank
    links = {
        "qk": concatenate("q", "k"),
        "turned": permute("large"),
        "steps": "steps",
        "rows": "rows",
        "bits": "bits",
    }
    every = WholeTensors(state, links=links, dtype=torch.bfloat16)
    changed = ChangedItems(state, links=links, dtype=torch.bfloat16, receiver=1, on_host=True)
    assert changed.tensors == every.tensors
    engine = {name: tensor.clone() for name, tensor in every}
    counts = []
    draw = torch.Generator().manual_seed(0)
    for step in range(6):
        for name, local in sorted((name, local_of(tensor)) for name, tensor in state.items()):
            where = torch.rand(local.shape, generator=draw) < (0.02, 0.9, 0.0)[step % 3]
            local.copy_(torch.where(where, torch.full_like(local, step + 1), local))
            if name == "bits" and step == 3:
                local[7:9] = torch.tensor([float("nan"), -0.0])
        found = changed.take()
        assert dist.get_rank() == changed.receiver or not found
        counts.append(sum(items.indices.numel() for items in found.values()))
        if step == 4:  # the engine was not reached
            continue
        for name, items in found.items():
            assert (
                items.shape == engine[name].shape and items.indices.unique().numel() == items.indices.numel()
            )
            kind = {2: torch.int16, 8: torch.int64}[items.values.itemsize]
            before = engine[name].view(-1)[items.indices]  # a copy
            assert bool((before.view(kind) != items.values.view(kind)).all())
            engine[name].view(-1)[items.indices] = items.values
        changed.commit()
        wanted = dict(every)
        if dist.get_rank() == changed.receiver:
            assert all(same_bytes(engine[name], wanted[name]) for name in links)
    return counts


def test_changed_items_are_what_a_gather_gives() -> None:
    """Concatenated, transposed, cast; no item without a change, and a step that was not committed loses nothing."""
    other, counts = run_ranks(2, changed_items)
    assert other == [0] * 6
    assert counts[2] == 0 < counts[0] < counts[1] / 10 and counts[5] == counts[4]


def refused_changes() -> None:
    """Codes are refused on all ranks."""
    _, state = trainer()
    links = {"codes": codes("large", Fp8Blocks(4, 4)), "q": "q"}
    assert "codes" in met(PlacementError, lambda: ChangedItems(state, links=links)).got


def test_changes_of_codes_are_refused() -> None:
    """With the name of the link."""
    run_ranks(2, refused_changes)
