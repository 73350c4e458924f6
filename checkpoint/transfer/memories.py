"""One rank's memory in a transfer: what it reads, what it fills, and how boxes of both become bytes and back.

Where a target keeps its old weights until all have arrived, it is filled beside them (`Destination.commit`). Where
it is filled in place, a transfer that fails midway leaves old and new mixed, so that all of it is spoilt
(`Destination.spoil`): every byte 0xFF, which is NaN in every float and -1 in every integer. Nobody serves that by
mistake.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vescale_fsdp.checkpoint.manifest.torch_dtypes import carrier_of, dtype_name, dtype_named
from vescale_fsdp.checkpoint.transfer.coding import CodedTensor, Key
from vescale_fsdp.checkpoint.transfer.planning.description import StateDescription
from vescale_fsdp.checkpoint.transfer.planning.shares import Share
from vescale_fsdp.checkpoint.transfer.planning.transfer_plan import TransferPlan
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.torch_private import local_of, storage_id, version_of


class PlannedPart(NamedTuple):
    """What a rank must hold of a described tensor.

    Attributes:
        place: number of the tensor in its description.
        dtype, shape: of the whole tensor.
        numel: items of this rank's part.
    """

    place: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int


def parts_of(description: StateDescription, places: Iterable[int], rank: int) -> list[PlannedPart]:
    """What a rank must hold of tensors of a description, where it holds any."""
    found = []
    for place in places:
        position = description.holders_of(place).position(rank)
        if position is not None:
            entry, layouts = description.entries[place], description.structure.layouts
            region = description.distributions[place].region(entry.shape, position[0], layouts)
            found.append(PlannedPart(place, entry.name, dtype_named(entry.dtype), entry.shape, region.numel))
    return found


def local_parts(
    tensors: Mapping[str, torch.Tensor], parts: Sequence[PlannedPart], rank: int
) -> dict[int, torch.Tensor]:
    """This rank's parts of the tensors of a state, by their numbers.

    Raises:
        CheckpointError: if the state is not what was described.
    """
    found = {}
    for part in parts:
        tensor = tensors.get(part.name)
        local = None if tensor is None else local_of(tensor)
        if tensor is None or local is None:
            got = "no such tensor"
        elif (tensor.dtype, tensor.shape, local.numel()) == (part.dtype, part.shape, part.numel):
            found[part.place] = local.detach()
            continue
        else:
            got = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}, {local.numel()} items here"
        raise CheckpointError(
            "A state is not the one that was planned for.",
            expected=f"{dtype_name(part.dtype)} {part.shape}, {part.numel} items here",
            got=got,
            where=f"{part.name}, rank {rank}",
            todo="describe it again, and plan a new transfer",
        )
    return found


def _flat(local: torch.Tensor) -> torch.Tensor:
    """1D: a tensor's own memory where it can be, else a copy."""
    if local.is_conj() or local.is_neg() or not local.is_contiguous():
        local = local.resolve_conj().resolve_neg().contiguous()
    return local.as_strided((local.numel(),), (1,))


def _strided(
    flat: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], start: int
) -> torch.Tensor:
    return flat.as_strided(sizes, strides, flat.storage_offset() + start)


def _moved(flat: torch.Tensor) -> torch.Tensor:
    """Items under a dtype that every copy kernel knows."""
    return flat.view(carrier_of(flat.dtype))


_watches: weakref.WeakSet[SourceWatch] = weakref.WeakSet()
_watches_lock = Lock()


def _note_step(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    with _watches_lock:
        watches = list(_watches)
    if watches:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        stepped = {storage_id(local_of(param)) for param in params}
        for watch in watches:
            watch.is_stepped |= not stepped.isdisjoint(watch.storages)


@lru_cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_note_step)


