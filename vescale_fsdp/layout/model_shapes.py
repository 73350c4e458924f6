"""Names, shapes and dtypes of a model's parameters, and the units that contain the parameters. No values are read.

Shapes come from a module (on the meta device or not), from a mapping, or from the headers of the safetensors files of a
Hugging Face folder. A unit contains the parameters of one `fully_shard` call. By default each module of a repeated list
(``model.layers.0``, ``model.layers.1``, ..) is a unit, and the root is a unit with all other parameters.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, LayoutError
from vescale_fsdp.layout.safetensors_header import read_header


@dataclass(frozen=True)
class ParamShape:
    """Name, shape and dtype of one parameter. If there is no module, a granularity function gets this as its param."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = True
    is_tied: bool = False  # whether other modules have the same parameter, as far as the source says
    param: Any = field(default=None, compare=False, repr=False)  # the parameter, if shapes come from a module

    @property
    def ndim(self) -> int:
        """Number of dims of the parameter."""
        return len(self.shape)


@runtime_checkable
class _Module(Protocol):
    """The method of torch.nn.Module that planning uses. A protocol, so that planning does not import torch."""

    def named_parameters(self, *, remove_duplicate: bool) -> Iterable[tuple[str, Any]]: ...


ShapeSource = Mapping[str, Any] | str | os.PathLike[str] | _Module


def shapes_of(source: ShapeSource, *, dtype: str = "bfloat16") -> tuple[ParamShape, ...]:
    """Return the parameters of a module, a mapping or a Hugging Face folder, in definition order.

    Args:
        source: a module; a mapping from name to shape, or to ``(shape, dtype name)``; or a folder.
        dtype: dtype of the mapping's entries that have none.

    Raises:
        LayoutError: if a shape is not valid, or if the folder has no safetensors files or damaged headers.
    """
    if isinstance(source, Mapping):
        return tuple(_of_entry(fqn, entry, dtype) for fqn, entry in source.items())
    if isinstance(source, str | os.PathLike):
        return _of_folder(Path(source))
    if isinstance(source, _Module):
        return tuple(_of_module(source))
    raise LayoutError(
        "There are no shapes to plan with.",
        expected="a module, a mapping from name to shape, or a folder with safetensors files",
        got=type(source).__name__,
    )


def _of_module(module: _Module) -> Iterator[ParamShape]:
    """Yield the parameters of a module."""
    names = Counter(id(param) for _, param in module.named_parameters(remove_duplicate=False))
    for fqn, param in module.named_parameters(remove_duplicate=True):
        dtype = str(param.dtype).removeprefix("torch.")
        yield ParamShape(fqn, tuple(param.shape), dtype, param.requires_grad, names[id(param)] > 1, param)


def _of_entry(fqn: str, entry: Any, dtype: str) -> ParamShape:
    """Return the parameter of one entry of a mapping."""
    shape, kind = entry, dtype
    # (shape, dtype name): a shape of two sizes contains no str.
    if isinstance(entry, Sequence) and len(entry) == 2 and isinstance(entry[1], str):
        shape, kind = entry
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise LayoutError(
            "This shape is not valid.",
            expected="whole numbers >= 0, or (shape, dtype name)",
            got=entry,
            where=fqn,
        )
    return ParamShape(fqn, tuple(shape), kind)


