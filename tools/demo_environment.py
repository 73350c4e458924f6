"""Run a command of the demo in an environment that has what the demo imports; make one if none has.

    python tools/demo_environment.py -m tools.demo        what `make demo` runs

The environments in question are this interpreter's, `.venv` (of the tests) and `.venv-demo`. The first that has the
packages is used. If none has them, `.venv-demo` is made with the packages of README's install line alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
MADE = ROOT / ".venv-demo"
NEEDED = ("torch", "safetensors", "transformers", "accelerate", "tqdm", "psutil", "click", "fsspec", "xxhash")
_HAS_ALL = (
    "import sys, importlib.util as u; sys.exit(sys.version_info < (3, 11) "
    f"or any(u.find_spec(name) is None for name in {NEEDED}))"
)


def has_all(python: Path) -> bool:
    """Whether an interpreter exists, is recent enough and finds all packages, without importing them."""
    return python.exists() and subprocess.run([python, "-c", _HAS_ALL], check=False).returncode == 0


def install(folder: Path) -> None:
    """Make an environment with PyTorch, this package and transformers, in the versions of the constraints file."""
    index = os.environ.get("TORCH_INDEX", "").split()
    print(f"installing PyTorch, transformers and this package into {folder.name}", flush=True)
    if sys.platform == "linux" and not index:
        print(
            "without a GPU, PyTorch's CPU build saves gigabytes: install it first, as pytorch.org shows, and then\n"
            "this package, by `pip install '.[hf]'`; `make demo` uses the environment that is active",
            flush=True,
        )
    venv.create(folder, with_pip=True)
    pip = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        "constraints.txt",
    ]
    subprocess.run([*pip, *index, "torch"], cwd=ROOT, check=True)
    subprocess.run([*pip, "--editable", ".[hf]"], cwd=ROOT, check=True)


def main() -> None:
    """Replace this process by the command, in the first environment that has what it needs."""
    candidates = [Path(sys.executable), ROOT / ".venv" / "bin" / "python", MADE / "bin" / "python"]
    python = next((each for each in candidates if has_all(each)), None)
    if python is None:
        install(MADE)
        python = candidates[-1]
    os.chdir(ROOT)
    os.execv(python, [str(python), *sys.argv[1:]])


if __name__ == "__main__":
    main()
