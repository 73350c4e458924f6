"""Links from the code that loads a model: `links_from_loader` runs it once, without data, and records what it moves.

A dispatch mode sees every operator of the loading code. Views (slices, transposes, reshapes) need no record: they have
the storage of their base, with an offset and strides. What is recorded are writes, each a strided copy from the items
of a checkpoint tensor to the items of a storage. A write from a storage that was itself written to, such as the result
of ``cat``, is composed with the writes to that storage (`layout.region.compose`).

    load_weights                     q  [8, 4] ---- narrow(0, 0, 4) ------ copy_ ----> qkv[0:4]
                                     k  [4, 4] ---- narrow(0, 0, 2) ------ copy_ ----> qkv[4:6]
    writes to the storage of qkv     q: 16 items from 0 to 0;  k: 8 items from 0 to 16
    the link of qkv                  concatenate(slice("q", 0, 4), slice("k", 0, 2))

In the end the writes to each tensor of the model are cut into boxes, each of which one checkpoint tensor fills with a
box of its own, and links are made of these boxes.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise, product
from typing import Any, NamedTuple

import torch
from torch import nn

from vescale_fsdp.errors import PlacementError, some
from vescale_fsdp.layout.geometry import Box, contiguous_strides, whole_box
from vescale_fsdp.layout.index_maps import Stack
from vescale_fsdp.layout.region import Copy, compose
from vescale_fsdp.torch_modes import TorchDispatchMode
from vescale_fsdp.torch_private import returns_nothing, storage_id, version_of, written_arguments
from vescale_fsdp.transfer.description import Ranks, StateDescription, named_tensors, transfer_ranks
from vescale_fsdp.transfer.links import (
    Leaf,
    Link,
    Mapped,
    concatenate,
    index,
    links_from_json,
    links_to_json,
    permute,
    slice,
    stack,
    zeros,
)

_MAX_BOXES = 1 << 14  # boxes of one write: beyond, code moves single items, and planning would take minutes
_MAX_SHOWN = 20  # problems that an error lists
_TODO = "compute it in the trainer, so that the result is a tensor of its state; or send this tensor without links"

Shape = tuple[int, ...]
Load = Callable[[Iterator[tuple[str, torch.Tensor]]], object]


@dataclass(frozen=True)
class _Unknown:
    """Why the items of a storage are no items of the checkpoint."""

    reason: str


class _Write(NamedTuple):
    """A write to a storage: a strided copy of items of one checkpoint tensor.

    Attributes:
        of: name of the checkpoint tensor; None for zeros; or why the items are unknown. Without a checkpoint tensor,
            the source strides of the copy are 0.
        copy: from the items of the checkpoint tensor to the items of the storage.
        operator: number of the operator that has written, which may make several writes.
        dtype: the narrowest dtype that the items have been cast to.
        is_rounded: whether a cast to this dtype has rounded them.
    """

    of: str | _Unknown | None
    copy: Copy
    operator: int
    dtype: torch.dtype
    is_rounded: bool = False


@dataclass
class _Contents:
    """What a storage contains.

    Attributes:
        kept: a tensor of the storage, which must live as long as its number is used.
        initial: what the storage contains where nothing was written.
        is_loaded: whether items of the checkpoint may be in the storage, or the model's tensors are.
        num_writes: number of operators that have written to the storage.
    """

    kept: torch.Tensor
    initial: _Unknown | None
    is_loaded: bool = False
    num_writes: int = 0
    writes: list[_Write] = field(default_factory=list)


def links_from_loader(
    model: nn.Module, load: Load, source: StateDescription | Any, *, prefix: str = ""
) -> dict[str, Link]:
    """Return the links that make the tensors of a model from a checkpoint's, by running the code that loads the model.

    ``load`` runs once, on tensors of the meta device, and may slice, transpose, reshape, concatenate, stack, cast and
    copy them. The model may be on any device, and its tensors keep their values. For an engine with tensor parallelism,
    call this once per rank, each with a prefix: on the engine's ranks, or in one process with torch's fake group.

    Args:
        model: the model, before ``load``. Its tensors are its parameters, shared ones once, and its persistent buffers.
        load: is called with an iterator of (name, tensor), such as ``model.load_weights``. It must do all that the
            engine does with weights (also what is called ``process_weights_after_loading``), on the caller's thread.
        source: the tensors that ``load`` reads, by name: the description of the trainer's state, or a state as
            `describe_states` takes it, of which only names, shapes and dtypes are read.
        prefix: what the names of the links begin with, such as ``"0."`` for the tensors of ``{"0": model}``.

    Returns:
        A link for each tensor of the model that ``load`` has written, in the model's order. A tensor without a link was
        not loaded, and does not belong into the target of a transfer.

    Raises:
        PlacementError: if ``load`` does anything else with the tensors: it computes, reads values, writes an item twice
            from two places, or leaves a part of a tensor unwritten. Lists every such tensor.

    Examples:
        >>> model = torch.nn.Linear(4, 6, bias=False, device="meta")
        >>> def load(weights):
        ...     for name, tensor in weights:
        ...         rows = 0 if name == "q" else 4
        ...         model.weight.data.narrow(0, rows, len(tensor)).copy_(tensor)
        >>> source = {"q": torch.empty(4, 4, device="meta"), "k": torch.empty(2, 4, device="meta")}
        >>> links_from_loader(model, load, source) == {"weight": concatenate("q", "k")}
        True
    """
    if isinstance(source, StateDescription):
        shapes = {
            entry.name: (entry.shape, dtype)
            for entry, dtype in zip(source.entries, source.dtypes, strict=True)
        }
    else:
        shapes = {name: (tuple(each.shape), each.dtype) for name, each in named_tensors(source)}
    recorder = _Recorder()
    versions: dict[str, tuple[torch.Tensor, int]] = {}
    for name, tensor in named_tensors(model):
        if not tensor.is_inference():  # these have no version counter
            versions[name] = tensor, version_of(tensor)
        recorder.add(tensor, _Unknown("never written"), is_loaded=True)
    own = _OwnTensors(model)
    try:
        with recorder:
            load(recorder.checkpoint(shapes))
        return _links(model, recorder, versions, shapes, prefix)
    finally:
        own.restore()


def _links(
    model: nn.Module,
    recorder: _Recorder,
    versions: Mapping[str, tuple[torch.Tensor, int]],
    shapes: Mapping[str, tuple[Shape, torch.dtype]],
    prefix: str,
) -> dict[str, Link]:
    """Return the links of a model whose loader has run.

    Args:
        versions: the tensors of the model before, and their versions.
        shapes: shape and dtype of each tensor of the checkpoint.
    """
    # Seen writes count too, if they were not to `.data`, which has a counter of its own.
    unseen = [
        name
        for name, (tensor, version) in versions.items()
        if version_of(tensor) - version > recorder.num_writes_to(tensor)
    ]
    if unseen:
        raise PlacementError(
            "Code that loads a model has written to it unseen.",
            expected="a loader that uses torch's operators, on the thread that calls it",
            got=f"{len(unseen)} tensors that were written to",
            where=some(unseen),
            todo="load without other threads and without kernels of your own",
        )
    links: dict[str, Link] = {}
    problems: list[str] = []
    for name, tensor in named_tensors(model):
        writes = recorder.writes_of(tensor)
        if not tensor.numel() or all(each.of == _Unknown("never written") for each in writes):
            continue
        try:
            links[prefix + name] = _link_of(writes, tuple(tensor.shape), tensor.dtype, shapes)
        except PlacementError as problem:
            problems.append(f"{name}: {problem.got}")
    if problems:
        shown = problems[:_MAX_SHOWN]
        if len(problems) > _MAX_SHOWN:
            shown.append(f"and {len(problems) - _MAX_SHOWN} more")
        raise PlacementError(
            "Tensors of a model are not made by moving items of a checkpoint.",
            expected="code that slices, transposes, reshapes, concatenates, stacks, casts and copies",
            got="\n    ".join([f"{len(problems)} tensors", *shown]),
            where=f"the tensors of a {type(model).__name__}",
            todo=_TODO,
        )
    return links


def share_links(links: Mapping[str, Link], *, ranks: Ranks = None) -> dict[str, Link]:
    """Return the links of all ranks, since `plan_transfer` needs all of them on each. A collective.

    Each rank of an engine traces its own loader, and a trainer has no links. Links are sent as JSON, once for all ranks
    that have the same.

    Args:
        links: this rank's links; empty on ranks that have none.
        ranks: the ranks of both states, as for `describe_states`.

    Raises:
        PlacementError: on ranks that have different links for one tensor, or a codec that is not of
            `vescale_fsdp.quantize`. Other ranks raise a CheckpointError.

    Examples:
        >>> from vescale_fsdp.transfer.links import concatenate
        >>> share_links({"qk": concatenate("q", "k")}) == {"qk": concatenate("q", "k")}
        True
    """
    coordinator = transfer_ranks(ranks)
    document = b""
    with coordinator.together("describing links", is_first=True):
        document = json.dumps({name: links_to_json(link) for name, link in links.items()}).encode()
        read = {name: links_from_json(link) for name, link in json.loads(document).items()}
        unlike = [name for name, link in links.items() if read[name] != link]  # such as a subclass of a codec
        if unlike:
            raise PlacementError(
                "Links cannot be sent to other ranks.",
                expected="codecs of vescale_fsdp.quantize",
                got=f"{len(unlike)} links that other ranks would read otherwise",
                where=some(unlike),
                todo="pass links with your own codecs to plan_transfer on every rank, without share_links",
            )
    shared: dict[str, Link] = {}
    first: dict[str, int] = {}  # tensor -> the first rank that has its link
    documents = coordinator.distinct(document, "sharing links")
    with coordinator.together("reading links of other ranks"):
        for holders, document in documents:
            for name, value in json.loads(document).items():
                link, rank = links_from_json(value), holders.ranks[0]
                if shared.setdefault(name, link) != link:
                    raise PlacementError(
                        "Two ranks have different links for one tensor.",
                        expected="the same link, or names of each rank's own",
                        got=f"links of ranks {first[name]} and {rank}",
                        where=name,
                        todo=f"give each rank of the engine a prefix: links_from_loader(.., prefix='{rank}.')",
                    )
                first.setdefault(name, rank)
    return shared


def _place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return where a tensor's items are in memory."""
    return storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


