"""All operations that key rules can use, each with its inverse.

A rule is written from Hugging Face's layout ("hf") to another ("ours"). An operation takes a *bundle*: one node per
name pattern of the rule. A node is a tensor, or a list of tensors if the pattern has a counted capture (experts). The
operations in order make ours from hf; their inverses in reverse order make hf from ours.

    {concat = {dim, sizes, groups}}  several nodes -> one      {stack = {over, dim, count}}  a list of tensors -> one
    {split = {dim, sizes, groups}}   one node -> several       {unstack = {over, dim, count}}  one -> a list of tensors
    {transpose = [dims]}   {reshape = {hf, ours}}   {interleave = {dim, groups, parts}}   {rope = {heads}}
    {pad = {dim, from, to}}   {trim = {dim, to}}   {cast = {to, back}}

``split`` and ``unstack`` are the inverses of ``concat`` and ``stack``, for tensors that are joined in hf and separate
in ours. One rule may contain both a ``split`` and a ``concat``, if ours joins the same tensors in another order.

``trim`` removes padding whose size is not recorded anywhere: from ours to hf, items beyond ``to`` are removed; from hf
to ours, tensors are unchanged. With ``groups``, ``concat`` joins within each of that many groups: [q q k v] [q q k v]
... instead of [q q q q] [k k] [v v]. ``heads`` may be a list with one number per pattern of the rule; 0 leaves a tensor
unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vescale_fsdp.conversion.engine.casting import CastView
from vescale_fsdp.conversion.engine.tensor_view import MappedView, TensorView
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.layout.index_maps import Concat, Index, Interleave, Pad, Permute, Reshape, Slice, Stack

Node = Any  # a TensorView, or a list of nodes
Bundle = list[Node]
Sizes = Callable[[str | int], int]  # evaluates a size expression


class Operation(ABC):
    """One entry of a rule's ``ops``."""

    @abstractmethod
    def forward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        """Convert a bundle from hf's layout to ours."""

    @abstractmethod
    def backward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        """Convert a bundle from our layout to hf's."""


def _each(node: Node, change: Callable[[TensorView], TensorView]) -> Node:
    """Apply ``change`` to every tensor of a node."""
    return [_each(item, change) for item in node] if isinstance(node, list) else change(node)


def _check_size(view: TensorView, dim: int, size: int, text: str) -> None:
    """Refuse a tensor whose size in ``dim`` is not ``size``; ``text`` is the rule's expression for ``size``."""
    shape = view.info.shape
    if dim >= len(shape) or shape[dim] != size:
        raise ConversionError(
            "A tensor does not have the size in the rule.",
            expected=f"{size} in dim {dim} ({text})",
            got=f"shape {shape}",
            where=view.info.name,
            todo="pass the config.json of this model, or correct the rule's sizes",
        )


class _EachTensor(Operation):
    """An operation that changes each tensor independently."""

    @abstractmethod
    def make(self, view: TensorView, sizes: Sizes, pattern: int, *, back: bool) -> TensorView:
        """Return the changed tensor.

        Args:
            pattern: the index of the tensor's name pattern in the rule.
            back: True from ours to hf, False from hf to ours.
        """

    def _run(self, bundle: Bundle, sizes: Sizes, *, back: bool) -> Bundle:
        return [
            _each(node, lambda view, pattern=pattern: self.make(view, sizes, pattern, back=back))  # type: ignore[misc]
            for pattern, node in enumerate(bundle)
        ]

    def forward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        return self._run(bundle, sizes, back=False)

    def backward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        return self._run(bundle, sizes, back=True)


@dataclass(frozen=True)
class _Transpose(_EachTensor):
    """Permutes the dims: dim i of ours is dim ``dims[i]`` of hf."""

    dims: tuple[int, ...]

    def make(self, view: TensorView, sizes: Sizes, pattern: int, *, back: bool) -> TensorView:
        # Back: the inverse permutation.
        dims = tuple(self.dims.index(dim) for dim in range(len(self.dims))) if back else self.dims
        return MappedView(Permute(dims), (view,))


@dataclass(frozen=True)
class _Reshape(_EachTensor):
    """Changes the shape; items keep their row-major order."""

    hf: tuple[str | int, ...]
    ours: tuple[str | int, ...]

    def make(self, view: TensorView, sizes: Sizes, pattern: int, *, back: bool) -> TensorView:
        return MappedView(Reshape(tuple(sizes(size) for size in (self.hf if back else self.ours))), (view,))


