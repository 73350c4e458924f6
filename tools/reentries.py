#!/usr/bin/env python3
"""Count how often one ``convert(source)`` comes back to a folder that it had left.

    python tools/reentries.py            the counts
    python tools/reentries.py --list     also every call that crosses folders, in the order of the run

A reader who follows a run through the code changes folders where a function calls one of another folder. Each function
counts at its first call; code that imports run does not count. Calls that cross folders, less the folders that are
reached so, are the re-entries. A reader does not follow leaf functions (those that call nothing else of this project);
the second count leaves them out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = tuple(f"{ROOT / name}/" for name in ("vescale_fsdp", "checkpoint", "conversion"))


# Run by imports, by the garbage collector, or as parts of the function that contains them.
NOT_CALLED = ("<module>", "__del__", "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")


class Crossing(NamedTuple):
    """The first call of a function by one of another folder."""

    caller: str
    folder: str
    name: str
    code: CodeType


def is_own(code: CodeType) -> bool:
    """Whether code belongs to this project."""
    return str(Path(code.co_filename).resolve()).startswith(FOLDERS)


def folder_of(code: CodeType) -> str:
    """The folder of a function's file, below the root."""
    return str(Path(code.co_filename).resolve().parent.relative_to(ROOT))


def crossings(run: Callable[[], object]) -> tuple[list[Crossing], set[CodeType]]:
    """The calls of ``run`` that cross folders, in their order, and the functions that call others of the project."""
    own: dict[CodeType, bool] = {}
    seen: set[CodeType] = set()
    callers: set[CodeType] = set()
    found: list[Crossing] = []

    def owned(code: CodeType) -> bool:
        if code not in own:
            own[code] = is_own(code)
        return own[code]

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not owned(frame.f_code) or frame.f_code.co_name in NOT_CALLED:
            return
        caller = frame.f_back
        while caller is not None and (
            not owned(caller.f_code) or caller.f_code.co_name.endswith(("expr>", "comp>"))
        ):
            caller = caller.f_back
        if caller is None or caller.f_code.co_name == "<module>":
            return
        callers.add(caller.f_code)
        code = frame.f_code
        if code not in seen:
            seen.add(code)
            here, there = folder_of(caller.f_code), folder_of(code)
            if here != there:
                found.append(Crossing(here, there, f"{Path(code.co_filename).stem}.{code.co_qualname}", code))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found, callers


def main() -> None:
    """Convert a small native checkpoint to a Hugging Face folder, and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print every call that crosses folders")
    args = parser.parse_args()
    import torch

    from vescale_fsdp.checkpoint import save
    from vescale_fsdp.conversion import convert, open_source

    with tempfile.TemporaryDirectory() as folder:
        names = ("model.embed.weight", "model.layers.0.weight", "model.norm.weight")
        save(f"{folder}/native", {name: torch.ones(8, 4) for name in names})
        source = open_source(f"{folder}/native")
        found, callers = crossings(lambda: convert(source, f"{folder}/hf", "hf"))
    followed = [each for each in found if each.code in callers]
    if args.list:
        for each in found:
            leaf = "" if each.code in callers else "  (leaf)"
            print(f"{each.caller:32s} -> {each.folder:32s} {each.name}{leaf}")
    print(f"re-entries: {len(found) - len({each.folder for each in found})}")
    print(f"re-entries without leaf functions: {len(followed) - len({each.folder for each in followed})}")
    print(f"arrows between folders: {len({(each.caller, each.folder) for each in found})}")


if __name__ == "__main__":
    main()
