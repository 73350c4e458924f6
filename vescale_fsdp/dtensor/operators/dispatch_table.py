"""Which rule carries out which operator on ragged tensors: the dispatch table, and the document made from it.

`rule_of` decides for one operator; `FAMILIES` says what each rule promises. The table in OPERATORS.md is
written by ``python tools/operators_table.py`` from the very functions that dispatch uses, so it cannot
promise what the code does not do (tests/dtensor/test_operator_table.py compares them).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from vescale_fsdp.dtensor.operators import elementwise, reductions, whole_tensors
from vescale_fsdp.dtensor.operators import random_values as random
from vescale_fsdp.dtensor.operators.arguments import first_ragged, refuse
from vescale_fsdp.dtensor.ragged_dtensor import Rule, set_rules
from vescale_fsdp.torch_private import operator_names

aten = torch.ops.aten


def _unsupported(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = first_ragged((*args, *kwargs.values()))
    raise refuse(func, like._spec if like is not None else None, "it has no rule")


def _decomposed(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch takes apart before it comes here, unless autograd is out of the way, as in inference mode."""
    return func.decompose(*args, **kwargs)


def _on_local(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Questions about storage, answered by the piece."""
    tensor, *rest = args
    return func(tensor._local_tensor, *rest, **kwargs)


FAMILIES: dict[Rule, tuple[str, str]] = {
    elementwise.elementwise: (
        "elementwise",
        "Runs on the pieces, beside scalars, 0-d tensors, ragged tensors cut alike, replicated DTensors.",
    ),
    elementwise.foreach: (
        "lists and fused optimizer steps",
        "As elementwise, on every tensor of a list; lists may mix ragged and plain tensors.",
    ),
    elementwise.like_factory: ("copies and tensors like it", "The result is cut like the input."),
    elementwise.new_factory: (
        "new tensors of a given shape",
        "Ragged for the tensor's own shape, replicated for others (new_empty: then zeros).",
    ),
    elementwise.flat_view: (
        "views",
        (
            "One run of the tensor's elements: another shape, `x[2]`, `x[2:5]`, `x.chunk(3)`; writes reach it. Not "
            "`x.t()`, `x[:, 2]`, nor any but its own shape where another mesh axis cuts it too."
        ),
    ),
    elementwise.masked_put: ("indexing", "`x[mask] = number`, with a mask of x's shape and cut."),
    elementwise.non_finite_check: ("gradient scaler", "The verdict is agreed over the mesh."),
    reductions.reduction: (
        "reductions",
        (
            "Over all dims, or over dims that every piece holds whole (ragged then). Over others: sum, mean, norm "
            "by one all-reduce, the rest gathered."
        ),
    ),
    reductions.foreach_norm: ("norms of lists", "One replicated DTensor per tensor, all by one collective."),
    reductions.along_dims: (
        "along one dim",
        "Ragged if every piece holds that dim whole; else gathered, and replicated.",
    ),
    reductions.equal: ("equality", "One answer, agreed over the mesh."),
    reductions.all_close: ("closeness", "One answer, agreed over the mesh."),
    whole_tensors.gathered: (
        "whole tensors",
        (
            "All others that give new tensors and draw no random numbers, such as `mm` and `cat`: gathered "
            "first, replicated afterwards. Refused beside plain tensors."
        ),
    ),
    whole_tensors.written_back: (
        "whole tensors in place",
        "All others that write to their first argument alone, such as `triu_`: gathered, then each keeps its piece.",
    ),
    _decomposed: (
        "made of others",
        "In inference mode, such as `chunk` and `linear`: as the operators they are made of.",
    ),
    whole_tensors.eye: ("the unit matrix", "Into a ragged tensor of its shape."),
    whole_tensors.rewritten: ("said in others", "As the operators they are made of; nothing is gathered."),
    random.random_fill: (
        "random values in place",
        "The same for any number of ranks and any cut, under vescale_fsdp.manual_seed.",
    ),
    random.random_like: ("random tensors like it", "As random values in place."),
    _on_local: ("questions about storage", "Answered for this rank's piece."),
}

# Elementwise, though torch's tags do not say so.
_ELEMENTWISE = (
    "alias",
    "complex",
    "copy_",
    "detach",
    "detach_",
    "elu_backward",
    "fill_",
    "floor_divide",
    "floor_divide_",
    "hardsigmoid_backward",
    "hardswish",
    "hardswish_",
    "hardswish_backward",
    "hardtanh_backward",
    "huber_loss_backward",
    "leaky_relu_backward",
    "lift_fresh",
    "log_sigmoid_backward",
    "mish_backward",
    "polar",
    "softplus_backward",
    "softshrink_backward",
    "zero_",
)
_BY_NAME: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise.elementwise),
    **dict.fromkeys(
        ("_pin_memory", "_to_copy", "clone", "empty_like", "full_like", "ones_like", "zeros_like"),
        elementwise.like_factory,
    ),
    **dict.fromkeys(
        ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"), elementwise.new_factory
    ),
    "_unsafe_view": elementwise.flat_view,
    "index_put_": elementwise.masked_put,
    **dict.fromkeys(("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"), elementwise.foreach),
    "_amp_foreach_non_finite_check_and_unscale_": elementwise.non_finite_check,
    # max and min may also mean an elementwise operator: see `_BY_OVERLOAD`
    **dict.fromkeys(reductions.TOTALS.keys() - {"max", "min"}, reductions.reduction),
    "_foreach_norm": reductions.foreach_norm,
    **dict.fromkeys(
        ("_log_softmax", "_softmax", "cumprod", "cumsum", "logcumsumexp", "sort", "topk"),
        reductions.along_dims,
    ),
    **dict.fromkeys(whole_tensors.REWRITTEN, whole_tensors.rewritten),
    "equal": reductions.equal,
    "allclose": reductions.all_close,
    **dict.fromkeys(("bernoulli_", "normal_", "uniform_"), random.random_fill),
    **dict.fromkeys(("rand_like", "randn_like"), random.random_like),
    **dict.fromkeys(("is_pinned", "record_stream"), _on_local),
}
# Names that mean an elementwise operator with two tensors, and a reduction with one.
_BY_OVERLOAD: dict[torch._ops.OpOverload, Rule] = dict.fromkeys(
    (aten.max.default, aten.max.dim, aten.min.default, aten.min.dim), reductions.reduction
) | dict.fromkeys((aten.eye.out, aten.eye.m_out), whole_tensors.eye)
_REFUSED_OVERLOADS = (aten.bernoulli_.Tensor,)
# Families of what is not named above; the document does not list their hundreds of operators.
_OPEN = (elementwise.flat_view, whole_tensors.gathered, whole_tensors.written_back, _decomposed)
_FOREACH_OF_WHOLES = ("_foreach_mm", "_foreach_powsum")


def _is_out(func: torch._ops.OpOverload) -> bool:
    return any(argument.is_out for argument in func._schema.arguments)


@cache
def _is_elementwise(func: torch._ops.OpOverload) -> bool:
    """Whether torch's tags call it pointwise; in-place forms count if their functional form does."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if torch.Tag.pointwise in func.tags:
        return True
    name = func._schema.name.removeprefix("aten::")
    if not name.endswith("_") or name.endswith("__"):
        return False
    packet = getattr(aten, name.removesuffix("_"), None)
    overload = getattr(packet, func._overloadname, None) if packet is not None else None
    return overload is not None and torch.Tag.pointwise in overload.tags


@cache
def rule_of(func: torch._ops.OpOverload) -> Rule:
    """The function that carries out an operator on ragged tensors; one that raises if there is none."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "aten" or func in _REFUSED_OVERLOADS:
        return _unsupported
    if func in _BY_OVERLOAD:
        return _BY_OVERLOAD[func]
    if name in _BY_NAME:
        rule = _BY_NAME[name]
        elementwise_out = rule is elementwise.elementwise or not _is_out(func)
        return rule if elementwise_out else _unsupported
    if name.startswith("_foreach_") and name not in _FOREACH_OF_WHOLES and not _is_out(func):
        return elementwise.foreach
    return elementwise.elementwise if _is_elementwise(func) else _open_rule(func)


def _open_rule(func: torch._ops.OpOverload) -> Rule:
    """The rule of an operator that is not named, from what its schema says."""
    arguments = func._schema.arguments
    if func.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd):
        return _decomposed
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _unsupported  # it would draw from each rank's own generator
    if func.is_view:
        single = sum("Tensor" in str(argument.type) for argument in arguments) == 1
        return elementwise.flat_view if single else _unsupported
    written = [argument for argument in arguments if argument.alias_info is not None]
    if not written:
        # Schemas of batch norms do not say that they write to these.
        secret = any(argument.name in ("running_mean", "running_var") for argument in arguments)
        return _unsupported if secret else whole_tensors.gathered
    own = written == arguments[:1] and not _is_out(func) and torch.Tag.inplace_view not in func.tags
    return whole_tensors.written_back if own else _unsupported


set_rules(rule_of)


def is_supported(func: torch._ops.OpOverload) -> bool:
    """Whether an operator, such as ``torch.ops.aten.add.Tensor``, can run on ragged tensors at all.

    Some then still depend on the arguments, such as a sum along a dim that must be whole on every rank.

    Examples:
        >>> is_supported(torch.ops.aten.add.Tensor)
        True
    """
    return rule_of(func) is not _unsupported


def operator_table() -> str:
    """OPERATORS.md: every family, what it promises, and the operators of this torch that it covers."""
    names: dict[Rule, set[str]] = {}
    for full_name in operator_names():
        namespace, _, rest = full_name.partition("::")
        name, _, overload = rest.partition(".")
        if namespace != "aten":
            continue
        func = getattr(getattr(aten, name), overload or "default")
        names.setdefault(rule_of(func), set()).add(name)
    lines = [
        "# Operators on ragged tensors",
        "",
        "Written by `python tools/operators_table.py` from the dispatch table; a test compares the two.",
        f"Operators are those of torch {torch.__version__.split('+')[0]}. What none of the families holds raises",
        "`UnsupportedOpError`, a `NotImplementedError` that names operator, placement and the way out.",
        "",
        "| family | what holds | operators |",
        "|---|---|---|",
    ]
    for rule, (family, promise) in FAMILIES.items():
        listed = "" if rule in _OPEN else ", ".join(f"`{name}`" for name in sorted(names.get(rule, ())))
        lines.append(f"| {family} | {promise} | {listed} |")
    return "\n".join(lines) + "\n"
