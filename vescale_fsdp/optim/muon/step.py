"""Running a planned Muon step: Newton-Schulz where matrices lie whole, and the pipeline of buckets.

bucket 0   gather | iterate         | scatter           | subtract
bucket 1            gather          | iterate           | scatter    | subtract
                    ^ in flight while 0 is iterated       ^ in flight while 1 is iterated
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp.dtensor.piece_map import PieceMap, local_part_of, local_tensor, pieces_of
from vescale_fsdp.layout.geometry import FlatRange
from vescale_fsdp.optim.muon.bucket_exchange import WIRE_DTYPE, Bucket, Pending, start_exchange
from vescale_fsdp.optim.muon.matrices import Matrix, matrices_of
from vescale_fsdp.optim.muon.newton_schulz import NewtonSchulz
from vescale_fsdp.optim.muon.step_plan import MuonPlan, SteppedParam
from vescale_fsdp.optim.structured_optimizer import batches_of, launches
from vescale_fsdp.torch_private import foreach_add_, foreach_copy_, foreach_mul_, muon_adjust_lr

_STACK_NUMEL = 32 << 20
"""Elements iterated at once, 64 MiB in bf16; an iteration holds up to four such: X, A, B and the next X."""

_WIDENED_NUMEL = 8 << 20
"""Elements subtracted at once, by way of fp32: 32 MiB, and as much again where parameters are of 16 bits."""


class ParamJob(NamedTuple):
    """One parameter in one step."""

    param: torch.Tensor
    group: dict[str, Any]
    pieces: PieceMap | None
    update: torch.Tensor  # 1D [own piece], what is to be orthogonalised

    def own(self, flat: torch.Tensor, wanted: FlatRange) -> torch.Tensor:
        """The elements ``wanted`` of the parameter, out of this rank's flat piece of it or of its state."""
        assert self.pieces is not None
        start = self.pieces.own_piece.start
        return flat[wanted.start - start : wanted.stop - start]

    def iteration(self) -> NewtonSchulz:
        """The iteration that the param group asks for."""
        return NewtonSchulz(tuple(self.group["ns_coefficients"]), self.group["ns_steps"], self.group["eps"])

    def scaled_lr(self, matrix: Matrix) -> float:
        """The learning rate for a matrix: by its own whole shape, never by a piece's."""
        shape = torch.Size((matrix.rows, matrix.cols))
        return muon_adjust_lr(float(self.group["lr"]), self.group["adjust_lr_fn"], shape)


class _Result(NamedTuple):
    """Elements of a parameter and what their matrix was orthogonalised to there."""

    job: ParamJob
    matrix: Matrix
    wanted: FlatRange
    orthogonal: torch.Tensor  # 1D [wanted], bf16

    @property
    def kind(self) -> Hashable:
        """Equal for what one launch can subtract."""
        return self.job.param.dtype, self.job.param.device, self.job.scaled_lr(self.matrix)


def taking_part_of(param: torch.Tensor, group: dict[str, Any]) -> SteppedParam:
    """How a parameter takes part in a step."""
    return SteppedParam(
        pieces_of(param), matrices_of(tuple(param.shape), group["row_splits"]), group["ns_steps"]
    )


def run_step(plan: MuonPlan, jobs: Sequence[ParamJob], *, meanwhile: Callable[[], None]) -> None:
    """Orthogonalise all updates and subtract them.

    Args:
        plan: made for the same parameters in the same order.
        jobs: one per parameter.
        meanwhile: other work of the step, done while the first bucket is on its way.
    """
    gathering = _start_gather(plan.buckets[0], jobs) if plan.buckets else None
    meanwhile()
    _decay(jobs)
    _orthogonalise_here(plan.here, jobs)
    for index in plan.gathered:
        _orthogonalise_everywhere(index, jobs)
    scattering: Pending | None = None
    for number, bucket in enumerate(plan.buckets):
        assert gathering is not None
        arrived = gathering
        if number + 1 < len(plan.buckets):
            gathering = _start_gather(plan.buckets[number + 1], jobs)
        results = _orthogonalise_arrived(bucket, arrived.wait(), jobs)
        before, scattering = scattering, _start_scatter(bucket, results, jobs)
        if before is not None:
            _subtract_arrived(plan.buckets[number - 1], before.wait(), jobs)
    if scattering is not None:
        _subtract_arrived(plan.buckets[-1], scattering.wait(), jobs)


