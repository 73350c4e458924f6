"""Imports run one way, the pure row stays pure, and private torch names live in one file.

Found by parsing the sources, so that an import inside a function counts too. Imports under
``if TYPE_CHECKING`` do not count for the order: they name a type and bring in nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "vescale_fsdp": "vescale_fsdp",
    "checkpoint": "vescale_fsdp.checkpoint",
    "conversion": "vescale_fsdp.conversion",
}

# Modules of the runtime from the bottom up: each may import those above it in this list. Subpackages
# (optim, quantize) stand on all of them.
ORDER = (
    "lazy",
    "errors",
    "geometry",
    "granularity",
    "layout",
    "packing",
    "shard_search",
    "planner",
    "padding",
    "placement",
    "canvas",
    "drawing",
    "shapes",
    "report",
    "torch_private",
    "collectives",
    "rank_order",
    "spec",
    "exchange",
    "redistribute",
    "dcp_hooks",
    "dtensor",
    "holding",
    "operands",
    "philox",
    "random",
    "elementwise",
    "reductions",
    "operators",
    "data_mesh",
    "outer",
    "placement_wish",
    "tensor_hooks",
    "replaced_params",
    "group_plan",
    "group_comm",
    "dbuffer",
    "streams",
    "param_group",
    "hooked_group",
    "takeover",
    "schedule",
    "consensus",
    "tensor_tree",
    "unit",
    "module",
    "fully_shard",
)
PURE = ORDER[: ORDER.index("torch_private")]
RUNTIME = ORDER[ORDER.index("dbuffer") :]  # what checkpoint and conversion must not know
# The pure row knows torch's placement class, to be one, and nothing else of torch.
PURE_TORCH = {"torch.distributed.tensor.placement_types"}


class Import(NamedTuple):
    """One imported name: where, from which module, which name ("" for ``import module``), bound to what."""

    line: int
    module: str
    name: str
    bound_to: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.module}.{self.name}".rstrip(".")


def sources() -> list[tuple[str, Path]]:
    """(installed module name, file) of everything that is installed, each file once."""
    found = []
    for folder, package in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "vescale_fsdp" and parts[0] in ("checkpoint", "conversion"):
                continue  # the links: Python 3.13 follows them
            found.append((".".join((package, *parts)).removesuffix(".__init__"), file))
    return found


def imports_of(tree: ast.AST) -> Iterator[Import]:
    """Every import statement that runs, wherever it stands."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, "", alias.asname or alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield Import(node.lineno, module, alias.name, alias.asname or alias.name)
        yield from imports_of(node)


def is_private(name: str) -> bool:
    """A leading underscore, dunders excepted."""
    return name.startswith("_") and not name.endswith("__")


def private_torch_names(source: str) -> list[str]:
    """Imports of torch, and attributes of what was imported from it, that run over a private name."""
    tree = ast.parse(source)
    of_torch = [i for i in imports_of(tree) if i.module.split(".")[0] == "torch"]
    found = [str(i) for i in of_torch if any(map(is_private, (*i.module.split("."), i.name)))]
    bound = {i.bound_to for i in of_torch}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        chain = ast.unparse(node).split(".")
        # torch.ops.aten._foreach_add is an operator's real name, torch._ops.OpOverload the type of them all
        is_operator = chain[:2] in (["torch", "ops"], ["torch", "_ops"])
        if chain[0] in bound and is_private(chain[-1]) and not is_operator:
            found.append(f"line {node.lineno}: {'.'.join(chain)}")
    return found


def own_target(found: Import, known: frozenset[str]) -> str | None:
    """The module of ours that an import reaches, if any: a submodule if the name is one."""
    if found.module.split(".")[0] != "vescale_fsdp":
        return None
    full = f"{found.module}.{found.name}"
    return full if full in known else found.module


def may_import(importer: str, target: str) -> bool:
    """DESIGN section 3 as one question about two modules of ours."""
    above, below = importer.removeprefix("vescale_fsdp."), target.removeprefix("vescale_fsdp.")
    if below.split(".")[0] == "conversion":
        return above.split(".")[0] == "conversion"
    if below.split(".")[0] == "checkpoint":
        return above.split(".")[0] in ("checkpoint", "conversion")
    if importer == "vescale_fsdp":
        return True
    if target == "vescale_fsdp":
        return False  # the front door imports everything
    if above.split(".")[0] in ("checkpoint", "conversion"):
        return below not in RUNTIME
    if above not in ORDER:
        return True  # optim and quantize
    return below in ORDER and ORDER.index(below) < ORDER.index(above)


SOURCES = [pytest.param(*pair, id=pair[0]) for pair in sources()]
KNOWN = frozenset(module for module, _ in sources())


