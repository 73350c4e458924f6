"""Data positions that can be restored on another number of ranks: `ReshardableSampler` and `ReshardableLoader`.

    sampler = ReshardableSampler(len(dataset), seed=1)
    loader = ReshardableLoader(DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=4))
    state = {.., "data": Resharded(loader)}

Every sample of an epoch is used once. Seed and epoch determine the order of the samples, and ranks take samples in
turns. After a restart on another number of ranks, the new ranks take turns at the remaining samples. The number of
samples that each earlier rank had taken determines the remaining ones. The state therefore has one list of numbers per
restart, a *stage*:

    order             7 2 5 0 3 6 1 4     2 ranks: 7 5 3 1 and 2 0 6 4
    taken             7 5 | 2             stages [[2, 1]]
    remaining         0 3 6 1 4           3 ranks: 0 1, 3 4 and 6

At the end of an epoch some ranks may already be in the next epoch. The merged state is then that of the oldest epoch;
its entry ``ahead`` has the stages of later epochs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from vescale_fsdp.errors import ArgumentError, CheckpointError

T = TypeVar("T")
_CHUNK = 4096  # indices converted to Python ints at a time: a list of a whole epoch would need much memory
_ALIKE = ("num_samples", "shuffle", "seed", "drop_last")  # settings that must be equal on all ranks


class ReshardableSampler(Sampler[int]):
    """A sampler of this rank's share of each epoch, for a `DataLoader`. Save it as `Resharded`.

    An iteration continues where the previous one stopped; after the last sample the next epoch begins. If a state is
    loaded during an iteration, the iterator continues from that state. Samples that a data loader's workers read ahead
    count as taken: with workers, wrap the loader in a `ReshardableLoader`, and save the `ReshardableLoader` instead.

    Args:
        num_samples: number of samples in the data set.
        shuffle: whether every epoch has its own random order; otherwise samples are in the order of the data set.
        seed: seed of the random orders; the same on all ranks.
        drop_last: drop up to ``world_size - 1`` samples of an epoch, so that all ranks have the same number; otherwise
            some ranks have one sample more.
        rank, world_size: default: the rank and world size of `torch.distributed`, read again when a state is loaded.

    Attributes:
        generation: counter that increases when a loaded state, a new epoch or a change of ranks moves the position.

    Examples:
        >>> list(ReshardableSampler(5, shuffle=False, rank=1, world_size=2))
        [1, 3]
    """

    def __init__(
        self,
        num_samples: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._given = rank, world_size
        self.rank, self.world_size = self._ranks_now()
        if num_samples < 0 or not 0 <= self.rank < self.world_size:
            raise ArgumentError(
                "A sampler needs a number of samples, and a rank in its world.",
                expected="num_samples >= 0 and 0 <= rank < world_size",
                got=f"{num_samples}, {self.rank}, {self.world_size}",
                where="ReshardableSampler(num_samples=.., rank=.., world_size=..)",
            )
        self._settings = {
            "num_samples": num_samples,
            "shuffle": shuffle,
            "seed": seed,
            "drop_last": drop_last,
        }
        self.epoch = 0
        # For each earlier set of ranks, the number of samples of each rank.
        self._stages: list[list[int]] = []
        # The later epochs that some saved ranks had begun, each with its stages.
        self._ahead: list[tuple[int, list[list[int]]]] = []
        self.num_taken = 0
        self.has_ended = False
        self.generation = 0

    def _ranks_now(self) -> tuple[int, int]:
        """Return the rank and the world size: as given, or else those of `torch.distributed`."""
        is_alone = not (dist.is_available() and dist.is_initialized())
        rank, world_size = self._given
        return (
            rank if rank is not None else 0 if is_alone else dist.get_rank(),
            world_size if world_size is not None else 1 if is_alone else dist.get_world_size(),
        )

    def renew(self, rank: int, world_size: int) -> None:
        """Become the sampler of another rank, at the start of epoch 0; `load_state_dict` then sets the position.

        `ElasticJob` calls this for the samplers in `Resharded` values when the ranks of the job change.
        """
        # Otherwise `load_state_dict` reads them from `torch.distributed` again.
        if self._given != (None, None):
            self._given = rank, world_size
        self.rank, self.world_size = rank, world_size
        self.epoch, self._stages, self.num_taken, self.has_ended = 0, [], 0, False
        self._ahead = []
        self.generation += 1

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it is the current one."""
        if epoch != self.epoch:
            # Before a restart, some ranks may have begun the epoch: their samples are not taken again.
            self._stages = dict(self._ahead).get(epoch, [])
            self._ahead = [(later, stages) for later, stages in self._ahead if later > epoch]
            self.epoch, self.num_taken, self.has_ended = epoch, 0, False
            self.generation += 1

    def begin(self) -> None:
        """Begin the next epoch if the current epoch has ended."""
        if self.has_ended:
            self.set_epoch(self.epoch + 1)

    def __iter__(self) -> Iterator[int]:
        self.begin()
        generation = -1
        while generation != self.generation:  # a loaded state or a change of ranks ends `_rest` early
            generation = self.generation
            yield from self._rest(generation)
        self.has_ended = True

    def _rest(self, generation: int) -> Iterator[int]:
        """Yield this rank's samples from its position on, until `generation` changes."""
        own = self._own()
        for start in range(self.num_taken, len(own), _CHUNK):
            for sample in own[start : start + _CHUNK].tolist():
                self.num_taken += 1  # before the yield: if the caller saves now, the sample counts as taken
                yield sample
                if generation != self.generation:
                    return

    def __len__(self) -> int:
        """Return the number of this rank's remaining samples."""
        return len(self._own()) - self.num_taken

    def _own(self) -> torch.Tensor:
        """Return the 1D indices of this rank's samples since the last change of ranks, taken or not."""
        # The factor keeps the orders of adjacent seeds different for a million epochs.
        count, epoch_seed = self._settings["num_samples"], self._settings["seed"] * 1_000_003 + self.epoch
        # The range that `manual_seed` accepts; a user may pass torch.initial_seed(), which has up to 64 bits.
        if not -(2**63) <= epoch_seed < 2**64:
            epoch_seed %= 2**64
        order = torch.arange(count, dtype=torch.int64, device="cpu")
        if self._settings["shuffle"]:
            # An own generator, so that the order does not depend on the global random state.
            generator = torch.Generator("cpu").manual_seed(epoch_seed)
            order = torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu")
        for taken in self._stages:
            order = order[_is_remaining(len(order), taken)]
        stop = len(order) // self.world_size * self.world_size if self._settings["drop_last"] else len(order)
        return order[self.rank : stop : self.world_size]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position."""
        return self.state_at(self.num_taken, has_ended=self.has_ended)

    def state_at(self, num_taken: int, *, has_ended: bool) -> dict[str, Any]:
        """Return the state that this rank has after ``num_taken`` samples."""
        return {
            **self._settings,
            "epoch": self.epoch,
            "stages": self._stages,
            "has_ended": has_ended,
            "ahead": [[epoch, stages] for epoch, stages in self._ahead],
            "num_taken": num_taken,
            "rank": self.rank,
            "world_size": self.world_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
            CheckpointError: if the state is from a sampler with other settings, or from another rank.
        """
        self.rank, self.world_size = self._ranks_now()
        expected = {**self._settings, "rank": self.rank, "world_size": self.world_size}
        unlike = {key: state[key] for key in expected if state[key] != expected[key]}
        if unlike:
            raise CheckpointError(
                "The state belongs to another sampler.",
                expected=", ".join(f"{key}={expected[key]}" for key in unlike),
                got=", ".join(f"{key}={value}" for key, value in unlike.items()),
                todo="create the sampler with the same arguments as the saved one; if the number of ranks may change, "
                "save Resharded(sampler)",
            )
        self.epoch = state["epoch"]
        # Copies, because the caller may use the lists of the state further.
        self._stages = [list(taken) for taken in state["stages"]]
        self._ahead = [(epoch, [list(taken) for taken in stages]) for epoch, stages in state["ahead"]]
        self.num_taken, self.has_ended = state["num_taken"], state["has_ended"]
        self.generation += 1

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge the states of all ranks into one, that of the oldest epoch. Some ranks may have begun a later epoch.

        Raises:
            CheckpointError: if the states are not from all ranks of one job, in rank order.
        """
        first = min(states, key=lambda state: state["epoch"])
        stages_by_epoch: dict[int, list[list[int]]] = {}  # the stages before the last change of ranks
        for state in states:
            for epoch, stages in [[state["epoch"], state["stages"]], *state["ahead"]]:
                stages_by_epoch.setdefault(epoch, stages)
        newest = max(state["epoch"] for state in states)
        for number, state in enumerate(states):
            epoch = state["epoch"]
            expected = {**first, "rank": number, "world_size": len(states), "stages": stages_by_epoch[epoch]}
            unlike = [key for key in (*_ALIKE, "stages", "rank", "world_size") if state[key] != expected[key]]
            if unlike:
                raise CheckpointError(
                    "The ranks' sampler states cannot be merged.",
                    expected=", ".join(f"{key}={expected[key]}" for key in unlike),
                    got=", ".join(f"{key}={state[key]}" for key in unlike),
                    where=f"saved rank {number}",
                    todo="pass the same arguments and seed on all ranks, and save the samplers of all ranks together",
                )
        whole = {key: first[key] for key in (*_ALIKE, "epoch")}
        ahead: list[list[Any]] = []
        # `range` adds the epochs in between, in which no rank may be at the moment.
        for epoch in sorted({*stages_by_epoch, *range(first["epoch"], newest + 1)}):
            stages = stages_by_epoch.get(epoch, [])
            if epoch <= newest:
                stages = [*stages, [_taken_of(epoch, stages, state) for state in states]]
            ahead.append([epoch, stages])
        (_, stages), *ahead = ahead
        # A rank in a later epoch has ended the oldest epoch.
        has_ended = all(state["has_ended"] or state["epoch"] > first["epoch"] for state in states)
        return {**whole, "stages": stages, "has_ended": has_ended, "ahead": ahead}

    def split(self, whole: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
        """Return the state for one of ``world_size`` ranks, which take turns at the remaining samples of ``whole``."""
        return {**whole, "num_taken": 0, "rank": rank, "world_size": world_size}


def _taken_of(epoch: int, stages: Sequence[Sequence[int]], state: Mapping[str, Any]) -> int:
    """Return how many samples of an epoch a rank has taken since the last change of ranks."""
    if state["epoch"] <= epoch:
        return int(state["num_taken"]) if state["epoch"] == epoch else 0
    # The rank is in a later epoch, so it has taken all its samples of this epoch.
    left, ranks = int(state["num_samples"]) - sum(map(sum, stages)), int(state["world_size"])
    return left // ranks if state["drop_last"] else len(range(state["rank"], left, ranks))


def _is_remaining(count: int, taken: Sequence[int]) -> torch.Tensor:
    """Return a 1D bool mask of the positions left, after ranks in turns have taken ``taken[rank]`` positions each."""
    is_remaining = torch.ones(count, dtype=torch.bool, device="cpu")
    for rank, number in enumerate(taken):
        is_remaining[rank :: len(taken)][:number] = False
    return is_remaining


class ReshardableLoader(Generic[T]):
    """A data loader over a `ReshardableSampler`; an iteration continues where the previous one stopped.

    Its state counts the batches that were returned, not the batches that workers have read ahead. torchdata's
    `StatefulDataLoader` works too, but its own state, such as that of workers, is not saved: no load could split it
    among other ranks.

    Args:
        loader: a loader with a `ReshardableSampler` as ``sampler`` and a fixed batch size. A loader with ``drop_last``
            loses the samples of a rank's last, smaller batch.

    Raises:
        TypeError: for a loader whose sampler is not a `ReshardableSampler`, or that has no batch size.

    Examples:
        >>> from vescale_fsdp.checkpoint.data import ReshardableSampler
        >>> sampler = ReshardableSampler(6, shuffle=False)
        >>> loader = ReshardableLoader(DataLoader(range(6), batch_size=3, sampler=sampler))
        >>> next(iter(loader)).tolist()
        [0, 1, 2]
    """

    def __init__(self, loader: DataLoader[T]) -> None:
        sampler, batch_size = loader.sampler, loader.batch_size
        if not isinstance(sampler, ReshardableSampler) or batch_size is None:
            raise ArgumentError(
                "This data loader has no position to save.",
                expected="DataLoader(dataset, batch_size=n, sampler=ReshardableSampler(..))",
                got=f"a {type(sampler).__name__}, batch_size={batch_size}",
                where="ReshardableLoader(loader=..)",
            )
        self.loader, self.sampler, self._batch_size = loader, sampler, batch_size
        self._num_taken = sampler.num_taken
        self._has_ended = sampler.has_ended

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it is the current one."""
        self._rewind()
        self.sampler.set_epoch(epoch)
        self._follow()

    def __iter__(self) -> Iterator[T]:
        self._rewind()
        self.sampler.begin()
        self._follow()
        generation = -1
        while generation != self.sampler.generation:  # a loaded state or a change of ranks ends `_rest` early
            generation = self.sampler.generation
            yield from self._rest(generation)
        self._has_ended = True

    def _rest(self, generation: int) -> Iterator[T]:
        """Yield batches from this rank's position on, until the sampler's generation changes.

        Batches that workers have read ahead are then dropped.
        """
        self._rewind()
        end = self._num_taken + len(self.sampler)
        for batch in self.loader:
            self._num_taken = min(self._num_taken + self._batch_size, end)  # the last batch may be smaller
            yield batch
            if generation != self.sampler.generation:
                return

    def renew(self, rank: int, world_size: int) -> None:
        """Become the loader of another rank: see `ReshardableSampler.renew`."""
        self.sampler.renew(rank, world_size)
        self._follow()

    def __len__(self) -> int:
        """Return the number of this rank's remaining batches."""
        self._rewind()  # samples that workers have read ahead still count as remaining
        return -(-len(self.sampler) // self._batch_size)

    def _rewind(self) -> None:
        """Set the sampler back to the last returned batch, before samples that workers have read ahead."""
        self.sampler.num_taken, self.sampler.has_ended = self._num_taken, self._has_ended

    def _follow(self) -> None:
        """Copy the sampler's position, after a change that did not come from the loader's iteration."""
        self._num_taken, self._has_ended = self.sampler.num_taken, self.sampler.has_ended

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position, without the samples that workers have read ahead."""
        return self.sampler.state_at(self._num_taken, has_ended=self._has_ended)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; raises the same errors as `ReshardableSampler.load_state_dict`."""
        self.sampler.load_state_dict(state)
        self._follow()

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge the states of all ranks into one: see `ReshardableSampler.merge`."""
        return self.sampler.merge(states)

    def split(self, whole: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
        """Return the state for one of ``world_size`` ranks: see `ReshardableSampler.split`."""
        return self.sampler.split(whole, rank, world_size)
