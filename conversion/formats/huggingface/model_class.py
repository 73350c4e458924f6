"""The weights that a class of transformers has: names, shapes, ties, orientation, and whether it loads given tensors.

    class_table.json    common classes: names and shapes as functions of config.json, options, ties; imports nothing.
                        Made by `tools.class_table`. A row has no answer for settings that it does not describe.
    `class_child`       all other classes, in a child process: 6 CPU seconds and 250 to 600 MiB. It runs before or after
                        the copy of the data, never at the same time. This process keeps its answers.

The child process is isolated (``python -I``): it gets this process's search path without the working directory, and is
told to use no network and no GPU. It is killed after ten minutes.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from vescale_fsdp.checkpoint.storage.checksums import digest_of
from vescale_fsdp.conversion.formats.huggingface import class_child

ClassForm = Mapping[str, tuple[int, ...]]
"""Name -> shape of every tensor."""
TensorKinds = Mapping[str, tuple[tuple[int, ...], str]]
"""Name -> (shape, torch's name of the dtype) of every tensor."""
_MOST_NAMES = 10**6  # maximum number of names of one template: a config.json can contain any number of layers
_FIELD = re.compile(r"\{(\w+)\}")  # in a name template: replaced by 0 up to the field's value - 1
_LONGEST_S = 600  # time limit of a child process
# No network and no GPU, since names and shapes need neither. UTF-8, since the request and the answer are UTF-8.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1"}
# Prefixes of variables that launchers set, which the child must not inherit: they change how transformers loads.
_OF_LAUNCHERS = ("ACCELERATE_", "FSDP_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")
Ties = tuple[dict[str, str] | None, tuple[str, ...]]
"""(ties, warnings). The ties are name -> the name it is tied to; None if the class gave no answer."""
# Cached descriptions of classes, by `_key`: one conversion needs a description several times.
_ANSWERS: dict[str, Mapping[str, Any]] = {}
# Answers of child processes, by the digest of the question: a planned result and its files are the same question.
_ANSWERED: dict[bytes, Mapping[str, Any]] = {}


@dataclass(frozen=True)
class KnownClass:
    """The tensors of a class with the settings of one config.json.

    Args:
        forms: all tensors, tied tensors included, under their names in memory and, if these differ, in files.
        ties: name -> the name it is tied to.
        ignored: regular expressions for names that the class silently ignores.
    """

    forms: tuple[ClassForm, ...]
    ties: Mapping[str, str]
    ignored: tuple[str, ...] = ()

    def problems(self, shapes: ClassForm) -> tuple[str, ...]:
        """List the differences between ``shapes`` and the form that fits best; empty if the class loads them."""
        return min((tuple(self._differences(form, shapes)) for form in self.forms), key=len)

    def _differences(self, form: ClassForm, shapes: ClassForm) -> Iterator[str]:
        """Yield one text for each difference between the tensors of a form and ``shapes``."""
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
    """Read the table; returns its rows by class name."""
    rows: dict[str, Any] = json.loads(Path(__file__).with_name("class_table.json").read_text())
    return rows


def known_class(config: Mapping[str, Any], class_name: str) -> KnownClass | None:
    """Look up the tensors of a class with the settings of a config.json; None if the table has no answer."""
    row = _rows().get(class_name)
    return expected_by(row, config) if isinstance(row, dict) else None


def expected_by(row: Mapping[str, Any], config: Mapping[str, Any]) -> KnownClass | None:
    """Evaluate a row of the table for a config.json; returns None for settings that the row does not describe."""
    aliases = row.get("aliases", {})  # alternative names of settings
    given = {aliases.get(key, key): value for key, value in config.items()}
    # Settings whose influence the row does not describe must have the value for which the row was made.
    if any(key in given and given[key] != value for key, value in row.get("fixed", {}).items()):
        return None
    flags = {flag: given.get(flag, value) for flag, value in row["flags"].items()}
    if not all(isinstance(value, bool) for value in flags.values()):  # the row describes True and False only
        return None
    sizes = {key: given[key] for key in row["fields"] if _is_size(given.get(key))}
    for key in row["fields"].keys() - sizes.keys():
        # For a field that is null or absent, the row may have an expression for the value that the class then uses.
        rule = row["fields"][key].get("null" if key in given else "absent")
        if given.get(key) is not None or rule is None:
            return None
        try:
            sizes[key] = size(str(rule), {name: value for name, value in given.items() if _is_size(value)})
        except (KeyError, ZeroDivisionError):  # the rule needs a field that is absent or 0
            return None
    only_if = row.get("only_if", {})
    templates = [template for form in row["forms"] for template in form]
    # A number of names per template, such as layers times experts.
    if any(prod(sizes[field] for field in _FIELD.findall(each)) > _MOST_NAMES for each in templates):
        return None
    forms = []
    for described in row["forms"]:
        form: dict[str, tuple[int, ...]] = {}
        for template, dims in described.items():
            if all(flags[flag] == wanted for flag, wanted in only_if.get(template, {}).items()):
                try:
                    shape = tuple(size(text, sizes) for text in dims)
                except ZeroDivisionError:  # by a number of heads that is 0
                    return None
                form |= dict.fromkeys(_names(template, sizes), shape)
        forms.append(form)
    # A pair, indexed by tie_word_embeddings: the ties if it is False, the ties if it is True.
    ties = row.get("tied", ({}, {}))[flags["tie_word_embeddings"]]
    return KnownClass(tuple(forms), ties, tuple(row.get("ignored", ())))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0  # bool is a subclass of int


def _names(template: str, sizes: Mapping[str, int]) -> Iterable[str]:
    """Yield all names of a template such as ``layers.{num_hidden_layers}.weight``."""
    pattern, fields = _FIELD.sub("{}", template), _FIELD.findall(template)
    return (
        pattern.format(*numbers) for numbers in itertools.product(*(range(sizes[field]) for field in fields))
    )


def size(text: str, sizes: Mapping[str, int]) -> int:
    """Evaluate a sum of products of numbers and fields, such as ``heads*dim+2*kv*dim``, or a quotient of two sums.

    Raises:
        KeyError: if ``sizes`` lacks a field.
    """
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
    tensors: TensorKinds | None = None,
    stored: TensorKinds | None = None,
) -> Mapping[str, Any]:
    """Return the answer of `class_child` in a child process; ``{"unknown": reason}`` if it fails.

    Args:
        config: the config.json.
        tensors: name -> (shape, torch's name of the dtype), to check whether the class loads these; None for a
            description of the class.
        stored: the same of the tensors of files, to get the names in memory.
    """
    import subprocess  # takes milliseconds, and most conversions start no child

    # Without transformers the child could not answer, and need not be started.
    if "transformers" not in sys.modules and find_spec("transformers") is None:
        return {"unknown": "transformers is not installed", "is_absent": True}
    # `python -m` and `python -c` put the working directory first, except in safe mode (-P). Its files must not shadow
    # packages in the child.
    is_script = not sys.flags.safe_path and sys.path[:1] in ([""], [os.getcwd()])
    path = [part for part in sys.path[is_script:] if part]
    request: dict[str, Any] = {"class": class_name, "config": config, "path": path}
    if tensors is not None:
        request["tensors"] = tensors
    if stored is not None:
        request["stored"] = stored
    question = json.dumps(request)
    digest = digest_of(question.encode())
    if digest in _ANSWERED:
        return _ANSWERED[digest]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)} | _OFFLINE
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(Path(class_child.__file__).resolve())],
            input=question,
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
    except ValueError:  # stdout is not JSON: the process has died before its answer
        last_line = done.stderr.strip().splitlines()[-1:]  # the last line of a traceback is the error itself
        return {"unknown": f"the child process ended with status {done.returncode}: {' '.join(last_line)}"}
    if "unknown" not in answer:
        _ANSWERED[digest] = answer
    return answer


