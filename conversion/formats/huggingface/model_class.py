"""What the class that a config.json names says of its weights: ties, orientation, and whether it takes a folder.

    the shipped table        common classes; nothing is imported                                       `class_table`
    a child process          all others of transformers; import and answer take 6 CPU seconds          `class_child`
                             and 250 to 600 MiB, which are gone before data moves, or come after it

The child is isolated (``python -I``) with this process's search path less the folder that it was started in, is told
that there is no network and no GPU, and ends after ten minutes at most.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vescale_fsdp.conversion.formats.huggingface import class_child
from vescale_fsdp.conversion.formats.huggingface.class_table import KnownClass, is_conv1d, known_class

_LONGEST_S = 600
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1"}
_OF_LAUNCHERS = (
    "ACCELERATE_",
    "FSDP_",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_",
)  # would change how a class loads

Ties = tuple[dict[str, str] | None, tuple[str, ...]]
"""Name -> the name that stands for it, None if there is no such class; and warnings."""


_ASKED: dict[
    str, Mapping[str, Any]
] = {}  # what classes have said of themselves: a conversion asks several times


def ask_child(
    config: Mapping[str, Any],
    class_name: str,
    tensors: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
) -> Mapping[str, Any]:
    """The answer of `class_child` from a child process; ``{"unknown": reason}`` where it gives none."""
    if "transformers" not in sys.modules and find_spec("transformers") is None:
        return {"unknown": "transformers is not installed", "is_absent": True}
    is_script = not sys.flags.safe_path and sys.path[:1] in (
        [""],
        [os.getcwd()],
    )  # `python -m` looks there first
    path = [part for part in sys.path[is_script:] if part]
    request: dict[str, Any] = {"class": class_name, "config": config, "path": path}
    if tensors is not None:
        request["tensors"] = tensors
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)} | _OFFLINE
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(Path(class_child.__file__).resolve())],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=_LONGEST_S,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"unknown": f"{type(error).__name__}: {error}"}
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip().splitlines()[-1:]
        return {"unknown": f"the child process ended with status {done.returncode}: {' '.join(said)}"}
    return found


def _about(config: Mapping[str, Any], class_name: str) -> Mapping[str, Any]:
    """What a class says of itself. Where torch is imported already it says so here: it is made, and no more."""
    key = _key(config, class_name)
    if key not in _ASKED:
        is_here = "torch" in sys.modules or not sys.executable
        ask = (
            class_child.answer if is_here else lambda request: ask_child(request["config"], request["class"])
        )
        _ASKED[key] = ask({"class": class_name, "config": config})
    return _ASKED[key]


def _key(config: Mapping[str, Any], class_name: str) -> str:
    described = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    return f"{class_name} {json.dumps(described, sort_keys=True)}"


def class_asked_before(config: Mapping[str, Any], class_name: str) -> KnownClass | None:
    """What a class has said of itself in this process already; None if it was not asked, or could not say."""
    found = _ASKED.get(_key(config, class_name), {})
    if "forms" not in found:
        return None
    forms = tuple({name: tuple(shape) for name, shape in form.items()} for form in found["forms"])
    return KnownClass(forms, found["ties"])


def orientation_of_class(config: Mapping[str, Any], class_name: str, module: str) -> bool | None:
    """Whether a module of a class has its weight as [in, out] (Conv1D) rather than [out, in] (Linear).

    Args:
        module: its name in memory, or the end of it.

    Returns:
        None if there is no such class in transformers, or no such module in it.
    """
    known = is_conv1d(class_name, module)
    if known is not None:
        return known
    found = {
        is_transposed
        for name, is_transposed in _about(config, class_name).get("modules", {}).items()
        if name == module or name.endswith(f".{module}") or module.endswith(f".{name}")
    }
    return found.pop() if len(found) == 1 else None


def ties_of_class(config: Mapping[str, Any], class_name: str) -> Ties:
    """The ties of a class with the settings of a config.json, under names of the model and of its files."""
    known = known_class(config, class_name)
    if known is not None:
        return dict(known.ties), ()
    found = _about(config, class_name)
    if "ties" in found:
        return dict(found["ties"]), ()
    if found.get("is_absent"):
        return None, ()
    return None, (f"transformers could not say which weights of {class_name} are tied: {found['unknown']}",)
