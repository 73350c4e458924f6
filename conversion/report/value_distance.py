"""How far two tensors are apart, found piece by piece."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


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
