"""The plan report: the cost of layouts on any number of ranks, and remedies. Runs offline.

`plan_report` plans every unit of a model for each number of shards and returns a `PlanReport`, a value that prints as
tables and draws itself. It needs shapes only: no GPU, no process group and no weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vescale_fsdp.errors import LayoutError, some
from vescale_fsdp.layout.dtypes import itemsize_of
from vescale_fsdp.layout.granularity import Granularity, GranularityRule, check_patterns, resolve_granularity
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.model_shapes import ParamShape, ShapeSource, shapes_of, units_of
from vescale_fsdp.layout.padding import PaddingPolicy, find_remedies, remedy_texts
from vescale_fsdp.layout.pictures import Canvas, Curve, layout_picture, padding_picture
from vescale_fsdp.layout.planner import TensorSpec, padding_ratio, plan_buffers
from vescale_fsdp.lazy import set_module

ROOT = "(root)"


@set_module("vescale_fsdp.layout")
@dataclass(frozen=True)
class PlannedParam:
    """One parameter, its granularity and its block."""

    fqn: str  # relative to the unit
    shape: tuple[int, ...]
    granularity: Granularity
    block_numel: int


@set_module("vescale_fsdp.layout")
@dataclass(frozen=True)
class PlannedGroup:
    """The parameters of a unit with one dtype, planned for several numbers of shards.

    Attributes:
        units: names of all units with these parameters; the first one represents them.
        dtype: dtype of the parameters.
        params: the parameters, in definition order.
        layouts: for each number of shards of the report, the layout of one buffer, or of two if two cost less.
    """

    units: tuple[str, ...]
    dtype: str
    params: tuple[PlannedParam, ...]
    layouts: tuple[tuple[GroupLayout, ...], ...]

    @property
    def name(self) -> str:
        """The first unit's name."""
        return self.units[0] or ROOT


@set_module("vescale_fsdp.layout")
@dataclass(frozen=True)
class PlanRow:
    """The numbers of one group over one number of shards; ratios are fractions of the payload.

    ``shard_bytes`` is a rank's share of the parameters of one unit, with padding. ``blocks_per_rank`` is a rank's share
    of the payload in the group's largest blocks: below about 8, rounding to whole blocks dominates. ``apart`` names
    the tensors of the second buffer, if there is one.
    """

    group: str
    num_units: int
    dtype: str
    num_shards: int
    payload_numel: int
    shard_bytes: int
    padding_ratio: float
    copied_ratio: float
    blocks_per_rank: float
    scattered: tuple[str, ...]
    apart: tuple[str, ...] = ()


