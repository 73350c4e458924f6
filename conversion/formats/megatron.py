"""Read Megatron's ``torch_dist`` checkpoints: torch.distributed.checkpoint with Megatron's own names.

    .metadata, __0_0.distcp ..    decoder.layers.mlp.linear_fc1.weight                        [layers, ..]
                                  optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight
                                  decoder.layers.mlp.linear_fc1._extra_state/shard_0_4         pickled objects
    common.pt                     arguments, iteration, groups of the optimizer

Megatron stores equal layers stacked in one tensor. This reader returns each layer as a separate tensor, as in memory. A
norm before a projection gets the name that it has in Transformer Engine, which Megatron usually stores, too. If the
checkpoint contains fp32 masters, they become the model's weights, because the 16-bit weights are rounded masters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from vescale_fsdp.checkpoint.state.nesting import ListIndex, Path, name_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.engine.entries import Entries
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.conversion.formats.dcp.source import open_dcp
from vescale_fsdp.conversion.formats.torch_save.pickle_reader import TensorRef
from vescale_fsdp.conversion.formats.torch_save.read import TorchFile
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.geometry import Box

_STACKED = re.compile(r"(.*\blayers)\.(?!\d)(.+)")  # (?!\d), because `layers.3.` is one layer, not a stack
_COMMON_FILE = "common.pt"
# The prefix `chained_0.` is that of one of several optimizers.
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state\.(\w+)\.(.+))?")
_MASTER = "fp32_param"
_NORMS = {  # names of Megatron's local layers -> names of Transformer Engine's
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
_BY_RANGES = (
    "the optimizer is dropped: its state is stored by ranges of buffers, not by parameter; Megatron stores it by "
    "parameter with --dist-ckpt-optim-fully-reshardable"
)
# Keys of parameter groups that are not copied as options: ``params`` is empty, and the step is added to the state of
# each parameter instead.
_NOT_OPTIONS = ("params", "step")


@dataclass
class LayerStacks:
    """Splits stacks into layers, and locates the items of a layer in a file when the layer is read.

    Args:
        locate: locates the items of a stack's chunk in its file.
    """

    locate: Callable[[TensorInfo, StoredChunk], StoredChunk]
    _origins: dict[Extent, tuple[TensorInfo, StoredChunk, int]] = field(default_factory=dict)

    def add(self, entries: Entries, path_of: Callable[[str], Path], name: str, tensor: StoredTensor) -> None:
        """Add each layer of a stack, or the tensor itself if it is not a stack.

        Args:
            entries: the entries to add to.
            path_of: returns the path for the name of a layer or tensor.
            name: the name in the checkpoint.
            tensor: the tensor in the checkpoint.
        """
        stack, match = tensor.info, _STACKED.fullmatch(name)
        if match is None or not stack.shape:  # a 0-d tensor cannot be a stack
            path = path_of(name)
            info = TensorInfo(name_of(path), stack.shape, stack.dtype)
            entries.add_tensor(path, StoredTensor(info, tensor.chunks))
            return
        for layer in range(stack.shape[0]):
            path = path_of(f"{match[1]}.{layer}.{match[2]}")
            info = TensorInfo(name_of(path), stack.shape[1:], stack.dtype)
            chunks = (self._slice(stack, chunk, layer) for chunk in tensor.chunks)
            stored = StoredTensor(info, tuple(chunk for chunk in chunks if chunk is not None))
            entries.add_tensor(path, stored)

    def _slice(self, stack: TensorInfo, chunk: StoredChunk, layer: int) -> StoredChunk | None:
        """Return the part of a stack's chunk that belongs to a layer, or None if there is none."""
        index = layer - chunk.box.offsets[0]
        if not 0 <= index < chunk.box.sizes[0]:
            return None
        # Until a chunk is located, `Source` identifies it by its file and offset. So each layer needs a different
        # offset, which `located` replaces by the true one.
        key = chunk.extent._replace(offset=chunk.extent.offset + index)
        self._origins[key] = (stack, chunk, index)
        return replace(chunk, box=Box(chunk.box.offsets[1:], chunk.box.sizes[1:]), extent=key)

    def located(self, info: TensorInfo, chunk: StoredChunk) -> StoredChunk:
        """Locate the items of a chunk in its file, for `Source.locate`."""
        origin = self._origins.get(chunk.extent)
        if origin is None:  # the chunk of a tensor that is not a stack
            return self.locate(info, chunk)
        stack, whole, index = origin
        located = self.locate(stack, whole)
        first, *steps = located.steps
        return located.with_items(chunk.box, index * first, info.dtype.itemsize, tuple(steps))


