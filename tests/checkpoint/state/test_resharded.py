"""Data that counts samples: on other ranks no sample of an epoch is seen twice or lost."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SequentialSampler

from tests.support.distributed import run_ranks
from vescale_fsdp.checkpoint import CheckpointManager, PerRank, async_save, load, save
from vescale_fsdp.checkpoint.data import ReshardableLoader, ReshardableSampler, Resharded
from vescale_fsdp.errors import ArgumentError, CheckpointError

NUM_SAMPLES = 103


def _samplers(num_samples: int, world: int, **options: Any) -> list[ReshardableSampler]:
    return [ReshardableSampler(num_samples, rank=rank, world_size=world, **options) for rank in range(world)]


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(0, 60),
    worlds=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_counts_on_any_ranks(num_samples: int, worlds: list[int], shuffle: bool, seed: int) -> None:
    """However many samples each rank took before ranks changed, each is seen once in an epoch; then the next begins."""
    drawn = random.Random(seed)
    seen: list[int] = []
    samplers: list[ReshardableSampler] = []
    for world in worlds:
        states = [sampler.state_dict() for sampler in samplers]
        samplers = _samplers(num_samples, world, shuffle=shuffle, seed=seed)
        for rank, sampler in enumerate(samplers):
            if states:
                sampler.load_state_dict(sampler.split(sampler.merge(states), rank, world))
            seen += islice(sampler, drawn.randint(0, len(sampler)))
    seen += [sample for sampler in samplers for sample in sampler]
    assert sorted(seen) == list(range(num_samples))

    following = [sample for sampler in samplers for sample in sampler]
    assert sorted(following) == sorted(seen) and {sampler.epoch for sampler in samplers} == {1}
    assert not shuffle or num_samples < 20 or following != seen


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(1, 40),
    worlds=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    drawn=st.randoms(use_true_random=False),
)
def test_ranks_in_different_epochs(num_samples: int, worlds: list[int], drawn: random.Random) -> None:
    """At uneven epochs' ends ranks are an epoch apart, or two: each epoch's samples are still seen once each."""
    seen: dict[int, list[int]] = {}
    samplers: list[ReshardableSampler] = []
    for world in worlds:
        states = [sampler.state_dict() for sampler in samplers]
        samplers = _samplers(num_samples, world, seed=2**64 - 1)
        for rank, sampler in enumerate(samplers):
            if states:
                sampler.load_state_dict(sampler.split(sampler.merge(states), rank, world))
            for _ in range(drawn.randint(0, 2 * num_samples // world + 2)):
                for sample in islice(sampler, 1):
                    seen.setdefault(sampler.epoch, []).append(sample)
    last = max(sampler.epoch for sampler in samplers)
    for sampler in samplers:
        while sampler.epoch < last or not sampler.has_ended:
            for sample in sampler:
                seen.setdefault(sampler.epoch, []).append(sample)
    for epoch in range(last + 1):
        assert sorted(seen.get(epoch, [])) == list(range(num_samples)), epoch


def test_seeds_of_torch() -> None:
    """Any seed that torch gives or takes; those that worked before keep their order."""
    for seed in (torch.initial_seed(), 2**64 - 1, -(2**63), 0):
        assert sorted(ReshardableSampler(20, seed=seed)) == list(range(20))
    expected = torch.randperm(20, generator=torch.Generator().manual_seed(3 * 1_000_003))
    assert list(ReshardableSampler(20, seed=3)) == expected.tolist()


def test_orders() -> None:
    """The drawing of the module; without shuffling the data set's order; drop_last leaves equally many to all."""
    plain = [list(sampler) for sampler in _samplers(7, 3, shuffle=False)]
    assert plain == [[0, 3, 6], [1, 4], [2, 5]]
    assert [list(sampler) for sampler in _samplers(7, 3, shuffle=False, drop_last=True)] == [
        [0, 3],
        [1, 4],
        [2, 5],
    ]
    order = torch.tensor([7, 2, 5, 0, 3, 6, 1, 4])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "randperm", lambda count, **options: order)
        first, second = _samplers(8, 2)
        assert list(islice(first, 2)) == [7, 5] and list(islice(second, 1)) == [2]
        whole = first.merge([first.state_dict(), second.state_dict()])
        assert whole["stages"] == [[2, 1]]
        thirds = _samplers(8, 3)
        for rank, sampler in enumerate(thirds):
            sampler.load_state_dict(sampler.split(whole, rank, 3))
        assert [list(sampler) for sampler in thirds] == [[0, 1], [3, 4], [6]]


def _differs(expected: str, got: str) -> Callable[[CheckpointError], bool]:
    """Whether an error names the two values that differ."""
    return lambda error: (error.expected, error.got) == (expected, got)


def test_what_does_not_fit_is_refused() -> None:
    """Other samples, another rank, ranks in different epochs, a loader over another sampler."""
    first, second = _samplers(10, 2, seed=3)
    for other, expected, got in (
        (ReshardableSampler(10, seed=4, rank=0, world_size=2), "seed=3", "seed=4"),
        (_samplers(11, 2, seed=3)[0], "num_samples=10", "num_samples=11"),
        (second, "rank=0", "rank=1"),
    ):
        with pytest.raises(CheckpointError, check=_differs(expected, got)):
            first.load_state_dict(other.state_dict())
    other_seed = _samplers(10, 2, seed=4)[1]
    with pytest.raises(CheckpointError, check=_differs("seed=3", "seed=4")):
        first.merge([first.state_dict(), other_seed.state_dict()])
    with pytest.raises(CheckpointError, check=_differs("world_size=1", "world_size=2")):
        first.merge([first.state_dict()])
    others: list[DataLoader[Any]] = [
        DataLoader(range(10), batch_size=2),  # type: ignore[arg-type]
        DataLoader(range(10), sampler=SequentialSampler(range(10))),  # type: ignore[arg-type]
        DataLoader(range(10), batch_size=None, sampler=first),  # type: ignore[arg-type]
    ]
    for loader in others:
        with pytest.raises(ArgumentError):
            ReshardableLoader(loader)
    with pytest.raises(ArgumentError, check=lambda error: error.got == "3, 2, 2"):
        ReshardableSampler(3, rank=2, world_size=2)


