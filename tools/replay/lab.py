"""Steps in the lab (`tools/lab`), measured, and replayed from their kernels' measured times: is the queue right?

    python -m tools.replay.lab --rates 0.1 --json lab.json        as root: needs network namespaces

A rank of `tools.bench.network` records one step of each library: what its threads compute between messages, in CPU
seconds; each message and collective with its bytes; and who waits for what. The replay gives all messages of a node one
link. Bytes are scaled to those that the link's counters have seen, because gloo's own algorithms send more than the
collective's buffer. Where a node has more ranks than cores, computing takes as much longer. The replay of a step with
other links needs no other recording.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
import torch.distributed as dist

from tools.bench.network import Case, batch_of, build, parse_case, received_by, sharded, step_of
from tools.bench.rows import Row, print_table, write_json
from tools.lab import Lab
from tools.replay.queue import replay
from tools.replay.recording import Item, Recording
from vescale_fsdp.collectives import slice_exchange

LIBRARIES = ("ours", "fsdp2")
_CASE = "REPLAY_LAB_CASE"
_SYNCHRONOUS = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
_LOCAL_BYTES_S = 1e9  # between ranks of one node, over gloo's sockets
_PAYLOAD = 1448 / 1514  # of a full packet
_MESSAGE_S = 1e-4  # what a message takes whose bytes take nothing


@dataclass(frozen=True)
class Measured:
    """One library's step."""

    recording: Recording
    cpu_s: dict[str, float]  # by operator
    received_bytes: float  # by the node, as the link counts them
    seconds: list[float]  # of steps with nothing recorded
    all_cpu_s: float = (
        0.0  # of all threads of all ranks in a step, with those of gloo, in user code and in the kernel
    )


class _Timeline:
    """Notes what the threads of a rank do in one step."""

    def __init__(self, per_node: int) -> None:
        self._per_node, self._node = per_node, dist.get_rank() // per_node
        self._lock, self._last = threading.Lock(), threading.local()
        self._num_events = 0
        self.items: list[Item] = []
        self.cpu_s: dict[str, float] = {}

    def computed(self) -> str:
        """Note what the calling thread has computed since its last call; returns its stream."""
        stream, now = threading.current_thread().name, time.thread_time()
        seconds = now - vars(self._last).get("cpu_s", now)
        self._last.cpu_s = now
        with self._lock:
            name = f"computing {len(self.cpu_s)}"
            self.cpu_s[name] = seconds
            self.items.append(Item("operator", stream, name))
        return stream

    def event(self, stream: str) -> int:
        """Record an event on a stream."""
        with self._lock:
            self._num_events += 1
            self.items.append(Item("record", stream, event=self._num_events))
            return self._num_events

    def wait(self, stream: str, event: int) -> None:
        """Let a stream wait for an event."""
        with self._lock:
            self.items.append(Item("wait", stream, event=event))

    def sent(self, nbytes: int, group: dist.ProcessGroup | None, peer: int | None = None) -> int:
        """Note a message from a rank of the group, or a collective; returns the event of its end."""
        start = self.event(self.computed())
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        others = ranks if peer is None else [ranks[peer]]
        wire = "link" if any(rank // self._per_node != self._node for rank in others) else "memory"
        self.wait(wire, start)
        with self._lock:
            self.items.append(Item("collective", wire, "message", nbytes, group=wire, ranks=len(ranks)))
        return self.event(wire)


class _TimedWork:
    """Work whose wait is noted."""

    def __init__(self, work: Any, timeline: _Timeline, event: int | None) -> None:
        self._work, self._timeline, self._event = work, timeline, event

    def wait(self, *timeout: Any) -> Any:
        stream = self._timeline.computed()
        if self._event is not None:
            self._timeline.wait(stream, self._event)
        return self._work.wait(*timeout)


@contextmanager
def _noting(timeline: _Timeline) -> Iterator[None]:
    """A context in which messages, collectives and calls of other threads are noted."""
    send, receive, start_call = dist.isend, dist.irecv, slice_exchange._CallThread.start_call

    def isend(tensor: torch.Tensor, **options: Any) -> Any:
        # Ranks do alike, so a link's two directions are equally busy: what is received is noted.
        return _TimedWork(send(tensor, **options), timeline, None)

    def irecv(tensor: torch.Tensor, *, group: Any, group_src: int, **options: Any) -> Any:
        event = timeline.sent(tensor.nbytes, group, group_src)
        return _TimedWork(receive(tensor, group=group, group_src=group_src, **options), timeline, event)

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            tensors = [each for each in (*args, *options.values()) if isinstance(each, torch.Tensor)]
            event = timeline.sent(max(each.nbytes for each in tensors), options.get("group"))
            if not options.get("async_op", False):
                timeline.wait(threading.current_thread().name, event)
                return function(*args, **options)
            return _TimedWork(function(*args, **options), timeline, event)

        return call

    def call_in_thread(thread: Any, call: Callable[[], None]) -> Any:
        start = timeline.event(timeline.computed())
        ends: list[int] = []

        def timed() -> None:
            timeline.wait(timeline.computed(), start)
            call()
            ends.append(timeline.event(timeline.computed()))

        work = start_call(thread, timed)

        class Waiting:
            def wait(self) -> None:
                stream = timeline.computed()
                work.wait()
                timeline.wait(stream, ends[0])

        return Waiting()

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(slice_exchange._CallThread, "start_call", call_in_thread))
        stack.enter_context(mock.patch.object(dist, "isend", isend))
        stack.enter_context(mock.patch.object(dist, "irecv", irecv))
        for name in vars(dist).keys() & {*_SYNCHRONOUS, "all_reduce", "broadcast"}:  # torch 2.11 lacks some
            stack.enter_context(mock.patch.object(dist, name, noted(getattr(dist, name))))
        timeline.computed()
        yield
        timeline.computed()


