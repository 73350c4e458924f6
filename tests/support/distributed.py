"""`run_ranks`: call a function on n gloo ranks, in worker processes that live for the whole test session.

Importing torch costs seconds, so ranks are forked from one server process that has imported it already
(multiprocessing's "forkserver"), and are kept. Every call gets a process group of its own:

    parent                               worker r (one per rank)
    pickle (fn, args)        ------->    init_process_group(gloo, new key prefix), seed 0, 1 thread
    wait for all, time-out               fn(*args), wait until all ranks returned or one failed
    results in rank order    <-------    destroy_process_group, result or traceback

What goes wrong ends in one failed test and nothing else: an exception comes back with the rank's traceback
(`RankError`), a hang ends in the stacks of all threads of all ranks (`RankTimeout`), and in both cases the
workers are killed by pid and forked anew for the next call. Workers exit when their parent is gone.

`fn` must be a module-level function (it is pickled by name); it asks `dist.get_rank()` who it is. `tmp_path`
may be passed as an argument: all ranks see the same folder. What it returns must be picklable.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import _redistribute, debug
from torch.testing._internal.distributed import multi_threaded_pg

from tests.support.faults.nan_memory import nan_memory_if_asked
from tests.support.faults.rounding_noise import noise_if_asked

if torch.__version__ < "2.12":  # the group of threads lacks this list, which `destroy_process_group` empties
    multi_threaded_pg.ThreadLocalWorld.comms = []  # type: ignore[attr-defined]

_PRELOAD = (
    "pytest",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "tests.support.distributed",
)
_GRACE_S = 30.0  # how long ranks may go on after one of them has failed, before the pool is killed
_KILLED_S = 10.0  # how long a killed process may take to end
_LAST_ANSWERS_S = 2.0  # how long the ranks that returned may take to say so after one has hung
# Of a worker. Some calls leave groups behind, such as those of a module whose hook keeps a result of its parameters: a
# cycle through torch's C++ objects, which is never collected. Each group has three threads, one of which wakes 100
# times a second. After two hours of tests two workers had 147 groups each, and the kernel took 42 % of the processors.
_MOST_THREADS = 64
_CLOSE = "close"  # the key that lets the ranks of a call destroy their process group
_DUMP_S = 5.0  # how long a signalled worker may take to write its stacks


class RankError(AssertionError):
    """A rank raised; the text names the rank and holds its traceback, `rank` is its number."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


class RankTimeout(AssertionError):
    """Some ranks did not return in time; the text holds the stacks of all threads of all ranks."""


class _Worker(NamedTuple):
    """One rank's process, the parent's end of its pipe, and the file its stacks go to."""

    process: BaseProcess
    pipe: Connection
    stack_file: Path


class _Failure(NamedTuple):
    """Why a rank failed, and when: what fails first is the cause, what fails after it a victim."""

    at_s: float  # time.monotonic(), the same clock for all processes of a machine
    text: str


class _Call(NamedTuple):
    """What a worker needs to know for one call, apart from the pickled function and arguments."""

    sys_path: list[str]
    store_port: int
    store_prefix: str
    rank: int
    world_size: int
    timeout_s: float
    backend: Callable[[], str]


def _gloo() -> str:
    return "gloo"


def cpu_mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A device mesh over all ranks of the current call (1-D unless a shape is given), made once in a call.

    Cases of one call share a mesh: DTensor remembers results by equal meshes, `fully_shard` compares by identity.
    """
    return _mesh(dist.group.WORLD, shape or (dist.get_world_size(),), names)


@lru_cache
def _mesh(
    world: dist.ProcessGroup | None, shape: tuple[int, ...], names: tuple[str, ...] | None
) -> DeviceMesh:
    """A mesh over a world: of a call, or of a thread that is a rank."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 180.0) -> list[Any]:
    """Call ``fn(*args)`` on every one of ``world_size`` gloo ranks.

    Args:
        world_size: number of ranks, at least 1.
        fn: a module-level function.
        args: picklable; the same for every rank.
        timeout_s: seconds until the stacks are dumped and the workers killed.

    Returns:
        What ``fn`` returned, in rank order.

    Raises:
        RankError: if ``fn`` raised on some rank (the first one to fail is named, others are listed).
        RankTimeout: if some rank did not return in time.
    """
    return _pool.run(world_size, fn, args, timeout_s)


