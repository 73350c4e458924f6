"""Model classes answer in this process: a child takes six seconds of CPU. Tests of the child ask for it themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from vescale_fsdp.checkpoint.formats.huggingface import class_check, class_child


@pytest.fixture(autouse=True)
def _no_child(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def ask(config: Mapping[str, Any], class_name: str, tensors: Any = None) -> Mapping[str, Any]:
        return class_child.answer({"class": class_name, "config": config, "tensors": tensors or {}})

    if "child" not in request.fixturenames:
        monkeypatch.setattr(class_check, "ask_child", ask)


@pytest.fixture
def child() -> None:
    """For tests that want the child process."""
