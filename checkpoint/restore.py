"""`StepSearch`: the newest step that all ranks see, however stale one rank's view of the storage is.

    every rank lists        {4, 6}    {4}       {4, 6}
    all hear of it          the newest is 6, rank 1 lacks it
    list again, ..          until all see 6, or, if it has vanished, the newest that is left by then
    patience is over        all ranks raise, and say who sees what

A step that was found damaged is passed over from then on, one that vanished while it was read is not: another job
saves and removes steps, and the next listing has its newer one.

A step in memory counts if any node holds a part of it; that ranks find different attempts to save it makes them
different steps. Memory that is lost stays lost, so that is said, and not waited for.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from vescale_fsdp.checkpoint.loading.load import Loader, LoadReport, Read, Verify
from vescale_fsdp.checkpoint.loading.read_state import read_manifest
from vescale_fsdp.checkpoint.manifest.file_names import step_name
from vescale_fsdp.checkpoint.manifest.manifest import Manifest, NoCheckpointError
from vescale_fsdp.checkpoint.memory.peer_memory import DiskTwin, HeldPart, LostPartError, PeerMemory, is_whole
from vescale_fsdp.checkpoint.memory.ram_tier import RamTier
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.exchange import FileMove
from vescale_fsdp.checkpoint.steps.run_file import RunFile
from vescale_fsdp.checkpoint.steps.step_folders import committed_steps
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError, PartialLoadError

_FIRST_PAUSE_S = 0.01
_LAST_PAUSE_S = 0.5
_MIN_READS = 3  # however long they take, and whatever the patience


class StoredStep(NamedTuple):
    """A step in one of the tiers.

    Attributes:
        attempt: which of several attempts to save it; on disk the load itself compares that.
    """

    number: int
    in_memory: bool
    attempt: str = ""

    @property
    def tier(self) -> Literal["ram", "disk"]:
        """As `Restored.tier` has it."""
        return "ram" if self.in_memory else "disk"


class Candidate(NamedTuple):
    """A step to try, where it lies for this rank, and, in memory, how its parts come there."""

    step: StoredStep
    storage: Storage
    supply: PeerMemory | None


class _View(NamedTuple):
    """What one rank sees and wants."""

    steps: Set[StoredStep]
    held: Mapping[StoredStep, HeldPart]  # of the steps in memory
    node: str
    is_late: bool  # patience is over since a step was last tried
    is_over: bool  # patience is over since the start


class StepSearch:
    """The steps to try, one after another; every method is called on all ranks alike.

    Args:
        run: the root's file; steps in memory count only if it includes them.
        wanted: this step and no other, even if a rollback has abandoned it.
        patience_s: how long ranks may go on seeing different steps.
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
        self._to_say: list[str] = []
        self._passed: dict[StoredStep, str] = {}
        self._mended: set[StoredStep] = set()
        self.damaged: list[StoredStep] = []
        self.num_vanished = 0

    @property
    def skipped(self) -> tuple[tuple[int, str], ...]:
        """Steps that were passed over, and why."""
        return tuple((step.number, reason) for step, reason in self._passed.items())

    def newest(self) -> Candidate | None:
        """The newest step that is left to try; None if no rank sees any.

        Raises:
            CheckpointError: on all ranks, if they see different steps until patience is over.
        """
        while True:
            views = self._coordinator.everyone(self._view())
            chosen = _newest(views)
            if chosen is None:
                self._say()
                return None
            if chosen.in_memory or all(chosen in view.steps for view in views):
                if self.num_vanished >= _MIN_READS and any(view.is_over for view in views):
                    raise self._error(f"Steps vanish while they are read, {self.num_vanished} so far.", views)
                self._say()
                return self._candidate(chosen, views)
            if any(view.is_late for view in views):
                raise self._error("Ranks see different steps.", views)
            if not self._has_warned:
                self._has_warned = True
                self._to_say.append(
                    f"ranks see different steps under {self._root.where}: {_told(views)}. "
                    f"They list again until they agree, for up to {self._patience_s:g} s."
                )
            self._slow_down()

    def _view(self) -> _View:
        on_disk, held, node = self._listed()
        now_s = time.monotonic()
        steps = sorted({*on_disk, *held} - self._passed.keys())
        is_late = now_s - self._last_try_s >= self._patience_s
        is_over = now_s - self._start_s >= self._patience_s
        return _View(frozenset(steps), held, node, is_late, is_over)

    def _candidate(self, step: StoredStep, views: Sequence[_View]) -> Candidate:
        disk = self._root.child(step_name(step.number))
        if not step.in_memory:
            return Candidate(step, disk, None)
        assert self._ram is not None
        storage = self._ram.step_storage(step.number)
        held = [view.held.get(step, HeldPart(view.node)) for view in views]
        return Candidate(step, storage, PeerMemory(self._coordinator, storage, held, DiskTwin(disk)))

    def pass_over(self, step: StoredStep, error: Exception) -> None:
        """A step has turned out damaged."""
        self._last_try_s = time.monotonic()
        self.damaged.append(step)
        self._passed[step] = str(error)
        self._to_say.append(f"step {step.number} ({step.tier}) is damaged and was skipped: {error}")

    def mended(self, found: Candidate, error: Exception) -> bool:
        """Whether a damaged step is worth another try: damaged files in memory are deleted, once, so that their
        copies on other nodes are taken, or the same step on disk."""
        step = found.step
        if self._ram is None or found.supply is None or step in self._mended:
            return False
        self._mended.add(step)
        manifest: Manifest | None = None
        doing = f"reading the manifest of {found.storage.where}"
        with self._coordinator.together(doing), suppress(CheckpointError):  # no node may have a good one
            manifest = read_manifest(found.storage)
        if not all(self._coordinator.everyone(manifest is not None)):
            return False
        assert manifest is not None
        dropped = self._ram.drop_damaged(self._coordinator, found.storage, manifest)
        if dropped:
            self._last_try_s = time.monotonic()
            self._to_say.append(
                f"step {step.number} (ram) is damaged: {error}. Damaged files were deleted, and their copies are "
                f"taken: {'; '.join(dropped[:4])}"
            )
        return bool(dropped)

    def lost(self, step: StoredStep, error: Exception) -> None:
        """A step in memory has turned out to lack a part: no damage, and nothing to wait for."""
        self._last_try_s = time.monotonic()
        self._passed[step] = str(error)
        self._to_say.append(f"step {step.number} (ram) was skipped: {error}")

    def vanished(self) -> None:
        """The step that was tried has been removed, or saved anew, meanwhile."""
        self._last_try_s = time.monotonic()
        self.num_vanished += 1
        self._slow_down()

    def _slow_down(self) -> None:
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LAST_PAUSE_S)

    def _listed(self) -> tuple[list[StoredStep], dict[StoredStep, HeldPart], str]:
        """What this rank sees on disk and in its node's memory, and the node's name."""
        on_disk: list[StoredStep] = []
        held: dict[StoredStep, HeldPart] = {}
        node = ""
        with self._coordinator.together(
            f"listing the steps in {self._root.where}", "nothing was overwritten"
        ):
            self._warn()
            time.sleep(self._pause_s)
            numbers = committed_steps(self._root, abandoned=self._wanted is not None)
            on_disk = [StoredStep(number, False) for number in numbers]
            if self._ram is not None:
                node = self._ram.node
                held = {
                    StoredStep(number, True, attempt): part
                    for (number, attempt), part in sorted(self._ram.held(self._run).items())
                }
        if self._wanted is not None:
            on_disk = [step for step in on_disk if step.number == self._wanted]
            held = {step: part for step, part in held.items() if step.number == self._wanted}
        return on_disk, held, node

    def _say(self) -> None:
        """Warn of what was passed over; a warning may be an error, which all ranks must hear of."""
        if self._to_say:
            with self._coordinator.together(
                "warning of steps that were passed over", "nothing was overwritten"
            ):
                self._warn()

    def _warn(self) -> None:
        texts, self._to_say = self._to_say, []
        for text in texts if self._coordinator.rank == 0 else ():
            warnings.warn(text, stacklevel=5)

    def _error(self, problem: str, views: Sequence[_View]) -> CheckpointError:
        return CheckpointError(
            problem,
            expected="the newest step to be there for all ranks, until it is read",
            got=f"{_told(views)} (after {self._patience_s:g} s)",
            where=self._root.where,
            todo="see whether all nodes have mounted it, and ask for the same step on all ranks; to go back to "
            "an older step that all see pass step=; where caches are stale for longer pass patience_s=",
        )


