"""The code blocks of README and the site's pages, and running them.

    ```python                         runs in the page's namespace, on one rank
    ```python title="on 2 ranks"      runs on so many ranks, each in a namespace of its own
    ```python title="train.py"        is written to that file, for commands behind it
    ```sh                             its commands run one after the other
    ```.. title="not run by our tests: why"        is not run, and readers see why
    ```python, and --8<-- "examples/x.py" in it    shows a file, which has tests of its own

All blocks of a page share a folder, empty at first. ``vescale-convert`` and one rank's code run in this process, which
has imported torch already; ``torchrun`` starts `run_ranks`, which are warm, or is the real one, which takes seconds.
Other languages (text, json, toml) are no code.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from tests.support.command import vescale_convert
from tests.support.distributed import run_ranks
from tests.support.processes import run_command
from tools.torchrun_job import Job

CODE = ("python", "sh")
_FENCE = re.compile(r"^( *)```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_TORCHRUN = re.compile(r"torchrun --nproc-per-node (\d+) (\w+)\.py ?(.*)")


class Block(NamedTuple):
    """One fenced block of a page."""

    language: str
    title: str
    text: str

    @property
    def reason(self) -> str | None:
        """Why it is not run; None if it is."""
        return (
            self.title.removeprefix("not run by our tests:").strip()
            if self.title.startswith("not run by our tests:")
            else None
        )

    @property
    def shown(self) -> str | None:
        """The file that is shown in its place; None if it is code itself."""
        found = re.fullmatch(r'--8<-- "([^"]+)"\n', self.text)
        return found and found[1]

    @property
    def is_run(self) -> bool:
        """Whether it runs with its page."""
        return self.language in CODE and self.reason is None and self.shown is None


def blocks_of(text: str) -> list[Block]:
    """All blocks of a page, in order."""
    found = []
    for indent, language, title, body in _FENCE.findall(text):
        lines = [line.removeprefix(indent) for line in body.splitlines()]
        found.append(Block(language, title, "\n".join(lines) + "\n"))
    return found


# What carries out `torchrun`: called with the script, the number of ranks and the script's arguments.
Launcher = Callable[[Path, int, list[str]], object]


def torchrun(script: Path, ranks: int, arguments: list[str]) -> None:
    """The command itself."""
    Job(script.stem, ranks, arguments, script.parent / "logs", folder=script.parent).wait()


def warm_ranks(script: Path, ranks: int, arguments: list[str]) -> None:
    """The same script on `run_ranks`, whose process group it takes for the one that it would make and end."""
    assert not arguments
    run_ranks(ranks, _as_launched, script)


def _as_launched(script: Path) -> None:
    with mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT):
        _on_rank(script.read_text(), script.parent)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """In a folder, made if need be, with a process group of one rank, as under ``torchrun``."""
    folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with chdir(folder):
            yield
    finally:
        dist.destroy_process_group()


def run_page(text: str, folder: Path, launcher: Launcher = warm_ranks) -> int:
    """Run a page's code in a folder, which is the current one; returns how many blocks ran."""
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [block for block in blocks_of(text) if block.is_run]
    for block in code:
        if block.language == "sh":
            for command in block.text.replace("\\\n", " ").splitlines():
                _run_command(command.partition("  #")[0].strip(), folder, launcher)
        elif block.title.endswith(".py"):
            (folder / block.title).write_text(block.text)
        elif ranks := re.fullmatch(r"on (\d) ranks", block.title):
            run_ranks(int(ranks[1]), _on_rank, block.text, folder)
        else:
            exec(compile(block.text, "<page>", "exec"), names)  # noqa: S102  pages are ours
    return len(code)


def _on_rank(text: str, folder: Path) -> None:
    with chdir(folder):
        exec(compile(text, "<page>", "exec"), {"__name__": "__main__"})  # noqa: S102


def _run_command(command: str, folder: Path, launcher: Launcher) -> None:
    if not command:
        return
    words = shlex.split(command)
    if words[0] == "vescale-convert":
        done = vescale_convert(*words[1:])
        assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception}"
    elif match := _TORCHRUN.fullmatch(command):
        launcher(folder / f"{match[2]}.py", int(match[1]), shlex.split(match[3]))
    else:
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        run = run_command(["bash", "-c", command], cwd=folder, env=environment)
        assert run.returncode == 0, f"{command}\n{run.stdout}{run.stderr}"
