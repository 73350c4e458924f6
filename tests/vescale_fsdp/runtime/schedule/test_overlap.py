"""What can run beside what on recorded streams: gathers, reductions and copies, beside compute and each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch

from tests.support import models
from tests.support.async_device.stream_recorder import Collective, RecordedStream, recording
from tests.support.distributed import cpu_mesh, run_ranks
from tests.vescale_fsdp.runtime.schedule.test_streams import shard, step
from vescale_fsdp.runtime.comm_context import CommContext
from vescale_fsdp.runtime.fsdp_state import state_of
from vescale_fsdp.runtime.param_group import ParamGroup


def overlap() -> tuple[list[int], list[list[int]], list[int]]:
    """Of two steps: most blocks gathered at once in each forward, slack of gathers in each half; of reductions."""
    model = shard()
    blocks = [group for block in model.blocks for group in state_of(block).groups]  # type: ignore[union-attr]
    gathers, most_full = [], []
    with recording(model) as recorder:
        for number in range(2):
            recorder.collectives.clear()
            recorder.counted, recorder.most_full = blocks, 0
            out = models.loss_of(model, models.batch(number, 0))
            most_full.append(recorder.most_full)
            num_forward = len(recorder.collectives)
            recorder.counted = []
            out.backward()
            forward, backward = recorder.collectives[:num_forward], recorder.collectives[num_forward:]
            assert [c.name for c in forward] == ["all_gather_each"] * 5
            gathers += [
                [c.slack for c in part if c.name == "all_gather_each"] for part in (forward, backward)
            ]
    return most_full, gathers, [c.slack for c in backward if c.name == "reduce_scatter_into"]


def test_communication_overlaps_and_memory_is_bounded() -> None:
    """Two gathered blocks at most; gathers and reductions can run beside a block's compute, in a first step too."""
    for most_full, gathers, reductions in run_ranks(1, overlap):
        assert most_full == [2, 2]
        assert [len(part) for part in gathers] == [5, 4, 5, 4]
        for forward, backward in (gathers[:2], gathers[2:]):
            # The root's and the first block's gather have nothing before them, the last block's in the backward
            # only the loss; all others a whole block.
            assert min(forward[2:]) >= 8, gathers
            assert min(backward[1:]) >= 8, gathers
        assert len(reductions) == 5
        assert min(reductions[:3]) >= 8, reductions  # the last block is reduced at the very end


def slack_behind_a_step(context: type[CommContext], given: bool) -> int:
    """Of the root's gather, where compute work follows the optimizer's step."""
    model = shard()
    with recording(model, context=context) as recorder:
        step(model, 0)
        if given:
            model.set_post_optim_event(recorder.current().record_event())
        for _ in range(20):
            torch.ones(3).add_(1)
        recorder.collectives.clear()
        models.loss_of(model, models.batch(1, 0))
        return recorder.collectives[0].slack


class GathersWaitForComputeToo(CommContext):
    def wait_for_event(self, event: Any) -> None:
        super().wait_for_event(event)
        self._waits_for_event = False


def test_gathers_wait_for_the_users_event_alone() -> None:
    """Behind `set_post_optim_event` the first gather runs beside compute work that came later than the event."""
    assert run_ranks(1, slack_behind_a_step, CommContext, True)[0] >= 20
    assert run_ranks(1, slack_behind_a_step, CommContext, False)[0] < 5
    assert run_ranks(1, slack_behind_a_step, GathersWaitForComputeToo, True)[0] < 5


class ReplicasAreReducedWhereShardsAre(CommContext):
    @property
    def replica_stream(self) -> Any:  # type: ignore[override]
        return self.reduce_stream


class ComputeWaitsForReplicas(CommContext):
    def _wait_until_reduced(self, reduction: Any) -> Any:
        stream: Any = super()._wait_until_reduced(reduction)
        reduction.owner.wait_event(stream.record_event())  # and not just for what reads the gradient buffer
        return stream


def replicas(context: type[CommContext]) -> tuple[list[int], list[bool], list[bool]]:
    """Slack of all-reduces; which reductions over shards are behind the last all-reduce, and the third last."""
    model = shard(cpu_mesh(2, 1))
    with recording(model, context=context) as recorder:
        models.loss_of(model, models.batch(0, 0)).backward()
    all_reduces: list[Collective] = []
    behind_last, behind_older = [], []
    for started in recorder.collectives:
        if started.name == "all_reduce_at_once":
            all_reduces.append(started)
        elif started.name == "reduce_scatter_into":
            behind = [started.clock[done.stream] >= done.tick for done in all_reduces]
            behind_last += behind[-1:]
            behind_older += behind[-3:-2]
    return [each.slack for each in all_reduces], behind_last, behind_older


