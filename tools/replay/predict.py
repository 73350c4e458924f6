"""Predictions of docs/gpu_expectations.md: ranges over stated assumptions, next to what was published.

calibrated   on the row Shard(0) of table 1 of arXiv:2602.22437, and on nothing else
assumed      `ASSUMPTIONS`: network, contention, and the speed of matrix products, in all combinations
a range      the least and the most of a gain over these combinations; a gain is FSDP2's step time over ours, less 1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from tools.bench.parts.model_shapes import layer_shapes
from tools.bench.parts.simulated_accelerator import library_bytes
from tools.bench.planner import fsdp2_padding
from tools.replay.machine import H800_BYTES, TABLE_1, Machine
from tools.replay.models import BLOCKSHARD, FSDP2, MODELS, NARROW, OURS, SHARD1, Case, Recorded
from tools.replay.recording import Peaks

ASSUMPTIONS: Mapping[str, tuple[float, ...]] = {
    "network": (0.5, 1.0, 2.0),  # bandwidth of collectives, of the calibrated one
    "contention": (0.0, 1.0),  # how much a copy and a collective slow each other
    "products": (0.3, 0.65),  # speed of matrix products, of the GPU's peak
}
FRAGMENTATION = (
    0.05,
    0.15,
)  # of the pools: what the caching allocator reserves above the peaks of its pools; assumed
CONTEXT_BYTES = 2**29  # of CUDA, with the kernels that it has loaded
PEAK_FLOPS = 989e12
OPTIMIZERS = {"gpt-oss-120B": "sgd"}  # as the paper ran it; of other models AdamW
TOKENS = {
    "Llama-3-70B": (2048, 4096, 8192, 16384, 32768, 65536),
    "gpt-oss-120B": (8192, 16384, 32768, 65536, 131072, 262144),
    "DeepSeek-V3": (4096, 8192, 16384, 32768, 65536, 131072),
}
RANKS = (64, 128, 256, 1024, 4096, 16384)
SERIES = (
    ("Llama-3-70B", FSDP2),
    ("gpt-oss-120B", FSDP2),
    ("gpt-oss-120B", SHARD1),
    ("gpt-oss-120B", BLOCKSHARD),
    ("DeepSeek-V3", FSDP2),
    ("DeepSeek-V3", SHARD1),
)
"""Models and rivals by number of ranks."""


def calibrated(recorded: Recorded) -> Machine:
    """A machine whose gpt-oss-120B layer, default FSDP2 over 64 ranks, takes what table 1's first row says.

    Args:
        recorded: this case.
    """
    row = {name: ms / 1000 for name, ms in TABLE_1["Shard(0)"].items()}
    sent = 63 / 64
    (_, gathered), (_, reduced) = (
        recorded.per_layer("collective", f"_{name}_base_") for name in ("allgather", "reduce_scatter")
    )
    (_, out), (_, into) = (
        recorded.per_layer("operator", name) for name in ("split_with_sizes_copy", "chunk_cat")
    )
    # A layer has two gathers, with a copy each, and one reduction. The row has one of each.
    return Machine(
        gather_bytes_s=gathered / 2 * sent / row["all-gather"],
        reduce_bytes_s=reduced * sent / row["reduce-scatter"],
        copy_out_bytes_s=out / 2 / row["copy-out"],
        copy_in_bytes_s=into / row["copy-in"],
    )


def other_row(machine: Machine, default: Recorded, by_dim: Recorded) -> dict[str, tuple[float, float]]:
    """Predict table 1's row Shard(1), in milliseconds; as a range where a kernel's bandwidth is not calibrated.

    Shard(1) concatenates the experts once more after each gather, and once more before the reduction. These copies read
    and write runs as short as a rank's part of a row: they are assumed to be as fast as one of the calibrated copies.
    """
    sent = 63 / 64
    (_, gathered), (_, reduced) = (
        by_dim.per_layer("collective", f"_{name}_base_") for name in ("allgather", "reduce_scatter")
    )
    (_, out), (_, into), (_, cat), (_, others) = (
        each.per_layer("operator", name)
        for each, name in (
            (by_dim, "split_with_sizes_copy"),
            (by_dim, "chunk_cat"),
            (by_dim, "cat"),
            (default, "cat"),  # the model's own
        )
    )
    each_cat = (cat - others) / 3
    speeds = (machine.copy_out_bytes_s, machine.copy_in_bytes_s)
    copy_out, copy_in = out / 2 / machine.copy_out_bytes_s, into / machine.copy_in_bytes_s
    gather, reduce = gathered / 2 * sent / machine.gather_bytes_s, reduced * sent / machine.reduce_bytes_s
    ms = {
        "all-gather": (gather, gather),
        "copy-out": (copy_out + each_cat / max(speeds), copy_out + each_cat / min(speeds)),
        "reduce-scatter": (reduce, reduce),
        "copy-in": (copy_in + each_cat / max(speeds), copy_in + each_cat / min(speeds)),
    }
    return {name: (1000 * low, 1000 * high) for name, (low, high) in ms.items()}


def machines(machine: Machine) -> Iterator[Machine]:
    """The machine under all combinations of `ASSUMPTIONS`."""
    for network, contention, products in product(*ASSUMPTIONS.values()):
        yield replace(
            machine,
            gather_bytes_s=machine.gather_bytes_s * network,
            reduce_bytes_s=machine.reduce_bytes_s * network,
            contention=contention,
            flops_s=PEAK_FLOPS * products,
        )


def gains(ours: Recorded, theirs: Recorded, machine: Machine, tokens: int) -> dict[str, float]:
    """Gains over all assumptions: the least, the most, with the calibrated machine, and without contention."""
    found = {
        each: float(theirs.step(each, tokens).seconds / ours.step(each, tokens).seconds - 1)
        for each in machines(machine)
    }
    calm = [gain for each, gain in found.items() if not each.contention]
    middle = theirs.step(machine, tokens).seconds / ours.step(machine, tokens).seconds - 1
    return {
        "least": min(found.values()),
        "most": max(found.values()),
        "middle": middle,
        "least without contention": min(calm),
        "most without contention": max(calm),
    }


@dataclass(frozen=True)
class Fit:
    """Bytes of a step on a GPU: the pools, what is lost to their fragmentation, and what is beside them.

    Attributes:
        beside: bytes of the libraries' buffers and of CUDA's context.
    """

    peaks: Peaks
    beside: int

    def total(self, lost: float) -> float:
        """Bytes in all, if this share of the pools is lost."""
        return self.peaks.pools * (1 + lost) + self.beside

    @property
    def most_lost(self) -> float:
        """The share of the pools that may be lost before the step does not fit into a GPU of 80 GB; may be negative."""
        return (H800_BYTES - self.beside) / self.peaks.pools - 1

    @property
    def verdict(self) -> str:
        """Whether the step fits, by `FRAGMENTATION`."""
        least, most = FRAGMENTATION
        if most <= self.most_lost:
            return "fits"
        return "out of memory" if least > self.most_lost else "depends on fragmentation"


def fit(recorded: Recorded, machine: Machine, tokens: int) -> Fit:
    """The memory of a step."""
    peaks = recorded.step(machine, tokens).peaks
    libraries = library_bytes(recorded.case.mesh_shape, exchanges=recorded.case.library == NARROW)
    return Fit(peaks, libraries + CONTEXT_BYTES)


def padding(model: str, ranks: int, library: str) -> float | None:
    """FSDP2's padding of one layer with its published shapes, of its parameters; None: refused.

    Args:
        model: a name of `tools.bench.parts.model_shapes`.
        library: `FSDP2`, `SHARD1` or `BLOCKSHARD`.
    """
    shapes = []
    for shape in layer_shapes(model).values():
        if len(shape) == 3 and library == SHARD1:
            if shape[1] % ranks:
                return None
            shape = (shape[1], shape[0] * shape[2])
        if len(shape) == 3 and library == BLOCKSHARD:
            shape = (shape[0] * shape[1], shape[2])
        shapes.append(shape)
    return fsdp2_padding(shapes, ranks)


class Study:
    """Recordings by case, made when they are first needed."""

    def __init__(self, cache: Path | None) -> None:
        self._cache = cache
        self._recorded: dict[Case, Recorded] = {}
        self.machine = calibrated(self.of("gpt-oss-120B", FSDP2, 64))

    def of(self, model: str, library: str, *mesh_shape: int) -> Recorded:
        """The recordings of a case."""
        case = Case(MODELS[model], library, mesh_shape, OPTIMIZERS.get(model, "adamw"))
        if case not in self._recorded:
            self._recorded[case] = Recorded.of(case, self._cache)
        return self._recorded[case]

    def table_1(self) -> dict[str, dict[str, Any]]:
        """The row that is not calibrated: predicted, and published."""
        rows = [self.of("gpt-oss-120B", library, 64) for library in (FSDP2, SHARD1)]
        predicted = other_row(self.machine, *rows)
        return {
            name: {"predicted_ms": predicted[name], "published_ms": ms}
            for name, ms in TABLE_1["Shard(1)"].items()
        }

    def by_tokens(self, model: str, ranks: int) -> list[dict[str, float]]:
        """Gains by tokens per GPU."""
        ours, theirs = (self.of(model, library, ranks) for library in (OURS, FSDP2))
        return [{"tokens": tokens, **gains(ours, theirs, self.machine, tokens)} for tokens in TOKENS[model]]

    def by_ranks(self, model: str, tokens: int, rival: str) -> list[dict[str, float | str]]:
        """Gains by ranks, with what the rival refuses."""
        found: list[dict[str, float | str]] = []
        for ranks in RANKS:
            if refusal := Case.refusal(MODELS[model], rival, ranks):
                found.append({"ranks": ranks, "refused": refusal})
                continue
            ours, theirs = (self.of(model, library, ranks) for library in (OURS, rival))
            found.append({"ranks": ranks, **gains(ours, theirs, self.machine, tokens)})
        return found

    def narrow(self, model: str, ranks: int, tokens: int) -> dict[float, float]:
        """Gains of narrow reductions over FSDP2, by the speed of an all-to-all per byte, of a reduce-scatter's."""
        ours, theirs = (self.of(model, library, ranks) for library in (NARROW, FSDP2))
        machines = {speed: replace(self.machine, exchange=speed) for speed in (0.5, 1.0)}
        return {
            speed: theirs.step(each, tokens).seconds / ours.step(each, tokens).seconds - 1
            for speed, each in machines.items()
        }

    def memory(self, model: str, ranks: int, tokens: int, libraries: tuple[str, ...]) -> dict[str, Any]:
        """GiB by library: live, pools, and in all without and with fragmentation; what may be lost; whether it fits."""
        found: dict[str, Any] = {}
        for library in libraries:
            each = fit(self.of(model, library, ranks), self.machine, tokens)
            least, most = FRAGMENTATION
            sizes = {
                "live": each.peaks.live,
                "pools": each.peaks.pools,
                "without": each.total(0),
                "least": each.total(least),
                "most": each.total(most),
            }
            found[library] = {name: size / 2**30 for name, size in sizes.items()}
            found[library] |= {"most_lost": each.most_lost, "verdict": each.verdict}
        return found

    def bounds(self, model: str, ranks: int) -> dict[str, float]:
        """A layer's milliseconds on the calibrated machine: its collectives, FSDP2's copies, and what both bound.

        Where collectives bound the step, removing copies gains nothing without contention. Where compute bounds it, the
        gain falls with tokens. It is largest where both take as long: copies over collectives.
        """
        default = self.of(model, FSDP2, ranks)
        sent = (ranks - 1) / ranks
        (_, gathered), (_, reduced) = (
            default.per_layer("collective", f"_{name}_base_") for name in ("allgather", "reduce_scatter")
        )
        (_, out), (_, into) = (
            default.per_layer("operator", name) for name in ("split_with_sizes_copy", "chunk_cat")
        )
        sending = sent * (gathered / self.machine.gather_bytes_s + reduced / self.machine.reduce_bytes_s)
        copying = out / self.machine.copy_out_bytes_s + into / self.machine.copy_in_bytes_s
        return {"sending_ms": 1000 * sending, "copying_ms": 1000 * copying, "most_gain": copying / sending}
