"""Reading Orbax checkpoints of JAX models: an array of zarr, version 2 or 3, for each leaf of a tree.

    _METADATA                       the tree: of which dicts and sequences each leaf lies in
    params.dense.kernel/.zarray     use_ocdbt=False               params.dense.kernel/zarr.json     use_zarr3=True
    _strings.json                   leaves that are text
    manifest.ocdbt                  OCDBT, Orbax's default: one B-tree of all arrays, which only tensorstore reads

Nested keys become dotted names. ``params`` at the root is the model, ``opt_state`` its optimizer; without ``params``
the whole tree is the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vescale_fsdp.checkpoint.formats.zarr.arrays import DAMAGE, Arrays, damaged
from vescale_fsdp.checkpoint.moves.source import Source, StoredValue, constant
from vescale_fsdp.checkpoint.state.nesting import Path
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.layout.foreign_json import parse_json

TREE_FILE = "_METADATA"
_STRINGS_FILE = "_strings.json"
_MODEL = "params"


def open_orbax(store: Storage) -> Source:
    """Open what Orbax saved without OCDBT: a folder with a tree, or a step with trees under items' names.

    Raises:
        ConversionError: for OCDBT, which is another file format.
        CorruptCheckpointError: if metadata is damaged or arrays are missing.
    """
    files = set(store.list_files())
    if found := next((file for file in sorted(files) if file.endswith("manifest.ocdbt")), None):
        raise ConversionError(
            "This Orbax checkpoint is in the format OCDBT.",
            expected="arrays of zarr, one folder for each",
            got=f"a file {found}, which only tensorstore reads",
            where=store.where,
            todo="save it again with PyTreeCheckpointHandler(use_ocdbt=False)",
        )
    trees = sorted(file for file in files if file.rpartition("/")[2] == TREE_FILE and file.count("/") < 2)
    items = [tree.removesuffix(TREE_FILE) for tree in trees]
    read = _Leaves(store, files)
    for item in items:
        try:
            read.add_item(item, (item.rstrip("/"),) if len(items) > 1 else ())
        except DAMAGE as error:
            raise damaged(store, f"{item}{TREE_FILE}", error) from error
    facts = {
        "arrays": str(len(read.arrays.tensors)),
        "items": ", ".join(item.rstrip("/") for item in items) or "one",
    }
    arrays = read.arrays
    return Source(
        "orbax", store, arrays.tensors, read.values, read.paths, facts, arrays.readers, arrays.decoded
    )


class _Leaves:
    """The leaves of the trees so far, by name."""

    def __init__(self, store: Storage, files: set[str]) -> None:
        self._store, self._files = store, files
        self.arrays = Arrays(store, files)
        self.values: dict[str, StoredValue] = {}
        self.paths: dict[str, Path] = {}

    def add_item(self, folder: str, container: Path) -> None:
        """All leaves of the tree in a folder, which ends in a slash or is empty."""
        tree = parse_json(self._store.read(folder + TREE_FILE))["tree_metadata"]
        leaves = dict(_leaves(tree))
        has_model = any(keys[0] == _MODEL and len(keys) > 1 for keys in leaves)
        strings = self._strings(folder)
        for keys, kind in leaves.items():
            node = ".".join(keys)
            split = (keys[0], ".".join(keys[1:])) if has_model and len(keys) > 1 else (node,)
            path = (*container, *split)
            name = ".".join(path)
            self.paths[name] = path
            if kind in ("None", "Dict", "List", "Tuple"):  # of the last three, empty ones
                self.values[name] = constant({"None": None, "Dict": {}, "List": [], "Tuple": ()}[kind])
            elif kind == "string":
                self.values[name] = constant(strings[node])
            else:
                self.arrays.add(f"{folder}{node}", name)

    def _strings(self, folder: str) -> Mapping[str, Any]:
        file = folder + _STRINGS_FILE
        return dict(parse_json(self._store.read(file))) if file in self._files else {}


def _leaves(tree: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Keys on the way to each leaf, and what kind of value it is."""
    for entry in tree.values():
        keys = tuple(str(part["key"]) for part in entry["key_metadata"])
        yield keys, str(entry["value_metadata"]["value_type"])
