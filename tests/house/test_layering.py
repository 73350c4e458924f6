"""Imports run one way: the table of folders, no circles, and private torch names in their homes alone.

Found by parsing the sources, so that an import inside a function, under ``if TYPE_CHECKING`` or in a string
(`lazy_function`, and ``module:function`` of `function_named`) counts too: whoever reads one file must know the other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.house.conftest import ROOT

FOLDERS = {
    "vescale_fsdp": "vescale_fsdp",
    "checkpoint": "vescale_fsdp.checkpoint",
    "conversion": "vescale_fsdp.conversion",
}

# Folders from the bottom up: each may import those of the rows above its own, never those of its own row.
# `checkpoint` and `conversion` stand for the files directly in them that have no entry of their own.
LEVELS = (
    ("errors", "lazy", "devices", "torch_modes", "torch_private"),
    ("collectives",),
    ("layout", "checkpoint.storage", "conversion.rules.shipped"),
    ("byte_sums",),
    ("dtensor", "runtime.comm", "checkpoint.manifest", "conversion.quantization.float_codes"),
    ("dtensor.operators", "quantize", "checkpoint.state"),
    ("checkpoint.ranks", "checkpoint.state.matching"),
    ("runtime", "checkpoint.native", "checkpoint.steps", "checkpoint.verify_report"),
    ("checkpoint.foreign", "checkpoint.fingerprint"),
    ("checkpoint.save", "checkpoint.load", "checkpoint.verify"),
    ("checkpoint.async_save",),
    ("checkpoint.memory",),
    ("checkpoint", "optim"),
    ("planning.cluster", "planning.step_memory"),
    ("planning",),
    ("transfer", "conversion.quantization.bit_packing"),
    ("elastic", "conversion.engine"),
    ("conversion.quantization", "conversion.formats.torch_save", "conversion.formats.native"),
    ("conversion.formats.zarr", "conversion.live"),
    ("conversion.formats.dcp", "conversion.formats.huggingface", "conversion.rules"),
    ("conversion.convert_options", "conversion.diff"),
    ("conversion.formats", "conversion.report"),
    # `convert` carries out what the table of formats plans, for all of them alike; no format calls it back.
    ("conversion",),
    ("conversion.live.huggingface", "conversion.live.source_state"),
    ("conversion.live.foreign",),
    ("conversion.cli",),
    ("integrations",),
)
LEVEL_OF = {folder: level for level, row in enumerate(LEVELS) for folder in row}
# Files of the first row that stand on others of it.
FIRST_ROW = {
    ("torch_modes", "errors"),
    ("torch_private", "errors"),
}
# Look-ups in strings against the table: who looks up -> the files. checkpoint has this one, for foreign formats.
AGAINST = {"checkpoint.foreign": {"conversion.live.foreign"}}
# Strangers whatever their level: who begins so knows nothing of what begins so.
STRANGERS = {
    "checkpoint": {"runtime", "quantize", "optim", "elastic", "integrations", "conversion"},
    "conversion": {"runtime", "quantize", "optim", "elastic", "integrations"},
    "runtime": {"checkpoint", "conversion"},
    "quantize": {"checkpoint", "conversion"},
    "optim": {"checkpoint", "conversion"},
}
# Front doors, which import what stands on them: public names, the rules of operators, the console command.
DOORS = {
    "",
    "checkpoint.__init__",
    "checkpoint.data",
    "checkpoint.dcp",
    "checkpoint.state_dict",
    "conversion.__init__",
    "conversion.__main__",
    "dtensor.__init__",
    "optim.__init__",
}
# Plain Python: nothing of torch but the class of placements, to be one, where the set says so.
PURE = {
    "errors": set(),
    "lazy": set(),
    "layout": {"torch.distributed.tensor.placement_types"},
    "conversion.quantization.float_codes": set(),
    "conversion.quantization.bit_packing": set(),
    "checkpoint.storage": set(),
    "planning.cluster": set(),
    "planning.step_memory": set(),
}
# Attributes of torch's objects that may change without notice, and who may name them.
PRIVATE_ATTRIBUTES = {"_base", "_cdata", "_local_tensor", "_overloadname", "_schema", "_spec", "_version"}
PRIVATE_NAMES = ("torch_modes", "torch_private")
PRIVATE_HOMES = ("torch_private", "dtensor")
# The strings that `function_named` takes. In a table they stand far from the call, so they count wherever they stand.
NAMED = re.compile(r"vescale_fsdp(\.\w+)+:\w+")


class Import(NamedTuple):
    """One imported name: where, from which module, which name ("" for ``import module``), bound to what."""

    line: int
    module: str
    name: str
    bound_to: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.module}.{self.name}".rstrip(".")


def sources() -> dict[str, Path]:
    """Installed module name (packages end in ``.__init__``) -> file, of everything that is installed."""
    found = {}
    for folder, package in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "vescale_fsdp" and parts[0] in ("checkpoint", "conversion"):
                continue  # the links: Python 3.13 follows them
            found[".".join((package, *parts))] = file
    return found


def imports_of(tree: ast.AST) -> Iterator[Import]:
    """Every import statement, `lazy_function` and string ``module:function`` of ours, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, "", alias.asname or alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield Import(node.lineno, module, alias.name, alias.asname or alias.name)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "lazy_function":
            # A module that is not spelled out, or none of ours, belongs to no row and stands out below.
            yield Import(node.lineno, *(str(getattr(arg, "value", "?")) for arg in node.args), "")
        elif isinstance(node, ast.Constant) and NAMED.fullmatch(str(node.value)):
            yield Import(node.lineno, *str(node.value).split(":"), "")


