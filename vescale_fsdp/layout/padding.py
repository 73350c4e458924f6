"""Padding policy: limits of a group's padding, warnings, and remedies. Integers only.

A group with too few blocks for its ranks needs padding under any planner, because a rank owns whole blocks only. The
policy sets the padding above which a group warns (once, with remedies) and above which it raises. Remedies are found by
planning again. They are never applied automatically, because each of them changes the user's request:

    a smaller shard size     HSDP: replicate over the other ranks; shards contain more blocks
    a larger unit            fully_shard over several layers at once; the group contains more blocks
    fewer rows               smaller blocks for the tensors that cause the padding; a coarser optimizer state
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from vescale_fsdp.errors import LayoutError, PaddingWarning, callers_level, some
from vescale_fsdp.layout.dtypes import itemsize_of
from vescale_fsdp.layout.geometry import numel_of
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.planner import Scatter, TensorSpec, padding_ratio, plan_buffers
from vescale_fsdp.lazy import set_module

MAX_MODULES_PER_UNIT = 64  # larger units are not tried as a remedy
MAX_PLANNED_TENSORS = 4_000  # larger units are not tried: planning them takes too long


@set_module("vescale_fsdp")
@dataclass(frozen=True)
class PaddingPolicy:
    """Limits on the padding of each group of `fully_shard`.

    Args:
        scatter: ``"auto"`` lets the planner scatter a few tensors if copying them out after each gather costs less than
            the padding it avoids; ``"never"`` keeps every tensor contiguous.
        warn_above: padding, as a fraction of the payload, above which a `PaddingWarning` names remedies.
        refuse_above: padding above which `LayoutError` is raised; ``math.inf`` accepts any.
        ignore_below_bytes: a group with less padding per rank than this neither warns nor raises, whatever its ratio.

    Examples:
        >>> strict = PaddingPolicy(scatter="never", warn_above=0.05, refuse_above=0.5)
        >>> strict.ignore_below_bytes
        1048576
    """

    scatter: Scatter = "auto"
    warn_above: float = 0.25
    refuse_above: float = 10.0
    ignore_below_bytes: int = 1 << 20  # 1 MiB

    def __post_init__(self) -> None:
        if self.scatter not in ("never", "auto") or not 0 <= self.warn_above <= self.refuse_above:
            raise LayoutError(
                "The padding policy is not valid.",
                expected="scatter 'auto' or 'never', and 0 <= warn_above <= refuse_above",
                got=self,
                todo="pass both limits as fractions of the payload, such as 0.25 and 10.0",
            )


@dataclass(frozen=True)
class Remedies:
    """Changes that bring a group's padding to a limit or below, each with the padding that remains.

    An attribute is None if no change of its kind is sufficient.

    Attributes:
        num_shards: (shards, padding); the largest sufficient divisor of the number of shards.
        modules_per_unit: (modules, padding); the number of such modules to wrap as one unit.
        smaller_blocks: (names, divisor, padding); the tensors whose blocks are divided by the divisor.
    """

    num_shards: tuple[int, float] | None = None
    modules_per_unit: tuple[int, float] | None = None
    smaller_blocks: tuple[tuple[str, ...], int, float] | None = None


def check_padding(layout: GroupLayout, policy: PaddingPolicy, *, warn: bool = True) -> None:
    """Warn or raise if a group has too much padding, with numbers and remedies.

    Args:
        layout: the group's layout.
        policy: the limits.
        warn: whether this process warns, which only rank 0 does. All processes raise.

    Raises:
        LayoutError: if the padding exceeds ``policy.refuse_above``.
    """
    ratio = layout.padding_ratio
    # A group without tensors has no dtype, which the next check needs.
    if ratio <= policy.warn_above or not layout.slots:
        return
    padded = layout.shard_numel - layout.payload_numel / layout.num_shards
    if padded * itemsize_of(layout.slots[0].dtype) < policy.ignore_below_bytes:
        return
    if ratio > policy.refuse_above:
        remedies = remedy_texts(find_remedies(layout, policy.warn_above, policy.scatter), layout)
        raise LayoutError(
            "The group would be mostly padding: it has too few blocks for its ranks.",
            expected=f"padding of at most {policy.refuse_above:.0%} of the payload",
            got=_numbers(layout),
            where=layout.slots[0].fqn,
            todo="; ".join((*remedies, "or accept it: padding_policy=PaddingPolicy(refuse_above=...)")),
        )
    if warn:
        _warn_once(layout, policy)


@lru_cache(maxsize=256)
def _warn_once(layout: GroupLayout, policy: PaddingPolicy) -> None:
    """Warn about a layout's padding. Cached, so that equal layers of a model warn once."""
    remedies = remedy_texts(find_remedies(layout, policy.warn_above, policy.scatter), layout)
    warnings.warn(
        f"padding is {_numbers(layout)}. Remedies: {'; '.join(remedies)}. "
        f"PaddingPolicy(warn_above=...) changes this limit.",
        PaddingWarning,
        stacklevel=callers_level(),
    )


