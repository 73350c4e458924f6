"""Manifests edited by hand: every error is a CheckpointError, and comes before the state is touched."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.generated_states import Box, assert_same, fresh
from vescale_fsdp import RaggedShard, distribute_tensor
from vescale_fsdp.checkpoint import PerRank, load, read_state, save, verify
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.structure import RankSet
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError, PartialLoadError

WRONG: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    -(2**70),
    0.5,
    1e300,
    "",
    "x",
    "nan",
    "ü\ud800",
    "0",
]
WRONG += [
    [],
    {},
    [[]],
    [0],
    {"$": "tensor", "i": 0},
    {"$": "tuple"},
    {"$": ["x"]},
    {"$": "dict", "v": [[{}, 1]]},
]
WRONG += [
    {"$": "numpy", "dtype": "O", "v": 1},
    {"$": "bytes", "v": "?"},
    {"$": "device", "v": "x"},
    {"$": None},
]


def _state(rank_value: int) -> dict[str, Any]:
    mesh = cpu_mesh()
    whole = torch.arange(20.0).reshape(5, 4)
    return {
        "model": {"w": distribute_tensor(whole, mesh, [RaggedShard((0, 1), (7, 13)[: mesh.size()])])}
        if mesh.size() == 2
        else {"w": whole.clone()},
        "plain": torch.arange(3, dtype=torch.bfloat16),
        "array": np.arange(4),
        "box": Box({"lr": 0.1, "moment": torch.ones(2)}),
        "misc": {
            1: (2, {3.5}),
            "k": [b"x", 1j, float("inf"), torch.int8, torch.device("cpu"), np.float32(2)],
        },
        "rng": PerRank({"seed": rank_value, "t": torch.ones(2)}),
    }


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    return [(node, key) for key in keys] + [place for key in keys for place in _places(node[key])]


def _deepen(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value


def _mutate(draw: Random, data: dict[str, Any]) -> None:
    """One edit: another value, a key more or less or of another name, a swap, a value many levels deep."""
    node, key = draw.choice(_places(data))
    ways: list[Callable[[], Any]] = [
        lambda: node.__setitem__(key, copy.deepcopy(draw.choice(WRONG))),
        lambda: node.__setitem__(key, copy.deepcopy(draw.choice(WRONG))),
        lambda: node.__delitem__(key),
        lambda: node.__setitem__(key, _deepen(node[key], draw.choice([1, 300]))),
    ]
    if isinstance(node[key], (int, float)):
        ways.append(lambda: node.__setitem__(key, node[key] + draw.choice([-1, 1, 7, 0.5])))
    if isinstance(node, dict):
        ways.append(lambda: node.__setitem__(draw.choice(["$", "v", "i", "x"]), draw.choice(WRONG)))
        ways.append(lambda: node.__setitem__(draw.choice(["$", "v", "x"]), node.pop(key)))
    else:
        ways.append(lambda: node.append(copy.deepcopy(node[key])))
    other, name = draw.choice(_places(data))
    if other is node:
        ways.append(lambda: node.__setitem__(key, copy.deepcopy(other[name])))
    draw.choice(ways)()


def _text_of(draw: Random, data: dict[str, Any]) -> bytes:
    """The manifest as an editor would write it, mostly with the checksum that fits."""
    content = {key: value for key, value in data.items() if key != "checksum"}
    compact = json.dumps(content, separators=(",", ":")).encode()
    if draw.random() < 0.9 and "checksum" in data:
        content["checksum"] = xxhash.xxh3_128_hexdigest(compact)
    text = json.dumps(content, separators=(",", ":"))
    if draw.random() < 0.03:
        text = text.replace(":1", draw.choice([":NaN", ":Infinity", ":1e999", ':1,"version":1']), 1)
    return text.encode()


def _mutations(path: Path, form: str, seeds: range) -> tuple[int, int]:
    """How many edits were refused, and how many were loaded."""
    save(path, _state(7), format=form, metadata={"a": [1, None]})
    (manifest,) = path.rglob("manifest.json")
    good = manifest.read_bytes()
    refused = loaded = 0
    for seed in seeds:
        draw = Random(seed)
        data = json.loads(good)
        for _ in range(draw.choice([1, 1, 2])):
            _mutate(draw, data)
        manifest.write_bytes(_text_of(draw, data))
        state, before = fresh(_state(1)), fresh(_state(1))
        try:
            verify(path)
            with suppress(CheckpointError):
                read_state(path).tree(read=True)
            verify_when = "while" if seed % 4 == 0 else "before"
            try:
                load(path, state, strict=bool(seed % 2), verify=verify_when)
                loaded += 1
            except CheckpointError as error:
                if not isinstance(error, PartialLoadError) or verify_when == "before":
                    assert_same(before, state)
                refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    manifest.write_bytes(good)
    state = fresh(_state(1))
    load(path, state)
    assert_same(_state(7), state)
    return refused, loaded


@pytest.mark.parametrize("num_edits", [80, pytest.param(250, marks=pytest.mark.part("faults"))])
@pytest.mark.parametrize("form", ["native", "zarr"])
def test_no_edit_of_a_manifest_ends_in_a_foreign_error(form: str, num_edits: int, tmp_path: Path) -> None:
    """No edit ends in an error of another class, nor in one after the state was overwritten that does not say so."""
    ((refused, loaded),) = run_ranks(1, _mutations, tmp_path / "c", form, range(num_edits))
    assert refused > 0.4 * num_edits and loaded > 0.02 * num_edits


def _saved(path: Path, form: str) -> None:
    save(path, _state(7), format=form)


@pytest.mark.parametrize("form", ["native", "zarr"])
def test_a_part_that_no_rank_has_is_named(form: str, tmp_path: Path) -> None:
    """A tensor's ranks without one of its cells: no save writes this. Readers and `verify` name the tensor."""
    path = tmp_path / "c"
    run_ranks(2, _saved, path, form)
    (file,) = path.rglob("manifest.json")
    good = Manifest.from_bytes(file.read_bytes(), where="before")
    (w,) = (index for index, entry in enumerate(good.entries) if entry.label == "model.w")
    bad = replace(
        good,
        rank_sets=(*good.rank_sets, RankSet.of([0])),
        holders=tuple(
            len(good.rank_sets) if index == w else holder for index, holder in enumerate(good.holders)
        ),
    )
    file.write_bytes(bad.to_bytes())
    (problem,) = verify(path).problems
    assert problem.where == bad.name and "'model.w'" in problem.text
    with pytest.raises(CorruptCheckpointError) as raised:
        read_state(path)
    assert "'model.w'" in str(raised.value)
    file.write_bytes(good.to_bytes())
    assert verify(path).ok
