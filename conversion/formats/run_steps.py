"""The folder around the checkpoints of a run: which steps it holds, and where one of them is.

    run/step-00000010/manifest.json        CheckpointManager        run/step-10/.metadata     torchtitan
    run/checkpoint-500/model.safetensors   transformers' Trainer    run/step-00000020/        unfinished: no step
    run/500/default/_METADATA              Orbax's manager

Nobody but the one who asks for "newest" means the newest: two runs of a command may find different ones. DeepSpeed's
file ``latest`` is an answer too, since its own tools go by it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import Literal

from vescale_fsdp.errors import ConversionError
from vescale_fsdp.formats import DCP_INSIDE, FORMATS

_STEP = re.compile(r"((?:global_?)?(?:step|iter|iteration|checkpoint|ckpt|epoch)[-_=]?)?(\d+)")
_log = logging.getLogger(__name__)
_MOST = 8  # that an error lists


def steps_in(files: Collection[str]) -> dict[int, str]:
    """Step -> its folder, of the checkpoints beside each other under a folder with these files; finished ones alone."""
    patterns = [form.file for form in FORMATS.values() if not form.is_file]
    deciding = re.compile("|".join(f"(?:{pattern})" for pattern in (*patterns, DCP_INSIDE)))
    found: dict[int, str] = {}
    for file in files:
        folder, _, inner = file.partition("/")
        match = _STEP.fullmatch(folder)
        if not inner and deciding.fullmatch(file):
            return {}  # the folder is a checkpoint itself
        if match and inner and deciding.fullmatch(inner):
            found[int(match[2])] = folder
    return dict(sorted(found.items()))


def says_which(files: Collection[str]) -> bool:
    """Whether a file beside the steps says which is meant, as DeepSpeed leaves it; its reader goes by it."""
    return "latest" in files


def step_url(
    url: str, steps: Mapping[int, str], abandoned: Collection[int], step: int | Literal["newest"] | None
) -> str:
    """The folder of the step that is meant, of those in ``url``.

    Args:
        abandoned: steps that a rollback has left behind: never the newest, but there for who names one.

    Raises:
        ConversionError: if nobody says which, or there is no such step.
    """
    # As `CheckpointManager.restore` and `latest` pick it. All abandoned: then nobody can say which is meant.
    newest = max((number for number in steps if number not in abandoned), default=None)
    wanted = newest if step == "newest" else step
    if isinstance(wanted, int) and wanted in steps:
        later = [number for number in steps if number > wanted and number in abandoned]
        if step == "newest" and later:
            _log.warning(
                "%s: step %d is the newest; a rollback has abandoned %s",
                url,
                wanted,
                ", ".join(map(str, later)),
            )
        return f"{url}/{steps[wanted]}"
    there = ", ".join(map(str, list(steps)[-_MOST:]))
    todo = (
        f"pass --step {newest}, which is the newest, or the folder of one checkpoint"
        if newest is not None
        else "pass --step to go back to one of them: a rollback has abandoned all"
        if steps
        else None
    )
    raise ConversionError(
        "This folder holds the steps of a run." if wanted is None else "There is no such step.",
        expected=f"one of the steps {there}" if steps else "a folder around the steps of a run",
        got="no step was named" if wanted is None else wanted,
        where=url,
        todo=todo or "leave out --step",
    )
