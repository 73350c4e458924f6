"""The plan report: units, figures that equal the planner's, text, pictures, and every kind of source."""

from __future__ import annotations

import json
import re
import struct
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.units import groups_of
from tools.bench.parts.model_shapes import LAYERS
from vescale_fsdp import Element, PaddingPolicy, PlanReport, Rows, fully_shard, plan_report
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.model_shapes import ParamShape, natural_key, shapes_of, units_of
from vescale_fsdp.layout.pictures import Canvas
from vescale_fsdp.layout.planner import TensorSpec, plan_group


def model_shapes(num_layers: int = 3) -> dict[str, tuple[int, ...]]:
    """A gpt-oss-like model of a few layers."""
    layers = {
        f"model.layers.{i}.{fqn}": shape
        for i in range(num_layers)
        for fqn, shape in LAYERS["gpt-oss-120B"].items()
    }
    return {"model.embed_tokens.weight": (201088, 2880), **layers, "lm_head.weight": (201088, 2880)}


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return plan_report(model_shapes(), [8, 1024, 2048], {"*proj*": Rows(128), "*.weight": Rows(1)})


def test_rows_are_the_planners_figures(report: PlanReport) -> None:
    """Each row holds what plan_group gives for that unit, and layers that are alike are one row."""
    shapes = LAYERS["gpt-oss-120B"]
    rules = {f: Rows(128) if "proj" in f else Rows(1) if f.endswith("weight") else Element() for f in shapes}
    specs = [TensorSpec(f, s, "bfloat16", rules[f].block_numel(s)) for f, s in shapes.items()]
    layouts = [plan_group(specs, count) for count in (8, 1024, 2048)]

    layers = [row for row in report.rows if row.group == "model.layers.0"]

    assert [row.num_shards for row in layers] == [8, 1024, 2048]
    assert [row.padding_ratio for row in layers] == [layout.padding_ratio for layout in layouts]
    assert [row.copied_ratio for row in layers] == [layout.copied_ratio for layout in layouts]
    assert [row.shard_bytes for row in layers] == [2 * layout.shard_numel for layout in layouts]
    assert {row.num_units for row in layers} == {3}
    assert layers[1].scattered == ("self_attn.o_proj.weight",)
    assert report.layout("model.layers.2", 1024) == layouts[1]


def test_totals_add_up_units(report: PlanReport) -> None:
    """Payload and bytes of all units; padding weighs each by its payload."""
    total = report.total(1024)
    layer, root = (report.layout(name, 1024) for name in ("model.layers.0", "(root)"))

    assert total.payload_numel == sum(torch.Size(s).numel() for s in model_shapes().values())
    assert total.shard_bytes == 2 * (3 * layer.shard_numel + root.shard_numel)
    assert total.padding_ratio == pytest.approx(
        (3 * layer.numel + root.numel) / (3 * layer.payload_numel + root.payload_numel) - 1
    )
    assert total.num_units == 4


def test_text_shows_figures_tensors_and_cures(report: PlanReport) -> None:
    """The printed report has each group's padding, each tensor's granularity, and cures above 25 %."""
    lines = [line.split() for line in str(report).splitlines()]

    assert [
        "1,024",
        "model.layers.0",
        "3",
        "17.5",
        "0.367",
        "4.3",
        "7.03",
        "self_attn.o_proj.weight",
    ] in lines
    assert ["mlp.experts.gate_up_proj", "128", "x", "2880", "x", "5760", "1", "Rows(128)", "737,280"] in lines
    assert ["self_attn.sinks", "64", "1", "Element()", "1"] in lines
    advice = str(report).split("model.layers.0 over 2,048 shards is padded by 41%:")[1]
    assert "shard over 1024 ranks (HSDP, 2 replicas): 17.5%" in advice


def test_json_has_all_rows(report: PlanReport) -> None:
    """Rows and totals survive JSON."""
    data = json.loads(json.dumps(report.to_json()))

    assert len(data["rows"]) == 2 * 3 + 3
    assert data["rows"][-1]["group"] == "all units"


