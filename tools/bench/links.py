"""Links from a loader (`links_from_loader`) for models of the largest size, in one process, without data.

    python tools/bench/links.py                       DeepSeek-V3's shapes: 61 layers of 256 experts, 46,000 tensors
    python tools/bench/links.py --layers 4            smaller

The loader is written as engines write theirs: ``narrow`` of a parameter and of a checkpoint tensor, and ``copy_``; gate
and up of all experts of a layer are one parameter, and so is down. One rank of 8 with tensor parallelism (each expert
is cut), and one of 8 with expert parallelism (each rank has whole experts). Seconds are CPU time: nothing waits here.
Each case runs in its own process; memory is the growth of its resident set's high-water mark. Planning is for one
trainer of 64 ranks, whose tensors are cut into rows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench.rows import Row, print_table, write_json
from tools.bench.step import _high_water_bytes, _reset_high_water, _resident_bytes
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name
from vescale_fsdp.layout.distribution import Axis, Distribution, RankSet, ShardCut
from vescale_fsdp.transfer import StateDescription, links_from_loader, plan_transfer
from vescale_fsdp.transfer.description import DescribedTensor, named_tensors

HIDDEN, INTER, EXPERTS, DENSE, VOCAB = 7168, 2048, 256, 3, 129_280
QKV = {"q_a_proj": (1536, HIDDEN), "kv_a_proj_with_mqa": (576, HIDDEN)}
RANKS, TRAINERS = 8, 64
TARGETS = {"links": "<= 15", "links memory": "<= 512", "plan": "<= 60"}


def checkpoint(layers: int) -> dict[str, torch.Tensor]:
    """Names and shapes of the checkpoint's tensors, on the meta device."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (VOCAB, HIDDEN),
        "head": (VOCAB, HIDDEN),
        "norm": (HIDDEN,),
    }
    for layer in range(layers):
        inter = INTER if layer >= DENSE else 9 * INTER
        own = {"input_norm": (HIDDEN,), "post_norm": (HIDDEN,), **QKV}
        own |= {"q_b_proj": (24_576, 1536), "kv_b_proj": (32_768, 512), "o_proj": (HIDDEN, 16_384)}
        for expert in range(EXPERTS + 1 if layer >= DENSE else 1):
            own |= {f"{expert}.{name}_proj": (inter, HIDDEN) for name in ("gate", "up")}
            own[f"{expert}.down_proj"] = (HIDDEN, inter)
        if layer >= DENSE:
            own |= {"router": (EXPERTS, HIDDEN)}
        shapes |= {f"{layer}.{name}": shape for name, shape in own.items()}
    return {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}


