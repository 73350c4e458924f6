"""Sharded training on one device that acts as N ranks, compared with a plain model: real data, streams, a strict group.

    python tools/mirror.py                            on the CPU, by the code path for accelerators, in program order
    python tools/mirror.py --device cuda --world 64
    python tools/mirror.py --device sim               on the asynchronous device of the tests

All N ranks have equal shards, so the slices of every parameter are tied, and one process can act as all ranks:

    all-gather        every rank's slice is this rank's shard
    reduce-scatter    the mean (or sum) over the slices of this rank's buffer: the gradient of tied slices
    all-to-all        rank r sends this rank's part for rank r; the sum over ranks is that of the reduce-scatter
    all-reduce        nothing, because replicas are equal

The group asserts NCCL's requirements: sizes, dtypes, alignment, the position of a shard in its full buffer, and that
collectives run on the current stream, which has the chosen priority. On a GPU, its collectives run on a separate
stream, as NCCL's do, with a delay before they access memory. The model is delayed too. A missing wait then changes
results: with delays on either side, on both and on none, training must give the bits of a run that synchronizes after
every collective, and the bits of the plain model. ``--control`` leaves out the compute stream's waits for gathers: the
bits must then differ in one of these runs. On the asynchronous device, orders of streams take the place of delays.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
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
from tools.bench.rows import Row
from tools.gpu.devices import KINDS, SIM, hazards, module_of, open_device, set_order, sleep
from vescale_fsdp import Rows, fully_shard
from vescale_fsdp.collectives import group_log
from vescale_fsdp.devices import ACCELERATORS, Accelerator
from vescale_fsdp.quantize import Fp8Blocks, QuantizedGather
from vescale_fsdp.runtime.comm.dbuffer import DBuffer
from vescale_fsdp.runtime.comm.streams import DeviceStreams, Stream
from vescale_fsdp.runtime.fsdp_state import state_of
from vescale_fsdp.runtime.param_group import ParamGroup

ALIGN_BYTES = 16  # below this alignment NCCL copies element by element
RATE = 1e-4
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass
class Delays:
    """What a device does before a collective and before a layer; ``synchronized``: no overlap."""

    collective: float = 0.0  # milliseconds
    compute: float = 0.0  # milliseconds
    order: str = "early"  # of the asynchronous device
    synchronized: bool = False


DELAYS = Delays()
MODES = {
    "synchronized": Delays(synchronized=True),
    "as it comes": Delays(order="random"),
    "late collectives": Delays(collective=3, order="sides last"),
    "late compute": Delays(compute=2, order="sides first"),
    "both late": Delays(collective=1, compute=1, order="late"),
}


class MirroredWork(Work):
    """A collective in flight on the group's stream."""

    def __init__(self, module: Any, event: Any) -> None:
        super().__init__()
        self._module, self._event = module, event

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait."""
        if self._event is not None:
            self._module.current_stream().wait_event(self._event)
        return True


# Any: torch calls these methods with other arguments than its type stubs declare.
_Base: Any = dist.ProcessGroup


class MirroredGroup(_Base):  # type: ignore[misc]
    """A group of equal ranks, of which this process is the first."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._size = size
        self._stream: Any = None  # made by the first collective on a device with streams
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
        module = module_of(tensor.device)
        if module is None:
            work()
            return MirroredWork(None, None)
        if self._stream is None:
            self._stream = module.Stream()
        if DELAYS.synchronized:
            module.synchronize()
        self._stream.wait_stream(module.current_stream())
        with module.stream(self._stream):
            sleep(tensor.device, DELAYS.collective)
            work()
            event = self._stream.record_event()
        if DELAYS.synchronized:
            module.synchronize()
        return MirroredWork(module, event)

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
        return MirroredWork(None, None)


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
def mirrored(world_size: int, device: torch.device | None = None) -> Iterator[MirroredGroup]:
    """A context in which this process is all ranks of a group of this size; on the CPU if no device is given."""
    if "mirror" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "mirror",
            lambda store, rank, size, timeout: MirroredGroup(rank, size),
            devices=list(KINDS),
        )
    dist.init_process_group("mirror", store=dist.HashStore(), rank=0, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    try:
        mirrors = dict.fromkeys(KINDS, Accelerator(frozenset({"mirror"})))
        without_ranks = mock.patch.object(group_log, "WITHOUT_RANKS", {"mirror"})
        with (
            _gaps_of_zeros(),
            _streams(device or torch.device("cpu")),
            mock.patch.dict(ACCELERATORS, mirrors),
            without_ranks,
        ):
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
def _streams(device: torch.device) -> Iterator[None]:
    """On the CPU: streams that only have names, so that the code path for accelerators runs."""
    if device.type != "cpu":
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
    def __init__(self, width: int, hidden: int, has_vectors: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width, elementwise_affine=has_vectors),
            nn.Linear(width, hidden, bias=has_vectors),
            nn.Linear(hidden, width, bias=has_vectors),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep(x.device, DELAYS.compute)
        y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


class MirroredModel(nn.Module):
    """Four blocks between two layers of the root.

    Args:
        has_vectors: whether there are biases and the weights of norms.
    """

    def __init__(self, recomputes: bool, has_vectors: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(24, 96, bias=has_vectors)
        self.blocks = nn.ModuleList(_Block(96, 200, has_vectors) for _ in range(4))
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
    has_vectors: bool = True  # besides matrices
    rate: float = RATE
    replicas: int = 1  # with more than one, a mesh of two axes
    compiled: bool = False  # each block by Inductor; on other devices than GPUs by AOTAutograd
    stepping: dict[str, Any] = field(default_factory=dict)  # options of the optimizer
    rounding: float = (
        0.0  # allowed distance from the plain model, as a fraction of the training's change; 0: no bit
    )
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
    "replicas": Case(replicas=2, rate=1e-2),
    "foreach": Case(stepping={"foreach": True}),
    # Only matrices, so that the codes and scales of every rank have the same positions; the plain model has no codes.
    "8-bit gathers": Case(
        QuantizedGather(torch.bfloat16, torch.float32, codecs=Fp8Blocks(1, 4)),
        has_vectors=False,
        rounding=0.5,
        options={"granularity": Rows(1)},
    ),
    "compiled": Case(compiled=True, rounding=0.1),
}


@dataclass
class Outcome:
    """Losses, and this rank's pieces of all parameters at the end and at the start."""

    losses: torch.Tensor
    pieces: list[torch.Tensor]
    start: list[torch.Tensor]

    def distance(self, other: Outcome) -> float:
        """The largest difference of a piece from another outcome's, relative to how far training has moved it."""
        pairs = zip(self.pieces, other.pieces, self.start, strict=True)
        apart = [(one - two).norm() / (two - start).norm() for one, two, start in pairs]
        return torch.stack(apart).max().item()  # NaN if any is NaN, unlike Python's max

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
    model = MirroredModel(case.recomputes, case.has_vectors)
    if case.double_norms:
        for block in model.blocks:
            block.get_submodule("norm").double()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.3)  # small, because slices are tied and a norm may get a matrix's values
    world_size = dist.get_world_size()
    if case.replicas > 1:
        sizes, names = (case.replicas, world_size // case.replicas), ("replicate", "shard")
    else:
        sizes, names = (world_size,), ("shard",)  # type: ignore[assignment]
    mesh = init_device_mesh(device, sizes, mesh_dim_names=names)
    for module in (*model.blocks, model):
        sharded: Any = fully_shard(module, mesh=mesh, mp_policy=case.policy, **case.options)
    sharded.set_narrow_reduction(case.narrow)
    for block in model.blocks if case.compiled else ():
        block.compile(backend="inductor" if device == "cuda" else "aot_eager")
    groups = _groups_of(model)
    start = [group.shard.detach().clone() for group in groups]
    optimizer = torch.optim.SGD(model.parameters(), lr=case.rate, **case.stepping)
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
    groups = _groups_of(sharded)
    num_shards = dist.get_world_size() // case.replicas
    names = {id(module): name for name, module in sharded.named_modules()}
    plain = MirroredModel(case.recomputes, case.has_vectors).to(device)
    shards = [shard.to(device, copy=True) for shard in start]
    losses = []
    for step in range(case.steps):
        sums = []
        for group, shard in zip(groups, shards, strict=True):
            full = shard.to(case.compute_dtype).repeat(num_shards)
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
                mean = (grads.view(num_shards, -1).sum(0) / num_shards).to(shard.dtype)
                for param in group.params:
                    shard[param.local].add_(mean[param.local], alpha=-case.rate)
    return Outcome(torch.stack(losses).cpu(), _pieces(groups, shards), _pieces(groups, start))


def check(name: str, device: torch.device, modes: Sequence[str] = tuple(MODES)) -> dict[str, bool]:
    """Train a case in some modes (one on the CPU, which has no streams); returns which results are as expected."""
    case = CASES[name]
    found: dict[str, bool] = {}
    first: Outcome | None = None
    for mode in modes[:1] if device.type == "cpu" else modes:
        vars(DELAYS).update(vars(MODES[mode]))
        set_order(device, DELAYS.order)
        outcome, model, start = train(case, device.type)
        vars(DELAYS).update(vars(Delays()))
        set_order(device, DELAYS.order)
        if first is None:
            first = outcome
            plain = train_plain(case, device.type, model, start)
            found["training moves parameters"] = outcome.moved
            found["plain model"] = (
                outcome.distance(plain) <= case.rounding if case.rounding else outcome.equals(plain)
            )
        else:
            found[mode] = outcome.equals(first)
    if device.type == SIM:
        found["no hazard"] = not hazards(device)
    return found


class _NeverWaits(DeviceStreams):
    """Streams whose compute stream ignores events: it does not wait for gathers."""

    def current(self) -> Stream:
        now: Any = super().current()
        kind: Any = type(now)
        stream: Stream = _deaf(kind)(
            stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type
        )
        return stream


@cache
def _deaf(kind: type) -> Any:
    """A device's class of streams, without waits for events."""
    return types.new_class("Deaf", (kind,), exec_body=lambda names: names.update(wait_event=lambda *_: None))


def control(device: torch.device) -> bool:
    """Train one case without the compute stream's waits; returns whether its bits differ, as they must."""
    with mock.patch("vescale_fsdp.runtime.fsdp_state.streams_of", _NeverWaits):
        found = check("bf16", device, ("synchronized", *(late := ("late collectives", "late compute"))))
    return not all(found[mode] for mode in late)


def main() -> int:
    """Command line; 1 if anything differs."""
    parser = argparse.ArgumentParser(description="sharded training, one device as many ranks")
    parser.add_argument("--device", choices=KINDS, default="cpu")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--modes", default=",".join(MODES), help="the first one is the reference")
    parser.add_argument(
        "--control", action="store_true", help="train without some waits, too: bits must differ"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.use_deterministic_algorithms(given.device == "cpu")
    device = open_device(given.device)
    results: dict[str, dict[str, bool]] = {}
    with mirrored(given.world, device):
        for name in given.cases.split(","):
            if given.device == "cpu" and name == "offload":
                continue
            results[name] = check(name, device, given.modes.split(","))
            print(name, results[name], flush=True)
        if given.control:
            results["without waits"] = {"differs": control(device)}
            print("without waits", results["without waits"], flush=True)
    if given.json:
        rows = [
            Row(f"{given.world} ranks, {case}", what, "bool", float(is_right), target=">= 1").to_json()
            for case, found in results.items()
            for what, is_right in found.items()
        ]
        given.json.write_text(json.dumps(rows))
    return int(not all(all(found.values()) for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
