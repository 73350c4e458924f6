"""Files of a checkpoint by relative name: read byte ranges, write new files, on disk or at any fsspec URL.

A `Store` is a folder. Reads are positional and exact: they fill the buffer or raise, so a truncated file can
never pass for a shorter tensor. A file being written has no final name until `OutputFile.commit`.

    store        data goes to             commit
    local        .NAME.partial, pwrite    rename to NAME (atomic)
    remote       one stream, in order     closing the stream (objects appear whole or not at all)

Small files are *staged*: all of them are written, under names of their own, before the first gets its final one.
"""

from __future__ import annotations

import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from vescale_fsdp.conversion.made_folders import MadeFolders
from vescale_fsdp.conversion.reserve import reserve
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, VescaleError, explain

__all__ = [
    "LocalStore",
    "OutputFile",
    "RemoteStore",
    "StagedFile",
    "Store",
    "open_store",
    "partial_name",
    "split_file",
]

T = TypeVar("T")

_PIECE_BYTES = 4 * 2**20  # 4 MiB
_MAX_OPEN_FILES = 256  # reading a checkpoint of more files than this reopens the rest at every read


def partial_name(name: str) -> str:
    """The name a local file has until it is committed (hidden, same folder, so that rename is atomic)."""
    folder, _, base = name.rpartition("/")
    return f"{folder}/.{base}.partial" if folder else f".{base}.partial"


