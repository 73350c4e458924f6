"""Checks that a test's errors come from the sites whose remedies it claims to run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.remedies.applied import CAUGHT, RUN
from tests.remedies.sites import site_of, sites
from vescale_fsdp.errors import VescaleError


@pytest.fixture(autouse=True)
def _sites_of_errors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    built: dict[str, set[str | None]] = {}  # site -> remedies
    build = VescaleError.__init__

    def note(self: VescaleError, problem: str, **parts: Any) -> None:
        build(self, problem, **parts)
        if self.todo is not None and (site := site_of(sys._getframe(1))):
            built.setdefault(site, set()).add(self.todo)

    monkeypatch.setattr(VescaleError, "__init__", note)
    CAUGHT.clear()
    sites()  # parses all files here, not where an error is built deep in a stack
    yield
    claimed = RUN.get(f"{request.function.__module__}.{request.function.__name__}", ())
    if "site" in request.node.funcargs:  # one test for many sites
        claimed = (request.node.funcargs["site"],)
    others = [site for site in claimed if not built.get(site, set()) & set(CAUGHT)]
    assert not others, f"no caught error is of {others}; errors were of {sorted(built)}"
