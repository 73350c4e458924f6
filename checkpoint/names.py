"""What makes a folder a checkpoint of this format: the names that tell without reading anything."""

from __future__ import annotations

__all__ = ["FORMAT_NAME", "FORMAT_VERSION", "MANIFEST_NAME"]

FORMAT_NAME = "vescale-checkpoint"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
