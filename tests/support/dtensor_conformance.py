"""What every ragged placement must do: a class of tests that each placement's tests inherit.

A `Cut` says how a tensor is placed. Worker functions distribute a known tensor by it, do something, and compare
with the same thing done to the plain tensor. Nothing here knows how pieces are found.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import RaggedDTensor, distribute_tensor
from vescale_fsdp.dtensor import redistribute


@dataclass(frozen=True)
class Cut:
    """A tensor of this shape, on a mesh of this shape, placed like this."""

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]

    def mesh(self) -> DeviceMesh:
        """The mesh, over all ranks of the current call."""
        return cpu_mesh(*self.mesh_shape)


def plain(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A known tensor, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def ragged(cut: Cut, full: torch.Tensor, mesh: DeviceMesh) -> RaggedDTensor:
    """That tensor, distributed."""
    return distribute_tensor(full, mesh, cut.placements)


def value_of(result: object) -> object:
    """A result with every DTensor gathered."""
    if isinstance(result, DTensor):
        return result.full_tensor()
    if isinstance(result, (list, tuple)):
        return type(result)(value_of(item) for item in result)
    return result


def assert_same(got: object, want: object, what: object, *, spoiled: bool = False) -> None:
    """Equal values, shapes and dtypes; floats to rounding; NaN only where a test has put it."""
    got = value_of(got)
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), what
        torch.testing.assert_close(got, want, equal_nan=spoiled, msg=lambda text: f"{what}: {text}")
    elif isinstance(want, (list, tuple)):
        assert isinstance(got, (list, tuple)) and len(got) == len(want), what
        for a, b in zip(got, want, strict=True):
            assert_same(a, b, what, spoiled=spoiled)
    else:
        assert got == want, what


def raised_by(call: Callable[[], object]) -> type[Exception] | None:
    """The class of the error a call ends in, if any."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  the class is what is asked for
        return type(error)
    return None


# -- worker functions: run on every rank ----------------------------------------------------------------


def pieces_tile(cut: Cut) -> int:
    """Every element is on one rank, times the replicas; returns how many are here."""
    mesh = cut.mesh()
    full = torch.arange(math.prod(cut.shape), dtype=torch.float64).view(cut.shape)
    tensor = ragged(cut, full, mesh)
    assert torch.equal(tensor.full_tensor(), full)
    held = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(held, tensor.to_local().reshape(-1))
    count = torch.bincount(torch.cat(held).long(), minlength=full.numel())
    copies = math.prod(mesh.size(a) for a, p in enumerate(tensor.placements) if p.is_replicate())
    assert count.tolist() == [copies] * full.numel()
    boxes = [full[box.slices()].reshape(-1) for box in tensor.boxes]
    assert torch.equal(torch.cat(boxes) if boxes else full.new_empty(0), tensor.to_local().reshape(-1))
    return tensor.to_local().numel()


ELEMENTWISE: dict[str, Callable[[Any, Any, Any], Any]] = {
    # x and y have the tensor's shape; row broadcasts to it
    "add": lambda x, y, row: x + y,
    "scalars": lambda x, y, row: 2 - x * 3.5 / 7,
    "zero_d": lambda x, y, row: x * torch.tensor(2.0) + torch.tensor(1, dtype=torch.int32),
    "zero_d_first": lambda x, y, row: torch.tensor(2.0) / (x + 9),
    "broadcast": lambda x, y, row: x * row + (row - y),
    "addcmul": lambda x, y, row: torch.addcmul(x, y, x, value=0.5),
    "lerp": lambda x, y, row: torch.lerp(x, y, 0.3),
    "where": lambda x, y, row: torch.where(x > 0, x, y),
    "where_scalar": lambda x, y, row: torch.where(x > y, 1.0, 0.0),
    "compare": lambda x, y, row: (x > 0) & (y <= x) | x.isnan(),
    "clamp": lambda x, y, row: x.clamp(-0.5, 0.5).clamp(max=y),
    "masked_fill": lambda x, y, row: x.masked_fill(y > 0, 3.0),
    "double": lambda x, y, row: x.double() + y,
    "half": lambda x, y, row: x.to(torch.bfloat16),
    "to_int": lambda x, y, row: (x * 10).to(torch.int64) // 3,
    "frexp": lambda x, y, row: list(torch.frexp(x)),
    "clone": lambda x, y, row: x.clone(memory_format=torch.preserve_format),
    "zeros_like": lambda x, y, row: torch.zeros_like(x) + torch.ones_like(y, dtype=torch.float64),
    "full_like": lambda x, y, row: torch.full_like(x, 7),
    "new_zeros": lambda x, y, row: x.new_zeros(x.shape) + x.new_full(x.shape, 2.0) + x.new_ones((1,)),
    "view": lambda x, y, row: x.view(x.shape) + x.view_as(y),
    "softplus": lambda x, y, row: torch.nn.functional.softplus(x),
    "isclose": lambda x, y, row: torch.isclose(x, x + 1e-9),
}

