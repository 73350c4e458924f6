"""Compare the replicas of tensors before a commit, by one all-reduce of a few numbers, while files are written.

Each replica of a tensor writes a share of the tensor. If replicas differed, the files would contain a mixture that
existed on no rank. Every rank therefore computes a digest of its replicas: byte sums of a strided sample or of all
elements.
The replicas of one region form a ring. Each replica adds a hash W of its digest d and its own number, and subtracts a
hash of its digest and the next replica's number.

    replica 0 of 2      + W(d0, 0) - W(d0, 1)
    replica 1 of 2      + W(d1, 1) - W(d1, 0)       the sum over all ranks and regions is 0 if d0 == d1

The comparison's part of the all-reduce has the same size for any number of ranks and tensors; the byte sums of tensors,
which are added up in it, take 16 bytes each. Only if the sum is not 0, ranks exchange more data to name tensors and
ranks. A sample takes 2 us per tensor and 2.5 us per MB: 1.1 ms for 10 tensors of 40 MB, 1.9 ms for
300 of 2 MB, 2.5 ms for 1,000 of 200 KB, 10 ms for 5,000 of 20 KB (minima of 15 runs on two shared cores).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from vescale_fsdp.byte_sums import pack_sums, run_sums
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.structure import Entry
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, carrier_of
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.tensor_sums import flat_parts, hex_sums, local_sums
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.storage.checksums import digest_of
from vescale_fsdp.errors import ArgumentError, CheckpointError, some
from vescale_fsdp.layout.geometry import Range, round_up

CheckReplicas = Literal["all", "sample", False]

# A sample has one element per 32 KiB of a tensor. More would take longer, because each element is a cache miss.
_BYTES_PER_ELEMENT = 32 << 10
_LEAST_ELEMENTS = 32  # minimum size of a sample; smaller tensors are compared as a whole
_NUM_WORDS = 4  # number of 32-bit words in a sum: one difference in 2**128 is not noticed
_MOD = 1 << 32  # words have 32 bits
_MAX_NAMED = 8  # maximum number of tensors for which an error names the ranks that differ


def check_choice(check_replicas: object) -> None:
    """Check a ``check_replicas`` argument.

    Raises:
        ValueError: if the value is not "all", "sample" or False.
    """
    if check_replicas is not False and check_replicas not in ("all", "sample"):
        raise ArgumentError(
            "check_replicas has an unknown value.",
            expected="check_replicas='all', 'sample' or False",
            got=repr(check_replicas),
            where="check_replicas=..",
        )


class _Replica(NamedTuple):
    """This rank's position in a ring of replicas.

    Attributes:
        kind: number of the sharding that all tensors of the ring share.
        coordinates: coordinates of the region that all ranks of the ring store.
        number, size: this replica's number in the ring, and the number of replicas.
    """

    kind: int
    coordinates: tuple[int, ...]
    number: int
    size: int

    def words(self, digest: bytes) -> list[int]:
        """Return the words that this rank adds to the sum over all ranks, modulo 2**32.

        Args:
            digest: digest of this rank's tensors in the ring.
        """
        # The ring's identity is hashed too, so that equal differences in two rings do not cancel out.
        ring = f"{self.kind} {self.coordinates} ".encode()
        own, following = (
            struct.unpack("<4I", digest_of(b"%s%d " % (ring, number) + digest))
            for number in (self.number, (self.number + 1) % self.size)
        )
        return [(plus - minus) % _MOD for plus, minus in zip(own, following, strict=True)]


def begin_comparison(
    plan: Callable[[], Manifest],
    locals_by_name: Mapping[str, torch.Tensor],
    coordinator: Coordinator,
    check_replicas: CheckReplicas,
    dropped: Callable[[Manifest], Collection[str]],
    *,
    most_sums: int = 0,
    threads: int = 1,
) -> Callable[[], tuple[str, ...]]:
    """Compute this rank's digests and start the comparison; a collective.

    The byte sums of all tensors (`tensor_sums`) are added up in the same all-reduce, if they are asked for.

    Args:
        plan: returns the manifest of the save.
        locals_by_name: name -> this rank's part of the tensor.
        dropped: returns the names of tensors that the save does not write.
        most_sums: a number of tensors that the manifest does not exceed, equal on all ranks; 0 to compute no sums. A
            rank that cannot compute the manifest then still takes part in an all-reduce of the right size.
        threads: number of threads that compute the sums of host tensors.

    Returns:
        A function that waits for the result and returns the sums of the manifest's tensors, if they were asked for. A
        collective, to be called before the commit. If replicas differ, the function raises `CheckpointError` on all
        ranks, with the names of tensors and ranks. If a rank failed to read its tensors, the function raises too: on
        that rank, the error of the read.
    """
    compares = bool(check_replicas) and coordinator.world_size > 1  # else no other rank has replicas
    if not compares and not most_sums:
        return lambda: ()
    error: BaseException | None = None
    words, sums = [0] * _NUM_WORDS, [0] * (2 * most_sums)
    replicas: _Replicas | None = None
    count = 0
    try:
        with gc_paused(), torch.no_grad():
            manifest = plan()
            if compares:
                replicas = _Replicas(
                    manifest, locals_by_name, coordinator.rank, check_replicas, dropped(manifest)
                )
                words = replicas.words()
            if most_sums:
                own = local_sums(manifest, locals_by_name, coordinator.rank, threads)
                count = len(own)
                sums[:count] = own
    except BaseException as caught:  # noqa: BLE001  raised in `finish`, since other ranks wait in the all-reduce
        error = caught
    arrive = coordinator.begin_sum([int(error is not None), *words, *sums])

    def finish() -> tuple[str, ...]:
        failed, *total = arrive()
        if failed:
            coordinator.raise_together(error, "comparing replicas")
        if any(word % _MOD for word in total[:_NUM_WORDS]):
            assert replicas is not None  # no rank has failed, so this rank has not either
            _raise_difference(replicas, coordinator)
        return hex_sums(total[_NUM_WORDS : _NUM_WORDS + count])

    return finish


class _Replicas:
    """This rank's tensors that other ranks have replicas of; computes their digests.

    Attributes:
        entries: all tensors that the save writes, in the same order on all ranks.
    """

    def __init__(
        self,
        manifest: Manifest,
        locals_by_name: Mapping[str, torch.Tensor],
        rank: int,
        check_replicas: CheckReplicas,
        dropped: Collection[str],
    ) -> None:
        self._locals_by_name = locals_by_name
        # Each save samples different elements, so that a small difference is detected by one of the next saves.
        self._phase = int(manifest.save_id, 16) >> 1  # one bit less, to fit in an int64
        self._samples = check_replicas == "sample"
        self.entries: list[Entry] = []  # the same on all ranks
        self._own: list[tuple[_Replica, list[int]]] = []  # this rank's rings, with indices into `entries`
        kinds: dict[tuple[int, int], list[int]] = {}
        skipped = frozenset(dropped)
        for number, (entry, holders) in enumerate(zip(manifest.entries, manifest.holders, strict=True)):
            if entry.name in skipped or not entry.numel:  # not written, or nothing to compare
                continue
            # Tensors with the same sharding share a ring, so that the digest is computed once for all of them.
            indices = kinds.get((holders, entry.axes))
            if indices is None:
                indices = kinds[holders, entry.axes] = []
                position = manifest.holders_of(number).position(rank)
                if position is not None and position[2] > 1:  # this rank has a replica, and there are several
                    self._own.append((_Replica(len(kinds), *position), indices))
            indices.append(len(self.entries))
            self.entries.append(entry)

    def words(self) -> list[int]:
        """Return the words that this rank adds to the sum; the sum is 0 if all replicas are equal."""
        total = [0] * _NUM_WORDS
        for replica, indices in self._own:
            own = replica.words(self._digest(indices))
            total = [(a + b) % _MOD for a, b in zip(total, own, strict=True)]
        return total

    def words_by_entry(self) -> list[int]:
        """Return one group of `words` for each of `entries`, concatenated."""
        all_words = [0] * (_NUM_WORDS * len(self.entries))
        for replica, indices in self._own:
            for index in indices:
                words = replica.words(self._digest([index]))
                all_words[_NUM_WORDS * index : _NUM_WORDS * (index + 1)] = words
        return all_words

    def digests(self, wanted: Collection[int]) -> dict[int, tuple[str, str]]:
        """Return index -> (ring, hex digest) of this rank's replicas, for the wanted indices of `entries`."""
        return {
            index: (f"{replica.coordinates}", self._digest([index]).hex())
            for replica, own in self._own
            for index in own
            if index in wanted
        }

    def _digest(self, indices: Sequence[int]) -> bytes:
        """Return one digest of several of this rank's tensors, in the given order."""
        tensors = [self._locals_by_name[self.entries[index].name] for index in indices]
        total, start = torch.zeros(2, dtype=torch.int64, device="cpu"), 0
        for raw in self._samples_of(tensors) if self._samples else chain.from_iterable(map(_bytes, tensors)):
            # One after the other, as the bytes of one tensor.
            total += run_sums(raw, start).cpu()
            start += round_up(raw.numel(), 8)  # whole words: odd runs would be copied
        return pack_sums(total)

    def _samples_of(self, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the bytes of samples of the tensors, those of one dtype together."""
        dtypes = [tensor.dtype for tensor in tensors]
        # `_sample` takes tensors of one dtype. A dict keeps the order of the entries, the same on all ranks.
        for dtype in dict.fromkeys(dtypes):
            alike = [tensor for tensor, own in zip(tensors, dtypes, strict=True) if own is dtype]
            yield torch.from_numpy(_sample(alike, self._phase).view(np.uint8))


def _bytes(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of all elements of a tensor, on its device."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    for raw, _ in flat_parts(plain, Range(0, plain.numel())):
        yield raw


class _Memory(NamedTuple):
    """A range of this process's memory, which numpy can read through the array interface. Does not keep it alive."""

    address: int  # address of the first item
    numel: int
    dtype: np.dtype[Any]

    @property
    def __array_interface__(self) -> dict[str, object]:
        is_read_only = True
        data = self.address, is_read_only
        return {"version": 3, "data": data, "shape": (self.numel,), "typestr": self.dtype.str}


def _sample(tensors: Sequence[torch.Tensor], phase: int) -> np.ndarray[Any, Any]:
    """Return the bits of every n-th element of each tensor, in row-major order, as a 1D array.

    All tensors must have the same dtype. Dense host tensors are read by their addresses, all in one numpy call, because
    creating a view of each tensor would take longer than reading the sample.
    """
    itemsize = tensors[0].itemsize
    numels = _of_each(torch.Tensor.numel, tensors, np.int64)
    if not numels.all():  # a region may be empty on this rank
        tensors = [tensor for tensor in tensors if tensor.numel()]
        numels = numels[numels > 0]
    steps = numels // np.maximum(_LEAST_ELEMENTS, numels * itemsize // _BYTES_PER_ELEMENT)
    # Odd, so that a sample reaches all columns even if rows have an even length.
    steps = np.maximum(1, steps) | 1
    # At most the last element, so that each tensor has at least one element in the sample.
    firsts = phase % np.minimum(steps, numels)
    counts = (numels - firsts + steps - 1) // steps
    addresses = _of_each(torch.Tensor.data_ptr, tensors, np.int64)
    # Aligned to items, because `_gathered` counts addresses in items.
    is_dense = _of_each(torch.Tensor.is_contiguous, tensors, np.bool_) & (addresses % itemsize == 0)
    is_dense &= _of_each(attrgetter("is_cpu"), tensors, np.bool_)
    # A lazy negation: memory has the opposite sign.
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
        _strided(tensors[index], int(firsts[index]), int(steps[index]))
        for index in np.flatnonzero(~is_dense).tolist()
    ]
    if len({view.device for view in views}) > 1:
        views = [view.cpu() for view in views]  # `torch.cat` needs one device
    # Joined on the device, so that one copy to the host is enough.
    sample[~is_gathered] = bytes_of(torch.cat(views).cpu()).numpy().view(sample.dtype)
    return sample


