"""Reading a folder with one torch.save file per rank, as accelerate, verl and hand-written loops of FSDP1
and FSDP2 leave them.

    pytorch_model_fsdp_rank0.bin  pytorch_model_fsdp_rank1.bin  optimizer_rank0.bin ...
    model_world_size_2_rank_0.pt  model_world_size_2_rank_1.pt  extra_state_world_size_2_rank_0.pt ...

Where each part belongs follows from what the ranks pickled (`held_tensors`). What belongs to neither model nor
optimizer (schedulers, random states) is left out as far as ranks disagree about it, or its pickle names more than
tensors and plain values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from vescale_fsdp.checkpoint.moves.source import BoxReader, Source, StoredValue, constant
from vescale_fsdp.checkpoint.moves.stored_tensor import StoredTensor
from vescale_fsdp.checkpoint.state.nesting import Path, name_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.formats.torch_save.held_tensors import (
    HeldTensor,
    box_reader,
    differing_files,
    is_tensor_ref,
    stored_tensor,
)
from vescale_fsdp.conversion.formats.torch_save.pickle_reader import PiecesRef, ShardRef
from vescale_fsdp.conversion.formats.torch_save.read import StateFile, open_state_file
from vescale_fsdp.conversion.formats.torch_save.unread_objects import is_plain
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError

_RANK_FILE = re.compile(r"(.+?)(?:_world_size_(\d+))?_rank_?(\d+)\.(?:bin|pt|pth)")
_STATES = ("model", "optimizer")
_CONTAINERS = {
    "pytorch_model_fsdp": "model",
    "optim": "optimizer",
    "optimizer_0": "optimizer",
    "optimizer": "optimizer",
}


def rank_files(files: Iterable[str]) -> dict[str, list[str]]:
    """Files of each state (``model``, ``optimizer``, ...), in order of rank; empty if there are none.

    Raises:
        CorruptCheckpointError: if ranks are missing.
    """
    found: dict[str, dict[int, str]] = {}
    worlds: dict[str, int] = {}
    for file in files:
        match = _RANK_FILE.fullmatch(file)
        if match and "/" not in file:
            name = _CONTAINERS.get(match[1], match[1])
            found.setdefault(name, {})[int(match[3])] = file
            worlds[name] = max(worlds.get(name, 0), int(match[2] or 0), int(match[3]) + 1)
    for name, ranks in found.items():
        if missing := sorted(set(range(worlds[name])) - set(ranks)):
            raise CorruptCheckpointError(
                "Files of some ranks are missing.",
                expected=f"{worlds[name]} files like {min(ranks.values())}",
                got=f"none for rank {', '.join(map(str, missing[:8]))}",
                todo="copy the files of all ranks into one folder",
            )
    return {name: [ranks[rank] for rank in sorted(ranks)] for name, ranks in sorted(found.items())}


def open_ranks(store: Storage, *, trust_pickle: bool = False) -> Source:
    """Open a folder of per-rank files; reads their directories and pickles.

    Raises:
        ConversionError: for placements that do not say where a part belongs, states that are no dicts, or
            plain tensors that differ between ranks though nothing says which part each is.
        CorruptCheckpointError: if a file is damaged, or the parts do not tile a tensor (a rank is missing).
    """
    joined = _Joined()
    groups = rank_files(store.list_files())
    for container, files in groups.items():
        is_state = container in _STATES
        try:
            states = [
                open_state_file(store, file, trust=trust_pickle, stand_ins=not is_state) for file in files
            ]
            joined.take(_Joined.of(container, states))
        except ConversionError as error:
            # FSDP1's optimizers under flat parameters hold ranges that nothing names; the model is read without.
            if container == "model" or (is_state and "model" not in groups):
                raise
            joined.omitted.append(container)
            problem = str(error).splitlines()[0]
            joined.warnings.append(f"{container} is left out because of {files[0]}. {problem}")
    facts = {"rank files": ", ".join(f"{name}: {len(files)}" for name, files in groups.items())}
    return Source(
        "ranks",
        store,
        joined.tensors,
        joined.values,
        joined.paths,
        facts,
        joined.readers,
        omitted=tuple(joined.omitted),
        warnings=tuple(joined.warnings),
    )


class _Joined:
    """The states of all ranks as one."""

    def __init__(self) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.values: dict[str, StoredValue] = {}
        self.readers: dict[str, BoxReader] = {}
        self.paths: dict[str, Path] = {}
        self.omitted: list[str] = []
        self.warnings: list[str] = []

    def take(self, other: _Joined) -> None:
        """Add what another has."""
        self.tensors |= other.tensors
        self.values |= other.values
        self.readers |= other.readers
        self.paths |= other.paths
        self.omitted += other.omitted
        self.warnings += other.warnings

    @classmethod
    def of(cls, container: str, states: list[StateFile]) -> _Joined:
        """One state of all ranks.

        Raises:
            ConversionError: if plain tensors of a model or an optimizer differ, and nothing says how they belong.
        """
        found = cls()
        differing: list[tuple[str, str]] = []
        is_sharded = False
        for path in dict.fromkeys(path for state in states for path in state.leaves):
            name = name_of((container, *path))
            held = [HeldTensor(s.file, s.archive, s.leaves[path]) for s in states if path in s.leaves]
            if not is_tensor_ref(held[0].ref):
                found._add_value((container, *path), [part.ref for part in held])
                continue
            unlike = differing_files(held)[:1]
            if unlike and container not in _STATES:
                found.omitted.append(name)  # random states
                continue
            found.paths[name] = (container, *path)
            found.tensors[name] = stored_tensor(name, held)
            if (reader := box_reader(held[0].ref)) is not None:
                found.readers[name] = reader
            is_sharded |= isinstance(held[0].ref, (ShardRef, PiecesRef))
            differing += [(name, file) for file in unlike]
        if differing and not is_sharded:
            raise _no_place(*differing[0], states[0].file)
        found.warnings += [
            f"{name} is not sharded but differs between ranks: taken from {states[0].file}"
            for name, _ in differing
        ]
        return found

    def _add_value(self, path: Path, said: list[Any]) -> None:
        """A value, unless ranks disagree about it or it is none that can be carried."""
        name = name_of(path)
        if path[0] in _STATES or (is_plain(said[0]) and all(other == said[0] for other in said)):
            self.values[name] = constant(said[0])
            self.paths[name] = path
        else:
            self.omitted.append(name)


def _no_place(name: str, file: str, first: str) -> ConversionError:
    return ConversionError(
        "The ranks hold plain tensors that differ, and nothing says how they fit together.",
        expected="DTensors or ShardedTensors, or the same tensors on every rank",
        got=f"another {name} in {file} than in {first}",
        todo=f"save with torch.distributed.checkpoint; if {first} alone is the whole state, pass that file",
    )
