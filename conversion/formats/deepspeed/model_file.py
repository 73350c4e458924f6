"""What a ``*_model_states.pt`` of DeepSpeed's holds: the module in the type that it computes in, names and shapes of
what ZeRO's flat tensors hold, frozen parameters, ties, and what the user handed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vescale_fsdp.checkpoint.formats.torch_save.found_entries import OpenedFile
from vescale_fsdp.checkpoint.formats.torch_save.held_tensors import HeldTensor, differing_files, is_tensor_ref
from vescale_fsdp.checkpoint.state.nesting import Path, flatten
from vescale_fsdp.checkpoint.storage.base import Storage

# What is read here, or is true of the run that saved alone.
_OWN = {
    *("module", "optimizer", "param_shapes", "buffer_names", "shared_params", "frozen_param_shapes"),
    *("frozen_param_fragments", "ds_config", "ds_version", "dp_world_size", "mp_world_size", "num_experts"),
    *("universal_checkpoint_info", "checkpoint_parallel_dimensions", "ds_autoep_layers", "autoep_layers"),
}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelFile:
    """One such file.

    Args:
        opened: the file.
        module: its state dict: tensors, empty ones where ZeRO-3 has cut them.
        shapes: of trained parameters by group; None without ZeRO.
        frozen: of the others; of ZeRO-2 and 3.
        fragments: a rank's part of each of these, flat.
        shared: names that are tied to another -> that one.
    """

    opened: OpenedFile
    module: Mapping[str, Any]
    shapes: list[dict[str, Shape]] | None
    frozen: Mapping[str, Shape]
    fragments: Mapping[str, Any]
    shared: Mapping[str, str]

    @classmethod
    def read(cls, store: Storage, file: str) -> ModelFile:
        """One of a store.

        Raises:
            CorruptCheckpointError: if it is none of DeepSpeed's.
        """
        opened = OpenedFile.open(store, file)
        content = opened.content
        module, shapes = content.get("module"), content.get("param_shapes")
        if not isinstance(module, Mapping):
            raise opened.damaged("a state dict under module", type(module).__name__)
        if shapes is not None:
            shapes = [dict(group) for group in ([shapes] if isinstance(shapes, Mapping) else shapes)]
        return cls(
            opened,
            module,
            shapes,
            content.get("frozen_param_shapes") or {},
            content.get("frozen_param_fragments") or {},
            content.get("shared_params") or {},
        )

    @property
    def facts(self) -> dict[str, str]:
        """Worth telling people."""
        content = self.opened.content
        return {"deepspeed": str(content.get("ds_version")), "global steps": str(content.get("global_steps"))}

    @cached_property
    def rest(self) -> dict[Path, Any]:
        """Everything that is not DeepSpeed's own: counters, schedulers, what the user handed in."""
        found = {k: v for k, v in self.opened.content.items() if k not in _OWN and v is not None}
        return flatten(found, is_tensor_ref)

    def differs(self, path: Path, others: list[ModelFile]) -> bool:
        """Whether ranks have other values than this one at a path of `rest`."""
        leaf = self.rest[path]
        theirs = [other.rest.get(path) for other in others]
        if not is_tensor_ref(leaf):
            return any(is_tensor_ref(other) or other != leaf for other in theirs)
        held = [HeldTensor(m.opened.file, m.opened.archive, m.rest.get(path)) for m in (self, *others)]
        return not all(map(is_tensor_ref, theirs)) or bool(differing_files(held))
