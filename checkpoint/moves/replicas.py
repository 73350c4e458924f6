"""Whether replicas hold the same bits, compared before a commit: one all-reduce of a few numbers, behind the writing.

Replicas share the writing of a tensor, so replicas that differ would be stored as parts of each: a tensor that no
rank has ever held. Every rank digests what it replicates, a strided sample or all of it, where the tensor is. The
replicas of one region form a ring: each adds its digest under its own number and subtracts it under the next one's.

    replica 0 of 2      + W(d0, 0) - W(d0, 1)
    replica 1 of 2      + W(d1, 1) - W(d1, 0)       the sum over all ranks and places is 0 if d0 == d1

So the numbers do not grow with ranks or tensors. Only where the sum is not 0 is more exchanged: to name tensors and
ranks. A sample costs a thread 2 us per tensor and 2.5 us per MB: 1.1 ms beside a save of 10 tensors of 40 MB, 1.9 ms of
300 of 2 MB, 2.5 ms of 1,000 of 200 KB, 10 ms of 5,000 of 20 KB (minima of 15 runs on two shared cores).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.structure import Entry
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, carrier_of, dense
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.storage.checksums import RunningDigest, digest_of
from vescale_fsdp.errors import ArgumentError, CheckpointError, some

CheckReplicas = Literal["all", "sample", False]

_BYTES_PER_ELEMENT = (
    32 << 10
)  # 32 KiB of a tensor to one element of its sample: each costs a miss of the caches
_LEAST_ELEMENTS = 32  # of a tensor's sample; smaller tensors are compared whole
_CHUNK_BYTES = 16 << 20  # 16 MiB of a tensor at a time are copied to the host for "all"
_NUM_WORDS = 4
_MOD = 1 << 32
_MAX_NAMED = 8  # tensors whose ranks an error names


def check_choice(check_replicas: object) -> None:
    """Refuse a value of ``check_replicas`` that does not exist.

    Raises:
        ValueError: naming those that do.
    """
    if check_replicas is not False and check_replicas not in ("all", "sample"):
        raise ArgumentError(
            "There is no such way to compare replicas.",
            expected="check_replicas='all', 'sample' or False",
            got=repr(check_replicas),
        )


class _Replica(NamedTuple):
    """This rank's part in a ring.

    Attributes:
        kind: number of the tensors' distribution.
        coordinates: of the region that the ring's ranks hold.
        number, size: which replica, and of how many.
    """

    kind: int
    coordinates: tuple[int, ...]
    number: int
    size: int

    def words(self, digest: bytes) -> list[int]:
        """What this rank adds to the sum over all ranks, each modulo 2**32."""
        place = f"{self.kind} {self.coordinates} ".encode()
        own, following = (
            struct.unpack("<4I", digest_of(b"%s%d " % (place, number) + digest))
            for number in (self.number, (self.number + 1) % self.size)
        )
        return [(plus - minus) % _MOD for plus, minus in zip(own, following, strict=True)]


def begin_comparison(
    plan: Callable[[], Manifest],
    locals_by_name: Mapping[str, torch.Tensor],
    coordinator: Coordinator,
    check_replicas: CheckReplicas,
    left_out: Callable[[Manifest], Collection[str]],
) -> Callable[[], None]:
    """Digest what this rank replicates and start to compare; what is returned waits, and raises. A collective.

    Args:
        plan: gives what the save writes.
        locals_by_name: this rank's tensors.
        left_out: names of tensors that the save does not write.

    Returns:
        To be called on all ranks together, before the commit. Raises `CheckpointError` on all of them if replicas
        differ, naming tensors and ranks; a rank that could not read its tensors raises what it met.
    """
    if not check_replicas or coordinator.world_size == 1:
        return lambda: None
    error: BaseException | None = None
    words = [0] * _NUM_WORDS
    replicas: _Replicas | None = None
    try:
        with gc_paused(), torch.no_grad():
            manifest = plan()
            replicas = _Replicas(
                manifest, locals_by_name, coordinator.rank, check_replicas, left_out(manifest)
            )
            words = replicas.words()
    except BaseException as caught:  # noqa: BLE001  the other ranks wait for this one's numbers
        error = caught
    arrive = coordinator.begin_sum([int(error is not None), *words])

    def finish() -> None:
        failed, *total = arrive()
        if failed:
            coordinator.raise_together(error, "comparing replicas")
        if any(word % _MOD for word in total):
            assert replicas is not None
            _raise_difference(replicas, coordinator)

    return finish


class _Replicas:
    """The tensors of which a rank holds a replica."""

    def __init__(
        self,
        manifest: Manifest,
        locals_by_name: Mapping[str, torch.Tensor],
        rank: int,
        check_replicas: CheckReplicas,
        left_out: Collection[str],
    ) -> None:
        self._locals_by_name = locals_by_name
        # Another save looks at other elements, so that a small difference is not missed for ever.
        self._phase = int(manifest.save_id, 16) >> 1  # as int64
        self._samples = check_replicas == "sample"
        self.entries: list[Entry] = []  # the same on all ranks
        self._own: list[tuple[_Replica, list[int]]] = []  # this rank's: places in `entries`
        kinds: dict[tuple[int, int], list[int]] = {}
        skipped = frozenset(left_out)
        for place, (entry, holders) in enumerate(zip(manifest.entries, manifest.holders, strict=True)):
            if entry.name in skipped or not entry.numel:
                continue
            places = kinds.get((holders, entry.axes))
            if places is None:
                places = kinds[holders, entry.axes] = []
                position = manifest.holders_of(place).position(rank)
                if position is not None and position[2] > 1:
                    self._own.append((_Replica(len(kinds), *position), places))
            places.append(len(self.entries))
            self.entries.append(entry)

    def words(self) -> list[int]:
        """What this rank adds to the sum that is 0 where all replicas are alike."""
        total = [0] * _NUM_WORDS
        for replica, places in self._own:
            own = replica.words(self._digest(places))
            total = [(a + b) % _MOD for a, b in zip(total, own, strict=True)]
        return total

    def words_by_entry(self) -> list[int]:
        """The same for each of `entries` by itself, one after the other."""
        found = [0] * (_NUM_WORDS * len(self.entries))
        for replica, places in self._own:
            for place in places:
                words = replica.words(self._digest([place]))
                found[_NUM_WORDS * place : _NUM_WORDS * (place + 1)] = words
        return found

    def digests(self, places: Collection[int]) -> dict[int, tuple[str, str]]:
        """Of some of `entries`, as far as this rank holds a replica: which ring, and the digest in hex."""
        return {
            place: (f"{replica.coordinates}", self._digest([place]).hex())
            for replica, own in self._own
            for place in own
            if place in places
        }

    def _digest(self, places: Sequence[int]) -> bytes:
        """Of several tensors of this rank, in their order."""
        tensors = [self._locals_by_name[self.entries[place].name] for place in places]
        hasher = RunningDigest()
        if self._samples:
            dtypes = [tensor.dtype for tensor in tensors]
            for dtype in dict.fromkeys(dtypes):
                alike = [tensor for tensor, own in zip(tensors, dtypes, strict=True) if own is dtype]
                hasher.update(_sample(alike, self._phase).data)
        else:
            for part in (part for tensor in tensors if tensor.numel() for part in _chunks(tensor)):
                hasher.update(bytes_of(part).numpy().data)
        return hasher.digest()


class _Memory(NamedTuple):
    """Items of this process's memory, as ``numpy.asarray`` takes them; it keeps nothing alive."""

    address: int  # of the first one, in bytes
    numel: int
    dtype: np.dtype[Any]

    @property
    def __array_interface__(self) -> dict[str, object]:
        is_read_only = True
        data = self.address, is_read_only
        return {"version": 3, "data": data, "shape": (self.numel,), "typestr": self.dtype.str}


