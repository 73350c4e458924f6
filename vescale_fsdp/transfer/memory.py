"""One rank's source and target tensors in a transfer, as bytes that are sent and received.

`Origin` packs boxes of the source, cast or quantized as planned. `Destination` fills the target in place; or, with
``keep_old``, a second copy that is copied into the target at the end. A failure of a transfer in place leaves old and
new weights mixed, so the whole target is poisoned: every byte becomes 0xFF, which is NaN in every float dtype and -1 in
every signed integer dtype. Such weights cannot be served by mistake.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vescale_fsdp.checkpoint.manifest.torch_dtypes import carrier_of, dtype_name, dtype_named
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.layout.distribution import LayoutCut
from vescale_fsdp.layout.geometry import round_up
from vescale_fsdp.layout.region import Copy, Region
from vescale_fsdp.torch_private import foreach_copy_, local_of, storage_id, storage_ids, versions_of
from vescale_fsdp.transfer.coding import CodedTensor, cut_blocks_of
from vescale_fsdp.transfer.description import StateDescription
from vescale_fsdp.transfer.links import CodedKey, SourceTensor
from vescale_fsdp.transfer.packing import gather, scatter
from vescale_fsdp.transfer.patches import Change, bits_of, put
from vescale_fsdp.transfer.plan import ALIGN_BYTES, TransferPlan
from vescale_fsdp.transfer.rank_transfers import Batch, LeafCopy

# Dtypes that all copy kernels support. A view in another dtype costs as much as the copy of a small tensor.
_COPIED_AS_IS = frozenset(
    {torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int32, torch.int64}
)
# 64 KiB: a copy of this costs less than the views and calls for several copies of a tensor's items.
_SMALL_BYTES = 64 << 10


def regions_of(description: StateDescription, numbers: Iterable[int], rank: int) -> dict[int, Region]:
    """Return the regions that a rank stores of the tensors with these ``numbers``, ascending, without empty regions."""
    regions = {}
    for number in sorted(set(numbers)):
        position = description.holders_of(number).position(rank)
        region = None if position is None else description.region(number, position[0])
        if region is not None and region.numel:
            regions[number] = region
    return regions


def local_pieces(
    tensors: Mapping[str, torch.Tensor],
    description: StateDescription,
    regions: Mapping[int, Region],
    rank: int,
) -> dict[int, torch.Tensor]:
    """Compare a state with the state's description, and return this rank's local tensors by tensor number.

    Args:
        tensors: the tensors of the state, by name.
        regions: the regions that this rank should store, by tensor number.

    Raises:
        CheckpointError: if a tensor is missing, or has another dtype, global shape or number of local items.
    """
    locals_by_number = {}
    entries, dtypes = description.entries, description.dtypes
    for number, region in regions.items():
        (start, stop), entry = region.span, entries[number]
        numel = stop - start  # not `Region.numel`: every run checks thousands of tensors
        got = "no such tensor"
        if entry.name in tensors:
            tensor = tensors[entry.name]
            local = local_of(tensor)
            # A hand-made plan may describe a plain tensor as a part; `describe_states` never does.
            is_planned = tensor.shape == entry.shape or (
                tensor is local and numel == region.box.numel and tensor.shape == region.box.sizes
            )
            if is_planned and tensor.dtype is dtypes[number] and local.numel() == numel:
                # A parameter is a leaf of autograd. Tensors without a gradient are used as they are: there may be
                # thousands.
                locals_by_number[number] = local.detach() if local.requires_grad else local
                continue
            got = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}, {local.numel()} items here"
        raise CheckpointError(
            "The transfer was planned for another state.",
            expected=f"{entry.dtype} {entry.shape}, {numel} items here",
            got=got,
            where=f"{entry.name}, rank {rank}",
            todo="describe the state again, and plan a new transfer",
        )
    return locals_by_number


def in_order(local: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory has the items in order: the tensor, or a copy if its memory has another order."""
    if _is_plain_memory(local):
        return local
    return local.resolve_conj().resolve_neg().contiguous()


def _is_plain_memory(local: torch.Tensor) -> bool:
    """Return whether memory has the items in row-major order, without torch's lazy conjugation or negation."""
    return local.is_contiguous() and not (local.is_conj() or local.is_neg())