def is_private(name: str) -> bool:
    """A leading underscore, dunders excepted."""
    return name.startswith("_") and not name.endswith("__")


def private_torch_names(tree: ast.AST) -> list[str]:
    """Imports of torch, and attributes of what was imported from it, that run over a private name."""
    of_torch = [i for i in imports_of(tree) if i.module.split(".")[0] == "torch"]
    found = [str(i) for i in of_torch if any(map(is_private, (*i.module.split("."), i.name)))]
    bound = {i.bound_to for i in of_torch}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        chain = ast.unparse(node).split(".")
        # torch.ops.aten._foreach_add is an operator's real name, torch._ops.OpOverload the type of them all
        is_operator = chain[:2] in (["torch", "ops"], ["torch", "_ops"])
        if chain[0] in bound and not is_operator:
            found.append(f"line {node.lineno}: {'.'.join(chain)}")
    return found


def private_attributes(tree: ast.AST) -> list[str]:
    """Uses of the private attributes listed above, on any object but ``self``."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES
        if not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]


def replaced_torch_names(tree: ast.AST) -> list[str]:
    """Assignments to, deletions of and ``setattr`` on attributes of what was imported from torch."""
    bound = {i.bound_to for i in imports_of(tree) if i.module.split(".")[0] == "torch"}
    owners: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            owners.append(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            owners.append(node.args[0])
    return [
        f"line {owner.lineno}: {ast.unparse(owner)}"
        for owner in owners
        if ast.unparse(owner).split(".")[0] in bound
    ]


SOURCES = sources()


@cache  # not when the file is imported: each process of a run imports it, and one runs its tests
def trees() -> dict[str, ast.Module]:
    """The syntax trees of our files."""
    return {module: ast.parse(file.read_text()) for module, file in SOURCES.items()}


@cache
def imports() -> dict[str, tuple[Import, ...]]:
    """What each of our files imports."""
    return {module: tuple(imports_of(tree)) for module, tree in trees().items()}


def text_of(module: str) -> str:
    """The source of a file of ours; empty for any other."""
    return SOURCES[module].read_text() if module in SOURCES else ""


def own_target(found: Import) -> str | None:
    """The file of ours that an import reaches, if any: a submodule if the name is one."""
    for name in (f"{found.module}.{found.name}", found.module):
        for candidate in (name, f"{name}.__init__"):
            if candidate in SOURCES:
                return candidate
    return None


def short(module: str) -> str:
    """A module's name without the package they all share."""
    return module.removeprefix("vescale_fsdp").removeprefix(".")


