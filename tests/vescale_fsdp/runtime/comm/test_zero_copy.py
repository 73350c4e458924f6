"""What gathers copy, by back end, and at most one pass over gradients; FSDP2 is the control."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.units import groups_of
from tools.mirror import MirroredGroup, mirrored
from vescale_fsdp import fully_shard

COPIES = (
    "aten.copy_",
    "aten._foreach_copy_",
    "aten.cat",
    "aten.clone",
    "aten._to_copy",
    "aten.split_with_sizes_copy",
    "fsdp.all_gather_copy_in",
    "fsdp.split_with_sizes_copy",
    "fsdp.chunk_cat",
)

# Copies of a shard that a back end may make where nothing is cast: in a gather, and behind a reduction. NCCL, which the
# mirror stands for, reads the shard where it is and writes where it is wanted. gloo works on one buffer, into which a
# rank's own slice goes; and its sums, which we make, begin with a copy of the first slice.
SLICE_COPIES = {"gloo": (1, 1), "mirror": (0, 0)}


class CountOps(TorchDispatchMode):
    """Counts operators, and the elements that copying ones write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.copied: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        self.calls[name] += 1
        result = func(*args, **(kwargs or {}))
        if name in COPIES:
            written = args[0] if name.endswith("_") else result
            tensors = [written] if isinstance(written, torch.Tensor) else written or []
            self.copied.append((name, sum(tensor.numel() for tensor in tensors)))
        return result


class Counted(NamedTuple):
    """Copies of a forward and of a backward, as (operator, elements), and what they are held to."""

    forward: list[tuple[str, int]]
    backward: list[tuple[str, int]]
    own: int  # elements that the plain model's backward copies
    shards: list[int]  # elements of each unit's, the root's first
    payload: int


def shard_with(shard: Any, policy: MixedPrecisionPolicy) -> models.Stack:
    model = models.build()
    for block in model.blocks:
        shard(block, mesh=cpu_mesh(), mp_policy=policy)
    return shard(model, mesh=cpu_mesh(), mp_policy=policy)


def count(use_ours: bool, half: bool) -> Counted:
    """Copies of a training step that is not the first."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    model = shard_with(fully_shard if use_ours else torch_fully_shard, policy)
    x = models.batch(0, torch.distributed.get_rank())
    models.loss_of(model, x).backward()  # the first iteration allocates
    model.zero_grad()
    forward, backward = CountOps(), CountOps()
    with forward:
        if half:
            x = x.to(torch.bfloat16)  # outside the modules: only copies of parameters are counted
            forward.copied.clear()
        out = model(x)
    loss = out.float().pow(2).mean()
    with backward:
        loss.backward()
    autograds_own = CountOps()  # copies of the plain model's backward, such as expanded gradients
    loss = models.loss_of(models.build(), models.batch(0, 0))
    with autograds_own:
        loss.backward()
    return Counted(
        forward.copied,
        backward.copied,
        sum(numel for _, numel in autograds_own.copied),
        [group.shard.numel() for group in groups_of(*model.modules())],
        sum(p.numel() for p in model.parameters()),
    )


def counted_on(backend: str, half: bool) -> list[Counted]:
    """What ours copies, by rank."""
    if backend == "gloo":
        return run_ranks(2, count, True, half)

    def on_the_wire(*given: Any) -> Any:
        with _disable_current_modes():  # what the group itself does stands for NCCL's kernels
            return run(*given)

    run = MirroredGroup._run
    with mirrored(8), mock.patch.object(MirroredGroup, "_run", on_the_wire):
        return [count(True, half)]


@pytest.mark.parametrize("backend", SLICE_COPIES)
@pytest.mark.parametrize("half", [False, True])
def test_forward_copies_no_more_than_the_shard(half: bool, backend: str) -> None:
    """Per unit: one cast of the shard in bf16; in fp32 as often as the back end asks, and never more than the shard.

    In bf16 each reshard casts the shard once more, to notice writes to gathered parameters. The root stays gathered.
    """
    for found in counted_on(backend, half):
        per_gather = 1 if half else SLICE_COPIES[backend][0]
        casts = [("aten._to_copy", numel) for numel in found.shards[1:]] if half else []
        copies = [("aten.copy_", numel) for numel in found.shards] * per_gather
        assert sorted(found.forward) == sorted(copies + casts)
        assert len(found.shards) == 4 and min(found.shards) > 0


@pytest.mark.parametrize("backend", SLICE_COPIES)
def test_backward_passes_over_gradients_once(backend: str) -> None:
    """In the backward each gradient is written once; the rest is what the back end does with a rank's own slice."""
    for found in counted_on(backend, False):
        per_gather, per_reduction = SLICE_COPIES[backend]
        assert {name for name, _ in found.backward} <= {"aten.copy_", "aten._foreach_copy_"}
        gathered_again = sum(found.shards[1:])  # the root's parameters have stayed
        slices = per_gather * gathered_again + per_reduction * sum(found.shards)
        assert sum(numel for _, numel in found.backward) - found.own == found.payload + slices


