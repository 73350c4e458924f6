"""The weights that a class of transformers has: names, shapes, ties, orientation, and whether it loads a folder.

    class_table.json   common classes: names and shapes as functions of config.json, options, ties (`tools.class_table`)
                        nothing is imported; a row has no answer for settings that it does not describe
    `class_child`       all other classes, in a child process: 6 CPU seconds and 250 to 600 MiB; it runs before
                        or after data is copied, never at the same time

The child process is isolated (``python -I``). It gets this process's search path without the working directory, no
network and no GPU, and is stopped after ten minutes.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from vescale_fsdp.checkpoint.formats.huggingface import class_child

ClassForm = Mapping[str, tuple[int, ...]]
"""Name -> shape of every tensor."""
_MOST_NAMES = 10**6  # limit for one row, since a config.json can contain any number
_FIELD = re.compile(r"\{(\w+)\}")  # placeholder in a name: runs from 0 to the field's value - 1
_LONGEST_S = 600  # time limit of a child process
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1"}
# Variables of launchers, which change how transformers loads a model.
_OF_LAUNCHERS = ("ACCELERATE_", "FSDP_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")
Ties = tuple[dict[str, str] | None, tuple[str, ...]]
"""Name -> the name that stands for it, None if transformers has no such class; and warnings."""
# Answers of classes about themselves: one conversion asks several times.
_ANSWERS: dict[str, Mapping[str, Any]] = {}


@dataclass(frozen=True)
class KnownClass:
    """The tensors of a class with certain settings.

    Args:
        forms: the tensors under their names in memory and, where they differ, in files; tied ones included.
        ties: name -> the name it is tied to.
        ignored: patterns of names that the class silently ignores.
    """

    forms: tuple[ClassForm, ...]
    ties: Mapping[str, str]
    ignored: tuple[str, ...] = ()

    def problems(self, shapes: ClassForm) -> tuple[str, ...]:
        """Differences between these tensors and the form that fits best; empty if the class loads them."""
        return min((tuple(self._differences(form, shapes)) for form in self.forms), key=len)

    def _differences(self, form: ClassForm, shapes: ClassForm) -> Iterator[str]:
        for name in sorted(form.keys() - shapes.keys() - self.ties.keys()):
            yield f"missing: {name}"
        for name in sorted(shapes.keys() - form.keys()):
            if not any(re.search(pattern, name) for pattern in self.ignored):
                yield f"unexpected: {name}"
        for name in sorted(form.keys() & shapes.keys()):
            if form[name] != shapes[name]:
                yield f"wrong shape: {name} is {list(shapes[name])}, the class has {list(form[name])}"


@cache
def _rows() -> Mapping[str, Any]:
    rows: dict[str, Any] = json.loads(Path(__file__).with_name("class_table.json").read_text())
    return rows


def known_class(config: Mapping[str, Any], class_name: str) -> KnownClass | None:
    """The tensors of a class with the settings of a config.json, by the table; None if it has no answer."""
    row = _rows().get(class_name)
    return expected_by(row, config) if isinstance(row, dict) else None


def expected_by(row: Mapping[str, Any], config: Mapping[str, Any]) -> KnownClass | None:
    """The tensors that a row of the table describes for a config.json; None for settings that it does not describe."""
    aliases = row.get("aliases", {})
    given = {aliases.get(key, key): value for key, value in config.items()}
    if any(key in given and given[key] != value for key, value in row.get("fixed", {}).items()):
        return None
    flags = {flag: given.get(flag, value) for flag, value in row["flags"].items()}
    if not all(isinstance(value, bool) for value in flags.values()):
        return None
    sizes = {key: given[key] for key in row["fields"] if _is_size(given.get(key))}
    for key in row["fields"].keys() - sizes.keys():
        rule = row["fields"][key].get("null" if key in given else "absent")
        if given.get(key) is not None or rule is None:
            return None
        try:
            sizes[key] = size(str(rule), {name: value for name, value in given.items() if _is_size(value)})
        except (KeyError, ZeroDivisionError):  # the rule needs a field that is absent too
            return None
    only_if = row.get("only_if", {})
    templates = [template for form in row["forms"] for template in form]
    if any(prod(sizes[field] for field in _FIELD.findall(each)) > _MOST_NAMES for each in templates):
        return None
    forms = []
    for described in row["forms"]:
        form: dict[str, tuple[int, ...]] = {}
        for template, dims in described.items():
            if all(flags[flag] == wanted for flag, wanted in only_if.get(template, {}).items()):
                shape = tuple(size(text, sizes) for text in dims)
                form |= dict.fromkeys(_names(template, sizes), shape)
        forms.append(form)
    # Two entries: the ties if tie_word_embeddings is False, and if it is True.
    ties = row.get("tied", ({}, {}))[flags["tie_word_embeddings"]]
    return KnownClass(tuple(forms), ties, tuple(row.get("ignored", ())))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0  # bool is a subclass of int


def _names(template: str, sizes: Mapping[str, int]) -> Iterable[str]:
    pattern, fields = _FIELD.sub("{}", template), _FIELD.findall(template)
    return (
        pattern.format(*numbers) for numbers in itertools.product(*(range(sizes[field]) for field in fields))
    )


def size(text: str, sizes: Mapping[str, int]) -> int:
    """A sum of products of numbers and fields, such as ``heads*dim+2*kv*dim``, or one quotient ``hidden//heads``."""
    above, _, below = text.partition("//")
    if below:
        return size(above, sizes) // size(below, sizes)
    return sum(
        prod(int(part) if part.isdecimal() else sizes[part] for part in term.split("*"))
        for term in text.split("+")
    )


