"""Codes of a few bits in words: what is unpacked is what was packed bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from vescale_fsdp.conversion.quantization.bit_packing import BitPacking


def _packed(codes: np.ndarray, bits: int, word_bits: int) -> np.ndarray:
    """Rows of codes as words, the lowest bits first; the last word may have unused bits."""
    stream = ((codes[..., None] >> np.arange(bits)) & 1).reshape(len(codes), -1).astype(np.uint8)
    stream = np.pad(stream, [(0, 0), (0, -stream.shape[1] % word_bits)])
    words = np.ascontiguousarray(np.packbits(stream, axis=1, bitorder="little"))
    return words.view(f"<u{word_bits // 8}")


@pytest.mark.parametrize("word_bits", [8, 32])
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_come_back(bits: int, word_bits: int) -> None:
    """Of every number of bits, also of those that words cut; in as many words as the count says."""
    packing = BitPacking(bits, word_bits)
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 2 * packing.codes))
    words = _packed(codes, bits, word_bits)
    assert words.shape[1] == 2 * packing.words == packing.num_words(codes.shape[1])
    assert packing.words * word_bits == packing.codes * bits
    found = packing.unpack(words)
    assert found.dtype == np.uint8 and np.array_equal(found, codes)


def test_an_order_within_a_word() -> None:
    """AWQ's: the code in the lowest bits is the first, the next one is the third."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes = np.arange(16).reshape(1, 16)
    words = _packed(codes.reshape(1, 2, 8)[..., order].reshape(1, 16), 4, 32)
    assert np.array_equal(BitPacking(4, order=order).unpack(words), codes)


@pytest.mark.parametrize(
    ("bits", "word_bits", "order"),
    [(0, 32, ()), (9, 32, ()), (4, 16, ()), (4, 32, (0, 1)), (4, 32, (0, 1, 2, 3, 4, 5, 6, 6))],
)
def test_a_packing_verifies_itself(bits: int, word_bits: int, order: Sequence[int]) -> None:
    """Bits beyond a byte, words of other sizes, and orders that are none."""
    with pytest.raises(AssertionError):
        BitPacking(bits, word_bits, tuple(order))
