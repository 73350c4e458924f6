"""Programs whose ranks form groups, each with one rank that is killed or stalled at a chosen call.

    spots_of(program, ..)     the calls that a rank makes of torch.distributed and of its store, in order, from a run
                              in which nobody dies
    launch(program, ..)       a run in which one rank gets a signal at one of these calls; how the others ended

A call is told by its name and, of a store, by the key: polls of one key are one spot. Calls that torch's C++ makes of
the store (gloo's, as it connects ranks) are among them, since the store is written in Python.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.support.distributed import forkserver
from tests.support.processes import stacks_of

# Time-out of groups where no elastic job ends waits. gloo waits five times as long for ranks to connect.
FORMING_S = 3.0
CALLS = (
    "init_process_group",
    "new_group",
    "barrier",
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "broadcast",
    "send",
    "recv",
    "isend",
    "irecv",
    "destroy_process_group",
)


class Death(NamedTuple):
    """A rank gets a signal when it makes a call, or a moment later."""

    rank: int
    spot: str
    signal: signal.Signals = signal.SIGKILL
    delay_s: float = 0.0


class End(NamedTuple):
    """How a rank ended."""

    exit_code: int | None  # None: it had not when time was up
    error: str  # its class; "" if it ended well
    bases: list[str]  # names of this class and of its bases
    text: str  # of the error, its causes and notes; the stacks of one that has not ended
    result: Any  # what the program returned
    threads: list[str]  # names of those that were left


class Spots:
    """The calls of this process; at one of them it sends itself a signal."""

    def __init__(self, folder: Path, rank: int, death: Death | None) -> None:
        self._file = open(folder / f"spots-{rank}", "a", buffering=1)  # noqa: SIM115  for life
        self._seen: dict[str, int] = {}
        self._folder, self._rank, self._death = folder, rank, death
        self._lock = threading.Lock()

    def pass_by(self, spot: str) -> None:
        """Note a call before it is made."""
        with self._lock:
            if spot in self._seen:
                return
            self._seen[spot] = 1
            self._file.write(spot + "\n")
        death = self._death
        if death is not None and (death.rank, death.spot) == (self._rank, spot):
            (self._folder / "death").touch()
            if death.delay_s:
                threading.Timer(death.delay_s, os.kill, (os.getpid(), death.signal)).start()
            else:
                os.kill(os.getpid(), death.signal)

    def count(self, name: str) -> None:
        """The same for calls without distinct names: each gets a number."""
        with self._lock:
            number = self._seen[name] = self._seen.get(name, 0) + 1
        self.pass_by(f"{name} {number}")


class SpottedStore(dist.Store):
    """A store whose calls are spots."""

    def __init__(self, store: dist.Store, spots: Spots) -> None:
        super().__init__()
        self._store, self._spots = store, spots
        self._asked: dict[str, list[str]] = {}
        self.set_timeout(timedelta(seconds=60))

    def _pass(self, name: str, key: str) -> None:
        # Names that differ from run to run; of ranks' addresses, which the first asked for is.
        known = re.sub("[0-9a-f]{8,}", "#", key)
        series = re.sub("/[0-9]+$", "/rank", known)
        if series != known:
            asked = self._asked.setdefault(f"{name} {series}", [])
            if key not in asked:
                asked.append(key)
            known = f"{series} {asked.index(key)}"
        self._spots.pass_by(f"store.{name} {known}")

    def set(self, key: str, value: Any) -> None:
        self._pass("set", key)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._pass("get", key)
        return self._store.get(key)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._pass("compare_set", key)
        return self._store.compare_set(key, expected, desired)

    def add(self, key: str, amount: int) -> int:
        self._pass("add", key)
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self._pass("check", keys[0])
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._pass("wait", keys[0])
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    deleteKey = delete_key

    def num_keys(self) -> int:
        return self._store.num_keys()

    def has_extended_api(self) -> bool:
        return False


Program = Callable[[Path, int, int, dist.Store, Spots], Any]


def _rank(program: Program, folder: Path, rank: int, num_ranks: int, port: int, death: Death | None) -> None:
    stacks = open(folder / f"stacks-{rank}", "w")  # noqa: SIM115  for life
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.dup2(os.open(folder / f"err-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    spots = Spots(folder, rank, death)
    for name in CALLS:
        setattr(dist, name, _spotted(getattr(dist, name), f"dist.{name}", spots))
    store = SpottedStore(dist.TCPStore("127.0.0.1", port, is_master=False), spots)
    found: dict[str, Any] = {"error": "", "bases": [], "text": "", "result": None}
    try:
        found["result"] = program(folder, rank, num_ranks, store, spots)
    except Exception as error:  # noqa: BLE001  the test looks at it
        bases = [base.__name__ for base in type(error).__mro__]
        found.update(error=bases[0], bases=bases, text=_all_texts(error))
    found["threads"] = [thread.name for thread in threading.enumerate()]
    (folder / f"end-{rank}").write_text(json.dumps(found))
    sys.exit(1 if found["error"] else 0)  # once all threads but daemons have ended


def _spotted(call: Callable[..., Any], name: str, spots: Spots) -> Callable[..., Any]:
    def passing(*args: Any, **kwargs: Any) -> Any:
        spots.count(name)
        return call(*args, **kwargs)

    return passing


def _all_texts(error: BaseException) -> str:
    texts = []
    each: BaseException | None = error
    while each is not None:
        texts += [str(each), *each.__dict__.get("__notes__", [])]
        each = each.__cause__ or each.__context__
    return "\n".join(texts)


def launch(
    program: Program, folder: Path, num_ranks: int, death: Death | None = None, *, limit_s: float = 60
) -> dict[int, End]:
    """Run a program on some ranks. Returns how each rank but the killed one ended; no process is left running.

    A stalled rank continues when the others have ended, and must end too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = forkserver()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: dict[int, BaseProcess] = {}
    try:
        for rank in range(num_ranks):
            arguments = (program, folder, rank, num_ranks, store.port, death)
            ranks[rank] = context.Process(target=_rank, args=arguments, daemon=True)
            ranks[rank].start()
        deadline_s = time.monotonic() + limit_s
        stalled = death.rank if death is not None and death.signal == signal.SIGSTOP else None
        _join([process for rank, process in ranks.items() if rank != stalled], deadline_s)
        if stalled is not None:
            os.kill(ranks[stalled].pid or 0, signal.SIGCONT)
            _join([ranks[stalled]], max(deadline_s, time.monotonic() + 20))
        stacks_of(
            (process.pid, folder / f"stacks-{rank}")
            for rank, process in ranks.items()
            if process.exitcode is None and process.pid is not None
        )
        return {rank: _end(folder, rank, process) for rank, process in ranks.items()}
    finally:
        for process in ranks.values():
            process.kill()
            process.join()


def _join(processes: list[BaseProcess], deadline_s: float) -> None:
    living = list(processes)
    while living and (left_s := deadline_s - time.monotonic()) > 0:
        wait([process.sentinel for process in living], left_s)
        living = [process for process in living if process.exitcode is None]


def _end(folder: Path, rank: int, process: BaseProcess) -> End:
    file, stacks = folder / f"end-{rank}", folder / f"stacks-{rank}"
    if process.exitcode is None or not file.exists():
        return End(process.exitcode, "", [], stacks.read_text() if stacks.exists() else "", None, [])
    return End(process.exitcode, **json.loads(file.read_text()))


def spots_of(program: Program, folder: Path, num_ranks: int, rank: int) -> list[str]:
    """The calls of a rank, if only the program itself kills ranks."""
    ends = launch(program, folder, num_ranks)
    assert ends[rank].exit_code == 0, ends
    return (folder / f"spots-{rank}").read_text().splitlines()
