"""Filling this rank's parts of live tensors from views, in boxes of bounded size, by a few threads.

A rank's part is a flat range of a box (`Region`), in memory one run of items. It is cut into boxes that are runs of
that memory again, so that what a file holds as it is wanted goes there without a copy:

    region   rows 3.5 .. 9.0 of a matrix      boxes   half of row 3 | rows 4 .. 8       (of at most 16 MiB)

Scratch is what views need to compute a box, and the box itself where the memory is a device's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from vescale_fsdp.checkpoint.formats.native.targets import LoadTarget
from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.moves.tensor_view import TensorView
from vescale_fsdp.checkpoint.moves.threads import Shared, in_threads
from vescale_fsdp.layout.geometry import Box

_BOX_BYTES = 16 << 20  # 16 MiB


class Filling(NamedTuple):
    """One tensor of the state: what fills this rank's part of it.

    Attributes:
        name: of the leaf.
        tensor: the leaf.
        target: this rank's part of it, in the type of the view.
    """

    name: str
    view: TensorView
    region: Region
    tensor: torch.Tensor
    target: LoadTarget


class _Job(NamedTuple):
    """A box of a view, and the target's items that it fills, from ``first`` on."""

    view: TensorView
    box: Box
    target: LoadTarget
    first: int

    def run(self) -> None:
        self.target.begin()
        raw, stop = self.view.info.dtype.raw, self.first + self.box.numel
        if self.target.memory is not None:
            items = self.target.memory.view(raw)[self.first : stop]
            self.view.read_into(self.box, items.reshape(self.box.sizes))
            return
        scratch = np.empty(self.box.numel, dtype=raw)
        self.view.read_into(self.box, scratch.reshape(self.box.sizes))
        into = self.target.flat[self.first : stop]
        into.copy_(torch.from_numpy(scratch.view(np.uint8)).view(into.dtype))


def fill_all(fillings: Iterable[Filling], num_threads: int) -> None:
    """Fill every tensor; any may hold some of its values if this raises.

    Raises:
        CorruptCheckpointError: if a file turns out damaged.
    """
    found = list(fillings)
    jobs = (job for filling in found for job in _jobs(filling))

    def work(shared: Shared[_Job]) -> None:
        for job in shared:
            job.run()

    in_threads(num_threads, work, jobs)
    for filling in found:
        filling.target.finish()


def same_values(a: Filling, b: Filling) -> bool:
    """Whether two views hold the same bytes for a rank's part of one tensor."""
    raw = a.view.info.dtype.raw
    for whole, _ in a.region.pieces():
        for box, _ in _cut(whole, raw.itemsize, 0):
            left, right = np.empty(box.sizes, dtype=raw), np.empty(box.sizes, dtype=raw)
            a.view.read_into(box, left)
            b.view.read_into(box, right)
            if not np.array_equal(left, right):
                return False
    return True


def _jobs(filling: Filling) -> Iterator[_Job]:
    for whole, place in filling.region.pieces():
        for box, first in _cut(whole, filling.target.itemsize, place):
            yield _Job(filling.view, box, filling.target, first)


def _cut(box: Box, itemsize: int, first: int) -> Iterator[tuple[Box, int]]:
    """Boxes of limited size that follow each other in a row-major box, each with its first item's place."""
    nbytes = box.numel * itemsize
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
    if nbytes <= _BOX_BYTES or dim is None:
        if box.numel:
            yield box, first
        return
    rows = box.sizes[dim]
    step = max(1, rows * _BOX_BYTES // nbytes)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
        part = Box(offsets, (*box.sizes[:dim], count, *box.sizes[dim + 1 :]))
        yield from _cut(part, itemsize, first + start * (box.numel // rows))
