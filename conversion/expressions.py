"""Parse expressions of checkpoints, such as ``base + 0.7 * (tuned - base)``, by Python's grammar; nothing is evaluated.

An expression is linear: at least one factor of each product is a number, divisors are numbers, and a number is not
added to a checkpoint, because that would add it to every weight.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence

from vescale_fsdp.conversion.engine.combined_view import NEGATE, OPERATORS, Step
from vescale_fsdp.errors import ConversionError, some

_SYMBOLS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
Program = tuple[Step, ...]


def parse_expression(text: str, names: Sequence[str]) -> Program:
    """Return the program that computes an expression from inputs with these names; see `CombinedView`.

    Args:
        text: names, numbers, ``+ - * /`` and parentheses.

    Raises:
        ConversionError: if the expression is not valid, has other names, or lacks one of the names.
    """
    text = text.strip()
    try:
        program = _program(ast.parse(text, mode="eval").body, text, names)
    # A NUL is a ValueError in some versions of Python; the others are thousands of parentheses.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _invalid(text, "an expression in the syntax of Python", str(error)) from error
    if isinstance(program, float):
        raise _invalid(text, f"one with the names {some(names, 8)}", "no name")
    if unused := [name for number, name in enumerate(names) if number not in _inputs(program)]:
        raise _invalid(text, f"one with the names {some(names, 8)}", f"none with {some(unused)}")
    return program


def _inputs(program: Program) -> set[int]:
    """Return the numbers of the inputs that a program uses. Not by ``in``, since 0 equals the number 0.0."""
    return {step for step in program if isinstance(step, int)}


def _program(node: ast.expr, text: str, names: Sequence[str]) -> float | Program:
    """Return the program of a part of an expression, or its value if it has only numbers."""
    got = ast.get_source_segment(text, node) or text
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            try:
                return _finite(float(number), text, got)
            except OverflowError:  # an integer above the range of float64
                return _finite(math.inf, text, got)
        case ast.Name(id=name):
            if name not in names:
                raise _invalid(text, f"only the names {some(names, 8)}", name)
            return (names.index(name),)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
            operand = _program(node.operand, text, names)
            if isinstance(node.op, ast.UAdd):
                return operand
            return -operand if isinstance(operand, float) else (*operand, NEGATE)
        case ast.BinOp() if type(node.op) in _SYMBOLS:
            symbol = _SYMBOLS[type(node.op)]
            left, right = _program(node.left, text, names), _program(node.right, text, names)
            if symbol == "/" and (not isinstance(right, float) or not right):
                raise _invalid(text, "divisors that are numbers other than 0", got)
            if isinstance(left, float) and isinstance(right, float):
                return _finite(OPERATORS[symbol](left, right), text, got)
            if symbol == "*" and not isinstance(left, float) and not isinstance(right, float):
                raise _invalid(text, "products with a number", got)
            if symbol in "+-" and (isinstance(left, float) or isinstance(right, float)):
                raise _invalid(text, "sums of checkpoints without a number", got)
            both = ((side,) if isinstance(side, float) else side for side in (left, right))
            return (*next(both), *next(both), symbol)
    raise _invalid(text, "numbers, names, + - * / and parentheses", got)


def _finite(number: float, text: str, got: str) -> float:
    """Return a number; raises if it is not a finite float32."""
    if not abs(number) <= _FLOAT32_MAX:
        raise _invalid(text, "finite numbers of float32", got)
    return number


def _invalid(text: str, expected: str, got: str) -> ConversionError:
    """Return the error for an expression that is not valid."""
    return ConversionError(
        "This is not a valid expression of checkpoints.",
        expected=expected,
        got=got,
        where=f"expression {text!r}",
        todo="write a sum of checkpoints times numbers, and pass a checkpoint for each of its names, as in: "
        "vescale-convert combine OUT 'base + 0.7 * (tuned - base)' base=PATH tuned=PATH",
    )
