"""`async_save`: the trainer waits only for a copy into a reused staging buffer; the save runs in the background.

    trainer              staging buffer            worker thread
    ---------------      --------------------      ---------------------------------------------
    walk the state
    copy             ->  this rank's tensors
    train on                                  ->   agree, hash, write, commit (see `save`)
    handle.wait()                             <-   done, or the error

On an accelerator the copy runs on a stream of its own. Tensors that only the optimizers in `optimizer` write are copied
while the trainer goes on: the optimizers' next step waits for the copy, on the device. All other copies are complete
when the call returns.

A save uses the buffer until it ends, so a second save waits for the first, instead of allocating a second buffer. All
saves of a process run on one worker thread in the order of the calls. This order is the same on all ranks, so their
collectives match.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.ranks.background import EXIT_TIMEOUT_S, BackgroundThread, Job, check_exit_timeout
from vescale_fsdp.checkpoint.ranks.coordinator import (
    Coordinator,
    SoloCoordinator,
    coordinator_for,
    num_neighbors,
)
from vescale_fsdp.checkpoint.ranks.first_error import adding_note, noting
from vescale_fsdp.checkpoint.ranks.replicas import CheckReplicas
from vescale_fsdp.checkpoint.save import Format, Saver, plain_json
from vescale_fsdp.checkpoint.state.capture import TakenState, take_state
from vescale_fsdp.checkpoint.state.host_copies import DeferredCopy, Stager, memory_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage, path_text
from vescale_fsdp.checkpoint.storage.progress import Tell, meter_for
from vescale_fsdp.errors import ArgumentError
from vescale_fsdp.torch_modes import plainly

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_HEAD_START_S = 0.005  # delay of the worker, which would compete with the trainer for the interpreter lock
_worker = BackgroundThread("checkpoint-save")


class SaveHandle:
    """A save that runs in the background. A ``with`` block waits for the save at its end.

    An exiting process finishes its saves first. If a save failed and no code read its error, or if the save takes
    longer than ``exit_timeout_s``, the process names the save on stderr and exits with status 1.

    Examples:
        >>> import torch
        >>> with async_save("saved_with_handle", {"w": torch.ones(4)}) as handle:
        ...     pass  # training goes on
        >>> handle.done()
        True
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def __enter__(self) -> SaveHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the save. If the block raised, an error of the save becomes a note of the block's error."""
        with noting(error):
            self.wait()

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not. Never blocks."""
        return self._job.future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint is committed and durable.

        Raises:
            CheckpointError: if another rank failed. The failed rank raises its own error. Both errors say whether the
                checkpoint was committed.
            TimeoutError: if the save takes longer than ``timeout_s``.
        """
        # Raises only a timeout: after it, no code has read the save's result, so `is_read` must stay False.
        self._job.future.exception(timeout_s)
        self._job.is_read = True
        self._job.future.result()

    def exception(self) -> BaseException | None:
        """Wait until the save has ended. Returns its error, or None if it succeeded."""
        error = self._job.future.exception()
        self._job.is_read = True
        return error


