"""`async_save`: the trainer waits for one copy into a reused staging buffer; everything else is behind it.

    trainer              staging buffer            worker thread
    ---------------      --------------------      ---------------------------------------------
    walk the state
    copy             ->  this rank's tensors
    train on                                  ->   agree, hash, write, meet, commit (see `save`)
    handle.wait()                             <-   done, or the error

On an accelerator the copy is work of a stream of its own. What the given optimizers alone write is copied while the
trainer goes on: their next step waits for it, on the device. All else is there when the call returns.

The buffer (see `staging`) belongs to the save until it ends, so a second save
waits for the first: back-pressure instead of unbounded memory. All saves of a process run on one worker
thread, in the order in which they were started, which is the same on all ranks.
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
from vescale_fsdp.checkpoint.ranks.background import (
    EXIT_TIMEOUT_S,
    BackgroundThread,
    Job,
    check_exit_timeout,
)
from vescale_fsdp.checkpoint.ranks.coordinator import (
    Coordinator,
    SoloCoordinator,
    coordinator_for,
    num_neighbours,
)
from vescale_fsdp.checkpoint.ranks.first_error import noting, telling
from vescale_fsdp.checkpoint.saving.replicas import CheckReplicas
from vescale_fsdp.checkpoint.saving.save import Format, Saved, Saver, plain_json
from vescale_fsdp.checkpoint.saving.staging import Stager
from vescale_fsdp.checkpoint.state.capture import TakenState, take_state
from vescale_fsdp.checkpoint.state.host_copies import DeferredCopy, memory_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.checkpoint.storage.progress import Tell, meter_for
from vescale_fsdp.torch_modes import plainly

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_HEAD_START_S = 0.005
_worker = BackgroundThread("checkpoint-save")


class SaveHandle:
    """A save that goes on in the background. A ``with`` block waits for it at its end.

    A process that exits finishes its saves first. If one failed and its error was never asked for, or it takes longer
    than its ``exit_timeout_s``, stderr names it and the exit status is 1.

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
        """Wait; an error of the block is raised before one of the save, which is then a note of it."""
        with noting(error):
            self.wait()

    def done(self) -> bool:
        """Whether the save has ended, well or not. Never blocks."""
        return self._job.future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the checkpoint is committed and durable.

        Raises:
            CheckpointError: if another rank failed, and how. A rank that failed itself raises what it met. What has
                become of the checkpoint is said in either.
            TimeoutError: if it takes longer than ``timeout_s``.
        """
        self._job.future.exception(timeout_s)
        self._job.is_read = True
        self._job.future.result()

    def exception(self) -> BaseException | None:
        """The error that the save ended with, or None; blocks until the save has ended."""
        error = self._job.future.exception()
        self._job.is_read = True
        return error


class AsyncSaver:
    """Saves behind training, at most one at a time.

    Args:
        coordinator: the ranks that save together; its group must serve nothing else.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._stager = Stager()
        self._last: Job | None = None

    @plainly
    def start(
        self,
        path: str | os.PathLike[str] | Storage,
        state: Any,
        *,
        metadata: Json = None,
        overwrite: bool = False,
        format: Format = "native",
        after: Callable[[Saved], None] | None = None,
        copies: Sequence[tuple[Storage, Format]] = (),
        progress: Tell = False,
        save_id: str | None = None,
        also: str | None = None,
        optimizer: Optimizers = (),
        check_replicas: CheckReplicas = "sample",
        exit_timeout_s: float = EXIT_TIMEOUT_S,
    ) -> SaveHandle:
        """Copy the state and return; the save goes on.

        Args:
            also: where else the state is saved, for the message of an error.
            optimizer: see `async_save`.
            after: called when it is committed.
            exit_timeout_s: see `async_save`.
            copies: where the same state goes next, and in which form; what is there is replaced.
        """
        savers: list[Saver] = []
        taken: tuple[TakenState, DeferredCopy] | None = None
        error: BaseException | None = None
        try:
            self.drain()
            storage = open_storage(path, neighbours=num_neighbours())
            meter = meter_for(progress, self._coordinator.rank)
            saver = partial(
                Saver,
                coordinator=self._coordinator,
                save_id=save_id,
                meter=meter,
                check_replicas=check_replicas,
            )
            savers = [saver(storage, overwrite=overwrite, format=format)]
            savers += [saver(place, overwrite=True, format=form) for place, form in copies]
            taken = self._stage(take_state(state, rank_of=self._coordinator.rank_of), savers, optimizer)
            metadata = plain_json(metadata)
        except BaseException as caught:  # noqa: BLE001  all ranks must hear of it, in the worker
            error = caught

        def take() -> TakenState:
            if error is not None:
                raise error
            assert taken is not None
            return taken[0]

        def work() -> None:
            nonlocal error
            # The trainer goes on first: a thread that wakes up holding the interpreter would make it wait.
            time.sleep(_HEAD_START_S)
            try:
                if taken is not None:
                    taken[1].finish()
            except Exception as caught:  # noqa: BLE001  all ranks must hear of it
                error = error or caught
            if not savers:
                self._coordinator.agree(None, 0, error)
                return
            for number, saver in enumerate(savers):
                with telling(also):
                    saved = saver.write(take, metadata)
                if number == 0 and after is not None:
                    after(saved)

        where = (
            savers[0].storage.where
            if savers
            else os.fspath(path)
            if not isinstance(path, Storage)
            else path.where
        )
        self._last = _worker.submit(work, f"the save to {where}", exit_timeout_s=exit_timeout_s)
        if error is not None and not isinstance(error, Exception):
            self._last.is_read = True
            raise error  # Ctrl-C is for whoever trains: it does not wait until somebody asks for the handle
        return SaveHandle(self._last)

    def drain(self) -> None:
        """Wait until no save is in flight; its error, if any, stays with its handle."""
        if self._last is not None:
            wait([self._last.future])

    def _stage(
        self, taken: TakenState, savers: Sequence[Saver], optimizer: Optimizers
    ) -> tuple[TakenState, DeferredCopy]:
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        left_out = set.intersection(*(set(saver.left_out(taken.structure)) for saver in savers))
        names = [name for name in taken.locals_by_name if name not in left_out]
        per_rank = [tensor for _, tensors in taken.per_rank.values() for tensor in tensors]
        staged, copying = self._stager.stage(
            [*(taken.locals_by_name[name] for name in names), *per_rank],
            can_wait=frozenset(memory_of(optimizers)),
        )
        rest = iter(staged[len(names) :])
        copies = {
            name: (tree, [next(rest) for _ in tensors]) for name, (tree, tensors) in taken.per_rank.items()
        }
        locals_by_name = dict(zip(names, staged, strict=False))
        return TakenState(taken.structure, locals_by_name, copies, taken.resharded), copying