def _describe(config: Mapping[str, Any], class_name: str) -> Mapping[str, Any]:
    """Return the description of a class by `class_child`, which is cached."""
    key = _key(config, class_name)
    if key not in _ANSWERS:
        if _is_in_process():
            _ANSWERS[key] = class_child.answer({"class": class_name, "config": config})
        else:
            _ANSWERS[key] = ask_child(config, class_name)
    return _ANSWERS[key]


def _is_in_process() -> bool:
    """Whether no child is needed: torch is imported already, or an embedded interpreter has no executable to start."""
    return "torch" in sys.modules or not sys.executable


def _key(config: Mapping[str, Any], class_name: str) -> str:
    """Return the key of a class and its settings in `_ANSWERS`."""
    # The dtype is left out, since it changes neither names nor shapes.
    described = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    return f"{class_name} {json.dumps(described, sort_keys=True)}"


def class_asked_before(config: Mapping[str, Any], class_name: str) -> KnownClass | None:
    """Return the tensors of a class from its cached description; None if this process has none."""
    answer = _ANSWERS.get(_key(config, class_name), {})
    if "forms" not in answer:
        return None
    forms = tuple({name: tuple(shape) for name, shape in form.items()} for form in answer["forms"])
    return KnownClass(forms, answer["ties"])


