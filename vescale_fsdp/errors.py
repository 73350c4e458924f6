"""The errors and warnings of this package, and how their messages are built.

The class tree (each class also inherits from the builtin exception that a caller would catch):

    VescaleError
    +-- ArgumentError(ValueError, TypeError)   an argument that a call does not accept
    +-- UnknownNameError(KeyError)         a name that is looked up and does not exist
    +-- LayoutError(ValueError)            sizes, granularities or layouts that are not valid
    +-- PlacementError(ValueError)         placements, meshes or shapes that do not go together
    +-- UnsupportedOpError(NotImplementedError)   an operation that has no correct result on ragged pieces
    +-- LifecycleError(RuntimeError)       a module used in an order the runtime cannot honor
    |   +-- MisuseError(AssertionError)    a misuse for which torch's FSDP2 has an assert: a second wrap, a deepcopy
    +-- CheckpointError(RuntimeError)      a checkpoint that cannot be written or read as requested
    |   +-- NoCheckpointError              a path without a checkpoint
    |   +-- StorageError                   a disk or a bucket that cannot be used
    |   +-- CorruptCheckpointError         the bytes on disk do not match the metadata
    |   +-- PartialLoadError               a load that failed after it had begun to overwrite tensors
    |   |   +-- DamagedLoadError           .. because the checkpoint is damaged (also a CorruptCheckpointError)
    |   +-- TransferError                  a state that was not moved between running ranks
    +-- ConversionError(RuntimeError)      a conversion that cannot be done as requested

Warnings with a class of their own, for filters: `PaddingWarning`, `GatherWarning`, `BoundNamesWarning`,
`UntriedVersionWarning`, `UnshardedWarning`.

After one sentence, a message has up to four parts: the expected value, the actual value, the place, and the remedy. The
error classes take the parts as arguments, store them as attributes, and build the text. For warnings, `explain` builds
the text.

    raise CheckpointError("There is no such step.", expected="one of [1, 2]", got=3, where="/run")
"""

from __future__ import annotations

import glob
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")
_MOST_PROBLEMS = 20  # maximum number of problems in the text of one error
_UNSAID = object()  # default of a missing part; not None, which may be the value that was expected or got


class VescaleError(Exception):
    """Base of every error raised by vescale_fsdp.

    Args:
        problem: one sentence; without other parts, the whole message.
        expected, got, where, todo: as for `explain`.

    Attributes:
        problem: the sentence.
        expected: the expected value; None if the part is missing. Strings, numbers, bools and None are stored
            unchanged, other values as their text, so that an error can be pickled.
        got: the actual value, stored in the same way.
        where: the place, such as a parameter, a rank, a file or an offset.
        todo: the remedy.

    Examples:
        >>> try:
        ...     raise VescaleError("It broke.", expected=3, got=4, todo="mend it")
        ... except VescaleError as error:
        ...     error.expected, error.got, error.where, error.todo
        (3, 4, None, 'mend it')
    """

    #: What to do, unless the error says something else.
    usual_todo: ClassVar[str | None] = None

    def __init__(
        self,
        problem: str,
        *,
        expected: object = _UNSAID,
        got: object = _UNSAID,
        where: object = None,
        todo: str | None = None,
    ) -> None:
        self.todo = todo if todo is not None else self.usual_todo
        super().__init__(explain(problem, expected=expected, got=got, where=where, todo=self.todo))
        self.problem = problem
        self.expected, self.got, self.where = _plain(expected), _plain(got), _plain(where)

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError.__str__ would return the repr of the message


def _plain(part: object) -> object:
    """Return a part of a message as a value that can be pickled and keeps no tensor or module alive."""
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


class CollectiveError(VescaleError, RuntimeError):
    """A collective has delivered other bits than ranks have sent (``fully_shard(check_collectives=N)``)."""


class CheckpointError(VescaleError, RuntimeError):
    """A checkpoint that cannot be written or read as requested."""