def _bits(itemsize: int) -> np.dtype[Any]:
    """Return a numpy dtype of this size for copying bits: an integer, or complex128 for 16 bytes."""
    return np.dtype(f"u{itemsize}" if itemsize <= 8 else f"c{itemsize}")


def _of_each(
    ask: Callable[[torch.Tensor], object], tensors: Sequence[torch.Tensor], dtype: type[np.generic]
) -> np.ndarray[Any, Any]:
    """Return the results of ``ask`` for each tensor."""
    return np.fromiter(map(ask, tensors), dtype, len(tensors))


def _gathered(
    addresses: np.ndarray[Any, Any],
    firsts: np.ndarray[Any, Any],
    steps: np.ndarray[Any, Any],
    counts: np.ndarray[Any, Any],
    itemsize: int,
) -> np.ndarray[Any, Any]:
    """Return elements ``firsts + k * steps``, for all ``k < counts``, of each of several dense tensors; 1D."""
    if not addresses.size:
        return np.empty(0, _bits(itemsize))
    lowest = int(addresses.min())
    starts = (addresses - lowest) // itemsize + firsts
    lasts = starts + (counts - 1) * steps
    # Indices into one array that spans all tensors are a running sum of strides: between the elements of a tensor, and
    # from the last element of a tensor to the first one of the next tensor.
    strides = np.repeat(steps, counts)
    strides[0] = starts[0]
    strides[np.cumsum(counts)[:-1]] = starts[1:] - lasts[:-1]
    memory = np.asarray(_Memory(lowest, int(lasts.max()) + 1, _bits(itemsize)))
    return memory[np.cumsum(strides)]