def _sample(tensors: Sequence[torch.Tensor], phase: int) -> np.ndarray[Any, Any]:
    """Bits of elements of each of some tensors of one dtype, at equal distances in row-major order; 1D.

    Dense host tensors are read by their addresses, all in one call, since a view of each takes longer than the reading.
    """
    itemsize = tensors[0].itemsize
    numels = _of_each(torch.Tensor.numel, tensors, np.int64)
    if not numels.all():  # of regions that are empty here
        tensors = [tensor for tensor in tensors if tensor.numel()]
        numels = numels[numels > 0]
    steps = numels // np.maximum(_LEAST_ELEMENTS, numels * itemsize // _BYTES_PER_ELEMENT)
    steps = np.maximum(1, steps) | 1  # odd: rows of an even length are looked at in all columns in turn
    firsts = phase % np.minimum(steps, numels)
    counts = (numels - firsts + steps - 1) // steps
    addresses = _of_each(torch.Tensor.data_ptr, tensors, np.int64)
    is_dense = _of_each(torch.Tensor.is_contiguous, tensors, np.bool_) & (addresses % itemsize == 0)
    is_dense &= _of_each(attrgetter("is_cpu"), tensors, np.bool_)
    is_dense &= ~_of_each(torch.Tensor.is_neg, tensors, np.bool_)
    if tensors and tensors[0].is_complex():
        is_dense &= ~_of_each(torch.Tensor.is_conj, tensors, np.bool_)
    if is_dense.all():
        return _gathered(addresses, firsts, steps, counts, itemsize)
    found = np.empty(counts.sum(), _bits(itemsize))
    is_gathered = np.repeat(is_dense, counts)
    found[is_gathered] = _gathered(
        addresses[is_dense], firsts[is_dense], steps[is_dense], counts[is_dense], itemsize
    )
    views = [
        _strided(tensors[place], int(firsts[place]), int(steps[place]))
        for place in np.flatnonzero(~is_dense).tolist()
    ]
    if len({view.device for view in views}) > 1:
        views = [view.cpu() for view in views]
    found[~is_gathered] = bytes_of(torch.cat(views).cpu()).numpy().view(found.dtype)  # one copy from a device
    return found


