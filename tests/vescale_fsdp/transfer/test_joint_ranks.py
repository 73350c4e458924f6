"""Two jobs that share no process group connect by a file or TCP, and one sends its weights to the other."""

from __future__ import annotations

import os
import pickle
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute_stock

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.processes import wait_until
from vescale_fsdp import RaggedShard, distribute_tensor
from vescale_fsdp.checkpoint.ranks import coordinator
from vescale_fsdp.checkpoint.ranks.coordinator import GroupCoordinator
from vescale_fsdp.checkpoint.ranks.stores import bound_store
from vescale_fsdp.errors import CheckpointError, PlacementError
from vescale_fsdp.torch_private import named_group, store_of
from vescale_fsdp.transfer.description import describe_states
from vescale_fsdp.transfer.joint_ranks import joint_ranks
from vescale_fsdp.transfer.plan import plan_transfer
from vescale_fsdp.transfer.transfer import Transfer


def two_jobs(folder: str, rendezvous: tuple[str, ...]) -> int:
    """The first two of three ranks are one job, the third is another; both number their ranks from 0."""
    rank = dist.get_rank()
    is_trainer = rank < 2
    dist.barrier()  # all have come, so none finds the others gone
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/job{int(is_trainer)}", 2 if is_trainer else 1)
    dist.init_process_group("gloo", store=store, rank=rank % 2, world_size=2 if is_trainer else 1)
    mesh = cpu_mesh()
    full = torch.arange(48.0).view(8, 6)
    sent = 0
    real, num_decided = GroupCoordinator.decide, 0

    def late(self: GroupCoordinator, name: str, *args: str) -> str:
        """Rank 0 decides first. As it has the store, its call returns when the other ranks have read the decision."""
        nonlocal num_decided
        num_decided += 1
        reading = [Path(folder, f"reads-{number}-{num_decided}") for number in range(3)]
        if rank:
            store_of(self.group).wait([name])
            reading[rank].touch()
        decision = real(self, name, *args)
        assert rank or all(path.exists() for path in reading[1:])
        return decision

    GroupCoordinator.decide = late  # type: ignore[method-assign]
    picklers = {name: getattr(dist, name) for name in dir(dist) if "_object" in name}
    for name in picklers:
        setattr(dist, name, None)
    for where in rendezvous:
        secret = "s3cret" if where.startswith("tcp") else None
        ranks = joint_ranks(
            where, first_rank=0 if is_trainer else 2, num_ranks=3, timeout_s=60, secret=secret
        )
        assert (ranks.rank, ranks.world_size) == (rank, 3)
        state = {"w": distribute_tensor(full, mesh, [RaggedShard((0,), (3, 5))])} if is_trainer else None
        into = (
            None
            if is_trainer
            else {"w": distribute_stock(full * 0, mesh, [Shard(1)]), "b": torch.zeros(8, 6)}
        )
        described = describe_states(state, into, ranks=ranks)
        plan = plan_transfer(*described, links={"b": "w"})
        Transfer(plan, ranks=ranks, verify=True).run(state, into)
        if into is not None:
            assert torch.equal(into["w"].full_tensor(), full) and torch.equal(into["b"], full)
        dist.all_reduce(torch.ones(1))  # the job's own group goes on
        assert distribute_stock(full, mesh, [Replicate()]).to_local().equal(full)
        sent += int(plan.demand.sent.sum())
        ranks.close()
        ranks.close()
    GroupCoordinator.decide = real  # type: ignore[method-assign]
    for name, pickler in picklers.items():
        setattr(dist, name, pickler)
    with pytest.raises(PlacementError, check=lambda error: error.got == "first_rank=2"):
        joint_ranks(rendezvous[0], first_rank=2, num_ranks=2)
    with pytest.raises(PlacementError, check=lambda error: error.got == "http://here"):
        joint_ranks("http://here", first_rank=0, num_ranks=2)
    return sent


def test_weights_between_two_jobs(tmp_path: Path) -> None:
    """Over a file and over TCP, one after the other, the same plan moves the weights."""
    where = (f"file://{tmp_path}/meet", f"tcp://127.0.0.1:{free_port()}")

    assert run_ranks(3, two_jobs, str(tmp_path), where) == [2 * 2 * 48 * 4] * 3


