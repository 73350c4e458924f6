"""What trainers leave beside a checkpoint of the model: optimizers, schedulers, random states, counters.

    optimizer.bin  optimizer.pt  optimizer_1.bin         optimizer, optimizer_1       accelerate, Trainer
    scheduler.bin  scheduler.pt  scaler.pt  sampler.bin  scheduler, scaler, sampler
    random_states_0.pkl  random_states_1.pkl             random_states.0, .1          accelerate, a file per rank
    rng_state.pth  rng_state_0.pth                       rng_state.0                  Trainer, a file per rank
    custom_checkpoint_0.pkl                              custom_checkpoint_0          accelerate: what a user registered
    trainer_state.json                                   trainer_state                Trainer
    meta.pt                                              at the root                  Lightning and Fabric

They join the model's state under these names. A file whose pickle names more than tensors and plain values is left out,
and said to be: the weights can be read without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from vescale_fsdp.checkpoint.formats.torch_save.read import (
    HeldTensor,
    box_reader,
    is_tensor_ref,
    open_state_file,
    stored_tensor,
)
from vescale_fsdp.checkpoint.moves.source import BoxReader, Source, StoredValue, constant
from vescale_fsdp.checkpoint.moves.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.checkpoint.state.nesting import Path, name_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError
from vescale_fsdp.layout.foreign_json import parse_json

_STATE = re.compile(
    r"((?:optimizer|scheduler|sampler|scaler|dl_state_dict|custom_checkpoint)(?:_\d+)?)\.(?:bin|pt|pkl)"
)
_OF_RANK = re.compile(r"(rng_state|random_states)(?:_(\d+))?\.(?:pth|pkl)")
_LIGHTNING = "meta.pt"
_TRAINER_STATE = "trainer_state.json"
_Locate = Callable[[TensorInfo, StoredChunk], StoredChunk]
_CLASSES = ("training_args.bin",)  # pickles of a class of arguments, which say nothing of the state


def with_side_files(source: Source, *, trust_pickle: bool = False) -> Source:
    """The source with what lies beside its weights; itself, if that is nothing. Reads pickles and JSON.

    Raises:
        CorruptCheckpointError: if a file is damaged, or has what the checkpoint has too.
    """
    found = _Beside(source.store, trust_pickle)
    for file in source.store.list_files():
        container = _container(file)
        if container is not None:
            found.add(file, container)
        elif file in _CLASSES:
            found.omitted.append(file)
    if not (found.tensors or found.values or found.omitted):
        return source
    if doubles := {**source.tensors, **source.values}.keys() & {**found.tensors, **found.values}.keys():
        raise CorruptCheckpointError(
            "A file beside the checkpoint has an entry that the checkpoint has too.",
            expected="other names",
            got=min(doubles),
            where=source.store.where,
            todo="take away the file that is not of this checkpoint",
        )
    return replace(
        source,
        tensors={**source.tensors, **found.tensors},
        values={**source.values, **found.values},
        paths={**source.paths, **found.paths},
        readers={**source.readers, **found.readers},
        facts={**source.facts, "beside the model": ", ".join(found.files) or "nothing that can be read"},
        omitted=(*source.omitted, *found.omitted),
        warnings=(*source.warnings, *found.warnings),
        locate=source.locate and partial(_located, source.locate, frozenset(found.files)),
    )


def _container(file: str) -> Path | None:
    """Where the state in a file belongs; None for files of other kinds."""
    if match := _STATE.fullmatch(file):
        return (match[1],)
    if match := _OF_RANK.fullmatch(file):
        return (match[1], match[2] or "0")
    return {_LIGHTNING: (), _TRAINER_STATE: ("trainer_state",)}.get(file)


def _located(
    locate: _Locate, whole_files: frozenset[str], info: TensorInfo, chunk: StoredChunk
) -> StoredChunk:
    """A chunk in a file beside is located already; those of the checkpoint itself are found as its format says."""
    return chunk if chunk.file in whole_files else locate(info, chunk)


class _Beside:
    """The state in the files beside a model."""

    def __init__(self, store: Storage, trust_pickle: bool) -> None:
        self._store, self._trust = store, trust_pickle
        self.files: list[str] = []
        self.tensors: dict[str, StoredTensor] = {}
        self.values: dict[str, StoredValue] = {}
        self.paths: dict[str, Path] = {}
        self.readers: dict[str, BoxReader] = {}
        self.omitted: list[str] = []
        self.warnings: list[str] = []

    def add(self, file: str, container: Path) -> None:
        """Take a file's state, or say why it is left out."""
        try:
            if file == _TRAINER_STATE:
                self._add_json(file, container)
            else:
                self._add_state(file, container)
        except ConversionError as error:
            self.omitted.append(file)
            self.warnings.append(f"{file} is left out. {' '.join(str(error).splitlines()[:3])}")
        else:
            self.files.append(file)

    def _add_state(self, file: str, container: Path) -> None:
        state = open_state_file(self._store, file, trust=self._trust)
        for path, leaf in state.leaves.items():
            whole = (*container, *path)
            name = name_of(whole)
            self.paths[name] = whole
            if not is_tensor_ref(leaf):
                self.values[name] = constant(leaf)
                continue
            self.tensors[name] = stored_tensor(name, [HeldTensor(file, state.archive, leaf)])
            if (reader := box_reader(leaf)) is not None:
                self.readers[name] = reader

    def _add_json(self, file: str, container: Path) -> None:
        try:
            state = dict(parse_json(self._store.read(file)))
        except (TypeError, ValueError) as error:
            raise ConversionError(
                "Its text cannot be read.", expected="a JSON object", got=error, todo="copy the file again"
            ) from error
        for key, value in state.items():
            path = (*container, str(key))
            self.paths[name_of(path)] = path
            self.values[name_of(path)] = constant(value)
