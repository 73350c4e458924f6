"""What one more unit adds to a training step: collectives, operators and allocations, this package against FSDP2.

    python tools/bench/counts.py                            64, 1,024 and 16,384 ranks, half a minute
    python tools/bench/counts.py --ranks 64 --json counts.json

One rank of a fake process group takes its path for accelerators (`tools/bench/parts/simulated_accelerator.py`): fake
tensors, streams that are objects with a name. Each figure is the difference of models of 3 and of 2 layers, in the
second step. The layers' own operators and allocations are subtracted, as a model that is not sharded has them.

    collectives     calls; gathers of one launch on NCCL count one by one
    operators       all but collectives, views and allocations: about one kernel each
    allocations     of the caching allocator

With the optimizer over nodes of 8 ranks, the rows compare with the same on 64 ranks: nothing depends on their number.

Another row has the requests to the process group's store of a step, by two ranks over gloo. Ranks compare the order of
their collectives by messages, so their number does not depend on the number of ranks. The last rows have the most
layers that have full parameters while a backward is between two layers, where parts of the model are frozen.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench.parts.simulated_accelerator import (
    Decoder,
    DecoderShape,
    fake_group,
    launch_of,
    simulated_accelerator,
)
from tools.bench.rows import Row, print_table, write_json
from vescale_fsdp import fully_shard
from vescale_fsdp.collectives import group_log
from vescale_fsdp.dtensor import meeting
from vescale_fsdp.runtime.comm import order_watch
from vescale_fsdp.torch_private import default_store

POLICIES = {
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "fp32": MixedPrecisionPolicy(),
}
TARGETS = {"collectives": "<= 1", "operators": "<= 1", "allocations": "<= 1"}


class Calls(TorchDispatchMode):
    """Counts collectives and operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # operators on its local tensors are dispatched here again
        if launches := launch_of(func):
            self.counts[f"{launches}s"] += 1
        return func(*args, **(kwargs or {}))


