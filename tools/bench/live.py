"""Loading a Hugging Face folder into live shards, against raw reads of the bytes that each rank needs.

    python tools/bench/live.py                                  2 ranks, 1 GiB in files of 256 MiB
    python tools/bench/live.py --ranks 4 --megabytes 4096 --json live.json

Three loads: names and dtypes of the folder; q, k and v concatenated by key rules; bfloat16 files into float32 shards.
Each alternates with ``readinto`` of as many bytes of the same files by the same processes, all from the page cache.
Peak memory is the growth of the resident set's high-water mark during one call.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench.checkpoint import peak_growth
from tools.bench.parts.shards import Settings, median, spawn, start_rank, timed
from tools.bench.rows import Row, print_table, write_json
from vescale_fsdp import RaggedDTensor, RaggedShard
from vescale_fsdp.checkpoint import SourceOptions, load
from vescale_fsdp.layout.planner import TensorSpec, plan_group

_HIDDEN, _FEED_FORWARD = 1024, 2816
_SHAPES = dict.fromkeys("qkvo", (_HIDDEN, _HIDDEN))
_SHAPES |= {
    "gate": (_FEED_FORWARD, _HIDDEN),
    "up": (_FEED_FORWARD, _HIDDEN),
    "down": (_HIDDEN, _FEED_FORWARD),
}
_LAYER_NUMEL = sum(a * b for a, b in _SHAPES.values())
_FILE_BYTES = 256 << 20  # 256 MiB
_WAYS = {"as stored": "float32", "q, k, v joined": "float32", "bfloat16 to float32": "bfloat16"}
_RULES = """
format = 1
[[rule]]
hf = ["{l}.q", "{l}.k", "{l}.v"]
ours = "{l}.qkv"
ops = [{ concat = { dim = 0, sizes = [1024, 1024, 1024] } }]
[[rule]]
hf = "{l}.o"
ours = "{l}.o"
[[rule]]
hf = "{l}.gate"
ours = "{l}.gate"
[[rule]]
hf = "{l}.up"
ours = "{l}.up"
[[rule]]
hf = "{l}.down"
ours = "{l}.down"
"""


def write_folder(folder: Path, total_bytes: int, dtype: torch.dtype) -> None:
    """Write a Hugging Face folder of the configured size."""
    folder.mkdir()
    layer_bytes = _LAYER_NUMEL * dtype.itemsize
    layers, per_file = max(1, total_bytes // layer_bytes), max(1, _FILE_BYTES // layer_bytes)
    weight_map: dict[str, str] = {}
    for first in range(0, layers, per_file):
        tensors = {
            f"{layer}.{name}": torch.rand(shape).to(dtype)
            for layer in range(first, min(first + per_file, layers))
            for name, shape in _SHAPES.items()
        }
        file = f"model-{first:05d}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"layers": layers}))


def ragged_state(layers: int, mesh: DeviceMesh, *, joined: bool) -> dict[str, torch.Tensor]:
    """A rank's shards: ragged views of one flat buffer per layer."""
    shapes: dict[str, tuple[int, ...]] = dict(_SHAPES)
    if joined:
        shapes = {
            "qkv": (3 * _HIDDEN, _HIDDEN),
            **{name: s for name, s in _SHAPES.items() if name not in "qkv"},
        }
    layout = plan_group(
        [TensorSpec(name, shape, "float32", 1) for name, shape in shapes.items()], mesh.size()
    )
    state: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        buffer = torch.zeros(layout.shard_numel)
        for slot in layout.slots:
            piece = layout.piece(slot, mesh.get_local_rank())
            local = buffer[piece.local_offset : piece.local_offset + piece.numel]
            placement = RaggedShard.from_piece_numels(slot.shape, layout.piece_numels(slot))
            state[f"{layer}.{slot.fqn}"] = RaggedDTensor.from_local(
                local, mesh, [placement], shape=slot.shape
            )
    return state


def read_raw(folder: Path, rank: int, world: int, memory: bytearray) -> None:
    """Read this rank's share of all files into one buffer."""
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size // world
        with open(file, "rb", buffering=0) as opened:
            opened.seek(rank * size)
            at = 0
            while at < size:
                at += opened.readinto(memoryview(memory)[at:size]) or 0


def _worker(rank: int, settings: Settings) -> None:
    mesh = start_rank(rank, settings.ranks, settings.port)
    root = Path(settings.folder)
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    for way, dtype in _WAYS.items():
        folder = root / dtype
        layers = json.loads((folder / "config.json").read_text())["layers"]
        state = ragged_state(layers, mesh, joined="joined" in way)
        rules = SourceOptions(rules=f"{root}/rules.toml")
        options: dict[str, Any] = {"source": rules} if "joined" in way else {"dtype": "state"}
        shares = [file.stat().st_size // settings.ranks for file in folder.glob("*.safetensors")]
        memory = bytearray(max(shares))
        for _ in range(settings.repeats + 1):
            raw = timed(partial(read_raw, folder, rank, settings.ranks, memory))
            with peak_growth(peaks, way):
                ours = timed(partial(load, folder, state, **options))
            seconds.setdefault(f"raw {way}", []).append(raw)
            seconds.setdefault(way, []).append(ours)
    torch.save({"seconds": seconds, "memory": peaks}, f"{settings.out}{rank}")
    dist.destroy_process_group()


def measure(settings: Settings) -> list[Row]:
    """Rows of speed and memory for each load."""
    root = Path(settings.folder)
    for dtype in set(_WAYS.values()):
        write_folder(root / dtype, settings.megabytes << 20, getattr(torch, dtype))
    (root / "rules.toml").write_text(_RULES)
    figures = spawn(_worker, settings.ranks, settings)
    case = f"{settings.ranks} ranks, {settings.megabytes} MiB"
    rows = []
    for way, dtype in _WAYS.items():
        total = sum(file.stat().st_size for file in (root / dtype).glob("*.safetensors")) / 1e9
        ours, raw = total / median(figures, way), total / median(figures, f"raw {way}")
        target = ">= 0.6" if dtype == "float32" else None  # a cast costs more than a read
        rows.append(Row(case, f"HF folder into shards, {way}", "GB/s", ours, raw, "readinto", target))
        peak = max(figure["memory"][way] for figure in figures)
        rows.append(Row(case, f"peak extra memory, {way}", "MiB", peak, None, None, "<= 256"))
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the folder")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; default: a temporary folder"
    )
    parser.add_argument("--json", type=Path, default=None)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="bench-live-") as folder:
        rows = measure(Settings(chosen.ranks, chosen.ranks, chosen.megabytes, chosen.repeats, folder))
    print_table(rows)
    if chosen.json is not None:
        write_json(chosen.json, rows)


if __name__ == "__main__":
    main()
