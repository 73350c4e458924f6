"""Peak memory of every (source, target) pair of the converter, with and without a cast, without its interpreter.

    python tools/bench/conversion/peak_memory.py --gb 1 --dir /large/disk
    python tools/bench/conversion/peak_memory.py --gb 6 --sources zarr --targets native --casts bf16

The state has fp32 matrices of 64 MiB and one matrix of a quarter of all bytes; two matrices are an optimizer's. A row
is the peak of a new ``vescale-convert`` process, less its peak for a few bytes between the same formats, which is that
of the interpreter and the libraries. The limit is the budget and 32 MiB. Sources are written one after another, and
results are removed at once: three times ``--gb`` is enough disk space.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[3]))

from tools.bench.conversion.many_names import COMMANDS, usage_of
from tools.bench.rows import Row, print_table, write_json
from vescale_fsdp.checkpoint import save
from vescale_fsdp.conversion import ConvertOptions, convert, open_source

COLUMNS = 4096
MATRIX_BYTES = 64 << 20
CASTS: dict[str, list[str]] = {
    "none": [],
    "bf16": ["--dtype", "bf16"],
    "fp8": ["--quantize", "fp8-128x128"],
}
TARGETS = ("dcp", "native", "hf", "torch", "zarr")


def state_of(nbytes: int) -> dict[str, Any]:
    """One tensor of a quarter of the bytes, and smaller ones; some of them are an optimizer's."""

    def matrix(size: int) -> torch.Tensor:
        rows = max(128, size // (4 * COLUMNS))  # fp8 has a scale per block of 128 x 128
        return torch.ones(rows // 128 * 128, COLUMNS)

    large = matrix(nbytes // 4)
    rest = [matrix(min(MATRIX_BYTES, nbytes)) for _ in range(max(4, (nbytes - large.nbytes) // MATRIX_BYTES))]
    model = {"embed.weight": large, **{f"layers.{place}.weight": each for place, each in enumerate(rest[2:])}}
    moments = {"layers.0.weight": {"exp_avg": rest[0], "exp_avg_sq": rest[1]}}
    return {"model": model, "optimizer": {"state": moments}}


def _save_rank_files(rank: int, folder: str, nbytes: int) -> None:
    """Worker: write one of two ranks' files of DTensors, as accelerate saves FSDP2's."""
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = state_of(nbytes)["model"]
    sharded = {name: distribute_tensor(model.pop(name), mesh, [Shard(0)]) for name in list(model)}
    torch.save(sharded, f"{folder}/pytorch_model_fsdp_rank{rank}.bin")
    dist.destroy_process_group()


def _rank_files(path: Path, nbytes: int) -> None:
    path.mkdir()
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_save_rank_files, args=(rank, str(path), nbytes)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert all(each.exitcode == 0 for each in ranks)


def _compressed(path: Path, nbytes: int) -> None:
    """Write zarr arrays that only the zarr library can read: zstd, in chunks of 4 MiB."""
    import zarr

    root = zarr.open_group(path, mode="w")
    for name, tensor in state_of(nbytes)["model"].items():
        rows = min(len(tensor), 256)
        array = root.create_array(name, shape=tensor.shape, chunks=(rows, COLUMNS), dtype="float32")
        array[:] = tensor.numpy()


def _from_torch(kind: str) -> Callable[[Path, int], None]:
    def make(path: Path, nbytes: int) -> None:
        file = path.with_suffix(".made")
        torch.save(state_of(nbytes), file)
        convert(open_source(str(file), kind="torch"), path, kind, ConvertOptions())
        file.unlink()

    return make


SOURCES: dict[str, Callable[[Path, int], None]] = {
    "dcp": lambda path, nbytes: dcp.save(state_of(nbytes), checkpoint_id=path, no_dist=True),
    "native": lambda path, nbytes: save(path, state_of(nbytes)),
    "hf": _from_torch("hf"),
    "torch": lambda path, nbytes: torch.save(state_of(nbytes), path),
    "zarr": _from_torch("zarr"),
    "ranks": _rank_files,
    "compressed": _compressed,
}


def peak_mib(source: Path, target: str, options: list[str]) -> float:
    """Peak MiB of one command, whose result is removed."""
    out = source.parent / "out"
    command = [*COMMANDS[target], "-q", *options, *(["--no-assets"] if target == "hf" else [])]
    try:
        return usage_of([*command, str(source), str(out)])[1]
    finally:
        shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)


def _make(kind: str, folder: Path, nbytes: int) -> Path:
    """Write a source in another process, so that this one stays small."""
    path = folder / kind
    maker = multiprocessing.get_context("spawn").Process(target=_run_maker, args=(kind, path, nbytes))
    maker.start()
    maker.join()
    assert maker.exitcode == 0, kind
    return path


def _run_maker(kind: str, path: Path, nbytes: int) -> None:
    SOURCES[kind](path, nbytes)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="peak memory of conversions, beside the interpreter")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--budget-mib", type=int, default=64)
    parser.add_argument("--sources", default=",".join(SOURCES), help="comma-separated")
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated")
    parser.add_argument("--casts", default=",".join(CASTS), help="comma-separated")
    parser.add_argument("--dir", type=Path, help="where to work; default a temporary folder")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    budget, rows = ["--memory-budget", f"{given.budget_mib}MiB"], []
    for kind in given.sources.split(","):
        with tempfile.TemporaryDirectory(dir=given.dir) as name:
            (Path(name) / "tiny").mkdir()
            tiny = _make(kind, Path(name) / "tiny", 1 << 20)
            source = _make(kind, Path(name), int(given.gb * 1e9))
            for target in given.targets.split(","):
                for cast in given.casts.split(","):
                    options = [*budget, *CASTS[cast]]
                    added = peak_mib(source, target, options) - peak_mib(tiny, target, options)
                    case, limit = f"{given.gb:g} GB, {kind} to {target}, {cast}", given.budget_mib + 32
                    rows.append(Row(case, "peak beside the interpreter", "MiB", added, target=f"<= {limit}"))
                    print_table(rows[-1:])
    print_table(rows)
    if given.json:
        write_json(given.json, rows)


if __name__ == "__main__":
    main()