IN_PLACE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add_": lambda x, y, row: x.add_(y, alpha=2),
    "mul_scalar": lambda x, y, row: x.mul_(3),
    "broadcast": lambda x, y, row: x.sub_(row),
    "copy_": lambda x, y, row: x.copy_(y),
    "copy_cast": lambda x, y, row: x.copy_(y.double()),
    "fill_": lambda x, y, row: x.fill_(4.0),
    "zero_": lambda x, y, row: x.zero_(),
    "masked_fill_": lambda x, y, row: x.masked_fill_(y > 0, -1.0),
    "out": lambda x, y, row: torch.mul(x, y, out=x),
    "exp_": lambda x, y, row: x.exp_(),
    "addcdiv_": lambda x, y, row: x.addcdiv_(y, y.abs() + 1, value=-0.1),
}


def elementwise_is_right(cut: Cut) -> None:
    """Every listed expression equals that of the plain tensors, and stays cut as it was."""
    mesh = cut.mesh()
    x, y = plain(cut.shape, 1), plain(cut.shape, 2)
    row = plain(cut.shape[-1:], 3)
    row_d = DTensor.from_local(row, mesh, [Replicate()] * mesh.ndim)
    for name, fn in {**ELEMENTWISE, **IN_PLACE}.items():
        rx, ry = ragged(cut, x, mesh), ragged(cut, y, mesh)
        rx.layout_ref = ry.layout_ref = ("here", "w")  # type: ignore[assignment]
        got, want = fn(rx, ry, row_d), fn(x.clone(), y.clone(), row)
        assert_same(got, want, (name, cut))
        for result in got if isinstance(got, list) else [got]:
            assert isinstance(result, RaggedDTensor), name
            assert result.placements == rx.placements and result.layout_ref == rx.layout_ref, name
        if name in IN_PLACE:
            assert got is rx, name
            assert_same(rx, want, (name, cut))


TOTALS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "sum_dtype": lambda x: x.sum(dtype=torch.float64),
    "mean": lambda x: x.mean(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(),
    "aminmax": lambda x: list(torch.aminmax(x)),
    "prod": lambda x: (x.abs() + 0.5).clamp(max=1.5).prod(),
    "any": lambda x: (x > 100).any(),
    "all": lambda x: (x < 100).all(),
    "any_true": lambda x: (x > 0).any(),
    "isnan": lambda x: x.isnan().any(),
    "count_nonzero": lambda x: torch.count_nonzero(x > 0),
    "var": lambda x: x.var(correction=0),
    "std": lambda x: x.double().std(correction=0),
    "logsumexp": lambda x: x.logsumexp(tuple(range(x.ndim))),
    "keepdim": lambda x: x.sum(dim=tuple(range(x.ndim)), keepdim=True),
    **{
        f"norm{p}": partial(torch.linalg.vector_norm, ord=p)
        for p in (0, 1, 2, 3.5, -1.5, math.inf, -math.inf)
    },
    "norm": lambda x: x.norm(),
    "foreach_norm": lambda x: torch._foreach_norm([x, x * 2]),
    "foreach_norm_inf": lambda x: torch._foreach_norm([x, x * 2], math.inf),
    "foreach_norm_negative": lambda x: torch._foreach_norm([x, x * 2], -1.5),
}