def ask_child(
    config: Mapping[str, Any],
    class_name: str,
    tensors: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
) -> Mapping[str, Any]:
    """The answer of `class_child` in a child process; ``{"unknown": reason}`` if there is none."""
    if "transformers" not in sys.modules and find_spec("transformers") is None:
        return {"unknown": "transformers is not installed", "is_absent": True}
    # `python -m` and `python -c` put the working directory first, which must not shadow packages in the child.
    is_script = not sys.flags.safe_path and sys.path[:1] in ([""], [os.getcwd()])
    path = [part for part in sys.path[is_script:] if part]
    request: dict[str, Any] = {"class": class_name, "config": config, "path": path}
    if tensors is not None:
        request["tensors"] = tensors
    # No downloads and no GPU: the answer needs neither.
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
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:  # no answer: the process has died
        last_line = done.stderr.strip().splitlines()[-1:]  # of a traceback, the error itself
        return {"unknown": f"the child process ended with status {done.returncode}: {' '.join(last_line)}"}
    return answer


def _describe(config: Mapping[str, Any], class_name: str) -> Mapping[str, Any]:
    """A class's description of itself: from this process if torch is imported already, else from a child process."""
    key = _key(config, class_name)
    if key not in _ANSWERS:
        # torch is loaded already; or an embedded interpreter has no executable to start as a child.
        if "torch" in sys.modules or not sys.executable:
            _ANSWERS[key] = class_child.answer({"class": class_name, "config": config})
        else:
            _ANSWERS[key] = ask_child(config, class_name)
    return _ANSWERS[key]


def _key(config: Mapping[str, Any], class_name: str) -> str:
    # A dtype changes neither names nor shapes.
    described = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    return f"{class_name} {json.dumps(described, sort_keys=True)}"


def class_asked_before(config: Mapping[str, Any], class_name: str) -> KnownClass | None:
    """The tensors of a class that has described itself in this process already; None for any other class."""
    answer = _ANSWERS.get(_key(config, class_name), {})
    if "forms" not in answer:
        return None
    forms = tuple({name: tuple(shape) for name, shape in form.items()} for form in answer["forms"])
    return KnownClass(forms, answer["ties"])


def orientation_of_class(config: Mapping[str, Any], class_name: str, module: str) -> bool | None:
    """Whether a module of a class has its weight as [in, out] (Conv1D) rather than [out, in] (Linear).

    Args:
        module: its name in memory, or the end of it.

    Returns:
        None if there is no such class in transformers, or no such module in it.
    """
    row = _rows().get(class_name)
    if isinstance(row, dict):
        leaf = module.rpartition(".")[2]
        if any(name.endswith(f"{leaf}.weight") for form in row["forms"] for name in form):
            return leaf in row.get("conv1d", ())
    orientations = {
        is_transposed
        for name, is_transposed in _describe(config, class_name).get("modules", {}).items()
        if name == module or name.endswith(f".{module}") or module.endswith(f".{name}")
    }
    return orientations.pop() if len(orientations) == 1 else None


def ties_of_class(config: Mapping[str, Any], class_name: str) -> Ties:
    """The ties of a class with the settings of a config.json, under names in memory and in files."""
    known = known_class(config, class_name)
    if known is not None:
        return dict(known.ties), ()
    answer = _describe(config, class_name)
    if "ties" in answer:
        return dict(answer["ties"]), ()
    if answer.get("is_absent"):
        return None, ()
    return None, (f"transformers could not say which weights of {class_name} are tied: {answer['unknown']}",)
