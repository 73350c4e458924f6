"""`RetentionPolicy`: which steps of a run are kept. A step is removed if no rule keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vescale_fsdp.checkpoint.steps.run_file import abandoned_steps
from vescale_fsdp.checkpoint.steps.save_policy import BestOf
from vescale_fsdp.checkpoint.steps.step_folders import StepFolder, no_longer_kept, retire
from vescale_fsdp.checkpoint.steps.step_records import best_steps, is_pinned, read_record
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import ArgumentError


@dataclass(frozen=True)
class RetentionPolicy:
    """Which steps are kept. Pinned steps, and the best ones of a `BestOf` in ``save_policy``, are kept too.

    Attributes:
        keep_last: number of newest steps; None keeps all steps, whatever the other rules say.
        keep_every: steps divisible by it.
        keep_best: the steps with the best metrics.

    Raises:
        ValueError: for a limit below 1.
        TypeError: for a limit of another type.

    Examples:
        >>> RetentionPolicy(keep_last=2, keep_every=1000, keep_best=BestOf(3))
        RetentionPolicy(keep_last=2, keep_every=1000, keep_best=BestOf(count=3, mode='min'))
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: BestOf | None = None

    def __post_init__(self) -> None:
        for name, limit in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if limit is not None and limit < 1:
                raise ArgumentError(f"{name} cannot be {limit}.", expected="at least 1", got=limit)
        if not isinstance(self.keep_best, BestOf | None):
            raise ArgumentError(
                "keep_best is not a BestOf.", expected="such as BestOf(3)", got=repr(self.keep_best)
            )


def retention_of(retention: RetentionPolicy | int | None) -> RetentionPolicy:
    """The policy that the argument ``retention`` of `CheckpointManager` means; an int is ``keep_last``."""
    if retention is None or (isinstance(retention, int) and not isinstance(retention, bool)):
        return RetentionPolicy(keep_last=retention)
    if not isinstance(retention, RetentionPolicy):
        raise ArgumentError(
            "This is not a retention policy.",
            expected="a RetentionPolicy, or the number of steps to keep",
            got=repr(retention),
            where="the argument `retention`",
        )
    return retention


def remove_old_steps(root: Storage, saved: int, policy: RetentionPolicy, best: Sequence[BestOf]) -> None:
    """Remove the steps that no rule keeps, now that step ``saved`` is committed; warn of those that cannot be removed.

    Args:
        best: further rules that keep steps.
    """
    keep_last, rules = policy.keep_last, (*best, policy.keep_best)
    if keep_last is None:
        return

    def chosen(folders: Sequence[StepFolder]) -> list[int]:
        # Steps that a rollback has abandoned stay until they are removed by hand, and take no live step's place.
        abandoned = abandoned_steps(root, (step for step, _ in folders))
        live = [folder for folder in folders if folder[0] not in abandoned]
        steps = no_longer_kept(live, saved, keep_last=keep_last, keep_every=policy.keep_every)
        if steps and any(rules):
            records = (read_record(root, step) for step, is_committed in live if is_committed)
            kept = best_steps(records, filter(None, rules))
            steps = [step for step in steps if step not in kept]
        return [step for step in steps if not is_pinned(root, step)]

    retire(root, chosen)
