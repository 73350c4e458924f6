"""Restore the newest good step that all ranks see, even if some rank's view of the storage is stale.

    every rank lists        {4, 6}    {4}       {4, 6}
    ranks exchange lists    the newest step is 6, but rank 1 does not see it
    ranks list again        until all ranks see step 6, or the step that is newest after a removal of step 6
    after patience_s        all ranks raise an error that lists the steps that each rank sees

A damaged step is skipped for the rest of the search. If a step is removed while it is read, another job is saving and
removing steps: the ranks list the steps again, and find that job's newer step. A step in memory is tried if any node
has a part of it; two attempts to save one step number are different steps. Steps of a run that was abandoned do not
count (`steps.step_folders.committed_steps`). If a part is lost, the step is skipped with
a warning and without waiting, because lost memory cannot reappear.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from vescale_fsdp.checkpoint.load import Loader, LoadReport, Read, Verify, partial_load
from vescale_fsdp.checkpoint.manifest.file_names import step_name
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.memory.peer_memory import (
    HeldPart,
    LostPartError,
    PeerMemory,
    StepOnDisk,
    is_whole,
)
from vescale_fsdp.checkpoint.memory.ram_tier import RamTier
from vescale_fsdp.checkpoint.native.read_state import read_manifest
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.exchange import FileMove
from vescale_fsdp.checkpoint.state.matching.result import Strict
from vescale_fsdp.checkpoint.steps.run_file import RunFile
from vescale_fsdp.checkpoint.steps.step_folders import committed_steps, list_steps
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NoCheckpointError,
    PartialLoadError,
    callers_level,
    some,
)

_FIRST_PAUSE_S = 0.01  # pause before the second listing; each further pause is twice as long
_LAST_PAUSE_S = 0.5  # longest pause between two listings
_MIN_READS = 3  # steps that must vanish during their load before the search fails, even after patience_s


@dataclass(frozen=True)
class Restored:
    """The result of `CheckpointManager.restore`.

    Attributes:
        step: the step that was restored.
        skipped: (number, reason) of newer steps that were not restored: damaged, or lost from the memory of a node.
        report: the report of the load: names that were not loaded, and the metadata.
        tier: the storage that the step was read from: "disk", the run's root, also on an object store, or "ram".
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
        attempt: the save_id of a step in memory, which differs for every attempt; empty for a step on disk.
    """

    number: int
    in_memory: bool
    attempt: str = ""

    def __str__(self) -> str:
        return f"step {self.number} ({self.tier})"

    @property
    def tier(self) -> str:
        """Where the step is stored: "disk" or "ram"."""
        return "ram" if self.in_memory else "disk"


class Candidate(NamedTuple):
    """A step to try, the folder that this rank reads, and, for a step in memory, the supply of missing files."""

    step: StoredStep
    storage: Storage
    supply: PeerMemory | None


class _View(NamedTuple):
    """The steps that one rank sees."""

    steps: Set[StoredStep]
    parts: Mapping[StoredStep, HeldPart]  # for each step in memory: the part on this rank's node
    node: str
    is_late: bool  # patience_s has passed since a step was last tried
    is_over: bool  # patience_s has passed since the start


class StepSearch:
    """The search for the step to restore; all ranks call every method together.

    Args:
        run: the root's run file; a step in memory is a candidate only if the run includes it.
        wanted: number of the only step to search, even if a rollback has abandoned it; None: any step.
        patience_s: seconds for which ranks may see different steps.
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
        """Return the newest step that has not been skipped; None if no rank sees any step.

        Raises:
            CheckpointError: on all ranks, if ranks still see different steps after ``patience_s``, or steps vanish
                again and again while they are read.
        """
        while True:
            views = self._coordinator.everyone(self._view())
            newest = _newest(views)
            if newest is None:
                self._warn_together()
                return None
            # A step in memory need not be on every node: the others fetch its files.
            if newest.in_memory or all(newest in view.steps for view in views):
                if self.num_vanished >= _MIN_READS and any(view.is_over for view in views):
                    raise self._error(f"Steps vanish while they are read, {self.num_vanished} so far.", views)
                self._warn_together()
                return self._candidate(newest, views)
            # `any`: clocks of ranks differ, but all ranks must make the same decision.
            if any(view.is_late for view in views):
                raise self._error("Ranks see different steps.", views)
            if not self._has_warned:  # once per search, not at every listing
                self._has_warned = True
                self._warnings.append(
                    f"ranks see different steps under {self._root.where}: {_format_views(views)}. "
                    f"All ranks list the steps again until they agree, for up to {self._patience_s:g} s."
                )
            self._slow_down()

    def _view(self) -> _View:
        """List the steps that this rank sees on disk and in its node's memory. A collective."""
        on_disk: list[StoredStep] = []
        parts: dict[StoredStep, HeldPart] = {}
        node = ""
        doing = f"listing the steps in {self._root.where}"
        with self._coordinator.together(doing, "nothing was overwritten"):
            self._warn()  # inside the block: if a warning filter raises on rank 0, all ranks raise
            time.sleep(self._pause_s)
            # A step that the caller has chosen by number may be an abandoned one.
            numbers = committed_steps(self._root, abandoned=self._wanted is not None)
            on_disk = [StoredStep(number, False) for number in numbers]
            if self._ram is not None:
                node = self._ram.node
                parts = {  # sorted: `everyone` compares the repr of views
                    StoredStep(number, True, attempt): part
                    for (number, attempt), part in sorted(self._ram.held(self._run).items())
                }
        steps = {*on_disk, *parts} - self._skipped.keys()
        if self._wanted is not None:
            steps = {step for step in steps if step.number == self._wanted}
        now_s = time.monotonic()
        is_late = now_s - self._last_try_s >= self._patience_s
        is_over = now_s - self._start_s >= self._patience_s
        # Sorted first: `everyone` compares the repr of views, and the order of a set depends on its insertions.
        return _View(frozenset(sorted(steps)), parts, node, is_late, is_over)

    def _candidate(self, step: StoredStep, views: Sequence[_View]) -> Candidate:
        """Return a step with the storages to read it from."""
        disk = self._root.child(step_name(step.number))
        if not step.in_memory:
            return Candidate(step, disk, None)
        assert self._ram is not None
        storage = self._ram.step_storage(step.number)
        parts = [view.parts.get(step, HeldPart(view.node)) for view in views]
        return Candidate(step, storage, PeerMemory(self._coordinator, storage, parts, StepOnDisk(disk)))

    def skip_damaged(self, step: StoredStep, error: Exception) -> None:
        """Skip a damaged step for the rest of the search."""
        self.damaged.append(step)
        then = "" if self._wanted is not None else "; the next older one is tried"
        if then and not step.in_memory:
            then += f". When the run saves step {step.number} again, it replaces this one: copy the folder before, to "
            then += "keep what is left of it"
        self._skip(step, error, f"{step} is damaged and was skipped{then}: {error}")

    def skip_lost(self, step: StoredStep, error: Exception) -> None:
        """Skip a step in memory of which a part is lost, for the rest of the search."""
        self._skip(step, error, f"{step} was skipped: {error}")

    def _skip(self, step: StoredStep, error: Exception, warning: str) -> None:
        """Skip a step, and collect the warning about it."""
        self._last_try_s = time.monotonic()
        self._skipped[step] = str(error)
        self._warnings.append(warning)

    def repair(self, candidate: Candidate, error: Exception) -> bool:
        """Delete the damaged files of a step in memory, at most once per step.

        Returns whether any file was deleted. The step can then be tried again: the next try replaces the deleted files
        by copies on other nodes, or from the same step on disk. A collective.
        """
        step = candidate.step
        # Not a second time: a step that is damaged again after its repair must be skipped.
        if self._ram is None or candidate.supply is None or step in self._repaired:
            return False
        self._repaired.add(step)
        manifest: Manifest | None = None
        doing = f"reading the manifest of {candidate.storage.where}"
        # The manifest itself may be what is damaged: then the files cannot be verified.
        with self._coordinator.together(doing), suppress(CheckpointError):
            manifest = read_manifest(candidate.storage)
        # Without a manifest, a rank cannot verify its node's files.
        if not all(self._coordinator.everyone(manifest is not None)):
            return False
        assert manifest is not None
        dropped = self._ram.drop_damaged(self._coordinator, candidate.storage, manifest)
        if dropped:
            self._last_try_s = time.monotonic()
            self._warnings.append(
                f"{step} is damaged: {error}. Damaged files were deleted; their copies are tried next: {some(dropped)}"
            )
        return bool(dropped)

    def try_again(self) -> None:
        """Count a step that was removed or replaced while it was read, and pause before the next listing."""
        self._last_try_s = time.monotonic()
        self.num_vanished += 1
        self._slow_down()

    def _slow_down(self) -> None:
        """Double the pause before the next listing, up to `_LAST_PAUSE_S`."""
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LAST_PAUSE_S)

    def _warn_together(self) -> None:
        """Warn about skipped steps. If a warning filter raises on rank 0, all ranks raise."""
        if self._warnings:
            with self._coordinator.together("warning about skipped steps", "nothing was overwritten"):
                self._warn()

    def _warn(self) -> None:
        """Issue the collected warnings, on rank 0 alone."""
        texts, self._warnings = self._warnings, []  # cleared first: a warning filter may raise below
        for text in texts if self._coordinator.rank == 0 else ():
            warnings.warn(text, stacklevel=callers_level())

    def _error(self, problem: str, views: Sequence[_View]) -> CheckpointError:
        """Return an error that lists the steps that each rank sees."""
        return CheckpointError(
            problem,
            expected="the newest step to be visible to all ranks until it is read",
            got=f"{_format_views(views)} (after {self._patience_s:g} s)",
            where=self._root.where,
            todo="check that all nodes have mounted this storage, and pass the same step on all ranks; to restore "
            "an older step that all ranks see, pass step=; if caches stay stale for longer, pass a larger patience_s=",
        )

    def check_none(self) -> None:
        """Raise if no step was restored although steps existed, or ``wanted`` was given."""
        # Only the first line of each error: its problem, without the details.
        reasons = "; ".join(
            f"step {step}: {reason.splitlines()[0].rstrip('.')}" for step, reason in self.skipped
        )
        if self.damaged and self._wanted is not None:
            raise CorruptCheckpointError(
                "This step is damaged.",
                expected=f"step {self._wanted}, undamaged",
                got=reasons,
                where=self._root.where,
                todo="restore without step=, which tries older steps; the page 'When something breaks' "
                "(docs/faults.md) shows how to load the undamaged tensors of this step",
            )
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
    """Return the error for a step that does not exist, or whose folder is incomplete."""
    steps = committed_steps(root)
    if (got, False) in list_steps(root):
        got = f"{got}, whose folder is incomplete: it has no manifest, which is written last"
    return CheckpointError("There is no such step.", expected=f"one of {steps}", got=got, where=root.where)


