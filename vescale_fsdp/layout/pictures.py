"""Pictures of a layout, and charts of padding over the number of shards, as SVG.

`layout_picture` draws two panels per buffer of one group:

    shards    one lane per rank; each band is a piece of a tensor, in buffer order; padding is hatched
    tensors   one bar per tensor; a part's color is the rank that owns the part. Ticks below the bar are ends of blocks:
              colors change only at ticks

Both panels have a readable size for any layout: they show the first and last ranks and the largest tensors, and state
how many ranks and tensors are omitted. Every band has a tooltip with the exact numbers. Lengths are in pixels, and y
grows downwards.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vescale_fsdp.layout.group_layout import GroupLayout, TensorSlot

PADDING = "padding"  # a fill that is hatched instead of a color; also the id of the SVG pattern
PAPER, HATCH_PAPER, HATCH_INK, INK = "#ffffff", "#f8f9fb", "#98a2b3", "#1d2433"
QUIET, RULE, MANY = "#667085", "#d0d5dd", "#dde3ec"
BAND_INK = "#111827"  # on bands, whose colors are light in both schemes
# What a dark scheme has in their places. A picture in a page follows the page's scheme.
DARK = {PAPER: "#1a1d27", HATCH_PAPER: "#232733", HATCH_INK: "#5b6475", INK: "#e4e7ec"}
DARK |= {QUIET: "#a3acbc", RULE: "#414a5c"}


class Canvas:
    """A picture under construction: later shapes cover earlier ones.

    Args:
        title: title of the SVG document.
        width_px, height_px: size of the picture. The height may be assigned later, when it is known.
    """

    def __init__(self, title: str, width_px: float, height_px: float = 0) -> None:
        self.title = title
        self.width_px = width_px
        self.height_px = height_px
        self._shapes: list[str] = []  # SVG elements, back to front

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "", tip: str = ""
    ) -> None:
        """Draw a filled rectangle, hatched if ``fill`` is `PADDING`. ``tip`` is its tooltip."""
        fill = "url(#padding)" if fill == PADDING else fill
        edge = f" stroke='{stroke}' stroke-width='0.8'" if stroke else ""
        self._shapes.append(
            # At least 0.6 pixels, because a narrower band would be invisible.
            f"<rect x='{x:.2f}' y='{y:.2f}' width='{max(width, 0.6):.2f}' height='{height:.2f}' "
            f"fill='{fill}'{edge}>{_title(tip)}</rect>"
        )

    def line(
        self, points: Sequence[tuple[float, float]], color: str, *, width: float = 1.0, dashed: bool = False
    ) -> None:
        """Draw an open line through points (x, y)."""
        vertices = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        dashes = " stroke-dasharray='5 4'" if dashed else ""
        self._shapes.append(
            f"<polyline points='{vertices}' fill='none' stroke='{color}' stroke-width='{width}' "
            f"stroke-linejoin='round'{dashes}/>"
        )

    def dot(self, x: float, y: float, radius: float, fill: str, *, tip: str = "") -> None:
        """Draw a filled circle. ``tip`` is its tooltip."""
        self._shapes.append(
            f"<circle cx='{x:.2f}' cy='{y:.2f}' r='{radius}' fill='{fill}'>{_title(tip)}</circle>"
        )

    def text(
        self,
        x: float,
        y: float,
        content: str,
        *,
        size: float = 11,
        color: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Draw a line of text. ``anchor`` says which part of the text is at ``x``: "start", "middle" or "end"."""
        weight = " font-weight='600'" if bold else ""
        self._shapes.append(
            f"<text x='{x:.2f}' y='{y:.2f}' font-size='{size}' fill='{color}' "
            f"text-anchor='{anchor}'{weight}>{escape(content)}</text>"
        )

    def svg(self) -> str:
        """Return the picture as an SVG document."""
        size = f"{self.width_px:.0f} {self.height_px:.0f}"
        width, height = size.split()
        hatch = (
            "<defs><pattern id='padding' width='6' height='6' patternUnits='userSpaceOnUse' "
            f"patternTransform='rotate(45)'><rect width='6' height='6' fill='{HATCH_PAPER}'/>"
            f"<line x1='0' y1='0' x2='0' y2='6' stroke='{HATCH_INK}' stroke-width='2'/></pattern></defs>"
        )
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {size}' "
            f"font-family='Inter, Helvetica, Arial, sans-serif'><title>{escape(self.title)}</title>"
        )
        paper = f"<rect width='{width}' height='{height}' fill='{PAPER}'/>"
        return "\n".join((head, _dark_style(), hatch, paper, *self._shapes, "</svg>")) + "\n"


