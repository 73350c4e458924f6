"""Transfers that fail: all ranks raise, and the target is complete or clearly unusable, never mixed."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partialmethod
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor as distribute_stock

from tests.support.distributed import RankError, run_ranks
from vescale_fsdp import RaggedShard, distribute_tensor
from vescale_fsdp.checkpoint.ranks import coordinator
from vescale_fsdp.checkpoint.ranks.coordinator import GroupCoordinator, SoloCoordinator, UnreachableError
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError, LifecycleError, TransferError
from vescale_fsdp.quantize import Int8Rows
from vescale_fsdp.torch_private import local_of
from vescale_fsdp.transfer import rank_transfers
from vescale_fsdp.transfer.agreement import FlatOf, SumAgreement
from vescale_fsdp.transfer.description import describe_states
from vescale_fsdp.transfer.exchange import Exchange
from vescale_fsdp.transfer.links import codes
from vescale_fsdp.transfer.memory import Destination, Origin
from vescale_fsdp.transfer.plan import TransferPlan, plan_transfer
from vescale_fsdp.transfer.transfer import Transfer

Pair = tuple[dict[str, Any] | None, dict[str, Any] | None]


def pair() -> tuple[TransferPlan, Pair]:
    """Two ranks that train and two that serve, float and integer tensors, many small messages."""
    trainer, engine = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    full = {f"w{n}": torch.randn(32, 32) for n in range(4)} | {"steps": torch.arange(64).view(8, 8)}
    state = into = None
    if dist.get_rank() < 2:
        cut = [RaggedShard((0,), (1, 3))]
        state = {name: distribute_tensor(value, trainer, cut) for name, value in full.items()}
    else:
        into = {
            name: distribute_stock(value * 0 + 7, engine, [Shard(1)], src_data_rank=None)
            for name, value in full.items()
        }
    plan = plan_transfer(*describe_states(state, into), budget_bytes=4096)
    return plan, (state, into)


def met(work: Callable[[], object]) -> BaseException | None:
    """The raised error, if any."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  the caller looks at it
        return error
    return None


def is_old(into: dict[str, Any] | None) -> bool:
    """Whether a target has its old weights."""
    return into is None or all((local_of(tensor) == 7).all() for tensor in into.values())


def is_unusable(into: dict[str, Any] | None) -> bool:
    """Whether no item of a target can be mistaken for a weight."""
    locals_ = [] if into is None else [local_of(tensor) for tensor in into.values()]
    return all((local.isnan() if local.is_floating_point() else local == -1).all() for local in locals_)


def fails_at(kind: type, method: str, calls: int) -> None:
    """Make a method fail on this rank after this number of calls."""
    real: Any = getattr(kind, method)
    seen: list[int] = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        if len(seen) > calls:
            raise ValueError("planted")
        return real(*args, **kwargs)

    setattr(kind, method, failing)


def one_rank_fails() -> None:
    """A rank that cannot pack or unpack, with and without `keep_old`."""
    plan, (state, into) = pair()
    rank = dist.get_rank()
    for kind, method, where in ((Origin, "pack", 1), (Destination, "unpack", 2)):
        for keep_old in (True, False):
            transfer, real = Transfer(plan, keep_old=keep_old), getattr(kind, method)
            for local in map(local_of, (into or {}).values()):
                local.fill_(7)
            if rank == where:
                fails_at(kind, method, 3)
            error = met(lambda: transfer.run(state, into))  # noqa: B023  called at once
            setattr(kind, method, real)
            assert isinstance(error, TransferError)
            assert isinstance(error.__cause__, ValueError if rank == where else CheckpointError), error
            assert "planted" in str(error) and f"ank {where}" in str(error)
            assert error.target == ("old" if keep_old else "unusable") and error.version is transfer.version
            assert (error.behind, error.lost) == ((2, 3), ())
            assert is_old(into) if keep_old else is_unusable(into)
            assert into is None or not (is_old(into) if not keep_old else is_unusable(into))
            transfer.run(state, into)
            assert into is None or not (is_old(into) or is_unusable(into))


