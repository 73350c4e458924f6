"""What a conversion is going to write, whatever the target format: planned from metadata, before a byte
moves.

A plan is data files (tensors and the bytes around them) and closing files (settings, index, manifest), in
the order they are published: the file that makes the folder a checkpoint comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import xxhash

from vescale_fsdp.checkpoint.storage.base import FileWriter
from vescale_fsdp.conversion.output.file_plan import FilePlan, TensorPart

__all__ = ["ClosingFile", "OutputPlan", "Written"]


Written = Callable[[str, int, int], bytes]
"""Bytes of a data file of the plan by its name, offset and number, once it is written."""


@dataclass(frozen=True)
class ClosingFile:
    """A small file written after all tensors."""

    name: str
    pieces: Callable[[], Iterable[bytes]]


@dataclass(frozen=True)
class OutputPlan:
    """Everything a conversion writes.

    Args:
        kind: the target format.
        files: data files.
        closing: small files, the decisive one last.
        is_stale: whether an old file in the target must go when this plan is published.
        wrap: put around each output file, which is then written front to back.
        single_file: the target is this one file rather than a folder.
        when_written: called when all data files are written, in whatever run or process, before the closing files are
            made.
    """

    kind: str
    files: tuple[FilePlan, ...]
    closing: tuple[ClosingFile, ...]
    is_stale: Callable[[str], bool]
    single_file: bool = False
    wrap: Callable[[str, FileWriter], FileWriter] | None = None
    when_written: Callable[[Written], None] = lambda _: None

    @cached_property
    def tensor_nbytes(self) -> int:
        """Bytes of tensor data in all files."""
        return sum(file.tensor_nbytes for file in self.files)

    def fingerprint(self) -> str:
        """Equal for equal plans: names, sizes and contents of all files, as far as metadata tells."""
        lines = [self.kind]
        for file in self.files:
            lines.append(f"{file.name} {file.nbytes}")
            for part in file.parts:
                if isinstance(part, TensorPart):
                    info = part.view.info
                    line = f"{info.name} {info.shape} {info.dtype.name} {part.start} {part.stop}"
                    lines.append(f" {line} {part.view.identity()}")
        for closing in self.closing:
            lines.append(closing.name)
        return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())