def _loader(workers: int = 0) -> ReshardableLoader[torch.Tensor]:
    sampler = ReshardableSampler(NUM_SAMPLES, seed=5)
    return ReshardableLoader(
        DataLoader(range(NUM_SAMPLES), batch_size=4, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
    )


def test_what_workers_read_ahead_was_not_seen() -> None:
    """The state counts batches that were handed out; an iteration goes on where one was broken off."""
    loader = _loader(workers=1)
    batches = loader.__iter__()
    seen = [sample for batch in islice(batches, 3) for sample in batch.tolist()]
    assert loader.state_dict()["num_taken"] == len(seen) == 12 < loader.sampler.num_taken  # read ahead
    del batches
    assert len(loader) == 23
    again = _loader()
    again.load_state_dict(loader.state_dict())
    rest = [[sample for batch in one for sample in batch.tolist()] for one in (loader, again)]
    assert rest[0] == rest[1] and sorted(seen + rest[0]) == list(range(NUM_SAMPLES))
    again.set_epoch(0)
    assert len(again) == 0
    again.set_epoch(7)
    assert len(again) == 26 and sorted(torch.cat(list(again)).tolist()) == list(range(NUM_SAMPLES))


def _train(root: Path, num_batches: int, resharded: bool) -> list[list[int]]:
    """Restore, train on some batches of an epoch, save; the samples of each epoch that this rank has seen."""
    loader = _loader()
    data = Resharded(loader) if resharded else PerRank(loader)
    manager = CheckpointManager(root)
    restored = manager.restore({"data": data})
    start = restored.step if restored is not None else 0
    seen: list[list[int]] = [[], []]
    for _ in range(num_batches):
        epoch, batch = loader.sampler.epoch, next(iter(loader), None)
        if batch is not None:
            seen[loader.sampler.epoch].extend(batch.tolist())
        assert epoch <= loader.sampler.epoch
    manager.save(start + 1, {"data": data})
    return seen


def test_on_4_then_3_then_5_ranks(tmp_path: Path) -> None:
    """Over two shuffled epochs every sample is seen once in each, wherever ranks changed in between."""
    seen: list[list[int]] = [[], []]
    for world, num_batches in ((4, 3), (3, 2), (5, 2), (2, 15)):
        for own in run_ranks(world, _train, tmp_path, num_batches, True):
            assert own[0] or own[1]
            for epoch, samples in enumerate(own):
                seen[epoch] += samples
    assert sorted(seen[0]) == list(range(NUM_SAMPLES)) and seen[0] != sorted(seen[0])
    assert len(set(seen[1])) == len(seen[1]) > 20


def _restores(root: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        _train(root, 1, resharded=False)
    return str(caught.value)


def test_per_rank_stays_per_rank(tmp_path: Path) -> None:
    """A place in the data that is saved as PerRank is not another number of ranks' place, and is refused as that."""
    run_ranks(2, _train, tmp_path, 2, False)
    for text in run_ranks(1, _restores, tmp_path):
        assert "Resharded(sampler)" in text and dist.is_available()


class _Part:
    """A value of a user's own: parts are tensors, which are merged if all ranks are at the same place."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "tensor": torch.full((2,), float(self.place))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]

    def merge(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        if any(state["tensor"].tolist() != states[0]["tensor"].tolist() for state in states):
            raise ValueError("ranks at different places")
        return states[0]

    def split(self, whole: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
        return whole


def _saves(root: Path, kind: str) -> str | None:
    """What a save says of values whose parts fit or do not fit, in the foreground and the background."""
    rank = dist.get_rank()
    value: Any
    if kind == "seeds":
        value = ReshardableSampler(100, seed=rank)
    elif kind == "loaders":
        sampler = ReshardableSampler(100 + rank)
        value = ReshardableLoader(DataLoader(range(200), batch_size=4, sampler=sampler))
    elif kind == "epochs":  # uneven: the first rank has one sample more, and the others begin the next epoch
        value = ReshardableSampler(4 * dist.get_world_size() + 1)
        for _ in range(2):
            _ = list(islice(value, 5 if rank == 0 else 3))
    else:
        value = _Part(rank if kind == "own" else 7)
    state = {"data": [Resharded(value)], "rng": PerRank(rank)}
    try:
        if kind == "own":
            async_save(root / kind, state).wait()
        else:
            save(root / kind, state)
    except CheckpointError as error:
        return str(error)
    return None


def test_parts_that_cannot_be_merged_are_refused_when_saved(tmp_path: Path) -> None:
    """On all ranks, naming the value and its ranks; nothing is left. Parts that fit are saved."""
    for kind in ("seeds", "loaders", "own"):
        for text in run_ranks(2, _saves, tmp_path, kind):
            assert text is not None and re.search(r"\bdata/0\b.*\b0, 1\b", text)
        assert not list(tmp_path.glob(f"{kind}/**/manifest.json"))
    for kind in ("epochs", "equal"):
        assert run_ranks(2, _saves, tmp_path, kind) == [None] * 2
        load(
            tmp_path / kind,
            {"data": [Resharded(_Part(0) if kind == "equal" else ReshardableSampler(9))]},
            strict=False,
        )
