"""A ragged tensor as a value: what it prints, how it is copied, and what torch.save says."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtensor_conformance import plain
from vescale_fsdp import RaggedShard, Whole, fully_shard
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, distribute_tensor, identified_by_address
from vescale_fsdp.dtensor.spec import axis_text
from vescale_fsdp.errors import UnsupportedOpError
from vescale_fsdp.layout.placement import StridedRaggedShard
from vescale_fsdp.torch_private import piece_in


def representations() -> list[str]:
    """What tensors print here: cut inside rows; a parameter beside Shard(0); a large one on named axes."""
    full = torch.arange(24.0).view(6, 4)
    cut = distribute_tensor(full, cpu_mesh(), [RaggedShard((0, 1), (3, 0, 13, 8))])
    mesh = cpu_mesh(2, 2)
    beside = torch.nn.Parameter(distribute_tensor(full, mesh, [RaggedShard((0,), (1, 2)), Shard(0)]))
    named = cpu_mesh(2, 2, names=("copies", "shards"))
    cuts = RaggedShard.from_piece_numels((300, 70), [20_000, 1_000])
    large = distribute_tensor(torch.full((300, 70), -1.2345e-20), named, [Replicate(), cuts])
    with FakeTensorMode(allow_non_fake_inputs=True):
        unknown = repr(cut + 1)
    return [repr(cut), repr(beside), repr(large), repr(cut.to("meta")), unknown]


def test_repr_tells_what_is_here() -> None:
    """Global shape, placements in words, this rank's range and boxes, and some of its values: at most five lines."""
    every = run_ranks(4, representations)
    first, second, third, _ = every

    assert first[0] == (
        "RaggedDTensor(shape=(6, 4), dtype=torch.float32,\n"
        "  dims (0, 1) as one cut 3:0:13:8 over the 4 ranks of mesh axis 0,\n"
        "  rank 0 of (4,) holds elements [0:3) = [0, 0:3],\n"
        "  local=tensor([0., 1., 2.]))"
    )
    assert "rank 1 of (4,) holds nothing" in second[0]
    assert "holds elements [3:16) = [0, 3], [1:4, 0:4],\n" in third[0]
    assert "local=tensor([ 3., 4., 5., ..., 13., 14., 15.])" in third[0]
    assert (
        "  dim 0 cut 1:2, each of 2 chunks over the 2 ranks of mesh axis 0; S(0) over the 2 ranks" in first[1]
    )
    assert "rank (0, 1) of (2, 2) holds elements [0:4) = [3, 0:4]" in second[1]
    assert all("requires_grad=True" in texts[1] for texts in (first, second, third))
    assert "the same over the 2 ranks of mesh axis 'copies'; dims (0, 1) as one cut 20:1 over" in first[2]
    assert "..., -1.2345e-20" in first[2] and "device='meta'" in first[3] and "FakeTensor" in first[4]
    assert all(
        len(text.splitlines()) <= 5 and max(map(len, text.splitlines())) < 150 for t in every for text in t
    )


def test_cuts_over_many_ranks_are_shortened() -> None:
    """A line does not grow with the job."""
    wide = axis_text("'shards'", 16_384, RaggedShard((0,), (1,) * 16_384))
    assert wide == "dim 0 cut 1:1:1:1:..:1:1:1 over the 16384 ranks of mesh axis 'shards'"
    assert axis_text("0", 2, RaggedShard((), (0, 1))) == "the whole cut 0:1 over the 2 ranks of mesh axis 0"


def addresses() -> tuple[int, int]:
    """How many pieces of a sharded model have memory here, and how many addresses they have."""
    model = fully_shard(models.build(), mesh=cpu_mesh())
    params = [param for param in model.parameters() if isinstance(param, RaggedDTensor)]
    filled = [param for param in params if param.to_local().numel()]
    for param in params:
        assert param.data_ptr() == param.detach().data_ptr() == 0
        assert param._local_tensor is piece_in(param)
    return len(filled), len({param._local_tensor.data_ptr() for param in filled})


def test_only_pieces_have_addresses() -> None:
    """torch's stager and RNNs take the storage of a tensor with an address; a ragged tensor has none."""
    for filled, distinct in run_ranks(2, addresses):
        assert distinct == filled > 5


