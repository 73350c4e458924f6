"""Disks of this process, for functions that take a path and no `Storage`: reads are counted, room is short, operations
fail. Where a `Storage` can be passed, tests pass a `FaultyStorage` or `WatchedStorage`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.local import LocalStorage


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Bytes of each read of a range of a file, of every storage."""
    found: list[int] = []
    read_into = Storage.read_into

    def counted(storage: Storage, name: str, offset: int, buffer: memoryview) -> None:
        found.append(len(buffer))
        read_into(storage, name, offset, buffer)

    with mock.patch.object(Storage, "read_into", counted):
        yield found


@contextmanager
def room(nbytes: int) -> Iterator[None]:
    """Every disk has so many free bytes."""
    with mock.patch.object(LocalStorage, "free_bytes", nbytes):
        yield


@contextmanager
def disk_operation(name: str, run: Callable[..., Any]) -> Iterator[None]:
    """Instead of an operation of `LocalStorage`, call ``run(real operation, storage, *arguments)``."""
    real = getattr(LocalStorage, name)

    def instead(storage: LocalStorage, *arguments: Any, **options: Any) -> Any:
        return run(real, storage, *arguments, **options)

    with mock.patch.object(LocalStorage, name, instead):
        yield
