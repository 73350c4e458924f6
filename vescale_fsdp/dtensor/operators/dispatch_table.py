"""The dispatch table: the rule of each operator on ragged tensors.

`rule_of` returns the rule of an operator; `FAMILIES` describes each rule. ``python tools/operators_table.py`` writes
OPERATORS.md by calling `rule_of`. tests/vescale_fsdp/dtensor/test_operator_table.py compares the file with the table,
so the document cannot differ from the code.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from vescale_fsdp.dtensor.operators import elementwise, reductions, whole_tensors
from vescale_fsdp.dtensor.operators import random_values as random
from vescale_fsdp.dtensor.operators.arguments import first_ragged, has_out, refuse
from vescale_fsdp.dtensor.ragged_dtensor import Args, Kwargs, Op, Rule, set_rules
from vescale_fsdp.torch_private import piece_in

aten = torch.ops.aten


def _unsupported(func: Op, args: Args, kwargs: Kwargs) -> Any:
    raise refuse(func, first_ragged((*args, *kwargs.values())), "it has no rule")


def _decomposed(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run a composite operator as other operators. torch does so before dispatch, except in inference mode."""
    return func.decompose(*args, **kwargs)


def _on_local(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run a query about storage on this rank's piece, which has the storage."""
    return func(piece_in(args[0]), *args[1:], **kwargs)


class Family(NamedTuple):
    """A rule's row in OPERATORS.md, and the names of operators that have this rule whatever their tags and schemas."""

    title: str
    support: str
    names: str = ""  # names of operators, separated by spaces


FAMILIES: dict[Rule, Family] = {
    elementwise.elementwise: Family(
        "elementwise",
        "Runs on the pieces, with scalars, 0-d tensors, ragged tensors cut alike, replicated DTensors. A tensor that "
        "is cut differently, or broadcasts from rows that its rank does not have, is sent: one message, counted, and "
        "logged once per pair of placements. The larger tensor never moves.",
        # These are elementwise, but torch does not tag them as pointwise.
        "alias complex copy_ detach detach_ elu_backward fill_ floor_divide floor_divide_ hardsigmoid_backward "
        "hardswish hardswish_ hardswish_backward hardtanh_backward huber_loss_backward leaky_relu_backward lift_fresh "
        "log_sigmoid_backward mish_backward polar softplus_backward softshrink_backward zero_",
    ),
    elementwise.foreach: Family(
        "lists and fused optimizer steps",
        "As elementwise, on every tensor of a list; lists may mix ragged and plain tensors.",
        "_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_",
    ),
    elementwise.like_factory: Family(
        "copies and `*_like`",
        "The result is cut like the input.",
        "_pin_memory _to_copy clone empty_like full_like ones_like zeros_like",
    ),
    elementwise.new_factory: Family(
        "new tensors of a given shape",
        "Ragged if the shape is the tensor's own, else replicated; `new_empty` then returns zeros.",
        "new_empty new_empty_strided new_full new_ones new_zeros",
    ),
    elementwise.flat_view: Family(
        "views",
        "Views of consecutive elements: the whole tensor in another shape or dtype (`view_as_real`), `x[2]`, `x[2:5]`, "
        "`x.chunk(3)`. A write to the view writes the tensor. All others, such as `x.t()` and `x[:, 2]`, are views of "
        "a gathered copy: reads give a `GatherWarning` once per operator, writes raise.",
        "_unsafe_view",
    ),
    elementwise.masked_put: Family(
        "indexing", "`x[mask] = number`, with a mask of x's shape and cut.", "index_put_"
    ),
    elementwise.non_finite_check: Family(
        "gradient scaler",
        "All ranks of the mesh agree on the result.",
        "_amp_foreach_non_finite_check_and_unscale_",
    ),
    reductions.reduction: Family(
        "reductions",
        "Over all dims; over dims that every piece contains whole (the result is ragged); over other dims by "
        "all-reduces of the result's size. Only reductions that return indices gather then.",
        # max and min have elementwise overloads, too, so `_BY_OVERLOAD` lists the overloads that reduce.
        " ".join(sorted(reductions.NAMES - {"max", "min"})),
    ),
    reductions.foreach_norm: Family(
        "norms of lists", "One replicated DTensor per tensor, all by one collective.", "_foreach_norm"
    ),
    reductions.along_dims: Family(
        "along one dim",
        "Ragged if every piece contains that dim whole; else gathered, and replicated.",
        "_log_softmax _softmax cumprod cumsum logcumsumexp sort topk",
    ),
    reductions.equal: Family("equality", "One result, the same on all ranks of the mesh.", "equal"),
    reductions.all_close: Family("closeness", "One result, the same on all ranks of the mesh.", "allclose"),
    whole_tensors.gathered: Family(
        "whole tensors",
        "All other operators that return new tensors and draw no random numbers, such as `mm` and `cat`: the tensors "
        "are gathered, with a `GatherWarning` once per operator, and the result is replicated. Raises in combination "
        "with plain tensors.",
        # torch's own decompositions would index with plain tensors.
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d",
    ),
    whole_tensors.written_back: Family(
        "whole tensors in place",
        "All other operators that write to their first argument only, such as `triu_`, or to `out=`: the tensors are "
        "gathered, with a `GatherWarning` once per operator, then each rank keeps its piece.",
    ),
    _decomposed: Family(
        "composite",
        "Operators such as `chunk` and `linear` in inference mode: decomposed into other operators.",
    ),
    whole_tensors.eye: Family(
        "identity matrix", "`torch.eye(out=tensor)`, for a tensor of the matrix's shape."
    ),
    whole_tensors.rewritten: Family(
        "rewritten", "Computed by other operators; nothing is gathered.", " ".join(whole_tensors.REWRITTEN)
    ),
    random.random_fill: Family(
        "random values in place",
        "The same for any number of ranks and any cut, under vescale_fsdp.manual_seed.",
        "bernoulli_ normal_ uniform_",
    ),
    random.drawn_whole: Family(
        "other random values",
        "Such as dropout and `exponential_`: every rank draws the values of the whole tensor, the same for any number "
        "of ranks, and keeps its piece. Tensors that are read are gathered.",
    ),
    random.random_like: Family("random `*_like`", "As random values in place.", "rand_like randn_like"),
    _on_local: Family("queries about storage", "Runs on this rank's piece.", "is_pinned record_stream"),
}
_BY_NAME = {name: rule for rule, family in FAMILIES.items() for name in family.names.split()}
# Overloads whose rule differs from other overloads of the name: max and min are elementwise with two tensors, and
# reductions with one; eye has a rule only for `out=`.
_BY_OVERLOAD: dict[Op, Rule] = dict.fromkeys(
    (aten.max.default, aten.max.dim, aten.min.default, aten.min.dim), reductions.reduction
) | dict.fromkeys((aten.eye.out, aten.eye.m_out), whole_tensors.eye)
# This overload has one probability per element, but `random_fill` takes a single one.
_BY_OVERLOAD[aten.bernoulli_.Tensor] = random.drawn_whole
# Rules of operators whose `out=` forms are computed from gathered tensors.
_WITH_OUT = (
    reductions.reduction,
    reductions.along_dims,
    elementwise.like_factory,
    elementwise.flat_view,
    whole_tensors.rewritten,
)
WITHOUT_LIST = (  # rules of too many operators for a list in OPERATORS.md
    elementwise.flat_view,
    whole_tensors.gathered,
    whole_tensors.written_back,
    random.drawn_whole,
    _decomposed,
)
_FOREACH_OF_WHOLES = ("_foreach_mm", "_foreach_powsum")  # products and sums need whole tensors


def _is_pointwise(func: Op, name: str) -> bool:
    """Return whether torch tags an operator as pointwise, or the functional form of an in-place operator."""
    if torch.Tag.pointwise in func.tags:
        return True
    if not name.endswith("_") or name.endswith("__"):  # `__and__` is not an in-place form
        return False
    packet = getattr(aten, name.removesuffix("_"), None)
    functional = getattr(packet, func._overloadname, None)
    return functional is not None and torch.Tag.pointwise in functional.tags


@cache
def rule_of(func: Op) -> Rule:
    """Return the function that runs an operator on ragged tensors; if no rule applies, a function that raises."""
    namespace, _, name = func._schema.name.partition("::")
    # An operator of another library raises, because its meaning is unknown.
    if namespace != "aten":
        return _unsupported
    if func in _BY_OVERLOAD:
        return _BY_OVERLOAD[func]
    if name in _BY_NAME:
        rule = _BY_NAME[name]
        # Only the elementwise rule supports `out=`; all other rules would ignore it.
        if rule is elementwise.elementwise or not has_out(func):
            return rule
        takes_lists = name.startswith("_foreach_")
        return whole_tensors.written_back if rule in _WITH_OUT and not takes_lists else _unsupported
    if name.startswith("_foreach_") and name not in _FOREACH_OF_WHOLES and not has_out(func):
        return elementwise.foreach
    # No family names this operator: its rule follows from torch's tags and from its schema.
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    if _is_pointwise(func, name) and not is_random:
        return elementwise.elementwise
    arguments = func._schema.arguments
    if func.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd):
        return _decomposed
    if is_random:
        return random.drawn_whole
    if func.is_view:
        # `flat_view` takes one tensor.
        single = sum("Tensor" in str(argument.type) for argument in arguments) == 1
        return elementwise.flat_view if single else _unsupported
    written = [argument for argument in arguments if argument.alias_info is not None]
    if not written:
        # Batch norms write to these two arguments, but the schemas of some do not declare it.
        writes_statistics = any(argument.name in whole_tensors.STATISTICS for argument in arguments)
        return whole_tensors.written_back if writes_statistics else whole_tensors.gathered
    # Operators with the tag inplace_view, such as `squeeze_`, change the shape in place; a ragged tensor cannot.
    if torch.Tag.inplace_view in func.tags:
        return _unsupported
    writes_statistics = all(argument.name in whole_tensors.STATISTICS for argument in written)
    writes_some = written == arguments[:1] or has_out(func) or writes_statistics
    return whole_tensors.written_back if writes_some else _unsupported


set_rules(rule_of)


def is_supported(func: Op) -> bool:
    """Return whether an operator, such as ``torch.ops.aten.add.Tensor``, has a rule for ragged tensors.

    A rule may still raise for some arguments.

    Examples:
        >>> is_supported(torch.ops.aten.add.Tensor)
        True
    """
    return rule_of(func) is not _unsupported