def bits_flip() -> None:
    """With `verify` a message that was changed is an error on all ranks; without it, the change is not detected."""
    plan, (state, into) = pair()
    real = Destination.unpack

    def flipping(self: Destination, share: Any, data: torch.Tensor) -> None:
        if dist.get_rank() == 3:
            data = data.clone()
            data[0] ^= 1
        real(self, share, data)

    Destination.unpack = flipping  # type: ignore[method-assign]
    try:
        error = met(lambda: Transfer(plan, verify=True).run(state, into))
        assert isinstance(error, TransferError) and is_unusable(into)
        assert isinstance(error.__cause__, CorruptCheckpointError)
        assert re.search(r"\b[01]\b.*\b3\b", str(error))
        Transfer(plan).run(state, into)
    finally:
        Destination.unpack = real  # type: ignore[method-assign]
    Transfer(plan, verify=True).run(state, into)


def stored_bits_flip() -> None:
    """With `verify` a bit that flips after its message was compared is noticed on all ranks, before the version."""
    plan, (state, into) = pair()
    real = SumAgreement.numbers

    def flipping(self: SumAgreement, source: FlatOf, target: FlatOf) -> list[int]:
        if dist.get_rank() == 3:
            target(2).view(-1).view(torch.uint8)[7] ^= 1
        return real(self, source, target)

    transfer = Transfer(plan, verify=True)
    with mock.patch.object(SumAgreement, "numbers", flipping):
        error = met(lambda: transfer.run(state, into))
    assert isinstance(error, TransferError) and is_unusable(into) and transfer.version is None
    transfer.run(state, into)
    assert transfer.version == 0


def trainer_steps() -> None:
    """A source that changes during a transfer is an error; a snapshot is sent as it was."""
    plan, (state, into) = pair()
    transfer = Transfer(plan, keep_old=True)
    real = Exchange.run

    def stepping(self: Exchange, *args: Any) -> None:
        for tensor in (state or {}).values():
            if dist.get_rank() == 1:
                tensor.add_(1)  # as an optimizer does
        real(self, *args)

    Exchange.run = stepping  # type: ignore[method-assign]
    try:
        error = met(lambda: transfer.run(state, into))
        assert isinstance(error, CheckpointError) and "snapshot=True" in str(error) and is_old(into)
        before = {name: local_of(tensor).clone() for name, tensor in (state or {}).items()}
        transfer.start(state, into, snapshot=True).wait(60)
    finally:
        Exchange.run = real  # type: ignore[method-assign]
    got = {name: local_of(tensor).clone() for name, tensor in (into or {}).items()}
    for name, tensor in (state or {}).items():  # back to what it was at the snapshot
        local_of(tensor).copy_(before[name])
    transfer.run(state, into)
    for name, tensor in (into or {}).items():
        assert torch.equal(got[name], local_of(tensor)) and not (got[name] == 7).all()


def misuse() -> None:
    """States that differ from their descriptions, different plans, two runs at once, shared memory."""
    plan, (state, into) = pair()
    transfer = Transfer(plan)
    wrong = None if state is None else {**state, "w0": state["w1"].to(torch.float64)}
    error = met(lambda: transfer.run(wrong if dist.get_rank() == 0 else state, into))
    assert isinstance(error, CheckpointError) and "float64" in str(error) and is_old(into)
    missing = None if into is None else {name: into[name] for name in list(into)[1:]}
    error = met(lambda: transfer.run(state, missing if dist.get_rank() == 3 else into))
    assert isinstance(error, CheckpointError) and "w0" in str(error) and is_old(into)
    error = met(lambda: Transfer(plan, verify=dist.get_rank() == 0))
    assert isinstance(error, CheckpointError) and "verify" in str(error)
    transfer._claim(None)
    error = met(lambda: transfer.run(state, into))
    assert isinstance(error, LifecycleError)
    transfer._busy.release()
    own = {"w": torch.arange(6.0)}
    alone = plan_transfer(*describe_states(own, own))
    error = met(lambda: Transfer(alone).run(own, own))
    assert isinstance(error, CheckpointError) and "keep_old=True" in str(error)
    Transfer(alone, keep_old=True).run(own, own)
    assert own["w"].equal(torch.arange(6.0))


