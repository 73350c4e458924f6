"""Which function carries out an operator on ragged tensors: the tensor class asks, the table of rules answers.

The class stands below the rules, which make tensors of it, so neither imports the other's answer: both know this
file. Importing anything of `vescale_fsdp.dtensor` brings the rules in (see its ``__init__``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Rule = Callable[[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]], Any]

_rule_of: Callable[[torch._ops.OpOverload], Rule]  # bound by `set_rules`


def set_rules(rule_of: Callable[[torch._ops.OpOverload], Rule]) -> None:
    """Say what carries out operators on ragged tensors from now on."""
    global _rule_of
    _rule_of = rule_of


def carry_out(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator, some of whose arguments are ragged, by its rule."""
    return _rule_of(func)(func, args, kwargs)
