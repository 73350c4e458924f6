"""Messages name options through `option`: as arguments in Python, as flags of ``vescale-convert`` in the command."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest
import torch

from tests.support.command import COMMANDS, vescale_convert
from vescale_fsdp.checkpoint import load
from vescale_fsdp.conversion import ConvertOptions, combine, convert, open_source
from vescale_fsdp.errors import ConversionError, flags_in_messages, option

ROOT = Path(__file__).parents[3]
FOLDERS = ("checkpoint", "conversion", "vescale_fsdp")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# A text with one of these has a whole command line, or names the flag of another program.
_COMMANDS = (
    "vescale-convert ",
    "torchrun ",
    "hf download ",
    "hf upload ",
    "--ckpt-format",
    "--dist-ckpt-optim",
)


def _sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted(
            (ROOT / folder).rglob("*.py")
        ):  # does not follow the links to the other two folders
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def flags_in(tree: ast.Module) -> Iterator[str]:
    """Yield the texts that name a flag, without docstrings and definitions of flags."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            skipped.add(node.body[0].value)  # type: ignore[attr-defined]
        if isinstance(node, ast.Expr):  # docstrings of attributes
            skipped.add(node.value)
    for node in ast.walk(tree):
        if node in skipped or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        skipped.update(parts)
        text = "".join(
            part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "{}"
            for part in parts
        )
        if _FLAG.search(text) and not text.startswith("--") and not any(word in text for word in _COMMANDS):
            yield text


def test_a_flag_in_a_text_is_found() -> None:
    """In plain texts and texts with values; not in docstrings, definitions and whole command lines."""
    found = """
def f(parser, name):
    "Parse --dtype."
    parser.add_argument("--dtype")
    raise ValueError(f"leave out --exclude {name}", "run: vescale-convert inspect SRC --json")
x = "or " "--rules"
"""
    assert set(flags_in(ast.parse(found))) == {"leave out --exclude {}", "or --rules"}


def test_only_the_command_names_flags() -> None:
    """All other code names options through `option`."""
    found = [
        f"{path}: {text}"
        for path, tree in _sources()
        if "cli" not in path.parts and str(path) != "vescale_fsdp/errors.py"
        for text in flags_in(tree)
    ]
    assert not found


def _named() -> set[str]:
    calls = (node for _, tree in _sources() for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {
        str(call.args[0].value)
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id == "option"
        and isinstance(call.args[0], ast.Constant)
    }


def test_every_option_that_is_named_exists() -> None:
    """In Python, and in the command; "adapter" and "config" stand for several arguments, see `option`."""
    arguments = {each.name for each in fields(ConvertOptions)}
    arguments |= {name for call in (open_source, combine) for name in inspect.signature(call).parameters}
    flags = {flag for command in COMMANDS.values() for param in command.params for flag in param.opts}
    assert _named()
    for name in _named() - {"adapter", "config"}:
        assert name in arguments and f"{name}=" in option(name)
        with flags_in_messages():
            assert option(name) in flags or name == "merge", name
    assert option("adapter") != option("config")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", ["bf16", "*.bias=float32"]),
        ("exclude", ["it's $x"]),
        ("model_prefix", ""),
        ("max_shard_bytes", 5 * 10**9),
        ("max_shard_bytes", 3 * 2**20),
        ("max_shard_bytes", 12345),
        ("memory_budget_bytes", 64 * 2**20),
        ("ranks", 8),
        ("overwrite", True),
        ("optimizer", "drop"),
    ],
)
def test_the_named_option_has_the_value(name: str, value: object) -> None:
    """The argument is Python for it, and the flag is parsed to it."""
    argument = option(name, value).removeprefix("ConvertOptions(").removesuffix(")")
    assert eval(f"dict({argument})") == {name: value}
    with flags_in_messages():
        words = shlex.split(option(name, value))
    command = COMMANDS["to-native"]
    parsed = command.make_context("to-native", ["source", "target", *words]).params[name]
    assert (list(parsed) if isinstance(parsed, tuple) else parsed) == value
    assert isinstance(command, click.Command)


def test_an_error_of_python_and_of_the_command(tmp_path: Path) -> None:
    """The same error names the argument in Python and the flag in the command, before and after the other."""
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    for _ in range(2):
        with pytest.raises(
            ConversionError, check=lambda error: "dequantize=" in error.todo and "--" not in error.todo
        ):
            convert(
                open_source(tmp_path / "a.pt"), tmp_path / "b.pt", "torch", ConvertOptions(dequantize="bf16")
            )
        args = ["to-torch", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--dequantize", "bf16"]
        refused = vescale_convert(*args).exception
        assert isinstance(refused, ConversionError) and "--dequantize" in str(refused.todo)
        assert "dequantize=" not in str(refused.todo)
    with pytest.raises(ConversionError, check=lambda error: "--" not in error.todo):
        load(tmp_path / "a.pt", {"w": torch.ones(2)}, dtype=["nothing=bf16"])
