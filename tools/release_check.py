"""Check a release: build it, check the files, install the wheel in a clean environment, run README's example.

    python tools/release_check.py [--keep]      make release-check

The clean environment has only the wheel and its dependencies, from pip's configured index. ``--keep`` keeps it in
build/release.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
WORK = ROOT / "build" / "release"


def run(*command: object, cwd: Path = ROOT) -> None:
    """Run a command that must succeed, without this checkout on its path."""
    print("$", *command, flush=True)
    loopback = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | {"GLOO_SOCKET_IFNAME": loopback},
        check=True,
    )


def example() -> str:
    """README's training script."""
    found = re.search(r"```python title=\"train\.py\"\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    if found is None:
        sys.exit("README has no example")
    return found[1]


def main() -> None:
    """Build, check, install, run."""
    for folder in (DIST, WORK):
        shutil.rmtree(folder, ignore_errors=True)
    WORK.mkdir(parents=True)
    run(sys.executable, "-m", "build", "--outdir", DIST)
    files = sorted(DIST.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    (wheel,) = (file for file in files if file.suffix == ".whl")
    venv.create(WORK / "venv", with_pip=True)
    python = WORK / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    (WORK / "train.py").write_text(example())
    for ranks in (2, 3):
        run(
            python,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            ranks,
            "train.py",
            cwd=WORK,
        )
    converter = WORK / "venv" / "bin" / "vescale-convert"
    run(converter, "verify", "run/step-00000200", cwd=WORK)
    run(converter, "to-torch", "run/step-00000200", "model.pt", cwd=WORK)
    if "--keep" not in sys.argv[1:]:
        shutil.rmtree(WORK)
    print(f"ready: {', '.join(file.name for file in files)}")


if __name__ == "__main__":
    main()
