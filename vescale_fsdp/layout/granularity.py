"""Granularity: how much of a tensor must stay whole on one rank.

A granularity is a frozen value that answers one question: for a given shape, how many contiguous elements make a
*block*? The planner never puts a rank boundary inside a block. The last block of a tensor may be short, and a block is
never larger than the tensor: ``Rows(128)`` on a tensor of 100 rows keeps it whole.

    granularity        block of a (6, 4, 10) tensor     block of a (24, 10) tensor
    Element()          1                                1
    Flat(16)           16                               16
    Rows(3)            3 * 10   (rows of the last dim)  3 * 10
    Tiles(2, 5)        2 * 10   (full rows hold tiles)  2 * 10
    Whole()            240                              240
    Whole(per="matrix")  40     (one (4, 10) matrix)    240

A *row* is always a run of the last dim. In a stack of expert matrices (E, m, k), a row has k elements, so an expert
can be cut between rows, and a stack needs no more padding than its matrices.

The planner only calls `Granularity.block_numel`. A new granularity class also needs a text in `parse_granularity`. Two
other files distinguish the classes, because their state has one scale per block: `quantize/codec.py` (`grid_of` accepts
`Flat` and `Tiles`) and `optim/adamw8bit.py` (stores the block as text). `optim/shampoo_blocks.py` and `optim/muon.py`
select a class for each parameter.
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
from vescale_fsdp.lazy import set_module


@set_module("vescale_fsdp")
class Granularity(ABC):
    """The rule for which elements of a tensor must stay on one rank. Subclasses are frozen values, compared by content.

    Examples:
        >>> Rows(32).block_numel((100, 30)), Whole().block_numel((100, 30))
        (960, 3000)
    """

    __slots__ = ()

    @abstractmethod
    def raw_block_numel(self, shape: tuple[int, ...]) -> int:
        """Return the number of elements per block, which may exceed the size of the tensor."""

    def block_numel(self, shape: tuple[int, ...]) -> int:
        """Return the number of elements per block of a tensor of this shape.

        The number is at most the tensor's numel, but at least 1, so that callers can divide by it.
        """
        return max(1, min(self.raw_block_numel(shape), numel_of(shape)))


def _positive(owner: Granularity, **fields: int) -> None:
    for name, value in fields.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:  # True is an int in Python
            raise LayoutError(
                f"{type(owner).__name__}: {name} cannot be {value!r}.",
                expected=f"a whole number {name} >= 1",
                got=repr(value),
                where=f"{type(owner).__name__}({name}=...)",
                todo="pass the number of elements or rows that must stay together",
            )


@set_module("vescale_fsdp")
@dataclass(frozen=True, slots=True)
class Element(Granularity):
    """A rank boundary may be between any two elements. This is the default; it needs practically no padding.

    Examples:
        >>> Element().block_numel((100, 30))
        1
    """

    def raw_block_numel(self, shape: tuple[int, ...]) -> int:
        return 1


@set_module("vescale_fsdp")
@dataclass(frozen=True, slots=True)
class Flat(Granularity):
    """Runs of ``numel`` elements of the flattened tensor stay whole, for quantizers with flat blocks.

    Examples:
        >>> Flat(256).block_numel((100, 30))
        256
    """

    numel: int

    def __post_init__(self) -> None:
        _positive(self, numel=self.numel)

    def raw_block_numel(self, shape: tuple[int, ...]) -> int:
        return self.numel


@set_module("vescale_fsdp")
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


@set_module("vescale_fsdp")
@dataclass(frozen=True, slots=True)
class Tiles(Granularity):
    """Tiles of ``rows`` x ``cols`` elements stay whole.

    A tile is not contiguous in a row-major matrix, but ``rows`` full rows are contiguous, and they are the block. So
    ``cols`` does not change the layout of a matrix; quantizers use it.

    Examples:
        >>> Tiles(128, 128).block_numel((512, 1024))
        131072
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        _positive(self, rows=self.rows, cols=self.cols)

    def raw_block_numel(self, shape: tuple[int, ...]) -> int:
        # A vector is one row, so its tiles are runs of ``cols`` elements.
        return self.rows * shape[-1] if len(shape) >= 2 else min(self.cols, numel_of(shape))


