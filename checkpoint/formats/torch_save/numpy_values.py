"""What numpy pickles, without numpy: its numbers as Python's, its arrays by bytes, which the pickle itself holds."""

from __future__ import annotations

import math
import pickle
import struct
from typing import TYPE_CHECKING, Any

from vescale_fsdp.layout.dtypes import dtype_from_numpy, dtype_from_torch
from vescale_fsdp.layout.geometry import Box

if TYPE_CHECKING:
    import numpy as np


class UnheldArrayError(Exception):
    """The pickle holds an array of what no format here can, such as objects and texts."""


class NumpyType:
    """Stand-in for numpy's dtype: the code of a number, and the order of its bytes."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code, self.order = code, "<"

    def __setstate__(self, state: Any) -> None:
        self.order = ">" if state[1] == ">" else "<"


class ArrayRef:
    """A numpy array, which a pickle holds in itself."""

    def __init__(self) -> None:
        self.dtype, self.shape = dtype_from_torch("uint8"), (0,)  # as numpy makes it before it is filled
        self._code, self._order, self.data = "u1", "C", b""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, data = state
        self.fill(data, kind, shape, "F" if is_fortran else "C")

    def fill(self, data: Any, kind: Any, shape: Any, order: str) -> None:
        """Become what a pickle says: bytes, a `NumpyType`, a shape, rows or columns first."""
        code = kind.code if isinstance(kind, NumpyType) else str(kind)
        dtype = dtype_from_numpy(code)
        if dtype is None:
            raise UnheldArrayError(f"a numpy array of type {code!r}")
        self.dtype, self.shape = dtype, tuple(shape)
        self._code, self._order, self.data = kind.order + code, order, bytes(data)
        if len(self.data) != math.prod(self.shape) * self.dtype.itemsize:
            raise pickle.UnpicklingError(f"{len(self.data)} bytes of an array of shape {self.shape}")

    def read(self, box: Box) -> np.ndarray:
        """A box of its items, little-endian, as raw bits."""
        import numpy as np

        values = np.frombuffer(self.data, dtype=self._code).reshape(self.shape, order=self._order)  # type: ignore[call-overload]
        part = values[box.slices()].astype(np.dtype(self._code).newbyteorder("<"))
        raw: np.ndarray = np.ascontiguousarray(part).reshape(box.sizes or (1,)).view(self.dtype.raw)
        return raw.reshape(box.sizes)


def _empty_array(*_: Any) -> ArrayRef:
    return ArrayRef()


def _array_of_buffer(data: Any, kind: Any, shape: Any, order: str) -> ArrayRef:
    """How protocol 5 writes an array."""
    found = ArrayRef()
    found.fill(data, kind, shape, order)
    return found


def _numpy_scalar(kind: Any, data: bytes) -> int | float | complex | bool:
    """A number of numpy's as one of Python's, with the same value."""
    letters = _NUMPY_NUMBERS.get(kind.code) if isinstance(kind, NumpyType) else None
    if letters is None:
        raise pickle.UnpicklingError(f"a numpy scalar of type {getattr(kind, 'code', kind)!r}")
    found: tuple[Any, ...] = struct.unpack(kind.order + letters, data)
    return complex(*found) if len(found) > 1 else found[0]


_NUMPY_NUMBERS = {  # numpy's code -> the struct module's
    "f2": "e",
    "f4": "f",
    "f8": "d",
    "c8": "ff",
    "c16": "dd",
    "b1": "?",
    **{
        f"{sign}{size}": letter
        for sign in "iu"
        for size, letter in zip("1248", "bhiq" if sign == "i" else "BHIQ", strict=True)
    },
}
_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
NUMBER_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): NumpyType,
    **{(module, "scalar"): _numpy_scalar for module in _MULTIARRAY},
}
ARRAY_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): ArrayRef,
    **{(module, "_reconstruct"): _empty_array for module in _MULTIARRAY},
    **{(module, "_frombuffer"): _array_of_buffer for module in ("numpy.core.numeric", "numpy._core.numeric")},
}
