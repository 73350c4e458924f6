"""Peak memory of every (source, target) pair of the converter, with and without a cast, without its interpreter.

    python tools/bench/conversion/peak_memory.py --gb 1 --dir /large/disk
    python tools/bench/conversion/peak_memory.py --gb 6 --sources zarr --targets native --casts bf16

`memory_sources.py` has the sources: all formats and kinds of quantization. A row is the peak of a new
``vescale-convert`` process (of its resident size, or of a child's, whichever is larger), less its peak for a few bytes
between the same formats, which is that of the interpreter and the libraries. The limit is the budget and 32 MiB.
Quantized sources are dequantized to bfloat16. Sources are written one after another, and results are removed at once:
three times ``--gb`` is enough disk space. OCDBT and GGUF need the extras ``orbax`` and ``gguf``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tools.bench.conversion.many_names import COMMANDS, usage_of
from tools.bench.conversion.memory_sources import QUANTIZED, SOURCES, make
from tools.bench.rows import Row, print_table, write_json

CASTS: dict[str, list[str]] = {
    "none": [],
    "bf16": ["--dtype", "bf16"],
    "fp8": ["--quantize", "fp8-128x128"],
    "dequantized": ["--dequantize", "bf16"],
}
TARGETS = ("dcp", "native", "hf", "torch", "zarr")


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
    maker = multiprocessing.get_context("spawn").Process(target=make, args=(kind, path, nbytes))
    maker.start()
    maker.join()
    assert maker.exitcode == 0, kind
    return path


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="peak memory of conversions, beside the interpreter")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--budget-mib", type=int, default=64)
    parser.add_argument("--sources", default=",".join(SOURCES), help="comma-separated")
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated")
    parser.add_argument("--casts", default="none,bf16,fp8", help="comma-separated")
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
                for cast in ["dequantized"] if kind in QUANTIZED else given.casts.split(","):
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