def test_experts_are_one_line() -> None:
    """Numbers inside names are folded: 256 experts print as one line per matrix."""
    text = str(plan_report({f"l.{i}.{f}": s for i in (0, 1) for f, s in LAYERS["DeepSeek-V3"].items()}, [64]))

    (line,) = (line.split() for line in text.splitlines() if "mlp.experts.*.gate_proj" in line)
    assert line == ["mlp.experts.*.gate_proj.weight", "2048", "x", "7168", "256", "Element()", "1"]


# -- what fully_shard does --------------------------------------------------------------------------------


def runtime_layouts() -> list[GroupLayout]:
    model, rule = models.build(), {"*.weight": Rows(2)}
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh(), granularity=rule)
    fully_shard(model, mesh=cpu_mesh(), granularity=rule)
    return [group.layout for group in groups_of(*model.blocks, model)]


def test_report_plans_what_the_runtime_plans() -> None:
    """For a module, units, groups and layouts are those of fully_shard on blocks and root."""
    with torch.device("meta"):
        model = models.build()

    report = plan_report(model, [3], {"*.weight": Rows(2)})

    (layouts, *_) = run_ranks(3, runtime_layouts)
    assert [report.layout(name, 3) for name in ("blocks.0", "blocks.1", "blocks.2", "(root)")] == layouts


def test_frozen_and_mixed_dtypes_are_groups_of_their_own() -> None:
    """As in fully_shard: one group per dtype and trainability."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, dtype=torch.bfloat16))
    model[0].bias.requires_grad_(False)

    report = plan_report(model, [2])

    assert [(g.name, g.dtype, [p.fqn for p in g.params]) for g in report.groups] == [
        ("(root)", "float32", ["0.weight"]),
        ("(root)", "float32, frozen", ["0.bias"]),
        ("(root)", "bfloat16", ["1.weight", "1.bias"]),
    ]
    assert [row.shard_bytes for row in report.rows] == [128, 128, 128]  # the least there is
    assert "float32, frozen" in str(report)


class Ends(nn.Module):
    """Two blocks of 64 KiB between an embedding and a head of 1 MiB each, and what has to stay in the root."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2**17))  # no module of its own
        self.body = nn.Module()
        self.body.embed = nn.Embedding(2048, 128)
        self.body.layers = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(2))
        self.body.bias = nn.Parameter(torch.ones(2**17))  # in a module that contains units
        self.norm = nn.RMSNorm(128)
        self.head = nn.Linear(128, 2048, bias=False)
        if is_tied:
            self.head.weight = self.body.embed.weight


def root_advice(report: PlanReport) -> dict[str, str]:
    """The modules that the advice names, and their sizes."""
    lines = [line for line in report.advice() if "fully_shard" in line]
    return {name: size for line in lines for name, size in re.findall(r"([\w.]+) \(([^)]+)\)", line)}


def test_a_root_larger_than_other_units_is_worth_splitting() -> None:
    """The advice names the bytes held, and what the root need not hold; done so, nothing is left to advise."""
    report = plan_report(Ends(), [2, 4])

    assert root_advice(report) == {"body.embed": "1.05 MB", "head": "1.05 MB"}
    assert "3.15 MB" in str(report) and "65.5 kB" in str(report)
    assert root_advice(plan_report(Ends(), [2], units=["body.layers.*", "body.embed", "head"])) == {}
    assert root_advice(plan_report(Ends(), [2], units=[""])) == {}


def test_tied_parameters_are_not_taken_out_of_the_root() -> None:
    """A unit of both modules would be gathered as long as the root."""
    assert root_advice(plan_report(Ends(is_tied=True), [2])) == {}


