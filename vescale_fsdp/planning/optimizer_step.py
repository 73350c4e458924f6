"""What an optimizer's step allocates on a rank: the step itself runs on the meta device. No values, no process group.

torch's fused AdamW allocates nothing. AdamW8bit allocates fp32 copies of its largest batch. Muon allocates an update of
all its matrices, and then buckets, stacks and their iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.optim.adamw import adamw

from vescale_fsdp.dtensor.piece_map import PieceMap
from vescale_fsdp.layout.geometry import RunLengths, numel_of
from vescale_fsdp.optim import adamw8bit
from vescale_fsdp.optim.muon import BUCKET_BYTES, STACK_NUMEL, Muon, ParamJob, run_step
from vescale_fsdp.optim.muon_plan import Bucket, MuonPlan, Ranks, SteppedParam, matrices_of, plan_step
from vescale_fsdp.optim.structured_optimizer import BATCH_NUMEL, batches_of
from vescale_fsdp.planning.meta_step import StorageMeter

_MESH: Any = "the mesh that shards"  # a key, where a step has its `DeviceMesh`


@dataclass(frozen=True)
class SteppedShape:
    """A parameter of a plan.

    Attributes:
        shape: of the whole parameter.
        dtype: in which it is stored.
        numels: elements on each of the ranks that shard it.
        is_special: whether Muon or AdamW8bit steps it by its own algorithm, and not as AdamW does.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    numels: RunLengths
    is_special: bool


def step_bytes(optimizer: str, params: Sequence[SteppedShape], replicas: int, *, on_cpu: bool) -> int:
    """Return the most bytes that a step of an optimizer allocates on a rank, beside weights, states and gradients.

    Args:
        optimizer: "adamw8bit" or "muon"; others allocate nothing.
        params: all parameters with a gradient.
        replicas: number of copies of the model.
        on_cpu: whether ranks are processes on the CPU.
    """
    if optimizer == "adamw8bit":
        return max((_peak(run) for run in _adamw8bit(params, on_cpu=on_cpu)), default=0)
    if optimizer == "muon":
        return _muon_bytes(params, replicas, on_cpu=on_cpu)
    return 0


def _peak(run: Callable[[], object]) -> int:
    with torch.no_grad(), StorageMeter() as meter:
        run()
    return meter.peak


def _adamw8bit(params: Sequence[SteppedShape], *, on_cpu: bool) -> Iterator[Callable[[], None]]:
    """Yield the step of the largest batch of each kind, on the rank with the largest piece."""
    rank = max((_largest(each.numels) for each in params), default=(0, 0))[1]
    pieces = [(each.dtype, each.is_special, each.numels[rank]) for each in params if each.numels[rank]]
    for dtype, is_8bit in dict.fromkeys(each[:2] for each in pieces):
        numels = [numel for *kind, numel in pieces if kind == [dtype, is_8bit]]
        batches = [[numel] for numel in numels]
        if not on_cpu:
            batches = list(batches_of(((0, numel, numel) for numel in numels), BATCH_NUMEL))
        # A batch of several pieces is copied together, so a smaller one may allocate more.
        for is_single in (True, False):
            alike = [batch for batch in batches if (len(batch) == 1) is is_single]
            if alike:
                yield adamw8bit.meta_step(max(alike, key=sum), dtype, is_8bit=is_8bit)


def _largest(numels: RunLengths) -> tuple[int, int]:
    """Return the largest number, and its first rank."""
    first, found = 0, (0, 0)
    for count, value in numels.runs:
        found = max(found, (value, -first))
        first += count
    return found[0], -found[1]


def _muon_bytes(params: Sequence[SteppedShape], replicas: int, *, on_cpu: bool) -> int:
    matrices = [each for each in params if each.is_special]
    if not matrices:
        return 0
    num_shards = len(matrices[0].numels)
    # Layers are alike, so those that fill some buckets and stacks have the peak of all.
    enough = 4 * num_shards * max(BUCKET_BYTES // 2 * replicas, STACK_NUMEL)
    some, numel = [], 0
    for each in matrices:
        if numel < enough:
            some.append(each)
            numel += numel_of(each.shape)
    plan = _plan_of(some, replicas, 0)
    rank = _busiest(plan, num_shards)
    updates = sum(each.numels[rank] * each.dtype.itemsize for each in matrices)
    plan = _plan_of(some, replicas, rank)
    jobs = [_job_of(each, rank) for each in some]
    others = [each for each in params if not each.is_special and each.numels[rank]]
    meanwhile = _adamw(others, rank, on_cpu=on_cpu)
    return updates + _peak(lambda: run_step(plan, jobs, meanwhile=meanwhile))


def _plan_of(matrices: Sequence[SteppedShape], replicas: int, rank: int) -> MuonPlan:
    """Plan the step of a rank of the first replica."""
    num_shards = len(matrices[0].numels)
    numbers = tuple(tuple(range(r * num_shards, (r + 1) * num_shards)) for r in range(replicas))
    key = (_MESH, 0)
    stepped = [
        SteppedParam(
            PieceMap(each.shape, each.numels, rank, key), matrices_of(each.shape, None, number), _steps()
        )
        for number, each in enumerate(matrices)
    ]
    return plan_step(stepped, BUCKET_BYTES, {key: Ranks(None, None, numbers, 0, rank)})


def _group() -> dict[str, Any]:
    """Return Muon's param group with its defaults."""
    return Muon([torch.zeros(1, 1, dtype=torch.float32, device="cpu")]).param_groups[0]


def _steps() -> int:
    return cast(int, _group()["ns_steps"])


def _busiest(plan: MuonPlan, num_shards: int) -> int:
    """Return the shard rank of the first replica that owns most of a bucket."""

    def owned(bucket: Bucket) -> Iterator[tuple[int, int]]:
        numels: dict[int, int] = {}
        for matrix, owner in bucket.owner_of.items():
            if owner.replica == 0:
                numels[owner.shard] = numels.get(owner.shard, 0) + matrix.numel
        yield from ((numel, -rank) for rank, numel in numels.items())

    return -max((each for bucket in plan.buckets for each in owned(bucket)), default=(0, 0))[1]


def _job_of(matrix: SteppedShape, rank: int) -> ParamJob:
    numel = matrix.numels[rank]
    param, update = (torch.empty(numel, dtype=matrix.dtype, device="meta") for _ in range(2))
    pieces = PieceMap(matrix.shape, matrix.numels, rank, (_MESH, 0))
    return ParamJob(param, _group(), pieces, update)


def _adamw(others: Sequence[SteppedShape], rank: int, *, on_cpu: bool) -> Callable[[], None]:
    """Return torch's AdamW on the pieces that Muon does not step."""
    params, grads, averages, squares = (
        [torch.empty(each.numels[rank], dtype=each.dtype, device="meta") for each in others] for _ in range(4)
    )
    steps = [torch.ones((), dtype=torch.float32, device="cpu") for _ in others]
    return lambda: adamw(
        params,
        grads,
        averages,
        squares,
        [],
        steps,
        foreach=not on_cpu,
        amsgrad=False,
        beta1=0.9,
        beta2=0.999,
        lr=1e-3,
        weight_decay=0.01,
        eps=1e-8,
        maximize=False,
    )
