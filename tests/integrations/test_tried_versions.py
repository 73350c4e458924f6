"""The table of versions that were tried: one truth in three places, and a warning for any other version."""

from __future__ import annotations

import re
import sys
import tomllib
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed.fsdp as torch_fsdp

from vescale_fsdp.integrations import UntriedVersionWarning, as_fsdp2, install, tried_versions
from vescale_fsdp.integrations.tried_versions import TRIED, check_version

ROOT = Path(__file__).parents[2]


def test_extras_pin_what_was_tried() -> None:
    """pyproject's extras install each stack in a version of the table, and every stack has an extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = {
        pin.split("==")[0]: pin.split("==")[1] for pins in extras.values() for pin in pins if "==" in pin
    }

    assert pinned.keys() == TRIED.keys()
    assert all(version in TRIED[name] for name, version in pinned.items())


def test_the_makefile_installs_what_was_tried() -> None:
    """What `make test-stacks` installs by name is of the table."""
    named = re.findall(r"(\w+)==([\d.]+)", (ROOT / "Makefile").read_text())

    assert ("nemo_automodel", TRIED["nemo_automodel"][0]) in named
    assert all(version in TRIED[name] for name, version in named if name in TRIED)


def test_readme_says_what_was_tried() -> None:
    """README's compatibility table has a row for each stack, with its versions."""
    rows = dict(re.findall(r"^\| (\w+)[^|]*\| ([\d., ]+) \|", (ROOT / "README.md").read_text(), re.MULTILINE))

    assert {name: rows[name] for name in TRIED} == {name: ", ".join(tried) for name, tried in TRIED.items()}


def test_another_version_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untried version is named with those of the table; a tried one is met with silence."""
    monkeypatch.setattr(tried_versions, "version", lambda package: "99.0")
    with pytest.warns(UntriedVersionWarning, match=r"expected: trl 1\.16\.0\n(.|\n)*got: trl 99\.0"):
        check_version("trl")
    monkeypatch.setitem(sys.modules, "trl", ModuleType("trl"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        install().uninstall()
    assert [w.category for w in caught if "trl 99.0" in str(w.message)] == [UntriedVersionWarning]
    monkeypatch.delitem(sys.modules, "trl")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with as_fsdp2():
            for _ in range(2):  # imported after the installation, and sharding
                with pytest.raises(ValueError, match="takes modules"):
                    eval(
                        "fully_shard(None)", {"__name__": "trl.models", "fully_shard": torch_fsdp.fully_shard}
                    )
    assert [w.category for w in caught if "trl 99.0" in str(w.message)] == [UntriedVersionWarning]
    monkeypatch.setattr(tried_versions, "version", lambda package: TRIED[package][0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version("trl")
