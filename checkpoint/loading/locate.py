"""Which bytes of which rank's file hold a region of a tensor: arithmetic on the manifest, no reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import FilePiece, RankFile
from vescale_fsdp.checkpoint.manifest.region import Region, SharedPatch, SharedRun, overlaps
from vescale_fsdp.errors import CorruptCheckpointError


class FileShare(NamedTuple):
    """What a region takes from one piece of one file."""

    rank: int
    piece: FilePiece
    share: SharedRun | SharedPatch


class ShareFinder:
    """Finds what regions take from files; rank files are computed once each, when first needed.

    Args:
        manifest: the checkpoint's manifest.
        cost: of reading a rank's file, for where every replica stores all: one of the cheapest is taken, the first.
    """

    def __init__(self, manifest: Manifest, cost: Callable[[int], int] = lambda rank: 0) -> None:
        self.manifest = manifest
        self._cost = cost
        self._files: dict[int, RankFile] = {}
        self._shares: dict[tuple[object, ...], list[tuple[int, SharedRun | SharedPatch]]] = {}

    def file(self, rank: int) -> RankFile:
        """Where everything lies in a rank's file."""
        found = self._files.get(rank)
        if found is None:
            found = self._files[rank] = RankFile(self.manifest, rank)
        return found

    def shares(self, place: int, wanted: Region) -> list[FileShare]:
        """Shares of files that together hold every element of a region of tensor number ``place``.

        Raises:
            CorruptCheckpointError: if they do not, naming the tensor.
        """
        entry = self.manifest.entries[place]
        # Weights and their moments are cut alike: one computation answers for all of them.
        key = (wanted, entry.shape, entry.itemsize, entry.axes, entry.cuts, self.manifest.holders[place])
        shares = self._shares.get(key)
        if shares is None:
            shares = self._shares[key] = self._complete_shares(place, wanted)
        return [FileShare(rank, self.file(rank).piece_of[place], share) for rank, share in shares]

    def _complete_shares(self, place: int, wanted: Region) -> list[tuple[int, SharedRun | SharedPatch]]:
        found = list(self._find_shares(place, wanted))
        numel = sum(share.numel for _, share in found)
        if numel != wanted.numel:
            entry = self.manifest.entries[place]
            raise CorruptCheckpointError(
                "The checkpoint does not hold all of a tensor.",
                expected=f"{wanted.numel} elements of box {wanted.box.offsets} + {wanted.box.sizes}",
                got=f"{numel}",
                where=entry.label,
                todo="restore an older step",
            )
        return found

    def _find_shares(self, place: int, wanted: Region) -> Iterator[tuple[int, SharedRun | SharedPatch]]:
        """Ranks that store parts of a region, and what it takes from each."""
        if not wanted.numel:
            return
        manifest, entry = self.manifest, self.manifest.entries[place]
        holders = manifest.holders_of(place)
        touching = manifest.distributions[place].touching(entry.shape, wanted, manifest.structure.layouts)
        for coordinates, region in touching:
            ranks = holders.ranks_at(coordinates)
            if manifest.split_bytes is None:
                ranks = [min(ranks, key=self._cost)]
            for replica, rank in enumerate(ranks):
                share = manifest.split(place, region, replica, len(ranks))
                for part in overlaps(share, wanted) if share.numel else ():
                    yield rank, part
