"""`ArrayView`: an array in memory, in the place of a tensor of a checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np

from vescale_fsdp.conversion.engine.stored_tensor import TensorInfo
from vescale_fsdp.conversion.engine.tensor_view import TensorView
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.layout.geometry import Box


class ArrayView(TensorView):
    """An array of one of numpy's dtypes."""

    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self._info, self._array = TensorInfo(name, array.shape, dtype_from_torch(str(array.dtype))), array

    @property
    def info(self) -> TensorInfo:
        return self._info

    def read_into(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        index: tuple[Any, ...] = (*box.slices(), ...)
        out[...] = self._array[index].view(out.dtype)

    def identity(self) -> str:
        return self._info.name


def without_values(name: str, shape: tuple[int, ...]) -> ArrayView:
    """A float32 tensor of any size, of which only name and shape are wanted."""
    return ArrayView(name, np.broadcast_to(np.float32(0), shape))
