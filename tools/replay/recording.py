"""Records what one training step launches on an accelerator, on one rank of a fake process group.

The step runs over `tools.bench.parts.simulated_accelerator`, so nothing is computed and no memory is used. A recording
has the host's order. That order and the streams decide what may run at the same time (`tools.replay.queue`).
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tools.bench.parts.simulated_accelerator import MemoryUse, launch_of, simulated_accelerator

KINDS = ("operator", "collective", "record", "wait", "host wait", "allocate", "free")


@dataclass(frozen=True)
class Item:
    """One thing that the host does.

    Raises:
        ValueError: the kind is unknown, a number is negative, or a collective has no ranks.
    """

    kind: str  # one of `KINDS`
    stream: str  # on which it is queued; the pool of an allocation
    name: str = ""  # of the operator or collective, without its namespace
    nbytes: int = 0  # an operator's reads and writes; a collective's full buffer; an allocation's size
    flops: int = 0
    event: int = 0  # recorded or waited for
    group: str = ""  # the collective's communicator
    ranks: int = 0  # of this communicator

    def __post_init__(self) -> None:
        if self.kind not in KINDS or min(self.nbytes, self.flops) < 0:
            raise ValueError(f"expected a kind of {KINDS} and numbers from 0; got {self}")
        if (self.kind == "collective") != (self.ranks > 0):
            raise ValueError(f"expected ranks for a collective, and for nothing else; got {self}")


@dataclass(frozen=True)
class Peaks:
    """Bytes: of all tensors at one time, and the sum of the peaks of the caching allocator's pools."""

    live: float
    pools: float


@dataclass(frozen=True)
class Recording:
    """A step: its items in the host's order, and the bytes that each pool has before the step."""

    items: tuple[Item, ...]
    before: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def peaks(self) -> Peaks:
        """The step's peaks of memory."""
        pools = Counter(self.before)
        most, live = pools.copy(), sum(pools.values())
        peak = live
        for item in self.items:
            if item.kind in ("allocate", "free"):
                change = item.nbytes if item.kind == "allocate" else -item.nbytes
                pools[item.stream] += change
                live += change
                peak, most[item.stream] = max(peak, live), max(most[item.stream], pools[item.stream])
        return Peaks(peak, sum(most.values()))

    def extrapolated(self, more: Recording, factor: float) -> Recording:
        """This recording, changed by ``factor`` times the difference to ``more``: bytes and flops are linear in tokens.

        Raises:
            ValueError: the steps launch different things.
        """
        shape = [(item.kind, item.stream, item.name) for item in self.items]
        if shape != [(item.kind, item.stream, item.name) for item in more.items]:
            raise ValueError(
                "expected recordings of one program with two numbers of tokens; got two programs"
            )

        def between(one: int, other: int) -> int:
            return max(0, round(one + factor * (other - one)))

        items = (
            replace(a, nbytes=between(a.nbytes, b.nbytes), flops=between(a.flops, b.flops))
            for a, b in zip(self.items, more.items, strict=True)
        )
        before = {pool: between(self.before[pool], more.before[pool]) for pool in self.before}
        return Recording(tuple(items), before)

    def to_json(self) -> str:
        """Return the recording as JSON."""
        return json.dumps({"before": dict(self.before), "items": [astuple(item) for item in self.items]})

    @staticmethod
    def from_json(text: str) -> Recording:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        return Recording(tuple(Item(*item) for item in values["items"]), values["before"])


class Recorder(MemoryUse):
    """Writes down allocations and events of a simulated accelerator, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Item] | None = None  # None: off
        self._num_events = 0

    def note(self, item: Item) -> None:
        """Add an item."""
        if self.items is not None:
            self.items.append(item)

    def recorded(self, stream: str) -> int:
        self._num_events += 1
        self.note(Item("record", stream, event=self._num_events))
        return self._num_events

    def waited(self, stream: str, event: int) -> None:
        self.note(Item("wait", stream, event=event))

    def host_waited(self, event: int) -> None:
        self.note(Item("host wait", "host", event=event))

    def take(self, nbytes: int) -> str:
        pool = super().take(nbytes)
        if nbytes:
            self.note(Item("allocate", pool, nbytes=nbytes))
        return pool

    def give_back(self, nbytes: int, pool: str) -> None:
        super().give_back(nbytes, pool)
        if nbytes:
            self.note(Item("free", pool, nbytes=nbytes))


class _Launches(TorchDispatchMode):
    """Notes operators and collectives."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # operators on its local tensors are dispatched here again
        result = func(*args, **(kwargs or {}))
        launches, stream = launch_of(func), self.recorder.current().name
        # FSDP2's copy before a reduction is `chunk_cat_mixed_dtype` in torch 2.15, with the kernels of `chunk_cat`.
        name = func._schema.name.partition("::")[2].removesuffix("_mixed_dtype")
        if launches == "collective":
            group = next(
                dist.ProcessGroup.unbox(leaf)
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
            )
            nbytes = max(map(_bytes, (_tensors(arg) for arg in args)), default=0)
            self.recorder.note(
                Item("collective", stream, name, nbytes, group=group.group_name, ranks=group.size())
            )
        elif launches:
            nbytes = _moved_bytes(func, args, kwargs or {}, result)
            self.recorder.note(
                Item("operator", stream, name, nbytes, _flops(func, args, kwargs or {}, result))
            )
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of tensors; an expanded tensor is read from its storage, which is smaller."""
    return sum(min(each.numel() * each.element_size(), each.untyped_storage().nbytes()) for each in tensors)


_ONLY_WRITE = {
    "copy_",
    "_foreach_copy_",
    "zero_",
    "_foreach_zero_",
    "fill_",
}  # they do not read what they write


def _moved_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes that an operator reads and writes."""
    name = func._schema.name.partition("::")[2]
    if name == "all_gather_copy_in":  # FSDP2 passes the full buffer too, of which the operator writes a shard
        return 2 * _bytes(_tensors(args[0]))
    if name == "embedding":  # it reads the rows of the tokens, not the matrix
        return 2 * _bytes(_tensors(result))
    total, written = 0, False
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        written |= is_written
        is_read = not (is_written and (argument.is_out or name in _ONLY_WRITE))
        total += (is_written + is_read) * _bytes(_tensors(value))
    return total if written else total + _bytes(_tensors(result))


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    if "scaled_dot_product" in func._schema.name:  # torch's table does not have the CPU's kernel
        backward = "backward" in func._schema.name
        query, key = args[1:3] if backward else args[:2]
        batch, heads, rows, width = query.shape
        matrix = 2 * batch * heads * rows * key.shape[2] * width // 2  # causal: half of the scores
        return matrix * (5 if backward else 2)
    formula = flop_registry.get(func.overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0


@contextmanager
def _without_collector() -> Iterator[None]:
    """Nothing is freed by the garbage collector: equal programs free memory at equal places."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def record(start: Callable[[], Callable[[int], None]], sizes: Sequence[int] = (1,)) -> tuple[Recording, ...]:
    """Record steps of a program, one per size.

    Args:
        start: builds and shards a model on the simulated accelerator, and returns the function that does one step
            with a batch of a size.
        sizes: of the batches. Each recorded step follows one of its size, so optimizers have their states.
    """
    recorder, recordings = Recorder(), []
    with simulated_accelerator(recorder) as use:
        step = start()
        for size in sizes:
            step(size)
            with _without_collector(), _Launches(recorder):
                before, recorder.items = dict(use.pools), []
                step(size)
                recordings.append(Recording(tuple(recorder.items), before))
                recorder.items = None
    return tuple(recordings)
