"""Plan a folder of stock torch.distributed.checkpoint (DCP), which every program that uses DCP can load.

A conversion cuts tensors along dim 0 into items of at most 64 MiB. DCP reads whole items even for a few rows, so small
items make a load on another number of ranks cheap. A live save writes each rank's boxes without further cuts.
``.metadata`` is written last. Its pickle contains only torch's own records and plain data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from vescale_fsdp.checkpoint.state.nesting import ListIndex
from vescale_fsdp.conversion.engine.carried_state import CarriedState
from vescale_fsdp.conversion.engine.plan import ClosingFile, Content, FilePlan, OutputPlan, TensorItems, whole
from vescale_fsdp.conversion.engine.stored_tensor import TensorInfo
from vescale_fsdp.conversion.engine.tensor_view import MappedView, TensorView
from vescale_fsdp.conversion.formats.dcp.source import METADATA_FILE
from vescale_fsdp.conversion.formats.torch_save.write import (
    Call,
    Global,
    New,
    TensorOut,
    dump_pickle,
    plan_archive,
    torch_dtype,
    torch_size,
)
from vescale_fsdp.layout.dtypes import DType
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.geometry import Box, run_start, whole_box
from vescale_fsdp.layout.index_maps import Slice

_ITEM_BYTES = 64 * 2**20  # 64 MiB: DCP reads whole items, even for a few rows
_RECORDS = "torch.distributed.checkpoint.metadata"


Items = dict[tuple[str, Box | None], Extent]
"""Name and box of a tensor, or name and None of a value -> the extent of the archive that contains it."""


def plan_dcp(state: CarriedState, max_shard_bytes: int) -> OutputPlan:
    """Plan data files of at most about ``max_shard_bytes`` bytes, and ``.metadata``.

    Raises:
        ConversionError: for values that are not plain data, or dtypes that torch lacks.
    """
    files = _Files(max_shard_bytes)
    for name, view in state.views.items():
        for box in _row_boxes(view.info) if name not in state.aliases else ():
            files.add_tensor(name, view, box)
    for name, read in state.values.items():
        files.add_value(name, read())
    plans = files.finish()

    def metadata() -> tuple[bytes]:
        return (dump_pickle(_metadata(state, files.items), where=METADATA_FILE),)

    closing = (ClosingFile(METADATA_FILE, metadata),)
    return OutputPlan("dcp", plans, closing, is_stale=_is_stale)


def file_of_rank(rank: int, number: int = 0) -> str:
    """Return the name of a rank's data file, in the form that stock DCP uses."""
    return f"__{rank}_{number}.distcp"


def plan_dcp_by_rank(
    state: CarriedState, boxes: Callable[[int], Iterable[tuple[str, Box]]], world_size: int, rank: int
) -> OutputPlan:
    """Plan the data file of ``rank``, and the ``.metadata`` that describes the files of all ranks.

    Args:
        boxes: returns (name, box) of each box that a rank writes; a tensor with several names is listed under its
            first name.
    """

    def of_rank(number: int) -> _Files:
        files = _Files(sys.maxsize, number)  # maxsize: one file per rank, of any size
        for name, box in boxes(number):
            files.add_tensor(name, state.views[name], box)
        if number == 0:  # rank 0 also writes empty tensors, which have no boxes, and values
            for name, view in state.views.items():
                if not view.info.numel:
                    files.add_tensor(name, view, whole_box(view.info.shape))
            for name, read in state.values.items():
                files.add_value(name, read())
        return files

    def metadata() -> tuple[bytes]:
        items: Items = {}
        for number in range(world_size):
            items |= of_rank(number).items
        return (dump_pickle(_metadata(state, items), where=METADATA_FILE),)

    closing = (ClosingFile(METADATA_FILE, metadata),)
    return OutputPlan("dcp", of_rank(rank).finish(), closing, is_stale=_is_stale)


def _is_stale(name: str) -> bool:
    return name.endswith(".distcp") or name == METADATA_FILE


