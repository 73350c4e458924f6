"""Copies between a device and the host beside compute, on recorded streams: saves and loads take a CPU for a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.async_device.stream_recorder import HOST, RecordedEvent, RecordedStream, StreamRecorder
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.checkpoint.async_save import AsyncSaver
from vescale_fsdp.checkpoint.native import targets
from vescale_fsdp.checkpoint.native import write as native_write
from vescale_fsdp.checkpoint.ranks.coordinator import SoloCoordinator
from vescale_fsdp.checkpoint.state import host_copies
from vescale_fsdp.checkpoint.state.host_copies import PinnedSlots, Stager, copy_stream_of, memory_of
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.torch_private import storage_id


class RecordedCopies:
    """A `CopyStream` of a recorder; what threads copy on it is recorded too."""

    def __init__(self, recorder: StreamRecorder) -> None:
        self.recorder, self.stream = recorder, RecordedStream(recorder, "copies")

    def wait_for_compute(self) -> None:
        self.stream.wait_stream(self.recorder.current())

    def hold_compute(self, event: Any = None) -> None:
        self.recorder.current().wait_event(event or self.stream.record_event())

    @contextmanager
    def on(self) -> Iterator[None]:
        with self.recorder, self.recorder.on(self.stream):
            yield

    def record(self) -> RecordedEvent:
        return self.stream.record_event()


class DoNotWait(RecordedCopies):
    def wait_for_compute(self) -> None:
        pass


class AreNotWaitedFor(RecordedCopies):
    def hold_compute(self, event: Any = None) -> None:
        pass


def stepped(*params: torch.Tensor) -> torch.optim.Optimizer:
    for param in params:
        param.grad = torch.ones_like(param)
    return torch.optim.SGD(params, lr=1.0)


def staged(body: Callable[[Stager, RecordedCopies], None]) -> list[str]:
    with StreamRecorder() as recorder:
        copies = RecordedCopies(recorder)
        body(Stager(stream_of=lambda device: copies), copies)  # type: ignore[arg-type, return-value]
    assert recorder.work["copies"] > 0
    return recorder.hazards


def train_on(holds: bool) -> Callable[[Stager, RecordedCopies], None]:
    def body(stager: Stager, copies: RecordedCopies) -> None:
        weight, other = (torch.nn.Parameter(torch.arange(4.0) + n) for n in range(2))
        buffer = torch.zeros(3)
        optimizer = stepped(weight)
        (one, two, three), copying = stager.stage(
            [weight.detach(), other.detach(), buffer], can_wait=frozenset(memory_of([optimizer]))
        )
        buffer.add_(1)  # not the optimizer's: copied when the call returned
        with torch.no_grad():
            other.add_(1)
        if holds:
            optimizer.step()
        else:
            with mock.patch.object(RecordedCopies, "hold_compute"):
                optimizer.step()
        copying.finish()
        assert one.tolist() == [0, 1, 2, 3] and two.tolist() == [1, 2, 3, 4] and three.tolist() == [0, 0, 0]
        assert weight.tolist() == [-1, 0, 1, 2]

    return body


def test_the_next_step_waits_for_the_copy() -> None:
    """What the optimizer writes is copied behind the call's back; without the wait it would be overwritten."""
    assert staged(train_on(holds=True)) == []
    assert any("writes what copies may still be using" in found for found in staged(train_on(holds=False)))
    assert not host_copies._under_way, "nothing is held longer than it is copied"


def unknown_writer(stager: Stager, copies: RecordedCopies) -> None:
    """No optimizer is given: all is copied when the call returns, whoever writes next."""
    weight = torch.zeros(4)
    _, copying = stager.stage([weight])
    weight.add_(1)
    copying.finish()


def test_without_an_optimizer_the_call_waits() -> None:
    """The host has waited for the copies, so any write is behind them."""
    assert staged(unknown_writer) == []
    with mock.patch.object(RecordedEvent, "synchronize"):
        assert staged(unknown_writer) != []


def test_memory_that_dies_is_kept_until_it_is_copied() -> None:
    """Tensors of a state may live nowhere else; their memory is not given out while it is read."""

    def body(stager: Stager, copies: RecordedCopies) -> None:
        source = torch.ones(64) * 2
        _, copying = stager.stage([source], can_wait=frozenset([storage_id(source)]))
        if not keeps:
            copying._sources = []
        del source
        torch.ones(64).add_(1)
        copying.finish()

    keeps = True
    assert staged(body) == []
    keeps = False
    assert any("freed to compute are still used by" in found for found in staged(body))


