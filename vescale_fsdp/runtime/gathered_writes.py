"""Writes to parameters: those to gathered parameters reach the shard, and those to shards invalidate what is gathered.

Between a gather and the reshard, parameters are ordinary tensors, which programs write in place: the moving average of
a codebook, ``nn.Embedding(max_norm=...)``, weights that are clipped through ``.data``. Memory that is freed would lose
these writes. So `GatheredWrites.close` compares this rank's part of the gathered values with the shard, and copies what
differs to the shard. A group whose gathered values are not the shard's (8-bit codes, all-gather hooks) raises.

Every unsharded Parameter has a version counter of its own, which gathers do not change:

    write in place to the gathered parameter      the counter rises, and with it autograd's check of saved tensors
    reshard                                       the counter rises: a backward that reads freed memory raises
    gather of the same values                     the counter is set back: saved tensors are valid again
    gather after a write to the shard             the counter stays: torch raises, as for an unsharded model, if a
    (an optimizer's step, a load)                 backward needs the values before the write
    gather after a write through ``.data``        the counter is set back: a backward reads the new values, as for an
    of the sharded parameter                      unsharded model

All ranks must write the same values. Ranks compare names and bits of written parameters through the log of
`OrderWatch`. A write through ``.data`` raises no counter. Only the owners of the elements see it, so on the CPU ranks
report it to each other with the flags of used parameters, and from then on compare the group's values at every reshard.
On an accelerator the host does not wait for values: such writes are kept, and not compared.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vescale_fsdp.errors import LifecycleError, callers_level, some
from vescale_fsdp.torch_modes import eager, is_fake
from vescale_fsdp.torch_private import increment_versions, local_of, set_versions, versions_of

if TYPE_CHECKING:
    from vescale_fsdp.runtime.param_group import ManagedParam, ParamGroup

# Integers of the size of an element: bits are compared, because NaN differs from itself and -0.0 equals 0.0.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Steps:
    """The optimizers that have stepped. Kernels of some optimizers write to shards without raising version counters."""

    def __init__(self) -> None:
        self.last = 0  # number of the last step among all steps of this process
        self._of: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def note(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        """Note a step; torch calls this after every step of every optimizer."""
        with self._lock:
            self.last += 1
            self._of[optimizer] = self.last

    def have_written(self, params: Iterable[ManagedParam], after: int) -> bool:
        """Return whether an optimizer of these parameters has stepped after the step with this number."""
        with self._lock:
            later = [optimizer for optimizer, step in self._of.items() if step > after]
        stepped = {
            id(each) for optimizer in later for group in optimizer.param_groups for each in group["params"]
        }
        return any(id(param.sharded) in stepped for param in params)


_steps = _Steps()
register_optimizer_step_post_hook(eager(_steps.note))
# Groups whose unsharded parameters users may hold outside of a forward.
_exposed: WeakSet[ParamGroup] = WeakSet()
_exposed_lock = threading.Lock()


def note_exposed(group: ParamGroup) -> None:
    """Note that users may hold unsharded parameters of a group."""
    with _exposed_lock:
        _exposed.add(group)


@eager
def _before_step(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    """Let the sharded parameters, which the step writes, have what users have done to unsharded ones."""
    if not _exposed:
        return
    stepped = {id(param) for each in optimizer.param_groups for param in each["params"]}
    with _exposed_lock:
        groups = list(_exposed)
    for group in groups:
        if any(id(param.sharded) in stepped for param in group.params):
            group.before_step()


register_optimizer_step_pre_hook(_before_step)


class ShardWrites:
    """Finds writes to the shard of a group since its last `note`.

    Attributes:
        epoch: `_epoch_of` the parameters as of the last note; empty before the first one, so that all of them count as
            written.
    """

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self._step = 0  # number of the last step
        self._accepts_versions = False

    def note(self, params: Sequence[ManagedParam]) -> None:
        """Note that the shard is read now."""
        self.epoch, self._step = _epoch_of(params), _steps.last
        self._accepts_versions = False

    def accept_versions(self) -> None:
        """Let the operator that has written before the last note raise versions of sharded parameters after it."""
        self._accepts_versions = True

    def found(self, params: Sequence[ManagedParam]) -> bool:
        """Return whether the shard was written since the last note."""
        epoch = _epoch_of(params)
        if self._accepts_versions and epoch[len(params) :] == self.epoch[len(params) :]:
            self.epoch = epoch  # a later write has counted itself, or calls `accept_versions` again
        if epoch != self.epoch:
            return True
        return self._step != _steps.last and _steps.have_written(params, self._step)


class GatheredWrites:
    """What one group knows of writes to its parameters.

    Attributes:
        is_compared: whether ranks compare all values of the group at every reshard.
        was_written_raw: whether this rank has found a write without a version since ranks last exchanged flags.
    """

    def __init__(self) -> None:
        self.is_compared = self.was_written_raw = False
        self._shard = ShardWrites()  # since the last gather began
        # When the unsharded parameters were set on the modules: their versions, and a digest of the values of a
        # group that does not gather its shard's values.
        self._opened: list[int] = []
        self._digest: str | None = None
        # Notes for the watch, which begins with the first forward; in their order.
        self._unnoted: dict[str, None] = {}
        self._valid: list[int] = []  # versions at the last reshard: those of tensors that autograd has saved

    def take_raw(self) -> bool:
        """Return whether a write without a version was found since the last call."""
        was_written, self.was_written_raw = self.was_written_raw, False
        return was_written

    def forget(self) -> None:
        """Drop the versions, since the group makes new unsharded parameters."""
        self._valid = []

    def begin(self, group: ParamGroup) -> None:
        """Note that a gather begins to read the shard."""
        params = group.params
        if self._unnoted and group.comm.watch is not None:
            notes, self._unnoted = list(self._unnoted), {}
            self._note(group, notes)
        last = self._shard.epoch
        self._shard.note(params)
        if self._valid and self._shard.epoch != last:
            moved = [now != before for now, before in zip(self._shard.epoch, last, strict=True)]
            size = len(params)
            self._valid = [
                version + (moved[at] or moved[at + size] or moved[at + 2 * size])
                for at, version in enumerate(self._valid)
            ]

    def accept_versions(self) -> None:
        """As `ShardWrites.accept_versions`."""
        self._shard.accept_versions()

    def is_stale(self, params: Sequence[ManagedParam]) -> bool:
        """Return whether sharded parameters were written since the last gather began to read them."""
        return self._shard.found(params)

    def open(self, group: ParamGroup, unsharded: Sequence[torch.Tensor]) -> None:
        """Note that modules get the unsharded parameters now."""
        if self._valid:
            set_versions(unsharded, self._valid)
        self._opened = versions_of(unsharded)
        self._digest = group.digest()

    def keep(self, group: ParamGroup, unsharded: Sequence[torch.Tensor]) -> None:
        """Copy writes to the shard while the group stays gathered, before the shard is read or written.

        Raises:
            LifecycleError: if writes cannot be kept.
        """
        if versions_of(unsharded) == self._opened or is_fake(group.shard):
            return
        refusal, notes = self._keep(group, unsharded)
        if refusal is not None:
            raise refusal
        self._opened = versions_of(unsharded)
        self._note(group, notes)

    def _note(self, group: ParamGroup, notes: Sequence[str]) -> None:
        """Let ranks compare writes, now or once they have a watch."""
        if group.comm.watch is None:
            self._unnoted.update(dict.fromkeys(notes))
            return
        for note in notes:
            group.comm.watch.note(note)

    def close(self, group: ParamGroup, unsharded: Sequence[torch.Tensor]) -> Callable[[], None] | None:
        """Copy writes to the shard, before the memory of the unsharded parameters is freed.

        Returns:
            A function to call once the group is resharded. It raises if writes cannot be kept.
        """
        refusal, notes = (None, []) if is_fake(group.shard) else self._keep(group, unsharded)
        self._valid = versions_of(unsharded)
        increment_versions(unsharded)  # autograd must not read what is freed
        if refusal is None and not notes:
            return None

        def report() -> None:
            if refusal is not None:
                raise refusal
            self._note(group, notes)

        return report

    def _keep(
        self, group: ParamGroup, unsharded: Sequence[torch.Tensor]
    ) -> tuple[LifecycleError | None, list[str]]:
        """Copy writes to the shard; return an error if they cannot be kept, and notes for the watch."""
        touched: set[str] = set()
        if (versions := versions_of(unsharded)) != self._opened:
            pairs = zip(group.params, versions, self._opened, strict=True)
            touched = {param.slot.fqn for param, now, before in pairs if now != before}
        replaced = group.return_to_buffer()
        if (
            replaced
        ):  # by ``p.data = tensor``: autograd has saved the values before, which the buffer no longer has
            increment_versions(
                each
                for param, each in zip(group.params, unsharded, strict=True)
                if param.slot.fqn in replaced
            )
            touched |= replaced
        if group.refuses_writes is not None:
            if touched or group.digest() != self._digest:
                return _refusal(group, touched, *group.refuses_writes), []
            return None, []
        if self.is_stale(group.params):  # the shard has newer values than the buffer
            return (_conflict(group, touched), []) if touched else (None, [])
        raw = group.write_back(touched)
        if not touched and not raw and not self.is_compared:
            return None, []
        self._shard.note(group.params)
        self.was_written_raw |= bool(raw)
        if group.compute_dtype != group.shard.dtype and (touched or raw):
            _warn_of_rounding(group)
        if not group.comm.can_watch:
            return None, []
        return None, [
            f"write to {param.slot.fqn} of {group.label[1:-1]} while it was gathered, bits {digest_of(local_of(each))}"
            for param, each in zip(group.params, unsharded, strict=True)
            if self.is_compared or param.slot.fqn in touched
        ]


def _epoch_of(params: Sequence[ManagedParam]) -> list[int]:
    """Return three numbers for each parameter, and one for all, of which a write to the shard raises at least one.

    The last number counts writes through views and ``.data``.
    """
    # Few calls: this runs for every gather and reshard.
    tensors = [param.sharded for param in params]
    tensors += [param.piece for param in params]  # type: ignore[misc]  # tensors, not Parameters
    counts = [param.sharded.writes for param in params]  # type: ignore[attr-defined]  # a RaggedDTensor
    raw = sum([count.number for count in counts if count is not None])
    return [*versions_of(tensors), *[param.generation for param in params], raw]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers, in shared memory."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.itemsize])


def digest_of(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's bits; the host waits for an accelerator."""
    import xxhash  # imported late, so that training needs no package beside torch unless it writes in place

    # A copy, because numpy would forbid to free the storage.
    values = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    array: Any = values.view(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_hexdigest(array)


def _refusal(group: ParamGroup, names: Iterable[str], what: str, todo: str) -> LifecycleError:
    every = [param.slot.fqn for param in group.params]
    return LifecycleError(
        f"Parameters were written in place while they were gathered, which {what} cannot keep.",
        expected="writes to the sharded parameters",
        got=f"writes to {some(sorted(names), 4)}" if names else f"a write to one of {some(every, 4)}",
        where=group.label[1:-1],
        todo=todo,
    )


def _conflict(group: ParamGroup, names: Iterable[str]) -> LifecycleError:
    return LifecycleError(
        "Parameters were written in place while they were gathered, and their sharded parameters were written as well "
        "(by an optimizer's step or a load), so one of the two writes would be lost.",
        expected="module.reshard() between the two writes",
        got=f"writes to {some(sorted(names), 4)}",
        where=group.label[1:-1],
        todo="call module.reshard() after writing to gathered parameters, before the step or load",
    )


def _warn_of_rounding(group: ParamGroup) -> None:
    # Python shows a warning once per text and line, so the text has no name of a unit.
    warnings.warn(
        f"Gathered parameters were written in {group.compute_dtype}, while shards are {group.shard.dtype}: the writes "
        "are kept, but updates below the rounding of the gathered dtype vanish. Write to the sharded parameters "
        "(outside of unshard() and forward) to keep all digits.",
        stacklevel=callers_level(),
    )
