"""The tested versions of each training stack, and a warning for any other version."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from vescale_fsdp.errors import UntriedVersionWarning, callers_level, explain

# For each package, the versions with which `make test-stacks` passed. README, docs/stacks.md, docs/compatibility.json
# and pyproject's extras list the same versions (checked by tests/vescale_fsdp/integrations/test_tried_versions.py).
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
        "verl": ("0.9.1",),
    }
)

# For each inference engine, the versions whose own classes took what `weight_sync` makes.
# tests/stacks/serving/test_engines.py loads their modules from the package's files. The engines themselves, which need
# GPUs, were not run.
TRIED_MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"sglang": ("0.5.22", "0.5.23"), "vllm": ("0.33.0",)}
)


def check_version(package: str) -> bool:
    """Return whether the installed version of a stack was tested. If not, issue an `UntriedVersionWarning`.

    Args:
        package: name of the stack.
    """
    try:
        installed = version(package)
    except PackageNotFoundError:  # the package was imported from a source tree, without metadata
        installed = "of unknown version"
    tried = TRIED[package] if package in TRIED else TRIED_MODULES[package]
    if installed in tried:
        return True
    warnings.warn(
        explain(
            f"This version of {package} was not tested with vescale_fsdp.",
            expected=f"{package} {' or '.join(tried)}",
            got=f"{package} {installed}",
            todo="compare a few losses with stock FSDP2, or install a version that docs/compatibility.md lists",
        ),
        UntriedVersionWarning,
        stacklevel=callers_level(),
    )
    return False