@dataclass(frozen=True)
class _Interleave(_EachTensor):
    """Interleaves the parts of each group, such as the halves of each head: a a a b b b becomes a b a b a b."""

    dim: int
    groups: tuple[str | int, ...]  # one number for all patterns, or one for each
    parts: int

    def make(self, view: TensorView, sizes: Sizes, pattern: int, *, back: bool) -> TensorView:
        if pattern >= len(self.groups) > 1:
            raise ConversionError(
                "A rule gives the number of heads or groups for only some of its names.",
                expected="one number for all names, or one for each",
                got=f"{list(self.groups)}",
                where=view.info.name,
                todo="write one number for each name of the rule; 0 leaves its tensor unchanged",
            )
        groups = sizes(self.groups[pattern if len(self.groups) > 1 else 0])
        # 0 groups: the rule leaves this tensor unchanged, such as v in a rule for q, k and v.
        return MappedView(Interleave(self.dim, groups, self.parts, back), (view,)) if groups else view


@dataclass(frozen=True)
class _Pad(_EachTensor):
    """Pads a dim with zeros, from size ``small`` in hf to size ``large`` in ours."""

    dim: int
    small: str | int
    large: str | int

    def make(self, view: TensorView, sizes: Sizes, pattern: int, *, back: bool) -> TensorView:
        small, large = sizes(self.small), sizes(self.large)
        _check_size(view, self.dim, large if back else small, str(self.large if back else self.small))
        return MappedView(Slice(self.dim, 0, small) if back else Pad(self.dim, large), (view,))


@dataclass(frozen=True)
class Trim(_EachTensor):
    """Removes padding from our tensors. No other operation loses items, so `apply_rules` adds a warning."""

    dim: int
    to: str | int

    def make(self, view: TensorView, sizes: Sizes, pattern: int, *, back: bool) -> TensorView:
        size = sizes(self.to)
        if view.info.shape[self.dim : self.dim + 1] == (size,):  # a slice, since the dim may not exist
            return view
        if not back:  # hf has no padding: another size is an error
            _check_size(view, self.dim, size, str(self.to))
        return MappedView(Slice(self.dim, 0, size), (view,))


@dataclass(frozen=True)
class Cast(_EachTensor):
    """Changes the dtype. No other operation changes values."""

    to: str
    back_to: str

    def make(self, view: TensorView, sizes: Sizes, pattern: int, *, back: bool) -> TensorView:
        dtype = dtype_from_torch(self.back_to if back else self.to)
        return view if view.info.dtype == dtype else CastView(view, dtype)


@dataclass(frozen=True)
class _Concat(Operation):
    """Concatenates the tensors of all patterns along a dim; with ``groups``, separately within each group."""

    dim: int
    sizes: tuple[str | int, ...]
    groups: str | int = 1

    def forward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        if len(bundle) != len(self.sizes):
            raise ConversionError(
                "A rule that joins tensors has a different number of sizes than names.",
                expected=f"{len(self.sizes)} sizes for {len(self.sizes)} names",
                got=f"{len(bundle)} names",
                todo="write one size for each name of the rule",
            )
        return [self._join(bundle, [sizes(size) for size in self.sizes], sizes(self.groups))]

    @property
    def _times(self) -> str:
        """The factor ``groups`` of an expression that an error shows; empty without groups."""
        return "" if self.groups == 1 else f"{self.groups} * "

    def _join(self, nodes: Sequence[Node], lengths: list[int], groups: int) -> Node:
        """Join one tensor of each pattern; for lists of tensors, join the tensors of each index."""
        if isinstance(nodes[0], list):
            return [self._join(column, lengths, groups) for column in zip(*nodes, strict=True)]
        # Checked, since `backward` cuts the result by these sizes.
        for view, length, text in zip(nodes, lengths, self.sizes, strict=True):
            _check_size(view, self.dim, groups * length, f"{self._times}{text}")
        if groups == 1:
            return MappedView(Concat(self.dim), tuple(nodes))
        grouped = tuple(self._in_groups(view, groups) for view in nodes)
        return self._flat(MappedView(Concat(self.dim + 1), grouped))

    def _in_groups(self, view: TensorView, groups: int) -> TensorView:
        """Split the dim into two dims: the group, and the index in the group."""
        shape = view.info.shape
        size = shape[self.dim] // groups
        return MappedView(Reshape((*shape[: self.dim], groups, size, *shape[self.dim + 1 :])), (view,))

    def _flat(self, view: TensorView) -> TensorView:
        """Join the two dims again that `_in_groups` made."""
        shape = view.info.shape
        joined = shape[self.dim] * shape[self.dim + 1]
        return MappedView(Reshape((*shape[: self.dim], joined, *shape[self.dim + 2 :])), (view,))

    def backward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        lengths, groups = [sizes(size) for size in self.sizes], sizes(self.groups)
        if len(bundle) != 1:
            raise ConversionError(
                "A rule splits a tensor, but has several.",
                expected="one tensor to split",
                got=f"{len(bundle)} tensors",
                todo="write one rule for each tensor that is split",
            )
        (node,) = bundle
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        total = sum(lengths) * groups
        text = " + ".join(map(str, self.sizes))
        text = f"{self._times}({text})" if self._times else text

        def cut(view: TensorView, start: int, size: int) -> TensorView:
            _check_size(view, self.dim, total, text)
            if groups == 1:
                return MappedView(Slice(self.dim, start, size), (view,))
            return self._flat(MappedView(Slice(self.dim + 1, start, size), (self._in_groups(view, groups),)))

        return [
            _each(node, lambda view, start=start, n=n: cut(view, start, n))  # type: ignore[misc]
            for start, n in zip(starts, lengths, strict=True)
        ]