class Bomb:
    """A value that runs code when it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (self.file, "w")


def met(work: Callable[[], object]) -> str:
    """The type of the raised error, "" if none."""
    try:
        work()
    except CheckpointError:
        return "CheckpointError"
    except Exception as error:  # noqa: BLE001  the caller looks at it
        return type(error).__name__
    return ""


@mock.patch.object(coordinator, "_DOCUMENT_BYTES", 1000)
def meets_a_stranger(folder: str) -> dict[str, str]:
    """Rank 1 sends forged messages. Returns the errors of each rank, by kind of message."""
    with pytest.raises(PlacementError):  # not this machine alone, and no secret
        joint_ranks("tcp://192.0.2.1:29600", first_rank=0, num_ranks=2, timeout_s=5)
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pickled = pickle.dumps(Bomb(f"{folder}/executed"))
    recorded = b""
    found: dict[str, str] = {}
    for secret in (None, "s"):
        for kind in (
            "as it is",
            "pickle",
            "again",
            "another meeting's",
            "cut",
            "empty",
            "long",
            "deep",
            "no text",
        ):
            where = f"file://{folder}/{secret} {kind}"
            with joint_ranks(where, first_rank=rank, num_ranks=2, timeout_s=20, secret=secret) as ranks:
                seal, sent = ranks._seal, list[bytes]()

                def sealed(data: bytes) -> bytes:
                    sent.append(seal(data))  # noqa: B023  called at once
                    forged = {
                        "pickle": pickled,
                        "another meeting's": recorded if len(sent) == 2 else sent[-1],  # noqa: B023
                        "again": sent[0],  # noqa: B023
                        "cut": sent[-1][:-1],  # noqa: B023
                        "empty": b"",
                        "long": bytes(2000),
                        "deep": b"[" * 999,
                        "no text": b"\xff\xfe",
                    }
                    return forged.get(kind, sent[-1])  # noqa: B023

                if rank == 1:
                    ranks._seal = sealed  # type: ignore[method-assign]
                words = (f"first {rank}", f"second {rank}")
                found[f"{secret} {kind}"] = met(lambda: list(map(ranks.everyone, words)))  # noqa: B023
                if kind == "as it is" and rank == 1:
                    recorded = sent[-1]
    return found


def meets_one_without(folder: str, secrets: tuple[str | None, str | None], where: str) -> str:
    """Ranks with different secrets. Returns the error of this rank, which comes long before the time-out."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    where = where or f"file://{folder}/{secrets}"
    return met(
        lambda: joint_ranks(where, first_rank=rank, num_ranks=2, timeout_s=600, secret=secrets[rank]).close()
    )


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_strangers_are_not_believed(tmp_path: Path) -> None:
    """Pickles, truncated, too long and replayed messages are refused, with a secret and without."""
    ours, theirs = run_ranks(2, meets_a_stranger, str(tmp_path))

    assert not (tmp_path / "executed").exists()
    assert ours["s as it is"] == theirs["s as it is"] == ours["None as it is"] == ""
    for name, said in ours.items():
        if name not in ("s as it is", "None as it is", "None again", "None another meeting's"):
            expected = "PlacementError" if name.startswith("s") and "empty" not in name else "CheckpointError"
            assert said == ("CheckpointError" if "long" in name else expected), name
    pickle.loads(pickle.dumps(Bomb(str(tmp_path / "executed")))).close()
    assert (tmp_path / "executed").exists()  # so it would have been


@pytest.mark.parametrize("secrets", [("a", "b"), ("a", ""), ("", "a")])
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_ranks_of_different_secrets_are_all_told(tmp_path: Path, secrets: tuple[str, str], kind: str) -> None:
    """Both ranks raise, also if one has no secret."""
    where = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else ""
    assert run_ranks(2, meets_one_without, str(tmp_path), secrets, where) == ["PlacementError"] * 2


