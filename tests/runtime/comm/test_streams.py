"""The runtime's streams and memory in order, proven on a CPU by `tests.support.stream_recorder`.

Each case trains a few steps on recorded streams and expects no hazard; each missing wait is one, as the
negative controls show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.runtime.comm import test_scattered_slots as test_fsdp_scattered
from tests.runtime.setup import test_all_gather_hooks as test_fsdp_tensor_hooks
from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.hooked_tensors import Int8Rows
from tests.support.stream_recorder import RecordedStream, StreamRecorder, recording
from vescale_fsdp import Rows, fully_shard, share_comm_ctx
from vescale_fsdp.quantize import Fp8Blocks, QuantizedGather
from vescale_fsdp.runtime.comm.streams import Streams, streams_of
from vescale_fsdp.runtime.comm_context import CommContext
from vescale_fsdp.runtime.fsdp_state import state_of
from vescale_fsdp.runtime.param_group import ParamGroup

HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def shard(mesh: Any = None, policy: MixedPrecisionPolicy = HALF, **options: Any) -> models.Stack:
    model = models.build(num_blocks=4)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh or cpu_mesh(), mp_policy=policy, **options)
    return model


def step(model: nn.Module, number: int, *, set_to_none: bool = True) -> float:
    """One step of SGD; the loss."""
    loss = models.loss_of(model, models.batch(number, dist.get_rank()))
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.add_(param.grad, alpha=-0.1)
    model.zero_grad(set_to_none)
    return loss.item() if number == 0 else 0.0


def plain(recorder: StreamRecorder, model: models.Stack) -> None:
    for number in range(3):
        step(model, number, set_to_none=number == 1)


def accumulate(recorder: StreamRecorder, model: models.Stack) -> None:
    for number in range(2):
        with model.no_sync():
            models.loss_of(model, models.batch(number, 0)).backward()
        model.set_requires_all_reduce(False)
        models.loss_of(model, models.batch(number, 1)).backward()
        model.set_requires_all_reduce(True)
        step(model, number)
        models.loss_of(model, models.batch(number, 0)).backward()
        step(model, number)  # adds to the gradients of the backward before


def optim_event(recorder: StreamRecorder, model: models.Stack) -> None:
    for number in range(3):
        step(model, number)
        model.set_post_optim_event(recorder.current().record_event())
        torch.ones(3).add_(1)  # compute work that gathers need not wait for


def prefetch_lists(recorder: StreamRecorder, model: models.Stack) -> None:
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch(blocks[:2])
    blocks[0].set_modules_to_forward_prefetch(blocks[1:3])
    blocks[3].set_modules_to_backward_prefetch([blocks[2], blocks[1]])
    plain(recorder, model)


def separate_group(recorder: StreamRecorder, model: models.Stack) -> None:
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(2)
    plain(recorder, model)
    assert len([name for name in recorder.work if name.startswith("communicator")]) == 2


def optimizer_in_backward(recorder: StreamRecorder, model: models.Stack) -> None:
    def update(param: torch.Tensor) -> None:
        with torch.no_grad():
            param.add_(param.grad, alpha=-0.1)  # type: ignore[arg-type]
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)
    plain(recorder, model)


def partly_used(recorder: StreamRecorder, model: models.Stack) -> None:
    """Frozen parameters, blocks left out that were gathered ahead, weights changed by hand in between."""
    for param in model.blocks[0].parameters():
        param.requires_grad_(False)
    step(model, 0)
    blocks = model.blocks
    few = nn.ModuleList([blocks[0]])  # block 1 is gathered ahead in vain
    model.blocks = few
    with torch.no_grad():
        model(models.batch(2, 0))
        for param in blocks.parameters():
            param.mul_(0.5)
    model.blocks = blocks
    step(model, 1)
    model.blocks = few
    step(model, 2)
    model.set_reshard_after_backward(False)
    blocks[1].set_reshard_after_backward(False)
    blocks[0].set_modules_to_backward_prefetch([blocks[1]])  # in vain, too
    step(model, 2)
    with torch.no_grad():
        for group in recorder.groups:
            group.shard.mul_(0.5)
    for module in (*blocks, model):
        module.reshard()
    model.blocks = blocks
    step(model, 3)
    model.load_state_dict(model.state_dict())
    step(model, 4)


def raises(*unused: Any) -> None:
    raise KeyError("on purpose")


def exceptions(recorder: StreamRecorder, model: models.Stack) -> None:
    step(model, 0)
    hook = model.blocks[2].register_forward_hook(raises)
    with pytest.raises(KeyError):
        model(models.batch(1, 0))
    hook.remove()
    model.reset_iter_state()
    step(model, 1)
    out = model(models.batch(2, 0))
    hook = model.blocks[1].register_full_backward_hook(raises)
    with pytest.raises(KeyError):
        models.loss_of(model, models.batch(2, 0)).backward()
    del out
    hook.remove()
    model.reset_iter_state()
    model.zero_grad()
    step(model, 2)


def hook_on_a_stream(recorder: StreamRecorder, model: models.Stack) -> None:
    for module in (*model.blocks, model):
        module.set_all_reduce_hook(lambda shard: shard.mul_(0.5), stream=RecordedStream(recorder, "user"))
    plain(recorder, model)
    assert recorder.work["user"] == 15


def by_hand(recorder: StreamRecorder, model: models.Stack) -> None:
    for number in range(2):
        handle = model.blocks[1].unshard(async_op=True)
        model.blocks[2].unshard()
        handle.wait()
        model.blocks[2].reshard()
        model.set_reshard_after_backward(bool(number))
        step(model, number)
    model.reshard()


CASES: dict[str, tuple[Callable[[StreamRecorder, models.Stack], None], dict[str, Any]]] = {
    "plain": (plain, {}),
    "fp32": (plain, {"policy": MixedPrecisionPolicy()}),
    "fp16": (plain, {"policy": MixedPrecisionPolicy(torch.float16, torch.float16)}),
    "quantized": (
        plain,
        {"policy": QuantizedGather(torch.bfloat16, codecs=Fp8Blocks(1, 4)), "granularity": Rows(1)},
    ),
    "kept after forward": (plain, {"reshard_after_forward": False}),
    "accumulate": (accumulate, {}),
    "optimizer event": (optim_event, {}),
    "prefetch lists": (prefetch_lists, {}),
    "separate group": (separate_group, {}),
    "optimizer in backward": (optimizer_in_backward, {}),
    "partly used": (partly_used, {}),
    "exceptions": (exceptions, {}),
    "by hand": (by_hand, {}),
    "hook on a stream": (hook_on_a_stream, {}),
    "offload": (plain, {"offload": True}),
    "offload fp32": (plain, {"offload": True, "policy": MixedPrecisionPolicy()}),
    "offload, optimizer in backward": (optimizer_in_backward, {"offload": True}),
    "offload accumulate": (accumulate, {"offload": True}),
    "offload partly used": (partly_used, {"offload": True}),
}


def run_case(name: str, mesh_shape: Sequence[int] = (), **options: Any) -> list[str]:
    body, given = CASES[name]
    options = {**given, **options}
    offload = options.pop("offload", False)
    model = shard(cpu_mesh(*mesh_shape), **options)
    with recording(model, offload=offload) as recorder:
        body(recorder, model)
    assert any(group.policy_gather is not None for group in recorder.groups) == (name == "quantized")
    assert (recorder.work["host"] > 0) == offload
    assert recorder.work["compute"] > 100
    assert recorder.work["stream1"] + recorder.work["stream2"] > 10
    assert sum(n for s, n in recorder.work.items() if s.startswith("communicator")) > 10
    return recorder.hazards


def run_cases(names: Sequence[str], *args: Any) -> dict[str, list[str]]:
    return {name: found for name in names if (found := run_case(name, *args))}


def test_no_hazard_under_any_switch() -> None:
    """Nothing is read, written or given out again before the work that uses it is done."""
    assert run_ranks(1, run_cases, list(CASES)) == [{}]


def scattered() -> list[str]:
    """Tensors copied out of the buffer behind a gather."""
    model = test_fsdp_scattered.shard(test_fsdp_scattered.build(), 4)
    with recording(model) as recorder:
        for number in range(3):
            model(test_fsdp_scattered.batch(number, 0)).pow(2).mean().backward()
    assert recorder.work["stream1"] > 10  # the copies
    return recorder.hazards


def run_hybrid() -> dict[str, list[str]]:
    found = {name: run_case(name, (2, 2)) for name in ("plain", "accumulate", "exceptions")}
    for reshard in (2, 4):
        found[f"part of {reshard}"] = run_case("plain", reshard_after_forward=reshard)
        found[f"event, part of {reshard}"] = run_case("optimizer event", reshard_after_forward=reshard)
    found["scattered"] = scattered()
    return {name: hazards for name, hazards in found.items() if hazards}


def test_no_hazard_with_replicas_and_parts() -> None:
    """The same on 2 replicas of 2 shards, and where each rank keeps a part between forward and backward."""
    assert run_ranks(4, run_hybrid) == [{}] * 4


def two_roots() -> list[str]:
    """Two pipeline stages on one context, two microbatches in turn."""
    first, second = (shard() for _ in range(2))
    with recording(first, second) as recorder:
        share_comm_ctx([first, second])  # type: ignore[list-item]
        for _ in range(2):
            losses = []
            for number in range(2):
                losses.append(models.loss_of(first, models.batch(number, 0)))
                losses.append(models.loss_of(second, models.batch(number, 1)))
            for loss in losses:
                loss.backward()
            for model in (first, second):
                step(model, 0)
    assert {name for name in recorder.work if name.startswith("stream")} == {"stream1", "stream2"}
    return recorder.hazards


def test_no_hazard_where_roots_share_streams() -> None:
    """`share_comm_ctx`: one pair of streams for both, in order."""
    assert run_ranks(1, two_roots) == [[]]


def hooked() -> list[str]:
    """Parameters that are encoded before and decoded behind a gather by hooks of their class."""
    model = test_fsdp_tensor_hooks.shard(fully_shard, Int8Rows, 8)
    with recording(model) as recorder:
        for number in range(3):
            model(test_fsdp_tensor_hooks.inputs(number)).pow(2).mean().backward()
    assert recorder.work["stream1"] > 20  # the hooks
    return recorder.hazards


def test_no_hazard_where_classes_gather_themselves() -> None:
    """Hooks of tensor subclasses run on the gather stream, with its memory."""
    assert run_ranks(1, hooked) == [[]]


class GathersDoNotWaitForFrees(CommContext):
    def reshard(self, groups: Sequence[ParamGroup], **options: bool) -> None:
        with mock.patch.object(self, "wait_for_compute"):
            super().reshard(groups, **options)

    def free_lingering(self) -> None:
        with mock.patch.object(self, "wait_for_compute"):
            super().free_lingering()


class GathersDoNotWaitForTheOptimizer(CommContext):
    def wait_for_compute(self) -> None:
        pass


class ComputeDoesNotWaitForGathers(CommContext):
    def wait(self, groups: Sequence[ParamGroup]) -> None:
        for group in groups:
            if group.gathered is not None:
                group.hand_over()


class _Deaf:
    """A stream that waits for no other."""

    def __init__(self, stream: Any) -> None:
        self.name, self.record_event = stream.name, stream.record_event

    def wait_stream(self, stream: Any) -> None:
        pass


class ReductionsDoNotWaitForCompute(CommContext):
    def __init__(self, streams: Streams) -> None:
        super().__init__(streams)
        self.reduce_stream = _Deaf(streams.new())


class ComputeDoesNotWaitForReductions(CommContext):
    def _compute_waits_for(self, stream: Any) -> None:
        pass


class BuffersAreFreedBeforeTheyAreReduced(CommContext):
    def finish_reduction(self) -> None:
        self.in_flight[0] = self.in_flight[0]._replace(owner=None)
        super().finish_reduction()


class HostDoesNotWait(CommContext):
    def wait_for_host_copies(self) -> None:
        pass


def hazards_without(context: type[CommContext], case: str) -> list[str]:
    body, options = CASES[case]
    options = dict(options)
    offload = options.pop("offload", False)
    model = shard(**options)
    with recording(model, offload=offload, context=context) as recorder:
        body(recorder, model)
    return sorted({text.split(" [")[0].split(" bytes ")[-1] for text in recorder.hazards})


@pytest.mark.parametrize(
    ("context", "case", "hazard"),
    [
        (GathersDoNotWaitForFrees, "plain", "freed to stream1 are still used by"),
        (GathersDoNotWaitForTheOptimizer, "plain", "aten.copy_.default on stream1 reads what compute may"),
        (ComputeDoesNotWaitForGathers, "plain", "on compute reads what communicator"),
        (ReductionsDoNotWaitForCompute, "plain", "reduce_scatter_into on communicator"),
        (ComputeDoesNotWaitForReductions, "plain", "on compute reads what stream2 may"),
        (BuffersAreFreedBeforeTheyAreReduced, "plain", "freed to compute are still used by"),
        (HostDoesNotWait, "offload", "on host reads what stream"),
        (HostDoesNotWait, "offload partly used", "on host writes what stream1 may"),
    ],
)
def test_every_wait_is_needed(context: type[CommContext], case: str, hazard: str) -> None:
    """Leave one wait out, and the recorder finds what it was for."""
    for found in run_ranks(1, hazards_without, context, case):
        assert any(hazard in text for text in found), found


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
            assert [c.name for c in forward] == ["all_gather_into"] * 5
            gathers += [
                [c.slack for c in part if c.name == "all_gather_into"] for part in (forward, backward)
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


def slack_of_replicas() -> list[int]:
    model = shard(cpu_mesh(2, 1))
    with recording(model) as recorder:
        models.loss_of(model, models.batch(0, 0)).backward()
    return [c.slack for c in recorder.collectives if c.name == "all_reduce_in_place"]


def test_replicas_are_reduced_beside_the_next_block() -> None:
    """HSDP: compute does not wait for a unit's all-reduce before the next unit's backward is over."""
    for slack in run_ranks(2, slack_of_replicas):
        assert len(slack) == 5
        assert min(slack[:2]) >= 8, slack


def test_the_host_has_no_streams() -> None:
    """On the CPU and on meta nothing is switched or recorded."""
    assert streams_of(torch.device("cpu")) is None
    assert streams_of(torch.device("meta")) is None
