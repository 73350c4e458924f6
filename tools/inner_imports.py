"""Count the test files that import inner names of other rooms, and the patches of the product's objects.

    python -m tools.inner_imports [--json FILE]     prints files, the names that they import, and three numbers

A room is a folder of the product. A name is inner unless it has a page, or its module is a public package or module, or
one of `FRONTS`. A test may import inner names of the room that its own folder mirrors, and of rooms in that room.
Counted are ``test_*.py``; the files that support them have a number of their own.

A patch is a call of ``monkeypatch.setattr``, ``monkeypatch.delattr``, ``mock.patch``, ``mock.patch.object``,
``mock.patch.multiple`` or ``mock.patch.dict`` on an object, or on a string, that does not come from another package.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path

from tests.house.docs.public_names import MODULES, OF_METHODS, OF_STACKS, PACKAGES, public_names
from tools.torchrun_job import ROOT

PACKAGE = "vescale_fsdp"
PUBLIC = {*PACKAGES, *MODULES, "vescale_fsdp.errors"}
# Some have the name of the module that defines them.
NAMES = {*public_names(), *OF_METHODS, *OF_STACKS}
# Inner modules, with what is in them, that tests of any room may use.
FRONTS = (
    "vescale_fsdp.checkpoint.ranks.coordinator",
    "vescale_fsdp.checkpoint.storage",
    "vescale_fsdp.layout.geometry",
    "vescale_fsdp.torch_private",
)


def imports_of(tree: ast.AST, root: Path) -> Iterator[tuple[str, str]]:
    """Module of the product and name, of every import; the name is empty if a module was imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if _is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                is_module = module not in NAMES and _is_module(root, module)
                yield (module, "") if is_module else (str(node.module), alias.name)


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == PACKAGE


def _is_module(root: Path, module: str) -> bool:
    path = root.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def _is_within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def room_of(root: Path, test: Path) -> str | None:
    """The room that a test's folder mirrors; None for tests of no room.

    Args:
        root: the checkout.
        test: path, relative to the checkout.
    """
    parts = test.parent.parts[1:]
    if parts and parts[0] in ("checkpoint", "conversion"):
        parts = (PACKAGE, *parts)
    while parts and not root.joinpath(*parts).is_dir():
        parts = parts[:-1]
    return ".".join(parts) or None


def inner_names(root: Path, test: Path) -> list[str]:
    """Full names that a test imports from inner modules of other rooms."""
    room = room_of(root, test)
    return sorted(
        {
            f"{module}.{name}".rstrip(".")
            for module, name in imports_of(ast.parse((root / test).read_text()), root)
            if module not in PUBLIC and f"{module}.{name}" not in NAMES
            if not any(_is_within(module, front) for front in FRONTS)
            if room is None or not _is_within(module, room)
        }
    )


def patches(tree: ast.AST) -> list[int]:
    """Lines where an object is patched that was not imported from another package: the product's and the test's own."""
    strangers = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            strangers |= {
                alias.asname or alias.name.split(".")[0] for alias in node.names if not _is_ours(alias.name)
            }
        elif isinstance(node, ast.ImportFrom) and not _is_ours(node.module or ""):
            strangers |= {alias.asname or alias.name for alias in node.names}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and _patches(ast.unparse(node.func).split(".")):
            target = node.args[0]
            if isinstance(target, ast.Constant):
                is_ours = _is_ours(str(target.value))
            else:
                is_ours = ast.unparse(target).split(".")[0] not in strangers
            if is_ours:
                found.append(node.lineno)
    return sorted(found)


def _patches(function: list[str]) -> bool:
    """Whether a called name, split at its dots, is one of the functions that patch."""
    if function[-1] in ("setattr", "delattr"):
        return len(function) == 2  # of a MonkeyPatch, whatever its name; not the built-in
    return function[-1] == "patch" or (function[-1] in ("object", "multiple", "dict") and "patch" in function)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lists there too")
    options = parser.parse_args()
    files = [file.relative_to(ROOT) for file in sorted((ROOT / "tests").rglob("*.py"))]
    inner = {str(file): names for file in files if (names := inner_names(ROOT, file))}
    tests = {file: names for file, names in inner.items() if Path(file).name.startswith("test_")}
    patched = {str(file): lines for file in files if (lines := patches(ast.parse((ROOT / file).read_text())))}
    for file, names in tests.items():
        print(f"{file}: {', '.join(names)}")
    print(f"test files that import inner names of other rooms: {len(tests)}")
    print(f"supporting files that do: {len(inner) - len(tests)}")
    print(f"patches of the product's objects: {sum(map(len, patched.values()))} in {len(patched)} files")
    if options.json:
        options.json.write_text(json.dumps({"inner": inner, "patches": patched}, indent=1))


if __name__ == "__main__":
    main()
