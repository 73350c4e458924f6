"""`open_zarr`: opens a zarr hierarchy of version 2 or 3 as a `Source`, in which each array is a tensor."""

from __future__ import annotations

import base64
from typing import Any

from vescale_fsdp.checkpoint.formats.zarr.arrays import ARRAY_FILE, DAMAGE, Arrays, damaged, read_metadata
from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME, ZARR_NAME
from vescale_fsdp.checkpoint.moves.source import Source, StoredValue, constant
from vescale_fsdp.checkpoint.state.nesting import ListIndex
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import CorruptCheckpointError

# Attribute of the root group in which older versions of to-zarr stored values that are not tensors.
_ATTRIBUTE = "vescale_conversion"


def has_manifest(store: Storage) -> bool:
    """Return whether the folder is a native checkpoint in the zarr form that has its manifest."""
    if store.size(ZARR_NAME) is None:
        return False
    attributes = read_metadata(store, ZARR_NAME).get("attributes") or {}
    return "manifest" in attributes and store.size(MANIFEST_NAME) is not None


def open_zarr(store: Storage) -> Source:
    """Open a group or a single array of version 2 or 3. Reads metadata and the list of files.

    Raises:
        CorruptCheckpointError: if metadata is damaged, or a chunk's file has the wrong size.
    """
    files = set(store.list_files())
    arrays = Arrays(store, files)
    if ZARR_NAME not in files:  # version 2
        # Sorted, since a conversion's plan depends on the order of the tensors.
        for file in sorted(name for name in files if name.rpartition("/")[2] == ARRAY_FILE):
            with arrays.damaged.noted():
                arrays.add(file.removesuffix(ARRAY_FILE).rstrip("/"))
        arrays.damaged.raise_any()
        facts = {"arrays": str(len(arrays.tensors)), "zarr version": "2"}
        return Source(
            "zarr", store, arrays.tensors, facts=facts, readers=arrays.readers, decoded=arrays.decoded
        )
    root = read_metadata(store, ZARR_NAME)
    for file in sorted(name for name in files if name.endswith(ZARR_NAME)):
        with arrays.damaged.noted():
            metadata = root if file == ZARR_NAME else read_metadata(store, file)
            if metadata.get("node_type") == "array":
                arrays.add(file.removesuffix(ZARR_NAME).rstrip("/"), metadata=metadata)
    arrays.damaged.raise_any()
    try:
        # `or {}`: fields may be missing or null.
        content = (root.get("attributes") or {}).get(_ATTRIBUTE) or {}
        values: dict[str, StoredValue] = {
            str(name): constant(_from_json_1(value)) for name, value in (content.get("values") or {}).items()
        }
        paths = arrays.paths | {
            # JSON stores an index of a list as a list of one number; a plain number is a key of a dict.
            str(name): tuple(ListIndex(part[0]) if isinstance(part, list) else part for part in parts)
            for name, parts in (content.get("paths") or {}).items()
        }
    except DAMAGE as error:
        raise damaged(store, ZARR_NAME, error) from error
    # A conversion's plan depends on the order, so it must not vary: as in the saved state where that is known, then by
    # file name.
    tensors = {
        name: arrays.tensors[name] for name in (*filter(arrays.tensors.__contains__, paths), *arrays.tensors)
    }
    facts = {"arrays": str(len(tensors)), "decoded by zarr": str(len(arrays.readers))}
    return Source("zarr", store, tensors, values, paths, facts, arrays.readers, arrays.decoded)


def _from_json_1(data: Any) -> Any:
    """Decode a value that an older version of to-zarr wrote; newer versions write native checkpoints.

    JSON values are themselves. Tuples, bytes, special floats, and dicts with keys other than plain strings are encoded
    as an object with the single key ``$``.

    Raises:
        CorruptCheckpointError: for an unknown marker.
    """
    if isinstance(data, list):
        return [_from_json_1(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "$" not in data:
        return {key: _from_json_1(value) for key, value in data.items()}
    match data["$"]:
        case ["float", str(text)]:
            return float(text)
        case ["bytes", str(text)]:
            return base64.b64decode(text)
        case ["tuple", list(items)]:
            return tuple(_from_json_1(item) for item in items)
        case ["dict", list(pairs)]:
            return {_from_json_1(key): _from_json_1(value) for key, value in pairs}
    raise CorruptCheckpointError(
        "A stored value is damaged.", expected="a known marker", got=data["$"], todo="use another copy"
    )
