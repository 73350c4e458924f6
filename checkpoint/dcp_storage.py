"""Native checkpoints through torch's DCP: `dcp.save` and `dcp.load` with a storage writer and a storage reader.

    dcp.save(state, storage_writer=RaggedWriter(path), planner=RaggedSavePlanner())
    dcp.load(state, storage_reader=RaggedReader(path), planner=RaggedLoadPlanner())

With these planners every rank gives DCP an empty plan, and `save` or `load` of this package handles the state. With
DCP's default planners, DCP plans as usual: the writer then saves the state that the planner was given, and the reader
describes each tensor as one chunk.

DCP does not pass its process group to a storage reader or writer. It passes each rank's number, and the plans of all
ranks to its coordinator rank. `_DcpRanks` compares both with the ranks that the reader or writer was created for, so
that no rank waits forever:

    RaggedWriter(path), dcp.save(no_dist=True) on one rank      one plan: this rank saves alone
    RaggedWriter(path, no_dist=True), dcp.save on all ranks     refused
    different process groups for the writer and dcp.save        refused
    use_collectives=False on several ranks                      refused: each passes one plan, as with no_dist=True
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

from vescale_fsdp.checkpoint.load import Loader, Overwriting, Verify
from vescale_fsdp.checkpoint.manifest.state_tree import Json, child_name
from vescale_fsdp.checkpoint.native.form import Commit
from vescale_fsdp.checkpoint.native.read_state import CheckpointReader, CheckpointTensor
from vescale_fsdp.checkpoint.ranks.coordinator import (
    Coordinator,
    SoloCoordinator,
    coordinator_for,
    num_neighbors,
    solo_coordinator,
)
from vescale_fsdp.checkpoint.ranks.replicas import CheckReplicas, check_choice
from vescale_fsdp.checkpoint.save import Saver
from vescale_fsdp.checkpoint.state.capture import take_state
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.errors import CheckpointError, callers_level, explain
from vescale_fsdp.layout.geometry import Box, Range
from vescale_fsdp.layout.region import Region
from vescale_fsdp.torch_private import flatten_state_dict, unflatten_state_dict

_GROUP_USE = "dcp"  # a separate gloo group, since DCP may save in a thread while other saves and loads run


class _DcpRanks:
    """The ranks that a reader or writer was created for; checks that DCP uses the same ranks.

    Args:
        process_group: the group that is passed to DCP, too; None for all ranks.
        no_dist: whether this rank works alone.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, no_dist: bool) -> None:
        self._process_group = process_group
        self._alone = self._no_dist = no_dist
        # Creates the gloo group now: that is a collective, and all ranks create their reader or writer.
        self.coordinator()

    def coordinator(self) -> Coordinator:
        """Return the coordinator of these ranks."""
        return solo_coordinator() if self._alone else coordinator_for(self._process_group, use=_GROUP_USE)

    def check_rank(self, is_coordinator: bool, options: Mapping[str, Any]) -> None:
        """Compare this rank's number with the rank that DCP passes.

        Args:
            is_coordinator: whether this rank is DCP's coordinator.
            options: the keyword arguments of DCP's set-up call.

        Raises:
            CheckpointError: if DCP uses other ranks, or several ranks without collectives.
        """
        # Reset, since `check_count` may have set it in an earlier save.
        self._alone = self._no_dist
        ours = self.coordinator()
        # Without collectives, each rank gets its own plan only, so that `check_count` would take it for a lone rank.
        if not options.get("use_collectives", True) and not isinstance(ours, SoloCoordinator):
            raise CheckpointError(
                "Ranks that save one checkpoint need collectives.",
                expected="use_collectives=True; the plans of RaggedSavePlanner are empty, and take no time to gather",
                got="use_collectives=False",
                todo="leave it out; to save this rank alone, create the writer with no_dist=True, too",
            )
        # DCP's coordinator has rank 0 with and without no_dist=True; only `check_count` can distinguish these cases.
        if not is_coordinator and options.get("rank") != ours.rank:
            raise _other_ranks(ours, f"rank {options.get('rank')}")

    def check_count(self, num_plans: int) -> None:
        """On DCP's coordinator, compare the number of ranks with DCP's number of plans.

        Raises:
            CheckpointError: if the numbers differ, unless DCP runs on this rank alone.
        """
        ours = self.coordinator()
        self._alone = num_plans == 1
        if not self._alone and (ours.rank, ours.world_size) != (0, num_plans):
            raise _other_ranks(ours, f"rank 0 of {num_plans}")