def counts_of_a_step(
    num_layers: int, policy: MixedPrecisionPolicy, function: Any, *, per_node: int = 0
) -> Counter[str]:
    """Counts of the second step of a decoder that ``function`` shards; None: it is not sharded.

    Args:
        per_node: ranks per node, over which the optimizer is sharded; 0: a mesh of one axis.
    """
    world, options = dist.get_world_size(), dict[str, Any]()
    mesh = init_device_mesh("cpu", (world,))
    if per_node:
        mesh = init_device_mesh("cpu", (world // per_node, per_node), mesh_dim_names=("node", "local"))
        options["shard_optimizer_over"] = "node"
    with simulated_accelerator() as use:
        # A model that is not sharded computes in the policy's dtype, too.
        torch.set_default_dtype(
            policy.param_dtype if function is None and policy.param_dtype else torch.float32
        )
        model = Decoder(DecoderShape(num_layers, 512, 128, 1536, 256))
        torch.set_default_dtype(torch.float32)
        for unit in (*model.layers, model) if function is not None else ():
            function(unit, mesh=mesh, mp_policy=policy, **options)
        batch = torch.zeros(1, 8, dtype=torch.long)
        for _ in range(2):
            before = use.num_allocations
            with Calls() as seen:
                model(batch).float().pow(2).mean().backward()
                model.zero_grad()
            torch.autograd.graph.increment_version(list(model.parameters()))  # as an optimizer's step
        return seen.counts + Counter(allocations=use.num_allocations - before)


def of_one_more(policy: MixedPrecisionPolicy, function: Any, *, per_node: int = 0) -> dict[str, int]:
    """What one more layer adds to a step."""
    more, fewer = (counts_of_a_step(number, policy, function, per_node=per_node) for number in (3, 2))
    return {metric: more[metric] - fewer[metric] for metric in TARGETS}


def rows_over_nodes(ranks: int) -> list[Row]:
    """Counts of a unit with the optimizer over nodes of 8 ranks, beside those on 64 ranks."""
    counts = []
    for number in (ranks, 64):
        with fake_group(number):
            counts.append(of_one_more(POLICIES["bf16"], fully_shard, per_node=8))
    case = f"bf16, {ranks} ranks, optimizer over nodes"
    return [
        Row(case, f"{metric} per unit", "", counts[0][metric], counts[1][metric], "64 ranks", target)
        for metric, target in TARGETS.items()
    ]


def rows_of(ranks: int) -> list[Row]:
    """Counts of a unit with so many ranks."""
    rows = []
    for name, policy in POLICIES.items():
        with fake_group(ranks):
            plain, ours, theirs = (
                of_one_more(policy, function)
                for function in (None, fully_shard, cast(Callable[..., Any], torch_fully_shard))
            )
        rows += [
            Row(
                f"{name}, {ranks} ranks",
                f"{metric} per unit",
                "",
                ours[metric] - plain[metric],
                theirs[metric] - plain[metric],
                "FSDP2",
                target,
            )
            for metric, target in TARGETS.items()
        ]
    return rows


# -- requests to the store ------------------------------------------------------------------------------


class CountingStore:
    """The store of the default group, with its requests counted."""

    def __init__(self) -> None:
        self.store, self.num_requests = default_store(), 0

    def __getattr__(self, name: str) -> Any:
        self.num_requests += 1
        return getattr(self.store, name)


def requests_of_a_step(rank: int, port: int) -> float:
    """Worker: requests per step, of steps with clipping and AdamW."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    store, steps = CountingStore(), 10
    with (
        mock.patch.object(order_watch, "default_store", return_value=store),
        mock.patch.object(group_log, "default_store", return_value=store),
        mock.patch.object(meeting, "default_store", return_value=store),
    ):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        for unit in (*model, model):
            fully_shard(unit)
        optimizer = torch.optim.AdamW(model.parameters())
        before = 0
        for step in range(steps + 1):
            if step == 1:  # the first step compares how ranks have sharded the model
                before = store.num_requests
            model(torch.ones(2, 64)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        requests = (store.num_requests - before) / steps
    dist.destroy_process_group()
    return requests


def rows_of_store() -> list[Row]:
    """Requests to the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        requests = pool.starmap(requests_of_a_step, [(rank, port) for rank in range(2)])
    return [
        Row("any number of ranks", "store requests per rank and step", "", max(requests), None, None, "<= 0")
    ]


# -- units in full --------------------------------------------------------------------------------------

# Name of a case -> whether a parameter is trained.
TRAINED: dict[str, Callable[[str], bool]] = {
    "everything trained": lambda name: True,
    "a projector under frozen layers": lambda name: name.startswith("layers.0."),
    "the upper half": lambda name: int(name.split(".")[1]) >= NUM_LAYERS // 2,
    "an adapter per layer": lambda name: ".adapter." in name,
}
NUM_LAYERS = 8


class Probe(torch.autograd.Function):
    """Calls a function where a backward passes."""

    @staticmethod
    def forward(ctx: Any, note: Callable[[], None], x: torch.Tensor) -> torch.Tensor:
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        ctx.note()
        return None, grad


class Layer(nn.Module):
    """A matrix with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.adapter(x))


class Stack(nn.Module):
    """Layers, with a probe before each."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self.layers, self.note = nn.ModuleList(Layer() for _ in range(NUM_LAYERS)), note

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(Probe.apply(self.note, x))
        return x


def most_in_full(function: Any, is_trained: Callable[[str], bool]) -> int:
    """The most layers with full parameters between the backwards of two layers, in the second step."""
    seen: list[int] = []

    def note() -> None:
        seen.append(sum(not isinstance(layer.base.weight, DTensor) for layer in model.layers))  # type: ignore[union-attr]

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with simulated_accelerator():
        model = Stack(note)
        for name, param in model.named_parameters():
            param.requires_grad_(is_trained(name))
        for unit in (*model.layers, model):
            function(unit, mesh=mesh)
        for _ in range(2):
            seen.clear()
            model(torch.ones(2, 64, requires_grad=True)).sum().backward()
    return max(seen, default=0)


def rows_of_frozen() -> list[Row]:
    """Layers in full while a backward runs."""
    with fake_group(64):
        return [
            Row(
                case,
                "most units in full between two units' backwards",
                "",
                most_in_full(fully_shard, is_trained),
                most_in_full(torch_fully_shard, is_trained),
                "FSDP2",
            )
            for case, is_trained in TRAINED.items()
        ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="collectives, operators, allocations and requests of a step")
    parser.add_argument("--ranks", default="64,1024,16384")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [*rows_of_store(), *rows_of_frozen()]
    for ranks in map(int, given.ranks.split(",")):
        rows += [*rows_of(ranks), *rows_over_nodes(ranks)]
    print_table(rows)
    if given.json:
        write_json(given.json, rows)


if __name__ == "__main__":
    main()
