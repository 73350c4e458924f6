"""Statistics of a tensor's values, and the distance between two tensors, added up piece by piece.

The histogram counts magnitudes. A bin covers two powers of two, so one pass is enough for any range.

    bin 0    |x| < 2^-62        bin 31    2^-2 <= |x| < 2^0        bin 63    |x| >= 2^62
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vescale_fsdp.layout.dtypes import DType, dtype_from_torch
from vescale_fsdp.views.float_codes import cast_array

_F32, _F64 = dtype_from_torch("float32"), dtype_from_torch("float64")
_NUM_BINS = 64


def values_of(raw: np.ndarray, dtype: DType) -> np.ndarray | None:
    """Raw items as numbers; complex ones as their parts. None for codes, which mean nothing without their scales."""
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
    """Least, largest, mean, norm and so on of the values that were added.

    Attributes:
        numel, nans, zeros: how many values, and how many of each kind.
        least, largest: of those that are finite.
        total, squares: sums of finite values and of their squares.
        bins: 2D [2, bins], magnitudes of negative and of positive values.
    """

    def __init__(self) -> None:
        self.numel = self.nans = self.zeros = self._num_finite = 0
        self.least, self.largest = math.inf, -math.inf
        self.total = self.squares = 0.0
        self.bins = np.zeros((2, _NUM_BINS), np.int64)

    def add(self, values: np.ndarray) -> None:
        """Count a piece."""
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
        wide = values.astype(np.float64)
        self.total += float(wide.sum())
        self.squares += float(np.dot(wide, wide))
        self.zeros += int(np.count_nonzero(values == 0))
        _, exponents = np.frexp(values)
        places = np.clip((exponents + _NUM_BINS - 1) >> 1, 0, _NUM_BINS - 1)
        for row, chosen in ((0, values < 0), (1, values > 0)):
            self.bins[row] += np.bincount(places[chosen], minlength=_NUM_BINS)

    def to_json(self) -> dict[str, Any]:
        """Plain values; what there is none of is left out."""
        count = self._num_finite
        infinities = self.numel - self.nans - count
        found: dict[str, Any] = {"nan": self.nans, "inf": infinities, "zero": self.zeros}
        if count:
            found |= {
                "min": self.least,
                "max": self.largest,
                "mean": self.total / count,
                "norm": math.sqrt(self.squares),
                "bins": [[[int(i), int(row[i])] for i in np.flatnonzero(row)] for row in self.bins],
            }
        return found


class ValueDistance:
    """Distance of the pairs of values that were added; pairs of NaN are equal.

    Attributes:
        differing: values that are not equal.
        largest: the largest distance of finite values.
        squares, reference: sums of squared distances, and of squares of the other's values.
    """

    def __init__(self) -> None:
        self.differing = 0
        self.largest = self.squares = self.reference = 0.0

    def add(self, ours: np.ndarray, others: np.ndarray) -> None:
        """Compare a piece of each."""
        a, b = ours.astype(np.float64), others.astype(np.float64)
        self.differing += int(np.count_nonzero((a != b) & ~(np.isnan(a) & np.isnan(b))))
        finite = np.isfinite(a) & np.isfinite(b)
        distance = np.abs(a[finite] - b[finite])
        self.largest = max(self.largest, float(distance.max(initial=0.0)))
        self.squares += float(np.dot(distance, distance))
        self.reference += float(np.dot(b[finite], b[finite]))

    def to_json(self) -> dict[str, Any]:
        """Plain values; the relative distance is that of the norms, absent where the other is all zeros."""
        found: dict[str, Any] = {"differing": self.differing, "max": self.largest}
        if self.reference:
            found["relative"] = math.sqrt(self.squares / self.reference)
        return found
