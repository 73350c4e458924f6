"""The runtime's streams and memory in order, proven on a CPU by `tests.support.async_device.stream_recorder`.

Each case trains a few steps on recorded streams and expects no hazard; each missing wait is one, as the
negative controls show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support import models
from tests.support.async_device.stream_recorder import HOST, RecordedStream, StreamRecorder, recording
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.hooked_tensors import Int8Rows
from tests.vescale_fsdp.runtime.comm import test_scattered_slots as test_fsdp_scattered
from tests.vescale_fsdp.runtime.setup import test_all_gather_hooks as test_fsdp_tensor_hooks
from vescale_fsdp import Rows, fully_shard, share_comm_ctx
from vescale_fsdp.quantize import Fp8Blocks, QuantizedGather
from vescale_fsdp.runtime.comm.streams import Streams, streams_of
from vescale_fsdp.runtime.comm.unsharded_grads import UsedFlags
from vescale_fsdp.runtime.comm_context import CommContext
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
    assert len({started.group for started in recorder.collectives}) == 2


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
    models.loss_of(model, models.batch(2, dist.get_rank())).backward()
    model.zero_grad()
    model.set_reshard_after_backward(True)
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
        models.loss_of(model, models.batch(number, dist.get_rank())).backward()
    model.reshard()
    step(model, 2)


def has_memory(module: nn.Module, *unused: Any) -> None:
    assert all(param.untyped_storage().nbytes() for param in module.parameters())


def twice_in_a_row(recorder: StreamRecorder, model: models.Stack) -> None:
    """Nothing is gathered ahead, so memory of the first forward lingers as the second one gathers it."""
    blocks = model.blocks
    hook = blocks[0].register_forward_pre_hook(has_memory)
    model.blocks = nn.ModuleList([blocks[0], blocks[0], blocks[1], blocks[1]])
    for number in range(2):
        step(model, number)
    hook.remove()
    model.blocks = blocks


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
    "twice in a row": (twice_in_a_row, {}),
    "hook on a stream": (hook_on_a_stream, {}),
    "offload": (plain, {"offload": True}),
    "offload fp32": (plain, {"offload": True, "policy": MixedPrecisionPolicy()}),
    "offload, optimizer in backward": (optimizer_in_backward, {"offload": True}),
    "offload accumulate": (accumulate, {"offload": True}),
    "offload partly used": (partly_used, {"offload": True}),
}


def run_case(name: str, mesh_shape: Sequence[int] = (), *, beside: bool = False, **options: Any) -> list[str]:
    body, given = CASES[name]
    options = {**given, **options}
    offload = options.pop("offload", False)
    model = shard(cpu_mesh(*mesh_shape), **options)
    with recording(model, offload=offload, beside=beside) as recorder:
        body(recorder, model)
    assert any(group.policy_gather is not None for group in recorder.groups) == (name == "quantized")
    assert (recorder.work["host"] > 0) == offload
    assert recorder.work["compute"] > 100
    assert recorder.work["stream1"] + recorder.work["stream2"] > 10
    assert len(recorder.collectives) > 10
    assert any(stream.startswith("communicator") for stream in recorder.work) == beside
    return recorder.hazards


def run_all() -> dict[str, list[str]]:
    found = {name: run_case(name) for name in CASES}
    for name in ("plain", "accumulate", "offload", "exceptions"):
        found[f"{name}, collectives beside"] = run_case(name, beside=True)
    return {name: hazards for name, hazards in found.items() if hazards}


@pytest.mark.part("numerics")
def test_no_hazard_under_any_switch() -> None:
    """Nothing is read, written or given out again before the work that uses it is done."""
    assert run_ranks(1, run_all) == [{}]


def scattered() -> list[str]:
    """Tensors copied out of the buffer behind a gather."""
    model = test_fsdp_scattered.shard(test_fsdp_scattered.build(), 4)
    with recording(model) as recorder:
        for number in range(3):
            model(test_fsdp_scattered.batch(number, 0)).pow(2).mean().backward()
    assert recorder.work["stream1"] > 10  # the copies
    return recorder.hazards


HYBRID: dict[str, Callable[[], list[str]]] = {
    "accumulate": partial(run_case, "accumulate", (2, 2)),
    "exceptions": partial(run_case, "exceptions", (2, 2)),
    "collectives beside": partial(run_case, "accumulate", (2, 2), beside=True),
    "event, part of 2": partial(run_case, "optimizer event", reshard_after_forward=2),
    "scattered": scattered,
}
MORE_HYBRID: dict[str, Callable[[], list[str]]] = {
    "plain": partial(run_case, "plain", (2, 2)),
    "offload": partial(run_case, "offload", (2, 2)),
    "part of 2": partial(run_case, "plain", reshard_after_forward=2),
    "part of 4": partial(run_case, "plain", reshard_after_forward=4),
    "event, part of 4": partial(run_case, "optimizer event", reshard_after_forward=4),
}


def run_hybrid(more: bool) -> dict[str, list[str]]:
    found = {name: case() for name, case in (MORE_HYBRID if more else HYBRID).items()}
    return {name: hazards for name, hazards in found.items() if hazards}


@pytest.mark.part("numerics")
@pytest.mark.parametrize("more", [False, True])
def test_no_hazard_with_replicas_and_parts(more: bool) -> None:
    """The same on 2 replicas of 2 shards, and where each rank keeps a part between forward and backward."""
    assert run_ranks(4, run_hybrid, more) == [{}] * 4


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
    def _free_full(self, groups: Sequence[ParamGroup], read: Any) -> None:
        super()._free_full(groups, None)


class GathersDoNotWaitForTheOptimizer(CommContext):
    def _gathers_wait_for_frees(self) -> None:
        pass


class CopiesDoNotWaitForTheOptimizer(CommContext):
    def _bring(self, groups: Sequence[ParamGroup]) -> list[torch.Tensor]:
        self._shards_ready = None
        return super()._bring(groups)


class GathersDoNotWaitForCopies(CommContext):
    def _bring(self, groups: Sequence[ParamGroup]) -> list[torch.Tensor]:
        assert self.gather_stream is not None
        with mock.patch.object(RecordedStream, "wait_stream"):
            return super()._bring(groups)


class CopiesAreNotKept(CommContext):
    def _bring(self, groups: Sequence[ParamGroup]) -> list[torch.Tensor]:
        super()._bring(groups)
        return []


class ReducedShardsAreNotKept(CommContext):
    def finish_reduction(self) -> None:
        super().finish_reduction()
        self._reduced.clear()


class ReplicasDoNotWaitForReductions(CommContext):
    def _wait_until_reduced(self, reduction: Any) -> Any:
        with mock.patch.object(RecordedStream, "wait_event"):
            return super()._wait_until_reduced(reduction)


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

    def wait_event(self, event: Any) -> None:
        pass


class ReductionsDoNotWaitForCompute(CommContext):
    def __init__(self, streams: Streams) -> None:
        super().__init__(streams)
        self.reduce_stream = _Deaf(streams.new())


class ComputeDoesNotWaitForReductions(CommContext):
    def _join_streams(self) -> None:
        with mock.patch.object(RecordedStream, "wait_event"):
            super()._join_streams()


class BuffersAreFreedBeforeTheyAreReduced(CommContext):
    def finish_reduction(self) -> None:
        self.in_flight[0] = self.in_flight[0]._replace(owner=None)
        super().finish_reduction()


class HostDoesNotWait(CommContext):
    def wait_for_host_copies(self) -> None:
        pass


def written_by_the_device(recorder: StreamRecorder, model: models.Stack) -> None:
    """Shards on the host are written by a copy that the host does not wait for."""
    for number in range(2):
        step(model, number)
        for group in recorder.groups:
            group.shard.copy_(torch.ones(group.shard.shape), non_blocking=True)
    step(model, 2)


CASES["offload, written by the device"] = (written_by_the_device, {"offload": True})


def hazards_without(context: type[CommContext], case: str, mesh_shape: Sequence[int] = ()) -> list[str]:
    body, options = CASES[case]
    options = dict(options)
    offload = options.pop("offload", False)
    model = shard(cpu_mesh(*mesh_shape), **options)
    with recording(model, offload=offload, context=context) as recorder:
        body(recorder, model)
    return sorted({text.split(" [")[0].split(" bytes ")[-1] for text in recorder.hazards})


@pytest.mark.parametrize(
    ("context", "case", "hazard"),
    [
        (GathersDoNotWaitForFrees, "plain", "freed to stream1 are still used by"),
        (GathersDoNotWaitForTheOptimizer, "plain", "aten.copy_.default on stream1 reads what compute may"),
        (ComputeDoesNotWaitForGathers, "plain", "on compute reads what stream1"),
        (ReductionsDoNotWaitForCompute, "plain", "reduce_scatter_into on stream1"),
        (ComputeDoesNotWaitForReductions, "plain", "on compute reads what stream2 may"),
        (BuffersAreFreedBeforeTheyAreReduced, "plain", "freed to compute are still used by"),
        (HostDoesNotWait, "offload", "on host reads what stream"),
        (HostDoesNotWait, "offload partly used", "on host writes what stream2 may"),
        (
            CopiesDoNotWaitForTheOptimizer,
            "offload, written by the device",
            "on stream2 reads what compute may",
        ),
        (GathersDoNotWaitForCopies, "offload", "on stream1 reads what stream2 may"),
        (CopiesAreNotKept, "offload", "freed to stream2 are still used by"),
    ],
)
def test_every_wait_is_needed(context: type[CommContext], case: str, hazard: str) -> None:
    """Leave one wait out, and the recorder finds what it was for."""
    for found in run_ranks(1, hazards_without, context, case):
        assert any(hazard in text for text in found), found


@pytest.mark.parametrize(
    ("context", "case", "hazard"),
    [
        (ReducedShardsAreNotKept, "accumulate", "freed to compute are still used by"),
        (ReplicasDoNotWaitForReductions, "plain", "on stream3 reads what stream2 may"),
    ],
)
def test_every_wait_of_replicas_is_needed(context: type[CommContext], case: str, hazard: str) -> None:
    """The same with replicas, whose all-reduce has a stream of its own."""
    for found in run_ranks(2, hazards_without, context, case, (2, 1)):
        assert any(hazard in text for text in found), found


def test_the_host_has_no_streams() -> None:
    """On the CPU and on meta nothing is switched or recorded."""
    assert streams_of(torch.device("cpu")) is None
    assert streams_of(torch.device("meta")) is None


def test_streams_of_a_device_come_first() -> None:
    """Gathers and reductions have streams of high priority: what they wait for is started before more compute."""
    device, module = torch.device("cuda", 0), mock.Mock()
    with mock.patch.object(torch, "get_device_module", return_value=module):
        streams = streams_of(device)
    assert streams is not None
    assert streams.new() is module.Stream.return_value
    module.Stream.assert_called_once_with(device=device, priority=-1)


class Halves(nn.Module):
    """Two layers, of which a call may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x)) if both else self.first(x)
        return result


