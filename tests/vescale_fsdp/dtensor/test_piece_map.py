"""What a PieceMap says of runs of equal pieces is what each piece would say alone."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from vescale_fsdp import Flat, Tiles
from vescale_fsdp.dtensor.piece_map import PieceMap, _chunks
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import Range, RunLengths, chunk_of
from vescale_fsdp.optim.shampoo_blocks import factor_grid_of
from vescale_fsdp.quantize.codec import grid_of

shapes = st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(1, 4))


@st.composite
def even_cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], PieceMap]:
    """A shape cut into a first piece, equal ones, a rest, and pieces of nothing among them."""
    shape = draw(shapes)
    total = shape[0] * shape[1] * shape[2]
    unit = draw(st.sampled_from((1, shape[2], 2 * shape[2], 4 * shape[2], shape[1] * shape[2])))
    first = min(total, unit * draw(st.integers(0, 3)))
    piece = unit * draw(st.integers(1, 4))
    full, rest = divmod(total - first, piece)
    return shape, PieceMap(shape, RunLengths(((1, first), (2, 0), (full, piece), (1, rest), (1, 0))))


def outcome(count: Callable[[], tuple[int, ...]]) -> tuple[int, ...] | str:
    """The counts, or that a cut is refused."""
    try:
        return count()
    except LayoutError:
        return "refused"


def check(pieces: PieceMap, period: int, count: Callable[[Range], int]) -> None:
    """Runs give what every piece gives when it is asked itself, refusals included."""
    ranks = range(pieces.num_shards)
    alone = outcome(lambda: tuple(count(pieces.piece(rank)) for rank in ranks))

    assert outcome(lambda: tuple(pieces.count_in_blocks(period, count))) == alone


@given(even_cuts(), st.integers(1, 4))
def test_bands_of_runs(case: tuple[tuple[int, ...], PieceMap], block: int) -> None:
    """Shampoo's bands, whose ends repeat only from matrix to matrix where the last of one is short."""
    shape, pieces = case
    grid = factor_grid_of(shape, block)
    check(pieces, grid.period, lambda piece: len(grid.bands_in(piece)))
    one = factor_grid_of((shape[0] * shape[1], shape[2]), block)
    check(pieces, one.period, lambda piece: len(one.bands_in(piece)))


@given(even_cuts(), st.integers(1, 4))
def test_scales_of_runs(case: tuple[tuple[int, ...], PieceMap], block: int) -> None:
    """Scales of quantization blocks, flat ones and tiles."""
    shape, pieces = case
    for granularity in (Flat(block), Tiles(block, 3)):
        grid = grid_of(shape, granularity)
        check(pieces, grid.band_numel, lambda piece, grid=grid: grid.scales_of(piece, "w"))  # type: ignore[misc]


def test_one_piece_stands_for_many() -> None:
    """Of 16,384 pieces in five runs a few are asked, not all; a cut inside a block is still refused."""
    asked: list[Range] = []
    pieces = PieceMap((8 * 16_380 + 6,), RunLengths(((3, 0), (16_380, 8), (1, 6))))
    grid = grid_of(pieces.shape, Flat(4))
    counts = pieces.count_in_blocks(4, lambda piece: (asked.append(piece), grid.scales_of(piece, "w"))[1])  # type: ignore[func-returns-value]

    assert counts.runs == ((3, 0), (16_381, 2)) and len(asked) == 3
    moved = PieceMap(pieces.shape, RunLengths(((1, 6), (16_380, 8))))
    assert (
        outcome(lambda: tuple(moved.count_in_blocks(4, lambda piece: grid.scales_of(piece, "w"))))
        == "refused"
    )


@given(st.integers(0, 40), st.integers(1, 12))
def test_chunks_are_torchs(rows: int, num_shards: int) -> None:
    """FSDP2's chunks of rows: full ones, a shorter one, then none."""
    assert tuple(_chunks(rows, num_shards)) == tuple(
        chunk_of(rows, num_shards, rank).numel for rank in range(num_shards)
    )