@set_module("vescale_fsdp")
@dataclass(frozen=True)
class PlanReport:
    """Plans of all groups of a model. ``str(report)`` gives the tables; `save` writes text and pictures.

    Examples:
        >>> report = plan_report({"w": (100, 30)}, [4])
        >>> round(report.total(4).padding_ratio, 4), report.layout("(root)", 4).shard_numel
        (0.024, 768)
    """

    shards: tuple[int, ...]
    groups: tuple[PlannedGroup, ...]
    policy: PaddingPolicy

    def __str__(self) -> str:
        return "\n".join(_text(self))

    @cached_property
    def rows(self) -> tuple[PlanRow, ...]:
        """One row per group and number of shards, groups in the order of wrapping."""
        return tuple(_row(group, layouts) for group in self.groups for layouts in group.layouts)

    def total(self, num_shards: int) -> PlanRow:
        """All units as one row (bytes and elements are summed over all units)."""
        rows = [row for row in self.rows if row.num_shards == num_shards]
        payload = sum(row.payload_numel * row.num_units for row in rows)
        weights = [(row, row.payload_numel * row.num_units / max(payload, 1)) for row in rows]
        return PlanRow(
            "all units",
            sum(row.num_units for row in rows),
            ", ".join(sorted({row.dtype for row in rows})),
            num_shards,
            payload,
            sum(row.shard_bytes * row.num_units for row in rows),
            sum(row.padding_ratio * weight for row, weight in weights),
            sum(row.copied_ratio * weight for row, weight in weights),
            min((row.blocks_per_rank for row in rows), default=0.0),  # the worst group decides
            tuple(name for row in rows for name in row.scattered),
            tuple(name for row in rows for name in row.apart),
        )

    def layout(self, group: str, num_shards: int) -> GroupLayout:
        """The layout of a group with one buffer; ``group`` is the name of any unit of the group.

        Raises:
            LayoutError: if the report has no such unit or number of shards, or if there are two buffers.
        """
        layouts = self.layouts(group, num_shards)
        if len(layouts) > 1:
            raise LayoutError(
                "The tensors of this group are in two buffers.",
                expected="a group in one buffer",
                got=f"{len(layouts)} layouts",
                where=f"{group} over {num_shards:,} shards",
                todo="call layouts(group, num_shards) for both",
            )
        return layouts[0]

    def layouts(self, group: str, num_shards: int) -> tuple[GroupLayout, ...]:
        """The layouts of a group, one per buffer; ``group`` is the name of any unit of the group.

        Raises:
            LayoutError: if the report has no such unit or number of shards.
        """
        for planned in self.groups:
            if group in (planned.name, *planned.units) and num_shards in self.shards:
                return planned.layouts[self.shards.index(num_shards)]
        raise LayoutError(
            "The report has no such plan.",
            expected=f"one of {[planned.name for planned in self.groups]} over one of {list(self.shards)}",
            got=f"{group!r} over {num_shards}",
        )

    def advice(self) -> Iterator[str]:
        """Remedies for each group whose padding exceeds the policy's limit."""
        for group in self.groups:
            for layout in (layout for layouts in group.layouts for layout in layouts):
                if layout.padding_ratio > self.policy.warn_above:
                    remedies = find_remedies(layout, self.policy.warn_above, self.policy.scatter)
                    whole = len(layout.slots) == len(group.params)
                    name = group.name if whole else f"{group.name}, the buffer of {layout.slots[0].fqn},"
                    yield f"{name} over {layout.num_shards:,} shards is padded by {layout.padding_ratio:.0%}:"
                    yield from (f"    {text}" for text in remedy_texts(remedies, layout))

    def to_json(self) -> dict[str, Any]:
        """The rows and totals, as plain values."""
        totals = [self.total(num_shards) for num_shards in self.shards]
        return {"scatter": self.policy.scatter, "rows": [asdict(row) for row in (*self.rows, *totals)]}

    def padding_picture(self) -> Canvas:
        """A chart of padding and copies of every group over the number of shards."""
        curves = []
        for group in self.groups:
            rows = [_row(group, layouts) for layouts in group.layouts]
            points = tuple((row.num_shards, row.padding_ratio, row.copied_ratio) for row in rows)
            curves.append(Curve(f"{group.name} ({len(group.units)} x {group.dtype})", points))
        return padding_picture(curves, "Padding over shards", limit=self.policy.warn_above)

    def layout_picture(self, group: str, num_shards: int) -> Canvas:
        """A picture of each rank's pieces of a group."""
        return layout_picture(self.layouts(group, num_shards), f"{group} over {num_shards:,} shards")

    def save(self, folder: Path | str) -> tuple[Path, ...]:
        """Write the tables and all pictures into a folder, as text and SVG.

        Returns:
            The files written.
        """
        pictures = {"padding": self.padding_picture()}
        one_dtype = len({group.dtype for group in self.groups}) == 1
        for group in self.groups:
            # For a file name: (root) becomes root.
            stem = re.sub(r"[^\w.-]", "", group.name) + ("" if one_dtype else f"-{group.dtype}")
            for num_shards, layouts in zip(self.shards, group.layouts, strict=True):
                title = f"{group.name} over {num_shards:,} shards"
                pictures[f"layout-{stem}-{num_shards}"] = layout_picture(layouts, title)
        texts = {"plan.txt": f"{self}\n", **{f"{stem}.svg": each.svg() for stem, each in pictures.items()}}
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            part = folder / f".{name}.part"  # renamed when complete, so that no reader sees half a picture
            try:
                part.write_text(text, encoding="utf-8", errors="backslashreplace")
                part.replace(folder / name)
            finally:
                part.unlink(missing_ok=True)
        return tuple(folder / name for name in texts)


def plan_report(
    model_or_shapes: ShapeSource,
    shards: Sequence[int],
    granularity: GranularityRule = None,
    *,
    units: Sequence[str] | None = None,
    dtype: str = "bfloat16",
    padding_policy: PaddingPolicy = PaddingPolicy(),  # noqa: B008 (frozen)
) -> PlanReport:
    """Plan a model for several numbers of shards, as `fully_shard` would, without ranks or weights.

    Examples:
        >>> from vescale_fsdp import Rows
        >>> report = plan_report({"w": (100, 32), "b": (32,)}, [2, 8], Rows(10))
        >>> [(row.num_shards, f"{row.padding_ratio:.0%}") for row in report.rows]
        [(2, '3%'), (8, '58%')]

    Args:
        model_or_shapes: a module (the meta device is enough), a mapping from name to shape or to ``(shape, dtype
            name)``, or a Hugging Face folder, of which only headers are read.
        shards: sizes of the sharding mesh axis.
        granularity: as for `fully_shard`; names are relative to each unit.
        units: names of the modules to be wrapped (``"model.layers.*"``); None: members of repeated lists.
            The root always gets the rest.
        dtype: dtype of the shapes in a mapping that name none.
        padding_policy: whether to scatter, and the padding above which `PlanReport.advice` names remedies.

    Raises:
        LayoutError: for shapes, names, patterns or numbers that are not valid.
    """
    if not shards:
        raise LayoutError(
            "There is nothing to plan for.",
            expected="at least one number of shards",
            got=f"shards={shards!r}",
        )
    params_of = units_of(shapes_of(model_or_shapes, dtype=dtype), units)
    check_patterns(granularity, [shape.fqn for shapes in params_of.values() for shape in shapes])
    names_of: dict[tuple[str, tuple[PlannedParam, ...]], list[str]] = {}  # equal groups are planned once
    for name, shapes in params_of.items():
        for kind, params in _groups(shapes, granularity).items():
            names_of.setdefault((kind, params), []).append(name)
    groups = []
    for (kind, params), names in names_of.items():
        element_type = kind.partition(",")[0]  # without ", frozen"
        specs = [TensorSpec(param.fqn, param.shape, element_type, param.block_numel) for param in params]
        layouts = tuple(plan_buffers(specs, count, scatter=padding_policy.scatter) for count in shards)
        groups.append(PlannedGroup(tuple(names), kind, params, layouts))
    return PlanReport(tuple(shards), tuple(groups), padding_policy)


