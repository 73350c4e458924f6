"""Transfer: a plan carried out between running ranks, as often as one likes, in bounded memory.

    transfer = Transfer(plan)                    once, on all ranks
    transfer.run(state, into)                    every step; plans nothing
    handle = transfer.start(state, into)         likewise, behind the caller's back

One transfer, on every rank:

    1  meet      the states are those that were planned for; all ranks have one plan; the source's version
    2  agree     on the magnitudes of quantisation blocks that are cut, where there are any
    3  exchange  messages, see `exchange`
    4  meet      whatever a rank has met, all raise
    5  decide    by the first entry in the ranks' store: ranks that step 4 left in doubt follow it
    6  commit    what was filled beside the target (``keep_old``); else a failure spoils it

A rank that is killed in step 4 breaks the meeting for some ranks and not for others. Whoever left it whole knows that
all ranks were ready, and enters "commit"; whoever did not enters "abort"; the first entry counts on all ranks. So they
commit together or not at all, unless the store itself is lost with that rank. Then a rank that could not read the
decision keeps its version; its error names that one and the one that others may have, as `Transfer.version` does.

Alternatives considered for what a failure leaves: to fill a second copy of the target always (twice the memory of an
engine that has none to spare), or to fill in place and leave the mixture (old and new weights look alike, and answers
are merely bad). So the caller chooses between a copy and memory, and a mixture is never left.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.ranks.coordinator import (
    ABORT,
    COMMIT,
    Coordinator,
    GroupCoordinator,
    coordinator_for,
)
from vescale_fsdp.checkpoint.transfer.coding import CutBlocks, coded_here
from vescale_fsdp.checkpoint.transfer.exchange import Exchange, Rooms
from vescale_fsdp.checkpoint.transfer.memories import Destination, Origin, SourceWatch, local_parts, parts_of
from vescale_fsdp.checkpoint.transfer.planning.description import StateDescription, named_tensors
from vescale_fsdp.checkpoint.transfer.planning.description import describe_states as _describe
from vescale_fsdp.checkpoint.transfer.planning.message_order import messages_of
from vescale_fsdp.checkpoint.transfer.planning.rank_transfers import RankTransfers
from vescale_fsdp.checkpoint.transfer.planning.transfer_plan import TransferPlan
from vescale_fsdp.errors import ArgumentError, CheckpointError, LifecycleError
from vescale_fsdp.torch_modes import plainly

_UNTOUCHED = "nothing was moved; the target has its old weights"
_KEPT = "the target has its old weights"
_SPOILT = "the target was filled in part and is unusable: all of it is NaN until a transfer succeeds"

_NO_VERSION = 2**62
_logger = logging.getLogger("vescale_fsdp")

Ranks = Coordinator | dist.ProcessGroup | None


def _coordinator(ranks: Ranks) -> Coordinator:
    return ranks if isinstance(ranks, Coordinator) else coordinator_for(ranks, use="transfer")


def describe_states(
    source: Any | None, target: Any | None, *, ranks: Ranks = None
) -> tuple[StateDescription, StateDescription]:
    """Who holds what of a state that is read and of one that is filled. A collective of all ranks of both.

    Args:
        source: nested dicts and lists of tensors and DTensors; None on ranks that hold nothing of it. A plain tensor
            is taken to be the same on all ranks that have it; shards that are plain are wrapped by
            ``DTensor.from_local``.
        target: likewise.
        ranks: those of both states: a process group (default: all ranks), or what `joint_ranks` gives. Rank
            numbers of the descriptions are places in it.

    Raises:
        CheckpointError: on all ranks, if a state cannot be described or ranks disagree about one.

    Examples:
        >>> trainer, engine = describe_states({"w": torch.ones(4)}, {"w": torch.zeros(4)})
        >>> trainer.entries[0].name
        'w'
    """
    return _describe(source, target, _coordinator(ranks))


class _SourceRead(NamedTuple):
    """What a rank reads in one transfer, as it was when the transfer began."""

    tensors: dict[str, torch.Tensor]
    watch: SourceWatch | None  # None of a snapshot
    error: Exception | None


def _check_version(version: int | None) -> None:
    if version is not None and not 0 <= version < _NO_VERSION:
        raise ArgumentError(
            "A version is a number of steps.", expected="an int of at least 0", got=repr(version)
        )


def _named(state: Any | None) -> dict[str, torch.Tensor]:
    return {} if state is None else dict(named_tensors(state))


class TransferHandle:
    """A transfer under way.

    Examples:
        >>> from vescale_fsdp import plan_transfer
        >>> trained, served = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
        >>> handle = Transfer(plan_transfer(*describe_states(trained, served))).start(trained, served)
        >>> handle.wait(timeout_s=60)
        >>> handle.done(), served["w"].sum().item()
        (True, 4.0)
    """

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the target has its new weights.

        Raises:
            CheckpointError: on all ranks, if one failed. What has become of the target is said.
            TimeoutError: if it takes longer than ``timeout_s``.
        """
        self._future.result(timeout_s)


