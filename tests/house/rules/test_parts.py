"""`make test-all` and CI know all parts of the tests."""

from __future__ import annotations

import re

from tests.conftest import PARTS
from tests.house.conftest import ROOT


def test_parts_have_the_same_numbers_everywhere() -> None:
    """`make test-all` runs each, CI chooses among all, CONTRIBUTING.md names them in their order."""
    (looped,) = re.findall(r"^\tfor part in ([\d ]+);", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (chosen_among,) = re.findall(r"^parts=(\d+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    named = re.findall(r"^\| (\d+) `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)

    assert looped.split() == [str(number) for number in range(1, len(PARTS) + 1)]
    assert int(chosen_among) == len(PARTS)
    assert named == [(str(number), name) for number, name in enumerate(PARTS, 1)]