def flags_of_used(both: bool) -> tuple[str, bool, list[str]]:
    """The stream of the message; whether compute or the host waited for it; the streams on which it was read."""
    model = fully_shard(Halves(), mesh=cpu_mesh())
    created: list[tuple[str, int]] = []
    read: list[str] = []
    create, anywhere = UsedFlags.__init__, UsedFlags.anywhere
    with recording(model) as recorder:

        def note_created(flags: UsedFlags, *given: Any) -> None:
            create(flags, *given)
            created.append((recorder.stream, recorder.clocks[recorder.stream][recorder.stream]))

        def note_read(flags: UsedFlags) -> list[bool]:
            read.append(recorder.stream)
            return anywhere(flags)

        with (
            mock.patch.object(UsedFlags, "__init__", note_created),
            mock.patch.object(UsedFlags, "anywhere", note_read),
        ):
            model(torch.ones(2, 4), both).sum().backward()
        assert not recorder.hazards
        ((stream, tick),) = created
        assert tick > 0
        return stream, any(recorder.clocks[waiter][stream] >= tick for waiter in ("compute", HOST)), read


def test_flags_of_used_parameters_delay_nothing() -> None:
    """They are sent on a stream that nothing waits for, and read on it, and only where something was unused."""
    assert run_ranks(1, flags_of_used, True) == [("stream1", False, [])]
    ((stream, _, read),) = run_ranks(1, flags_of_used, False)
    assert read == [stream]
