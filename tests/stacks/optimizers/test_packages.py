"""The optimizers of a dozen packages on sharded models: the values of one process, or an error that names the class."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from tests.stacks.optimizers.packages import PACKAGES, walk
from tests.support.distributed import run_ranks
from tools.docs.compatibility import OPTIMIZER_RESULTS

# They draw random numbers in their step, which depend on how parameters are sharded.
LEFT_OUT = {("pytorch_optimizer", "BSAM"), ("pytorch_optimizer", "Gravity")}
_AS_IT_IS = ("element", "rows:8", "whole")


def result_of(verdicts: dict[str, str]) -> str:
    """The column of a class: the first of which all its verdicts are true."""
    as_it_is = {verdicts[way] for way in _AS_IT_IS}
    if as_it_is == {"bits"}:
        return "bits"
    if as_it_is <= {"bits", "tolerance"}:
        return "rounding"
    return "owner" if verdicts.get("owner") in ("bits", "tolerance") else "refused"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_class_has_the_values_of_one_process_or_is_refused_by_name(
    package: str, request: pytest.FixtureRequest
) -> None:
    """By element, by rows, by whole parameters and by OwnerOptimizer."""
    verdicts: dict[str, dict[str, str]] = run_ranks(2, walk, package, timeout_s=900.0)[0]

    stepped = {name: own for name, own in verdicts.items() if "alone" not in own}
    wrong = {
        (name, way): verdict
        for name, own in stepped.items()
        for way, verdict in own.items()
        if not verdict.startswith(("bits", "tolerance", "refused:")) and (package, name) not in LEFT_OUT
    }
    assert not wrong
    assert stepped
    row: dict[str, Any] = {result: [] for result in OPTIMIZER_RESULTS}
    for name, own in sorted(stepped.items()):
        if (package, name) not in LEFT_OUT:
            row[result_of(own)].append(name)
    # Not by `record_property`, which warns under --junitxml.
    recorded = {package: {"version": version(package).partition("+")[0], **row}}
    request.node.user_properties.append(("optimizers", recorded))
