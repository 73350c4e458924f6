"""NeMo Automodel's own sharding functions with our runtime, against stock FSDP2, on CPU ranks.

Its recipes and its model classes need CUDA kernels; its parallelizers, which are what changes, do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from examples.stacks.options import Options
from tests.stacks.jobs.example_ranks import (
    HALF,
    LARGEST,
    History,
    check_losses,
    control_of,
    converted,
    run_example,
    run_on_ranks,
)
from vescale_fsdp import FSDPModule

CLIP = {"norm_type": LARGEST, "max_norm": 0.05}


def train(*args: Any, **kwargs: Any) -> History:
    """The example's; importing Automodel warns, so that is left to the ranks."""
    from examples.stacks import train_automodel as example

    return example.train(*args, **kwargs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs of this file."""
    return tmp_path_factory.mktemp("automodel")


@pytest.fixture(scope="module")
def stock(folder: Path) -> History:
    """Stock FSDP2's losses and norms, uninterrupted."""
    return run_example(2, train, Options(folder / "stock", "fsdp2", **CLIP))


def test_losses_are_fsdp2s(folder: Path, stock: History) -> None:
    """To the last bit, over 50 steps with two micro-batches and clipping, resumed in the middle; three ranks go on."""
    check_losses(train, Options(folder / "ours", **CLIP), f"step_{HALF}", stock)


def test_gradients_at_one_nth_are_seen(folder: Path, stock: History) -> None:
    """The comparison can fail: gradients divided once more give other losses."""
    assert control_of(train, Options(folder, **CLIP))[1:] != stock[1:10]


def test_the_converter_opens_a_save(folder: Path) -> None:
    """vescale-convert makes of the save in the middle what stock FSDP2 has at that step."""
    ours, expected = (
        converted(folder / runtime / f"step_{HALF}", folder / f"{runtime}.pt")
        for runtime in ("ours", "stock")
    )
    assert len(expected) > 10 and ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def _units(runtime: str) -> list[bool]:
    """Whether each sharded module is ours."""
    from examples.stacks.train_automodel import parallelized

    model = parallelized(Options(Path(), runtime))
    sharded = [module for module in model.modules() if isinstance(module, TorchFSDPModule)]
    return [isinstance(module, FSDPModule) for module in sharded]


def test_its_units() -> None:
    """Automodel shards with this package inside the context, and with stock FSDP2 without it."""
    assert run_on_ranks(2, _units, "vescale") == 2 * [3 * [True]]
    assert run_on_ranks(2, _units, "fsdp2") == 2 * [3 * [False]]
