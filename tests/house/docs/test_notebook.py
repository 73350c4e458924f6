"""The tutorial runs from start to end, as the notebook that its page gives."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tools.docs.notebook import NOTEBOOK, PAGE, notebook_of


def test_the_notebook_is_the_page() -> None:
    """`python tools/docs/notebook.py` has been run since the page was changed."""
    assert NOTEBOOK.read_text() == notebook_of(PAGE.read_text())


def test_tutorial(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, kill, go on with three, look, export, load: with what the page says is to be seen."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(PAGE.parent.parent))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    book = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}
    ).execute()
    printed = "".join(out.get("text", "") for cell in book.cells for out in cell.get("outputs", []))

    assert "killed, as planned" in printed
    assert "step 40 on 2 ranks" in printed and "step 100" not in printed
    assert "went from step 40 to 80 on 3 ranks" in printed
    assert "0 problems" in printed
    assert {"layout.svg", "report.html"} <= {file.name for file in folder.iterdir()}
    assert "def read(self" in printed