def _dark_style() -> str:
    """Return the rules that replace the colors of paper and ink where the reader prefers a dark scheme."""
    rules = (f"[{key}='{old}']{{{key}:{new}}}" for old, new in DARK.items() for key in ("fill", "stroke"))
    return f"<style>@media (prefers-color-scheme: dark) {{{''.join(rules)}}}</style>"


def _title(tip: str) -> str:
    """Return the SVG element of a tooltip; "" without a text."""
    return f"<title>{escape(tip)}</title>" if tip else ""


MAX_LANES = 16  # with more ranks, those in the middle are omitted
MAX_TENSORS = 14  # most tensors in the tensor panel
MAX_SEGMENTS = 90  # most pieces in a tensor's bar; more pieces would be too narrow to distinguish
LABEL_PX = 240  # width of the left column, which contains names
BODY_PX = 900
LANE_PX = 26
BAR_PX = 16
GAP_PX = 6
CHART_LEFT_PX, CHART_TOP_PX, CHART_WIDTH_PX, CHART_HEIGHT_PX = 130, 80, 800, 340
LOWEST_POWER = -2  # the lowest line of the chart is at 10^-2 percent
CURVE_COLORS = ("#2e6fdb", "#e07b1a", "#189a6a", "#b03a9f", "#8a6d1f", "#5b5bd6", "#c2373f", "#3a8fa3")


def layout_svg(layout: GroupLayout, title: str = "layout") -> str:
    """Return the picture of one layout as an SVG document."""
    return layout_picture([layout], title).svg()


def layout_picture(layouts: Sequence[GroupLayout], title: str = "layout") -> Canvas:
    """Draw one group, buffer by buffer: a lane per rank, then a bar per tensor.

    Args:
        layouts: one layout per buffer of the group. Of a large layout, only some ranks and tensors are drawn.
        title: headline of the picture.
    """
    canvas = Canvas(title, LABEL_PX + BODY_PX + 40)
    names = short_names([slot.fqn for layout in layouts for slot in layout.slots])
    canvas.text(20, 32, title, size=18, bold=True)
    top = 52.0
    for number, layout in enumerate(layouts, 1):
        which = f"buffer {number} of {len(layouts)}: " if len(layouts) > 1 else ""
        canvas.text(20, top, which + _summary(layout), size=12, color=QUIET)
        top = _draw_shards(canvas, layout, names, top + 32)
        top = _draw_tensors(canvas, layout, names, top + 30) + 36
    padded = sum(layout.numel - layout.payload_numel for layout in layouts)
    _draw_legend(canvas, layouts[0].num_shards, padded, top - 28)
    canvas.height_px = top + 4
    return canvas


def distinct_layouts(layouts: Iterable[GroupLayout]) -> list[tuple[GroupLayout, int]]:
    """Return layouts that differ in more than the names of their tensors, each with its number; the largest first.

    The layers of a model usually have one layout, of which the first layer's is returned.
    """
    kinds: dict[tuple[object, ...], list[GroupLayout]] = {}
    for layout in layouts:
        slots = tuple(
            (slot.shape, slot.dtype, slot.block_numel, slot.offset, slot.runs) for slot in layout.slots
        )
        kinds.setdefault((layout.num_shards, layout.shard_numel, slots), []).append(layout)
    alike = [(same[0], len(same)) for same in kinds.values()]
    return sorted(alike, key=lambda each: -each[0].numel)


