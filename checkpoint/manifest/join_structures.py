"""One manifest from the structures of ranks that hold different state (pipeline stages, experts).

Dicts are joined key by key. A tensor may occur in several structures: described alike, its ranks are joined;
described differently, each description must be complete on its own, else ranks disagree about the layout
and the save is refused with the first difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vescale_fsdp.checkpoint.manifest.distribution import Axes, Cut, Holders, LayoutCut
from vescale_fsdp.checkpoint.manifest.rank_set import RankSet
from vescale_fsdp.checkpoint.manifest.state_tree import Json, child_name
from vescale_fsdp.checkpoint.manifest.structure import Entry, Structure, dump_json, renumber
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.layout.group_layout import GroupLayout


class _Merged:
    """Joined tree and tables; ``entries`` are the tensors with the ranks that hold each."""

    def __init__(self) -> None:
        self.tree: Json = None
        self.axes: dict[Axes, int] = {}
        self.layouts: dict[GroupLayout, int] = {}
        self.entries: dict[Entry, RankSet] = {}


def merge_structures(classes: Sequence[tuple[RankSet, Structure]]) -> tuple[Structure, tuple[RankSet, ...]]:
    """Join the structures of all ranks.

    Args:
        classes: each distinct structure with the ranks that have it, in order of their first rank.

    Returns:
        The joined structure, tensors in file order, and the ranks that hold each of them.

    Raises:
        CheckpointError: if ranks disagree, naming the first difference.
    """
    merged = _Merged()
    for ranks, structure in classes:
        _add(merged, structure, ranks)
    found = list(merged.entries)
    order = sorted(range(len(found)), key=lambda place: -found[place].itemsize)
    tree = renumber(merged.tree, {place: number for number, place in enumerate(order)})
    entries = tuple(found[place] for place in order)
    holders = tuple(merged.entries[entry] for entry in entries)
    return Structure(tree, entries, tuple(merged.axes), tuple(merged.layouts)), holders


def _add(merged: _Merged, structure: Structure, ranks: RankSet) -> None:
    axes = [merged.axes.setdefault(item, len(merged.axes)) for item in structure.axes]
    layouts = [merged.layouts.setdefault(item, len(merged.layouts)) for item in structure.layouts]
    numbers = {}
    places = {entry: place for place, entry in enumerate(merged.entries)}
    for place, entry in enumerate(structure.entries):
        moved = replace(
            entry, axes=axes[entry.axes], cuts=tuple(_move_cut(cut, layouts) for cut in entry.cuts)
        )
        known = merged.entries.get(moved)
        merged.entries[moved] = ranks if known is None else known.union(ranks)
        numbers[place] = places.setdefault(moved, len(places))
    tree = renumber(structure.tree, numbers)
    merged.tree = tree if merged.tree is None else _join(merged.tree, tree, "", list(merged.entries))


def _move_cut(cut: Cut, layouts: Sequence[int]) -> Cut:
    return LayoutCut(layouts[cut.layout], cut.slot) if isinstance(cut, LayoutCut) else cut


def _join(left: Json, right: Json, name: str, entries: Sequence[Entry]) -> Json:
    """Join two nodes of one place of the tree."""
    if left == right or _kind(right) == "absent":
        return left
    if _kind(left) == "absent":
        return right
    if _kind(left) == "tensor" and _kind(right) == "tensor":
        a, b = entries[left["i"]], entries[right["i"]]
        if (a.shape, a.dtype) == (b.shape, b.dtype):
            return left
        raise _differ(name, f"{a.dtype} {a.shape}", f"{b.dtype} {b.shape}")
    if isinstance(left, dict) and isinstance(right, dict) and "$" not in left and "$" not in right:
        joined = dict(left)
        for key, item in right.items():
            joined[key] = _join(left[key], item, child_name(name, key), entries) if key in left else item
        return joined
    if _kind(left) == _kind(right) == "dict":
        return {"$": "dict", "v": _join_items(left["v"], right["v"], name, entries)}
    items = [node["v"] if _kind(node) == "tuple" else node for node in (left, right)]
    if all(isinstance(item, list) for item in items) and len(items[0]) == len(items[1]):
        joined_items = [
            _join(a, b, child_name(name, place), entries)
            for place, (a, b) in enumerate(zip(*items, strict=True))
        ]
        return {"$": "tuple", "v": joined_items} if _kind(left) == "tuple" else joined_items
    raise _differ(name, left, right)


def _join_items(left: Any, right: Any, name: str, entries: Sequence[Entry]) -> list[Any]:
    joined = {dump_json(key): (key, item) for key, item in left}
    for key, item in right:
        text = dump_json(key)
        if text in joined:
            item = _join(joined[text][1], item, child_name(name, key), entries)
        joined[text] = (key, item)
    return [[key, item] for key, item in joined.values()]


def _kind(node: Json) -> str | None:
    return node.get("$") if isinstance(node, Mapping) else None


def _differ(name: str, left: object, right: object) -> CheckpointError:
    return CheckpointError(
        "Ranks disagree about the state; the first difference is named below.",
        expected=f"the same on all ranks: {_short(left)}",
        got=_short(right),
        where=name or "the state itself",
        todo="give all ranks the same value, or wrap it in PerRank(value)",
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + " ..."


def prove_complete(
    structure: Structure, sets: Sequence[RankSet], classes: Sequence[tuple[RankSet, Structure]]
) -> None:
    """Refuse a state of which part of a tensor is held by no rank.

    Raises:
        CheckpointError: naming the tensor, and the first difference between ranks.
    """
    checked: dict[tuple[RankSet, int], int | None] = {}
    for entry, ranks in zip(structure.entries, sets, strict=True):
        key = (ranks, entry.axes)
        if key not in checked:
            checked[key] = Holders(ranks, structure.axes[entry.axes]).missing_place()
        missing = checked[key]
        if missing is not None and entry.numel:
            raise CheckpointError(
                "Ranks disagree about the layout: part of a tensor is held by no rank.",
                expected=f"all places of axes {[axis.size for axis in structure.axes[entry.axes]]} taken",
                got=f"nobody at place {missing}; {_first_difference(entry.name, classes)}",
                where=entry.label,
                todo="shard the model the same way on all ranks of its mesh, and let all of them save",
            )


def _first_difference(name: str, classes: Sequence[tuple[RankSet, Structure]]) -> str:
    """What the ranks of the first two differing structures say of one tensor."""
    said: list[tuple[int, str]] = []
    for ranks, structure in classes:
        first_rank = ranks.ranks[0]
        for text in _descriptions(name, structure):
            if all(text != other for _, other in said):
                said.append((first_rank, text))
    if len(said) < 2:
        return f"only ranks {[r.ranks[0] for r, _ in classes][:4]} .. were asked, all of them said {said}"
    return "; ".join(f"rank {rank} says {text}" for rank, text in said[:2])


def _descriptions(name: str, structure: Structure) -> Iterator[str]:
    for entry in structure.entries:
        if entry.name == name:
            cuts = []
            for cut in entry.cuts:
                if isinstance(cut, LayoutCut):
                    layout = structure.layouts[cut.layout]
                    slot = layout.slots[cut.slot]
                    cuts.append(f"shards of {layout.shard_numel} elements, offset {slot.offset}")
                else:
                    cuts.append(str(cut))
            yield f"{entry.dtype} {list(entry.shape)} cut by ({', '.join(cuts)})"
            return
    yield "nothing"
