"""Running a planned Muon step: Newton-Schulz where matrices lie whole, and the pipeline of buckets.

bucket 0   gather | iterate         | scatter           | subtract
bucket 1            gather          | iterate           | scatter    | subtract
                    ^ in flight while 0 is iterated       ^ in flight while 1 is iterated
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp.dtensor.piece_map import PieceMap, local_part_of, local_tensor, pieces_of
from vescale_fsdp.layout.geometry import FlatRange
from vescale_fsdp.optim.muon.bucket_exchange import WIRE_DTYPE, Bucket, Pending, start_exchange
from vescale_fsdp.optim.muon.matrices import Matrix, matrices_of
from vescale_fsdp.optim.muon.newton_schulz import NewtonSchulz
from vescale_fsdp.optim.muon.step_plan import MuonPlan, SteppedParam
from vescale_fsdp.torch_private import muon_adjust_lr

__all__ = ["ParamJob", "run_step", "taking_part_of"]

_STACK_NUMEL = 32 << 20
"""Elements iterated at once, 64 MiB in bf16; an iteration holds up to four such: X, A, B and the next X."""


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

    def subtract(self, matrix: Matrix, wanted: FlatRange, orthogonal: torch.Tensor) -> None:
        """``p -= lr' * o`` on the elements ``wanted``, which belong to ``matrix``."""
        target = self.own(local_tensor(self.param), wanted)
        if target.dtype in (torch.bfloat16, torch.float16):
            # torch's 16-bit CPU kernel rounds the last few elements of a run otherwise than the rest, so the
            # result would depend on where the cuts fall.
            target.copy_(target.float().add_(orthogonal, alpha=-self.scaled_lr(matrix)))
        else:
            target.add_(orthogonal, alpha=-self.scaled_lr(matrix))


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
    for job in jobs:
        local_tensor(job.param).mul_(1 - float(job.group["lr"]) * job.group["weight_decay"])
    _orthogonalise_here(plan.here, jobs)
    for index in plan.gathered:
        _orthogonalise_everywhere(jobs[index])
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
    matrices: Iterable[tuple[int, Matrix]], jobs: Sequence[ParamJob]
) -> Iterator[tuple[NewtonSchulz, tuple[int, int], list[int]]]:
    """Positions of matrices that are iterated together: of equal shape and constants, and not too many."""
    kinds: dict[tuple[NewtonSchulz, int, int], list[int]] = {}
    for position, (index, matrix) in enumerate(matrices):
        kinds.setdefault((jobs[index].iteration(), matrix.rows, matrix.cols), []).append(position)
    for (iteration, rows, cols), positions in kinds.items():
        count = max(1, _STACK_NUMEL // (rows * cols))
        for start in range(0, len(positions), count):
            yield iteration, (rows, cols), positions[start : start + count]


def _orthogonalise_here(here: Sequence[tuple[int, Matrix]], jobs: Sequence[ParamJob]) -> None:
    """Matrices that lie whole on this rank."""
    for iteration, shape, positions in _stacks(here, jobs):
        device = jobs[here[positions[0]][0]].update.device
        stack = torch.empty(len(positions), *shape, dtype=WIRE_DTYPE, device=device)
        for row, position in zip(stack, positions, strict=True):
            index, matrix = here[position]
            row.view(-1).copy_(jobs[index].own(jobs[index].update, matrix.range))
        for result, position in zip(iteration(stack), positions, strict=True):
            index, matrix = here[position]
            jobs[index].subtract(matrix, matrix.range, result.reshape(-1))


def _orthogonalise_everywhere(job: ParamJob) -> None:
    """A parameter in no contiguous pieces: every rank gathers it and takes its part of the result."""
    assert isinstance(job.param, DTensor)
    spread = torch.zeros_like(job.param)
    local_tensor(spread, "update").copy_(job.update)
    assert isinstance(spread, DTensor)
    update = spread.full_tensor()
    orthogonal = torch.zeros_like(update)
    for matrix in matrices_of(tuple(job.param.shape), job.group["row_splits"]):
        whole = update.reshape(-1)[matrix.range.start : matrix.range.stop].view(1, matrix.rows, matrix.cols)
        result = job.iteration()(whole.to(WIRE_DTYPE, copy=True)).reshape(-1)
        orthogonal.view(-1)[matrix.range.start : matrix.range.stop].add_(result, alpha=-job.scaled_lr(matrix))
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
        for row, n in zip(stack, positions, strict=True):
            torch.cat([parts[s, n] for s in range(owned[n].pieces.num_shards)], out=row.view(-1))
        for result, n in zip(iteration(stack), positions, strict=True):
            results[n] = result.reshape(-1)
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
    for t, part in zip(bucket.inbound, parts, strict=True):
        if part.numel():
            jobs[t.param].subtract(t.matrix, t.part(shard), part)
