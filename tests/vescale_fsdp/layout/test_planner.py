"""The planner: the paper's table, lower bounds, exactness on real layers, scattering, determinism, bad input."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.processes import run_command
from tools.bench.parts.model_shapes import LAYERS
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.dtypes import itemsize_of
from vescale_fsdp.layout.geometry import numel_of
from vescale_fsdp.layout.granularity import Element, Granularity, Rows
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.packing import RepeatedSizes, TensorSize, least_shard, place_in_order
from vescale_fsdp.layout.planner import (
    COPIED_MEMORY_PRICE,
    COPIED_TIME_PRICE,
    PADDED_MEMORY_PRICE,
    PADDED_WIRE_PRICE,
    Scatter,
    TensorSpec,
    _plan_sizes,
    align_numel_of,
    plan_by_rows,
    plan_group,
)

ALIGN = align_numel_of("bfloat16")
SHARDS = (8, 16, 32, 64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 16384)


def layer(model: str, granularity: Granularity, **replaced: tuple[int, ...]) -> list[TensorSpec]:
    """Specs of one decoder layer; keyword arguments replace shapes of projections (``o_proj=(m, k)``)."""
    shapes = dict(LAYERS[model])
    shapes |= {f"self_attn.{name}.weight": shape for name, shape in replaced.items()}
    return [
        TensorSpec(fqn, shape, "bfloat16", granularity.block_numel(shape)) for fqn, shape in shapes.items()
    ]


def tensors(*sizes: tuple[int, int]) -> list[TensorSpec]:
    """1-D tensors of (numel, block_numel)."""
    return [TensorSpec(f"t{index}", (numel,), "float32", block) for index, (numel, block) in enumerate(sizes)]


# -- against the paper ------------------------------------------------------------------------------------

# Padding in % of one gpt-oss-120B layer: with o_proj rows of 4096, and with all rows multiples of 2880.
PAPER_TABLE = {
    1: {64: (0.01, 0.01), 128: (0.02, 0.02), 256: (0.05, 0.05), 512: (0.14, 0.05), 768: (1.3, 0.09), 1024: (5.7, 0.05)},
    16: {64: (0.05, 0.05), 128: (0.23, 0.23), 256: (0.60, 0.60), 512: (1.3, 1.3), 768: (41, 1.3), 1024: (88, 2.8)},
    128: {64: (1.3, 1.3), 128: (2.8, 2.8), 256: (5.7, 5.7), 512: (5.7, 5.7), 768: (59, 5.7), 1024: (111, 17.5)},
}  # fmt: skip


@pytest.mark.parametrize("rows", PAPER_TABLE)
def test_padding_is_that_of_the_papers_table(rows: int) -> None:
    """The padding of a gpt-oss-120B layer is the paper's, with scattering off."""
    for num_shards, (unrelated, related) in PAPER_TABLE[rows].items():
        found = plan_group(layer("gpt-oss-120B", Rows(rows)), num_shards, scatter="never")
        matched = plan_group(
            layer("gpt-oss-120B", Rows(rows), o_proj=(4096, 2880)), num_shards, scatter="never"
        )

        for layout, percent in ((found, unrelated), (matched, related)):
            digits = 2 if percent < 1 else 1 if percent < 41 else 0
            assert round(100 * layout.padding_ratio, digits) == percent, (num_shards, rows)


# -- bounds and exactness ---------------------------------------------------------------------------------

small_sizes = st.lists(
    st.integers(1, 60).flatmap(
        lambda numel: st.builds(TensorSize, st.just(numel), st.integers(1, min(numel, 12)))
    ),
    min_size=1,
    max_size=5,
)


def smallest_in_order(sizes: list[TensorSize], num_shards: int, align: int) -> int:
    """The exact optimum for this order, by trying every S."""
    patterns = [RepeatedSizes((size,), 1) for size in sizes]
    return next(
        shard_numel
        for shard_numel in itertools.count(align, align)
        if place_in_order(patterns, num_shards, shard_numel, align) is not None
    )


