"""Set-up shared by all tests: order, the end of the worker pool, GPU skips, and how hypothesis searches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.support.alone import pytest_runtest_protocol, pytest_unconfigure
from tests.support.distributed import close_pool
from tests.support.faults.nan_memory import NAN_MEMORY, nan_memory_if_asked
from tests.support.faults.rounding_noise import ROUNDING_NOISE, noise_if_asked
from tools.lab import missing
from vescale_fsdp.conversion.formats.huggingface import class_check, class_child

__all__ = ["pytest_runtest_protocol", "pytest_unconfigure"]  # pytest finds them here

# Examples are drawn anew in the same order on every run, so that a red test stays red; time per example
# is not limited, because the machine may be busy.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=200)
settings.load_profile("repeatable")

# Tests compute small tensors, several processes at a time: OpenMP's threads would wait for each other's cores.
torch.set_num_threads(1)

# If a build for CUDA finds no device, FakeTensorMode stores a pointer to an object of the calling thread in a table of
# the process, and first reads the pointer of the thread before: the process crashes once that thread has ended (torch
# 2.11; not 2.15). DTensor's operators enter the mode, and ranks may be threads. So only the main thread does it.
if torch.version.cuda and torch.__version__ < "2.15" and not torch.cuda.is_available():
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._ensureCUDADeviceGuardSet = lambda: None


# The files of `make test` that take longest, begun first, in this order: it runs two at a time, and shall not wait for
# one of these at the end.
LONG = (
    "tools/test_check.py",
    "checkpoint/save/test_fault_matrix.py",
    "vescale_fsdp/elastic/test_store_membership.py",
    "vescale_fsdp/device/test_programs.py",
    "conversion/formats/test_conformance.py",
    "checkpoint/storage/test_remote.py",
    "checkpoint/memory/test_ram_tier.py",
    "conversion/formats/huggingface/test_class_check.py",
    "vescale_fsdp/runtime/fuzz/habits/test_habits.py",
    "vescale_fsdp/runtime/fuzz/test_fuzz.py",
    "vescale_fsdp/elastic/test_kills.py",
    "conversion/test_urls.py",
    "vescale_fsdp/runtime/test_numerics.py",
    "vescale_fsdp/elastic/test_job.py",
    "checkpoint/ranks/test_roll_call.py",
    # Short in `make test`, and the last ones in a run of all parts.
    "vescale_fsdp/transfer/test_delta.py",
    "vescale_fsdp/planning/test_peaks.py",
)
assert all((Path(__file__).parent / name).exists() for name in LONG), "a file of LONG has moved"


# Tests that are not in `make test`: they are marked ``part("name")``. `make test-part PART=name` (or its number) runs
# one part, in at most eight minutes on two cores.
PARTS = {
    "jobs": "whole training jobs: killed, preempted, restarted; examples, the demo, and tools that run tests",
    "faults": "more rows of the faults of saves, loads, transfers and elastic jobs",
    "formats": "more rows of the tables of formats, model families and object stores",
    "numerics": "torch's operator database, BLAS code paths, optimizers at more sizes and world sizes",
    "pages": "code of README, docs and notebook; the site's pages; the GPU command, dry",
}


@pytest.fixture(scope="session", autouse=True)
def _worker_pool() -> Iterator[None]:
    """End the worker processes when the session ends."""
    yield
    close_pool()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        default="all",
        choices=("all", "core", *PARTS, *(str(number) for number in range(1, len(PARTS) + 1))),
        help="core: what `make test` runs; or one of the parts that it leaves out, by name or number",
    )
    parser.addoption(
        "--nan-memory", action="store_true", help="fill new and freed memory with NaN, in all ranks"
    )
    parser.addoption(
        "--rounding-noise",
        type=int,
        metavar="SEED",
        help="round products and decompositions as another processor might, in all ranks",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nan-memory"):
        os.environ[NAN_MEMORY] = "1"  # the workers' too, which are forked later
    if config.getoption("--rounding-noise") is not None:
        os.environ[ROUNDING_NOISE] = str(config.getoption("--rounding-noise"))


@pytest.fixture(autouse=True)
def _other_machines() -> Iterator[None]:
    """Under ``--nan-memory`` and ``--rounding-noise``: in this process."""
    with nan_memory_if_asked(), noise_if_asked():
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the part. Put long files first. Skip tests marked ``gpu`` or ``lab`` where there is none."""
    chosen = config.getoption("--part")
    if chosen.isdecimal():
        chosen = list(PARTS)[int(chosen) - 1]
    if chosen != "all":
        parts = [part_of(item) for item in items]
        others = [item for item, part in zip(items, parts, strict=True) if part != chosen]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item, part in zip(items, parts, strict=True) if part == chosen]
    items.sort(key=place_of)
    reason = missing() if any(item.get_closest_marker("lab") for item in items) else None
    # CI has what the lab needs (.ci/run), so there these tests fail without it.
    if reason is not None and not os.environ.get("CI"):
        for item in items:
            if item.get_closest_marker("lab"):
                item.add_marker(pytest.mark.skip(reason=reason))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch finds none here"))


def place_of(item: pytest.Item) -> int:
    """A test's file among the long ones; the others, which keep their order, behind them."""
    file = item.nodeid.partition("::")[0].removeprefix("tests/")
    return LONG.index(file) if file in LONG else len(LONG)


def part_of(item: pytest.Item) -> str:
    """The part that a test belongs to: by the nearest marker, or "core"."""
    marker = item.get_closest_marker("part")
    if marker is None:
        return "core"
    (part,) = marker.args
    if part not in PARTS:
        raise pytest.UsageError(f"{item.nodeid}: no part is named {part!r}; there are {', '.join(PARTS)}.")
    return str(part)


@pytest.fixture(autouse=True)
def _no_child(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Model classes answer in this process: a child takes six seconds of CPU."""

    def ask(config: Mapping[str, Any], class_name: str, tensors: Any = None) -> Mapping[str, Any]:
        return class_child.answer({"class": class_name, "config": config, "tensors": tensors or {}})

    if "child" not in request.fixturenames:
        monkeypatch.setattr(class_check, "ask_child", ask)


@pytest.fixture
def child() -> None:
    """For tests of the child process itself."""
