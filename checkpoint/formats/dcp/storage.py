"""The native engine as a storage reader and writer of torch's DCP: the same files, through `dcp.save` and `dcp.load`.

    dcp.save(state, storage_writer=RaggedWriter(path), planner=RaggedSavePlanner())
    dcp.load(state, storage_reader=RaggedReader(path), planner=RaggedLoadPlanner())

With these planners DCP's own planning is empty: every rank hands in an empty plan, and the engine agrees on a digest
and writes, or fills the state. The writer and the reader also work with DCP's default planners, whose planning then
costs what it costs: the writer saves the planner's state, the reader offers every tensor as one chunk.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from vescale_fsdp.checkpoint.formats.form import Commit
from vescale_fsdp.checkpoint.formats.read_state import CheckpointReader, CheckpointTensor
from vescale_fsdp.checkpoint.load import Loader, Overwriting, Verify
from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.manifest.state_tree import Json, child_name
from vescale_fsdp.checkpoint.moves.replicas import CheckReplicas, check_choice
from vescale_fsdp.checkpoint.ranks.coordinator import num_neighbours
from vescale_fsdp.checkpoint.ranks.dcp_ranks import DcpRanks, wrong_partner
from vescale_fsdp.checkpoint.save import Saver
from vescale_fsdp.checkpoint.state.capture import take_state
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.errors import CheckpointError, explain
from vescale_fsdp.layout.geometry import Box, FlatRange
from vescale_fsdp.torch_private import flatten_state_dict, unflatten_state_dict


class RaggedSavePlanner(SavePlanner):
    """Plans nothing: the state goes to the engine as it is.

    Examples:
        >>> planner = RaggedSavePlanner()  # for dcp.save(storage_writer=RaggedWriter(..), planner=..)
    """

    state: Any = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        raise wrong_partner("RaggedSavePlanner", "RaggedWriter")


class RaggedWriter(StorageWriter):
    """A DCP storage writer that writes native checkpoints.

    Make it on every rank that saves: the first one makes a gloo group for the engine.

    Args:
        path: folder or fsspec URL.
        metadata: JSON stored with the state.
        overwrite: replace an existing checkpoint.
        process_group: the ranks that save; the same that DCP gets.
        no_dist: this rank saves alone, as in ``dcp.save(no_dist=True)``, and may make the writer alone.
        check_replicas: as for `vescale_fsdp.checkpoint.save`.

    Examples:
        >>> import torch.distributed.checkpoint as dcp
        >>> writer = RaggedWriter("by_dcp", metadata={"step": 3})
        >>> _ = dcp.save({"w": torch.ones(4)}, storage_writer=writer, planner=RaggedSavePlanner())
        >>> from vescale_fsdp.checkpoint import read_state
        >>> read_state("by_dcp").metadata
        {'step': 3}
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Storage,
        *,
        metadata: Json = None,
        overwrite: bool = False,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        check_replicas: CheckReplicas = "sample",
    ) -> None:
        check_choice(check_replicas)
        self._check_replicas: CheckReplicas = check_replicas
        self._storage = open_storage(path, neighbours=num_neighbours())
        self._metadata = metadata
        self._overwrite = overwrite
        self._ranks = DcpRanks(process_group, no_dist)
        self._commit: Commit | None = None
        self._held = ExitStack()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another path, if one is given."""
        self._held.close()
        if checkpoint_id is not None:
            self._storage = open_storage(checkpoint_id, neighbours=num_neighbours())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See that DCP saves with the ranks this writer was made for."""
        self._ranks.meet(is_coordinator, kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._ranks.count(len(plans))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Agree and write this rank's file; DCP then calls `finish` on its coordinator."""
        coordinator = self._ranks.coordinator()
        saver = Saver(
            self._storage, coordinator, overwrite=self._overwrite, check_replicas=self._check_replicas
        )
        try:
            self._commit = saver.write_uncommitted(
                lambda: take_state(_state_of(planner), rank_of=coordinator.rank_of),
                self._metadata,
                self._held,
            )
        except BaseException:
            self._held.close()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit."""
        assert self._commit is not None
        with self._held:
            self._commit.run()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether DCP may take this for a checkpoint's place: any path or URL."""
        return bool(os.fspath(checkpoint_id))


def _state_of(planner: SavePlanner) -> Any:
    """The state a planner was set up with, nested as it was."""
    if isinstance(planner, RaggedSavePlanner):
        return planner.state
    if isinstance(planner, DefaultSavePlanner):
        if planner.flatten_state_dict:
            return unflatten_state_dict(planner.state_dict, planner.mappings)
        return planner.state_dict
    raise CheckpointError(
        "RaggedWriter cannot get the state from this planner.",
        expected="RaggedSavePlanner, or DCP's DefaultSavePlanner",
        got=type(planner).__qualname__,
        todo="pass planner=RaggedSavePlanner()",
    )


class RaggedLoadPlanner(LoadPlanner):
    """Plans nothing: the engine fills the state.

    The state says what to load, so a dict without keys asks for nothing: an optimizer before its first step has
    one. Where the checkpoint holds something for it, a warning says so.

    Args:
        strict: raise if the checkpoint lacks a leaf of the state (it may always hold more).
        verify: as for `vescale_fsdp.checkpoint.load`.

    Examples:
        >>> planner = RaggedLoadPlanner(strict=False, verify="before")  # for dcp.load(planner=..)
    """

    state: Any = None

    def __init__(self, *, strict: bool = True, verify: Verify = "while") -> None:
        self.strict = strict
        self.verify: Verify = verify

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state = state_dict

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise wrong_partner("RaggedLoadPlanner", "RaggedReader")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        raise wrong_partner("RaggedLoadPlanner", "RaggedReader")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        raise wrong_partner("RaggedLoadPlanner", "RaggedReader")


class RaggedReader(StorageReader):
    """A DCP storage reader of native checkpoints.

    Args:
        path: folder or fsspec URL.
        process_group: the ranks that load; the same that DCP gets.
        no_dist: this rank loads alone, as in ``dcp.load(no_dist=True)``, and may make the reader alone.

    Examples:
        >>> import torch.distributed.checkpoint as dcp
        >>> from vescale_fsdp.checkpoint import save
        >>> save("for_dcp", {"w": torch.ones(4)})
        >>> state = {"w": torch.zeros(4)}
        >>> dcp.load(state, storage_reader=RaggedReader("for_dcp"), planner=RaggedLoadPlanner())
        >>> state["w"].sum().item()
        4.0
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Storage,
        *,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> None:
        self._storage = open_storage(path, neighbours=num_neighbours())
        self._ranks = DcpRanks(process_group, no_dist)
        self._reader: CheckpointReader | None = None
        self._stored: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another path, if one is given."""
        self._reader = None
        if checkpoint_id is not None:
            self._storage = open_storage(checkpoint_id, neighbours=num_neighbours())

    def read_metadata(self, *args: Any, **unused: Any) -> Metadata:
        """The checkpoint as DCP sees it: every tensor is one chunk, every other leaf is bytes.

        DCP asks a ``**kwargs`` of that name once more after an error, for metadata of this rank alone, and if it
        gets them goes on without the other ranks, who wait.
        """
        self._reader = CheckpointReader(self._storage)
        tree = self._reader.tree()
        stubs: dict[int, CheckpointTensor] = {}
        flat, mappings = flatten_state_dict(_with_stubs(tree, stubs))
        self._stored = {}
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, value in flat.items():
            stored = stubs.get(id(value))
            self._stored[name] = stored if stored is not None else value
            described[name] = BytesStorageMetadata() if stored is None else _as_one_chunk(stored)
        return Metadata(described, planner_data=mappings)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """See that DCP loads with the ranks this reader was made for."""
        self._ranks.meet(is_coordinator, kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        self._ranks.count(len(plans))
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's state, by the engine where the planner is ours, else item by item."""
        with torch.no_grad():
            if isinstance(planner, RaggedLoadPlanner):
                loader = Loader(self._storage, self._ranks.coordinator(), planner.verify)
                empty = tuple(_empty_dicts(planner.state, ""))
                report = loader.load(
                    planner.state, strict="missing" if planner.strict else False, include=None
                )
                left = [name for name in report.unexpected if name.startswith(empty)]
                if left and loader.coordinator.rank == 0:
                    _warn_of_empty(left)
            else:
                self._read_items(plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_items(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        assert self._reader is not None
        targets, overwriting = [], Overwriting()
        with closing(self._reader.reads()) as reads:
            for item in plan.items:
                stored = self._stored[item.storage_index.fqn]
                if item.type == LoadItemType.BYTE_IO:
                    data = io.BytesIO()
                    torch.save(stored, data)
                    data.seek(0)
                    planner.load_bytes(item, data)
                    continue
                tensor = planner.resolve_tensor(item).detach()
                box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                if tensor.dtype != stored.dtype:
                    raise _other_dtype(stored, tensor)
                region = Region(box, FlatRange(0, box.numel))
                target = reads.ask(stored.index, region, tensor)
                overwriting.add(item.storage_index.fqn, tensor, target)
                targets.append((item, tensor, target))
            with overwriting.together(num_ranks=1):  # DCP itself tells the other ranks
                reads.run(verify=True)
                for item, tensor, target in targets:
                    target.finish()
                    planner.commit_tensor(item, tensor)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether DCP may take this for a checkpoint's place: any path or URL."""
        return bool(os.fspath(checkpoint_id))


def _empty_dicts(value: Any, name: str) -> Iterator[str]:
    """What the names of leaves would start with that a state's empty dicts do not ask for."""
    if isinstance(value, Mapping) and not value:
        yield f"{name}." if name else ""
    if isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _empty_dicts(item, child_name(name, key))


def _warn_of_empty(left: list[str]) -> None:
    warnings.warn(
        explain(
            f"{len(left)} leaves of the checkpoint were not loaded: the state has an empty dict in their place.",
            expected="a state with a key for everything that is to be loaded",
            got=f"an empty dict for {left[0]}" + (", .." if len(left) > 1 else ""),
            todo="an optimizer before its first step has no state yet: let vescale_fsdp.checkpoint.load fill it, with "
            "{'model': model, 'optimizer': optimizer}",
        ),
        stacklevel=2,
    )


def _other_dtype(stored: CheckpointTensor, tensor: torch.Tensor) -> CheckpointError:
    return CheckpointError(
        "A tensor has another dtype than in the checkpoint.",
        expected=stored.dtype,
        got=tensor.dtype,
        where=stored.name,
        todo="build the state as it was saved; cast after loading",
    )


def _with_stubs(value: Any, stubs: dict[int, CheckpointTensor]) -> Any:
    """The tree with tensors without values, which DCP's flattening takes for tensors."""
    if isinstance(value, CheckpointTensor):
        stub = torch.empty(value.shape, dtype=value.dtype, device="meta")
        stubs[id(stub)] = value
        return stub
    if isinstance(value, dict):
        return {key: _with_stubs(item, stubs) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_stubs(item, stubs) for item in value)
    return value


def _as_one_chunk(stored: CheckpointTensor) -> TensorStorageMetadata:
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(stored.shape)), sizes=stored.shape)
    properties = TensorProperties(dtype=stored.dtype)
    return TensorStorageMetadata(properties=properties, size=stored.shape, chunks=[chunk])
