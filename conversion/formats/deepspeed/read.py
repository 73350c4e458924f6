"""Read checkpoints of DeepSpeed's ZeRO-1, 2 and 3, and its universal ones, by range and without DeepSpeed.

The model is what DeepSpeed's ``zero_to_fp32.py`` produces, and more. Trained parameters are their fp32 masters; the
16-bit copies, which are their rounding, are not read. Buffers and frozen parameters keep the saved type. Ties stay.
The optimizer's moments, steps and options are named after the parameters, as torch names them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vescale_fsdp.checkpoint.formats.torch_save.found_entries import FoundEntries, OpenedFile
from vescale_fsdp.checkpoint.formats.torch_save.pickle_reader import TensorRef
from vescale_fsdp.checkpoint.formats.torch_save.read import HeldTensor, differing_files, is_tensor_ref
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.stored_tensor import StoredTensor
from vescale_fsdp.checkpoint.state.nesting import Path, flatten
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.formats.deepspeed.zero_files import ZeroFiles
from vescale_fsdp.conversion.formats.deepspeed.zero_shards import (
    Shapes,
    UniversalFolder,
    ZeroShards,
    runs_of_parameters,
    tensor_of_runs,
)
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, some

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


# What a file that lacks a key, or has another thing there, may raise while it is read.
_DAMAGE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)


def open_deepspeed(store: Storage) -> Source:
    """Open a checkpoint of DeepSpeed's, or the folder around it with a file ``latest``; reads directories and pickles
    of the files. What their pickles name besides tensors and plain values is not imported, and left out.

    Raises:
        ConversionError: for one that is spread over more than data-parallel ranks, or lacks the optimizer's files.
        CorruptCheckpointError: if files are missing, damaged or from different saves.
    """
    files = ZeroFiles.find(store)
    with _reading(f"{store.where}/{files.folder}"):
        models = [ModelFile.read(store, file) for file in files.model]
        reader = _Reader(store, files, models)
        return reader.source()


@contextmanager
def _reading(where: str) -> Iterator[None]:
    try:
        yield
    except (ConversionError, CorruptCheckpointError):
        raise
    except _DAMAGE as error:
        raise CorruptCheckpointError(
            "The files of this checkpoint are not what DeepSpeed writes.",
            expected="states as DeepSpeed's engine saves them",
            got=f"{type(error).__name__}: {error}",
            where=where.rstrip("/"),
            todo="copy the checkpoint again, or make a universal checkpoint with DeepSpeed's ds_to_universal.py",
        ) from error


class _Reader:
    """One checkpoint on its way into a source."""

    def __init__(self, store: Storage, files: ZeroFiles, models: list[ModelFile]) -> None:
        self._store, self._files, self._models = store, files, models
        self._model = models[0]
        self._entries = FoundEntries()
        self._require_one_step()

    def source(self) -> Source:
        """All of it."""
        trained = self._trained()
        self._add_model(trained)
        if trained is not None:
            trained.add_optimizer(self._entries)
        elif self._model.opened.content.get("optimizer") is not None:
            self._entries.add_all(("optimizer",), self._model.opened.content["optimizer"], self._model.opened)
        for path, leaf in self._model.rest.items():
            if path[0] in ("model", "optimizer") or self._model.differs(path, self._models[1:]):
                self._entries.omitted.append(".".join(map(str, path)))
            else:
                self._entries.add_all(path, leaf, self._model.opened)
        found, ranks = self._entries, len(self._files.optim)
        kind = "universal" if self._files.parameters else f"{ranks} ranks" if ranks else "no ZeRO"
        return Source(
            "deepspeed",
            self._store,
            found.tensors,
            found.values,
            found.paths,
            {**self._model.facts, "form": f"ZeRO-3, {kind}" if self._files.is_stage3 else kind},
            readers=found.readers,
            omitted=tuple(found.omitted),
            warnings=tuple(found.warnings),
        )

    def _require_one_step(self) -> None:
        said = [model.opened.content.get("global_steps") for model in self._models]
        for model, step in zip(self._models, said, strict=True):
            if step != said[0]:
                todo = "copy the files of one step"
                raise model.opened.damaged(f"step {said[0]}, as {self._model.opened.file} has", step, todo)

    def _trained(self) -> ZeroShards | UniversalFolder | None:
        """Who knows the parameters that are trained."""
        shapes = self._model.shapes
        if shapes is not None and self._files.parameters:
            self._require_all_known(shapes)
            return UniversalFolder(self._store, self._files, shapes)
        if shapes is not None and self._files.optim:
            return ZeroShards(self._store, self._files, shapes)
        if shapes is None and not self._files.optim and not self._files.parameters:
            return None
        sixteen_bits = (
            f"; {self._model.opened.file} alone is a source too, of the weights that it computes with"
        )
        raise ConversionError(
            "The masters of this checkpoint are not there."
            if shapes is not None
            else "This checkpoint of DeepSpeed's does not say which parameters its masters are.",
            expected="files *_model_states.pt with shapes, and *_optim_states.pt of all ranks",
            got="no *_optim_states.pt" if shapes is not None else "no shapes: it was saved without ZeRO",
            where=f"{self._store.where}/{self._files.folder}".rstrip("/"),
            todo=("copy the *_optim_states.pt too" if shapes is not None else "save it with ZeRO-1")
            + ("" if self._files.is_stage3 else sixteen_bits),
        )

    def _require_all_known(self, shapes: Shapes) -> None:
        """Refuse a universal checkpoint of which the one file of the model that is read knows a part: those of other
        stages of a pipeline know more, those of other tensor-parallel ranks have other parts of what is not trained."""
        trained = {name for group in shapes for name in group}
        unknown = sorted(self._files.parameters.keys() - trained - self._model.module.keys())
        buffers = set(self._model.opened.content.get("buffer_names") or ())
        if self._files.is_spread:
            unknown += sorted(self._model.module.keys() - trained - buffers - self._model.shared.keys())
        if unknown:
            raise ConversionError(
                "Not all of this universal checkpoint can be told from its files.",
                expected="parameters that are trained, of one stage of a pipeline",
                got=some(unknown),
                where=f"{self._store.where}/{self._files.folder}".rstrip("/"),
                todo="load it with DeepSpeed on data-parallel ranks alone, and save it again",
            )

    def _add_model(self, trained: ZeroShards | UniversalFolder | None) -> None:
        """Parameters and buffers in the module's order, then what the module does not list."""
        shapes = [name for group in self._model.shapes or () for name in group]
        known = dict.fromkeys([*self._model.module, *shapes, *self._model.frozen, *self._model.shared])
        masters = set(shapes)
        for name in known:
            stored = self._model.shared.get(name, name)
            path: Path = ("model", name)
            if stored in masters and trained is not None:
                self._entries.add_tensor(path, trained.weight(stored, path))
            elif self._files.is_stage3 and stored in self._model.frozen:
                self._entries.add_tensor(path, self._frozen(stored, path))
            elif (leaf := self._model.module.get(stored, self._model.fragments.get(stored))) is not None:
                self._require_whole(stored, leaf)
                self._entries.add_all(path, leaf, self._model.opened)

    def _frozen(self, name: str, path: Path) -> StoredTensor:
        """A parameter that is not trained, of which each rank holds a part."""
        shape = self._model.frozen[name]
        parts = [[model.opened.flat(model.fragments[name])] for model in self._models]
        runs = runs_of_parameters([math.prod(shape)], len(parts), [parts[0][0].numel])[0]
        return tensor_of_runs(path, shape, runs, parts, self._model.opened)

    def _require_whole(self, name: str, leaf: object) -> None:
        """Refuse the empty tensor that ZeRO-3 leaves of a parameter that nothing else knows."""
        if self._files.is_stage3 and isinstance(leaf, TensorRef) and 0 in leaf.shape:
            raise self._model.opened.damaged(
                f"the shape of {name}, which is cut over ranks",
                "none",
                "save again without exclude_frozen_parameters, or with a newer DeepSpeed",
            )
