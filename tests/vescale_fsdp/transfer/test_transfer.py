"""Transfers between ranks: any distribution to any other, through views and codecs, bit for bit."""

from __future__ import annotations

from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute_stock

from tests.support.distributed import cpu_mesh, run_ranks
from tests.vescale_fsdp.dtensor.test_properties import search_together
from tests.vescale_fsdp.transfer.live_states import Placed, all_meshes, placed, state_of
from vescale_fsdp import RaggedShard, distribute_tensor
from vescale_fsdp.quantize import BlockCodec, Fp8Blocks, Int8Rows, Mxfp8, Quantized
from vescale_fsdp.torch_private import StridedShard, local_of
from vescale_fsdp.transfer.description import describe_states
from vescale_fsdp.transfer.links import Link, codes, concatenate, index, permute, scales, slice, stack, zeros
from vescale_fsdp.transfer.plan import plan_transfer
from vescale_fsdp.transfer.transfer import Transfer

SHAPES = [(), (7,), (4, 6), (5, 3), (6, 5), (2, 3, 4), (2, 2, 5, 3), (0, 3), (8, 8)]
CODECS = (Fp8Blocks(3, 4), Fp8Blocks(4, 2), Mxfp8(1, 4), Int8Rows())


class Case(NamedTuple):
    """Tensors of a source and a target, their distributions, and the links between them."""

    shapes: dict[str, tuple[int, ...]]
    source: dict[str, Placed]
    target: dict[str, Placed]
    made: dict[str, str]  # name in the target: what is done
    codec: int
    keep_old: bool
    verify: bool


def made_of(a: torch.Tensor, b: torch.Tensor, codec: BlockCodec) -> dict[str, tuple[Link, torch.Tensor]]:
    """Links to two source tensors of one shape, each with the expected tensor."""
    found: dict[str, tuple[Link, torch.Tensor]] = {"same": ("a", a), "cast": ("a", a.bfloat16())}
    found["wide"] = ("half", a.bfloat16().float())
    if a.dim():
        found["fused"] = (concatenate("a", "b", dim=a.dim() - 1), torch.cat([a, b], a.dim() - 1))
        found["stacked"] = (stack("a", "b", dim=1), torch.stack([a, b], 1))
        found["padded"] = (concatenate(zeros(a.shape), "a"), torch.cat([torch.zeros_like(a), a]))
        found["cleared"] = (zeros(a.shape), torch.zeros_like(a))
    if a.dim() and a.shape[0] > 1:
        found["part"] = (slice(concatenate("a", "b"), 1, a.shape[0]), torch.cat([a, b])[1 : 1 + a.shape[0]])
        found["picked"] = (index(stack("a", "b"), 1), b)
    turn = (*range(a.dim() - 2), a.dim() - 1, a.dim() - 2)
    if a.dim() > 1:
        found["turned"] = (
            permute(concatenate("a", permute(permute("b", turn), turn)), turn),
            torch.cat([a, b]).mT.contiguous(),
        )
    if a.dim() and a.numel():
        parts = {"": ("a", a), "row": (index("a", a.shape[0] - 1), a[-1])}
        if a.dim() > 1:
            inner = slice("a", 1, a.shape[1] - 1, dim=1)
            parts |= {
                "inner": (inner, a[:, 1:]),
                "inner rows": (slice(inner, 1, a.shape[0] - 1), a[1:, 1:]),
                "column": (index("a", 1, dim=a.dim() - 1), a[..., 1]),
            }
        for name, (of, part) in parts.items():
            if part.dim() and part.numel():
                found[f"{name} codes".strip()] = (codes(of, codec), quantized(part, codec).codes)
                found[f"{name} scales".strip()] = (scales(of, codec), quantized(part, codec).scales)
        found["experts"] = (
            stack(codes("a", codec), codes("b", codec)),
            torch.stack([quantized(a, codec).codes, quantized(b, codec).codes]),
        )
    if a.dim() > 1 and a.numel():
        found["turned codes"] = (permute(codes("a", codec), turn), quantized(a, codec).codes.mT.contiguous())
    return found


def quantized(tensor: torch.Tensor, codec: BlockCodec) -> Quantized:
    """Codes and scales of each matrix by itself."""
    if tensor.dim() < 3:
        return codec.quantize(tensor.float().contiguous())
    each = [quantized(part, codec) for part in tensor]
    stacked = (torch.stack([getattr(one, name) for one in each]) for name in ("codes", "scales"))
    return Quantized(codec, *stacked)


@st.composite
def cases(draw: st.DrawFn, *, has_all: bool) -> Case:
    """Any distributions, and any links or all of them."""
    shape = draw(st.sampled_from(SHAPES))
    codec = draw(st.integers(0, len(CODECS) - 1))
    known = made_of(torch.zeros(shape), torch.zeros(shape), CODECS[codec])
    some = st.lists(st.sampled_from(sorted(known)), min_size=min(5, len(known)), max_size=8, unique=True)
    names = sorted(known) if has_all else draw(some)
    source = {name: draw(placed(shape)) for name in ("a", "b", "half")}
    target = {name: draw(placed(tuple(known[name][1].shape))) for name in names}
    made = {name: name for name in names}
    shapes = {"a": shape, "b": shape, "half": shape}
    return Case(shapes, source, target, made, codec, draw(st.booleans()), draw(st.booleans()))


