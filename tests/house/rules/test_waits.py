"""Every wait of the package ends: its call carries a time-out, or stands here with what ends it. Tests wait for
conditions, with a deadline.

Found by parsing the sources. Collectives that a call itself waits for (``dist.all_reduce(..)``) end with the time-out
of their process group, and are not listed. Bounds are reached in ``tests/vescale_fsdp/elastic/test_formation.py``
(ranks that are stalled), ``test_store_membership.py`` (stores that are) and the tests named below.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]

# Waits without an argument that says for how long.
_ENDLESS = {"wait", "join", "result", "exception", "get", "acquire", "accept", "recv", "communicate", "pause"}
# Calls that wait unless one says how long, by the place of that argument among those without a name.
_TIMED = {
    "create_connection": 1,
    "urlopen": 2,
    "as_completed": 1,
    "run": None,
    "check_output": None,
    "check_call": None,
    "call": None,
}
_MODULES = {"subprocess", "socket", "urllib", "request", "futures"}  # of `_TIMED`, where they are attributes

GROUP = "the time-out of the process group: test_formation.py, tests/checkpoint/ranks/test_coordinators.py"
SAVE = "a save or a read under way, which ends with its group's and its storage's: test_remote_storage.py"
THREAD = "a thread of this process that computes, or writes what the caller would"
DEVICE = "work that this process has given its device"
DONE = "nothing: it has ended already"
MEMBERS = "StoreMembership(timeout_s=): test_store_membership.py"
IDLE = "the end of its object or process: a daemon, for which nothing waits"

BOUNDS: dict[str, dict[str, str]] = {
    "vescale_fsdp/transfer/transfer.py": {"stream.record_event().synchronize()": DEVICE},
    "checkpoint/manager.py": {
        "handle.exception()": SAVE,
        "handle.wait()": SAVE,
        "self._ram.wait()": GROUP,
        "self.wait()": SAVE,
    },
    "checkpoint/memory/ram_tier.py": {"copies.exception()": GROUP},
    "checkpoint/ranks/background.py": {"job.future.exception()": DONE, "queue.get()": IDLE},
    "checkpoint/ranks/exchange.py": {"ahead.popleft().result()": SAVE},
    "checkpoint/ranks/roll_call.py": {"work.wait()": GROUP},
    "checkpoint/ranks/threads.py": {"ended.wait()": THREAD, "self._pending.popleft().result()": THREAD},
    "checkpoint/async_save.py": {
        "self._job.future.exception()": SAVE,
        "self._job.future.result()": DONE,
        "self.wait()": SAVE,
        "wait([self._last.future])": SAVE,
    },
    "checkpoint/native/write.py": {"stream.record().synchronize()": DEVICE},
    "checkpoint/manifest/zarr_layout.py": {"thread.submit(asyncio.run, coroutine).result()": THREAD},
    "checkpoint/native/zarr_live.py": {"workers.wait()": THREAD},
    "checkpoint/state/host_copies.py": {"busy.synchronize()": DEVICE, "event.synchronize()": DEVICE},
    "checkpoint/storage/first_answer.py": {
        "answer.exception()": SAVE,
        "answer.result()": SAVE,
        "connection.exception()": DONE,
        "looked_up.exception()": DONE,
        "looked_up.result()": SAVE,
        "made.result()": DONE,
    },
    "checkpoint/storage/lock_file.py": {"renewing.join()": SAVE},
    "checkpoint/storage/remote.py": {
        "part.result()": SAVE,
        "self._parts[number - 1 - _IN_FLIGHT].result()": SAVE,
    },
    "conversion/formats/huggingface/write_from_ranks.py": {
        "write.result()": THREAD,
        "written.result()": THREAD,
    },
    "vescale_fsdp/collectives/interruptible.py": {"answer.result()": GROUP, "self.calls.get()": IDLE},
    "vescale_fsdp/collectives/slice_exchange.py": {
        "self.calls.get()": IDLE,
        "self.result()": GROUP,
        "work.wait()": GROUP,
    },
    "vescale_fsdp/dtensor/ragged_dtensor.py": {
        "self._move.wait()": GROUP,
        "Redistribution(steps).wait()": GROUP,
    },
    "vescale_fsdp/dtensor/operators/combining.py": {"each.wait()": GROUP},
    "vescale_fsdp/dtensor/redistribute.py": {"start_redistribution(local, source, target).wait()": GROUP},
    "vescale_fsdp/elastic/job.py": {"self._manager.wait()": SAVE, "self._membership.wait()": MEMBERS},
    "vescale_fsdp/elastic/store_server.py": {"signal.pause()": IDLE},
    "vescale_fsdp/optim/muon.py": dict.fromkeys(
        ("arrived.wait()", "before.wait()", "scattering.wait()"), GROUP
    ),
    "vescale_fsdp/runtime/comm/streams.py": {"self._module.synchronize(self._device)": DEVICE},
    "vescale_fsdp/runtime/comm/unsharded_grads.py": {"self.wait()": GROUP},
    "vescale_fsdp/runtime/comm/order_watch.py": {
        "looking.join()": THREAD,
        "message.event.synchronize()": GROUP,
    },
    "vescale_fsdp/runtime/comm_context.py": {
        "event.synchronize()": DEVICE,
        "flags.wait()": GROUP,
        "reduced.wait()": GROUP,
    },
    "vescale_fsdp/runtime/fsdp_module.py": {"handle.wait()": GROUP},
    "vescale_fsdp/runtime/schedule.py": {
        "self.comm.streams.synchronize()": DEVICE,
        "self.start_finalizing(is_last=self.is_last_backward).wait()": GROUP,
    },
    "vescale_fsdp/runtime/self_gathering_group.py": {"work.wait()": GROUP},
}


def _is_endless(call: ast.Call) -> bool:
    keywords = {keyword.arg for keyword in call.keywords}
    if keywords & {"timeout", "timeout_s"}:
        return False
    match call.func:
        case ast.Attribute(attr="flock" | "lockf"):
            return not any(flag in ast.unparse(call) for flag in ("LOCK_NB", "LOCK_UN"))
        case ast.Attribute(attr="synchronize"):
            return True
        case ast.Attribute(attr="recv"):
            return not ast.unparse(call.func).startswith("dist.")
        case ast.Attribute(attr=name) if name in _ENDLESS:
            return not call.args and "blocking" not in keywords
        case ast.Attribute(value=ast.Name(id=module), attr=name) if module in _MODULES and name in _TIMED:
            place = _TIMED[name]
            return place is None or len(call.args) <= place
        case ast.Name(id="wait"):  # of concurrent.futures
            return len(call.args) < 2
        case ast.Name(id="urlopen" | "create_connection" | "as_completed" as name):
            return len(call.args) <= (_TIMED[name] or 0)
    return False


def _waits() -> Iterator[tuple[str, str]]:
    for folder in ("vescale_fsdp", "checkpoint", "conversion"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if any(parent.is_symlink() for parent in path.parents):
                continue
            name = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and _is_endless(node):
                    yield name, ast.unparse(node)


def test_every_wait_has_a_bound() -> None:
    """Each is known, with what ends it."""
    found = set(_waits())
    assert found
    assert found - {(path, wait) for path, waits in BOUNDS.items() for wait in waits} == set()


# Files of tests that pause for a fixed time, and why. Others call `wait_until`.
PAUSES = {
    "support/processes.py": "between two looks at a condition",
    "support/distributed.py": "between two looks at a condition; a thread of a worker",
    "support/faults/stream_storage.py": "slow writes, of which tests show what runs meanwhile",
    "support/faults/faulty_storage.py": "slow writes, of which tests show what runs meanwhile",
    "support/s3_server.py": "slow answers, of which tests count those under way at once",
    "house/test_distributed_harness.py": "a rank that hangs is what is tested",
    "vescale_fsdp/elastic/test_connections.py": "a thread that must not act again has the time in which it would",
    "vescale_fsdp/transfer/test_joint_ranks.py": "a rank that connects slowly is what is tested",
    "checkpoint/jobs/test_killed_jobs.py": "a kill at a random moment is what is tested",
    "checkpoint/save/test_faults.py": "a kill at a random moment is what is tested",
}


@cache
def _calls_of_tests() -> list[tuple[str, set[str], ast.Call]]:
    """All calls in the tests: the file, the names that the function is called by, and the call."""
    folder = ROOT / "tests"
    return [
        (path.relative_to(folder).as_posix(), _names_of(node.func), node)
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]


def _names_of(function: ast.expr) -> set[str]:
    """Of ``time.sleep``: ``sleep`` and ``time.sleep``."""
    match function:
        case ast.Name(id=name):
            return {name}
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return {name, f"{module}.{name}"}
        case ast.Attribute(attr=name):
            return {name}
    return set()


def _calls_in_tests(name: str) -> Iterator[tuple[str, ast.Call]]:
    return ((file, call) for file, names, call in _calls_of_tests() if name in names)


def test_no_test_waits_for_a_fixed_time() -> None:
    """A time that is enough on one machine is too short on another."""
    assert {file for file, _ in _calls_in_tests("time.sleep")} == PAUSES.keys()


def test_commands_of_tests_have_a_deadline() -> None:
    """At which they show stacks, as `run_command` does."""
    assert {file for file, call in _calls_in_tests("subprocess.run") if _is_endless(call)} == set()


# Files of tests that receive from a pipe, join or ask for a result without a deadline, and what ends that wait.
UNBOUNDED = {
    "support/processes.py": "after a poll with a deadline",
    "support/distributed.py": "a worker's next call; it ends with its parent",
    "checkpoint/save/test_faults.py": "after a poll: what a killed process had sent",
    "checkpoint/steps/test_rollback.py": "a process that lives until it is killed",
    "vescale_fsdp/elastic/formation.py": "after a kill",
    "vescale_fsdp/elastic/killed_ranks.py": "after a kill",
}


def test_processes_and_threads_of_tests_are_waited_for_with_a_deadline() -> None:
    """One that hangs fails its own test, instead of stopping the whole run."""
    found = {
        file
        for name in ("recv", "join", "result")
        for file, call in _calls_in_tests(name)
        if not call.args and _is_endless(call)
    }
    assert found == UNBOUNDED.keys()


def test_what_counts_as_a_wait() -> None:
    """Calls of each kind, with a bound and without."""
    endless = ("e.wait()", "t.join()", "q.get()", "f.result()", "s.accept()", "wait(fs)", "subprocess.run(c)")
    bounded = ("e.wait(3)", "','.join(x)", "d.get('k')", "f.result(timeout=1)", "wait(fs, 3)", "k.run()")
    endless += ("fcntl.flock(f, LOCK_EX)", "socket.create_connection(a)")
    bounded += (
        "fcntl.flock(f, LOCK_EX | LOCK_NB)",
        "socket.create_connection(a, 3)",
        "subprocess.run(c, timeout=3)",
    )
    for texts, expected in ((endless, True), (bounded, False)):
        for text in texts:
            (call,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
            assert _is_endless(call) is expected, text
