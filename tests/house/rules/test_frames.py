"""No product code looks at its callers, but a helper that finds a warning's line and one look-up with two uses.

What depends on the caller's frame differs under a debugger, a decorator or a thread, and from one torch to the next.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]

# Names by which code gets a frame, or leaves one.
FRAMES = {
    *(
        "_getframe",
        "_getframemodulename",
        "_current_frames",
        "currentframe",
        "getouterframes",
        "getinnerframes",
    ),
    *("f_back", "f_locals", "f_globals", "f_code", "f_lineno", "tb_frame", "gi_frame", "cr_frame"),
    *("extract_stack", "format_stack", "print_stack", "walk_stack", "walk_tb", "findCaller", "settrace"),
}
# By file: the functions that may, and why.
ALLOWED = {
    "vescale_fsdp/errors.py": {"callers_level": "the line that a warning names"},
    "vescale_fsdp/torch_private.py": {
        "frame_of": "whether one function of torch is running",
        "storage_writer_in_use": "DCP's safetensors writer would drop data without an error",
    },
}
# The look-up's uses. Both raise or do nothing.
USES = {"storage_writer_in_use", "refuse_set_state_dict"}


def _looks(source: str) -> Iterator[str]:
    """The outermost functions (or "") that name a frame."""
    for top in ast.parse(source).body if any(name in source for name in (*FRAMES, "inspect.")) else ():
        for node in ast.walk(top):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
            is_stack = isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "inspect.stack",
                "inspect.trace",
            )
            if name in FRAMES or is_stack:
                yield getattr(top, "name", "")
            if isinstance(node, ast.ImportFrom) and FRAMES & {alias.name for alias in node.names}:
                yield ""


def _calls(name: str) -> Iterator[tuple[str, ast.AST, ast.Call]]:
    """(function that calls, node around the call, call) of each call of ``name`` in the product."""
    for path, source in _sources():
        for top in ast.parse(source).body if name in source else ():
            for node in ast.walk(top):
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.Call) and ast.unparse(child.func).split(".")[-1] == name:
                        yield getattr(top, "name", path), node, child


def _sources() -> Iterator[tuple[str, str]]:
    for folder in ("vescale_fsdp", "checkpoint", "conversion"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def test_what_counts_as_a_look() -> None:
    """Attributes and imported names, not words."""
    looks = ("def f():\n    sys._getframe(1)", "def f():\n    g = x.f_back", "def f():\n    inspect.stack()")
    assert [list(_looks(each)) for each in looks] == [["f"]] * 3
    assert list(_looks("from inspect import currentframe")) == [""]
    assert list(_looks("def f():\n    torch.stack(x)  # f_back\n    trace('f_locals')")) == []


def test_no_code_looks_at_frames() -> None:
    """But the functions above, each of which still does."""
    found = {path: set(_looks(source)) for path, source in _sources()}
    assert {path: looks for path, looks in found.items() if looks} == {
        path: set(allowed) for path, allowed in ALLOWED.items()
    }


def test_what_is_found_decides_nothing_else() -> None:
    """A level is a warning's, every warning has it, and the look-up has the uses that are listed."""
    levels = [around for _, around, _ in _calls("callers_level")]
    assert levels
    assert all(isinstance(around, ast.keyword) and around.arg == "stacklevel" for around in levels)
    warned = [call for _, _, call in _calls("warn") if ast.unparse(call.func) == "warnings.warn"]
    given = [keyword.value for call in warned for keyword in call.keywords if keyword.arg == "stacklevel"]
    assert len(given) == len(warned) and {ast.unparse(each) for each in given} == {"callers_level()"}
    assert {function for function, _, _ in _calls("frame_of")} == USES
