"""The snapshot of behavior: its comparison finds what differs, and its digests see single bytes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tools.snapshot import Scrubber, differences, main, record
from vescale_fsdp.errors import CheckpointError


def _recorded(folder: Path) -> dict[str, Any]:
    """A small record: of a folder's files, of an error, and of names."""
    scrubber = Scrubber(folder)
    error = CheckpointError("Planted.", expected=3, got=[4], where=f"{folder}/a")
    return {
        "files": scrubber.files(folder),
        "error": scrubber.error(error),
        "names": {"pkg": {"load": "(path)"}},
    }


def test_a_byte_an_attribute_and_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of them is found where it is; equal records are equal, wherever the folder is."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.arange(9.0)}, tmp_path / name / "w.safetensors")
    before = _recorded(tmp_path / "one")
    assert differences(before, _recorded(tmp_path / "two")) == []
    assert before["error"] == {
        "error": "CheckpointError",
        "expected": 3,
        "got": "[4]",
        "where": "TMP/a",
        "todo": None,
    }

    data = bytearray((tmp_path / "two" / "w.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "two" / "w.safetensors").write_bytes(data)
    after = _recorded(tmp_path / "two")
    after["error"]["got"] = "[5]"
    del after["names"]["pkg"]["load"]
    places = [line.split(":")[0] for line in differences(before, after)]
    assert places == ["files / w.safetensors", "error / got", "names / pkg / load"]

    for name, value in {"a": before, "b": copy.deepcopy(before), "c": after}.items():
        (tmp_path / name).write_text(json.dumps(value))
    assert main(["--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert main(["--compare", str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(places)


def test_a_number_is_not_its_text() -> None:
    """Values of other types differ, in lists too."""
    assert (
        differences({"got": 1}, {"got": True}) and differences([1], [2]) and differences({"a": 1}, {"a": "1"})
    )


def test_public_names_with_signatures() -> None:
    """The same in two runs."""
    names = record("names")
    assert names["names"]["vescale_fsdp.checkpoint"]["load"].startswith("(path")
    assert differences(names, record("names")) == []
