"""Restore the newest good step that all ranks see, even if some rank's view of the storage is stale.

    every rank lists        {4, 6}    {4}       {4, 6}
    ranks exchange lists    the newest step is 6, rank 1 does not see it
    list again, ..          until all ranks see 6; if 6 is removed meanwhile, until all see the step that is newest then
    patience_s is over      all ranks raise an error that lists the steps that each rank sees

A damaged step is skipped for the rest of the search. A step that is removed while it is read is not skipped: another
job saves and removes steps, and the next listing contains its newer step. A step in memory is tried if any node has a
part of it; different attempts to save it are different steps. If a part is lost, the step is skipped with a warning and
without waiting, because lost memory cannot reappear.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from vescale_fsdp.checkpoint.formats.read_state import read_manifest
from vescale_fsdp.checkpoint.load import Loader, LoadReport, Read, Verify, partial_load
from vescale_fsdp.checkpoint.manifest.file_names import step_name
from vescale_fsdp.checkpoint.manifest.manifest import Manifest, NoCheckpointError
from vescale_fsdp.checkpoint.memory.peer_memory import (
    HeldPart,
    LostPartError,
    PeerMemory,
    StepOnDisk,
    is_whole,
)
from vescale_fsdp.checkpoint.memory.ram_tier import RamTier
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.exchange import FileMove
from vescale_fsdp.checkpoint.steps.run_file import RunFile
from vescale_fsdp.checkpoint.steps.step_folders import committed_steps
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError, PartialLoadError, some

_FIRST_PAUSE_S = 0.01  # before the second listing; each further pause is twice as long
_LAST_PAUSE_S = 0.5  # longest pause
_MIN_READS = 3  # reads of vanishing steps before the search can fail, even if patience_s is over


@dataclass(frozen=True)
class Restored:
    """The result of `CheckpointManager.restore`.

    Attributes:
        step: the step that was restored.
        skipped: newer steps that were not restored, with the reason: damaged, or lost from the memory of a node.
        report: the load's report: names that were not loaded, and the metadata.
        tier: the tier that the step was read from: "disk" or "ram".
        moves: one entry for each file that was missing from the memory of a node that needed it: the rank that sent it,
            or `FROM_DISK` if it was rebuilt from the same step on disk, and the rank that received it.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.checkpoint import CheckpointManager
        >>> manager = CheckpointManager("run_to_restore")
        >>> _ = manager.save(5, {"w": torch.ones(4)}, metadata={"loss": 2.5})
        >>> restored = manager.restore({"w": torch.zeros(4)})
        >>> restored.step, restored.tier, restored.report.metadata
        (5, 'disk', {'loss': 2.5})
    """

    step: int
    skipped: tuple[tuple[int, str], ...]
    report: LoadReport
    tier: str
    moves: tuple[FileMove, ...] = ()


class StoredStep(NamedTuple):
    """A step on disk or in memory.

    Attributes:
        attempt: the save_id of a step in memory, to tell attempts apart; empty for a step on disk.
    """

    number: int
    in_memory: bool
    attempt: str = ""

    def __str__(self) -> str:
        return f"step {self.number} ({self.tier})"

    @property
    def tier(self) -> str:
        """The tier that the step is in: "disk" or "ram"."""
        return "ram" if self.in_memory else "disk"


class Candidate(NamedTuple):
    """A step to try, its folder as this rank reads it, and the source of its parts if the step is in memory."""

    step: StoredStep
    storage: Storage
    supply: PeerMemory | None


class _View(NamedTuple):
    """The steps that one rank sees."""

    steps: Set[StoredStep]
    parts: Mapping[StoredStep, HeldPart]  # of steps in memory: the part on this rank's node
    node: str
    is_late: bool  # patience_s has passed since a step was last tried
    is_over: bool  # patience_s has passed since the start


class StepSearch:
    """The steps to try, one after another; every method is a collective.

    Args:
        run: the root's run file; a step in memory is a candidate only if the run includes it.
        wanted: the only step to search, even if a rollback has abandoned it; None: any step.
        patience_s: how long ranks may see different steps.
    """

    def __init__(
        self,
        root: Storage,
        ram: RamTier | None,
        coordinator: Coordinator,
        run: RunFile | None,
        wanted: int | None,
        patience_s: float,
    ) -> None:
        self._root, self._ram, self._coordinator = root, ram, coordinator
        self._run, self._wanted = run, wanted
        self._patience_s = patience_s
        self._start_s = self._last_try_s = time.monotonic()
        self._pause_s = 0.0
        self._has_warned = False
        self._warnings: list[str] = []
        self._skipped: dict[StoredStep, str] = {}
        self._repaired: set[StoredStep] = set()
        self.damaged: list[StoredStep] = []
        self.num_vanished = 0

    @property
    def skipped(self) -> tuple[tuple[int, str], ...]:
        """Number and reason of each skipped step."""
        return tuple((step.number, reason) for step, reason in self._skipped.items())

    def newest(self) -> Candidate | None:
        """The newest step that has not been skipped; None if no rank sees any.

        Raises:
            CheckpointError: on all ranks, if they see different steps until patience_s is over.
        """
        while True:
            views = self._coordinator.everyone(self._view())
            newest = _newest(views)
            if newest is None:
                self._warn_together()
                return None
            if newest.in_memory or all(newest in view.steps for view in views):
                if self.num_vanished >= _MIN_READS and any(view.is_over for view in views):
                    raise self._error(f"Steps vanish while they are read, {self.num_vanished} so far.", views)
                self._warn_together()
                return self._candidate(newest, views)
            if any(view.is_late for view in views):
                raise self._error("Ranks see different steps.", views)
            if not self._has_warned:
                self._has_warned = True
                self._warnings.append(
                    f"ranks see different steps under {self._root.where}: {_format_views(views)}. "
                    f"All ranks list the steps again until they agree, for up to {self._patience_s:g} s."
                )
            self._slow_down()

    def _view(self) -> _View:
        """The steps that this rank sees on disk and in its node's memory."""
        on_disk: list[StoredStep] = []
        parts: dict[StoredStep, HeldPart] = {}
        node = ""
        doing = f"listing the steps in {self._root.where}"
        with self._coordinator.together(doing, "nothing was overwritten"):
            self._warn()
            time.sleep(self._pause_s)
            # A step that the caller has named may be an abandoned one.
            numbers = committed_steps(self._root, abandoned=self._wanted is not None)
            on_disk = [StoredStep(number, False) for number in numbers]
            if self._ram is not None:
                node = self._ram.node
                parts = {
                    StoredStep(number, True, attempt): part
                    for (number, attempt), part in sorted(self._ram.held(self._run).items())
                }
        steps = {*on_disk, *parts} - self._skipped.keys()
        if self._wanted is not None:
            steps = {step for step in steps if step.number == self._wanted}
        now_s = time.monotonic()
        is_late = now_s - self._last_try_s >= self._patience_s
        is_over = now_s - self._start_s >= self._patience_s
        # Sorted first: `everyone` compares representations, and the order of a set depends on its insertions.
        return _View(frozenset(sorted(steps)), parts, node, is_late, is_over)

    def _candidate(self, step: StoredStep, views: Sequence[_View]) -> Candidate:
        disk = self._root.child(step_name(step.number))
        if not step.in_memory:
            return Candidate(step, disk, None)
        assert self._ram is not None
        storage = self._ram.step_storage(step.number)
        parts = [view.parts.get(step, HeldPart(view.node)) for view in views]
        return Candidate(step, storage, PeerMemory(self._coordinator, storage, parts, StepOnDisk(disk)))

    def skip_damaged(self, step: StoredStep, error: Exception) -> None:
        """Skip a damaged step."""
        self.damaged.append(step)
        self._skip(step, error, f"{step} is damaged and was skipped: {error}")

    def skip_lost(self, step: StoredStep, error: Exception) -> None:
        """Skip a step in memory because a part of it is lost."""
        self._skip(step, error, f"{step} was skipped: {error}")

    def _skip(self, step: StoredStep, error: Exception, warning: str) -> None:
        self._last_try_s = time.monotonic()
        self._skipped[step] = str(error)
        self._warnings.append(warning)

    def repair(self, candidate: Candidate, error: Exception) -> bool:
        """Delete the damaged files of a step in memory, at most once per step.

        Returns whether any were deleted. The step can then be tried again: the next try uses copies on other nodes, or
        the same step on disk.
        """
        step = candidate.step
        if self._ram is None or candidate.supply is None or step in self._repaired:
            return False
        self._repaired.add(step)
        manifest: Manifest | None = None
        doing = f"reading the manifest of {candidate.storage.where}"
        with self._coordinator.together(doing), suppress(CheckpointError):  # it may be damaged on all nodes
            manifest = read_manifest(candidate.storage)
        if not all(self._coordinator.everyone(manifest is not None)):
            return False
        assert manifest is not None
        dropped = self._ram.drop_damaged(self._coordinator, candidate.storage, manifest)
        if dropped:
            self._last_try_s = time.monotonic()
            self._warnings.append(
                f"{step} is damaged: {error}. Damaged files were deleted, and their copies are used: {some(dropped)}"
            )
        return bool(dropped)

    def try_again(self) -> None:
        """Count a step that was removed or replaced while it was read."""
        self._last_try_s = time.monotonic()
        self.num_vanished += 1
        self._slow_down()

    def _slow_down(self) -> None:
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LAST_PAUSE_S)

    def _warn_together(self) -> None:
        """Warn about skipped steps. If a warning filter raises on rank 0, all ranks raise."""
        if self._warnings:
            with self._coordinator.together("warning about skipped steps", "nothing was overwritten"):
                self._warn()

    def _warn(self) -> None:
        texts, self._warnings = self._warnings, []
        for text in texts if self._coordinator.rank == 0 else ():
            warnings.warn(text, stacklevel=5)

    def _error(self, problem: str, views: Sequence[_View]) -> CheckpointError:
        return CheckpointError(
            problem,
            expected="the newest step to be visible to all ranks until it is read",
            got=f"{_format_views(views)} (after {self._patience_s:g} s)",
            where=self._root.where,
            todo="check that all nodes have mounted this storage, and pass the same step on all ranks; to restore "
            "an older step that all ranks see, pass step=; if caches are stale for longer, pass patience_s=",
        )

    def check_none(self) -> None:
        """Raise if no step was restored although some existed or ``wanted`` was given."""
        reasons = "; ".join(f"step {step}: {reason.splitlines()[0]}" for step, reason in self.skipped)
        if self.damaged or self.num_vanished:
            kind = CorruptCheckpointError if self.damaged else CheckpointError
            raise kind(
                "All steps of this run are damaged."
                if self.damaged
                else "The steps were removed while they were read.",
                expected="one good step" if self.damaged else "one step to remain",
                got=reasons or "none",
                where=self._root.where,
                todo=None if self.damaged else "check which job removes the steps",
            )
        if self._wanted is not None:
            raise no_such_step(self._root, reasons or self._wanted)


