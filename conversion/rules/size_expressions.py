"""Sizes in key rules: small arithmetic over the numbers of a config.json.

    "heads * head_dim"      names are [let] entries or keys of the config
    "a ?? b / c"            the first alternative whose names are all there

Numbers, names, + - * / and brackets; nothing else is an expression. A division must come out even.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from vescale_fsdp.errors import ConversionError

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
}


class _MissingName(Exception):
    """A name that is neither a let nor in the config."""


def evaluate(text: str | int, lets: Mapping[str, str], config: Mapping[str, Any]) -> int:
    """The whole number an expression stands for.

    Raises:
        ConversionError: if it is no expression, a name is missing, or the result is no whole number >= 0.
    """
    try:
        found = _first(str(text), lets, config, depth=0)
    except (SyntaxError, ZeroDivisionError, _MissingName) as error:
        raise _bad(text, f"{type(error).__name__.lstrip('_')}: {error}") from error
    if found.denominator != 1 or found < 0:
        raise _bad(text, str(found))
    return int(found)


def _bad(text: str | int, got: str) -> ConversionError:
    return ConversionError(
        "A size in the key rules cannot be computed.",
        expected="numbers, + - * /, and names that are in [let] or in config.json",
        got=f"{text!r}: {got}",
        todo="pass --assets with the model's config.json, or correct the rule",
    )


def _first(text: str, lets: Mapping[str, str], config: Mapping[str, Any], *, depth: int) -> Fraction:
    if depth > 20:
        raise _MissingName(f"{text} is defined by itself")
    alternatives = text.split("??")
    for number, alternative in enumerate(alternatives):
        try:
            return _value(ast.parse(alternative.strip(), mode="eval").body, lets, config, depth)
        except _MissingName:
            if number == len(alternatives) - 1:
                raise
    raise AssertionError("split never gives an empty list")


def _value(node: ast.expr, lets: Mapping[str, str], config: Mapping[str, Any], depth: int) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if isinstance(node, ast.Name):
        if node.id in lets:
            return _first(str(lets[node.id]), lets, config, depth=depth + 1)
        found = config.get(node.id)
        if not isinstance(found, int) or isinstance(found, bool):
            raise _MissingName(f"{node.id} is {found!r}")
        return Fraction(found)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = (_value(side, lets, config, depth) for side in (node.left, node.right))
        return _OPERATORS[type(node.op)](left, right)
    raise SyntaxError(f"{ast.unparse(node)} is not allowed")
