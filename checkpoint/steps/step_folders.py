"""The steps under a root: which are committed, which need not be kept, and how one is removed.

    root/step-00000100/manifest.json, data-..      a committed step
    root/step-00000200/data-..                     torn: no manifest, never taken for good
    root/run.json                                  which steps a rollback has abandoned: see `run_file`

Only folders of this form are ever looked at or removed. Another job may save and remove steps meanwhile.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable

from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME, parse_step_name, step_name
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.steps.run_file import abandoned_steps
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.errors import CheckpointError

StepFolder = tuple[int, bool]
"""A step's number, and whether it is committed."""


def latest(root: str | os.PathLike[str] | Storage) -> str | None:
    """The path or URL of the newest committed step of a run, for `load` and `read_state`; None if there is none.

    Steps that a rollback has abandoned are skipped, as `CheckpointManager.restore` skips them.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.checkpoint import save
        >>> save("run/step-00000010", {"w": torch.ones(4)})
        >>> str(latest("run")).endswith("step-00000010"), latest("nothing_here")
        (True, None)
    """
    storage = open_storage(root)
    steps = committed_steps(storage)
    return storage.child(step_name(steps[-1])).where if steps else None


def list_steps(root: Storage) -> list[StepFolder]:
    """All step folders, ascending."""
    return _looked_at(root, _names(root))


def committed_steps(root: Storage, *, abandoned: bool = False) -> list[int]:
    """Numbers of the committed steps, ascending.

    Args:
        abandoned: include those that a rollback has abandoned.
    """
    names = _names(root)
    while True:
        found = [step for step, committed in _looked_at(root, names) if committed]
        # Steps may be removed after they were listed, when newer ones are committed that were not listed yet:
        # that none is left says nothing unless nothing has changed.
        if found or names == (names := _names(root)):
            gone = set() if abandoned else abandoned_steps(root, found)
            return [step for step in found if step not in gone]


def _names(root: Storage) -> list[str]:
    return [name for name in root.list_folder("") if parse_step_name(name)]


def _looked_at(root: Storage, names: Iterable[str]) -> list[StepFolder]:
    steps = filter(None, map(parse_step_name, names))
    return sorted((step, root.exists(f"{name}/{MANIFEST_NAME}")) for step, name in steps)


def no_longer_kept(
    folders: Iterable[StepFolder], saved: int, *, keep_last: int, keep_every: int | None = None
) -> list[int]:
    """Steps to remove now that step ``saved`` is committed: torn ones, and those that are too many."""
    # Newer steps are not ours to judge: they belong to a run that was restored from before them.
    older = [(step, good) for step, good in folders if step < saved]
    committed = [step for step, good in older if good]
    keep = set(committed[max(0, len(committed) + 1 - keep_last) :])  # beside the one just saved
    keep |= {step for step in committed if keep_every is not None and step % keep_every == 0}
    return [step for step, _ in older if step not in keep]


def retire(root: Storage, choose: Callable[[list[StepFolder]], list[int]]) -> None:
    """Remove the steps that are chosen; warns of what cannot be removed.

    Nothing is raised for it, since it comes after a commit: the step that was saved is good.
    """
    left: list[str] = []
    try:
        for step in choose(list_steps(root)):
            problem = remove_step(root, step)
            if problem is not None:
                left.append(problem)
    except Exception as error:  # noqa: BLE001  see above
        left.append(f"{type(error).__name__}: {error}")
    if left:
        shown = "; ".join(left[:4]) + (f"; and {len(left) - 4} more" if len(left) > 4 else "")
        warnings.warn(
            f"the new step is saved, but older ones could not be removed from {root.where}: {shown}",
            stacklevel=3,
        )