def test_fsdp2_is_seen_to_copy() -> None:
    """The same counter finds FSDP2's copy-in, copy-out and gradient copy: it can see copies."""
    for found in run_ranks(2, count, False, False):
        forward, backward = (
            Counter(name for name, _ in copied) for copied in (found.forward, found.backward)
        )
        assert forward["fsdp.all_gather_copy_in"] == 4
        assert forward["fsdp.split_with_sizes_copy"] == 4
        # One chunk_cat per unit, or (torch 2.15) plain copies; gloo's reduce-scatter makes one more per unit.
        assert backward["fsdp.chunk_cat"] + backward["aten.copy_"] > 4


def gradient_buffers(in_flight: int) -> list[list[torch.Tensor]]:
    """The buffer that each unit reduced from, in order, in two backwards: three equal blocks, one other, the root."""
    model = models.build(num_blocks=4)
    model.blocks[1].extra = nn.Parameter(torch.ones(3))  # unused: another layout, and zeros
    for module in (*model.blocks, model):
        fully_shard(module, mesh=cpu_mesh())
    model.set_reduce_scatter_max_input_buffers(in_flight)

    def backward(step: int) -> None:
        models.loss_of(model, models.batch(step, torch.distributed.get_rank())).backward()

    backward(0)  # units share from their first forward on
    steps: list[list[torch.Tensor]] = []
    root = groups_of(model)[0].layout.numel

    def with_memory() -> list[torch.Tensor]:
        # Without the root's: the loss begins with its gradients, so they are there beside a layer's.
        layers = {id(full): full for step in steps for full in step if full.numel() != root}
        return [full for full in layers.values() if full.untyped_storage().nbytes()]

    for module in (*model.blocks, model):
        (group,) = groups_of(module)
        reduce, take = group.comm.reduce_scatter, group.grads.take_spare

        def watched(shard: torch.Tensor, full: torch.Tensor, reduce: Any = reduce) -> Any:
            others = [other for other in with_memory() if other is not full]
            assert len(others) < in_flight, "a layer's memory is kept while another's is reduced"
            steps[-1].append(full)
            return reduce(shard, full)

        def taken(spares: list[Any], take: Any = take) -> Any:
            spare = take(spares)
            assert all(spare is not None and full is spare.flat for full in with_memory()), "nobody needs it"
            return spare

        group.comm.reduce_scatter, group.grads.take_spare = watched, taken
    for step in (1, 2):
        steps.append([])
        backward(step)
    return steps


def share_buffers(in_flight: int) -> None:
    for last, third, other, first, root in gradient_buffers(in_flight):
        assert last is third and last is first, "equal layers reduce from one buffer"
        assert other.numel() > 0 and root.numel() > 0
        assert len({id(last), id(other), id(root)}) == 3
        assert [full.untyped_storage().nbytes() for full in (last, other, root)] == [0, 0, 0]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_equal_layers_share_a_gradient_buffer(in_flight: int) -> None:
    """The memory of a layer's gradients goes to the next equal layer's, away before another kind of layer asks for its
    own, and away when the backward ends, with one reduction at a time or two."""
    run_ranks(2, share_buffers, in_flight)


