"""Convert nested states to flat names, as torch.distributed.checkpoint flattens them, and back without loss.

    {"model": {"a.b": T}, "groups": [{"lr": 1}]}     names  model.a.b        groups.0.lr
                                                     paths  (model, a.b)     (groups, ListIndex(0), lr)

Dicts are always flattened, lists only if an item is a tensor or a container. Paths distinguish dicts and lists: a list
index is a `ListIndex`, and a plain int is a key of a dict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from vescale_fsdp.errors import ConversionError, option

Path = tuple[str | int, ...]
# Names of modules inside the wrappers of torch.compile, activation checkpointing and FSDP1.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class ListIndex(int):
    """An index of a list, as part of a path; never equal to a plain int, which is a key of a dict."""

    def __hash__(self) -> int:
        return hash(("list", int(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ListIndex) and int(self) == int(other)

    def __ne__(self, other: object) -> bool:  # int defines its own, which ignores `__eq__`
        return not self == other


def name_of(path: Path) -> str:
    """Return the flattened name of a path: its keys and indices, joined by dots."""
    return ".".join([part if type(part) is str else str(part) for part in path])


def without_wrappers(name: str) -> str:
    """Return a dotted name without the parts that ``torch.compile``, activation checkpointing and FSDP1 add."""
    if not any(wrapper in name for wrapper in _WRAPPERS):  # fast path: most names have no such part
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def flatten(state: Mapping[Any, Any], is_tensor: Callable[[Any], bool]) -> dict[Path, Any]:
    """Return the leaves of a nested state by path.

    Args:
        is_tensor: whether a value is a tensor, which is always a leaf.

    Raises:
        ConversionError: if two leaves have the same flattened name.
    """
    leaves: dict[Path, Any] = {}

    def add(value: Any, path: Path) -> None:
        if is_tensor(value):
            leaves[path] = value
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                # Keys of other types become text, as they do in the flattened name.
                add(inner, (*path, key if isinstance(key, (str, int)) else str(key)))
            if not value and path:
                leaves[path] = {}  # an empty dict is a leaf; otherwise it would be lost
        # A list of plain values is one leaf, as in torch.distributed.checkpoint.
        elif isinstance(value, (list, tuple)) and any(
            isinstance(item, (Mapping, list, tuple)) or is_tensor(item) for item in value
        ):
            for index, inner in enumerate(value):
                add(inner, (*path, ListIndex(index)))
        else:
            leaves[path] = value

    add(state, ())
    names: dict[str, Path] = {}
    for path in leaves:
        name = name_of(path)
        if name in names:
            raise ConversionError(
                "Two entries of the state have the same flattened name.",
                expected="different names after keys are joined by dots",
                got=f"{names[name]} and {path}",
                todo="rename one of the keys in the source",
            )
        names[name] = path
    return leaves


def claim_name(name: str, taken: Collection[str]) -> None:
    """Check that a tensor's name is not taken. The name is that of a native checkpoint: keys joined by ``/``.

    Raises:
        ConversionError: if another tensor has the name.
    """
    if name in taken:
        raise ConversionError(
            "Two tensors would have the same name.",
            expected="different names after keys are joined as text",
            got=f"two tensors named {name!r}",
            todo=f"exclude one of them with {option('exclude')}, or rename it in the source",
        )


def nest(leaves: Mapping[Path, Any]) -> dict[Any, Any]:
    """Build the nested state from its leaves by path. Gaps in the indices of a list are closed.

    Raises:
        ConversionError: if one leaf's path is the beginning of another leaf's path.
    """
    root: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise _inside(path)
        if path[-1] in node:  # as a container, since every path occurs once
            raise _inside(path)
        node[path[-1]] = leaf
    closed: dict[Any, Any] = _close_lists(root)
    return closed


def _inside(path: Path) -> ConversionError:
    return ConversionError(
        "An entry of the state is inside another entry that is not a container.",
        expected="values only at the ends of paths",
        got=name_of(path),
        todo=f"exclude one of the entries with {option('exclude')}",
    )


def _close_lists(node: Any) -> Any:
    """Convert the dicts whose keys are all list indices to lists. In other dicts, indices become plain int keys."""
    if not isinstance(node, dict):
        return node
    if node and all(isinstance(key, ListIndex) for key in node):
        return [_close_lists(node[key]) for key in sorted(node, key=int)]  # leaves may come in any order
    return {int(k) if isinstance(k, ListIndex) else k: _close_lists(value) for k, value in node.items()}
