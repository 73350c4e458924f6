"""What killed jobs leave under a root, and how it is removed.

    step-00000200/data-..                  a torn step: no manifest
    step-00000200/.manifest.json.<x>.tmp   a small file that was about to be published; also of probes and lock files
    exports/.step-00000200.saving          an export that was not finished
    exports/.step-00000200.before          the export before it, where folders cannot be exchanged at once
    (uploads)                              parts of S3 uploads that were never completed, which cost money unseen

What another job holds locked is left alone, and so is anything that has changed lately: where there are no locks
(object stores) for a day.
"""

from __future__ import annotations

import re

from vescale_fsdp.checkpoint.manifest.file_names import step_name
from vescale_fsdp.checkpoint.steps.step_folders import list_steps, remove_step
from vescale_fsdp.checkpoint.storage.base import Storage

__all__ = ["remove_leftovers"]

_UNFINISHED = re.compile(r"\.(step-\d+)\.(saving|before)")


def remove_leftovers(root: Storage, exports: str, older_than_s: float | None = None) -> list[str]:
    """Remove what killed jobs have left.

    Args:
        exports: the folder of exported steps.
        older_than_s: what has changed since may be in use; None for the store's own `abandoned_after_s`.

    Returns:
        Names of what was removed, sorted.
    """
    limit_s = root.abandoned_after_s if older_than_s is None else older_than_s
    removed, names = [], []
    for step, is_committed in list_steps(root):
        names.append(name := step_name(step))
        if is_committed or not root.is_older(name, limit_s):
            continue
        if remove_step(root, step, if_torn=True) is None and not root.list_folder(name):
            removed.append(name)
    for name in root.list_folder(exports):
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
    return sorted(removed + root.remove_abandoned(["", exports, *names], limit_s))