def search(num_cases: int, has_all: bool) -> dict[str, int]:
    """The search; counts of what the cases contained."""
    meshes = all_meshes()
    seen: dict[str, int] = {}

    def check(case: Case) -> None:
        codec = CODECS[case.codec]
        generator = torch.Generator().manual_seed(3)
        full = {name: torch.randn(shape, generator=generator) for name, shape in case.shapes.items()}
        full["half"] = full["a"].bfloat16()
        wanted = {name: made_of(full["a"], full["b"], codec)[name] for name in case.made}
        state = state_of(full, case.source, meshes)
        into = state_of(
            {name: torch.ones_like(value) for name, (_, value) in wanted.items()}, case.target, meshes
        )
        source, target = describe_states(state, into)
        links = {name: link for name, (link, _) in wanted.items()}
        plan = plan_transfer(source, target, links=links, cast=True, budget_bytes=4096)
        transfer = Transfer(plan, keep_old=case.keep_old, verify=case.verify)
        for step in range(2):
            for tensor in state.values():
                local_of(tensor).mul_(-1 if step else 1)
            transfer.run(state, into)
        for name, value in made_of(-full["a"], -full["b"], codec).items():
            if name in case.made:
                again = state_of({name: value[1]}, case.target, meshes)
                assert set(again) == {name} & set(into)
                for key, tensor in again.items():
                    assert torch.equal(local_of(into[key]), local_of(tensor)), (name, case)
                    seen[name] = seen.get(name, 0) + int(local_of(tensor).numel() > 0)
        seen["sent"] = seen.get("sent", 0) + int(plan.demand.sent.sum() > 0)
        seen["cut blocks"] = seen.get("cut blocks", 0) + (transfer._cut_blocks.total > 0)

    search_together(cases(has_all=has_all), check, num_cases)
    return seen


@pytest.mark.parametrize(
    ("num_cases", "has_all"), [(5, True), pytest.param(40, False, marks=pytest.mark.part("faults"))]
)
def test_any_state_to_any_other(num_cases: int, has_all: bool) -> None:
    """For any source, target and links every rank gets its part, also in a second transfer."""
    seen = run_ranks(4, search, num_cases, has_all, timeout_s=300)

    met = {name: sum(found.get(name, 0) for found in seen) for found in seen for name in found}
    assert (
        min(met[name] for name in (*made_of(torch.zeros(4, 6), torch.zeros(4, 6), CODECS[0]), "cut blocks"))
        > 0
    )
    assert met["sent"] > 2 * num_cases


def small_tensors() -> None:
    """Hundreds of small tensors, from two ranks to shards of columns on two others, to whole ones and transposed."""
    trainer, engine = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    torch.manual_seed(1)
    matrices = {f"m{number}": torch.randn(8, 6) for number in range(90)}
    vectors = {f"v{number}": torch.randn(5 + number // 20) for number in range(40)}
    halves = {f"h{number}": torch.randn(8, 6) for number in range(30)}
    full = matrices | vectors | halves
    wanted = {
        name: (
            value.bfloat16() if name in halves else value.t().contiguous() if name.endswith("7") else value
        )
        for name, value in full.items()
    }
    links = {name: permute(name) for name in matrices if name.endswith("7")}
    state = into = None
    if dist.get_rank() < 2:
        cut = [RaggedShard((0,), (1, 3))]
        state = {
            name: distribute_tensor(value, trainer, cut if value.dim() > 1 else [RaggedShard((0,), (1, 0))])
            for name, value in full.items()
        }
    else:
        into = {
            name: distribute_stock(
                value * 0, engine, [Shard(1)] if value.dim() > 1 else [Replicate()], src_data_rank=None
            )
            for name, value in wanted.items()
        }
    plan = plan_transfer(*describe_states(state, into), links=links, cast=True)
    for keep_old, verify in ((False, True), (True, False)):
        transfer = Transfer(plan, keep_old=keep_old, verify=verify)
        made = [copy for message in transfer._messages for batch in message.batches for copy in batch.copies]
        assert made and len(made) < 60  # of more than 300 that are sent
        for factor in (1, -2):
            for tensor in (state or {}).values():
                local_of(tensor).mul_(factor)
            transfer.run(state, into)
            for name, tensor in (into or {}).items():
                value = (wanted if factor == 1 else {name: wanted[name] * -2})[name]
                got = distribute_stock(value, engine, tensor.placements, src_data_rank=None)
                assert torch.equal(local_of(tensor), local_of(got)), name
        for tensor in (state or {}).values():
            local_of(tensor).div_(-2)


def test_small_tensors_are_copied_together() -> None:
    """Their values, with casts and transposes and again in a second run, and that few operators copy them."""
    run_ranks(4, small_tensors)


def strided() -> bool:
    """Strided shards of rows, to columns and back."""
    mesh = cpu_mesh(2, 2)
    outer, inner = mesh.get_coordinate() or (0, 0)
    full = torch.arange(24.0).view(8, 3)
    first = 4 * inner + 2 * outer
    held = DTensor.from_local(
        full[first : first + 2].clone(), mesh, [StridedShard(0, split_factor=2), Shard(0)]
    )
    columns = distribute_stock(torch.zeros(8, 3), mesh, [Shard(1), Replicate()])
    Transfer(plan_transfer(*describe_states({"w": held}, {"w": columns}))).run({"w": held}, {"w": columns})
    again = DTensor.from_local(torch.zeros(2, 3), mesh, held.placements)
    Transfer(plan_transfer(*describe_states({"w": columns}, {"w": again}))).run({"w": columns}, {"w": again})
    assert torch.equal(columns.full_tensor(), full)
    return torch.equal(local_of(again), full[first : first + 2])


def test_strided_shards_are_sources_and_targets() -> None:
    """Strided shards, as FSDP2 with tensor parallelism makes them, as a source and as a target."""
    assert all(run_ranks(4, strided))
