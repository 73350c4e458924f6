"""Links: what a target tensor is made of, and which items of which source tensors that means.

    "layers.0.q.weight"                       a tensor of another name
    concatenate("q", "k", "v")                one after the other along a dim; `slice` is the inverse
    stack("expert0.w", "expert1.w")           along a new dim; `index` is the inverse
    permute("w")                              dims in another order
    codes("w", Fp8Blocks())                   codes and `scales` that a codec computes from the whole tensor

Links nest. Each resolves into *leaves*: a box of one source tensor, and where its items belong in the target, dim by
dim. The maps are those of `vescale_fsdp.views`. Maps that split or merge dims (reshape, interleave) or add items (pad)
have no such leaves and are refused.

`resolve_links` compares two descriptions under their links and lists everything that does not match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name, stored_dtype
from vescale_fsdp.errors import PlacementError
from vescale_fsdp.layout.geometry import Box, FlatRange, contiguous_strides, numel_of, whole_box
from vescale_fsdp.transfer.coding import Codec, Grid, hull_of, scale_regions
from vescale_fsdp.transfer.description import StateDescription
from vescale_fsdp.views.index_maps import Concat, Index, IndexMap, InputPiece, Permute, Slice, Stack

Shape = tuple[int, ...]

_NAMES_OF_BYTES = {"float8_e4m3fn": ("uint8",), "int8": ("uint8",), "uint8": ("float8_e8m0fnu",)}
_MAX_SHOWN = 20  # problems that an error lists


@dataclass(frozen=True)
class Named:
    """A source tensor, as it is."""

    name: str


@dataclass(frozen=True)
class Coded:
    """The codes or scales of a whole source tensor; ``part`` is ``"codes"`` or ``"scales"``."""

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


def as_link(item: Linkable) -> Link:
    """A link; a name alone is the source tensor of that name."""
    return Named(item) if isinstance(item, str) else item


def concatenate(*inputs: Linkable, dim: int = 0) -> Link:
    """Tensors one after the other along a dim: q, k and v as one matrix.

    Examples:
        >>> links = {"qkv.weight": concatenate("q.weight", "k.weight", "v.weight")}
        >>> links |= {"w2": stack("experts.0.w2", permute("experts.1.w2_t")), "rest.weight": "head.weight"}
        >>> sorted(links)  # for plan_transfer(source, target, links=links)
        ['qkv.weight', 'rest.weight', 'w2']
    """
    return Mapped(Concat(dim), tuple(map(as_link, inputs)))


def slice(of: Linkable, start: int, size: int, *, dim: int = 0) -> Link:
    """Indices [start, start + size) of a dim: q of a fused q, k and v.

    Examples:
        >>> links = {"q.weight": slice("qkv.weight", 0, 64)}
    """
    return Mapped(Slice(dim, start, size), (as_link(of),))


def stack(*inputs: Linkable, dim: int = 0) -> Link:
    """Tensors of one shape along a new dim: experts as one tensor.

    Examples:
        >>> links = {"experts.w2": stack("experts.0.w2", "experts.1.w2")}
    """
    return Mapped(Stack(dim), tuple(map(as_link, inputs)))


def index(of: Linkable, number: int, *, dim: int = 0) -> Link:
    """One index of a dim, and the dim is dropped: one expert.

    Examples:
        >>> links = {f"experts.{e}.w2": index("experts.w2", e) for e in range(2)}
    """
    return Mapped(Index(dim, number), (as_link(of),))


def permute(of: Linkable, dims: Sequence[int] = (1, 0)) -> Link:
    """Dims in another order: dim i of the result is dim ``dims[i]`` of the input; by default a transpose.

    Examples:
        >>> links = {"w_t": permute("w"), "kernel": permute("conv.weight", (2, 3, 1, 0))}
    """
    return Mapped(Permute(tuple(dims)), (as_link(of),))


def codes(name: str, codec: Codec) -> Link:
    """The codes of a whole tensor. The ranks that store it compute them.

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
        box: the items that are read.
        corner: index of the box's first item in the target.
        dims: for each dim of the target, the dim of the source that runs along it; -1 where the leaf has one
            index. In source dims that are not listed the box has one index.
    """

    source: Named | Coded
    box: Box
    corner: Shape
    dims: Shape

    @property
    def target_box(self) -> Box:
        """The items of the target that the leaf fills."""
        return Box(self.corner, tuple(1 if dim < 0 else self.box.sizes[dim] for dim in self.dims))

    def to_source(self, wanted: Box) -> Box | None:
        """The box of the source that fills a box of the target; None if the leaf fills nothing of it."""
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

    def to_target(self, stored: Box) -> Box | None:
        """The box of the target that a box of the source fills; None if the leaf reads nothing of it."""
        shared = stored.intersect(self.box)
        if shared is None:
            return None
        offsets, sizes = list(self.corner), [1] * len(self.dims)
        for target_dim, dim in enumerate(self.dims):
            if dim >= 0:
                offsets[target_dim] += shared.offsets[dim] - self.box.offsets[dim]
                sizes[target_dim] = shared.sizes[dim]
        return Box(tuple(offsets), tuple(sizes))

    @property
    def is_identity(self) -> bool:
        """Whether items have the same indices in the target as in the source."""
        return self.corner == self.box.offsets and self.dims == tuple(range(len(self.box.sizes)))


def leaves_of(link: Link, shape_of: Callable[[Named | Coded], Shape]) -> tuple[Shape, list[Leaf]]:
    """The shape of a link's result, and its leaves.

    Args:
        shape_of: shape of a source tensor, as it is or coded; raises for one that does not exist.

    Raises:
        PlacementError: if inputs do not fit their map, or the map splits or merges dims.
    """
    if not isinstance(link, Mapped):
        shape = shape_of(link)
        whole = whole_box(shape)
        return shape, [Leaf(link, whole, whole.offsets, tuple(range(len(shape))))] if whole.numel else []
    inputs = [leaves_of(item, shape_of) for item in link.inputs]
    shapes = [shape for shape, _ in inputs]
    misfit = link.map.misfit(shapes)
    if misfit is not None:
        number, expected = misfit
        raise PlacementError(link.map.problem, expected=expected, got=shapes[number], where=f"input {number}")
    shape = link.map.shape(shapes)
    if not numel_of(shape):
        return shape, []
    pieces = list(link.map.pieces(shapes, whole_box(shape)))
    if link.map.has_gaps or any(piece.shape is not None for piece in pieces):
        raise _unsupported(link.map)
    return shape, [
        leaf for piece in pieces for leaf in _under(piece, link.map, shape, inputs[piece.input][1])
    ]


def _unsupported(map: IndexMap) -> PlacementError:
    return PlacementError(
        "A transfer does not support this map.",
        expected="maps that move whole dims: Concat, Slice, Stack, Index, Permute",
        got=map,
        todo="transfer the tensors as they are, and apply the map afterwards",
    )


def _under(piece: InputPiece, map: IndexMap, shape: Shape, leaves: Sequence[Leaf]) -> Iterator[Leaf]:
    """The leaves of one input, as leaves of the map's result."""
    corner, rest = [], piece.offset
    for stride in contiguous_strides(shape):
        corner.append(rest // stride)
        rest %= stride
    runs_along = [-1] * len(shape)  # dim of the input, for each dim of the result
    for dim, (size, stride) in enumerate(zip(piece.box.sizes, piece.strides, strict=True)):
        if size == 1:
            continue
        # At most one dim matches: of dims that share a stride, all but one have size 1.
        matches = [
            number
            for number, own in enumerate(contiguous_strides(shape))
            if own == stride and shape[number] >= corner[number] + size and runs_along[number] < 0
        ]
        if not matches:
            raise _unsupported(map)
        runs_along[matches[0]] = dim
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


class SourceTensor:
    """A tensor of a source's description, as leaves read it.

    Args:
        description: of the source.
        link: the tensor, as it is or coded.

    Attributes:
        place: number of the tensor in the description.
        name, stored_shape: of the tensor that ranks store.
        distribution, holders: how it is cut, and which ranks store the parts.
        codec, grid: None for a tensor that is read as it is.
        is_scales: whether leaves read the scales.
        shape, dtype: of what leaves read.
    """

    def __init__(self, description: StateDescription, link: Named | Coded) -> None:
        self._description = description
        self._regions: dict[Shape, list[tuple[Region, int]]] = {}
        self.place = description.places_by_name[link.name]
        self.distribution = description.distributions[self.place]
        self.holders = description.holders_of(self.place)
        entry = description.entries[self.place]
        self.name, self.stored_shape = entry.name, entry.shape
        self.shape, self.dtype = entry.shape, entry.dtype
        self.codec: Codec | None = None
        self.grid: Grid | None = None
        self.is_scales = False
        if isinstance(link, Coded):
            self.codec, self.grid = link.codec, link.codec.grid(entry.shape)
            self.is_scales = link.part == "scales"
            self.dtype = dtype_name(link.codec.scale_dtype if self.is_scales else link.codec.code_dtype)
            self.shape = self.grid.scales_shape if self.is_scales else entry.shape

    @property
    def regions_key(self) -> tuple[Any, ...]:
        """With the distribution, everything that regions depend on."""
        if self.grid is None or not self.is_scales:
            return (self.stored_shape,)
        return self.stored_shape, self.grid.rows, self.grid.cols, self.grid.line_numel

    def stored_region(self, coordinates: Shape) -> Region:
        """What ranks at these coordinates store of the tensor."""
        return self._description.region(self.place, coordinates)

    def regions(self, coordinates: Shape) -> list[tuple[Region, int]]:
        """What leaves can read from ranks at these coordinates, each region with its offset in one flat memory."""
        known = self._regions.get(coordinates)
        if known is not None:
            return known
        regions = [self.stored_region(coordinates)]
        if self.grid is not None and self.is_scales:
            regions = scale_regions(regions[0], self.stored_shape, self.grid)
        starts = accumulate((region.numel for region in regions), initial=0)
        self._regions[coordinates] = list(zip(regions, starts, strict=False))
        return self._regions[coordinates]

    def touching(self, box: Box) -> Iterator[Shape]:
        """Coordinates whose regions may share items with a box."""
        region = Region(box, FlatRange(0, box.numel))
        if self.grid is not None and self.is_scales:
            region = Region(whole_box(self.stored_shape), hull_of(box, self.stored_shape, self.grid))
        return self._description.touching(self.place, region)

    def all_coordinates(self) -> Iterator[Shape]:
        """Those of all places, in order."""
        return np.ndindex(*(axis.size for axis in self.distribution.axes))


class PlacedLeaf(NamedTuple):
    """A leaf of a plan: the tensor that it reads, and the tensor of the target that it fills.

    Attributes:
        target: number of the tensor in the target's description.
        wire_dtype: of items as they are sent: the narrower dtype of both sides.
        narrowed, widened: whether the source casts items to it, and the target from it.
    """

    leaf: Leaf
    source: SourceTensor
    target: int
    wire_dtype: str
    narrowed: bool
    widened: bool

    @property
    def itemsize(self) -> int:
        """Bytes of an item as it is sent."""
        return stored_dtype(self.wire_dtype).itemsize


def resolve_links(
    source: StateDescription, target: StateDescription, links: Mapping[str, Link], cast: bool
) -> tuple[PlacedLeaf, ...]:
    """The leaves of all tensors of a target, in their order.

    Raises:
        PlacementError: if names, shapes or dtypes do not match, or no rank has a part; lists all problems.
    """
    problems: list[str] = []
    sources: dict[Named | Coded, SourceTensor] = {}
    placed: list[PlacedLeaf] = []

    def source_of(item: Named | Coded) -> SourceTensor:
        if item not in sources:
            sources[item] = SourceTensor(source, item)
        return sources[item]

    for place, entry in enumerate(target.entries):
        link = links.get(entry.name, Named(entry.name))
        try:
            shape, leaves = leaves_of(link, lambda item: source_of(item).shape)
        except KeyError as missing:
            problems.append(f"{entry.name!r}: the source has no tensor {missing}")
            continue
        except PlacementError as misfit:
            problems.append(f"{entry.name!r}: " + " ".join(str(misfit).split()))
            continue
        if shape != entry.shape:
            problems.append(f"{entry.name!r}: shape {entry.shape}, but the source makes {shape}")
            continue
        for leaf in leaves:
            item = source_of(leaf.source)
            have, want = stored_dtype(item.dtype), stored_dtype(entry.dtype)
            # Codes are bytes: the target may call them by the name that its kernels take.
            is_renamed = item.codec is not None and want.name in _NAMES_OF_BYTES.get(have.name, ())
            is_cast = have.name != want.name and not is_renamed
            if is_cast and not (cast and have.kind == want.kind == "float"):
                problems.append(f"{entry.name!r}: dtype {want.name}, but the source makes {have.name}")
            wire = entry.dtype if want.itemsize <= have.itemsize else item.dtype
            casts = (is_cast and wire != item.dtype, is_cast and wire != entry.dtype)
            placed.append(PlacedLeaf(leaf, item, place, wire, *casts))
    names = {entry.name for entry in target.entries}
    problems += [
        f"{name!r} is linked, but the target has no such tensor" for name in links if name not in names
    ]
    problems += _missing_parts(placed)
    if problems:
        more = len(problems) - _MAX_SHOWN
        raise PlacementError(
            "Source and target do not match.",
            expected="for each tensor of the target a source of its shape and dtype",
            got="\n    ".join(
                [
                    f"{len(problems)} problems",
                    *problems[:_MAX_SHOWN],
                    *([f"and {more} more"] if more > 0 else []),
                ]
            ),
            todo="link names that differ: plan_transfer(..., links={name: ...}); cast=True rounds floats",
        )
    return tuple(placed)


def _missing_parts(leaves: Sequence[PlacedLeaf]) -> Iterator[str]:
    """The parts of tensors that leaves read and no rank stores."""
    for source in {id(leaf.source): leaf.source for leaf in leaves}.values():
        missing = source.holders.missing_cell()
        if missing is not None:
            sizes = [axis.size for axis in source.distribution.axes]
            where = np.unravel_index(missing, sizes) if sizes else ()
            yield f"{source.name!r}: no rank of the source has the part at {[int(n) for n in where]} of {sizes}"
