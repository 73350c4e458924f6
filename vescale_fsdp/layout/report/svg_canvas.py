"""A canvas: rectangles, lines, dots and text, kept as values, written as SVG text or, with matplotlib, as PNG.

Pictures draw once and are written in either form, so that both look alike. Lengths are pixels, y grows
downwards. ``PADDING`` as a fill is a hatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

__all__ = ["PADDING", "Canvas"]

PADDING = "padding"
PAPER, HATCH_PAPER, HATCH_INK, INK = "#ffffff", "#f8f9fb", "#98a2b3", "#1d2433"
POINTS_PER_PX = 0.75  # matplotlib sizes fonts and lines in points; at 96 dpi a pixel is 3/4 of one


@dataclass(frozen=True)
class _Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str
    tip: str

    def svg(self) -> str:
        fill = "url(#padding)" if self.fill == PADDING else self.fill
        edge = f" stroke='{self.stroke}' stroke-width='0.8'" if self.stroke else ""
        tip = f"<title>{escape(self.tip)}</title>" if self.tip else ""
        return (
            f"<rect x='{self.x:.2f}' y='{self.y:.2f}' width='{self.width:.2f}' height='{self.height:.2f}' "
            f"fill='{fill}'{edge}>{tip}</rect>"
        )

    def draw(self, axes: Any, patches: Any) -> None:
        hatched = self.fill == PADDING
        axes.add_patch(
            patches.Rectangle(
                (self.x, self.y),
                self.width,
                self.height,
                facecolor=HATCH_PAPER if hatched else self.fill,
                edgecolor=HATCH_INK if hatched else self.stroke or "none",
                hatch="////" if hatched else None,
                linewidth=0.6 if hatched or self.stroke else 0,
            )
        )


@dataclass(frozen=True)
class _Line:
    points: tuple[tuple[float, float], ...]
    colour: str
    width: float
    dashed: bool

    def svg(self) -> str:
        where = " ".join(f"{x:.2f},{y:.2f}" for x, y in self.points)
        dashes = " stroke-dasharray='5 4'" if self.dashed else ""
        return (
            f"<polyline points='{where}' fill='none' stroke='{self.colour}' stroke-width='{self.width}' "
            f"stroke-linejoin='round'{dashes}/>"
        )

    def draw(self, axes: Any, patches: Any) -> None:
        xs, ys = zip(*self.points, strict=True)
        style = "--" if self.dashed else "-"
        axes.plot(xs, ys, color=self.colour, linewidth=self.width * POINTS_PER_PX, linestyle=style)


@dataclass(frozen=True)
class _Dot:
    x: float
    y: float
    radius: float
    fill: str
    tip: str

    def svg(self) -> str:
        tip = f"<title>{escape(self.tip)}</title>" if self.tip else ""
        return (
            f"<circle cx='{self.x:.2f}' cy='{self.y:.2f}' r='{self.radius}' fill='{self.fill}'>{tip}</circle>"
        )

    def draw(self, axes: Any, patches: Any) -> None:
        axes.add_patch(patches.Circle((self.x, self.y), self.radius, facecolor=self.fill, linewidth=0))


@dataclass(frozen=True)
class _Text:
    x: float
    y: float
    content: str
    size: float
    colour: str
    anchor: str
    bold: bool

    def svg(self) -> str:
        weight = " font-weight='600'" if self.bold else ""
        return (
            f"<text x='{self.x:.2f}' y='{self.y:.2f}' font-size='{self.size}' fill='{self.colour}' "
            f"text-anchor='{self.anchor}'{weight}>{escape(self.content)}</text>"
        )

    def draw(self, axes: Any, patches: Any) -> None:
        axes.text(
            self.x,
            self.y,
            self.content.replace("$", r"\$"),  # else matplotlib reads it as mathematics
            fontsize=self.size * POINTS_PER_PX,
            color=self.colour,
            ha={"start": "left", "middle": "center", "end": "right"}[self.anchor],
            va="baseline",
            fontweight="bold" if self.bold else "normal",
        )


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
        self._shapes: list[_Rect | _Line | _Dot | _Text] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "", tip: str = ""
    ) -> None:
        """A filled rectangle; ``fill=PADDING`` hatches it. The tip shows in SVG when pointed at."""
        self._shapes.append(_Rect(x, y, max(width, 0.6), height, fill, stroke, tip))

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, *, width: float = 1.0, dashed: bool = False
    ) -> None:
        """An open line through points."""
        self._shapes.append(_Line(tuple(points), colour, width, dashed))

    def dot(self, x: float, y: float, radius: float, fill: str, *, tip: str = "") -> None:
        """A filled circle."""
        self._shapes.append(_Dot(x, y, radius, fill, tip))

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
        self._shapes.append(_Text(x, y, content, size, colour, anchor, bold))

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
        return "\n".join((head, hatch, paper, *(shape.svg() for shape in self._shapes), "</svg>")) + "\n"

    def save_png(self, path: Path) -> None:
        """Write the picture as PNG.

        Raises:
            ImportError: without matplotlib.
        """
        from matplotlib import patches
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(self.width_px / 96, self.height_px / 96), dpi=96, facecolor=PAPER)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, self.width_px), ylim=(self.height_px, 0))
        axes.set_axis_off()
        for shape in self._shapes:
            shape.draw(axes, patches)
        figure.savefig(path, dpi=144)
