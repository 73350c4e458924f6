"""Sharded training on one device that acts as N ranks, compared with a plain model: real data, streams, a strict group.

    python tools/mirror.py                            on the CPU, by the code path for accelerators, in program order
    python tools/mirror.py --device cuda --world 64

All N ranks have equal shards, so the slices of every parameter are tied, and one process can act as all ranks:

    all-gather        every rank's slice is this rank's shard
    reduce-scatter    the mean (or sum) over the slices of this rank's buffer: the gradient of tied slices
    all-to-all        rank r sends this rank's part for rank r; the sum over ranks is that of the reduce-scatter
    all-reduce        nothing, because replicas are equal

The group asserts NCCL's requirements: sizes, dtypes, alignment, the position of a shard in its full buffer, and that
collectives run on the current stream, which has the chosen priority. On a GPU, its collectives run on a separate
stream, as NCCL's do, with a delay before they access memory. The model is delayed too. A missing wait then changes
results: with delays on either side, on both and on none, training must give the bits of a run that synchronizes after
every collective, and the bits of the plain model.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Work
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.bench.parts.simulated_accelerator import MemoryUse
from vescale_fsdp import fully_shard
from vescale_fsdp.collectives import group_log
from vescale_fsdp.devices import ACCELERATORS, Accelerator
from vescale_fsdp.runtime.comm.dbuffer import DBuffer
from vescale_fsdp.runtime.fsdp_state import state_of
from vescale_fsdp.runtime.param_group import ParamGroup

ALIGN_BYTES = 16  # below this alignment NCCL copies element by element
RATE = 1e-4
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass
class Delays:
    """Milliseconds that a GPU waits before a collective and before a layer; ``synchronized``: no overlap."""

    collective: float = 0.0
    compute: float = 0.0
    synchronized: bool = False


DELAYS = Delays()
MODES = {
    "synchronized": Delays(synchronized=True),
    "as it comes": Delays(),
    "late collectives": Delays(collective=3),
    "late compute": Delays(compute=2),
    "both late": Delays(collective=1, compute=1),
}


def sleep(milliseconds: float) -> None:
    """Keep the current CUDA stream busy; nothing on the CPU."""
    if milliseconds and torch.cuda.is_available():
        torch.cuda._sleep(int(milliseconds * 1.7e6))


class MirroredWork(Work):
    """A collective in flight on the group's stream."""

    def __init__(self, event: Any) -> None:
        super().__init__()
        self._event = event

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return True


# Any: torch calls these methods with other arguments than its type stubs declare.
_Base: Any = dist.ProcessGroup


class MirroredGroup(_Base):  # type: ignore[misc]
    """A group of equal ranks, of which this process is the first."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._size = size
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.calls: Counter[str] = Counter()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0

    def getBackendName(self) -> str:
        return "mirror"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]  # type: ignore[index]

    def _run(self, name: str, tensor: torch.Tensor, work: Callable[[], object]) -> Work:
        self.calls[name] += 1
        if self._stream is None or not tensor.is_cuda:
            work()
            return MirroredWork(None)
        if DELAYS.synchronized:
            torch.cuda.synchronize()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            sleep(DELAYS.collective)
            work()
            event = self._stream.record_event()
        if DELAYS.synchronized:
            torch.cuda.synchronize()
        return MirroredWork(event)

    def _allgather_base(self, full: torch.Tensor, shard: torch.Tensor, opts: Any = None) -> Work:
        _require(full, shard, self._size)
        _require_current(opts)
        in_place = full.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        assert not in_place or shard.data_ptr() == full.data_ptr(), "the slice of rank 0"

        def work() -> None:
            rows = full.view(self._size, -1)
            if not in_place:
                rows[0].copy_(shard)
            rows[1:].copy_(shard.expand(self._size - 1, -1))

        return self._run("all_gather in place" if in_place else "all_gather", full, work)

    def _reduce_scatter_base(self, shard: torch.Tensor, full: torch.Tensor, opts: Any = None) -> Work:
        _require(full, shard, self._size)
        _require_current(opts)
        averages = opts is not None and opts.reduceOp == dist.ReduceOp.AVG

        def work() -> None:
            rows = full.view(self._size, -1)
            torch.sum(rows, 0, out=shard)
            if averages:
                shard.div_(self._size)
            full.zero_()  # its contents are undefined from here on, so a later read gives wrong results

        return self._run("reduce_scatter", full, work)

    def allgather_into_tensor_coalesced(
        self, full: list[torch.Tensor], shards: list[torch.Tensor], opts: Any = None
    ) -> Work:
        self.calls["all_gather coalesced"] += 1
        works = [self._allgather_base(*pair, opts) for pair in zip(full, shards, strict=True)]
        return works[-1]

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # torch 2.13's names
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def alltoall(self, received: list[torch.Tensor], sent: list[torch.Tensor], opts: Any = None) -> Work:
        assert len(received) == len(sent) == self._size
        _require_current(opts)
        for into, of in zip(received, sent, strict=True):
            _require(into, of, 1)

        def work() -> None:
            for into, of in zip(received, sent, strict=True):
                into.copy_(of)

        return self._run("all_to_all", sent[0], work)

    def alltoall_base(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_numels: list[int],
        sent_numels: list[int],
        opts: Any = None,
    ) -> Work:
        assert not received_numels and not sent_numels  # equal parts
        return self.alltoall(list(received.chunk(self._size)), list(sent.chunk(self._size)), opts)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self._run("all_reduce", tensors[0], lambda: None)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self._run("broadcast", tensors[0], lambda: None)

    def barrier(self, opts: Any = None) -> Work:
        return MirroredWork(None)


def _require(full: torch.Tensor, shard: torch.Tensor, size: int) -> None:
    """Check NCCL's requirements for the two buffers of a collective."""
    assert full.numel() == size * shard.numel(), (full.shape, shard.shape)
    assert full.is_contiguous() and shard.is_contiguous()
    assert full.dtype is shard.dtype and full.device == shard.device
    if full.numel() * full.element_size() > 1024:  # small messages need not be fast
        for tensor in (full, shard):
            assert tensor.data_ptr() % ALIGN_BYTES == 0, "a buffer that starts between packs of 16 bytes"


