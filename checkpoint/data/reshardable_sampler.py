"""`ReshardableSampler`: every sample of an epoch once, on whichever ranks, however often their number changes.

An epoch's order follows from seed and epoch alone. Ranks take turns at it; when others go on, they take turns at what
is left of it. How many each rank had taken tells what that is, so the state is a few numbers per restart:

    order             7 2 5 0 3 6 1 4     2 ranks: 7 5 3 1 and 2 0 6 4
    taken             7 5 | 2             stages [[2, 1]]
    left              0 3 6 1 4           3 ranks: 0 1, 3 4 and 6

At an epoch's end some ranks may have begun the next one: they have taken all of theirs. The merged state is in the
oldest epoch, and says ``ahead`` what was taken of later ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from vescale_fsdp.errors import ArgumentError, CheckpointError

_CHUNK = 4096  # samples that become Python numbers at a time
_ALIKE = ("num_samples", "shuffle", "seed", "drop_last")


class ReshardableSampler(Sampler[int]):
    """This rank's samples of an epoch, for a `DataLoader`; for `Resharded`, by itself or in a `ReshardableLoader`.

    An iteration continues where the one before stopped; after the last sample the next epoch begins. An iterator goes
    on from a state that is loaded while it is in use. What a data
    loader's workers read ahead counts as taken here: with workers put the loader into a `ReshardableLoader`.

    Args:
        num_samples: of the data set.
        shuffle: whether every epoch has an order of its own; else it is that of the data set.
        seed: of the orders; the same on all ranks.
        drop_last: leave out up to ``world_size - 1`` samples of an epoch, so that all ranks have equally many; else
            some ranks have one more than others.
        rank, world_size: this rank and how many there are; default: of all in `torch.distributed`,
            asked again when a state is loaded.

    Attributes:
        generation: rises whenever the place in the data is set from outside: by a loaded state, another epoch or other
            ranks.

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
                "A sampler needs samples and a rank.",
                expected="num_samples >= 0 and 0 <= rank < world_size",
                got=f"{num_samples}, {self.rank}, {self.world_size}",
            )
        self._settings = {
            "num_samples": num_samples,
            "shuffle": shuffle,
            "seed": seed,
            "drop_last": drop_last,
        }
        self.epoch = 0
        self._stages: list[list[int]] = []  # for each number of ranks so far, what each rank took
        self._ahead: list[
            tuple[int, list[list[int]]]
        ] = []  # the same of later epochs, where ranks were ahead
        self.num_taken = 0
        self.has_ended = False
        self.generation = 0

    def _ranks_now(self) -> tuple[int, int]:
        """The given rank and number of ranks; where they were not given, those of `torch.distributed` now."""
        is_alone = not (dist.is_available() and dist.is_initialized())
        rank, world_size = self._given
        return (
            rank if rank is not None else 0 if is_alone else dist.get_rank(),
            world_size if world_size is not None else 1 if is_alone else dist.get_world_size(),
        )

    def renew(self, rank: int, world_size: int) -> None:
        """Become the sampler of another rank, at the beginning of its data; `load_state_dict` says where it goes on.

        `ElasticJob` calls this for the samplers in `Resharded` values when the ranks of the job change.
        """
        if self._given != (None, None):
            self._given = rank, world_size
        self.rank, self.world_size = rank, world_size
        self.epoch, self._stages, self.num_taken, self.has_ended = 0, [], 0, False
        self._ahead = []
        self.generation += 1

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it is the one that is under way."""
        if epoch != self.epoch:
            self._stages = dict(self._ahead).get(epoch, [])
            self._ahead = [(later, stages) for later, stages in self._ahead if later > epoch]
            self.epoch, self.num_taken, self.has_ended = epoch, 0, False
            self.generation += 1

    def begin(self) -> None:
        """Go on to the next epoch if this one has ended."""
        if self.has_ended:
            self.set_epoch(self.epoch + 1)

    def __iter__(self) -> Iterator[int]:
        self.begin()
        generation = -1
        while generation != self.generation:  # also where a state was loaded or ranks changed meanwhile
            generation = self.generation
            yield from self._rest(generation)
        self.has_ended = True

    def _rest(self, generation: int) -> Iterator[int]:
        """This rank's samples from its place on, as long as the place is not set from outside."""
        own = self._own()
        for start in range(self.num_taken, len(own), _CHUNK):
            for sample in own[start : start + _CHUNK].tolist():
                self.num_taken += 1
                yield sample
                if generation != self.generation:
                    return

    def __len__(self) -> int:
        """Samples that are left to this rank."""
        return len(self._own()) - self.num_taken

    def _own(self) -> torch.Tensor:
        """This rank's samples since the number of ranks last changed, 1D."""
        count, epoch_seed = self._settings["num_samples"], self._settings["seed"] * 1_000_003 + self.epoch
        if not -(2**63) <= epoch_seed < 2**64:  # what a generator takes; torch.initial_seed() has 64 bits
            epoch_seed %= 2**64
        order = torch.arange(count, dtype=torch.int64, device="cpu")
        if self._settings["shuffle"]:
            generator = torch.Generator("cpu").manual_seed(epoch_seed)
            order = torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu")
        for taken in self._stages:
            order = order[_left(count=len(order), taken=taken)]
        stop = len(order) // self.world_size * self.world_size if self._settings["drop_last"] else len(order)
        return order[self.rank : stop : self.world_size]

    def state_dict(self) -> dict[str, Any]:
        """Where this rank is."""
        return self.state_at(self.num_taken, has_ended=self.has_ended)

    def state_at(self, num_taken: int, *, has_ended: bool) -> dict[str, Any]:
        """The state in which this rank has taken so many samples."""
        whole = {**self._settings, "epoch": self.epoch, "stages": self._stages, "has_ended": has_ended}
        if self._ahead:
            whole["ahead"] = [[epoch, stages] for epoch, stages in self._ahead]
        return {**whole, "num_taken": num_taken, "rank": self.rank, "world_size": self.world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            CheckpointError: if it is the state of other samples, or of another rank.
        """
        self.rank, self.world_size = self._ranks_now()
        expected = {**self._settings, "rank": self.rank, "world_size": self.world_size}
        unlike = {key: state[key] for key in expected if state[key] != expected[key]}
        if unlike:
            raise CheckpointError(
                "A sampler gets the state of another one.",
                expected=", ".join(f"{key}={expected[key]}" for key in unlike),
                got=", ".join(f"{key}={value}" for key, value in unlike.items()),
                todo="make it as it was made when it was saved; where the number of ranks may change, save "
                "Resharded(sampler)",
            )
        self.epoch = state["epoch"]
        self._stages = [list(taken) for taken in state["stages"]]
        self._ahead = [(epoch, [list(taken) for taken in stages]) for epoch, stages in state.get("ahead", [])]
        self.num_taken, self.has_ended = state["num_taken"], state["has_ended"]
        self.generation += 1

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What the samplers of all ranks together have left; some may have begun a later epoch.

        Raises:
            CheckpointError: if they are not the samplers of all ranks.
        """
        first = min(states, key=lambda state: state["epoch"])
        stages_by_epoch: dict[int, list[list[int]]] = {}  # before these ranks
        for state in states:
            for epoch, stages in [[state["epoch"], state["stages"]], *state.get("ahead", [])]:
                stages_by_epoch.setdefault(epoch, stages)
        newest = max(state["epoch"] for state in states)
        for number, state in enumerate(states):
            epoch = state["epoch"]
            expected = {**first, "rank": number, "world_size": len(states), "stages": stages_by_epoch[epoch]}
            unlike = [key for key in (*_ALIKE, "stages", "rank", "world_size") if state[key] != expected[key]]
            if unlike:
                raise CheckpointError(
                    "Samplers of different ranks do not fit together.",
                    expected=", ".join(f"{key}={expected[key]}" for key in unlike),
                    got=", ".join(f"{key}={state[key]}" for key in unlike),
                    where=f"rank {number} of those that saved",
                    todo="make the samplers of all ranks alike, with the same seed, and save all of them together",
                )
        whole = {key: first[key] for key in (*_ALIKE, "epoch")}
        ahead: list[list[Any]] = []
        for epoch in sorted({*stages_by_epoch, *range(first["epoch"], newest + 1)}):
            stages = stages_by_epoch.get(epoch, [])
            if epoch <= newest:
                stages = [*stages, [_taken_of(epoch, stages, state) for state in states]]
            ahead.append([epoch, stages])
        (_, stages), *ahead = ahead
        has_ended = all(state["has_ended"] or state["epoch"] > first["epoch"] for state in states)
        whole |= {"stages": stages, "has_ended": has_ended}
        return {**whole, "ahead": ahead} if ahead else whole

    def split(self, whole: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
        """A rank's part of what is left."""
        return {**whole, "num_taken": 0, "rank": rank, "world_size": world_size}


def _taken_of(epoch: int, stages: Sequence[Sequence[int]], state: Mapping[str, Any]) -> int:
    """How many samples of an epoch a rank has taken since the number of ranks last changed."""
    if state["epoch"] <= epoch:
        return int(state["num_taken"]) if state["epoch"] == epoch else 0
    left, ranks = int(state["num_samples"]) - sum(map(sum, stages)), int(state["world_size"])
    return left // ranks if state["drop_last"] else len(range(state["rank"], left, ranks))


def _left(*, count: int, taken: Sequence[int]) -> torch.Tensor:
    """Which places of an order are left when ranks that take turns have taken so many each; 1D, bool."""
    is_left = torch.ones(count, dtype=torch.bool, device="cpu")
    for rank, number in enumerate(taken):
        is_left[rank :: len(taken)][:number] = False
    return is_left