def told_apart(device: str, granularity: Any) -> tuple[int, list[bool]]:
    """How many pieces have no memory here; whether all parameters have addresses that differ, in both ways to ask."""
    with torch.device(device):
        model = fully_shard(nn.Sequential(*(nn.Linear(3, 3) for _ in range(6))), granularity=granularity)
    params: list[Any] = list(model.parameters())
    with identified_by_address():
        of_model = [p.data_ptr() for p in params]
        of_optimizer = [p._local_tensor.data_ptr() for p in params]
    found = [of_model == of_optimizer, len({*of_model}) == len(params), 0 not in of_model]
    found += [p._local_tensor.data_ptr() == p.to_local().data_ptr() and p.data_ptr() == 0 for p in params]
    return sum(p._local_tensor.data_ptr() == 0 for p in params), found


def all_told_apart() -> list[tuple[int, list[bool]]]:
    """Cut by elements, with empty pieces, and on the meta device."""
    return [told_apart("cpu", None), told_apart("cpu", Whole()), told_apart("meta", Whole())]


def test_pieces_without_memory_are_told_apart() -> None:
    """accelerate gives optimizers their parameters by address: it finds one for each, and the same by both its ways."""
    for every in run_ranks(2, all_told_apart):
        assert all(all(found) for _, found in every)
        assert every[1][0] > 2 and every[2][0] > 2


