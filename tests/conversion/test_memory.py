"""Peak memory of a conversion, seen from outside: the budget and an interpreter, whatever the tensor's size."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.support.processes import run_command
from vescale_fsdp.checkpoint import load, save

MIB = 2**20
TENSOR_BYTES = 256 * MIB  # one tensor, four times the budget
BUDGET_MIB = 64
INTERPRETER_MIB = 150

# Runs a command and prints its largest resident size in KiB, as the kernel counted it.
WATCH = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stderr=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak_mib(*command: str) -> float:
    """Peak resident size of a Python command."""
    root = Path(__file__).parents[2]
    watched = [sys.executable, "-c", WATCH, sys.executable, *command]
    done = run_command(watched, cwd=root, check=True)
    return int(done.stdout) / 1024


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tensor of 256 MiB as DCP, native and a file of raw bytes."""
    folder = tmp_path_factory.mktemp("sources")
    state = {"model": {"big": torch.ones(TENSOR_BYTES // 4096, 1024)}}
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    save(folder / "native", state)
    return folder


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("dcp", []),
        pytest.param("native", [], marks=pytest.mark.part("formats")),
        pytest.param("dcp", ["--dtype", "bf16"], marks=pytest.mark.part("formats")),
        ("native", ["--dtype", "bf16"]),
        ("native", ["--quantize", "big=fp8-128x128"]),
    ],
)
def test_one_tensor_larger_than_the_budget(
    sources: Path, tmp_path: Path, source: str, options: list[str]
) -> None:
    """Moved or computed, the process stays below its budget and 150 MiB of interpreter."""
    command = ["-m", "vescale_fsdp.conversion", "to-hf", "-q", "--memory-budget", f"{BUDGET_MIB}MiB"]
    peak = peak_mib(*command, *options, str(sources / source), str(tmp_path / "out"))

    assert peak < BUDGET_MIB + INTERPRETER_MIB
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert size > TENSOR_BYTES / (4 if "--quantize" in options else 2 if options else 1)


@pytest.mark.part("formats")
def test_an_average_of_tensors_larger_than_the_budget(sources: Path, tmp_path: Path) -> None:
    """Six inputs at the same time, in the memory of one."""
    inputs = [str(sources / kind) for kind in ("dcp", "native") * 3]
    command = ["-m", "vescale_fsdp.conversion", "average", "-q", "--memory-budget", f"{BUDGET_MIB}MiB"]
    peak = peak_mib(*command, *inputs, str(tmp_path / "out"), "--to", "hf")
    assert peak < BUDGET_MIB + INTERPRETER_MIB
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > TENSOR_BYTES


LARGE_TRANSFORMERS = """
held = bytearray(512 << 20)
held[::4096] = bytes(len(held) // 4096)  # touched, so that it counts
class PreTrainedModel:
    config_class = type("Config", (), {"from_dict": staticmethod(dict)})
    def __init__(self, config): assert config["hidden_size"] == 8
    def get_expanded_tied_weights_keys(self, all_submodels): return {"head": "embed"}
    _keys_to_ignore_on_save = None
    def state_dict(self): return dict.fromkeys(("embed", "head"), type("Tensor", (), {"shape": (4,)}))
    def named_modules(self): return []
    print("noise")
class Model(PreTrainedModel): pass
"""
ASK = """
import resource, sys
from vescale_fsdp.conversion import convert, open_source
convert(open_source(sys.argv[1]), sys.argv[2], "native")
assert "transformers" not in sys.modules
(own,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.part("formats")
def test_what_is_asked_of_transformers_is_not_held(tmp_path: Path) -> None:
    """Which weights are tied, a child process finds out: the converter has the answer, and none of the libraries."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(LARGE_TRANSFORMERS)
    (tmp_path / "transformers" / "core_model_loading.py").write_text(
        "def revert_weight_conversion(*_): return {}"
    )
    (tmp_path / "transformers" / "pytorch_utils.py").write_text("class Conv1D: pass")
    (tmp_path / "hf").mkdir()
    save_file({"embed": torch.ones(4)}, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    config = {"architectures": ["Model"], "tie_word_embeddings": True, "hidden_size": 8}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    command = [sys.executable, "-c", ASK, str(tmp_path / "hf"), str(tmp_path / "out")]
    done = run_command(command, cwd=tmp_path, env=environment, check=True)
    own, child = (int(kib) / 1024 for kib in done.stdout.split())

    assert own < 100 and child > 512
    state = {"embed": torch.zeros(4), "head": torch.zeros(4)}
    load(tmp_path / "out", state)
    assert all(torch.equal(value, torch.ones(4)) for value in state.values())


def test_the_measure_sees_what_is_held(sources: Path) -> None:
    """The control: a process that reads the data file whole is far above the limit."""
    file = max((sources / "dcp").iterdir(), key=lambda path: path.stat().st_size)

    assert peak_mib("-c", f"open({str(file)!r}, 'rb').read()") > BUDGET_MIB + INTERPRETER_MIB