class OwnMemory:
    """A reduce-scatter that counts the elements asked of it, and copies (for one rank)."""

    def __init__(self) -> None:
        self.allocated: list[int] = []

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated.append(size[0])
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool
    ) -> None:
        output_tensor.copy_(input_tensor)


def reduce_from_own_memory() -> None:
    model = shard_with(fully_shard, MixedPrecisionPolicy())
    models.loss_of(model, models.batch(0, 0)).backward()
    block, own = model.blocks[1], OwnMemory()
    block.set_custom_reduce_scatter(own)
    for _ in range(2):
        models.loss_of(model, models.batch(0, 0)).backward()
    layout = groups_of(block)[0].layout
    assert own.allocated == [layout.numel, layout.shard_numel, layout.shard_numel]


def test_a_users_reduction_reads_its_own_memory() -> None:
    """Set after a step, it is not handed the buffer that the layers share, and its own is kept."""
    run_ranks(1, reduce_from_own_memory)


def alone() -> None:
    model, plain = shard_with(fully_shard, MixedPrecisionPolicy()), models.build()
    with CommDebugMode() as traffic:
        models.loss_of(model, models.batch(0, 0)).backward()
    models.loss_of(plain, models.batch(0, 0)).backward()
    assert traffic.get_total_counts() == 0
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None
        assert torch.equal(param.grad.to_local(), expected.grad.view(-1))  # type: ignore[union-attr]


def test_one_rank_alone_sends_nothing() -> None:
    """A mesh of one rank gathers and reduces without a collective, as FSDP2 does; the gradients are the plain ones."""
    run_ranks(1, alone)


def where_parameters_lie() -> int:
    model = shard_with(fully_shard, MixedPrecisionPolicy())
    seen = []

    def check(module: nn.Module, args: Any) -> None:
        (group,) = groups_of(module)
        first = group.full.flat.data_ptr()
        last = first + group.full.flat.numel() * group.full.flat.element_size()
        for param in module.parameters():
            assert first <= param.data_ptr() < last
            assert param.is_contiguous()
            seen.append(param.data_ptr())

    for block in model.blocks:
        block.register_forward_pre_hook(check)
    models.loss_of(model, models.batch(0, 0)).backward()
    return len(set(seen))


def test_unsharded_parameters_lie_inside_the_gathered_buffer() -> None:
    """Every parameter the forward reads is a contiguous slice of the all-gather's output."""
    for distinct in run_ranks(2, where_parameters_lie):
        assert distinct >= 6


def buffers_after_each_phase() -> list[list[int]]:
    """Bytes of the full buffers of all units: before, inside block 1, after forward, after backward."""
    model = shard_with(fully_shard, MixedPrecisionPolicy())
    groups = groups_of(*model.blocks, model)

    def sizes() -> list[int]:
        return [g.full.flat.untyped_storage().nbytes() if g.full is not None else 0 for g in groups]

    inside: list[int] = []
    in_backward: list[int] = []
    model.blocks[1].register_forward_pre_hook(lambda *_: inside.extend(sizes()))
    model.blocks[1].tiny.register_forward_hook(
        lambda module, args, out: out.register_hook(lambda grad: in_backward.extend(sizes())) and None
    )
    for _ in range(2):
        inside.clear()
        in_backward.clear()
        out = models.loss_of(model, models.batch(0, 0))
        after_forward = sizes()
        out.backward()
        after_backward = sizes()
    assert not any(group.grads for group in groups)
    return [inside, after_forward, in_backward, after_backward]


def test_full_buffers_live_only_while_needed() -> None:
    """At most the current block, the next one and the root are full; in the backward (on the CPU) not the next."""
    for inside, after_forward, in_backward, after_backward in run_ranks(2, buffers_after_each_phase):
        assert [bool(n) for n in in_backward] == [False, True, False, True]
        assert [bool(n) for n in inside] == [False, True, True, True]
        assert [bool(n) for n in after_forward] == [False, False, False, True]
        assert after_backward == [0, 0, 0, 0]
