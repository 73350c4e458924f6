"""The closed set of operations of key rules, each with its inverse.

A rule is written from Hugging Face's layout ("hf") to another ("ours"). An operation gets a *bundle*: one
node per name pattern of the rule, where a node is a tensor, or a list of them where a pattern counts
(experts). Running the operations forward makes ours from hf, running the inverses backward makes hf from
ours.

    {concat = {dim, sizes}}  several nodes -> one          {stack = {over, dim, count}}  a counted list -> one
    {transpose = [dims]}   {reshape = {hf, ours}}   {interleave = {dim, parts}}   {rope = {heads}}
    {pad = {dim, from, to}}   {cast = {to, back}}
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vescale_fsdp.conversion.box_maps import (
    ConcatView,
    IndexView,
    InterleaveView,
    PadView,
    PermuteView,
    ReshapeView,
    SliceView,
    StackView,
)
from vescale_fsdp.conversion.casting import CastView
from vescale_fsdp.conversion.dtypes import dtype_from_torch
from vescale_fsdp.conversion.view import TensorView
from vescale_fsdp.errors import ConversionError, explain

__all__ = ["Bundle", "Node", "Operation", "Stack", "parse_operation"]

Node = Any  # a TensorView, or a list of nodes
Bundle = list[Node]
Sizes = Callable[[str | int], int]  # evaluates a size expression


class Operation(ABC):
    """One step of a rule."""

    @abstractmethod
    def forward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        """From hf's side towards ours."""

    @abstractmethod
    def backward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        """From our side towards hf's."""


def _each(node: Node, change: Callable[[TensorView], TensorView]) -> Node:
    return [_each(item, change) for item in node] if isinstance(node, list) else change(node)


class _EachTensor(Operation):
    """An operation on every tensor by itself."""

    @abstractmethod
    def make(self, view: TensorView, sizes: Sizes, *, back: bool) -> TensorView:
        """The changed tensor."""

    def forward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        return [_each(node, lambda view: self.make(view, sizes, back=False)) for node in bundle]

    def backward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        return [_each(node, lambda view: self.make(view, sizes, back=True)) for node in bundle]


@dataclass(frozen=True)
class _Transpose(_EachTensor):
    dims: tuple[int, ...]

    def make(self, view: TensorView, sizes: Sizes, *, back: bool) -> TensorView:
        dims = tuple(self.dims.index(dim) for dim in range(len(self.dims))) if back else self.dims
        return PermuteView(view, dims)


@dataclass(frozen=True)
class _Reshape(_EachTensor):
    hf: tuple[str | int, ...]
    ours: tuple[str | int, ...]

    def make(self, view: TensorView, sizes: Sizes, *, back: bool) -> TensorView:
        return ReshapeView(view, tuple(sizes(size) for size in (self.hf if back else self.ours)))


@dataclass(frozen=True)
class _Interleave(_EachTensor):
    dim: int
    groups: str | int
    parts: int

    def make(self, view: TensorView, sizes: Sizes, *, back: bool) -> TensorView:
        return InterleaveView(view, self.dim, sizes(self.groups), self.parts, back)


@dataclass(frozen=True)
class _Pad(_EachTensor):
    dim: int
    small: str | int
    large: str | int

    def make(self, view: TensorView, sizes: Sizes, *, back: bool) -> TensorView:
        if back:
            return SliceView(view, self.dim, 0, sizes(self.small))
        return PadView(view, self.dim, sizes(self.large))


@dataclass(frozen=True)
class _Cast(_EachTensor):
    to: str
    back_to: str

    def make(self, view: TensorView, sizes: Sizes, *, back: bool) -> TensorView:
        dtype = dtype_from_torch(self.back_to if back else self.to)
        return view if view.info.dtype == dtype else CastView(view, dtype)


@dataclass(frozen=True)
class _Concat(Operation):
    dim: int
    sizes: tuple[str | int, ...]

    def forward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        return [self._join(bundle)]

    def _join(self, nodes: Sequence[Node]) -> Node:
        if isinstance(nodes[0], list):
            return [self._join(column) for column in zip(*nodes, strict=True)]
        return ConcatView(tuple(nodes), self.dim)

    def backward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        lengths = [sizes(size) for size in self.sizes]
        (node,) = bundle
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        return [
            _each(node, lambda view, start=start, n=n: self._cut(view, start, n, sum(lengths)))  # type: ignore[misc]
            for start, n in zip(starts, lengths, strict=True)
        ]

    def _cut(self, view: TensorView, start: int, size: int, total: int) -> TensorView:
        shape = view.info.shape
        if self.dim >= len(shape) or shape[self.dim] != total:
            raise ConversionError(
                explain(
                    "a joined tensor does not have the size that the rule says",
                    expected=f"{total} in dim {self.dim}",
                    got=f"shape {shape}",
                    where=view.info.name,
                    todo="pass the config.json of this model, or correct the rule's sizes",
                )
            )
        return SliceView(view, self.dim, start, size)


@dataclass(frozen=True)
class Stack(Operation):
    """A pattern's counted tensors as one tensor with a dim more."""

    over: str
    dim: int
    count: str | int

    def forward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        count = sizes(self.count)
        for node in bundle:
            if len(node) != count:
                raise ConversionError(
                    explain(
                        "a list of tensors is not complete",
                        expected=f"{count} tensors ({self.count})",
                        got=f"{len(node)}, from {node[0].info.name}",
                        todo="check that the source holds all of them, or pass its own config.json",
                    )
                )
        return [StackView(tuple(node), self.dim) for node in bundle]

    def backward(self, bundle: Bundle, sizes: Sizes) -> Bundle:
        count = sizes(self.count)
        for view in bundle:
            shape = view.info.shape
            if self.dim >= len(shape) or shape[self.dim] != count:
                raise ConversionError(
                    explain(
                        "a stacked tensor does not have the size that the rule says",
                        expected=f"{count} in dim {self.dim} ({self.count})",
                        got=f"shape {shape}",
                        where=view.info.name,
                        todo="pass the config.json of this model, or correct the rule",
                    )
                )
        return [[IndexView(view, self.dim, index) for index in range(count)] for view in bundle]


_PARSERS: Mapping[str, Callable[[Any], Operation]] = {
    "concat": lambda v: _Concat(int(v["dim"]), tuple(v["sizes"])),
    "stack": lambda v: Stack(str(v["over"]), int(v["dim"]), v["count"]),
    "transpose": lambda v: _Transpose(tuple(int(dim) for dim in v)),
    "reshape": lambda v: _Reshape(tuple(v["hf"]), tuple(v["ours"])),
    "interleave": lambda v: _Interleave(int(v["dim"]), v.get("groups", 1), int(v.get("parts", 2))),
    "rope": lambda v: _Interleave(0, v["heads"], 2),
    "pad": lambda v: _Pad(int(v["dim"]), v["from"], v["to"]),
    "cast": lambda v: _Cast(str(v["to"]), str(v["back"])),
}


def parse_operation(data: Mapping[str, Any], *, where: str) -> Operation:
    """From one table of a rule's ``ops``.

    Raises:
        ConversionError: for an operation outside the set, or one without its fields.
    """
    try:
        ((kind, value),) = data.items()
        return _PARSERS[kind](value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConversionError(
            explain(
                "a rule has an operation that does not exist or is incomplete",
                expected=f"one of {', '.join(_PARSERS)}, with its fields",
                got=f"{data} ({type(error).__name__}: {error})",
                where=where,
                todo="see the rule files that come with this package",
            )
        ) from error
