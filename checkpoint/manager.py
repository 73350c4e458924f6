"""`CheckpointManager`: saves the steps of a run, applies the retention policy, and restores the newest good step.

The files under a root are listed in `steps.step_folders`. The retention policy removes a step only after this job has
committed a newer step. Which step is restored is described at `CheckpointManager.restore`.
"""

from __future__ import annotations

import logging
import operator
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from vescale_fsdp.checkpoint.async_save import AsyncSaver, Optimizers, SaveHandle
from vescale_fsdp.checkpoint.load import Read, Verify, check_choices
from vescale_fsdp.checkpoint.manifest.file_names import step_name
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.memory.ram_tier import RamTier
from vescale_fsdp.checkpoint.native.read_state import read_manifest
from vescale_fsdp.checkpoint.ranks.background import EXIT_TIMEOUT_S, check_exit_timeout
from vescale_fsdp.checkpoint.ranks.coordinator import (
    Coordinator,
    coordinator_for,
    is_of_storage,
    num_neighbors,
)
from vescale_fsdp.checkpoint.ranks.first_error import adding_note, noting
from vescale_fsdp.checkpoint.ranks.replicas import CheckReplicas, check_choice
from vescale_fsdp.checkpoint.restore import Restored, StepSearch, no_such_step, restore_newest
from vescale_fsdp.checkpoint.save import Format, Saver, form_of
from vescale_fsdp.checkpoint.state.matching.result import Strict
from vescale_fsdp.checkpoint.steps.retention import (
    RetentionPolicy,
    StepRecord,
    read_record,
    read_records,
    remove_old_steps,
    remove_unpinned,
    retention_of,
    set_pinned,
)
from vescale_fsdp.checkpoint.steps.run_file import (
    RootHold,
    RunFile,
    hold_root,
    manifest_digest,
    read_run_file,
)
from vescale_fsdp.checkpoint.steps.save_policy import (
    BestOf,
    EverySteps,
    SavePolicy,
    check_policy,
    leaves_of,
    shape_of,
)
from vescale_fsdp.checkpoint.steps.save_schedule import Decision, SaveSchedule
from vescale_fsdp.checkpoint.steps.step_folders import committed_steps, remove_leftovers, torn_steps
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage, path_text
from vescale_fsdp.checkpoint.storage.progress import Tell, meter_for
from vescale_fsdp.errors import ArgumentError, callers_level

_EXPORTS = "exports"  # folder under the root for exported steps
_log = logging.getLogger(__name__)


class _Start(NamedTuple):
    """Where a run starts: at a restored step, or, if it has restored none, at the first step that it saves.

    Attributes:
        newest: the newest step of earlier runs that stays valid.
        is_rollback: whether steps of earlier runs, on disk or in memory, may be later.
        later: on rank 0, the later steps on disk and the checksums of their manifests; empty on other ranks.
        text: for the log.
    """

    newest: int
    is_rollback: bool
    later: dict[int, str]
    text: str


