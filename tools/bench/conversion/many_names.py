"""Cost of planning a conversion of many tensors: 40,000 parameters, each with two moments.

    python tools/bench/conversion/many_names.py --dir /fast/disk
    python tools/bench/conversion/many_names.py --sources native --targets dcp,hf --repeat 3 --json names.json

The sources are a training state of expert matrices: a native checkpoint of 64 ranks, whose boundaries cut many of the
matrices; the same state as DCP, as one file of `torch.save`, and as a Hugging Face folder of all entries under their
flattened names. The zarr form has 120,000 folders and takes minutes to write and to remove: ``--sources zarr``. Each
row is a new process, ``vescale-convert .. --dry-run``: its CPU seconds, including the interpreter's start and end, and
its largest resident size. ``inspect`` is measured too.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[3]))

from tools.bench.rows import Row, print_table, write_json
from vescale_fsdp.conversion import ConvertOptions, convert, open_source

SIDE = 16  # rows and columns of a matrix
EXPERTS = 200  # of three matrices each, as in a layer of a large model
RANKS = 64
COMMANDS = {
    "dcp": ["to-fsdp2"],
    "native": ["to-native", "--ranks", str(RANKS)],
    "hf": ["to-hf"],
    "torch": ["to-torch"],
    "zarr": ["to-zarr"],
    "inspect": ["inspect"],
}
MAX_SECONDS, MAX_MIB = 10, 500
# Started by a small process, because a forked child inherits the high-water mark of its parent.
WATCH = """
import resource, subprocess, sys
if code := subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode:
    sys.exit(code)
use = resource.getrusage(resource.RUSAGE_CHILDREN)
print(use.ru_utime + use.ru_stime, use.ru_maxrss / 1024)
"""


def training_state(num_params: int) -> dict[str, Any]:
    """Weights and two moments each. All share one storage, because only names and positions matter here."""
    experts = [f"layers.{place // EXPERTS}.mlp.experts.{place % EXPERTS}" for place in range(num_params // 3)]
    matrices = [f"{expert}.{kind}_proj.weight" for expert in experts for kind in ("gate", "up", "down")]
    state = {name: {kind: torch.ones(SIDE, SIDE) for kind in ("exp_avg", "exp_avg_sq")} for name in matrices}
    groups = [{"params": matrices, "lr": 1e-3, "betas": (0.9, 0.95)}]
    return {
        "model": {name: torch.ones(SIDE, SIDE) for name in matrices},
        "optimizer": {"state": state, "param_groups": groups},
    }


def make_sources(folder: Path, num_params: int, kinds: list[str]) -> None:
    """Write the state in every requested format."""
    state = training_state(num_params)
    torch.save(state, folder / "torch")
    source = open_source(str(folder / "torch"))
    for kind in ("native", "dcp", "zarr"):
        if kind in kinds:
            convert(source, folder / kind, kind, ConvertOptions(ranks=RANKS))
    if "hf" in kinds:
        (folder / "hf").mkdir()
        flat = {f"model.{name}": weight for name, weight in state["model"].items()}
        for name, moments in state["optimizer"]["state"].items():
            flat |= {f"optimizer.state.{name}.{kind}": moment for kind, moment in moments.items()}
        save_file(flat, folder / "hf" / "model.safetensors", {"format": "pt"})


def usage_of(command: list[str]) -> tuple[float, float]:
    """CPU seconds and peak MiB of one ``vescale-convert``; its output goes to stderr if it fails."""
    watched = [sys.executable, "-c", WATCH, sys.executable, "-m", "vescale_fsdp.conversion", *command]
    done = subprocess.run(watched, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"failed: vescale-convert {shlex.join(command)}")
    seconds, mebibytes = done.stdout.split()
    return float(seconds), float(mebibytes)


def rows_of(source: Path, target: str, repeat: int) -> list[Row]:
    """Rows of one (source, target): the median of the seconds and the maximum of the sizes."""
    out = [] if target == "inspect" else [str(source.parent / "none"), "--dry-run", "-q"]
    found = [usage_of([*COMMANDS[target], str(source), *out]) for _ in range(repeat)]
    case = f"{source.name}, {target}"
    return [
        Row(case, "CPU", "s", statistics.median(each[0] for each in found), target=f"<= {MAX_SECONDS}"),
        Row(case, "peak", "MiB", max(each[1] for each in found), target=f"<= {MAX_MIB}"),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="what conversions of very many tensors cost to plan")
    parser.add_argument("--parameters", type=int, default=40_000)
    parser.add_argument("--sources", default="native,dcp,torch,hf", help="comma-separated")
    parser.add_argument("--targets", default=",".join(COMMANDS), help="comma-separated; inspect is one")
    parser.add_argument("--repeat", type=int, default=1, help="medians are reported")
    parser.add_argument("--dir", type=Path, help="where to work; default a temporary folder")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sources = given.sources.split(",")
    rows = []
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        make_sources(Path(name), given.parameters, sources)
        for source in sources:
            for target in given.targets.split(","):
                rows += rows_of(Path(name) / source, target, given.repeat)
    print_table(rows)
    if given.json:
        write_json(given.json, rows)


if __name__ == "__main__":
    main()
