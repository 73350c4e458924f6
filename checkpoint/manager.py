"""`CheckpointManager`: a folder of steps. Saves them, keeps the right ones, restores the newest good one.

    root/step-00000100/manifest.json, data-..      a committed step
    root/step-00000200/data-..                     torn: no manifest, never taken for good

Only folders of this form are ever looked at or removed. A step is removed manifest first, so a crash in
between leaves a torn step, not a damaged one; and only after a newer step has been committed by this job.
"""

from __future__ import annotations

import operator
import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from vescale_fsdp.checkpoint.agreement import coordinator_for
from vescale_fsdp.checkpoint.async_saving import AsyncSaver, SaveHandle
from vescale_fsdp.checkpoint.loading import Loader, LoadReport, Verify
from vescale_fsdp.checkpoint.names import MANIFEST_NAME, parse_step_name, step_name
from vescale_fsdp.checkpoint.ram_tier import RamTier
from vescale_fsdp.checkpoint.saving import Saver
from vescale_fsdp.checkpoint.storage import Storage, open_storage
from vescale_fsdp.checkpoint.tree import Json
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError, explain

__all__ = ["CheckpointManager", "Restored"]


@dataclass(frozen=True)
class Restored:
    """What `CheckpointManager.restore` did.

    Attributes:
        step: the step that was restored.
        skipped: newer steps that were found damaged, with the reason.
        report: what the load left untouched, and the user's JSON.
        tier: where it was read from: "disk" or "ram".
    """

    step: int
    skipped: tuple[tuple[int, str], ...]
    report: LoadReport
    tier: str


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

    Raises:
        ValueError: for limits below 1.
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
        self._root = open_storage(root)
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._interval = save_interval
        self._ram = ram
        self._coordinator = coordinator_for(process_group)
        self._async = AsyncSaver(coordinator_for(process_group, use="async")) if async_ else None
        self._handle: SaveHandle | None = None

    def steps(self) -> list[int]:
        """Committed steps, ascending; torn ones are not among them."""
        return [step for step, committed in self._folders() if committed]

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
            self._ram.save(self._coordinator, step, state, user)
        if not force and step % self._interval:
            return None
        self.wait()
        storage = self._root.child(step_name(step))
        if self._async is None:
            Saver(storage, self._coordinator, overwrite=True).save(state, user)
            self._retain(step)
            return None
        self._handle = self._async.start(
            storage, state, user=user, overwrite=True, after=lambda: self._retain(step)
        )
        return self._handle

    def wait(self) -> None:
        """Return when no save is in flight.

        Raises:
            CheckpointError: if the last asynchronous save failed; raised once.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()

    def restore(
        self,
        state: Any,
        *,
        step: int | None = None,
        strict: bool = True,
        include: str | tuple[str, ...] | None = None,
        verify: Verify = "before",
    ) -> Restored | None:
        """Fill a state from the newest step that is good; a collective.

        A damaged step is skipped with a warning and the next older one is tried. A step that is good but
        does not fit the state raises, because older ones would not fit either.

        Args:
            state: filled in place, as `load` does.
            step: this step and no other.
            strict, include, verify: as for `load`.

        Returns:
            What was restored; None if there is no checkpoint at all.

        Raises:
            CorruptCheckpointError: if there are steps, and all are damaged; the state is untouched then,
                unless ``verify="while"`` was asked for.
            CheckpointError: if a step does not fit the state, or the step asked for does not exist.
        """
        self.wait()
        patterns = (include,) if isinstance(include, str) else include
        # Compared before a rank looks for steps: one that finds none goes home, while others wait for it to load.
        alike = {"step": step, "strict": strict, "include": patterns, "verify": verify}
        self._coordinator.raise_together(None, "restoring", alike)
        skipped: list[tuple[int, str]] = []
        for number, tier, storage in self._candidates(step):
            try:
                loader = Loader(storage, self._coordinator, verify)
                report = loader.load(state, strict=strict, include=patterns)
            except CorruptCheckpointError as error:
                skipped.append((number, str(error)))
                if self._coordinator.rank == 0:
                    warnings.warn(f"step {number} ({tier}) is damaged and was skipped: {error}", stacklevel=2)
                continue
            return Restored(number, tuple(skipped), report, tier)
        if skipped:
            raise CorruptCheckpointError(
                explain(
                    "No step of this run is good.",
                    expected="one good step",
                    got="; ".join(f"step {number}: {reason.splitlines()[0]}" for number, reason in skipped),
                    where=self._root.where,
                )
            )
        if step is not None:
            raise CheckpointError(
                explain(
                    "There is no such step.",
                    expected=f"one of {self.steps()}",
                    got=step,
                    where=self._root.where,
                )
            )
        return None

    def _candidates(self, wanted: int | None) -> list[tuple[int, str, Storage]]:
        """Steps to try, newest first, memory before disk; the same on all ranks."""
        found = [(step, "disk", self._root.child(step_name(step)), "") for step in self.steps()]
        if self._ram is not None:
            found += [(step, "ram", storage, attempt) for step, storage, attempt in self._ram.steps()]
        # A step in memory counts if all nodes hold parts of the same attempt to save it.
        keys = self._coordinator.common([(step, tier, attempt) for step, tier, _, attempt in found])
        chosen = [
            (step, tier, storage)
            for step, tier, storage, attempt in found
            if (step, tier, attempt) in keys and wanted in (None, step)
        ]
        return sorted(chosen, key=lambda item: (item[0], item[1] == "ram"), reverse=True)

    def _folders(self) -> list[tuple[int, bool]]:
        """All step folders, ascending, and whether each is committed."""
        steps = filter(None, map(parse_step_name, self._root.list_folder("")))
        return sorted((step, self._root.exists(f"{name}/{MANIFEST_NAME}")) for step, name in steps)

    def _retain(self, saved: int) -> None:
        """On rank 0, remove what need not be kept, now that a step is committed."""
        if self._coordinator.rank or self._keep_last is None:
            return
        folders = self._folders()
        committed = [step for step, good in folders if good and step <= saved]
        keep = set(committed[-self._keep_last :])
        keep |= {step for step in committed if self._keep_every is not None and step % self._keep_every == 0}
        for step, good in folders:
            # Newer steps are not ours to judge: they belong to a run that was restored from before them.
            if step < saved and not (good and step in keep):
                self._root.remove(f"{step_name(step)}/{MANIFEST_NAME}")
                self._root.remove(step_name(step))
