"""The layout of a rank's file, computed from the manifest alone: pieces, header, and table of checksums.

    bytes   0        8              data                              blob        table      end
            |u64 len | JSON, spaces | piece | piece | ... | piece |   per-rank  | checksums |
                                      dense, in the order of the manifest's tensors

The file of the zarr form has no pieces, but the checksums of the chunks that the rank owns.

The header ends at a multiple of 64 bytes, and pieces are in order of descending item size, so that every piece is
aligned. The checksums are the last entry of the safetensors file: a copy of the file includes them, and a writer can
append them.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from json.encoder import encode_basestring_ascii
from typing import NamedTuple

from vescale_fsdp.checkpoint.manifest.manifest import FORMAT_NAME, FORMAT_VERSION, Manifest, StoredShare
from vescale_fsdp.checkpoint.manifest.torch_dtypes import stored_dtype
from vescale_fsdp.checkpoint.manifest.zarr_layout import Chunk, held_chunks
from vescale_fsdp.checkpoint.storage.checksums import CHECKSUM_BYTES, CRC_BYTES, checksum_of
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.geometry import round_up
from vescale_fsdp.layout.region import Copy, Region, overlaps

BLOB_NAME = "__per_rank__"
TABLE_NAME = "__checksums__"
CHUNKS_NAME = "__chunks__"  # not reserved: only in files of the zarr form, which have no tensors
RESERVED_NAMES = ("__metadata__", BLOB_NAME, TABLE_NAME)  # entries of the header that are not tensors
_HEADER_ALIGN_BYTES = 64  # a multiple of every item size, so that memory-mapped pieces are aligned


class FilePiece(NamedTuple):
    """A stored region of a tensor, and its half-open byte range in the file.

    Attributes:
        local_start: index of the region's first element in the rank's local tensor, of which a replica may store only
            a part.
    """

    tensor_index: int
    region: Region
    local_start: int
    start_bytes: int
    stop_bytes: int


class RankFile:
    """The layout of one rank's file.

    Args:
        manifest: the checkpoint's manifest.
        rank: the rank that wrote (or will write) the file.
        shares: the rank's entry of `Manifest.shares`, if the caller has computed the shares of all ranks; None to
            compute them for this rank alone.
    """

    def __init__(self, manifest: Manifest, rank: int, shares: Sequence[StoredShare] | None = None) -> None:
        self.manifest = manifest
        self.rank = rank
        self._shares = shares
        self.name = manifest.file_name(rank)
        self.chunks: tuple[Chunk, ...] = ()
        if manifest.is_zarr:
            held = held_chunks(manifest, rank)
            self.chunks = tuple(chunk for chunk, holders in held if holders[0].rank == rank)

    @cached_property
    def _relative(self) -> list[FilePiece]:
        """The pieces, with byte ranges counted from the header's end, because the header's size depends on them."""
        pieces: list[FilePiece] = []
        start, entries = 0, self.manifest.entries
        for index, share, held in self._own_shares() if self._shares is None else self._shares:
            stop = start + share.numel * entries[index].itemsize
            pieces.append(FilePiece(index, share, share.span.start - held.span.start, start, stop))
            start = stop
        return pieces

    def _own_shares(self) -> Iterator[StoredShare]:
        """Yield the shares that this rank stores, in file order."""
        manifest, layouts = self.manifest, self.manifest.structure.layouts
        if manifest.is_zarr:
            return  # the tensors are stored in zarr arrays instead
        # Two caches: most tensors have the same ranks and axes, and weights and their moments have the same cuts.
        positions: dict[tuple[int, int], tuple[tuple[int, ...], int, int] | None] = {}
        regions: dict[tuple[object, ...], Region] = {}
        for index, entry in enumerate(manifest.entries):
            key = (manifest.holders[index], entry.axes)
            if key not in positions:
                positions[key] = manifest.holders_of(index).position(self.rank)
            position = positions[key]
            if position is None:  # this rank has no part of the tensor
                continue
            coordinates, replica, replicas = position
            cut = (entry.shape, entry.axes, entry.cuts, coordinates)
            held = regions.get(cut)
            if held is None:
                held = manifest.distributions[index].region(entry.shape, coordinates, layouts)
                regions[cut] = held
            share = manifest.split(index, held, replica, replicas)
            if share.numel:  # an empty share is not stored
                yield StoredShare(index, share, held)

    @cached_property
    def pieces(self) -> tuple[FilePiece, ...]:
        """The non-empty pieces, in file order."""
        base = len(self.header)
        return tuple(
            FilePiece(index, region, local_start, base + start, base + stop)
            for index, region, local_start, start, stop in self._relative
        )

    @cached_property
    def piece_of(self) -> dict[int, FilePiece]:
        """Tensor number -> piece."""
        return {piece.tensor_index: piece for piece in self.pieces}

    @cached_property
    def _payload_bytes(self) -> int:
        # Without pieces, the payload is the checksums of the chunks, which only files of the zarr form have.
        return self._relative[-1].stop_bytes if self._relative else CRC_BYTES * len(self.chunks)

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

    def stripe(self, index: int) -> tuple[int, int]:
        """Return the half-open byte range of a stripe."""
        size = self.manifest.stripe_bytes
        return index * size, min((index + 1) * size, self.table_start)

    def chunk_table(self, checksums: Mapping[Chunk, int]) -> bytes:
        """Return the chunk checksums as they are stored in a file of the zarr form: the crc32c of each of its chunks.

        Args:
            checksums: the crc32c of each chunk that the rank owns.
        """
        return struct.pack(f"<{len(self.chunks)}I", *(checksums[chunk] for chunk in self.chunks))

    @property
    def tensor_names(self) -> list[str]:
        """Names of all tensors and other parts of the file, for messages."""
        return self.names_in(len(self.header), self.table_start)

    def names_in(self, start: int, stop: int) -> list[str]:
        """Return the names of the tensors and other parts in a byte range, for messages."""
        names = ["the header"] if start < len(self.header) else []
        # - 1: the piece before may extend into the range.
        first = max(0, bisect_right(self.pieces, start, key=lambda piece: piece.start_bytes) - 1)
        for piece in self.pieces[first:]:
            if piece.start_bytes >= stop:
                break
            if piece.stop_bytes > start:
                names.append(self.manifest.entries[piece.tensor_index].label)
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
        for index, region, _, start, stop in self._relative:
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


class FileShare(NamedTuple):
    """A part of a wanted region, and the piece of a rank's file that contains the part.

    Attributes:
        rank: the rank of the file.
        piece: the stored piece.
        copy: from the items of the piece to those of the wanted region.
    """

    rank: int
    piece: FilePiece
    copy: Copy


class ShareFinder:
    """Finds the stored parts of regions. The layout of each rank's file is computed once, when first needed.

    Args:
        manifest: the checkpoint's manifest.
        cost: returns the cost of reading a rank's file. Where every replica stores its whole region, the replica with
            the lowest cost is read.
    """

    def __init__(self, manifest: Manifest, cost: Callable[[int], int] = lambda rank: 0) -> None:
        self.manifest = manifest
        self._cost = cost
        self._files: dict[int, RankFile] = {}
        self._shares: dict[tuple[object, ...], list[tuple[int, Copy]]] = {}

    def file(self, rank: int) -> RankFile:
        """Return the layout of a rank's file."""
        if rank not in self._files:
            self._files[rank] = RankFile(self.manifest, rank)
        return self._files[rank]

    def shares(self, index: int, wanted: Region) -> list[FileShare]:
        """Return the stored parts that together make up a region of tensor number ``index``.

        Raises:
            CorruptCheckpointError: if elements are missing; names the tensor.
        """
        entry = self.manifest.entries[index]
        # A cache, because weights and their moments are cut alike. The key is all that the result depends on.
        key = (wanted, entry.shape, entry.itemsize, entry.axes, entry.cuts, self.manifest.holders[index])
        shares = self._shares.get(key)
        if shares is None:
            shares = self._shares[key] = list(self._find_shares(index, wanted))
            numel = sum(share.numel for _, share in shares)
            if numel != wanted.numel:
                raise CorruptCheckpointError(
                    "The checkpoint does not contain all of a tensor.",
                    expected=f"{wanted.numel} elements of box {wanted.box.offsets} + {wanted.box.sizes}",
                    got=f"{numel}",
                    where=entry.label,
                    todo="restore an older step",
                )
        return [FileShare(rank, self.file(rank).piece_of[index], share) for rank, share in shares]

    def _find_shares(self, index: int, wanted: Region) -> Iterator[tuple[int, Copy]]:
        """Yield (rank, part) for each stored part of a region."""
        if not wanted.numel:
            return
        manifest, entry = self.manifest, self.manifest.entries[index]
        holders = manifest.holders_of(index)
        touching = manifest.distributions[index].touching(entry.shape, wanted, manifest.structure.layouts)
        for coordinates, region in touching:
            ranks = holders.ranks_at(coordinates)
            if manifest.split_bytes is None:
                # One is enough: each replica has stored the whole region.
                ranks = [min(ranks, key=self._cost)]
            for replica, rank in enumerate(ranks):
                share = manifest.split(index, region, replica, len(ranks))
                for part in overlaps(share, wanted) if share.numel else ():
                    yield rank, part
