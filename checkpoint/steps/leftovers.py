"""What killed jobs leave under a root, and how it is removed.

    step-00000200/data-..                  a torn step: no manifest
    step-00000100/data-<id>                of an overwrite: the manifest names another one
    step-00000100/data-<id>/.<file>.partial        a copy of another node's file in memory
    step-00000200/.manifest.json.<x>.tmp   a small file that was about to be published; also of probes and lock files
    exports/.step-00000200.saving          an export that was not finished
    exports/.step-00000200.before          the export before it, where folders cannot be exchanged at once
    (uploads)                              parts of S3 uploads that were never completed, which cost money unseen

What another job holds locked is left alone, and so is anything that has changed lately: where there are no locks
(object stores) for a day.
"""

from __future__ import annotations

import re

from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME, step_name
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.steps.step_folders import list_steps, remove_step
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import CheckpointError

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