class NoCheckpointError(CheckpointError):
    """There is no checkpoint at a path: none was saved there yet, or the checkpoint was removed."""


class StorageError(CheckpointError):
    """A storage cannot be used: it is full, denies access, is locked by another job or cannot be opened.

    A `CheckpointManager` treats it like an OSError.
    """


class CorruptCheckpointError(CheckpointError):
    """The bytes of a checkpoint do not match its metadata.

    Attributes:
        others: the errors of further files, if several files are damaged or missing; see `DamagedFiles`.
    """

    usual_todo: ClassVar[str | None] = (
        "copy or download the checkpoint again from where it was made, or use an older one; if it is the only one, "
        "the page 'When something breaks' (docs/faults.md) shows how to load its undamaged tensors"
    )
    others: tuple[CorruptCheckpointError, ...] = ()

    def __str__(self) -> str:
        # The last part of the message is what to do.
        number = len(self.others)
        more = f"; verify lists {counted(number, 'more problem')}" if number else ""
        return super().__str__() + more


class DamagedFiles:
    """Collects the errors of several files, so that one error has them all.

    Examples:
        >>> damaged = DamagedFiles()
        >>> for file in ("a", "b"):
        ...     with damaged.noted():
        ...         raise CorruptCheckpointError("A file is missing.", where=file)
        >>> try:
        ...     damaged.raise_any()
        ... except CorruptCheckpointError as error:
        ...     error.where, [other.where for other in error.others]
        ('a', ['b'])
    """

    def __init__(self) -> None:
        self._errors: list[CorruptCheckpointError] = []

    def read(self, read: Callable[[str], T], files: Iterable[str]) -> list[T]:
        """Return what ``read`` returns for each file; without the files whose damage is noted."""
        contents = []
        for file in files:
            with self.noted():
                contents.append(read(file))
        return contents

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context manager that keeps a `CorruptCheckpointError` of the block and does not raise it."""
        try:
            yield
        except CorruptCheckpointError as error:
            self._errors += (error, *error.others)

    def raise_any(self) -> None:
        """Raise the first error, with the later ones as its ``others``; do nothing if there was no error."""
        if self._errors:
            self._errors[0].others = tuple(self._errors[1:])
            raise self._errors[0]


class PartialLoadError(CheckpointError):
    """A load that failed after it had begun to overwrite tensors, which now mix old and loaded values.

    A forward with such sharded parameters raises until a later load has filled them. Tensors other than sharded
    parameters are not checked.

    Args:
        problem: the cause of the failure, and its effect.
        overwritten: names of tensors that this rank has overwritten in part. If empty, other ranks may still have
            overwritten tensors.
    """

    def __init__(self, problem: str, *, overwritten: Iterable[str] = ()) -> None:
        super().__init__(problem)
        self.overwritten = tuple(overwritten)


class DamagedLoadError(PartialLoadError, CorruptCheckpointError):
    """A load that failed because of damage, after it had begun to overwrite tensors."""

    usual_todo = None  # its text ends with that of the damage


class TransferError(CheckpointError):
    """A transfer that failed. Raised on all ranks, from the error of this rank.

    Args:
        target: what this rank's target contains now: "old" (its weights before the transfer) or "unusable".
        version: the version of this rank's target; None if it is unusable or has no version.
        behind: ranks of the target that do not have the version that was sent. If the ranks' store was lost before a
            rank could read whether all ranks commit, only the rank itself.
        lost: ranks that were killed or do not answer; empty if all ranks answer, or if it is unknown which do not.
    """

    def __init__(
        self,
        problem: str,
        *,
        target: str = "old",
        version: int | None = None,
        behind: Iterable[int] = (),
        lost: Iterable[int] = (),
        **parts: Any,
    ) -> None:
        super().__init__(problem, **parts)
        self.target, self.version = target, version
        self.behind, self.lost = tuple(behind), tuple(lost)


class ConversionError(VescaleError, RuntimeError):
    """A conversion that cannot be done as requested.

    Attributes:
        problems: all problems with key rules, each with the parts of an error, if there are several.
    """

    problems: tuple[ConversionError, ...] = ()

    def with_parts(self, **parts: Any) -> ConversionError:
        """Return the error with some of its parts (``expected``, ``got``, ``where``, ``todo``) replaced."""
        named = {"expected": self.expected, "got": self.got, "where": self.where, "todo": self.todo}
        own: dict[str, Any] = {name: part for name, part in named.items() if part is not None}
        return type(self)(self.problem, **(own | parts))

    def __str__(self) -> str:
        lines = [super().__str__()]
        for number, each in enumerate(self.problems[:_MOST_PROBLEMS], 1):
            lines.append(textwrap.indent(f"{number}. {each}", "    "))
        if len(self.problems) > _MOST_PROBLEMS:
            lines.append(f"    and {len(self.problems) - _MOST_PROBLEMS} more")
        return "\n".join(lines)


class PaddingWarning(UserWarning):
    """The padding of a group exceeds the policy's limit.

    Examples:
        >>> import warnings
        >>> warnings.simplefilter("error", PaddingWarning)  # too much padding raises
        >>> warnings.resetwarnings()
    """


class GatherWarning(UserWarning):
    """An operator gathered a whole sharded tensor on every rank. Given once per operator.

    Examples:
        >>> import warnings
        >>> warnings.simplefilter("error", GatherWarning)  # an implicit gather raises
        >>> warnings.resetwarnings()
    """


class BoundNamesWarning(UserWarning):
    """A training stack was imported before `integrations.install` ran, so its modules still use torch's functions."""