def worker(case: Case) -> None:
    """A rank: record and measure both libraries."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batch, found = batch_of(case.model), {}
    for library in LIBRARIES:
        model = sharded(library, build(case.model), case)
        step = step_of(model, list(model.parameters()), batch, case.micros)
        for _ in range(3):
            step()
        received = torch.tensor(received_by(step), dtype=torch.float64)
        dist.all_reduce(received, dist.ReduceOp.MAX)
        seconds, cpu_s = [], time.process_time()
        for _ in range(case.steps):
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        all_cpu_s = torch.tensor((time.process_time() - cpu_s) / case.steps, dtype=torch.float64)
        dist.all_reduce(all_cpu_s)
        timeline = _Timeline(case.per_node)
        dist.barrier()
        with _noting(timeline):
            step()
        dist.barrier()
        found[library] = {
            "recording": Recording(tuple(timeline.items)).to_json(),
            "cpu_s": timeline.cpu_s,
            "received_bytes": received.item(),
            "seconds": seconds,
            "all_cpu_s": all_cpu_s.item(),
        }
    if dist.get_rank() == 0:
        Path(case.out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(case: Case, gbit: float, folder: Path) -> dict[str, Measured]:
    """Run a case in the lab; returns each library's step."""
    out = folder / "steps.json"
    with Lab(case.nodes, gbit, minutes=30, shared=[folder]) as lab:
        for node in range(case.nodes):
            lab.slow(node, mbit=1000 * gbit)
        lab.run(
            ["-m", "tools.replay.lab"],
            nproc_per_node=case.per_node,
            timeout_s=600,
            env={_CASE: json.dumps({**asdict(case), "out": str(out)})},
        )
    return {
        library: Measured(Recording.from_json(step.pop("recording")), **step)
        for library, step in json.loads(out.read_text()).items()
    }


def predicted_s(step: Measured, case: Case, gbit: float, cores: int) -> float:
    """Replay a step over links of a rate; seconds."""
    noted = sum(item.nbytes for item in step.recording.items if item.group == "link")
    scale = step.received_bytes / case.per_node / max(noted, 1)
    link_bytes_s = gbit * 1e9 / 8 * _PAYLOAD / case.per_node  # the ranks of a node share its link
    crowded = max(1.0, case.nodes * case.per_node / cores)

    def seconds_of(item: Item) -> float:
        if item.kind == "operator":
            return step.cpu_s[item.name] * crowded
        if item.group == "link":
            return _MESSAGE_S + item.nbytes * scale / link_bytes_s
        return _MESSAGE_S + item.nbytes / _LOCAL_BYTES_S

    # A rank has one core, which its threads share.
    return float(replay(step.recording, seconds_of, slowdowns={("operator", "operator"): 1.0}).total)


@click.command(help=__doc__.splitlines()[0])
@click.option("--cases", default="2x1,2x2,2x2h,4x1", show_default=True, help="nodes x ranks; h: HSDP")
@click.option("--models", default="dense,moe", show_default=True)
@click.option("--rates", default="0.1,1", show_default=True, help="Gb/s; the first one's steps are measured")
@click.option("--steps", default=3, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(cases: str, models: str, rates: str, steps: int, file: Path | None) -> None:
    rows: list[Row] = []
    gbits = [float(rate) for rate in rates.split(",")]
    for kind in map(parse_case, cases.split(",")):
        for model in models.split(","):
            case = Case(**kind, model=model, dtype="bf16", steps=steps)
            with tempfile.TemporaryDirectory() as folder:
                found = measured(case, gbits[0], Path(folder))
            cores = os.cpu_count() or 1
            busy = {library: 1000 * step.all_cpu_s / cores for library, step in found.items()}
            rows.append(
                Row(case.name, "step, least by the cores", "ms", busy["ours"], busy["fsdp2"], "FSDP2")
            )
            for library, step in found.items():
                noted = 1000 * sum(step.cpu_s.values())
                of_rank = busy[library] * cores / (case.nodes * case.per_node)
                rows.append(
                    Row(case.name, f"CPU time of {library}, noted", "ms", noted, of_rank, "all threads'")
                )
            for gbit in gbits:
                ms = {library: 1000 * predicted_s(step, case, gbit, cores) for library, step in found.items()}
                name = f"{case.name}, {gbit:g} Gb/s"
                rows.append(Row(name, "step, predicted", "ms", ms["ours"], ms["fsdp2"], "FSDP2, predicted"))
                for library in LIBRARIES if gbit == gbits[0] else ():
                    median = 1000 * statistics.median(found[library].seconds)
                    rows.append(
                        Row(name, f"step of {library}, predicted", "ms", ms[library], median, "measured")
                    )
            print_table(rows)
    if file:
        write_json(file, rows)


if __name__ == "__main__":
    if _CASE in os.environ:
        worker(Case(**json.loads(os.environ[_CASE])))
    else:
        main()
