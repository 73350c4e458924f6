"""JSON of zarr hierarchies, and the one error for what cannot be used of them."""

from __future__ import annotations

from typing import Any

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.foreign_json import parse_json

DAMAGE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What metadata that lacks something makes its readers raise."""


def read_metadata(store: Storage, file: str, version: int = 3) -> dict[str, Any]:
    """What a metadata file says.

    Raises:
        CorruptCheckpointError: if it is no JSON, or of another version.
    """
    try:
        found = parse_json(store.read(file))
        if not isinstance(found, dict) or found.get("zarr_format") != version:
            raise ValueError(f"zarr_format is not {version} but {found!r:.60}")
    except ValueError as error:
        raise damaged(store, file, error) from error
    return found


def damaged(store: Storage, file: str, error: Exception) -> CorruptCheckpointError:
    """A hierarchy that cannot be used, because of this file."""
    return CorruptCheckpointError(
        "A zarr hierarchy cannot be used.",
        expected="zarr metadata of regular arrays, and chunks that their codecs decode",
        got=f"{type(error).__name__}: {error}",
        where=f"{store.where}/{file}",
        todo="copy the hierarchy again from where it was made",
    )