@given(small_sizes, st.integers(1, 12), st.sampled_from([1, 2, 8]))
@settings(max_examples=200)
def test_small_groups_against_brute_force(sizes: list[TensorSize], num_shards: int, align: int) -> None:
    """Not above the optimum of the given order, nor below the best of all orders or the lower bound."""
    layout = plan_group(tensors(*sizes), num_shards, align_numel=align, scatter="never")

    every_order = (
        smallest_in_order(list(order), num_shards, align) for order in set(itertools.permutations(sizes))
    )
    best = min(every_order)
    assert layout.shard_numel <= smallest_in_order(sizes, num_shards, align)
    assert layout.shard_numel >= best >= least_shard(tuple(sizes), num_shards, align)


@pytest.mark.parametrize("rows", [1, 16, 32, 128])
@pytest.mark.parametrize(
    "model", ["gpt-oss-120B", "DeepSeek-V3 grouped", "Llama-3-8B", "Qwen3-30B-A3B grouped"]
)
def test_no_smaller_shard_exists_for_real_layers(model: str, rows: int) -> None:
    """Scanning every smaller S finds none that is feasible in definition order.

    A tensor of two shards or more has two boundaries inside, so its block must divide S: only such S count.
    """
    scanned = 0
    for num_shards in (8, 48, 64, 256, 512, 768, 1024, 8192):
        specs = layer(model, Rows(rows))
        layout = plan_group(specs, num_shards, scatter="never")
        long = (spec.block_numel for spec in specs if spec.numel >= 2 * layout.shard_numel)
        step = math.lcm(ALIGN, *long)
        least = -(-layout.payload_numel // num_shards // step) * step
        smaller = range(least, layout.shard_numel, step)
        if len(smaller) > 20_000:
            continue  # too long a scan; other shard counts of the same layer are scanned
        patterns = [RepeatedSizes((TensorSize(spec.numel, spec.block_numel),), 1) for spec in specs]
        assert all(place_in_order(patterns, num_shards, size, ALIGN) is None for size in smaller)
        scanned += 1

    assert scanned >= 4, "too many scans were too long"


@pytest.mark.parametrize("model", LAYERS)
def test_lower_bound_is_nearly_met(model: str) -> None:
    """Every planned shard is within 2.5 % of what no order could undercut, at every granularity."""
    for granularity in (Element(), Rows(1), Rows(32), Rows(128)):
        specs = layer(model, granularity)
        sizes = tuple((spec.numel, spec.block_numel) for spec in specs)
        for num_shards in SHARDS:
            layout = plan_group(specs, num_shards, scatter="never")
            assert layout.shard_numel <= 1.025 * least_shard(sizes, num_shards, ALIGN)


# -- padding of real layers -------------------------------------------------------------------------------


@pytest.mark.parametrize("model", LAYERS)
def test_elements_pad_only_for_alignment(model: str) -> None:
    """By element, padding is at most 0.01 %, or what the last 128 bytes of each shard need."""
    for num_shards in SHARDS:
        layout = plan_group(layer(model, Element()), num_shards)
        exact_share = layout.payload_numel / num_shards
        assert layout.padding_ratio <= 0.0001 or layout.shard_numel - exact_share < ALIGN


@pytest.mark.parametrize("model", LAYERS)
def test_rows_pad_less_than_one_step_per_rank(model: str) -> None:
    """32-row blocks: with n common blocks (LCM of all blocks) per rank, padding is at most 1/n.

    A rank's share is rounded up to a whole common block at worst, so below 1 % is certain from n = 100 on.
    """
    checked = 0
    for num_shards in (1, 2, 4, *SHARDS):
        layout = plan_group(layer(model, Rows(32)), num_shards, scatter="never")
        common_block = math.lcm(ALIGN, *(slot.block_numel for slot in layout.slots))
        blocks_per_rank = layout.payload_numel / num_shards / common_block
        if blocks_per_rank >= 1:
            assert layout.padding_ratio <= 1 / blocks_per_rank
            checked += 1
        if blocks_per_rank >= 100:
            assert layout.padding_ratio < 0.01

    assert checked


# -- scattering -------------------------------------------------------------------------------------------


def test_scattering_removes_the_spikes_of_gpt_oss() -> None:
    """128-row blocks, o_proj rows of 4096: padding plus copies is below 18 % up to 1024 ranks.

    It is mostly below 6 %. Only where a rank's share is a little over 5 blocks of gate_up (856 to 871
    ranks) do whole blocks cost more.
    """
    specs = layer("gpt-oss-120B", Rows(128))
    gate_up_block = 128 * 5760
    costs = {}
    for num_shards in range(8, 1025, 8):
        layout = plan_group(specs, num_shards, scatter="auto")
        costs[num_shards] = layout.padding_ratio + layout.copied_ratio
        assert {slot.fqn for slot in layout.slots if slot.is_scattered} <= {"self_attn.o_proj.weight"}
        least = -(-layout.payload_numel // num_shards // gate_up_block) * gate_up_block
        assert costs[num_shards] < 0.18 or layout.shard_numel == least

    powers = [costs[num_shards] for num_shards in (8, 16, 32, 64, 128, 256, 512, 1024)]
    assert max(powers) < 0.18
    assert sum(cost < 0.06 for cost in powers) == 7
    assert [num_shards for num_shards, cost in costs.items() if cost >= 0.18] == [856, 864]
    assert plan_group(specs, 1024, scatter="never").padding_ratio > 1  # what it would be without


@pytest.mark.parametrize("model", ["gpt-oss-120B", "DeepSeek-V3 grouped", "Qwen2.5-32B", "Llama-3-8B"])
@pytest.mark.parametrize("rows", [1, 32, 128])
def test_scattering_never_costs_more(model: str, rows: int) -> None:
    """By its own prices a scattered plan is at least as cheap as the contiguous one."""
    gained = 0
    for num_shards in SHARDS:
        specs = layer(model, Rows(rows))
        plain, scattered = (plan_group(specs, num_shards, scatter=mode) for mode in ("never", "auto"))
        assert plain.copied_numel == 0
        assert price(scattered) <= price(plain)
        gained += scattered.copied_numel > 0

    assert gained


def price(layout: GroupLayout) -> int:
    """What the planner's two prices make of a layout."""
    padded = layout.numel - layout.payload_numel
    return padded * (PADDED_WIRE_PRICE + PADDED_MEMORY_PRICE) + layout.copied_numel * (
        COPIED_TIME_PRICE + COPIED_MEMORY_PRICE
    )


@given(
    st.lists(
        st.integers(1, 400).flatmap(lambda numel: st.tuples(st.just(numel), st.integers(1, min(numel, 60)))),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 24),
)
def test_scattered_layouts_hold_every_element_once(sizes: list[tuple[int, int]], num_shards: int) -> None:
    """Pieces of a plan with scattering cover each tensor in rank order, in whole blocks, disjoint in a shard."""
    layout = plan_group(tensors(*sizes), num_shards, align_numel=1, scatter="auto")
    contiguous = plan_group(tensors(*sizes), num_shards, align_numel=1, scatter="never")

    assert price(layout) <= price(contiguous)
    for slot in layout.slots:
        pieces = [layout.piece(slot, rank) for rank in range(num_shards)]
        held = [piece for piece in pieces if piece.numel]
        assert [piece.range.start for piece in held] == [0, *(p.range.stop for p in held[:-1])]
        assert held[-1].range.stop == slot.numel
        assert all(piece.range.start % slot.block_numel == 0 for piece in held)
        assert layout.piece_numels(slot) == tuple(piece.numel for piece in pieces)
    for rank in range(num_shards):
        cursor = 0
        for _, piece in layout.pieces_of(rank):
            assert piece.local_offset >= cursor
            cursor = piece.local_offset + piece.numel
        assert cursor <= layout.shard_numel


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 90)), min_size=1, max_size=6),
    st.integers(1, 24),
    st.sampled_from([1, 4, 8]),
)
def test_starts_and_shards_are_aligned(sizes: list[tuple[int, int]], num_shards: int, align: int) -> None:
    """S, the start of every tensor, and every scattered piece's place in its shard are aligned."""
    layout = plan_group(tensors(*sizes), num_shards, align_numel=align)

    assert layout.shard_numel % align == 0
    for slot in layout.slots:
        assert slot.offset % align == 0
        assert all(run.local_offset % align == 0 for run in slot.runs)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8", "bfloat16", "float32", "complex128"])