class SourceWatch:
    """Detects writes to tensors since it was made, by whichever thread.

    Version counters alone miss the write that is under way: torch increments them after a kernel, for a fused
    optimizer after all of its tensors. So a step of an optimizer counts from its beginning.

    Args:
        tensors: DTensors are watched with their local tensors.

    Attributes:
        storages: ids of the watched memory.
        is_stepped: whether an optimizer of any of them has begun a step.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        tensors = list(tensors)
        watched = [item for tensor in tensors for item in (tensor, local_of(tensor))]
        self.storages = {storage_id(local_of(tensor)) for tensor in tensors}
        self.is_stepped = False
        with _watches_lock:
            _watch_optimizers()
            _watches.add(self)
        self._versions = [(item, version_of(item)) for item in watched if not item.is_inference()]

    def check(self) -> None:
        """Raise if something was written.

        Raises:
            CheckpointError: naming how many tensors changed.
        """
        changed = sum(version_of(tensor) != version for tensor, version in self._versions)
        if changed or self.is_stepped:
            raise CheckpointError(
                "The source was written to while it was sent.",
                expected="no optimizer step before the transfer has ended",
                got=f"{changed} of {len(self._versions)} tensors changed"
                + (", and an optimizer's step began" if self.is_stepped else ""),
                todo="wait for the handle first, or start with snapshot=True",
            )


class Origin:
    """What a rank reads of a source.

    Args:
        locals_by_place: by number in the source's description.
    """

    def __init__(self, plan: TransferPlan, locals_by_place: Mapping[int, torch.Tensor]) -> None:
        self._plan = plan
        self.flats = {place: _flat(local) for place, local in locals_by_place.items()}
        self.storages = {storage_id(local) for local in locals_by_place.values() if local.numel()}
        self.coded: dict[Key, CodedTensor] = {}
        self._scales: dict[tuple[Key, int], torch.Tensor] = {}

    @property
    def by_name(self) -> dict[str, torch.Tensor]:
        """1D items of each tensor that is read here, by name."""
        return {self._plan.source.entries[place].name: flat for place, flat in self.flats.items()}

    @property
    def devices(self) -> set[torch.device]:
        """Of the tensors that are read."""
        return {flat.device for flat in self.flats.values()}

    def _flat_of(self, share: Share, rank: int) -> torch.Tensor:
        source = self._plan.leaves[share.leaf].source
        if source.codec is None:
            return self.flats[source.place]
        key = (source.name, source.codec)
        known = self._scales.get((key, source.place))
        if known is None:
            position = source.holders.position(rank)
            assert position is not None
            known = self.coded[key].scales(source.regions(position[0]))
            self._scales[key, source.place] = known
        return known

    def run(self, share: Share, numel: int) -> torch.Tensor:
        """The bytes of so many items from a share's first one on, which lie as they travel."""
        flat = self.flats[self._plan.leaves[share.leaf].source.place]
        return flat[share.source : share.source + numel].view(torch.uint8)

    def pack(self, share: Share, out: torch.Tensor, rank: int) -> None:
        """Write a share's bytes as they travel; ``out`` is 1D uint8."""
        placed = self._plan.leaves[share.leaf]
        codec = placed.source.codec
        if codec is not None and not placed.source.is_scales:
            coded = self.coded[placed.source.name, codec]
            coded.encode(out.view(share.sizes), share.sizes, share.source_strides, share.source)
            return
        flat = self._flat_of(share, rank)
        box = share.sizes, share.source_strides, share.source
        if placed.narrowed:
            out.view(dtype_named(placed.wire_dtype)).view(share.sizes).copy_(_strided(flat, *box))
        else:
            moved = _moved(flat)
            out.view(moved.dtype).view(share.sizes).copy_(_strided(moved, *box))


class Destination:
    """What a rank fills of a target.

    Args:
        locals_by_place: by number in the target's description.
        keep_old: fill memory beside it, and bring it in at the end.
        beside: memory of an earlier transfer for that, by number; what is missing is added.
    """

    def __init__(
        self,
        plan: TransferPlan,
        locals_by_place: Mapping[int, torch.Tensor],
        *,
        keep_old: bool,
        beside: dict[int, torch.Tensor],
    ) -> None:
        self._plan = plan
        self._locals = locals_by_place
        self._keeps_old = keep_old
        self.is_mixed = not keep_old  # whether the target may hold some of the new weights
        self._flats: dict[int, torch.Tensor] = {}
        for place, local in locals_by_place.items():
            is_direct = local.is_contiguous() and not (local.is_conj() or local.is_neg())
            if is_direct and not keep_old:
                self._flats[place] = _flat(local)
                continue
            known = beside.get(place)
            if known is None:
                known = beside[place] = torch.empty(local.numel(), dtype=local.dtype, device=local.device)
            self._flats[place] = known

    @property
    def devices(self) -> set[torch.device]:
        """Of the tensors that are filled."""
        return {local.device for local in self._locals.values()}

    def prove_apart(self, origin: Origin) -> None:
        """That nothing is filled that is still to be read.

        Raises:
            CheckpointError: if a tensor of both states lies in one memory.
        """
        own = {storage_id(local) for local in self._locals.values() if local.numel()}
        if own & origin.storages and not self._keeps_old:
            raise CheckpointError(
                "Source and target share memory.",
                expected="tensors of their own on both sides",
                got=f"{len(own & origin.storages)} storages of both",
                todo="pass keep_old=True, which fills the target when all is read",
            )

    def run(self, share: Share, numel: int) -> torch.Tensor:
        """The memory of so many items from a share's first one on, which lie as they travel."""
        flat = self._flats[self._plan.leaves[share.leaf].target]
        return flat[share.target : share.target + numel].view(torch.uint8)

    def unpack(self, share: Share, data: torch.Tensor) -> None:
        """Bring a share's bytes where they belong."""
        wire, box = self._views(share, data)
        box.copy_(wire)

    def read_back(self, share: Share, out: torch.Tensor) -> None:
        """What was filled, as it travelled: the inverse of `unpack`."""
        wire, box = self._views(share, out)
        wire.copy_(box)

    def _views(self, share: Share, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        placed = self._plan.leaves[share.leaf]
        flat = self._flats[placed.target]
        if not placed.widened:
            flat = _moved(flat)
        dtype = dtype_named(placed.wire_dtype) if placed.widened else flat.dtype
        box = _strided(flat, share.sizes, share.target_strides, share.target)
        return data.view(dtype).view(share.sizes), box

    def commit(self) -> None:
        """Bring in what was filled beside the target."""
        self.is_mixed = True
        for place, local in self._locals.items():
            flat = self._flats[place]
            if flat.data_ptr() != local.data_ptr() and local.numel():
                _carried(local).copy_(_moved(flat).view(local.shape))

    def spoil(self) -> None:
        """Make a target that is filled in part unusable."""
        for local in self._locals.values() if self.is_mixed else ():
            if local.dtype == torch.bool:
                local.fill_(True)
            elif local.numel():
                ones = torch.full((local.dtype.itemsize,), 0xFF, dtype=torch.uint8, device=local.device)
                _carried(local).copy_(ones.view(carrier_of(local.dtype)))


def _carried(local: torch.Tensor) -> torch.Tensor:
    return local.view(carrier_of(local.dtype))
