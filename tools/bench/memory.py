"""Peak memory of a training step on an accelerator, simulated for one rank of many: this package against FSDP2.

    python tools/bench/memory.py                              the whole table, minutes
    python tools/bench/memory.py --cases Llama-70B gpt-oss-120B DeepSeek-V3 --ranks 64 256 1024 --peaks
    python tools/bench/memory.py --cases blocks "256 k tied, 32 ranks" --dtypes bf16 --json memory.json

No GPU is needed: `tools/bench/parts/simulated_accelerator.py` explains what is counted and how. Sequences are short, so
that weights and gradients make up the peak. In the last case activations do, and sharding makes no difference. FSDP2
computes in the same dtype and reduces in fp32. Its figure with reductions in bf16, which round the sums, has no target.

A case with the optimizer over nodes has rows of its own: beside the arithmetic (FSDP's peak, and the parts of the
parameters that ranks keep in bf16), and beside HSDP's peak.

    bf16            bf16 compute; gradients are reduced in fp32
    bf16 narrow     the same with `set_narrow_reduction(True)`: gradients are sent in bf16 and summed in fp32
    fp32            everything in fp32
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench.parts.simulated_accelerator import (
    Decoder,
    DecoderShape,
    MemoryUse,
    fake_group,
    library_bytes,
    simulated_training,
)
from tools.bench.rows import Row, print_table, write_json
from vescale_fsdp import fully_shard
from vescale_fsdp.optim import step_in_backward

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model and how it is cut into units."""

    shape: DecoderShape
    tokens: int
    ends_are_units: bool = False  # embedding and head are units; else they are in the root's unit
    by_activations: bool = False  # activations make up the peak
    mesh_shape: tuple[int, ...] = (64,)  # (ranks,) or (replicas, ranks)
    spread: bool = False  # whether the optimizer is sharded over replicas, too


LLAMA_8B = DecoderShape(32, 4096, 1024, 14336, 128_256)
CASES = {
    "Llama-8B, 32 ranks": Case(LLAMA_8B, 64, mesh_shape=(32,)),
    "Llama-8B, HSDP 4x8": Case(LLAMA_8B, 64, mesh_shape=(4, 8)),
    "ViT-g, 32 ranks": Case(DecoderShape(40, 1536, 1536, 4096, 1000), 257, mesh_shape=(32,)),
    "gpt-oss-20B, 32 ranks": Case(
        DecoderShape(24, 2880, 576, 2880, 201_088, num_experts=32), 64, mesh_shape=(32,)
    ),
    "256 k tied, 32 ranks": Case(
        DecoderShape(26, 2304, 1152, 9216, 256_000, tied=True), 64, mesh_shape=(32,)
    ),
    "blocks": Case(DecoderShape(6, 4096, 1024, 14336, 256), 64),
    "ends as units": Case(DecoderShape(4, 4096, 1024, 14336, 128_256), 128, ends_are_units=True),
    "ends in root": Case(DecoderShape(4, 4096, 1024, 14336, 128_256), 128),
    "step's dense": Case(DecoderShape(8, 2048, 512, 5632, 32_000), 128),
    "long sequence": Case(
        DecoderShape(4, 4096, 1024, 14336, 128_256), 4096, ends_are_units=True, by_activations=True
    ),
}
# Of many ranks, which `--ranks` sets; for `--cases`, not in the default table.
LARGE = {
    "Llama-70B": Case(DecoderShape(80, 8192, 1024, 28672, 128_256), 64),
    "gpt-oss-120B": Case(DecoderShape(36, 2880, 576, 2880, 201_088, num_experts=128), 64),
    "DeepSeek-V3": Case(DecoderShape(61, 7168, 1792, 2048, 129_280, num_experts=256), 64),
    "Llama-70B, optimizer over 8 nodes of 8": Case(
        DecoderShape(80, 8192, 1024, 28672, 128_256), 64, mesh_shape=(8, 8), spread=True
    ),
    "gpt-oss-20B, optimizer over 4 nodes of 8": Case(
        DecoderShape(24, 2880, 576, 2880, 201_088, num_experts=32), 64, mesh_shape=(4, 8), spread=True
    ),
}
POLICIES = {
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bf16 narrow": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "fp32": MixedPrecisionPolicy(),
}
ROUNDED = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
TARGETS = {
    "bf16": ("<= 1.001", "<= 1"),
    "bf16 narrow": ("<= 1.001", "<= 1"),
    "fp32": ("<= 1.001", "<= 1"),
}