def test_replicas_are_reduced_beside_the_next_unit() -> None:
    """HSDP: neither compute nor the next unit's reduction over shards waits for a unit's all-reduce."""
    found = run_ranks(2, replicas, CommContext)
    waiting = run_ranks(2, replicas, ComputeWaitsForReplicas)
    for (slack, behind_last, behind_older), (less, _, _) in zip(found, waiting, strict=True):
        assert len(slack) == 5
        assert slack[0] >= less[0] + 8, (slack, less)
        assert min(slack[:2]) >= 8, slack
        assert behind_last == [False] * 4
        assert behind_older == [True] * 2  # so that no more than two reduced shards are kept for it
    for _, behind_last, _ in run_ranks(2, replicas, ReplicasAreReducedWhereShardsAre):
        assert behind_last == [True] * 4


class CopiesAreMadeWhereGathersAre(CommContext):
    @property
    def copy_stream(self) -> Any:  # type: ignore[override]
        return self.gather_stream


def copies_behind_gathers(context: type[CommContext]) -> list[bool]:
    """Of the copies from the host of a second step's forward: which ones wait for the gather before them."""
    model, found = shard(), []
    bring = ParamGroup.bring_shard
    with recording(model, offload=True, context=context) as recorder:

        def watched(group: ParamGroup) -> list[torch.Tensor]:
            gathers = [each for each in recorder.collectives if each.name == "all_gather_each"]
            if gathers:
                found.append(recorder.clocks[recorder.stream][gathers[-1].stream] >= gathers[-1].tick)
            return bring(group)

        models.loss_of(model, models.batch(0, 0)).backward()
        recorder.collectives.clear()
        with mock.patch.object(ParamGroup, "bring_shard", watched):
            models.loss_of(model, models.batch(1, 0))
        assert recorder.hazards == []
    return found


def test_shards_come_from_the_host_beside_gathers() -> None:
    """Offload: the copy of a unit's shard does not wait for the all-gather of the unit before."""
    assert run_ranks(1, copies_behind_gathers, CommContext) == [[False] * 4]
    assert run_ranks(1, copies_behind_gathers, CopiesAreMadeWhereGathersAre) == [[True] * 4]


def peaks(ahead: int) -> tuple[float, float]:
    """Bytes of the gather stream's pool at its peak, in gathered blocks; the same of the reduce stream's, in shards."""
    model = shard()
    blocks = list(model.blocks)
    if ahead > 1:
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + ahead])
    with recording(model) as recorder:
        for number in range(2):
            step(model, number)
    groups = [group for block in blocks for group in state_of(block).groups]  # type: ignore[union-attr]
    gathered = max(group.layout.numel * group.compute_dtype.itemsize for group in groups)
    shards = sum(group.shard.nbytes for group in groups)
    return recorder.pool_peaks["stream1"] / gathered, recorder.pool_peaks["stream2"] / shards


def test_pools_hold_what_they_are_for() -> None:
    """The gather stream's: two blocks; one more where the user asks for it. The reduce stream owns no gradients."""
    ((two, reduced),) = run_ranks(1, peaks, 1)
    assert two == 2
    assert reduced == 0
    assert run_ranks(1, peaks, 2)[0][0] == 3


def in_a_thread(waits: bool) -> list[str]:
    """Backwards that another thread runs, on a stream of its own."""
    model = shard()
    with recording(model) as recorder, ThreadPoolExecutor(1) as pool:
        own = RecordedStream(recorder, "other thread")

        def backward(loss: torch.Tensor) -> None:
            assert recorder.stream == "compute"  # streams are chosen by thread
            with recorder, recorder.on(own):
                loss.backward()

        for number in range(2):
            loss = models.loss_of(model, models.batch(number, 0))
            if waits:
                own.wait_stream(recorder.current())
            with recorder.on(RecordedStream(recorder, "this thread")):
                pool.submit(backward, loss).result(60)
            if waits:
                recorder.current().wait_stream(own)
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(param.grad, alpha=-0.1)  # type: ignore[arg-type]
            model.zero_grad()
        assert recorder.work["other thread"] > 50 and not recorder.work["this thread"]
    return recorder.hazards


def test_a_backward_in_another_thread() -> None:
    """It has that thread's stream; whoever started it waits for it, and finds gradients and shards in order."""
    assert run_ranks(1, in_a_thread, True) == [[]]
    (hazards,) = run_ranks(1, in_a_thread, False)
    assert hazards != []
