"""Read DeepSpeed's ZeRO-1, 2 and 3 checkpoints and universal checkpoints, by range and without DeepSpeed.

The model includes everything that DeepSpeed's ``zero_to_fp32.py`` writes. Trained parameters are read from their fp32
masters; the 16-bit copies, which are rounded masters, are not read. Buffers and frozen parameters keep their dtype, and
tied weights stay tied. The optimizer's moments, steps and options are named by parameter, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vescale_fsdp.checkpoint.formats.entries import Entries
from vescale_fsdp.checkpoint.formats.torch_save.pickle_reader import TensorRef
from vescale_fsdp.checkpoint.formats.torch_save.read import (
    TensorPart,
    TorchFile,
    differing_files,
    is_tensor_ref,
)
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.stored_tensor import StoredTensor
from vescale_fsdp.checkpoint.state.nesting import Path, flatten
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.formats.deepspeed_zero import (
    Shapes,
    UniversalFolder,
    ZeroFiles,
    ZeroShards,
    runs_of_parameters,
    tensor_of_runs,
)
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, some

# Keys of a model file that this reader uses, or that describe only the run that saved the file.
_OWN = {
    *("module", "optimizer", "param_shapes", "buffer_names", "shared_params", "frozen_param_shapes"),
    *("frozen_param_fragments", "ds_config", "ds_version", "dp_world_size", "mp_world_size", "num_experts"),
    *("universal_checkpoint_info", "checkpoint_parallel_dimensions", "ds_autoep_layers", "autoep_layers"),
}
# Errors from files in which a key is missing, or a value has another type than DeepSpeed writes.
_DAMAGE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)


def open_deepspeed(store: Storage) -> Source:
    """Open a DeepSpeed checkpoint, or the folder around it with a file ``latest``.

    Reads the directories and pickles of the files. Pickled objects other than tensors and plain values are omitted, and
    never imported.

    Raises:
        ConversionError: if it uses more than data parallelism, or the optimizer's files are missing.
        CorruptCheckpointError: if files are missing, damaged or from different saves.
    """
    files = ZeroFiles.find(store)
    try:
        return _Reader(store, files, [ModelFile.read(store, file) for file in files.model]).source()
    except _DAMAGE as error:
        raise CorruptCheckpointError(
            "The files of this checkpoint are not what DeepSpeed writes.",
            expected="states as DeepSpeed's engine saves them",
            got=f"{type(error).__name__}: {error}",
            where=files.where,
            todo="copy the checkpoint again, or make a universal checkpoint with DeepSpeed's ds_to_universal.py",
        ) from error


@dataclass(frozen=True)
class ModelFile:
    """One file ``*_model_states.pt``.

    Args:
        opened: the file.
        module: the state dict; a parameter that ZeRO-3 has sharded is an empty tensor.
        shapes: shapes of trained parameters, by group; None without ZeRO.
        frozen: shapes of parameters that are not trained (ZeRO-2 and 3).
        fragments: a rank's part of each frozen parameter, flat.
        shared: tied name -> the name of the stored weight.
    """

    opened: TorchFile
    module: Mapping[str, Any]
    shapes: Shapes | None
    frozen: Mapping[str, tuple[int, ...]]
    fragments: Mapping[str, Any]
    shared: Mapping[str, str]

    @classmethod
    def read(cls, store: Storage, file: str) -> ModelFile:
        """Read one file.

        Raises:
            CorruptCheckpointError: if it is not a DeepSpeed file.
        """
        # Stand-ins, because pickles may name classes of DeepSpeed and of users, which are never imported.
        opened = TorchFile.open(store, file, stand_ins=True)
        content = opened.content
        module, shapes = content.get("module"), content.get("param_shapes")
        if not isinstance(module, Mapping):
            raise opened.damaged("a state dict under module", type(module).__name__)
        if shapes is not None:
            # A single mapping is one group.
            shapes = [dict(group) for group in ([shapes] if isinstance(shapes, Mapping) else shapes)]
        return cls(
            opened,
            module,
            shapes,
            content.get("frozen_param_shapes") or {},
            content.get("frozen_param_fragments") or {},
            content.get("shared_params") or {},
        )

    @cached_property
    def rest(self) -> dict[Path, Any]:
        """Entries other than DeepSpeed's own, by path: counters, schedulers, the user's state."""
        rest = {k: v for k, v in self.opened.content.items() if k not in _OWN and v is not None}
        return flatten(rest, is_tensor_ref)

    def differs(self, path: Path, others: list[ModelFile]) -> bool:
        """Whether the value at a path of `rest` differs between this file and the files of other ranks."""
        leaf = self.rest[path]
        theirs = [other.rest.get(path) for other in others]
        if not is_tensor_ref(leaf):
            return any(is_tensor_ref(other) or other != leaf for other in theirs)
        parts = [TensorPart(model.opened, model.rest.get(path)) for model in (self, *others)]
        return not all(map(is_tensor_ref, theirs)) or bool(differing_files(parts))


class _Reader:
    """Builds the source of one checkpoint."""

    def __init__(self, store: Storage, files: ZeroFiles, models: list[ModelFile]) -> None:
        self._store, self._files, self._models = store, files, models
        self._model = models[0]
        self._entries = Entries()

    def source(self) -> Source:
        """The source: the model, then the optimizer, then everything else."""
        model, entries = self._model, self._entries
        content = model.opened.content
        step = content.get("global_steps")
        for other in self._models:
            if (other_step := other.opened.content.get("global_steps")) != step:
                expected = f"step {step}, as {model.opened.file} has"
                raise other.opened.damaged(expected, other_step, "copy the files of one step")
        trained = self._trained()
        self._add_model(trained)
        if trained is not None:
            trained.add_optimizer(entries)
        elif content.get("optimizer") is not None:
            model.opened.add_all(entries, ("optimizer",), content["optimizer"])
        for path, leaf in model.rest.items():
            # These names are taken, and a value that differs between ranks has no single value.
            if path[0] in ("model", "optimizer") or model.differs(path, self._models[1:]):
                entries.omitted.append(".".join(map(str, path)))
            else:
                model.opened.add_all(entries, path, leaf)
        ranks = len(self._files.optim)
        form = "universal" if self._files.parameters else f"{ranks} ranks" if ranks else "no ZeRO"
        facts = {
            "deepspeed": str(content.get("ds_version")),
            "global steps": str(step),
            "form": f"ZeRO-3, {form}" if self._files.is_stage3 else form,
        }
        return entries.source("deepspeed", self._store, facts)

    def _trained(self) -> ZeroShards | UniversalFolder | None:
        """The reader of the trained parameters; None for a checkpoint without ZeRO, whose model file stores them."""
        files, shapes = self._files, self._model.shapes
        if shapes is not None and files.parameters:
            self._require_all_known(shapes)
            return UniversalFolder(self._store, files, shapes)
        if shapes is not None and files.optim:
            return ZeroShards(self._store, files, shapes)
        if shapes is None and not files.optim and not files.parameters:
            return None
        hint = (
            "" if files.is_stage3 else f"; {self._model.opened.file} alone is a source of the 16-bit weights"
        )
        if shapes is not None:
            problem = "The fp32 masters of this checkpoint are missing."
            got, todo = "no *_optim_states.pt", "copy the *_optim_states.pt too"
        else:
            problem = "This DeepSpeed checkpoint does not name the parameters of its masters."
            got, todo = "no shapes: it was saved without ZeRO", "save it with ZeRO-1"
        raise ConversionError(
            problem,
            expected="files *_model_states.pt with shapes, and *_optim_states.pt of all ranks",
            got=got,
            where=files.where,
            todo=todo + hint,
        )

    def _require_all_known(self, shapes: Shapes) -> None:
        """Refuse a universal checkpoint whose first model file describes only a part of the model.

        Only that file is read. The files of other pipeline stages would add parameters, and the files of other
        tensor-parallel ranks would add parts of buffers.
        """
        trained = {name for group in shapes for name in group}
        unknown = sorted(self._files.parameters.keys() - trained - self._model.module.keys())
        buffers = set(self._model.opened.content.get("buffer_names") or ())
        if self._files.is_spread:
            unknown += sorted(self._model.module.keys() - trained - buffers - self._model.shared.keys())
        if unknown:
            raise ConversionError(
                "The files of this universal checkpoint do not describe all of its parameters.",
                expected="only parameters that are trained, in one pipeline stage",
                got=some(unknown),
                where=self._files.where,
                todo="load it with DeepSpeed on data-parallel ranks alone, and save it again",
            )

    def _add_model(self, trained: ZeroShards | UniversalFolder | None) -> None:
        """Add parameters and buffers in the module's order, then parameters that the module does not list."""
        model, entries = self._model, self._entries
        masters = dict.fromkeys(name for group in model.shapes or () for name in group)
        for name in dict.fromkeys([*model.module, *masters, *model.frozen, *model.shared]):
            stored = model.shared.get(name, name)
            path: Path = ("model", name)
            if stored in masters and trained is not None:
                entries.add_tensor(path, trained.weight(stored, path))
            elif self._files.is_stage3 and stored in model.frozen:
                entries.add_tensor(path, self._frozen(stored, path))
            elif (leaf := model.module.get(stored, model.fragments.get(stored))) is not None:
                # An empty tensor is a parameter that ZeRO-3 has sharded; no key of the file has its whole shape.
                if self._files.is_stage3 and isinstance(leaf, TensorRef) and 0 in leaf.shape:
                    raise model.opened.damaged(
                        f"the shape of {stored}, which is cut over ranks",
                        "none",
                        "save again without exclude_frozen_parameters, or with a newer DeepSpeed",
                    )
                model.opened.add_all(entries, path, leaf)

    def _frozen(self, name: str, path: Path) -> StoredTensor:
        """A parameter that is not trained, of which each rank's model file has a part."""
        shape = self._model.frozen[name]
        parts = [[model.opened.flat(model.fragments[name])] for model in self._models]
        # The runs of one parameter, whose parts have equal sizes.
        runs = runs_of_parameters([math.prod(shape)], len(parts), [parts[0][0].numel])[0]
        return tensor_of_runs(path, shape, runs, parts, self._model.opened)
