"""The plan report: what a model's layouts cost on any number of ranks, and remedies for padding. Runs offline.

`plan_report` plans every unit of a model for each number of shards and returns a `PlanReport`, which can be printed as
tables or drawn as pictures. It needs shapes only: no GPU, no process group and no weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from vescale_fsdp.errors import LayoutError, format_bytes, some
from vescale_fsdp.layout.dtypes import itemsize_of
from vescale_fsdp.layout.granularity import Granularity, GranularityRule, check_patterns, resolve_granularity
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.model_shapes import ParamShape, ShapeSource, shapes_of, units_of
from vescale_fsdp.layout.padding import PaddingPolicy, find_remedies, remedy_texts
from vescale_fsdp.layout.pictures import Canvas, Curve, layout_picture, padding_picture, pictures_html
from vescale_fsdp.layout.planner import TensorSpec, padding_ratio, plan_buffers
from vescale_fsdp.lazy import set_module

ROOT = "(root)"  # the printed name of the root unit, whose name is ""


@set_module("vescale_fsdp.layout")
@dataclass(frozen=True)
class PlannedParam:
    """One parameter, its granularity and its block."""

    fqn: str  # relative to the unit
    shape: tuple[int, ...]
    granularity: Granularity
    block_numel: int
    is_tied: bool = False  # whether other modules have it, too


@set_module("vescale_fsdp.layout")
@dataclass(frozen=True)
class PlannedGroup:
    """The parameters of a unit with one dtype, planned for several numbers of shards.

    Attributes:
        units: names of all units with equal parameters of this dtype, such as the layers of a model. The group is named
            after the first unit.
        dtype: dtype of the parameters, with ", frozen" appended for frozen parameters.
        params: the parameters, in definition order, with names relative to the unit.
        layouts: for each number of shards of the report, one layout per buffer: one, or two if two cost less.
    """

    units: tuple[str, ...]
    dtype: str
    params: tuple[PlannedParam, ...]
    layouts: tuple[tuple[GroupLayout, ...], ...]

    @property
    def name(self) -> str:
        """The first unit's name, or `ROOT`."""
        return self.units[0] or ROOT