@pytest.mark.parametrize("steps", [False, True])
def test_another_write_before_the_step_fails_the_save(tmp_path: Path, steps: bool) -> None:
    """Such a save may be of two states: it is no checkpoint, and its handle says why."""
    with StreamRecorder() as recorder:
        saver = AsyncSaver(SoloCoordinator())
        copies: Any = RecordedCopies(recorder)
        saver._stager = Stager(stream_of=lambda device: copies)
        weight = torch.nn.Parameter(torch.zeros(8))
        optimizer = stepped(weight)
        state = {"weight": weight.detach(), "step": 3}
        good = saver.start(tmp_path / "good", state, optimizer=optimizer)
        optimizer.step()
        good.wait()
        written = threading.Event()  # before the copy is done, however slow this thread is
        with mock.patch.object(RecordedEvent, "synchronize", side_effect=lambda: written.wait(60)):
            bad = saver.start(tmp_path / "bad", state, optimizer=[optimizer])
            with torch.no_grad():
                weight.mul_(2)
            if steps:
                optimizer.step()
            written.set()
            with pytest.raises(CheckpointError, check=lambda error: "`optimizer`" in str(error.expected)):
                bad.wait()
    assert not (tmp_path / "bad" / "manifest.json").exists()
    load(tmp_path / "good", state)
    assert weight.tolist() == [0.0] * 8


def test_who_is_no_optimizer_is_refused() -> None:
    """Nobody would hear of its steps."""
    with pytest.raises(TypeError, check=lambda error: "torch.optim.Optimizer" in str(error)):
        memory_of([object()])  # type: ignore[list-item]
    assert copy_stream_of(torch.device("cpu")) is None


def state_of_many_kinds() -> dict[str, torch.Tensor]:
    values = torch.arange(3000.0)
    return {
        "plain": values.clone(),
        "transposed": values.reshape(50, 60).t(),
        "half": values.bfloat16(),
        "fp8": values[:99].to(torch.float8_e4m3fn),
        "bytes": torch.arange(77, dtype=torch.uint8),
        "odd": values[:7].double(),
        "empty": torch.empty(0),
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value.float(), other[name].float()) for name, value in one.items())


def through_devices(path: Path, kind: type[RecordedCopies]) -> tuple[list[str], bool]:
    """Save tensors that another stream has just made, load them into some that it reads, and read these at once."""
    with StreamRecorder() as recorder:
        copies, lend = kind(recorder), PinnedSlots.lend

        def lent(slots: PinnedSlots, num_bytes: int) -> torch.Tensor:
            with recorder.paused():
                room = lend(slots, num_bytes)
            recorder.on_host.add(room.untyped_storage()._cdata)
            return room

        with (
            recorder.on(RecordedStream(recorder, "user")),
            mock.patch.object(PinnedSlots, "lend", lent),
            mock.patch.object(native_write, "copy_stream_of", return_value=copies),
            mock.patch.object(targets, "copy_stream_of", return_value=copies),
            mock.patch.object(targets, "_PINNED_BYTES", 512),
        ):
            state = state_of_many_kinds()
            for value in state.values():
                recorder.block_of(value, born=True)
            state["plain"].add_(1)
            save(
                path, state, fingerprint=False
            )  # the host waits for fingerprints, which would hide a lack of waits
            assert recorder.clocks[HOST]["copies"] == recorder.clocks["copies"]["copies"] > 5, recorder.work
            recorder.clocks[HOST].clear()  # what the save has waited for is not what the load waits for
            loaded = {name: torch.zeros_like(value) for name, value in state.items()}
            for value in loaded.values():
                value.clone()
            load(path, loaded)
            for value in loaded.values():
                value.clone()
    assert recorder.work["copies"] > 20
    return sorted(set(recorder.hazards)), same(state, loaded) and bool(state["plain"][0] == 1)


def test_save_and_load_go_by_way_of_pinned_memory(tmp_path: Path) -> None:
    """In order with the caller's stream, whichever it is; what is written is what would be without a device."""
    assert through_devices(tmp_path / "a", RecordedCopies) == ([], True)
    plain = state_of_many_kinds()
    plain["plain"].add_(1)
    save(tmp_path / "b", plain)
    files = [next((tmp_path / each).glob("data-*/*")).read_bytes() for each in "ab"]
    headers = [8 + int.from_bytes(each[:8], "little") for each in files]  # which name the save
    values = [each[start:][:29_000] for each, start in zip(files, headers, strict=True)]
    assert values[0] == values[1] and len(set(values[0])) > 50
    early, _ = through_devices(tmp_path / "c", DoNotWait)
    assert any("copies reads what user may" in found for found in early)
    assert any("copies writes what user may" in found for found in early)
    late, _ = through_devices(tmp_path / "d", AreNotWaitedFor)
    assert any("on user reads what copies may" in found for found in late)
