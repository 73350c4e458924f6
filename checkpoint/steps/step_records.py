"""What is noted beside a step's checkpoint: what saving it took, its metric, and that it is to stay.

    step-00000100/record.json       {"num_bytes": .., "seconds": .., "unix_s": .., "metric": ..}, behind the commit
    step-00000100/pinned            empty: retention leaves the step alone

Neither is needed to restore. A step saved by hand, or by an older version, has none; a record that cannot be read
counts as none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from vescale_fsdp.checkpoint.manifest.file_names import step_name
from vescale_fsdp.checkpoint.steps.save_policy import BestOf
from vescale_fsdp.checkpoint.steps.step_folders import remove_step
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import CheckpointError

_RECORD_NAME = "record.json"
_PIN_NAME = "pinned"
_LIMIT_BYTES = 1 << 16  # 64 KiB


@dataclass(frozen=True)
class StepRecord:
    """One step of a run.

    Attributes:
        num_bytes: of all ranks' files.
        seconds: that the save took, from its call to its commit.
        unix_s: when it was committed, in seconds since 1970.
        metric: as given to `CheckpointManager.save`.
        pinned: whether it stays whatever the limits say.
        abandoned: whether a rollback has left it behind: `CheckpointManager.restore` skips it unless asked for it.

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


def write_record(root: Storage, record: StepRecord) -> None:
    """Note what saving a step took; a metric that is no finite number is left out."""
    metric = record.metric if record.metric is not None and math.isfinite(record.metric) else None
    noted = {
        "num_bytes": record.num_bytes,
        "seconds": record.seconds,
        "unix_s": record.unix_s,
        "metric": metric,
    }
    root.child(step_name(record.step)).commit(_RECORD_NAME, json.dumps(noted).encode(), replace=True)


def read_record(root: Storage, step: int) -> StepRecord:
    """What is noted of a step."""
    pinned = is_pinned(root, step)
    try:
        raw = root.read_small(f"{step_name(step)}/{_RECORD_NAME}", limit_bytes=_LIMIT_BYTES)
        found = json.loads(raw)
        values = [found.get(key) for key in ("num_bytes", "seconds", "unix_s", "metric")]
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError):
        return StepRecord(step, pinned=pinned)
    num_bytes, seconds, unix_s, metric = map(_finite_or_none, values)
    return StepRecord(step, None if num_bytes is None else int(num_bytes), seconds, unix_s, metric, pinned)


def _finite_or_none(value: object) -> float | None:
    """A number of a record; None for any other value, and for an integer too long for a float."""
    try:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return None
    return value if is_number else None  # type: ignore[return-value]


def is_pinned(root: Storage, step: int) -> bool:
    """Whether a step is to stay."""
    return root.exists(f"{step_name(step)}/{_PIN_NAME}")


def set_pinned(root: Storage, step: int, pinned: bool) -> None:
    """Let a step stay, or no longer."""
    if pinned:
        root.child(step_name(step)).commit(_PIN_NAME, b"", replace=True)
    else:
        root.remove(f"{step_name(step)}/{_PIN_NAME}")


def remove_unpinned(root: Storage, step: int) -> None:
    """Remove a step.

    Raises:
        CheckpointError: if it is pinned, or cannot be removed.
    """
    if is_pinned(root, step):
        raise CheckpointError(
            "A pinned step is not removed.", got=step, where=root.where, todo="call unpin(step) first"
        )
    problem = remove_step(root, step)
    if problem is not None:
        raise CheckpointError("A step could not be removed.", got=problem, where=root.where)


def best_steps(records: Iterable[StepRecord], rules: Iterable[BestOf]) -> set[int]:
    """The steps that any rule keeps: of equal ones the newer."""
    known = [(record.step, record.metric) for record in records if record.metric is not None]
    found: set[int] = set()
    for rule in rules:
        ranked = sorted(known, key=lambda one: (rule.order(one[1]), -one[0]))
        found.update(step for step, _ in ranked[: rule.count])
    return found