class OutputFile(ABC):
    """A file that does not exist under its name yet."""

    needs_order: bool  # whether offsets must be written front to back without gaps

    @abstractmethod
    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write all of ``data`` at byte ``offset``. Safe from several threads unless `needs_order`."""

    @abstractmethod
    def finish(self) -> None:
        """All bytes are written: release the handle. The file keeps its partial name where it has one."""

    @abstractmethod
    def abort(self) -> None:
        """Give up: leave nothing behind."""


class StagedFile(ABC):
    """A small file ready to appear."""

    @abstractmethod
    def commit(self) -> None:
        """Give it its final name, over an older file."""

    @abstractmethod
    def abort(self) -> None:
        """Leave nothing of it behind, committed or not."""


class Store(ABC):
    """A folder of files, by relative names with forward slashes."""

    url: str

    @abstractmethod
    def list_files(self) -> list[str]:
        """Names of all regular files, in subfolders too, sorted; empty if the folder does not exist."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a file, or None if there is no such file."""

    @abstractmethod
    def stamp(self, name: str) -> str:
        """A text that changes when the file is replaced; raises as `required_size`."""

    @abstractmethod
    def append(self, name: str, data: bytes) -> None:
        """Add to the end of a small file under its final name, making it if needed."""

    @abstractmethod
    def stage(self, name: str, pieces: Iterable[bytes]) -> StagedFile:
        """Prepare a small file; ``pieces`` are read now where a file can wait under another name, else when it
        is committed."""

    @property
    @abstractmethod
    def folders(self) -> MadeFolders | None:
        """The folders made for its files; None where there are no folders."""

    @abstractmethod
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` (flat, 1 byte per item) from byte ``offset`` of a file.

        Raises:
            CorruptCheckpointError: if the file is missing or ends too early.
        """

    @abstractmethod
    def create(self, name: str, nbytes: int = 0) -> OutputFile:
        """Start writing a file; folders are made as needed, and room for ``nbytes`` bytes where possible.

        Raises:
            OSError: if there is no space.
        """

    @abstractmethod
    def commit(self, name: str) -> None:
        """Give a finished file its final name."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file if it is there."""

    @property
    @abstractmethod
    def renames(self) -> bool:
        """Whether a file can be written under a partial name and committed by an atomic rename."""

    def working_name(self, name: str) -> str:
        """The name a finished but uncommitted file has."""
        return partial_name(name) if self.renames else name

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes at ``offset``; raises as `read_into`."""
        buffer = bytearray(nbytes)
        if nbytes:
            self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_file(self, name: str) -> bytes:
        """The whole of a (small) file; raises as `read_into`."""
        return self.read(name, 0, self.required_size(name))

    def required_size(self, name: str) -> int:
        """`size`, but a missing file raises CorruptCheckpointError."""
        size = self.size(name)
        if size is None:
            raise CorruptCheckpointError(
                explain(
                    "a file of the checkpoint is missing",
                    expected=f"a file {name}",
                    got="no such file",
                    where=self.url,
                    todo="copy the checkpoint again, with all its files",
                )
            )
        return size

    def read_pieces(self, name: str) -> Iterator[bytes]:
        """The whole of a file, a few MiB at a time; raises as `read_into`."""
        nbytes = self.required_size(name)
        for start in range(0, nbytes, _PIECE_BYTES):
            yield self.read(name, start, min(_PIECE_BYTES, nbytes - start))

    def write_file(self, name: str, data: bytes) -> None:
        """Write and commit a small file."""
        staged = self.stage(name, (data,))
        try:
            staged.commit()
        except BaseException:
            staged.abort()
            raise

    def _too_short(self, name: str, offset: int, wanted: int, got: int) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            explain(
                "a file of the checkpoint is truncated",
                expected=f"{wanted} bytes at offset {offset}",
                got=f"{got} bytes before the end of the file",
                where=f"{self.url}/{name}",
                todo="copy the file again from where it was saved, or use an older checkpoint",
            )
        )


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
    def __init__(self, path: Path, pieces: Iterable[bytes], folders: MadeFolders) -> None:
        # Several processes, on several machines, may write the same file at once: each has a name of its own.
        self._path, self._working = path, path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        self._committed = False
        with folders.using(path.parent, lambda: open(self._working, "wb")) as file:
            try:
                for piece in pieces:
                    file.write(piece)
                file.flush()
            except BaseException:
                self.abort()
                raise

    def commit(self) -> None:
        os.replace(self._working, self._path)
        self._committed = True

    def abort(self) -> None:
        (self._path if self._committed else self._working).unlink(missing_ok=True)


class LocalStore(Store):
    """A folder on disk. Read handles stay open, since reopening costs a round trip on network disks."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.url = str(self.root)
        self._folders = MadeFolders(self.root)
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()

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

    def stage(self, name: str, pieces: Iterable[bytes]) -> StagedFile:
        return _LocalStaged(self.root / name, pieces, self._folders)

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
        try:
            os.replace(self.root / partial_name(name), self.root / name)
        except FileNotFoundError:
            if not (self.root / name).is_file():  # else another process of this conversion did it
                raise

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


class _RemoteOutput(OutputFile):
    needs_order = True

    def __init__(self, stream: IO[bytes], name: str, remove: Callable[[], None]) -> None:
        self._stream, self._name, self._remove = stream, name, remove
        self._position = 0

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        assert offset == self._position, f"{self._name}: written at {offset}, stream is at {self._position}"
        _reach(self._name, lambda: self._stream.write(data))
        self._position += memoryview(data).nbytes

    def finish(self) -> None:
        _reach(self._name, self._stream.close)

    def abort(self) -> None:
        import fsspec

        if isinstance(self._stream, fsspec.spec.AbstractBufferedFile) and not self._stream.closed:
            # Closing would publish a torn object, and so would the finaliser of a file that is not closed.
            self._stream.discard()
            self._stream.closed = True
        else:  # published, or on a file system without uploads
            self._stream.close()
            self._remove()


class _RemoteStaged(StagedFile):
    def __init__(self, create: Callable[[], OutputFile], pieces: Iterable[bytes]) -> None:
        self._create, self._pieces = create, pieces
        self._out: OutputFile | None = None

    def commit(self) -> None:
        self._out, position = self._create(), 0
        for piece in self._pieces:
            self._out.write_at(position, piece)
            position += len(piece)
        self._out.finish()

    def abort(self) -> None:
        if self._out is not None:
            self._out.abort()


def _reach(url: str, action: Callable[[], T]) -> T:
    """Run what goes over the network.

    Raises:
        ConnectionError: for errors of the client library; OSErrors and ours as they are.
    """
    try:
        return action()
    except (OSError, VescaleError):
        raise
    except Exception as error:  # what client libraries raise has no common base
        raise ConnectionError(
            explain(
                "a remote file system cannot be used",
                expected="that it answers, and knows who asks",
                got=f"{type(error).__name__}: {error}",
                where=url,
                todo="check the URL, credentials and the network; if files were finished, go on with --resume",
            )
        ) from error


class RemoteStore(Store):
    """A prefix of an object store or any other fsspec file system."""

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self._fs, self._root, self.url = fs, root.rstrip("/"), url.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def list_files(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = _reach(self.url, lambda: self._fs.find(self._root))
        except FileNotFoundError:
            return []
        prefix = self._root.lstrip("/") + "/"
        names = (str(path).lstrip("/") for path in found)
        return sorted(name[len(prefix) :] for name in names if name.startswith(prefix))

    def size(self, name: str) -> int | None:
        try:
            info = _reach(self.url, lambda: self._fs.info(self._path(name)))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def stamp(self, name: str) -> str:
        self.required_size(name)
        info = _reach(self.url, lambda: self._fs.info(self._path(name)))
        return " ".join(str(info.get(key)) for key in ("size", "ETag", "LastModified", "mtime", "created"))

    def append(self, name: str, data: bytes) -> None:
        old = self.read_file(name) if self.size(name) is not None else b""
        self.write_file(name, old + data)

    def stage(self, name: str, pieces: Iterable[bytes]) -> StagedFile:
        return _RemoteStaged(lambda: self.create(name), pieces)

    @property
    def folders(self) -> None:
        return None

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        try:
            stop = offset + len(buffer)
            data = _reach(self.url, lambda: self._fs.cat_file(self._path(name), start=offset, end=stop))
        except FileNotFoundError:
            self.required_size(name)
            raise
        if len(data) != len(buffer):
            raise self._too_short(name, offset, len(buffer), len(data))
        buffer[:] = data

    def create(self, name: str, nbytes: int = 0) -> OutputFile:
        stream = _reach(self.url, lambda: self._fs.open(self._path(name), "wb"))
        return _RemoteOutput(stream, f"{self.url}/{name}", lambda: self.remove(name))

    def commit(self, name: str) -> None:
        """Nothing to do: closing the stream published the object."""

    @property
    def renames(self) -> bool:
        return False

    def remove(self, name: str) -> None:
        if self._fs.exists(self._path(name)):
            _reach(self.url, lambda: self._fs.rm_file(self._path(name)))


def open_store(url: str) -> Store:
    """The store for a local path or an fsspec URL.

    Raises:
        ConversionError: if no file system is known for the URL.
    """
    if "://" not in url:
        return LocalStore(url)
    import fsspec  # 0.1 s that local conversions do without

    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConversionError(
            explain(
                "cannot open this URL",
                expected="a local path or a URL whose file system fsspec knows",
                got=f"{url} ({error})",
                todo="install the package the message names (for example s3fs for s3://)",
            )
        ) from error
    if url.startswith("file://"):
        return LocalStore(root)
    return RemoteStore(fs, root, url)


def split_file(url: str) -> tuple[str, str]:
    """``folder/name`` of a file's path or URL, as (folder, name)."""
    folder, _, name = url.rpartition("/")
    return (folder or ("/" if url.startswith("/") else ".")), name