def _as_carrier(local: torch.Tensor) -> torch.Tensor:
    """View a tensor in a dtype of the same width that every copy kernel supports; some dtypes have no kernels."""
    return local if local.dtype in _COPIED_AS_IS else local.view(carrier_of(local.dtype))


class Stage:
    """A buffer with copies of a rank's small tensors of one state, reused by all runs of a transfer.

    A view and a call for each copy of each tensor would take longer than sending. In the buffer, tensors of one shape
    are at regular distances, so that one operator copies items of many tensors to or from a message.

    Args:
        regions: the regions of the state that the rank stores, by tensor number.
        limit_bytes: largest size of the buffer. Tensors that do not fit are not staged.

    Attributes:
        starts: index of the first item of each staged tensor in the buffer, in items, by tensor number.
        nbytes: size of the buffer.
        flats: each staged tensor in the buffer, by tensor number; filled by `fit`.
    """

    def __init__(
        self, description: StateDescription, regions: Mapping[int, Region], limit_bytes: int
    ) -> None:
        self.starts: dict[int, int] = {}
        self.nbytes = 0
        self.flats: dict[int, torch.Tensor] = {}
        self._views: list[torch.Tensor] = []  # of the staged tensors, in their shapes in the state
        dtypes = description.dtypes
        small = [
            number
            for number, region in regions.items()
            if dtypes[number] in _COPIED_AS_IS and region.numel * dtypes[number].itemsize <= _SMALL_BYTES
        ]
        # One shape after another. `sorted` keeps the order of tensors of one shape, in which they are sent too.
        for number in sorted(small, key=lambda number: (str(dtypes[number]), regions[number].numel)):
            itemsize = dtypes[number].itemsize
            nbytes = round_up(regions[number].numel * itemsize, ALIGN_BYTES)
            if self.nbytes + nbytes > limit_bytes:
                break
            self.starts[number] = self.nbytes // itemsize
            self.nbytes += nbytes
        self._numbers = [number for number in small if number in self.starts]

    def fit(self, locals_by_number: Mapping[int, torch.Tensor]) -> None:
        """Allocate the buffer at first use, and view it in the shapes of this rank's tensors."""
        if not self._numbers:
            return
        locals_ = [locals_by_number[number] for number in self._numbers]
        if not self.flats or self._views[0].device != locals_[0].device:
            buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=locals_[0].device)
            typed = {local.dtype: buffer.view(local.dtype) for local in locals_}
            for number, local in zip(self._numbers, locals_, strict=True):
                start = self.starts[number]
                self.flats[number] = typed[local.dtype][start : start + local.numel()]
            self._views = [self.flats[number] for number in self._numbers]
        self._views = [
            view if view.shape == local.shape else view.view(local.shape)
            for view, local in zip(self._views, locals_, strict=True)
        ]

    def fill(self, locals_by_number: Mapping[int, torch.Tensor]) -> None:
        """Copy tensors of the state into the buffer."""
        if self._numbers:
            foreach_copy_(self._views, [locals_by_number[number] for number in self._numbers])

    def empty(self, locals_by_number: Mapping[int, torch.Tensor]) -> None:
        """Copy the buffer into the tensors of the state."""
        if self._numbers:
            foreach_copy_([locals_by_number[number] for number in self._numbers], self._views)


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
        is_stepped: whether an optimizer of any of the tensors has begun a step.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        tensors = list(tensors)
        locals_ = [local_of(tensor) for tensor in tensors]
        pairs = zip(tensors, locals_, strict=True)
        watched = [*locals_, *(tensor for tensor, local in pairs if tensor is not local)]
        self._locals = locals_
        self.is_stepped = False
        with _watches_lock:  # two threads could run a function with `lru_cache` at the same time
            _watch_optimizers()
            _watches.add(self)
        # Inference tensors have no version counter.
        self._watched = [item for item in watched if not item.is_inference()]
        self._versions = versions_of(self._watched)

    @cached_property
    def storages(self) -> set[int]:
        """`storage_id` of each tensor; computed if an optimizer steps, which is rare during a transfer."""
        return storage_ids(self._locals)

    @property
    def is_written(self) -> bool:
        """Whether a version counter has changed, or an optimizer has begun a step."""
        return self.is_stepped or versions_of(self._watched) != self._versions

    def check(self) -> None:
        """Check that no tensor was written to since the watch was created.

        Raises:
            CheckpointError: if a version counter changed or an optimizer began a step; names the number of tensors.
        """
        if self.is_written:
            versions = versions_of(self._watched)
            changed = sum(now != before for now, before in zip(versions, self._versions, strict=True))
            raise CheckpointError(
                "The source was written to while it was sent.",
                expected="no optimizer step before the transfer has ended",
                got=f"{changed} of {len(versions)} tensors changed"
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
            stored = map(source.stored_boxes, source.touching_all())
            cut = {block for boxes in stored for block in cut_blocks_of(boxes, grid)}
            self.blocks[key] = sorted(cut)  # the all-reduce needs the same order on all ranks
        self.total = sum(map(len, self.blocks.values()))

    def agree(self, tensors: Mapping[CodedKey, CodedTensor], coordinator: Coordinator) -> None:
        """All-reduce the largest magnitudes of blocks that may span ranks, and store the results in ``tensors``.

        A collective, unless there are no such blocks. If it fails on any rank, it fails on all.

        Args:
            tensors: this rank's pieces of quantized tensors.
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
        stage: the buffer for small tensors, which is filled here.

    Attributes:
        coded: this rank's pieces of quantized tensors, with the largest magnitude of each block.
    """

    def __init__(
        self, plan: TransferPlan, rank: int, locals_by_number: Mapping[int, torch.Tensor], stage: Stage
    ) -> None:
        self._plan = plan
        self._rank = rank
        stage.fit(locals_by_number)
        stage.fill(locals_by_number)
        self._flats = dict(stage.flats)
        for number, local in locals_by_number.items():
            if number not in stage.starts:
                self._flats[number] = in_order(local)
        self._scales: dict[CodedKey, torch.Tensor] = {}
        self.coded: dict[CodedKey, CodedTensor] = {}
        for key, source in _coded_sources(plan).items():
            position = source.holders.position(rank)
            if position is not None and source.number in self._flats:
                assert source.codec is not None and source.grid is not None
                stored, items = source.stored_boxes(position[0]), self._flats[source.number]
                self.coded[key] = CodedTensor(source.codec, source.grid, stored, items)

    def flat(self, number: int) -> torch.Tensor:
        """Return this rank's items of source tensor ``number``, contiguous."""
        return self._flats[number]

    def bytes_of(self, run: LeafCopy) -> torch.Tensor:
        """Return a view of the bytes of a run of source items, 1D."""
        placed, copy = run
        return copy.source_view(self._flats[placed.source.number]).view(torch.uint8)

    def pack(self, batch: Batch, out: torch.Tensor) -> None:
        """Write a batch's bytes as they are sent, cast or quantized if planned, into ``out`` (1D uint8)."""
        placed, first = batch.copies[0]
        key = placed.source.coded_key
        if key is not None and not placed.source.is_scales:  # the only copy of its batch
            self.coded[key].encode(out.view(first.sizes), first.sizes, first.source_strides, first.source)
            return
        # Only the side with the wider dtype casts, so that the narrower one is sent; here, the sender.
        casts = placed.narrowed
        boxes = []
        for each, copy in batch.copies:
            items = self._flats[each.source.number] if key is None else self._scales_of(each.source)
            boxes.append(copy.source_view(items if casts else _as_carrier(items)))
        gather(boxes, out.view(dtype_named(placed.wire_dtype) if casts else boxes[0].dtype))

    def _scales_of(self, source: SourceTensor) -> torch.Tensor:
        """Return the scales that this rank owns of a tensor, 1D."""
        key = source.coded_key
        assert key is not None
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
        stage: the second copy of small tensors, which have one also without ``keep_old``.

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
        stage: Stage,
    ) -> None:
        self._plan = plan
        self._locals = locals_by_number
        self.is_mixed = False
        stage.fit(locals_by_number)
        self._stage = stage
        self._flats = dict(stage.flats)
        # The tensors that have a second copy: number, tensor, copy. And those whose copy is filled.
        self._copies: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._copied = self._copies
        for number, local in locals_by_number.items():
            if number in stage.starts:
                continue
            if not keep_old and _is_plain_memory(local):
                self._flats[number] = local
                continue
            # Fill a second copy: with `keep_old`, or because the target's items are not in order in memory.
            if number not in copies:
                copies[number] = torch.empty(local.numel(), dtype=local.dtype, device=local.device)
            self._flats[number] = copies[number]
            self._copies.append((number, local, copies[number]))

    def flat(self, number: int) -> torch.Tensor:
        """Return what this rank has received of target tensor ``number``, contiguous."""
        return self._flats[number]

    def begin_patches(self, *, keep_old: bool) -> None:
        """Prepare for patches, which have only changed items: copy the target into second copies.

        Args:
            keep_old: into all second copies. Else patches are stored in the target, where its memory has the items in
                order, and other tensors and staged ones are copied.
        """
        self._stage.fill(self._locals)
        self._copied = []
        for number, local, copied in self._copies:
            if keep_old or not _is_plain_memory(local):
                self._copied.append((number, local, copied))
                self._flats[number] = copied
                _as_carrier(copied).copy_(_as_carrier(in_order(local)).view(-1))
            else:
                self._flats[number] = local

    def put(self, change: Change) -> None:
        """Store changed items in the target or its second copy, cast if planned."""
        placed = change.copy[0]
        flat = self._flats[placed.target]
        put(change, bits_of(flat), self.stored_bits(change), is_source=False)

    def stored_bits(self, change: Change) -> torch.Tensor:
        """Return the bits of changed items as the target stores them."""
        placed = change.copy[0]
        if not placed.widened:
            return change.values
        dtype = self._plan.target.dtypes[placed.target]
        return bits_of(change.values.view(dtype_named(placed.wire_dtype)).to(dtype))

    def bytes_of(self, run: LeafCopy) -> torch.Tensor:
        """Return a view of the bytes of a run of items to fill, 1D."""
        placed, copy = run
        return copy.target_view(self._flats[placed.target]).view(torch.uint8)

    def unpack(self, batch: Batch, data: torch.Tensor) -> None:
        """Copy a batch's items from the bytes of a message into the target or its second copy, cast if planned."""
        scatter(*self._wire_and_boxes(batch, data))

    def read_back(self, batch: Batch, out: torch.Tensor) -> None:
        """Write a batch's stored items into ``out``, as the bytes that were received: the inverse of `unpack`."""
        wire, boxes = self._wire_and_boxes(batch, out)
        gather(boxes, wire)

    def _wire_and_boxes(self, batch: Batch, data: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the items of a batch in ``data``, 1D, and its boxes in the target or its second copy."""
        placed = batch.copies[0][0]
        casts = placed.widened
        boxes = []
        for each, copy in batch.copies:
            items = self._flats[each.target]
            boxes.append(copy.target_view(items if casts else _as_carrier(items)))
        return data.view(dtype_named(placed.wire_dtype) if casts else boxes[0].dtype), boxes

    def write_zeros(self, boxes: Iterable[tuple[int, Copy]]) -> None:
        """Fill boxes of the target or its second copy with zeros.

        Args:
            boxes: tensor numbers, and copies whose target is this rank's piece of the tensor.
        """
        for number, copy in boxes:
            _as_carrier(copy.target_view(self._flats[number])).zero_()

    def commit(self) -> None:
        """Copy second copies, if there are any, into the target, and reset `is_mixed`."""
        self.is_mixed = True  # an interruption between two copies leaves a mixture
        self._stage.empty(self._locals)
        for _, local, copied in self._copied:
            _as_carrier(local).copy_(_as_carrier(copied).view(local.shape))
        self.is_mixed = False

    def poison(self) -> None:
        """Set all bytes of the target to 0xFF, which is NaN in floats, if `is_mixed`; bools become True."""
        for local in self._locals.values() if self.is_mixed else ():
            if local.dtype == torch.bool:
                local.fill_(True)  # the byte 0xFF is not a valid bool
            elif local.numel():
                ones = torch.full((local.dtype.itemsize,), 0xFF, dtype=torch.uint8, device=local.device)
                local.view(carrier_of(local.dtype)).copy_(ones.view(carrier_of(local.dtype)))