@pytest.mark.parametrize("num_shards", [1, 3, 64])
def test_tensors_start_at_cache_lines(dtype: str, num_shards: int) -> None:
    """128 bytes, whatever the dtype, behind tensors of odd sizes, cut by blocks, by rows, and scattered."""
    shapes = [(1,), (7, 3), (33,), (64, 96), (48, 125), (5, 96)]
    specs = [TensorSpec(f"t{i}", s, dtype, numel_of(s[1:])) for i, s in enumerate(shapes)]
    itemsize = itemsize_of(dtype)

    for layout in (plan_group(specs, num_shards), plan_by_rows(specs, num_shards)):
        assert layout.align_numel * itemsize == 128
        starts = [piece.local_offset for rank in range(num_shards) for _, piece in layout.pieces_of(rank)]
        starts += [slot.offset for slot in layout.slots] + [layout.shard_numel]
        assert max(starts) > 0
        assert {start * itemsize % 128 for start in starts} == {0}


def test_tensors_are_put_back_where_they_fit_after_all() -> None:
    """Scattered tensors are as few as can be: kv_b and q_b are smaller than o, but o alone is in the way."""
    layout = plan_group(layer("DeepSeek-V3 grouped", Rows(32)), 256, scatter="auto")

    assert [slot.fqn for slot in layout.slots if slot.is_scattered] == ["self_attn.o_proj.weight"]