def unit_name(layout: GroupLayout) -> str:
    """Return the leading parts that the names of all tensors have in common; "(root)" if there are none."""
    names = [slot.fqn.split(".")[:-1] for slot in layout.slots]
    shared = [parts[0] for parts in zip(*names, strict=False) if len(set(parts)) == 1]
    return ".".join(shared) or "(root)"


def layouts_html(layouts: Iterable[GroupLayout], most: int = 4) -> str:
    """Return pictures of the largest distinct layouts, one below the other, for a notebook."""
    kinds = distinct_layouts(layouts)
    pictures = [layout_svg(layout, layout_title(layout, count)) for layout, count in kinds[:most]]
    return pictures_html(pictures, len(kinds) - most)


def pictures_html(svgs: Sequence[str], more: int = 0) -> str:
    """Return pictures one below the other, for a notebook, and how many ``more`` there are."""
    # A notebook has one document: its styles must not depend on the order of pictures, which all have the same.
    # A picture that is wider than its cell is scrolled.
    pictures = [f'<div style="overflow-x: auto">{svg}</div>' for svg in svgs]
    return "\n".join((*pictures, f"<p>{more} more layouts are smaller.</p>" if more > 0 else ""))


def layout_title(layout: GroupLayout, count: int = 1) -> str:
    """Return the headline of a layout: its unit, its ranks, and how many units more have this layout."""
    more = f", and {count - 1:,} more units" if count > 1 else ""
    return f"{unit_name(layout)} on {layout.num_shards:,} ranks{more}"


