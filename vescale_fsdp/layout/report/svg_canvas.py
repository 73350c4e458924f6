"""A canvas: rectangles, lines, dots and text, written as SVG text.

Lengths are pixels, y grows downwards. ``PADDING`` as a fill is a hatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

PADDING = "padding"
PAPER, HATCH_PAPER, HATCH_INK, INK = "#ffffff", "#f8f9fb", "#98a2b3", "#1d2433"


class Canvas:
    """Collects the shapes of one picture, back to front.

    Args:
        title: what the picture shows.
        width_px, height_px: its size; the height may be set when all is drawn.
    """

    def __init__(self, title: str, width_px: float, height_px: float = 0) -> None:
        self.title = title
        self.width_px = width_px
        self.height_px = height_px
        self._shapes: list[str] = []  # elements of SVG

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "", tip: str = ""
    ) -> None:
        """A filled rectangle; ``fill=PADDING`` hatches it. The tip shows in SVG when pointed at."""
        fill = "url(#padding)" if fill == PADDING else fill
        edge = f" stroke='{stroke}' stroke-width='0.8'" if stroke else ""
        self._shapes.append(
            f"<rect x='{x:.2f}' y='{y:.2f}' width='{max(width, 0.6):.2f}' height='{height:.2f}' "
            f"fill='{fill}'{edge}>{_title(tip)}</rect>"
        )

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, *, width: float = 1.0, dashed: bool = False
    ) -> None:
        """An open line through points."""
        where = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        dashes = " stroke-dasharray='5 4'" if dashed else ""
        self._shapes.append(
            f"<polyline points='{where}' fill='none' stroke='{colour}' stroke-width='{width}' "
            f"stroke-linejoin='round'{dashes}/>"
        )

    def dot(self, x: float, y: float, radius: float, fill: str, *, tip: str = "") -> None:
        """A filled circle."""
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
        colour: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """A line of text whose baseline starts (``"start"``), is centred or ends at a point."""
        weight = " font-weight='600'" if bold else ""
        self._shapes.append(
            f"<text x='{x:.2f}' y='{y:.2f}' font-size='{size}' fill='{colour}' "
            f"text-anchor='{anchor}'{weight}>{escape(content)}</text>"
        )

    def svg(self) -> str:
        """The picture as an SVG document."""
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
        return "\n".join((head, hatch, paper, *self._shapes, "</svg>")) + "\n"


def _title(tip: str) -> str:
    return f"<title>{escape(tip)}</title>" if tip else ""
