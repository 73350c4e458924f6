"""`open_zarr`: opens a zarr hierarchy of version 2 or 3 as a `Source`, in which each array is a tensor."""

from __future__ import annotations

from vescale_fsdp.checkpoint.manifest.file_names import CHECKPOINT_NODE, ZARR_NAME, manifest_file
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.formats.zarr.arrays import ARRAY_FILE, Arrays, read_metadata


def has_manifest(store: Storage) -> bool:
    """Return whether the folder is a native checkpoint in the zarr form that has its manifest."""
    if store.size(ZARR_NAME) is None:
        return False
    attributes = read_metadata(store, ZARR_NAME).get("attributes") or {}
    return "manifest" in attributes and manifest_file(store) is not None


def open_zarr(store: Storage) -> Source:
    """Open a group or a single array of version 2 or 3. Reads metadata and the list of files.

    Raises:
        CorruptCheckpointError: if metadata is damaged, or a chunk's file has the wrong size.
    """
    files = set(store.list_files())
    arrays = Arrays(store, files)
    is_version_2 = ZARR_NAME not in files
    for file in sorted(files):  # sorted, since a conversion's plan depends on the order of the tensors
        node, _, name = file.rpartition("/")
        with arrays.damaged.noted():
            if is_version_2 and name == ARRAY_FILE:
                arrays.add(node)
            elif name == ZARR_NAME and not is_version_2:
                metadata = read_metadata(store, file)
                if metadata.get("node_type") == "array" and node != CHECKPOINT_NODE:
                    arrays.add(node, metadata=metadata)
    arrays.damaged.raise_any()
    facts = {"zarr version": "2"} if is_version_2 else {"decoded by zarr": str(len(arrays.readers))}
    return Source(
        "zarr",
        store,
        arrays.tensors,
        paths=arrays.paths,
        facts={"arrays": str(len(arrays.tensors)), **facts},
        readers=arrays.readers,
        decoded=arrays.decoded,
    )
