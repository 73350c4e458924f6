"""Jobs under torchrun, controlled from outside: start, follow the progress file, kill ranks, read losses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
POLL_S = 0.05


class JobFailed(RuntimeError):
    """A job did not end as expected; the message contains the end of its log."""


class Job:
    """One torchrun launch of a module, with its output in a log file.

    Args:
        module: name of the module to run, such as ``examples.train``.
        ranks: processes to start on this machine.
        arguments: command line of the module.
        log: file for everything the ranks print.
        folder: the working directory, from which modules are also imported.
        timeout_s: seconds after which the job is killed and fails.
    """

    def __init__(
        self,
        module: str,
        ranks: int,
        arguments: list[str],
        log: Path,
        *,
        folder: Path = ROOT,
        timeout_s: float = 240,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.deadline = time.monotonic() + timeout_s
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback[0])  # the machine's host name may not resolve
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]  # 0: any free port
        torchrun = [sys.executable, "-m", "torch.distributed.run", *rendezvous]
        self.command = [*torchrun, "--nproc-per-node", str(ranks), "-m", module, *arguments]
        with log.open("w") as sink:
            self.process = subprocess.Popen(
                self.command, cwd=folder, env=environment, stdout=sink, stderr=subprocess.STDOUT
            )

    def wait(self) -> None:
        """Wait for the job.

        Raises:
            JobFailed: if the job fails or takes too long.
        """
        if self._wait_for_exit() != 0:
            raise JobFailed(f"{' '.join(self.command)} failed:\n{self._end_of_log()}")

    def follow(
        self, run: Path, title: str, steps: range, until: Callable[[int], bool] = lambda _: False
    ) -> int:
        """Show steps in a progress bar until the job ends or ``until(last step)`` is true; returns the last step."""
        step = steps.start
        interval_s = 0.5 if sys.stderr.isatty() else 15  # rarely in a log file
        with tqdm(
            total=steps.stop, initial=steps.start, desc=title, unit="step", mininterval=interval_s
        ) as bar:
            while not until(step) and self.process.poll() is None and time.monotonic() < self.deadline:
                time.sleep(POLL_S)
                losses = losses_of(run)
                step = max(losses, default=steps.start)
                bar.set_postfix_str(f"loss {losses[step]:.3f}" if losses else "starting", refresh=False)
                bar.update(step - bar.n)
            losses = losses_of(run)
            step = max(losses, default=steps.start)
            bar.update(step - bar.n)
        return step

    def kill_ranks(self, run: Path) -> None:
        """SIGKILL every rank, and wait until torchrun gives up."""
        for file in (run / "pids").iterdir():
            os.kill(int(file.read_text()), signal.SIGKILL)
            file.unlink()
        if self._wait_for_exit() == 0:
            raise JobFailed("the job succeeded although its ranks were killed")

    def _wait_for_exit(self) -> int:
        try:
            return self.process.wait(max(1.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.terminate()  # torchrun ends its ranks
            self.process.wait(60)
            raise JobFailed(f"{' '.join(self.command)} took too long:\n{self._end_of_log()}") from None

    def _end_of_log(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


def losses_of(run: Path) -> dict[int, float]:
    """Loss by step from a run's progress file; the later loss of a step that was trained twice."""
    file = run / "progress.jsonl"
    lines: list[dict[str, Any]] = []
    for text in file.read_text().splitlines(keepends=True) if file.exists() else []:
        if text.endswith("\n"):  # the last line may be half written
            lines.append(json.loads(text))
    return {line["step"]: line["loss"] for line in lines}
