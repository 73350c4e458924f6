"""A storage that passes everything on to another one: what faulty and watched ones are made from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vescale_fsdp.checkpoint.storage.base import FileInfo, FileReader, FileWriter, Storage


class PassingStorage(Storage):
    """Passes everything on to ``inner``."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.write_threads, self.read_threads = inner.write_threads, inner.read_threads
        self.far_read_threads = inner.far_read_threads
        self.in_order, self.is_shared = inner.in_order, inner.is_shared

    @property
    def where(self) -> str:
        return self.inner.where

    @property
    def location(self) -> tuple[str, ...]:
        return self.inner.location

    def child(self, name: str) -> Storage:
        return self.inner.child(name)

    def create(self, name: str, size_bytes: int) -> FileWriter:
        return self.inner.create(name, size_bytes)

    def lay_out(self, name: str, size_bytes: int) -> FileWriter:
        return self.inner.lay_out(name, size_bytes)

    def join(self, name: str) -> FileWriter:
        return self.inner.join(name)

    def beside(self, name: str) -> Storage:
        return self.inner.beside(name)

    def take_over(self, other: Storage, last: str = "") -> None:
        self.inner.take_over(other, last)

    def open_file(self, name: str) -> FileReader:
        return self.inner.open_file(name)

    def read_small(self, name: str, *, limit_bytes: int) -> bytes:
        return self.inner.read_small(name, limit_bytes=limit_bytes)

    def commit(self, name: str, data: bytes, *, replace: bool) -> None:
        self.inner.commit(name, data, replace=replace)

    def exists(self, name: str) -> bool:
        return self.inner.exists(name)

    def list_folder(self, name: str) -> list[str]:
        return self.inner.list_folder(name)

    def list_files(self) -> list[str]:
        return self.inner.list_files()

    def info(self, name: str) -> FileInfo | None:
        return self.inner.info(name)

    @property
    def free_bytes(self) -> int | None:
        return self.inner.free_bytes

    def append(self, name: str, data: bytes) -> None:
        self.inner.append(name, data)

    def rename(self, old: str, new: str) -> None:
        self.inner.rename(old, new)

    def sync_folder(self, name: str) -> None:
        self.inner.sync_folder(name)

    def remove(self, name: str) -> None:
        self.inner.remove(name)

    @contextmanager
    def lock(self) -> Iterator[None]:
        with self.inner.lock():
            yield
