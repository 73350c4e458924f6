"""Random damage to any byte of any file: `verify` finds all of it, and a load never returns other values."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoint_states import assert_equal
from vescale_fsdp.checkpoint import PerRank, load, save, verify
from vescale_fsdp.checkpoint.load import Verify
from vescale_fsdp.checkpoint.save import Format
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError, PartialLoadError


def _state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"t{i}": torch.randn(30, 10, generator=generator) for i in range(3)}
    loader = PerRank({"cursor": torch.arange(3) + seed, "seed": seed})
    return {"model": tensors, "step": 5 + seed, "betas": [0.1, None, (1, 2)], "loader": loader}


def _flip(data: bytearray, at: int) -> bytearray:
    data[at] ^= 1 << at % 8
    return data


def _swap(data: bytearray, at: int) -> bytearray:
    other = (at * 7 + 13) % len(data)
    data[at], data[other] = data[other], data[at]
    return data


DAMAGES: dict[str, Callable[[bytearray, int], bytearray]] = {
    "bit": _flip,
    "byte": lambda data, at: data[:at] + bytes([at % 256]) + data[at + 1 :],
    "swap": _swap,
    "zeros": lambda data, at: data[:at] + bytes(len(data[at : at + 8])) + data[at + 8 :],
    "inserted": lambda data, at: data[:at] + b"x" + data[at:],
    "appended": lambda data, at: data + b"\0",
    "cut": lambda data, at: data[:at],
    "empty": lambda data, at: bytearray(),
}


@pytest.mark.parametrize("form", ["native", "zarr"])
def test_no_damage_is_overlooked(form: Format, tmp_path: Path) -> None:
    """Every kind of damage at random places of every file; no byte of a checkpoint is without a check."""
    path = tmp_path / "c"
    save(path, _state(0), format=form, metadata={"run": 1})
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != ".lock"]
    assert len(files) == (2 if form == "native" else 12)
    places = random.Random(0)
    found = 0
    for number in range(22 * len(DAMAGES)):
        file = files[number % len(files)] if number % 3 else places.choice(files)
        good = file.read_bytes()
        kind = list(DAMAGES)[number % len(DAMAGES)]
        damaged = DAMAGES[kind](bytearray(good), places.randrange(len(good)))
        if damaged == good:
            continue
        file.write_bytes(damaged)

        assert not verify(path).ok, (file, kind)

        _assert_old_or_saved(path, "before" if places.random() < 0.5 else "while")
        file.write_bytes(good)
        found += 1
    assert found > 150
    assert verify(path).ok


def _assert_old_or_saved(path: Path, mode: Verify) -> None:
    """A load refuses and leaves alone what it does not name, or (zarr: damage where it does not look) loads what was
    saved."""
    state, expected = _state(1), _state(1)
    overwritten: tuple[str, ...] = ()
    try:
        load(path, state, verify=mode)
    except PartialLoadError as error:
        overwritten = error.overwritten
    except CheckpointError:
        pass
    else:
        expected = _state(0)
    for name in overwritten:
        assert mode == "while"
        for each in (expected, state):
            del each["model"][name.removeprefix("model.")]
    assert_equal(expected["model"], state["model"])
    assert (expected["step"], expected["betas"]) == (state["step"], state["betas"])
    assert_equal(expected["loader"].value, state["loader"].value)


def test_files_of_another_step(tmp_path: Path) -> None:
    """Two steps of one run have files of one size; a file that went from one to the other is recognized."""
    for step in (1, 2):
        save(tmp_path / f"{step}", _state(step))
    (one,), (two,) = (list((tmp_path / step).glob("data-*/*")) for step in "12")
    assert one.stat().st_size == two.stat().st_size
    one.write_bytes(two.read_bytes())

    assert str(one.relative_to(tmp_path / "1")) in str(verify(tmp_path / "1").problems[0])
    with pytest.raises(CorruptCheckpointError, check=lambda error: error.where == str(one)):
        load(tmp_path / "1", _state(0))
    assert verify(tmp_path / "2").ok


def test_a_folder_of_another_step(tmp_path: Path) -> None:
    """A manifest beside another attempt's data misses its own folder."""
    for step in (1, 2):
        save(tmp_path / f"{step}", _state(step))
    (tmp_path / "1" / "manifest.json").write_bytes((tmp_path / "2" / "manifest.json").read_bytes())

    assert "missing" in verify(tmp_path / "1").problems[0].text
    with pytest.raises(CorruptCheckpointError, check=lambda error: "data-" in str(error.where)):
        load(tmp_path / "1", _state(0))