def _row_boxes(info: TensorInfo) -> Iterator[Box]:
    """Yield boxes of whole rows that tile a tensor; one box for a tensor that is empty or 0-d."""
    if not info.shape or not info.numel:
        yield whole_box(info.shape)
        return
    rows, corner = info.shape[0], (0,) * (len(info.shape) - 1)
    step = max(1, _ITEM_BYTES // (info.nbytes // rows))  # at least 1: a row may be larger than an item
    for first in range(0, rows, step):
        yield Box((first, *corner), (min(step, rows - first), *info.shape[1:]))


@lru_cache(maxsize=256)  # cached, since items of equal layers have the same pickle
def _tensor_pickle(dtype: DType, sizes: tuple[int, ...]) -> bytes:
    return dump_pickle(TensorOut("0", dtype, sizes), where="a tensor")  # "0": the archive's only storage


class _Files:
    """Collects archives in data files of a limited size; archives in a file follow each other."""

    def __init__(self, max_bytes: int, rank: int = 0) -> None:
        self.items: Items = {}
        self._max_bytes, self._rank = max_bytes, rank
        self._done: list[FilePlan] = []
        self._contents: list[Content] = []
        self._nbytes = 0

    @property
    def _name(self) -> str:
        """The name of the current file."""
        return file_of_rank(self._rank, len(self._done))

    def add_tensor(self, name: str, view: TensorView, box: Box) -> None:
        """Append a box of a tensor as one archive."""
        start = run_start(view.info.shape, box)
        if start is not None:  # the box is one run of the tensor's items, which needs no slicing
            items = TensorItems(view, start, start + box.numel)
        else:
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                if size != view.info.shape[dim]:
                    view = MappedView(Slice(dim, offset, size), (view,))
            items = whole(view)
        self._add(name, box, _tensor_pickle(view.info.dtype, box.sizes), [items])

    def add_value(self, name: str, value: Any) -> None:
        """Append a value that is not a tensor as one archive."""
        self._add(name, None, dump_pickle(value, where=name), [])

    def _add(self, name: str, box: Box | None, pickle: bytes, storages: list[TensorItems]) -> None:
        """Append an archive; it begins a new file if the current file would become too large."""
        if self._contents and self._nbytes + sum(items.nbytes for items in storages) > self._max_bytes:
            self._close()
        contents = plan_archive(pickle, storages, len(self._contents))
        nbytes = sum(content.nbytes for content in contents)
        self.items[name, box] = Extent(self._name, self._nbytes, nbytes)
        self._contents += contents
        self._nbytes += nbytes

    def _close(self) -> None:
        """Finish the current file."""
        self._done.append(FilePlan(self._name, tuple(self._contents)))
        self._contents, self._nbytes = [], 0

    def finish(self) -> tuple[FilePlan, ...]:
        """Close the last file and return all files."""
        if self._contents or not self._done:  # an empty state has one empty file
            self._close()
        return tuple(self._done)


def _metadata(state: CarriedState, written: Items) -> New:
    """Make the record that stock DCP pickles into ``.metadata``; ``written`` are the items of all files."""
    names: dict[str, list[str]] = {}
    for alias, first in state.aliases.items():
        names.setdefault(first, [first]).append(alias)
    # All names of a tensor refer to the same bytes, which stock DCP allows.
    entries: dict[str, Any] = {}
    chunks: dict[str, list[New]] = {name: [] for name in state.views}
    storage: dict[Any, Any] = {}
    items = (
        (name, box, extent) for (first, box), extent in written.items() for name in names.get(first, [first])
    )
    for name, box, extent in items:
        index: dict[str, Any] = {"fqn": name, "offset": None, "index": None}
        if box is not None:
            chunk = {"offsets": torch_size(box.offsets), "sizes": torch_size(box.sizes)}
            index |= {"offset": torch_size(box.offsets), "index": len(chunks[name])}
            chunks[name].append(New(Global(_RECORDS, "ChunkStorageMetadata"), chunk))
        else:
            entries[name] = New(Global(_RECORDS, "BytesStorageMetadata"), {})
        key = _Key(Global(_RECORDS, "MetadataIndex"), index)
        byte_range = dict(zip(("relative_path", "offset", "length"), extent, strict=True))
        storage[key] = New(Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"), byte_range)
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Global(_RECORDS, "_MEM_FORMAT_ENCODING"), (0,))
    for name, view in state.views.items():
        info = view.info
        # The order in which TensorProperties pickles its fields: dtype, layout, requires_grad, memory format, pinned.
        properties = (torch_dtype(info.dtype), layout, False, contiguous, False)
        fields = {
            "properties": New(Global(_RECORDS, "TensorProperties"), properties),
            "size": torch_size(info.shape),
            "chunks": chunks[name],
        }
        entries[name] = New(Global(_RECORDS, "TensorStorageMetadata"), fields)
    # In DCP's paths, an int is the index of a list, and a str is the key of a dict.
    paths = {
        name: tuple(int(part) if isinstance(part, ListIndex) else str(part) for part in state.path(name))
        for name in entries
    }
    meta: dict[str, Any] = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
    fields = {
        "state_dict_metadata": entries,
        "planner_data": paths,
        "storage_data": storage,
        "storage_meta": New(Global(_RECORDS, "StorageMeta"), meta),
        "version": "1.0.0",  # CURRENT_DCP_VERSION of torch
    }
    return New(Global(_RECORDS, "Metadata"), fields)


class _Key(New):
    """A record used as a dict key. It is hashed by identity, since its state is a dict, which cannot be hashed."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other
