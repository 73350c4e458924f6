"""Arrays of types that the zarr library does not know, opened as unsigned integers of the same width: their bytes are
all that is wanted."""

from __future__ import annotations

import json
from typing import Any

import zarr
from zarr.storage import FsspecStore, LocalStore, WrapperStore

from vescale_fsdp.checkpoint.manifest.file_names import ZARR_NAME
from vescale_fsdp.layout.dtypes import DType


def open_as_integers(path: str, dtype: DType) -> Any:
    """The array at a path or URL, whose ``zarr.json`` names this type and whose chunks that are not there are zeros."""
    store = FsspecStore.from_url(path, read_only=True) if "://" in path else LocalStore(path, read_only=True)
    return zarr.open_array(_Retyped(store, dtype), mode="r")


class _Retyped(WrapperStore[Any]):
    """A store whose array's metadata name another type."""

    def __init__(self, store: Any, dtype: DType) -> None:
        super().__init__(store)
        self._dtype = dtype

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        found = await self._store.get(key, prototype, byte_range)
        if key != ZARR_NAME or found is None:
            return found
        metadata = json.loads(found.to_bytes())
        metadata |= {"data_type": self._dtype.zarr_name, "fill_value": 0}
        return prototype.buffer.from_bytes(json.dumps(metadata).encode())
