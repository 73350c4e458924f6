"""A storage that writes down every call made of it, and makes one of them fail.

`Watch` is shared by the storage, its children, readers and writers, so a call is known by what it does, to which
kind of file, and how many like it came before. A fault-free run tells which calls there are.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from tests.support.faults.passing_storage import PassingStorage
from vescale_fsdp.checkpoint.storage.base import Buffer, FileReader, FileWriter, Storage

T = TypeVar("T")


class Call(NamedTuple):
    """One call of a storage: the number of calls before it with the same operation and name tells which."""

    operation: str
    name: str  # with stars for what differs from save to save
    number: int


class Fault(NamedTuple):
    """What goes wrong: at which call, before or after it has done its work, and how."""

    call: Call
    after: bool
    error: BaseException


class Watch:
    """The calls of one rank since the last `begin`, and the fault that is to come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin(None)

    def begin(self, fault: Fault | None) -> None:
        """Forget what was; from now on this is to go wrong."""
        self.calls: list[Call] = []
        self.fired = False
        self._fault = fault
        self._counts: Counter[tuple[str, str]] = Counter()

    def do(self, operation: str, name: str, work: Callable[[], T]) -> T:
        """Do the work of a call, unless it is its turn to fail."""
        plain = re.sub(r"data-[0-9a-f]+", "data-*", re.sub(r"step-\d+", "step-*", name))
        with self._lock:
            call = Call(operation, plain, self._counts[operation, plain])
            self._counts[operation, plain] += 1
            self.calls.append(call)
            fault = self._fault if self._fault is not None and self._fault.call == call else None
        if fault is None:
            return work()
        self.fired = True
        if fault.after:
            with suppress(Exception):  # a file that is not there: the fault comes all the same
                work()
        raise fault.error


class WatchedStorage(PassingStorage):
    """Passes everything on to ``inner`` under the eyes of a watch."""

    def __init__(self, inner: Storage, watch: Watch, prefix: str = "", *, is_far: bool = False) -> None:
        super().__init__(inner)
        self._watch = watch
        self._prefix = prefix
        self._is_far = is_far
        self.visible_is_durable = inner.visible_is_durable

    def _do(self, operation: str, name: str, work: Callable[[], T]) -> T:
        return self._watch.do(operation, f"{self._prefix}{name}", work)

    def child(self, name: str) -> Storage:
        inner = self.inner.child(name)
        return WatchedStorage(inner, self._watch, f"{self._prefix}{name}/", is_far=self._is_far)

    def create(self, name: str, size_bytes: int) -> FileWriter:
        made = self._do("create", name, lambda: self.inner.create(name, size_bytes))
        return _WatchedWriter(made, lambda operation, work: self._do(operation, name, work))

    def lay_out(self, name: str, size_bytes: int) -> FileWriter:
        made = self._do("lay_out", name, lambda: self.inner.lay_out(name, size_bytes))
        return _WatchedWriter(made, lambda operation, work: self._do(operation, name, work))

    def join(self, name: str) -> FileWriter:
        joined = self._do("join", name, lambda: self.inner.join(name))
        return _WatchedWriter(joined, lambda operation, work: self._do(operation, name, work))

    def beside(self, name: str) -> Storage:
        return WatchedStorage(self.inner.beside(name), self._watch, "beside/")

    def take_over(self, other: Storage, last: str = "") -> None:
        assert isinstance(other, WatchedStorage)
        self._do("take_over", "", lambda: self.inner.take_over(other.inner, last))

    def list_files(self) -> list[str]:
        return self._do("list_files", "", self.inner.list_files)

    def open_file(self, name: str) -> FileReader:
        opened = self._do("open_file", name, lambda: self.inner.open_file(name))
        return _WatchedReader(opened, self._is_far, lambda operation, work: self._do(operation, name, work))

    def read_small(self, name: str, *, limit_bytes: int) -> bytes:
        return self._do("read_small", name, lambda: self.inner.read_small(name, limit_bytes=limit_bytes))

    def commit(self, name: str, data: bytes, *, replace: bool) -> None:
        self._do("commit", name, lambda: self.inner.commit(name, data, replace=replace))

    def exists(self, name: str) -> bool:
        return self._do("exists", name, lambda: self.inner.exists(name))

    def list_folder(self, name: str) -> list[str]:
        return self._do("list_folder", name, lambda: self.inner.list_folder(name))

    def rename(self, old: str, new: str) -> None:
        self._do("rename", old, lambda: self.inner.rename(old, new))

    def sync_folder(self, name: str) -> None:
        self._do("sync_folder", name, lambda: self.inner.sync_folder(name))

    def remove(self, name: str) -> None:
        self._do("remove", name, lambda: self.inner.remove(name))

    @property
    def free_bytes(self) -> int | None:
        return self._do("free_bytes", "", lambda: self.inner.free_bytes)

    def retrying(self, work: Callable[[], T]) -> T:
        return self.inner.retrying(work)

    @contextmanager
    def lock(self) -> Iterator[None]:
        with self.inner.lock():
            self._do("lock", "", lambda: None)
            yield


_Do = Callable[[str, Callable[[], T]], T]


class _WatchedWriter(FileWriter):
    def __init__(self, inner: FileWriter, do: _Do[None]) -> None:
        self._inner, self._do = inner, do

    def write_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        self._do("write_at", lambda: self._inner.write_at(offset_bytes, buffers))

    def close(self) -> None:
        self._do("close", self._inner.close)

    def abort(self) -> None:
        self._inner.abort()


class _WatchedReader(FileReader):
    def __init__(self, inner: FileReader, is_far: bool, do: _Do[Any]) -> None:
        self._inner, self._is_far, self._do = inner, is_far, do

    @property
    def looks_in_place(self) -> bool:  # type: ignore[override]
        return not self._is_far and self._inner.looks_in_place

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def read_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        def read() -> memoryview:
            self._inner.read_at(offset_bytes, buffers)
            return memoryview(b"")

        self._do("read_at", read)

    def view(self, start_bytes: int, stop_bytes: int) -> memoryview:
        return self._do("view", lambda: self._inner.view(start_bytes, stop_bytes))

    def is_at_hand(self, start_bytes: int, stop_bytes: int) -> bool:
        return not self._is_far and self._inner.is_at_hand(start_bytes, stop_bytes)

    def close(self) -> None:
        self._inner.close()