class AsyncSaver:
    """Saves in the background, at most one at a time.

    Args:
        coordinator: coordinator of the ranks that save; its group must not be used for anything else.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._stager = Stager()
        self._last: Job | None = None  # the save that was started last

    @plainly  # the copies are used later, by a thread that is not in the caller's modes
    def start(
        self,
        path: str | os.PathLike[str] | Storage,
        state: Any,
        *,
        metadata: Json = None,
        overwrite: bool = False,
        format: Format = "native",
        after: Callable[[], None] | None = None,
        copies: Sequence[tuple[Storage, Format]] = (),
        progress: Tell = False,
        save_id: str | None = None,
        also: str | None = None,
        optimizer: Optimizers = (),
        check_replicas: CheckReplicas = "sample",
        fingerprint: bool | None = None,
        exit_timeout_s: float = EXIT_TIMEOUT_S,
        metric: float | None = None,
        called_s: float | None = None,
    ) -> SaveHandle:
        """Copy the state and return; the save goes on in the background.

        Args:
            after: called on the worker thread when the checkpoint is committed.
            copies: further storages for the same state, each with its format; existing folders are replaced.
            also: a note for errors, which says where else the state is saved; None if nowhere.
            optimizer, exit_timeout_s: as for `async_save`.
            metric: see `SaveRecord`.
            called_s: when the user called, by `time.monotonic`; None for now.
        """
        called_s = time.monotonic() if called_s is None else called_s
        savers: list[Saver] = []
        taken: tuple[TakenState, DeferredCopy] | None = None
        error: BaseException | None = None
        where, waits_s = type(path).__name__, EXIT_TIMEOUT_S  # until the arguments are known to be valid
        try:
            check_exit_timeout(exit_timeout_s)
            waits_s = exit_timeout_s
            where = path_text(path)
            self.drain()  # the previous save still reads the staging buffer
            storage = open_storage(path, neighbors=num_neighbors())  # neighbors: ranks share the cores
            where = storage.where
            meter = meter_for(progress, self._coordinator.rank)
            saver = partial(
                Saver,
                coordinator=self._coordinator,
                save_id=save_id,
                meter=meter,
                check_replicas=check_replicas,
                fingerprint=fingerprint,
                metric=metric,
                called_s=called_s,
            )
            savers = [saver(storage, overwrite=overwrite, format=format)]
            savers += [saver(folder, overwrite=True, format=form) for folder, form in copies]
            taken = self._stage(take_state(state, rank_of=self._coordinator.rank_of), savers, optimizer)
            metadata = plain_json(metadata)  # a copy: the trainer may change its dict
        except BaseException as caught:  # noqa: BLE001  the worker raises it on all ranks
            error = caught

        def take() -> TakenState:
            """Return the copied state, or raise the error of the copy: `Saver.write` raises it on all ranks."""
            if error is not None:
                raise error
            assert taken is not None
            return taken[0]

        def work() -> None:
            """Write the checkpoint and its copies, on the worker thread."""
            nonlocal error
            time.sleep(_HEAD_START_S)
            try:
                if taken is not None:
                    taken[1].finish()
            except Exception as caught:  # noqa: BLE001  `take` raises it on all ranks
                error = error or caught
            if not savers:  # an error came before their creation
                self._coordinator.agree(None, 0, error)  # other ranks wait in `agree`: now all ranks raise
                return
            for number, saver in enumerate(savers):
                with adding_note(also):
                    saver.write(take, metadata)
                if number == 0 and after is not None:  # the checkpoint itself, not one of `copies`
                    after()

        # Submitted after an error too: the other ranks wait in `agree` for this rank to report the error.
        self._last = _worker.submit(work, f"the save to {where}", exit_timeout_s=waits_s)
        if isinstance(error, ArgumentError) or (error is not None and not isinstance(error, Exception)):
            self._last.is_read = True  # the exit must not report an error that is raised here
            raise error  # a mistake in the call, or Ctrl-C, stops the trainer now, not only in `handle.wait()`
        return SaveHandle(self._last)

    def drain(self) -> None:
        """Wait until no save is in flight. Raises nothing: an error of the save stays with its handle."""
        if self._last is not None:
            wait([self._last.future])

    def _stage(
        self, taken: TakenState, savers: Sequence[Saver], optimizer: Optimizers
    ) -> tuple[TakenState, DeferredCopy]:
        """Copy the tensors that any of the savers stores into the staging buffer.

        Returns the state with these copies in place of its tensors, and the copies that may still run.
        """
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        # A tensor that every format drops is not copied.
        dropped = set.intersection(*(set(saver.dropped(taken.structure)) for saver in savers))
        names = [name for name in taken.locals_by_name if name not in dropped]
        per_rank = [tensor for _, tensors in taken.per_rank.values() for tensor in tensors]
        staged, copying = self._stager.stage(
            [*(taken.locals_by_name[name] for name in names), *per_rank],
            can_wait=frozenset(memory_of(optimizers)),
        )
        rest = iter(staged[len(names) :])  # the per-rank tensors follow the named ones
        copies = {
            name: (tree, [next(rest) for _ in tensors]) for name, (tree, tensors) in taken.per_rank.items()
        }
        locals_by_name = dict(zip(names, staged, strict=False))  # `staged` also ends with per-rank tensors
        return TakenState(taken.structure, locals_by_name, copies, taken.resharded), copying


_solo_saver = AsyncSaver(SoloCoordinator())
# One saver, and so one staging buffer, per group. Weak keys: the buffer is freed together with the group.
_group_savers: weakref.WeakKeyDictionary[dist.ProcessGroup, AsyncSaver] = weakref.WeakKeyDictionary()


def async_save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    metadata: Json = None,
    overwrite: bool = False,
    format: Format = "native",
    process_group: dist.ProcessGroup | None = None,
    progress: Tell = False,
    optimizer: Optimizers = (),
    check_replicas: CheckReplicas = "sample",
    fingerprint: bool | None = None,
    exit_timeout_s: float = EXIT_TIMEOUT_S,
) -> SaveHandle:
    """Like `save`, but returns as soon as the state is copied; a collective.

    If the previous call's save is still running, this call waits for it first. Other arguments are those of `save`.

    Args:
        optimizer: one or several torch optimizers. On an accelerator, their parameters and state are copied while the
            trainer goes on, and the optimizers' next step waits for the copy. If other code writes these tensors before
            that step, the save fails; writes through ``.data`` are not noticed (docs/limits.md).
        exit_timeout_s: seconds that an exiting process waits for the save; after that, the process names the save on
            stderr and exits with status 1.

    Returns:
        A handle. Its ``wait()`` and the end of a ``with`` block wait until the checkpoint is committed, and raise the
        error of a failed save.

    Raises:
        ArgumentError: for an argument that is not accepted, such as a state in the place of the path. The handles of
            the other ranks raise too.

    Examples:
        >>> import torch
        >>> handle = async_save("saved_behind", {"w": torch.ones(4)})  # .. training goes on ..
        >>> handle.wait()
        >>> handle.done()
        True
    """
    saver = _saver_for(process_group)
    return saver.start(
        path,
        state,
        metadata=metadata,
        overwrite=overwrite,
        format=format,
        progress=progress,
        optimizer=optimizer,
        check_replicas=check_replicas,
        fingerprint=fingerprint,
        exit_timeout_s=exit_timeout_s,
    )


def _saver_for(process_group: dist.ProcessGroup | None) -> AsyncSaver:
    """Return the saver of a process group, which is created by the first call."""
    coordinator = coordinator_for(process_group, use="async")
    if isinstance(coordinator, SoloCoordinator):  # a single process has no group
        return _solo_saver
    # The default group is looked up, because None cannot be a weak key.
    base = process_group if process_group is not None else dist.group.WORLD
    assert base is not None
    return _group_savers.setdefault(base, AsyncSaver(coordinator))
