"""How much each rank reads: its own parts, headers, and next to nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard as fully_shard_2

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.faults.disks import counted_reads
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import SourceOptions, load
from vescale_fsdp.conversion.engine.box_reading import read_box
from vescale_fsdp.conversion.engine.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.geometry import Box, whole_box

LAYERS, HIDDEN, KV = 125, 72, 24  # of 8 tensors each
RULES = """
format = 1
[let]
q = "num_attention_heads * head_dim"
kv = "num_key_value_heads * head_dim"
[[rule]]
hf = ["m.{l}.q", "m.{l}.k", "m.{l}.v"]
ours = "layers.{l}.qkv"
ops = [{ concat = { dim = 0, sizes = ["q", "kv", "kv"] } }]
[[rule]]
hf = ["m.{l}.gate", "m.{l}.up"]
ours = "layers.{l}.gate_up"
ops = [{ concat = { dim = 0, sizes = ["intermediate_size", "intermediate_size"] } }]
[[rule]]
hf = "m.{l}.{x}_norm"
ours = "layers.{l}.norms.{x}"
[[rule]]
hf = "m.{l}.down"
ours = "layers.{l}.down"
"""


def _hf_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (HIDDEN, HIDDEN),
        "k": (KV, HIDDEN),
        "v": (KV, HIDDEN),
        "gate": (100, HIDDEN),
    }
    shapes |= {"up": (100, HIDDEN)}
    shapes |= {"0_norm": (HIDDEN,), "1_norm": (HIDDEN,), "down": (HIDDEN, 50)}
    return {f"m.{layer}.{k}": torch.randn(shape) for layer in range(LAYERS) for k, shape in shapes.items()}


def _expected(hf: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for layer in range(LAYERS):
        old, new = f"m.{layer}.", f"layers.{layer}."
        found[f"{new}qkv"] = torch.cat([hf[old + x] for x in "qkv"])
        found[f"{new}gate_up"] = torch.cat([hf[old + "gate"], hf[old + "up"]])
        found |= {f"{new}norms.{x}": hf[f"{old}{x}_norm"] for x in range(2)}
        found[f"{new}down"] = hf[old + "down"]
    return found


class _Tree(nn.Module):
    """A module that has parameters of these names."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        super().__init__()
        inner: dict[str, dict[str, torch.Size]] = {}
        for name, shape in shapes.items():
            head, _, rest = name.partition(".")
            if rest:
                inner.setdefault(head, {})[rest] = shape
            else:
                self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        for head, below in inner.items():
            self.add_module(head, _Tree(below))


def _read_in_shards(folder: Path) -> list[tuple[int, int, bool]]:
    """Bytes needed, bytes read, and whether all values are right: joined and taken apart, both ways of sharding."""
    hf = _hf_tensors()
    ours = _expected(hf)
    found = []
    for shard, to, expected in ((fully_shard, "ours", ours), (fully_shard_2, "hf", hf)):
        model = _Tree({name: value.shape for name, value in expected.items()})
        shard(model, mesh=cpu_mesh())
        with counted_reads() as read:
            source = folder / ("hf" if to == "ours" else "ours")
            names = SourceOptions(rules=str(folder / "rules.toml"), rules_to=to)
            load(source, model, source=names)
        params: dict[str, Any] = dict(model.named_parameters())
        needed = sum(param.to_local().numel() * 4 for param in params.values())
        same = all(torch.equal(params[name].full_tensor(), expected[name]) for name in sorted(expected)[::17])
        found.append((needed, sum(read), same))
    return found


def test_a_thousand_tensors(tmp_path: Path) -> None:
    """q, k, v and what is fused of them: at most 5 % more than a rank's own bytes, headers too."""
    tensors = _hf_tensors()
    assert len(tensors) == 1000
    config = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 100}
    for side, held in (("hf", tensors), ("ours", _expected(tensors))):
        (tmp_path / side).mkdir()
        save_file(held, tmp_path / side / "model.safetensors")
        (tmp_path / side / "config.json").write_text(json.dumps(config))
    (tmp_path / "rules.toml").write_text(RULES)

    for found in run_ranks(2, _read_in_shards, tmp_path):
        assert len(found) == 2
        for needed, read, same in found:
            assert same and needed > 2_000_000
            assert needed <= read <= 1.05 * needed


def test_wide_gaps_are_not_read() -> None:
    """Of columns far apart in the file each is read by itself; small gaps are read over."""
    for columns, wanted in ((60_000, 40 * 4 * 10), (1000, 40_000 * 4 - 990 * 4)):
        shape = (40, columns)
        data = np.arange(40 * columns, dtype=np.uint32)
        info = TensorInfo("w", shape, dtype_from_torch("float32"))
        tensor = StoredTensor(info, (StoredChunk(whole_box(shape), Extent("f", 0, data.nbytes)),))
        read: list[int] = []

        def fill(
            _: str,
            offset: int,
            buffer: memoryview,
            read: list[int] = read,
            data: np.ndarray = data,  # type: ignore[type-arg]
        ) -> None:
            read.append(len(buffer))
            buffer[:] = data.view(np.uint8).data[offset : offset + len(buffer)]

        out = np.empty((40, 10), dtype=np.uint32)
        read_box(tensor, Box((0, 5), (40, 10)), out, lambda chunk: chunk, fill)
        assert np.array_equal(out, data.reshape(shape)[:, 5:15])
        assert sum(read) == wanted