def plans_once() -> None:
    """A second transfer plans nothing, and allocates no memory for messages."""
    plan, (state, into) = pair()
    transfer = Transfer(plan)
    transfer.run(state, into)
    pool = transfer._pool
    assert len(pool._free) <= 8
    assert sum(len(buffer) for buffer in pool._free) <= plan.budget_bytes
    known = [buffer.data_ptr() for buffer in pool._free]

    def refuse(*args: object) -> None:
        raise AssertionError("planned again")

    real = rank_transfers.copies_between
    rank_transfers.copies_between = refuse  # type: ignore[assignment]
    try:
        transfer.run(state, into)
        handle = transfer.start(state, into)
        handle.wait(60)
        assert handle.done()
    finally:
        rank_transfers.copies_between = real
    assert sorted(known) == sorted(buffer.data_ptr() for buffer in pool._free)


def fails_on_one_rank(transfer: Transfer, call: str) -> Any:
    """Patch: one of the collectives that end a run, "finish" or "decide", is done, and then fails here."""
    name = {"finish": "raise_together", "decide": "wait_for_all"}[call]
    real: Any = getattr(GroupCoordinator, name)

    def breaking(self: GroupCoordinator, *args: Any, **kwargs: Any) -> Any:
        found = real(self, *args, **kwargs)
        if self is transfer._coordinator and "starting a transfer" not in args:
            raise UnreachableError("planted")
        return found

    return mock.patch.object(GroupCoordinator, name, breaking)


def ranks_are_lost_as_they_meet() -> None:
    """One of the last collectives fails on one rank only: all ranks commit or none does, all have the same version."""
    plan, (state, into) = pair()
    for keep_old, victim, call in (
        (True, 0, "finish"),
        (False, 3, "finish"),
        (True, 3, "decide"),
        (False, 0, "decide"),
    ):
        transfer = Transfer(plan, keep_old=keep_old, ranks=dist.new_group())
        for local in map(local_of, (into or {}).values()):
            local.fill_(7)
        fails = fails_on_one_rank(transfer, call) if dist.get_rank() == victim else nullcontext()
        with fails, mock.patch.object(coordinator, "_READERS_S", 0.1):
            error = met(lambda: transfer.run(state, into, version=5))  # noqa: B023  called at once
        outcomes: list[Any] = [None] * 4
        is_new = into is None or not (is_old(into) or is_unusable(into))
        dist.all_gather_object(outcomes, (error is None, transfer.version == 5, is_new))
        assert {outcome[:2] for outcome in outcomes} in ({(True, True)}, {(False, False)}), outcomes
        assert len({outcome[2] for outcome in outcomes[2:]}) == 1, outcomes
        assert outcomes[2][2] == outcomes[2][0]
        # If only the last collective fails, the other ranks have committed.
        assert error is None or call == "finish"
    again = Transfer(plan, ranks=dist.new_group(), version=transfer.version)
    again.run(state, into, version=20 if dist.get_rank() == 1 else None)
    assert again.version == 20
    again.run(state, into)
    assert again.version == 21


class LostStore:
    """A store whose process has ended."""

    def compare_set(self, *args: str) -> bytes:
        raise dist.DistNetworkError("planted")