def folder_of(module: str) -> str:
    """The row entry a module belongs to: its folder, or itself for a file at the top or with an entry of its own."""
    name = short(module)
    return name if name in LEVEL_OF else name.rpartition(".")[0] or name


def may_import(importer: str, target: str) -> bool:
    """The table above as one question about two files of ours."""
    if short(importer) == "__init__" or short(importer) in DOORS:
        return True
    above, below = folder_of(importer), folder_of(target)
    if above == below:
        return True
    if "__init__" in (above, below) or LEVEL_OF[above] == 0:
        return (above, below) in FIRST_ROW  # nobody goes through the front door from inside
    strangers = STRANGERS.get(above.split(".")[0], set())
    return below.split(".")[0] not in strangers and LEVEL_OF[below] < LEVEL_OF[above]


def circles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Sets of files that import each other, however far around: Tarjan's strongly connected components."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in order:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], order[other])
        if lowest[node] == order[node]:
            start = stack.index(node)
            found.append(set(stack[start:]))
            del stack[start:]

    for node in edges:
        if node not in order:
            visit(node)
    return [component for component in found if len(component) > 1]


def test_sources_are_found() -> None:
    """The search sees the modules of all three folders, under their installed names."""
    assert {
        "vescale_fsdp.__init__",
        "vescale_fsdp.layout.group_layout",
        "vescale_fsdp.checkpoint.manager",
        "vescale_fsdp.conversion.convert",
    } <= set(SOURCES)


def test_every_folder_has_its_row() -> None:
    """A new folder must be given its place in LEVELS."""
    assert {folder_of(module) for module in SOURCES} - {"__init__"} - set(LEVEL_OF) == set()


def test_front_doors_only_pass_on_names() -> None:
    """A door that held code would be a file like any other, and would count as one in its folder."""
    allowed = (ast.Import, ast.ImportFrom)

    def has_code(module: str) -> bool:
        _docstring, *rest = trees()[module].body
        return any(
            not isinstance(statement, allowed) and "__all__" not in ast.unparse(statement)
            for statement in rest
        )

    doors = [m for m in SOURCES if short(m) in DOORS and "__" not in short(m)]
    assert {short(m) for m in doors} == {door for door in DOORS if door and "__" not in door}
    assert [m for m in doors if has_code(m)] == []


def looks_up(module: str) -> set[str]:
    """The files of ours that a file names in strings, and that the table keeps from it."""
    by_name = {own_target(i) for i in imports()[module] if i.bound_to == ""}
    return {short(target) for target in by_name if target and not may_import(module, target)}