def _of_folder(folder: Path) -> tuple[ParamShape, ...]:
    """Return the parameters in the safetensors headers of a folder."""
    # Sorted, because the order of glob depends on the file system.
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise LayoutError(
            "The folder contains no safetensors files.",
            expected="*.safetensors, as in Hugging Face repositories",
            got=f"{len(list(folder.glob('*')))} other files" if folder.is_dir() else "no folder",
            where=folder,
            todo="download the weights, or pass a mapping of shapes",
        )
    shapes: dict[str, ParamShape] = {}
    for file in files:
        with file.open("rb") as stream:
            try:
                entries, _ = read_header(
                    # `read_header` reads from the start and in order, so the offset is not needed.
                    lambda _, nbytes: stream.read(nbytes),
                    file.stat().st_size,
                    file,
                    whole=False,  # plans need no data, so a file may be cut off after its header
                )
            # Translated, so that all bad input of a plan raises one class.
            except (ConversionError, CorruptCheckpointError) as error:
                raise LayoutError(
                    error.problem, expected=error.expected, got=error.got, where=error.where, todo=error.todo
                ) from error
        shapes.update((fqn, ParamShape(fqn, entry.shape, entry.dtype.name)) for fqn, entry in entries.items())
    # Files list tensors by name or size. The natural order of names puts layer 2 before layer 10, as the model does.
    return tuple(shapes[fqn] for fqn in sorted(shapes, key=natural_key))


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that compares runs of digits as numbers, so that layer 2 comes before layer 10."""
    parts = re.split(r"(\d+)", name)  # the group keeps the digits in the result
    # A leading 0 (number) or 1 (text) prevents a comparison between a number and a text. The digits break ties such as
    # 1 and 01.
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)


def units_of(shapes: Sequence[ParamShape], names: Sequence[str] | None = None) -> dict[str, list[ParamShape]]:
    """Assign each parameter to a unit.

    Args:
        shapes: all parameters, by full name.
        names: names of the modules to be wrapped, in which each part may be a pattern (``"model.layers.*"``). A
            parameter belongs to the deepest such module. None: the members of each list of modules in which at least
            two members have the same parameters.

    Returns:
        The parameters of each unit by the unit's name, with names relative to the unit. The root, "", is last.

    Raises:
        LayoutError: if a name matches no module.
    """
    modules = _repeated(shapes) if names is None else _matching(shapes, names)
    units: dict[str, list[ParamShape]] = {}
    for shape in shapes:
        unit = next((module for module in reversed(_ancestors(shape.fqn)) if module in modules), "")
        units.setdefault(unit, []).append(_relative(shape, unit))
    if "" in units:  # the root comes last, because users wrap it last
        units[""] = units.pop("")
    return units


def _relative(shape: ParamShape, module: str) -> ParamShape:
    """Return the parameter with a name relative to a module; "" is the root."""
    return replace(shape, fqn=shape.fqn.removeprefix(f"{module}.")) if module else shape


def _ancestors(fqn: str) -> list[str]:
    """Return the names of the modules that contain a parameter, outermost first, without the root."""
    parts = fqn.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _repeated(shapes: Sequence[ParamShape]) -> set[str]:
    """Return the members of each outermost list of modules in which at least two members have the same parameters."""
    lists: dict[str, dict[str, list[ParamShape]]] = {}
    for shape in shapes:
        # A module whose name ends in a number, such as "model.layers.0", is a member of a list.
        member = next((a for a in _ancestors(shape.fqn) if a.rpartition(".")[2].isdecimal()), None)
        if member is not None:
            lists.setdefault(member.rpartition(".")[0], {}).setdefault(member, []).append(shape)
    repeated: set[str] = set()
    for members in lists.values():
        kinds = [tuple(_relative(s, name) for s in params) for name, params in members.items()]
        if len(set(kinds)) < len(kinds):
            repeated.update(members)
    return repeated


def _matching(shapes: Sequence[ParamShape], names: Sequence[str]) -> set[str]:
    """Return the modules that match a name or pattern. Raises LayoutError for a name without a match."""
    modules = sorted({ancestor for shape in shapes for ancestor in _ancestors(shape.fqn)})
    matching: set[str] = set()
    for name in names:
        parts = name.split(".")
        # Parts are matched one by one, so that * does not match several levels of modules.
        matched = [
            module
            for module in modules
            if len(split := module.split(".")) == len(parts)
            and all(fnmatch.fnmatchcase(part, pattern) for part, pattern in zip(split, parts, strict=True))
        ]
        if name and not matched:  # "" is the root, which is not among the modules and is always a unit
            raise LayoutError(
                "A unit's name matches no module.",
                expected="names of modules with parameters, or '' for the root",
                got=repr(name),
                # 0.3 is below difflib's default (0.6), because wildcards make a pattern unlike the intended name.
                where=f"near it: {', '.join(difflib.get_close_matches(name, modules, 5, 0.3)) or modules[:5]}",
                todo="write one part per module level, such as 'model.layers.*'",
            )
        matching.update(matched)
    return matching
