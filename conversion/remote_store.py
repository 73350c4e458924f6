"""Object stores and other fsspec file systems: files are streams that appear when they are closed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import IO, Any, TypeVar

from vescale_fsdp.conversion.store import OutputFile, StagedFile, Store
from vescale_fsdp.errors import ConversionError, VescaleError, explain

__all__ = ["RemoteStore"]

T = TypeVar("T")


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

    def commit(self) -> None:
        out, position = self._create(), 0
        try:
            for piece in self._pieces:
                out.write_at(position, piece)
                position += len(piece)
            out.finish()
        except BaseException:
            out.abort()
            raise

    def abort(self) -> None:
        """Nothing to do: there is nothing before the commit."""


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

    @property
    def place(self) -> tuple[str, ...]:
        protocol = self._fs.protocol  # s3a is s3
        name = protocol if isinstance(protocol, str) else protocol[0]
        return (name, *(part for part in self._root.split("/") if part))

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

    def stage(self, name: str, pieces: Iterable[bytes], owner: str = "") -> StagedFile:
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
        if len(data) > len(buffer):
            raise ConversionError(
                explain(
                    "the server does not give parts of files",
                    expected=f"{len(buffer)} bytes at offset {offset}",
                    got=f"{len(data)} bytes",
                    where=f"{self.url}/{name}",
                    todo="download the checkpoint first, or use a server that knows range requests",
                )
            )
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