def _newest(views: Sequence[_View]) -> StoredStep | None:
    """Return the newest step that any rank sees; None if no rank sees one.

    For equal numbers, memory is preferred to disk, and in memory a complete attempt to an incomplete one.
    """

    def order(step: StoredStep) -> tuple[int, bool, bool, str]:
        parts = [view.parts[step] for view in views if step in view.parts]
        # The last key, the attempt, has no meaning: with it no two steps are equal, so all ranks choose the same step.
        return step.number, step.in_memory, step.in_memory and is_whole(parts), step.attempt

    return max({step for view in views for step in view.steps}, key=order, default=None)


def _format_views(views: Sequence[_View]) -> str:
    """Return the steps on disk that each rank sees, as text; ranks that see the same steps are grouped."""
    ranks_by_view: dict[str, list[int]] = {}
    for rank, view in enumerate(views):
        numbers = sorted({step.number for step in view.steps if not step.in_memory}, reverse=True)
        text = f"steps {some(map(str, numbers))}" if numbers else "no step"
        ranks_by_view.setdefault(text, []).append(rank)
    # At most 4 groups: each of many ranks could see different steps.
    return "; ".join(
        f"ranks {some(map(str, ranks))} see {text}" for text, ranks in list(ranks_by_view.items())[:4]
    )


