"""A folder on disk: files are written under partial names, in any order, and renamed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

from vescale_fsdp.checkpoint.storage.created_folders import MadeFolders
from vescale_fsdp.checkpoint.storage.preallocate import reserve
from vescale_fsdp.conversion.store import OutputFile, StagedFile, Store, partial_name

__all__ = ["LocalStore"]

_MAX_OPEN_FILES = 256  # reading a checkpoint of more files than this reopens the rest at every read


class _LocalOutput(OutputFile):
    needs_order = False

    def __init__(self, path: Path, nbytes: int, folders: MadeFolders) -> None:
        self._path = path
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
        self._fd = folders.using(path.parent, lambda: os.open(path, flags, 0o666))  # the umask takes its part
        try:
            reserve(self._fd, nbytes)
        except OSError as error:
            error.filename = os.fspath(path)
            self.abort()
            raise

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B")
        try:
            while len(view):
                written = os.pwrite(self._fd, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            error.filename = os.fspath(self._path)
            raise

    def finish(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def abort(self) -> None:
        self.finish()
        self._path.unlink(missing_ok=True)


class _LocalStaged(StagedFile):
    def __init__(self, path: Path, working: Path, pieces: Iterable[bytes], folders: MadeFolders) -> None:
        self._path, self._working = path, working
        with folders.using(path.parent, lambda: open(self._working, "wb")) as file:
            try:
                for piece in pieces:
                    file.write(piece)
                file.flush()
            except BaseException:
                self.abort()
                raise

    def commit(self) -> None:
        _rename(self._working, self._path)

    def abort(self) -> None:
        self._working.unlink(missing_ok=True)


def _rename(working: Path, path: Path) -> None:
    try:
        os.replace(working, path)
    except FileNotFoundError:
        if not path.is_file():  # else another process of this conversion did it
            raise


class LocalStore(Store):
    """A folder on disk. Read handles stay open, since reopening costs a round trip on network disks."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.url = str(self.root)
        self._folders = MadeFolders(self.root)
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def place(self) -> tuple[str, ...]:
        """Symbolic links are resolved."""
        return ("file", *Path(os.path.realpath(self.root)).parts)

    def list_files(self) -> list[str]:
        found = [path for path in self.root.rglob("*") if path.is_file()]
        return sorted(path.relative_to(self.root).as_posix() for path in found)

    def size(self, name: str) -> int | None:
        path = self.root / name
        return path.stat().st_size if path.is_file() else None

    def stamp(self, name: str) -> str:
        self.required_size(name)
        found = (self.root / name).stat()
        return f"{found.st_size} {found.st_mtime_ns}"

    def append(self, name: str, data: bytes) -> None:
        path = self.root / name
        with self._folders.using(path.parent, lambda: path.open("ab")) as file:
            file.write(data)

    def stage(self, name: str, pieces: Iterable[bytes], owner: str = "") -> StagedFile:
        working = self.root / partial_name(name, owner)
        return _LocalStaged(self.root / name, working, pieces, self._folders)

    @property
    def folders(self) -> MadeFolders:
        return self._folders

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        fd = self._handle(name)
        try:
            done = 0
            while done < len(buffer):
                got = os.preadv(fd, [buffer[done:]], offset + done)
                if not got:
                    raise self._too_short(name, offset, len(buffer), done)
                done += got
        finally:
            if self._fds.get(name) != fd:
                os.close(fd)

    def _handle(self, name: str) -> int:
        with self._lock:
            if name in self._fds:
                return self._fds[name]
            self.required_size(name)
            fd = os.open(self.root / name, os.O_RDONLY)
            if len(self._fds) < _MAX_OPEN_FILES:
                self._fds[name] = fd
            return fd

    def create(self, name: str, nbytes: int = 0) -> OutputFile:
        return _LocalOutput(self.root / partial_name(name), nbytes, self._folders)

    def commit(self, name: str) -> None:
        _rename(self.root / partial_name(name), self.root / name)

    def remove(self, name: str) -> None:
        if name in self._fds:  # a kept handle would go on reading the removed file
            with self._lock:
                os.close(self._fds.pop(name))
        (self.root / name).unlink(missing_ok=True)

    @property
    def renames(self) -> bool:
        return True

    def __del__(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