def _require_current(opts: Any) -> None:
    assert opts is None or not opts.asyncOp, "a collective that would run on the communicator's own stream"


@contextmanager
def mirrored(world_size: int) -> Iterator[MirroredGroup]:
    """A context in which this process is all ranks of a group of this size."""
    if "mirror" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "mirror",
            lambda store, rank, size, timeout: MirroredGroup(rank, size),
            devices=["cpu", "cuda"],
        )
    dist.init_process_group("mirror", store=dist.HashStore(), rank=0, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    try:
        mirrors = dict.fromkeys(("cpu", "cuda"), Accelerator(frozenset({"mirror"})))
        without_ranks = mock.patch.object(group_log, "WITHOUT_RANKS", {"mirror"})
        with _gaps_of_zeros(), _streams(), mock.patch.dict(ACCELERATORS, mirrors), without_ranks:
            yield group  # type: ignore[misc]
    finally:
        dist.destroy_process_group()


@contextmanager
def _gaps_of_zeros() -> Iterator[None]:
    """Set gaps between tensors to zero: no rank writes them, and the mean over slices mixes them with values."""
    allocate = DBuffer.allocate

    def allocated(buffer: DBuffer) -> None:
        was_free = buffer.flat.untyped_storage().nbytes() == 0 or not vars(buffer).get("was_zeroed", False)
        allocate(buffer)
        if was_free:
            vars(buffer)["was_zeroed"] = True
            with torch.no_grad():
                buffer.flat.zero_()

    with mock.patch.object(DBuffer, "allocate", allocated):
        yield


@contextmanager
def _streams() -> Iterator[None]:
    """Without a GPU: streams that only have names, so that the code path for accelerators runs."""
    if torch.cuda.is_available():
        yield
        return
    beside = mock.Mock(return_value=False)
    with (
        mock.patch("vescale_fsdp.runtime.fsdp_state.streams_of", return_value=MemoryUse()),
        mock.patch("vescale_fsdp.collectives.operations.runs_beside", beside),
        mock.patch("vescale_fsdp.collectives.slice_exchange.runs_beside", beside),
        mock.patch("vescale_fsdp.runtime.comm.group_comm.runs_beside", beside),
    ):
        yield


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, hidden),
            nn.Linear(hidden, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep(DELAYS.compute)
        y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


class MirroredModel(nn.Module):
    """Four blocks between two layers of the root."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(24, 96)
        self.blocks = nn.ModuleList(_Block(96, 200) for _ in range(4))
        self.head = nn.Linear(96, 8, bias=False)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if self.recomputes:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        y: torch.Tensor = self.head(x)
        return y


@dataclass(frozen=True)
class Case:
    """Options of one training."""

    policy: MixedPrecisionPolicy = HALF
    narrow: bool = False
    double_norms: bool = False  # so that units have two groups
    recomputes: bool = False
    micro_batches: int = 1
    steps: int = 3
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.policy.param_dtype or torch.float32

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self.policy.reduce_dtype or torch.float32


CASES = {
    "bf16": Case(),
    "bf16 narrow": Case(narrow=True),
    "fp32": Case(MixedPrecisionPolicy()),
    "bf16 sums": Case(MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)),
    "recompute": Case(recomputes=True),
    "accumulate": Case(micro_batches=3),
    "two groups": Case(double_norms=True),
    "kept": Case(options={"reshard_after_forward": False}),
    "offload": Case(options={"offload_policy": CPUOffloadPolicy()}),
}


@dataclass
class Outcome:
    """Losses, and this rank's pieces of all parameters at the end and at the start."""

    losses: torch.Tensor
    pieces: list[torch.Tensor]
    start: list[torch.Tensor]

    def equals(self, other: Outcome) -> bool:
        """Whether losses and pieces are equal to the last bit."""
        pairs = zip(self.pieces, other.pieces, strict=True)
        return torch.equal(self.losses, other.losses) and all(torch.equal(*pair) for pair in pairs)

    @property
    def moved(self) -> bool:
        """Whether training has changed every piece."""
        return all((one - other).norm() > 0 for one, other in zip(self.pieces, self.start, strict=True))


def _batch(number: int, device: str) -> torch.Tensor:
    return torch.randn(32, 24, generator=torch.Generator().manual_seed(number)).to(device)


def _loss(model: nn.Module, number: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    loss: torch.Tensor = model(_batch(number, device).to(dtype)).float().square().mean()
    return loss


def _groups_of(model: nn.Module) -> list[ParamGroup]:
    states = dict.fromkeys(state for module in model.modules() if (state := state_of(module)) is not None)
    return [group for state in states for group in state.groups]


def _pieces(groups: list[ParamGroup], shards: list[torch.Tensor]) -> list[torch.Tensor]:
    found = [
        shard[param.local] for group, shard in zip(groups, shards, strict=True) for param in group.params
    ]
    return [piece.detach().cpu().clone() for piece in found if piece.numel()]


def train(case: Case, device: str) -> tuple[Outcome, nn.Module, list[torch.Tensor]]:
    """Train a case sharded; returns the outcome, the model, and copies of the initial shards."""
    torch.manual_seed(0)
    model = MirroredModel(case.recomputes)
    if case.double_norms:
        for block in model.blocks:
            block.get_submodule("norm").double()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.3)  # small, because slices are tied and a norm may get a matrix's values
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for module in (*model.blocks, model):
        sharded: Any = fully_shard(module, mesh=mesh, mp_policy=case.policy, **case.options)
    sharded.set_narrow_reduction(case.narrow)
    groups = _groups_of(model)
    start = [group.shard.detach().clone() for group in groups]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(case.steps):
        for number in range(case.micro_batches):
            sharded.set_requires_gradient_sync(number == case.micro_batches - 1)
            loss = _loss(model, 10 * step + number, device, case.compute_dtype)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    shards = [group.shard for group in groups]
    return Outcome(torch.stack(losses).cpu(), _pieces(groups, shards), _pieces(groups, start)), model, start


def train_plain(case: Case, device: str, sharded: nn.Module, start: list[torch.Tensor]) -> Outcome:
    """Train a plain model whose parameters are views of tied slices."""
    world_size, groups = dist.get_world_size(), _groups_of(sharded)
    names = {id(module): name for name, module in sharded.named_modules()}
    plain = MirroredModel(case.recomputes).to(device)
    shards = [shard.to(device, copy=True) for shard in start]
    losses = []
    for step in range(case.steps):
        sums = []
        for group, shard in zip(groups, shards, strict=True):
            full = shard.to(case.compute_dtype).repeat(world_size)
            grads = torch.zeros(group.layout.numel, dtype=case.reduce_dtype, device=device)
            for param in group.params:
                owner, name = param.owners[0]
                values = full[param.slot.offset :][: param.slot.numel].view(param.slot.shape)
                leaf = nn.Parameter(values)
                plain.get_submodule(names[id(owner)])._parameters[name] = leaf
                sums.append((leaf, grads, param.slot.offset))
        for number in range(case.micro_batches):
            loss = _loss(plain, 10 * step + number, device, case.compute_dtype)
            loss.backward()
            losses.append(loss.detach())
            for leaf, grads, offset in sums:
                assert leaf.grad is not None
                grads[offset : offset + leaf.numel()].add_(leaf.grad.reshape(-1))
                leaf.grad = None
        whole = list(dict.fromkeys(grads for _, grads, _ in sums))
        with torch.no_grad():
            for shard, group, grads in zip(shards, groups, whole, strict=True):
                mean = (grads.view(world_size, -1).sum(0) / world_size).to(shard.dtype)
                for param in group.params:
                    shard[param.local].add_(mean[param.local], alpha=-RATE)
    return Outcome(torch.stack(losses).cpu(), _pieces(groups, shards), _pieces(groups, start))


def check(name: str, device: str) -> dict[str, bool]:
    """Train a case in all modes (one on the CPU); returns which results have the expected bits."""
    case = CASES[name]
    found: dict[str, bool] = {}
    first: Outcome | None = None
    for mode, delays in MODES.items():
        if device == "cpu" and first is not None:
            break
        vars(DELAYS).update(vars(delays))
        outcome, model, start = train(case, device)
        vars(DELAYS).update(vars(Delays()))
        if first is None:
            first = outcome
            found["training moves parameters"] = outcome.moved
            found["plain model"] = outcome.equals(train_plain(case, device, model, start))
        else:
            found[mode] = outcome.equals(first)
    return found


def main() -> int:
    """Command line; 1 if anything differs."""
    parser = argparse.ArgumentParser(description="sharded training, one device as many ranks")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--cases", default=",".join(CASES))
    given = parser.parse_args()
    torch.use_deterministic_algorithms(given.device == "cpu")
    good = True
    with mirrored(given.world):
        for name in given.cases.split(","):
            if given.device == "cpu" and name == "offload":
                continue
            found = check(name, given.device)
            good &= all(found.values())
            print(name, found, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
