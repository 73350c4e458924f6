"""Files that trainers save next to a model's checkpoint: optimizers, schedulers, random states, counters.

    optimizer.bin  optimizer.pt  optimizer_1.bin         optimizer, optimizer_1       accelerate, Trainer
    scheduler.bin  scheduler.pt  scaler.pt  sampler.bin  scheduler, scaler, sampler
    random_states_0.pkl  random_states_1.pkl             random_states.0, .1          accelerate, a file per rank
    rng_state.pth  rng_state_0.pth                       rng_state.0                  Trainer, a file per rank
    custom_checkpoint_0.pkl                              custom_checkpoint_0          accelerate: objects of the user
    trainer_state.json                                   trainer_state                Trainer
    meta.pt                                              at the root                  Lightning and Fabric

The state in these files is added to the checkpoint's state under the names in the middle column. A file whose pickle
contains objects other than tensors and plain values is dropped with a warning, because the weights can be read without
it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from vescale_fsdp.checkpoint.state.nesting import Path
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.engine.entries import Entries
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.stored_tensor import StoredChunk, TensorInfo
from vescale_fsdp.conversion.formats.torch_save.read import TorchFile
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, DamagedFiles
from vescale_fsdp.layout.foreign_json import parse_json

_STATE = re.compile(
    r"((?:optimizer|scheduler|sampler|scaler|dl_state_dict|custom_checkpoint)(?:_\d+)?)\.(?:bin|pt|pkl)"
)
_OF_RANK = re.compile(r"(rng_state|random_states)(?:_(\d+))?\.(?:pth|pkl)")
_LIGHTNING = "meta.pt"  # its state has no common name: each entry is added at the root
_TRAINER_STATE = "trainer_state.json"
_Locate = Callable[[TensorInfo, StoredChunk], StoredChunk]
_UNSUPPORTED = ("training_args.bin",)  # pickled arguments of the training script, not state


def with_side_files(source: Source, *, trust_pickle: bool = False) -> Source:
    """Return a source with the state in the trainer's files added. Reads the pickles and JSON of these files.

    Raises:
        CorruptCheckpointError: if a file is damaged, or contains an entry that the checkpoint also contains.
    """
    entries, read_files, damaged = Entries(), list[str](), DamagedFiles()
    for file in source.store.list_files():
        container = _container(file)
        if container is not None:
            try:
                with damaged.noted():
                    entries.update(_entries_of(source.store, file, container, trust_pickle))
                    read_files.append(file)
            except ConversionError as error:
                entries.unsupported.append(file)
                # The first 3 lines of an error are the problem, what was expected and what was found.
                entries.warnings.append(f"{file} is dropped. {' '.join(str(error).splitlines()[:3])}")
        elif file in _UNSUPPORTED:
            entries.unsupported.append(file)
    damaged.raise_any()
    if not (entries.tensors or entries.values or entries.unsupported):
        return source
    if doubles := {**source.tensors, **source.values}.keys() & {**entries.tensors, **entries.values}.keys():
        raise CorruptCheckpointError(
            "A file next to the checkpoint has an entry that the checkpoint also has.",
            expected="other names",
            got=min(doubles),
            where=source.store.where,
            todo="remove the file that does not belong to this checkpoint",
        )
    return replace(
        source,
        tensors={**source.tensors, **entries.tensors},
        values={**source.values, **entries.values},
        paths={**source.paths, **entries.paths},
        readers={**source.readers, **entries.readers},
        facts={**source.facts, "next to the model": ", ".join(read_files) or "nothing that can be read"},
        unsupported=(*source.unsupported, *entries.unsupported),
        warnings=(*source.warnings, *entries.warnings),
        # If `locate` is None, all chunks of the source are located already, and it stays None.
        locate=source.locate and partial(_located, source.locate, frozenset(read_files)),
    )


def _container(file: str) -> Path | None:
    """Return the path under which the state in a file is added, or None if the file has no state."""
    if match := _STATE.fullmatch(file):
        return (match[1],)
    if match := _OF_RANK.fullmatch(file):
        return (match[1], match[2] or "0")  # one process saves a file without a rank
    return {_LIGHTNING: (), _TRAINER_STATE: ("trainer_state",)}.get(file)


def _located(
    locate: _Locate, side_files: frozenset[str], info: TensorInfo, chunk: StoredChunk
) -> StoredChunk:
    """Locate the items of a chunk in its file. Chunks of the trainer's files are already located."""
    return chunk if chunk.extent.file in side_files else locate(info, chunk)


def _entries_of(store: Storage, file: str, container: Path, trust: bool) -> Entries:
    """Return the state in a file, under the path ``container``.

    Raises:
        ConversionError: if the file cannot be read.
    """
    entries = Entries()
    if file != _TRAINER_STATE:
        opened = TorchFile.open(store, file, trust=trust)
        for path, leaf in opened.leaves().items():
            opened.add_leaf(entries, (*container, *path), leaf)
        return entries
    try:
        state = dict(parse_json(store.read(file)))
    except (TypeError, ValueError) as error:
        raise ConversionError(
            "The trainer state cannot be read.",
            expected="a JSON object",
            got=error,
            todo="copy the file again",
        ) from error
    for key, value in state.items():
        entries.add_value((*container, str(key)), value)
    return entries
