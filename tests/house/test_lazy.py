"""Packages load their names on first use: what loads when, and that a name means one thing in any order."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

from tests.house.conftest import ROOT, failures
from tests.support.processes import run_command

PACKAGES = [
    f"vescale_fsdp{name}" for name in ("", ".checkpoint", ".conversion", ".elastic", ".layout", ".transfer")
]

# Ways to bring in the function `convert` or the module of that name; each must leave the function public.
IMPORTS = [
    "import vescale_fsdp.conversion.convert",
    "from vescale_fsdp.conversion import convert as public",
    "from vescale_fsdp.conversion.convert import convert as direct",
]
CHECK = """
import sys, types
import vescale_fsdp.conversion as package
from vescale_fsdp.conversion import convert
assert isinstance(convert, types.FunctionType) and package.convert is convert
import vescale_fsdp.conversion.convert
assert package.convert is convert is sys.modules["vescale_fsdp.conversion.convert"].convert
"""


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    return run_command(command, cwd=ROOT, check=True).stdout


def test_a_function_named_like_its_module_stays_the_function() -> None:
    """Whatever imports the submodule first, and whatever follows, the package offers the function."""

    def check(first: str) -> None:
        others = [statement for statement in IMPORTS if statement != first]
        forks = [
            f"if os.fork() == 0:\n    {statement}\n    exec({CHECK!r}); os._exit(0)" for statement in others
        ]  # fresh copies of the interpreter as `first` left it: imports take seconds
        wait = f"codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range({len(others)})]\n"
        assert run("\n".join(["import os", first, *forks, wait, CHECK, "print(codes)"])).strip() == "[0, 0]"

    assert not (failed := failures(check, IMPORTS)), failed


def test_type_checkers_and_the_interpreter_see_the_same_names() -> None:
    """The stub has imports alone, which Python's own parser reads as the package did, and every name is there."""
    assert not (failed := failures(_compare_stub, PACKAGES)), failed


def _compare_stub(name: str) -> None:
    package = importlib.import_module(name)
    _docstring, *body = ast.parse(Path(f"{package.__file__}i").read_text()).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    listed = {alias.name: node.module for node in imports for alias in node.names}

    assert [ast.unparse(node) for node in body if node not in imports] in ([], ["__version__: str"])
    assert all(alias.asname == alias.name for node in imports for alias in node.names)  # else it is private
    assert listed.items() <= package.__exports__.items() and package.__all__ == sorted(listed)
    for public, module in package.__exports__.items():  # those for pickles too
        assert getattr(package, public) is getattr(importlib.import_module(str(module)), public)
    assert set(package.__all__) <= set(dir(package))


def test_unknown_names_are_refused() -> None:
    """A misspelt name is an AttributeError, and so an ImportError in a from-import."""
    package = importlib.import_module("vescale_fsdp")
    with pytest.raises(AttributeError, match="fuly_shard"):
        package.fuly_shard  # noqa: B018
    with pytest.raises(ImportError, match="fuly_shard"):
        exec("from vescale_fsdp import fuly_shard")  # noqa: S102


def test_packages_load_no_torch_until_a_name_needs_it() -> None:
    """Nor numpy. And the rules of operators are there, whatever imports the class of ragged tensors first."""
    loaded = "print(*sorted({'torch', 'numpy'} & set(sys.modules)))"
    imports = "import sys, " + ", ".join(PACKAGES)
    pure = "import vescale_fsdp as v, vescale_fsdp.layout; v.layout.plan_group"
    ragged = """
from vescale_fsdp.dtensor.ragged_dtensor import distribute_tensor
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (1,)), [v.RaggedShard((0,), (1,))])
print(type(x + x).__name__, float((x + x).sum().full_tensor()))
dist.destroy_process_group()
print(v.fully_shard.__name__)
"""
    lines = run("\n".join([imports, loaded, pure, loaded, ragged, loaded])).splitlines()

    assert lines == ["", "", "RaggedDTensor 30.0", "fully_shard", "numpy torch"]
