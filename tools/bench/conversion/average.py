"""Speed and memory of `vescale-convert average`, against a program that only reads the inputs and writes one of them.

    python tools/bench/conversion/average.py --gb 1 --inputs 5 --repeat 3 --json average.json
    python tools/bench/conversion/average.py --gb 0.2 --formats hf --dtype float32

Every program runs in a new process, alternating, with a cold page cache for the inputs (``posix_fadvise``, for which no
privileges are needed). The inputs are native checkpoints and Hugging Face folders of bfloat16 or float32 weights.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[3]))

from tools.bench.conversion.convert import LAYER_NUMEL, Contender, size_of
from tools.bench.rows import Row, print_table, write_json
from vescale_fsdp.checkpoint import save

BUDGET_MIB = 64
MAX_MIB = 96  # of the whole process
MAX_RATIO = 1.25
# Reads all files of all inputs in pieces, and writes the bytes of the last input to a new file.
READ_AND_WRITE = """
import os, sys
*inputs, out = sys.argv[1:]
buffer = memoryview(bytearray(4 << 20))
with open(out, "wb", buffering=0) as target:
    for folder in inputs:
        for path, _, names in os.walk(folder):
            for name in names:
                with open(os.path.join(path, name), "rb", buffering=0) as file:
                    while count := file.readinto(buffer):
                        if folder == inputs[-1]:
                            target.write(buffer[:count])
"""


def make_inputs(
    folder: Path, kinds: list[str], gigabytes: float, count: int, dtype: torch.dtype
) -> dict[str, list[Path]]:
    """Write the inputs; returns format -> folders."""
    layers = max(1, round(gigabytes * 1e9 / (dtype.itemsize * LAYER_NUMEL)))
    made: dict[str, list[Path]] = {kind: [] for kind in kinds}
    for number in range(count):
        block = torch.randn(LAYER_NUMEL // 16, generator=torch.Generator().manual_seed(number)).to(dtype)
        weights = {
            f"model.layers.{i}.weight": block.roll(i).repeat(16).view(4096, 4096) for i in range(layers)
        }
        for kind, folders in made.items():
            folders.append(folder / f"{kind}-{number}")
            if kind == "vescale":
                save(folders[-1], {"model": weights})
            else:
                folders[-1].mkdir()
                save_file(weights, folders[-1] / "model.safetensors", {"format": "pt"})
    return made


def evict(folders: list[Path]) -> None:
    """Remove the pages of all files from the page cache."""
    os.sync()  # only clean pages are removed
    for file in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description="vescale-convert average beside reading and writing")
    parser.add_argument("--gb", type=float, default=1.0, help="size of each input")
    parser.add_argument("--inputs", type=int, default=5)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--formats", nargs="+", choices=["vescale", "hf"], default=["vescale", "hf"])
    parser.add_argument("--repeat", type=int, default=3, help="alternating runs; medians are reported")
    parser.add_argument("--dir", type=Path, help="where to work; default a temporary folder")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    given = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        made = make_inputs(Path(name), given.formats, given.gb, given.inputs, getattr(torch, given.dtype))
        for kind, folders in made.items():
            inputs, nbytes = [str(folder) for folder in folders], sum(map(size_of, folders))
            average = [sys.executable, "-m", "vescale_fsdp.conversion", "average", "-q"]
            average += ["--memory-budget", f"{BUDGET_MIB}MiB", *inputs]
            ours = Contender("average", average, nbytes)
            rival = Contender("reads and writes", [sys.executable, "-c", READ_AND_WRITE, *inputs], nbytes)
            for _ in range(given.repeat):
                for contender in (ours, rival):
                    evict(folders)
                    contender.run(Path(name) / "target")
            case = f"{given.inputs} x {given.gb:g} GB, {given.dtype}, {kind}"
            own, others = (statistics.median(each.seconds) for each in (ours, rival))
            rows.append(Row(case, "time, cold", "s", own, others, rival.name, f"<= {MAX_RATIO}"))
            own, others = (statistics.median(each.cpu_seconds) for each in (ours, rival))
            rows.append(Row(case, "CPU time", "s", own, others, rival.name))
            rows.append(Row(case, "peak memory", "MiB", max(ours.peak_mib), target=f"<= {MAX_MIB}"))
    print_table(rows)
    if given.json:
        write_json(given.json, rows)


if __name__ == "__main__":
    main()
