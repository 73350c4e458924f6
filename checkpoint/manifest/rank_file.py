"""A rank's file, computed from the manifest alone: its pieces, its header to the byte, its checksums' place.

    bytes   0        8              data                              blob        table      end
            |u64 len | JSON, spaces | piece | piece | ... | piece |   per-rank  | checksums |
                                      dense, in the order of the manifest's tensors

In the zarr form there are no pieces; the checksums of the chunks that the rank owns stand in their place.

The header ends at a multiple of 64 bytes and pieces come with falling item size, so every piece is aligned.
Checksums are the last entry of the safetensors file, so they travel with it, and every writer can append.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from json.encoder import encode_basestring_ascii
from typing import NamedTuple

from vescale_fsdp.checkpoint.checksums import CHECKSUM_BYTES, CRC_BYTES, checksum_of
from vescale_fsdp.checkpoint.manifest.chunk_owners import Chunk, held_chunks
from vescale_fsdp.checkpoint.manifest.manifest import FORMAT_NAME, Manifest, StoredShare
from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.manifest.torch_dtypes import stored_dtype

BLOB_NAME = "__per_rank__"
TABLE_NAME = "__checksums__"
CHUNKS_NAME = "__chunks__"  # only in files that hold no tensors
RESERVED_NAMES = ("__metadata__", BLOB_NAME, TABLE_NAME)  # entries of the header that are not tensors
_HEADER_ALIGN_BYTES = 64


class FilePiece(NamedTuple):
    """A stored piece: which tensor, which region of it, and where its bytes lie in the file.

    Attributes:
        local_start: the piece's first element, counted from the first that the rank holds.
    """

    place: int
    region: Region
    local_start: int
    start_bytes: int
    stop_bytes: int


class RankFile:
    """Where everything lies in one rank's file.

    Args:
        manifest: the checkpoint's manifest.
        rank: the rank that wrote (or will write) the file.
        shares: what the rank stores, of `Manifest.shares`, where the files of all ranks are wanted; None to find
            it for this rank alone.
    """

    def __init__(self, manifest: Manifest, rank: int, shares: Sequence[StoredShare] | None = None) -> None:
        self.manifest = manifest
        self.rank = rank
        self._shares = shares
        self.name = manifest.file_name(rank)
        self.chunks: tuple[Chunk, ...] = ()
        if manifest.has_chunk_table:
            held = held_chunks(manifest, rank)
            self.chunks = tuple(chunk for chunk, holders in held if holders[0].rank == rank)

    @cached_property
    def _relative(self) -> list[FilePiece]:
        """What the rank stores of each tensor, its share among replicas; bytes are counted from the header's end."""
        found: list[FilePiece] = []
        start, entries = 0, self.manifest.entries
        for place, share, held in self._own_shares if self._shares is None else self._shares:
            stop = start + share.numel * entries[place].itemsize
            found.append(FilePiece(place, share, share.span.start - held.span.start, start, stop))
            start = stop
        return found

    @property
    def _own_shares(self) -> Iterator[StoredShare]:
        """What this rank stores, in file order."""
        manifest, layouts = self.manifest, self.manifest.structure.layouts
        if manifest.is_zarr:
            return  # tensors lie in arrays of their own
        positions: dict[tuple[int, int], tuple[tuple[int, ...], int, int] | None] = {}
        regions: dict[tuple[object, ...], Region] = {}  # weights and their moments are cut alike
        for place, entry in enumerate(manifest.entries):
            key = (manifest.holders[place], entry.axes)
            if key not in positions:
                positions[key] = manifest.holders_of(place).position(self.rank)
            position = positions[key]
            if position is None:
                continue
            coordinates, replica, replicas = position
            cut = (entry.shape, entry.axes, entry.cuts, coordinates)
            held = regions.get(cut)
            if held is None:
                held = manifest.distributions[place].region(entry.shape, coordinates, layouts)
                regions[cut] = held
            share = manifest.split(place, held, replica, replicas)
            if share.numel:
                yield StoredShare(place, share, held)

    @cached_property
    def pieces(self) -> tuple[FilePiece, ...]:
        """The pieces with their bytes, in file order; empty pieces do not occur."""
        base = len(self.header)
        return tuple(
            FilePiece(place, region, local_start, base + start, base + stop)
            for place, region, local_start, start, stop in self._relative
        )

    @cached_property
    def piece_of(self) -> dict[int, FilePiece]:
        """The piece of each tensor number."""
        return {piece.place: piece for piece in self.pieces}

    @cached_property
    def _payload_bytes(self) -> int:
        return self._relative[-1].stop_bytes if self._relative else CRC_BYTES * len(self.chunks)

    @property
    def blob_start(self) -> int:
        """Where the per-rank values start."""
        return len(self.header) + self._payload_bytes

    @property
    def table_start(self) -> int:
        """Where the checksums start; all bytes before are covered by them."""
        return self.blob_start + self.manifest.blob_bytes

    @cached_property
    def num_stripes(self) -> int:
        """Stripes of the covered bytes; the last may be short."""
        return -(-self.table_start // self.manifest.stripe_bytes)

    @property
    def total_bytes(self) -> int:
        """Size of the file. The table has one more checksum: its own."""
        return self.table_start + (self.num_stripes + 1) * CHECKSUM_BYTES

    def stripe(self, index: int) -> tuple[int, int]:
        """Half-open byte range of a stripe."""
        size = self.manifest.stripe_bytes
        return index * size, min((index + 1) * size, self.table_start)

    def chunk_table(self, checksums: Mapping[Chunk, int]) -> bytes:
        """The bytes that stand in the place of pieces: crc32c of the rank's chunks, as its file lists them."""
        return struct.pack(f"<{len(self.chunks)}I", *(checksums[chunk] for chunk in self.chunks))

    def names_in(self, start: int, stop: int) -> list[str]:
        """Names of what lies in a range of the file's bytes, for messages."""
        names = ["the header"] if start < len(self.header) else []
        first = max(0, bisect_right(self.pieces, start, key=lambda piece: piece.start_bytes) - 1)
        for piece in self.pieces[first:]:
            if piece.start_bytes >= stop:
                break
            if piece.stop_bytes > start:
                names.append(self.manifest.entries[piece.place].label)
        if self.chunks and start < self.blob_start and stop > len(self.header):
            names.append("checksums of chunks")
        if self.manifest.blob_bytes and stop > self.blob_start:
            names.append("per-rank values")
        return names

    @cached_property
    def header(self) -> bytes:
        """The file's first bytes: length and JSON, padded with spaces."""
        metadata = {
            "format": FORMAT_NAME,
            "version": str(self.manifest.version),
            "save_id": self.manifest.save_id,
            "rank": str(self.rank),
            "world_size": str(self.manifest.world_size),
        }
        entries = self.manifest.entries
        items = [f'"__metadata__":{json.dumps(metadata, separators=(",", ":"))}']
        for place, region, _, start, stop in self._relative:
            entry = entries[place]
            code, multiple = stored_dtype(entry.dtype).carrier
            items.append(_item(entry.name, code, region.numel * multiple, start, stop))
        if self.chunks:
            items.append(_item(CHUNKS_NAME, "U32", len(self.chunks), 0, self._payload_bytes))
        end = self._payload_bytes + self.manifest.blob_bytes
        if self.manifest.blob_bytes:
            items.append(_item(BLOB_NAME, "U8", self.manifest.blob_bytes, self._payload_bytes, end))
        pieces = ",".join(items)
        # The table's size follows from the header's, the header's from its digits: two rounds at most.
        table_bytes = 0
        while True:
            table = _item(TABLE_NAME, "U8", table_bytes, end, end + table_bytes)
            header = _pad(f"{{{pieces},{table}}}".encode())
            stripes = -(-(len(header) + end) // self.manifest.stripe_bytes)
            if table_bytes == (stripes + 1) * CHECKSUM_BYTES:
                return header
            table_bytes = (stripes + 1) * CHECKSUM_BYTES


def pack_table(checksums: Sequence[int]) -> bytes:
    """The table of a file's checksums, little-endian, followed by its own checksum."""
    table = struct.pack(f"<{len(checksums)}Q", *checksums)
    return table + struct.pack("<Q", checksum_of(table))


def _item(name: str, code: str, numel: int, start: int, stop: int) -> str:
    """One entry of a safetensors header, as compact JSON."""
    return f'{encode_basestring_ascii(name)}:{{"dtype":"{code}","shape":[{numel}],"data_offsets":[{start},{stop}]}}'


def _pad(text: bytes) -> bytes:
    padded = -(-(8 + len(text)) // _HEADER_ALIGN_BYTES) * _HEADER_ALIGN_BYTES
    return struct.pack("<Q", padded - 8) + text.ljust(padded - 8)
