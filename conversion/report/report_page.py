"""The page: a template with the report in it as JSON. It fetches nothing, and runs nothing that a checkpoint says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

_PLACE = "REPORT_DATA"


def report_page(report: Mapping[str, Any]) -> str:
    """One HTML document.

    Args:
        report: what `checkpoint_report` gives.
    """
    files = resources.files(__package__)
    page = files.joinpath("page.html").read_text(encoding="utf-8")
    for name in ("page.css", "page.js"):
        page = page.replace(f"/* {name} */", files.joinpath(name).read_text(encoding="utf-8"))
    # Names come from a file: none may end the script element, whatever it is called.
    data = json.dumps(report, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    before, _, after = page.partition(_PLACE)
    return f"{before}{data}{after}"