# Dtypes that torch indexes and concatenates bit by bit. Other dtypes are viewed as integers first, which costs time.
_COPIED_AS_THEY_ARE = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64})


def _strided(tensor: torch.Tensor, first: int, step: int) -> torch.Tensor:
    """Return every ``step``-th element from element ``first`` on, in row-major order, 1D, on the tensor's device."""
    if tensor.dtype not in _COPIED_AS_THEY_ARE:  # torch cannot index or concatenate some of these dtypes
        tensor = tensor.resolve_conj().resolve_neg()
        tensor = tensor.view(carrier_of(tensor.dtype))
    numel = tensor.numel()
    if tensor.is_contiguous():
        picked = tensor.as_strided(
            ((numel - first + step - 1) // step,), (step,), tensor.storage_offset() + first
        )
    else:
        indices = np.unravel_index(np.arange(first, numel, step), tuple(tensor.shape))
        picked = tensor[tuple(torch.from_numpy(index).to(tensor.device) for index in indices)].view(-1)
    return picked.resolve_neg()


def _raise_difference(replicas: _Replicas, coordinator: Coordinator) -> None:
    """Find the tensors that differ and their ranks, and raise the same error on all ranks; a collective."""
    doing = "comparing replicas"
    words: list[int] = []
    with coordinator.together(doing), torch.no_grad():
        words = replicas.words_by_entry()
    total = coordinator.begin_sum(words)()
    differing = [
        index
        for index in range(len(replicas.entries))
        if any(word % _MOD for word in total[_NUM_WORDS * index : _NUM_WORDS * (index + 1)])
    ]
    named = differing[:_MAX_NAMED]
    own: dict[int, tuple[str, str]] = {}
    with coordinator.together(doing), torch.no_grad():
        own = replicas.digests(named)
    everyone = coordinator.everyone(own)
    names = [replicas.entries[index].label for index in differing]
    differences = map(partial(_format_difference, everyone=everyone), named)
    raise CheckpointError(
        "Replicas of a tensor differ between ranks.",
        expected="the same values on all ranks that have the same part of a tensor",
        # Not strict: `differences` contains only the first `_MAX_NAMED` tensors.
        got="; ".join(f"{name}: {text}" for name, text in zip(names, differences, strict=False)),
        where=some(names, _MAX_NAMED),
        todo="nothing was committed. Give all replicas the same values (the same seed before sharding, a broadcast, an "
        "all-reduce of gradients); put values that differ on purpose into the state as PerRank(value). "
        "check_replicas=False stores a mixture without comparing",
    )


def _format_difference(index: int, everyone: Sequence[Mapping[int, tuple[str, str]]]) -> str:
    """Return, as text, the groups of ranks with equal values, for the first region of a tensor where ranks differ.

    Args:
        index: index of the tensor in `_Replicas.entries`.
        everyone: for each rank, the result of `_Replicas.digests`.
    """
    rings: dict[str, dict[str, list[int]]] = {}
    for rank, digests_of_rank in enumerate(everyone):
        if index in digests_of_rank:
            ring, digest = digests_of_rank[index]
            rings.setdefault(ring, {}).setdefault(digest, []).append(rank)
    groups = next((list(digests.values()) for digests in rings.values() if len(digests) > 1), [])
    return " differs from ".join(f"ranks {ranks[:8]}" for ranks in groups[:4])
