"""The errors and warnings of this package, and how their messages are built.

The tree (each class is also the builtin a caller would expect to catch):

    VescaleError
    +-- ArgumentError(ValueError, TypeError)   an argument that a call does not accept
    +-- UnknownNameError(KeyError)         a name that is looked up and does not exist
    +-- LayoutError(ValueError)            sizes, granularities or layouts that are not valid
    +-- PlacementError(ValueError)         placements, meshes or shapes that do not go together
    +-- UnsupportedOpError(NotImplementedError)   an operation that has no correct result on ragged pieces
    +-- LifecycleError(RuntimeError)       a module used in an order the runtime cannot honor
    |   +-- MisuseError(AssertionError)    where torch's FSDP2 asserts: a second wrap, a deepcopy
    +-- CheckpointError(RuntimeError)      a checkpoint that cannot be written or read as requested
    |   +-- CorruptCheckpointError         the bytes on disk do not match the metadata
    |   +-- PartialLoadError               a load that failed after it had begun to overwrite tensors
    |       +-- DamagedLoadError           .. because the checkpoint is damaged (also a CorruptCheckpointError)
    +-- ConversionError(RuntimeError)      a conversion that cannot be done as requested

Warnings with a class of their own, for filters: `PaddingWarning`, `BoundNamesWarning`, `UntriedVersionWarning`.

A message answers four questions: what was expected, what was got instead, where, and what to do about it. Errors take
the answers, keep them as attributes and build the text themselves; `explain` builds it for warnings:

    raise CheckpointError("There is no such step.", expected="one of [1, 2]", got=3, where="/run")
"""

from __future__ import annotations

import os
from collections.abc import Iterable

_UNSAID = object()  # default of a part that the message does not have; None may be a value


def allows_untried(feature: str) -> bool:
    """Whether VESCALE_FSDP_UNTRIED=feature,.. allows a feature that has never run on its intended hardware."""
    return feature in os.environ.get("VESCALE_FSDP_UNTRIED", "").split(",")


class VescaleError(Exception):
    """Base of every error raised by vescale_fsdp.

    Args:
        problem: one sentence; the whole message if nothing follows.
        expected, got, where, todo: as for `explain`.

    Attributes:
        problem: the sentence.
        expected, got, where, todo: the parts of the message; None for parts that it does not have. Plain values are
            kept, others as the text that the message shows, so that an error can be pickled.

    Examples:
        >>> try:
        ...     raise VescaleError("It broke.", expected=3, got=4, todo="mend it")
        ... except VescaleError as error:
        ...     error.expected, error.got, error.where, error.todo
        (3, 4, None, 'mend it')
    """

    def __init__(
        self,
        problem: str,
        *,
        expected: object = _UNSAID,
        got: object = _UNSAID,
        where: object = None,
        todo: str | None = None,
    ) -> None:
        super().__init__(explain(problem, expected=expected, got=got, where=where, todo=todo))
        self.problem = problem
        self.expected, self.got, self.where = _plain(expected), _plain(got), _plain(where)
        self.todo = todo

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show its repr


def _plain(part: object) -> object:
    """A part of a message as an attribute value that can be pickled and keeps no object alive."""
    if part is _UNSAID:
        return None
    return part if isinstance(part, str | int | float | bool | None) else str(part)


class ArgumentError(VescaleError, ValueError, TypeError):
    """An argument with a value or a type that a call does not accept."""


class UnknownNameError(VescaleError, KeyError):
    """A name that is looked up and does not exist."""


class LayoutError(VescaleError, ValueError):
    """Sizes, a granularity or a layout that is not valid."""


class PlacementError(VescaleError, ValueError):
    """Placements, meshes or shapes that do not go together."""


class UnsupportedOpError(VescaleError, NotImplementedError):
    """An operation that has no correct result on a ragged piece."""


class LifecycleError(VescaleError, RuntimeError):
    """A sharded module used in an order the runtime cannot honor."""


class MisuseError(LifecycleError, AssertionError):
    """A misuse that torch's FSDP2 refuses with an AssertionError."""


class CheckpointError(VescaleError, RuntimeError):
    """A checkpoint that cannot be written or read as requested."""


class CorruptCheckpointError(CheckpointError):
    """The bytes of a checkpoint do not match its metadata."""


class PartialLoadError(CheckpointError):
    """A load that failed after it had begun to overwrite tensors, which now have values of two states.

    The next forward with such sharded parameters raises, until a load has filled them. Other tensors have no such
    check.

    Args:
        problem: the cause of the failure, and its effect.
        overwritten: names of tensors that this rank has overwritten in part. Even if there are none, other ranks may
            have overwritten tensors.
    """

    def __init__(self, problem: str, *, overwritten: Iterable[str] = ()) -> None:
        super().__init__(problem)
        self.overwritten = tuple(overwritten)


class DamagedLoadError(PartialLoadError, CorruptCheckpointError):
    """A load that failed because of damage, after it had begun to overwrite tensors."""


class ConversionError(VescaleError, RuntimeError):
    """A conversion that cannot be done as requested."""


class PaddingWarning(UserWarning):
    """The padding of a group exceeds the policy's limit.

    Examples:
        >>> import warnings
        >>> warnings.simplefilter("error", PaddingWarning)  # too much padding raises
        >>> warnings.resetwarnings()
    """


class BoundNamesWarning(UserWarning):
    """A training stack was imported before `integrations.install`, and its modules still use torch's functions."""


class UntriedVersionWarning(UserWarning):
    """A training stack is installed in a version that this package was not tested with."""


def explain(
    problem: str,
    *,
    expected: object = _UNSAID,
    got: object = _UNSAID,
    where: object = None,
    todo: str | None = None,
) -> str:
    """The text of an error: one sentence, then the given parts of expected / got / where / what to do."""
    parts = {"expected": expected, "got": got, "where": where, "what to do": todo}
    always = ("expected", "got")  # shown even if None, which may be the value itself
    said = [
        f"  {name}: {part}"
        for name, part in parts.items()
        if part is not _UNSAID and (part is not None or name in always)
    ]
    return "\n".join([problem, *said])


def some(names: Iterable[str], most: int = 4) -> str:
    """The first few names, and how many more there are; "none" for none.

    >>> some(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    listed = list(names)
    return (", ".join(listed[:most]) or "none") + (
        f" and {len(listed) - most} more" if len(listed) > most else ""
    )


def format_bytes(nbytes: int) -> str:
    """A number of bytes in decimal units, with three digits (terabytes: four).

    >>> format_bytes(1_230_000)
    '1.23 MB'
    """
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"  # four digits: there is no larger unit
