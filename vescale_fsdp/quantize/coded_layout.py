"""CodedLayout: what a quantized gather sends for each tensor of a group, and where. Sizes and indices only.

Every rank sends two buffers:

    codes   1-D [S], uint8          one byte per element, at the element's offset in the shard
    rest    1-D [R], uint8          scales of this rank's blocks, and this rank's pieces of parameters without a codec

    rest of a rank      [ scales of the main codec | spare | scales of odd tensors, values without a codec ]
                         0                          F-16    F                                              R

The *main* codec is the one with the most elements. Its tensors are encoded and decoded all at once, whatever their
number and the number of ranks: a table (`CodedLayout.table`) has the position of the scale of every *granule*, a run of
elements that no block and no tensor cuts. Typical granules have 32 elements, so the table, of 4 bytes per entry, has a
sixteenth of the bytes of a bf16 buffer. Groups of equal layout share it. Granules outside of these tensors (padding,
values without a codec) have the scale ``spare``, and what is decoded there is overwritten or never read.

*Odd* tensors are encoded and decoded one by one: those with another codec, and those whose granule would be so short
that the table would be large (lines of 3 elements, as in the last dim of a convolution).

All ranks of a run of equal pieces have a tensor's pieces at the same place in ``rest``. So the pieces of a run are one
strided view, and no loop is over ranks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch

from vescale_fsdp.layout.geometry import Range, round_up
from vescale_fsdp.layout.group_layout import GroupLayout, PieceRun, TensorSlot
from vescale_fsdp.quantize.codec import BlockCodec, BlockGrid
from vescale_fsdp.torch_modes import is_fake

# Parts of ``rest`` start at multiples of this number, because they are viewed in wider dtypes, and kernels load up to
# 16 bytes at once.
_ALIGN_BYTES = 16
# The shortest granule. The table then has half a byte per element, a quarter of a bf16 buffer.
_LEAST_GRANULE = 8


class Part(NamedTuple):
    """A run of equal pieces of one tensor, and the range of ``rest`` with their scales or values on each rank."""

    slot: TensorSlot
    run: PieceRun
    rest_start: int  # position in the ``rest`` of every rank of the run, in elements of what is stored there
    rest_numel: int  # number of scales, or of values without a codec, of one piece


class CodedLayout:
    """The contents of ``codes`` and ``rest`` for one group. Create it with `coded_layout_of`.

    Args:
        layout: the group's layout.
        codecs: codecs by parameter name. Parameters that are not listed are sent without encoding, in ``rest``.
        dtype: the compute dtype, in which parameters without a codec are sent.

    Attributes:
        main: the main codec.
        granule: elements per entry of the table.
        rest_bytes: R.
        main_scales: scales in [0, F) of ``rest``, the spare one included.
        odd: parts of the odd tensors.
        plain: parts of the tensors without a codec.

    Raises:
        LayoutError: if a rank boundary cuts a block.
    """

    def __init__(self, layout: GroupLayout, codecs: Mapping[str, BlockCodec], dtype: torch.dtype) -> None:
        self.layout = layout
        self.codecs = codecs
        numels: dict[BlockCodec, int] = {}
        for slot in layout.slots:
            if slot.fqn in codecs:
                numels[codecs[slot.fqn]] = numels.get(codecs[slot.fqn], 0) + slot.numel
        self.main = max(numels, key=lambda codec: numels[codec])
        self.granule, main_slots = self._choose_main_slots()
        # The first free byte of ``rest`` on each rank. A run takes the same offset on all of its ranks.
        ends = [0] * layout.num_shards
        size = self.main.scale_dtype.itemsize
        self._main = [part for slot in main_slots for part in self._parts(slot, ends, size, align=size)]
        main_bytes = round_up(max(ends), _ALIGN_BYTES) + _ALIGN_BYTES  # the last scale is the spare one
        self.main_scales = main_bytes // size
        ends = [main_bytes] * layout.num_shards
        self.odd: list[Part] = []
        self.plain: list[Part] = []
        for slot in layout.slots:
            codec = codecs.get(slot.fqn)
            if codec is None:
                self.plain += self._parts(slot, ends, dtype.itemsize)
            elif slot not in main_slots:
                self.odd += self._parts(slot, ends, codec.scale_dtype.itemsize)
        # The largest number of any rank, because all-gathers require equal sizes.
        self.rest_bytes = max(ends)
        self._tables: dict[tuple[torch.device, bool], torch.Tensor] = {}

    def _choose_main_slots(self) -> tuple[int, list[TensorSlot]]:
        """Return the granule, and the tensors that are encoded and decoded at once; the largest tensors come first."""
        granule, chosen = 0, []  # gcd(0, n) is n
        for slot in sorted(self.layout.slots, key=lambda slot: -slot.numel):
            if self.codecs.get(slot.fqn) != self.main or not slot.numel:
                continue
            common = math.gcd(granule, self._granule_of(slot))
            if common >= _LEAST_GRANULE:
                granule = common
                chosen.append(slot)
        return granule, chosen

    def _granule_of(self, slot: TensorSlot) -> int:
        """Return the largest number of elements that divides the buffer into runs of one block of this tensor."""
        grid = self.main.grid(slot.shape)
        # A block is ``cols`` wide, and the last block of a line ends with the line, where the next block begins.
        width = grid.cols if grid.line_numel == grid.cols else math.gcd(grid.line_numel, grid.cols)
        runs = self.layout.runs_of(slot)
        starts = (number for run in runs for number in (run.local_offset, run.piece_numel))
        return math.gcd(width, self.layout.shard_numel, slot.numel, *starts)

    def _parts(
        self, slot: TensorSlot, ends: list[int], itemsize: int, align: int = _ALIGN_BYTES
    ) -> list[Part]:
        """Reserve room in ``rest`` for a tensor's scales or values, and return its parts.

        Args:
            slot: the tensor.
            ends: the first free byte of ``rest`` on each rank; updated.
            itemsize: bytes of a scale or of a value.
            align: bytes; parts start at multiples of it.
        """
        parts, codec, start = [], self.codecs.get(slot.fqn), 0
        for run in self.layout.runs_of(slot):
            numel = run.piece_numel
            if codec is not None:
                grid = codec.grid(slot.shape)
                for place in {
                    0,
                    min(1, run.num_ranks - 1),
                    run.num_ranks - 1,
                }:  # the pieces between are alike
                    first = start + place * run.piece_numel
                    numel = grid.scales_of(Range(first, first + run.piece_numel), slot.fqn)
            start += run.numel
            ranks = slice(run.first_rank, run.ranks.stop)
            begin = max(ends[ranks])
            ends[ranks] = [round_up(begin + numel * itemsize, align)] * run.num_ranks
            parts.append(Part(slot, run, begin // itemsize, numel))
        return parts

    def grid_of(self, part: Part) -> BlockGrid:
        """Return the grid of a part's tensor, which has a codec."""
        return self.codecs[part.slot.fqn].grid(part.slot.shape)

    def table(self, device: torch.device, *, fake: bool) -> torch.Tensor:
        """Return the position of each granule's scale in the gathered ``rest`` (1-D [m * S / granule], int32 or int64).

        Positions are in scales, from the start of the first rank's ``rest``.

        Args:
            device: where the table is used.
            fake: whether the caller computes with fake tensors.
        """
        table = self._tables.get((device, fake))
        if table is None:
            table = self._tables[device, fake] = self._new_table(device)
            assert is_fake(table) == fake
        return table

    @property
    def scales_per_rank(self) -> int:
        """R, in scales of the main codec."""
        return self.rest_bytes // self.main.scale_dtype.itemsize

    def _new_table(self, device: torch.device) -> torch.Tensor:
        ranks, granule = self.layout.num_shards, self.granule
        most = ranks * self.scales_per_rank
        dtype = torch.int32 if most < 2**31 else torch.int64  # int32 has half the bytes
        first = torch.arange(ranks, device=device, dtype=dtype).view(-1, 1) * self.scales_per_rank
        table = (first + (self.main_scales - 1)).repeat(
            1, self.layout.shard_numel // granule
        )  # the spare scales
        for part in self._main:
            grid, run = self.grid_of(part), part.run
            at = torch.arange(
                0, run.piece_numel, granule, dtype=torch.int64, device=device
            )  # from the start of a piece, in elements
            band = at.div(grid.band_numel, rounding_mode="floor")
            block = at.remainder(grid.line_numel).div(grid.cols, rounding_mode="floor")
            scale = (band * grid.scales_per_band + block + part.rest_start).to(dtype)
            begin = run.local_offset // granule
            owners = slice(run.first_rank, run.ranks.stop)
            table[owners, begin : begin + len(scale)] = first[owners] + scale
        return table.view(-1)


_layouts: weakref.WeakValueDictionary[object, CodedLayout] = weakref.WeakValueDictionary()


def coded_layout_of(layout: GroupLayout, codecs: Mapping[str, BlockCodec], dtype: torch.dtype) -> CodedLayout:
    """Return the coded layout of these arguments, which groups of equal layout share while one of them exists."""
    key = (layout, tuple(codecs.items()), dtype)
    coded = _layouts.get(key)
    if coded is None:
        coded = _layouts[key] = CodedLayout(layout, codecs, dtype)
    return coded
