"""One rank's source and target tensors in a transfer, as bytes that are sent and received.

`Origin` packs boxes of the source, cast or quantized as planned. `Destination` fills the target. With ``keep_old``, it
fills a second copy, and copies that into the target at the end. Without ``keep_old``, it fills the target in place. A
failure then leaves old and new weights mixed, so the whole target is poisoned: every byte becomes 0xFF, which is NaN in
every float dtype and -1 in every signed integer dtype. Such weights cannot be served by mistake.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vescale_fsdp.checkpoint.manifest.distribution import LayoutCut
from vescale_fsdp.checkpoint.manifest.torch_dtypes import carrier_of, dtype_name, dtype_named
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.torch_private import local_of, storage_id, version_of
from vescale_fsdp.transfer.coding import CodedTensor, cut_blocks_of
from vescale_fsdp.transfer.description import StateDescription
from vescale_fsdp.transfer.links import CodedKey, SourceTensor
from vescale_fsdp.transfer.plan import TransferPlan
from vescale_fsdp.transfer.rank_transfers import Shape, Share


class PlannedPart(NamedTuple):
    """The part of a described tensor that one rank stores.

    Attributes:
        number: index of the tensor in its description.
        name, dtype, shape: name, dtype and shape of the whole tensor.
        numel: number of items of the part.
    """

    number: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int


def parts_of(description: StateDescription, numbers: Iterable[int], rank: int) -> list[PlannedPart]:
    """Return a rank's parts of the tensors with these ``numbers``, ascending. Tensors without a part are omitted."""
    parts = []
    for number in sorted(set(numbers)):
        position = description.holders_of(number).position(rank)
        if position is not None:
            entry, numel = description.entries[number], description.region(number, position[0]).numel
            parts.append(PlannedPart(number, entry.name, dtype_named(entry.dtype), entry.shape, numel))
    return parts


def local_parts(
    tensors: Mapping[str, torch.Tensor], parts: Sequence[PlannedPart], rank: int
) -> dict[int, torch.Tensor]:
    """Compare a state with its description, and return this rank's local tensors by tensor number.

    Args:
        tensors: the tensors of the state, by name.
        parts: the parts that this rank should store.

    Raises:
        CheckpointError: if a tensor is missing, or has another dtype, global shape or number of local items.
    """
    locals_by_number = {}
    for number, name, dtype, shape, numel in parts:
        got = "no such tensor"
        if name in tensors:
            tensor, local = tensors[name], local_of(tensors[name])
            if (tensor.dtype, tensor.shape, local.numel()) == (dtype, shape, numel):
                locals_by_number[number] = local.detach()
                continue
            got = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}, {local.numel()} items here"
        raise CheckpointError(
            "The transfer was planned for another state.",
            expected=f"{dtype_name(dtype)} {shape}, {numel} items here",
            got=got,
            where=f"{name}, rank {rank}",
            todo="describe the state again, and plan a new transfer",
        )
    return locals_by_number


def _is_plain_memory(local: torch.Tensor) -> bool:
    """Return whether memory has the items in row-major order, without torch's lazy conjugation or negation."""
    return local.is_contiguous() and not (local.is_conj() or local.is_neg())


def _flat(local: torch.Tensor) -> torch.Tensor:
    """Return a tensor's items as 1D: a view if the memory has them in order, else a copy."""
    if not _is_plain_memory(local):
        local = local.resolve_conj().resolve_neg().contiguous()
    return local.as_strided((local.numel(),), (1,))


def _as_carrier(local: torch.Tensor) -> torch.Tensor:
    """View a tensor in a dtype of the same width that every copy kernel supports; some dtypes have no kernels."""
    return local.view(carrier_of(local.dtype))


