"""Errors that are caught, and what their remedies name, as the remedy writes it.

Remedies name commands, and options: as flags in errors of `command`, as arguments in errors of Python's calls.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import click
import pytest

from tests.support.command import COMMANDS, vescale_convert
from vescale_fsdp.errors import VescaleError

T = TypeVar("T", bound=Callable[..., Any])
RUN: dict[str, tuple[str, ...]] = {}  # test -> the sites whose remedies it runs
CAUGHT: list[str] = []  # remedies of the errors that the running test has caught


def runs(*sites: str) -> Callable[[T], T]:
    """Decorate a test that makes the errors of these sites, and applies their remedies."""

    def note(test: T) -> T:
        RUN[f"{test.__module__}.{test.__name__}"] = sites
        return test

    return note


def refused(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """Return the remedy of the error that a call raises."""
    with pytest.raises(VescaleError) as raised:
        call(*args, **options)
    assert raised.value.todo is not None, raised.value
    CAUGHT.append(raised.value.todo)
    return raised.value.todo


def command(*args: object) -> str:
    """Run ``vescale-convert`` in this process; returns what it printed, or raises its error."""
    result = vescale_convert(*args)
    if result.exception is not None:
        raise result.exception
    return result.stdout


@cache
def options() -> dict[str, bool]:
    """Return the options of all commands, and whether they take a value."""
    return {
        name: not each.is_flag
        for every in COMMANDS.values()
        for each in every.params
        if isinstance(each, click.Option)
        for name in each.opts + each.secondary_opts
    }


def flag(remedy: str, name: str) -> list[str]:
    """Return an option as a remedy writes it: ["--exclude", "w"]."""
    word = r"(?:'[^']*'|\"[^\"]*\"|[^\s;,)'\"])+"
    value = text_in(remedy, rf"{name}(?![\w-])((?: {word})?)")
    return [name, *(shlex.split(value) if options()[name] else ())]


def text_in(remedy: str, pattern: str) -> str:
    """Return what a pattern matches in a remedy: its first group, or all of it."""
    found = re.search(pattern, remedy)
    assert found, f"{pattern} is not in {remedy!r}"
    return found[found.re.groups and 1]


def argument(remedy: str, name: str) -> dict[str, Any]:
    """Return an argument as a remedy writes it: {"dtype": "state"}, {"exclude": ["w"]}."""
    text = r"""(?:'[^']*'|"[^"]*")"""
    return {name: ast.literal_eval(text_in(remedy, rf"\b{name}=(\[{text}(?:, {text})*\]|{text}|[\w.]+)"))}


def commands(remedy: str, **words: object) -> list[str]:
    """Return the arguments of the command that a remedy names, with values in place of words such as OUT."""
    found = shlex.split(text_in(remedy, r"(?:vescale-convert |(?=merge-adapter ))([^;:]*)"))
    return [str(words.get(word, word)) for word in found]
