"""Links: how target tensors are made from source tensors.

    "layers.0.q.weight"                       the source tensor of that name
    concatenate("q", "k", "v")                tensors one after the other along a dim; `slice` is the inverse
    stack("expert0.w", "expert1.w")           tensors along a new dim; `index` is the inverse
    permute("w")                              one tensor with its dims in another order
    zeros([4, 8])                             zeros, such as the padding behind a concatenated tensor
    codes("w", Fp8Blocks())                   the codes that a codec computes from a tensor; `scales` gives its scales
    codes(index("experts.w", 3), Fp8Blocks())       of a selected box, quantized as a tensor of its own

Links nest. `leaves_of` resolves a link into *leaves*. A leaf is a box of one source tensor, with the corner and the
dims of the target where the box's items go. The maps are classes of `vescale_fsdp.layout.index_maps`.

`resolve_links` compares two descriptions under their links and lists everything that does not match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from vescale_fsdp.checkpoint.manifest.state_tree import dotted_name
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name, stored_dtype
from vescale_fsdp.errors import PlacementError
from vescale_fsdp.layout.geometry import Box, contiguous_strides, whole_box
from vescale_fsdp.layout.index_maps import Concat, Index, Permute, Slice, Stack
from vescale_fsdp.layout.region import Copy, Region
from vescale_fsdp.transfer.coding import MatrixGrid, StoredBox, scale_regions
from vescale_fsdp.transfer.description import StateDescription

if TYPE_CHECKING:
    # For type checkers only: importing `vescale_fsdp.quantize` imports the runtime, which planning does not need.
    from vescale_fsdp.quantize.codec import BlockCodec

__all__ = ["codes", "concatenate", "index", "permute", "scales", "slice", "stack", "zeros"]

Shape = tuple[int, ...]
Map = Concat | Index | Permute | Slice | Stack  # the maps that turn every box into one box

# For the dtype of a codec's codes or scales: other dtypes that a target may declare for the same bytes. Some kernels
# expect uint8 for fp8 codes, or float8_e8m0fnu for scales that are exponents.
_NAMES_OF_BYTES = {"float8_e4m3fn": ("uint8",), "int8": ("uint8",), "uint8": ("float8_e8m0fnu",)}
_MAX_SHOWN = 20  # problems that an error lists


@dataclass(frozen=True)
class Coded:
    """The codes or the scales of a source tensor, or of a box of a source tensor that `slice` and `index` select.

    Raises:
        PlacementError: if ``of`` is not a name, or a slice or index of one.
    """

    of: Link
    codec: BlockCodec
    is_scales: bool

    def __post_init__(self) -> None:
        item = self.of
        while isinstance(item, Mapped) and isinstance(item.map, Index | Slice):
            item = item.inputs[0]
        if not isinstance(item, str):
            raise PlacementError(
                "Codes and scales of this link cannot be computed.",
                expected="the name of a source tensor, or `slice` and `index` of one",
                got=item,
                todo="quantize first, then join: concatenate(codes(a, codec), codes(b, codec)); likewise scales",
            )


@dataclass(frozen=True)
class Mapped:
    """A link whose result is made from the results of other links, such as a concatenation."""

    map: Map
    inputs: tuple[Link, ...]


@dataclass(frozen=True)
class ZeroItems:
    """A link to zeros, which no rank sends: the ranks of the target write them."""

    shape: Shape


Link = str | Coded | Mapped | ZeroItems  # a name alone is the source tensor of that name
CodedKey = tuple[Link, "BlockCodec"]  # identifies what is quantized: the codes and scales of one tensor


def concatenate(*inputs: Link, dim: int = 0) -> Link:
    """Make a link that concatenates tensors along a dim, such as q, k and v into one matrix.

    Examples:
        >>> links = {"qkv.weight": concatenate("q.weight", "k.weight", "v.weight")}
        >>> links |= {"w2": stack("experts.0.w2", permute("experts.1.w2_t")), "rest.weight": "head.weight"}
        >>> sorted(links)  # for plan_transfer(source, target, links=links)
        ['qkv.weight', 'rest.weight', 'w2']
    """
    return Mapped(Concat(dim), inputs)


def slice(of: Link, start: int, size: int, *, dim: int = 0) -> Link:
    """Make a link to the indices [start, start + size) of a dim of ``of``, such as q in a fused q, k and v matrix.

    Examples:
        >>> links = {"q.weight": slice("qkv.weight", 0, 64)}
    """
    return Mapped(Slice(dim, start, size), (of,))


def stack(*inputs: Link, dim: int = 0) -> Link:
    """Make a link that stacks tensors of one shape along a new dim, such as all experts into one tensor.

    Examples:
        >>> links = {"experts.w2": stack("experts.0.w2", "experts.1.w2")}
    """
    return Mapped(Stack(dim), inputs)


def index(of: Link, number: int, *, dim: int = 0) -> Link:
    """Make a link to one index of a dim of ``of``, such as one expert of a stack. The result does not have this dim.

    Examples:
        >>> links = {f"experts.{e}.w2": index("experts.w2", e) for e in range(2)}
    """
    return Mapped(Index(dim, number), (of,))


def permute(of: Link, dims: Sequence[int] = (1, 0)) -> Link:
    """Make a link that permutes dims: dim i of the result is dim ``dims[i]`` of the input. Default: a transpose.

    Examples:
        >>> links = {"w_t": permute("w"), "kernel": permute("conv.weight", (2, 3, 1, 0))}
    """
    return Mapped(Permute(tuple(dims)), (of,))


def zeros(shape: Sequence[int]) -> Link:
    """Make a link to zeros of the target's dtype, such as the rows of an embedding behind the last word.

    Examples:
        >>> links = {"embed.weight": concatenate("embed.weight", zeros([24, 64]))}
    """
    return ZeroItems(tuple(shape))


def codes(of: Link, codec: BlockCodec) -> Link:
    """Make a link to the codes of a quantized tensor. The ranks that store the tensor compute the codes.

    Each matrix (the last two dims) of a tensor is quantized by itself, so no block spans two experts of a fused tensor.

    Args:
        of: the name of a source tensor, or `slice` and `index` of one. Blocks begin at the first selected item.

    Raises:
        PlacementError: for other links, such as `concatenate`.

    Examples:
        >>> from vescale_fsdp.quantize import Fp8Blocks
        >>> links = {"w": codes("w", Fp8Blocks()), "w_scale_inv": scales("w", Fp8Blocks())}
        >>> gate = slice(index("experts.gate_up", 3), 0, 512)  # expert 3 of [experts, out, in], the first 512 of out
        >>> links |= {"experts.3.gate": codes(gate, Fp8Blocks()), "experts.3.gate_scale": scales(gate, Fp8Blocks())}
    """
    return Coded(of, codec, is_scales=False)


def scales(of: Link, codec: BlockCodec) -> Link:
    """Make a link to the scales of a quantized tensor, one scale per block of the codec.

    The last dims are ``codec.grid(shape[-2:]).scales_shape``, behind the tensor's other dims. For a fused tensor
    [experts, out, in] they are [experts, bands, blocks per band].

    Args:
        of: as for `codes`.

    Raises:
        PlacementError: as for `codes`.

    Examples:
        >>> from vescale_fsdp.quantize import Fp8Blocks
        >>> links = {"w_scale_inv": scales("w", Fp8Blocks())}
    """
    return Coded(of, codec, is_scales=True)


class Leaf(NamedTuple):
    """A box of one source tensor, and where its items go in a target tensor.

    Attributes:
        source: name of the source tensor, or its codes or scales; or zeros.
        box: the box of the source that is read.
        corner: offsets of the box's first item in the target.
        dims: for each dim of the target, the matching dim of the source; -1 for a dim that the source lacks, in which
            the leaf fills one index. In source dims that are not listed, the size of the box is 1.
    """

    source: str | Coded | ZeroItems
    box: Box
    corner: Shape
    dims: Shape

    @property
    def target_box(self) -> Box:
        """The box of the target that the leaf fills."""
        return Box(self.corner, tuple(1 if dim < 0 else self.box.sizes[dim] for dim in self.dims))

    def to_source(self, wanted: Box) -> Box | None:
        """Return the box of the source that fills the box ``wanted`` of the target; None if the leaf fills no item."""
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
        """Return the box of the target that the box ``stored`` of the source fills; None if the leaf reads no item."""
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
        """Whether each item has the same index in the target as in the source."""
        return self.corner == self.box.offsets and self.dims == tuple(range(len(self.box.sizes)))


def leaves_of(link: Link, shape_of: Callable[[str | Coded], Shape]) -> tuple[Shape, list[Leaf]]:
    """Return the shape of a link's result, and its leaves.

    Args:
        shape_of: returns the shape of a source tensor, or of its codes or scales; raises if there is no such tensor.

    Raises:
        PlacementError: if the shapes of inputs do not fit their map.
    """
    if not isinstance(link, Mapped):
        shape = link.shape if isinstance(link, ZeroItems) else shape_of(link)
        whole = whole_box(shape)
        return shape, [
            Leaf(link, whole, whole.offsets, tuple(range(len(shape))))
        ] if whole.numel else []  # an empty tensor has no items to read
    inputs = [leaves_of(item, shape_of) for item in link.inputs]
    shapes = [shape for shape, _ in inputs]
    misfit = link.map.misfit(shapes)
    if misfit is not None:
        number, expected = misfit
        raise PlacementError(link.map.problem, expected=expected, got=shapes[number], where=f"input {number}")
    moved = [
        _moved(leaf, link.map, number, shapes) for number, (_, leaves) in enumerate(inputs) for leaf in leaves
    ]
    return link.map.shape(shapes), [leaf for leaf in moved if leaf is not None]


def _moved(leaf: Leaf, map: Map, number: int, shapes: Sequence[Shape]) -> Leaf | None:
    """Apply a map to a leaf of one input. Returns a leaf of the map's result, or None if the result lacks its items.

    Args:
        number: index of the input among the map's inputs.
        shapes: shapes of all inputs.
    """
    corner, dims = leaf.corner, leaf.dims
    match map:
        case Concat(dim):
            before = sum(shape[dim] for shape in shapes[:number])
            return leaf._replace(corner=(*corner[:dim], corner[dim] + before, *corner[dim + 1 :]))
        case Stack(dim):  # -1: the new dim exists only in the target
            corner = (*corner[:dim], number, *corner[dim:])
            return leaf._replace(corner=corner, dims=(*dims[:dim], -1, *dims[dim:]))
        case Permute(order):
            corner = tuple(corner[dim] for dim in order)
            return leaf._replace(corner=corner, dims=tuple(dims[dim] for dim in order))
        case Slice(dim, start, size):
            return _cut(leaf, dim, start, size, shapes[0])
        case Index(dim, at):
            one = _cut(leaf, dim, at, 1, shapes[0])
            if one is None:
                return None
            corner, dims = one.corner, one.dims
            return one._replace(
                corner=(*corner[:dim], *corner[dim + 1 :]), dims=(*dims[:dim], *dims[dim + 1 :])
            )


def _cut(leaf: Leaf, dim: int, start: int, size: int, shape: Shape) -> Leaf | None:
    """Cut a leaf to the target indices [start, start + size) along ``dim``, and move the cut leaf to index 0.

    Args:
        shape: shape of the leaf's target.

    Returns:
        The cut leaf; None if the leaf has no items at these indices.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = start, size
    wanted = Box(tuple(offsets), tuple(sizes))
    source, filled = leaf.to_source(wanted), leaf.target_box.intersect(wanted)
    if source is None or filled is None:
        return None
    corner = tuple(a - b for a, b in zip(filled.offsets, offsets, strict=True))
    return Leaf(leaf.source, source, corner, leaf.dims)


