"""Time from the death of a rank to the next step: elastic recovery in place, against a restart by torchrun.

    python tools/bench/faults/elastic.py               3 alternating rounds of each; a minute or two
    python tools/bench/faults/elastic.py --rounds 5

Both train the small Llama of `examples.train` on 4 ranks, gloo, and save every step to memory. Then rank 0 is killed,
or, for ``ours``, also stopped (SIGSTOP), as if its machine had lost its power:

    ours        the 3 other ranks continue in their processes (`ElasticJob`)
    torchrun    ``--max-restarts``: the agent, which polls every 0.1 s, ends the other ranks and starts 4 new ones,
                which restore from the RAM tier of the native engine

Time is from the signal to the end of rank 0's next step. For ``ours`` it is also divided: detection, until the
survivors have agreed, and the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

from examples.corpus import Batches, read_corpus
from examples.elastic_without_restart import Launcher
from examples.train import Trainer
from tools.bench.rows import Row, print_table, write_json
from vescale_fsdp.checkpoint import CheckpointManager, EverySteps, RamTier
from vescale_fsdp.runtime.data_mesh import default_mesh

ROOT = Path(__file__).parents[3]
RANKS, STEPS, SEQ_LEN = 4, 400, 32
WARM_STEPS = 6


def restarted_worker(out: Path, memory: str) -> None:
    """A rank under torchrun: restore from memory, train, save to memory."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = default_mesh()
    trainer = Trainer(mesh, Batches(read_corpus(), batch_size=12, seq_len=SEQ_LEN), num_steps=STEPS)
    manager = CheckpointManager(
        out / "steps", save_policy=EverySteps(STEPS), ram=RamTier("job", folder=memory)
    )

    state = {"model": trainer.model, "optimizer": trainer.optimizer}
    restored = manager.restore(state)
    if restored is not None:
        trainer.next_step = restored.step
    while True:
        loss = trainer.step()
        if dist.get_rank() == 0:
            line = {"step": trainer.next_step, "loss": loss, "at_s": time.time(), "pid": os.getpid()}
            with open(out / "progress.jsonl", "a") as progress:
                progress.write(json.dumps(line) + "\n")
        manager.save(trainer.next_step, state)


def _lines(out: Path) -> list[dict[str, Any]]:
    file = out / "progress.jsonl"
    texts = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(text) for text in texts if text.endswith("\n")]


def _wait(
    out: Path, is_done: Callable[[list[dict[str, Any]]], bool], limit_s: float = 300
) -> list[dict[str, Any]]:
    deadline_s = time.monotonic() + limit_s
    while not is_done(lines := _lines(out)):
        if time.monotonic() > deadline_s:
            sys.exit(f"no step for {limit_s} s; see {out}")
        time.sleep(0.01)
    return lines


def _kill_rank_0(out: Path, number: signal.Signals = signal.SIGKILL) -> tuple[int, float]:
    """Kill or stop rank 0 once the job is warm; returns its process and the time of the signal."""
    pid = int(_wait(out, lambda lines: len(lines) >= WARM_STEPS)[-1]["pid"])
    killed_s = time.time()
    os.kill(pid, number)
    return pid, killed_s


def in_place(out: Path, memory: Path, number: signal.Signals) -> tuple[float, float]:
    """Seconds from the signal to the next step, and seconds from the survivors' agreement to it."""
    arguments = ["--out", str(out), "--steps", str(STEPS), "--seq-len", str(SEQ_LEN)]
    launcher = Launcher(out, memory, arguments)
    try:
        for _ in range(RANKS):
            launcher.start()
        pid, killed_s = _kill_rank_0(out, number)
        lines = _wait(out, lambda lines: lines[-1]["pid"] != pid)
        first = next(line for line in lines if line["pid"] != pid)
        return first["at_s"] - killed_s, first["at_s"] - first["agreed_at_s"]
    finally:
        launcher.end()


def restarted(out: Path, memory: Path) -> float:
    """Seconds from the kill to the next step under torchrun."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    # torch 2.13: restarted gloo workers would read the old workers' addresses in the store of torchrun.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback[0], **os.environ, **own_store}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["--max-restarts=3", "--monitor-interval=0.1", "-m", "tools.bench.faults.elastic", "--worker"]
    with open(out / "log", "w") as log:
        job = subprocess.Popen(
            [*command, "--out", str(out), "--memory", str(memory)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        pid, killed_s = _kill_rank_0(out)
        lines = _wait(out, lambda lines: lines[-1]["pid"] != pid)
        return next(line["at_s"] for line in lines if line["pid"] != pid) - killed_s
    finally:
        job.terminate()  # torchrun ends its workers
        job.wait()


def measure(rounds: int) -> list[Row]:
    """Alternate rounds of both; medians."""
    found: dict[str, list[tuple[float, float]]] = {"killed": [], "stopped": [], "torchrun": []}
    for _ in range(rounds):
        for kind, times in found.items():
            out = Path(tempfile.mkdtemp(prefix="bench-elastic-"))
            memory = Path(tempfile.mkdtemp(prefix="bench-elastic-", dir="/dev/shm"))
            try:
                if kind == "torchrun":
                    times.append((restarted(out, memory), 0.0))
                else:
                    number = signal.SIGKILL if kind == "killed" else signal.SIGSTOP
                    times.append(in_place(out, memory, number))
            finally:
                shutil.rmtree(memory)
                shutil.rmtree(out, ignore_errors=True)
    medians = {
        kind: [statistics.median(each) for each in zip(*times, strict=True)] for kind, times in found.items()
    }
    rows = []
    for kind, detection in (("killed", "<= 1"), ("stopped", "<= 5")):
        case, (whole_s, after_s) = f"{RANKS} ranks, rank 0 {kind}", medians[kind]
        detected_s = statistics.median(whole - after for whole, after in found[kind])
        rows.append(Row(case, "detection and agreement", "s", detected_s, None, None, detection))
        rows.append(Row(case, "agreement to next step", "s", after_s, None, None, "<= 2"))
        if kind == "killed":
            restart_s = medians["torchrun"][0]
            rows.append(
                Row(case, "kill to next step", "s", whole_s, restart_s, "torchrun restart", "<= 0.10")
            )
    return rows


def main() -> None:
    """Measure; with ``--worker``, run as a rank under torchrun."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return restarted_worker(options.out, options.memory)
    rows = measure(options.rounds)
    print_table(rows)
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