def the_store_is_lost_before_all_have_read() -> None:
    """A rank that cannot read the decision raises, names both versions and keeps its own; other ranks commit."""
    plan, (state, into) = pair()
    for keep_old in (True, False):
        transfer = Transfer(plan, keep_old=keep_old, ranks=dist.new_group())
        transfer.run(state, into, version=3)
        before = [local_of(tensor).clone() for tensor in (into or {}).values()]
        for tensor in (state or {}).values():
            local_of(tensor).add_(1)
        is_cut_off = dist.get_rank() == 3
        lost = mock.patch.object(coordinator, "store_of", return_value=LostStore())
        with ExitStack() as patched:
            if is_cut_off:
                patched.enter_context(lost)
                patched.enter_context(fails_on_one_rank(transfer, "decide"))
            error = met(lambda: transfer.run(state, into, version=4))  # noqa: B023  called at once
        is_as_before = all(
            torch.equal(old, local_of(tensor))
            for old, tensor in zip(before, (into or {}).values(), strict=True)
        )
        if is_cut_off:
            assert isinstance(error, TransferError) and isinstance(error.__cause__, CheckpointError)
            assert "version 4" in str(error.__cause__.where)
            assert (error.version, error.behind) == (3 if keep_old else None, (3,))
            assert transfer.version == error.version
            assert is_as_before if keep_old else is_unusable(into)
        else:
            assert error is None and transfer.version == 4
            assert into is None or not is_as_before


def versions_differ() -> None:
    """Different versions are an error before any data is sent."""
    plan, (state, into) = pair()
    transfer = Transfer(plan)
    error = met(lambda: transfer.run(state, into, version=dist.get_rank() if state else None))
    assert isinstance(error, CheckpointError) and is_old(into) and transfer.version is None
    assert isinstance(met(lambda: transfer.run(state, into, version=-1)), ValueError)
    snapshot_fails = None if state is None else {**state, "w0": NoClone(local_of(state["w0"]))}
    error = met(
        lambda: transfer.start(snapshot_fails if dist.get_rank() == 0 else state, into, snapshot=True).wait(
            60
        )
    )
    assert isinstance(error, TransferError) and is_old(into)
    assert isinstance(error.__cause__, MemoryError if dist.get_rank() == 0 else CheckpointError)


def blocks_are_not_measured() -> None:
    """A rank that fails before anything is sent: the target that is filled in place keeps its old weights."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    full, codec = torch.randn(30, 20), Int8Rows()
    state = {
        "w": distribute_tensor(full, mesh, [RaggedShard.from_piece_numels(full.shape, [110, 90, 205, 195])])
    }
    into = {"c": torch.full(full.shape, 7, dtype=torch.int8)}
    transfer = Transfer(plan_transfer(*describe_states(state, into), links={"c": codes("w", codec)}))
    assert transfer._cut_blocks.total
    transfer.run(state, into, version=3)
    known = into["c"].clone()
    state["w"].mul_(-1)
    lacks_memory = mock.patch.object(torch.Tensor, "cpu", side_effect=MemoryError)
    with lacks_memory if dist.get_rank() == 2 else nullcontext():
        error = met(lambda: transfer.run(state, into))
    assert isinstance(error, TransferError) and (error.target, error.version) == ("old", 3)
    assert isinstance(error.__cause__, MemoryError) == (dist.get_rank() == 2)
    assert transfer.version == 3 and torch.equal(into["c"], known)
    transfer.run(state, into)
    assert transfer.version == 4 and (into["c"] != known).any()


def the_target_changes() -> None:
    """While a target is changed it has no version, in place during the messages, else while it is copied."""
    plan, (state, into) = pair()
    for keep_old in (True, False):
        seen = []
        transfer = Transfer(plan, keep_old=keep_old, version=5)
        real = Exchange.run, Destination.commit

        def note(*args: Any, real: Any) -> None:
            seen.append(transfer.version)  # noqa: B023  called at once
            real(*args)

        with (
            mock.patch.object(Exchange, "run", partialmethod(note, real=real[0])),
            mock.patch.object(Destination, "commit", partialmethod(note, real=real[1])),
        ):
            transfer.run(state, into)
        assert seen == [5 if keep_old else None, None] and transfer.version == 6


class NoClone(torch.Tensor):
    """A tensor that cannot be copied, as if memory were short."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.clone:
            raise MemoryError
        return super().__torch_function__(function, types, args, kwargs or {})


