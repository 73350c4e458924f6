"""Checksums of stored bytes: the algorithms, and how checksums of pieces are joined.

All code of ``checkpoint`` and ``conversion`` that computes a checksum of stored bytes calls this module. Hashes of
names (`file_names`), signatures (`ranks.stores`) and hashes in the rest of the package are computed where they are
used.

bytes                                         algorithm    here
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

CHECKSUM_BYTES = 8  # an xxh3-64 as files store it
CRC_BYTES = 4

RunningChecksum = xxhash.xxh3_64  # update(data), intdigest(), hexdigest(), reset()
RunningDigest = xxhash.xxh3_128

checksum_of: Callable[[Any], int] = xxhash.xxh3_64_intdigest
hex_checksum_of: Callable[[Any], str] = xxhash.xxh3_64_hexdigest
digest_of: Callable[[Any], bytes] = xxhash.xxh3_128_digest  # 16 bytes
hex_digest_of: Callable[[Any], str] = xxhash.xxh3_128_hexdigest


@dataclass(frozen=True)
class Crc:
    """One kind of 32-bit CRC.

    A CRC is linear over GF(2): n zero bytes after the first piece multiply its CRC by x^(8n) modulo the polynomial, and
    the CRC of both pieces is that product, xor the CRC of the second. Pieces that several threads read or write
    therefore need no second pass.

    Args:
        polynomial: in reflected bit order.
        of: the CRC of some bytes.
    """

    polynomial: int
    of: Callable[[Any], int]

    def combine(self, first: int, second: int, second_nbytes: int) -> int:
        """CRC of two pieces together, from the CRC of each and the length of the second."""
        return _multiply(_power_of_x(8 * second_nbytes, self.polynomial), first, self.polynomial) ^ second

    def join(self, pieces: Iterable[tuple[int, int]]) -> int:
        """CRC of many pieces from the (CRC, bytes) of each, in their order."""
        joined = 0
        for crc, nbytes in pieces:
            joined = self.combine(joined, crc, nbytes) if joined else crc  # for a CRC of 0 the product is 0
        return joined


def _crc32(data: Any) -> int:
    return _crc32_function()(data)


@lru_cache(maxsize=1)
def _crc32_function() -> Callable[[Any], int]:
    try:
        from isal.isal_zlib import crc32
    except ImportError:  # no build for this platform; zlib has a tenth of the speed
        from zlib import crc32
    function: Callable[[Any], int] = crc32
    return function


def _crc32c(data: Any) -> int:
    import google_crc32c  # here: these imports take time, and most commands need neither
    import numpy as np

    # google_crc32c takes bytes and arrays, and refuses memoryviews.
    crc: int = google_crc32c.value(np.frombuffer(data, np.uint8) if isinstance(data, memoryview) else data)
    return crc


CRC32 = Crc(0xEDB88320, _crc32)  # of IEEE 802.3
CRC32C = Crc(0x82F63B78, _crc32c)  # of Castagnoli

_ONE = 0x80000000  # the polynomial 1: in reflected order the highest bit is the lowest power


def _multiply(a: int, b: int, polynomial: int) -> int:
    product = 0
    bit = _ONE
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ (polynomial if b & 1 else 0)
        bit >>= 1
    return product


@lru_cache(maxsize=4096)  # pieces have few different lengths
def _power_of_x(bits: int, polynomial: int) -> int:
    """x ** bits modulo the polynomial, by squaring."""
    result, base = _ONE, _ONE >> 1
    while bits:
        if bits & 1:
            result = _multiply(result, base, polynomial)
        base = _multiply(base, base, polynomial)
        bits >>= 1
    return result