def test_a_mapping_knows_units_by_its_names(report: PlanReport) -> None:
    """Roots smaller than another unit get no advice, nor mappings without units."""
    blocks = {f"layers.{i}.w": (16, 16) for i in range(2)}

    assert root_advice(plan_report({"head.w": (100, 100), **blocks}, [2])) == {"head": "20 kB"}
    assert root_advice(plan_report({"head.w": (16, 16), **blocks}, [2])) == {}
    assert root_advice(plan_report({"head.w": (100, 100)}, [2])) == {}
    assert root_advice(report) == {}


# -- sources and units ------------------------------------------------------------------------------------


def test_a_hugging_face_folder_is_read_by_its_headers(tmp_path: Path) -> None:
    """Shapes and dtypes come from all files' headers, in the order of layer numbers; data is not needed."""
    save_file({f"layers.{i}.w": torch.zeros(4, 6) for i in (10, 2)}, tmp_path / "model-1.safetensors")
    save_file({"head.w": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    whole = (tmp_path / "model-1.safetensors").read_bytes()
    (tmp_path / "model-1.safetensors").write_bytes(whole[:-100])

    assert shapes_of(tmp_path) == (
        ParamShape("head.w", (3,), "bfloat16"),
        ParamShape("layers.2.w", (4, 6), "float32"),
        ParamShape("layers.10.w", (4, 6), "float32"),
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "length -1 in a file of 0 bytes"),
        (struct.pack("<Q", 1 << 60) + b"{}", "in a file of 10 bytes"),
        (struct.pack("<Q", 4) + b"nope", "JSONDecodeError"),
    ],
)
def test_damaged_headers_are_refused(content: bytes, words: str, tmp_path: Path) -> None:
    """A header that is cut, absurd or no JSON is an error with file and sizes, before anything is allocated."""
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(LayoutError) as refused:
        shapes_of(tmp_path)
    assert words in str(refused.value.got) and "model.safetensors" in str(refused.value.where)


@pytest.mark.parametrize(
    ("source", "got", "where"),
    [
        ({"w": (4, -1)}, "(4, -1)", "w"),
        ({"w": (4, "x")}, "(4, 'x')", "w"),
        (17, "int", None),
        ("/nowhere/at/all", "no folder", "/nowhere/at/all"),
    ],
)
def test_sources_that_cannot_be(source: object, got: str, where: str | None) -> None:
    """Bad shapes, other types and empty folders are refused."""
    with pytest.raises(LayoutError) as refused:
        plan_report(source, [2])  # type: ignore[arg-type]
    assert (refused.value.got, refused.value.where) == (got, where)


def names_of(shapes: dict[str, tuple[int, ...]], units: list[str] | None = None) -> dict[str, list[str]]:
    return {name: [p.fqn for p in params] for name, params in units_of(shapes_of(shapes), units).items()}


def test_repeated_blocks_are_units_and_the_root_has_the_rest() -> None:
    """Lists with two members alike give units, the outermost list counts, others stay in the root."""
    shapes = {
        "embed.w": (8, 4),
        "layers.0.experts.0.w": (4, 4),
        "layers.0.experts.1.w": (4, 4),
        "layers.1.experts.0.w": (4, 4),
        "layers.1.experts.1.w": (4, 4),
        "layers.2.dense.w": (9, 9),
        "heads.0.w": (4, 1),
        "heads.1.w": (4, 2),
    }

    assert names_of(shapes) == {
        "layers.0": ["experts.0.w", "experts.1.w"],
        "layers.1": ["experts.0.w", "experts.1.w"],
        "layers.2": ["dense.w"],
        "": ["embed.w", "heads.0.w", "heads.1.w"],
    }


def test_named_units_take_the_deepest_match() -> None:
    """Patterns match part by part, and a unit inside a unit keeps its parameters."""
    shapes = {
        "m.layers.0.mlp.w": (2,),
        "m.layers.0.attn.w": (2,),
        "m.layers.1.attn.w": (2,),
        "m.norm.w": (2,),
    }

    assert names_of(shapes, ["m.layers.*", "m.layers.*.mlp"]) == {
        "m.layers.0.mlp": ["w"],
        "m.layers.0": ["attn.w"],
        "m.layers.1": ["attn.w"],
        "": ["m.norm.w"],
    }
    with pytest.raises(LayoutError) as refused:
        names_of(shapes, ["m.layer.*"])
    assert refused.value.got == "'m.layer.*'" and "m.layers" in str(refused.value.where)