def run_cases(
    world_size: int, fn: Callable[..., Any], cases: Sequence[tuple[Any, ...]], timeout_s: float = 180.0
) -> list[list[Any]]:
    """Call ``fn(*case)`` for every case, within one call of `run_ranks`.

    A case takes less than in a call of its own: DTensor remembers how it computes on a mesh, and the processor's caches
    are warm. An error of a rank names the case.

    Returns:
        For every case, what ``fn`` returned, in rank order.
    """
    by_rank = run_ranks(world_size, _each, fn, cases, timeout_s=timeout_s)
    return [list(results) for results in zip(*by_rank, strict=True)]


def _each(fn: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    results = []
    for case in cases:
        torch.manual_seed(0)
        try:
            results.append(fn(*case))
        except BaseException as error:
            error.add_note(f"in case {case}")
            raise
    return results


def forkserver() -> ForkServerContext:
    """Return what starts processes from one that has imported torch, and nothing of this package.

    Python has one such server in a process, with the modules that were set first: so all tests use this.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    return context


def run_fresh(fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> None:
    """Call ``fn(*args)`` in a process of its own, which has imported torch and nothing of this package.

    It starts in hundredths of a second, where a new interpreter takes seconds.

    Args:
        fn: a function that is pickled by name: its module is imported in the process. ``exec`` takes source.

    Raises:
        AssertionError: if the process does not end with status 0 in time; its traceback is on stderr.
    """
    process = forkserver().Process(target=fn, args=args, daemon=True)
    process.start()
    process.join(timeout_s)
    status = process.exitcode
    process.kill()
    assert status == 0, f"{fn.__qualname__} ended with {status}" if status else f"no end in {timeout_s} s"


def close_pool() -> None:
    """End all workers; the next call forks new ones."""
    for pool in _pools:
        pool.close()


def run_threads(world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """The same with threads of this process as ranks: torch's threaded process group, collectives as NCCL spells them.

    It starts in hundredths of a second. ``fn`` need not be picklable, and may not count on what a process has one of
    (seeds, warnings' filters).

    Raises:
        RankError: as `run_ranks`.
        RankTimeout: as `run_ranks`; ranks that wait for others end, a rank that computes on is left behind.
    """
    group = multi_threaded_pg.ProcessLocalGroup
    results: dict[int, Any] = {}
    errors: dict[int, _Failure] = {}
    store = dist.HashStore()

    def rank_of(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            try:
                results[rank] = fn(*args)
            finally:
                dist.destroy_process_group()
        except BaseException as error:  # noqa: BLE001  whatever it is, it belongs to the test that caused it
            if rank not in results:
                errors[rank] = _Failure(time.monotonic(), traceback.format_exc())
            group.exception_handle(error)  # wakes ranks that wait for this one

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(world_size)]
    multi_threaded_pg._install_threaded_pg()
    isolate_threads = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate_threads(True)
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        missing = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        stacks = "".join(
            f"rank {rank}:\n{''.join(traceback.format_stack(sys._current_frames()[threads[rank].ident]))}"
            for rank in missing
        )
        if missing:
            group.exception_handle(TimeoutError())
            for thread in threads:
                thread.join(1.0)
    finally:
        group.reset()
        isolate_threads(False)
        multi_threaded_pg._uninstall_threaded_pg()
        _forget_meshes()
    if errors and not missing:
        raise _rank_error(errors, [], "")
    if missing:
        who = f"ranks {missing} of {world_size}"
        raise RankTimeout(f"{who} did not return from {fn.__qualname__} in {timeout_s} s\n{stacks}")
    return [results[rank] for rank in range(world_size)]


class Pool:
    """The workers, and the key-value store over which they meet.

    Args:
        backend: called in each worker before a call; returns the backend of the call's process group.
    """

    def __init__(self, backend: Callable[[], str] = _gloo) -> None:
        self._backend = backend
        _pools.append(self)
        self._context = forkserver()
        self._workers: list[_Worker] = []
        self._store: dist.TCPStore | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_calls = 0

    def run(
        self, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
    ) -> list[Any]:
        payload = pickle.dumps((fn, args))
        self._grow(world_size)
        assert self._store is not None
        self._num_calls += 1
        workers = self._workers[:world_size]
        for rank, worker in enumerate(workers):
            call = _Call(
                sys.path, self._store.port, self._prefix(), rank, world_size, timeout_s, self._backend
            )
            worker.pipe.send(call)
            worker.pipe.send_bytes(payload)
        results, errors = self._collect(workers, timeout_s)
        if len(results) == world_size:
            if any(num_threads(worker.process) > _MOST_THREADS for worker in workers):
                self.close()  # the next call begins with new ones
            return [results[rank] for rank in range(world_size)]
        missing = [rank for rank in range(world_size) if rank not in results and rank not in errors]
        stacks = self._dump_stacks(workers) if missing else ""
        self.close()
        if errors:
            raise _rank_error(errors, missing, stacks)
        who = f"ranks {missing} of {world_size}"
        raise RankTimeout(f"{who} did not return from {fn.__qualname__} in {timeout_s} s\n{stacks}")

    def _prefix(self) -> str:
        """What the keys of the current call start with."""
        return f"call{self._num_calls}"

    def _grow(self, world_size: int) -> None:
        """Fork workers until there is one per rank."""
        if self._store is None or self._folder is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            stack_file = Path(self._folder.name) / f"rank{len(self._workers)}"
            process = self._context.Process(
                target=_serve, args=(theirs, str(stack_file), os.getpid()), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, stack_file))

    def _collect(
        self, workers: list[_Worker], timeout_s: float
    ) -> tuple[dict[int, Any], dict[int, _Failure]]:
        """Results and failures by rank, until all are in or time is up."""
        assert self._store is not None
        results: dict[int, Any] = {}
        errors: dict[int, _Failure] = {}
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        deadline, is_late = time.monotonic() + timeout_s, False
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and is_late:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                answer = _receive(pipe, workers[rank].process)
                if isinstance(answer, _Failure):
                    errors[rank] = answer
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                else:
                    results[rank] = answer
            if not is_late and (errors or not ready):
                # Those that returned wait for those that failed, died or hang no longer.
                dist.PrefixStore(self._prefix(), self._store).set(_CLOSE, "")
                is_late, deadline = True, max(deadline, time.monotonic() + _LAST_ANSWERS_S)
        return results, errors

    def _dump_stacks(self, workers: list[_Worker]) -> str:
        """Ask every worker for the stacks of its threads, and wait until they are written."""
        for worker in workers:
            if worker.process.is_alive() and worker.process.pid is not None:
                os.kill(worker.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_S
        sizes: list[int] = []
        while time.monotonic() < deadline:
            time.sleep(0.2)
            before, sizes = (
                sizes,
                [worker.stack_file.stat().st_size for worker in workers if worker.process.is_alive()],
            )
            if sizes == before and all(sizes):
                break
        return "\n".join(
            f"--- stacks of rank {rank} ---\n{worker.stack_file.read_text()}"
            for rank, worker in enumerate(workers)
            if worker.stack_file.exists()
        )

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(_KILLED_S)
            worker.pipe.close()
        self._workers.clear()
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def num_threads(process: BaseProcess) -> int:
    """How many threads a process has; 0 where there is no ``/proc``."""
    return len(list(Path(f"/proc/{process.pid}/task").glob("*")))


def _receive(pipe: Connection, process: BaseProcess) -> Any:
    """What a worker sent, or a `_Failure` if it is gone."""
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        process.join(1.0)
        return _Failure(0.0, f"the process died with exit code {process.exitcode}")  # never a victim


def _rank_error(errors: dict[int, _Failure], missing: list[int], stacks: str) -> RankError:
    """One error out of all failed ranks; the first to fail is the cause, the rest its victims."""
    first, *others = sorted(errors, key=lambda rank: errors[rank].at_s)
    lines = [f"rank {first} failed:\n{errors[first].text}"]
    lines += [
        f"rank {rank} failed after that: {errors[rank].text.strip().splitlines()[-1]}" for rank in others
    ]
    if missing:
        lines.append(f"ranks {missing} did not return within {_GRACE_S} s after that\n{stacks}")
    return RankError(first, "\n".join(lines))


_pools: list[Pool] = []
_pool = Pool()
atexit.register(close_pool)


def _serve(pipe: Connection, stack_file: str, parent_pid: int) -> None:
    """A worker's life: take a call, run it, send back what it returned or its traceback."""
    stacks = open(stack_file, "w")  # noqa: SIM115  (faulthandler keeps its file number for life)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=_die_with_parent, args=(parent_pid,), daemon=True).start()
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])  # host names need not resolve
    torch.set_num_threads(1)
    gc.freeze()  # what torch brought is not looked at after every call
    while True:
        try:
            call = pipe.recv()
            payload = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            return
        answer = _answer(call, payload)
        # Once all frames of the call are gone, which keep its models: what is frozen while it is still in use is never
        # collected, and with it the threads and sockets of its groups, which slow down all later calls.
        gc.collect()
        gc.freeze()  # what stays is modules and caches: later collections, 50 ms each by then, need not look at it
        pipe.send_bytes(answer)


