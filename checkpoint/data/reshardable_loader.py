"""`ReshardableLoader`: a data loader whose state counts what was handed out, however far its workers have read ahead.

    sampler = ReshardableSampler(len(dataset), seed=1)
    loader = ReshardableLoader(DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=4))
    state = {.., "data": Resharded(loader)}

torchdata's `StatefulDataLoader` is a `DataLoader` too. What it keeps beyond the place in the epoch (states of workers,
of iterable data sets) belongs to the ranks and workers it was made for, and cannot be shared out among others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader

from vescale_fsdp.checkpoint.data.reshardable_sampler import ReshardableSampler
from vescale_fsdp.errors import ArgumentError

T = TypeVar("T")


class ReshardableLoader(Generic[T]):
    """A data loader over a `ReshardableSampler`; an iteration goes on where the one before has stopped.

    Args:
        loader: with ``sampler=`` a `ReshardableSampler`, and batches of a fixed size. With its own ``drop_last`` it
            loses the samples of a rank's last batch.

    Raises:
        TypeError: for any other loader.

    Examples:
        >>> from vescale_fsdp.checkpoint import ReshardableSampler
        >>> sampler = ReshardableSampler(6, shuffle=False)
        >>> loader = ReshardableLoader(DataLoader(range(6), batch_size=3, sampler=sampler))
        >>> next(iter(loader)).tolist()
        [0, 1, 2]
    """

    def __init__(self, loader: DataLoader[T]) -> None:
        sampler, batch_size = loader.sampler, loader.batch_size
        if not isinstance(sampler, ReshardableSampler) or batch_size is None:
            raise ArgumentError(
                "The place of this data loader in its data is not known.",
                expected="DataLoader(dataset, batch_size=n, sampler=ReshardableSampler(..))",
                got=f"a {type(sampler).__name__}, batch_size={batch_size}",
            )
        self.loader, self.sampler, self._batch_size = loader, sampler, batch_size
        self._num_taken = sampler.num_taken
        self._has_ended = sampler.has_ended

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it is the one that is under way."""
        self._rewind()
        self.sampler.set_epoch(epoch)
        self._follow()

    def __iter__(self) -> Iterator[T]:
        self._rewind()
        self.sampler.begin()
        self._follow()
        generation = -1
        while (
            generation != self.sampler.generation
        ):  # also where a state was loaded or ranks changed meanwhile
            generation = self.sampler.generation
            yield from self._rest(generation)
        self._has_ended = True

    def _rest(self, generation: int) -> Iterator[T]:
        """Batches from this rank's place on, as long as the place is not set from outside; none read ahead before."""
        self._rewind()
        end = self._num_taken + len(self.sampler)
        for batch in self.loader:
            self._num_taken = min(self._num_taken + self._batch_size, end)
            yield batch
            if generation != self.sampler.generation:
                return

    def renew(self, rank: int, world_size: int) -> None:
        """As `ReshardableSampler.renew`."""
        self.sampler.renew(rank, world_size)
        self._follow()

    def __len__(self) -> int:
        """Batches that are left to this rank."""
        self._rewind()
        return -(-len(self.sampler) // self._batch_size)

    def _rewind(self) -> None:
        """Take back what was read ahead."""
        self.sampler.num_taken, self.sampler.has_ended = self._num_taken, self._has_ended

    def _follow(self) -> None:
        self._num_taken, self._has_ended = self.sampler.num_taken, self.sampler.has_ended

    def state_dict(self) -> dict[str, Any]:
        """Where this rank is."""
        return self.sampler.state_at(self._num_taken, has_ended=self._has_ended)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; raises as the sampler does."""
        self.sampler.load_state_dict(state)
        self._follow()

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """As `ReshardableSampler.merge`."""
        return self.sampler.merge(states)

    def split(self, whole: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
        """As `ReshardableSampler.split`."""
        return self.sampler.split(whole, rank, world_size)