_solo_saver = AsyncSaver(SoloCoordinator())
# Weak, as the groups of `coordinator_for` are: a staging buffer ends with the group it served.
_group_savers: weakref.WeakKeyDictionary[dist.ProcessGroup, AsyncSaver] = weakref.WeakKeyDictionary()


def async_save(
    path: str | os.PathLike[str] | Storage,
    state: Any,
    *,
    metadata: Json = None,
    overwrite: bool = False,
    format: Format = "native",
    process_group: dist.ProcessGroup | None = None,
    progress: Tell = False,
    optimizer: Optimizers = (),
    check_replicas: CheckReplicas = "sample",
    exit_timeout_s: float = EXIT_TIMEOUT_S,
) -> SaveHandle:
    """Like `save`, but returns as soon as the state is copied; a collective.

    If the previous call's save still runs, this one waits for it first. Other arguments as for `save`.

    Args:
        optimizer: one or several of torch's kind, which alone write the parameters and the state that they step, until
            their next step. On an accelerator these are then copied while the trainer goes on, and that step waits for
            the copy; any other write to them before fails the save.
        exit_timeout_s: how long a process that exits meanwhile waits for the save; if that is not enough, stderr names
            the save and the exit status is 1.

    Returns:
        A handle: ``wait()``, or the end of a ``with`` block around it, returns when the checkpoint is committed, and
        raises what went wrong.

    Raises:
        ValueError: if ``exit_timeout_s`` is no time.

    Examples:
        >>> import torch
        >>> handle = async_save("saved_behind", {"w": torch.ones(4)})  # .. training goes on ..
        >>> handle.wait()
        >>> handle.done()
        True
    """
    check_exit_timeout(exit_timeout_s)
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
        exit_timeout_s=exit_timeout_s,
    )


def _saver_for(process_group: dist.ProcessGroup | None) -> AsyncSaver:
    coordinator = coordinator_for(process_group, use="async")
    if isinstance(coordinator, SoloCoordinator):
        return _solo_saver
    base = process_group if process_group is not None else dist.group.WORLD
    assert base is not None
    return _group_savers.setdefault(base, AsyncSaver(coordinator))