@set_module("vescale_fsdp")
@dataclass(frozen=True, slots=True)
class Whole(Granularity):
    """The whole tensor stays on one rank. With ``per="matrix"``, each matrix (last two dims) of a stack does.

    Examples:
        >>> Whole().block_numel((8, 64, 32)), Whole(per="matrix").block_numel((8, 64, 32))
        (16384, 2048)
    """

    per: Literal["tensor", "matrix"] = "tensor"

    def __post_init__(self) -> None:
        if self.per not in ("tensor", "matrix"):
            raise LayoutError(
                "This value of per is not valid.",
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
"""A user's rule: one value, a mapping of fnmatch patterns, a function ``(fqn, param)``, or None.

A text such as ``"rows:32"`` may replace any value (see `parse_granularity`)."""


def resolve_granularity(rule: GranularityRule, fqn: str, param: Any) -> Granularity:
    """Return the granularity of one parameter under a user's rule, or `Element` if no rule applies.

    Args:
        rule: a granularity for all parameters; a mapping from name pattern (fnmatch) to granularity, in which the first
            match wins; or a function of the parameter's name and the parameter (anything with ``.shape``). A text may
            replace each granularity.
        fqn: the parameter's fully qualified name.
        param: the parameter, passed to a function rule.

    Raises:
        LayoutError: if the rule has another type, or returns anything but a Granularity or its text.
    """
    value: object = rule
    if rule is None:
        value = Element()
    elif isinstance(rule, Mapping):
        matches = (value for pattern, value in rule.items() if fnmatch.fnmatchcase(fqn, pattern))
        value = next(matches, Element())
    # A class such as `Rows` is also callable, but the user meant a value of the class: `_granularity` raises for it.
    elif callable(rule) and not isinstance(rule, (Granularity, type)):
        value = rule(fqn, param)
    return _granularity(value, f"parameter {fqn!r}")


def check_rule(rule: GranularityRule) -> None:
    """Check a user's rule before the parameters are known.

    Args:
        rule: as for `resolve_granularity`. A function is not checked, because it needs a parameter.

    Raises:
        LayoutError: if the rule contains anything but granularities and their texts.
    """
    if isinstance(rule, Mapping):
        for pattern, value in rule.items():
            _granularity(value, f"pattern {pattern!r}")
    # A class such as `Rows` is also callable, but the user meant a value of the class: `_granularity` raises for it.
    elif rule is not None and (not callable(rule) or isinstance(rule, (Granularity, type))):
        _granularity(rule, "granularity=")


def _granularity(value: object, where: str) -> Granularity:
    if isinstance(value, str):
        return parse_granularity(value)
    if isinstance(value, Granularity):
        return value
    todo = "pass a Granularity, a mapping of name patterns to them, or a function that returns one"
    if isinstance(value, type) and issubclass(value, Granularity):
        todo = f"pass a value of the class {value.__name__}: {_EXAMPLES.get(value, value.__name__ + '(..)')}"
    raise LayoutError(
        "The granularity rule did not return a granularity.",
        expected=f"Element(), Flat(n), Rows(n), Tiles(r, c) or Whole(), or a text: {_GRAMMAR}",
        got=repr(value),
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
    """Refuse a mapping with a pattern that matches no name: a typo would silently select Element.

    Args:
        rule: as for `resolve_granularity`; only mappings have patterns.
        fqns: names of all parameters that the rule applies to.

    Raises:
        LayoutError: if a pattern matches no name. The message has these patterns and the names closest to each.
    """
    if not isinstance(rule, Mapping):
        return
    unmatched = [p for p in rule if not any(fnmatch.fnmatchcase(fqn, p) for fqn in fqns)]
    if not unmatched:
        return
    # The cutoff is below difflib's default (0.6), because wildcards make a pattern unlike the intended name.
    near = {pattern: difflib.get_close_matches(pattern, fqns, n=3, cutoff=0.3) for pattern in unmatched}
    raise LayoutError(
        "A pattern of the granularity mapping matches no parameter.",
        expected="patterns (fnmatch) that each match a name relative to the wrapped module",
        got=", ".join(map(repr, unmatched)),
        where="; ".join(f"near {p!r}: {', '.join(n) or list(fqns[:5])}" for p, n in near.items()),
        todo="correct the pattern, or pass each fully_shard call the patterns of its own module",
    )


def parse_granularity(text: str) -> Granularity:
    """Return the granularity that a text names.

    The texts are ``element``, ``flat:256``, ``rows:32``, ``tiles:128x128``, ``whole`` and ``whole:matrix``.

    The command line and `fully_shard` accept these texts in place of values.

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
    except ValueError as error:  # from int(), and from the classes
        # LayoutError is a subclass of ValueError. It names the invalid size, so it is raised unchanged.
        if isinstance(error, LayoutError):
            raise
    raise LayoutError(
        "This text does not name a granularity.",
        expected=_GRAMMAR,
        got=repr(text),
        todo="write the kind, a colon, and its sizes",
    )


def parse_granularities(texts: Sequence[str]) -> dict[str, Granularity]:
    """Parse texts such as ``rows:32`` (for all tensors) and ``*.w1=tiles:128x128`` (for a name pattern).

    Returns:
        A mapping for `resolve_granularity`, in the order of the texts, except that the text for all tensors is last.

    >>> parse_granularities(["rows:32", "*.w1=whole"])
    {'*.w1': Whole(per='tensor'), '*': Rows(rows=32)}

    Raises:
        LayoutError: for a text without a granularity, or two different granularities for the same pattern.
    """
    # Cut at the last =, because a pattern may contain one and a granularity never does.
    rules = [text.rpartition("=") for text in texts]
    by_pattern: dict[str, Granularity] = {}
    # `resolve_granularity` takes the first match, so the text without a pattern, which matches all names, comes last.
    for pattern, _, rule in sorted(rules, key=lambda rule: not rule[0]):
        granularity = parse_granularity(rule)
        if (other := by_pattern.setdefault(pattern or "*", granularity)) != granularity:
            raise LayoutError(
                "Two granularities apply to the same tensors.",
                expected="at most one granularity for all tensors, and at most one for each name pattern",
                got=f"{other} and {granularity} for {pattern or '*'}",
                todo="remove one, or give it a pattern of its own",
            )
    return by_pattern
