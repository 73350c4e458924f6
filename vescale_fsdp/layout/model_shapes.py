"""Names, shapes and dtypes of a model's parameters, and their units, without values.

Shapes come from a module (on the meta device or not), from a mapping, or from the headers of the safetensors files of a
Hugging Face folder. A unit is the parameters of one `fully_shard` call: by default the modules of repeated lists
(``model.layers.0``, ``model.layers.1``, ..), and the root with the rest.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, LayoutError
from vescale_fsdp.layout.safetensors_header import read_header


@dataclass(frozen=True)
class ParamShape:
    """The planner's input for one parameter. A granularity function gets this value if there is no module."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = True
    param: Any = field(default=None, compare=False, repr=False)  # the parameter, if shapes come from a module

    @property
    def ndim(self) -> int:
        """Dims of the parameter."""
        return len(self.shape)


@runtime_checkable
class _Module(Protocol):
    """The part of torch.nn.Module that planning needs, so that it does not import torch."""

    def named_parameters(self) -> Iterable[tuple[str, Any]]: ...


ShapeSource = Mapping[str, Any] | str | os.PathLike[str] | _Module


def shapes_of(source: ShapeSource, *, dtype: str = "bfloat16") -> tuple[ParamShape, ...]:
    """The parameters of a module, a mapping or a Hugging Face folder, in their order.

    Args:
        source: a module; a mapping from name to shape, or to ``(shape, dtype name)``; or a folder.
        dtype: dtype of the shapes in a mapping that name none.

    Raises:
        LayoutError: for a shape that is not valid, a folder without safetensors files or with damaged headers.
    """
    if isinstance(source, Mapping):
        return tuple(_of_entry(fqn, entry, dtype) for fqn, entry in source.items())
    if isinstance(source, str | os.PathLike):
        return _of_folder(Path(source))
    if isinstance(source, _Module):
        return tuple(
            ParamShape(fqn, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad, p)
            for fqn, p in source.named_parameters()
        )
    raise LayoutError(
        "There are no shapes to plan with.",
        expected="a module, a mapping from name to shape, or a folder with safetensors files",
        got=type(source).__name__,
    )


def _of_entry(fqn: str, entry: Any, dtype: str) -> ParamShape:
    shape, kind = entry, dtype
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
    files = sorted(folder.glob("*.safetensors"))  # glob has no order
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
                    # whole=False: headers are enough to plan
                    lambda _, nbytes: stream.read(nbytes),
                    file.stat().st_size,
                    file,
                    whole=False,
                )
            # So that all bad input of a plan raises one class.
            except (ConversionError, CorruptCheckpointError) as error:
                raise LayoutError(
                    error.problem, expected=error.expected, got=error.got, where=error.where, todo=error.todo
                ) from error
        shapes.update((fqn, ParamShape(fqn, entry.shape, entry.dtype.name)) for fqn, entry in entries.items())
    # Files list tensors by name or size; this restores the order of layers.
    return tuple(shapes[fqn] for fqn in sorted(shapes, key=natural_key))


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that compares runs of digits as numbers, so that layer 2 comes before layer 10."""
    parts = re.split(r"(\d+)", name)
    # The leading 0 or 1 keeps numbers and text from being compared with each other.
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)


def units_of(shapes: Sequence[ParamShape], names: Sequence[str] | None = None) -> dict[str, list[ParamShape]]:
    """Assign parameters to units: unit name -> parameters, with names relative to the unit.

    The root, "", is last, because it is wrapped last.

    Args:
        shapes: all parameters, by full name.
        names: names of the modules to be wrapped, in which each part may be a pattern (``"model.layers.*"``). A
            parameter belongs to the deepest such module. None: the members of lists in which at least two members have
            the same parameters.

    Raises:
        LayoutError: if a name matches no module.
    """
    modules = _repeated(shapes) if names is None else _matching(shapes, names)
    units: dict[str, list[ParamShape]] = {}
    for shape in shapes:
        unit = next((module for module in reversed(_ancestors(shape.fqn)) if module in modules), "")
        units.setdefault(unit, []).append(_relative(shape, unit))
    if "" in units:  # the root is wrapped last, so it comes last
        units[""] = units.pop("")
    return units


def _relative(shape: ParamShape, module: str) -> ParamShape:
    return replace(shape, fqn=shape.fqn.removeprefix(f"{module}.")) if module else shape


def _ancestors(fqn: str) -> list[str]:
    """Modules that contain a parameter, outermost first, without the root."""
    parts = fqn.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _repeated(shapes: Sequence[ParamShape]) -> set[str]:
    """Members of the outermost lists in which at least two members have the same parameters."""
    lists: dict[str, dict[str, list[ParamShape]]] = {}
    for shape in shapes:
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
    modules = sorted({ancestor for shape in shapes for ancestor in _ancestors(shape.fqn)})
    matching: set[str] = set()
    for name in names:
        parts = name.split(".")
        matched = [
            module
            for module in modules
            if len(split := module.split(".")) == len(parts)
            and all(fnmatch.fnmatchcase(part, pattern) for part, pattern in zip(split, parts, strict=True))
        ]
        if name and not matched:
            raise LayoutError(
                "A unit's name matches no module.",
                expected="names of modules with parameters, or '' for the root",
                got=repr(name),
                # 0.3: below difflib's default, because wildcards make a pattern unlike the name that it means.
                where=f"near it: {', '.join(difflib.get_close_matches(name, modules, 5, 0.3)) or modules[:5]}",
                todo="write one part per module level, such as 'model.layers.*'",
            )
        matching.update(matched)
    return matching
