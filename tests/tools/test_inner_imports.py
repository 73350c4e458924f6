"""`tools.inner_imports` tells a room's own names from those of other rooms, and patches of ours from those of torch."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.inner_imports import inner_names, patches
from tools.torchrun_job import ROOT

TEST = """
import vescale_fsdp.checkpoint.native.write
from vescale_fsdp.checkpoint import native, save
from vescale_fsdp.checkpoint.native.write import FileImage
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.layout.packing import Position, RepeatedSizes
"""
PATCHES = """
import os, torch
from vescale_fsdp.checkpoint import storage
def test(monkeypatch, manager):
    monkeypatch.setattr(os, "fsync", None)
    mock.patch.object(torch, "empty")
    patched.setattr(manager, "save", None)
    with mock.patch("vescale_fsdp.checkpoint.save.Saver"), mock.patch("torch.empty"):
        mock.patch.dict(storage.TABLE, a=1)
    setattr(manager, "save", None)
"""


def test_names_of_other_rooms(tmp_path: Path) -> None:
    """Public names and fronts never count; a room's inner names only outside of it."""
    # A module whose public function has its name.
    (tmp_path / "vescale_fsdp/checkpoint").mkdir(parents=True)
    (tmp_path / "vescale_fsdp/checkpoint/save.py").touch()
    for folder in (
        "vescale_fsdp/checkpoint/native",
        "vescale_fsdp/layout",
        "tests/checkpoint/native",
        "tests/house",
    ):
        (tmp_path / folder).mkdir(parents=True)
    names = {}
    for file in ("tests/checkpoint/native/test_write.py", "tests/house/test_write.py"):
        (tmp_path / file).write_text(TEST)
        names[file] = inner_names(tmp_path, Path(file))

    layout = ["vescale_fsdp.layout.packing.Position", "vescale_fsdp.layout.packing.RepeatedSizes"]
    native = ["", ".write", ".write.FileImage"]
    assert names["tests/checkpoint/native/test_write.py"] == layout
    assert names["tests/house/test_write.py"] == [
        *(f"vescale_fsdp.checkpoint.native{name}" for name in native),
        *layout,
    ]
    assert inner_names(ROOT, Path(__file__).relative_to(ROOT)) == []


def test_patches_of_other_packages_do_not_count() -> None:
    """Nor does the built-in `setattr`."""
    assert patches(ast.parse(PATCHES)) == [7, 8, 9]