# -- a layout is small, the same everywhere, and planned once ---------------------------------------------


@pytest.mark.parametrize("scatter", ["never", "auto"])
def test_layout_does_not_grow_with_the_ranks(scatter: Scatter) -> None:
    """The JSON of a layout is as long at 16,384 ranks as at 640, but for the digits of its numbers."""
    specs = layer("gpt-oss-120B", Rows(1))
    small, large = (
        json.dumps(plan_group(specs, num_shards, scatter=scatter).to_json()) for num_shards in (640, 16384)
    )

    assert len(large) <= len(small) + 40


def digest() -> str:
    """One hash over layouts of real layers."""
    found = hashlib.sha256()
    for model, rows, num_shards in itertools.product(
        ("gpt-oss-120B", "DeepSeek-V3 grouped"), (1, 128), (24, 1000)
    ):
        layout = plan_group(layer(model, Rows(rows)), num_shards, scatter="auto")
        found.update(json.dumps(layout.to_json()).encode())
    return found.hexdigest()


def test_plans_do_not_depend_on_the_process() -> None:
    """Another process with another hash seed plans the same layouts."""
    code = "from tests.vescale_fsdp.layout.test_planner import digest; print(digest())"
    env = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}

    other = run_command([sys.executable, "-c", code], env=env, check=True)

    assert other.stdout.strip() == digest()


def test_equal_layers_are_planned_once() -> None:
    """61 layers of the same sizes cost one search."""
    _plan_sizes.cache_clear()
    for index in range(61):
        specs = [
            TensorSpec(f"layers.{index}.{spec.fqn}", spec.shape, spec.dtype, spec.block_numel)
            for spec in layer("DeepSeek-V3", Rows(128))
        ]
        assert len(plan_group(specs, 16384).slots) == 782

    assert _plan_sizes.cache_info().misses == 1


