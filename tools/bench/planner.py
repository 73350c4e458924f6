"""Padding, copies and planning time of real decoder layers, against FSDP2 and the LCM rule. Needs no GPU or ranks.

    python tools/bench/planner.py                                    every model, 8 to 16,384 shards
    python tools/bench/planner.py --models gpt-oss --granularity rows:128 --shards 512,768,1024
    python tools/bench/planner.py --json planner.json

One decoder layer is one group, all its parameters on all shards. Columns, in % of the payload unless named:

    padding         plan_group(scatter="never"): every tensor one run of the buffer, gathers copy nothing
    auto, copied    plan_buffers, as fully_shard plans: padding of one buffer or two, and elements of scattered tensors
    blocks/rank     payload per rank in the group's largest blocks; below about 8, rounding to whole blocks dominates
    ms              planning with "auto", CPU time, nothing cached, median of three
    FSDP2           dim 0 of every tensor rounded up to the number of ranks, for any granularity
    LCM rows        Megatron-FSDP v2: S is a multiple of the LCM of all row sizes (a row: a slice of dim 0)
    LCM blocks      the same rule with the blocks of the granularity

The other rules are derived from published descriptions, with the least padding that they allow.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench.parts.model_shapes import LAYERS
from tools.bench.rows import Row, machine, print_table, write_json
from vescale_fsdp.layout.geometry import numel_of
from vescale_fsdp.layout.granularity import parse_granularity
from vescale_fsdp.layout.planner import (
    TensorSpec,
    _best_split,
    _plan_sizes,
    padding_ratio,
    plan_buffers,
    plan_group,
)

SHARDS = (8, 16, 32, 64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 16384)
GRANULARITIES = ("element", "rows:1", "rows:32", "rows:128")
ENOUGH_BLOCKS = 8
HEAD = ("shards", "blocks/rank", "padding", "auto", "copied", "ms", "FSDP2", "LCM rows", "LCM blocks")


@dataclass(frozen=True)
class Measured:
    """One layer at one granularity over one number of shards; ratios are fractions of the payload."""

    model: str
    granularity: str
    num_shards: int
    blocks_per_rank: float
    padding: float
    auto_padding: float
    copied: float
    milliseconds: float
    fsdp2: float
    lcm_rows: float
    lcm_blocks: float

    @property
    def case(self) -> str:
        """Name of the case in the JSON."""
        return f"{self.model} {self.granularity} x{self.num_shards}"


def specs_of(model: str, granularity: str, *, layer: int = 0) -> list[TensorSpec]:
    """The planner's input for one decoder layer."""
    rule = parse_granularity(granularity)
    return [
        TensorSpec(f"layers.{layer}.{fqn}", shape, "bfloat16", rule.block_numel(shape))
        for fqn, shape in LAYERS[model].items()
    ]