class Engine(nn.Module):
    """The parameters of one rank, and a loader.

    Args:
        by_expert: give the rank whole experts instead of a part of each.
    """

    def __init__(self, layers: int, rank: int, *, by_expert: bool) -> None:
        super().__init__()
        self.rank, self.by_expert = rank, by_expert
        self.own = (
            range(EXPERTS // RANKS * rank, EXPERTS // RANKS * (rank + 1)) if by_expert else range(EXPERTS)
        )
        self.width = INTER if by_expert else INTER // RANKS
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("embed", "head"), (VOCAB // RANKS, HIDDEN))
        shapes["norm"] = (HIDDEN,)
        for layer in range(layers):
            dense = (INTER if layer >= DENSE else 9 * INTER) // RANKS
            own = {"input_norm": (HIDDEN,), "post_norm": (HIDDEN,), "qkv_a": (1536 + 576, HIDDEN)}
            own |= {"q_b": (24_576 // RANKS, 1536), "kv_b": (32_768 // RANKS, 512)}
            own |= {"o": (HIDDEN, 16_384 // RANKS), "gate_up": (2 * dense, HIDDEN), "down": (HIDDEN, dense)}
            if layer >= DENSE:
                own["router"] = (EXPERTS, HIDDEN)
                own["w13"] = (len(self.own), 2 * self.width, HIDDEN)
                own["w2"] = (len(self.own), HIDDEN, self.width)
            shapes |= {f"{layer}/{name}": shape for name, shape in own.items()}
        for name, shape in shapes.items():
            made = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            self.register_parameter(name, nn.Parameter(made, requires_grad=False))

    def _cut(self, into: str, tensor: torch.Tensor, dim: int, at: int = 0, parts: int = 1) -> None:
        """Copy this rank's part along a dim of ``tensor``, into part ``at`` of a parameter."""
        size = tensor.shape[dim] // RANKS
        target = self.get_parameter(into).data
        width = target.shape[dim] // parts
        target.narrow(dim, at * width, width).copy_(tensor.narrow(dim, self.rank * size, size))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load all parameters."""
        for name, tensor in weights:
            layer, _, rest = name.partition(".")
            prefix = f"{layer}/"
            if not rest or rest in ("input_norm", "post_norm", "router"):
                if name in ("embed", "head"):
                    self._cut(name, tensor, 0)
                else:
                    self.get_parameter(prefix + rest if rest else name).data.copy_(tensor)
            elif rest in QKV:
                start = 0 if rest == "q_a_proj" else 1536
                self.get_parameter(f"{prefix}qkv_a").data.narrow(0, start, len(tensor)).copy_(tensor)
            elif rest in ("q_b_proj", "kv_b_proj", "o_proj"):
                self._cut(prefix + rest.removesuffix("_proj"), tensor, 1 if rest == "o_proj" else 0)
            else:
                number, _, kind = rest.partition(".")
                dim, at = (1, 0) if kind == "down_proj" else (0, int(kind == "up_proj"))
                if int(number) == EXPERTS or int(layer) < DENSE:  # the shared expert
                    self._cut(prefix + ("down" if dim else "gate_up"), tensor, dim, at, 1 if dim else 2)
                elif int(number) in self.own:
                    data = self.get_parameter(prefix + ("w2" if dim else "w13")).data[
                        int(number) - self.own.start
                    ]
                    if not self.by_expert:
                        tensor = tensor.narrow(dim, self.rank * self.width, self.width)
                    data.narrow(dim, at * self.width, self.width).copy_(tensor)


def described(tensors: Iterable[tuple[str, torch.Tensor]], first: int, count: int) -> StateDescription:
    """Tensors cut into rows on ``count`` ranks from ``first`` on."""
    rows = Distribution((Axis(count, 1),), (ShardCut(0),))
    whole = Distribution((), ())
    return StateDescription.of(
        DescribedTensor(
            name,
            dtype_name(tensor.dtype),
            tuple(tensor.shape),
            rows if count > 1 else whole,
            RankSet.of(range(first, first + count)),
        )
        for name, tensor in tensors
    )


def measure(layers: int, by_expert: bool) -> dict[str, float]:
    """Worker: the figures of one case."""
    torch.set_num_threads(1)
    source = checkpoint(layers)
    engine = Engine(layers, 3, by_expert=by_expert)
    description = described(source.items(), 0, TRAINERS)
    _reset_high_water()
    before, start = _resident_bytes(), time.process_time()
    links = links_from_loader(engine, engine.load_weights, description)
    figures = {"links": time.process_time() - start, "tensors": len(source)}
    figures["links memory"] = (_high_water_bytes() - before) / (1 << 20)
    assert links.keys() == {name for name, _ in named_tensors(engine)}
    target = described(named_tensors(engine), TRAINERS, 1)
    start = time.process_time()
    plan = plan_transfer(description, target, links=links)
    figures |= {"plan": time.process_time() - start, "boxes": len(plan.leaves)}
    wanted = sum(entry.numel * entry.itemsize for entry in target.entries)
    assert sum(plan.sent_bytes.values()) == wanted
    return figures


def main() -> None:
    """Measure, print a table, and exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    rows = []
    for by_expert in (False, True):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            figures = pool.apply(measure, (arguments.layers, by_expert))
        case = f"rank of {RANKS}, {'whole experts' if by_expert else 'a part of each expert'}"
        case += f": {figures['tensors']:,.0f} tensors in {figures['boxes']:,.0f} boxes"
        for metric, unit in (("links", "CPU s"), ("links memory", "MiB"), ("plan", "CPU s")):
            rows.append(Row(case, metric, unit, figures[metric], None, None, TARGETS[metric]))
    print_table(rows)
    if arguments.json:
        write_json(arguments.json, rows)
    sys.exit(any(row.met is False for row in rows))


if __name__ == "__main__":
    main()
