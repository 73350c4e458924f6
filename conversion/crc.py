"""CRC-32 of data that was checksummed in pieces.

A CRC is linear over GF(2): appending n zero bytes to the first piece multiplies its CRC by x^(8n) modulo the
polynomial, and the CRC of the whole is that, xor the CRC of the second piece. So pieces written by several
threads need no second pass. Polynomial and bit order are those of zip (reflected 0xEDB88320).
"""

from __future__ import annotations

from functools import lru_cache

__all__ = ["combine_crc32"]

_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000  # the polynomial 1: the highest bit is the lowest power


def _multiply(a: int, b: int) -> int:
    """a * b modulo the polynomial."""
    product = 0
    bit = _ONE
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


@lru_cache(maxsize=4096)
def _power_of_x(bits: int) -> int:
    """x ** bits modulo the polynomial, by squaring."""
    result, base = _ONE, _ONE >> 1
    while bits:
        if bits & 1:
            result = _multiply(result, base)
        base = _multiply(base, base)
        bits >>= 1
    return result


def combine_crc32(first: int, second: int, second_nbytes: int) -> int:
    """CRC-32 of two pieces of data together, from the CRC-32 of each and the length of the second."""
    return _multiply(_power_of_x(8 * second_nbytes), first) ^ second
