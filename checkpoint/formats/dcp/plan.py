"""Planning a stock torch.distributed.checkpoint folder, which FSDP2 and everything else on DCP loads.

Tensors are cut along dim 0 into items of at most 64 MiB: DCP reads whole items even for a few rows, so
small ones keep a resharding load cheap. ``.metadata`` comes last. The pickle names torch's records and
holds plain data only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from vescale_fsdp.checkpoint.formats.dcp.source import METADATA_FILE
from vescale_fsdp.checkpoint.formats.torch_save.write import (
    Call,
    Global,
    New,
    TensorOut,
    dump_pickle,
    plan_archive,
    torch_dtype,
    torch_size,
)
from vescale_fsdp.checkpoint.moves.carried_state import CarriedState
from vescale_fsdp.checkpoint.moves.plan import ClosingFile, Content, FilePlan, OutputPlan, TensorItems, whole
from vescale_fsdp.checkpoint.moves.stored_tensor import TensorInfo
from vescale_fsdp.checkpoint.moves.tensor_view import MappedView, TensorView
from vescale_fsdp.checkpoint.state.nesting import ListIndex, Path
from vescale_fsdp.layout.dtypes import DType
from vescale_fsdp.layout.geometry import Box, whole_box
from vescale_fsdp.views.index_maps import Slice

_ITEM_BYTES = 64 * 2**20  # 64 MiB
_RECORDS = "torch.distributed.checkpoint.metadata"


class _Item(NamedTuple):
    name: str
    offsets: tuple[int, ...] | None  # None for a value
    sizes: tuple[int, ...]
    file: str
    start: int  # byte in the file
    nbytes: int


def plan_dcp(state: CarriedState, max_shard_bytes: int) -> OutputPlan:
    """Data files of about ``max_shard_bytes`` at most, and ``.metadata``.

    Raises:
        ConversionError: for values that are no plain data, or types that torch lacks.
    """
    files = _Files(max_shard_bytes)
    for name, view in state.views.items():
        for first, rows in _row_chunks(view.info) if name not in state.aliases else ():
            files.add_tensor(name, view, first, rows)
    for name, read in state.values.items():
        files.add_value(name, read())
    plans = files.finish()

    def metadata() -> tuple[bytes]:
        return (dump_pickle(_metadata(state, files.items), where=METADATA_FILE),)

    closing = (ClosingFile(METADATA_FILE, metadata),)
    return OutputPlan("dcp", plans, closing, is_stale=_is_stale)


def file_of_rank(rank: int, number: int = 0) -> str:
    """A rank's data file, as stock DCP names them."""
    return f"__{rank}_{number}.distcp"


def plan_dcp_by_rank(
    state: CarriedState, boxes: Callable[[int], Iterable[tuple[str, Box]]], world_size: int, rank: int
) -> OutputPlan:
    """One data file per rank, of which one rank's is in the plan, and ``.metadata`` of all.

    Args:
        boxes: by rank, the boxes of tensors that it writes; of a tensor with several names, those of its first.
    """

    def of_rank(number: int) -> _Files:
        files = _Files(sys.maxsize, number)
        for name, box in boxes(number):
            files.add_box(name, state.views[name], box)
        if number == 0:
            for name, view in state.views.items():
                if not view.info.numel:  # no rank has a part of it
                    files.add_box(name, view, whole_box(view.info.shape))
            for name, read in state.values.items():
                files.add_value(name, read())
        return files

    def metadata() -> tuple[bytes]:
        items = [item for number in range(world_size) for item in of_rank(number).items]
        return (dump_pickle(_metadata(state, items), where=METADATA_FILE),)

    closing = (ClosingFile(METADATA_FILE, metadata),)
    return OutputPlan("dcp", of_rank(rank).finish(), closing, is_stale=_is_stale)


def _is_stale(name: str) -> bool:
    return name.endswith(".distcp") or name == METADATA_FILE


