"""`RamTier`: newest states in the nodes' shared memory, which outlives a killed worker.

Same format, same checks, on a memory file system (``/dev/shm``): a save is one copy and costs no disk; a restart
reads it back at memory speed. Every rank stores all that it holds and every node has its own manifest, so that on the
same nodes no rank needs another's memory. A step's save_id begins with the id of the run's branch (see `run_file`):
steps of another run, or of a branch that a rollback has left, are never restored, and are removed by the next save.

    replicas=0      a node that is lost takes its part with it; what was replicated over nodes survives
    replicas=1      a partner node has a copy of each file, sent behind training out of the memory that holds it
                    anyway, so that the trainer waits for nothing more. Losing any one node costs no read of a disk

On other nodes, or on fewer or more of them, what a rank needs comes from the nodes that hold it (see `peer_memory`).
What none of them holds any more comes from disk, if the same step was saved there too (see `disk_twin`); else the step
is passed over.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.checkpoint.loading.read_state import read_manifest
from vescale_fsdp.checkpoint.manifest.file_names import parse_rank_file_name, step_name
from vescale_fsdp.checkpoint.manifest.manifest import NoCheckpointError
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.memory.peer_memory import HeldPart
from vescale_fsdp.checkpoint.ranks.background import BackgroundThread
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.file_moves import FileMove, move_files
from vescale_fsdp.checkpoint.ranks.partners import node_name, partners_in_cliques, partners_in_rings
from vescale_fsdp.checkpoint.saving.async_save import SaveHandle
from vescale_fsdp.checkpoint.saving.replicas import CheckReplicas
from vescale_fsdp.checkpoint.saving.save import Saver
from vescale_fsdp.checkpoint.steps.run_file import RunFile
from vescale_fsdp.checkpoint.steps.step_folders import (
    StepFolder,
    committed_steps,
    no_longer_kept,
    remove_step,
    retire,
)
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import ArgumentError, CheckpointError

__all__ = ["RamTier"]


class RamTier:
    """Steps kept in shared memory.

    Args:
        name: of the run; restarts of the same run must give the same one, and no other run on these nodes may. A run
            is known by its root: steps of another root's run are never restored, whatever the name.
        interval: steps between two saves to memory.
        keep_last: steps to keep, at least 1; while a step is written or copied, one more is held.
        replicas: other nodes that hold a copy of each node's part, sent in the background. Nodes are told apart by
            their memory file systems, and keep each other's copies in cliques of ``replicas + 1``.
        mesh: one dimension of a mesh whose ranks keep each other's copies instead, such as ``mesh["replicate"]``;
            neighbours along it lie on different nodes.
        folder: a memory file system. Steps lie in a folder of it that only this user can enter; one that another user
            may have made is refused by every method that looks into it.

    Raises:
        ValueError: if a limit is too low, the name is not a plain file name, or the mesh has several dimensions.

    Examples:
        >>> ram = RamTier("my_run", interval=10, keep_last=1)
        >>> ram.is_due(25), ram.is_due(30)
        (False, True)
    """

    def __init__(
        self,
        name: str,
        *,
        interval: int = 1,
        keep_last: int = 1,
        replicas: int = 0,
        mesh: DeviceMesh | None = None,
        folder: str | os.PathLike[str] = "/dev/shm",
    ) -> None:
        is_plain = re.fullmatch(r"[\w.-]+", name) and not name.startswith(".")
        if interval < 1 or keep_last < 1 or replicas < 0 or not is_plain:
            raise ArgumentError(
                "A RamTier cannot be made of these arguments.",
                expected="a plain name, interval >= 1, keep_last >= 1 and replicas >= 0",
                got=f"{name!r}, {interval}, {keep_last}, {replicas}",
            )
        if mesh is not None and (mesh.ndim != 1 or not replicas):
            raise ArgumentError(
                "RamTier(mesh=) says which ranks keep each other's copies.",
                expected="replicas >= 1 and a mesh of one axis",
                got=f"replicas={replicas} and {mesh.ndim} axes",
                todo="pass one axis of the mesh, such as mesh['replicate']",
            )
        self.name = name
        self.replicas = replicas
        self._interval = interval
        self._keep_last = keep_last
        self._mesh = mesh
        self._folder = Path(folder)
        self._root = LocalStorage(self._folder / f"vescale-{name}", durable=False, private=True)
        self._copier = BackgroundThread("checkpoint-copies")
        self._copies: SaveHandle | None = None
        self._leads_node: bool | None = None  # whether this rank is its node's first; not known before a save
        self._partners: list[list[int]] = []  # by rank, those that keep copies of its files

    def is_due(self, step: int) -> bool:
        """Whether a step is to be saved."""
        return step % self._interval == 0

    def save(
        self,
        coordinator: Coordinator,
        step: int,
        state: Any,
        user: Json,
        *,
        run: RunFile,
        behind: Coordinator | None = None,
        check_replicas: CheckReplicas = "sample",
    ) -> str:
        """Save a step and forget older ones; a collective.

        Args:
            run: to which the step belongs, the same on all ranks.
            behind: the same ranks as ``coordinator``, with a group that serves nothing but copies; where there are
                replicas. It is they who forget older steps then, when the copies are there.
            check_replicas: as for `vescale_fsdp.checkpoint.save`.

        Returns:
            The step's save_id, for a save of the same state to disk.
        """
        error: BaseException | None = None
        try:
            self.wait()
        except BaseException as caught:  # noqa: BLE001  all ranks must hear of it
            error = caught
        # Rank 0 draws the attempt's number, which all ranks learn by the same meeting.
        attempt = secrets.randbits(32) if coordinator.rank == 0 else 0
        doing = "waiting for the copies of the step before"
        (attempt,) = coordinator.raise_together(error, doing, numbers=[attempt])
        if self._leads_node is None:
            self._look_around(coordinator)
        saver = Saver(
            self.step_storage(step),
            coordinator,
            overwrite=True,
            save_id=f"{run.branch}{attempt:08x}",
            every_node=True,
            leads_node=bool(self._leads_node),
            check_replicas=check_replicas,
        )
        saved = saver.save(state, user)
        if self.replicas:
            assert behind is not None
            what = f"copying {saver.storage.where} to other nodes"
            job = self._copier.submit(partial(self._copy, behind, step, run), what, is_needed=False)
            self._copies = SaveHandle(job)
        else:
            self._retire(coordinator, step, run)
        return saved.save_id

    def wait(self) -> None:
        """Return when all copies have been made.

        Raises:
            CheckpointError: if one could not be; raised once. The step itself is good, but may lack copies.
        """
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.wait()

    def remove(self, coordinator: Coordinator, step: int) -> None:
        """Forget a step; a collective."""
        if self._leads_node is None:
            self._look_around(coordinator)
        with coordinator.together(f"removing step {step} from {self._root.where}", "see what is left of it"):
            if coordinator.rank == 0 or self._leads_node:
                remove_step(self._root, step)

    def abandon(self) -> None:
        """Return when no copy is in flight any more, however it has ended."""
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.error()

    def step_storage(self, step: int) -> Storage:
        """The folder of a step in this node's memory."""
        return self._root.child(step_name(step))

    def _look_around(self, coordinator: Coordinator) -> None:
        """Find out who shares this rank's node, and who keeps copies of whose files; a collective."""
        with coordinator.together(f"looking at {self._folder}"):
            node = self.node
        nodes = coordinator.everyone(node)
        if self.replicas and self._mesh is None:
            self._partners = partners_in_cliques(nodes, self.replicas)
        elif self._mesh is not None:
            ranks = dist.get_process_group_ranks(self._mesh.get_group())
            rank_of = coordinator.rank_of
            rings = coordinator.everyone([rank if rank_of is None else rank_of[rank] for rank in ranks])
            self._partners = partners_in_rings(rings, nodes, self.replicas)
        self._leads_node = nodes.index(node) == coordinator.rank

    def _copy(self, coordinator: Coordinator, step: int, run: RunFile) -> None:
        """Send this rank's file to its partners, and keep theirs."""
        storage = self.step_storage(step)
        with coordinator.together(f"copying {storage.where} to other nodes"):
            manifest = read_manifest(storage)
        moves = [
            FileMove(manifest.file_name(rank), rank, keeper)
            for number in range(self.replicas)
            for rank, keepers in enumerate(self._partners)
            for keeper in keepers[number : number + 1]
        ]
        move_files(coordinator, storage, moves, f"copying {storage.where} to other nodes")
        self._retire(coordinator, step, run)

    def _retire(self, coordinator: Coordinator, saved: int, run: RunFile) -> None:
        with coordinator.together(f"removing older steps from {self._root.where}", f"step {saved} is saved"):
            if coordinator.rank == 0 or self._leads_node:
                retire(self._root, lambda found: self._no_longer_kept(found, saved, run))

    def _no_longer_kept(self, found: Sequence[StepFolder], saved: int, run: RunFile) -> list[int]:
        """Older steps that are too many, and any that do not belong to the run."""
        foreign = [
            step
            for step, is_committed in found
            if is_committed and not any(run.includes(step, save_id) for save_id in self._save_ids(step))
        ]
        own = [folder for folder in found if folder[0] not in foreign]
        return [*foreign, *no_longer_kept(own, saved, keep_last=self._keep_last)]

    def _save_ids(self, step: int) -> list[str]:
        """Of the attempts at a step whose data lies in this node's memory."""
        names = self.step_storage(step).list_folder("")
        return [name.removeprefix("data-") for name in names if name.startswith("data-")]

    @property
    def node(self) -> str:
        """This node's name, see `node_name`."""
        return node_name(self._folder)

    def held(self, run: RunFile | None) -> dict[tuple[int, str], HeldPart]:
        """What this node holds of a run: of each step, by its number and the attempt that wrote it."""
        node = self.node
        found: dict[tuple[int, str], HeldPart] = {}
        if run is None:
            return found  # a run that has saved nothing: whatever lies here is another run's
        for number in committed_steps(self._root):
            storage = self.step_storage(number)
            try:
                manifest = read_manifest(storage)
            except NoCheckpointError:
                continue
            except CheckpointError:
                if not any(run.includes(number, save_id) for save_id in self._save_ids(number)):
                    continue
                found[number, ""] = HeldPart(node)  # damaged: tried last, and said if no node has a good one
                continue
            if not run.includes(number, manifest.save_id):
                continue
            ranks = map(parse_rank_file_name, storage.list_folder(f"data-{manifest.save_id}"))
            held = tuple(rank for rank in ranks if rank is not None)
            found[number, manifest.save_id] = HeldPart(node, held, manifest.world_size)
        return found

    def clear(self) -> None:
        """Give the memory back."""
        self._root.remove("")