def asked_in_a_step() -> tuple[int, int]:
    """How often a step asks for pieces by the property, which costs more than the slot; and who asks once."""
    model = models.shard(models.build(), mesh=cpu_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    torchs = vars(RaggedDTensor)["_local_tensor"]
    asked: list[int] = []

    def ask(self: RaggedDTensor) -> torch.Tensor:
        asked.append(1)
        return torchs.fget(self)  # type: ignore[no-any-return]

    def step() -> int:
        models.loss_of(model, models.batch(0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return len(asked)

    step()  # which makes the optimizer's state
    with mock.patch.object(RaggedDTensor, "_local_tensor", property(ask, torchs.fset)):
        in_a_step = step()
        assert next(model.parameters())._local_tensor is not None
    return in_a_step, len(asked) - in_a_step


def test_steps_take_pieces_from_the_slot() -> None:
    """What the property does for stacks costs a step nothing."""
    assert run_ranks(2, asked_in_a_step) == [(0, 1)] * 2


def copies() -> None:
    """deepcopy and pickle keep values, placement, layout reference and requires_grad; memory is their own."""
    mesh = cpu_mesh()
    tensor = distribute_tensor(plain((6, 4)), mesh, [RaggedShard((0, 1), (7, 0, 17))])
    tensor.layout_ref = ("layout", "w")  # type: ignore[assignment]
    parameter = torch.nn.Parameter(tensor.clone())
    within = torch.cat([torch.zeros(3), tensor.to_local()])[3:]  # a piece that does not start its storage
    within_tensor = RaggedDTensor.wrap(within, tensor._spec, layout_ref=tensor.layout_ref)
    sliced = torch.nn.Parameter(within_tensor)
    sliced.grad, sliced.tag = within_tensor.clone(), ["a user's"]  # type: ignore[attr-defined]
    twin = copy.deepcopy(sliced)
    assert torch.equal(twin.grad.full_tensor(), plain((6, 4))) and twin.tag == ["a user's"]  # type: ignore[union-attr,attr-defined]
    assert twin.grad is not sliced.grad and twin.tag is not sliced.tag  # type: ignore[attr-defined]
    for original in (tensor, parameter, within_tensor, sliced):
        pickled = (pickle.loads(pickle.dumps(original, protocol)) for protocol in (2, 5))
        for twin in (copy.deepcopy(original), *pickled):
            assert isinstance(twin, torch.nn.Parameter) is isinstance(original, torch.nn.Parameter)
            assert isinstance(twin, RaggedDTensor) and twin.placements == tensor.placements
            assert twin.requires_grad == original.requires_grad and twin.layout_ref == tensor.layout_ref
            assert torch.equal(twin.to_local(), tensor.to_local())
            assert (
                twin.to_local().numel() == 0 or twin.to_local().data_ptr() != original.to_local().data_ptr()
            )
            assert torch.equal(twin.full_tensor().detach(), plain((6, 4)))
    state = {"w": tensor, "nested": [tensor]}
    memo_copy = copy.deepcopy(state)
    assert memo_copy["w"] is memo_copy["nested"][0]  # type: ignore[index]


def test_copies_are_the_same_tensor() -> None:
    """Copies and pickles are ragged tensors of the same values, on every rank."""
    run_ranks(3, copies)


def torch_saves() -> list[str]:
    """What torch.save says of a ragged tensor, alone and inside a state dict."""
    tensor = distribute_tensor(plain((6, 4)), cpu_mesh(), [RaggedShard((0,), (1, 2))])
    texts = []
    for thing in (tensor, {"model": {"w": torch.nn.Parameter(tensor)}}):
        for how in ({}, {"pickle_protocol": 5}, {"_use_new_zipfile_serialization": False}):
            with pytest.raises(UnsupportedOpError) as caught:
                torch.save(thing, io.BytesIO(), **how)
            texts.append(str(caught.value))
    assert torch.equal(copy.copy(tensor).to_local(), tensor.to_local())
    buffer = io.BytesIO()
    torch.save(tensor.full_tensor(), buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), plain((6, 4)))
    return texts


def test_torch_save_is_refused_with_the_way_out() -> None:
    """torch.save would store one rank's piece: it is refused, and the text names what to use instead."""
    for texts in run_ranks(2, torch_saves):
        for text in texts:
            assert "checkpoint.save" in text and "full_tensor()" in text and "(6, 4)" in text


def test_runs_of_a_strided_cut_are_those_of_its_picture() -> None:
    """The runs of a strided cut are those of its picture: 0 and 3; 1, 2 and 4, 5."""
    placement = StridedRaggedShard((0,), (1, 2), 2)

    assert [tuple(run) for run in placement.runs((6,), 0)] == [(0, 1), (3, 4)]
    assert [tuple(run) for run in placement.runs((6,), 1)] == [(1, 3), (4, 6)]
    assert placement != RaggedShard((0,), (1, 2)) and len({placement, copy.deepcopy(placement)}) == 1


def strided_order() -> list[float]:
    """A strided tensor's pieces in rank order of its ragged axis, and the tensor."""
    mesh = cpu_mesh(2, 2)
    full = torch.arange(12.0).view(6, 2)
    tensor = distribute_tensor(full, mesh, [RaggedShard((0,), (1, 2)), Shard(0)])
    placement = tensor.placements[0]
    assert isinstance(placement, StridedRaggedShard)
    together = tensor.redistribute(placements=[tensor.placements[0], Shard(0)])
    assert torch.equal(together.full_tensor(), full)
    runs = placement.runs((6, 2), mesh.get_local_rank(0))
    own = runs[mesh.get_local_rank(1)]
    assert tensor.to_local().tolist() == full.view(-1)[own.start : own.stop].tolist()
    halves = tensor.redistribute(placements=[Replicate(), Shard(0)])
    assert isinstance(halves, DTensor) and not isinstance(halves, RaggedDTensor)
    return tensor.to_local().tolist()


def test_strided_pieces_make_the_tensor() -> None:
    """Pieces lie where `runs` says, and full_tensor undoes the permutation."""
    assert run_ranks(4, strided_order) == [
        [0.0, 1.0],
        [6.0, 7.0],
        [2.0, 3.0, 4.0, 5.0],
        [8.0, 9.0, 10.0, 11.0],
    ]


def both_orders() -> bool:
    """Rows cut raggedly beside columns cut by Shard(1): whichever axis cuts first, a rank holds the same."""
    mesh = cpu_mesh(2, 2)
    full = plain((4, 6))
    ours = distribute_tensor(full, mesh, [RaggedShard((0,), (1, 3)), Shard(1)]).to_local()
    rows = full[:1] if mesh.get_local_rank(0) == 0 else full[1:]
    return torch.equal(ours, rows.chunk(2, dim=1)[mesh.get_local_rank(1)].reshape(-1))


def test_order_of_axes_beside_other_dims() -> None:
    """Cuts between whole rows (blocks that are multiples of the row) commute with Shard of a later dim."""
    assert run_ranks(4, both_orders) == [True] * 4