class CheckpointManager:
    """Checkpoints of one run under one root.

    Args:
        root: folder or fsspec URL.
        save_policy: decides when `save` writes a step to disk, unless forced; default: at every call. Pass a policy
            such as ``EverySteps(1000) | EveryMinutes(30)`` or your own `SavePolicy`, of the same classes on all ranks.
            With `OnSignal`, create the manager in the main thread, and close it to restore the signal handlers.
        retention: which steps to keep: a `RetentionPolicy`, or the number of newest steps; default: all steps.
        asynchronous: save in the background; `save` then waits only for the state's copy and for the previous save.
        export: a second format, such as `vescale_fsdp.conversion.HuggingFace(..)`, written to ``exports/step-..`` under
            the root. `restore` does not read exports, retention does not remove them, and a final save writes none.
            An export of the same step is replaced; in an object store, a failed save loses it.
        export_every: every step divisible by this number is exported, even if the policy does not save it.
        ram: also saves steps to shared memory; `restore` tries these steps first.
        process_group: the ranks that save and restore together; default: all.
        progress: callable that receives this rank's progress in disk saves and restores; True draws a bar of rank 0's
            bytes, and in a log file writes lines.
        optimizer: as for `async_save`; used if ``asynchronous``, on an accelerator.
        check_replicas, fingerprint: as for `vescale_fsdp.checkpoint.save`.
        exit_timeout_s: as for `async_save`; used if ``asynchronous``.

    Raises:
        ValueError: for limits below 1, a negative ``exit_timeout_s``, or an unknown ``check_replicas``.
        TypeError: for a ``save_policy`` or ``retention`` of the wrong type.
        CheckpointError: on all ranks, if any rank cannot use the root: it is not a folder, a permission is missing, or
            the bucket does not exist. A read-only root that contains steps causes a warning instead.

    Examples:
        >>> import torch
        >>> state = {"w": torch.zeros(4)}
        >>> with CheckpointManager("run_of_two", retention=2) as manager:
        ...     for step in (1, 2, 3):
        ...         _ = state["w"].fill_(step)
        ...         _ = manager.save(step, state)
        >>> manager.steps()
        [2, 3]
        >>> manager.restore({"w": torch.zeros(4)}).step
        3
    """

    Record = StepRecord  # the type of the items of `history()`, for the user's annotations

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_policy: SavePolicy | None = None,
        retention: RetentionPolicy | int | None = None,
        asynchronous: bool = False,
        export: Format | None = None,
        export_every: int = 1,
        ram: RamTier | None = None,
        process_group: dist.ProcessGroup | None = None,
        progress: Tell = False,
        optimizer: Optimizers = (),
        check_replicas: CheckReplicas = "sample",
        fingerprint: bool | None = None,
        exit_timeout_s: float = EXIT_TIMEOUT_S,
    ) -> None:
        self._exit_timeout_s, self._check_replicas = exit_timeout_s, check_replicas
        self._fingerprint = fingerprint
        self._progress, self._optimizer = progress, optimizer
        self._export_every, self._ram = export_every, ram
        self._coordinator = coordinator_for(process_group)
        alike: dict[str, Json] = {}
        # All arguments are checked inside the block, so that all ranks raise.
        with self._coordinator.together(f"looking at {path_text(root)}", "nothing was written", alike):
            if export_every < 1:
                raise ArgumentError(
                    f"export_every cannot be {export_every}.",
                    expected="at least 1",
                    got=export_every,
                    where="CheckpointManager(export_every=..)",
                )
            check_choice(check_replicas)
            check_exit_timeout(exit_timeout_s)
            policy = check_policy(EverySteps(1) if save_policy is None else save_policy)
            self._retention = retention_of(retention)
            self._best = tuple(rule for rule in leaves_of(policy) if isinstance(rule, BestOf))
            self._root = open_storage(root, neighbors=num_neighbors())  # neighbors: ranks share the cores
            self._export = None if export is None else form_of(export).for_exports()
            self._check_root()
            copies = ram is not None and ram.replicas > 0
            # They decide which groups the ranks create below, and at which steps they meet.
            alike |= {
                "save_policy": shape_of(policy),
                "asynchronous": asynchronous,
                "replicas": copies,
                "export": export is not None,
                "export_every": export_every,
            }
        # Groups of their own: background threads issue collectives at any time between those of the trainer.
        self._behind = coordinator_for(process_group, use="async") if asynchronous else self._coordinator
        self._copying = coordinator_for(process_group, use="copies") if copies else self._coordinator
        self._is_swept = False  # whether leftovers of killed jobs have been removed
        self._async = AsyncSaver(self._behind) if asynchronous else None
        self._handle: SaveHandle | None = None
        # A group of its own: an all-reduce of the schedule can stay in flight between two calls.
        schedule_ranks = coordinator_for(process_group, use="schedule")
        self._schedule = SaveSchedule(policy, schedule_ranks, self._known_metrics)
        self._hold: RootHold | None = None  # on rank 0, after the first save
        self._restored: _Start | None = None  # by a restore since the last save
        self._is_new_run = True  # until the first restore or save: later steps on disk are an older run's
        self._has_begun = False  # whether a save has locked the root since the last restore
        self._run: RunFile | None = None  # the root's run file, only with a RAM tier; the same on all ranks
        self._stall_s: float | None = None  # see `metrics`
        # The newest step that this manager has committed to disk, and the seconds that its save took on this rank.
        self._committed: tuple[int, float] | None = None
        self._record: StepRecord | None = None  # of a step that `metrics` has read

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the manager. If the block raised, an error of a save becomes a note of the block's error."""
        with noting(error):
            self.close()

    def _check_root(self) -> None:
        """Raise if the root cannot be used; warn if it can only be read."""
        problem = self._root.check_root()
        if problem is not None and self._coordinator.rank == 0:
            warnings.warn(f"steps can be restored, but not saved: {problem}", stacklevel=callers_level())

    def clean(self, *, older_than_s: float | None = None) -> list[str]:
        """Remove the leftovers of killed jobs on disk and in memory; a collective. The first save cleans the disk too.

        Leftovers are incomplete steps, data of uncommitted overwrites, unfinished exports, temporary files, and open S3
        uploads. Steps that another job has locked are kept.

        Args:
            older_than_s: age in seconds; younger files are kept. Default: a minute, or a day on object stores, which
                have no locks. Pass 0 only if no other job saves under this root.

        Returns:
            The removed files and folders, the same on all ranks: names under the root, and paths in shared memory.
        """
        self._wait_together()
        removed: list[str] = []
        with self._coordinator.together(f"cleaning {self._root.where}", alike={"older_than_s": older_than_s}):
            if self._coordinator.rank == 0:
                removed = remove_leftovers(self._root, _EXPORTS, older_than_s)
        removed = self._coordinator.everyone(removed)[0]  # rank 0 alone has removed files
        return removed + (self._ram.clean(self._coordinator, older_than_s) if self._ram is not None else [])

    def _sweep(self) -> None:
        """Remove leftovers before the first save; an error only causes a warning."""
        if self._is_swept:
            return
        self._is_swept = True  # set first: after a failure, later saves do not try again
        with self._coordinator.together(f"cleaning {self._root.where}"):
            if self._coordinator.rank == 0:
                try:
                    remove_leftovers(self._root, _EXPORTS)
                except Exception as error:  # noqa: BLE001  no committed step depends on this cleanup
                    problem = f"{type(error).__name__}: {error}"
                    warnings.warn(
                        f"leftovers under {self._root.where} stay: {problem}", stacklevel=callers_level()
                    )

    def steps(self) -> list[int]:
        """Return the committed steps, ascending, without steps that a rollback has abandoned (see `restore`)."""
        return committed_steps(self._root)

    def history(self) -> list[StepRecord]:
        """Return a record of each committed step: size, seconds, metric, and whether it is pinned or abandoned."""
        return read_records(self._root)

    def metrics(self) -> dict[str, float]:
        """Return numbers about the last save, for TensorBoard, W&B or another logger; not a collective.

        The number of bytes comes from the manifest of the step, which the call reads once per step. Seconds are
        those of this rank.

        Returns:
            Empty before the first save; then

            * "checkpoint/stall_seconds": for how long the last call of `save` that saved a step held this rank,
              including saves to memory, exports, and the removal of older steps. An asynchronous save holds it for the
              copy of the state, and for the end of the previous save
            * "checkpoint/step": the newest step that is committed to disk
            * "checkpoint/bytes": size of all tensors and per-rank values of this step
            * "checkpoint/save_seconds": duration of the save of this step, from the call of `save` until its commit. An
              asynchronous save's includes the time in the background

        Examples:
            >>> import torch
            >>> with CheckpointManager("watched") as manager:
            ...     _ = manager.save(7, {"w": torch.zeros(4)})
            >>> sorted(manager.metrics())
            ['checkpoint/bytes', 'checkpoint/save_seconds', 'checkpoint/stall_seconds', 'checkpoint/step']
        """
        found: dict[str, float | None] = {"checkpoint/stall_seconds": self._stall_s}
        if self._committed is not None:
            step, found["checkpoint/save_seconds"] = self._committed
            if self._record is None or self._record.step != step:
                self._record = read_record(self._root, step)
            found["checkpoint/step"] = step
            found["checkpoint/bytes"] = self._record.num_bytes
        return {name: value for name, value in found.items() if value is not None}

    def pin(self, step: int) -> None:
        """Exempt a step from the retention policy; a collective."""
        self._change(step, "pinning", partial(set_pinned, self._root, step, True))

    def unpin(self, step: int) -> None:
        """Let the retention policy apply to a step again; a collective."""
        self._change(step, "unpinning", partial(set_pinned, self._root, step, False))

    def remove(self, step: int) -> None:
        """Remove a step from disk and from memory; a collective.

        Raises:
            CheckpointError: if there is no such step, it is pinned, or it could not be removed.
        """
        self._change(step, "removing", partial(remove_unpinned, self._root, step))
        if self._ram is not None:
            self._ram.remove(self._coordinator, step)

    def _change(self, step: int, doing: str, work: Callable[[], None]) -> None:
        """Run `work` on rank 0; raise on all ranks if the step does not exist. A collective."""
        self._wait_together()  # the step may be the one that is still being saved
        doing = f"{doing} step {step} of {self._root.where}"
        alike: dict[str, Json] = {}
        with self._coordinator.together(doing, "the step may be incomplete", alike):
            alike["step"] = step = _step_number(step)
            if self._coordinator.rank == 0:
                if step not in committed_steps(self._root, abandoned=True):
                    raise no_such_step(self._root, step)
                work()

    @property
    def should_stop(self) -> bool:
        """Whether all ranks have decided on a final save, because of a signal or a deadline. End the run after it."""
        return self._schedule.should_stop

    def should_save(self, step: int, *, metric: float | None = None) -> bool:
        """Return whether `save` would write this step to disk, to memory or as an export; a collective.

        Use it if building the state for `save` is expensive.

        Args:
            step, metric: as for `save`. If the metric is passed here, `save` may omit it.

        Raises:
            CheckpointError: if ranks pass different steps, or a policy failed on another rank. A rank whose own policy
                failed raises that error.
            TypeError: if a policy returns something other than a bool, on any rank.
        """
        decision = self._decide(step, metric, force=False)
        return bool(self._targets(decision)) or self._is_for_ram(step)

    def _is_for_ram(self, step: int) -> bool:
        """Return whether a step is due to be saved to memory."""
        return self._ram is not None and self._ram.is_due(step)

    def _is_exported(self, step: int) -> bool:
        """Return whether a step is due to be exported."""
        return self._export is not None and step % self._export_every == 0

    def _targets(self, decision: Decision) -> list[tuple[Storage, Format]]:
        """Return (folder, format) of everything to write for a step: first the step itself, then its export."""
        name, targets = step_name(decision.step), list[tuple[Storage, Format]]()
        if decision.is_due:
            targets.append((self._root.child(name), "native"))
        # A final save has no export, since the job ends after it, often at a deadline.
        if self._export is not None and self._is_exported(decision.step) and not decision.is_final:
            targets.append((self._root.child(_EXPORTS).child(name), self._export))
        return targets

    def _decide(self, step: int, metric: float | None, *, force: bool) -> Decision:
        """Check the arguments, and decide with all ranks whether the step is saved. A collective."""
        try:
            step = _step_number(step)
            if step < 0:
                raise ArgumentError(
                    "A step cannot be negative.", expected="step >= 0", got=step, where="step=.."
                )
            metric = None if metric is None else float(metric)  # a tensor of one item becomes a float
        except Exception:  # any class: a metric's `__float__` is the user's code
            self._schedule.refuse()  # otherwise ranks with a valid step would wait for this rank
            raise
        # A step for memory or export has further collectives, so its call has to wait for all ranks anyway.
        return self._schedule.decide(
            step, metric, force=force, waits=self._is_for_ram(step) or self._is_exported(step)
        )

    def save(
        self,
        step: int,
        state: Any,
        *,
        metadata: Json = None,
        force: bool = False,
        metric: float | None = None,
    ) -> SaveHandle | None:
        """Save a step if it is due; a collective. Raises the error of the previous asynchronous save, if any.

        Args:
            step: the step's number, 0 or more; an existing step of that number is replaced.
            state: as for `vescale_fsdp.checkpoint.save`.
            metadata: JSON of your own (counters, configuration); returned in the report of `restore`.
            force: save even if the policy would not.
            metric: the step's metric, the same on all ranks; used by `BestOf` and `history`.

        Returns:
            A handle if the save runs in the background, else None. A final save (see `should_stop`) goes to disk only,
            and is complete when the call returns.

        Raises:
            CheckpointError: if this save or the previous asynchronous one failed, or ranks pass different steps.
            TypeError: if the step is not an integer, or a policy returns something other than a bool.
        """
        start_s = time.monotonic()
        decision = self._decide(step, metric, force=force)
        step, save_id = decision.step, None
        targets = self._targets(decision)
        # A final save goes to disk only: the job ends after it, often at a deadline.
        to_ram = self._ram is not None and (force or self._ram.is_due(step)) and not decision.is_final
        # An export alone is no step of the run, so it needs neither the lock nor a branch.
        if (to_ram or decision.is_due) and not self._has_begun:
            self._begin_branch(step)
        save_to_ram: Callable[[], bool] | None = None
        is_in_ram = False
        if to_ram:
            assert self._ram is not None and self._run is not None
            # The save to disk gets the same save_id, which shows that memory and disk have the same state.
            save_id, is_copying = self._ram.begin(self._coordinator, self._run)
            save_to_ram = partial(
                self._ram.save,
                self._coordinator,
                step,
                state,
                metadata,
                save_id=save_id,
                run=self._run,
                behind=self._copying,
                check_replicas=self._check_replicas,
                fingerprint=self._fingerprint,
            )
            # A save to memory waits until the previous step is copied to other nodes. While such copies run, the save
            # to disk comes first, so that it need not wait for them.
            if not (is_copying and targets):
                is_in_ram, save_to_ram = save_to_ram(), None
        if not targets:
            if to_ram:
                self._stall_s = time.monotonic() - start_s
            return None
        self._sweep()
        also = f"step {step} is saved in memory, from where restore takes it" if is_in_ram else None
        try:
            self._save_to(targets, decision, state, metadata, save_id, also, start_s)
        except Exception as error:  # any class: `is_of_storage` reads its mark
            # If only the disk failed, the state itself is good and can still be saved to memory.
            if save_to_ram is not None and is_of_storage(error) and save_to_ram():
                error.add_note(f"step {step} is saved in memory, from where restore takes it")
            raise
        if save_to_ram is not None:  # postponed above
            save_to_ram()
        if decision.is_due:
            self._schedule.saved(decision)
        self._stall_s = time.monotonic() - start_s
        return self._handle

    def _begin_branch(self, step: int) -> None:
        """Lock the root and record a rollback, before the first save and before the first save after each restore.

        A collective.

        Args:
            step: the step to save.
        """
        run: RunFile | None = None
        with self._coordinator.together(f"beginning to save to {self._root.where}"):
            if self._coordinator.rank == 0:
                run = self._branch(step)
        self._has_begun, self._restored, self._is_new_run = True, None, False
        if self._ram is not None:
            self._run = self._coordinator.everyone(run)[0]  # only rank 0 has read or written the file

    def _branch(self, step: int) -> RunFile | None:
        """Update the root's run file and return its content, on rank 0; None if there is no file and none is needed."""
        run = read_run_file(self._root)
        start, is_locked = self._restored, self._hold_root()
        # Memory may have later steps even if the disk has none and no rank sees any: that of a lost node that returns.
        # They belong to branches in `run`.
        is_after_memory = self._ram is not None and run is not None and is_locked
        if self._is_new_run:
            text = f"starts at step {step}, without a restore"
            start = _Start(step - 1, is_after_memory, self._steps_after(step), text)
        later = start.later if start is not None else {}
        changed = run
        if start is not None and (start.is_rollback or is_after_memory or later):
            if is_locked:
                # Steps that another job has saved, or saved again, since the restore are not abandoned.
                later = {
                    step: digest
                    for step, digest in later.items()
                    if manifest_digest(self._root, step) == digest
                }
                changed = (run or RunFile.new()).rolled_back(start.newest, later)
            else:
                warnings.warn(
                    f"another job holds {self._root.where}: the steps after step {start.newest} were not marked as "
                    "abandoned, and a restart takes them again. Give each run its own root",
                    stacklevel=callers_level(),
                )
        if self._ram is not None and changed is None:
            changed = RunFile.new()  # steps in memory belong to a branch of the run file
        if changed is not None and changed is not run:
            changed.write(self._root)
            if start is not None and later:
                _log.warning(
                    "%s %s: later steps are abandoned (skipped by restore, and kept until this run saves a step of the "
                    "same number%s): %s",
                    self._root.where,
                    start.text,
                    f", as it does now with step {step}" if step in later else "",
                    ", ".join(map(str, sorted(later))),
                )
        return changed

    def _hold_root(self) -> bool:
        """Try to lock the root until the manager is closed. Returns whether this process has the lock."""
        if self._hold is None:
            try:
                self._hold = hold_root(self._root)
            except BlockingIOError:  # another job has the lock
                return False
        return True

    def _save_to(
        self,
        targets: Sequence[tuple[Storage, Format]],
        decision: Decision,
        state: Any,
        metadata: Json,
        save_id: str | None,
        also: str | None,
        called_s: float,
    ) -> None:
        """Write a step to disk: the step itself, its export, or both.

        Args:
            targets: from `_targets`.
            also: a note for errors, which says where else the step is saved; None if nowhere.
            called_s: when the user called `save`, by `time.monotonic`.
        """
        if self._async is None or decision.is_final:  # the job may exit right after a final save
            with self._after_previous_save(decision):
                for storage, form in targets:
                    meter = meter_for(self._progress, self._coordinator.rank)
                    saver = Saver(
                        storage,
                        self._coordinator,
                        overwrite=True,  # a step that was saved before is replaced
                        format=form,
                        save_id=save_id,
                        meter=meter,
                        check_replicas=self._check_replicas,
                        fingerprint=self._fingerprint,
                        metric=decision.metric,
                        called_s=called_s,
                    )
                    with adding_note(also):
                        saver.save(state, metadata)
                    if decision.is_due and storage is targets[0][0]:  # the step itself; exports come after it
                        self._conclude(decision, self._coordinator, called_s)
            return
        self._wait_for_disk_together()
        (storage, form), *copies = targets
        self._handle = self._async.start(
            storage,
            state,
            metadata=metadata,
            overwrite=True,  # a step that was saved before is replaced
            format=form,
            after=partial(self._conclude, decision, self._behind, called_s=called_s)
            if decision.is_due
            else None,
            copies=copies,
            progress=self._progress,
            save_id=save_id,
            also=also,
            optimizer=self._optimizer,
            check_replicas=self._check_replicas,
            fingerprint=self._fingerprint,
            exit_timeout_s=self._exit_timeout_s,
            metric=decision.metric,
            called_s=called_s,
        )

    @contextmanager
    def _after_previous_save(self, decision: Decision) -> Iterator[None]:
        """Context manager: wait for the previous save, and raise its error before the block.

        Around a final save, the error is raised after the block: no later step could be saved instead.
        """
        error: Exception | None = None
        try:
            self._wait_for_disk_together()
        except Exception as caught:  # any class: raised after the final save
            if not decision.is_final:
                raise
            error = caught
        yield
        if error is not None:
            error.add_note(f"the previous save failed; step {decision.step}, the final one, is saved")
            raise error

    def _conclude(self, decision: Decision, coordinator: Coordinator, called_s: float) -> None:
        """Apply the retention policy after the commit of a step, on rank 0. A collective.

        Args:
            called_s: when the user called `save`, by `time.monotonic`.
        """
        # One assignment: another thread may read both in `metrics`.
        self._committed = (decision.step, time.monotonic() - called_s)
        doing = f"removing older steps from {self._root.where}"
        with coordinator.together(doing, f"step {decision.step} is committed"):
            if coordinator.rank == 0:
                remove_old_steps(self._root, decision.step, self._retention, self._best)

    def _known_metrics(self, step: int) -> list[float]:
        """Return the metrics of the steps that rank 0 sees on disk, before ``step`` may be saved. A collective.

        Without steps that are abandoned, or that the save will mark as abandoned.
        """
        metrics: list[float] = []
        with self._coordinator.together(f"reading the metrics of {self._root.where}", "nothing was saved"):
            if self._coordinator.rank == 0:
                history = self.history()
                later = {record.step for record in history if self._is_new_run and record.step > step}
                later |= self._restored.later.keys() if self._restored is not None else set()
                records = [record for record in history if not (record.abandoned or record.step in later)]
                metrics = [record.metric for record in records if record.metric is not None]
        return self._coordinator.everyone(metrics)[0]

    def wait(self) -> None:
        """Wait until no save and no copy to another node's memory is in flight. A failed copy only causes a warning.

        Raises:
            CheckpointError: if the last asynchronous save failed; raised once.
        """
        try:
            self._wait_for_disk()
        finally:
            if self._ram is not None:
                self._ram.wait()

    def _wait_for_disk(self) -> None:
        """Wait for the last asynchronous save, and raise its error."""
        handle, self._handle = self._handle, None  # cleared first: an error is raised only once
        if handle is not None:
            handle.wait()

    def close(self) -> None:
        """Wait for the last save, restore the signal handlers, and release the lock of the root."""
        try:
            self.wait()
        finally:
            self._schedule.close()
            self._hold, self._has_begun = None, False  # the lock is released with its last reference

    def abandon(self) -> None:
        """Wait until no save is in flight, and ignore errors of saves. For a job that has lost ranks."""
        self._hold, self._has_begun = None, False  # the lock is released with its last reference
        if self._async is not None:
            self._async.drain()
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.exception()  # marks the error as read, so that the exit does not report it
        if self._ram is not None:
            self._ram.abandon()

    def _wait_for_disk_together(self) -> None:
        """Wait for the previous asynchronous save; its error is raised on all ranks."""
        with self._coordinator.together("waiting for the previous save", is_first=True):
            self._wait_for_disk()

    def _wait_together(self) -> None:
        """Wait for the previous save and for copies to other nodes; an error is raised on all ranks."""
        with self._coordinator.together("waiting for the previous save", is_first=True):
            self.wait()

    def restore(
        self,
        state: Any,
        *,
        step: int | None = None,
        strict: Strict = True,
        include: str | tuple[str, ...] | None = None,
        init: Callable[[nn.Module], object] | None = None,
        verify: Verify = "while",
        read: Read = "auto",
        read_only: bool = False,
        patience_s: float = 30.0,
    ) -> Restored | None:
        """Fill a state from the newest good step; a collective.

        Restoring changes nothing on disk. After a rollback with ``step=``, or if the newest steps are damaged, the disk
        contains steps that are later than the restored one. The next `save` of this manager marks these later steps as
        abandoned before it writes: they are logged, and `restore`, `latest` and `steps` skip them. They are kept until
        the run saves a step of the same number, which replaces the abandoned one. The first
        `save` of a manager that has not called `restore` does the same with later steps, which are an older run's. To
        restore an abandoned step, pass ``step=``; to delete it, call `remove`. Every job locks the root from its first
        save to `close`; no step is marked while another job has the lock.

        A damaged step is skipped with a warning. Then the next older step is tried, which overwrites everything that
        the damaged step has overwritten. An undamaged step that does not fit the state is an error, because older steps
        would not fit either. Any other failure to read a step, such as a lost connection, is an error too. If another
        job removes the step during the restore, the search for the newest step starts again.

        Args:
            state: filled in place, as by `load`.
            step: restore this step only.
            read_only: True if this manager does not continue the run: its saves then never mark steps as abandoned.
            strict, include, init, verify, read: as for `load`. ``read`` does not apply to a step in memory, which each
                rank reads itself. Unless ``read_only``, a strict restore also refuses a step with another object, such
                as an optimizer that the state lacks: training would go on without it.
            patience_s: seconds for which ranks retry while they see different steps, for example because of stale
                caches of a network file system; then all ranks raise.

        Returns:
            The restored step and its metadata; None if no rank sees any checkpoint.

        Raises:
            ValueError: for a negative ``patience_s``, or an unknown ``verify`` or ``read``.
            CorruptCheckpointError: if all existing steps are damaged. With ``verify="before"`` the state is then
                unchanged.
            CheckpointError: if a step does not fit the state, the given step does not exist, or ranks see different
                steps for ``patience_s``. An error of one rank is raised on all ranks.
            PartialLoadError: instead of these errors, if a step was loaded in part and no other step completely; see
                `load`. If damage was the cause, it is a CorruptCheckpointError too.
        """
        self._wait_together()
        alike: dict[str, Json] = {"strict": strict, "verify": verify, "read": read, "read_only": read_only}
        alike["init"] = init is not None
        run: RunFile | None = None
        with self._coordinator.together(f"starting to restore from {self._root.where}", alike=alike):
            check_choices(verify, read)  # also checked by `Loader`, but only if there is a step to load
            if not patience_s >= 0:  # also refuses NaN
                raise ArgumentError(
                    "patience_s is not a time.",
                    expected=">= 0",
                    got=patience_s,
                    where="CheckpointManager.restore(patience_s=..)",
                )
            patterns = (include,) if isinstance(include, str) else include
            if isinstance(state, (int, str, os.PathLike)):
                raise ArgumentError(
                    "A number or a path is no state to fill.",
                    expected="a state, such as {'model': model, 'optimizer': optimizer}",
                    got=repr(state),
                    where="CheckpointManager.restore(state=..)",
                    todo="manager.restore(state), or manager.restore(state, step=5)",
                )
            wanted = None if step is None else _step_number(step)
            # Added after their checks; ranks compare the arguments when the block ends.
            alike |= {"step": wanted, "include": patterns, "ram": self._ram.name if self._ram else None}
            if self._ram is not None and self._coordinator.rank == 0:
                run = read_run_file(self._root)
        run = self._coordinator.everyone(run)[0] if self._ram is not None else None
        search = StepSearch(self._root, self._ram, self._coordinator, run, wanted, patience_s)
        restored = restore_newest(
            search,
            self._coordinator,
            state,
            strict=strict,
            include=patterns,
            init=init,
            verify=verify,
            read=read,
            meter=meter_for(self._progress, self._coordinator.rank),
            whole=not read_only,
        )
        self._is_new_run = False
        if not read_only and wanted is None:
            self._warn_of_torn_steps(0 if restored is None else restored.step)
        if restored is not None and not read_only:
            self._note_restored(restored.step, is_rollback=bool(wanted is not None or restored.skipped))
            if restored.tier == "ram" and self._ram is not None and self._ram.replicas:
                self._renew_copies(self._ram, restored.step)
        return restored

    def _renew_copies(self, ram: RamTier, step: int) -> None:
        """Start to copy a step in memory to nodes whose copies were lost or damaged. A collective."""
        manifest: Manifest | None = None
        doing = f"reading the manifest of step {step} in memory"
        with self._coordinator.together(doing, f"step {step} is restored"):
            manifest = read_manifest(ram.step_storage(step))
        assert manifest is not None
        ram.begin_renewal(self._coordinator, self._copying, step, manifest)

    def _warn_of_torn_steps(self, step: int) -> None:
        """Log the folders of steps later than ``step`` that have no manifest. A collective."""
        with self._coordinator.together(f"looking for steps without a manifest in {self._root.where}"):
            if self._coordinator.rank != 0:
                return
            if later := torn_steps(self._root, after=step):
                _log.warning(
                    "%s: steps without a manifest were not restored: %s. Their saves were interrupted or still run "
                    "in another job, or their manifests were deleted. The next save removes old ones: if they were "
                    "complete, put the manifests back first.",
                    self._root.where,
                    ", ".join(map(str, later)),
                )

    def _note_restored(self, step: int, *, is_rollback: bool) -> None:
        """Note which step the run continues from and, on rank 0, which steps on disk are later. A collective."""
        later: dict[int, str] = {}
        with self._coordinator.together(
            f"looking for steps after step {step} in {self._root.where}", f"step {step} is restored"
        ):
            if self._coordinator.rank == 0:
                later = self._steps_after(step)
        self._restored = _Start(step, is_rollback, later, f"goes on from step {step}")
        self._has_begun = False
        self._schedule.restored(step)

    def _steps_after(self, step: int) -> dict[int, str]:
        """Return the steps on disk that are later than ``step``, and the checksums of their manifests."""
        numbers = [number for number in committed_steps(self._root) if number > step]
        digests = {number: manifest_digest(self._root, number) for number in numbers}
        # The digest is None if another job has removed the step just now.
        return {number: digest for number, digest in digests.items() if digest is not None}


def _step_number(step: object) -> int:
    """Return the number of a step; integers of numpy and torch are accepted, floats are not.

    Raises:
        ArgumentError: for another value, such as a state that was passed in place of the number.
    """
    try:
        return operator.index(step)  # type: ignore[arg-type]
    except TypeError as error:
        raise ArgumentError(
            "This is not the number of a step.",
            expected="an integer",
            got=repr(step) if isinstance(step, (str, float)) else f"a value of type {type(step).__name__}",
            todo="pass the number first: manager.save(step, state), manager.should_save(step), manager.pin(step); to "
            "restore, manager.restore(state, step=5)",
            where="step=..",
        ) from error