def _numbers(layout: GroupLayout) -> str:
    """Return the numbers of a layout's padding in words, for messages."""
    blocks = layout.payload_numel / layout.num_shards / max(slot.block_numel for slot in layout.slots)
    return (
        f"{layout.padding_ratio:.0%} of the payload: {layout.payload_numel:,} elements in {layout.num_shards:,} "
        f"shards of {layout.shard_numel:,}, {blocks:.2g} of the largest blocks per rank"
    )


def remedy_texts(remedies: Remedies, layout: GroupLayout) -> Iterator[str]:
    """Yield each remedy in words, with the padding that remains. The last one, cutting by element, always applies."""
    if remedies.num_shards is not None:
        shards, ratio = remedies.num_shards
        yield f"shard over {shards} ranks (HSDP, {layout.num_shards // shards} replicas): {ratio:.1%}"
    if remedies.modules_per_unit is not None:
        count, ratio = remedies.modules_per_unit
        yield f"fully_shard {count} such modules as one unit: {ratio:.1%}"
    if remedies.smaller_blocks is not None:
        names, divisor, ratio = remedies.smaller_blocks
        slot = layout.slot(names[0])
        block, row = slot.block_numel // divisor, _row_numel(slot.shape)
        # `Rows` has no effect on a tensor below 2-D.
        example = f"Rows({block // row})" if row > 1 else f"Flat({block})"
        yield f"blocks {divisor} times smaller, such as {example}, for {some(names, 3)}: {ratio:.1%}"
    yield "the default granularity, which cuts between any two elements: practically none"


def find_remedies(layout: GroupLayout, limit: float, scatter: Scatter = "auto") -> Remedies:
    """Return changes that bring the padding of a group to ``limit`` or below, found by planning its tensors again."""
    specs = [TensorSpec(slot.fqn, slot.shape, slot.dtype, slot.block_numel) for slot in layout.slots]
    shards = layout.num_shards

    def first(tries: Iterable[tuple[tuple[Any, ...], Sequence[TensorSpec], int]]) -> Any:
        """Return the first of (change, tensors, shards) whose padding is small enough, with the padding; or None."""
        for change, changed, num_shards in tries:
            ratio = padding_ratio(plan_buffers(changed, num_shards, scatter=scatter))
            if ratio <= limit:
                return (*change, ratio)
        return None

    return Remedies(
        # The largest divisor is tried first, because it needs the fewest replicas. With 1, nothing would be sharded.
        first(((size,), specs, size) for size in range(shards // 2, 1, -1) if shards % size == 0),
        first(
            ((count,), [replace(s, fqn=f"{copy}.{s.fqn}") for copy in range(count) for s in specs], shards)
            for count in _powers_of_two(MAX_MODULES_PER_UNIT)
            if count * len(specs) <= MAX_PLANNED_TENSORS
        ),
        first((cut, changed, shards) for cut, changed in _smaller_blocks(specs)),
    )


def _powers_of_two(most: int) -> Iterator[int]:
    """Yield the powers of two from 2 to at most ``most``."""
    return (1 << bit for bit in range(1, most.bit_length()))


def _smaller_blocks(
    specs: Sequence[TensorSpec],
) -> Iterator[tuple[tuple[tuple[str, ...], int], list[TensorSpec]]]:
    """Yield ways to divide blocks by 2, 4, .., as ((names of the changed tensors, divisor), all tensors).

    Tensors with equal blocks form a class. First each class is changed alone, beginning with the class of the fewest
    elements; then all classes are changed together.
    """
    classes: dict[int, list[TensorSpec]] = {}
    for spec in specs:
        # A tensor of one block, or one that may be cut anywhere, does not cause the padding.
        if 1 < spec.block_numel < spec.numel:
            classes.setdefault(spec.block_numel, []).append(spec)
    every = [spec for members in classes.values() for spec in members]
    for members in (*sorted(classes.values(), key=lambda m: sum(spec.numel for spec in m)), every):
        names = tuple(spec.fqn for spec in members)
        row_numels = [_row_numel(spec.shape) for spec in members]
        blocks_and_rows = [(spec.block_numel, row) for spec, row in zip(members, row_numels, strict=True)]
        # If a block is not whole rows, the user could not request a smaller block as Rows(n).
        if any(block % row for block, row in blocks_and_rows):
            continue
        rows = math.gcd(*(block // row for block, row in blocks_and_rows))
        for divisor in _powers_of_two(rows):
            if rows % divisor == 0:  # otherwise smaller blocks would not be whole rows
                smaller = {spec: replace(spec, block_numel=spec.block_numel // divisor) for spec in members}
                yield (names, divisor), [smaller.get(spec, spec) for spec in specs]


def _row_numel(shape: Sequence[int]) -> int:
    """Return the elements per row, or 1 for a tensor below 2-D, which `Rows` cuts by element."""
    return numel_of(shape[-1:]) if len(shape) >= 2 else 1