def remove_step(root: Storage, step: int, *, if_torn: bool = False) -> str | None:
    """Remove a step that no other job is writing, manifest first: a crash in between leaves a torn step.

    Args:
        if_torn: nothing happens if it is committed by now.

    Returns:
        What is left, and why; None if nothing is.
    """
    name = step_name(step)
    manifest = f"{name}/{MANIFEST_NAME}"
    try:
        if root.is_link(name):  # what lies behind it belongs to somebody else
            root.remove(name)
            return None
        if root.size(name) is not None:  # a file: nothing there is a step
            return None
        with root.child(name).lock():
            if if_torn and root.exists(manifest):
                return None
            root.remove(manifest)
            # Some stores refuse without an error; a manifest must never outlive its data.
            if root.exists(manifest):
                return f"{manifest} is still there"
            root.remove(name)
        root.remove_empty(name)  # NFS keeps the name of a lock file until it is closed
        rest = [
            left for left in root.list_folder(name) if root.exists(f"{name}/{left}")
        ]  # some stores list late
    except BlockingIOError as busy:
        return f"{name} is being written by another job: {busy}"
    except Exception as error:  # noqa: BLE001  the next step may still be removable
        return f"{name}: {type(error).__name__}: {error}"
    return f"{name} still holds {', '.join(rest[:4])}" if rest else None


_UNFINISHED = re.compile(r"\.(step-\d+)\.(saving|before)")


def remove_leftovers(
    root: Storage, exports: str | None = None, older_than_s: float | None = None
) -> list[str]:
    """Remove what killed jobs have left.

    Args:
        exports: the folder of exported steps, if there are any.
        older_than_s: what has changed since may be in use; None for the store's own `abandoned_after_s`.

    Returns:
        Names of what was removed, sorted.
    """
    limit_s = root.abandoned_after_s if older_than_s is None else older_than_s
    removed, names = [], []
    for step, is_committed in list_steps(root):
        names.append(name := step_name(step))
        if is_committed:
            removed += _remove_old_data(root, name, limit_s)
            continue
        if not root.is_older(name, limit_s):
            continue
        if remove_step(root, step, if_torn=True) is None and not root.list_folder(name):
            removed.append(name)
    for name in root.list_folder(exports) if exports is not None else ():
        found = _UNFINISHED.fullmatch(name)
        folder = f"{exports}/{name}"
        if found is None or not root.is_older(folder, limit_s) or root.is_link(folder):
            continue
        if found[2] == "before" and not root.exists(f"{exports}/{found[1]}"):
            continue  # the only copy: its successor was not put in place
        try:
            with root.child(folder).lock():
                root.remove(folder)
        except BlockingIOError:
            continue
        root.remove_empty(folder)
        removed.append(folder)
    folders = ["", *names] if exports is None else ["", exports, *names]
    return sorted(removed + root.remove_abandoned(folders, limit_s))


def _remove_old_data(root: Storage, name: str, limit_s: float) -> list[str]:
    """Data of a committed step that is not its manifest's, and unfinished files in it; names of what was removed."""
    if root.is_link(name):
        return []
    folders = [found for found in root.list_folder(name) if found.startswith("data-")]
    found = []
    if len(folders) > 1:
        try:
            with root.child(name).lock():
                raw = root.read(f"{name}/{MANIFEST_NAME}")
                kept = f"data-{Manifest.from_bytes(raw, where=f'{root.where}/{name}').save_id}"
                if kept in folders:  # else it is not what was listed, or the step is damaged
                    found = [f"{name}/{folder}" for folder in folders if folder != kept]
                    found = [folder for folder in found if root.is_older(folder, limit_s)]
                for folder in found:
                    root.remove(folder)
        except (
            BlockingIOError,
            CheckpointError,
        ):  # another job is writing it; or it is damaged: nothing is certain
            return []
    for folder in folders:
        for file in root.list_folder(f"{name}/{folder}"):
            path = f"{name}/{folder}/{file}"
            if file.startswith(".") and file.endswith(".partial") and root.is_older(path, limit_s):
                root.remove(path)
                found.append(path)
    return found