def zero_boxes(
    source: StateDescription, target: StateDescription, links: Iterable[tuple[str, Link]]
) -> Iterator[tuple[int, Box]]:
    """Yield the boxes of target tensors that are zeros, each with the number of the tensor."""
    for spelled, link in links:
        if not _has_zeros(link):
            continue
        name = spelled if spelled in target.numbers_by_name else dotted_name(spelled)
        _, leaves = leaves_of(link, lambda item: SourceTensor(source, item).shape)
        for leaf in leaves:
            if isinstance(leaf.source, ZeroItems):
                yield target.numbers_by_name[name], leaf.target_box


def _has_zeros(link: Link) -> bool:
    """Return whether zeros are among the inputs of a link."""
    return isinstance(link, ZeroItems) or (isinstance(link, Mapped) and any(map(_has_zeros, link.inputs)))


def links_to_json(value: Any) -> Any:
    """Convert a link, or nested tuples with links, to plain values."""
    if is_dataclass(value):
        values = {field.name: links_to_json(getattr(value, field.name)) for field in fields(value)}
        return {"kind": type(value).__name__, **values}
    return [*map(links_to_json, value)] if isinstance(value, tuple) else value


def links_from_json(value: Any) -> Any:
    """Undo `links_to_json`.

    Raises:
        PlacementError: for codecs that are not of `vescale_fsdp.quantize`, and for anything else that is not a link.
    """
    if isinstance(value, list):
        return tuple(map(links_from_json, value))
    if not isinstance(value, dict):
        return value
    from vescale_fsdp import quantize  # here, since it imports the runtime

    codecs = (quantize.Fp8Blocks, quantize.Int8Rows, quantize.Mxfp8)
    kinds = {kind.__name__: kind for kind in (Coded, Mapped, ZeroItems, *get_args(Map), *codecs)}
    values = {name: links_from_json(each) for name, each in value.items() if name != "kind"}
    try:
        return kinds[value["kind"]](**values)
    except (KeyError, TypeError) as error:
        raise PlacementError(
            "A link cannot be read.",
            expected=f"a name, or one of {', '.join(kinds)}",
            got=repr(value)[:200],
            todo="use the codecs of vescale_fsdp.quantize, and the same version of this package on all ranks",
        ) from error


