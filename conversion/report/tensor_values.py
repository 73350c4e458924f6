"""Statistics of a tensor's values, and the distance between two tensors, accumulated piece by piece.

The histogram counts magnitudes. Bins have fixed edges, two powers of two apart, so one pass is enough for any range.

    bin 0    |x| < 2^-62        bin 31    2^-2 <= |x| < 2^0        bin 63    |x| >= 2^62
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from vescale_fsdp.conversion.quantization.float_codes import cast_array
from vescale_fsdp.layout.dtypes import DType, dtype_from_torch

_F32, _F64 = dtype_from_torch("float32"), dtype_from_torch("float64")
_NUM_BINS = 64
_MOST = sys.float_info.max  # stands for larger numbers: JSON has no infinity


def values_of(raw: np.ndarray, dtype: DType) -> np.ndarray | None:
    """Convert raw items to numbers: float32 or float64, a complex item to two numbers.

    Returns None for quantized codes, whose values depend on their scales.
    """
    if dtype.kind == "float":
        target = _F64 if dtype.bits == 64 else _F32
        return cast_array(raw, dtype, target).view(np.float64 if target is _F64 else np.float32)
    if dtype.kind == "complex":
        return raw.view(f"f{dtype.itemsize // 2}").astype(np.float64)
    if dtype.kind == "bool":
        return raw.astype(np.float64)
    if dtype.kind == "int" and dtype.is_numpy:
        return raw.view(dtype.name).astype(np.float64)
    return None


class ValueSummary:
    """Statistics of the values that were added.

    Attributes:
        numel, nans, zeros: the number of values, of NaNs and of zeros.
        least, largest: the smallest and the largest finite value.
        total, squares: the sum of the finite values, and the sum of their squares.
        bins: int64 [2, number of bins]: finite negative values (row 0) and positive values (row 1) by magnitude.
    """

    def __init__(self) -> None:
        self.numel = self.nans = self.zeros = self._num_finite = 0
        self.least, self.largest = math.inf, -math.inf
        self.total = self.squares = 0.0
        self.bins = np.zeros((2, _NUM_BINS), np.int64)

    def add(self, values: np.ndarray) -> None:
        """Add the values of a piece."""
        self.numel += values.size
        finite = np.isfinite(values)
        if not finite.all():
            self.nans += int(np.isnan(values).sum())
            values = values[finite]
        self._num_finite += values.size
        if not values.size:
            return
        self.least = min(self.least, float(values.min()))
        self.largest = max(self.largest, float(values.max()))
        wide = values.astype(np.float64)  # sums of many float32 numbers lose digits
        with np.errstate(over="ignore"):  # squares of numbers beyond 1e154
            self.total += float(wide.sum())
            self.squares += float(np.dot(wide, wide))
        self.zeros += int(np.count_nonzero(values == 0))
        _, exponents = np.frexp(values)
        # frexp: 2**(e - 1) <= |x| < 2**e. The exponent is shifted to the first bin, and halved: a bin has two powers.
        bins = np.clip((exponents + _NUM_BINS - 1) >> 1, 0, _NUM_BINS - 1)
        for row, mask in ((0, values < 0), (1, values > 0)):
            self.bins[row] += np.bincount(bins[mask], minlength=_NUM_BINS)

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as plain values; without min, max, mean, norm and bins if no value is finite."""
        count = self._num_finite
        infinities = self.numel - self.nans - count
        summary: dict[str, Any] = {"nan": self.nans, "inf": infinities, "zero": self.zeros}
        if count:
            summary |= {
                "min": self.least,
                "max": self.largest,
                "mean": max(-_MOST, min(_MOST, self.total)) / count,
                "norm": math.sqrt(min(_MOST, self.squares)),
                "bins": [[[int(i), int(row[i])] for i in np.flatnonzero(row)] for row in self.bins],
            }
        return summary


class ValueDistance:
    """The distance between two tensors, from the pairs of values that were added.

    Attributes:
        differing: the number of pairs that are not equal; NaN equals NaN.
        largest: the largest absolute difference of a finite pair.
        squares, reference: of the finite pairs, the sum of squared differences, and the sum of squares of the other
            tensor's values.
    """

    def __init__(self) -> None:
        self.differing = 0
        self.largest = self.squares = self.reference = 0.0

    def add(self, ours: np.ndarray, others: np.ndarray) -> None:
        """Add the values of the same piece of both tensors."""
        a, b = ours.astype(np.float64), others.astype(np.float64)
        self.differing += int(np.count_nonzero((a != b) & ~(np.isnan(a) & np.isnan(b))))
        finite = np.isfinite(a) & np.isfinite(b)
        with np.errstate(over="ignore"):
            distance = np.abs(a[finite] - b[finite])
            self.largest = max(self.largest, min(_MOST, float(distance.max(initial=0.0))))
            self.squares += float(np.dot(distance, distance))
            self.reference += float(np.dot(b[finite], b[finite]))

    def to_json(self) -> dict[str, Any]:
        """Return the distance as plain values.

        "relative" is the norm of the differences divided by the norm of the other tensor, if that norm is not zero.
        """
        distance: dict[str, Any] = {"differing": self.differing, "max": self.largest}
        if self.reference:
            distance["relative"] = math.sqrt(min(_MOST, self.squares) / min(_MOST, self.reference))
        return distance