def test_patterns_must_match_and_shards_must_be_given() -> None:
    """The report refuses what the runtime would refuse."""
    with pytest.raises(LayoutError) as unmatched:
        plan_report(model_shapes(), [8], {"mlp.upproj": Rows(2)})
    assert unmatched.value.got == "'mlp.upproj'"
    for shards, got in (([], "shards=[]"), ([0], "num_shards=0")):
        with pytest.raises(LayoutError) as refused:
            plan_report(model_shapes(), shards)
        assert got in str(refused.value.got)


def test_a_granularity_function_sees_name_and_shape() -> None:
    """Functions get the name relative to the unit and something with the parameter's shape."""
    seen = {}

    def rule(fqn: str, param: ParamShape) -> Element:
        seen[fqn] = (param.shape, param.ndim, param.dtype)
        return Element()

    plan_report({"layers.0.w": ((4, 2), "float32"), "layers.1.w": ((4, 2), "float32")}, [2], rule)

    assert seen == {"w": ((4, 2), 2, "float32")}


def test_numbers_in_names_are_ordered_by_value() -> None:
    """Numbers in names count by value."""
    assert sorted(["a.10.w", "a.9.w", "a.b"], key=natural_key) == ["a.9.w", "a.10.w", "a.b"]


# -- pictures ---------------------------------------------------------------------------------------------


def test_save_writes_tables_and_pictures(report: PlanReport, tmp_path: Path) -> None:
    """Text, one picture of padding and one per group and shards, each as SVG."""
    files = report.save(tmp_path / "plan")

    stems = {"padding", *(f"layout-{g}-{n}" for g in ("model.layers.0", "root") for n in (8, 1024, 2048))}
    assert {file.name for file in files} == {"plan.txt", *(f"{s}.svg" for s in stems)}
    for file in files:
        if file.suffix == ".svg":
            assert ET.fromstring(file.read_text()).tag.endswith("svg")
    assert (tmp_path / "plan" / "plan.txt").read_text().startswith("4 groups of 2 kinds")


def test_chart_has_a_dot_per_plan_at_its_height() -> None:
    """Dots lie on a logarithmic scale: ten times the padding is one line higher."""
    shapes = {"w": (2880, 4096), "v": (128, 2880, 5760)}
    report = plan_report(shapes, [768, 1024, 2048], Rows(128), padding_policy=PaddingPolicy(scatter="never"))

    root = ET.fromstring(report.padding_picture().svg())
    dots = [float(c.attrib["cy"]) for c in root.iter("{http://www.w3.org/2000/svg}circle")]
    heights = [row.padding_ratio for row in report.rows]

    assert len(dots) == 3
    assert len(set(heights)) == 3
    assert sorted(heights, reverse=True) == [h for _, h in sorted(zip(dots, heights, strict=True))]


def test_canvas_draws_every_shape() -> None:
    """What is drawn is in the SVG text, its texts escaped."""
    canvas = Canvas("a & b", 100, 80)
    canvas.rect(1, 2, 30, 40, "#ff0000", stroke="#000000", tip="<tip>")
    canvas.line([(0, 0), (10, 10), (20, 0)], "#00ff00", dashed=True)
    canvas.dot(5, 5, 2, "#0000ff")
    canvas.text(3, 4, "cost: $5", anchor="end", bold=True)

    tags = [element.tag.rpartition("}")[2] for element in ET.fromstring(canvas.svg()).iter()]
    assert {"rect", "polyline", "circle", "text"} <= set(tags)
    assert "a &amp; b" in canvas.svg() and "&lt;tip&gt;" in canvas.svg()
