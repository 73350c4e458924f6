"""Jobs under torchrun, controlled from outside: start, follow the progress file, kill ranks, read losses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
POLL_S = 0.05
_END_S = 10.0  # how long a process may take to write its stacks and end
_SHOWN_LINES = 40  # of each log, in errors


class JobFailed(RuntimeError):
    """A job did not end as expected; the message contains the end of each log, with stacks after a time-out."""


class Job:
    """One torchrun launch of a module. Its output is in a folder: ``torchrun.log``, and a file per rank and stream.

    Results are not read from output: a module writes them to a file, which an argument names.

    Args:
        module: name of the module to run, such as ``examples.train``.
        ranks: processes to start on this machine.
        arguments: command line of the module.
        logs: folder for output.
        folder: the working directory, from which modules are also imported.
        timeout_s: seconds after the start, or after the last step that `follow` has seen, in which the job must end or
            make a step; else it is killed and fails.
        options: further ones of torchrun.
        environment: variables to set.
    """

    def __init__(
        self,
        module: str,
        ranks: int,
        arguments: list[str],
        logs: Path,
        *,
        folder: Path = ROOT,
        timeout_s: float = 240,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._timeout_s = timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        variables["PYTHONFAULTHANDLER"] = "1"  # SIGABRT writes the stacks of all threads
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        variables.setdefault("GLOO_SOCKET_IFNAME", loopback[0])  # the machine's host name may not resolve
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]  # 0: any free port
        # Ranks that share a file write into each other's lines.
        apart = ["--log-dir", str(logs), "--redirects", "3"]
        variables |= environment or {}
        torchrun = [sys.executable, "-m", "torch.distributed.run", *rendezvous, *apart, *options]
        self.command = [*torchrun, "--nproc-per-node", str(ranks), "-m", module, *arguments]
        with (logs / "torchrun.log").open("w") as sink:
            self.process = subprocess.Popen(
                self.command, cwd=folder, env=variables, stdout=sink, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave no process running."""
        abort_with_children(self.process)

    def output(self, most_lines: int | None = None) -> str:
        """What torchrun and the ranks have written so far, file by file; of each the last lines, if limited."""
        parts = []
        for file in sorted(self._logs.rglob("*.log"), key=lambda file: (len(file.parts), file)):
            lines = file.read_text(errors="replace").splitlines()
            if lines:
                shown = lines if most_lines is None else lines[-most_lines:]
                parts.append("\n".join([f"--- {file.relative_to(self._logs)} ---", *shown]))
        return "\n".join(parts)

    def wait(self) -> None:
        """Wait for the job.

        Raises:
            JobFailed: if the job fails, or makes no step for too long.
        """
        if self._wait_for_exit() != 0:
            raise JobFailed(f"{' '.join(self.command)} failed:\n{self.output(_SHOWN_LINES)}")

    def follow(
        self, run: Path, title: str, steps: range, until: Callable[[int], bool] = lambda _: False
    ) -> int:
        """Show steps in a progress bar until the job ends or ``until(last step)`` is true; returns the last step."""
        step = steps.start
        interval_s = 0.5 if sys.stderr.isatty() else 15  # rarely in a log file
        with tqdm(
            total=steps.stop, initial=steps.start, desc=title, unit="step", mininterval=interval_s
        ) as bar:
            while not until(step) and self.process.poll() is None and time.monotonic() < self.deadline_s:
                time.sleep(POLL_S)
                losses = losses_of(run)
                last, step = step, max(losses, default=steps.start)
                if step > last:  # a slow machine may take its time
                    self.deadline_s = time.monotonic() + self._timeout_s
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
            return self.process.wait(max(1.0, self.deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            abort_with_children(self.process)
            stopped = f"made no step, and did not end, for {self._timeout_s:.0f} s, and was stopped"
            raise JobFailed(f"{' '.join(self.command)} {stopped}:\n{self.output(_SHOWN_LINES)}") from None


def abort_with_children(process: subprocess.Popen[Any]) -> None:
    """End a process and all its descendants. Those that run under PYTHONFAULTHANDLER write their stacks to stderr.

    Descendants end first: torchrun, for example, would kill them before they have written.
    """
    if process.poll() is not None:
        return
    children = psutil.Process(process.pid).children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGABRT)
    _, living = psutil.wait_procs(children, _END_S)
    for child in living:  # stopped ones, or ones with a handler of their own
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.send_signal(signal.SIGABRT)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_END_S)


def losses_of(run: Path) -> dict[int, float]:
    """Loss by step from a run's progress file; the later loss of a step that was trained twice."""
    file = run / "progress.jsonl"
    lines: list[dict[str, Any]] = []
    for text in file.read_text().splitlines(keepends=True) if file.exists() else []:
        if text.endswith("\n"):  # the last line may be half written
            lines.append(json.loads(text))
    return {line["step"]: line["loss"] for line in lines}
