"""Real text that every machine has: the source files of Python's own standard library, as bytes.

The corpus is one run of bytes, and a batch is a set of windows into it. Which windows make up step s depends
on s and the seed alone, so that a job may go on with another number of ranks and still see the same data:

    global batch of step s     windows w0 w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11
    on 2 ranks                 [ rank 0          ] [ rank 1              ]
    on 3 ranks                 [ rank 0  ] [ rank 1   ] [ rank 2         ]
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

NOT_OURS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def python_sources() -> list[Path]:
    """The standard library's .py files, sorted by path; tests and installed packages left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (file for file in root.rglob("*.py") if not NOT_OURS & set(file.relative_to(root).parts))
    return sorted(files)


def read_corpus(max_bytes: int = 4 << 20) -> Tensor:
    """The first ``max_bytes`` (4 MiB) of the sources, one after the other: 1D [bytes] uint8."""
    data = bytearray()
    for file in python_sources():
        data += file.read_bytes()
        if len(data) >= max_bytes:
            break
    return torch.frombuffer(data[:max_bytes], dtype=torch.uint8)


@dataclass(frozen=True)
class Batches:
    """Which windows of the corpus each rank sees at each step.

    Args:
        corpus: 1D [bytes] uint8.
        batch_size: windows of a global batch; every world size used must divide it.
        seq_len: tokens of a window; one more byte is read, as the last target.
        seed: another seed gives another order of windows.
    """

    corpus: Tensor
    batch_size: int = 12
    seq_len: int = 128
    seed: int = 0

    def offsets(self, step: int) -> list[int]:
        """Where the windows of a step start, in bytes; the same for every world size."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        last = self.corpus.numel() - self.seq_len - 1
        return torch.randint(0, last + 1, (self.batch_size,), generator=generator).tolist()

    def of_rank(self, step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one rank, each [batch / world_size, seq] int64.

        Raises:
            ValueError: if the global batch does not divide into the ranks.
        """
        if self.batch_size % world_size:
            raise ValueError(f"a batch of {self.batch_size} does not divide into {world_size} ranks")
        share = self.batch_size // world_size
        mine = self.offsets(step)[rank * share : (rank + 1) * share]
        windows = torch.stack([self.corpus[start : start + self.seq_len + 1] for start in mine]).long()
        return windows[:, :-1], windows[:, 1:]