def measure(
    case: Case,
    *,
    ours: bool,
    policy: MixedPrecisionPolicy,
    narrow: bool = False,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> MemoryUse:
    """Memory of one rank that trains the case, by default with AdamW."""
    shape = (
        case.mesh_shape if dist.get_world_size() == math.prod(case.mesh_shape) else (dist.get_world_size(),)
    )
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    function = cast(Callable[..., Any], fully_shard if ours else torch_fully_shard)
    if case.spread:
        function = partial(function, shard_optimizer_over="replicate")

    def shard(model: Decoder) -> None:
        for layer in model.layers:
            function(layer, mesh=mesh, mp_policy=policy)
        if case.ends_are_units:
            function(model.embed, mesh=mesh, mp_policy=policy)
            function([model.norm, model.head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        sharded = function(model, mesh=mesh, mp_policy=policy)
        if ours:
            sharded.set_narrow_reduction(narrow)

    return simulated_training(case.shape, shard, tokens=case.tokens, optimizer=optimizer)


def stepped_in_backward(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW that steps each unit after its reduction."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    step_in_backward(model, optimizer)
    return optimizer


def fused(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW without temporaries: those of foreach are as large as all gradients of a rank, whoever shards."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def peaks_of(name: str, case: Case) -> list[Row]:
    """Peaks of one model in bf16, with both reductions, next to FSDP2's."""
    policy = POLICIES["bf16"]
    theirs = measure(case, ours=False, policy=policy)
    rows = []
    for title, narrow in ((name, False), (f"{name}, narrow", True)):
        mine = measure(case, ours=True, policy=policy, narrow=narrow)
        rows += [
            Row(title, "live peak", "GiB", mine.peak / GIB, theirs.peak / GIB, "FSDP2", TARGETS["bf16"][0]),
            Row(title, "sum of pools", "GiB", mine.reserved / GIB, theirs.reserved / GIB, "FSDP2", "<= 1"),
        ]
    return rows


def rows_over_nodes(name: str, case: Case) -> list[Row]:
    """A model with the optimizer over nodes, in bf16: beside the arithmetic, and beside HSDP."""
    replicas, per_node = case.mesh_shape
    with torch.device("meta"):
        kept = 2 * sum(parameter.numel() for parameter in Decoder(case.shape).parameters()) / per_node
    plain, hsdp, spread = (
        measure(each, ours=True, policy=POLICIES["bf16"])
        for each in (
            replace(case, mesh_shape=(replicas * per_node,), spread=False),
            replace(case, spread=False),
            case,
        )
    )
    rival = "FSDP and kept parts"
    return [
        Row(name, "live peak", "GiB", spread.peak / GIB, (plain.peak + kept) / GIB, rival, "<= 1.05"),
        Row(
            name,
            "sum of pools",
            "GiB",
            spread.reserved / GIB,
            (plain.reserved + kept) / GIB,
            rival,
            "<= 1.05",
        ),
        Row(name, "live peak", "GiB", spread.peak / GIB, hsdp.peak / GIB, "HSDP"),
        Row(name, "live peak", "GiB", spread.peak / GIB, plain.peak / GIB, "FSDP"),
    ]


def rows_of(name: str, case: Case, dtypes: str) -> list[Row]:
    """One model under one policy."""
    if case.spread:
        return rows_over_nodes(name, case) if dtypes == "bf16" else []
    policy = POLICIES[dtypes]
    mine = measure(case, ours=True, policy=policy, narrow=dtypes == "bf16 narrow")
    theirs = measure(case, ours=False, policy=policy)
    live, pools = TARGETS["fp32" if case.by_activations else dtypes]
    title = f"{name}, {dtypes}"
    rows = [
        Row(title, "live peak", "GiB", mine.peak / GIB, theirs.peak / GIB, "FSDP2", live),
        Row(title, "sum of pools", "GiB", mine.reserved / GIB, theirs.reserved / GIB, "FSDP2", pools),
        Row(
            title,
            "sum of pools, with an estimate of libraries",
            "GiB",
            (mine.reserved + library_bytes(case.mesh_shape, exchanges=dtypes == "bf16 narrow")) / GIB,
            (theirs.reserved + library_bytes(case.mesh_shape, exchanges=False)) / GIB,
            "FSDP2",
        ),
    ]
    if dtypes == "bf16 narrow":
        stepped = measure(case, ours=True, policy=policy, optimizer=stepped_in_backward, narrow=True)
        rows.append(
            Row(
                title,
                "live peak, steps in backward",
                "GiB",
                stepped.peak / GIB,
                theirs.peak / GIB,
                "FSDP2",
                live,
            )
        )
        own, rivals = (
            measure(case, ours=ours, policy=policy, optimizer=fused, narrow=True).peak
            for ours in (True, False)
        )
        rows.append(Row(title, "live peak, fused AdamW", "GiB", own / GIB, rivals / GIB, "FSDP2", live))
        theirs = measure(case, ours=False, policy=ROUNDED)
        rival = "FSDP2, bf16 sums"
        rows += [
            Row(title, "live peak", "GiB", mine.peak / GIB, theirs.peak / GIB, rival),
            Row(title, "sum of pools", "GiB", mine.reserved / GIB, theirs.reserved / GIB, rival),
        ]
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="peak memory on an accelerator, simulated: ours, FSDP2")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=[*CASES, *LARGE])
    parser.add_argument("--ranks", nargs="+", type=int, default=[], help="instead of the cases' own ranks")
    parser.add_argument(
        "--peaks", action="store_true", help="only live peak and pools in bf16, for both reductions"
    )
    parser.add_argument("--dtypes", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[Row] = []
    for name in given.cases:
        given_case = {**CASES, **LARGE}[name]
        cases = {f"{name}, {ranks} ranks": replace(given_case, mesh_shape=(ranks,)) for ranks in given.ranks}
        for title, case in (cases or {name: given_case}).items():
            with fake_group(math.prod(case.mesh_shape)):
                if given.peaks:
                    rows += peaks_of(title, case)
                else:
                    rows += [row for dtypes in given.dtypes for row in rows_of(title, case, dtypes)]
    print_table(rows)
    if given.json:
        write_json(given.json, rows)


if __name__ == "__main__":
    main()
