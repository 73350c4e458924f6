"""mkdocs hook: inserts README into the site's first page and adapts its links, which start at the repository's root."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_PAGES = {
    "vescale_fsdp/DESIGN.md": "how_it_works.md",
    "checkpoint/FORMAT.md": "format.md",
    "CONTRIBUTING.md": "contribute.md",
    "CHANGELOG.md": "changes.md",
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert README at its marker in the first page."""
    if page.file.src_uri != "index.md":
        return markdown
    readme = (ROOT / "README.md").read_text()
    readme = re.sub(r"\]\(docs/", "](", readme)
    for source, target in _PAGES.items():
        readme = readme.replace(f"]({source})", f"]({target})")
    return markdown.replace("<!-- README -->", readme)
