"""What makes a folder a checkpoint of this format, or a step of a run: the names that tell without reading."""

from __future__ import annotations

import re

FORMAT_NAME = "vescale-checkpoint"
FORMAT_VERSION = 2  # the newest that is read; what each brought: FORMAT.md
MANIFEST_NAME = "manifest.json"
ZARR_NAME = "zarr.json"  # metadata of an array or a group

_STEP = re.compile(r"step-(\d{8,})")
_RANK_FILE = re.compile(r"(\d{5,})-of-\d{5,}\.safetensors")


def step_name(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:08d}"


def parse_step_name(name: str) -> tuple[int, str] | None:
    """(step, name) of a step's folder; None for every other name, also for a step's number in another form."""
    match = _STEP.fullmatch(name)
    return (int(match[1]), name) if match and step_name(int(match[1])) == name else None


def parse_rank_file_name(name: str) -> int | None:
    """The rank that wrote a file of this name, as `Manifest.file_name` gives it; None for every other name."""
    match = _RANK_FILE.fullmatch(name)
    return int(match[1]) if match else None
