"""Comparison of replicas before a commit: one all-reduce of a few numbers, while files are written.

Each replica of a tensor writes a share of it. If replicas differed, the file would mix their values into a tensor that
existed on no rank. So every rank computes a digest of its replicas, of a strided sample or of all elements, on the
tensor's device. The replicas of one region form a ring: each adds a hash of its digest under its own number, and
subtracts one under the number of the next replica.

    replica 0 of 2      + W(d0, 0) - W(d0, 1)
    replica 1 of 2      + W(d1, 1) - W(d1, 0)       the sum over all ranks and places is 0 if d0 == d1

So the message has the same size for any number of ranks and tensors. Only if the sum is not 0, ranks exchange more, to
name tensors and ranks. A sample takes 2 us per tensor and 2.5 us per MB: 1.1 ms for 10 tensors of 40 MB, 1.9 ms for
300 of 2 MB, 2.5 ms for 1,000 of 200 KB, 10 ms for 5,000 of 20 KB (minima of 15 runs on two shared cores).
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

# A sample has one element per 32 KiB of a tensor. Each element is a cache miss.
_BYTES_PER_ELEMENT = 32 << 10
_LEAST_ELEMENTS = 32  # of a sample; smaller tensors are compared whole
_CHUNK_BYTES = 16 << 20  # 16 MiB: for "all", tensors are copied to the host in pieces of this size
_NUM_WORDS = 4  # words of 32 bits in a sum: a difference goes unnoticed once in 2**128
_MOD = 1 << 32  # of the words
_MAX_NAMED = 8  # tensors whose ranks an error names


def check_choice(check_replicas: object) -> None:
    """Check the value of ``check_replicas``.

    Raises:
        ValueError: for any other value than "all", "sample" and False.
    """
    if check_replicas is not False and check_replicas not in ("all", "sample"):
        raise ArgumentError(
            "There is no such way to compare replicas.",
            expected="check_replicas='all', 'sample' or False",
            got=repr(check_replicas),
        )


class _Replica(NamedTuple):
    """This rank's place in a ring.

    Attributes:
        kind: number of the distribution that the ring's tensors have.
        coordinates: of the region that the ring's ranks store.
        number, size: the replica's number in the ring, and the number of replicas.
    """

    kind: int
    coordinates: tuple[int, ...]
    number: int
    size: int

    def words(self, digest: bytes) -> list[int]:
        """The words that this rank adds to the sum over all ranks, modulo 2**32."""
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
    """Compute this rank's digests and start the comparison; a collective.

    Args:
        plan: returns the manifest of the save.
        locals_by_name: this rank's tensors.
        left_out: returns the names of tensors that the save does not write.

    Returns:
        A function that waits for the result: a collective, called before the commit. It raises `CheckpointError` on
        all ranks if replicas differ, with tensors and ranks. A rank that could not read its tensors raises that error.
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
    """The tensors of which a rank has a replica."""

    def __init__(
        self,
        manifest: Manifest,
        locals_by_name: Mapping[str, torch.Tensor],
        rank: int,
        check_replicas: CheckReplicas,
        left_out: Collection[str],
    ) -> None:
        self._locals_by_name = locals_by_name
        # Each save samples other elements, so that a small difference is noticed sooner or later.
        self._phase = int(manifest.save_id, 16) >> 1  # as int64
        self._samples = check_replicas == "sample"
        self.entries: list[Entry] = []  # the same on all ranks
        self._own: list[tuple[_Replica, list[int]]] = []  # this rank's rings, with indices into `entries`
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
        """The words that this rank adds to the sum, which is 0 if all replicas are equal."""
        total = [0] * _NUM_WORDS
        for replica, places in self._own:
            own = replica.words(self._digest(places))
            total = [(a + b) % _MOD for a, b in zip(total, own, strict=True)]
        return total

    def words_by_entry(self) -> list[int]:
        """As `words`, for each of `entries` alone, one after the other."""
        all_words = [0] * (_NUM_WORDS * len(self.entries))
        for replica, places in self._own:
            for place in places:
                words = replica.words(self._digest([place]))
                all_words[_NUM_WORDS * place : _NUM_WORDS * (place + 1)] = words
        return all_words

    def digests(self, places: Collection[int]) -> dict[int, tuple[str, str]]:
        """The ring and the hex digest of this rank's replica, for those of the given entries that it replicates."""
        return {
            place: (f"{replica.coordinates}", self._digest([place]).hex())
            for replica, own in self._own
            for place in own
            if place in places
        }

    def _digest(self, places: Sequence[int]) -> bytes:
        """The digest of several tensors of this rank, in their order."""
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
    """A range of this process's memory as numpy's array interface; it keeps no tensor alive."""

    address: int  # of the first one, in bytes
    numel: int
    dtype: np.dtype[Any]

    @property
    def __array_interface__(self) -> dict[str, object]:
        is_read_only = True
        data = self.address, is_read_only
        return {"version": 3, "data": data, "shape": (self.numel,), "typestr": self.dtype.str}


