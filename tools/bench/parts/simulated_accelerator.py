"""Simulated peak memory of a training step on an accelerator, by pool of torch's caching allocator.

Tensors are fake (sizes without values) on the device ``cpu``, which every torch has. Streams are objects with a name
only. The process group is torch's fake one. The code under test takes its path for accelerators. Memory is counted as
torch's caching allocator does without ``record_stream``:

    an allocation    belongs to the pool of the current stream
    live             bytes of all storages that have memory, at one time
    pools            sum of the peaks of all pools: reserved memory is at least that

Activations are those of the model's own operators under recomputation. Rounding and fragmentation are not counted.
`library_bytes` estimates what cuBLAS and NCCL allocate outside of these pools.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
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

    def __init__(self, use: MemoryUse, name: str) -> None:
        self.use, self.name = use, name

    def record_event(self, event: Any = None) -> NamedEvent:
        recorded: NamedEvent = event or NamedEvent(self.use)
        return recorded.record(self)

    def wait_event(self, event: Any) -> None:
        self.use.waited(self.name, event.number)

    def wait_stream(self, stream: Any) -> None:
        if stream is not None:  # FSDP2 passes None for what a CPU does not have
            self.wait_event(stream.record_event())


class NamedEvent:
    """An event of a `NamedStream`.

    Attributes:
        number: what `MemoryUse.recorded` returned last.
    """

    def __init__(self, use: MemoryUse, *options: Any, **named: Any) -> None:
        self.use, self.number = use, 0

    def record(self, stream: NamedStream | None = None) -> NamedEvent:
        self.number = self.use.recorded((stream or self.use.current()).name)
        return self

    def wait(self, stream: NamedStream | None = None) -> None:
        self.use.waited((stream or self.use.current()).name, self.number)

    def synchronize(self) -> None:
        self.use.host_waited(self.number)

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
    num_streams: int = 0
    num_allocations: int = 0

    def __post_init__(self) -> None:
        self.stream = NamedStream(self, "compute")

    def recorded(self, stream: str) -> int:
        """Called when an event is recorded on a stream; returns the event's number."""
        return 0

    def waited(self, stream: str, event: int) -> None:
        """Called when a stream waits for an event."""

    def host_waited(self, event: int) -> None:
        """Called when the host waits for an event."""

    def new(self) -> NamedStream:
        self.num_streams += 1
        return NamedStream(self, f"stream{self.num_streams}")

    def current(self) -> NamedStream:
        return self.stream

    def synchronize(self) -> None:
        """Do nothing: the work of these streams takes no time."""

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
        self.num_allocations += nbytes > 0
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
        if func is torch.ops.aten.add.Tensor and _sums_gradients(args):
            func = torch.ops.aten.add_.Tensor
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


def _sums_gradients(args: Any) -> bool:
    """Whether autograd adds the two gradients of a matrix in place, such as those of two look-ups in an embedding.

    Autograd adds plain tensors in place if no other tensor has the memory of the first one, but fake ones out of place,
    because they are a subclass. The first gradient of a tied embedding is that of a linear layer: a view, transposed.
    """
    return (
        torch._C._current_graph_task_id() >= 0  # in a backward
        and not torch.is_grad_enabled()  # not in a forward that is computed again
        and all(type(each) is FakeTensor and each.ndim == 2 for each in args)
        and not args[0]._is_view()
    )


def _first_chunk(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """The first of the parts into which FSDP2 cuts a parameter, which is that of rank 0 of a `fake_group`.

    FSDP2 creates all of them, and reads two: that takes a minute for 16,384 ranks and fake tensors.
    """
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]


_LAUNCH_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}


def launch_of(func: Any) -> str:
    """What an operator launches: "collective", "operator", or "" for views, allocations, queries and labels."""
    space, _, name = func._schema.name.partition("::")
    if space == "c10d":
        return "collective"
    returns_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return "" if returns_view or name in _LAUNCH_NOTHING or space in ("prim", "profiler") else "operator"


