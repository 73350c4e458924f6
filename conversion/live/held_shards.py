"""The shards of a live state as a `Source` for the converter's views; finds the rank that stores each item of a view.

A rank reads its own items; items of other ranks are read as zeros. To find the rank of each item of a view, the view is
computed a second time, over tensors whose items are rank numbers (rank + 1) instead of values. This works for every
view, however it moves items. A tensor of four rows, of which rank 0 stores the first two, seen by rank 0:

    values     1 2 | 3 4 | . . | . .        transposed     1 3 . . | 2 4 . .
    numbers    1 1 | 1 1 | 2 2 | 2 2        transposed     1 1 2 2 | 1 1 2 2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.torch_dtypes import carrier_of, dense, dtype_named
from vescale_fsdp.checkpoint.native.leaves import NativeLeaves
from vescale_fsdp.checkpoint.storage.base import Buffer, Storage
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.conversion.engine.tensor_view import SourceView, TensorView, read_range
from vescale_fsdp.conversion.formats.native.source import constants_of, infos_of
from vescale_fsdp.layout.distribution import ShardCut
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.geometry import Box, Range, boxes_of_range, run_start, whole_box
from vescale_fsdp.layout.region import Copy, Region, overlaps

_MAX_STEP_BYTES = 1 << 20  # 1 MiB of items per step of `content_sum`, which needs arrays of 8 bytes per item


class HeldShards:
    """The shards of all tensors of a save. Every rank knows the location of all shards, but has only its own bytes.

    Args:
        manifest: the manifest of the save.
        rank: this rank.
        locals_by_name: this rank's tensors.
        storage: the target of the save, for messages.

    Attributes:
        source: the state as a source. Its readers return this rank's items, and zeros for items of other ranks.
        file: the file that this rank would write in the native form. It determines which items of a replicated tensor
            this rank writes.
        places: flattened name -> number of the tensor in the manifest.
    """

    def __init__(
        self, manifest: Manifest, rank: int, locals_by_name: Mapping[str, torch.Tensor], storage: Storage
    ) -> None:
        self.manifest, self.rank = manifest, rank
        self.file = RankFile(manifest, rank)
        self._locals_by_name = locals_by_name
        self._last: tuple[int, torch.Tensor] | None = None  # (number, items) of the tensor that was read last
        leaves = NativeLeaves(manifest.structure, storage.where)
        self.places = leaves.tensors
        firsts: dict[int, str] = {}
        for name, place in self.places.items():
            firsts.setdefault(place, name)
        # One chunk without a file for each tensor: all items are read through `readers`.
        self.source = Source(
            "live",
            storage,
            {
                name: StoredTensor(i, (StoredChunk(whole_box(i.shape), Extent("", 0, i.nbytes)),))
                for name, i in infos_of(manifest.structure, leaves).items()
            },
            constants_of(leaves),
            leaves.paths,
            readers={name: partial(self._read, place) for name, place in self.places.items()},
            aliases={name: firsts[place] for name, place in self.places.items() if firsts[place] != name},
            unsupported=tuple(leaves.per_rank),
        )

    def place_of(self, leaf: SourceView) -> int:
        """Return the number of a stored tensor in the manifest."""
        return self.places[leaf.source_name]

    def _items(self, place: int) -> torch.Tensor:
        """Return the items of this rank's region in CPU memory, 1D, as the integer dtype that carries their bits."""
        last = self._last
        if last is None or last[0] != place:
            plain = dense(self._locals_by_name[self.manifest.entries[place].name]).view(-1)
            last = (place, plain.view(carrier_of(plain.dtype)))
            self._last = last  # kept: boxes of one tensor are read one after another
        return last[1]

    def _read(self, place: int, box: Box) -> np.ndarray:
        """Return the bits of a box's items; zeros for items that only other ranks have."""
        region, wanted = self.file.held(place), Region.of_box(box)
        shares = overlaps(region, wanted) if region is not None else []
        # No copy if a single run contains the whole box.
        if len(shares) == 1 and shares[0].is_run and shares[0].numel == box.numel:
            return shares[0].source_view(self._items(place)).numpy().reshape(box.sizes)
        carrier = carrier_of(dtype_named(self.manifest.entries[place].dtype))
        found = torch.zeros(box.numel, dtype=carrier, device="cpu")
        for share in shares:
            share.target_view(found).copy_(share.source_view(self._items(place)))
        return found.numpy().reshape(box.sizes)

    def lies_in_runs(self, view: TensorView) -> bool:
        """Return whether every rank's part of the view's stored tensor is one contiguous run of items."""
        if view.stored is None:
            return False
        place = self.place_of(view.stored)
        shape = self.manifest.entries[place].shape
        cuts = self.manifest.distributions[place].cuts
        dims = [cut.dim for cut in cuts if isinstance(cut, ShardCut)]
        # A cut along a dim leaves one run per part only if all earlier dims have size 1.
        return all(size == 1 for size in shape[: max(dims, default=0)])

    def own_run(self, leaf: SourceView) -> Range:
        """Return the range of a stored tensor's items that this rank writes. Needs `lies_in_runs`."""
        place = self.place_of(leaf)
        region = self.file.pieces.get(place)
        if region is None:  # this rank writes no part of the tensor
            return Range(0, 0)
        box, first = next(region.pieces())
        start = run_start(self.manifest.entries[place].shape, box)
        assert start is not None and first == 0, "every part is one run"
        return Range(start, start + region.numel)

    def own_bytes(self, leaf: SourceView, start: int, stop: int) -> Buffer:
        """Return the bytes of items [start, stop), which are in `own_run`; not copied if they are in CPU memory."""
        place = self.place_of(leaf)
        first = self.file.local_start(place) + start - self.own_run(leaf).start
        return self._items(place)[first : first + stop - start].view(torch.uint8).numpy()

    def _brought(self, place: int, box: Box, turn: int) -> Iterator[tuple[int, list[Copy]]]:
        """Yield (rank, the rank's shares of the box) for each rank that provides items of a box.

        Args:
            turn: any number; consecutive numbers choose the replicas in turn.
        """
        wanted, holders = Region.of_box(box), self.manifest.holders_of(place)
        for coordinates, region in self.manifest.distributions[place].touching(
            self.manifest.entries[place].shape, wanted, self.manifest.structure.layouts
        ):
            shares = overlaps(region, wanted)
            if any(share.numel for share in shares):
                ranks = holders.ranks_at(coordinates)
                yield ranks[turn % len(ranks)], shares

    def holders(self, view: TensorView, start: int, stop: int, turn: int) -> dict[int, int]:
        """Return the ranks that provide items [start, stop) of a view, ascending, and an upper bound of their items.

        Args:
            turn: chooses among replicas.
        """
        found = Counter[int]()
        numel = 0
        for box in boxes_of_range(view.info.shape, start, stop):
            for leaf, part in view.parts(box):
                numel += part.numel
                for rank, shares in self._brought(self.place_of(leaf), part, turn):
                    found[rank] += sum(share.numel for share in shares)
        # The sum is exact if each item of the view is one stored item; otherwise, the view may repeat a rank's items.
        # A single rank provides all items, zeros included.
        is_exact = len(found) > 1 and numel == stop - start
        return {rank: found[rank] if is_exact else stop - start for rank in sorted(found)}

    def numbers(self, view: TensorView, start: int, stop: int, turn: int) -> np.ndarray:
        """Return, for each item, the number (rank + 1) of the rank that provides it; 0 if no rank does. 1D int32."""
        numbered = view.over(lambda leaf: _NumberView(self, leaf.info, self.place_of(leaf), turn))
        return read_range(numbered, start, stop).view(np.int32)

    def content_sum(self, view: TensorView, step_bytes: int) -> int:
        """Return this rank's summand of a checksum of a view.

        The checksum, a sum over all ranks, is equal for views of the same shape and dtype with equal bytes. It adds up
        one hash per byte, of the byte's value and position, so it does not depend on which rank has which items.
        """
        dtype, total = view.info.dtype, 0
        step = max(1, min(step_bytes, _MAX_STEP_BYTES) // dtype.itemsize)
        for start in range(0, view.info.numel, step):
            stop = min(start + step, view.info.numel)
            if self.rank not in self.holders(view, start, stop, 0):  # spares reading items of other ranks
                continue
            items = read_range(view, start, stop)
            # Turn 0: one replica of each item, so that each item counts once.
            mine = np.flatnonzero(self.numbers(view, start, stop, 0) == self.rank + 1)
            words = items.reshape(-1, dtype.itemsize)[mine].astype(np.uint64)
            for byte in range(dtype.itemsize):
                places = (mine + start).astype(np.uint64) * np.uint64(dtype.itemsize) + np.uint64(byte)
                # Position * 256 + value: a different number for every pair of position and value.
                total += int(_mixed(places * np.uint64(256) + words[:, byte]).sum(dtype=np.uint64))
        return total % 2**64  # the ranks' sums are added up as 64-bit integers, which wrap

    def number_box(self, place: int, box: Box, turn: int) -> np.ndarray:
        """Return the number (rank + 1) of the rank that provides each item of a box of a stored tensor."""
        found = torch.zeros(box.numel, dtype=torch.int32, device="cpu")
        for rank, shares in self._brought(place, box, turn):
            for share in shares:
                share.target_view(found).fill_(rank + 1)
        return found.numpy().reshape(box.sizes)


def _mixed(words: np.ndarray) -> np.ndarray:
    """Return hashes of 64-bit numbers, by the finalizer of MurmurHash3.

    Without it, the sum in `content_sum` would not change if two bytes changed places.
    """
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        words = (words ^ (words >> np.uint64(33))) * np.uint64(factor)
    return words ^ (words >> np.uint64(33))


@dataclass(frozen=True)
class _NumberView(TensorView):
    """A view whose items are the numbers (rank + 1) of the ranks that provide a stored tensor's items."""

    shards: HeldShards
    of: TensorInfo
    place: int
    turn: int

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.of.name, self.of.shape, dtype_from_torch("int32"))

    def read_into(self, box: Box, out: np.ndarray) -> None:
        out[...] = self.shards.number_box(self.place, box, self.turn)

    def identity(self) -> str:
        return f"holders of {self.place}"
