"""What examples may count on: a folder of their own and a process group of one rank, as under ``torchrun``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone, ended behind the test."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which relative paths mean."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
