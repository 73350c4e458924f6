"""Archives beyond 4 GiB, planned and read without their bytes: wide sizes, far offsets, and both read again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from vescale_fsdp.conversion.formats.torch_save.archive_plan import plan_archive
from vescale_fsdp.conversion.formats.torch_save.archive_reader import TorchArchive
from vescale_fsdp.conversion.output.plan import ComputedBytes, FilePlan, FixedBytes, TensorItems, whole
from vescale_fsdp.conversion.source.source import Source
from vescale_fsdp.conversion.source.stored_tensor import TensorInfo
from vescale_fsdp.conversion.views.tensor_view import SourceView, TensorView
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.layout.geometry import Box


class _Bytes(TensorView):
    """So many bytes that nobody reads."""

    def __init__(self, nbytes: int) -> None:
        self._info = TensorInfo("x", (nbytes,), dtype_from_torch("uint8"))

    @property
    def info(self) -> TensorInfo:
        return self._info

    def read_into(self, box: Box, out: np.ndarray) -> None:
        raise AssertionError("planned without reading")

    def sources(self) -> Iterator[tuple[Source, str]]:
        return iter(())

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        return iter(())

    def over(self, leaf: Callable[[SourceView], TensorView]) -> TensorView:
        return self

    def identity(self) -> str:
        return "bytes"


@pytest.mark.parametrize("nbytes", [1000, 2**32 - 2, 2**32 - 1, 2**32 + 8])
def test_sizes_and_offsets_beyond_32_bits(nbytes: int) -> None:
    """The reader finds each storage where the plan puts it, at a multiple of 64 bytes, with its checksum."""
    storages = [whole(_Bytes(n)) for n in (nbytes, 50, nbytes, 7)]
    plan = FilePlan("x", tuple(plan_archive(b"pickle", storages, 0)))
    tensors = [i for i, part in enumerate(plan.contents) if isinstance(part, TensorItems)]
    crcs = {index: 0xC0DE0000 + index for index in tensors}
    known: dict[int, bytes] = {}
    for offset, part in zip(plan.offsets, plan.contents, strict=True):
        if not isinstance(part, TensorItems):
            known[offset] = part.data if isinstance(part, FixedBytes) else part.make(crcs.__getitem__)
            assert len(known[offset]) == part.nbytes
    assert sum(isinstance(part, ComputedBytes) for part in plan.contents) == 4

    def read(offset: int, length: int) -> bytes:
        found = bytearray(length)  # of tensors: zeros
        for start, data in known.items():
            low, high = max(start, offset), min(start + len(data), offset + length)
            if low < high:
                found[low - offset : high - offset] = data[low - start : high - start]
        return bytes(found)

    archive = TorchArchive(read, plan.nbytes, where="x")
    assert archive.pickle == b"pickle"
    for key, index in enumerate(tensors):
        assert archive.storage_range(str(key)) == (plan.offsets[index], plan.contents[index].nbytes)
        assert archive.storage_crc(str(key)) == crcs[index] and plan.offsets[index] % 64 == 0