def rank_color(rank: int, num_shards: int, *, shade: bool = False) -> str:
    """Return the fill color of a rank, in one of two shades. Hues repeat after 16 ranks."""
    cycle = min(max(num_shards, 3), 16)
    # Few ranks share the circle of hues equally. For more ranks, steps of the golden angle, about 3/8 of the circle,
    # give adjacent ranks clearly different hues.
    hue = (0.58 + (rank % cycle) * (1 / cycle if cycle < 7 else 0.381966)) % 1.0
    red, green, blue = colorsys.hls_to_rgb(hue, 0.80 if shade else 0.72, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def short_names(fqns: Sequence[str]) -> dict[str, str]:
    """Return each name's short form, without the leading parts that all names have in common."""
    parts = [fqn.split(".") for fqn in fqns]
    shared = 0
    while len(parts) > 1 and all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return {fqn: ".".join(part[shared:]) for fqn, part in zip(fqns, parts, strict=True)}


def _summary(layout: GroupLayout) -> str:
    """Return one line of text with the numbers of a layout."""
    filled = [slot for slot in layout.slots if slot.numel]
    dtypes = ", ".join(sorted({slot.dtype for slot in filled})) or "nothing"
    copied = f", copied {_percent(layout.copied_ratio)}" if layout.copied_numel else ""
    return (
        f"{len(filled)} tensors of {dtypes}, {layout.payload_numel:,} elements in {layout.num_shards:,} "
        f"shards of {layout.shard_numel:,}; padding {_percent(layout.padding_ratio)}{copied}"
    )


def _percent(ratio: float) -> str:
    """Return a ratio in percent. A ratio that would be rounded to 0.00 % is "< 0.01 %", unless it is zero."""
    if ratio == 0:
        return "0 %"
    return f"{ratio:.2%}".replace("%", " %") if ratio >= 0.0001 else "< 0.01 %"


def _fit(label: str, width_px: float, size: float = 10.5) -> str:
    """Return as much of a label as fits into a width: all, its start and end, or ""."""
    room = int((width_px - 6) / (size * 0.56))  # a character is about 0.56 of the font size wide
    if len(label) <= room:
        return label
    if room < 9:  # fewer characters would not identify a name
        return ""
    # The end gets more characters, because names of one model differ most at their ends.
    tail = (room - 1) * 2 // 3
    return f"{label[: room - 1 - tail]}…{label[-tail:]}"


def _draw_band(
    canvas: Canvas,
    start: tuple[float, float],
    size: tuple[float, float],
    fill: str,
    label: str,
    tip: str,
    *,
    stroke: str = "",
) -> None:
    """Draw a rectangle with as much of its label as fits."""
    (x, y), (width, height) = start, size
    canvas.rect(x, y, width, height, fill, tip=tip, stroke=stroke)
    label = _fit(label, width)
    if label:
        canvas.text(x + width / 2, y + height / 2 + 4, label, size=10.5, color=BAND_INK, anchor="middle")


def _draw_shards(canvas: Canvas, layout: GroupLayout, names: dict[str, str], top: float) -> float:
    """Draw the panel of ranks and return the y below it."""
    canvas.text(20, top, "Shards: the pieces of each rank", size=13, bold=True)
    # max: the shards of a group without elements are empty.
    y, num_shards, scale = top + 12, layout.num_shards, BODY_PX / max(layout.shard_numel, 1)
    last_ranks = range(num_shards - 3, num_shards) if num_shards > MAX_LANES else range(0)
    # 11 first and 3 last ranks, so that the line "more ranks" fits, too.
    num_first = MAX_LANES - 5 if last_ranks else num_shards
    for rank in (*range(num_first), *last_ranks):
        if last_ranks and rank == last_ranks.start:
            canvas.text(LABEL_PX, y + 12, f"⋮  {rank - num_first:,} more ranks", size=11, color=QUIET)
            y += LANE_PX - 4
        canvas.rect(20, y + 6, 12, 12, rank_color(rank, num_shards))
        canvas.text(40, y + 16, f"rank {rank:,}", size=11.5)
        # The lane is hatched first: what the pieces do not cover is padding.
        canvas.rect(LABEL_PX, y, BODY_PX, LANE_PX, PADDING, stroke=RULE, tip=f"rank {rank}: padding")
        for index, (slot, piece) in enumerate(layout.pieces_of(rank)):
            start, width = (LABEL_PX + piece.local_offset * scale, y), piece.numel * scale
            # Two alternating shades separate adjacent pieces even if no label fits.
            fill = rank_color(rank, num_shards, shade=index % 2 == 1)
            tip = (
                f"{slot.fqn} {list(slot.shape)}: elements [{piece.range.start:,}, {piece.range.stop:,}) of "
                f"{slot.numel:,} on rank {rank} at {piece.local_offset:,}"
            )
            stroke = PAPER if width > 3 else ""  # an edge would cover a narrower band
            _draw_band(canvas, start, (width, LANE_PX), fill, names[slot.fqn], tip, stroke=stroke)
        y += LANE_PX + 4
    return y


def _draw_tensors(canvas: Canvas, layout: GroupLayout, names: dict[str, str], top: float) -> float:
    """Draw the panel of tensors and return the y below it."""
    canvas.text(20, top, "Tensors: the rank of each part", size=13, bold=True)
    filled = [slot for slot in layout.slots if slot.numel]
    largest = sorted(filled, key=lambda slot: -slot.numel)[:MAX_TENSORS]
    y = top + 12
    for slot in (slot for slot in filled if slot in largest):  # in definition order
        canvas.text(20, y + 12, _fit(names[slot.fqn], LABEL_PX - 24, 11) or slot.fqn, size=11)
        _draw_bar(canvas, layout, slot, y + 1)
        blocks = -(-slot.numel // slot.block_numel)
        shape = " x ".join(map(str, slot.shape)) or "scalar"
        note = f"{shape}, {blocks:,} x block {slot.block_numel:,}"
        note += ", scattered" if slot.is_scattered else ""
        canvas.text(20, y + 24, note, size=9, color=QUIET)
        y += BAR_PX + 12 + GAP_PX
    if len(filled) > len(largest):
        canvas.text(LABEL_PX, y + 10, f"⋮  {len(filled) - len(largest):,} smaller tensors", color=QUIET)
        y += 20
    return y


def _draw_bar(canvas: Canvas, layout: GroupLayout, slot: TensorSlot, y: float) -> None:
    """Draw the bar of one tensor: a band per piece, and a tick per block."""
    scale = BODY_PX / slot.numel
    # One more than is drawn: enough to know that there are too many. All ranks could be thousands.
    holders = list(islice(layout.holders(slot), MAX_SEGMENTS + 1))
    if len(holders) > MAX_SEGMENTS:
        runs = layout.runs_of(slot)
        count, last = sum(run.num_ranks for run in runs), runs[-1].first_rank + runs[-1].num_ranks - 1
        label = f"on {count:,} ranks, {holders[0]:,} to {last:,}"
        _draw_band(canvas, (LABEL_PX, y), (BODY_PX, BAR_PX), MANY, label, f"{slot.fqn}: on {count:,} ranks")
        return
    for rank in holders:
        piece = layout.piece(slot, rank)
        start, size = (LABEL_PX + piece.range.start * scale, y), (piece.numel * scale, BAR_PX)
        tip = f"{slot.fqn}: rank {rank} holds [{piece.range.start:,}, {piece.range.stop:,})"
        _draw_band(canvas, start, size, rank_color(rank, layout.num_shards), f"rank {rank}", tip)
    block_px = slot.block_numel * scale
    if block_px >= 4:  # ticks closer than 4 pixels would merge
        for tick in range(1, -(-slot.numel // slot.block_numel)):
            x = LABEL_PX + tick * block_px
            canvas.line([(x, y + BAR_PX), (x, y + BAR_PX + 4)], QUIET, width=0.8)
    canvas.line([(LABEL_PX, y + BAR_PX), (LABEL_PX + BODY_PX, y + BAR_PX)], RULE, width=0.8)


def _draw_legend(canvas: Canvas, num_shards: int, padded_numel: int, y: float) -> None:
    """Draw the meaning of hatches, ticks and colors in one line."""
    canvas.rect(LABEL_PX, y, 22, 12, PADDING, stroke=RULE)
    canvas.text(LABEL_PX + 28, y + 10, f"padding, {padded_numel:,} elements", color=QUIET)
    canvas.line([(LABEL_PX + 230, y + 2), (LABEL_PX + 230, y + 12)], INK, width=0.8)
    canvas.text(LABEL_PX + 238, y + 10, "end of a block: colors change only there", color=QUIET)
    canvas.rect(LABEL_PX + 520, y, 12, 12, rank_color(0, num_shards))
    canvas.rect(LABEL_PX + 532, y, 12, 12, rank_color(0, num_shards, shade=True))
    canvas.text(LABEL_PX + 550, y + 10, "color: rank; shades separate adjacent tensors", color=QUIET)


class Curve(NamedTuple):
    """Padding and copies of one group over the number of shards, as fractions of the group's payload."""

    name: str
    points: tuple[tuple[int, float, float], ...]  # (shards, padding, copied)


def padding_picture(curves: Sequence[Curve], title: str, *, limit: float | None = None) -> Canvas:
    """Draw a chart of padding over the number of shards. Dashed lines are copied elements.

    Args:
        curves: one per group, all with the same numbers of shards.
        title: headline of the picture.
        limit: padding, as a fraction, that a horizontal line marks; None: no line.
    """
    canvas = Canvas(title, CHART_LEFT_PX + CHART_WIDTH_PX + 60)
    canvas.text(20, 32, title, size=18, bold=True)
    canvas.text(20, 52, "padding in % of the payload (dashed: copied after a gather)", size=12, color=QUIET)
    shards = [count for count, _, _ in curves[0].points] if curves else []
    highest = max([limit or 0.0, *(max(p, c) for curve in curves for _, p, c in curve.points)])
    # The highest line is a power of ten of percents, at least 10 %. 1e-9, because zero has no logarithm.
    top_power = max(1, math.ceil(math.log10(max(highest * 100, 1e-9))))
    _draw_axes(canvas, shards, top_power)
    if limit:
        y = _chart_y(limit, top_power)
        canvas.line(
            [(CHART_LEFT_PX, y), (CHART_LEFT_PX + CHART_WIDTH_PX, y)], "#b42318", width=0.8, dashed=True
        )
        canvas.text(CHART_LEFT_PX + 4, y - 5, f"warned above {limit:.0%}", size=10, color="#b42318")
    y = CHART_TOP_PX + CHART_HEIGHT_PX + 64
    for index, curve in enumerate(curves):
        color = CURVE_COLORS[index % len(CURVE_COLORS)]  # more curves than colors: colors repeat
        _draw_curve(canvas, curve, color, top_power)
        canvas.rect(CHART_LEFT_PX, y - 9, 12, 12, color)
        canvas.text(CHART_LEFT_PX + 20, y + 1, curve.name)
        y += 20
    canvas.height_px = y + 10
    return canvas


def _draw_axes(canvas: Canvas, shards: Sequence[int], top_power: int) -> None:
    """Draw a horizontal line per power of ten, and a tick per number of shards."""
    right = CHART_LEFT_PX + CHART_WIDTH_PX
    for power in range(LOWEST_POWER, top_power + 1):
        y = _chart_y(10.0**power / 100, top_power)
        canvas.line([(CHART_LEFT_PX, y), (right, y)], RULE, width=0.8)
        label = f"{10.0**power:g} %" if power > LOWEST_POWER else f"{10.0**power:g} % or less"
        canvas.text(CHART_LEFT_PX - 8, y + 4, label, size=10.5, color=QUIET, anchor="end")
    for index, count in enumerate(shards):
        x = _chart_x(index, len(shards))
        bottom = CHART_TOP_PX + CHART_HEIGHT_PX
        canvas.line([(x, bottom), (x, bottom + 5)], QUIET, width=0.8)
        canvas.text(x, bottom + 20, f"{count:,}", size=10.5, color=QUIET, anchor="middle")
    middle = CHART_LEFT_PX + CHART_WIDTH_PX / 2
    canvas.text(middle, CHART_TOP_PX + CHART_HEIGHT_PX + 40, "shards", color=QUIET, anchor="middle")


def _draw_curve(canvas: Canvas, curve: Curve, color: str, top_power: int) -> None:
    """Draw the line and dots of a group's padding, and the dashed line of its copies if it has any."""
    xs = [_chart_x(index, len(curve.points)) for index in range(len(curve.points))]
    copied = [(x, _chart_y(c, top_power)) for x, (_, _, c) in zip(xs, curve.points, strict=True)]
    if any(c for _, _, c in curve.points):
        canvas.line(copied, color, width=1.2, dashed=True)
    padding = [(x, _chart_y(p, top_power)) for x, (_, p, _) in zip(xs, curve.points, strict=True)]
    canvas.line(padding, color, width=2)
    for (x, y), (count, p, c) in zip(padding, curve.points, strict=True):
        canvas.dot(x, y, 3.5, color, tip=f"{curve.name}, {count:,} shards: {p:.2%} padding, {c:.2%} copied")


def _chart_x(index: int, count: int) -> float:
    """Return the x of point ``index`` of ``count``, at the middle of its part of the width."""
    return CHART_LEFT_PX + CHART_WIDTH_PX * (index + 0.5) / max(count, 1)


def _chart_y(ratio: float, top_power: int) -> float:
    """Return the y of a ratio on a logarithmic scale. Ratios below 10^LOWEST_POWER percent are on the lowest line."""
    # 1e-9, because zero has no logarithm.
    power = max(LOWEST_POWER, math.log10(max(ratio * 100, 1e-9)))
    return CHART_TOP_PX + CHART_HEIGHT_PX * (top_power - power) / (top_power - LOWEST_POWER)
