"""The harness itself: what a hung, dying or failing rank does to its test, and to the next one."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import RankError, RankTimeout, cpu_mesh, run_cases, run_fresh, run_ranks
from tests.support.processes import run_command, wait_until


def _rank_and_sum(base: int) -> tuple[int, int, int]:
    total = torch.tensor([base + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


def _return_hang_or_wait() -> None:
    """Rank 0 returns, rank 1 hangs, rank 2 waits for it in a collective."""
    if dist.get_rank() == 1:
        time.sleep(300)
    if dist.get_rank() == 2:
        dist.recv(torch.zeros(1), src=1)


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("planted")
    dist.barrier()


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def _write_own_file(folder: Path) -> int:
    (folder / f"rank{dist.get_rank()}").write_text("here")
    dist.barrier()
    return len(list(folder.iterdir()))


def _pid_and_threads() -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


_kept: list[threading.Thread] = []


def _leave_threads(number: int) -> int:
    for _ in range(number):
        _kept.append(threading.Thread(target=threading.Event().wait, daemon=True))
        _kept[-1].start()
    return os.getpid()


def _mesh_shape() -> tuple[int, ...]:
    return tuple(cpu_mesh(2, 2, names=("replicate", "shard")).shape)


def _case(rank: int) -> tuple[int, float, bool]:
    if dist.get_rank() == rank:
        raise ValueError("planted")
    return dist.get_rank(), float(torch.rand(())), cpu_mesh() is cpu_mesh()


def _random_number() -> float:
    return float(torch.rand(()))


def test_results_come_in_rank_order() -> None:
    """Each rank runs the function with the arguments, in one process group of the asked size."""
    assert run_ranks(1, _rank_and_sum, 10) == [(0, 1, 10)]
    assert run_ranks(4, _rank_and_sum, 10) == [(rank, 4, 46) for rank in range(4)]


def test_workers_are_kept_and_single_threaded() -> None:
    """Two calls reach the same processes, which use one thread each."""
    first = run_ranks(2, _pid_and_threads)

    assert run_ranks(2, _pid_and_threads) == first
    assert len({pid for pid, _ in first} | {os.getpid()}) == 3
    assert [threads for _, threads in first] == [1, 1]


def test_workers_that_keep_threads_are_replaced() -> None:
    """By the next call, of all ranks; a few threads do not matter."""
    before = run_ranks(2, _leave_threads, 2)
    assert run_ranks(2, _leave_threads, 64) == before
    after = run_ranks(2, _leave_threads, 0)
    assert set(after).isdisjoint(before) and not any(map(psutil.pid_exists, before))


def test_every_call_starts_from_the_same_seed() -> None:
    """Random numbers do not depend on which tests ran before, nor on the rank."""
    first = run_ranks(2, _random_number)

    assert first[0] == first[1]
    assert run_ranks(2, _random_number) == first


def test_ranks_share_the_tests_folder(tmp_path: Path) -> None:
    """A tmp_path handed over is one folder for all ranks."""
    assert run_ranks(3, _write_own_file, tmp_path) == [3, 3, 3]


def test_mesh_helper_gives_two_axes() -> None:
    """cpu_mesh makes an HSDP mesh when asked."""
    assert run_ranks(4, _mesh_shape) == [(2, 2)] * 4


def test_cases_share_a_call_and_a_failure_names_its_case() -> None:
    """Results come case by case, each from the same seed; one mesh serves a call."""
    (first, second) = run_cases(2, _case, [(-1,), (-2,)])

    assert [rank for rank, _, _ in first] == [0, 1] and first == second
    assert all(is_one for _, _, is_one in first)
    with pytest.raises(RankError) as caught:
        run_cases(2, _case, [(-1,), (1,)])
    assert caught.value.rank == 1 and "(1,)" in str(caught.value)


def test_a_fresh_process_has_torch_and_nothing_of_ours() -> None:
    """Its failure is the caller's."""
    run_fresh(exec, "import sys; assert 'torch' in sys.modules and 'vescale_fsdp' not in sys.modules", {})

    with pytest.raises(AssertionError):
        run_fresh(exec, "raise SystemExit(3)", {})


def test_exception_names_its_rank_and_line() -> None:
    """The rank that raised first is named, with its traceback; the next call works."""
    with pytest.raises(RankError, match="planted") as caught:
        run_ranks(3, _raise_on, 1)

    assert caught.value.rank == 1
    assert "in _raise_on" in str(caught.value)
    assert [rank for rank, _, _ in run_ranks(3, _rank_and_sum, 0)] == [0, 1, 2]


def test_dead_process_is_reported() -> None:
    """A rank that vanishes is named with its exit code; the next call works."""
    with pytest.raises(RankError, match=r"\b7\b") as caught:
        run_ranks(2, _die_on, 1)

    assert caught.value.rank == 1
    assert len(run_ranks(2, _rank_and_sum, 0)) == 2


@pytest.mark.part("jobs")
def test_hang_ends_in_stacks_and_dead_workers() -> None:
    """A hang shows who did not return and where they stand, kills the pool, and does not spoil the next call."""
    pids = [pid for pid, _ in run_ranks(3, _pid_and_threads)]
    with pytest.raises(RankTimeout) as caught:
        run_ranks(3, _return_hang_or_wait, timeout_s=3.0)

    text = str(caught.value)
    assert "ranks [1, 2] of 3" in text
    stacks = dict(
        re.findall(r"--- stacks of rank (\d) ---\n(.*?)(?=^---|\Z)", text, re.DOTALL | re.MULTILINE)
    )
    assert ["_return_hang_or_wait" in stacks[rank] for rank in "012"] == [False, True, True]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert len(run_ranks(2, _rank_and_sum, 0)) == 2


_ORPHAN = """
import os
from tests.support.distributed import run_ranks
from tests.house.test_distributed_harness import _pid_and_threads
if __name__ == "__main__":
    print(*[pid for pid, _ in run_ranks(2, _pid_and_threads)], flush=True)
    os._exit(0)
"""


@pytest.mark.part("jobs")
def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    """A session that ends without any clean-up leaves no worker behind."""
    script = tmp_path / "orphan.py"
    script.write_text(_ORPHAN)
    root = str(Path(__file__).parents[2])
    done = run_command(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": root}, check=True, timeout_s=120
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), f"the end of {pids}", limit_s=30)
