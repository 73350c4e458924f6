"""`CheckpointManager`: a folder of steps. Saves them, keeps the right ones, restores the newest good one.

What lies under a root, and how a step is removed: see `step_folders`. A step is removed only after a newer one has
been committed by this job. Which step is restored, and what becomes of ranks that see different ones: see
`step_search`.
"""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from vescale_fsdp.checkpoint.loading.load import Loader, LoadReport, Verify, prove_verify
from vescale_fsdp.checkpoint.loading.partial_load import partial_load
from vescale_fsdp.checkpoint.manifest.file_names import step_name
from vescale_fsdp.checkpoint.manifest.manifest import NoCheckpointError
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.peer_memory import LostPartError
from vescale_fsdp.checkpoint.ram_tier import RamTier
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, coordinator_for
from vescale_fsdp.checkpoint.ranks.file_moves import FileMove
from vescale_fsdp.checkpoint.ranks.neighbours import num_neighbours
from vescale_fsdp.checkpoint.saving.async_save import AsyncSaver, SaveHandle
from vescale_fsdp.checkpoint.saving.save import Saver
from vescale_fsdp.checkpoint.step_folders import committed_steps, no_longer_kept, retire
from vescale_fsdp.checkpoint.step_search import Candidate, StepSearch
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError, PartialLoadError, explain

__all__ = ["CheckpointManager", "Restored"]


@dataclass(frozen=True)
class Restored:
    """What `CheckpointManager.restore` did.

    Attributes:
        step: the step that was restored.
        skipped: newer steps that were not restored, with the reason: damaged, or lost from the memory of a node.
        report: what the load left untouched, and the user's JSON.
        tier: where it was read from: "disk" or "ram".
        moves: files that came from another node's memory, and the ranks that sent and received them.
    """

    step: int
    skipped: tuple[tuple[int, str], ...]
    report: LoadReport
    tier: str
    moves: tuple[FileMove, ...] = ()


@dataclass
class _StepLoad:
    """How steps are loaded, and what those that failed have left in the state."""

    state: Any
    strict: bool
    include: tuple[str, ...] | None
    verify: Verify
    overwritten: dict[str, None] = field(default_factory=dict)

    def of(self, found: Candidate, coordinator: Coordinator) -> LoadReport:
        """Load one step."""
        if found.supply is not None:
            found.supply.bring_manifest()
        loader = Loader(found.storage, coordinator, self.verify, found.supply)
        try:
            return loader.load(self.state, strict=self.strict, include=self.include)
        except PartialLoadError as error:
            self.overwritten |= dict.fromkeys(error.overwritten)
            raise


