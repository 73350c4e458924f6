"""What pages say of commands, options, names, arguments, files and numbers is so."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import vescale_fsdp
from tests.house.docs.page_blocks import blocks_of
from tests.house.docs.public_names import OF_STACKS, PUBLIC, is_ours
from tests.house.docs.test_pages import NOTES, OF_TORCH, PAGES, ROOT
from tests.support.command import COMMANDS
from vescale_fsdp import plan_report
from vescale_fsdp.layout.granularity import parse_granularity

TEXTS = {
    **PAGES,
    **{file.relative_to(ROOT).as_posix(): file for file in NOTES},
    **{
        file.relative_to(ROOT).as_posix(): file
        for folder in ("vescale_fsdp/optim", "vescale_fsdp/elastic", "vescale_fsdp/transfer")
        for file in (ROOT / folder).glob("DESIGN.md")
    },
    "SECURITY.md": ROOT / "SECURITY.md",
}
OF_OTHERS = {  # Slurm's, torchrun's, pip's, Megatron's
    *(
        "--no-kill",
        "--array",
        "--wrap",
        "--kill-on-bad-exit",
        "--signal",
        "--ntasks-per-node",
        "--gpus-per-node",
    ),
    *("--nproc-per-node", "--standalone", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--max-restarts"),
    *("--nnodes", "--node-rank", "--master-addr", "--master-port", "--pid", "--extra-index-url"),
    *("--ckpt-format", "--dist-ckpt-optim-fully-reshardable", "-m", "-q"),
}
OPTIONS = {
    name: {opt for param in command.params for opt in (*param.opts, *param.secondary_opts)} | {"--help"}
    for name, command in COMMANDS.items()
}
TOOLS = [
    *(ROOT / "tools").rglob("*.py"),
    ROOT / "vescale_fsdp/elastic/store_server.py",
    ROOT / "tests/conftest.py",
    *(ROOT / "examples").rglob("*.py"),
]
OF_TOOLS = set(re.findall(r"--[a-z][a-z-]+", "".join(file.read_text() for file in TOOLS)))
SOURCES = {
    file.name
    for folder in ("vescale_fsdp", "checkpoint", "conversion", "tests", "tools", "examples")
    for file in (ROOT / folder).rglob("*.py")
}


def spans_of(text: str) -> list[str]:
    """The code inside lines, outside of fences."""
    return [
        re.sub(r"\s+", " ", span)
        for span in re.findall(
            r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
        )
    ]


def wrong_options(text: str) -> list[str]:
    """Options that no command has, or not the one that they stand behind."""
    commands = [
        line for block in blocks_of(text) if block.language == "sh" for line in block.text.splitlines()
    ]
    found = []
    for said in [*spans_of(text), *commands]:
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", said)) - OF_OTHERS
        call = re.search(r"(?:vescale-convert|vescale_fsdp\.conversion) ([a-z][a-z0-9-]*)", said)
        known = OPTIONS.get(call[1], set()) if call else OF_TOOLS.union(*OPTIONS.values(), {"--version"})
        found += [f"{said}: {option}" for option in sorted(options - known)]
    return found


def wrong_names(text: str) -> list[str]:
    """Dotted names of the package that lead nowhere."""
    named = re.findall(r"`(?:import )?(vescale_fsdp(?:\.[A-Za-z_]\w*)+)(?![\w/])", text)
    return [name for name in dict.fromkeys(named) if not _leads_somewhere(name)]


def _leads_somewhere(name: str) -> bool:
    if name in OF_STACKS or ROOT.joinpath(*name.split(".")).with_suffix(".py").exists():
        return True  # importing it may need a stack
    found: Any = vescale_fsdp
    path = "vescale_fsdp"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(path)
            except ImportError:
                return False
    return True


def wrong_arguments(text: str) -> list[str]:
    """Keyword arguments, in code inside lines, that the public name called has not."""
    return [
        f"{said}: {keyword}"
        for said in spans_of(text)
        for call in _calls(said)
        if not ast.unparse(call.func).startswith(("dcp.", "torch."))
        for keyword in (word.arg for word in call.keywords)
        if (takes := _takes(ast.unparse(call.func).split(".")[-1])) and keyword not in takes
    ]


def _calls(said: str) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(said.replace("(..)", "(...)").replace("=..)", "=...)").strip())
    except SyntaxError:
        return
    yield from (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    )


def _takes(name: str) -> set[str | None]:
    """What public names of this last part take; nothing where any of them takes whatever comes."""
    found: set[str | None] = set()
    for full, value in PUBLIC.items():
        if full.rsplit(".", 1)[1] == name and callable(value) and is_ours(value):
            parameters = inspect.signature(value).parameters.values()
            if any(p.kind is p.VAR_KEYWORD for p in parameters):
                return set()
            found.update(p.name for p in parameters)
    return found


def wrong_targets(text: str) -> list[str]:
    """Targets that the Makefile has not."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    return sorted(set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, re.MULTILINE)) - targets)


