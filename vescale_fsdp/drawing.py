"""Pictures of a layout as SVG text: what each rank holds, and where each tensor is cut. No dependency.

`layout_svg` draws two panels of one group:

    shards    one lane per rank; bands are the pieces the rank holds, in buffer order; padding is hatched
    tensors   one bar per tensor, coloured by the ranks that hold it; light ticks are blocks, so one sees
              that every change of colour falls on a tick

Both panels stay of readable size for any layout: only the first and last ranks and the largest tensors
are drawn, and what is left out is said. Every band carries a tooltip with the exact numbers.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from html import escape
from itertools import islice

from vescale_fsdp.layout import GroupLayout, TensorSlot

__all__ = ["SvgCanvas", "layout_svg", "rank_colour", "short_names"]

MAX_LANES = 16  # ranks drawn before the middle is left out
MAX_TENSORS = 14  # tensors drawn in the tensor panel
MAX_SEGMENTS = 256  # pieces drawn in one tensor bar
LABEL_PX = 210  # width of the column of names on the left
BODY_PX = 900
LANE_PX = 26
BAR_PX = 16
GAP_PX = 6
INK, QUIET, RULE, PAPER = "#1d2433", "#667085", "#d0d5dd", "#ffffff"
FONT = "font-family='Inter, Helvetica, Arial, sans-serif'"


class SvgCanvas:
    """Collects the elements of one picture; `text` of the whole comes from `render`."""

    def __init__(self, width_px: float, title: str) -> None:
        self.width_px = width_px
        self._title = title
        self._elements: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, tip: str = "", stroke: str = ""
    ) -> None:
        """A filled rectangle, with an optional tooltip and outline."""
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        edge = f" stroke='{stroke}' stroke-width='0.8'" if stroke else ""
        self._elements.append(
            f"<rect x='{x:.2f}' y='{y:.2f}' width='{max(width, 0.6):.2f}' height='{height:.2f}' "
            f"fill='{fill}'{edge}>{inner}</rect>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1.0) -> None:
        """A straight line."""
        self._elements.append(
            f"<line x1='{x1:.2f}' y1='{y1:.2f}' x2='{x2:.2f}' y2='{y2:.2f}' stroke='{colour}' "
            f"stroke-width='{width}'/>"
        )

    def polyline(self, points: Sequence[tuple[float, float]], colour: str, *, dash: str = "") -> None:
        """An open line through points."""
        where = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        dashes = f" stroke-dasharray='{dash}'" if dash else ""
        self._elements.append(
            f"<polyline points='{where}' fill='none' stroke='{colour}' stroke-width='2' "
            f"stroke-linejoin='round'{dashes}/>"
        )

    def circle(self, x: float, y: float, radius: float, fill: str, *, tip: str = "") -> None:
        """A dot, with an optional tooltip."""
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        self._elements.append(
            f"<circle cx='{x:.2f}' cy='{y:.2f}' r='{radius}' fill='{fill}'>{inner}</circle>"
        )

    def text(
        self,
        x: float,
        y: float,
        content: str,
        *,
        size: float = 11,
        colour: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """A line of text whose baseline starts (or ends, or centres) at a point."""
        weight = " font-weight='600'" if bold else ""
        self._elements.append(
            f"<text x='{x:.2f}' y='{y:.2f}' font-size='{size}' fill='{colour}' text-anchor='{anchor}'"
            f"{weight}>{escape(content)}</text>"
        )

    def render(self, height_px: float) -> str:
        """The SVG document."""
        hatch = (
            "<defs><pattern id='padding' width='6' height='6' patternUnits='userSpaceOnUse' "
            "patternTransform='rotate(45)'><rect width='6' height='6' fill='#f8f9fb'/>"
            "<line x1='0' y1='0' x2='0' y2='6' stroke='#98a2b3' stroke-width='2'/></pattern></defs>"
        )
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{self.width_px:.0f}' height='{height_px:.0f}' "
            f"viewBox='0 0 {self.width_px:.0f} {height_px:.0f}' {FONT}><title>{escape(self._title)}</title>"
        )
        paper = f"<rect width='{self.width_px:.0f}' height='{height_px:.0f}' fill='{PAPER}'/>"
        return "\n".join((head, hatch, paper, *self._elements, "</svg>")) + "\n"


def layout_svg(layout: GroupLayout, title: str = "layout") -> str:
    """Draw one group: a lane per rank, then a bar per tensor.

    Args:
        layout: any layout; large ones are drawn in part, and the picture says so.
        title: headline of the picture.

    Returns:
        A complete SVG document.
    """
    canvas = SvgCanvas(LABEL_PX + BODY_PX + 40, title)
    names = short_names([slot.fqn for slot in layout.slots])
    canvas.text(20, 32, title, size=18, bold=True)
    canvas.text(20, 52, _summary(layout), size=12, colour=QUIET)
    top = _draw_shards(canvas, layout, names, 84)
    top = _draw_tensors(canvas, layout, names, top + 30)
    _draw_legend(canvas, layout, top + 8)
    return canvas.render(top + 40)


def rank_colour(rank: int, num_shards: int, *, shade: bool = False) -> str:
    """The fill of a rank, in one of two shades: hues spread over at most 16 ranks, then repeat."""
    cycle = min(max(num_shards, 3), 16)
    # Steps of 3/8 of the circle put clearly different hues on neighbouring ranks.
    hue = (0.58 + (rank % cycle) * (1 / cycle if cycle < 7 else 0.381966)) % 1.0
    red, green, blue = colorsys.hls_to_rgb(hue, 0.80 if shade else 0.72, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def short_names(fqns: Sequence[str]) -> dict[str, str]:
    """Names without the leading parts that all of them share."""
    parts = [fqn.split(".") for fqn in fqns]
    shared = 0
    while len(parts) > 1 and all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return {fqn: ".".join(part[shared:]) for fqn, part in zip(fqns, parts, strict=True)}


def _summary(layout: GroupLayout) -> str:
    filled = [slot for slot in layout.slots if slot.numel]
    dtypes = ", ".join(sorted({slot.dtype for slot in filled})) or "nothing"
    copied = f", copied {_percent(layout.copied_ratio)}" if layout.copied_numel else ""
    return (
        f"{len(filled)} tensors of {dtypes}, {layout.payload_numel:,} elements in {layout.num_shards:,} "
        f"shards of {layout.shard_numel:,}; padding {_percent(layout.padding_ratio)}{copied}"
    )


def _percent(ratio: float) -> str:
    if ratio == 0:
        return "0 %"
    return f"{ratio:.2%}".replace("%", " %") if ratio >= 0.0001 else "< 0.01 %"


def _fit(label: str, width_px: float, size: float = 10.5) -> str:
    """The label if it fits, its start and end if that much fits, else nothing."""
    room = int((width_px - 6) / (size * 0.56))
    if len(label) <= room:
        return label
    if room < 9:
        return ""
    tail = (room - 1) * 2 // 3
    return f"{label[: room - 1 - tail]}…{label[-tail:]}"


def _drawn_ranks(num_shards: int) -> list[int | None]:
    """Ranks to draw; None stands for those left out."""
    if num_shards <= MAX_LANES:
        return list(range(num_shards))
    return [*range(MAX_LANES - 5), None, *range(num_shards - 3, num_shards)]


def _draw_shards(canvas: SvgCanvas, layout: GroupLayout, names: dict[str, str], top: float) -> float:
    canvas.text(20, top, "Shards: what each rank holds", size=13, bold=True)
    y = top + 12
    for rank in _drawn_ranks(layout.num_shards):
        if rank is None:
            left_out = layout.num_shards - MAX_LANES + 2
            canvas.text(LABEL_PX, y + 12, f"⋮  {left_out:,} more ranks", size=11, colour=QUIET)
            y += LANE_PX - 4
            continue
        canvas.rect(20, y + 6, 12, 12, rank_colour(rank, layout.num_shards))
        canvas.text(40, y + 16, f"rank {rank:,}", size=11.5)
        _draw_lane(canvas, layout, names, rank, y)
        y += LANE_PX + 4
    return y


def _draw_lane(canvas: SvgCanvas, layout: GroupLayout, names: dict[str, str], rank: int, y: float) -> None:
    scale = BODY_PX / max(layout.shard_numel, 1)
    canvas.rect(LABEL_PX, y, BODY_PX, LANE_PX, "url(#padding)", stroke=RULE, tip=f"rank {rank}: padding")
    for index, (slot, piece) in enumerate(layout.pieces_of(rank)):
        x, width = LABEL_PX + piece.local_offset * scale, piece.numel * scale
        tip = (
            f"{slot.fqn} {list(slot.shape)}: elements [{piece.range.start:,}, {piece.range.stop:,}) of "
            f"{slot.numel:,} on rank {rank} at {piece.local_offset:,}"
        )
        # Two shades alternate, so that neighbours stay apart where no label fits.
        fill = rank_colour(rank, layout.num_shards, shade=index % 2 == 1)
        canvas.rect(x, y, width, LANE_PX, fill, tip=tip, stroke=PAPER if width > 3 else "")
        label = _fit(names[slot.fqn], width)
        if label:
            canvas.text(x + width / 2, y + LANE_PX / 2 + 4, label, size=10.5, anchor="middle")


def _draw_tensors(canvas: SvgCanvas, layout: GroupLayout, names: dict[str, str], top: float) -> float:
    canvas.text(20, top, "Tensors: which rank holds which part", size=13, bold=True)
    filled = [slot for slot in layout.slots if slot.numel]
    largest = sorted(filled, key=lambda slot: -slot.numel)[:MAX_TENSORS]
    y = top + 12
    for slot in (slot for slot in filled if slot in largest):
        canvas.text(20, y + 12, _fit(names[slot.fqn], LABEL_PX - 24, 11) or slot.fqn, size=11)
        _draw_bar(canvas, layout, slot, y + 1)
        blocks = -(-slot.numel // slot.block_numel)
        note = f"{' x '.join(map(str, slot.shape))}, {blocks:,} x block {slot.block_numel:,}"
        note += ", scattered: copied" if slot.is_scattered else ""
        canvas.text(20, y + 24, note, size=9, colour=QUIET)
        y += BAR_PX + 12 + GAP_PX
    if len(filled) > len(largest):
        canvas.text(LABEL_PX, y + 10, f"⋮  {len(filled) - len(largest):,} smaller tensors", colour=QUIET)
        y += 20
    return y


def _draw_bar(canvas: SvgCanvas, layout: GroupLayout, slot: TensorSlot, y: float) -> None:
    scale = BODY_PX / slot.numel
    for rank in islice(layout.holders(slot), MAX_SEGMENTS):
        piece = layout.piece(slot, rank)
        x, width = LABEL_PX + piece.range.start * scale, piece.numel * scale
        tip = f"{slot.fqn}: rank {rank} holds [{piece.range.start:,}, {piece.range.stop:,})"
        canvas.rect(x, y, width, BAR_PX, rank_colour(rank, layout.num_shards), tip=tip)
        label = _fit(f"rank {rank}", width, 10)
        if label:
            canvas.text(x + width / 2, y + BAR_PX / 2 + 3.5, label, size=10, anchor="middle")
    block_px = slot.block_numel * scale
    if block_px >= 4:
        for tick in range(1, -(-slot.numel // slot.block_numel)):
            x = LABEL_PX + tick * block_px
            canvas.line(x, y + BAR_PX, x, y + BAR_PX + 4, QUIET, 0.8)
    canvas.line(LABEL_PX, y + BAR_PX, LABEL_PX + BODY_PX, y + BAR_PX, RULE, 0.8)


def _draw_legend(canvas: SvgCanvas, layout: GroupLayout, y: float) -> None:
    canvas.rect(LABEL_PX, y, 22, 12, "url(#padding)", stroke=RULE)
    canvas.text(
        LABEL_PX + 28, y + 10, f"padding, {layout.numel - layout.payload_numel:,} elements", colour=QUIET
    )
    canvas.line(LABEL_PX + 230, y + 2, LABEL_PX + 230, y + 12, INK, 0.8)
    canvas.text(LABEL_PX + 238, y + 10, "edge of a block: colours change only there", colour=QUIET)
    canvas.rect(LABEL_PX + 520, y, 12, 12, rank_colour(0, layout.num_shards))
    canvas.rect(LABEL_PX + 532, y, 12, 12, rank_colour(0, layout.num_shards, shade=True))
    canvas.text(LABEL_PX + 550, y + 10, "colour: rank; shades tell neighbouring tensors apart", colour=QUIET)