def open_megatron(store: Storage, *, trust_pickle: bool = False) -> Source:
    """Open a ``torch_dist`` checkpoint. Reads its metadata and ``common.pt``.

    Raises:
        ConversionError: if the checkpoint has no tensors of a model.
        CorruptCheckpointError: if the checkpoint is damaged.
    """
    # Stand-ins replace classes that are not torch's: Megatron pickles the plans of the save in the metadata.
    stored = open_dcp(store, trust_pickle=trust_pickle, stand_ins=True)
    model: dict[str, StoredTensor] = {}
    states: dict[str, dict[str, StoredTensor]] = {}  # kind of state -> name of the weight -> tensor
    others: list[str] = []  # names of optimizer tensors that do not belong to a single weight
    for name, tensor in stored.tensors.items():
        match = _OPTIMIZER.match(name)  # not fullmatch: an optimizer's other names match without groups
        if match is None:
            model[name] = tensor
        elif match[1] is not None:
            states.setdefault(match[1], {})[match[2]] = tensor
        else:
            others.append(name)
    if not model:
        raise ConversionError(
            "No model weights were found in the source.",
            expected="tensors such as decoder.layers.mlp.linear_fc1.weight",
            got=f"{len(stored.tensors)} tensors, all of an optimizer",
            where=store.where,
            todo="pass the folder of one iteration, saved with --ckpt-format torch_dist",
        )
    stacks, entries = LayerStacks(partial(_locate, stored)), Entries()
    # Each tensor of the state has the name and shape of a weight, unless state is stored by ranges of buffers.
    is_by_parameter = not others and all(
        name in model and model[name].info.shape == tensor.info.shape
        for tensors in states.values()
        for name, tensor in tensors.items()
    )
    if not is_by_parameter:
        states = {}
        entries.warnings.append(_BY_RANGES)
    masters = states.pop(_MASTER, {})  # the masters become the model's weights
    for name, tensor in model.items():
        stacks.add(entries, lambda layer: ("model", _canonical(layer)), name, masters.get(name, tensor))
    for kind, tensors in states.items():
        path_of = partial(_state_path, kind)
        for name, tensor in tensors.items():
            stacks.add(entries, path_of, name, tensor)
    _add_common(entries, TorchFile.open(store, _COMMON_FILE, stand_ins=True))
    # `stored.values` are pickled objects: extra state of Transformer Engine's layers, and random states of ranks.
    entries.unsupported += [*others, *stored.values]
    return entries.source("megatron", store, stored.facts, locate=stacks.located)


def _state_path(kind: str, name: str) -> Path:
    """Return the path of a weight's optimizer state of one kind."""
    return ("optimizer", "state", _canonical(name), kind)


def _locate(stored: Source, info: TensorInfo, chunk: StoredChunk) -> StoredChunk:
    """Locate the items of a chunk in its file. Chunks of ``common.pt`` are already located."""
    # Every DCP source has `locate`, because DCP's metadata does not contain the addresses of items.
    assert stored.locate is not None
    return chunk if chunk.extent.file == _COMMON_FILE else stored.locate(info, chunk)


def _canonical(name: str) -> str:
    """Return a weight's name with Transformer Engine's names of norms, and without a wrapper's prefix."""
    for local_name, engine_name in _NORMS.items():
        name = name.replace(local_name, engine_name)
    return name.removeprefix("module.")


def _add_common(entries: Entries, common: TorchFile) -> None:
    """Add the content of ``common.pt``: the optimizer's steps and options, and all other entries."""
    content = dict(common.content)
    optimizer = content.pop("optimizer", {})
    step = next(_steps(optimizer), None)  # the first count: Megatron has one for all parameters
    names = list(
        dict.fromkeys(str(path[2]) for path in entries.paths.values() if path[:2] == ("optimizer", "state"))
    )
    if step is not None:
        for name in names:
            common.add_step(entries, ("optimizer", "state", name, "step"), step)
    if names:
        _add_options(entries, list(_groups(optimizer)), names, common)
    for key, value in content.items():
        if value not in (None, {}, []) and not str(key).startswith("model"):
            common.add_all(entries, (str(key),), value)


def _groups(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the options of each parameter group, also in nested optimizers."""
    if not isinstance(value, Mapping):
        return
    for key, inner in value.items():
        if key != "param_groups":
            yield from _groups(inner)
            continue
        for group in inner if isinstance(inner, (list, tuple)) else ():
            if isinstance(group, Mapping):
                yield {str(option): chosen for option, chosen in group.items() if option not in _NOT_OPTIONS}


def _add_options(entries: Entries, groups: list[dict[str, Any]], names: list[str], common: TorchFile) -> None:
    """Add one parameter group with all parameters if all groups have the same options; otherwise add a warning.

    Megatron does not store which parameters a group has.
    """
    options = {option: [group.get(option) for group in groups] for group in groups for option in group}
    differing = {
        option: chosen for option, chosen in options.items() if any(other != chosen[0] for other in chosen)
    }
    if differing:
        differences = "; ".join(
            f"{option} {' or '.join(dict.fromkeys(f'{value!r:.60}' for value in chosen))}"
            for option, chosen in differing.items()
        )
        common_options = ", ".join(
            f"{option} {chosen[0]!r:.60}" for option, chosen in options.items() if option not in differing
        )
        entries.warnings.append(
            f"options of the optimizer are dropped: it has {len(groups)} groups, and the checkpoint does not store "
            f"which parameters a group has; the groups differ in {differences}, and have in common "
            f"{common_options or 'nothing'}"
        )
        return
    options = {"params": [names], **options} if groups else {}
    for option, chosen in options.items():
        common.add_all(entries, ("optimizer", "param_groups", ListIndex(0), option), chosen[0])


def _steps(value: Any) -> Iterator[Any]:
    """Yield all step counts in an optimizer's state, however nested."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            # `type` instead of isinstance, because bool is a subclass of int.
            is_count = type(inner) in (int, float) or (isinstance(inner, TensorRef) and inner.shape == ())
            if key in ("step", "common_step") and is_count:
                yield inner
            else:
                yield from _steps(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _steps(inner)
