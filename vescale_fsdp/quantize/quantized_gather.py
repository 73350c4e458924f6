"""QuantizedGather: a mixed precision policy that gathers weights as 8-bit codes, half the bytes of bf16.

Pass it to `fully_shard` in place of a `MixedPrecisionPolicy`::

    codec = Fp8Blocks()
    policy = QuantizedGather(param_dtype=torch.bfloat16, codecs={"*weight": codec})
    fully_shard(model, mp_policy=policy, granularity=codec.granularity)

Each rank encodes its shard of the master weights, without communication because no rank boundary cuts a block. Two
all-gathers send the codes, and the scales with the values of parameters without a codec (`coded_layout`). Every rank
decodes them into the full buffer, in the compute dtype. The number of kernels depends neither on the number of ranks
nor on the number of tensors of one codec: torch.compile makes one kernel of the decoding.

So the forward and the backward compute with ``decode(encode(full weight))``, bit for bit, at every world size.
Gradients are applied to the master weights without rounding (a straight-through estimator).
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from vescale_fsdp.collectives.slice_exchange import Work, wait_for
from vescale_fsdp.layout.group_layout import GroupLayout, TensorSlot
from vescale_fsdp.lazy import set_module
from vescale_fsdp.quantize.codec import BlockCodec
from vescale_fsdp.quantize.coded_layout import CodedLayout, Part, coded_layout_of
from vescale_fsdp.runtime.comm.collective_check import GatherCheck
from vescale_fsdp.runtime.comm.group_comm import GatherPolicy, GroupComm
from vescale_fsdp.torch_modes import CompiledFunction, is_fake
from vescale_fsdp.torch_private import foreach_copy_

CodecRule = BlockCodec | Mapping[str, BlockCodec] | Callable[[str, torch.Size], BlockCodec | None]

# Elements of an odd tensor that are decoded at a time, because the steps in between have fp32 tensors of this size.
_CHUNK_NUMEL = 1 << 20


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
        return _CodedGather(coded_layout_of(layout, codecs, dtype), comm, dtype) if codecs else None

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
        coded: what is sent for each tensor, and where.
        comm: the group's collectives.
        dtype: the compute dtype, in which parameters without a codec are sent.
    """

    def __init__(self, coded: CodedLayout, comm: GroupComm, dtype: torch.dtype) -> None:
        self.coded = coded
        self.comm = comm
        self.dtype = dtype

    def __call__(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """Start the gather of ``shard`` (1-D [S], master weights) into ``full`` (1-D [m * S], compute dtype)."""
        layout = self.coded.layout
        ranks = layout.num_shards
        codes = torch.empty(ranks * layout.shard_numel, dtype=torch.uint8, device=full.device)
        rest = torch.empty(ranks * self.coded.rest_bytes, dtype=torch.uint8, device=full.device)
        # This rank encodes into its own part of the outputs, so that the all-gathers need not copy it there.
        own_codes = codes.view(ranks, -1)[self.comm.rank]
        own_rest = rest.view(ranks, -1)[self.comm.rank]
        self._encode(shard.to(full.device, non_blocking=True), own_codes, own_rest)
        messages = [(codes, own_codes), (rest, own_rest)]
        checks = [] if is_fake(full) else [self.comm.begin_check(*each) for each in messages]
        works = [self.comm.all_gather(*each) for each in messages]
        return _Coded(self, full, codes, rest, works, [check for check in checks if check is not None])

    def _encode(self, shard: torch.Tensor, codes: torch.Tensor, rest: torch.Tensor) -> None:
        """Write this rank's codes, and its scales and values without a codec, into its parts of the two buffers."""
        coded, rank = self.coded, self.comm.rank
        if coded.granule:  # first, because it also writes where the codes of odd tensors are
            scales = rest.view(coded.main.scale_dtype)[: coded.main_scales]
            self._encode_main(shard, codes, scales)
        for part in coded.odd:
            if rank in part.run.ranks:
                span = slice(part.run.local_offset, part.run.local_offset + part.run.piece_numel)
                codec = coded.codecs[part.slot.fqn]
                piece_codes, piece_scales = codec.encode(shard[span], coded.grid_of(part))
                codes[span].copy_(piece_codes)
                part_of(rest.view(codec.scale_dtype), part).copy_(piece_scales)
        own = [part for part in coded.plain if rank in part.run.ranks]
        if own:  # foreach operators refuse an empty list
            foreach_copy_(
                [part_of(rest.view(self.dtype), part) for part in own],
                [shard[part.run.local_offset :][: part.run.piece_numel] for part in own],
            )

    def _encode_main(self, shard: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the codes (1-D [S]) and scales (1-D [main_scales]) of all tensors of the main codec."""
        coded = self.coded
        kernels = _kernels_of(coded.main)
        table = coded.table(shard.device, fake=is_fake(shard)).view(coded.layout.num_shards, -1)
        blocks = table[self.comm.rank].long() - self.comm.rank * coded.scales_per_rank  # of each granule
        values = shard.view(-1, coded.granule)
        amax = torch.zeros(coded.main_scales, dtype=torch.float32, device=shard.device)
        kernels.find_amax(values, blocks, amax)
        factors, block_scales = coded.main.scales_of(amax)
        scales.copy_(block_scales)
        kernels.encode(values, blocks, codes.view(-1, coded.granule), factors)

    def decode(self, full: torch.Tensor, codes: torch.Tensor, rest: torch.Tensor) -> None:
        """Fill the full buffer from the gathered buffers ``codes`` and ``rest``."""
        coded = self.coded
        if coded.granule:  # first, because it also writes where the tensors below are
            table = coded.table(full.device, fake=is_fake(full))
            scales = rest.view(coded.main.scale_dtype)
            values, main_codes = full.view(-1, coded.granule), codes.view(-1, coded.granule)
            _kernels_of(coded.main).decode(values, main_codes, table, scales)
        for part in coded.odd:
            self._decode_odd(part, full, codes, rest)
        if coded.plain:  # foreach operators refuse an empty list
            values = rest.view(self.dtype)
            foreach_copy_(
                [self._pieces(full, part) for part in coded.plain],
                [self._rest_of(values, part) for part in coded.plain],
            )

    def _decode_odd(self, part: Part, full: torch.Tensor, codes: torch.Tensor, rest: torch.Tensor) -> None:
        """Decode the pieces of one part, which together are whole bands."""
        codec, grid = self.coded.codecs[part.slot.fqn], self.coded.grid_of(part)
        part_codes = self._pieces(codes, part).reshape(-1)
        part_scales = self._rest_of(rest.view(codec.scale_dtype), part).reshape(-1)
        into = self._pieces(full, part)
        if not into.is_contiguous():  # a scattered tensor: its pieces are one shard apart
            into.copy_(codec.decode(part_codes, part_scales, grid, full.dtype).view(into.shape))
            return
        num_bands = max(1, _CHUNK_NUMEL // grid.band_numel)
        chunks = part_codes.split(num_bands * grid.band_numel)
        scales = part_scales.split(num_bands * grid.scales_per_band)
        for values, chunk, chunk_scales in zip(
            into.view(-1).split(num_bands * grid.band_numel), chunks, scales, strict=True
        ):
            values.copy_(codec.decode(chunk, chunk_scales, grid, full.dtype))

    def _pieces(self, buffer: torch.Tensor, part: Part) -> torch.Tensor:
        """Return the view [ranks, piece_numel] of a part's pieces in ``full`` or in the gathered ``codes``."""
        size, run = self.coded.layout.shard_numel, part.run
        start = run.first_rank * size + run.local_offset
        return buffer[start:].as_strided((run.num_ranks, run.piece_numel), (size, 1))

    def _rest_of(self, rest: torch.Tensor, part: Part) -> torch.Tensor:
        """Return the view [ranks, rest_numel] of a part in the gathered ``rest``, viewed in the part's dtype."""
        size = self.coded.rest_bytes // rest.element_size()
        start = part.run.first_rank * size + part.rest_start
        return rest[start:].as_strided((part.run.num_ranks, part.rest_numel), (size, 1))


def part_of(own_rest: torch.Tensor, part: Part) -> torch.Tensor:
    """Return the view of a part in one rank's ``rest``, which is viewed in the part's dtype."""
    return own_rest[part.rest_start : part.rest_start + part.rest_numel]


class _Kernels:
    """The steps of a codec that read or write every element, each compiled into one kernel.

    Tensors of granules are 2-D [n, granule] or 1-D [n]; a granule's block is its index in the 1-D tensors of blocks.
    """

    def __init__(self, codec: BlockCodec) -> None:
        def find_amax(values: torch.Tensor, blocks: torch.Tensor, amax: torch.Tensor) -> None:
            amax.scatter_reduce_(0, blocks, values.abs().amax(1).float(), "amax")

        def encode(
            values: torch.Tensor, blocks: torch.Tensor, codes: torch.Tensor, factors: torch.Tensor
        ) -> None:
            codes.copy_(codec.codes_of(values.float(), factors[blocks].unsqueeze(1)))

        def decode(
            values: torch.Tensor, codes: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor
        ) -> None:
            factors = codec.factors_of(scales[blocks]).unsqueeze(1)
            values.copy_(codes.view(codec.code_dtype).float() * factors)

        self.find_amax = CompiledFunction(find_amax, num_split=2)
        self.encode = CompiledFunction(encode, num_split=3)
        self.decode = CompiledFunction(decode, num_split=3)


@functools.cache
def _kernels_of(codec: BlockCodec) -> _Kernels:
    return _Kernels(codec)


@dataclass
class _Coded:
    """A coded gather in flight. It keeps the buffers of its collectives alive."""

    gather: _CodedGather
    full: torch.Tensor
    codes: torch.Tensor
    rest: torch.Tensor
    works: list[Work | None]
    checks: list[GatherCheck]

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the collectives, and decode into the full buffer on the current stream, which owns the buffers."""
        wait_for(*self.works)
        for check in self.checks:
            check.finish(f"of {self.gather.coded.layout.slots[0].fqn}")
        self.checks = []  # a second wait is a no-op
        self.gather.decode(self.full, self.codes, self.rest)
