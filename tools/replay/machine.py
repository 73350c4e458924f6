"""How long a GPU takes for what a recording has: a roofline, and bandwidths from one published row.

    an operator      the larger of its flops and its bytes at the machine's rates, and a launch
    FSDP2's copies   their bytes at the bandwidths of the published row
    a collective     its bytes over the links at the bandwidths of the published row, and a latency
    contention       how much a copy and a collective slow each other while both run

The row is FSDP2's on gpt-oss-120B over 64 H800 (arXiv:2602.22437, table 1): milliseconds of one layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

from tools.replay.recording import Item

TABLE_1 = {
    "Shard(0)": {"all-gather": 43.71, "copy-out": 5.22, "reduce-scatter": 94.24, "copy-in": 12.37},
    "Shard(1)": {"all-gather": 44.35, "copy-out": 13.72, "reduce-scatter": 95.36, "copy-in": 23.14},
}
"""Milliseconds of FSDP2's gpt-oss-120B layer over 64 H800, by the placement of its experts."""

H800_BYTES = 79.1 * 2**30  # what torch reports for "80 GB"


@dataclass(frozen=True)
class Machine:
    """A GPU and its links.

    Raises:
        ValueError: a rate is not positive, or contention is negative.
    """

    gather_bytes_s: float  # of an all-gather's full buffer, less this rank's part
    reduce_bytes_s: float  # of a reduce-scatter's
    copy_out_bytes_s: float  # read and written by `split_with_sizes_copy`
    copy_in_bytes_s: float  # by `chunk_cat`
    contention: float = 0.0  # how much a copy and a collective slow each other; 1: twice as long
    exchange: float = 1.0  # speed of an all-to-all per byte, of a reduce-scatter's
    flops_s: float = 989e12 * 0.5  # H800's matrix products in bf16, half of the peak
    memory_bytes_s: float = 3.35e12 * 0.8
    launch_s: float = 2e-6
    hop_s: float = 10e-6  # times log2 of the ranks: the latency of a collective

    def __post_init__(self) -> None:
        rates = (self.gather_bytes_s, self.reduce_bytes_s, self.copy_out_bytes_s, self.copy_in_bytes_s)
        if min(*rates, self.flops_s, self.memory_bytes_s, self.exchange) <= 0 or self.contention < 0:
            raise ValueError(f"expected positive rates and no negative contention; got {self}")

    @property
    def slowdowns(self) -> Mapping[tuple[str, str], float]:
        """Contention for the queue. Two communicators share the links, whatever the contention is."""
        pairs = {("copy", "collective"): self.contention, ("collective", "copy"): self.contention}
        return {**pairs, ("collective", "collective"): 1.0}

    @staticmethod
    def class_of(item: Item) -> str:
        """ "collective", "product" for operators with flops, "copy" for others."""
        if item.kind == "collective":
            return "collective"
        return "product" if item.flops else "copy"

    def seconds_of(self, item: Item) -> float:
        """Seconds of an operator or a collective that runs alone."""
        if item.kind == "collective":
            return self._sent_s(item) + self.hop_s * log2(item.ranks) if item.ranks > 1 else 0.0
        rates = {"split_with_sizes_copy": self.copy_out_bytes_s, "chunk_cat": self.copy_in_bytes_s}
        moved_s = item.nbytes / rates.get(item.name, self.memory_bytes_s)
        return self.launch_s + max(item.flops / self.flops_s, moved_s)

    def _sent_s(self, item: Item) -> float:
        sent = item.nbytes * (item.ranks - 1) / item.ranks
        if "allgather" in item.name:
            return sent / self.gather_bytes_s
        if "alltoall" in item.name:
            return sent / (self.reduce_bytes_s * self.exchange)
        return (
            sent / self.reduce_bytes_s * (1 if "reduce_scatter" in item.name else 2)
        )  # an all-reduce: there and back