def restore_newest(
    search: StepSearch,
    coordinator: Coordinator,
    state: Any,
    *,
    strict: Strict,
    include: tuple[str, ...] | None,
    init: Callable[[nn.Module], object] | None,
    verify: Verify,
    read: Read,
    meter: Meter,
    whole: bool,
) -> Restored | None:
    """Load the newest good step, and return which one it is; None if there is no step.

    The load also replaces all values that damaged steps have overwritten.

    Raises:
        PartialLoadError: instead of any other error, if a damaged step has overwritten a part of the state.
        CheckpointError: see `CheckpointManager.restore`.
    """
    overwritten: dict[str, None] = {}

    def load(candidate: Candidate) -> LoadReport:
        """Load a step; note the tensors that a failed load has overwritten."""
        if candidate.supply is not None:
            candidate.supply.bring_manifest()
        loader = Loader(
            candidate.storage, coordinator, verify, candidate.supply, read, meter, init=init, whole=whole
        )
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
            except NoCheckpointError:  # the step was removed or replaced meanwhile, which is no damage
                search.try_again()
            except CorruptCheckpointError as error:
                if not search.repair(candidate, error):  # else the loop tries the step again
                    search.skip_damaged(step, error)
            except Exception as error:  # any class: the note says what was not tried
                error.add_note(
                    f"{step} was not restored. Older steps were not tried, because this step is not damaged: to "
                    "restore an older one, pass step="
                )
                raise
            else:
                moves = supply.moves if supply is not None else ()
                return Restored(step.number, search.skipped, report, step.tier, moves)
        search.check_none()
    except PartialLoadError:  # already names the overwritten tensors
        raise
    except Exception as error:  # any class: an earlier try may have overwritten tensors
        if not overwritten:
            raise
        raise partial_load(error, overwritten) from error
    return None
