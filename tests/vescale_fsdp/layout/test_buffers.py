"""Two buffers where blocks do not go together: when, what they save, and how the report shows it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vescale_fsdp.layout.test_planner import layer, tensors
from tools.bench.parts.model_shapes import LAYERS
from vescale_fsdp import Rows, plan_report
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout import planner
from vescale_fsdp.layout.packing import TensorSize
from vescale_fsdp.layout.planner import MESSAGE_PRICE, padding_ratio, plan_buffers, plan_group, price_of

GROUPED = "Llama-4-Maverick grouped"  # rows of 5,120, 8,192 and 16,384


def test_blocks_that_do_not_go_together_lie_apart() -> None:
    """128 rows over 768 shards: one buffer pads 48 % or copies a third of the layer, two pad 3 % and copy nothing."""
    specs = layer(GROUPED, Rows(128))
    never, scattered = (plan_group(specs, 768, scatter=mode) for mode in ("never", "auto"))

    first, second = plan_buffers(specs, 768)

    assert 0.47 < never.padding_ratio < 0.49
    assert scattered.copied_ratio > 0.32
    assert padding_ratio((first, second)) < 0.035
    assert first.copied_numel == second.copied_numel == 0
    assert {slot.shape[-1] for slot in second.slots} == {8192, 16384}
    assert plan_buffers(specs, 768, scatter="never") == (first, second)


def test_two_buffers_never_cost_more() -> None:
    """On every layer: every tensor once, in its order, and a second buffer only where that is cheaper by the prices."""
    split = 0
    for model, rows in itertools.product(LAYERS, (32, 128)):
        specs = layer(model, Rows(rows))
        for num_shards in (64, 256, 768, 2048):
            whole, layouts = plan_group(specs, num_shards), plan_buffers(specs, num_shards)
            names = [slot.fqn for layout in layouts for slot in layout.slots]
            assert sorted(names) == sorted(spec.fqn for spec in specs)
            order = {spec.fqn: place for place, spec in enumerate(specs)}
            for layout in layouts:
                places = [order[slot.fqn] for slot in layout.slots]
                assert places == sorted(places)
            assert layouts[0].slots[0].fqn == specs[0].fqn
            if len(layouts) == 1:
                assert layouts == (whole,)
            else:
                assert sum(map(price_of, layouts)) + MESSAGE_PRICE < price_of(whole)
                split += 1

    assert split > 25


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(2, 9), st.integers(1, 40)), min_size=1, max_size=5), st.integers(2, 12))
def test_no_other_split_is_smaller(blocks: list[tuple[int, int]], num_shards: int) -> None:
    """The split is the best of all that keep equal blocks together, found by trying every one."""
    sizes = tuple(TensorSize(count * block, block) for count, block in blocks)
    kinds = sorted({block for _, block in blocks})

    def numel(apart: set[int]) -> int:
        parts = [[size for size in sizes if (size[1] in apart) is side] for side in (False, True)]
        plans = [plan_group(tensors(*part), num_shards, align_numel=1, scatter="never") for part in parts]
        return sum(plan.shard_numel for plan in plans)

    every = [set(some) for count in range(len(kinds)) for some in itertools.combinations(kinds, count)]
    found = planner._best_split(sizes, num_shards, 1)

    assert numel({sizes[index][1] for index in found}) == min(map(numel, every))


def test_small_gains_are_not_worth_a_message() -> None:
    """A layout that pads by less than a message costs is one buffer, however large its share of padding."""
    small, large = (tensors((7 * 2560 * by, 2560 * by), (8 * 1600 * by, 1600 * by)) for by in (1, 10))

    assert [len(plan_buffers(specs, 4)) for specs in (small, large)] == [1, 2]
    assert plan_group(small, 4).padding_ratio == plan_group(large, 4).padding_ratio > 0.3


def test_what_scattering_may_copy_is_a_matter_of_prices() -> None:
    """Two thirds of a layer are copied where the padding they avoid would cost more."""
    specs = layer("Qwen3-30B-A3B grouped", Rows(128))
    never, found = (plan_group(specs, 768, scatter=mode) for mode in ("never", "auto"))

    assert found.copied_ratio > 0.5
    assert price_of(found) < price_of(never)


def test_equal_layers_are_split_once() -> None:
    """What 24 layers of one model cost is one search."""
    planner._best_split.cache_clear()
    for _ in range(24):
        assert len(plan_buffers(layer(GROUPED, Rows(128)), 768)) == 2

    assert planner._best_split.cache_info().misses == 1


def test_the_report_shows_both_buffers(tmp_path: Path) -> None:
    """A row has the figures of both, the table names what lies apart, and the picture draws the two."""
    shapes = {f"layers.{index}.{name}": shape for index in (0, 1) for name, shape in LAYERS[GROUPED].items()}
    report = plan_report(shapes, [1, 768], Rows(128))
    layouts = plan_buffers(layer(GROUPED, Rows(128)), 768)

    one, two = (report.rows[place] for place in (0, 1))

    assert report.layouts("layers.1", 768) == layouts
    assert (one.apart, two.apart) == ((), tuple(slot.fqn for slot in layouts[1].slots))
    assert two.padding_ratio == padding_ratio(layouts)
    assert two.shard_bytes == 2 * sum(layout.shard_numel for layout in layouts)
    assert two.blocks_per_rank < one.blocks_per_rank
    assert ", ".join(two.apart) in str(report)
    assert report.layout("layers.0", 1).num_shards == 1
    with pytest.raises(LayoutError) as refused:
        report.layout("layers.0", 768)
    assert refused.value.got == "2 layouts" and "layers.0" in str(refused.value.where)
    report.save(tmp_path)
    drawn = {file.name: file.read_text() for file in tmp_path.glob("layout-*.svg")}
    assert "buffer 2 of 2" in drawn["layout-layers.0-768.svg"]
    assert "buffer" not in drawn["layout-layers.0-1.svg"]