@dataclass(frozen=True)
class StackCounted(Operation):
    """Stacks the tensors that a pattern counts (experts) along a new dim.

    Args:
        over: the capture that counts the tensors.
        dim: the position of the new dim.
        count: the size expression for the number of tensors.
    """

    over: str
    dim: int
    count: str | int

    def forward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        count = sizes(self.count)
        for node in bundle:
            self._require(node, is_list=True)
            if len(node) != count:
                raise ConversionError(
                    "A list of tensors is incomplete.",
                    expected=f"{count} tensors ({self.count})",
                    got=f"{len(node)}, from {node[0].info.name} to {node[-1].info.name}",
                    todo="check that the source contains all of them, or pass its own config.json",
                )
        return [MappedView(Stack(self.dim), tuple(node)) for node in bundle]

    def backward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        count = sizes(self.count)
        for view in bundle:
            self._require(view, is_list=False)
            _check_size(view, self.dim, count, str(self.count))
        return [[MappedView(Index(self.dim, index), (view,)) for index in range(count)] for view in bundle]

    def _require(self, node: Node, *, is_list: bool) -> None:
        if isinstance(node, list) != is_list:
            raise ConversionError(
                "A rule stacks or unstacks tensors twice, or in the wrong order.",
                expected="a list of tensors for stack, one tensor for unstack",
                got="one tensor" if is_list else "a list of tensors",
                where=f"the operation over {self.over}",
                todo="correct the order of the rule's ops",
            )


@dataclass(frozen=True)
class _Inverse(Operation):
    """The inverse of an operation: ``split`` of a ``concat``."""

    operation: Operation

    def forward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        return self.operation.backward(bundle, sizes)

    def backward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        return self.operation.forward(bundle, sizes)


@dataclass(frozen=True)
class UnstackCounted(_Inverse):
    """``unstack``: the inverse of a `StackCounted`, whose tensors only patterns of ours count."""

    operation: StackCounted


def _list(value: Any) -> tuple[str | int, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def _concat(value: Mapping[str, Any]) -> _Concat:
    return _Concat(int(value["dim"]), tuple(value["sizes"]), value.get("groups", 1))


def _stack(value: Mapping[str, Any]) -> StackCounted:
    return StackCounted(str(value["over"]), int(value["dim"]), value["count"])


_PARSERS: Mapping[str, Callable[[Any], Operation]] = {
    "concat": _concat,
    "split": lambda v: _Inverse(_concat(v)),
    "stack": _stack,
    "unstack": lambda v: UnstackCounted(_stack(v)),
    "transpose": lambda v: _Transpose(tuple(int(dim) for dim in v)),
    "reshape": lambda v: _Reshape(tuple(v["hf"]), tuple(v["ours"])),
    "interleave": lambda v: _Interleave(int(v["dim"]), _list(v.get("groups", 1)), int(v.get("parts", 2))),
    # 2: the halves of each head, which become adjacent pairs.
    "rope": lambda v: _Interleave(0, _list(v["heads"]), 2),
    "pad": lambda v: _Pad(int(v["dim"]), v["from"], v["to"]),
    "trim": lambda v: Trim(int(v["dim"]), v["to"]),
    "cast": lambda v: Cast(str(v["to"]), str(v["back"])),
}


def parse_operation(data: Mapping[str, Any], *, where: str) -> Operation:
    """Parse one table of a rule's ``ops``.

    Raises:
        ConversionError: for an unknown operation, or an operation that lacks one of its fields.
    """
    try:
        ((kind, value),) = data.items()  # a table with exactly one key, the operation's name
        return _PARSERS[kind](value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConversionError(
            "A rule has an operation that does not exist or is incomplete.",
            expected=f"one of {', '.join(_PARSERS)}, with its fields",
            got=f"{data} ({type(error).__name__}: {error})",
            where=where,
            todo="see the rule files that come with this package",
        ) from error
