"""Every wait of the runtime and of checkpoints for a stream or an event is needed: without it, some program is wrong.

`make test-device` removes each wait from the programs that execute it, until one has wrong values, an unordered access,
or an error. `make test` lets the waits that come before a free come after it.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.async_device import needs_device, run_on_device
from tests.support.async_device.waits import Wait, all_waits, changed, executed
from tests.support.distributed import RankError, RankTimeout
from tests.vescale_fsdp.device.programs import Program, draw
from tests.vescale_fsdp.device.test_programs import IS_LONG, PARITY, needs_fresh, run, world_size

pytestmark = needs_device()

WAITS = all_waits() if IS_LONG else []
TRIED: tuple[str | Program, ...] = (*PARITY, *map(draw, range(60)))
ORDERS = (("sides last", 0), ("sides first", 0), ("late", 0), ("uneven", 0))


def _executed(name: str | Program) -> list[tuple[str, int]]:
    executed.clear()
    run(name, ("early", 0))
    return sorted(executed)


@cache
def _programs_of() -> dict[Wait, list[str | Program]]:
    programs: dict[Wait, list[str | Program]] = {wait: [] for wait in WAITS}
    for name in TRIED:
        fresh = needs_fresh(name)
        lines = run_on_device(world_size(name), _executed, name, timeout_s=300, fresh=fresh)[0]
        for wait in WAITS:
            if any(file == wait.file and wait.first <= line <= wait.last for file, line in lines):
                programs[wait].append(name)
    return programs


def _run_changed(wait: Wait, name: str | Program, order: tuple[str, int], is_late: bool) -> list[str]:
    with changed(wait, is_late=is_late):
        return run(name, order)


def _id(wait: Wait) -> str:
    return f"{wait.file}:{wait.first} {wait.text}"


@pytest.mark.skipif(not IS_LONG, reason="runs in make test-device")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("wait", WAITS, ids=_id)
def test_a_program_is_wrong_without_the_wait(wait: Wait) -> None:
    programs = _programs_of()[wait]
    assert programs, "no program executes this wait"
    for name in programs:
        for order in ORDERS:
            try:
                results = run_on_device(
                    world_size(name),
                    _run_changed,
                    wait,
                    name,
                    order,
                    False,
                    timeout_s=300,
                    fresh=needs_fresh(name),
                )
            except (RankError, RankTimeout) as error:
                print(f"{_id(wait)}: {name}, {order}: {str(error).splitlines()[-1]}")
                return
            if any(results):
                print(f"{_id(wait)}: {name}, {order}: {next(filter(None, results))[0]}")
                return
    pytest.fail(f"right without the wait: {programs}")


# A function that frees memory after it waits, and a program that is wrong if the function frees first.
FREES = [
    ("_free_full", Program(model="mixed dtypes, frozen matrices")),  # `reshard` and `free_lingering`
    ("_release", Program(model="mixed dtypes, frozen matrices", offload=True)),  # copies from the host
    (
        "_release",
        Program(mesh="replicas", world_size=4, micro_batches=2),
    ),  # reduced shards, which are added to gradients
    ("_wait_until_reduced", Program(optimizer="AdamW")),
    ("write_kept", Program(model="side streams in units")),
]


@pytest.mark.parametrize(("function", "name"), FREES)
def test_memory_that_is_freed_before_its_stream_waits_is_found(function: str, name: str | Program) -> None:
    """Under the native allocator such a wait would be in time, because it comes before the stream's next work."""
    found = [
        hazard
        for wait in all_waits()
        if wait.function == function
        for results in run_on_device(
            world_size(name), _run_changed, wait, name, ("early", 0), True, fresh=needs_fresh(name)
        )
        for hazard in results
    ]

    assert any("freed" in hazard for hazard in found), found