def waits_for_one_that_does_not_come(folder: str) -> str:
    """The error of rank 0 of three if rank 2 does not come."""
    dist.barrier()
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        joint_ranks(f"file://{folder}/meet", first_rank=rank, num_ranks=3, timeout_s=1)
    except CheckpointError as error:
        return str(error.got)
    return ""


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    """The error after the time-out lists them."""
    assert all("[2]" in got for got in run_ranks(2, waits_for_one_that_does_not_come, str(tmp_path)))


def misses_the_first_rank(port: int) -> list[str]:
    """Rank 1's errors where nobody hosts the store, and where its host dies while rank 1 waits for rank 2."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    said = []
    if rank == 0:
        said.append(
            met(lambda: joint_ranks(f"tcp://127.0.0.1:{port}", first_rank=1, num_ranks=3, timeout_s=1))
        )
        hosted = bound_store("127.0.0.1", port, timedelta(seconds=10))
        threading.Timer(0.5, lambda: released.pop()).start()
        released = [hosted]
        del hosted
        said.append(
            met(lambda: joint_ranks(f"tcp://127.0.0.1:{port}", first_rank=1, num_ranks=3, timeout_s=2))
        )
        assert not released
    return said


def test_a_first_rank_that_is_late_or_dies() -> None:
    """The documented error, which callers meet again after, not that of the store."""
    assert run_ranks(2, misses_the_first_rank, free_port())[0] == ["CheckpointError"] * 2


def meets_among_strangers(port: int, count: int) -> bool:
    """Rank 0 may open few files, and hosts the store, to whose port rank 1 opens silent connections before it meets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers: list[socket.socket] = []
    if dist.get_rank() == 0:
        used = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + count // 2, hard))
    else:
        wait_until(lambda: not _refuses(port), "the store")
        strangers += [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(count)]
    try:
        with joint_ranks(f"tcp://127.0.0.1:{port}", first_rank=0, num_ranks=2, timeout_s=30) as ranks:
            return ranks.world_size == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for stranger in strangers:
            stranger.close()


def _refuses(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists files in /proc")
def test_strangers_do_not_cost_a_meeting() -> None:
    """More connections to the port than rank 0 could open files when it began; 3,392 did at a limit of 1,024."""
    assert run_ranks(2, meets_among_strangers, free_port(), 600) == [True, True]


def leaves_at_once(folder: str, secret: str) -> bool:
    """Whether rank 1 is connected when rank 0 has its ranks, and so may close them and end the store."""
    connected = Path(folder, "connected")

    def late(*args: Any) -> dist.ProcessGroup:
        group = named_group(*args)
        if dist.get_rank() == 1:
            time.sleep(0.3)
            connected.touch()
        return group

    with (
        mock.patch.dict(joint_ranks.__globals__, named_group=late),
        joint_ranks(f"file://{folder}/meet", first_rank=0, num_ranks=2, timeout_s=30, secret=secret),
    ):
        return connected.exists()


@pytest.mark.parametrize("secret", ["", "s"])
def test_no_rank_is_back_before_all_are_connected(tmp_path: Path, secret: str) -> None:
    """With a secret and without."""
    assert run_ranks(2, leaves_at_once, str(tmp_path), secret) == [True, True]


def meets_often(folder: str, port: int, count: int) -> list[tuple[int, int, int]]:
    """Numbers of open files, threads and process groups after each connection. All but the first meet again by TCP."""
    found = []
    for number in range(count):
        where = f"tcp://127.0.0.1:{port}" if number else f"file://{folder}/meet"
        with joint_ranks(where, first_rank=0, num_ranks=2, timeout_s=60, secret="x") as ranks:
            ranks.raise_together(None, "meeting")
        files, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
        found.append((files, threads, len(distributed_c10d._world.pg_map)))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists files and threads in /proc")
@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.part("faults"))])
def test_a_meeting_leaves_nothing(tmp_path: Path, count: int) -> None:
    """Many connections leave no more files, threads and groups than two."""
    for found in run_ranks(2, meets_often, str(tmp_path), free_port(), count):
        files, threads, groups = zip(*found, strict=True)
        assert len(found) == count and len(set(groups)) == 1, found
        assert max(files[1:]) <= files[1] + 1 and max(threads[1:]) <= threads[1] + 1, found