class Transfer:
    """A plan that ranks carry out. Made on all of them together.

    Args:
        plan: the same on all ranks.
        ranks: as for `describe_states`.
        keep_old: fill memory beside the target, and bring it in when all ranks have all: a failure leaves the old
            weights whole. Otherwise the target is filled in place, and a failure spoils all of it: NaN.
        verify: compare checksums of every message as it was packed with what was filled.
        group: over which messages go, where tensors are on an accelerator: nothing else may use it meanwhile.
        rooms: memory for messages, to be shared with transfers that never run at the same time.

    Examples:
        >>> from vescale_fsdp import plan_transfer
        >>> trained, served = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
        >>> Transfer(plan_transfer(*describe_states(trained, served))).run(trained, served)
        >>> served["w"].tolist()
        [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        plan: TransferPlan,
        *,
        ranks: Ranks = None,
        keep_old: bool = False,
        verify: bool = False,
        group: dist.ProcessGroup | None = None,
        rooms: Rooms | None = None,
    ) -> None:
        self.plan = plan
        self._coordinator = _coordinator(ranks)
        self._keep_old = keep_old
        self._verify = verify
        own = self._coordinator
        self._on_cpu_only = group is None
        self._group = group or (own.group if isinstance(own, GroupCoordinator) else None)
        self._alike = {"plan": plan.digest, "keep_old": keep_old, "verify": verify}
        with own.together("planning a transfer", _UNTOUCHED, self._alike):
            self._transfers = RankTransfers(plan, own.rank)
            self._messages = messages_of(self._transfers)
            packed = (message.nbytes for message in self._messages if not message.lies_whole)
            self._room_bytes = max(packed, default=0)
            if self._transfers.kept:
                self._room_bytes = max(self._room_bytes, plan.message_bytes)
            self._cut_blocks = CutBlocks(plan)
            read = sorted({leaf.source.place for leaf in plan.leaves})
            self._read_parts = parts_of(plan.source, read, own.rank)
            self._filled_parts = parts_of(
                plan.target, sorted({leaf.target for leaf in plan.leaves}), own.rank
            )
        self._name = own.new_name()
        self._rooms = Rooms() if rooms is None else rooms
        self._beside: dict[int, torch.Tensor] = {}
        self._busy = Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._version: int | None = None
        self._num_runs = 0

    @property
    def version(self) -> int | None:
        """The version of the weights that the last transfer has brought, the same on all ranks.

        None before the first one, and after one that failed and left the target unusable. Ranks that serve together
        compare it after an error or a restart.
        """
        return self._version

    def run(self, state: Any | None, into: Any | None, *, version: int | None = None) -> None:
        """Move a state into another. A collective of all ranks of both.

        Args:
            state: what was described as the source; None on ranks that have nothing of it.
            into: what was described as the target, filled in place; likewise.
            version: number of these weights, such as the trainer's step; at least 0, and the same on all ranks that
                give one. None: left to the others; where no rank gives one, one more than the last.

        Raises:
            CheckpointError: on all ranks, if one failed, was lost, or came with another state or version. What has
                become of the target is said.
            LifecycleError: if the transfer is running already.
            ValueError: if ``version`` is negative.
        """
        _check_version(version)
        self._claim()
        try:
            self._run(self._taken(state, snapshot=False), into, version)
        finally:
            self._busy.release()

    def start(
        self, state: Any | None, into: Any | None, *, snapshot: bool = False, version: int | None = None
    ) -> TransferHandle:
        """Like `run`, but returns at once.

        Until the handle's ``wait()`` has returned, the source must not change: a step of its optimizer, and any other
        write that torch counts (``copy_``), fails the transfer on all ranks if it comes earlier.

        Args:
            snapshot: copy what this rank reads first, so that the source may change as soon as this returns.
            version: as for `run`.
        """
        _check_version(version)
        self._claim()
        try:
            taken = self._taken(state, snapshot=snapshot)
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="transfer")
            future = self._worker.submit(self._run, taken, into, version)
        except BaseException:
            self._busy.release()
            raise
        future.add_done_callback(lambda _: self._busy.release())
        return TransferHandle(future)

    def _claim(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise LifecycleError(
                "This transfer is running.",
                expected="one run at a time",
                got="another one",
                todo="wait for its handle, or make a second Transfer",
            )

    @plainly
    def _taken(self, state: Any | None, *, snapshot: bool) -> _SourceRead:
        """What this rank reads, as it is now: on the caller's thread, before the caller can change it.

        An error is kept for the first meeting, where the other ranks would wait for this one.
        """
        try:
            names = {part.name for part in self._read_parts}
            read = {name: tensor for name, tensor in _named(state).items() if name in names}
            if not snapshot:
                return _SourceRead(read, SourceWatch(read.values()), None)
            return _SourceRead({name: tensor.detach().clone() for name, tensor in read.items()}, None, None)
        except Exception as error:  # noqa: BLE001  raised in the first meeting
            return _SourceRead({}, None, error)

    @plainly
    def _run(self, taken: _SourceRead, into: Any | None, version: int | None) -> None:
        own = self._coordinator
        self._num_runs += 1
        error: BaseException | None = taken.error
        if error is None:
            try:
                origin, destination = self._bind(taken.tensors, into)
                rooms = self._rooms_on(origin, destination)
            except BaseException as caught:  # noqa: BLE001  Ctrl-C too: the others would wait for this rank
                error = caught
        version = self._agreed_version(version, error)
        try:
            self._cut_blocks.agree(origin.coded, own)
            with self._decided_together(version):
                exchange = Exchange(
                    self.plan,
                    own.rank,
                    origin,
                    destination,
                    group=self._group,
                    rooms=rooms,
                    verify=self._verify,
                )
                exchange.run(self._messages, self._transfers.kept)
                if exchange.error is not None:
                    raise exchange.error
                if taken.watch is not None:
                    taken.watch.check()
            destination.commit()
            destination.is_mixed = False
            self._version = version
        finally:
            if destination.is_mixed:
                self._version = None
                destination.spoil()

    def _agreed_version(self, version: int | None, error: BaseException | None) -> int:
        """The first meeting: the version that ranks give, the same on all of them."""
        last = -1 if self._version is None else self._version
        given = [-_NO_VERSION, -_NO_VERSION] if version is None else [version, -version]
        most, minus_least, last = self._coordinator.raise_together(
            error, "starting a transfer", _UNTOUCHED, self._alike, [*given, last]
        )
        if most == -_NO_VERSION:
            return last + 1
        if most != -minus_least:
            raise CheckpointError(
                "Ranks send different versions.",
                expected="the same version on all ranks that give one",
                got=f"from {-minus_least} to {most}",
                where=f"rank {self._coordinator.rank}",
                todo=f"send when all ranks have done the same steps; {_UNTOUCHED}",
            )
        return most

    @contextmanager
    def _decided_together(self, version: int) -> Iterator[None]:
        """A block that ends well on all ranks or on none, also where a rank is lost as they meet.

        Raises:
            CheckpointError: also where the store is lost before this rank has read what was decided: it names the
                version that this rank has, and the one that others may have.
        """
        own, outcome = self._coordinator, _KEPT if self._keep_old else _SPOILT
        is_ready = False
        try:
            with own.together("moving a state", outcome):
                yield
                is_ready = True
        except BaseException:
            # Others may have met before a rank was lost; they cannot have if this one was not ready.
            if not is_ready or self._decide(ABORT, version) != COMMIT:
                raise
            _logger.warning(
                "a rank was lost as a transfer ended; all others have committed it, so this one does"
            )
        else:
            if self._decide(COMMIT, version) != COMMIT:
                raise CheckpointError(
                    "A rank was lost as a transfer ended.",
                    expected="all ranks to meet",
                    got="another rank has found one lost",
                    where=f"rank {own.rank}",
                    todo=f"see what that rank says; {outcome}",
                )

    def _decide(self, word: str, version: int) -> str:
        now, before = (f"transfer {self._name} {run}" for run in (self._num_runs, self._num_runs - 1))
        # All ranks have read the one before: they have met since.
        try:
            return self._coordinator.decide(now, word, before)
        except CheckpointError as lost:
            held = "no version" if self._version is None else f"version {self._version}"
            if not self._keep_old:
                held = "no usable weights"
            raise CheckpointError(
                "The ranks' store was lost as a transfer ended.",
                expected=f"all ranks to read whether version {version} is committed",
                got=lost.got,
                where=f"rank {self._coordinator.rank}, which has {held}; ranks that read it first may have version "
                f"{version}",
                todo="compare Transfer.version between ranks; where it differs, make a Transfer among the ranks that "
                "are left and send again",
            ) from lost

    def _bind(self, read: Mapping[str, torch.Tensor], into: Any | None) -> tuple[Origin, Destination]:
        """This rank's memories, checked against the descriptions."""
        plan, rank = self.plan, self._coordinator.rank
        origin = Origin(plan, local_parts(read, self._read_parts, rank))
        filled = local_parts(_named(into), self._filled_parts, rank)
        destination = Destination(plan, filled, keep_old=self._keep_old, beside=self._beside)
        destination.prove_apart(origin)
        origin.coded = coded_here(plan, rank, origin.by_name)
        return origin, destination

    def _rooms_on(self, origin: Origin, destination: Destination) -> Rooms:
        """Memory for messages on the device of the tensors, kept."""
        devices = {*origin.devices, *destination.devices} or {torch.device("cpu")}
        if len(devices) > 1 or (self._on_cpu_only and devices != {torch.device("cpu")}):
            raise CheckpointError(
                "A transfer moves tensors of one device.",
                expected="tensors on one device, and a group whose backend moves them (on a CPU: none is needed)",
                got=sorted(map(str, devices)),
                where=f"rank {self._coordinator.rank}",
                todo="Transfer(..., group=dist.new_group(backend='nccl'))",
            )
        device = devices.pop()
        self._rooms.fit(self._room_bytes, device, self.plan.budget_bytes)
        return self._rooms
