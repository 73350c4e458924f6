"""The table of versions that were tried: one truth in its places, and a warning for any other version."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed.fsdp as torch_fsdp

from tools.docs import compatibility
from vescale_fsdp.errors import ArgumentError, UntriedVersionWarning
from vescale_fsdp.integrations import as_fsdp2, install, tried_versions
from vescale_fsdp.integrations.tried_versions import TRIED, check_version

ROOT = Path(__file__).parents[3]
ONLY_NEEDED = (
    "jax",
    "fsspec",
    "s3fs",
    "gcp-storage-emulator",
    "tensordict",
    "torchft",
)  # by Orbax, gcsfs, a test of it, verl, torchtitan's replica groups

UNREPLACED = {"ray": "2.60.0"}  # no function of it is replaced, so nothing looks at its version


def test_extras_pin_what_was_tried() -> None:
    """pyproject's extras install each stack in a version of the table, and every stack has an extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = {
        re.split(r"[\[=]", pin)[0]: pin.split("==")[1]
        for extra, pins in extras.items()
        for pin in pins
        if "==" in pin and extra != "docs"
    }

    assert pinned.keys() == TRIED.keys() | UNREPLACED.keys()
    assert all(version in (*TRIED.get(name, ()), UNREPLACED.get(name)) for name, version in pinned.items())


def test_the_makefile_installs_what_was_tried() -> None:
    """What `make test-stacks` installs by name is of the table."""
    named = re.findall(r"([\w-]+)==([\d.]+)", (ROOT / "Makefile").read_text())

    assert ("nemo_automodel", TRIED["nemo_automodel"][0]) in named
    assert all(version in TRIED[name] for name, version in named if name in TRIED)
    data = json.loads(compatibility.DATA.read_text())
    optimizers = {name: row["version"] for name, row in data["optimizers"].items()}
    files = {name: row["versions"] for name, row in data["files"].items()}
    listed = {name: version for name, version in named if name not in (*TRIED, *ONLY_NEEDED)}
    assert files | {name: [version] for name, version in optimizers.items() if name in listed} == {
        name: [version] for name, version in listed.items()
    }


@pytest.mark.parametrize("page", ["README.md", "docs/stacks.md", "docs/compatibility.md"])
def test_pages_say_what_was_tried(page: str) -> None:
    """The table of each has a row for each stack, with its versions."""
    text = (ROOT / page).read_text()
    rows = dict(re.findall(r"^\| (\w+)[^|]*\| ([\d., ]+) \|", text, re.MULTILINE))

    assert {name: rows[name] for name in TRIED} == {name: ", ".join(tried) for name, tried in TRIED.items()}
    assert page == "docs/compatibility.md" or UNREPLACED.items() <= rows.items()


def test_the_machine_readable_table_says_it_too() -> None:
    """docs/compatibility.json has the same versions, and its page the tables that follow from it."""
    data = json.loads(compatibility.DATA.read_text())

    assert {name: tuple(row["versions"]) for name, row in data["stacks"].items()} == dict(TRIED)
    assert all(table in compatibility.PAGE.read_text() for table in compatibility.tables(data).values())


def test_what_passes_is_noted() -> None:
    """A run on another torch adds its row, a run of the stacks replaces theirs; nothing else changes."""
    data = json.loads(compatibility.DATA.read_text())
    installed = {"torch": "2.99.1+cpu", **dict.fromkeys((*TRIED, *data["files"]), "7.0")}
    on_torch = compatibility.noted(data, "torch", installed.__getitem__, "2027-01-02")
    of_stacks = compatibility.noted(data, "stacks", installed.__getitem__, "2027-01-02")

    assert on_torch["torch"] == data["torch"] | {
        "2.99.1": {"tests": "all", "result": "pass", "date": "2027-01-02"}
    }
    assert on_torch["stacks"] == data["stacks"] and of_stacks["torch"] == data["torch"]
    assert of_stacks["files"]["deepspeed"] == of_stacks["stacks"]["trl"]
    assert of_stacks["stacks"]["trl"] == {"versions": ["7.0"], "torch": "2.99.1", "date": "2027-01-02"}


def test_another_version_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untried version is named with those of the table; a tried one is met with silence."""
    monkeypatch.setattr(tried_versions, "version", lambda package: "99.0")
    with pytest.warns(UntriedVersionWarning, match=r"trl 1\.16\.0\n(.|\n)*trl 99\.0"):
        check_version("trl")
    monkeypatch.setitem(sys.modules, "trl", ModuleType("trl"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        install().uninstall()
        with as_fsdp2():
            pass
    of_trl = [warning for warning in caught if "trl 99.0" in str(warning.message)]
    assert [warning.category for warning in of_trl] == [UntriedVersionWarning] * 2
    assert {warning.filename for warning in of_trl} == {__file__}
    monkeypatch.delitem(sys.modules, "trl")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with as_fsdp2():
            monkeypatch.setitem(sys.modules, "trl", ModuleType("trl"))  # imported after the installation
            for _ in range(2):
                with pytest.raises(ArgumentError, check=lambda error: "NoneType" in error.got):
                    torch_fsdp.fully_shard(None)  # type: ignore[call-overload]
    assert [w.category for w in caught if "trl 99.0" in str(w.message)] == [UntriedVersionWarning]
    monkeypatch.setattr(tried_versions, "version", lambda package: TRIED[package][0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version("trl")
