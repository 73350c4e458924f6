"""CRCs of data that was checksummed in pieces.

A CRC is linear over GF(2): appending n zero bytes to the first piece multiplies its CRC by x^(8n) modulo the
polynomial, and the CRC of the whole is that, xor the CRC of the second piece. So pieces written by several
threads need no second pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

try:
    from isal.isal_zlib import crc32
except ImportError:  # no build for this platform: a tenth of the speed
    from zlib import crc32

_ONE = 0x80000000  # the polynomial 1: in reflected order the highest bit is the lowest power


@dataclass(frozen=True)
class Crc:
    """One kind of 32-bit CRC.

    Args:
        polynomial: in reflected bit order.
        of: the CRC of some bytes.
    """

    polynomial: int
    of: Callable[[Any], int]

    def combine(self, first: int, second: int, second_nbytes: int) -> int:
        """CRC of two pieces together, from the CRC of each and the length of the second."""
        return _multiply(_power_of_x(8 * second_nbytes, self.polynomial), first, self.polynomial) ^ second


def _crc32c(data: Any) -> int:
    import google_crc32c

    found: int = google_crc32c.value(bytes(data) if isinstance(data, memoryview) else data)
    return found


CRC32 = Crc(0xEDB88320, crc32)  # zip, and so torch.save
CRC32C = Crc(0x82F63B78, _crc32c)  # zarr


def _multiply(a: int, b: int, polynomial: int) -> int:
    product = 0
    bit = _ONE
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ (polynomial if b & 1 else 0)
        bit >>= 1
    return product


@lru_cache(maxsize=4096)
def _power_of_x(bits: int, polynomial: int) -> int:
    """x ** bits modulo the polynomial, by squaring."""
    result, base = _ONE, _ONE >> 1
    while bits:
        if bits & 1:
            result = _multiply(result, base, polynomial)
        base = _multiply(base, base, polynomial)
        bits >>= 1
    return result