def _answer(call: _Call, payload: bytes) -> bytes:
    """Run one call; what it returns, or a `_Failure`, pickled."""
    try:
        sys.path[:] = call.sys_path  # pytest adds folders as it collects
        fn, args = pickle.loads(payload)
        with _process_group(call) as store, nan_memory_if_asked(), noise_if_asked():
            try:
                torch.manual_seed(0)
                # Ranks of former calls that were fewer may have set a seed, which the others have not.
                import vescale_fsdp  # here: `run_fresh` forks processes that have not imported it

                vescale_fsdp.set_rng_state((None, 0))
                answer = pickle.dumps(fn(*args))
                _wait_for_all(store, call)
                return answer
            except BaseException:  # noqa: BLE001  whatever it is, it belongs to the test that caused it
                # Before the connections close, which makes the other ranks fail as well.
                return pickle.dumps(_Failure(time.monotonic(), traceback.format_exc()))
    except BaseException:  # noqa: BLE001  as above
        return pickle.dumps(_Failure(time.monotonic(), traceback.format_exc()))


@lru_cache(maxsize=1)
def _client(store_port: int) -> dist.TCPStore:
    """This worker's connection to the store, kept: every dozenth new one takes 5 s (torch 2.13, loopback)."""
    return dist.TCPStore("127.0.0.1", store_port, is_master=False)


