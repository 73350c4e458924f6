"""Read Orbax checkpoints of JAX models: a zarr array, version 2 or 3, for each leaf of a tree.

    _METADATA                       the tree: for each leaf, the keys of the dicts and lists around it
    params.dense.kernel/.zarray     use_ocdbt=False               params.dense.kernel/zarr.json     use_zarr3=True
    _strings.json                   leaves that are text
    manifest.ocdbt                  OCDBT, Orbax's default: a B-tree of all arrays, read by `ocdbt.py`

Nested keys become dotted names. ``params`` at the root is the model, and ``opt_state`` is its optimizer. If there is no
``params``, the whole tree is the model. Items without a tree, such as a config's JSON or the state of a data iterator,
are dropped and listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vescale_fsdp.checkpoint.state.nesting import Path, name_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.engine.entries import Entries
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.formats.ocdbt import ROOT_FILE, OcdbtArrays
from vescale_fsdp.conversion.formats.zarr.arrays import DAMAGE, Arrays, damaged
from vescale_fsdp.errors import CorruptCheckpointError, some
from vescale_fsdp.layout.foreign_json import parse_json

TREE_FILE = "_METADATA"
_STRINGS_FILE = "_strings.json"
_MODEL = "params"
# Leaves that are not arrays: the value of each type. Dict, List and Tuple are leaves only if they are empty. Functions,
# so that each leaf gets a new container.
_VALUES: dict[str, Callable[[], Any]] = {"None": lambda: None, "Dict": dict, "List": list, "Tuple": tuple}


def open_orbax(store: Storage) -> Source:
    """Open an Orbax checkpoint: a folder with a tree, or a step's folder with a tree per item.

    Raises:
        ConversionError: if the checkpoint is in the file format OCDBT, and the package tensorstore is not installed or
            the folder is not on a local disk.
        CorruptCheckpointError: if metadata is damaged or arrays are missing, or if a save of several hosts ended early.
    """
    files = set(store.list_files())
    # A tree is in the folder itself, or in the subfolder of each item, but not deeper.
    trees = sorted(file for file in files if file.rpartition("/")[2] == TREE_FILE and file.count("/") < 2)
    items = [tree.removesuffix(TREE_FILE) for tree in trees]
    entries, arrays = Entries(), Arrays(store, files)
    if "" not in items:  # the folders of a step are its items
        entries.unsupported += sorted(
            {f"{file.partition('/')[0]}/" for file in files if "/" in file} - set(items)
        )
    for item in items:
        try:
            # Leaves of several items are added under the items' names, the leaves of a single item at the root.
            _add_item(entries, arrays, store, files, item, (item.rstrip("/"),) if len(items) > 1 else ())
        except DAMAGE as error:
            raise damaged(store, f"{item}{TREE_FILE}", error) from error
    arrays.damaged.raise_any()
    facts = {
        "arrays": str(len(arrays.tensors) + len(entries.tensors)),
        "items": ", ".join(item.rstrip("/") for item in items) or "one",
    }
    entries.update(Entries(arrays.tensors, readers=arrays.readers, decoded=arrays.decoded))
    return entries.source("orbax", store, facts)


def _add_item(
    entries: Entries, arrays: Arrays, store: Storage, files: set[str], folder: str, container: Path
) -> None:
    """Add the leaves of one tree.

    Args:
        folder: the tree's folder in the store: a path that ends in a slash, or "".
        container: the path under which the leaves are added.
    """
    ocdbt = _open_ocdbt(store, files, folder)
    tree = parse_json(store.read(folder + TREE_FILE))["tree_metadata"]
    leaves = dict(_leaves(tree))
    has_model = any(keys[0] == _MODEL and len(keys) > 1 for keys in leaves)
    strings_file = folder + _STRINGS_FILE
    strings = dict(parse_json(store.read(strings_file))) if strings_file in files else {}
    for keys, kind in leaves.items():
        node = ".".join(keys)
        # With a model, the root's keys separate model and optimizer, so only the keys below are joined.
        split = (keys[0], ".".join(keys[1:])) if has_model and len(keys) > 1 else (node,)
        path = (*container, *split)
        if kind in _VALUES:
            entries.add_value(path, _VALUES[kind]())
        elif kind == "string":
            entries.add_value(path, strings[node])
        elif ocdbt is not None:
            ocdbt.add(entries, node, path)
        else:
            with arrays.damaged.noted():
                arrays.add(f"{folder}{node}", name_of(path))
            entries.paths[name_of(path)] = path


def _open_ocdbt(store: Storage, files: set[str], folder: str) -> OcdbtArrays | None:
    """Open the OCDBT tree of an item; None if each array has a folder of its own."""
    if folder + ROOT_FILE in files:
        return OcdbtArrays(store, folder)
    parts = sorted(file for file in files if file.startswith(folder) and file.endswith(f"/{ROOT_FILE}"))
    if parts:
        raise CorruptCheckpointError(
            "The parts that hosts wrote of this Orbax checkpoint were not joined.",
            expected=f"a file {folder}{ROOT_FILE}, which Orbax writes last",
            got=f"only {some(parts)}",
            where=store.where,
            todo="use another step, or copy the checkpoint again if this copy is incomplete",
        )
    return None


def _leaves(tree: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys from the root to each leaf, and the leaf's type."""
    for entry in tree.values():
        keys = tuple(str(part["key"]) for part in entry["key_metadata"])
        yield keys, str(entry["value_metadata"]["value_type"])
