"""`RetentionPolicy`: which steps of a run are kept. This module also reads the record of a step, and its pin.

    step-00000100/manifest.json     has the record of the save: its metric, duration and time
    step-00000100/pinned            an empty file: the step is pinned, and no rule removes it

A step is removed if no rule keeps it. A step whose manifest is damaged has no known metric, so rules about metrics keep
it, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from vescale_fsdp.checkpoint.manifest.file_names import manifest_file, step_name
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.steps.run_file import abandoned_steps
from vescale_fsdp.checkpoint.steps.save_policy import BestOf
from vescale_fsdp.checkpoint.steps.step_folders import StepFolder, committed_steps, list_steps, remove_step
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import ArgumentError, CheckpointError, callers_level, some
from vescale_fsdp.lazy import set_module


@set_module("vescale_fsdp.checkpoint")
@dataclass(frozen=True)
class RetentionPolicy:
    """Rules for which steps are kept. Pinned steps, and the best steps of a `BestOf` in ``save_policy``, are kept too.

    Attributes:
        keep_last: number of newest steps to keep; None keeps all steps, whatever the other rules are.
        keep_every: also keep steps divisible by this number.
        keep_best: also keep the steps with the best metrics.

    Raises:
        ValueError: for a limit below 1.
        TypeError: for an argument of a wrong type.

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
                raise ArgumentError(
                    f"{name} cannot be {limit}.",
                    expected="at least 1",
                    got=limit,
                    where=f"RetentionPolicy({name}=..)",
                )
        if not isinstance(self.keep_best, BestOf | None):
            raise ArgumentError(
                "keep_best is not a BestOf.",
                expected="such as BestOf(3)",
                got=repr(self.keep_best),
                where="RetentionPolicy(keep_best=..)",
            )


def retention_of(retention: RetentionPolicy | int | None) -> RetentionPolicy:
    """Return the policy for a ``retention`` argument of `CheckpointManager`; an int is ``keep_last``.

    Raises:
        TypeError: for an argument of another type.
    """
    # A bool is an int too, but no number of steps.
    if retention is None or (isinstance(retention, int) and not isinstance(retention, bool)):
        return RetentionPolicy(keep_last=retention)
    if not isinstance(retention, RetentionPolicy):
        raise ArgumentError(
            "This is not a retention policy.",
            expected="a RetentionPolicy, or the number of steps to keep",
            got=repr(retention),
            where="retention=..",
        )
    return retention


def remove_old_steps(root: Storage, saved: int, policy: RetentionPolicy, best: Sequence[BestOf]) -> None:
    """Remove the steps that no rule keeps, after step ``saved`` is committed. Warns if a step cannot be removed.

    Args:
        best: the `BestOf` policies in ``save_policy``, which are further rules.
    """
    keep_last, rules = policy.keep_last, (*best, policy.keep_best)
    if keep_last is None:  # all steps are kept
        return

    def chosen(folders: Sequence[StepFolder]) -> list[int]:
        # Abandoned steps are kept until the user removes them, and do not count as newest steps.
        abandoned = abandoned_steps(root, (step for step, _ in folders))
        live = [folder for folder in folders if folder[0] not in abandoned]
        steps = surplus_steps(live, saved, keep_last=keep_last, keep_every=policy.keep_every)
        if steps and any(rules):  # only then: reading the records of all steps takes time
            records = [read_record(root, step) for step, is_committed in live if is_committed]
            kept = best_steps(records, filter(None, rules))
            damaged = {record.step for record in records if record.damage} & {*steps}
            if damaged:
                warnings.warn(
                    f"steps {sorted(damaged)} of {root.where} are kept, because their manifests are damaged: a lost "
                    "metric may be the best one. To remove a step, call CheckpointManager.remove",
                    stacklevel=callers_level(),
                )
            steps = [step for step in steps if step not in kept | damaged]
        return [step for step in steps if not is_pinned(root, step)]

    remove_chosen(root, chosen)


def surplus_steps(
    folders: Iterable[StepFolder], saved: int, *, keep_last: int, keep_every: int | None = None
) -> list[int]:
    """Return the steps to remove after the commit of ``saved``: earlier steps that are torn or that no limit keeps.

    Steps later than ``saved`` exist if the run was restored from an earlier step; they are kept.
    """
    older = [(step, is_committed) for step, is_committed in folders if step < saved]
    committed = [step for step, is_committed in older if is_committed]
    keep = set(committed[max(0, len(committed) + 1 - keep_last) :])  # + 1: step `saved` counts for keep_last
    keep |= {step for step in committed if keep_every is not None and step % keep_every == 0}
    return [step for step, _ in older if step not in keep]


