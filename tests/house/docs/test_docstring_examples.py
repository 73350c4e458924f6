"""Examples in docstrings give what they show, and every public name has one."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import warnings
from pathlib import Path

from tests.house.conftest import ROOT, failures
from tests.house.docs.page_blocks import alone
from tests.house.docs.public_names import OF_STACKS, PUBLIC, is_ours
from vescale_fsdp.errors import BoundNamesWarning

# By installed path: two folders of the package are links, which older Pythons' globs do not follow.
INSTALLED = [
    ROOT / "vescale_fsdp" / file.relative_to(ROOT / base)
    for top, base in (("vescale_fsdp", "vescale_fsdp"), ("checkpoint", "."), ("conversion", "."))
    for file in sorted((ROOT / top).rglob("*.py"))
]
FILES = [file for file in dict.fromkeys(INSTALLED) if ">>> " in file.read_text()]
# Their modules import a stack, which is not here; their examples are compiled, and stacks' tests run what they say.
NEED_A_STACK = [ROOT.joinpath(*name.split(".")[:-1]).with_suffix(".py") for name in OF_STACKS]


def docstring_of(name: str) -> str:
    """The docstring of a function or class by its full name, from its file."""
    *module, last = name.split(".")
    tree = ast.parse(ROOT.joinpath(*module).with_suffix(".py").read_text())
    found = [n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == last]
    return ast.get_docstring(found[-1]) or ""


def test_every_public_name_has_an_example() -> None:
    """Names of torch that we hand on are torch's to explain."""
    ours = {name: inspect.getdoc(value) or "" for name, value in PUBLIC.items() if is_ours(value)}
    texts = ours | {name: docstring_of(name) for name in OF_STACKS}

    assert texts
    assert sorted(name for name, text in texts.items() if ">>> " not in text) == []


def test_examples_give_what_they_show(tmp_path: Path) -> None:
    """Each runs with its module's names, on one rank, in an empty folder."""

    def check(file: Path) -> None:
        with alone(tmp_path / file.relative_to(ROOT)), warnings.catch_warnings():
            # Other test modules, which may have been imported too, have bound torch's names.
            warnings.simplefilter("ignore", BoundNamesWarning)
            run_examples(file)

    assert not (failed := failures(check, FILES)), failed


def run_examples(file: Path) -> None:
    """A file's examples, compiled alone where they need a stack."""
    if file in NEED_A_STACK and "weight_sync" not in file.parts:
        parsed = [
            doctest.DocTestParser().get_examples(docstring_of(n)) for n in OF_STACKS if _file(n) == file
        ]
        assert [compile(e.source, str(file), "single") for examples in parsed for e in examples]
        return
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    examples = finder.find(module)
    # doctest takes what is named by its package (`lazy.set_module`) for imported.
    kinds = ast.ClassDef | ast.FunctionDef
    defined = [node.name for node in ast.parse(file.read_text()).body if isinstance(node, kinds)]
    for value in (vars(module)[name] for name in defined):
        if value.__module__ != module.__name__:
            examples += finder.find(value, module=False, globs=vars(module))
    for example in examples:
        runner.run(example)
    found = runner.summarize()

    assert found.attempted > 0
    assert found.failed == 0


def _file(name: str) -> Path:
    return ROOT.joinpath(*name.split(".")[:-1]).with_suffix(".py")