def _sample(tensors: Sequence[torch.Tensor], phase: int) -> np.ndarray[Any, Any]:
    """The bits of every n-th element of each tensor, in row-major order, 1D. All tensors have one dtype.

    Dense host tensors are read by their addresses, all in one call: making a view of each takes longer than reading.
    """
    itemsize = tensors[0].itemsize
    numels = _of_each(torch.Tensor.numel, tensors, np.int64)
    if not numels.all():  # a region may be empty on this rank
        tensors = [tensor for tensor in tensors if tensor.numel()]
        numels = numels[numels > 0]
    steps = numels // np.maximum(_LEAST_ELEMENTS, numels * itemsize // _BYTES_PER_ELEMENT)
    steps = np.maximum(1, steps) | 1  # odd, so that samples of rows of even length reach all columns
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
    sample = np.empty(counts.sum(), _bits(itemsize))
    is_gathered = np.repeat(is_dense, counts)
    sample[is_gathered] = _gathered(
        addresses[is_dense], firsts[is_dense], steps[is_dense], counts[is_dense], itemsize
    )
    views = [
        _strided(tensors[place], int(firsts[place]), int(steps[place]))
        for place in np.flatnonzero(~is_dense).tolist()
    ]
    if len({view.device for view in views}) > 1:
        views = [view.cpu() for view in views]
    # Joined on the device, so that there is one copy to the host.
    sample[~is_gathered] = bytes_of(torch.cat(views).cpu()).numpy().view(sample.dtype)
    return sample


def _bits(itemsize: int) -> np.dtype[Any]:
    """A numpy dtype of that size whose items are only copied; numpy has no integers of 16 bytes."""
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
    # One running sum over all tensors: each stride leads to the next element, also from a tensor to the next one.
    strides = np.repeat(steps, counts)
    strides[0] = starts[0]
    strides[np.cumsum(counts)[:-1]] = starts[1:] - lasts[:-1]
    memory = np.asarray(_Memory(lowest, int(lasts.max()) + 1, _bits(itemsize)))
    return memory[np.cumsum(strides)]


# Dtypes whose bits `torch.cat` copies unchanged; others are viewed as integers, at some cost for each tensor.
_COPIED_AS_THEY_ARE = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64})


def _strided(tensor: torch.Tensor, first: int, step: int) -> torch.Tensor:
    """Every ``step``-th element from element ``first`` on, in row-major order, on the tensor's device; 1D."""
    if tensor.dtype not in _COPIED_AS_THEY_ARE:  # torch cannot index and join tensors of some other dtypes
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
    """A whole tensor in contiguous pieces; tensors with gaps are copied some rows at a time."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        # Host memory is hashed where it is.
        size = flat.numel() if tensor.device.type == "cpu" else _CHUNK_BYTES // tensor.itemsize
        yield from map(dense, flat.split(size))
    else:
        row_numel = max(1, tensor.numel() // tensor.shape[0])
        yield from map(dense, tensor.split(max(1, _CHUNK_BYTES // tensor.itemsize // row_numel)))


def _raise_difference(replicas: _Replicas, coordinator: Coordinator) -> None:
    """Find the tensors that differ and their ranks, and raise the same error on all ranks."""
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
    differences = map(partial(_format_difference, everyone=everyone), named)
    raise CheckpointError(
        "Replicas of a tensor differ between ranks.",
        expected="the same values on all ranks that have the same part of a tensor",
        # Not strict: only the first tensors are described.
        got="; ".join(f"{name}: {text}" for name, text in zip(names, differences, strict=False)),
        where=some(names, _MAX_NAMED),
        todo="nothing was committed. Give all replicas the same values (the same seed before sharding, a broadcast, an "
        "all-reduce of gradients); put values that differ on purpose into the state as PerRank(value). "
        "check_replicas=False stores a mixture without comparing",
    )


def _format_difference(place: int, everyone: Sequence[Mapping[int, tuple[str, str]]]) -> str:
    """The groups of ranks with equal values, for the first region of a tensor with several groups."""
    rings: dict[str, dict[str, list[int]]] = {}
    for rank, of_rank in enumerate(everyone):
        if place in of_rank:
            ring, digest = of_rank[place]
            rings.setdefault(ring, {}).setdefault(digest, []).append(rank)
    groups = next((list(digests.values()) for digests in rings.values() if len(digests) > 1), [])
    return " differs from ".join(f"ranks {ranks[:8]}" for ranks in groups[:4])
