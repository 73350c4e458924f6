"""How a conversion runs: overwrite, resume, parts, memory and threads."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from vescale_fsdp.checkpoint.moves.copying import CopyLimits
from vescale_fsdp.errors import ConversionError

_MAX_PARTS = 65_536  # each part has a journal, which all others look for


@dataclass(frozen=True)
class Part:
    """Which share of the files this process writes: ``index`` of ``count``, from 0.

    Examples:
        >>> Part.parse("2/8")
        Part(index=2, count=8)
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count <= _MAX_PARTS:
            raise ConversionError(
                "There is no such part.",
                expected=f"--part I/N with 0 <= I < N, and N at most {_MAX_PARTS:,}",
                got=f"{self.index}/{self.count}",
                todo="number the parts from 0",
            )

    @classmethod
    def parse(cls, text: str) -> Part:
        """From ``i/n``, or ``env`` for the numbers that torchrun gives its processes.

        Raises:
            ConversionError: for any other text, and for an environment without those numbers.
        """
        if text.strip() == "env":
            return cls._from_environment()
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None:
            raise ConversionError(
                "This is not a valid part.",
                expected="I/N, or env",
                got=repr(text),
                todo="write 0/4, for example",
            )
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def _from_environment(cls) -> Part:
        rank, count = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        if not (rank.isdecimal() and count.isdecimal()):
            raise ConversionError(
                "The environment does not say which part is wanted.",
                expected="RANK and WORLD_SIZE, numbers, as torchrun sets them",
                got=f"RANK={rank!r}, WORLD_SIZE={count!r}",
                where="--part env",
                todo="start the command with torchrun, or pass --part I/N",
            )
        return cls(int(rank), int(count))


@dataclass(frozen=True)
class RunOptions:
    """How a plan is carried out.

    Args:
        overwrite: replace what is in the target.
        resume: go on where an interrupted run of the same plan stopped; start if there was none.
        dry_run: check the target, write nothing.
        part: this process's share.
        limits: memory and threads.

    Examples:
        >>> RunOptions(resume=True, part=Part(0, 4)).dry_run
        False
    """

    overwrite: bool = False
    resume: bool = False
    dry_run: bool = False
    part: Part = field(default_factory=Part)
    limits: CopyLimits = field(default_factory=CopyLimits)
