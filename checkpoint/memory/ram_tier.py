"""`RamTier`: the newest steps in the nodes' shared memory, which survives a killed worker.

Steps have the same format and checks as on disk, but are on a memory file system (``/dev/shm``). A save is one copy,
and a restart reads at memory speed. Every rank stores its complete local state, and every node has its own manifest, so
that after a restart on the same nodes no rank needs another node's memory. A step's save_id begins with the id of the
run's branch (see `run_file`). Steps of another run, or of a branch that a rollback has ended, are never restored, and
the next save removes them.

    replicas=0      the loss of a node loses its part; parameters that are replicated across nodes survive
    replicas=1      a partner node has a copy of each file, which is sent in the background from the memory that stores
                    the step. A restore after the loss of one node reads no disk

On different nodes, or another number of nodes, a rank gets files from the nodes that have them (see `peer_memory`), or
from disk if the same step was saved there; otherwise the step is skipped. A damaged file is deleted and counts as lost.
After a restore, missing copies are made again.

If a node's memory has too little space for a step or a copy, the tier warns; saves to disk are not affected.
"""

from __future__ import annotations

import os
import re
import secrets
import warnings
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.checkpoint.async_save import SaveHandle
from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME, parse_rank_file_name, step_name
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.memory.partners import (
    node_name,
    partners_in_cliques,
    partners_in_rings,
    plan_copies,
)
from vescale_fsdp.checkpoint.memory.peer_memory import HeldPart
from vescale_fsdp.checkpoint.native.check import rank_file_problem
from vescale_fsdp.checkpoint.native.form import lock_errors
from vescale_fsdp.checkpoint.native.read_state import read_manifest
from vescale_fsdp.checkpoint.ranks.background import BackgroundThread
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, is_interrupt, is_of_storage
from vescale_fsdp.checkpoint.ranks.exchange import FileMove, move_files
from vescale_fsdp.checkpoint.ranks.replicas import CheckReplicas
from vescale_fsdp.checkpoint.save import Saver
from vescale_fsdp.checkpoint.steps.retention import remove_chosen, surplus_steps
from vescale_fsdp.checkpoint.steps.run_file import RunFile
from vescale_fsdp.checkpoint.steps.step_folders import (
    StepFolder,
    committed_steps,
    remove_leftovers,
    remove_step,
)
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import ArgumentError, CheckpointError, NoCheckpointError, StorageError, callers_level

NO_COPIES = "a step in memory could not be copied to other nodes, so the loss of a node may lose the step"


