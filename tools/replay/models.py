"""Recordings of well-known models under this library and under FSDP2, at any number of layers, tokens and ranks.

A model is a `Decoder` with the published sizes; the attention of DeepSeek-V3 is an ordinary one of nearly as many
parameters. Its layers, its embedding and its norm with the head are units, and layers are recomputed.

    ours                one reduce-scatter in fp32 per unit: the default on accelerators
    ours, narrow        `set_narrow_reduction(True)`: slices of gradients are sent in bf16 and summed in fp32
    FSDP2               as it is: rows of dim 0, which for grouped experts are whole experts
    FSDP2, Shard(1)     the experts by dim 1, as torchtitan shards them over more ranks than experts
    FSDP2, BlockShard   a rule for the placement of torch's main branch: rows are cut inside the experts

Steps are recorded with two numbers of layers and two of sequences. Layers are alike, and bytes and flops are linear in
the number of sequences, so everything else follows from these four recordings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

from tools.bench.parts.simulated_accelerator import Decoder, DecoderShape, fake_group
from tools.replay.machine import Machine
from tools.replay.queue import replay
from tools.replay.recording import Peaks, Recording, record
from vescale_fsdp import fully_shard

OURS, NARROW, FSDP2, SHARD1, BLOCKSHARD = LIBRARIES = (
    *("ours", "ours, narrow"),
    *("FSDP2", "FSDP2, Shard(1)", "FSDP2, BlockShard"),
)
FEWER, MORE = 3, 4  # recorded layers; steps of fewer layers have no layer in the middle
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Model:
    """A model and the length of its sequences."""

    shape: DecoderShape
    sequence: int


MODELS = {
    "Llama-3-70B": Model(DecoderShape(80, 8192, 1024, 28672, 128_256, head=128), 4096),
    "gpt-oss-120B": Model(
        DecoderShape(36, 2880, 512, 2880, 201_088, num_experts=128, top_k=4, query=4096, head=64), 8192
    ),
    "DeepSeek-V3": Model(
        DecoderShape(61, 7168, 1792, 2048, 129_280, num_experts=256, top_k=8, head=128), 4096
    ),
}


@dataclass(frozen=True)
class Case:
    """A model under a library on a mesh.

    Raises:
        ValueError: the library is unknown, or refuses to shard this model over so many ranks.
    """

    model: Model
    library: str
    mesh_shape: tuple[int, ...]  # (ranks,) or (replicas, ranks)
    optimizer: str = "adamw"  # or "sgd", without momentum

    def __post_init__(self) -> None:
        if self.library not in LIBRARIES or self.optimizer not in ("adamw", "sgd"):
            raise ValueError(f"expected a library of {LIBRARIES}, with adamw or sgd; got {self}")
        if refusal := self.refusal(self.model, self.library, self.mesh_shape[-1]):
            raise ValueError(refusal)

    @staticmethod
    def refusal(model: Model, library: str, ranks: int) -> str:
        """Why the library does not shard the model over so many ranks; empty if it does."""
        if library != SHARD1:
            return ""
        if not model.shape.num_experts:
            return "there are no experts"
        sizes = {model.shape.hidden, model.shape.mlp}  # dim 1 of gate and up, and of down
        uneven = sorted(size for size in sizes if size % ranks)
        return f"Shard(1) needs dims that {ranks} ranks divide; {uneven} do not" if uneven else ""

    def record(self, num_layers: int, sequences: Sequence[int]) -> tuple[Recording, ...]:
        """Record steps of a model of so many layers, with these numbers of sequences per rank."""
        shape = replace(self.model.shape, num_layers=num_layers, flat_experts=self.library == BLOCKSHARD)
        with fake_group(prod(self.mesh_shape)):
            mesh = init_device_mesh(
                "cpu", self.mesh_shape, mesh_dim_names=("replicate", "shard")[-len(self.mesh_shape) :]
            )

            def start() -> Callable[[int], None]:
                model = Decoder(shape)
                self._shard(model, mesh)
                parameters = list(model.parameters())
                optimizer = (
                    torch.optim.AdamW(parameters, lr=1e-4, fused=True)
                    if self.optimizer == "adamw"
                    else torch.optim.SGD(parameters, lr=1e-4, foreach=True)
                )

                def step(sequences: int) -> None:
                    batch = torch.zeros(sequences, self.model.sequence, dtype=torch.long)
                    model(batch).float().pow(2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()

                return step

            return record(start, sequences)

    def _shard(self, model: Decoder, mesh: Any) -> None:
        ours = self.library in (OURS, NARROW)
        function = cast(Callable[..., Any], fully_shard if ours else torch_fully_shard)

        def placement(param: torch.nn.Parameter) -> Shard | None:
            return Shard(1) if param.ndim == 3 else None

        by_dim = {"shard_placement_fn": placement} if self.library == SHARD1 else {}
        for layer in model.layers:
            function(layer, mesh=mesh, mp_policy=POLICY, **by_dim)
        function(model.embed, mesh=mesh, mp_policy=POLICY)
        function([model.norm, model.head], mesh=mesh, mp_policy=POLICY, reshard_after_forward=False)
        root = function(model, mesh=mesh, mp_policy=POLICY)
        if ours:
            root.set_narrow_reduction(self.library == NARROW)


@dataclass(frozen=True)
class Step:
    """A predicted step."""

    seconds: float
    sending_s: float  # a collective ran
    copying_s: float  # operators that only move bytes ran
    exposed_s: float  # only collectives ran
    peaks: Peaks


@dataclass(frozen=True)
class Recorded:
    """A case's four recordings, of which any number of layers and sequences follows."""

    case: Case
    recordings: tuple[tuple[Recording, Recording], tuple[Recording, Recording]]  # by layers, by sequences

    @staticmethod
    def of(case: Case, cache: Path | None = None) -> Recorded:
        """Record a case, or read what an earlier call wrote into the folder ``cache``."""
        fewer, more = (_cached(case, layers, cache) for layers in (FEWER, MORE))
        return Recorded(case, (fewer, more))

    def with_sequences(self, sequences: float) -> tuple[Recording, Recording]:
        """Return the recordings of `FEWER` and `MORE` layers with a number of sequences per rank, or a part of one."""
        fewer, more = (one.extrapolated(two, sequences - 1) for one, two in self.recordings)
        return fewer, more

    @cached_property
    def num_layers(self) -> int:
        return self.case.model.shape.num_layers

    def step(self, machine: Machine, tokens: int, num_layers: int | None = None) -> Step:
        """Predict a step with so many tokens per rank; default: of the whole model."""
        recordings = self.with_sequences(tokens / self.case.model.sequence)
        replays = [
            replay(each, machine.seconds_of, machine.class_of, machine.slowdowns) for each in recordings
        ]
        factor = ((num_layers or self.num_layers) - FEWER) / (MORE - FEWER)

        def of_all(fewer: Any, more: Any) -> float:
            return float(fewer + factor * (more - fewer))

        sending, copying = ([each.busy.get(kind, 0) for each in replays] for kind in ("collective", "copy"))
        fewer, more = recordings
        return Step(
            of_all(replays[0].total, replays[1].total),
            of_all(*sending),
            of_all(*copying),
            of_all(*(each.alone.get("collective", 0) for each in replays)),
            Peaks(of_all(fewer.peaks.live, more.peaks.live), of_all(fewer.peaks.pools, more.peaks.pools)),
        )

    def per_layer(self, kind: str, name: str) -> tuple[float, float]:
        """Launches of an operator or collective that one more layer adds to a step, and their bytes."""
        fewer, more = (
            [item.nbytes for item in each[0].items if (item.kind, item.name) == (kind, name)]
            for each in self.recordings
        )
        added = MORE - FEWER
        return (len(more) - len(fewer)) / added, (sum(more) - sum(fewer)) / added


def _cached(case: Case, num_layers: int, cache: Path | None) -> tuple[Recording, Recording]:
    if cache is None:
        one, two = case.record(num_layers, (1, 2))
        return one, two
    shape, ranks = case.model.shape, "x".join(map(str, case.mesh_shape))
    name = f"{shape.hidden}-{shape.num_experts}-{case.library}-{ranks}-{case.optimizer}-{num_layers}"
    files = [cache / f"{name.replace(' ', '')}-{sequences}.json" for sequences in (1, 2)]
    if not all(file.exists() for file in files):
        for file, recording in zip(files, case.record(num_layers, (1, 2)), strict=True):
            file.write_text(recording.to_json())
    one, two = (Recording.from_json(file.read_text()) for file in files)
    return one, two