def no_such_step(root: Storage, got: object) -> CheckpointError:
    """The error for a step that does not exist."""
    steps = committed_steps(root)
    return CheckpointError("There is no such step.", expected=f"one of {steps}", got=got, where=root.where)


def _newest(views: Sequence[_View]) -> StoredStep | None:
    """The newest step that any rank sees. Memory goes before disk, and a complete attempt before an incomplete one."""

    def order(step: StoredStep) -> tuple[int, bool, bool, str]:
        parts = [view.parts[step] for view in views if step in view.parts]
        # The attempt decides between equal steps, so that all ranks choose the same one.
        return step.number, step.in_memory, step.in_memory and is_whole(parts), step.attempt

    return max({step for view in views for step in view.steps}, key=order, default=None)


def _format_views(views: Sequence[_View]) -> str:
    """The steps on disk that each rank sees, as text; ranks that see the same steps are grouped."""
    ranks_by_view: dict[str, list[int]] = {}
    for rank, view in enumerate(views):
        numbers = sorted({step.number for step in view.steps if not step.in_memory}, reverse=True)
        text = f"steps {some(map(str, numbers))}" if numbers else "no step"
        ranks_by_view.setdefault(text, []).append(rank)
    return "; ".join(
        f"ranks {some(map(str, ranks))} see {text}" for text, ranks in list(ranks_by_view.items())[:4]
    )


