"""Granularity: the rule that says how much of a tensor must stay whole on one rank.

A granularity is a frozen value with one question to answer: given a shape, how many contiguous elements
make a *block*? The planner never puts a rank boundary inside a block. The last block of a tensor may be
short, and a block is never larger than the tensor: ``Rows(128)`` on a tensor of 100 rows keeps it whole.

    granularity        block of a (6, 4, 10) tensor     block of a (24, 10) tensor
    Element()          1                                1
    Flat(16)           16                               16
    Rows(3)            3 * 10   (rows of the last dim)  3 * 10
    Tiles(2, 5)        2 * 10   (full rows hold tiles)  2 * 10
    Whole()            240                              240
    Whole(per="matrix")  40     (one (4, 10) matrix)    240

A *row* is always a run of the last dim: in a stack of expert matrices (E, m, k) rows are those of the
inner matrices, so an expert can be cut between rows and a stack pads no more than its matrices would.
"""

from __future__ import annotations

import difflib
import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import numel_of


class Granularity(ABC):
    """What must stay whole. Subclasses are frozen values; equality is by content.

    Examples:
        >>> Rows(32).block_numel((100, 30)), Whole().block_numel((100, 30))
        (960, 3000)
    """

    __slots__ = ()

    @abstractmethod
    def raw_block_numel(self, shape: tuple[int, ...]) -> int:
        """Elements per block before the limit of the tensor's own size."""

    def block_numel(self, shape: tuple[int, ...]) -> int:
        """Elements per block of a tensor of this shape: at least 1, at most its numel (1 if empty)."""
        return max(1, min(self.raw_block_numel(shape), numel_of(shape)))


def _positive(owner: Granularity, **fields: int) -> None:
    for name, value in fields.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise LayoutError(
                f"{type(owner).__name__}: {name} cannot be {value!r}.",
                expected=f"a whole number {name} >= 1",
                got=repr(value),
                where=f"{type(owner).__name__}({name}=...)",
                todo="give the number of elements or rows that must stay together",
            )


@dataclass(frozen=True, slots=True)
class Element(Granularity):
    """Any cut between two elements is allowed. The default: padding is then practically nil.

    Examples:
        >>> Element().block_numel((100, 30))
        1
    """

    def raw_block_numel(self, shape: tuple[int, ...]) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Flat(Granularity):
    """Runs of ``numel`` flat elements stay whole (flat quantisation blocks).

    Examples:
        >>> Flat(256).block_numel((100, 30))
        256
    """

    numel: int

    def __post_init__(self) -> None:
        _positive(self, numel=self.numel)

    def raw_block_numel(self, shape: tuple[int, ...]) -> int:
        return self.numel


@dataclass(frozen=True, slots=True)
class Rows(Granularity):
    """Groups of ``rows`` rows of the last dim stay whole. Tensors below 2-D are cut by element.

    Examples:
        >>> Rows(32).block_numel((100, 30)), Rows(32).block_numel((100,))
        (960, 1)
    """

    rows: int

    def __post_init__(self) -> None:
        _positive(self, rows=self.rows)

    def raw_block_numel(self, shape: tuple[int, ...]) -> int:
        return self.rows * shape[-1] if len(shape) >= 2 else 1


@dataclass(frozen=True, slots=True)
class Tiles(Granularity):
    """Tiles of ``rows`` x ``cols`` elements stay whole.

    A tile is not contiguous in a row-major matrix, ``rows`` full rows are: those are the block. Columns
    therefore do not change the layout; they are kept because a quantiser needs them.

    Examples:
        >>> Tiles(128, 128).block_numel((512, 1024))
        131072
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        _positive(self, rows=self.rows, cols=self.cols)

    def raw_block_numel(self, shape: tuple[int, ...]) -> int:
        return self.rows * shape[-1] if len(shape) >= 2 else min(self.cols, numel_of(shape))


@dataclass(frozen=True, slots=True)
class Whole(Granularity):
    """The tensor stays whole on one rank; with ``per="matrix"`` each matrix (last two dims) of a stack.

    Examples:
        >>> Whole().block_numel((8, 64, 32)), Whole(per="matrix").block_numel((8, 64, 32))
        (16384, 2048)
    """

    per: Literal["tensor", "matrix"] = "tensor"

    def __post_init__(self) -> None:
        if self.per not in ("tensor", "matrix"):
            raise LayoutError(
                "Whole does not know this unit.",
                expected="per='tensor' or per='matrix'",
                got=repr(self.per),
                where="Whole(per=...)",
                todo="use per='matrix' to keep each expert of a stacked (E, m, k) tensor whole",
            )

    def raw_block_numel(self, shape: tuple[int, ...]) -> int:
        if self.per == "matrix" and len(shape) >= 2:
            return shape[-2] * shape[-1]
        return numel_of(shape)


GranularityRule = (
    Granularity
    | str
    | Mapping[str, Granularity | str]
    | Callable[[str, Any], Granularity]
    | Callable[[str, Any], str]
    | None
)
"""What users may pass: one value, a mapping of fnmatch patterns, a function ``(fqn, param)``, or None.

