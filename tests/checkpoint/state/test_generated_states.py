"""Whatever `save` accepts, a load brings back, bit for bit and by type; what it could not is refused."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from tests.support.generated_states import Box, assert_same, draw_state, fresh
from vescale_fsdp.checkpoint import PerRank, async_save, fingerprint, load, read_state, save, verify
from vescale_fsdp.conversion import fingerprint_of, open_source
from vescale_fsdp.errors import CheckpointError

_CORE = ((1, "native"), (2, "behind"), (3, "zarr"))  # each form, and most world sizes


def _round_trips(path: Path, form: str, seeds: range) -> tuple[int, int]:
    """Leaves compared, and states compared, after a save, a verification and a load into a fresh state."""
    leaves = states = 0
    for seed in seeds:
        folder = path / f"{seed}"
        state = draw_state(seed)
        own = fingerprint(state)
        if form == "behind":
            async_save(folder, state, fingerprint=True).wait()
        else:
            save(folder, state, format=form, fingerprint=True)
        if dist.get_rank() == 0:
            assert verify(folder).problems == (), seed
            source = open_source(str(folder))
            assert fingerprint_of(source).differences(own) == (), seed
            assert fingerprint_of(source, recorded=True) == own, seed
            read_state(folder).tree(read=True)
        into: dict[str, Any] = fresh(draw_state(seed))
        load(folder, into)
        leaves += assert_same(state, into, f"{seed}")
        states += 1
    return leaves, states


@pytest.mark.parametrize(
    ("world", "form"),
    [
        row if row in _CORE else pytest.param(*row, marks=pytest.mark.part("formats"))
        for row in product((1, 2, 3, 4), ("native", "zarr", "behind"))
    ],
)
def test_every_state_comes_back(world: int, form: str, tmp_path: Path) -> None:
    """Random nestings of every kind of leaf, under odd keys, on one to four ranks."""
    seeds = range(100 * world, 100 * world + 12)
    for leaves, states in run_ranks(world, _round_trips, tmp_path, form, seeds):
        # What is drawn depends on how many dtypes this torch has.
        assert states == len(seeds) and leaves > 6 * len(seeds)


class Odd(tuple[int, int]):
    """A tuple that no list of items makes."""

    def __new__(cls, left: int, right: int) -> Odd:
        return super().__new__(cls, (left, right))


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {0: (value,)}
    return value


REFUSED: dict[str, Any] = {
    "nan key": {math.nan: 1},
    "nan in a key": {(1, frozenset({math.nan})): 1},
    "tensor in a key": {(1, torch.ones(2)): 1},
    "tensor in a set": {torch.ones(2)},
    "PerRank in a set": frozenset({PerRank(1)}),
    "mask": np.ma.masked_array([1.0, 2.0], [True, False]),
    "own tuple": Odd(1, 2),
    "long number": 10**5000,
    "deep": _deep(51),
    "object in an object": PerRank(Box({"in": Box(1)})),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_could_not_be_loaded_is_refused(kind: str, tmp_path: Path) -> None:
    """Nothing is written then, and the error says where it is."""
    with pytest.raises(CheckpointError, check=lambda error: str(error.where).startswith("here")):
        save(tmp_path / "c", {"x": 1, "here": REFUSED[kind]})
    assert not list(tmp_path.glob("c/manifest.json"))


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    """Half a surrogate pair is a string like any other, but no name of a tensor."""
    with pytest.raises(CheckpointError, check=lambda error: error.got == r"'\ud800'"):
        save(tmp_path / "c", {"\ud800": torch.ones(2)})
    save(tmp_path / "c", {"\ud800": "\udfff"})
    state = {"\ud800": ""}
    load(tmp_path / "c", state)
    assert state == {"\ud800": "\udfff"}


def test_the_deepest_state_that_is_taken(tmp_path: Path) -> None:
    """What is nested as deeply as a save takes is loaded."""
    save(tmp_path / "c", {"a": _deep(49)})
    state = {"a": 0}
    load(tmp_path / "c", state)
    assert state == {"a": _deep(49)}
    nested = {"a": _deep(49)}
    load(tmp_path / "c", nested)
    assert nested == state
