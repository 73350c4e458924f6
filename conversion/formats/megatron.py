"""Read Megatron's ``torch_dist`` checkpoints: torch.distributed.checkpoint with Megatron's own names.

    .metadata, __0_0.distcp ..    decoder.layers.mlp.linear_fc1.weight                        [layers, ..]
                                  optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight
                                  decoder.layers.mlp.linear_fc1._extra_state/shard_0_4         pickled objects
    common.pt                     arguments, iteration, groups of the optimizer

Megatron stacks layers that are alike in one tensor; they become one tensor per layer, as in memory. Norms in front of a
projection get Transformer Engine's name, under which Megatron mostly stores its own too. fp32 masters, where there are
any, are the model: the stored 16-bit weights are their rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from vescale_fsdp.checkpoint.formats.dcp.source import open_dcp
from vescale_fsdp.checkpoint.formats.torch_save.found_entries import FoundEntries, OpenedFile
from vescale_fsdp.checkpoint.formats.torch_save.pickle_reader import TensorRef
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.checkpoint.state.nesting import ListIndex
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.layout.geometry import Box

_STACKED = re.compile(r"(.*\blayers)\.(?!\d)(.+)")


@dataclass
class LayerStacks:
    """Takes stacks apart, and remembers where their layers came from.

    Args:
        locate: finds a stack's chunk in its file.
    """

    locate: Callable[[TensorInfo, StoredChunk], StoredChunk]
    _origins: dict[tuple[str, int], tuple[TensorInfo, StoredChunk, int]] = field(default_factory=dict)

    def layers(self, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
        """The tensor by name, or each layer of it."""
        match = _STACKED.fullmatch(name)
        if match is None or not tensor.info.shape:
            yield name, tensor
            return
        for layer in range(tensor.info.shape[0]):
            info = TensorInfo(name, tensor.info.shape[1:], tensor.info.dtype)
            chunks = (self._slice(tensor.info, chunk, layer) for chunk in tensor.chunks)
            stored = StoredTensor(info, tuple(chunk for chunk in chunks if chunk is not None))
            yield f"{match[1]}.{layer}.{match[2]}", stored

    def _slice(self, stack: TensorInfo, chunk: StoredChunk, layer: int) -> StoredChunk | None:
        """What a chunk of a stack holds of a layer."""
        place = layer - chunk.box.offsets[0]
        if not 0 <= place < chunk.box.sizes[0]:
            return None
        # A chunk is told by its file and offset, until it is located: layers in one chunk must differ there.
        key = (chunk.file, chunk.offset + place)
        self._origins[key] = (stack, chunk, place)
        return replace(chunk, box=Box(chunk.box.offsets[1:], chunk.box.sizes[1:]), offset=key[1])

    def located(self, info: TensorInfo, chunk: StoredChunk) -> StoredChunk:
        """Where a chunk of a layer, or of what is no stack, lies in its file: for `Source.locate`."""
        origin = self._origins.get((chunk.file, chunk.offset))
        if origin is None:
            return self.locate(info, chunk)
        stack, whole, place = origin
        found = self.locate(stack, whole)
        first, *steps = found.steps
        size = info.dtype.itemsize
        return replace(
            found,
            box=chunk.box,
            offset=found.offset + place * first * size,
            nbytes=chunk.box.numel * size,
            strides=tuple(steps),
        )


_COMMON_FILE = "common.pt"
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state\.(\w+)\.(.+))?")
_MASTER = "fp32_param"
_NORMS = {  # as one layer spec calls them: as Transformer Engine does
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
_BY_RANGES = (
    "the optimizer is left out: its state is stored by ranges of buffers, not by parameter; Megatron stores it by "
    "parameter with --dist-ckpt-optim-fully-reshardable"
)
_NOT_OPTIONS = ("params", "step")  # the parameters, which Megatron leaves out, and what they count together


def open_megatron(store: Storage, *, trust_pickle: bool = False) -> Source:
    """Open such a checkpoint; reads metadata and ``common.pt``.

    Raises:
        ConversionError: if it has no tensors of a model.
        CorruptCheckpointError: if it is damaged.
    """
    stored = open_dcp(store, trust_pickle=trust_pickle, stand_ins=True)  # plans of the save are in there
    stacks, entries = LayerStacks(partial(_locate, stored)), FoundEntries()
    state = _State.sorted(stored.tensors)
    if not state.model:
        raise ConversionError(
            "No model weights were found in the source.",
            expected="tensors such as decoder.layers.mlp.linear_fc1.weight",
            got=f"{len(stored.tensors)} tensors, all of an optimizer",
            where=store.where,
            todo="pass the folder of one iteration, saved with --ckpt-format torch_dist",
        )
    masters, moments = state.masters, state.moments
    for name, tensor in state.model.items():
        for layer, part in stacks.layers(name, masters.get(name, tensor)):
            entries.add_named(("model", _canonical(layer)), part)
    for kind, tensors in moments.items():
        for name, tensor in tensors.items():
            for layer, part in stacks.layers(name, tensor):
                entries.add_named(("optimizer", "state", _canonical(layer), kind), part)
    _add_common(entries, OpenedFile.open(store, _COMMON_FILE))
    if not state.is_by_parameter:
        entries.warnings.append(_BY_RANGES)
    # Objects: states of layers in Transformer Engine's own form, random states of ranks.
    entries.omitted.extend((*state.others, *stored.values))
    return replace(
        stored,
        kind="megatron",
        tensors=entries.tensors,
        values=entries.values,
        paths=entries.paths,
        readers=entries.readers,
        omitted=tuple(entries.omitted),
        warnings=tuple(entries.warnings),
        locate=stacks.located,
    )


def _locate(stored: Source, info: TensorInfo, chunk: StoredChunk) -> StoredChunk:
    """A chunk in its file; those of the common file are found already."""
    assert stored.locate is not None  # of DCP's only the file says how a chunk lies in it
    return chunk if chunk.file == _COMMON_FILE else stored.locate(info, chunk)


def _canonical(name: str) -> str:
    for own, other in _NORMS.items():
        name = name.replace(own, other)
    return name.removeprefix("module.")


@dataclass
class _State:
    """Tensors by what they are.

    Args:
        model: weights by name.
        states: the optimizer's, by kind and by the weight's name.
        others: names of the optimizer's that are by no weight.
    """

    model: dict[str, StoredTensor] = field(default_factory=dict)
    states: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    @classmethod
    def sorted(cls, tensors: Mapping[str, StoredTensor]) -> _State:
        """These tensors."""
        found = cls()
        for name, tensor in tensors.items():
            match = _OPTIMIZER.match(name)
            if match is None:
                found.model[name] = tensor
            elif match[1] is not None:
                found.states.setdefault(match[1], {})[match[2]] = tensor
            else:
                found.others.append(name)
        return found

    @property
    def is_by_parameter(self) -> bool:
        """Whether all of the optimizer's state is by weight, in the weights' shapes."""
        shapes = {name: tensor.info.shape for name, tensor in self.model.items()}
        all_states = (item for found in self.states.values() for item in found.items())
        return not self.others and all(shapes.get(name) == tensor.info.shape for name, tensor in all_states)

    @property
    def masters(self) -> dict[str, StoredTensor]:
        """Weights in fp32, as far as they are there."""
        return self.states.get(_MASTER, {}) if self.is_by_parameter else {}

    @property
    def moments(self) -> dict[str, dict[str, StoredTensor]]:
        """What else the optimizer has of each weight."""
        return {k: v for k, v in self.states.items() if k != _MASTER} if self.is_by_parameter else {}


def _add_common(entries: FoundEntries, common: OpenedFile) -> None:
    """Steps of the optimizer, and everything that is not of tensors."""
    content = dict(common.content)
    optimizer = content.pop("optimizer", {})
    step = next(_steps(optimizer), None)
    moved = dict.fromkeys(
        str(path[2]) for path in entries.paths.values() if path[:2] == ("optimizer", "state")
    )
    if step is not None:
        for name in moved:
            entries.add_step(("optimizer", "state", name, "step"), step, common)
    if moved:
        _add_options(entries, list(_groups(optimizer)), list(moved), common)
    for key, value in content.items():
        if value not in (None, {}, []) and not str(key).startswith("model"):
            entries.add_all((str(key),), value, common)


def _groups(value: Any) -> Iterator[dict[str, Any]]:
    """Options of each group of parameters, of however many optimizers."""
    if not isinstance(value, Mapping):
        return
    for key, inner in value.items():
        if key != "param_groups":
            yield from _groups(inner)
            continue
        for group in inner if isinstance(inner, (list, tuple)) else ():
            if isinstance(group, Mapping):
                yield {str(option): said for option, said in group.items() if option not in _NOT_OPTIONS}


def _add_options(
    entries: FoundEntries, groups: list[dict[str, Any]], names: list[str], common: OpenedFile
) -> None:
    """One group of all parameters where all groups say the same; else they are named, since Megatron does not store
    which parameters a group is for."""
    options = {option: [group.get(option) for group in groups] for group in groups for option in group}
    differ = {option: said for option, said in options.items() if any(other != said[0] for other in said)}
    if differ:
        told = "; ".join(
            f"{option} {' or '.join(dict.fromkeys(f'{value!r:.60}' for value in said))}"
            for option, said in differ.items()
        )
        same = ", ".join(
            f"{option} {said[0]!r:.60}" for option, said in options.items() if option not in differ
        )
        entries.warnings.append(
            f"options of the optimizer are left out: it has {len(groups)} groups, and which a parameter is in is not "
            f"stored; they differ in {told}, and have in common {same or 'nothing'}"
        )
        return
    options = {"params": [names], **options} if groups else {}
    for option, said in options.items():
        entries.add_all(("optimizer", "param_groups", ListIndex(0), option), said[0], common)


def _steps(value: Any) -> Iterator[Any]:
    """Steps anywhere in what is stored of an optimizer, which counts all parameters together."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            is_count = type(inner) in (int, float) or (isinstance(inner, TensorRef) and inner.shape == ())
            if key in ("step", "common_step") and is_count:
                yield inner
            else:
                yield from _steps(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _steps(inner)
