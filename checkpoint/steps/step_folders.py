"""The step folders of a root: listing, removal of a step, and removal of the leftovers of killed jobs.

    root/step-00000100/manifest.json, data-..      a committed step
    root/step-00000200/data-..                     a torn step: has no manifest, and is never restored
    root/run.json                                  the steps that rollbacks have abandoned: see `run_file`

The root is the folder of one run. Only folders with names of steps are read or removed. Another job may save and remove
steps at the same time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from vescale_fsdp.checkpoint.manifest.file_names import (
    MANIFEST_NAME,
    manifest_file,
    parse_step_name,
    step_name,
)
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.steps.run_file import abandoned_steps
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.errors import CheckpointError, some

StepFolder = tuple[int, bool]
"""The number of a step, and whether the step is committed."""

_UNFINISHED_EXPORT = re.compile(r"\.(step-\d+)\.(saving|before)")  # the last two names in `remove_leftovers`


def latest(root: str | os.PathLike[str]) -> str | None:
    """Return the path or URL of a run's newest committed step, for `load` or `read_state`; None if there is no step.

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
    """Return all step folders, committed or torn, in ascending order of steps."""
    return _step_folders(root, _names(root))


def torn_steps(root: Storage, after: int) -> list[int]:
    """Return the steps later than ``after`` whose folders have no manifest, in ascending order."""
    return [step for step, is_committed in list_steps(root) if step > after and not is_committed]


def committed_steps(root: Storage, *, abandoned: bool = False) -> list[int]:
    """Return the numbers of the committed steps in ascending order.

    Args:
        abandoned: include steps that a rollback has abandoned.
    """
    names = _names(root)
    while True:
        committed = [step for step, is_committed in _step_folders(root, names) if is_committed]
        # Another job may have committed a newer step, and removed all listed steps, after the listing. An empty result
        # is therefore returned only if a second listing has the same names.
        if committed or names == (names := _names(root)):
            skipped = set() if abandoned else abandoned_steps(root, committed)
            return [step for step in committed if step not in skipped]


def _names(root: Storage) -> list[str]:
    return [name for name in root.list_folder("") if parse_step_name(name)]


def _step_folders(root: Storage, names: Iterable[str]) -> list[StepFolder]:
    steps = filter(None, map(parse_step_name, names))
    return sorted((step, manifest_file(root, name) is not None) for step, name in steps)


def remove_step(root: Storage, step: int, *, if_torn: bool = False) -> str | None:
    """Remove a step, unless another job is writing it. The manifest is removed first, so a crash leaves a torn step.

    Args:
        if_torn: do nothing if the step has been committed meanwhile.

    Returns:
        The reason why the step, or a part of the step, was not removed; None on success.
    """
    name = step_name(step)
    try:
        if root.is_link(name):
            root.remove(name)  # the link only: its target is outside of the run's folder
            return None
        if root.size(name) is not None:  # a file, not a step
            return None
        with root.child(name).lock():
            manifest = manifest_file(root, name)
            if if_torn and manifest is not None:
                return None
            if manifest is not None:
                root.remove(manifest)
                # Some stores fail to remove a file without an error. A manifest without data would look like a step.
                if root.exists(manifest):
                    return f"{manifest} is still there"
            root.remove(name)
        # After the unlock, because NFS keeps the name of a lock file until the file is closed.
        root.remove_empty(name)
        # `exists` for each name, because some stores still list removed files.
        rest = [file for file in root.list_folder(name) if root.exists(f"{name}/{file}")]
    except BlockingIOError as busy:
        return f"{name} is being written by another job: {busy}"
    except Exception as error:  # noqa: BLE001  returned as text: the caller continues with the next step
        return f"{name}: {type(error).__name__}: {error}"
    return f"{name} still contains {some(rest)}" if rest else None


def remove_leftovers(
    root: Storage, exports: str | None = None, older_than_s: float | None = None
) -> list[str]:
    """Remove what killed jobs have left in a run's root folder.

        step-00000200/data-..                  a torn step: no manifest
        step-00000100/data-<id>                data of an uncommitted or older save: the manifest has another id
        step-00000100/data-<id>/.<file>.partial        an incomplete copy of another node's file in memory
        step-00000200/.manifest.json.<x>.tmp   a small file before its rename; also the files of probes and locks
        exports/.step-00000200.saving          an unfinished export
        exports/.step-00000200.before          the previous export, if the file system cannot exchange folders
        (uploads)                              parts of incomplete S3 uploads: invisible, but billed

    Steps that another job has locked are kept, and so are recently changed files.

    Args:
        exports: name of the folder of exported steps; None if there is no such folder.
        older_than_s: younger files are kept, because a job may use them; None for the store's `abandoned_after_s`.

    Returns:
        Names of the removed files and folders, sorted.
    """
    limit_s = root.abandoned_after_s if older_than_s is None else older_than_s
    removed, names = [], []
    for step, is_committed in list_steps(root):
        names.append(name := step_name(step))
        if is_committed:
            removed += _remove_old_data(root, name, limit_s)
        elif (
            root.is_older(name, limit_s)
            and remove_step(root, step, if_torn=True) is None
            and not root.list_folder(name)  # `remove_step` keeps a step that was committed meanwhile
        ):
            removed.append(name)
    for name in root.list_folder(exports) if exports is not None else ():
        match = _UNFINISHED_EXPORT.fullmatch(name)
        folder = f"{exports}/{name}"
        if match is None or not root.is_older(folder, limit_s) or root.is_link(folder):
            continue
        if match[2] == "before" and not root.exists(f"{exports}/{match[1]}"):
            continue  # the only copy of this export: the new export was not renamed to its final name
        try:
            with root.child(folder).lock():
                root.remove(folder)
        except BlockingIOError:  # another job is exporting
            continue
        root.remove_empty(folder)  # after the unlock, for the lock file: see `remove_step`
        removed.append(folder)
    folders = ["", *names] if exports is None else ["", exports, *names]
    return sorted(removed + root.remove_abandoned(folders, limit_s))


def _remove_old_data(root: Storage, name: str, limit_s: float) -> list[str]:
    """Remove data folders that a committed step's manifest does not name, and unfinished files.

    Returns:
        The removed names.
    """
    if root.is_link(name):  # its target is outside of the run's folder
        return []
    folders = [folder for folder in root.list_folder(name) if folder.startswith("data-")]
    removed = []
    if len(folders) > 1:
        try:
            with root.child(name).lock():
                raw = root.read(f"{name}/{MANIFEST_NAME}")
                current = f"data-{Manifest.from_bytes(raw, where=f'{root.where}/{name}').save_id}"
                if current in folders:  # else the step was saved again after the listing, or is damaged
                    old = [f"{name}/{folder}" for folder in folders if folder != current]
                    removed = [folder for folder in old if root.is_older(folder, limit_s)]
                for folder in removed:
                    root.remove(folder)
        except (BlockingIOError, CheckpointError):
            # Another job is writing the step, or its manifest is damaged.
            return []
    for folder in folders:
        for file in root.list_folder(f"{name}/{folder}"):
            path = f"{name}/{folder}/{file}"
            if file.startswith(".") and file.endswith(".partial") and root.is_older(path, limit_s):
                root.remove(path)
                removed.append(path)
    return removed