def _stacks(
    matrices: Sequence[tuple[int, Matrix]], jobs: Sequence[ParamJob]
) -> Iterator[tuple[NewtonSchulz, tuple[int, int], list[int]]]:
    """Positions of matrices that are iterated together: of equal shape and constants, and not too many."""
    found = (
        ((jobs[index].iteration(), matrix.rows, matrix.cols), matrix.numel, position)
        for position, (index, matrix) in enumerate(matrices)
    )
    for positions in batches_of(found, _STACK_NUMEL):
        index, matrix = matrices[positions[0]]
        yield jobs[index].iteration(), (matrix.rows, matrix.cols), positions


def _decay(jobs: Sequence[ParamJob]) -> None:
    kept = [1 - float(job.group["lr"]) * job.group["weight_decay"] for job in jobs]
    kinds = [(job.param.dtype, job.param.device, factor) for job, factor in zip(jobs, kept, strict=True)]
    for alike in batches_of(zip(kinds, (0 for _ in jobs), range(len(jobs)), strict=True), 0):
        locals_ = [local_tensor(jobs[index].param) for index in alike]
        if launches(locals_[0].device):
            foreach_mul_(locals_, kept[alike[0]])
        else:
            for local in locals_:  # torch 2.13's foreach rounds the factor to 16 bits there, as mul_ does not
                local.mul_(kept[alike[0]])


def _subtract(results: Iterable[_Result]) -> None:
    """``p -= lr' * o``: one launch for those of one dtype and learning rate, as far as the memory for it goes."""
    found = ((each.kind, each.wanted.numel, each) for each in results)
    for alike in batches_of(found, _WIDENED_NUMEL):
        _subtract_alike(alike)


def _subtract_alike(results: Sequence[_Result]) -> None:
    job, matrix, _, _ = results[0]
    targets = [each.job.own(local_tensor(each.job.param), each.wanted) for each in results]
    sums = targets
    if job.param.dtype in (torch.bfloat16, torch.float16):
        # torch's 16-bit CPU kernel rounds the last few elements of a run otherwise than the rest, so the
        # result would depend on where the cuts fall.
        sums = _widened(targets)
    foreach_add_(sums, _widened([each.orthogonal for each in results]), alpha=-job.scaled_lr(matrix))
    if sums is not targets:
        foreach_copy_(targets, sums)