def test_sources_are_found() -> None:
    """The search sees the modules of all three folders, under their installed names."""
    assert {
        "vescale_fsdp",
        "vescale_fsdp.layout.group_layout",
        "vescale_fsdp.checkpoint",
        "vescale_fsdp.conversion",
    } <= KNOWN


def test_every_module_has_its_place_in_the_order() -> None:
    """A new module of the runtime must be given its place in ORDER above."""
    top = {file.stem for _, file in sources() if file.parent == ROOT / "vescale_fsdp"} - {"__init__"}

    assert top - set(ORDER) == set()


@pytest.mark.parametrize(("module", "file"), SOURCES)
def test_imports_run_one_way(module: str, file: Path) -> None:
    """No module imports one that stands on it."""
    reached = [(i, own_target(i, KNOWN)) for i in imports_of(ast.parse(file.read_text()))]

    assert [str(i) for i, target in reached if target and not may_import(module, target)] == []


@pytest.mark.parametrize(("module", "file"), SOURCES)
def test_installed_names_only(module: str, file: Path) -> None:
    """Nobody imports `checkpoint` or `conversion` by folder name, nor relatively, nor tests or tools."""
    outside = {"", "checkpoint", "conversion", "tests", "tools"}
    found = imports_of(ast.parse(file.read_text()))

    assert [str(i) for i in found if i.module.split(".")[0] in outside] == []


@pytest.mark.parametrize(("module", "file"), SOURCES)
def test_private_torch_names_live_in_one_file(module: str, file: Path) -> None:
    """Only torch_private.py touches names that torch may change without notice."""
    found = private_torch_names(file.read_text())

    assert bool(found) if module == "vescale_fsdp.torch_private" else found == []


@pytest.mark.parametrize(("module", "file"), SOURCES)
def test_pure_row_knows_no_process_group(module: str, file: Path) -> None:
    """Planner, layout and their like import nothing of torch but the class of placements."""
    found = [i for i in imports_of(ast.parse(file.read_text())) if i.module.split(".")[0] == "torch"]
    pure = module.removeprefix("vescale_fsdp.") in PURE

    assert not pure or [str(i) for i in found if i.module not in PURE_TORCH] == []


@pytest.mark.parametrize(
    ("importer", "target", "allowed"),
    [
        ("vescale_fsdp.fully_shard", "vescale_fsdp.runtime.fsdp_module", True),
        ("vescale_fsdp.runtime.fsdp_module", "vescale_fsdp.fully_shard", False),
        ("vescale_fsdp.layout.group_layout", "vescale_fsdp.layout.planner", False),
        ("vescale_fsdp.layout.group_layout", "vescale_fsdp.layout.group_layout", False),
        ("vescale_fsdp.layout.group_layout", "vescale_fsdp", False),
        ("vescale_fsdp", "vescale_fsdp.fully_shard", True),
        ("vescale_fsdp", "vescale_fsdp.checkpoint", False),
        ("vescale_fsdp.dtensor.ragged_dtensor", "vescale_fsdp.checkpoint", False),
        ("vescale_fsdp.checkpoint.api", "vescale_fsdp.layout.group_layout", True),
        ("vescale_fsdp.checkpoint.api", "vescale_fsdp.dtensor.ragged_dtensor", True),
        ("vescale_fsdp.checkpoint.api", "vescale_fsdp.runtime.param_group", False),
        ("vescale_fsdp.checkpoint.api", "vescale_fsdp.conversion.cli.main", False),
        ("vescale_fsdp.conversion.cli.main", "vescale_fsdp.checkpoint.api", True),
        ("vescale_fsdp.conversion.cli.main", "vescale_fsdp.runtime.fsdp_module", False),
        ("vescale_fsdp.optim.muon.optimizer", "vescale_fsdp.dtensor.ragged_dtensor", True),
        ("vescale_fsdp.dtensor.ragged_dtensor", "vescale_fsdp.optim.muon.optimizer", False),
    ],
)
def test_the_rule_itself(importer: str, target: str, allowed: bool) -> None:
    """The question answers as the table of DESIGN section 3 says."""
    assert may_import(importer, target) is allowed


SAMPLE = """
import torch, torch.distributed as dist
from torch._C import public
from torch.distributed import _private
from torch.distributed.tensor import DTensor
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from torch._guards import only_a_type
def f(self):
    import torch._inductor
    dist._z(torch.__version__, self._own, torch.ops.aten._foreach_add)
    return DTensor._op_dispatcher
"""


def test_private_names_are_seen() -> None:
    """Each way of writing a private name is found, once; dunders, own names and operators are not."""
    found = [text.split(": ")[1] for text in private_torch_names(SAMPLE)]

    assert sorted(found) == [
        "DTensor._op_dispatcher",
        "dist._z",
        "torch._C.public",
        "torch._inductor",
        "torch.distributed._private",
    ]
