"""Write the notebook `docs/start.ipynb` from the tutorial `docs/start.md`, block by block.

python tools/docs/notebook.py           write it
python tools/docs/notebook.py --check   exit code 1 if the notebook does not match the page
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "start.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
_BLOCK = re.compile(r"^```(python|sh)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def notebook_of(page: str) -> str:
    """The notebook's JSON: prose unchanged, python as cells, commands as ``!`` lines, files as ``%%writefile``."""
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
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1) + "\n"


def _add(cells: list[dict[str, Any]], kind: str, text: str) -> None:
    if text.strip():
        more: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
        lines = text.strip("\n").splitlines(keepends=True)
        cells.append({"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, **more, "source": lines})


if __name__ == "__main__":
    made = notebook_of(PAGE.read_text())
    if "--check" in sys.argv[1:]:
        sys.exit(0 if NOTEBOOK.read_text() == made else "docs/start.ipynb is not up to date")
    NOTEBOOK.write_text(made)
