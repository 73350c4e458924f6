"""QuantizedGather: a mixed precision policy that gathers weights as 8-bit codes, half the bytes of bf16.

Pass it to `fully_shard` in place of a `MixedPrecisionPolicy`::

    codec = Fp8Blocks()
    policy = QuantizedGather(param_dtype=torch.bfloat16, codecs={"*weight": codec})
    fully_shard(model, mp_policy=policy, granularity=codec.granularity)

Each rank encodes its shard of the master weights, without communication because no rank boundary cuts a block. Two
all-gathers send the buffers below, and every rank decodes them into the full buffer, in the compute dtype:

    codes   1-D [S], uint8          one byte per element, at the element's offset in the shard
    rest    1-D [R], uint8          scales of this rank's blocks, and this rank's pieces of parameters without a codec

So the forward and the backward compute with ``decode(encode(full weight))``, bit for bit, at every world size.
Gradients are applied to the master weights without rounding (a straight-through estimator).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from vescale_fsdp.collectives import Work, wait_for
from vescale_fsdp.layout.geometry import round_up
from vescale_fsdp.layout.group_layout import GroupLayout, Piece, TensorSlot
from vescale_fsdp.lazy import set_module
from vescale_fsdp.quantize.codec import BlockCodec
from vescale_fsdp.runtime.comm.group_comm import GatherPolicy, GroupComm

CodecRule = BlockCodec | Mapping[str, BlockCodec] | Callable[[str, torch.Size], BlockCodec | None]

# Parts of ``rest`` start at multiples of this number, because they are viewed in wider dtypes, and kernels load up to
# 16 bytes at once.
_ALIGN_BYTES = 16


@set_module("vescale_fsdp.quantize")
@dataclass(frozen=True)
class QuantizedGather(GatherPolicy):
    """A `MixedPrecisionPolicy` with 8-bit gathers.

    Args:
        codecs: one of the following. A codec: for all parameters of two or more dims. A mapping from name patterns
            (fnmatch, names relative to the sharded module) to codecs: for matching parameters of two or more dims. A
            function ``(fqn, shape) -> codec or None``: for parameters of any shape. Parameters without a codec are
            sent in the compute dtype.

    Examples:
        >>> from vescale_fsdp import fully_shard
        >>> from vescale_fsdp.quantize import Fp8Blocks
        >>> codec = Fp8Blocks(32, 32)
        >>> policy = QuantizedGather(codecs=codec, param_dtype=torch.bfloat16)
        >>> model = fully_shard(torch.nn.Linear(64, 64), mp_policy=policy, granularity=codec.granularity)
        >>> model(torch.randn(2, 64)).dtype
        torch.bfloat16
    """

    codecs: CodecRule = field(default_factory=dict, hash=False)  # not hashed, because a mapping has no hash

    def gather_of(self, layout: GroupLayout, comm: GroupComm, dtype: torch.dtype) -> _CodedGather | None:
        """Return the gather of one group; None if no parameter of the group has a codec.

        Raises:
            LayoutError: if a rank boundary cuts a block.
        """
        codecs = {slot.fqn: codec for slot in layout.slots if (codec := self._codec_of(slot)) is not None}
        return _CodedGather(layout, comm, codecs, dtype) if codecs else None

    def _codec_of(self, slot: TensorSlot) -> BlockCodec | None:
        """Return the codec of a parameter, or None."""
        if not getattr(torch, slot.dtype).is_floating_point:  # codecs encode floats only
            return None
        if isinstance(self.codecs, (BlockCodec, Mapping)):
            if len(slot.shape) < 2:
                return None
            if isinstance(self.codecs, BlockCodec):
                return self.codecs
            # fnmatchcase, because fnmatch ignores case on some operating systems. The first matching pattern decides.
            matches = (c for pattern, c in self.codecs.items() if fnmatch.fnmatchcase(slot.fqn, pattern))
            return next(matches, None)
        return self.codecs(slot.fqn, torch.Size(slot.shape))


class _CodedGather:
    """The gather of one group: encodes a shard, sends the buffers ``codes`` and ``rest``, decodes into the full buffer.

    Args:
        layout: the group's layout.
        comm: the group's collectives.
        codecs: codecs by parameter name. Parameters that are not listed are sent without encoding, in ``rest``.
        dtype: the compute dtype, in which parameters without a codec are sent.
    """

    def __init__(
        self, layout: GroupLayout, comm: GroupComm, codecs: Mapping[str, BlockCodec], dtype: torch.dtype
    ) -> None:
        self.layout = layout
        self.comm = comm
        self.codecs = codecs
        self.dtype = dtype
        self.pieces: dict[str, list[tuple[int, Piece]]] = {slot.fqn: [] for slot in layout.slots}
        self.rest_starts: dict[tuple[int, str], int] = {}  # byte offset in ``rest`` of each (rank, name)
        # Bytes of ``rest`` on each rank: the largest number of any rank, because all-gathers require equal sizes.
        self.rest_bytes = 0
        for rank in range(layout.num_shards):
            end = 0
            for slot, piece in layout.pieces_of(rank):
                self.pieces[slot.fqn].append((rank, piece))
                self.rest_starts[rank, slot.fqn] = end
                end += round_up(self._rest_bytes_of(slot, piece), _ALIGN_BYTES)
            self.rest_bytes = max(self.rest_bytes, end)

    def _rest_bytes_of(self, slot: TensorSlot, piece: Piece) -> int:
        """Return the bytes of a piece in ``rest``: of its scales, or of its values if it has no codec."""
        codec = self.codecs.get(slot.fqn)
        if codec is None:
            return piece.numel * self.dtype.itemsize
        return codec.grid(slot.shape).scales_of(piece.range, slot.fqn) * codec.scale_dtype.itemsize

    def __call__(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """Start the gather of ``shard`` (1-D [S], master weights) into ``full`` (1-D [m * S], compute dtype)."""
        ranks = self.layout.num_shards
        codes = torch.empty(ranks * self.layout.shard_numel, dtype=torch.uint8, device=full.device)
        rest = torch.empty(ranks * self.rest_bytes, dtype=torch.uint8, device=full.device)
        # This rank encodes into its own part of the outputs, so that the all-gathers need not copy it there.
        own_codes = codes.view(ranks, -1)[self.comm.rank]
        own_rest = rest.view(ranks, -1)[self.comm.rank]
        self._encode(shard.to(full.device, non_blocking=True), own_codes, own_rest)
        works = [self.comm.all_gather(codes, own_codes), self.comm.all_gather(rest, own_rest)]
        return _Coded(self, full, codes, rest, works)

    def _encode(self, shard: torch.Tensor, codes: torch.Tensor, rest: torch.Tensor) -> None:
        """Write this rank's codes, and its scales and values without a codec, into its parts of the two buffers."""
        for slot, piece in self.layout.pieces_of(self.comm.rank):
            span = slice(piece.local_offset, piece.local_offset + piece.numel)
            values, codec = shard[span], self.codecs.get(slot.fqn)
            piece_rest = self._piece_rest(rest, self.comm.rank, slot, piece)
            if codec is None:
                piece_rest.view(self.dtype).copy_(values)
                continue
            piece_codes, scales = codec.encode(values, codec.grid(slot.shape))
            codes[span].copy_(piece_codes)
            piece_rest.copy_(scales.view(torch.uint8))

    def _piece_rest(self, rest: torch.Tensor, rank: int, slot: TensorSlot, piece: Piece) -> torch.Tensor:
        """Return the view of a piece's bytes in a rank's ``rest``."""
        start = self.rest_starts[rank, slot.fqn]
        return rest[start : start + self._rest_bytes_of(slot, piece)]

    def decode(self, full: torch.Tensor, codes: torch.Tensor, rest: torch.Tensor) -> None:
        """Fill the full buffer from the gathered buffers ``codes`` and ``rest``."""
        by_rank = rest.view(self.layout.num_shards, -1)
        for slot in self.layout.slots:
            codec = self.codecs.get(slot.fqn)
            for rank, piece in self.pieces[slot.fqn]:
                start = rank * self.layout.shard_numel + piece.local_offset
                span = slice(start, start + piece.numel)
                piece_rest = self._piece_rest(by_rank[rank], rank, slot, piece)
                if codec is None:
                    full[span].copy_(piece_rest.view(self.dtype))
                    continue
                scales = piece_rest.view(codec.scale_dtype)
                full[span].copy_(codec.decode(codes[span], scales, codec.grid(slot.shape), full.dtype))


@dataclass
class _Coded:
    """A coded gather in flight. It keeps the buffers of its collectives alive."""

    gather: _CodedGather
    full: torch.Tensor
    codes: torch.Tensor
    rest: torch.Tensor
    works: list[Work | None]

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the collectives, and decode into the full buffer on the current stream, which owns the buffers."""
        wait_for(*self.works)
        self.gather.decode(self.full, self.codes, self.rest)