def remove_chosen(root: Storage, choose: Callable[[list[StepFolder]], list[int]]) -> None:
    """Remove the steps that ``choose`` returns. A failure is only a warning: the new step is already committed."""
    problems: list[str] = []
    try:
        problems += filter(None, [remove_step(root, step) for step in choose(list_steps(root))])
    except Exception as error:  # noqa: BLE001  reported as a warning below
        problems.append(f"{type(error).__name__}: {error}")
    if problems:
        warnings.warn(
            f"the new step is saved, but older steps could not be removed from {root.where}: {some(problems)}",
            stacklevel=callers_level(),
        )


_PIN_NAME = "pinned"


@dataclass(frozen=True)
class StepRecord:
    """The record of one step of a run. Values are None if the step's manifest lacks them, or cannot be read.

    Attributes:
        step: the step's number.
        num_bytes: size of all tensors and per-rank values.
        seconds: duration of the save, from the call of `CheckpointManager.save` until its commit.
        unix_s: time of the commit, in seconds since 1970.
        metric: the ``metric`` argument of `CheckpointManager.save`.
        pinned: whether the step is exempt from the retention policy.
        abandoned: whether a rollback has abandoned the step. `CheckpointManager.restore` then skips the step, unless it
            is called with the step's number.
        damage: why the manifest cannot be read; empty if it can.

    Examples:
        >>> StepRecord(100, num_bytes=1 << 30, seconds=2.0).num_bytes
        1073741824
    """

    step: int
    num_bytes: int | None = None
    seconds: float | None = None
    unix_s: float | None = None
    metric: float | None = None
    pinned: bool = False
    abandoned: bool = False
    damage: str = ""


def read_record(root: Storage, step: int) -> StepRecord:
    """Read the record of a step."""
    return read_step(root, step)[0]


def read_step(root: Storage, step: int) -> tuple[StepRecord, Manifest | None]:
    """Read the record of a step, and its manifest: None if another job has removed the step, or if it is damaged."""
    pinned, name = is_pinned(root, step), manifest_file(root, step_name(step))
    if name is None:  # another job has removed the step
        return StepRecord(step, pinned=pinned), None
    try:
        manifest = Manifest.from_bytes(root.read(name), where=f"{root.where}/{name}")
    except FileNotFoundError:  # another job has removed the step
        return StepRecord(step, pinned=pinned), None
    except CheckpointError as error:
        return StepRecord(step, pinned=pinned, damage=str(error)), None
    saved = manifest.saved
    if saved is None:
        return StepRecord(step, manifest.num_bytes, pinned=pinned), manifest
    record = StepRecord(step, manifest.num_bytes, saved.seconds, saved.unix_s, saved.metric, pinned)
    return record, manifest


def read_records(root: Storage) -> list[StepRecord]:
    """Read the records of all committed steps, ascending. Steps that a rollback has abandoned are among them."""
    steps = committed_steps(root, abandoned=True)
    abandoned = abandoned_steps(root, steps)
    return [replace(read_record(root, step), abandoned=step in abandoned) for step in steps]


def is_pinned(root: Storage, step: int) -> bool:
    """Return whether a step is pinned."""
    return root.exists(f"{step_name(step)}/{_PIN_NAME}")


def set_pinned(root: Storage, step: int, pinned: bool) -> None:
    """Pin a step, or unpin it."""
    if pinned:
        root.child(step_name(step)).commit(_PIN_NAME, b"", replace=True)
    else:
        root.remove(f"{step_name(step)}/{_PIN_NAME}")


def remove_unpinned(root: Storage, step: int) -> None:
    """Remove a step.

    Raises:
        CheckpointError: if the step is pinned or cannot be removed.
    """
    if is_pinned(root, step):
        raise CheckpointError(
            "A pinned step cannot be removed.", got=step, where=root.where, todo="call unpin(step) first"
        )
    problem = remove_step(root, step)
    if problem is not None:
        raise CheckpointError("A step could not be removed.", got=problem, where=root.where)


def best_steps(records: Iterable[StepRecord], rules: Iterable[BestOf]) -> set[int]:
    """Return the steps that any rule keeps. Of steps with equal metrics, the newer step counts as better."""
    metrics = [(record.step, record.metric) for record in records if record.metric is not None]
    kept: set[int] = set()
    for rule in rules:
        ranked = sorted(metrics, key=lambda pair: (rule.order(pair[1]), -pair[0]))
        kept.update(step for step, _ in ranked[: rule.count])
    return kept