def _bits(itemsize: int) -> np.dtype[Any]:
    return np.dtype(f"u{itemsize}" if itemsize <= 8 else f"c{itemsize}")


def _of_each(
    ask: Callable[[torch.Tensor], object], tensors: Sequence[torch.Tensor], dtype: type[np.generic]
) -> np.ndarray[Any, Any]:
    return np.fromiter(map(ask, tensors), dtype, len(tensors))


def _gathered(
    addresses: np.ndarray[Any, Any],
    firsts: np.ndarray[Any, Any],
    steps: np.ndarray[Any, Any],
    counts: np.ndarray[Any, Any],
    itemsize: int,
) -> np.ndarray[Any, Any]:
    """Elements ``firsts + k * steps`` with ``k < counts`` of each of several dense tensors; 1D."""
    if not addresses.size:
        return np.empty(0, _bits(itemsize))
    lowest = int(addresses.min())
    starts = (addresses - lowest) // itemsize + firsts
    lasts = starts + (counts - 1) * steps
    strides = np.repeat(steps, counts)  # from each element to the next one, here and in the next tensor
    strides[0] = starts[0]
    strides[np.cumsum(counts)[:-1]] = starts[1:] - lasts[:-1]
    memory = np.asarray(_Memory(lowest, int(lasts.max()) + 1, _bits(itemsize)))
    return memory[np.cumsum(strides)]


# Dtypes whose bits `torch.cat` copies unchanged; others are viewed as integers, at some cost for each tensor.
_COPIED_AS_THEY_ARE = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64})


def _strided(tensor: torch.Tensor, first: int, step: int) -> torch.Tensor:
    """Every ``step``-th element from the first one on, in row-major order, where the tensor is; 1D."""
    if (
        tensor.dtype not in _COPIED_AS_THEY_ARE
    ):  # torch indexes and joins no tensors of some of the other dtypes
        tensor = tensor.resolve_conj().resolve_neg()
        tensor = tensor.view(carrier_of(tensor.dtype))
    numel = tensor.numel()
    if tensor.is_contiguous():
        picked = tensor.as_strided(
            ((numel - first + step - 1) // step,), (step,), tensor.storage_offset() + first
        )
    else:
        places = np.unravel_index(np.arange(first, numel, step), tuple(tensor.shape))
        picked = tensor[tuple(torch.from_numpy(index).to(tensor.device) for index in places)].view(-1)
    return picked.resolve_neg()


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """All of a tensor in CPU memory, contiguous, row by row where it must be copied."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        size = flat.numel() if tensor.device.type == "cpu" else _CHUNK_BYTES // tensor.itemsize
        yield from map(dense, flat.split(size))
    else:
        row_numel = max(1, tensor.numel() // tensor.shape[0])
        yield from map(dense, tensor.split(max(1, _CHUNK_BYTES // tensor.itemsize // row_numel)))


def _raise_difference(replicas: _Replicas, coordinator: Coordinator) -> None:
    """Find out which tensors differ, and between which ranks; raise alike on all ranks."""
    doing = "comparing replicas"
    words: list[int] = []
    with coordinator.together(doing), torch.no_grad():
        words = replicas.words_by_entry()
    total = coordinator.begin_sum(words)()
    places = [
        place
        for place in range(len(replicas.entries))
        if any(word % _MOD for word in total[_NUM_WORDS * place : _NUM_WORDS * (place + 1)])
    ]
    named = places[:_MAX_NAMED]
    own: dict[int, tuple[str, str]] = {}
    with coordinator.together(doing), torch.no_grad():
        own = replicas.digests(named)
    everyone = coordinator.everyone(own)
    names = [replicas.entries[place].label for place in places]
    said = map(partial(_said_of, everyone=everyone), named)
    raise CheckpointError(
        "Replicas of a tensor differ between ranks.",
        expected="the same values on all ranks that hold the same part of a tensor",
        got="; ".join(f"{name}: {text}" for name, text in zip(names, said, strict=False)),
        where=some(names, _MAX_NAMED),
        todo="nothing was committed. Give all replicas the same values (the same seed before sharding, a broadcast, an "
        "all-reduce of gradients); what is meant to differ goes into the state as PerRank(value). "
        "check_replicas=False stores parts of each without comparing them",
    )


def _said_of(place: int, everyone: Sequence[Mapping[int, tuple[str, str]]]) -> str:
    """Which ranks hold which values of a tensor, of the first region of which there are several."""
    rings: dict[str, dict[str, list[int]]] = {}
    for rank, digests in enumerate(everyone):
        if place in digests:
            ring, digest = digests[place]
            rings.setdefault(ring, {}).setdefault(digest, []).append(rank)
    groups = next((list(found.values()) for found in rings.values() if len(found) > 1), [])
    return " differs from ".join(f"ranks {ranks[:8]}" for ranks in groups[:4])
