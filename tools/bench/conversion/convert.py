"""Speed and memory of vescale-convert, cp and other tools on the same tensors, alternating, in separate processes.

    python tools/bench/conversion/convert.py --gb 1 --repeat 3 --json convert.json
    python tools/bench/conversion/convert.py --gb 4 --no-rivals

Every program runs in a new process: the wall time includes start-up, the peak memory is the kernel's record (VmHWM of
/proc/PID/status, read from outside). The sources are a stock DCP checkpoint of bfloat16 weights in two data files and,
with the same number of bytes, a native one, a file of `torch.save`, and a native one of fp32 weights with both moments.
torch's consolidator gets the weights in the form that it needs. ``start-up`` is the time of vescale-convert for a
checkpoint of one number. accelerate is optional: its row tells if it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter

sys.path.insert(0, str(Path(__file__).parents[3]))

from tools.bench.rows import Row, print_table, write_json
from vescale_fsdp.checkpoint import save

BUDGET_MIB = 512
INTERPRETER_MIB = 150  # allowed on top of the budget
LAYER_NUMEL = 4096 * 4096
ACCELERATE_NAME = "accelerate merge"
PAIRS = {  # command, source, and the targeted fraction of cp's speed (from 4 GB up)
    "DCP to HF": ("to-hf", "dcp", 0.9),
    "native to HF": ("to-hf", "native", 0.9),
    "native to native": ("to-native", "native", 0.9),
    "native with moments to native": ("to-native", "trained", 0.7),
    "torch.save to HF": ("to-hf", "torch.pt", 0.7),
    "native to torch.save": ("to-torch", "native", 0.7),
}
RIVALS = ("dcp_to_torch_save", ACCELERATE_NAME, "consolidate_safetensors_files")

DCP_TO_TORCH = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
"""
CONSOLIDATE = """
import os, sys
from safetensors import safe_open
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
source, target = sys.argv[1:3]
names = []
for file in os.listdir(source):
    if file.endswith(".safetensors"):
        with safe_open(os.path.join(source, file), "pt") as opened:
            names += list(opened.keys())
os.makedirs(target)
consolidate_safetensors_files(source, target, {name: 1 for name in names}, num_threads=4)
"""
ACCELERATE = """
import sys
from accelerate.utils import merge_fsdp_weights
merge_fsdp_weights(sys.argv[1], sys.argv[2])
"""


# Installed packages have compiled files. With this variable Python would compile at each start, and be measured.
AS_INSTALLED = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


@dataclass
class Contender:
    """One program and its measurements."""

    name: str
    command: list[str]
    nbytes: int  # size of its source
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_mib: list[float] = field(default_factory=list)

    def run(self, target: Path) -> None:
        """One run to a new target, after the disk has finished writing."""
        remove(target)
        os.sync()
        start, used = time.monotonic(), _cpu_of_children()
        process = subprocess.Popen(
            [*self.command, str(target)], env=AS_INSTALLED, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, peak_kib(process.pid))
            time.sleep(0.005)
        self.seconds.append(time.monotonic() - start)
        self.cpu_seconds.append(_cpu_of_children() - used)
        self.peak_mib.append(peak / 1024)
        if process.returncode:
            assert process.stderr is not None
            raise SystemExit(f"{self.name} failed:\n{process.stderr.read().decode()}")
        remove(target)


