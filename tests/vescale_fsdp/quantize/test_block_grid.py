"""Blocks of a piece are the blocks of the whole tensor, for every block shape and every cut between bands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_fsdp import Element, Flat, Granularity, Rows, Tiles
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import Range, numel_of
from vescale_fsdp.quantize.codec import BlockGrid, grid_of

SHAPES = st.sampled_from([(10,), (1, 1), (3, 5), (64, 48), (33, 70), (4, 9, 7), (128, 1)])
BLOCKS = st.sampled_from([Flat(4), Flat(256), Tiles(2, 3), Tiles(32, 32), Tiles(1, 32)])


def naive_blocks(full: torch.Tensor, grid: BlockGrid) -> list[torch.Tensor]:
    """The elements of each block, by loops over the definition."""
    lines = full.reshape(-1).split(grid.line_numel)
    blocks = []
    for top in range(0, len(lines), grid.rows):
        for left in range(0, grid.line_numel, grid.cols):
            parts = [line[left : left + grid.cols] for line in lines[top : top + grid.rows]]
            blocks.append(torch.cat(parts))
    return blocks


@given(shape=SHAPES, block=BLOCKS)
def test_tiles_are_the_blocks(shape: tuple[int, ...], block: Granularity) -> None:
    """Tiling gives each block's elements, zeros where it is short, one scale each; untiling undoes it."""
    grid = grid_of(shape, block)
    full = torch.arange(1.0, numel_of(shape) + 1).view(shape)
    tiles = grid.tiled(full.view(-1))
    blocks = naive_blocks(full, grid)

    assert numel_of(grid.scales_shape) == tiles.shape[0] * tiles.shape[2] == len(blocks)
    for got, expected in zip(
        tiles.permute(0, 2, 1, 3).reshape(-1, grid.rows * grid.cols), blocks, strict=True
    ):
        assert torch.equal(got[got != 0], expected)
    assert torch.equal(grid.untiled(tiles, full.numel()).view(shape), full)


@given(shape=SHAPES, block=BLOCKS, data=st.data())
def test_a_piece_has_the_blocks_of_the_whole(
    shape: tuple[int, ...], block: Granularity, data: st.DataObject
) -> None:
    """A piece cut between the granularity's blocks has exactly its share of the full tensor's tiles."""
    grid = grid_of(shape, block)
    numel = numel_of(shape)
    cuts = sorted({0, numel, *range(0, numel, grid.band_numel)})
    start, stop = sorted(data.draw(st.tuples(st.sampled_from(cuts), st.sampled_from(cuts))))
    full = torch.arange(1.0, numel + 1)
    first = start // grid.band_numel

    assert min(grid.band_numel, numel) == block.block_numel(shape)  # what the planner keeps whole
    count = grid.scales_of(Range(start, stop), "tensor")
    assert count == grid.bands_of(stop - start) * grid.scales_per_band
    tiles = grid.tiled(full)[first : first + grid.bands_of(stop - start)]
    assert torch.equal(grid.tiled(full[start:stop]), tiles)


def test_the_grid_has_the_numbers_of_its_drawing() -> None:
    """The numbers of the module's drawing."""
    flat, tiles = grid_of((10,), Flat(4)), grid_of((3, 5), Tiles(2, 3))

    assert (flat.band_numel, flat.scales_per_band, flat.scales_shape) == (4, 1, (3,))
    assert (tiles.band_numel, tiles.scales_per_band, tiles.scales_shape) == (10, 2, (2, 2))


def test_a_cut_inside_a_block_is_refused() -> None:
    """Both ends of a piece must lie between bands; the end of the tensor counts."""
    grid = grid_of((10, 4), Tiles(4, 4))
    assert grid.scales_of(Range(16, 40), "w") == 2
    assert grid.scales_of(Range(8, 8), "w") == 0
    for piece in (Range(8, 40), Range(0, 20)):
        with pytest.raises(LayoutError) as caught:
            grid.scales_of(piece, "w")
        assert caught.value.got == f"[{piece.start}, {piece.stop}) of 40"
        assert caught.value.where == "w of shape (10, 4)"
        assert "granularity=" in (caught.value.todo or "")


@pytest.mark.parametrize("block", [Element(), Rows(3)])
def test_other_granularities_are_no_blocks(block: Granularity) -> None:
    """Only runs and tiles have a scale each."""
    with pytest.raises(LayoutError) as caught:
        grid_of((4, 4), block)
    assert caught.value.got == repr(block)