class SourceTensor:
    """What leaves read from one source tensor: its items, its codes or its scales.

    Args:
        description: the description of the source.
        link: the name of a tensor, or a link to the codes or scales of a tensor or of a box of a tensor.

    Raises:
        KeyError: if the source has no tensor of this name.
        PlacementError: if the link selects indices that the tensor lacks.

    Attributes:
        number: index of the tensor in the description.
        name, stored_shape: name and shape of the tensor that ranks store.
        distribution, holders: how the tensor is cut, and which ranks store the pieces.
        codec, grid: the codec and its blocks; None if leaves read the tensor itself.
        coded_key: identifies what is quantized, so that codes and scales of it are computed together.
        is_scales: whether leaves read the scales.
        shape, dtype: shape and dtype of the tensor, codes or scales that leaves read.
    """

    def __init__(self, description: StateDescription, link: str | Coded) -> None:
        self._description = description
        self._regions: dict[Shape, list[tuple[Region, int]]] = {}
        of = link.of if isinstance(link, Coded) else link

        def shape_of(item: str | Coded) -> Shape:
            assert isinstance(item, str)  # `Coded` accepts only names, and slices and indices of names
            numbers = description.numbers_by_name
            self.number = numbers[item if item in numbers else dotted_name(item)]  # slashes are accepted too
            return description.entries[self.number].shape

        self.shape, leaves = leaves_of(of, shape_of)
        # The box of the tensor that is read or quantized, as a leaf; None if the box is empty.
        self._selected = leaves[0] if leaves else None
        self.distribution = description.distributions[self.number]
        self.holders = description.holders_of(self.number)
        entry = description.entries[self.number]
        self.name, self.stored_shape, self.dtype = entry.name, entry.shape, entry.dtype
        self.codec: BlockCodec | None = None
        self.grid: MatrixGrid | None = None
        self.coded_key: CodedKey | None = None
        self.is_scales = False
        if isinstance(link, Coded):
            self.codec, self.grid = link.codec, MatrixGrid.of(link.codec, self.shape)
            self.coded_key = of, link.codec
            self.is_scales = link.is_scales
            self.dtype = dtype_name(link.codec.scale_dtype if self.is_scales else link.codec.code_dtype)
            self.shape = self.grid.scales_shape if self.is_scales else self.shape

    @property
    def regions_key(self) -> tuple[Any, ...]:
        """A hashable key: tensors with equal keys and equal distributions have equal `regions`."""
        selected = None if self._selected is None else self._selected._replace(source="")
        return self.stored_shape, selected, self.grid if self.is_scales else None

    @property
    def is_whole(self) -> bool:
        """Whether `regions` are those that ranks store: of the whole tensor, not of its scales."""
        return not self.is_scales and self.stored_shape == self.shape

    def stored_region(self, coordinates: Shape) -> Region:
        """Return the region of the tensor that the ranks at ``coordinates`` store."""
        return self._description.region(self.number, coordinates)

    def stored_boxes(self, coordinates: Shape) -> Iterator[StoredBox]:
        """Yield the boxes of the selected box that the ranks at ``coordinates`` store, and where their items are."""
        if self._selected is None:
            return
        number = 0  # of the box's first code
        for piece, first in self.stored_region(coordinates).pieces():
            box, shared = self._selected.to_target(piece), piece.intersect(self._selected.box)
            if box is None or shared is None:  # both are None, or neither is
                continue
            strides = contiguous_strides(piece.sizes)
            corners = zip(shared.offsets, piece.offsets, strides, strict=True)
            first += sum((offset - corner) * stride for offset, corner, stride in corners)
            along_box = tuple(strides[dim] for dim in self._selected.dims)
            # Not `Copy.of`, which joins dims: these are the dims of the box.
            yield box, Copy(box.sizes, first, along_box, number, contiguous_strides(box.sizes))
            number += box.numel

    def regions(self, coordinates: Shape) -> list[tuple[Region, int]]:
        """Return the regions that leaves can read from ranks at ``coordinates``, each with its offset in flat memory.

        Scales, and codes of a selected box, may have several regions. The regions are concatenated.
        """
        known = self._regions.get(coordinates)
        if known is not None:
            return known
        if self.is_scales:
            assert self.grid is not None
            regions = scale_regions(self.stored_boxes(coordinates), self.grid)
        elif self.is_whole:
            regions = [self.stored_region(coordinates)]
        else:
            regions = [Region.of_box(box) for box, _ in self.stored_boxes(coordinates)]
        starts = accumulate((region.numel for region in regions), initial=0)
        # Not strict: `starts` has one more item, the total.
        self._regions[coordinates] = list(zip(regions, starts, strict=False))
        return self._regions[coordinates]

    def touching(self, box: Box) -> Iterator[Shape]:
        """Yield the coordinates whose ranks may have items of ``box``; more than needed, but never fewer."""
        if self.is_scales:
            assert self.grid is not None
            box = self.grid.first_items(box)  # the rank that stores the first item of a block owns its scale
        stored = self._selected.to_source(box) if self._selected else None
        if stored is not None:
            yield from self._description.touching(self.number, Region.of_box(stored))

    def touching_all(self) -> Iterator[Shape]:
        """Yield the coordinates whose ranks may have items of the selected box; more than needed, but never fewer."""
        if self._selected is not None:
            yield from self._description.touching(self.number, Region.of_box(self._selected.box))

    def all_coordinates(self) -> Iterator[Shape]:
        """Return the coordinates of all pieces of the tensor, in row-major order."""
        return np.ndindex(*(axis.size for axis in self.distribution.axes))