def totals_are_right(cut: Cut) -> None:
    """Reductions over all dims equal those of the plain tensor, a nan in one piece included."""
    mesh, x = cut.mesh(), plain(cut.shape, 4)
    tensor = ragged(cut, x, mesh)
    for name, fn in TOTALS.items():
        assert_same(fn(tensor), fn(x), (name, cut))
    broken = x.clone()
    broken.view(-1)[x.numel() // 2] = math.nan
    for name in ("max", "amax", "norminf", "foreach_norm_inf", "sum", "isnan"):
        if name in TOTALS:
            got, want = TOTALS[name](ragged(cut, broken, mesh)), TOTALS[name](broken)
            assert_same(got, want, (name, "nan", cut), spoiled=True)


def comparisons_are_right(cut: Cut) -> None:
    """torch.equal and allclose see a difference wherever it lies."""
    mesh, x = cut.mesh(), plain(cut.shape, 5)
    tensor = ragged(cut, x, mesh)
    assert torch.equal(tensor, tensor.clone()) is True
    assert torch.allclose(tensor, tensor + 1e-9) is True
    for index in sorted({0, x.numel() // 2, x.numel() - 1}):
        other = x.clone()
        other.view(-1)[index] += 1
        assert torch.equal(tensor, ragged(cut, other, mesh)) is False, index
        assert torch.allclose(tensor, ragged(cut, other, mesh)) is False, index
        found_inf = torch.zeros(1)
        other.view(-1)[index] = math.inf
        grads: list[torch.Tensor] = [ragged(cut, other, mesh), ragged(cut, x, mesh)]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, torch.tensor(0.5))
        assert found_inf.item() == 1.0, index
        assert_same(grads[1], x * 0.5, "unscaled")


def goes_everywhere(cut: Cut) -> None:
    """To Replicate and every Shard and back: the values stay, so do gradients."""
    mesh, x = cut.mesh(), plain(cut.shape, 6)
    tensor = ragged(cut, x, mesh)
    targets: list[list[Placement]] = [[Replicate()] * mesh.ndim]
    targets += [[Shard(dim)] + [Replicate()] * (mesh.ndim - 1) for dim in range(x.ndim)]
    targets += [[Replicate()] * (mesh.ndim - 1) + [Shard(dim)] for dim in range(x.ndim)]
    for target in targets:
        there = tensor.redistribute(placements=target)
        assert not isinstance(there, RaggedDTensor) and list(there.placements) == target
        assert torch.equal(there.full_tensor(), x), target
        expected = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim).redistribute(placements=target)
        assert torch.equal(there.to_local(), expected.to_local()), target
        back = redistribute(there, tensor.placements)
        assert isinstance(back, RaggedDTensor)
        assert torch.equal(back.to_local(), tensor.to_local()), target
    weight = plain(cut.shape, 7)
    leaf = ragged(cut, x, mesh).requires_grad_()
    assert isinstance(leaf, RaggedDTensor)
    (leaf.full_tensor() * weight).sum().backward()
    grad = leaf.grad
    assert isinstance(grad, RaggedDTensor) and grad.placements == leaf.placements
    torch.testing.assert_close(grad.full_tensor(), weight)  # the mean over ranks, which rounds


def is_a_value(cut: Cut) -> str:
    """Copies and pickles keep placement, values and layout; returns the repr."""
    mesh, x = cut.mesh(), plain(cut.shape, 8)
    tensor = ragged(cut, x, mesh)
    tensor.layout_ref = ("here", "w")  # type: ignore[assignment]
    parameter = torch.nn.Parameter(tensor)
    assert isinstance(parameter, torch.nn.Parameter) and isinstance(parameter, RaggedDTensor)
    copies = (copy.deepcopy(tensor), copy.deepcopy(parameter), tensor.to("cpu"))
    for twin in (*copies, tensor.detach(), parameter):
        assert isinstance(twin, RaggedDTensor)
        assert twin.placements == tensor.placements and twin.layout_ref == tensor.layout_ref
        assert torch.equal(twin, tensor)
    for placement in tensor.placements:
        twin_placement = pickle.loads(pickle.dumps(placement))
        assert twin_placement == placement and hash(twin_placement) == hash(placement)
    return repr(tensor)


def keeps_promises(cut: Cut) -> tuple[int, str]:
    """All of the above, with one set-up of ranks; how many elements are here, and the repr."""
    elementwise_is_right(cut)
    totals_are_right(cut)
    comparisons_are_right(cut)
    goes_everywhere(cut)
    return pieces_tile(cut), is_a_value(cut)


class Conformance:
    """The test of one kind of placement. A subclass parametrises ``cut``; the mesh tells the world size."""

    def test_keeps_every_promise(self, cut: Cut) -> None:
        """Pieces tile the tensor; operators, reductions and comparisons are those of the plain tensor; moves to stock
        placements and back are exact, with gradients; copies are equal; the repr names shape, placement and part.
        """
        results = run_ranks(math.prod(cut.mesh_shape), keeps_promises, cut)

        assert sum(numel for numel, _ in results) >= math.prod(cut.shape) > 0
        for _, text in results:
            assert f"shape={cut.shape}" in text and " axis " in text and "holds" in text
            assert len(text.splitlines()) <= 5