def _row_chunks(info: TensorInfo) -> Iterator[tuple[int, int]]:
    """(first row, rows) of each item; one item for a tensor without rows."""
    rows = info.shape[0] if info.shape else 1
    if not info.numel:
        yield 0, rows
        return
    step = max(1, _ITEM_BYTES // (info.nbytes // rows))
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


@lru_cache(maxsize=256)
def _tensor_pickle(dtype: DType, sizes: tuple[int, ...]) -> bytes:
    return dump_pickle(TensorOut("0", dtype, sizes), where="a tensor")


class _Files:
    """Archives put one after the other into files of a limited size."""

    def __init__(self, max_bytes: int, rank: int = 0) -> None:
        self.items: list[_Item] = []
        self._max_bytes, self._rank = max_bytes, rank
        self._done: list[FilePlan] = []
        self._contents: list[Content] = []
        self._nbytes = 0

    @property
    def _name(self) -> str:
        return file_of_rank(self._rank, len(self._done))

    def add_box(self, name: str, view: TensorView, box: Box) -> None:
        part = view
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            if size != part.info.shape[dim]:
                part = MappedView(Slice(dim, offset, size), (part,))
        pickle = _tensor_pickle(view.info.dtype, box.sizes)
        self._add(name, box.offsets, box.sizes, pickle, [whole(part)])

    def add_tensor(self, name: str, view: TensorView, first: int, rows: int) -> None:
        info = view.info
        sizes = (rows, *info.shape[1:]) if info.shape else ()
        per_row = info.numel // info.shape[0] if info.shape and info.numel else 1
        start = first * per_row if info.shape else 0
        stop = start + (rows * per_row if info.numel else 0)
        pickle = _tensor_pickle(info.dtype, sizes)
        offsets = (first, *(0,) * (len(sizes) - 1)) if info.shape else ()
        self._add(name, offsets, sizes, pickle, [TensorItems(view, start, stop)])

    def add_value(self, name: str, value: Any) -> None:
        self._add(name, None, (), dump_pickle(value, where=name), [])

    def _add(
        self,
        name: str,
        offsets: tuple[int, ...] | None,
        sizes: tuple[int, ...],
        pickle: bytes,
        storages: list[TensorItems],
    ) -> None:
        if self._contents and self._nbytes + sum(items.nbytes for items in storages) > self._max_bytes:
            self._close()
        contents = plan_archive(pickle, storages, len(self._contents))
        nbytes = sum(content.nbytes for content in contents)
        self.items.append(_Item(name, offsets, sizes, self._name, self._nbytes, nbytes))
        self._contents += contents
        self._nbytes += nbytes

    def _close(self) -> None:
        self._done.append(FilePlan(self._name, tuple(self._contents)))
        self._contents, self._nbytes = [], 0

    def finish(self) -> tuple[FilePlan, ...]:
        if self._contents or not self._done:
            self._close()
        return tuple(self._done)


def _metadata(state: CarriedState, written: list[_Item]) -> New:
    # Two names of the same bytes: stock DCP reads where it is told.
    names: dict[str, list[str]] = {}
    for twin, kept in state.aliases.items():
        names.setdefault(kept, [kept]).append(twin)
    items = [item._replace(name=name) for item in written for name in names.get(item.name, [item.name])]
    entries: dict[str, Any] = {}
    chunks: dict[str, list[New]] = {name: [] for name in state.views}
    storage: dict[Any, Any] = {}
    for item in items:
        index: dict[str, Any] = {"fqn": item.name, "offset": None, "index": None}
        if item.offsets is not None:
            box = {"offsets": torch_size(item.offsets), "sizes": torch_size(item.sizes)}
            index |= {"offset": torch_size(item.offsets), "index": len(chunks[item.name])}
            chunks[item.name].append(New(Global(_RECORDS, "ChunkStorageMetadata"), box))
        else:
            entries[item.name] = New(Global(_RECORDS, "BytesStorageMetadata"), {})
        key = _Key(Global(_RECORDS, "MetadataIndex"), index)
        place = {"relative_path": item.file, "offset": item.start, "length": item.nbytes}
        storage[key] = New(Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"), place)
    for name, view in state.views.items():
        info = view.info
        fields = {
            "properties": New(Global(_RECORDS, "TensorProperties"), _properties(info)),
            "size": torch_size(info.shape),
            "chunks": chunks[name],
        }
        entries[name] = New(Global(_RECORDS, "TensorStorageMetadata"), fields)
    meta: dict[str, Any] = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
    fields = {
        "state_dict_metadata": entries,
        "planner_data": {name: _plain(state.path(name)) for name in entries},
        "storage_data": storage,
        "storage_meta": New(Global(_RECORDS, "StorageMeta"), meta),
        "version": "1.0.0",
    }
    return New(Global(_RECORDS, "Metadata"), fields)


class _Key(New):
    """A record used as a dict key: equal to itself only, since its state cannot be hashed."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _properties(info: TensorInfo) -> tuple[Any, ...]:
    """(dtype, layout, requires_grad, memory format, pinned), as the record pickles itself."""
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Global(_RECORDS, "_MEM_FORMAT_ENCODING"), (0,))
    return (torch_dtype(info.dtype), layout, False, contiguous, False)


def _plain(path: Path) -> Path:
    """A path as DCP writes it: ints are list indices, keys of dicts are strings."""
    return tuple(int(part) if isinstance(part, ListIndex) else str(part) for part in path)