class UntriedVersionWarning(UserWarning):
    """The installed version of a training stack is one that this package was not tested with."""


class UnshardedWarning(UserWarning):
    """A training stack was to shard a model by this package, and has sharded nothing."""


# Packages whose lines a user cannot change, by the first part of a module's name.
_INSIDE = ("vescale_fsdp", "torch", "contextlib")


def callers_level() -> int:
    """Return the ``stacklevel`` with which the calling function's warnings name the line of the user's code.

    This is the nearest line outside of this package, torch and `contextlib`. No result depends on it.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    return level


def explain(
    problem: str,
    *,
    expected: object = _UNSAID,
    got: object = _UNSAID,
    where: object = None,
    todo: str | None = None,
) -> str:
    """Return the text of a message: one sentence, then a line for each given part."""
    parts = {"expected": expected, "got": got, "where": where, "what to do": todo}
    always = ("expected", "got")  # shown even if None, which may be the value itself
    said = [
        f"  {name}: {part}"
        for name, part in parts.items()
        if part is not _UNSAID and (part is not None or name in always)
    ]
    return "\n".join([problem, *said])


_names_flags = False  # whether messages are read by a user of ``vescale-convert``
_FLAGS = {
    "config": "assets",
    "kind": "from",
    "max_shard_bytes": "max-shard-size",
    "memory_budget_bytes": "memory-budget",
}
_LISTS = (
    "copy",
    "dtype",
    "exclude",
    "include",
    "include_asset",
    "quantize",
)  # arguments that are lists in Python
# Python's calls with an argument that no other call has. Other arguments, such as ``dtype``, belong to several calls.
_OPEN, _CONVERT, _COMBINE = "open_source(.., {})", "ConvertOptions({})", "combine(.., {})"
_CALLS = {
    "compute_dtype": _COMBINE,
    "copy": _COMBINE,
    "exclude": _CONVERT,
    "include": _CONVERT,
    "include_asset": _CONVERT,
    "kind": _OPEN,
    "memory_budget_bytes": _CONVERT,
    "merge": _CONVERT,
    "no_assets": _CONVERT,
    "on_disagreement": _CONVERT,
    "optimizer": _CONVERT,
    "prefix": _CONVERT,
    "quantize": _CONVERT,
    "resume": _CONVERT,
    "step": _OPEN,
    "trust_pickle": _OPEN,
}


@contextmanager
def flags_in_messages() -> Iterator[None]:
    """Context manager of ``vescale-convert``: messages that are built inside name flags, see `option`."""
    global _names_flags
    before, _names_flags = _names_flags, True
    try:
        yield
    finally:
        _names_flags = before


def option(name: str, value: object = _UNSAID) -> str:
    """Return how a message names an option: as an argument in Python, or as a flag of ``vescale-convert``.

    Args:
        name: the argument of Python. "config" is the folder of a config.json, which conversions call ``assets``.
            "adapter" stands for the conversion to a peft folder.
        value: the value to pass; without it, only the option is named.

    Examples:
        >>> option("dtype", "bf16"), option("exclude"), option("max_shard_bytes", 10**9)
        ("dtype=['bf16']", 'ConvertOptions(exclude=)', 'max_shard_bytes=1000000000')
        >>> with flags_in_messages():
        ...     option("dtype", "bf16"), option("exclude"), option("max_shard_bytes", 10**9)
        ('--dtype bf16', '--exclude', '--max-shard-size 1GB')
    """
    if _names_flags:
        return _flag(name, value)
    if name == "adapter":
        return "convert(.., 'adapter')"
    if name == "config":
        return "assets= (of load: SourceOptions(config=))"
    if name in _LISTS and isinstance(value, str):
        value = [value]
    return _CALLS.get(name, "{}").format(f"{name}=" if value is _UNSAID else f"{name}={value!r}")


def _flag(name: str, value: object) -> str:
    """Return an option as a flag with its value, quoted for a shell."""
    if name == "adapter":
        return "to-hf --adapter"
    if name == "merge":
        return f"merge-adapter BASE {shlex.quote(str(value))} OUT"
    flag = f"--{_FLAGS.get(name, name.replace('_', '-'))}"
    if value is _UNSAID or value is True:
        return flag
    if value is None or value is False or value == []:
        return f"no {flag}"
    if isinstance(value, int):
        unit = next((unit for unit in _UNITS if name in _FLAGS and value % _UNITS[unit] == 0), "")
        value = f"{value // _UNITS.get(unit, 1)}{unit}"
    return " ".join(
        f"{flag} {shlex.quote(str(each))}" for each in (value if isinstance(value, list) else [value])
    )


_UNITS = {"GB": 10**9, "MB": 10**6, "MiB": 2**20}


def some(names: Iterable[str], most: int = 4) -> str:
    """Return a text with the first ``most`` names and the number of further names; "none" if there are no names.

    >>> some(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    listed = list(names)
    return (", ".join(listed[:most]) or "none") + (
        f" and {len(listed) - most} more" if len(listed) > most else ""
    )


def counted(number: int, noun: str) -> str:
    """Return a number and a noun, which gets an s unless the number is 1.

    >>> counted(1, "tensor"), counted(0, "tensor")
    ('1 tensor', '0 tensors')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def sides_of(texts: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Return each different text with the ranks that have it; the text of the lowest rank is the first.

    At most 5 texts are returned, each with at most 16 ranks: a job may have thousands of ranks.

    >>> sides_of({0: "a", 1: "b", 2: "a"})
    [('a', [0, 2]), ('b', [1])]
    """
    sides: dict[str, list[int]] = {}
    for rank in sorted(texts):
        sides.setdefault(texts[rank], []).append(rank)
    return [(text, ranks[:16]) for text, ranks in sides.items()][:5]


def as_pattern(name: str) -> str:
    """Return a name as an option's pattern that matches this name only; `option` quotes it.

    >>> as_pattern("layers[0].weight")
    'layers[[]0].weight'
    """
    return glob.escape(name)


def format_bytes(nbytes: int) -> str:
    """Return a number of bytes as a text in decimal units, with three significant digits (terabytes: four).

    >>> format_bytes(1_230_000)
    '1.23 MB'
    """
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"  # four digits: there is no larger unit