class _OwnTensors:
    """The tensors that a model had before its loader ran, and which it gets back.

    A loader may replace them: ``layer.weight = Parameter(..)``, ``load_state_dict(assign=True)``, ``weight.data = ..``.
    What it sets has no values. A model on meta keeps what was set there, which has no values before either.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = [
            (kind, name, tensor, tensor.detach())
            for module in model.modules()
            for kind in (module._parameters, module._buffers)
            for name, tensor in kind.items()
            if tensor is not None and not tensor.is_meta
        ]

    def restore(self) -> None:
        """Set the tensors again, with their memory.

        Raises:
            PlacementError: if a tensor has become one on meta, as by ``torch.utils.swap_tensors``.
        """
        swapped = []
        for kind, name, tensor, values in self._slots:
            kind[name] = tensor
            if tensor.is_meta:
                swapped.append(name)
                kind[name] = nn.Parameter(values, False) if isinstance(tensor, nn.Parameter) else values
            elif _place_of(tensor) != _place_of(values):
                tensor.data = values
        if swapped:
            raise PlacementError(
                "Code that loads a model has exchanged the memory of its tensors for tensors without values.",
                expected="a loader that copies, or sets a new parameter",
                got=f"{len(swapped)} exchanged tensors",
                where=some(swapped),
                todo="load without torch.utils.swap_tensors, or call links_from_loader on a model on the meta device; "
                "this model has new Parameter objects with its old values",
            )


class _Recorder(TorchDispatchMode):
    """Records what operators write, while it is the current mode; nothing is written to loaded tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._memories: dict[int, _Contents] = {}
        self._num_operators = 0
        self._at = "the beginning"  # of the checkpoint: the tensor that the loader has got last

    def checkpoint(
        self, shapes: Mapping[str, tuple[Shape, torch.dtype]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name of each tensor of a checkpoint, and a tensor without values."""
        for name, (shape, dtype) in shapes.items():
            self._at = repr(name)
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            whole = Copy.run(0, 0, max(tensor.numel(), 1))
            self.add(tensor, _EMPTY, is_loaded=True).writes.append(_Write(name, whole, 0, dtype))
            yield name, tensor

    def add(self, tensor: torch.Tensor, initial: _Unknown | None, *, is_loaded: bool = False) -> _Contents:
        """Replace what is known of a tensor's storage."""
        memory = self._memories[storage_id(tensor)] = _Contents(tensor, initial, is_loaded)
        return memory

    def num_writes_to(self, tensor: torch.Tensor) -> int:
        """Return the number of operators that have written to a tensor's storage."""
        return self._memory(tensor).num_writes

    def writes_of(self, tensor: torch.Tensor) -> list[_Write]:
        """Return what a tensor contains: writes to its items in row-major order, later ones over earlier ones."""
        shape = tuple(tensor.shape)
        into = Copy(shape, int(tensor.storage_offset()), tensor.stride(), 0, contiguous_strides(shape))
        return self._read(tensor, into)

    def _read(self, tensor: torch.Tensor, into: Copy) -> list[_Write]:
        """Return the writes that a copy of items of a tensor makes.

        Args:
            into: the copy, from the tensor's storage.
        """
        memory = self._memory(tensor)
        if tensor.dtype is not memory.kept.dtype:
            reason = f"bits of {memory.kept.dtype} read as {tensor.dtype}"
            return [self._initial(_Unknown(reason), into, tensor.dtype)]
        if not into.numel:
            return []
        found = [
            each._replace(copy=Copy.of(*copy))
            for each in memory.writes
            for copy in islice(compose(each.copy, into), _MAX_BOXES + 1)
        ]
        if len(found) > _MAX_BOXES:
            return [self._initial(_Unknown("moved as single items"), into, tensor.dtype)]
        if len(found) == 1 and found[0].copy.numel == into.numel:
            return found
        return [self._initial(memory.initial, into, memory.kept.dtype), *found]

    def _initial(self, of: _Unknown | None, into: Copy, dtype: torch.dtype) -> _Write:
        """Return a write of zeros or of unknown items to all items of a copy's target."""
        nothing = (0,) * len(into.sizes)
        return _Write(of, Copy.of(into.sizes, 0, nothing, into.target, into.target_strides), 0, dtype)

    def _write(self, target: torch.Tensor, source: torch.Tensor | _Unknown | None) -> None:
        """Record a write of a tensor, broadcast and cast, or of zeros or unknown items, to all items of ``target``."""
        if not target.numel():
            return
        memory = self._memory(target)
        memory.num_writes += 1
        shape = tuple(target.shape)
        offset, strides = 0, (0,) * len(shape)
        if isinstance(source, torch.Tensor):
            expanded = source.expand(shape)
            offset, strides = int(expanded.storage_offset()), expanded.stride()
        into = Copy(shape, offset, strides, int(target.storage_offset()), target.stride())
        if target.dtype is not memory.kept.dtype:
            source = _Unknown(f"written as {target.dtype} into {memory.kept.dtype}")
        if isinstance(source, torch.Tensor):
            writes = [_cast(each, memory.kept.dtype) for each in self._read(source, into)]
            memory.is_loaded |= self._memory(source).is_loaded
        else:
            writes = [self._initial(source, into, memory.kept.dtype)]
        memory.writes += [each._replace(operator=self._num_operators) for each in writes]

    def _memory(self, tensor: torch.Tensor) -> _Contents:
        """Return what is known of a tensor's storage."""
        # Unknown: made before the loader ran, or on another thread.
        known = self._memories.get(storage_id(tensor))
        return known or self.add(tensor, _Unknown("a tensor that is not of the checkpoint"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._num_operators += 1
        tensors = list(_tensors_of((*args, *kwargs.values())))
        # Otherwise factories, and operators on tensors of the loader's own, which have values.
        is_loaded = any(each.is_meta or self._memory(each).is_loaded for each in tensors)
        if func.is_view:
            return self._made(func(*args, **kwargs), _Unknown(str(func)))
        written = list(_tensors_of(written_arguments(func, args, kwargs)))
        if func in _WRITES:
            for target, source in _WRITES[func](*args, **kwargs):
                self._write(target, source)
            if not is_loaded:
                return func(*args, **kwargs)
            return None if returns_nothing(func) else args[0]
        reason = f"{func}, at {self._at}"
        for each in written:
            self._write(each, _Unknown(reason))
        if is_loaded:
            if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
                raise self._refusal(func, "reads values")
            args, kwargs = _on_meta(args), {key: _on_meta(value) for key, value in kwargs.items()}
            if "device" in kwargs:
                kwargs["device"] = torch.device("meta")
        try:
            made = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not is_loaded:
                raise
            raise self._refusal(func, f"cannot run without values ({error})") from error
        if written:
            return made if returns_nothing(func) else written[0]
        self._made(made, _FACTORIES.get(func, _Unknown(reason)))
        if func in _JOINS:
            for pair in _JOINS[func](made, *args, **kwargs):
                self._write(*pair)
        return made

    def _made(self, made: Any, initial: _Unknown | None) -> Any:
        """Note the new storages among an operator's results."""
        for each in _tensors_of(made):
            if storage_id(each) not in self._memories:
                self.add(each, initial)
        return made

    def _refusal(self, func: Any, got: str) -> PlacementError:
        return PlacementError(
            "Code that loads a model does more than move items.",
            expected="slices, transposes, reshapes, cat, stack, casts and copies of the checkpoint's tensors",
            got=f"{func}, which {got}",
            where=f"the loader, at {self._at}",
            todo=_TODO,
        )


def _tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results of an operator, also those in lists."""
    for value in values if isinstance(values, (list, tuple)) else (values,):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_of(value)


def _on_meta(value: Any) -> Any:
    """Return an argument of an operator with meta tensors instead of tensors that have values."""
    if isinstance(value, (list, tuple)):
        return [_on_meta(each) for each in value]
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


_Pairs = Iterator[tuple[torch.Tensor, torch.Tensor | _Unknown | None]]


def _filled(target: torch.Tensor, value: Any) -> _Pairs:
    # Not -0.0, whose bits are not those of zeros. `repr`, because a value may be complex or a bool.
    is_zero = not isinstance(value, torch.Tensor) and value == 0 and "-" not in repr(value)
    yield target, None if is_zero else _Unknown(f"filled with {value}")


def _cat(made: torch.Tensor, parts: Sequence[torch.Tensor], dim: int = 0) -> _Pairs:
    start = 0
    for part in parts:
        if part.dim() == made.dim():  # else an empty tensor [0], which torch accepts
            yield made.narrow(dim, start, part.shape[dim]), part
            start += part.shape[dim]


def _stack(made: torch.Tensor, parts: Sequence[torch.Tensor], dim: int = 0) -> _Pairs:
    return zip(made.unbind(dim), parts, strict=True)


def _padded(made: torch.Tensor, inner: torch.Tensor, pad: Sequence[int], value: float = 0) -> _Pairs:
    yield from _filled(made, value)
    for number in range(len(pad) // 2):  # pairs, the last dim first
        dim, before = made.dim() - 1 - number, pad[2 * number]
        made = made.narrow(
            dim, max(before, 0), made.shape[dim] - max(before, 0) - max(pad[2 * number + 1], 0)
        )
        start = max(-before, 0)
        inner = inner.narrow(dim, start, made.shape[dim])
    yield made, inner


_aten = torch.ops.aten
_EMPTY = _Unknown("memory that was not written to")
# What the results of factories contain; those of other operators are unknown.
_FACTORIES: dict[Any, _Unknown | None] = {
    **dict.fromkeys((_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default)),
    **dict.fromkeys(
        (
            _aten.empty.memory_format,
            _aten.empty_strided.default,
            _aten.empty_like.default,
            _aten.new_empty.default,
            _aten.new_empty_strided.default,
        ),
        _EMPTY,
    ),
}
# Operators that write to their first argument, and those whose new result has the items of their arguments: pairs of a
# written tensor and the tensor of its shape that is written, or None for zeros.
_WRITES: dict[Any, Callable[..., _Pairs]] = {
    _aten.copy_.default: lambda target, source, non_blocking=False: iter([(target, source)]),
    _aten._foreach_copy_.default: lambda targets, sources, non_blocking=False: zip(
        targets, sources, strict=True
    ),
    _aten.zero_.default: lambda target: iter([(target, None)]),
    _aten.fill_.Scalar: _filled,
    _aten.fill_.Tensor: _filled,
}
_JOINS: dict[Any, Callable[..., _Pairs]] = {
    _aten.clone.default: lambda made, source, **options: iter([(made, source)]),
    _aten._to_copy.default: lambda made, source, **options: iter([(made, source)]),
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.constant_pad_nd.default: _padded,
}


def _cast(write: _Write, dtype: torch.dtype) -> _Write:
    """Return a write with the items cast to another dtype."""
    if write.dtype is dtype or not isinstance(write.of, str):
        return write
    if not (write.dtype.is_floating_point and dtype.is_floating_point):
        return write._replace(of=_Unknown(f"a cast of {write.of!r} from {write.dtype} to {dtype}"))
    narrow, wide = torch.finfo(write.dtype), torch.finfo(dtype)
    if wide.eps <= narrow.eps and wide.max >= narrow.max and wide.tiny * wide.eps <= narrow.tiny * narrow.eps:
        return write  # every item keeps its value
    if write.is_rounded:
        return write._replace(of=_Unknown(f"{write.of!r} rounded to {write.dtype} and to {dtype}"))
    return write._replace(dtype=dtype, is_rounded=True)


class _Part(NamedTuple):
    """A box of a tensor of the model that one write has filled.

    Attributes:
        leaf: the box of a checkpoint tensor whose items are in the box; None if they are zeros or unknown.
    """

    box: Box
    write: _Write
    leaf: Leaf | None

    def covers(self, box: Box) -> bool:
        """Return whether a box is in this one."""
        dims = zip(self.box.offsets, self.box.sizes, box.offsets, box.sizes, strict=True)
        return all(own <= start and start + size <= own + own_size for own, own_size, start, size in dims)

    def link(self, box: Box, shapes: Mapping[str, tuple[Shape, torch.dtype]]) -> Link | None:
        """Return the link of a box in this one; None if the items are unknown."""
        if self.leaf is None:
            return None if self.write.of is not None else zeros(box.sizes)
        assert isinstance(self.leaf.source, str)
        return _link_of_leaf(self.leaf, self.leaf.source, box, shapes[self.leaf.source][0])


def _link_of(
    writes: Sequence[_Write],
    shape: Shape,
    dtype: torch.dtype,
    shapes: Mapping[str, tuple[Shape, torch.dtype]],
) -> Link:
    """Return the link of a tensor of the model.

    Args:
        writes: the writes to its items in row-major order, later ones over earlier ones.
        shapes: shape and dtype of each tensor of the checkpoint.

    Raises:
        PlacementError: if items are unknown, or were written from two places.
    """
    parts: list[_Part] = []
    for write in writes:
        if write.is_rounded and write.dtype is not dtype:
            write = write._replace(of=_Unknown(f"{write.of!r} rounded to {write.dtype} before {dtype}"))
        parts += islice(_parts_of(write, shape, shapes), _MAX_BOXES + 1 - len(parts))
        if len(parts) > _MAX_BOXES:
            raise _not_moved(f"more than {_MAX_BOXES} boxes: items are moved one by one")
    return _joined(whole_box(shape), parts, shapes)


def _not_moved(got: str) -> PlacementError:
    """Return the error of one tensor, from which `links_from_loader` makes the error of all."""
    return PlacementError("A tensor of a model is not made by moving items of a checkpoint.", got=got)


def _parts_of(
    write: _Write, shape: Shape, shapes: Mapping[str, tuple[Shape, torch.dtype]]
) -> Iterator[_Part]:
    """Yield the boxes of a tensor that a write fills, each from a box of the write's checkpoint tensor."""
    source_shape = shapes[write.of][0] if isinstance(write.of, str) else None
    copies: Iterable[Copy] = [write.copy]
    if source_shape is not None:  # cut at the dims of the source
        copies = compose(_whole(source_shape), write.copy)
    for copy in chain.from_iterable(compose(each, _whole(shape)) for each in copies):
        dims = [
            dim
            for dim in zip(copy.sizes, copy.source_strides, copy.target_strides, strict=True)
            if dim[0] > 1
        ]
        kept: list[tuple[int, int, int]] = []  # size, source dim (-1: none), target dim
        single: list[tuple[int, int, int]] = []  # dims of which each index is a box
        for size, from_step, into_step in dims:
            into, is_next = _dim_of(shape, into_step)
            from_ = -1
            if source_shape is not None:
                from_, is_adjacent = _dim_of(source_shape, from_step) if from_step else (-1, False)
                is_next &= is_adjacent
            if is_next:
                kept.append((size, from_, into))
            else:
                single.append((size, from_step, into_step))
        for at in product(*(range(size) for size, _, _ in single)):
            source = copy.source + sum(i * step for i, (_, step, _) in zip(at, single, strict=True))
            target = copy.target + sum(i * step for i, (_, _, step) in zip(at, single, strict=True))
            sizes, from_dims = [1] * len(shape), [-1] * len(shape)
            for size, from_, into in kept:
                sizes[into], from_dims[into] = size, from_
            box = Box(_unraveled(target, shape), tuple(sizes))
            leaf = None
            if source_shape is not None:
                assert isinstance(write.of, str)
                source_sizes = [1] * len(source_shape)
                for size, from_, _ in kept:
                    source_sizes[from_] = size
                source_box = Box(_unraveled(source, source_shape), tuple(source_sizes))
                leaf = Leaf(write.of, source_box, box.offsets, tuple(from_dims))
            yield _Part(box, write, leaf)


def _whole(shape: Shape) -> Copy:
    """Return the copy of all items of a tensor to the same places."""
    strides = contiguous_strides(shape)
    return Copy(shape, 0, strides, 0, strides)


def _dim_of(shape: Shape, step: int) -> tuple[int, bool]:
    """Return the dim of a tensor along which items are ``step`` apart, and whether their indices are consecutive."""
    for dim, stride in enumerate(contiguous_strides(shape)):
        if shape[dim] > 1 and stride <= step:
            return dim, stride == step
    raise AssertionError(f"no dim of {shape} has steps of {step}")  # a step of an item or more


def _unraveled(number: int, shape: Shape) -> Shape:
    """Return the indices of an item of a tensor, from its number in row-major order."""
    strides = contiguous_strides(shape)
    return tuple(number // stride % size for stride, size in zip(strides, shape, strict=True))


def _joined(region: Box, parts: Sequence[_Part], shapes: Mapping[str, tuple[Shape, torch.dtype]]) -> Link:
    """Return the link of a box of a tensor, which the parts cover.

    Args:
        parts: all parts with items in the box; later ones are over earlier ones.
    """
    inner = [each for each in parts if not each.covers(region)]
    if not inner:
        *below, top = parts
        link = top.link(region, shapes)
        if link is None:
            assert isinstance(top.write.of, _Unknown)
            raise _not_moved(f"items {_shown(region)}: {top.write.of.reason}")
        for each in below:
            if each.leaf is None or each.write.operator == top.write.operator or top.leaf is None:
                continue
            if each.link(region, shapes) != link:
                raise _not_moved(
                    f"items {_shown(region)}: written twice, from {each.write.of!r} and from {top.write.of!r}"
                )
        return link
    for cut in (_between, _at_edges):
        for dim in range(len(region.sizes)):
            edges = cut(inner, region, dim)
            if len(edges) > 2:
                return _concatenated(_along(region, parts, dim, edges, shapes), dim)
    raise AssertionError(f"parts that neither fill {region} nor end in it")


def _range(box: Box, region: Box, dim: int) -> tuple[int, int]:
    """Return start and stop of a box along a dim, cut to a region."""
    start, stop = region.offsets[dim], region.offsets[dim] + region.sizes[dim]
    return max(box.offsets[dim], start), min(box.offsets[dim] + box.sizes[dim], stop)


def _between(parts: Sequence[_Part], region: Box, dim: int) -> list[int]:
    """Return the places along a dim that cut a region without cutting a part, with both ends of the region."""
    edges, end = [region.offsets[dim]], region.offsets[dim]
    for start, stop in sorted(_range(each.box, region, dim) for each in parts):
        if start >= end:
            edges += [end, start]
        end = max(end, stop)
    return sorted({*edges, end, region.offsets[dim] + region.sizes[dim]})


def _at_edges(parts: Sequence[_Part], region: Box, dim: int) -> list[int]:
    """Return all places along a dim where a part begins or ends, with both ends of the region."""
    ends = {region.offsets[dim], region.offsets[dim] + region.sizes[dim]}
    return sorted(ends.union(*(_range(each.box, region, dim) for each in parts)))


def _along(
    region: Box,
    parts: Sequence[_Part],
    dim: int,
    edges: Sequence[int],
    shapes: Mapping[str, tuple[Shape, torch.dtype]],
) -> list[Link]:
    """Return the links of the boxes into which a region is cut along a dim, in order."""
    inside: list[list[_Part]] = [[] for _ in edges[1:]]
    for each in parts:
        start, stop = _range(each.box, region, dim)
        for number in range(bisect_right(edges, start) - 1, len(inside)):
            if edges[number] >= stop:
                break
            inside[number].append(each)
    return [
        _joined(region.with_range(dim, start, stop - start), own, shapes)
        for (start, stop), own in zip(pairwise(edges), inside, strict=True)
    ]


def _concatenated(links: Sequence[Link], dim: int) -> Link:
    """Return the link that concatenates links along a dim: as a stack, if each is one tensor along a new dim."""
    single = [
        (each.map.dim, each.inputs[0])
        for each in links
        if isinstance(each, Mapped) and isinstance(each.map, Stack) and len(each.inputs) == 1
    ]
    dims = {at for at, _ in single}
    if len(single) < len(links) or len(dims) > 1:
        return concatenate(*links, dim=dim)
    inputs, at = [each for _, each in single], dims.pop()
    if at == dim:
        return stack(*inputs, dim=dim)
    return stack(concatenate(*inputs, dim=dim - (at < dim)), dim=at)


def _link_of_leaf(leaf: Leaf, name: str, region: Box, shape: Shape) -> Link:
    """Return the link of a box of a tensor whose items are a box of one checkpoint tensor.

    Args:
        region: the box, in the leaf's.
        shape: shape of the checkpoint tensor.
    """
    box = leaf.to_source(region)
    assert box is not None
    # A dim of one item is that of the checkpoint tensor, if it has one at this place.
    dims = tuple(
        at if dim < 0 and at < len(shape) and at not in leaf.dims else dim for at, dim in enumerate(leaf.dims)
    )
    link: Link = name
    for dim in reversed(range(len(shape))):  # the last first, since `index` drops the dim
        if dim not in dims:
            link = index(link, box.offsets[dim], dim=dim)
        elif box.sizes[dim] != shape[dim]:
            link = slice(link, box.offsets[dim], box.sizes[dim], dim=dim)
    kept = sorted(dim for dim in dims if dim >= 0)
    order = [kept.index(dim) for dim in dims if dim >= 0]
    if order != sorted(order):
        link = permute(link, order)
    for at, dim in enumerate(dims):
        if dim < 0:
            link = stack(link, dim=at)
    return link


def _shown(box: Box) -> str:
    """Return a box as indices, such as [0:4, 2:3]."""
    return f"[{', '.join(f'{start}:{start + size}' for start, size in zip(box.offsets, box.sizes, strict=True))}]"
