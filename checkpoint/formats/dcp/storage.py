"""Native checkpoints through torch's DCP: `dcp.save` and `dcp.load` with a storage writer and a storage reader.

    dcp.save(state, storage_writer=RaggedWriter(path), planner=RaggedSavePlanner())
    dcp.load(state, storage_reader=RaggedReader(path), planner=RaggedLoadPlanner())

With these planners every rank gives DCP an empty plan; the checkpoint's own engine saves or fills the state. With DCP's
default planners, DCP plans as usual: the writer then saves the planner's state, and the reader offers each tensor as
one chunk.

DCP does not pass its process group to a storage. It passes each rank's number, and the plans of all ranks to the
coordinator. `_DcpRanks` compares both with the ranks that the storage was made for, so that no rank waits forever:

    RaggedWriter(path), dcp.save(no_dist=True) on one rank      one plan: that rank saves alone
    RaggedWriter(path, no_dist=True), dcp.save on all ranks     refused
    two process groups                                          refused
    use_collectives=False                                       refused: differs from no_dist=True, but looks the same
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
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from vescale_fsdp.checkpoint.formats.form import Commit
from vescale_fsdp.checkpoint.formats.read_state import CheckpointReader, CheckpointTensor
from vescale_fsdp.checkpoint.load import Loader, Overwriting, Verify
from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.manifest.state_tree import Json, child_name
from vescale_fsdp.checkpoint.moves.replicas import CheckReplicas, check_choice
from vescale_fsdp.checkpoint.ranks.coordinator import (
    Coordinator,
    SoloCoordinator,
    coordinator_for,
    num_neighbors,
    solo_coordinator,
)
from vescale_fsdp.checkpoint.save import Saver
from vescale_fsdp.checkpoint.state.capture import take_state
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.errors import CheckpointError, explain
from vescale_fsdp.layout.geometry import Box, FlatRange
from vescale_fsdp.torch_private import flatten_state_dict, unflatten_state_dict

_GROUP_USE = "dcp"  # a group of its own: DCP saves in a thread, while other saves and loads may run


class _DcpRanks:
    """The ranks that a storage was made for, to compare with the ranks that DCP works with.

    Args:
        process_group: as passed to DCP; default: all ranks.
        no_dist: this rank alone.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, no_dist: bool) -> None:
        self._process_group = process_group
        self._alone = self._no_dist = no_dist
        self.coordinator()  # makes the gloo group, a collective, here: all ranks make their storage

    def coordinator(self) -> Coordinator:
        """The coordinator of the storage's ranks."""
        return solo_coordinator() if self._alone else coordinator_for(self._process_group, use=_GROUP_USE)

    def check_rank(self, is_coordinator: bool, options: Mapping[str, Any]) -> None:
        """Compare this rank's number; ``options`` are the keyword arguments of DCP's set-up call.

        Raises:
            CheckpointError: if DCP works with other ranks, or without any collectives.
        """
        # Reset, since `check_count` of an earlier save may have set it.
        self._alone = self._no_dist
        ours = self.coordinator()
        if not options.get("use_collectives", True) and not isinstance(ours, SoloCoordinator):
            raise CheckpointError(
                "Ranks that save one checkpoint need collectives.",
                expected="use_collectives=True: with RaggedSavePlanner no plan is gathered anyway",
                got="use_collectives=False",
                todo="leave it out; to save this rank alone, make the writer with no_dist=True too",
            )
        # DCP's coordinator has rank 0 with and without no_dist=True: only `check_count` can tell these apart.
        if not is_coordinator and options.get("rank") != ours.rank:
            raise _other_ranks(ours, f"rank {options.get('rank')}")

    def check_count(self, num_plans: int) -> None:
        """On DCP's coordinator: compare the number of ranks.

        Raises:
            CheckpointError: if it differs from the storage's.
        """
        ours = self.coordinator()
        self._alone = num_plans == 1
        if not self._alone and (ours.rank, ours.world_size) != (0, num_plans):
            raise _other_ranks(ours, f"rank 0 of {num_plans}")


def _other_ranks(ours: Coordinator, theirs: str) -> CheckpointError:
    return CheckpointError(
        "DCP and its storage were given different ranks.",
        expected=f"rank {ours.rank} of {ours.world_size}, as RaggedWriter or RaggedReader was made",
        got=f"{theirs}, as dcp.save or dcp.load was called",
        todo="pass the same process_group and the same no_dist to both",
    )