@dataclass(frozen=True, eq=False, slots=True)  # compared by identity: a plan has one object per leaf
class PlacedLeaf:
    """A leaf of a plan, with the source tensor that the leaf reads and the target tensor that the leaf fills.

    Attributes:
        target: index of the target tensor in the target's description.
        wire_dtype: dtype of items as they are sent: of the dtypes of source and target, the one with fewer bytes.
        itemsize: bytes of an item as it is sent.
        narrowed: whether the sender casts items to ``wire_dtype``.
        widened: whether the receiver casts items from ``wire_dtype``.
    """

    leaf: Leaf
    source: SourceTensor
    target: int
    wire_dtype: str
    itemsize: int
    narrowed: bool
    widened: bool


def resolve_links(
    source: StateDescription, target: StateDescription, links: Iterable[tuple[str, Link]], cast: bool
) -> tuple[PlacedLeaf, ...]:
    """Return the leaves of all target tensors, in the order of the tensors.

    Args:
        links: (target name, link) pairs; names have dots or slashes between keys.
        cast: whether floats may be rounded to the target's dtype.

    Raises:
        PlacementError: if names, shapes or dtypes do not match, or a piece of a tensor is on no rank; lists all
            problems.
    """
    problems: list[str] = []
    sources: dict[str | Coded, SourceTensor] = {}
    placed: list[PlacedLeaf] = []
    link_of: dict[str, Link] = {}
    for spelled, link in links:
        name = spelled if spelled in target.numbers_by_name else dotted_name(spelled)
        if name not in target.numbers_by_name:
            problems.append(f"{spelled!r} is linked, but the target has no such tensor")
        elif name in link_of:
            problems.append(f"{name!r} is linked twice, also as {spelled!r}")
        link_of[name] = link  # also after a problem, so that one error lists the problems of all tensors

    def source_of(item: str | Coded) -> SourceTensor:
        if item not in sources:  # one object for all leaves, since it caches regions
            sources[item] = SourceTensor(source, item)
        return sources[item]

    for number, entry in enumerate(target.entries):
        try:
            shape, leaves = leaves_of(link_of.get(entry.name, entry.name), lambda item: source_of(item).shape)
        except KeyError as missing:  # raised by `SourceTensor`
            problems.append(f"{entry.name!r}: the source has no tensor {missing}")
            continue
        except PlacementError as misfit:
            problems.append(f"{entry.name!r}: " + " ".join(str(misfit).split()))  # on one line
            continue
        if shape != entry.shape:
            problems.append(f"{entry.name!r}: shape {entry.shape}, but the source makes {shape}")
            continue
        for leaf in leaves:
            if isinstance(leaf.source, ZeroItems):  # `zero_boxes` has these
                continue
            item = source_of(leaf.source)
            have, want = stored_dtype(item.dtype), stored_dtype(entry.dtype)
            # Bytes of codes and scales are copied without a cast if only the name of their dtype differs.
            is_renamed = item.codec is not None and want.name in _NAMES_OF_BYTES.get(have.name, ())
            is_cast = have.name != want.name and not is_renamed
            if is_cast and not (cast and have.kind == want.kind == "float"):
                problems.append(f"{entry.name!r}: dtype {want.name}, but the source makes {have.name}")
            # Items are sent in the narrower dtype, which takes fewer bytes.
            wire = entry.dtype if want.itemsize <= have.itemsize else item.dtype
            casts = (is_cast and wire != item.dtype, is_cast and wire != entry.dtype)
            placed.append(PlacedLeaf(leaf, item, number, wire, min(have.itemsize, want.itemsize), *casts))
    # Each source once; a dict instead of a set keeps the order of the messages.
    for item in dict.fromkeys(leaf.source for leaf in placed):
        missing_cell = item.holders.missing_cell()
        if missing_cell is not None:
            sizes = [axis.size for axis in item.distribution.axes]
            where = [int(at) for at in np.unravel_index(missing_cell, sizes)] if sizes else []
            problems.append(f"{item.name!r}: no rank of the source has the piece at {where} of {sizes}")
    if problems:
        shown = [f"{len(problems)} problems", *problems[:_MAX_SHOWN]]
        if len(problems) > _MAX_SHOWN:
            shown.append(f"and {len(problems) - _MAX_SHOWN} more")
        raise PlacementError(
            "Source and target do not match.",
            expected="for each tensor of the target a source of its shape and dtype",
            got="\n    ".join(shown),
            todo="link names that differ: plan_transfer(..., links={name: ...}); cast=True rounds floats",
        )
    return tuple(placed)
