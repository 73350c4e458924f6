"""The layout of a rank's file, computed from the manifest alone: pieces, header, and table of checksums.

    bytes   0        8              data                              blob        table      end
            |u64 len | JSON, spaces | piece | piece | ... | piece |   per-rank  | checksums |
                                      dense, in the order of the manifest's tensors

In the zarr form, the file has the checksums of the chunks that the rank owns, in place of pieces.

The header ends at a multiple of 64 bytes, and pieces are in order of descending item size, so that every piece is
aligned. The checksums are the last entry of the safetensors file: a copy of the file includes them, and a writer can
append them.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, islice, pairwise
from json.encoder import encode_basestring_ascii

from vescale_fsdp.checkpoint.manifest.manifest import FORMAT_NAME, FORMAT_VERSION, Manifest
from vescale_fsdp.checkpoint.manifest.torch_dtypes import stored_dtype
from vescale_fsdp.checkpoint.manifest.zarr_layout import Chunk, held_chunks
from vescale_fsdp.checkpoint.storage.checksums import CHECKSUM_BYTES, CRC_BYTES, checksum_of
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.geometry import round_up
from vescale_fsdp.layout.region import Copy, Region, overlaps

BLOB_NAME = "__per_rank__"
TABLE_NAME = "__checksums__"
CHUNKS_NAME = "__chunks__"  # not reserved: only in files of the zarr form, which have no tensors
RESERVED_NAMES = ("__metadata__", BLOB_NAME, TABLE_NAME)  # entries of the header that are not tensors
_HEADER_ALIGN_BYTES = 64  # a multiple of every item size, so that memory-mapped pieces are aligned


class RankFile:
    """The layout of one rank's file.

    Args:
        manifest: the checkpoint's manifest.
        rank: the rank that wrote (or will write) the file.
        pieces: the rank's entry of `Manifest.pieces`, if the caller has computed the pieces of all ranks; None to
            compute them for this rank alone.
    """

    def __init__(self, manifest: Manifest, rank: int, pieces: Mapping[int, Region] | None = None) -> None:
        self.manifest = manifest
        self.rank = rank
        self._pieces = pieces
        self.name = manifest.file_name(rank)
        self.chunks: tuple[Chunk, ...] = ()
        if manifest.is_zarr:
            held = held_chunks(manifest, rank)
            self.chunks = tuple(chunk for chunk, holders in held if holders[0][0] == rank)
        # Two caches: most tensors share their ranks and axes, and moments share the cuts of their weights.
        self._positions: dict[tuple[int, int], tuple[tuple[int, ...], int, int] | None] = {}
        self._regions: dict[tuple[object, ...], Region] = {}

    @cached_property
    def pieces(self) -> Mapping[int, Region]:
        """Tensor number -> the region of the tensor that this rank stores, in file order; without empty regions."""
        if self._pieces is not None:
            return self._pieces
        manifest = self.manifest
        pieces: dict[int, Region] = {}
        # In the zarr form, tensors are stored in zarr arrays instead.
        for index in range(0 if manifest.is_zarr else len(manifest.entries)):
            position = self._position(index)
            if position is not None:  # else this rank is outside of the tensor's mesh
                coordinates, replica, replicas = position
                region = manifest.split(index, self._region(index, coordinates), replica, replicas)
                if region.numel:
                    pieces[index] = region
        return pieces

    def _position(self, index: int) -> tuple[tuple[int, ...], int, int] | None:
        """Return `Holders.position` of this rank for a tensor."""
        key = (self.manifest.holders[index], self.manifest.entries[index].axes)
        if key not in self._positions:
            self._positions[key] = self.manifest.holders_of(index).position(self.rank)
        return self._positions[key]

    def held(self, index: int) -> Region | None:
        """Return the region of a tensor that this rank has in memory; None if it is outside of the tensor's mesh.

        The rank's piece is a part of this region: replicas have the same region, and may divide it among their files.
        """
        position = self._position(index)
        return None if position is None else self._region(index, position[0])

    def _region(self, index: int, coordinates: tuple[int, ...]) -> Region:
        """Return the region of a tensor that ranks at these coordinates have."""
        entry = self.manifest.entries[index]
        cut = (entry.shape, entry.axes, entry.cuts, coordinates)
        region = self._regions.get(cut)
        if region is None:
            layouts = self.manifest.structure.layouts
            region = self.manifest.distributions[index].region(entry.shape, coordinates, layouts)
            self._regions[cut] = region
        return region

    def local_start(self, index: int) -> int:
        """Return the index of a piece's first element in the rank's local tensor, which has the region `held`."""
        held = self.held(index)
        assert held is not None  # a rank with a piece is inside of the tensor's mesh
        return self.pieces[index].span.start - held.span.start

    @cached_property
    def _relative_starts(self) -> list[int]:
        """Offset of each piece, and the end of the last piece, from the header's end; the header contains these."""
        entries = self.manifest.entries
        sizes = (region.numel * entries[index].itemsize for index, region in self.pieces.items())
        return list(accumulate(sizes, initial=0))

    @cached_property
    def starts(self) -> dict[int, int]:
        """Tensor number -> offset in the file of the first byte of the tensor's piece, in file order."""
        base = len(self.header)
        starts = zip(self.pieces, self._relative_starts, strict=False)  # without the last end
        return {index: base + start for index, start in starts}

    @cached_property
    def _payload_bytes(self) -> int:
        # Without pieces, the payload is the checksums of the chunks, which only files of the zarr form have.
        return self._relative_starts[-1] if self.pieces else CRC_BYTES * len(self.chunks)

    @property
    def blob_start(self) -> int:
        """Offset of the per-rank values' first byte in the file."""
        return len(self.header) + self._payload_bytes

    @property
    def table_start(self) -> int:
        """Offset of the table of checksums in the file; the checksums cover all bytes before it."""
        return self.blob_start + self.manifest.blob_bytes

    @cached_property
    def num_stripes(self) -> int:
        """Number of stripes that the checksums cover; the last stripe may be short."""
        return -(-self.table_start // self.manifest.stripe_bytes)

    @property
    def total_bytes(self) -> int:
        """Size of the file in bytes."""
        # + 1: the table ends with its own checksum.
        return self.table_start + (self.num_stripes + 1) * CHECKSUM_BYTES

    def stripe(self, index: int) -> Extent:
        """Return the bytes of a stripe."""
        start = index * self.manifest.stripe_bytes
        return Extent(self.name, start, min(self.manifest.stripe_bytes, self.table_start - start))

    def chunk_table(self, checksums: Mapping[Chunk, int]) -> bytes:
        """Return the chunk checksums as they are stored in a file of the zarr form: the crc32c of each of its chunks.

        Args:
            checksums: the crc32c of each chunk that the rank owns.
        """
        return struct.pack(f"<{len(self.chunks)}I", *(checksums[chunk] for chunk in self.chunks))

    @property
    def content_names(self) -> list[str]:
        """Names of all that the file stores behind its header, for messages; see `names_in`."""
        return self.names_in(len(self.header), self.table_start)

    def tensors_in(self, start: int, stop: int) -> list[str]:
        """Return the names of the tensors in a byte range."""
        ends = self._relative_starts[1:]
        first = bisect_right(ends, start - len(self.header))  # the first piece that ends after `start`
        last = bisect_left(self._relative_starts, stop - len(self.header), hi=len(ends))
        return [self.manifest.entries[index].label for index in islice(self.pieces, first, last)]

    def names_in(self, start: int, stop: int) -> list[str]:
        """Return the names of entries in a byte range, for messages: tensors, header, checksums, per-rank values."""
        names = ["the header"] if start < len(self.header) else []
        names += self.tensors_in(start, stop)
        if self.chunks and start < self.blob_start and stop > len(self.header):
            names.append("checksums of chunks")
        if self.manifest.blob_bytes and stop > self.blob_start:
            names.append("per-rank values")
        return names

    @cached_property
    def header(self) -> bytes:
        """The file's first bytes: the length of the JSON, and the JSON, padded with spaces."""
        metadata = {
            "format": FORMAT_NAME,
            "version": str(FORMAT_VERSION),
            "save_id": self.manifest.save_id,
            "rank": str(self.rank),  # safetensors allows only strings as values of __metadata__
            "world_size": str(self.manifest.world_size),
        }
        entries = self.manifest.entries
        items = [f'"__metadata__":{json.dumps(metadata, separators=(",", ":"))}']
        starts = pairwise(self._relative_starts)
        for (index, region), (start, stop) in zip(self.pieces.items(), starts, strict=True):
            entry = entries[index]
            # A dtype that safetensors lacks is declared as several elements of a narrower dtype.
            code, multiple = stored_dtype(entry.dtype).carrier
            items.append(_item(entry.name, code, region.numel * multiple, start, stop))
        if self.chunks:
            items.append(_item(CHUNKS_NAME, "U32", len(self.chunks), 0, self._payload_bytes))
        end = self._payload_bytes + self.manifest.blob_bytes
        if self.manifest.blob_bytes:
            items.append(_item(BLOB_NAME, "U8", self.manifest.blob_bytes, self._payload_bytes, end))
        pieces = ",".join(items)
        # The header contains the table's size, and a longer header may need a larger table: repeated until both fit.
        table_bytes = 0
        while True:
            table = _item(TABLE_NAME, "U8", table_bytes, end, end + table_bytes)
            header = _pad(f"{{{pieces},{table}}}".encode())
            stripes = -(-(len(header) + end) // self.manifest.stripe_bytes)
            if table_bytes == (stripes + 1) * CHECKSUM_BYTES:
                return header
            table_bytes = (stripes + 1) * CHECKSUM_BYTES


def pack_table(checksums: Sequence[int]) -> bytes:
    """Return the table of a file's checksums as little-endian u64, followed by the table's own checksum."""
    table = struct.pack(f"<{len(checksums)}Q", *checksums)
    return table + struct.pack("<Q", checksum_of(table))


def _item(name: str, code: str, numel: int, start: int, stop: int) -> str:
    """Return one entry of a safetensors header as compact JSON."""
    return f'{encode_basestring_ascii(name)}:{{"dtype":"{code}","shape":[{numel}],"data_offsets":[{start},{stop}]}}'


def _pad(text: bytes) -> bytes:
    """Return the length of the JSON, and the JSON with spaces up to the alignment."""
    padded = round_up(8 + len(text), _HEADER_ALIGN_BYTES)  # 8 bytes are the length before the text
    return struct.pack("<Q", padded - 8) + text.ljust(padded - 8)


class CopyFinder:
    """Finds the copies from ranks' files to regions. The layout of each file is computed once, when first needed.

    Args:
        manifest: the checkpoint's manifest.
        cost: returns the cost of reading a rank's file. Where every replica stores its whole region, the replica with
            the lowest cost is read.
    """

    def __init__(self, manifest: Manifest, cost: Callable[[int], int] = lambda rank: 0) -> None:
        self.manifest = manifest
        self._cost = cost
        self._files: dict[int, RankFile] = {}
        self._copies: dict[tuple[object, ...], list[tuple[int, Copy]]] = {}

    def file(self, rank: int) -> RankFile:
        """Return the layout of a rank's file."""
        if rank not in self._files:
            self._files[rank] = RankFile(self.manifest, rank)
        return self._files[rank]

    def copies(self, index: int, wanted: Region) -> list[tuple[RankFile, Copy]]:
        """Return the copies that together fill a region of tensor number ``index``, each with the file it reads.

        The source of a copy is the file, from byte 0 on, as items of the tensor's dtype. Pieces are aligned, so that
        each piece begins at a whole number of items.

        Raises:
            CorruptCheckpointError: if elements are missing; names the tensor.
        """
        entry = self.manifest.entries[index]
        # Cached, because weights and their moments are cut alike. The key has all values that the result depends on.
        key = (wanted, entry.shape, entry.itemsize, entry.axes, entry.cuts, self.manifest.holders[index])
        copies = self._copies.get(key)
        if copies is None:
            copies = self._copies[key] = list(self._from_pieces(index, wanted))
            numel = sum(copy.numel for _, copy in copies)
            if numel != wanted.numel:
                raise CorruptCheckpointError(
                    "The checkpoint does not contain all of a tensor.",
                    expected=f"{wanted.numel} elements of box {wanted.box.offsets} + {wanted.box.sizes}",
                    got=f"{numel}",
                    where=entry.label,
                )
        return [
            (file := self.file(rank), copy.shift(file.starts[index] // entry.itemsize))
            for rank, copy in copies
        ]

    def _from_pieces(self, index: int, wanted: Region) -> Iterator[tuple[int, Copy]]:
        """Yield (rank, copy) for each stored piece that has elements of a region; the copy's source is the piece."""
        if not wanted.numel:
            return
        manifest, entry = self.manifest, self.manifest.entries[index]
        holders = manifest.holders_of(index)
        touching = manifest.distributions[index].touching(entry.shape, wanted, manifest.structure.layouts)
        for coordinates, region in touching:
            ranks = holders.ranks_at(coordinates)
            if manifest.split_bytes is None:
                # One rank is enough: each replica has stored the whole region.
                ranks = [min(ranks, key=self._cost)]
            for replica, rank in enumerate(ranks):
                piece = manifest.split(index, region, replica, len(ranks))
                for copy in overlaps(piece, wanted) if piece.numel else ():
                    yield rank, copy
