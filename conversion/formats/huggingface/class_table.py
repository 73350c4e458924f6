"""The shipped table: what common classes of transformers take, without asking transformers.

    class_table.json    class -> names and shapes as functions of config.json, options, ties     (tools/class_table.py)

A row knows its limits: for settings that it does not describe there is no answer, and the class itself is asked
(`model_class`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

ClassForm = Mapping[str, tuple[int, ...]]
"""Name -> shape of every tensor."""
_MOST_NAMES = 10**6  # of one row; a config.json can say any number
_FIELD = re.compile(r"\{(\w+)\}")  # in a name, for 0, 1, .. below the field's value


@dataclass(frozen=True)
class KnownClass:
    """What a class with certain settings takes.

    Args:
        forms: its tensors, under the names in memory and, where they differ, in files; tied ones included.
        ties: name -> the name that stands for it.
        ignored: patterns of names that it leaves out without a word.
    """

    forms: tuple[ClassForm, ...]
    ties: Mapping[str, str]
    ignored: tuple[str, ...] = ()

    def problems(self, shapes: ClassForm) -> tuple[str, ...]:
        """What keeps the class from taking tensors of these names and shapes; empty if it takes them."""
        return min((tuple(self._misfits(form, shapes)) for form in self.forms), key=len)

    def _misfits(self, form: ClassForm, shapes: ClassForm) -> Iterator[str]:
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
    """What the table says of a class with the settings of a config.json; None if it does not know."""
    row = _rows().get(class_name)
    return expected_by(row, config) if isinstance(row, dict) else None


def is_conv1d(class_name: str, module: str) -> bool | None:
    """Whether a matrix of a class is stored as [in, out]; None if the table does not know the class or the module.

    Args:
        module: its name, or the end of it.
    """
    row = _rows().get(class_name)
    if not isinstance(row, dict):
        return None
    leaf = module.rpartition(".")[2]
    names = (name for form in row["forms"] for name in form)
    return leaf in row.get("conv1d", ()) if any(name.endswith(f"{leaf}.weight") for name in names) else None


def expected_by(row: Mapping[str, Any], config: Mapping[str, Any]) -> KnownClass | None:
    """What a row of the table says for the settings of a config.json; None where it does not describe them."""
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
        except (KeyError, ZeroDivisionError):  # of a field that is not there itself
            return None
    only_if = row.get("only_if", {})
    if any(_count(template, sizes) > _MOST_NAMES for form in row["forms"] for template in form):
        return None
    forms = []
    for described in row["forms"]:
        form: dict[str, tuple[int, ...]] = {}
        for template, dims in described.items():
            if all(flags[flag] == wanted for flag, wanted in only_if.get(template, {}).items()):
                shape = tuple(size(text, sizes) for text in dims)
                form |= dict.fromkeys(_names(template, sizes), shape)
        forms.append(form)
    ties = row.get("tied", ({}, {}))[flags["tie_word_embeddings"]]
    return KnownClass(tuple(forms), ties, tuple(row.get("ignored", ())))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _count(template: str, sizes: Mapping[str, int]) -> int:
    return prod(sizes[field] for field in _FIELD.findall(template))


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