def fsdp2_padding(shapes: Iterable[tuple[int, ...]], num_shards: int) -> float:
    """FSDP2's padding: each rank has room for ``ceil(dim 0 / ranks)`` slices of dim 0 of every tensor."""
    padded = payload = 0
    for shape in shapes:
        row = numel_of(shape[1:])
        padded += -(-shape[0] // num_shards) * num_shards * row
        payload += shape[0] * row
    return padded / payload - 1


def lcm_padding(blocks: Iterable[int], payload_numel: int, num_shards: int) -> float:
    """The LCM rule's padding: S is the least multiple of the LCM of all blocks with room for a rank's payload."""
    step = math.lcm(*blocks)
    return -(-payload_numel // (num_shards * step)) * step * num_shards / payload_numel - 1


def measure(model: str, granularity: str, num_shards: int) -> Measured:
    """Plan one layer with and without scattering, and compute the padding of the other rules."""
    specs, shapes = specs_of(model, granularity), list(LAYERS[model].values())
    seconds = []
    for _ in range(3):
        _forget_plans()
        start = time.process_time()
        auto = plan_buffers(specs, num_shards)
        seconds.append(time.process_time() - start)
    never = plan_group(specs, num_shards, scatter="never")
    payload = never.payload_numel
    return Measured(
        model,
        granularity,
        num_shards,
        blocks_per_rank=payload / num_shards / max(spec.block_numel for spec in specs),
        padding=never.padding_ratio,
        auto_padding=padding_ratio(auto),
        copied=sum(layout.copied_numel for layout in auto) / payload,
        milliseconds=1000 * statistics.median(seconds),
        fsdp2=fsdp2_padding(shapes, num_shards),
        lcm_rows=lcm_padding((numel_of(shape[1:]) for shape in shapes), payload, num_shards),
        lcm_blocks=lcm_padding((spec.block_numel for spec in specs), payload, num_shards),
    )


def _forget_plans() -> None:
    _plan_sizes.cache_clear()
    _best_split.cache_clear()


def rows_of(found: Measured) -> list[Row]:
    """Rows of one case, with its targets."""
    target = None
    if found.granularity == "element":
        target = "<= 0.01"
    elif found.granularity == "rows:32" and found.blocks_per_rank >= ENOUGH_BLOCKS:
        target = "< 1"
    total = 100 * (found.auto_padding + found.copied)
    spike = "< 18" if (found.model, found.granularity) == ("gpt-oss-120B", "rows:128") else None
    slow = "< 10" if (found.model, found.num_shards) == ("DeepSeek-V3", 16384) else None
    rows = [
        Row(found.case, "padding, scatter auto", "%", 100 * found.auto_padding, target=target),
        Row(
            found.case,
            "padding + copied, scatter auto",
            "%",
            total,
            target=spike if found.num_shards <= 1024 else None,
        ),
        Row(found.case, "planning, CPU", "ms", found.milliseconds, target=slow),
    ]
    for name, rival in (
        ("FSDP2", found.fsdp2),
        ("LCM rows", found.lcm_rows),
        ("LCM blocks", found.lcm_blocks),
    ):
        rows.append(Row(found.case, "padding, scatter never", "%", 100 * found.padding, 100 * rival, name))
    return rows


def whole_model(model: str, granularity: str, num_layers: int, num_shards: int) -> Row:
    """Planning time of all layers of a model, with empty caches."""
    layers = [specs_of(model, granularity, layer=layer) for layer in range(num_layers)]
    seconds = []
    for _ in range(5):
        _forget_plans()
        start = time.process_time()
        plans = [plan_buffers(specs, num_shards) for specs in layers]
        seconds.append(time.process_time() - start)
    assert len(plans) == num_layers
    case = f"{model} {granularity} x{num_shards}, {num_layers} layers"
    return Row(case, "planning, CPU", "ms", 1000 * statistics.median(seconds), target="< 300")


def print_model(found: Sequence[Measured]) -> None:
    """One table for a model at a granularity."""
    print(f"\n{found[0].model}, {len(LAYERS[found[0].model])} tensors, {found[0].granularity}")
    print("".join(name.rjust(12) for name in HEAD))
    for case in found:
        ratios = (case.fsdp2, case.lcm_rows, case.lcm_blocks)
        cells = [f"{case.num_shards}", f"{case.blocks_per_rank:.3g}"]
        cells += [_percent(ratio) for ratio in (case.padding, case.auto_padding, case.copied)]
        cells += [f"{case.milliseconds:.1f}", *map(_percent, ratios)]
        print("".join(cell.rjust(12) for cell in cells))


def _percent(ratio: float) -> str:
    percent = 100 * ratio
    return f"{percent:.0f}" if percent >= 100 else f"{percent:.3f}" if percent < 1 else f"{percent:.1f}"


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="", help="comma-separated parts of names; default: all")
    parser.add_argument("--granularity", default=",".join(GRANULARITIES), help="comma-separated")
    parser.add_argument("--shards", default=",".join(map(str, SHARDS)), help="comma-separated")
    parser.add_argument("--json", type=Path, help="write all rows here")
    options = parser.parse_args()
    parts = options.models.lower().split(",")
    rows: list[Row] = []
    for model in (name for name in LAYERS if any(part in name.lower() for part in parts)):
        for granularity in options.granularity.split(","):
            found = [measure(model, granularity, int(count)) for count in options.shards.split(",")]
            print_model(found)
            rows += [row for case in found for row in rows_of(case)]
    if "deepseek-v3".startswith(parts[0]):
        rows += [whole_model("DeepSeek-V3", granularity, 61, 16384) for granularity in GRANULARITIES]
    judged = [row for row in rows if row.met is not None]
    print(
        f"\n{sum(bool(row.met) for row in judged)} of {len(judged)} targets met; whole models, and those not met:"
    )
    print_table([row for row in judged if not row.met or "layers" in row.case])
    print(machine())
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
