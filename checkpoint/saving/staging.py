"""The staging buffer of `async_save`: CPU memory, pinned if there is a GPU, allocated once and kept between saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

__all__ = ["Stager"]

_ALIGN_BYTES = 64
_Kind = tuple[torch.Size, torch.dtype]


def host_memory(num_bytes: int) -> torch.Tensor:
    """1D bytes in CPU memory, pinned if there is a GPU.

    Filled once: the first touch of fresh pages costs more than the copy itself.
    """
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


class Stager:
    """Copies this rank's tensors into one buffer that is kept from save to save.

    Args:
        allocate: gives 1D bytes in CPU memory; asked again only for a larger state.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor] = host_memory) -> None:
        self._allocate = allocate
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._kinds: list[_Kind] = []  # of the last call, for which the places were made
        self._places: list[torch.Tensor] = []  # views of the buffer

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return self._buffer.numel()

    def stage(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous CPU copies; valid until the next call."""
        kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if kinds != self._kinds:
            # Views of a thousand tensors take longer than the copies of all that are small.
            self._places = self._cut(kinds)
            self._kinds = kinds
        devices = set()
        for place, tensor in zip(self._places, tensors, strict=True):
            if tensor.numel():
                _copy(place, tensor)
            if not tensor.is_cpu:
                devices.add(tensor.device)
        for device in devices:
            torch.get_device_module(device).current_stream(device).synchronize()
        return self._places

    def _cut(self, kinds: Sequence[_Kind]) -> list[torch.Tensor]:
        """Views of the buffer for tensors of these kinds, after more memory has been asked for if it is short."""
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in kinds]
        starts = [0, *accumulate(-(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for nbytes in sizes)]
        if self._buffer.numel() < starts[-1]:
            self._kinds, self._places = [], []
            self._buffer = torch.empty(0, dtype=torch.uint8)  # given back before more is asked for
            self._buffer = self._allocate(starts[-1])
        return [
            self._buffer[start : start + nbytes].view(dtype).view(shape)
            for (shape, dtype), start, nbytes in zip(kinds, starts, sizes, strict=False)
        ]


def _copy(into: torch.Tensor, tensor: torch.Tensor) -> None:
    """Bits of one tensor to another; without waiting where the source is on a device."""
    if tensor.dtype.itemsize == 1:  # copy kernels do not know all one-byte dtypes
        into, tensor = into.view(torch.uint8), tensor.view(torch.uint8)
    into.copy_(tensor, non_blocking=not tensor.is_cpu)