def _widened(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """fp32 copies of 1-D tensors, in one launch."""
    numels = [part.numel() for part in parts]
    wide = list(torch.empty(sum(numels), dtype=torch.float32, device=parts[0].device).split(numels))
    foreach_copy_(wide, list(parts))
    return wide


def _orthogonalise_here(here: Sequence[tuple[int, Matrix]], jobs: Sequence[ParamJob]) -> None:
    """Matrices that lie whole on this rank."""
    for iteration, shape, positions in _stacks(here, jobs):
        members = [(jobs[here[position][0]], here[position][1]) for position in positions]
        stack = torch.empty(len(members), *shape, dtype=WIRE_DTYPE, device=members[0][0].update.device)
        rows = list(stack.flatten(1).unbind())
        foreach_copy_(rows, [job.own(job.update, matrix.range) for job, matrix in members])
        results = iteration(stack).flatten(1).unbind()
        _subtract(
            _Result(job, matrix, matrix.range, result)
            for (job, matrix), result in zip(members, results, strict=True)
        )


def _orthogonalise_everywhere(index: int, jobs: Sequence[ParamJob]) -> None:
    """A parameter in no contiguous pieces: every rank gathers it and takes its part of the result."""
    job = jobs[index]
    assert isinstance(job.param, DTensor)
    spread = torch.zeros_like(job.param)
    local_tensor(spread, "update").copy_(job.update)
    assert isinstance(spread, DTensor)
    update = spread.full_tensor()
    orthogonal = torch.zeros_like(update)
    matrices = matrices_of(tuple(job.param.shape), job.group["row_splits"])
    for iteration, shape, positions in _stacks([(index, matrix) for matrix in matrices], jobs):
        ranges = [matrices[position].range for position in positions]
        stack = torch.stack([update.reshape(-1)[start:stop].view(shape) for start, stop in ranges])
        results = iteration(stack.to(WIRE_DTYPE)).flatten(1).to(orthogonal.dtype)
        scaled = results.mul_(-job.scaled_lr(matrices[positions[0]])).unbind()
        foreach_copy_([orthogonal.view(-1)[start:stop] for start, stop in ranges], list(scaled))
    local_tensor(job.param).add_(local_part_of(orthogonal, job.param).reshape(-1))


def _device(bucket: Bucket, jobs: Sequence[ParamJob]) -> torch.device:
    return jobs[bucket.travels[0].param].update.device


def _start_gather(bucket: Bucket, jobs: Sequence[ParamJob]) -> Pending:
    """Send this rank's parts of a bucket's matrices to their owners."""
    shard = bucket.ranks.shard
    parts = [
        jobs[t.param].own(jobs[t.param].update, t.part(shard))
        for travels in bucket.outbound
        for t in travels
        if t.part(shard).numel
    ]
    return start_exchange(parts, bucket.gather_transfer, bucket.ranks.group, _device(bucket, jobs))


def _orthogonalise_arrived(
    bucket: Bucket, arrived: torch.Tensor, jobs: Sequence[ParamJob]
) -> list[torch.Tensor]:
    """The orthogonal factors of the matrices this rank owns, flat, in their order in the bucket."""
    owned = bucket.owned
    # Parts arrive rank by rank, each rank's in the order of the bucket; a matrix is its parts in shard order.
    places = [(s, n) for r, s in bucket.everyone if r == bucket.ranks.replica for n in range(len(owned))]
    chunks = arrived.split([owned[n].part(s).numel for s, n in places]) if places else ()
    parts = dict(zip(places, chunks, strict=True))
    results = [arrived] * len(owned)
    for iteration, shape, positions in _stacks([(t.param, t.matrix) for t in owned], jobs):
        stack = torch.empty(len(positions), *shape, dtype=WIRE_DTYPE, device=arrived.device)
        meeting = [parts[s, n] for n in positions for s in range(owned[n].pieces.num_shards)]
        foreach_copy_(list(stack.view(-1).split([part.numel() for part in meeting])), meeting)
        for result, n in zip(iteration(stack).flatten(1), positions, strict=True):
            results[n] = result
    return results


def _start_scatter(bucket: Bucket, results: Sequence[torch.Tensor], jobs: Sequence[ParamJob]) -> Pending:
    """Send every rank its parts of the orthogonal factors."""
    wanted = [
        (result, t.part(shard).shift(-t.matrix.start))
        for _, shard in bucket.everyone
        for t, result in zip(bucket.owned, results, strict=True)
    ]
    parts = [result[part.start : part.stop] for result, part in wanted if part.numel]
    return start_exchange(parts, bucket.scatter_transfer, bucket.ranks.group, _device(bucket, jobs))


def _subtract_arrived(bucket: Bucket, arrived: torch.Tensor, jobs: Sequence[ParamJob]) -> None:
    """Subtract this rank's parts of a bucket's orthogonal factors."""
    shard = bucket.ranks.shard
    parts = arrived.split([t.part(shard).numel for t in bucket.inbound])
    _subtract(
        _Result(jobs[t.param], t.matrix, t.part(shard), part)
        for t, part in zip(bucket.inbound, parts, strict=True)
        if part.numel()
    )
