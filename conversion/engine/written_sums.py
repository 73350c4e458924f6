"""Byte sums of the tensors of written files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vescale_fsdp.conversion.engine.plan import DataFile, TensorItems, Written

if TYPE_CHECKING:
    import torch

_READ_BYTES = 4 * 2**20  # 4 MiB


def written_sums(file: DataFile, read: Written) -> Iterator[tuple[TensorItems, torch.Tensor]]:
    """Read a written file; yield its contents that are tensors, in order, with what each adds to its tensor's sums."""
    import torch  # late: a conversion that records no fingerprints needs neither torch nor `byte_sums`

    from vescale_fsdp.byte_sums import run_sums

    plan = file.planned()
    for index, items in plan.tensors:
        offset, first = plan.offsets[index], items.start * items.view.info.dtype.itemsize
        total = torch.zeros(2, dtype=torch.int64, device="cpu")
        for start in range(0, items.nbytes, _READ_BYTES):
            data = read(file.name, offset + start, min(_READ_BYTES, items.nbytes - start))
            total += run_sums(torch.frombuffer(bytearray(data), dtype=torch.uint8), first + start)
        yield items, total


def sums_as_hex(sums: torch.Tensor) -> str:
    """Return two sums as 32 hex digits, as manifests store them."""
    from vescale_fsdp.byte_sums import pack_sums

    return pack_sums(sums).hex()
