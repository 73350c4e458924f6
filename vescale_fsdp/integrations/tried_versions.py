"""The versions of each stack that our examples were run with, and a warning for any other."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from vescale_fsdp.errors import UntriedVersionWarning, explain

# Package -> versions that `make test-stacks` passed with. README, docs/stacks.md, docs/compatibility.json and
# pyproject's extras say the same (tests/integrations/test_tried_versions.py).
TRIED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "accelerate": ("1.15.0",),
        "lightning": ("2.6.6",),
        "nemo_automodel": ("0.7.0",),
        "peft": ("0.21.2",),
        "torch_checkpointing": ("0.1.1",),
        "torchtitan": ("0.3.0",),
        "transformers": ("5.23.0",),
        "trl": ("1.16.0",),
    }
)


def check_version(package: str) -> bool:
    """Whether the installed version of a stack is one that was tried; a warning if not."""
    try:
        installed = version(package)
    except PackageNotFoundError:  # it runs from its sources
        installed = "of no known version"
    if installed in TRIED[package]:
        return True
    warnings.warn(
        explain(
            f"This version of {package} was not tried with vescale_fsdp.",
            expected=f"{package} {' or '.join(TRIED[package])}",
            got=f"{package} {installed}",
            todo="compare a few losses with stock FSDP2's, or install a version of the table in docs/compatibility.md",
        ),
        UntriedVersionWarning,
        stacklevel=3,
    )
    return False
