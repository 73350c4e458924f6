"""What a target tensor is made of: source tensors, by name, under maps that move boxes and codecs that round.

    "layers.0.q.weight"                       a tensor of another name
    concatenate("q", "k", "v")                one after the other along a dim; `slice` takes one out again
    stack("expert0.w", "expert1.w")           along a new dim; `index` takes one out again
    permute("w")                              dims in another order
    codes("w", Fp8Blocks())                   what a codec makes of the whole tensor: `codes` and `scales`

Links nest. Each resolves into *leaves*: a box of one source tensor, and where it lies in the target, dim by dim.
The maps are those of `vescale_fsdp.views`; those that tear dims apart (reshape, interleave) or invent items (pad)
have no leaves of this kind and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

from vescale_fsdp.errors import PlacementError
from vescale_fsdp.layout.geometry import Box, contiguous_strides, numel_of, whole_box
from vescale_fsdp.views.index_maps import Concat, Index, IndexMap, InputPiece, Permute, Slice, Stack

Shape = tuple[int, ...]


class Grid(Protocol):
    """Blocks of a tensor, as `vescale_fsdp.quantize.BlockGrid` has them: rows of lines, one scale per block."""

    @property
    def line_numel(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def scales_shape(self) -> Shape: ...


class Codec(Protocol):
    """What a transfer asks of `vescale_fsdp.quantize.BlockCodec`; handed in, as this folder stands below it."""

    @property
    def code_dtype(self) -> Any: ...
    @property
    def scale_dtype(self) -> Any: ...
    def grid(self, shape: Shape) -> Grid: ...
    def scales_of(self, amax: Any) -> tuple[Any, Any]: ...
    def codes_of(self, values: Any, factors: Any) -> Any: ...


@dataclass(frozen=True)
class Named:
    """A source tensor, as it is."""

    name: str


@dataclass(frozen=True)
class Coded:
    """What a codec makes of a whole source tensor; ``part`` is ``"codes"`` or ``"scales"``."""

    name: str
    codec: Codec
    part: str


@dataclass(frozen=True)
class Mapped:
    """Links under a map that moves items."""

    map: IndexMap
    inputs: tuple[Link, ...]


Link = Named | Coded | Mapped
Linkable = str | Named | Coded | Mapped


def _link(item: Linkable) -> Link:
    return Named(item) if isinstance(item, str) else item


def concatenate(*inputs: Linkable, dim: int = 0) -> Link:
    """Tensors one after the other along a dim: q, k and v as one matrix.

    Examples:
        >>> links = {"qkv.weight": concatenate("q.weight", "k.weight", "v.weight")}
        >>> links |= {"w2": stack("experts.0.w2", permute("experts.1.w2_t")), "rest.weight": "head.weight"}
        >>> sorted(links)  # for plan_transfer(source, target, links=links)
        ['qkv.weight', 'rest.weight', 'w2']
    """
    return Mapped(Concat(dim), tuple(map(_link, inputs)))


def slice(of: Linkable, start: int, size: int, *, dim: int = 0) -> Link:
    """Indices [start, start + size) of a dim: q of a fused q, k and v.

    Examples:
        >>> links = {"q.weight": slice("qkv.weight", 0, 64)}
    """
    return Mapped(Slice(dim, start, size), (_link(of),))


def stack(*inputs: Linkable, dim: int = 0) -> Link:
    """Tensors of one shape along a new dim: experts as one tensor.

    Examples:
        >>> links = {"experts.w2": stack("experts.0.w2", "experts.1.w2")}
    """
    return Mapped(Stack(dim), tuple(map(_link, inputs)))


def index(of: Linkable, number: int, *, dim: int = 0) -> Link:
    """One index of a dim, which is gone: one expert.

    Examples:
        >>> links = {f"experts.{e}.w2": index("experts.w2", e) for e in range(2)}
    """
    return Mapped(Index(dim, number), (_link(of),))


def permute(of: Linkable, dims: Sequence[int] = (1, 0)) -> Link:
    """Dims in another order: dim i of the result is dim ``dims[i]`` of the input; by default a transpose.

    Examples:
        >>> links = {"w_t": permute("w"), "kernel": permute("conv.weight", (2, 3, 1, 0))}
    """
    return Mapped(Permute(tuple(dims)), (_link(of),))


def codes(name: str, codec: Codec) -> Link:
    """The codes of a whole tensor, made by its holders.

    Examples:
        >>> from vescale_fsdp.quantize import Fp8Blocks
        >>> links = {"w": codes("w", Fp8Blocks()), "w_scale_inv": scales("w", Fp8Blocks())}
    """
    return Coded(name, codec, "codes")


def scales(name: str, codec: Codec) -> Link:
    """The scales of a whole tensor's blocks.

    Examples:
        >>> from vescale_fsdp.quantize import Fp8Blocks
        >>> links = {"w_scale_inv": scales("w", Fp8Blocks())}
    """
    return Coded(name, codec, "scales")


class Leaf(NamedTuple):
    """Items of one source tensor in a target tensor.

    Attributes:
        source: the tensor, as it is or coded.
        box: what is taken of it.
        corner: where the box's first item lies in the target.
        dims: for each dim of the target, the dim of the source that runs along it; -1 where the leaf has one
            index. Source dims that are not named have one index in the box.
    """

    source: Named | Coded
    box: Box
    corner: Shape
    dims: Shape

    @property
    def target_box(self) -> Box:
        """What the leaf fills of the target."""
        return Box(self.corner, tuple(1 if dim < 0 else self.box.sizes[dim] for dim in self.dims))

    def to_source(self, wanted: Box) -> Box | None:
        """The box of the source that fills a box of the target, as far as this leaf does."""
        shared = wanted.intersect(self.target_box)
        if shared is None:
            return None
        offsets, sizes = list(self.box.offsets), [1] * len(self.box.sizes)
        for dim, offset, size, corner in zip(
            self.dims, shared.offsets, shared.sizes, self.corner, strict=True
        ):
            if dim >= 0:
                offsets[dim] += offset - corner
                sizes[dim] = size
        return Box(tuple(offsets), tuple(sizes))

    def to_target(self, held: Box) -> Box | None:
        """The box of the target that a box of the source fills."""
        shared = held.intersect(self.box)
        if shared is None:
            return None
        offsets, sizes = list(self.corner), [1] * len(self.dims)
        for place, dim in enumerate(self.dims):
            if dim >= 0:
                offsets[place] += shared.offsets[dim] - self.box.offsets[dim]
                sizes[place] = shared.sizes[dim]
        return Box(tuple(offsets), tuple(sizes))

    @property
    def is_identity(self) -> bool:
        """Whether items lie in the target where they lie in the source."""
        return self.corner == self.box.offsets and self.dims == tuple(range(len(self.box.sizes)))


ShapeOf = Callable[[Named | Coded], Shape]


def leaves_of(link: Link, shape_of: ShapeOf) -> tuple[Shape, list[Leaf]]:
    """The shape of what a link makes, and its leaves.

    Args:
        shape_of: of a source tensor, as it is or coded; raises for one that is not there.

    Raises:
        PlacementError: if inputs do not fit their map, or the map tears dims apart.
    """
    if not isinstance(link, Mapped):
        shape = shape_of(link)
        whole = whole_box(shape)
        return shape, [Leaf(link, whole, whole.offsets, tuple(range(len(shape))))] if whole.numel else []
    found = [leaves_of(item, shape_of) for item in link.inputs]
    shapes = [shape for shape, _ in found]
    misfit = link.map.misfit(shapes)
    if misfit is not None:
        number, expected = misfit
        raise PlacementError(link.map.problem, expected=expected, got=shapes[number], where=f"input {number}")
    shape = link.map.shape(shapes)
    if not numel_of(shape):
        return shape, []
    pieces = list(link.map.pieces(shapes, whole_box(shape)))
    if link.map.has_gaps or any(piece.shape is not None for piece in pieces):
        raise _torn(link.map)
    return shape, [leaf for piece in pieces for leaf in _under(piece, link.map, shape, found[piece.input][1])]


def _torn(map: IndexMap) -> PlacementError:
    return PlacementError(
        "A transfer cannot follow this map.",
        expected="maps that move whole dims: Concat, Slice, Stack, Index, Permute",
        got=map,
        todo="move the tensors as they are, and apply it afterwards",
    )


def _under(piece: InputPiece, map: IndexMap, shape: Shape, leaves: Sequence[Leaf]) -> Iterator[Leaf]:
    """The leaves of an input as leaves of the map's result."""
    corner, rest = [], piece.offset
    for stride in contiguous_strides(shape):
        corner.append(rest // stride)
        rest %= stride
    runs_along = [-1] * len(shape)  # dim of the input, for each dim of the result
    for dim, (size, stride) in enumerate(zip(piece.box.sizes, piece.strides, strict=True)):
        if size == 1:
            continue
        places = [
            place
            for place, own in enumerate(contiguous_strides(shape))
            if own == stride and shape[place] >= corner[place] + size and runs_along[place] < 0
        ]
        if not places:
            raise _torn(map)
        runs_along[places[0]] = dim  # there is but one: dims that share a stride have one index, all but one
    outer = Leaf(Named(""), piece.box, tuple(corner), tuple(runs_along))
    for leaf in leaves:
        filled = leaf.target_box.intersect(piece.box)
        if filled is None:
            continue
        source, target = leaf.to_source(filled), outer.to_target(filled)
        assert source is not None and target is not None
        dims = tuple(-1 if dim < 0 else leaf.dims[dim] for dim in runs_along)
        yield Leaf(leaf.source, source, target.offsets, dims)


_MAPS: dict[str, type[IndexMap]] = {kind.__name__: kind for kind in (Concat, Index, Permute, Slice, Stack)}


def _values(item: Any) -> dict[str, Any]:
    """The fields of a dataclass."""
    return {field.name: getattr(item, field.name) for field in fields(item)}


def link_to_json(link: Link) -> Any:
    """Plain values that `link_from_json` reads back without loss."""
    if isinstance(link, Named):
        return link.name
    if isinstance(link, Coded):
        codec = {"kind": type(link.codec).__name__, **_values(link.codec)}
        return {"name": link.name, "codec": codec, "part": link.part}
    return {"map": type(link.map).__name__, **_values(link.map), "inputs": [*map(link_to_json, link.inputs)]}


def link_from_json(data: Any, codecs: Mapping[str, Callable[..., Codec]]) -> Link:
    """Inverse of `link_to_json`.

    Args:
        codecs: classes of the codecs that links name, by class name.
    """
    if isinstance(data, str):
        return Named(data)
    if "codec" in data:
        values = dict(data["codec"])
        return Coded(data["name"], codecs[values.pop("kind")](**values), data["part"])
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    inputs, kind = values.pop("inputs"), _MAPS[values.pop("map")]
    return Mapped(kind(**values), tuple(link_from_json(item, codecs) for item in inputs))