A text such as ``"rows:32"`` stands for a value wherever one is expected (`parse_granularity` reads it)."""


def resolve_granularity(rule: GranularityRule, fqn: str, param: Any) -> Granularity:
    """The granularity of one parameter under a user's rule; Element where the rule says nothing.

    Args:
        rule: a value for all; a mapping from name pattern (fnmatch) to value, first match wins; or a
            function of the parameter's name and the parameter (anything with ``.shape``). Values may be texts.
        fqn: the parameter's fully qualified name.
        param: the parameter, handed on to a function rule.

    Raises:
        LayoutError: if the rule is none of these or gives something that is not a Granularity.
    """
    found: object = rule
    if rule is None:
        found = Element()
    elif isinstance(rule, Mapping):
        matches = (value for pattern, value in rule.items() if fnmatch.fnmatchcase(fqn, pattern))
        found = next(matches, Element())
    elif callable(rule) and not isinstance(rule, (Granularity, type)):
        found = rule(fqn, param)
    return _granularity(found, f"parameter {fqn!r}")


def check_rule(rule: GranularityRule) -> None:
    """Refuse a rule that gives something else than granularities, before there is any parameter.

    Args:
        rule: as for `resolve_granularity`; what a function gives is not known yet.

    Raises:
        LayoutError: naming the value.
    """
    if isinstance(rule, Mapping):
        for pattern, value in rule.items():
            _granularity(value, f"pattern {pattern!r}")
    elif rule is not None and (not callable(rule) or isinstance(rule, (Granularity, type))):
        _granularity(rule, "granularity=")


def _granularity(found: object, where: str) -> Granularity:
    if isinstance(found, str):
        return parse_granularity(found)
    if isinstance(found, Granularity):
        return found
    todo = "pass a Granularity, a mapping of name patterns to them, or a function that returns one"
    if isinstance(found, type) and issubclass(found, Granularity):
        todo = f"pass a value of the class {found.__name__}: {_EXAMPLES.get(found, found.__name__ + '(..)')}"
    raise LayoutError(
        "The granularity rule did not give a granularity.",
        expected=f"Element(), Flat(n), Rows(n), Tiles(r, c) or Whole(), or a text: {_GRAMMAR}",
        got=repr(found),
        where=where,
        todo=todo,
    )


_GRAMMAR = "element, flat:256, rows:32, tiles:128x128, whole or whole:matrix"
_EXAMPLES: dict[type[Granularity], str] = {
    Element: "Element()",
    Flat: "Flat(256)",
    Rows: "Rows(32)",
    Tiles: "Tiles(128, 128)",
    Whole: 'Whole() or Whole(per="matrix")',
}


def check_patterns(rule: GranularityRule, fqns: Sequence[str]) -> None:
    """Refuse a mapping with a pattern that matches no name: a typing error would silently cut by element.

    Args:
        rule: as for `resolve_granularity`; only mappings have patterns.
        fqns: names of all parameters the rule is meant for.

    Raises:
        LayoutError: naming each such pattern and the names nearest to it.
    """
    if not isinstance(rule, Mapping):
        return
    unmatched = [p for p in rule if not any(fnmatch.fnmatchcase(fqn, p) for fqn in fqns)]
    if not unmatched:
        return
    near = {pattern: difflib.get_close_matches(pattern, fqns, n=3, cutoff=0.3) for pattern in unmatched}
    raise LayoutError(
        "A pattern of the granularity mapping matches no parameter.",
        expected="patterns (fnmatch) that each match a name relative to the wrapped module",
        got=", ".join(map(repr, unmatched)),
        where="; ".join(f"near {p!r}: {', '.join(n) or list(fqns[:5])}" for p, n in near.items()),
        todo="correct the pattern, or give each fully_shard call the patterns of its own module",
    )


def parse_granularity(text: str) -> Granularity:
    """Read ``element``, ``flat:256``, ``rows:32``, ``tiles:128x128``, ``whole`` or ``whole:matrix``.

    The command line reads these texts, and `fully_shard` takes them in place of values.

    >>> parse_granularity("rows:32")
    Rows(rows=32)

    Raises:
        LayoutError: for any other text.
    """
    kind, _, argument = text.strip().lower().partition(":")
    try:
        if kind == "element" and not argument:
            return Element()
        if kind == "flat":
            return Flat(int(argument))
        if kind == "rows":
            return Rows(int(argument))
        if kind == "tiles":
            rows, _, cols = argument.partition("x")
            return Tiles(int(rows), int(cols))
        if kind == "whole" and argument in ("", "tensor", "matrix"):
            return Whole("matrix" if argument == "matrix" else "tensor")
    except ValueError as error:
        if isinstance(error, LayoutError):
            raise
    raise LayoutError(
        "This text does not name a granularity.",
        expected=_GRAMMAR,
        got=repr(text),
        todo="write the kind, a colon, and its sizes",
    )


def parse_granularities(texts: Sequence[str]) -> dict[str, Granularity]:
    """Read texts such as ``rows:32`` (for all) and ``*.w1=tiles:128x128`` (for a name pattern) as a mapping for
    `resolve_granularity`: patterns in the order given, what is for all last.

    >>> parse_granularities(["rows:32", "*.w1=whole"])
    {'*.w1': Whole(per='tensor'), '*': Rows(rows=32)}

    Raises:
        LayoutError: for a text without a granularity, or two that differ for the same pattern.
    """
    rules = [text.rpartition("=") for text in texts]
    found: dict[str, Granularity] = {}
    for pattern, _, rule in sorted(rules, key=lambda rule: not rule[0]):  # what is for all comes last
        granularity = parse_granularity(rule)
        if (other := found.setdefault(pattern or "*", granularity)) != granularity:
            raise LayoutError(
                "Two granularities are given for the same tensors.",
                expected="one for all, and one for each pattern of names",
                got=f"{other} and {granularity} for {pattern or '*'}",
                todo="leave one out, or give it a pattern of its own",
            )
    return found
