"""The staging buffer of `async_save`: CPU memory, pinned if there is a GPU, allocated once and kept between saves.

Tensors of a device are copied on a stream of their own (`vescale_fsdp.checkpoint.state.host_copies`). The call returns
once they are copied, but for those that it is told can wait: their copies go on until the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate

import torch

from vescale_fsdp.checkpoint.state.host_copies import (
    CopyEvent,
    CopyStream,
    DeferredCopy,
    copy_stream_of,
    host_memory,
)
from vescale_fsdp.torch_private import storage_id

_ALIGN_BYTES = 64
_Kind = tuple[torch.Size, torch.dtype]


class Stager:
    """Copies this rank's tensors into one buffer that is kept from save to save.

    Args:
        allocate: gives 1D bytes in CPU memory; asked again only for a larger state.
        stream_of: gives the stream for a device's copies, None where there is none.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor] = host_memory,
        stream_of: Callable[[torch.device], CopyStream | None] = copy_stream_of,
    ) -> None:
        self._allocate, self._stream_of = allocate, stream_of
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._kinds: list[_Kind] = []  # of the last call, for which the places were made
        self._places: list[torch.Tensor] = []  # views of the buffer

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return self._buffer.numel()

    def stage(
        self, tensors: Sequence[torch.Tensor], *, can_wait: frozenset[int] = frozenset()
    ) -> tuple[list[torch.Tensor], DeferredCopy]:
        """Contiguous CPU copies; valid until the next call.

        Args:
            can_wait: storages (by `storage_id`) that only optimizers of torch's kind write.

        Returns:
            The copies, and what there is to wait for before they are read: those of tensors that can wait.
        """
        kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if kinds != self._kinds:
            # Views of a thousand tensors take longer than the copies of all that are small.
            self._places = self._cut(kinds)
            self._kinds = kinds
        streams = {device: self._stream_of(device) for device in {tensor.device for tensor in tensors}}
        pairs = list(zip(self._places, tensors, strict=True))
        waiting = [
            (place, tensor)
            for place, tensor in pairs
            if streams[tensor.device] is not None and storage_id(tensor) in can_wait
        ]
        late = {id(place) for place, _ in waiting}
        at_once = [(place, tensor) for place, tensor in pairs if id(place) not in late]
        for stream in streams.values():
            if stream is not None:
                stream.wait_for_compute()
        needed = DeferredCopy((), _copy(at_once, streams))
        waited_for_later = DeferredCopy([tensor for _, tensor in waiting], _copy(waiting, streams))
        needed.finish()
        return self._places, waited_for_later

    def _cut(self, kinds: Sequence[_Kind]) -> list[torch.Tensor]:
        """Views of the buffer for tensors of these kinds, after more memory has been asked for if it is short."""
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in kinds]
        starts = [0, *accumulate(-(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for nbytes in sizes)]
        if self._buffer.numel() < starts[-1]:
            self._kinds, self._places = [], []
            self._buffer = torch.empty(
                0, dtype=torch.uint8, device="cpu"
            )  # given back before more is asked for
            self._buffer = self._allocate(starts[-1])
        return [
            self._buffer[start : start + nbytes].view(dtype).view(shape)
            for (shape, dtype), start, nbytes in zip(kinds, starts, sizes, strict=False)
        ]


def _copy(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], streams: dict[torch.device, CopyStream | None]
) -> list[tuple[CopyStream, CopyEvent]]:
    """Start to copy the second of each pair into the first; where copies go on, and the points behind them."""
    used: dict[CopyStream, None] = {}
    for place, tensor in pairs:
        if not tensor.numel():
            continue
        stream = streams[tensor.device]
        if tensor.dtype.itemsize == 1:  # copy kernels do not know all one-byte dtypes
            place, tensor = place.view(torch.uint8), tensor.view(torch.uint8)
        with nullcontext() if stream is None else stream.on():
            place.copy_(tensor, non_blocking=stream is not None)
        if stream is not None:
            used[stream] = None
    return [(stream, stream.record()) for stream in used]