def restore_newest(
    search: StepSearch,
    coordinator: Coordinator,
    state: Any,
    *,
    strict: bool,
    include: tuple[str, ...] | None,
    verify: Verify,
    read: Read,
    meter: Meter,
) -> Restored | None:
    """Load the newest good step, which also replaces all values loaded from damaged steps; None if there is no step.

    Raises:
        PartialLoadError: instead of any other error, if a damaged step has overwritten a part of the state.
        CheckpointError: see `CheckpointManager.restore`.
    """
    overwritten: dict[str, None] = {}

    def load(candidate: Candidate) -> LoadReport:
        if candidate.supply is not None:
            candidate.supply.bring_manifest()
        loader = Loader(candidate.storage, coordinator, verify, candidate.supply, read, meter)
        try:
            return loader.load(state, strict=strict, include=include)
        except PartialLoadError as error:
            overwritten.update(dict.fromkeys(error.overwritten))
            raise

    try:
        while (candidate := search.newest()) is not None:
            step, supply = candidate.step, candidate.supply
            try:
                report = load(candidate)
            except LostPartError as error:
                search.skip_lost(step, error)
            except NoCheckpointError:  # removed or replaced meanwhile, which is no damage
                search.try_again()
            except CorruptCheckpointError as error:
                if not search.repair(candidate, error):
                    search.skip_damaged(step, error)
            except Exception as error:
                error.add_note(
                    f"{step} was not restored. Older steps were not tried, because this step is not damaged: to "
                    "restore an older one, pass step="
                )
                raise
            else:
                moves = supply.moves if supply is not None else ()
                return Restored(step.number, search.skipped, report, step.tier, moves)
        search.check_none()
    except PartialLoadError:  # names its tensors already
        raise
    except Exception as error:
        if not overwritten:
            raise
        raise partial_load(error, overwritten) from error
    return None