class RamTier:
    """Saves recent steps in shared memory.

    Args:
        name: the run's name: the same in all restarts of a run, and different for each run on these nodes. Steps of a
            run with another root are never restored, even under the same name.
        interval: only steps that are multiples of this number are saved.
        keep_last: number of steps to keep, at least 1. Memory has one more step while a step is written or copied.
        replicas: number of other nodes that keep a copy of each node's part, sent in the background. Nodes are
            distinguished by their memory file systems, and form groups of ``replicas + 1``. If there are fewer nodes,
            there are fewer copies, with a warning.
        mesh: a 1D mesh, such as ``mesh["replicate"]``, whose ranks keep each other's copies. Neighboring ranks of the
            mesh must be on different nodes. None: groups of nodes are formed by the order of ranks.
        folder: a folder of a memory file system. Steps are in a private folder inside it. If another user may have
            created the private folder, an error is raised.

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
        # The name becomes part of a folder's name, so it must not lead to another folder or be hidden.
        is_plain = re.fullmatch(r"[\w.-]+", name) and not name.startswith(".")
        if interval < 1 or keep_last < 1 or replicas < 0 or not is_plain:
            raise ArgumentError(
                "A RamTier cannot be created with these arguments.",
                expected="a plain name, interval >= 1, keep_last >= 1 and replicas >= 0",
                got=f"{name!r}, {interval}, {keep_last}, {replicas}",
                where="RamTier(name=.., interval=.., keep_last=.., replicas=..)",
            )
        if mesh is not None and (mesh.ndim != 1 or not replicas):
            raise ArgumentError(
                "The mesh of a RamTier must be 1D, and needs replicas.",
                expected="replicas >= 1 and a mesh of one dimension",
                got=f"replicas={replicas} and {mesh.ndim} dimensions",
                todo="pass one dimension of the mesh, such as mesh['replicate']",
                where="RamTier(mesh=.., replicas=..)",
            )
        self.name = name
        self.replicas = replicas
        self._interval = interval
        self._keep_last = keep_last
        self._mesh = mesh
        self._folder = Path(folder)
        # Not durable, because a power loss erases memory anyway. Private, because every user may write to /dev/shm.
        self._root = LocalStorage(self._folder / f"vescale-{name}", durable=False, private=True)
        self._copier = BackgroundThread("checkpoint-copies")
        self._copies: SaveHandle | None = None
        # The coordinator that the next four attributes were computed for. A weak reference, so that this object does
        # not keep the process group of an ended job alive.
        self._seen: weakref.ref[Coordinator] | None = None
        self._nodes: list[str] = []  # by rank
        self._leads_node = False  # whether this rank is the first of its node
        self._partners: list[list[int]] = []  # by rank, the ranks that keep copies of its file
        self._warns = True  # whether this rank also warns about errors of other ranks
        self._copied_step = -1  # the newest step with all copies that this process knows of
        self._is_swept = False  # whether leftovers of killed jobs were removed

    def is_due(self, step: int) -> bool:
        """Return whether to save this step in memory."""
        return step % self._interval == 0

    def begin(self, coordinator: Coordinator, run: RunFile) -> tuple[str, bool]:
        """Begin a save; a collective that does not wait for copies.

        Returns:
            The step's save_id, which a save of the same state to disk must use too; and whether any rank is still
            copying an earlier step.
        """
        # Rank 0 draws the attempt's number. The all-reduce by MAX below sends it to all ranks. Not `random`: a script
        # that seeds it would get the same number in every restart.
        attempt = secrets.randbits(32) if coordinator.rank == 0 else 0
        is_copying = self._copies is not None and not self._copies.done()
        doing = "looking for copies of the previous step"
        attempt, is_copying_anywhere = coordinator.raise_together(
            None, doing, numbers=[attempt, int(is_copying)]
        )
        return f"{run.branch}{attempt:08x}", bool(is_copying_anywhere)

    def save(
        self,
        coordinator: Coordinator,
        step: int,
        state: Any,
        metadata: Json,
        *,
        save_id: str,
        run: RunFile,
        behind: Coordinator,
        check_replicas: CheckReplicas = "sample",
        fingerprint: bool | None = None,
    ) -> bool:
        """Save a step and remove older steps; a collective. Waits for the copies of the previous step.

        With replicas, copies are sent and older steps are removed in the background.

        Args:
            save_id: the save_id that `begin` has returned.
            run: the run file, the same on all ranks.
            behind: a coordinator of the same ranks whose process group is used only in the background, so that its
                collectives do not mix with those of the main thread.
            check_replicas, fingerprint: as for `vescale_fsdp.checkpoint.save`.

        Returns:
            Whether the step was saved, the same on all ranks. If it was not, a warning names the rank and the cause.

        Raises:
            CheckpointError: for an error in the state, which would stop a save to disk as well.
        """
        self._finish_copies(coordinator)  # otherwise memory would have more than `keep_last + 1` steps
        try:
            self._write(coordinator, step, state, metadata, save_id, check_replicas, fingerprint)
        except Exception as error:  # any class: `is_of_storage` reads its mark
            if not is_of_storage(error):
                raise
            # Such as a full memory, which must not stop the training.
            self._clear_away(step, save_id)  # frees its memory
            self._warn(coordinator, f"step {step} is not saved in memory ({self._root.where})", error)
            return False
        if any(self._partners):
            what = f"copying {self.step_storage(step).where} to other nodes"
            job = self._copier.submit(partial(self._copy, behind, step, run), what, is_needed=False)
            self._copies = SaveHandle(job)
        else:
            self._retire(coordinator, step, run)
        return True

    def _write(
        self,
        coordinator: Coordinator,
        step: int,
        state: Any,
        metadata: Json,
        save_id: str,
        check_replicas: CheckReplicas,
        fingerprint: bool | None,
    ) -> None:
        """Write and commit a step on all nodes; a collective."""
        self._find_nodes(coordinator)
        storage = self.step_storage(step)
        with ExitStack() as locks:
            with coordinator.together(f"locking {storage.where}"):
                self._sweep()
                if self._leads_node and coordinator.rank:  # not on rank 0, whose folder `Saver` locks
                    with lock_errors(storage):
                        locks.enter_context(storage.lock())
            saver = Saver(
                storage,
                coordinator,
                overwrite=True,
                save_id=save_id,
                every_node=True,
                leads_node=self._leads_node,
                check_replicas=check_replicas,
                fingerprint=fingerprint,
            )
            saver.save(state, metadata)

    def _sweep(self) -> None:
        """Remove the leftovers of killed jobs on this node, before the first write."""
        if self._leads_node and not self._is_swept:
            remove_leftovers(self._root)
        self._is_swept = True

    def _clear_away(self, step: int, save_id: str) -> None:
        """Remove this node's files of an attempt that has failed on any node, unless the attempt was committed here."""
        if self._leads_node:
            storage, name = self.step_storage(step), f"data-{save_id}"
            with suppress(OSError, CheckpointError):  # the caller warns about the failed save
                is_committed = storage.exists(MANIFEST_NAME) and read_manifest(storage).save_id == save_id
                if name in storage.list_folder("") and not is_committed:
                    storage.remove(name)

    def _warn(self, coordinator: Coordinator, problem: str, error: BaseException | None) -> None:
        """Warn about a problem, on rank 0 and on ranks with an error of their own; a collective.

        If a user's warning filter turns the warning into an exception on one rank, all ranks raise.
        """
        with coordinator.together(f"warning that {problem}", "steps on disk are not affected"):
            if error is not None and (self._warns or not isinstance(error, CheckpointError)):
                warnings.warn(f"{problem}: {_text_of(error)}", stacklevel=callers_level())

    def _finish_copies(self, coordinator: Coordinator) -> None:
        """Wait for all copies, and warn about failed copies; a collective."""
        error = self._copy_error()
        doing = "waiting for the copies of the previous step"
        (has_failed,) = coordinator.raise_together(None, doing, numbers=[int(error is not None)])
        if has_failed:
            self._warn(coordinator, NO_COPIES, error)

    def _copy_error(self) -> BaseException | None:
        """Wait for all copies, and return their error or None. Raises the error if Ctrl-C on any rank has caused it."""
        copies, self._copies = self._copies, None
        error = None if copies is None else copies.exception()
        if error is not None and is_interrupt(error):
            raise error
        return error

    def wait(self) -> None:
        """Wait until no copy is in flight, and warn about failed copies."""
        error = self._copy_error()
        # The same ranks as in `_warn`, which is a collective: rank 0, and ranks with an error of their own.
        if error is not None and (self._warns or not isinstance(error, CheckpointError)):
            warnings.warn(f"{NO_COPIES}: {_text_of(error)}", stacklevel=callers_level())

    def remove(self, coordinator: Coordinator, step: int) -> None:
        """Remove a step from the memory of all nodes; a collective.

        Raises:
            StorageError: on the rank that could not remove it; the others raise an error that names this rank.
        """
        self._find_nodes(coordinator)
        with coordinator.together(
            f"removing step {step} from {self._root.where}", "the step may be incomplete"
        ):
            if self._leads_node:
                problem = remove_step(self._root, step)
                if problem is not None:
                    raise StorageError("A step could not be removed.", got=problem, where=self._root.where)

    def clean(self, coordinator: Coordinator, older_than_s: float | None) -> list[str]:
        """Remove the leftovers of killed jobs on every node; a collective. Returns the removed paths of all nodes."""
        self._find_nodes(coordinator)
        removed: list[str] = []
        with coordinator.together(f"cleaning {self._root.where}"):
            if self._leads_node:
                removed = remove_leftovers(self._root, older_than_s=older_than_s)
        names = set().union(*coordinator.everyone(removed))
        return [f"{self._root.where}/{name}" for name in sorted(names)]

    def abandon(self) -> None:
        """Wait until no copy is in flight, ignoring errors."""
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.exception()

    def step_storage(self, step: int) -> Storage:
        """Return the storage of a step's folder in this node's memory."""
        return self._root.child(step_name(step))

    def _find_nodes(self, coordinator: Coordinator) -> None:
        """Determine the node and the partners of each rank; a collective.

        This is repeated for each new coordinator, because an elastic job may continue on other nodes.
        """
        if self._seen is not None and self._seen() is coordinator:
            return
        node = ""
        with coordinator.together(f"looking at {self._folder}"):
            node = self.node
        nodes = coordinator.everyone(node)
        partners: list[list[int]] = [[] for _ in nodes]
        if self._mesh is not None:
            ranks = dist.get_process_group_ranks(self._mesh.get_group())
            rank_of = coordinator.rank_of  # the mesh has global ranks, the coordinator those of its group
            rings = coordinator.everyone([rank if rank_of is None else rank_of[rank] for rank in ranks])
            partners = partners_in_rings(rings, nodes, self.replicas)
        elif self.replicas:
            partners = partners_in_cliques(nodes, self.replicas)
        self._nodes, self._partners = nodes, partners
        self._leads_node, self._warns = nodes.index(node) == coordinator.rank, coordinator.rank == 0
        if self.num_copies < self.replicas:
            with coordinator.together("warning about too few nodes"):
                if self._warns:
                    kept, there = self.num_copies, len(set(nodes))
                    warnings.warn(
                        f"RamTier(replicas={self.replicas}) keeps {kept or 'no'} cop{'y' if kept == 1 else 'ies'} of "
                        f"each node's part: there {'is' if there == 1 else 'are'} only {there} "
                        f"node{'' if there == 1 else 's'}, and each copy needs another node. Ranks with one memory "
                        "file system are one node",
                        stacklevel=callers_level(),
                    )
        self._seen = weakref.ref(coordinator)  # weak, so that the group of a failed job can be freed

    @property
    def num_copies(self) -> int:
        """Number of copies of each part on other nodes, limited by the number of nodes; known after the first save."""
        return min(self.replicas, len(set(self._nodes)) - 1)

    def _copy(self, coordinator: Coordinator, step: int, run: RunFile) -> None:
        """Send this rank's file to its partners, receive their files, and remove older steps. A collective."""
        storage = self.step_storage(step)
        doing = f"copying {storage.where} to other nodes"
        try:
            with coordinator.together(doing):
                manifest = read_manifest(storage)
            # Round by round, so that each file has its first copy before any file gets a second one.
            moves = [
                FileMove(manifest.file_name(rank), rank, keeper)
                for number in range(self.replicas)
                for rank, keepers in enumerate(self._partners)
                for keeper in keepers[number : number + 1]  # a slice, since there may be fewer keepers
            ]
            move_files(coordinator, storage, moves, doing)
            self._copied_step = step
        except Exception as error:  # any class: `is_of_storage` reads its mark
            # An error of storage, such as a full memory: older steps are removed as usual. After any other error, ranks
            # may be unreachable for the collective in `_retire`.
            if is_of_storage(error):
                self._retire(coordinator, step, run)
            raise
        self._retire(coordinator, step, run)

    def begin_renewal(
        self, coordinator: Coordinator, behind: Coordinator, step: int, manifest: Manifest
    ) -> None:
        """Make missing copies again in the background, after a restore from memory; a collective.

        Args:
            behind: as for `save`.
            step: number of the restored step.
            manifest: the step's manifest.
        """
        self._find_nodes(coordinator)
        if any(self._partners):
            what = f"renewing the copies of {self.step_storage(step).where}"
            job = self._copier.submit(partial(self._renew, behind, step, manifest), what, is_needed=False)
            self._copies = SaveHandle(job)

    def _renew(self, coordinator: Coordinator, step: int, manifest: Manifest) -> None:
        """Make missing copies of a step's files, after verifying the files that exist; a collective."""
        storage = self.step_storage(step)
        doing = f"renewing the copies of {storage.where}"
        if not self._missing_copies(coordinator, storage, manifest):  # the usual case: nothing is read
            return
        self.drop_damaged(coordinator, storage, manifest)  # a damaged file counts as missing
        moves = self._missing_copies(coordinator, storage, manifest)
        move_files(coordinator, storage, moves, doing)
        with coordinator.together(doing):
            for move in moves:
                if move.receiver == coordinator.rank:  # memory or network may have damaged the copy
                    problem = rank_file_problem(storage, manifest, _rank_of(move.name))
                    if problem is not None:
                        storage.remove(move.name)
                        raise StorageError(
                            "A copy differs from the file that was sent.", got=problem, where=storage.where
                        )
        self._copied_step = step

    def _missing_copies(
        self, coordinator: Coordinator, storage: Storage, manifest: Manifest
    ) -> list[FileMove]:
        """Plan the moves after which each file has `num_copies` copies, as far as possible; a collective."""
        present: list[str] = []
        with coordinator.together(f"looking at {storage.where}"):
            present = [name for name in _files_of(manifest) if storage.exists(name)]
        return plan_copies(_files_of(manifest), coordinator.everyone(present), self._nodes, self.num_copies)

    def drop_damaged(self, coordinator: Coordinator, storage: Storage, manifest: Manifest) -> list[str]:
        """Verify the files of a step on all nodes, and delete damaged files; a collective.

        Returns:
            One line of text per deleted file: the rank that verified it, the problem and the file's name. The same on
            all ranks.
        """
        self._find_nodes(coordinator)
        here = [rank for rank, node in enumerate(self._nodes) if node == self._nodes[coordinator.rank]]
        dropped: list[str] = []
        with coordinator.together(f"verifying {storage.where}"):
            files = [name for name in _files_of(manifest) if storage.exists(name)]
            # The ranks of a node share the work.
            for name in files[here.index(coordinator.rank) :: len(here)]:
                problem = rank_file_problem(storage, manifest, _rank_of(name))
                if problem is not None:
                    storage.remove(name)
                    dropped.append(f"rank {coordinator.rank}: {problem.splitlines()[0]} ({name})")
        return [text for texts in coordinator.everyone(dropped) for text in texts]

    def _retire(self, coordinator: Coordinator, saved: int, run: RunFile) -> None:
        """Remove surplus steps from all nodes, after step ``saved`` was saved; a collective."""
        with coordinator.together(f"removing older steps from {self._root.where}", f"step {saved} is saved"):
            if self._leads_node:
                remove_chosen(self._root, lambda folders: self._surplus_steps(folders, saved, run))

    def _surplus_steps(self, folders: Sequence[StepFolder], saved: int, run: RunFile) -> list[int]:
        """Return the steps to remove: older steps beyond ``keep_last``, and all steps that do not belong to the run."""
        foreign = [
            step
            for step, is_committed in folders
            if is_committed and not any(run.includes(step, save_id) for save_id in self._save_ids(step))
        ]
        own = [folder for folder in folders if folder[0] not in foreign]
        too_many = surplus_steps(own, saved, keep_last=self._keep_last)
        # The newest step with all copies stays: if later copies have failed, no other step survives the loss of a node.
        return [*foreign, *(step for step in too_many if step != self._copied_step)]

    def _save_ids(self, step: int) -> list[str]:
        """Return the save_ids of all attempts to save a step whose data is in this node's memory."""
        names = self.step_storage(step).list_folder("")
        return [name.removeprefix("data-") for name in names if name.startswith("data-")]

    @property
    def node(self) -> str:
        """This node's name, see `node_name`."""
        return node_name(self._folder)

    def held(self, run: RunFile | None) -> dict[tuple[int, str], HeldPart]:
        """Return the files of a run in this node's memory, by (step number, save_id).

        Args:
            run: the run file; None if the run has saved nothing.
        """
        node = self.node
        parts: dict[tuple[int, str], HeldPart] = {}
        if run is None:
            return parts  # all steps in this memory belong to other runs
        for number in committed_steps(self._root):
            storage = self.step_storage(number)
            try:
                manifest = read_manifest(storage)
            except NoCheckpointError:  # the step was removed after it was listed
                continue
            except CheckpointError:
                # A damaged manifest. Another node may have a good manifest, and the data folder's name has the save_id.
                for save_id in self._save_ids(number):
                    if run.includes(number, save_id):
                        parts[number, save_id] = HeldPart(node, self._saved_ranks(storage, save_id))
                continue
            if not run.includes(number, manifest.save_id):
                continue
            ranks = self._saved_ranks(storage, manifest.save_id)
            parts[number, manifest.save_id] = HeldPart(node, ranks, manifest.world_size)
        return parts

    def _saved_ranks(self, storage: Storage, save_id: str) -> tuple[int, ...]:
        """Return the saved ranks whose files are in a step's data folder."""
        ranks = map(parse_rank_file_name, storage.list_folder(f"data-{save_id}"))
        return tuple(rank for rank in ranks if rank is not None)

    def clear(self) -> None:
        """Remove all steps from this node's memory."""
        self._root.remove("")


def _files_of(manifest: Manifest) -> list[str]:
    """Return the paths of a step's rank files, in the order of ranks."""
    return [manifest.file_name(rank) for rank in range(manifest.world_size)]


def _rank_of(name: str) -> int:
    """Return the saved rank of a rank file, from its path."""
    rank = parse_rank_file_name(name.rpartition("/")[2])
    assert rank is not None, name
    return rank


def _text_of(error: BaseException) -> str:
    """Return an error and its notes, which name the rank, as text for a warning."""
    notes: list[str] = error.__dict__.get("__notes__", [])  # PEP 678
    return "; ".join([f"{type(error).__name__}: {error}", *notes])