def offences(find: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Module -> what `find` reports of it, for the modules with any report."""
    return {module: found for module in SOURCES if (found := find(module))}


def test_imports_run_down_the_table() -> None:
    """No file imports one of its own row or below; strings are held by the next test."""

    def wrong_imports(module: str) -> list[str]:
        reached = [(i, own_target(i)) for i in imports()[module] if i.bound_to != ""]
        return [str(i) for i, target in reached if target and not may_import(module, target)]

    assert offences(wrong_imports) == {}


def test_look_ups_against_the_table_are_those_named() -> None:
    """A string hides no import against the table, but those of `AGAINST`; and each of those is still there."""
    assert {short(m): found for m in SOURCES if (found := looks_up(m))} == AGAINST


def type_only_lines(tree: ast.AST) -> set[int]:
    """Lines of the imports under ``if TYPE_CHECKING``."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return {found.line for block in blocks for node in block.body for found in imports_of(node)}


def needed(module: str) -> set[str]:
    """The files that a file imports, without type-only imports within its folder and look-ups that are allowed."""
    type_only = type_only_lines(trees()[module])
    allowed = AGAINST.get(short(module), set())
    targets = {
        (target, i.line)
        for i in imports()[module]
        if (target := own_target(i)) and not (i.bound_to == "" and short(target) in allowed)
    }
    return {
        target
        for target, line in targets
        if target != module and (line not in type_only or folder_of(target) != folder_of(module))
    }


def test_no_circles() -> None:
    """No two files need each other, imports inside functions included; front doors only lead in."""
    edges = {module: needed(module) for module in trees()}

    assert circles(edges) == []


def test_installed_names_only() -> None:
    """No file imports `checkpoint` or `conversion` by folder name, nor relatively, nor tests, tools or examples."""
    outside = {"", "checkpoint", "conversion", "tests", "tools", "examples"}

    assert offences(lambda m: [str(i) for i in imports()[m] if i.module.split(".")[0] in outside]) == {}


def test_modules_are_imported_by_statement() -> None:
    """`import_module` hides an edge from this test; only lazy exports need it."""

    def hidden(module: str) -> list[str]:
        used = [i for i in imports()[module] if i.name == "import_module" or i.module == "importlib"]
        return (
            [] if short(module) == "lazy" or {i.name for i in used} == {"resources"} else list(map(str, used))
        )

    assert offences(hidden) == {}


def test_lazy_functions_are_spelled_out() -> None:
    """A function that is imported by name is one of ours, in a file that the tests above can find."""

    def unknown(module: str) -> list[str]:
        by_name = [i for i in imports()[module] if i.bound_to == ""]
        return [
            str(i)
            for i in by_name
            if not re.search(rf"^(def|class) {i.name}\b", text_of(i.module), re.MULTILINE)
        ]

    assert offences(unknown) == {}


def hidden_names(tree: ast.AST) -> list[str]:
    """Calls of `function_named` whose name is computed: neither a string nor the field of a table's row."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in calls
        if ast.unparse(call.func).split(".")[-1] == "function_named"
        if not isinstance(call.args[0], ast.Constant | ast.Attribute)
    ]


def test_named_functions_are_spelled_out() -> None:
    """`function_named` takes a string that the tests above read, or one of a table's rows."""
    assert offences(lambda module: hidden_names(trees()[module])) == {}


def test_private_torch_names_live_in_two_files() -> None:
    """Only torch_private.py and torch_modes.py import or reach names that torch may change without notice."""
    found = offences(lambda module: private_torch_names(trees()[module]))

    assert {short(module) for module in found} == set(PRIVATE_NAMES), found


def test_private_attributes_live_in_two_homes() -> None:
    """Only torch_private.py and the tensor class with its operators name private attributes of tensors."""
    found = offences(lambda module: private_attributes(trees()[module]))

    assert {
        module: uses for module, uses in found.items() if not short(module).startswith(PRIVATE_HOMES)
    } == {}


def test_torch_is_replaced_on_call_alone() -> None:
    """No file assigns to torch's modules and classes: users tell `integrations.replaced_names` which."""
    assert offences(lambda module: replaced_torch_names(trees()[module])) == {}


def test_pure_folders_know_no_torch() -> None:
    """Layouts, maps of boxes and storage import nothing of torch but the class of placements, and names of types."""

    def torch_imports(module: str) -> list[str]:
        allowed = PURE.get(folder_of(module))
        types = type_only_lines(trees()[module])
        found = [i for i in imports()[module] if i.module.split(".")[0] == "torch" and i.line not in types]
        return [] if allowed is None else [str(i) for i in found if i.module not in allowed]

    assert offences(torch_imports) == {}


# Importer, what it imports, and whether it may.
QUESTIONS = (
    ("runtime.fully_shard", "runtime.comm.group_comm", True),
    ("runtime.comm.group_comm", "runtime.fully_shard", False),
    ("layout.planner", "layout.group_layout", True),
    ("layout.planner", "dtensor.spec", False),
    ("layout.planner", "__init__", False),
    ("__init__", "runtime.fully_shard", True),
    ("__init__", "checkpoint.manager", True),
    ("errors", "lazy", False),
    ("dtensor.spec", "checkpoint.manager", False),
    ("dtensor.spec", "dtensor.operators.dispatch_table", False),
    ("dtensor.__init__", "dtensor.operators.dispatch_table", True),
    ("checkpoint.save", "layout.geometry", True),
    ("checkpoint.save", "checkpoint.load", False),
    ("checkpoint.manager", "runtime.comm.dbuffer", False),
    ("checkpoint.manager", "conversion.quantization", False),
    ("conversion.cli.main", "checkpoint.manager", True),
    ("conversion.cli.main", "runtime.fully_shard", False),
    ("optim.in_backward", "runtime.fsdp_state", True),
    ("runtime.param_group", "optim.in_backward", False),
    ("optim.in_backward", "checkpoint.manager", False),
    ("integrations.stand_ins", "runtime.fully_shard", True),
    ("integrations.stand_ins", "checkpoint.state.torch_state_dicts", True),
    ("runtime.fully_shard", "integrations.stand_ins", False),
    ("conversion.cli.main", "integrations.installation", False),
)


def test_the_rule_itself() -> None:
    """The question answers as the table says."""
    answers = [(a, b, may_import(f"vescale_fsdp.{a}", f"vescale_fsdp.{b}")) for a, b, _ in QUESTIONS]

    assert answers == list(QUESTIONS)


def test_lazy_functions_are_seen() -> None:
    """A function by name is an import of its module, up the table too; one that is not spelled out is none of ours."""
    lines = ("lazy_function('vescale_fsdp.conversion.convert', 'convert')", "lazy.lazy_function(NAME, 'f')")
    spelled, hidden = (next(imports_of(ast.parse(line))) for line in lines)

    assert own_target(spelled) == "vescale_fsdp.conversion.convert"
    assert not may_import("vescale_fsdp.conversion.formats.table", "vescale_fsdp.conversion.convert")
    assert (hidden.module, text_of(hidden.module)) == ("?", "")


def test_strings_are_seen() -> None:
    """``module:function`` is an import of the module wherever it stands, and a computed name is an offence."""
    row, call = (
        ast.parse(line)
        for line in (
            "Row(opener='vescale_fsdp.conversion.convert:convert')",
            "lazy.function_named(f'{HERE}.x:y')",
        )
    )

    assert [own_target(i) for i in imports_of(row)] == ["vescale_fsdp.conversion.convert"]
    assert (hidden_names(row), len(hidden_names(call))) == ([], 1)


def test_circles_are_seen() -> None:
    """A circle of three is found whole; a chain is none."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


SAMPLE = """
import torch, torch.distributed as dist
from torch._C import public
from torch.distributed import _private
from torch.distributed.tensor import DTensor
def f(self):
    import torch._inductor
    dist._z(torch.__version__, self._own, torch.ops.aten._foreach_add)
    return DTensor._op_dispatcher
"""


def test_private_names_are_seen() -> None:
    """Each way of writing a private name is found, once; dunders, own names and operators are not."""
    found = [text.split(": ")[1] for text in private_torch_names(ast.parse(SAMPLE))]

    assert sorted(found) == [
        "DTensor._op_dispatcher",
        "dist._z",
        "torch._C.public",
        "torch._inductor",
        "torch.distributed._private",
    ]
    assert private_attributes(ast.parse("x._spec, self._spec, x._own")) == ["line 1: x._spec"]


def test_replaced_names_are_seen() -> None:
    """Each way of replacing a name of torch is found; an attribute of one's own object is not."""
    source = """
import torch.distributed.fsdp as fsdp
from torch.distributed.tensor import DTensor
fsdp.fully_shard = None
setattr(DTensor, "full_tensor", None)
del fsdp.FSDPModule
own.fully_shard = fsdp.fully_shard
"""
    assert [text.split(": ")[1] for text in replaced_torch_names(ast.parse(source))] == [
        "fsdp",
        "DTensor",
        "fsdp",
    ]
