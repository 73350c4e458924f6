"""The native engine as a storage writer of torch's DCP: same files, through `dcp.save` and `dcp.async_save`.

    dcp.save(state, storage_writer=RaggedWriter(path), planner=RaggedSavePlanner())

With this planner DCP's own planning is empty: every rank hands in an empty plan, the engine agrees on a digest and
writes. The writer also works with DCP's default planner, whose planning then costs what it costs: it saves the
planner's state.
"""

from __future__ import annotations

import io
import os
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.ranks.coordinator import num_neighbours
from vescale_fsdp.checkpoint.ranks.dcp_ranks import DcpRanks, wrong_partner
from vescale_fsdp.checkpoint.saving.form import Commit
from vescale_fsdp.checkpoint.saving.replicas import CheckReplicas, check_choice
from vescale_fsdp.checkpoint.saving.save import Saver
from vescale_fsdp.checkpoint.state.capture import take_state
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.torch_private import unflatten_state_dict


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
        metadata: JSON stored beside the state.
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
