"""`BitPacking`: how codes of a few bits are stored in words of 8 or 32 bits, and how they are unpacked.

The codes are a stream of bits that begins at the lowest bit of the first word. A code may continue in the next word:

    4 bits in int32    1 word has 8 codes      GPTQ, compressed-tensors
    3 bits in int32    3 words have 32 codes   the same; codes 10 and 21 are in two words
    6 bits in uint8    3 bytes have 4 codes    compressed-tensors' MXFP6
    AWQ                1 word has 8 codes; the code at position p of the word is number order[p]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class BitPacking:
    """Codes of ``bits`` bits, packed in words.

    Args:
        bits: bits per code, 1 to 8.
        word_bits: bits per word, 8 or 32.
        order: for each position in a period, the number of the code that is stored there; empty if codes are in order.

    Examples:
        >>> import numpy as np
        >>> BitPacking(4).unpack(np.array([0x76543210], dtype=np.uint32)).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
        >>> BitPacking(3).words, BitPacking(3).codes, BitPacking(3).num_words(40)
        (3, 32, 4)
    """

    bits: int
    word_bits: int = 32
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert 1 <= self.bits <= 8, self.bits
        assert self.word_bits in (8, 32), self.word_bits
        assert not self.order or sorted(self.order) == list(range(self.codes)), self.order

    @property
    def words(self) -> int:
        """Number of words in a period, after which the bits are aligned again."""
        return self.bits // math.gcd(self.bits, self.word_bits)

    @property
    def codes(self) -> int:
        """Number of codes in a period."""
        return self.word_bits // math.gcd(self.bits, self.word_bits)

    def num_words(self, num_codes: int) -> int:
        """Return the number of words that store ``num_codes`` codes."""
        return -(-num_codes * self.bits // self.word_bits)

    def unpack(self, words: np.ndarray) -> np.ndarray:
        """Return the codes, uint8 [..., periods * codes], of unsigned words [..., periods * words]."""
        import numpy as np

        periods = words.reshape(*words.shape[:-1], -1, self.words)
        codes = np.empty((*periods.shape[:-1], self.codes), dtype=np.uint8)
        for position, number in enumerate(self.order or range(self.codes)):
            word, shift = divmod(position * self.bits, self.word_bits)
            value = periods[..., word] >> shift
            if (kept := self.word_bits - shift) < self.bits:  # the code's upper bits are in the next word
                value |= periods[..., word + 1] << kept
            codes[..., number] = value & ((1 << self.bits) - 1)
        return codes.reshape(*words.shape[:-1], -1)
