"""`VerifyReport`: what `verify` says of a checkpoint of any format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vescale_fsdp.errors import CorruptCheckpointError


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`.

    Attributes:
        problems: all problems; empty if the checkpoint is good.
        num_tensors: number of tensors in the checkpoint.
        num_checksums: number of verified checksums: of stripes, of chunks, or of records of other formats.
        num_bytes: number of tensor bytes that were read.

    Examples:
        >>> VerifyReport((), num_tensors=4, num_checksums=1, num_bytes=1 << 20).ok
        True
        >>> import torch
        >>> from vescale_fsdp.checkpoint import save, verify
        >>> save("to_damage", {"w": torch.ones(4)})
        >>> from pathlib import Path
        >>> (file,) = Path("to_damage").glob("data-*/*.safetensors")
        >>> data = bytearray(file.read_bytes())
        >>> data[-100] ^= 1
        >>> _ = file.write_bytes(data)
        >>> (problem,) = verify("to_damage").problems
        >>> problem.where.endswith(file.name)
        True
    """

    class Problem(NamedTuple):
        """One problem of a checkpoint.

        Attributes:
            where: the file's name; in other formats, which are verified tensor by tensor, the tensor's name; the
                path of a file that cannot be opened.
            text: message of the error that a load would raise.
            tensors: names of all tensors with values in the damaged bytes; empty if unknown.
        """

        where: str
        text: str
        tensors: tuple[str, ...] = ()

        def __str__(self) -> str:
            return f"{self.where}: {self.text}"

    problems: tuple[Problem, ...]
    num_tensors: int = 0
    num_checksums: int = 0
    num_bytes: int = 0

    @property
    def damaged_tensors(self) -> tuple[str, ...]:
        """Names of all tensors with values in damaged bytes, sorted. Most of a tensor may be good nevertheless."""
        return tuple(sorted({name for problem in self.problems for name in problem.tensors}))

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def damage_report(damage: CorruptCheckpointError, where: str) -> VerifyReport:
    """Return the report about a checkpoint at ``where`` that cannot be opened: a problem per file."""
    errors = (damage, *damage.others)
    # args[0]: the message of one error alone
    problems = (VerifyReport.Problem(str(error.where or where), error.args[0]) for error in errors)
    return VerifyReport(tuple(problems))
