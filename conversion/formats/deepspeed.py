"""Read DeepSpeed's ZeRO-1, 2 and 3 checkpoints and universal checkpoints, without DeepSpeed.

The model includes everything that DeepSpeed's ``zero_to_fp32.py`` writes. Trained parameters are read from their fp32
masters instead of the 16-bit copies, which are rounded masters. Buffers and frozen parameters keep their dtype, and
tied weights stay tied. The optimizer's moments, steps and options are named by parameter, as in torch. Only the ranges
of items that a conversion needs are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from vescale_fsdp.checkpoint.state.nesting import Path, flatten
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.engine.entries import Entries
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.stored_tensor import StoredTensor
from vescale_fsdp.conversion.formats.deepspeed_zero import (
    RankShards,
    Shapes,
    UniversalFolder,
    ZeroFiles,
    ZeroShards,
    runs_of_parameters,
    tensor_of_runs,
)
from vescale_fsdp.conversion.formats.torch_save.pickle_reader import TensorRef
from vescale_fsdp.conversion.formats.torch_save.read import (
    TensorPart,
    TorchFile,
    differing_files,
    is_tensor_ref,
)
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, DamagedFiles, some

# Keys of a model file that are not copied: this reader uses them, or they describe only the run that saved the file.
_OWN = {
    *("module", "optimizer", "param_shapes", "buffer_names", "shared_params", "frozen_param_shapes"),
    *("frozen_param_fragments", "ds_config", "ds_version", "dp_world_size", "mp_world_size", "num_experts"),
    *("universal_checkpoint_info", "checkpoint_parallel_dimensions", "ds_autoep_layers", "autoep_layers"),
}
# Python's errors for a file in which a key is missing, or a value has another type than DeepSpeed writes.
_DAMAGE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)


def open_deepspeed(store: Storage) -> Source:
    """Open a DeepSpeed checkpoint, or the folder around several with a file ``latest``.

    Reads the zip directory and the pickle of each file. Pickled objects other than tensors and plain values are
    unsupported, and their classes are never imported.

    Raises:
        ConversionError: if the checkpoint uses more than data parallelism, or the optimizer's files are missing.
        CorruptCheckpointError: if files are missing, damaged or from different saves.
    """
    files, damaged = ZeroFiles.find(store), DamagedFiles()
    try:
        models = damaged.read(partial(ModelFile.read, store), files.model)
        ranks = damaged.read(partial(RankShards.read, store), files.optim)
        damaged.raise_any()
        return _Reader(store, files, models, ranks).source()
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
        shapes: shapes of the trained parameters of each group; None without ZeRO.
        frozen: shapes of frozen parameters, which are not trained (ZeRO-2 and 3).
        fragments: this rank's part of each frozen parameter, flat.
        shared: for each tied name, the name under which the weight is stored.
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
            CorruptCheckpointError: if the file has no state dict under ``module``.
        """
        # Pickles may name classes of DeepSpeed and of users. Stand-ins replace them, so that none is imported.
        opened = TorchFile.open(store, file, stand_ins=True)
        content = opened.content
        module, shapes = content.get("module"), content.get("param_shapes")
        if not isinstance(module, Mapping):
            raise opened.damaged("a state dict under module", type(module).__name__)
        if shapes is not None:
            # DeepSpeed may store a single group as a mapping instead of a list.
            shapes = [dict(group) for group in ([shapes] if isinstance(shapes, Mapping) else shapes)]
        # `or {}`, because DeepSpeed stores None for an entry that the run does not use.
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
        """Entries that are not in `_OWN`, by path: counters, schedulers, the user's state."""
        # DeepSpeed stores None for what the run does not use, such as a scheduler.
        rest = {k: v for k, v in self.opened.content.items() if k not in _OWN and v is not None}
        return flatten(rest, is_tensor_ref)

    def differs(self, path: Path, others: list[ModelFile]) -> bool:
        """Return whether the value at a path of `rest` differs between this file and other ranks' files."""
        leaf = self.rest[path]
        theirs = [other.rest.get(path) for other in others]
        if not is_tensor_ref(leaf):
            return any(is_tensor_ref(other) or other != leaf for other in theirs)
        parts = [TensorPart(model.opened, model.rest.get(path)) for model in (self, *others)]
        return not all(map(is_tensor_ref, theirs)) or bool(differing_files(parts))


class _Reader:
    """Builds the source of one checkpoint."""

    def __init__(
        self, store: Storage, files: ZeroFiles, models: list[ModelFile], ranks: list[RankShards]
    ) -> None:
        self._store, self._files, self._models, self._ranks = store, files, models, ranks
        self._model = models[0]
        self._damaged = DamagedFiles()
        self._entries = Entries()

    def source(self) -> Source:
        """Return the source: the model, then the optimizer, then all other entries."""
        model, entries = self._model, self._entries
        content = model.opened.content
        step = content.get("global_steps")
        for other in self._models:
            if (other_step := other.opened.content.get("global_steps")) != step:
                expected = f"step {step}, as {model.opened.name} has"
                raise other.opened.damaged(expected, other_step, "copy the files of one step")
        trained = self._trained()
        self._add_model(trained)
        if trained is not None:
            with self._damaged.noted():
                trained.add_optimizer(entries)
        elif content.get("optimizer") is not None:  # without ZeRO, the model file contains the optimizer
            model.opened.add_all(entries, ("optimizer",), content["optimizer"])
        self._damaged.raise_any()
        for path, leaf in model.rest.items():
            # An entry is unsupported if it has the name of the model or the optimizer, which are added above, or if its
            # value differs between ranks.
            if path[0] in ("model", "optimizer") or model.differs(path, self._models[1:]):
                entries.unsupported.append(".".join(map(str, path)))
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
        """Return the reader of the trained parameters; None without ZeRO, because the model file stores them then.

        Raises:
            ConversionError: if the fp32 masters, or the names of their parameters, are missing.
        """
        files, shapes = self._files, self._model.shapes
        if shapes is not None and files.parameters:
            self._require_all_known(shapes)
            return UniversalFolder(self._store, files, shapes)
        if shapes is not None and files.optim:
            return ZeroShards(self._store, files, self._ranks, shapes)
        if shapes is None and not files.optim and not files.parameters:
            return None
        hint = (
            "" if files.is_stage3 else f"; {self._model.opened.name} alone is a source of the 16-bit weights"
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
        """Raise for a universal checkpoint whose first model file describes only a part of the model.

        This reader uses only the first model file. Files of other pipeline stages would add parameters, and files of
        other tensor-parallel ranks would add parts of buffers.
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
        """Add parameters and buffers in the order of the state dict, then parameters that it does not list."""
        model, entries = self._model, self._entries
        masters = dict.fromkeys(name for group in model.shapes or () for name in group)
        for name in dict.fromkeys([*model.module, *masters, *model.frozen, *model.shared]):
            stored = model.shared.get(name, name)
            path: Path = ("model", name)
            if stored in masters and trained is not None:
                with self._damaged.noted():
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
        """Return a frozen parameter, of which each rank's model file contains a part."""
        shape = self._model.frozen[name]
        parts = [[model.opened.flat(model.fragments[name])] for model in self._models]
        # ZeRO-3 cuts a frozen parameter like a row with a single parameter, into parts of equal size.
        runs = runs_of_parameters([math.prod(shape)], len(parts), [parts[0][0].info.numel])[0]
        return tensor_of_runs(path, shape, runs, parts, self._model.opened)
