"""Write the notebook `docs/start.ipynb` from the tutorial `docs/start.md`, block by block, with the outputs of a run.

python tools/docs/notebook.py           write it (make notebook); runs it, in two minutes, if its code has changed
python tools/docs/notebook.py --run     run it in any case, to store what this version prints
python tools/docs/notebook.py --check   exit code 1 if the notebook does not match the page
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "start.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
_BLOCK = re.compile(r"^```(python|sh)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# What other packages print while transformers is imported and loads weights.
_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}


def cells_of(page: str) -> list[dict[str, Any]]:
    """The notebook's cells: prose unchanged, python as cells, commands as ``!`` lines, files as ``%%writefile``."""
    cells: list[dict[str, Any]] = []
    done = 0
    for block in _BLOCK.finditer(page):
        language, title, code = block[1], block[2] or "", block[3].strip("\n")
        if title.startswith("not run by our tests:"):
            continue  # stays part of the prose
        _add(cells, "markdown", page[done : block.start()])
        if title:
            code = f"%%writefile {title}\n{code}"
        elif language == "sh":
            code = "\n".join(f"!{line}" for line in code.splitlines())
        _add(cells, "code", code)
        done = block.end()
    _add(cells, "markdown", page[done:])
    return cells


def _add(cells: list[dict[str, Any]], kind: str, text: str) -> None:
    if text.strip():
        more: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
        lines = text.strip("\n").splitlines(keepends=True)
        cells.append({"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, **more, "source": lines})


def digest_of(cells: list[dict[str, Any]]) -> str:
    """A digest of the code, which the notebook stores for the code that its outputs are of."""
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def with_outputs(page: str, outputs: list[list[Any]]) -> dict[str, Any]:
    """The notebook of a page, with the outputs of each cell of code, in order."""
    cells = cells_of(page)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for count, (cell, found) in enumerate(zip(code, outputs, strict=True), 1):
        cell["execution_count"], cell["outputs"] = count, found
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "outputs_of": digest_of(cells)}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def run(page: str, folder: Path) -> dict[str, Any]:
    """Run the page in a folder; returns its notebook with outputs, which contain no path of the folder.

    Raises:
        CellExecutionError: if a cell fails.
    """
    import nbformat
    from nbclient import NotebookClient

    empty = with_outputs(page, [[] for cell in cells_of(page) if cell["cell_type"] == "code"])
    node = nbformat.reads(json.dumps(empty), as_version=4)  # joins the lines of sources
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {"PATH": paths, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **_QUIET}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        resources = {"metadata": {"path": folder}}
        NotebookClient(
            node, timeout=600, kernel_name="python3", resources=resources, record_timing=False
        ).execute()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    code = (cell for cell in node.cells if cell["cell_type"] == "code")
    return with_outputs(page, [_stored(cell["outputs"], folder) for cell in code])


def _stored(found: list[Any], folder: Path) -> list[dict[str, Any]]:
    """A cell's outputs as they are stored: without the folder, and without the text of what has a picture.

    What is written to stderr is left out: warnings of other packages, which differ between machines.
    """
    kept: list[dict[str, Any]] = []
    for output in json.loads(json.dumps(found).replace(f"{folder.resolve()}/", "")):
        if output.get("name") == "stderr":
            continue
        if "text/html" in output.get("data", {}):
            output["data"].pop("text/plain", None)
        if "text" in output:
            output["text"] = output["text"].replace("\r\n", "\n")
            if kept and "text" in kept[-1]:
                kept[-1]["text"] += output["text"]
                continue
        kept.append(output)
    return kept


def outputs_of(book: dict[str, Any], page: str) -> list[list[Any]] | None:
    """The outputs that a notebook stores, if they are of the page's code; None if they are not."""
    if not book["metadata"].get("outputs_of") == digest_of(book["cells"]) == digest_of(cells_of(page)):
        return None
    return [cell["outputs"] for cell in book["cells"] if cell["cell_type"] == "code"]


def is_up_to_date(book: dict[str, Any], page: str) -> bool:
    """Whether a notebook has the page's cells, and outputs of these cells."""
    outputs = outputs_of(book, page)
    return outputs is not None and book == with_outputs(page, outputs)


def _main(arguments: list[str]) -> str | None:
    """Check or write the notebook; returns the error."""
    book, page = json.loads(NOTEBOOK.read_text()), PAGE.read_text()
    if "--check" in arguments:
        return None if is_up_to_date(book, page) else "docs/start.ipynb is not up to date: make notebook"
    outputs = None if "--run" in arguments else outputs_of(book, page)
    if outputs is not None:
        made = with_outputs(page, outputs)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            made = run(page, Path(scratch))
    NOTEBOOK.write_text(json.dumps(made, indent=1) + "\n")
    return None


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