def _cpu_of_children() -> float:
    """CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def peak_kib(pid: int) -> int:
    """The largest resident size of a process so far, by the kernel's record; 0 when the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def make_sources(folder: Path, gigabytes: float) -> None:
    """Write all sources, and the input of torch's consolidator."""
    count = max(1, round(gigabytes * 1e9 / (2 * LAYER_NUMEL)))
    block = torch.randn(LAYER_NUMEL // 16).to(torch.bfloat16)
    weights = {f"model.layers.{i}.weight": block.roll(i).repeat(16).view(4096, 4096) for i in range(count)}
    writer = dcp.FileSystemWriter(folder / "dcp", thread_count=2)
    dcp.save({"model": weights}, storage_writer=writer, no_dist=True)
    save(folder / "native", {"model": weights})
    torch.save({"model": weights}, folder / "torch.pt")
    save(folder / "trained", _trained(block, max(1, count // 6)))
    split = HuggingFaceStorageWriter(str(folder / "split"), save_distributed=True, thread_count=1)
    dcp.save(weights, storage_writer=split, no_dist=True)
    dcp.save({"x": torch.zeros(())}, checkpoint_id=folder / "tiny", no_dist=True)


def _trained(block: torch.Tensor, count: int) -> dict[str, Any]:
    """Weights and moments of a model, six times the bytes of ``count`` layers."""
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    layers = [f"model.layers.{i}.weight" for i in range(count)]
    made = {
        kind: {name: block.float().roll(place).repeat(16).view(4096, 4096) for name in layers}
        for place, kind in enumerate(kinds)
    }
    moments = {name: {kind: made[kind][name] for kind in kinds[1:]} for name in layers}
    return {"model": made["weight"], "optimizer": {"state": moments}}


def contenders(folder: Path, *, with_rivals: bool) -> list[Contender]:
    """All installed programs."""
    command = [sys.executable, "-m", "vescale_fsdp.conversion"]
    options = ["--memory-budget", f"{BUDGET_MIB}MiB", "-q"]
    source, split, nbytes = str(folder / "dcp"), str(folder / "split"), size_of(folder / "dcp")
    found = [
        Contender(name, [*command, target, *options, str(folder / file)], size_of(folder / file))
        for name, (target, file, _) in PAIRS.items()
    ]
    found += [
        Contender("cp", ["cp", "--reflink=never", "-r", source], nbytes),
        Contender("start-up", [*command, "to-hf", *options, str(folder / "tiny")], 0),
    ]
    if not with_rivals:
        return found
    found += [
        Contender("dcp_to_torch_save", [sys.executable, "-c", DCP_TO_TORCH, source], nbytes),
        Contender("consolidate_safetensors_files", [sys.executable, "-c", CONSOLIDATE, split], nbytes),
    ]
    if importlib.util.find_spec("accelerate"):
        found.append(Contender(ACCELERATE_NAME, [sys.executable, "-c", ACCELERATE, source], nbytes))
    return found


def rows_of(case: str, measured: list[Contender], *, with_rivals: bool) -> list[Row]:
    """Rows of speed and peak memory of the conversions, against each other program."""
    by_name = {contender.name: contender for contender in measured}

    def speed(name: str, without_s: float = 0.0) -> float:
        seconds = statistics.median(by_name[name].seconds) - without_s
        return by_name[name].nbytes / 1e6 / max(1e-9, seconds)

    startup = statistics.median(by_name["start-up"].seconds)
    rows = [Row(case, "start-up", "s", startup, target="<= 0.15")]
    for name, (_, _, target) in PAIRS.items():
        ours, label = by_name[name], f"{case}, {name}"
        limit = BUDGET_MIB + INTERPRETER_MIB
        rows.append(Row(label, "speed", "MB/s", speed(name), speed("cp"), "cp", f">= {target}"))
        rows.append(Row(label, "peak memory", "MiB", max(ours.peak_mib), target=f"<= {limit}"))
        if startup < 0.9 * statistics.median(ours.seconds):  # else the difference is noise
            rows.append(Row(label, "speed without start-up", "MB/s", speed(name, startup), speed("cp"), "cp"))
        for rival in measured:
            if rival.name in RIVALS:
                peaks = (max(ours.peak_mib), max(rival.peak_mib))
                rows.append(Row(label, "speed", "MB/s", speed(name), speed(rival.name), rival.name, "> 1"))
                rows.append(Row(label, "peak memory", "MiB", *peaks, rival.name, "< 1"))
        if with_rivals and ACCELERATE_NAME not in by_name:
            absent = f"{ACCELERATE_NAME}: not installed"
            rows.append(Row(label, "speed", "MB/s", speed(name), rival_name=absent))
    return rows


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description="vescale-convert beside cp and other tools")
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0], help="sizes of the model")
    parser.add_argument("--repeat", type=int, default=3, help="alternating runs; medians are reported")
    parser.add_argument("--no-rivals", action="store_true", help="nothing but cp beside ours")
    parser.add_argument("--dir", type=Path, help="where to work; default a temporary folder")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for gigabytes in arguments.gb:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
            folder = Path(name)
            make_sources(folder, gigabytes)
            measured = contenders(folder, with_rivals=not arguments.no_rivals)
            for _ in range(arguments.repeat):
                for contender in measured:
                    contender.run(folder / "target")
            rows += rows_of(f"{gigabytes:g} GB", measured, with_rivals=not arguments.no_rivals)
    print_table(rows)
    if arguments.json:
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
