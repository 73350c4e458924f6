"""Checksums of stored bytes, and the combination of the CRCs of pieces.

All code of ``checkpoint`` and ``conversion`` that computes checksums of stored bytes uses this module: rank files get
theirs in `native.write`, and reads compare them in `native.rank_file_reader`. Hashes for other
purposes, such as those of names (`file_names`) and signatures (`ranks.stores`), are computed by the code that needs
them.

bytes                                         algorithm    names
stripes of files, rows of a journal           xxh3-64      checksum_of, RunningChecksum
documents, contents of replicas               xxh3-128     digest_of, RunningDigest
records of zip archives (torch.save)          CRC-32       CRC32
chunks of zarr arrays                         CRC-32C      CRC32C
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import xxhash

CHECKSUM_BYTES = 8  # size of an xxh3-64 in files
CRC_BYTES = 4  # size of a CRC in files

RunningChecksum = xxhash.xxh3_64  # update(data), intdigest(), hexdigest(), reset()
RunningDigest = xxhash.xxh3_128

checksum_of: Callable[[Any], int] = xxhash.xxh3_64_intdigest
hex_checksum_of: Callable[[Any], str] = xxhash.xxh3_64_hexdigest
digest_of: Callable[[Any], bytes] = xxhash.xxh3_128_digest  # 16 bytes
hex_digest_of: Callable[[Any], str] = xxhash.xxh3_128_hexdigest


@dataclass(frozen=True)
class Crc:
    """One kind of 32-bit CRC.

    A CRC is linear over GF(2). Appending n zero bytes to a piece multiplies its CRC by x^(8n) modulo the polynomial.
    The CRC of two pieces is this product, with n the length of the second piece, xor the second CRC. Pieces that
    several threads read or write therefore need no second pass.

    Args:
        polynomial: the generator polynomial, in reflected bit order.
        of: computes the CRC of a buffer.
    """

    polynomial: int
    of: Callable[[Any], int]

    def combine(self, first: int, second: int, second_nbytes: int) -> int:
        """Return the CRC of two adjacent pieces, from the CRC of each piece and the length of the second."""
        return _multiply(_power_of_x(8 * second_nbytes, self.polynomial), first, self.polynomial) ^ second

    def join(self, pieces: Iterable[tuple[int, int]]) -> int:
        """Return the CRC of many adjacent pieces, from the CRC and the number of bytes of each, in order."""
        joined = 0
        for crc, nbytes in pieces:
            # A shortcut: the product with 0 is 0.
            joined = self.combine(joined, crc, nbytes) if joined else crc
        return joined


def _crc32(data: Any) -> int:
    return _crc32_function()(data)


@lru_cache(maxsize=1)
def _crc32_function() -> Callable[[Any], int]:
    """Return the fastest CRC-32 function; cached, because isal is imported only if a CRC is needed."""
    try:
        from isal.isal_zlib import crc32
    except ImportError:  # isal has no build for this platform; zlib is ten times slower
        from zlib import crc32
    function: Callable[[Any], int] = crc32
    return function


def _crc32c(data: Any) -> int:
    # Imported late: google_crc32c takes 4 ms and numpy more, and most commands need neither.
    import google_crc32c
    import numpy as np

    # google_crc32c takes bytes and arrays, and refuses memoryviews.
    crc: int = google_crc32c.value(np.frombuffer(data, np.uint8) if isinstance(data, memoryview) else data)
    return crc


CRC32 = Crc(0xEDB88320, _crc32)  # of IEEE 802.3
CRC32C = Crc(0x82F63B78, _crc32c)  # of Castagnoli

_ONE = 0x80000000  # the polynomial 1: in reflected bit order, the highest bit is the coefficient of x^0


def _multiply(a: int, b: int, polynomial: int) -> int:
    """Return the product of two polynomials over GF(2), modulo a third one."""
    product = 0
    bit = _ONE
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ (polynomial if b & 1 else 0)
        bit >>= 1
    return product


@lru_cache(maxsize=4096)  # most pieces have one of a few lengths
def _power_of_x(bits: int, polynomial: int) -> int:
    """Return x ** bits modulo the polynomial, by repeated squaring."""
    result, base = _ONE, _ONE >> 1
    while bits:
        if bits & 1:
            result = _multiply(result, base, polynomial)
        base = _multiply(base, base, polynomial)
        bits >>= 1
    return result