def _wrong_storage(planner: str, storage: str) -> CheckpointError:
    return CheckpointError(
        f"{planner} works only with {storage}.",
        expected=storage,
        got="another storage",
        todo=f"pass a {storage}(path), or leave the planner out",
    )


class RaggedSavePlanner(DefaultSavePlanner):
    """Gives the state to `RaggedWriter` as it is; DCP plans nothing.

    Examples:
        >>> planner = RaggedSavePlanner()  # for dcp.save(storage_writer=RaggedWriter(..), planner=..)
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        if storage_meta is not None:  # RaggedWriter has none; DCP's own writers would save an empty plan
            raise _wrong_storage("RaggedSavePlanner", "RaggedWriter")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return SavePlan([])


class RaggedWriter(StorageWriter):
    """A DCP storage writer that writes native checkpoints.

    Make it on every rank that saves: making the first one is a collective, which makes a gloo group.

    Args:
        path: folder or fsspec URL.
        metadata: JSON stored with the state.
        overwrite: replace an existing checkpoint.
        process_group: the ranks that save; pass the same group to DCP.
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
        self._storage = open_storage(path, neighbors=num_neighbors())
        self._metadata = metadata
        self._overwrite = overwrite
        self._ranks = _DcpRanks(process_group, no_dist)
        self._commit: Commit | None = None
        self._held = ExitStack()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Release the lock of a failed save; use another path, if one is given."""
        self._held.close()
        if checkpoint_id is not None:
            self._storage = open_storage(checkpoint_id, neighbors=num_neighbors())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that DCP saves with the ranks that this writer was made for."""
        self._ranks.check_rank(is_coordinator, kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._ranks.check_count(len(plans))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, once all ranks have agreed on the state; DCP then calls `finish` on rank 0."""
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
        except BaseException:  # DCP calls `finish`, which releases the lock, only after a success
            self._held.close()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the manifest."""
        assert self._commit is not None
        with self._held:
            self._commit.run()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether DCP may use this as a path: any path or URL."""
        return bool(os.fspath(checkpoint_id))


def _state_of(planner: SavePlanner) -> Any:
    """The state that a planner was set up with, nested as it was."""
    if not isinstance(planner, DefaultSavePlanner):
        raise CheckpointError(
            "RaggedWriter cannot get the state from this planner.",
            expected="RaggedSavePlanner, or DCP's DefaultSavePlanner",
            got=type(planner).__qualname__,
            todo="pass planner=RaggedSavePlanner()",
        )
    if planner.flatten_state_dict:
        return unflatten_state_dict(planner.state_dict, planner.mappings)
    return planner.state_dict


class RaggedLoadPlanner(DefaultLoadPlanner):
    """Lets `RaggedReader` fill the state; DCP plans nothing.

    A value is loaded if the state has a key for it. An optimizer before its first step has an empty dict in place of
    its moments: the moments are not loaded, and a warning names one of them.

    Args:
        strict: raise if the checkpoint lacks a leaf of the state (it may always have more).
        verify: as for `vescale_fsdp.checkpoint.load`.

    Examples:
        >>> planner = RaggedLoadPlanner(strict=False, verify="before")  # for dcp.load(planner=..)
    """

    def __init__(self, *, strict: bool = True, verify: Verify = "while") -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.strict = strict
        self.verify: Verify = verify

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if (
            metadata is not None and metadata.storage_data is not None
        ):  # DCP's own readers would load an empty plan
            raise _wrong_storage("RaggedLoadPlanner", "RaggedReader")
        self.state_dict = state_dict  # set here: the base class would replace tensors on the meta device

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])


class RaggedReader(StorageReader):
    """A DCP storage reader of native checkpoints.

    Args:
        path: folder or fsspec URL.
        process_group: the ranks that load; pass the same group to DCP.
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
        self._storage = open_storage(path, neighbors=num_neighbors())
        self._ranks = _DcpRanks(process_group, no_dist)
        self._reader: CheckpointReader | None = None  # opened by `read_metadata`, which DCP calls first
        self._stored: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Close the open checkpoint; use another path, if one is given."""
        self._reader = None
        if checkpoint_id is not None:
            self._storage = open_storage(checkpoint_id, neighbors=num_neighbors())

    def read_metadata(self, *args: Any, **unused: Any) -> Metadata:
        """The checkpoint as DCP sees it: every tensor is one chunk, every other leaf is bytes."""
        # The keyword arguments are not named ``kwargs``: after an error, DCP calls a reader with ``**kwargs`` again for
        # one rank's metadata. That rank would then continue while all other ranks wait.
        self._reader = CheckpointReader(self._storage)
        tree = self._reader.tree()
        stubs: dict[int, CheckpointTensor] = {}
        flat, mappings = flatten_state_dict(_with_stubs(tree, stubs))
        self._stored = {}
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, value in flat.items():
            stored = stubs.get(id(value))
            if stored is None:
                self._stored[name], described[name] = value, BytesStorageMetadata()
                continue
            whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(stored.shape)), sizes=stored.shape)
            properties = TensorProperties(dtype=stored.dtype)
            self._stored[name] = stored
            described[name] = TensorStorageMetadata(properties=properties, size=stored.shape, chunks=[whole])
        return Metadata(described, planner_data=mappings)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Check that DCP loads with the ranks that this reader was made for."""
        self._ranks.check_rank(is_coordinator, kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        self._ranks.check_count(len(plans))
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the state: as one load with `RaggedLoadPlanner`, item by item with DCP's planners."""
        with torch.no_grad():
            if isinstance(planner, RaggedLoadPlanner):
                self._load(planner)
            else:
                self._read_items(plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _load(self, planner: RaggedLoadPlanner) -> None:
        loader = Loader(self._storage, self._ranks.coordinator(), planner.verify)
        empty_dicts = tuple(_empty_dicts(planner.state_dict, ""))
        report = loader.load(planner.state_dict, strict="missing" if planner.strict else False, include=None)
        left_out = [name for name in report.unexpected if name.startswith(empty_dicts)]
        if left_out and loader.coordinator.rank == 0:
            warnings.warn(
                explain(
                    f"{len(left_out)} leaves of the checkpoint were not loaded: the state has an empty dict for them.",
                    expected="a state with a key for every value to load",
                    got=f"an empty dict for {left_out[0]}" + (", .." if len(left_out) > 1 else ""),
                    todo="an optimizer before its first step has no state yet: let vescale_fsdp.checkpoint.load fill "
                    "it, with {'model': model, 'optimizer': optimizer}",
                ),
                stacklevel=2,
            )

    def _read_items(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        assert self._reader is not None
        targets, overwriting = [], Overwriting()
        with closing(self._reader.reads()) as reads:
            for item in plan.items:
                stored = self._stored[item.storage_index.fqn]
                if item.type == LoadItemType.BYTE_IO:
                    data = io.BytesIO()
                    # Planners expect the bytes of a torch.save, as DCP's own writers store values.
                    torch.save(stored, data)
                    data.seek(0)  # planners read from the current place
                    planner.load_bytes(item, data)
                    continue
                tensor = planner.resolve_tensor(item).detach()
                box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                if tensor.dtype != stored.dtype:
                    raise CheckpointError(
                        "A tensor has another dtype than in the checkpoint.",
                        expected=stored.dtype,
                        got=tensor.dtype,
                        where=stored.name,
                        todo="build the state as it was saved; cast after loading",
                    )
                region = Region(box, FlatRange(0, box.numel))
                target = reads.ask(stored.index, region, tensor)
                overwriting.add(item.storage_index.fqn, tensor, target)
                targets.append((item, tensor, target))
            with overwriting.together(num_ranks=1):  # DCP reports errors to the other ranks
                reads.run(verify=True)
                for item, tensor, target in targets:
                    target.finish()
                    planner.commit_tensor(item, tensor)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether DCP may use this as a path: any path or URL."""
        return bool(os.fspath(checkpoint_id))


def _empty_dicts(value: Any, name: str) -> Iterator[str]:
    """For each empty dict of a state, the prefix of names of leaves in that dict."""
    if isinstance(value, Mapping) and not value:
        yield f"{name}." if name else ""
    if isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _empty_dicts(item, child_name(name, key))


def _with_stubs(value: Any, stubs: dict[int, CheckpointTensor]) -> Any:
    """The tree with a meta tensor in place of each `CheckpointTensor`: DCP's flattening knows torch's tensors only."""
    if isinstance(value, CheckpointTensor):
        stub = torch.empty(value.shape, dtype=value.dtype, device="meta")
        stubs[id(stub)] = value
        return stub
    if isinstance(value, dict):
        return {key: _with_stubs(item, stubs) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_stubs(item, stubs) for item in value)
    return value