def _newest(views: Sequence[_View]) -> StoredStep | None:
    """The newest step that any rank sees: of equal ones one in memory, and of attempts at it one that is whole."""

    def order(step: StoredStep) -> tuple[int, bool, bool, str]:
        held = [view.held[step] for view in views if step in view.held]
        return step.number, step.in_memory, step.in_memory and is_whole(held), step.attempt

    return max({step for view in views for step in view.steps}, key=order, default=None)


def _told(views: Sequence[_View]) -> str:
    """Who sees what, ranks of the same view together."""
    ranks_by_view: dict[str, list[int]] = {}
    for rank, view in enumerate(views):
        numbers = sorted({step.number for step in view.steps if not step.in_memory}, reverse=True)
        text = f"steps {_some(numbers)}" if numbers else "no step"
        ranks_by_view.setdefault(text, []).append(rank)
    return "; ".join(f"ranks {_some(ranks)} see {text}" for text, ranks in list(ranks_by_view.items())[:4])


def _some(numbers: Sequence[Any]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", .." if len(numbers) > 4 else "")


@dataclass(frozen=True)
class Restored:
    """What `CheckpointManager.restore` did.

    Attributes:
        step: the step that was restored.
        skipped: newer steps that were not restored, with the reason: damaged, or lost from the memory of a node.
        report: what the load left untouched, and the JSON given to `save`.
        tier: where it was read from: "disk" or "ram".
        moves: files that did not lie in the memory of the node that needed them: from which rank's memory they came, or
            that they were put together of the same step on disk (`FROM_DISK`), and which rank received them.

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


@dataclass
class StepLoad:
    """How steps are loaded, and what those that failed have left in the state."""

    state: Any
    strict: bool
    include: tuple[str, ...] | None
    verify: Verify
    read: Read
    meter: Meter
    overwritten: dict[str, None] = field(default_factory=dict)

    def of(self, found: Candidate, coordinator: Coordinator) -> LoadReport:
        """Load one step."""
        if found.supply is not None:
            found.supply.bring_manifest()
        loader = Loader(found.storage, coordinator, self.verify, found.supply, self.read, self.meter)
        try:
            return loader.load(self.state, strict=self.strict, include=self.include)
        except PartialLoadError as error:
            self.overwritten |= dict.fromkeys(error.overwritten)
            raise


def first_good(search: StepSearch, load: Callable[[Candidate], LoadReport]) -> Restored | None:
    """The newest step that can be loaded, which makes up for what others overwrote in part; None if none is left."""
    while (found := search.newest()) is not None:
        stored, supply = found.step, found.supply
        try:
            report = load(found)
        except LostPartError as error:
            search.lost(stored, error)
        except NoCheckpointError:
            search.vanished()
        except CorruptCheckpointError as error:
            if not search.mended(found, error):
                search.pass_over(stored, error)
        except Exception as error:
            error.add_note(
                f"step {stored.number} ({stored.tier}) was not restored; older ones were not tried, since this is "
                "no damage: pass step= to go back to one"
            )
            raise
        else:
            moves = supply.moves if supply is not None else ()
            return Restored(stored.number, search.skipped, report, stored.tier, moves)
    return None
