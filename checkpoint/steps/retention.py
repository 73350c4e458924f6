"""`Retention`: which steps of a run stay, by several rules at once: a step goes if none of them keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vescale_fsdp.checkpoint.steps.run_file import abandoned_steps
from vescale_fsdp.checkpoint.steps.save_policy import BestOf
from vescale_fsdp.checkpoint.steps.step_folders import StepFolder, no_longer_kept, retire
from vescale_fsdp.checkpoint.steps.step_records import best_steps, is_pinned, read_record
from vescale_fsdp.checkpoint.storage.base import Storage


@dataclass(frozen=True)
class Retention:
    """What is kept beside pinned steps.

    Attributes:
        last: newest steps; None keeps all.
        every: steps divisible by it.
        best: steps of the best metrics.
    """

    last: int | None = None
    every: int | None = None
    best: tuple[BestOf, ...] = ()

    def apply(self, root: Storage, saved: int) -> None:
        """Remove what need not stay now that step ``saved`` is committed; warns of what cannot be removed."""
        if self.last is not None:
            retire(root, lambda folders: self._chosen(root, folders, saved))

    def _chosen(self, root: Storage, folders: Sequence[StepFolder], saved: int) -> list[int]:
        assert self.last is not None
        # Steps that a rollback has abandoned stay until they are removed by hand, and take no live step's place.
        abandoned = abandoned_steps(root, (step for step, _ in folders))
        folders = [folder for folder in folders if folder[0] not in abandoned]
        chosen = no_longer_kept(folders, saved, keep_last=self.last, keep_every=self.every)
        if chosen and self.best:
            best = best_steps((read_record(root, step) for step, good in folders if good), self.best)
            chosen = [step for step in chosen if step not in best]
        return [step for step in chosen if not is_pinned(root, step)]
