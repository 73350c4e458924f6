"""Between nested states and flat names: as torch.distributed.checkpoint flattens, and back without loss.

    {"model": {"a.b": T}, "groups": [{"lr": 1}]}     names  model.a.b        groups.0.lr
                                                     paths  (model, a.b)     (groups, ListIndex(0), lr)

Dicts are always entered, lists only if something inside is a tensor or a container, and the path remembers
which was which: a plain int in a path is a key of a dict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from vescale_fsdp.errors import ConversionError

Path = tuple[str | int, ...]
# Modules that torch.compile, activation checkpointing and FSDP1 put around others.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class ListIndex(int):
    """A place in a list, as part of a path; never equal to a plain int, which is a key of a dict."""

    def __hash__(self) -> int:
        return hash(("list", int(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ListIndex) and int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def name_of(path: Path) -> str:
    """The flattened name of a path."""
    return ".".join([part if type(part) is str else str(part) for part in path])


def without_wrappers(name: str) -> str:
    """A dotted name without the parts that ``torch.compile``, activation checkpointing and FSDP1 add."""
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def flatten(state: Mapping[Any, Any], is_tensor: Callable[[Any], bool]) -> dict[Path, Any]:
    """Leaves of a nested state by path.

    Raises:
        ConversionError: if two leaves would get one name.
    """
    found: dict[Path, Any] = {}

    def add(value: Any, path: Path) -> None:
        if is_tensor(value):
            found[path] = value
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                add(inner, (*path, key if isinstance(key, (str, int)) else str(key)))
            if not value and path:
                found[path] = {}
        elif isinstance(value, (list, tuple)) and any(
            isinstance(item, (Mapping, list, tuple)) or is_tensor(item) for item in value
        ):
            for index, inner in enumerate(value):
                add(inner, (*path, ListIndex(index)))
        else:
            found[path] = value

    add(state, ())
    names: dict[str, Path] = {}
    for path in found:
        name = name_of(path)
        if name in names:
            raise ConversionError(
                "Two entries of the state have the same flattened name.",
                expected="names that differ when their keys are joined by dots",
                got=f"{names[name]} and {path}",
                todo="rename one of the keys in the source",
            )
        names[name] = path
    return found


def claim_name(name: str, taken: Collection[str]) -> None:
    """Refuse a tensor's name in a native checkpoint that another has: keys joined by ``/``, an empty one left out.

    Raises:
        ConversionError: if it is taken.
    """
    if name in taken:
        raise ConversionError(
            "Two tensors would have one name.",
            expected="keys that differ when they are joined, as text",
            got=f"two times {name!r}",
            todo="leave one of them out with --exclude, or rename it in the source",
        )


def nest(leaves: Mapping[Path, Any]) -> dict[Any, Any]:
    """The nested state whose leaves these are; missing places of a list are closed up.

    Raises:
        ConversionError: if a leaf lies inside another leaf.
    """
    root: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConversionError(
                    "An entry of the state lies inside another.",
                    expected="values at the ends of paths only",
                    got=path,
                    todo="leave one of the entries out with --exclude",
                )
        node[path[-1]] = leaf
    closed: dict[Any, Any] = _close_lists(root)
    return closed


def _close_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if node and all(isinstance(key, ListIndex) for key in node):
        return [_close_lists(node[key]) for key in sorted(node, key=int)]
    return {int(k) if isinstance(k, ListIndex) else k: _close_lists(value) for k, value in node.items()}