def _views(
    data: torch.Tensor, wire_dtype: str | None, flat: torch.Tensor, sizes: Shape, strides: Shape, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two views of a share, both of shape ``sizes``: its items in a message, and its items in a flat memory.

    Args:
        data: the share's bytes of the message, 1D uint8.
        wire_dtype: dtype of the items in the message, for a copy that casts; None for a copy of bits.
        flat: 1D, the memory.
        strides, start: strides of the share in ``flat``, and index of its first item there.
    """
    if wire_dtype is None:
        flat = _as_carrier(flat)
    wire = data.view(flat.dtype if wire_dtype is None else dtype_named(wire_dtype))
    return wire.view(sizes), flat.as_strided(sizes, strides, flat.storage_offset() + start)


_watches: weakref.WeakSet[SourceWatch] = weakref.WeakSet()  # weak: a watch ends with its run of a transfer
_watches_lock = Lock()  # an optimizer may step on another thread than the transfer's


def _note_step(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    """Mark each watch of memory of the optimizer's parameters. torch calls this before every optimizer's step."""
    with _watches_lock:
        watches = list(_watches)  # a copy: other threads may add watches during the loop
    if watches:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        # Compared by storage: tensors of a state dict are other objects than the optimizer's, with the same memory.
        stepped = {storage_id(local_of(param)) for param in params}
        for watch in watches:
            watch.is_stepped |= not stepped.isdisjoint(watch.storages)


@lru_cache  # register the hook once per process: it runs for all optimizers
def _watch_optimizers() -> None:
    """Make torch call `_note_step` before every step of every optimizer of this process."""
    register_optimizer_step_pre_hook(_note_step)


class SourceWatch:
    """Detects writes to tensors, by any thread, after the watch was created.

    Version counters alone miss a write in progress: torch increments a counter after a kernel, and after all kernels of
    a fused optimizer. So the beginning of an optimizer's step counts as a write.

    Args:
        tensors: the tensors to watch; the local tensor of a DTensor, which has its own counter, is watched too.

    Attributes:
        storages: `storage_id` of each tensor.
        is_stepped: whether an optimizer of any of the tensors has begun a step.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        tensors = list(tensors)
        watched = [item for tensor in tensors for item in (tensor, local_of(tensor))]
        self.storages = {storage_id(local_of(tensor)) for tensor in tensors}
        self.is_stepped = False
        with _watches_lock:  # two threads could run a function with `lru_cache` at the same time
            _watch_optimizers()
            _watches.add(self)
        # Inference tensors have no version counter.
        self._versions = [(item, version_of(item)) for item in watched if not item.is_inference()]

    def check(self) -> None:
        """Check that no tensor was written to since the watch was created.

        Raises:
            CheckpointError: if a version counter changed or an optimizer began a step; names the number of tensors.
        """
        changed = sum(version_of(tensor) != version for tensor, version in self._versions)
        if changed or self.is_stepped:
            raise CheckpointError(
                "The source was written to while it was sent.",
                expected="no optimizer step before the transfer has ended",
                got=f"{changed} of {len(self._versions)} tensors changed"
                + (", and an optimizer began a step" if self.is_stepped else ""),
                todo="call the handle's wait() before the step, or start the transfer with snapshot=True",
            )


def _coded_sources(plan: TransferPlan) -> dict[CodedKey, SourceTensor]:
    """Return the source tensors that a plan quantizes, one per tensor and codec, in the order of the plan's leaves."""
    sources: dict[CodedKey, SourceTensor] = {}
    for leaf in plan.leaves:
        if leaf.source.coded_key is not None:
            sources.setdefault(leaf.source.coded_key, leaf.source)
    return sources


class CutBlocks:
    """The quantization blocks that may span several ranks, computed from the plan: the same list on all ranks.

    Attributes:
        blocks: for each quantized tensor, the numbers of its blocks that may span ranks, ascending.
        total: number of these blocks in all tensors.
    """

    def __init__(self, plan: TransferPlan) -> None:
        layouts = plan.source.structure.layouts
        self.blocks: dict[CodedKey, list[int]] = {}
        for key, source in _coded_sources(plan).items():
            grid, cuts = source.grid, source.distribution.cuts
            assert grid is not None
            # The usual layout of this library, for which no region needs to be computed.
            if len(cuts) == 1 and isinstance(cuts[0], LayoutCut) and grid.shape == source.stored_shape:
                slot = layouts[cuts[0].layout].slots[cuts[0].slot]
                if grid.cuts_no_block(slot.block_numel):
                    continue  # no rank boundary cuts a block of the layout
            parts = map(source.parts, source.touching_all())
            cut = {block for part in parts for block in cut_blocks_of(part, grid)}
            self.blocks[key] = sorted(cut)  # the all-reduce needs the same order on all ranks
        self.total = sum(map(len, self.blocks.values()))

    def agree(self, tensors: Mapping[CodedKey, CodedTensor], coordinator: Coordinator) -> None:
        """All-reduce the largest magnitudes of blocks that may span ranks, and store the results in ``tensors``.

        A collective, unless there are no such blocks. If it fails on any rank, it fails on all.

        Args:
            tensors: this rank's parts of quantized tensors.
        """
        if not self.total:  # the same on all ranks
            return
        # As integers, since the coordinator all-reduces integers. The bits of non-negative floats, read as integers,
        # have the order of the floats, and NaN is the largest. On the CPU, since the coordinator's group is gloo.
        # The last number is 1 if a rank has failed.
        largest = torch.zeros(self.total + 1, dtype=torch.int32, device="cpu")
        # For each tensor on this rank: its magnitudes, and the indices of its cut blocks in ``largest`` and in these.
        own: list[tuple[torch.Tensor, list[int], list[int]]] = []
        errors = FirstError()

        def collect() -> None:
            start = 0
            for key, blocks in self.blocks.items():
                if key in tensors:
                    amax, first = tensors[key].amax.view(-1), tensors[key].first_block
                    here = [at for at, block in enumerate(blocks) if 0 <= block - first < amax.numel()]
                    own.append((amax, [start + at for at in here], [blocks[at] - first for at in here]))
                start += len(blocks)
            for amax, numbers, here in own:
                largest[numbers] = amax[here].cpu().view(torch.int32)

        errors.attempt(collect)
        largest[-1] = errors.error is not None
        coordinator.raise_to_largest(largest)
        errors.raise_kept()
        if largest[-1]:
            raise CheckpointError("Another rank failed while it measured quantization blocks.")
        for amax, numbers, here in own:
            amax[here] = largest[numbers].view(torch.float32).to(amax.device)


class Origin:
    """One rank's source tensors in one run of a transfer. Measures the blocks of quantized tensors when it is created.

    Args:
        locals_by_number: this rank's local tensors, by tensor number in the source's description.

    Attributes:
        coded: this rank's parts of quantized tensors, with the largest magnitude of each block.
    """

    def __init__(self, plan: TransferPlan, rank: int, locals_by_number: Mapping[int, torch.Tensor]) -> None:
        self._plan = plan
        self._rank = rank
        self._flats = {number: _flat(local) for number, local in locals_by_number.items()}
        self._scales: dict[CodedKey, torch.Tensor] = {}
        self.coded: dict[CodedKey, CodedTensor] = {}
        for key, source in _coded_sources(plan).items():
            position = source.holders.position(rank)
            if position is not None:
                assert source.codec is not None and source.grid is not None
                parts, flat = source.parts(position[0]), self._flats[source.number]
                self.coded[key] = CodedTensor(source.codec, source.grid, parts, flat)

    def run(self, share: Share, numel: int) -> torch.Tensor:
        """Return a view of the bytes of ``numel`` contiguous source items, from the first item of ``share`` on."""
        flat = self._flats[self._plan.leaves[share.leaf].source.number]
        return flat[share.source : share.source + numel].view(torch.uint8)

    def pack(self, share: Share, out: torch.Tensor) -> None:
        """Write a share's bytes as they are sent, cast or quantized if planned, into ``out`` (1D uint8)."""
        placed = self._plan.leaves[share.leaf]
        key = placed.source.coded_key
        if key is not None and not placed.source.is_scales:
            self.coded[key].encode(out.view(share.sizes), share.sizes, share.source_strides, share.source)
            return
        flat = self._flats[placed.source.number] if key is None else self._scales_of(placed.source, key)
        # Only the side with the wider dtype casts, so that the narrower one is sent; here, the sender.
        wire_dtype = placed.wire_dtype if placed.narrowed else None
        wire, box = _views(out, wire_dtype, flat, share.sizes, share.source_strides, share.source)
        wire.copy_(box)

    def _scales_of(self, source: SourceTensor, key: CodedKey) -> torch.Tensor:
        """Return the scales that this rank owns of a tensor, 1D."""
        if key not in self._scales:  # computed once per run
            position = source.holders.position(self._rank)
            assert position is not None
            self._scales[key] = self.coded[key].scales(source.regions(position[0]))
        return self._scales[key]


class Destination:
    """One rank's target tensors in one run of a transfer.

    Args:
        locals_by_number: this rank's local tensors, by tensor number in the target's description.
        keep_old: fill a second copy, which `commit` copies into the target.
        copies: second copies of earlier runs, by tensor number, for reuse. Missing copies are added.

    Attributes:
        is_mixed: whether the target may have a mixture of old and new weights. The caller sets it before it fills a
            target in place.
    """

    def __init__(
        self,
        plan: TransferPlan,
        locals_by_number: Mapping[int, torch.Tensor],
        *,
        keep_old: bool,
        copies: dict[int, torch.Tensor],
    ) -> None:
        self._plan = plan
        self._locals = locals_by_number
        self.is_mixed = False
        self._flats: dict[int, torch.Tensor] = {}
        for number, local in locals_by_number.items():
            if _is_plain_memory(local) and not keep_old:
                self._flats[number] = _flat(local)
                continue
            # Fill a second copy: with `keep_old`, or because the target's items are not in order in memory.
            if number not in copies:
                copies[number] = torch.empty(local.numel(), dtype=local.dtype, device=local.device)
            self._flats[number] = copies[number]

    def run(self, share: Share, numel: int) -> torch.Tensor:
        """Return a view of the bytes of ``numel`` contiguous items to fill, from the first item of ``share`` on."""
        flat = self._flats[self._plan.leaves[share.leaf].target]
        return flat[share.target : share.target + numel].view(torch.uint8)

    def unpack(self, share: Share, data: torch.Tensor) -> None:
        """Copy a share's items from the bytes of a message into the target or its second copy, cast if planned."""
        wire, box = self._wire_and_box(share, data)
        box.copy_(wire)

    def read_back(self, share: Share, out: torch.Tensor) -> None:
        """Write a share's stored items into ``out``, as the bytes that were received: the inverse of `unpack`."""
        wire, box = self._wire_and_box(share, out)
        wire.copy_(box)

    def _wire_and_box(self, share: Share, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two views of a share: its items in ``data``, and its items in the target or its second copy."""
        placed = self._plan.leaves[share.leaf]
        flat, wire_dtype = self._flats[placed.target], placed.wire_dtype if placed.widened else None
        return _views(data, wire_dtype, flat, share.sizes, share.target_strides, share.target)

    def commit(self) -> None:
        """Copy second copies, if there are any, into the target, and reset `is_mixed`."""
        self.is_mixed = True  # an interruption between two copies leaves a mixture
        for number, local in self._locals.items():
            flat = self._flats[number]
            # With equal addresses the tensor was filled in place.
            if flat.data_ptr() != local.data_ptr() and local.numel():
                _as_carrier(local).copy_(_as_carrier(flat).view(local.shape))
        self.is_mixed = False

    def poison(self) -> None:
        """Set all bytes of the target to 0xFF, which is NaN in floats, if `is_mixed`; bools become True."""
        for local in self._locals.values() if self.is_mixed else ():
            if local.dtype == torch.bool:
                local.fill_(True)  # the byte 0xFF is not a valid bool
            elif local.numel():
                ones = torch.full((local.dtype.itemsize,), 0xFF, dtype=torch.uint8, device=local.device)
                _as_carrier(local).copy_(ones.view(carrier_of(local.dtype)))
