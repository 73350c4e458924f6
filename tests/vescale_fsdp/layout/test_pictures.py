"""Pictures: well-formed SVG whose bands are as wide as the pieces they stand for."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tools.bench.parts.model_shapes import LAYERS
from vescale_fsdp import Cluster, plan_report, plan_training
from vescale_fsdp.checkpoint import save
from vescale_fsdp.conversion import convert, open_source
from vescale_fsdp.layout.granularity import Rows
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.pictures import (
    BODY_PX,
    DARK,
    PAPER,
    distinct_layouts,
    layout_svg,
    layout_title,
    rank_color,
    short_names,
)
from vescale_fsdp.layout.planner import TensorSpec, plan_group

SVG = "{http://www.w3.org/2000/svg}"


def _layout(num_shards: int) -> GroupLayout:
    return plan_group(
        [
            TensorSpec("layers.0.up.weight", (176, 64), "bfloat16", 16 * 64),
            TensorSpec("layers.0.down.weight", (64, 176), "bfloat16", 16 * 176),
            TensorSpec("layers.0.norm.weight", (64,), "bfloat16", 1),
            TensorSpec("layers.0.empty", (0, 4), "bfloat16", 1),
        ],
        num_shards,
    )


def _bands(svg: str, phrase: str) -> list[float]:
    """Widths of the rectangles whose tooltip holds a phrase."""
    root = ElementTree.fromstring(svg)
    titled = [(rect.findtext(f"{SVG}title") or "", rect) for rect in root.iter(f"{SVG}rect")]
    return [float(rect.attrib["width"]) for tip, rect in titled if phrase in tip]


@pytest.mark.parametrize("num_shards", [1, 2, 5, 16])
def test_lane_bands_are_as_wide_as_their_pieces(num_shards: int) -> None:
    """The bands of each rank's lane have the widths of its pieces on the scale of one shard."""
    layout = _layout(num_shards)

    svg = layout_svg(layout, "a <title>")

    for rank in range(num_shards):
        expected = [piece.numel / layout.shard_numel * BODY_PX for _, piece in layout.pieces_of(rank)]
        drawn = _bands(svg, f"on rank {rank} at ")
        assert drawn == pytest.approx([max(width, 0.6) for width in expected], abs=0.01)
    assert "a &lt;title&gt;" in svg


def test_a_tensor_bar_is_cut_where_ranks_change() -> None:
    """The parts of one tensor's bar add up to the whole bar, one part per rank that holds some."""
    layout = _layout(4)
    slot = layout.slot("layers.0.up.weight")

    parts = _bands(layout_svg(layout), "layers.0.up.weight: rank")

    held = [numel for numel in layout.piece_numels(slot) if numel]
    assert len(held) > 1
    assert parts == pytest.approx([numel / slot.numel * BODY_PX for numel in held], abs=0.01)


def test_a_large_layout_is_drawn_in_part_and_says_so() -> None:
    """The picture of 10,000 ranks stays small and names how many ranks it leaves out."""
    svg = layout_svg(plan_group([TensorSpec("w", (80_000, 8), "float32", 1)], 10_000))

    assert "9,986" in svg
    assert len(svg) < 100_000


def test_a_tensor_without_dims_is_a_scalar() -> None:
    """A label is never an empty shape."""
    svg = layout_svg(plan_group([TensorSpec("s", (), "float32", 1), TensorSpec("w", (3,), "float32", 1)], 2))

    assert "scalar, 1 x block 1" in svg


def test_names_lose_only_what_all_share() -> None:
    """Shared leading parts go; a name that is a part of the others stays readable."""
    assert short_names(["a.b.w", "a.b.c.w"]) == {"a.b.w": "w", "a.b.c.w": "c.w"}
    assert short_names(["only.one"]) == {"only.one": "only.one"}


def test_neighboring_ranks_differ_in_color() -> None:
    """No two of sixteen ranks share a fill."""
    assert len({rank_color(rank, 16) for rank in range(16)}) == 16


def test_scattered_and_widely_held_tensors_are_marked() -> None:
    """A scattered tensor is named as such; one on hundreds of ranks is one bar that says on which."""
    specs = [
        TensorSpec(fqn, shape, "bfloat16", Rows(128).block_numel(shape))
        for fqn, shape in LAYERS["gpt-oss-120B"].items()
    ]

    svg = layout_svg(plan_group(specs, 1024))

    assert "2880 x 4096, 23 x block 524,288, scattered" in svg
    assert "on 577 ranks, 4 to 580" in svg
    assert "padding 17.48 %, copied 0.37 %" in svg


def test_a_picture_has_the_colors_of_a_dark_scheme() -> None:
    """Paper and ink have others there, also as edges; labels of bands, whose colors stay, do not."""
    svg = layout_svg(_layout(2))
    style = ElementTree.fromstring(svg).findtext(f"{SVG}style") or ""

    assert "prefers-color-scheme: dark" in style
    assert f"[fill='{PAPER}']{{fill:{DARK[PAPER]}}}" in style and f"[stroke='{PAPER}']" in style
    labels = [text for text in ElementTree.fromstring(svg).iter(f"{SVG}text") if text.text == "rank 1"]
    assert {label.attrib["fill"] in DARK for label in labels} == {True, False}  # beside a lane, and in a band


def test_equal_layouts_are_drawn_once() -> None:
    """Layers differ in names only: the first one is drawn, and its headline says how many more there are."""
    layers = [
        plan_group([TensorSpec(f"layers.{i}.{name}", (64, 8), "float32", 8) for name in ("up", "down")], 4)
        for i in range(5)
    ]
    other = plan_group([TensorSpec("embed", (640, 8), "float32", 8)], 4)
    kinds = distinct_layouts([*layers, other])

    assert [(layout, count) for layout, count in kinds] == [(other, 1), (layers[0], 5)]
    assert layout_title(*kinds[1]) == "layers.0 on 4 ranks, and 4 more units"
    assert layout_title(*kinds[0]) == "(root) on 4 ranks"


def test_notebooks_show_plans_and_checkpoints(tmp_path: Path) -> None:
    """A plan, an opened checkpoint and a conversion are text, with pictures of layouts; names of tensors stay text."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    batch = torch.empty(16, 64, device="meta")
    training = plan_training(model, Cluster(4), batch=batch)
    report = plan_report({"<b>.weight": (64, 8), "layers.0.w": (80, 8), "layers.1.w": (80, 8)}, [2, 4])
    save(tmp_path / "saved", {"w<i>": torch.ones(64, 8)})
    source = open_source(str(tmp_path / "saved"))
    converted = convert(source, str(tmp_path / "out"), "zarr")
    assert len(repr(source)) < 300 and len(repr(converted)) < 300  # not every tensor
    for value in (training, report, source, converted):
        html = value._repr_html_()
        assert html.startswith("<pre>") and "<b>" not in html and "<i>" not in html
    pictures = report._repr_html_()
    assert pictures.count("<svg") == 2 and "rank 3" in pictures
    # A unit has its name, though its tensors have names inside it.
    assert "layers.0 over 4 shards" in pictures and "and 1 more" in pictures
    assert report.layout("layers.0", 4)._repr_html_().count("<svg") == 1
    assert "rank 3" in training._repr_html_()