def memory_names(config: Mapping[str, Any], class_name: str | None) -> frozenset[str] | None:
    """Return the names that a class has in memory; None if neither the table nor an earlier answer has them."""
    if class_name is None:
        return None
    known = known_class(config, class_name) or class_asked_before(config, class_name)
    return None if known is None else frozenset(known.forms[0])


def has_names_of_files(config: Mapping[str, Any], class_name: str, names: Iterable[str]) -> bool:
    """Whether the shipped table says that a class has these names, and the same names in memory and in files."""
    known = known_class(config, class_name)
    return known is not None and len(known.forms) == 1 and known.forms[0].keys() >= set(names)


def files_of_class(config: Mapping[str, Any], class_name: str) -> Mapping[str, Any]:
    """Return the description of a class, with ``"in_files"`` (see `class_child.answer`), or ``{"unknown": reason}``."""
    return _describe(config, class_name)


def memory_of_class(config: Mapping[str, Any], class_name: str, stored: TensorKinds) -> Mapping[str, Any]:
    """Return what the tensors of a class are made from (see `class_child`), or ``{"unknown": reason}``.

    Args:
        stored: name -> (shape, torch's name of the dtype) of the tensors of files.
    """
    if _is_in_process():
        return class_child.answer({"class": class_name, "config": config, "stored": stored})
    return ask_child(config, class_name, stored=stored)


def orientation_of_class(config: Mapping[str, Any], class_name: str, module: str) -> bool | None:
    """Whether the weight of a module is [in, out] (Conv1D) rather than [out, in] (Linear).

    Args:
        module: the module's name in memory, or the end of this name.

    Returns:
        None if transformers has no such class, the class has no such module, or several modules of this name differ.
    """
    row = _rows().get(class_name)
    if isinstance(row, dict):
        leaf = module.rpartition(".")[2]
        if any(f".{name}".endswith(f".{leaf}.weight") for form in row["forms"] for name in form):
            return leaf in row.get("conv1d", ())
    orientations = {
        is_transposed
        for name, is_transposed in _describe(config, class_name).get("modules", {}).items()
        if name == module or name.endswith(f".{module}") or module.endswith(f".{name}")
    }
    return orientations.pop() if len(orientations) == 1 else None


def ties_of_class(config: Mapping[str, Any], class_name: str, names: Collection[str] = ()) -> Ties:
    """Return the ties of a class with the settings of a config.json, by names in memory and by names in files.

    Args:
        names: names of the model's tensors. One name may be tied to a name in memory and to another one in files.
    """
    known = known_class(config, class_name)
    if known is not None:
        return dict(known.ties), ()
    answer = _describe(config, class_name)
    if "ties" in answer:
        ties = dict(answer["ties"])
        ties |= {
            alias: target
            for alias, target in answer["memory_ties"].items()
            if target in names and ties[alias] not in names
        }
        return ties, ()
    if answer.get("is_absent"):
        return None, ()
    return None, (f"transformers could not say which weights of {class_name} are tied: {answer['unknown']}",)