@contextmanager
def simulated_accelerator(use: MemoryUse | None = None) -> Iterator[MemoryUse]:
    """A context in which this package and FSDP2 shard and train as on an accelerator.

    Args:
        use: counts the memory, and is called for each event; default: a new `MemoryUse`.
    """
    use = use or MemoryUse()
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
            mock.patch.object(torch.cpu, "Event", partial(NamedEvent, use), create=True),
            mock.patch.object(torch.cpu, "stream", use.on),
            mock.patch.object(torch.cpu, "current_stream", current),
            mock.patch.object(torch.accelerator, "current_stream", current),
            mock.patch("torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty", _first_chunk),
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
    tied: bool = False  # whether the embedding is the head
    num_experts: int = 0  # grouped experts with gate and up in one matrix each; 0: a dense MLP
    top_k: int = 0  # experts per token; 0: each expert gets one token
    query: int = 0  # width of the queries; 0: the hidden size
    head: int = 0  # width of an attention head; 0: an elementwise attention, whose memory and time are small
    flat_experts: bool = False  # the experts' matrices are stacked row by row, in 2-D parameters


class _Experts(nn.Module):
    """The matrices of all experts of a layer; each expert gets equally many tokens, because only sizes matter here."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        count = (shape.num_experts,)
        sizes = (*count, shape.hidden, 2 * shape.mlp), (*count, shape.mlp, shape.hidden)
        self.gate_up, self.down = (
            nn.Parameter(torch.empty(size[0] * size[1], size[2]) if shape.flat_experts else torch.empty(size))
            for size in sizes
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        count, hidden = self.shape.num_experts, self.shape.hidden
        flat = rows.flatten(0, 1)
        each = max(1, len(flat) * self.shape.top_k // count)
        tokens = flat[:each].expand(count, each, -1)
        gate, up = (tokens @ self.gate_up.view(count, hidden, -1)).chunk(2, -1)
        mixed = nn.functional.silu(gate) * up @ self.down.view(count, -1, hidden)
        result: torch.Tensor = rows + mixed.sum((0, 1))
        return result


class _Layer(nn.Module):
    """The matrices of a decoder layer."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        hidden, kv, mlp = shape.hidden, shape.kv, shape.mlp
        query = shape.query or hidden
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.q, self.o = nn.Linear(hidden, query, bias=False), nn.Linear(query, hidden, bias=False)
        self.k, self.v = (nn.Linear(hidden, kv, bias=False) for _ in range(2))
        self.experts = _Experts(shape) if shape.num_experts else None
        if self.experts is None:
            self.gate, self.up = (nn.Linear(hidden, mlp, bias=False) for _ in range(2))
            self.down = nn.Linear(mlp, hidden, bias=False)
        self.repeats, self.head = query // kv, shape.head

    def _attention(self, seen: torch.Tensor) -> torch.Tensor:
        query, key, value = self.q(seen), self.k(seen), self.v(seen)
        if not self.head:
            return query + key.repeat(1, 1, self.repeats) * value.repeat(1, 1, self.repeats)  # type: ignore[no-any-return]
        query, key, value = (
            each.unflatten(-1, (-1, self.head)).transpose(1, 2) for each in (query, key, value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows + self.o(self._attention(self.norms[0](rows)))
        seen = self.norms[1](rows)
        if self.experts is not None:
            return rows + self.experts(seen)
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
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.embed(tokens)
        for layer in self.layers:
            rows = torch.utils.checkpoint.checkpoint(layer, rows, use_reentrant=False)
        result: torch.Tensor = self.head(self.norm(rows))
        return result


_CUBLAS_BYTES = 2 * 32 * 2**20  # a workspace of 32 MiB on Hopper for the forward's thread, and for autograd's
_NCCL_BUFFER_BYTES = 4 * 2**20  # NCCL_BUFFSIZE's default, per channel, peer and direction
_NCCL_CHANNELS = 16
_RANKS_PER_NODE = 8


def library_bytes(mesh_shape: tuple[int, ...], *, exchanges: bool) -> int:
    """An estimate of the memory of cuBLAS's workspaces and NCCL's buffers. It is arithmetic: no GPU has confirmed it.

    Each axis of the mesh has a communicator, whose rings have two peers per channel. An exchange of slices needs more:
    a buffer per direction for each peer in the node, and per channel for the network, whose peers share buffers.

    Args:
        mesh_shape: (ranks,) or (replicas, ranks).
        exchanges: whether gradients are exchanged by an all-to-all over the last axis.
    """
    axes = [size for size in mesh_shape if size > 1]
    buffers = 2 * _NCCL_CHANNELS * len(axes)
    if exchanges:
        buffers += 2 * (min(mesh_shape[-1], _RANKS_PER_NODE) - 1)
        if mesh_shape[-1] > _RANKS_PER_NODE:
            buffers += 2 * _NCCL_CHANNELS
    return _CUBLAS_BYTES + buffers * _NCCL_BUFFER_BYTES


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
