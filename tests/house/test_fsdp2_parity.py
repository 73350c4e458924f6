"""docs/fsdp2_parity.md says what is so: against torch's class and functions, and ours."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import fsdp

import vescale_fsdp
from tests.house.conftest import failures
from vescale_fsdp.errors import UnsupportedOpError
from vescale_fsdp.runtime import group_plan

DOCUMENT = Path(__file__).parents[2] / "docs" / "fsdp2_parity.md"


def rows(section: str) -> dict[str, str]:
    """Name -> verdict of the table in a section."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    return dict(re.findall(r"^\| `(\w+)`[^|]*\| ([^|]*?) \|", text, re.MULTILINE))


METHODS = rows("FSDPModule")


def public(cls: type) -> set[str]:
    return {name for name, member in vars(cls).items() if callable(member) and not name.startswith("_")}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_every_public_method_is_in_the_table() -> None:
    """torch's and ours, and none besides, but those of another torch."""
    theirs, ours = public(fsdp.FSDPModule), public(vescale_fsdp.FSDPModule)
    assert METHODS
    assert theirs <= METHODS.keys() and ours <= METHODS.keys()
    assert {name for name, verdict in METHODS.items() if verdict == "ours"} == {
        name
        for name in ours - theirs
        if name in METHODS and "(" not in METHODS[name]  # "(torch 2.15)" and the like
    }
    assert all("torch" in METHODS[name] for name in METHODS.keys() - theirs - ours)


def test_same_methods_have_torchs_parameters() -> None:
    """By name, kind and default, where this torch has the method."""
    same = [name for name, verdict in METHODS.items() if verdict.startswith("same")]
    assert same
    assert not (failed := failures(_compare_parameters, same)), failed


def _compare_parameters(name: str) -> None:
    ours = parameters(vars(vescale_fsdp.FSDPModule)[name])
    torchs = vars(fsdp.FSDPModule).get(name)
    assert ours[0][0] == "self"
    if torchs is not None:
        assert ours == parameters(torchs)
    else:
        assert any(each in METHODS[name] for each in ("(torch", "(after torch", "(not in torch"))


def test_refused_methods_raise_by_name() -> None:
    """Those that this torch has; the others do not exist."""
    found = 0
    module: Any = object.__new__(vescale_fsdp.FSDPModule)
    for name in (name for name, verdict in METHODS.items() if verdict.startswith("refused")):
        method = vars(vescale_fsdp.FSDPModule).get(name)
        if method is None:
            assert "after" in METHODS[name] and name not in vars(fsdp.FSDPModule)
            continue
        with pytest.raises(UnsupportedOpError, match=name):
            method(module, *["NCCL"] * (len(parameters(method)) - 1))
        found += 1
    assert found >= 2


def test_arguments_and_policies_are_in_the_tables() -> None:
    """All of torch's arguments in torch's order, then ours; all fields that are followed."""
    arguments = rows("fully_shard")
    theirs, ours = parameters(fsdp.fully_shard), parameters(vescale_fsdp.fully_shard)
    assert [name for name, _, _ in ours] == list(arguments)
    assert ours[: len(theirs)] == theirs
    assert [name for name, verdict in arguments.items() if verdict == "ours"] == [
        name for name, _, _ in ours[len(theirs) :] if "torch" not in arguments[name]
    ]

    fields = rows("MixedPrecisionPolicy, CPUOffloadPolicy")
    assert set().union(*group_plan._FOLLOWED.values()) == fields.keys() - {"grad_dtype"}
    for policy in (fsdp.MixedPrecisionPolicy, fsdp.CPUOffloadPolicy):
        assert {field.name for field in dataclasses.fields(policy)} <= fields.keys()
    for name in ("register_fsdp_forward_method", "share_comm_ctx"):
        assert name in rows("Functions")
        assert [p[0] for p in parameters(vars(fsdp)[name])] == [
            p[0] for p in parameters(getattr(vescale_fsdp, name))
        ]
