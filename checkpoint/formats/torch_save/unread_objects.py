"""Stand-ins for objects of classes that nobody here knows.

Trainers pickle more than tensors: loss scalers, arguments, random states. What is wanted lies beside those in one
pickle, so that refusing the pickle would refuse the weights. A stand-in imports nothing and does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class UnreadObject:
    """Takes whatever its pickle tells it, and keeps attributes alone."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):  # (attributes, slots)
            self.__dict__.update(part if isinstance(part, dict) else {})

    def __call__(self, *args: Any, **options: Any) -> UnreadObject:
        return UnreadObject()

    def __setitem__(self, key: Any, value: Any) -> None:
        """Of a kind of dict."""

    def append(self, item: Any) -> None:
        """Of a kind of list."""

    def extend(self, items: Any) -> None:
        """Of a kind of list."""

    def add(self, item: Any) -> None:
        """Of a kind of set."""


def unread_type(module: str, name: str) -> type[UnreadObject]:
    """A stand-in for a class, or for a function, which becomes what it would have returned."""
    return type(f"{module}.{name}", (UnreadObject,), {})  # never taken for one that is known


def is_plain(value: Any) -> bool:
    """Whether a value is made of numbers, texts and containers of them alone."""
    if isinstance(value, Mapping):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))
