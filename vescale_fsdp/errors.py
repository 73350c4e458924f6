"""Every error this package raises on its own behalf, and how their messages are built.

The tree (each class is also the builtin a caller would expect to catch):

    VescaleError
    +-- LayoutError(ValueError)            sizes, granularities or layouts that are not valid
    +-- PlacementError(ValueError)         placements, meshes or shapes that do not go together
    +-- UnsupportedOpError(NotImplementedError)   an operation that has no right answer on ragged pieces
    +-- LifecycleError(RuntimeError)       a module used in an order the runtime cannot honour
    |   +-- MisuseError(AssertionError)    where torch's FSDP2 asserts: a second wrap, a deepcopy, half a hook
    +-- CheckpointError(RuntimeError)      a checkpoint that cannot be written or read as asked
    |   +-- CorruptCheckpointError         the bytes on disk are not what they claim to be
    +-- ConversionError(RuntimeError)      a conversion that cannot be done as asked

A message answers four questions: what was expected, what was got instead, where, and what to do
about it. `explain` builds that text, so that all of them read alike and tests can match on the parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "CheckpointError",
    "ConversionError",
    "CorruptCheckpointError",
    "LayoutError",
    "LifecycleError",
    "MisuseError",
    "PlacementError",
    "UnsupportedOpError",
    "VescaleError",
    "explain",
]


class VescaleError(Exception):
    """Base of every error raised by vescale_fsdp: one sentence, and the parts of `explain` if they are given."""

    def __init__(
        self,
        problem: str,
        *,
        expected: object = None,
        got: object = None,
        where: object = None,
        todo: str | None = None,
    ) -> None:
        is_explained = expected is not None
        super().__init__(
            explain(problem, expected=expected, got=got, where=where, todo=todo) if is_explained else problem
        )

    @classmethod
    def explained(
        cls, problem: str, *, expected: object, got: object, where: object = None, todo: str | None = None
    ) -> Self:
        """The error whose text `explain` builds."""
        return cls(explain(problem, expected=expected, got=got, where=where, todo=todo))


class LayoutError(VescaleError, ValueError):
    """Sizes, a granularity or a layout that is not valid."""


class PlacementError(VescaleError, ValueError):
    """Placements, meshes or shapes that do not go together."""


class UnsupportedOpError(VescaleError, NotImplementedError):
    """An operation that has no right answer on a ragged piece."""


class LifecycleError(VescaleError, RuntimeError):
    """A sharded module used in an order the runtime cannot honour."""


class MisuseError(LifecycleError, AssertionError):
    """What torch's FSDP2 refuses with an AssertionError."""


class CheckpointError(VescaleError, RuntimeError):
    """A checkpoint that cannot be written or read as asked."""


class CorruptCheckpointError(CheckpointError):
    """The bytes of a checkpoint are not what its metadata says."""


class ConversionError(VescaleError, RuntimeError):
    """A conversion that cannot be done as asked."""


def explain(
    problem: str, *, expected: object, got: object, where: object = None, todo: str | None = None
) -> str:
    """Return the text of an error: one sentence, then expected / got / where / what to do."""
    lines = [problem, f"  expected: {expected}", f"  got: {got}"]
    if where is not None:
        lines.append(f"  where: {where}")
    if todo is not None:
        lines.append(f"  what to do: {todo}")
    return "\n".join(lines)
