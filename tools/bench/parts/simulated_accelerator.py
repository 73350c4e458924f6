"""Simulated peak memory of a training step on an accelerator, by pool of torch's caching allocator.

Tensors are fake (sizes without values) on the device ``cpu``, which every torch has. Streams are objects with a name
only. The process group is torch's fake one. The code under test takes its path for accelerators. Memory is counted as
torch's caching allocator does without ``record_stream``:

    an allocation    belongs to the pool of the current stream
    live             bytes of all storages that have memory, at one time
    pools            sum of the peaks of all pools: reserved memory is at least that

Activations are those of the model's own operators under recomputation. Rounding, fragmentation and workspaces of
libraries are not counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vescale_fsdp.runtime.comm.streams import Streams


class NamedStream:
    """A stream that does nothing; its name is the name of the pool of its allocations."""

    def __init__(self, device: Any = None, priority: int = 0, name: str = "side") -> None:
        self.name = name
        self.priority = priority

    def record_event(self, event: Any = None) -> NamedEvent:
        return NamedEvent()

    def wait_event(self, event: Any) -> None:
        """Do nothing: nothing runs on the stream."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: nothing runs on the stream."""


class NamedEvent:
    """An event of a `NamedStream`."""

    def __init__(self, *options: Any, **named: Any) -> None:
        pass

    def record(self, stream: Any = None) -> NamedEvent:
        return self

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


@dataclass
class MemoryUse(Streams):
    """Bytes in use, now and at the peak. It creates the streams, and so knows the stream of each allocation."""

    live: int = 0
    peak: int = 0
    at_peak: Counter[str] = field(default_factory=Counter)  # bytes by pool
    pools: Counter[str] = field(default_factory=Counter)  # bytes by pool, now
    pool_peaks: Counter[str] = field(default_factory=Counter)
    stream: NamedStream = field(default_factory=lambda: NamedStream(name="compute"))
    num_streams: int = 0

    def new(self) -> NamedStream:
        self.num_streams += 1
        return NamedStream(name=f"stream{self.num_streams}")

    def current(self) -> NamedStream:
        return self.stream

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def take(self, nbytes: int) -> str:
        """Count an allocation on the current stream; returns its pool."""
        pool = self.stream.name
        self.live += nbytes
        self.pools[pool] += nbytes
        self.pool_peaks[pool] = max(self.pool_peaks[pool], self.pools[pool])
        if self.live > self.peak:
            self.peak, self.at_peak = self.live, self.pools.copy()
        return pool

    def give_back(self, nbytes: int, pool: str) -> None:
        self.live -= nbytes
        self.pools[pool] -= nbytes

    def forget_peaks(self) -> None:
        """Reset the peaks."""
        self.peak, self.at_peak = self.live, self.pools.copy()
        self.pool_peaks = self.pools.copy()

    @property
    def reserved(self) -> int:
        """Sum of the peaks of all pools."""
        return sum(self.pool_peaks.values())


class _Allocator(TorchDispatchMode):
    """Reports every storage that is created, freed or resized to a `MemoryUse`."""

    def __init__(self, use: MemoryUse) -> None:
        super().__init__()
        self.use = use
        self._held: dict[int, tuple[int, str]] = {}  # bytes and pool by storage
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # operators on its local tensors are dispatched here again
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is FakeTensor:
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return

        def gone(ref: object) -> None:
            del self._known[key]
            self._release(key)

        self._known[key] = weakref.ref(storage, gone)
        self._hold(key, storage.nbytes())

    def _hold(self, key: int, nbytes: int) -> None:
        self._held[key] = (nbytes, self.use.take(nbytes))

    def _release(self, key: int) -> None:
        self.use.give_back(*self._held.pop(key))

    def resizing(self) -> Any:
        """A patch that reports resized storages."""
        resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            if storage._cdata in self._known:
                self._release(storage._cdata)
                self._hold(storage._cdata, nbytes)
            return result

        return mock.patch.object(torch.UntypedStorage, "resize_", watched)


@contextmanager
def simulated_accelerator() -> Iterator[MemoryUse]:
    """A context in which this package and FSDP2 shard and train as on an accelerator."""
    use = MemoryUse()
    allocator = _Allocator(use)

    def current(device: Any = None) -> NamedStream:
        return use.current()

    def new(device: Any = None, priority: int = 0) -> NamedStream:
        return use.new()

    def streams_of(device: torch.device) -> MemoryUse:
        return use

    with ExitStack() as stack:
        for patch in (
            # A torch without CUDA has no device guard for CUDA tensors, not even for fake ones; so the device is `cpu`.
            mock.patch("vescale_fsdp.runtime.fsdp_state.streams_of", streams_of),
            mock.patch.object(torch.cpu, "Stream", new),
            mock.patch.object(torch.cpu, "Event", NamedEvent, create=True),
            mock.patch.object(torch.cpu, "stream", use.on),
            mock.patch.object(torch.cpu, "current_stream", current),
            mock.patch.object(torch.accelerator, "current_stream", current),
            allocator.resizing(),
        ):
            stack.enter_context(patch)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(allocator)
        yield use


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder."""

    num_layers: int
    hidden: int
    kv: int
    mlp: int
    vocab: int


class _Layer(nn.Module):
    """The matrices of a decoder layer, with an elementwise attention: memory of activations does not matter here."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        hidden, kv, mlp = shape.hidden, shape.kv, shape.mlp
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.q, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden, kv, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(mlp, hidden, bias=False)
        self.repeats = hidden // kv

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        seen = self.norms[0](rows)
        mixed = self.k(seen).repeat(1, 1, self.repeats) * self.v(seen).repeat(1, 1, self.repeats)
        rows = rows + self.o(self.q(seen) + mixed)
        seen = self.norms[1](rows)
        result: torch.Tensor = rows + self.down(nn.functional.silu(self.gate(seen)) * self.up(seen))
        return result


class Decoder(nn.Module):
    """A decoder whose layers are recomputed in the backward."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.embed(tokens)
        for layer in self.layers:
            rows = torch.utils.checkpoint.checkpoint(layer, rows, use_reentrant=False)
        result: torch.Tensor = self.head(self.norm(rows))
        return result


@contextmanager
def fake_group(world_size: int) -> Iterator[None]:
    """A context with a fake process group of many ranks, of which this is rank 0; its collectives send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def simulated_training(
    shape: DecoderShape,
    shard: Callable[[Decoder], None],
    *,
    tokens: int,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> MemoryUse:
    """Train a decoder for two steps as a rank of a `fake_group`; returns the memory use of the second step.

    Args:
        shape: sizes of the decoder.
        shard: calls ``fully_shard``, this package's or FSDP2's.
        tokens: tokens per batch.
        optimizer: constructs the optimizer of the sharded model; default: AdamW.
    """
    make = optimizer or (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True))
    with simulated_accelerator() as use:
        model = Decoder(shape)
        shard(model)
        stepped = make(model)
        batch = torch.zeros(1, tokens, dtype=torch.long)
        for step in range(2):
            if step == 1:  # from here on the optimizer has its state
                use.forget_peaks()
            model(batch).float().pow(2).mean().backward()
            stepped.step()
            stepped.zero_grad()
    return use