@set_module("vescale_fsdp.layout")
@dataclass(frozen=True)
class PlanRow:
    """The numbers of one group over one number of shards. Ratios are fractions of the payload.

    Attributes:
        shard_bytes: a rank's share of the parameters of one unit, including padding.
        blocks_per_rank: a rank's share of the payload, counted in the group's largest blocks. Below about 8, rounding
            to whole blocks dominates the padding.
        scattered: names of the scattered tensors.
        apart: names of the tensors in the second buffer, if there is one.
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

    def _repr_html_(self) -> str:
        """Return the tables and the largest layouts, as a notebook shows them."""
        return f"<pre>{escape(str(self))}</pre>\n{largest_layouts_html(self)}"

    @cached_property
    def rows(self) -> tuple[PlanRow, ...]:
        """One row per group and number of shards. Groups are in the order in which users wrap their units."""
        return tuple(_row(group, layouts) for group in self.groups for layouts in group.layouts)

    def total(self, num_shards: int) -> PlanRow:
        """Return one row for all units. Bytes and elements are summed; ratios are averaged by payload."""
        rows = [row for row in self.rows if row.num_shards == num_shards]
        payload = sum(row.payload_numel * row.num_units for row in rows)
        # max: a model of empty tensors has no payload.
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
            min((row.blocks_per_rank for row in rows), default=0.0),  # of the group with the most rounding
            tuple(name for row in rows for name in row.scattered),
            tuple(name for row in rows for name in row.apart),
        )

    def layout(self, group: str, num_shards: int) -> GroupLayout:
        """Return the layout of a group that has one buffer. ``group`` is the name of any unit of the group.

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
        """Return the layouts of a group, one per buffer. ``group`` is the name of any unit of the group.

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
        """Yield lines of text with remedies for groups whose padding exceeds the policy's limit, and for a large root.

        The root stays gathered from the forward to the end of the backward. If it is larger than every other unit, the
        advice names the modules that may be units of their own. Tied parameters are left out where the report knows of
        them: the unit of both modules would be gathered as long as the root.
        """
        for group in self.groups:
            for layout in (layout for layouts in group.layouts for layout in layouts):
                if layout.padding_ratio > self.policy.warn_above:
                    remedies = find_remedies(layout, self.policy.warn_above, self.policy.scatter)
                    whole = len(layout.slots) == len(group.params)  # otherwise name the buffer, too
                    name = group.name if whole else f"{group.name}, the buffer of {layout.slots[0].fqn},"
                    yield f"{name} over {layout.num_shards:,} shards is padded by {layout.padding_ratio:.0%}:"
                    yield from (f"    {text}" for text in remedy_texts(remedies, layout))
        yield from _root_advice(self.groups)

    def to_json(self) -> dict[str, Any]:
        """Return the rows and totals as JSON values."""
        totals = [self.total(num_shards) for num_shards in self.shards]
        return {"scatter": self.policy.scatter, "rows": [asdict(row) for row in (*self.rows, *totals)]}

    def padding_picture(self) -> Canvas:
        """Return a chart of the padding and copies of every group over the number of shards."""
        curves = []
        for group in self.groups:
            rows = [_row(group, layouts) for layouts in group.layouts]
            points = tuple((row.num_shards, row.padding_ratio, row.copied_ratio) for row in rows)
            curves.append(Curve(f"{group.name} ({len(group.units)} x {group.dtype})", points))
        return padding_picture(curves, "Padding over shards", limit=self.policy.warn_above)

    def layout_picture(self, group: str, num_shards: int) -> Canvas:
        """Return a picture of each rank's pieces of a group."""
        return layout_picture(self.layouts(group, num_shards), f"{group} over {num_shards:,} shards")

    def save(self, folder: Path | str) -> tuple[Path, ...]:
        """Write the tables and all pictures into a folder, as text and SVG.

        Returns:
            The files written.
        """
        pictures = {"padding": self.padding_picture()}
        # Groups of one unit differ in dtype only, so file names need it if there are several.
        one_dtype = len({group.dtype for group in self.groups}) == 1
        for group in self.groups:
            # Characters that file names may not contain are dropped: (root) becomes root.
            stem = re.sub(r"[^\w.-]", "", group.name) + ("" if one_dtype else f"-{group.dtype}")
            for num_shards, layouts in zip(self.shards, group.layouts, strict=True):
                title = f"{group.name} over {num_shards:,} shards"
                pictures[f"layout-{stem}-{num_shards}"] = layout_picture(layouts, title)
        texts = {"plan.txt": f"{self}\n", **{f"{stem}.svg": each.svg() for stem, each in pictures.items()}}
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            # The file is renamed when it is complete, so that no reader sees an incomplete picture.
            part = folder / f".{name}.part"
            try:
                # Names from a mapping may contain unpaired surrogates, which UTF-8 cannot encode.
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

    Args:
        model_or_shapes: a module (the meta device is enough), a mapping from name to shape or to ``(shape, dtype
            name)``, or a Hugging Face folder, of which only headers are read.
        shards: sizes of the sharding mesh axis.
        granularity: as for `fully_shard`; names are relative to each unit.
        units: names or patterns of the modules to be wrapped (``"model.layers.*"``); None: the members of lists of
            modules with equal parameters. All other parameters belong to the root.
        dtype: dtype of a mapping's entries that have none.
        padding_policy: whether to scatter, and the padding above which `PlanReport.advice` names remedies.

    Raises:
        LayoutError: for shapes, names, patterns or numbers of shards that are not valid.

    Examples:
        >>> from vescale_fsdp import Rows
        >>> report = plan_report({"w": (100, 32), "b": (32,)}, [2, 8], Rows(10))
        >>> [(row.num_shards, f"{row.padding_ratio:.0%}") for row in report.rows]
        [(2, '3%'), (8, '58%')]
    """
    if isinstance(shards, int):
        raise LayoutError(
            "Numbers of shards are a list.",
            expected="a list, such as [8, 64]",
            got=shards,
            todo=f"pass [{shards}]",
        )
    if not shards:
        raise LayoutError(
            "There is nothing to plan for.",
            expected="at least one number of shards",
            got=f"shards={shards!r}",
        )
    params_of = units_of(shapes_of(model_or_shapes, dtype=dtype), units)
    check_patterns(granularity, [shape.fqn for shapes in params_of.values() for shape in shapes])
    # Units by their parameters, so that units with equal parameters are planned once.
    names_of: dict[tuple[str, tuple[PlannedParam, ...]], list[str]] = {}
    for name, shapes in params_of.items():
        for kind, params in _groups(shapes, granularity).items():
            names_of.setdefault((kind, params), []).append(name)
    groups = []
    for (kind, params), names in names_of.items():
        element_type = kind.partition(",")[0]  # `_groups` appends ", frozen"
        specs = [TensorSpec(param.fqn, param.shape, element_type, param.block_numel) for param in params]
        layouts = tuple(plan_buffers(specs, count, scatter=padding_policy.scatter) for count in shards)
        groups.append(PlannedGroup(tuple(names), kind, params, layouts))
    return PlanReport(tuple(shards), tuple(groups), padding_policy)


def _groups(
    shapes: Sequence[ParamShape], granularity: GranularityRule
) -> dict[str, tuple[PlannedParam, ...]]:
    """Return the planned parameters by dtype. Frozen parameters form separate groups, as in `fully_shard`."""
    groups: dict[str, list[PlannedParam]] = {}
    for shape in shapes:
        # A function gets the parameter, as in `fully_shard`, or its shape if there is no module.
        rule = resolve_granularity(granularity, shape.fqn, shape.param if shape.param is not None else shape)
        planned = PlannedParam(shape.fqn, shape.shape, rule, rule.block_numel(shape.shape), shape.is_tied)
        groups.setdefault(shape.dtype if shape.requires_grad else f"{shape.dtype}, frozen", []).append(
            planned
        )
    return {kind: tuple(params) for kind, params in groups.items()}


def largest_layouts_html(report: PlanReport, most: int = 4) -> str:
    """Return pictures of the groups with the most elements over the last number of shards, for a notebook."""
    groups = sorted(report.groups, key=lambda group: -sum(layout.numel for layout in group.layouts[-1]))
    pictures = []
    for group in groups[:most]:
        units = f", and {len(group.units) - 1:,} more units" if len(group.units) > 1 else ""
        title = f"{group.name} over {report.shards[-1]:,} shards{units}"
        pictures.append(layout_picture(group.layouts[-1], title).svg())
    return pictures_html(pictures, len(groups) - most)


def _root_advice(groups: Sequence[PlannedGroup]) -> Iterator[str]:
    """Yield lines with the bytes that a root larger than every other unit holds, and what to take out of it."""
    sizes: Counter[str] = Counter()  # bytes by unit
    inside: Counter[str] = Counter()  # bytes by module, of the root's parameters
    kept = set()  # modules that cannot be units of their own
    for group in groups:
        tied = {param.fqn for param in group.params if param.is_tied}
        for slot in (slot for layout in group.layouts[0] for slot in layout.slots):
            nbytes = slot.numel * itemsize_of(slot.dtype)
            sizes.update(dict.fromkeys(group.units, nbytes))
            if "" in group.units:
                module = slot.fqn.rpartition(".")[0]
                inside[module] += nbytes
                if slot.fqn in tied:
                    kept.add(module)
    held = left = sizes.pop("", 0)
    largest = max(sizes.values(), default=held)  # a report of one unit may know no modules
    # A module above other units is needed as long as they are.
    kept |= {module for module in inside if not module or any(u.startswith(f"{module}.") for u in sizes)}
    named = []
    for module, nbytes in inside.most_common():
        if left > largest and nbytes > held / 100 and module not in kept:
            named.append(f"{module} ({format_bytes(nbytes)})")
            left -= nbytes
    if named:
        yield (
            f"{ROOT} stays gathered until the end of the backward: {format_bytes(held)} in the dtype of its "
            f"parameters, and the largest other unit has {format_bytes(largest)}:"
        )
        yield f"    shard by fully_shard, before the root: {', '.join(named)}; {format_bytes(left)} stay in the root"


def _row(group: PlannedGroup, layouts: Sequence[GroupLayout]) -> PlanRow:
    """Return the numbers of one group, whose ``layouts`` are for one number of shards."""
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
    """Yield the lines of the report: a table of all groups, a table per group, and remedies."""
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
        if len(rows) > 1:  # the total of one group would repeat its row
            lines.append(_cells(report.total(num_shards)))
    yield from text_table(lines)
    yield "    MiB/rank: parameters of one unit, of all units in the last line; blocks/rank: largest blocks per rank"
    for group in report.groups:
        yield ""
        yield f"{group.name}, {len(group.units)} x {group.dtype}:"
        yield from text_table([("tensor", "shape", "x", "granularity", "block"), *_param_cells(group)])
    advice = list(report.advice())
    if advice:
        yield ""
        yield from advice


def _cells(row: PlanRow) -> tuple[str, ...]:
    """Return the cells of one line of the first table."""
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
    """Return one line of cells per name. Numbers in names become *, so that all experts of a layer share a line."""
    counts: Counter[tuple[str, tuple[int, ...], str, int]] = Counter(
        (
            re.sub(r"(?<=\.)\d+(?=\.)", "*", param.fqn),
            param.shape,
            re.sub(r"\w+=", "", repr(param.granularity)),  # prints Rows(rows=32) as Rows(32)
            param.block_numel,
        )
        for param in group.params
    )
    return [
        (name, " x ".join(map(str, shape)) or "scalar", str(count), rule, f"{block:,}")
        for (name, shape, rule, block), count in counts.items()
    ]


def text_table(lines: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines as text with aligned columns. Columns of numbers are right-aligned."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    # A column is numeric if every cell below the head starts with a digit.
    right = [all(line[column][:1].isdigit() for line in lines[1:]) for column in range(len(widths))]
    for line in lines:
        cells = zip(line, widths, right, strict=True)
        yield ("    " + "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in cells)).rstrip()
