"""The box above a long table of the site filters its rows, in a browser without a network."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.processes import run_command

CHROMIUM = shutil.which("chromium")
DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.part("pages")
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("", ["llama", "llama4", "qwen3"]),
        ("LLAMA", ["llama", "llama4"]),
        ("llama moe", ["llama4"]),
        ("x", []),
    ],
)
def test_rows_with_all_words_are_shown(tmp_path: Path, words: str, shown: list[str]) -> None:
    """In any case and order; the address has the words, as a link to a model does."""
    rows = [("llama", "LlamaModel"), ("llama4", "a moe"), ("qwen3", "moe")]
    body = "".join(f"<tr><td>{name}</td><td>{text}</td></tr>" for name, text in rows)
    table = f"<table><thead><tr><th>llama moe x</th></tr></thead><tbody>{body}</tbody></table>"
    page = tmp_path / "page.html"
    script = (DOCS / "site.js").read_text()
    box = "<label><input><output></output></label>"
    page.write_text(f'<body><div class="long">{box}{table}</div><script>{script}</script>')
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
    ]
    address = f"{page.as_uri()}#filter={words.replace(' ', '+')}"
    document = run_command([str(CHROMIUM), *flags, address], timeout_s=120, check=True).stdout

    assert re.findall(r"<tr><td>(\w+)", document) == shown
    assert f"<output>{len(shown)} of 3</output>" in document