# -- corners and bad input --------------------------------------------------------------------------------


def test_empty_and_tiny_groups_have_layouts() -> None:
    """Nothing at all, only empty tensors, a tensor smaller than the world, and a block above its tensor."""
    assert plan_group([], 4).shard_numel == 0
    assert plan_group([TensorSpec("e", (0, 3), "float32", 3)], 4).shard_numel == 0
    assert plan_group([TensorSpec("s", (), "float32", 1)], 64).piece_numels(
        plan_group([TensorSpec("s", (), "float32", 1)], 64).slots[0]
    ) == (1, *[0] * 63)
    whole = plan_group([TensorSpec("w", (5, 3), "float32", 1000)], 4)
    assert whole.slots[0].block_numel == 15
    assert whole.piece_numels(whole.slots[0]) == (15, 0, 0, 0)


@pytest.mark.parametrize(
    ("spec", "num_shards", "options", "got"),
    [
        (TensorSpec("w", (4, -1), "float32", 1), 2, {}, "shape (4, -1)"),
        (TensorSpec("w", (4, 1), "float32", 0), 2, {}, "block_numel 0"),
        (TensorSpec("w", (4, 1), "float32", 1), 0, {}, "num_shards=0"),
        (TensorSpec("w", (4, 1), "float32", 1), -3, {}, "num_shards=-3"),
        (TensorSpec("w", (4, 1), "float32", 1), 2, {"align_numel": 0}, "align_numel=0"),
        (TensorSpec("w", (4, 1), "float32", 1), 2, {"scatter": "always"}, "'always'"),
    ],
)
def test_bad_input_is_refused(
    spec: TensorSpec, num_shards: int, options: dict[str, object], got: str
) -> None:
    """Impossible sizes and options end in an error that names them."""
    with pytest.raises(LayoutError) as error:
        plan_group([spec], num_shards, **options)  # type: ignore[arg-type]

    assert isinstance(error.value, ValueError)
    assert got in str(error.value.got) and error.value.expected and error.value.todo
    assert error.value.where == ("w" if min(spec.shape) < 0 or spec.block_numel < 1 else error.value.where)


def test_differing_dtypes_are_refused() -> None:
    """One group is one buffer of one dtype."""
    pair = [TensorSpec("w", (4,), "float32", 1), TensorSpec("s", (4,), "bfloat16", 1)]

    with pytest.raises(LayoutError) as refused:
        plan_group(pair, 2)
    assert refused.value.got == "bfloat16 (s), float32 (w)"


def test_repeated_names_are_refused() -> None:
    """A name stands for one tensor."""
    with pytest.raises(LayoutError) as refused:
        plan_group([TensorSpec("w", (4,), "float32", 1)] * 2, 2)
    assert refused.value.got == "['w']"


def test_rows_are_cut_as_fsdp2_cuts_them() -> None:
    """Each tensor by torch.chunk of its rows, at the same place of every shard; padding at the end of rows."""
    for rows, world in [(8, 2), (7, 2), (7, 3), (2, 4), (9, 4), (5, 1), (0, 2)]:
        specs = [TensorSpec("a", (rows, 3), "float32", 1), TensorSpec("b", (4,), "float32", 1)]
        layout = plan_by_rows(specs, world)
        chunks = [c.numel() for c in torch.zeros(rows, 3).chunk(world)]
        assert list(layout.piece_numels(layout.slot("a"))) == chunks + [0] * (world - len(chunks))
        assert layout.shard_numel == -(-(-(-rows // world) * 3) // 32) * 32 + 32
        starts = {layout.piece(layout.slot("b"), r).local_offset for r in range(world) if r < 4}
        assert starts <= {0, layout.shard_numel - 32}