def _wait_for_all(store: dist.Store, call: _Call) -> None:
    """Return when every rank has come here, or one has failed.

    A rank that closes its connections while another still builds a group over them (gloo, torch 2.13) ends the
    other's `new_group` with "Connection closed by peer": one pause of a rank at the wrong moment is enough, in
    a test that makes a mesh and communicates no more.
    """
    if store.add("returned", 1) == call.world_size:
        store.set(_CLOSE, "")
    store.wait([_CLOSE], timedelta(seconds=call.timeout_s + 60))


@contextmanager
def _process_group(call: _Call) -> Iterator[dist.Store]:
    """A default process group for one call and the store it met over; closing it wakes ranks that wait for this one."""
    store = dist.PrefixStore(call.store_prefix, _client(call.store_port))
    dist.init_process_group(
        call.backend(),
        store=store,
        rank=call.rank,
        world_size=call.world_size,
        timeout=timedelta(seconds=call.timeout_s + 60),  # a hang is ours to report, not gloo's
    )
    try:
        yield store
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear what DTensor remembers: it decides by mesh, and the next call's equal mesh has other groups.

    Who remembers a mesh also keeps the threads and sockets of its groups, hundreds of them by the end of a session.
    """
    _mesh.cache_clear()
    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


def _die_with_parent(parent_pid: int) -> None:
    """Leave when the test session is gone, even if the main thread hangs in a collective."""
    while True:
        time.sleep(1.0)
        try:
            os.kill(parent_pid, 0)
        except ProcessLookupError:
            os._exit(1)