class CheckpointManager:
    """Checkpoints of one run under one root.

    Args:
        root: folder or fsspec URL.
        keep_last: newest steps to keep; None keeps all.
        keep_every: steps divisible by it are kept as well.
        async_: save behind training; `save` then waits only for the copy, and for the save before.
        save_interval: `save` does nothing for steps not divisible by it, unless forced.
        ram: a second tier in shared memory, tried first by `restore`.
        process_group: the ranks that save and restore together; default: all.
        patience_s: how long `restore` lists again while ranks see different steps, which a network file system's
            caches can bring about for as long as they are kept; then it raises.

    Raises:
        ValueError: for limits below 1, or a negative patience.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Storage,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        async_: bool = False,
        save_interval: int = 1,
        ram: RamTier | None = None,
        process_group: dist.ProcessGroup | None = None,
        patience_s: float = 30.0,
    ) -> None:
        for name, value in (
            ("keep_last", keep_last),
            ("keep_every", keep_every),
            ("save_interval", save_interval),
        ):
            if value is not None and value < 1:
                raise ValueError(
                    explain(f"{name} cannot be {value}.", expected="at least 1", got=value, where=str(root))
                )
        if not patience_s >= 0:
            raise ValueError(
                explain("patience_s is not a time.", expected=">= 0", got=patience_s, where=str(root))
            )
        self._root = open_storage(root, neighbours=num_neighbours())
        self._patience_s = patience_s
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._interval = save_interval
        self._ram = ram
        self._coordinator = coordinator_for(process_group)
        self._behind = coordinator_for(process_group, use="async") if async_ else self._coordinator
        copies = ram is not None and ram.replicas > 0
        self._copying = coordinator_for(process_group, use="copies") if copies else self._coordinator
        self._async = AsyncSaver(self._behind) if async_ else None
        self._handle: SaveHandle | None = None

    def steps(self) -> list[int]:
        """Committed steps, ascending; torn ones are not among them."""
        return committed_steps(self._root)

    def save(self, step: int, state: Any, *, user: Json = None, force: bool = False) -> SaveHandle | None:
        """Save a step if it is due; a collective. An earlier asynchronous save's error is raised here.

        Args:
            step: the step's number, any integer from 0; a step of the same number is replaced.
            state: as for `vescale_fsdp.checkpoint.save`.
            user: JSON of your own (counters, configuration); `restore` returns it.
            force: save although the interval says no.

        Returns:
            A handle if saving goes on behind training, else None.

        Raises:
            CheckpointError: if this save, or the asynchronous one before it, failed.
            TypeError: if the step is no integer.
        """
        step = operator.index(step)
        if step < 0:
            raise ValueError(
                explain("A step cannot be negative.", expected="step >= 0", got=step, where=self._root.where)
            )
        if self._ram is not None and (force or self._ram.is_due(step)):
            self._ram.save(self._coordinator, step, state, user, behind=self._copying)
        if not force and step % self._interval:
            return None
        self._wait_together()
        storage = self._root.child(step_name(step))
        if self._async is None:
            Saver(storage, self._coordinator, overwrite=True).save(state, user)
            self._retain(step, self._coordinator)
            return None
        self._handle = self._async.start(
            storage, state, user=user, overwrite=True, after=lambda: self._retain(step, self._behind)
        )
        return self._handle

    def wait(self) -> None:
        """Return when no save is in flight, and copies in memory have been made.

        Raises:
            CheckpointError: if the last asynchronous save failed, or a copy; raised once.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
        if self._ram is not None:
            self._ram.wait()

    def _wait_together(self) -> None:
        with self._coordinator.together("waiting for the save before"):
            self.wait()

    def restore(
        self,
        state: Any,
        *,
        step: int | None = None,
        strict: bool = True,
        include: str | tuple[str, ...] | None = None,
        verify: Verify = "while",
    ) -> Restored | None:
        """Fill a state from the newest step that is good; a collective.

        A damaged step is skipped with a warning and the next older one is tried; what the damaged one had overwritten
        by then, the next one overwrites. A step that is good but
        does not fit the state raises, because older ones would not fit either; and so does one that cannot be read
        for another reason than damage, such as a lost connection or a lack of permission. A step that another job
        removes meanwhile is no damage: the newest one is looked for again.

        Args:
            state: filled in place, as `load` does.
            step: this step and no other.
            strict, include, verify: as for `load`.

        Returns:
            What was restored; None if no rank sees any checkpoint.

        Raises:
            CorruptCheckpointError: if there are steps, and all are damaged. With ``verify="before"`` damage leaves the
                state untouched.
            CheckpointError: if a step does not fit the state, the step asked for does not exist, or ranks still see
                different steps when patience is over. Whatever one rank meets, all raise.
            PartialLoadError: in place of any of these, if a step had been loaded in part by then and none after it
                whole; see `load`. One that damage led to is a CorruptCheckpointError too.
        """
        self._wait_together()
        alike: dict[str, Json] = {"strict": strict, "verify": verify}
        with self._coordinator.together(f"starting to restore from {self._root.where}", alike=alike):
            prove_verify(verify)
            patterns = (include,) if isinstance(include, str) else include
            wanted = None if step is None else operator.index(step)
            alike |= {"step": wanted, "include": patterns, "ram": self._ram.name if self._ram else None}
        search = StepSearch(self._root, self._ram, self._coordinator, wanted, self._patience_s)
        load = _StepLoad(state, strict, patterns, verify)
        try:
            return self._restore_newest(search, load, wanted)
        except PartialLoadError:
            raise
        except Exception as error:
            if not load.overwritten:
                raise
            raise partial_load(error, load.overwritten) from error

    def _restore_newest(self, search: StepSearch, load: _StepLoad, wanted: int | None) -> Restored | None:
        """Try steps until one is good; a step that overwrote the state in part is made up for by the next."""
        while (found := search.newest()) is not None:
            stored, supply = found.step, found.supply
            try:
                report = load.of(found, self._coordinator)
            except LostPartError as error:
                search.lost(stored, error)
            except NoCheckpointError:
                search.vanished()
            except CorruptCheckpointError as error:
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
        if search.skipped or search.num_vanished or wanted is not None:
            self._nothing_restored(search, wanted)
        return None

    def _nothing_restored(self, search: StepSearch, wanted: int | None) -> None:
        """Raise if there were steps, or if one was asked for."""
        skipped = "; ".join(f"step {number}: {reason.splitlines()[0]}" for number, reason in search.skipped)
        if search.damaged:
            raise CorruptCheckpointError(
                "No step of this run is good.",
                expected="one good step",
                got=skipped,
                where=self._root.where,
            )
        if search.num_vanished:
            raise CheckpointError(
                "The steps were removed while they were read.",
                expected="one to remain",
                got="none",
                where=self._root.where,
                todo="see which job removes them",
            )
        if wanted is not None:
            raise CheckpointError(
                "There is no such step.",
                expected=f"one of {self.steps()}",
                got=skipped or wanted,
                where=self._root.where,
            )

    def _retain(self, saved: int, coordinator: Coordinator) -> None:
        """On rank 0, remove what need not be kept, now that a step is committed."""
        with coordinator.together(
            f"removing older steps from {self._root.where}", f"step {saved} is committed"
        ):
            keep_last, keep_every = self._keep_last, self._keep_every
            if coordinator.rank == 0 and keep_last is not None:
                retire(
                    self._root,
                    lambda found: no_longer_kept(found, saved, keep_last=keep_last, keep_every=keep_every),
                )