def all_faults() -> None:
    """All checks that need no killed process."""
    for check in (one_rank_fails, bits_flip, stored_bits_flip, trainer_steps, misuse, plans_once):
        torch.manual_seed(0)
        check()
    for check in (
        ranks_are_lost_as_they_meet,
        the_store_is_lost_before_all_have_read,
        versions_differ,
        blocks_are_not_measured,
        the_target_changes,
    ):
        torch.manual_seed(0)
        check()


def test_faults_are_heard_of_on_all_ranks() -> None:
    """Failures of one rank, changed bits, a trainer that steps, wrong states: an error on all ranks, no mixture."""
    run_ranks(4, all_faults, timeout_s=120)


def dies(folder: str, victim: int, keep_old: bool) -> None:
    """A rank is killed during a transfer; other ranks write their errors to files."""
    plan, (state, into) = pair()
    transfer = Transfer(plan, keep_old=keep_old)
    if dist.get_rank() == victim:
        for kind, method in ((Origin, "pack"), (Destination, "unpack")):
            real: Any = getattr(kind, method)
            seen: list[int] = []

            def dying(*args: Any, real: Any = real, seen: list[int] = seen) -> Any:
                seen.append(1)
                if len(seen) > 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args)

            setattr(kind, method, dying)
    error = met(lambda: transfer.run(state, into))
    assert isinstance(error, TransferError) and error.version is transfer.version is None
    verdict = "old" if is_old(into) else "unusable" if is_unusable(into) else "mixed"
    outcome = [
        list(error.lost),
        list(error.behind),
        error.target,
        error.target if into is None else verdict,
    ]
    Path(folder, str(dist.get_rank())).write_text(json.dumps(outcome))


class Late(SoloCoordinator):
    """A coordinator whose first collective waits for an event."""

    def __init__(self) -> None:
        super().__init__()
        self.may_begin = Event()

    def raise_together(self, error: Any, doing: str, *args: Any, **kwargs: Any) -> Any:
        if doing == "starting a transfer":
            assert self.may_begin.wait(60)
        return super().raise_together(error, doing, *args, **kwargs)


class RawSGD(torch.optim.SGD):
    """Writes that torch does not count, as those of some fused optimizers."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(1.0)


@pytest.mark.parametrize("kind", [torch.optim.SGD, RawSGD])
def test_a_step_behind_start_is_refused(kind: type[torch.optim.SGD]) -> None:
    """However late the transfer reads, and whether or not torch counts the write. Other optimizers may step."""
    weights = [torch.nn.Parameter(torch.ones(8)) for _ in range(2)]
    optimizers = [kind([weight], lr=1.0) for weight in weights]
    state, into = {"w": weights[0].detach()}, {"w": torch.zeros(8)}
    late = Late()
    transfer = Transfer(plan_transfer(*describe_states(state, into)), ranks=late, keep_old=True)
    for stepping, is_refused in ((1, False), (0, True)):
        late.may_begin.clear()
        handle = transfer.start(state, into)
        weights[stepping].grad = torch.ones(8)
        optimizers[stepping].step()
        late.may_begin.set()
        if is_refused:
            with pytest.raises(CheckpointError):
                handle.wait(60)
        else:
            handle.wait(60)
        assert torch.equal(into["w"], torch.ones(8)) and transfer.version == 0
    transfer.run(state, into)
    assert torch.equal(into["w"], torch.zeros(8)) and transfer.version == 1


@pytest.mark.parametrize(
    ("victim", "keep_old"),
    [(0, True), *(pytest.param(rank, False, marks=pytest.mark.part("faults")) for rank in (1, 3))],
)
def test_a_rank_dies(tmp_path: Path, victim: int, keep_old: bool) -> None:
    """SIGKILL of a sender or a receiver: all other ranks name it, and no target is mixed."""
    with pytest.raises(RankError, match="died"):
        run_ranks(4, dies, str(tmp_path), victim, keep_old, timeout_s=60)

    told = {file.name: json.loads(file.read_text()) for file in tmp_path.iterdir()}
    assert set(told) == {str(rank) for rank in range(4) if rank != victim}
    outcome = "old" if keep_old else "unusable"
    assert all(seen == [[victim], [2, 3], outcome, outcome] for seen in told.values()), told