def _groups(
    shapes: Sequence[ParamShape], granularity: GranularityRule
) -> dict[str, tuple[PlannedParam, ...]]:
    """Planned parameters by dtype; frozen parameters form groups of their own, as in `fully_shard`."""
    groups: dict[str, list[PlannedParam]] = {}
    for shape in shapes:
        rule = resolve_granularity(granularity, shape.fqn, shape.param if shape.param is not None else shape)
        planned = PlannedParam(shape.fqn, shape.shape, rule, rule.block_numel(shape.shape))
        groups.setdefault(shape.dtype if shape.requires_grad else f"{shape.dtype}, frozen", []).append(
            planned
        )
    return {kind: tuple(params) for kind, params in groups.items()}


def _row(group: PlannedGroup, layouts: Sequence[GroupLayout]) -> PlanRow:
    payload = sum(layout.payload_numel for layout in layouts)
    return PlanRow(
        group.name,
        len(group.units),
        group.dtype,
        layouts[0].num_shards,
        payload,
        sum(layout.shard_numel * itemsize_of(layout.slots[0].dtype) for layout in layouts),
        padding_ratio(layouts),
        sum(layout.copied_numel for layout in layouts) / payload if payload else 0.0,
        min(
            layout.payload_numel
            / layout.num_shards
            / max((slot.block_numel for slot in layout.slots), default=1)
            for layout in layouts
        ),
        tuple(slot.fqn for layout in layouts for slot in layout.slots if slot.is_scattered),
        tuple(slot.fqn for layout in layouts[1:] for slot in layout.slots),
    )


def _text(report: PlanReport) -> Iterator[str]:
    payload = sum(
        layout.payload_numel * len(group.units) for group in report.groups for layout in group.layouts[0]
    )
    count = sum(len(group.units) for group in report.groups)
    yield f"{count} groups of {len(report.groups)} kinds, {payload:,} parameters; scatter {report.policy.scatter}"
    yield ""
    head = "shards,group,x,padding %,copied %,blocks/rank,MiB/rank,scattered,second buffer"
    lines: list[tuple[str, ...]] = [tuple(head.split(","))]
    for num_shards in report.shards:
        rows = [row for row in report.rows if row.num_shards == num_shards]
        lines += [_cells(row) for row in rows]
        if len(rows) > 1:
            lines.append(_cells(report.total(num_shards)))
    yield from _table(lines)
    yield "    MiB/rank: parameters of one unit, of all units in the last line; blocks/rank: largest blocks per rank"
    for group in report.groups:
        yield ""
        yield f"{group.name}, {len(group.units)} x {group.dtype}:"
        yield from _table([("tensor", "shape", "x", "granularity", "block"), *_param_cells(group)])
    advice = list(report.advice())
    if advice:
        yield ""
        yield from advice


def _cells(row: PlanRow) -> tuple[str, ...]:
    blocks = f"{row.blocks_per_rank:,.1f}" if row.blocks_per_rank < 10_000 else f"{row.blocks_per_rank:.1e}"
    return (
        f"{row.num_shards:,}",
        row.group,
        str(row.num_units),
        f"{100 * row.padding_ratio:.3g}",
        f"{100 * row.copied_ratio:.3g}",
        blocks,
        f"{row.shard_bytes / 2**20:,.2f}",
        some(row.scattered, 2) if row.scattered else "",
        some(row.apart, 2) if row.apart else "",
    )


def _param_cells(group: PlannedGroup) -> list[tuple[str, ...]]:
    """One line per name, with * in place of numbers, so that the experts of a layer share a line."""
    counts: Counter[tuple[str, tuple[int, ...], str, int]] = Counter(
        (
            re.sub(r"(?<=\.)\d+(?=\.)", "*", param.fqn),
            param.shape,
            re.sub(r"\w+=", "", repr(param.granularity)),  # Rows(32) for Rows(rows=32)
            param.block_numel,
        )
        for param in group.params
    )
    return [
        (name, " x ".join(map(str, shape)) or "scalar", str(count), rule, f"{block:,}")
        for (name, shape, rule, block), count in counts.items()
    ]


def _table(lines: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Lines with aligned columns; numbers are right-aligned."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    right = [all(line[column][:1].isdigit() for line in lines[1:]) for column in range(len(widths))]
    for line in lines:
        cells = zip(line, widths, right, strict=True)
        yield ("    " + "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in cells)).rstrip()