def _other_ranks(ours: Coordinator, theirs: str) -> CheckpointError:
    return CheckpointError(
        "DCP and its storage were given different ranks.",
        expected=f"rank {ours.rank} of {ours.world_size}, for which RaggedWriter or RaggedReader was created",
        got=f"{theirs}, with which dcp.save or dcp.load was called",
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
    """Passes the state to `RaggedWriter` unchanged; DCP gets an empty plan.

    Examples:
        >>> planner = RaggedSavePlanner()  # for dcp.save(storage_writer=RaggedWriter(..), planner=..)
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        # RaggedWriter passes None. DCP's own writers pass metadata, and would save nothing with an empty plan.
        if storage_meta is not None:
            raise _wrong_storage("RaggedSavePlanner", "RaggedWriter")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return SavePlan([])


class RaggedWriter(StorageWriter):
    """A DCP storage writer that writes native checkpoints.

    Create it on all ranks that save: creating the first one creates a gloo group, which is a collective.

    Args:
        path: folder or fsspec URL.
        metadata: JSON stored with the state.
        overwrite: replace an existing checkpoint.
        process_group: the ranks that save; pass the same group to DCP.
        no_dist: this rank saves alone, as in ``dcp.save(no_dist=True)``, and may create the writer alone.
        check_replicas: see `vescale_fsdp.checkpoint.save`.

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
        """Release the lock of a failed save; ``checkpoint_id`` is the path of the next save, None for the same path."""
        self._held.close()
        if checkpoint_id is not None:
            self._storage = open_storage(checkpoint_id, neighbors=num_neighbors())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that DCP saves with the ranks for which this writer was created."""
        self._ranks.check_rank(is_coordinator, kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._ranks.check_count(len(plans))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, after all ranks have agreed on the state; DCP then calls `finish` on rank 0."""
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
        except BaseException:  # releases the lock here, since DCP calls `finish` only after a success
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
        """Whether DCP may pass this as a path; any path or URL that is not empty is valid."""
        return bool(os.fspath(checkpoint_id))


def _state_of(planner: SavePlanner) -> Any:
    """Return the state that was passed to the planner, with its original nesting."""
    if not isinstance(planner, DefaultSavePlanner):
        raise CheckpointError(
            "RaggedWriter cannot read the state of this planner.",
            expected="RaggedSavePlanner, or DCP's DefaultSavePlanner",
            got=type(planner).__qualname__,
            todo="pass planner=RaggedSavePlanner()",
        )
    if planner.flatten_state_dict:
        return unflatten_state_dict(planner.state_dict, planner.mappings)
    return planner.state_dict


class RaggedLoadPlanner(DefaultLoadPlanner):
    """Lets `RaggedReader` load the state; DCP gets an empty plan.

    A value is loaded if the state has a key for it. Before its first step, an optimizer has an empty dict in place of
    its moments. The moments are then not loaded, and a warning names one of them.

    Args:
        strict: raise if the checkpoint lacks a leaf of the state; further leaves of the checkpoint are allowed.
        verify: see `vescale_fsdp.checkpoint.load`.

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
        self.state_dict = state_dict  # not by the base class, which would replace tensors on the meta device

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])


class RaggedReader(StorageReader):
    """A DCP storage reader of native checkpoints.

    Args:
        path: folder or fsspec URL.
        process_group: the ranks that load; pass the same group to DCP.
        no_dist: this rank loads alone, as in ``dcp.load(no_dist=True)``, and may create the reader alone.

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
        self._stored: dict[str, Any] = {}  # flattened name -> value, or `CheckpointTensor`

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the open checkpoint; ``checkpoint_id`` is the path for the next load, None for the same path."""
        self._reader = None
        if checkpoint_id is not None:
            self._storage = open_storage(checkpoint_id, neighbors=num_neighbors())

    def read_metadata(self, *args: Any, **unused: Any) -> Metadata:
        """Open the checkpoint and describe it for DCP: each tensor is one chunk, each other leaf is bytes."""
        # The keyword arguments must not be named ``kwargs``: if such a reader fails, DCP calls it again for the
        # metadata of one rank. That rank would then continue while all other ranks wait.
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
        """Check that DCP loads with the ranks for which this reader was created."""
        self._ranks.check_rank(is_coordinator, kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        self._ranks.check_count(len(plans))
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the state: with a `RaggedLoadPlanner` as in `checkpoint.load`, with DCP's planners item by item."""
        with torch.no_grad():
            if isinstance(planner, RaggedLoadPlanner):
                self._load(planner)
            else:
                self._read_items(plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _load(self, planner: RaggedLoadPlanner) -> None:
        """Load the planner's state; warns about leaves for which the state has an empty dict."""
        loader = Loader(self._storage, self._ranks.coordinator(), planner.verify)
        empty_dicts = tuple(_empty_dicts(planner.state_dict, ""))
        report = loader.load(planner.state_dict, strict="missing" if planner.strict else False, include=None)
        ignored = [name for name in (*report.unexpected, *report.ignored) if name.startswith(empty_dicts)]
        if ignored and loader.coordinator.rank == 0:
            warnings.warn(
                explain(
                    f"{len(ignored)} leaves of the checkpoint were not loaded: the state has an empty dict for them.",
                    expected="a state with a key for every value to load",
                    got=f"an empty dict for {ignored[0]}" + (", .." if len(ignored) > 1 else ""),
                    todo="an optimizer before its first step has no state yet: pass the optimizer itself to "
                    "vescale_fsdp.checkpoint.load, as {'model': model, 'optimizer': optimizer}",
                ),
                stacklevel=callers_level(),
            )

    def _read_items(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read the items of a plan that one of DCP's own planners has made."""
        assert self._reader is not None
        targets, overwriting = [], Overwriting()
        with closing(self._reader.reads()) as reads:
            for item in plan.items:
                stored = self._stored[item.storage_index.fqn]
                if item.type == LoadItemType.BYTE_IO:
                    data = io.BytesIO()
                    # Planners expect the bytes of torch.save, since DCP's own writers store values in this form.
                    torch.save(stored, data)
                    data.seek(0)  # planners read from the current position
                    planner.load_bytes(item, data)
                    continue
                tensor = planner.resolve_tensor(item).detach()
                box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                if tensor.dtype != stored.dtype:
                    raise CheckpointError(
                        "The dtype of a tensor differs from that in the checkpoint.",
                        expected=stored.dtype,
                        got=tensor.dtype,
                        where=stored.name,
                        todo="create the state with the dtypes of the checkpoint, and cast it after loading",
                    )
                region = Region(box, Range(0, box.numel))
                target = reads.ask(stored.index, region, tensor)
                overwriting.add(item.storage_index.fqn, tensor, target)
                targets.append((item, tensor, target))
            with overwriting.together(num_ranks=1):  # 1: DCP itself reports errors to other ranks
                reads.run(verify=True)
                for item, tensor, target in targets:
                    target.finish()
                    planner.commit_tensor(item, tensor)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether DCP may pass this as a path; any path or URL that is not empty is valid."""
        return bool(os.fspath(checkpoint_id))


def _empty_dicts(value: Any, name: str) -> Iterator[str]:
    """Yield, for each empty dict in a state, the prefix that names of leaves in this dict would have."""
    if isinstance(value, Mapping) and not value:
        yield f"{name}." if name else ""
    if isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _empty_dicts(item, child_name(name, key))


def _with_stubs(value: Any, stubs: dict[int, CheckpointTensor]) -> Any:
    """Return the tree with a meta tensor in place of each `CheckpointTensor`, since DCP flattens only torch's tensors.

    Args:
        stubs: gets id of the meta tensor -> `CheckpointTensor`.
    """
    if isinstance(value, CheckpointTensor):
        stub = torch.empty(value.shape, dtype=value.dtype, device="meta")
        stubs[id(stub)] = value
        return stub
    if isinstance(value, dict):
        return {key: _with_stubs(item, stubs) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_stubs(item, stubs) for item in value)
    return value
