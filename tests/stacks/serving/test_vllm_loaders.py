"""Links from the loaders of vLLM's model classes: a transfer by them gives what vLLM loads, on every rank.

Set ``ENGINE_PACKAGES`` to folders with the unpacked wheel of vllm and the packages that its model classes import, or
install vllm. The tests are skipped where one of them is missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.stacks.serving.test_engines import folder_of
from tests.stacks.serving.vllm_loaders import MISSING, MODELS


@pytest.mark.skipif(folder_of("vllm") is None, reason="needs the files of vllm")
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model_type", MODELS)
def test_links_load_what_vllm_loads(model_type: str, ranks: int) -> None:
    """Bit for bit; with fused q, k and v, fused experts, and biases that one rank alone adds."""
    assert _run(model_type, str(ranks)) >= 15 * ranks


@pytest.mark.skipif(folder_of("vllm") is None, reason="needs the files of vllm")
@pytest.mark.parametrize("model_type", MODELS)
def test_vllm_applies_patches(model_type: str) -> None:
    """A model that vLLM has patched has the digests of one that it has loaded."""
    assert _run(model_type, "patch") > 1000


def _run(model_type: str, what: str) -> int:
    command = [sys.executable, "-m", "tests.stacks.serving.vllm_loaders", model_type, what]
    settings = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=settings)
    if done.returncode == MISSING:
        pytest.skip(f"vllm cannot be imported: {done.stdout}")
    assert done.returncode == 0, done.stderr[-4000:]
    return int(json.loads(done.stdout.splitlines()[-1]))