def wrong_files(text: str) -> list[str]:
    """Names of Python files, in drawings too, that no file of ours has."""
    named = re.findall(r"(?<![\w/.*])([a-z_0-9]+\.py)\b", text)
    return sorted(set(named) - SOURCES - {"train.py", "zero_to_fp32.py", "ds_to_universal.py"})


@pytest.mark.parametrize(
    "wrong",
    [wrong_options, wrong_names, wrong_arguments, wrong_targets, wrong_files],
    ids=lambda f: f.__name__,
)
def test_what_pages_name_is_there(wrong: Any) -> None:
    """On every page and in every note."""
    said = {name: file.read_text() for name, file in TEXTS.items() if file != OF_TORCH}

    assert said
    assert {name: found for name, text in said.items() if (found := wrong(text))} == {}


def test_what_is_wrong_is_found() -> None:
    """Each of the searches above sees its mistake, and passes over what is right."""
    assert wrong_options("`vescale-convert diff A B --rtol 1 --assets X`, `--no-such`, `--rtol`") == [
        "vescale-convert diff A B --rtol 1 --assets X: --assets",
        "--no-such: --no-such",
    ]
    assert wrong_options("```sh\nvescale-convert inspect A --granularity rows:4\n```\n") != []
    assert wrong_names("`vescale_fsdp.Rows`, `vescale_fsdp.Columns`, `vescale_fsdp.layout.nothing`") == [
        "vescale_fsdp.Columns",
        "vescale_fsdp.layout.nothing",
    ]
    assert wrong_arguments('`save(p, s, format="zarr")` and `load(p, s, check="before")`') == [
        'load(p, s, check="before"): check'
    ]
    assert wrong_targets("`make test`, then `make coffee`") == ["coffee"]
    assert wrong_files("    step.py, planner.py, plans_of_old.py") == ["plans_of_old.py"]


def test_padding_of_the_example() -> None:
    """The table of the page on granularity is what its example prints."""
    page = (ROOT / "docs" / "granularity.md").read_text()
    tree = ast.parse(next(b.text for b in blocks_of(page) if b.language == "python"))
    layer = ast.literal_eval(next(node.value for node in tree.body if isinstance(node, ast.Assign)))
    said = re.findall(r"^\| (by element|by row|\d+ rows) \| (.*) \|$", page, re.MULTILINE)
    granularities = {"by element": None, "by row": "rows:1", "32 rows": "rows:32", "128 rows": "rows:128"}
    printed = {
        name: [
            f"{row.padding_ratio:.2%}"
            for row in plan_report(layer, [8, 64, 512], text and parse_granularity(text)).rows
        ]
        for name, text in granularities.items()
    }

    assert {name: cells.replace(" %", "%").split(" | ") for name, cells in said} == printed


def test_the_citation_has_what_its_format_asks_for() -> None:
    """CITATION.cff has what its format asks for, and this version."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (paper,) = cited["references"]

    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["version"] == vescale_fsdp.__version__ and cited["license"] == "Apache-2.0"
    assert {"type", "title", "authors", "url"} <= paper.keys()
    assert all(
        author.get("name") or author.get("family-names") for author in cited["authors"] + paper["authors"]
    )


def test_public_methods_are_documented() -> None:
    """The API reference leaves out what has no docstring, and says nothing of it."""
    methods = {
        f"{name}.{key}": inspect.getdoc(member)
        for name, kind in PUBLIC.items()
        if inspect.isclass(kind) and is_ours(kind)
        for key, member in vars(kind).items()
        if not key.startswith("_")
        and key not in inspect.get_annotations(kind)  # fields with a default
        and (inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod))
    }

    assert methods
    assert sorted(name for name, doc in methods.items() if not doc) == []
