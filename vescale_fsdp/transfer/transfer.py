"""Transfer: runs a transfer plan any number of times, in bounded memory.

    transfer = Transfer(plan)                    once, on all ranks
    transfer.run(state, into)                    every step; plans nothing
    handle = transfer.start(state, into)         runs in the background

One transfer, on every rank:

    1  compare   an all-reduce checks that states match the plan, and that plan and version are equal on all ranks
    2  agree     an all-reduce of the largest magnitudes of quantization blocks that span ranks, if there are any
    3  exchange  messages, see `exchange`
    4  finish    an all-reduce: if any rank failed, all raise
    5  decide    a barrier: where it succeeds, all ranks know that all were ready
    6  commit    copy second copies into the target: small tensors, or with ``keep_old`` all

If a rank is killed during step 4 or 5, that collective may succeed on some ranks and fail on others. Ranks on which it
failed ask the ranks' store: each enters "commit" if step 4 succeeded on it, else "abort", and follows the first entry.
So either all ranks commit or none does. A rank on which step 5 succeeded commits without the store: all other ranks
took part in step 5, so step 4 had succeeded on them and none enters "abort". The exception is a store that is lost with
the killed rank: a rank that cannot read the entry keeps its version, and its error names that version and the version
that other ranks may have.

A rank that loses another rank closes its connections, so that ranks that wait for it fail at once. The first rank that
does so enters in the store which ranks it has lost, and all ranks report that entry.

With ``keep_old``, the target has its old weights after a failure, but each rank needs memory for a second copy, which
an inference engine rarely has. Without ``keep_old``, the target is filled in place, and a failure poisons it: all
floats become NaN. A mixture of old and new weights would be worse than an error: the model would run, and its answers
would be wrong.

With ``delta``, ranks of the target that have the weights of the last committed transfer get patches, which are stored
in step 6: see `delta`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any, cast

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.ranks.coordinator import ABORT, COMMIT, GroupCoordinator, UnreachableError
from vescale_fsdp.devices import current_device
from vescale_fsdp.errors import ArgumentError, CheckpointError, LifecycleError, TransferError
from vescale_fsdp.layout.region import Region, overlaps
from vescale_fsdp.runtime.comm.streams import Stream, streams_of
from vescale_fsdp.torch_modes import plainly
from vescale_fsdp.torch_private import storage_ids
from vescale_fsdp.transfer.agreement import SumAgreement
from vescale_fsdp.transfer.delta import Agreed, Delta, DeltaExchange, DeltaPlan
from vescale_fsdp.transfer.description import Ranks, named_tensors, transfer_ranks
from vescale_fsdp.transfer.exchange import Exchange, StagingPool
from vescale_fsdp.transfer.memory import (
    CutBlocks,
    Destination,
    Origin,
    SourceWatch,
    Stage,
    local_pieces,
    regions_of,
)
from vescale_fsdp.transfer.plan import TransferPlan
from vescale_fsdp.transfer.rank_transfers import Batch, Message, RankTransfers

_UNTOUCHED = "nothing was moved; the target has its old weights"
_POISONED = "the target was filled in part and is unusable: all values are NaN until a transfer succeeds"

# Stands for a missing version in a collective of int64: above every valid version; the negative number fits int64 too.
_NO_VERSION = 2**62
_logger = logging.getLogger("vescale_fsdp")


# What `Transfer._read` returns: the source tensors by name, and the watch that detects writes to them (None for a
# snapshot). If reading failed, the error.
_SourceRead = tuple[dict[str, torch.Tensor], SourceWatch | None] | Exception


def _named(state: Any | None) -> dict[str, torch.Tensor]:
    """Return the tensors of a state by name; empty for None, the state of a rank that stores nothing."""
    return dict(named_tensors({} if state is None else state))


class TransferHandle:
    """A transfer that `Transfer.start` runs in the background.

    Examples:
        >>> from vescale_fsdp.transfer import describe_states, plan_transfer
        >>> trained, served = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
        >>> handle = Transfer(plan_transfer(*describe_states(trained, served))).start(trained, served)
        >>> handle.wait(timeout_s=60)
        >>> handle.done(), served["w"].sum().item()
        (True, 4.0)
    """

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        """Return whether the transfer has ended, successfully or with an error. Never blocks."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the target has its new weights.

        Raises:
            TransferError: on all ranks, if any rank failed or was lost.
            TimeoutError: if the transfer has not ended after ``timeout_s`` seconds. The transfer continues.
        """
        self._future.result(timeout_s)


class Transfer:
    """Runs a transfer plan any number of times. The constructor is a collective of all ranks.

    Args:
        plan: the plan, equal on all ranks.
        ranks: the ranks of both states, as passed to `describe_states`.
        keep_old: fill a second copy, which is copied into the target when all ranks have received everything. After a
            failure the target has its old weights. Without ``keep_old`` the target is filled in place, and a failure
            makes all values NaN.
        verify: compare the sender's checksum of each message with a checksum of the items that the receiver has stored;
            and, before the target gets its version, the fingerprints of all tensors that are only moved, not cast or
            quantized: what all ranks of the target have stored is what the source has. This takes 16 bytes per tensor
            in one all-reduce.
        group: the process group for messages, if tensors are on an accelerator. Nothing else may use the group during
            a transfer. Default: a gloo group of ``ranks``, for tensors on the CPU.
        pool: buffers for messages; transfers that never run at the same time can share a pool. Default: a new pool.
        version: the version of the weights that this rank has already, such as from an earlier Transfer.
        delta: send only the items whose bits have changed since the last committed transfer. True, or the `delta` of an
            earlier Transfer. Ranks of the target that do not have the weights of that transfer get all items: in the
            first run, after a failure that has changed the target, and if other code has written to it.

    Attributes:
        delta: what this rank remembers for the next run; None without ``delta``.

    Examples:
        >>> from vescale_fsdp.transfer import describe_states, plan_transfer
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
        pool: StagingPool | None = None,
        version: int | None = None,
        delta: bool | Delta = False,
    ) -> None:
        self.plan = plan
        self.delta = Delta() if delta is True else delta or None
        self._coordinator = own = transfer_ranks(ranks)
        self._keep_old = keep_old
        self._verify = verify
        self._on_cpu_only = group is None  # the coordinator's group is gloo
        # A coordinator of a single process has no group, and sends no messages.
        self._headers = own.group if isinstance(own, GroupCoordinator) else None
        self._group = group or self._headers
        self._pool = StagingPool() if pool is None else pool
        # Compared between ranks here and in each run: ranks with different plans would wait for each other's messages.
        self._alike = {
            "plan": plan.digest,
            "keep_old": keep_old,
            "verify": verify,
            "delta": self.delta is not None,
        }
        with own.together("planning a transfer", _UNTOUCHED, self._alike):
            self._read_regions = regions_of(
                plan.source, (leaf.source.number for leaf in plan.leaves), own.rank
            )
            self._read_names = {plan.source.entries[number].name for number in self._read_regions}
            filled = [leaf.target for leaf in plan.leaves] + [number for number, _ in plan.zero_boxes]
            self._filled_regions = regions_of(plan.target, filled, own.rank)
            self._zeros = [
                (number, copy)
                for number, box in plan.zero_boxes
                if number in self._filled_regions
                for copy in overlaps(Region.of_box(box), self._filled_regions[number])
            ]
            self._stages = (
                Stage(plan.source, self._read_regions, plan.staged_bytes),
                Stage(plan.target, self._filled_regions, plan.staged_bytes),
            )
            transfers = RankTransfers(plan, own.rank, (self._stages[0].starts, self._stages[1].starts))
            self._messages, self._kept = transfers.messages(), transfers.kept_batches()
            packed = [message.nbytes for message in self._messages if message.in_place is None]
            # At least the size of a message if this rank copies within its own memory: these copies use a buffer too.
            self._buffer_bytes = max([*packed, plan.message_bytes if self._kept else 0])
            self._cut_blocks = CutBlocks(plan)
            self._agreement = SumAgreement(plan, own.rank, self._filled_regions) if verify else None
            self._deltas: DeltaPlan | None = None
            if self.delta is not None:
                regions, stages = self._filled_regions, self._stages
                self._deltas = DeltaPlan(plan, transfers, stages, regions, self.delta, self._agreement)
                self._buffer_bytes = max(self._buffer_bytes, self._deltas.buffer_bytes)
        self._name = own.new_name()  # in the keys of this transfer's decisions in the ranks' store
        # Second copies of target tensors, by tensor number; the next run fills the same memory.
        self._copies: dict[int, torch.Tensor] = {}
        # Not an RLock: a run in the background takes the lock on the caller's thread, and releases it on the worker's.
        self._busy = Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._stream: Stream | None = None  # of transfers in the background
        self._version = version
        # The newest version of this rank: kept after a failure, so that the next version is a new number.
        self._last_version = -1 if version is None else version  # -1: without versions, the first is 0
        self._num_runs = 0
        self._lost: tuple[int, ...] | None = None  # ranks that this run has lost; None if it has lost none

    @property
    def version(self) -> int | None:
        """The version of the target's weights; None before the first transfer, while the target is changed, and after a
        failure that has made the target unusable.

        An engine serves while the version is a number. Ranks that serve together should compare their versions after an
        error or a restart, since versions may differ if the ranks' store was lost at the end of a transfer.
        """
        return self._version

    def run(self, state: Any | None, into: Any | None, *, version: int | None = None) -> None:
        """Copy the source state into the target state. A collective of all ranks of both states.

        Args:
            state: the state that was described as the source; None on ranks that store nothing of the source.
            into: the state that was described as the target; None on ranks that store nothing of the target.
            version: number of the source's weights, such as the trainer's step: at least 0, and equal on all ranks
                that pass one. If no rank passes a version, the version is the last one plus one.

        Raises:
            TransferError: on all ranks, if any rank failed, was lost, or passed a different state or version. Its
                attributes are what became of the target, and the lost ranks. After a loss, all connections of
                ``ranks`` are closed: call `joint_ranks` again, and make a new Transfer with this one's `version`.
            LifecycleError: if the transfer is already running.
            ValueError: if ``version`` is negative.
        """
        self._claim(version)
        try:
            self._run(self._read(state, snapshot=False), into, version)
        finally:
            self._busy.release()

    def start(
        self, state: Any | None, into: Any | None, *, snapshot: bool = False, version: int | None = None
    ) -> TransferHandle:
        """Start a transfer in the background and return its handle, whose ``wait()`` raises the errors of `run`.

        The source must not change until the handle's ``wait()`` has returned. An earlier step of its optimizer, or any
        other write that increments torch's version counter (``copy_``), fails the transfer on all ranks.

        Args:
            state, into: the source state and the target state, as for `run`.
            snapshot: before `start` returns, copy the tensors that this rank reads, so that the source may change.
            version: as for `run`.

        Raises:
            LifecycleError: if the transfer is already running.
            ValueError: if ``version`` is negative.
        """
        self._claim(version)
        try:
            read = self._read(state, snapshot=snapshot)
            if self._worker is None:
                # Created at first use: most callers never run in the background. `_busy` admits one run at a time.
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="transfer")
            run = self._beside()

            def released() -> None:
                # Not by a callback of the future, which may run after the handle's `wait` has returned.
                try:
                    run(read, into, version)
                finally:
                    self._busy.release()

            return TransferHandle(self._worker.submit(released))
        except BaseException:  # nothing was submitted
            self._busy.release()
            raise

    def _beside(self) -> Callable[[_SourceRead, Any | None, int | None], None]:
        """Return `_run` for the worker's thread: on an accelerator, on a stream behind the caller's work so far.

        The thread's own stream would be the default stream, on which training runs. There a message would wait for
        collectives that training has queued before the message. On another rank, whose threads ran in another order,
        these collectives would wait for the message: a deadlock.
        """
        kind = None if self._on_cpu_only else torch.accelerator.current_accelerator(check_available=True)
        streams = None if kind is None else streams_of(current_device(kind.type))
        if streams is None:
            return self._run
        if self._stream is None:
            self._stream = streams.new()
        stream = self._stream
        stream.wait_stream(streams.current())

        def run(read: _SourceRead, into: Any | None, version: int | None) -> None:
            with streams.on(stream):
                try:
                    self._run(read, into, version)
                finally:
                    # Callers then need not wait for this stream, and may free what it reads.
                    stream.record_event().synchronize()

        return run

    def _claim(self, version: int | None) -> None:
        """Check ``version``, and take the lock that admits one run at a time."""
        if version is not None and not 0 <= version < _NO_VERSION:
            raise ArgumentError(
                "The version of a transfer is not valid.",
                expected="an int of at least 0",
                got=repr(version),
                where="version=..",
            )
        if not self._busy.acquire(blocking=False):
            raise LifecycleError(
                "This transfer is already running.",
                expected="one run at a time",
                got="a second run before the first has ended",
                todo="wait for the handle of the first run, or make a second Transfer",
            )

    @plainly
    def _read(self, state: Any | None, *, snapshot: bool) -> _SourceRead:
        """Collect the source tensors that this rank reads, before the caller of `start` can change them.

        Returns an error instead of raising it: `_run` raises it in the first collective, in which other ranks wait.
        """
        try:
            # Only tensors that this rank reads: writes to other tensors do no harm.
            names = self._read_names
            tensors = {name: tensor for name, tensor in _named(state).items() if name in names}
            if snapshot:
                return {name: tensor.detach().clone() for name, tensor in tensors.items()}, None
            return tensors, SourceWatch(tensors.values())
        except Exception as error:  # noqa: BLE001  `_run` raises it in the first collective
            return error

    @plainly
    def _run(self, read: _SourceRead, into: Any | None, version: int | None) -> None:
        """Do steps 1 to 6 of a transfer (see the top of this file)."""
        own = self._coordinator
        # Before anything can fail: a key that must be equal on all ranks contains the number.
        self._num_runs += 1
        self._lost = None
        destination: Destination | None = None
        # Raised by `_agreed_version`, a collective in which other ranks wait.
        error: BaseException | None = None
        try:
            if isinstance(read, Exception):
                raise read
            tensors, watch = read
            origin, destination, targets = self._bind(tensors, into)
            words = [] if self._deltas is None else self._deltas.words(targets, self._pool.device)
        except BaseException as caught:  # noqa: BLE001  Ctrl-C too: other ranks wait for this one
            error = caught
            words = [0] * (0 if self._deltas is None else self._deltas.num_words)
        exchange: Exchange | None = None
        try:
            version, words = self._agreed_version(version, error, words)
            assert destination is not None  # else `_agreed_version` has raised the error
            agreed = None if self._deltas is None else self._deltas.agreed(words)
            with self._decided_together(version):
                self._cut_blocks.agree(origin.coded, own)
                # Patches are kept outside of the target, which has its zeros from an earlier run.
                if agreed is None or own.rank not in agreed.patched:
                    if not self._keep_old:
                        self._begin_in_place(destination)
                    destination.write_zeros(self._zeros)
                exchange, messages, kept = self._exchange(agreed, origin, destination)
                with self._agreeing(origin, destination):
                    exchange.run(messages, kept)
                    # Inside of this block, so that a write to the source fails the run on all ranks.
                    if watch is not None:
                        watch.check()
            self._version = None  # until all of the target is new
            if isinstance(exchange, DeltaExchange):
                assert self._deltas is not None and agreed is not None
                self._deltas.commit(exchange, agreed, targets, watch)
            else:
                destination.commit()
            self._version = self._last_version = version
        except Exception as failure:  # any class: the error raised says what the target contains
            if isinstance(failure, UnreachableError):
                self._leave(failure.rank)
            is_mixed = destination is not None and destination.is_mixed
            raise self._error(failure, version, is_mixed=is_mixed) from failure
        finally:
            if self.delta is not None and isinstance(exchange, DeltaExchange):
                self.delta.sent_bytes = exchange.close()
            if destination is not None and destination.is_mixed:
                destination.poison()

    def _begin_in_place(self, destination: Destination) -> None:
        """Note that the target is changed from now on."""
        self._version, destination.is_mixed = None, True
        if self.delta is not None:
            self.delta.target_run = None

    def _exchange(
        self, agreed: Agreed | None, origin: Origin, destination: Destination
    ) -> tuple[Exchange, Sequence[Message], Sequence[Sequence[Batch]]]:
        """Return the exchange of one run, with its messages and its local copies."""
        memory, pool = (origin, destination), self._pool
        if self._deltas is None or agreed is None:
            plan, rank = self.plan, self._coordinator.rank
            return Exchange(plan, rank, *memory, self._group, pool, self._verify), self._messages, self._kept

        def spill() -> None:
            if self._keep_old:
                destination.begin_patches(keep_old=True)
            else:
                self._begin_in_place(destination)

        groups = self._group, self._headers
        exchange = self._deltas.exchange(agreed, memory, groups, pool, verify=self._verify, spill=spill)
        kept = () if exchange.is_patched else self._kept
        return exchange, cast("list[Message]", self._deltas.turns(self._messages, agreed)), kept

    @contextmanager
    def _agreeing(self, origin: Origin, destination: Destination) -> Iterator[None]:
        """Context manager around the exchange: with ``verify``, compare what was stored with the source. A collective.

        Ranks that fail in the block take part in the comparison, because other ranks wait for them.

        Raises:
            CheckpointError: on all ranks, if a tensor of the target differs.
        """
        if self._agreement is None:
            yield
            return
        failure: BaseException | None = None
        numbers = [0] * (2 * len(self.plan.target.entries))
        try:
            yield
            deltas = self._deltas
            stored = (
                self._agreement.stored_sums(destination.flat) if deltas is None else deltas.sums(destination)
            )
            numbers = self._agreement.numbers(origin.flat, stored)
        except UnreachableError:  # connections are closed: other ranks do not wait
            raise
        except BaseException as caught:  # noqa: BLE001  Ctrl-C too: other ranks wait for this one
            failure = caught
        num_failed, *total = self._coordinator.begin_sum([int(failure is not None), *numbers])()
        if failure is not None:
            raise failure
        if not num_failed:  # else another rank raises, and the collective that follows reports it
            if self.delta is not None and any(total):
                self.delta.forget()
            self._agreement.check(total)

    def _leave(self, rank: int | None) -> None:
        """Find out which ranks were lost, and close this transfer's connections, so that no rank waits for this one.

        Args:
            rank: the rank that this rank waited for; None if it waited for no single rank.
        """
        if self._lost is None:
            name = f"transfer {self._name} {self._num_runs} lost"
            self._lost = self._coordinator.leave(name, rank)

    def _error(self, failure: Exception, version: int | None, *, is_mixed: bool) -> TransferError:
        """Make the error that this rank raises.

        Args:
            version: the version that was sent; None if ranks did not agree on one.
            is_mixed: whether the target has a mixture of old and new weights, so that it will be poisoned.
        """
        rank, lost = self._coordinator.rank, self._lost or ()
        own = _POISONED if is_mixed else f"this rank's target has its old weights, {_format(self._version)}"
        is_undecided = isinstance(failure, _UndecidedError)
        behind = self.plan.target.all_ranks
        again = "meet again, and make a new Transfer" if lost else "run the transfer again"
        return TransferError(
            "A transfer failed.",
            target="unusable" if is_mixed else "old",
            version=self._version,
            behind=[rank] if is_undecided and rank in behind else () if is_undecided else behind,
            lost=lost,
            expected=f"{_format(version)} on ranks {_shown(behind)}",
            got=f"{type(failure).__name__}: {failure}",
            where=f"rank {rank}" + (f", which lost ranks {_shown(lost)}" if lost else ""),
            todo=f"{again}; {own}",
        )

    def _bind(
        self, read: Mapping[str, torch.Tensor], into: Any | None
    ) -> tuple[Origin, Destination, dict[int, torch.Tensor]]:
        """Check this rank's tensors of both states against the plan, and bind them to the plan for one run.

        Also gives the pool buffers of the right size on the tensors' device. Returns the target's local tensors too.

        Raises:
            CheckpointError: if a state or a device does not fit, or the states share memory and ``keep_old`` is False.
        """
        plan, rank = self.plan, self._coordinator.rank
        sources = local_pieces(read, plan.source, self._read_regions, rank)
        targets = local_pieces(_named(into), plan.target, self._filled_regions, rank)
        # Filling the target in place would overwrite source items that are not read yet.
        shared = set()
        if sources and targets and not self._keep_old:
            shared = storage_ids(sources.values()) & storage_ids(targets.values())
        if shared:
            raise CheckpointError(
                "Source and target share memory.",
                expected="different memory of the two states",
                got=f"{len(shared)} shared storages",
                where=f"rank {rank}",
                todo="pass keep_old=True, which fills the target after everything is read",
            )
        # A rank without tensors sends no messages, and uses the CPU.
        devices = {local.device for local in (*sources.values(), *targets.values())} or {torch.device("cpu")}
        if len(devices) > 1 or (self._on_cpu_only and devices != {torch.device("cpu")}):
            raise CheckpointError(
                "A transfer does not support these devices.",
                expected="all tensors on the CPU, or all on one accelerator and a group whose backend supports it",
                got=sorted(map(str, devices)),
                where=f"rank {rank}",
                todo="Transfer(..., group=dist.new_group(backend='nccl'))",
            )
        from_stage, to_stage = self._stages
        budget_bytes = plan.budget_bytes - from_stage.nbytes - to_stage.nbytes
        self._pool.fit(self._buffer_bytes, devices.pop(), budget_bytes)
        keep_old, copies = self._keep_old, self._copies
        destination = Destination(plan, targets, keep_old=keep_old, copies=copies, stage=to_stage)
        return Origin(plan, rank, sources, from_stage), destination, targets

    def _agreed_version(
        self, version: int | None, error: BaseException | None, words: Sequence[int]
    ) -> tuple[int, list[int]]:
        """Return the version of this run, equal on all ranks, or raise ``error`` on all ranks. The first collective.

        Args:
            words: numbers of which the largest of all ranks are returned too.
        """
        # The collective returns maxima over ranks. So the smallest version is passed as a negative number.
        given = [-_NO_VERSION, -_NO_VERSION] if version is None else [version, -version]
        most, minus_least, last, *largest = self._coordinator.raise_together(
            error, "starting a transfer", _UNTOUCHED, self._alike, [*given, self._last_version, *words]
        )
        if most == -_NO_VERSION:  # no rank passes a version
            return last + 1, largest
        if most != -minus_least:
            raise CheckpointError(
                "Ranks pass different versions.",
                expected="the same version on all ranks that pass one",
                got=f"versions from {-minus_least} to {most}",
                where=f"rank {self._coordinator.rank}",
                todo=f"start the transfer when all ranks have done the same steps; {_UNTOUCHED}",
            )
        return most, largest

    @contextmanager
    def _decided_together(self, version: int) -> Iterator[None]:
        """Make a block succeed on all ranks or on none, even if a rank is lost in the collective that ends the block.

        Raises:
            UnreachableError: if a rank was lost.
            CheckpointError: if a rank fails, or if the store is lost before this rank has read the decision.
        """
        own, outcome = self._coordinator, f"no rank has {_format(version)}"
        is_ready = are_all_ready = False
        try:
            with own.together("moving a state", outcome):
                try:
                    yield
                except UnreachableError as lost:
                    self._leave(lost.rank)  # before the collective: ranks may wait for messages of this rank
                    raise
                is_ready = True
            are_all_ready = True
            own.wait_for_all("committing a state")
        except BaseException as failure:  # Ctrl-C too: other ranks may wait for this one
            # An error that the collective has reported is raised on all ranks, and so is an error before this rank was
            # ready.
            is_reported = isinstance(failure, CheckpointError) and not isinstance(failure, UnreachableError)
            if not is_ready or is_reported:
                raise
            # First, since other ranks may wait for this one in a collective.
            self._leave(failure.rank if isinstance(failure, UnreachableError) else None)
            if self._decide(COMMIT if are_all_ready else ABORT, version) != COMMIT:
                raise
            _logger.warning(
                "ranks %s were lost at the end of a transfer; other ranks have committed, so this rank commits too",
                _shown(self._lost or ()),
            )

    def _decide(self, word: str, version: int) -> str:
        """Enter ``word`` in the ranks' store, and return the word that the first rank entered."""
        try:
            return self._coordinator.decide(f"transfer {self._name} {self._num_runs}", word)
        except CheckpointError as lost:
            raise _UndecidedError(
                "The ranks' store was lost at the end of a transfer.",
                expected=f"all ranks to read whether {_format(version)} is committed",
                got=lost.got,
                where=f"rank {self._coordinator.rank}; other ranks may have {_format(version)}",
                todo="compare Transfer.version of all ranks; if versions differ, make a new Transfer and send again",
            ) from lost


class _UndecidedError(CheckpointError):
    """This rank could not read whether the ranks have committed."""


def _format(version: int | None) -> str:
    """Return a version as text."""
    return "no version" if version is None else f"version {version}"


def _shown(ranks: Sequence[int]) -> str:
    """Return ranks as text; at most 16 of them."""
    return f"{list(ranks[:16])}" + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
