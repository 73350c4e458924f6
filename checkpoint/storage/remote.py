"""`RemoteStorage`: object stores and all other fsspec URLs, with sequential uploads and parallel ranged reads.

Object stores have no rename and no fsync. A file is durable when its `close` has returned. The commit of a save is one
small object, which is written last. Every attempt to save writes under a new prefix, so that attempts never mix.
Listings bypass fsspec's cache, because other processes write too. After a transient error (5xx, time-out, lost
connection) the whole upload, or one part of a `MultipartWriter`, is repeated after a growing pause. A failed upload
leaves at most invisible parts. If all tries fail, a `ConnectionError` is raised: the store could not be reached, and
its content may be sound. `first_answer` finds a wrong address without these tries.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import fsspec

from vescale_fsdp.checkpoint.storage.base import (
    Buffer,
    FileInfo,
    FileReader,
    FileWriter,
    SourceError,
    Storage,
)
from vescale_fsdp.checkpoint.storage.first_answer import (
    NoAnswer,
    credentials_answer,
    first_answer,
    has_answered,
)
from vescale_fsdp.errors import ConversionError, StorageError, VescaleError, explain

_log = logging.getLogger(__name__)
T = TypeVar("T")
_TRIES = 5  # in addition to the client's own retries; the pauses add up to 3 s
_FIRST_PAUSE_S = 0.2  # doubled after each try
_PATIENCE_S = 60.0  # no try starts after this time, because some clients retry for minutes themselves
_SILENT_S = 3.0  # tries that take longer are logged
# Errors that another try would raise again.
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
# Transient errors of clients, other than OSErrors. Names instead of classes, because most clients are not installed.
_PASSING = {
    "aiohttp.client_exceptions.ClientError",
    "azure.core.exceptions.ServiceRequestError",
    "azure.core.exceptions.ServiceResponseError",
    "botocore.exceptions.ConnectionError",
    "botocore.exceptions.HTTPClientError",
    "botocore.exceptions.IncompleteReadError",
    "botocore.parsers.ResponseParserError",
    "gcsfs.retry.HttpError",
    "google.auth.exceptions.TransportError",
    "http.client.HTTPException",
    "urllib3.exceptions.HTTPError",
}
_NO_CREDENTIALS = {
    "azure.core.exceptions.ClientAuthenticationError",
    "botocore.exceptions.NoCredentialsError",
    "botocore.exceptions.PartialCredentialsError",
    "google.auth.exceptions.DefaultCredentialsError",
}
_AZURE = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_CONNECTION_STRING"
# Protocol -> what gives the client credentials.
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    **dict.fromkeys(
        ("gs", "gcs"), "GOOGLE_APPLICATION_CREDENTIALS, or NO_GCE_CHECK=true to read a public bucket"
    ),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
}
WITH_BUCKETS = (
    "s3",
    "s3a",
    "gs",
    "gcs",
    "az",
    "abfs",
    "abfss",
)  # protocols whose buckets must exist before a save
_PASSING_CODES = re.compile(  # S3's error codes after which a request may be repeated
    "SlowDown|RequestTimeout|RequestTimeTooSkewed|InternalError|ServiceUnavailable|Throttling"
)
PART_BYTES = 16 << 20  # 16 MiB; smaller files are sent in one request
_MAX_PARTS = 10_000  # S3's limit: files of more than 156 GiB get larger parts
# Number of parts that are sent at once; they take 64 MiB of memory, or more if parts are larger.
_IN_FLIGHT = 4


class _StreamWriter(FileWriter):
    """Writes a file front to back."""

    _at = 0  # offset of the next byte

    def _in_order(self, offset_bytes: int, buffers: Sequence[Buffer]) -> Iterator[memoryview]:
        """Return the buffers as bytes; raises AssertionError if they do not continue the last write."""
        if offset_bytes != self._at:
            raise AssertionError(
                f"a stream is written in order: expected byte {self._at}, got {offset_bytes}"
            )
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            yield view
            self._at += len(view)

    def _discard(self) -> None:
        """Discard the unfinished upload; may raise."""
        raise NotImplementedError

    def abort(self) -> None:
        try:
            self._discard()
        except Exception as error:  # noqa: BLE001  must not hide the error that ended the upload
            _log.info("an upload could not be discarded: %s: %s", type(error).__name__, error)


class MultipartWriter(_StreamWriter):
    """Writes a large object of an S3 store front to back, with several parts in flight, in bounded memory.

    s3fs sends one part at a time, at the speed of one connection. This writer fills the next part while up to four
    parts are sent. After a transient error, only the failed part is sent again. The object becomes visible when the
    upload is completed.

    Args:
        filesystem: the file system of s3fs.
        path: the object's path, including its bucket.
        size_bytes: the object's size, which determines the size of parts.
        retrying: repeats a call after transient errors, see `Storage.retrying`.
    """

    def __init__(
        self,
        filesystem: Any,
        path: str,
        size_bytes: int,
        retrying: Callable[[Callable[[], dict[str, Any]]], dict[str, Any]],
    ) -> None:
        bucket, key, _ = filesystem.split_path(path)
        self._filesystem, self._path, self._retrying = filesystem, path, retrying
        self._target = {"Bucket": bucket, "Key": key}
        self._part_bytes = max(PART_BYTES, -(-size_bytes // _MAX_PARTS))
        self._target["UploadId"] = self._call("create_multipart_upload")["UploadId"]
        # An executor of its own: the store's answers, in the order of the parts, complete the upload.
        self._pool = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="checkpoint-upload")
        self._parts: list[Future[dict[str, Any]]] = []
        self._filling = bytearray()

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call an S3 method for this upload, with the user's settings of s3fs and with retries."""
        store, settings = self._filesystem, (self._filesystem.s3_additional_kwargs, self._filesystem.req_kw)
        return self._retrying(lambda: store.call_s3(method, *settings, **self._target, **arguments))

    def write_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        for view in self._in_order(offset_bytes, buffers):
            while len(view):
                room = self._part_bytes - len(self._filling)
                self._filling += view[:room]
                view = view[room:]
                if len(self._filling) == self._part_bytes:
                    self._send()

    def _send(self) -> None:
        """Start to send the filled part. First waits until fewer than `_IN_FLIGHT` parts are in flight."""
        number, body = len(self._parts) + 1, bytes(self._filling)
        self._filling = bytearray()
        if number > _IN_FLIGHT:
            self._parts[number - 1 - _IN_FLIGHT].result()
        self._parts.append(self._pool.submit(self._upload, number, body))

    def _upload(self, number: int, body: bytes) -> dict[str, Any]:
        answer = self._call("upload_part", PartNumber=number, Body=body)
        # S3 expects a checksum of the part again when the upload is completed.
        checksums = {key: answer[key] for key in ("ChecksumSHA256",) if key in answer}
        return {"PartNumber": number, "ETag": answer["ETag"], **checksums}

    def close(self) -> None:
        if self._filling or not self._parts:  # an upload must have at least one part
            self._send()
        parts = [part.result() for part in self._parts]
        self._call("complete_multipart_upload", MultipartUpload={"Parts": parts})
        self._pool.shutdown()
        self._filesystem.invalidate_cache(self._path)  # s3fs does not know about the new object

    def _discard(self) -> None:
        # Before the abort, because S3 keeps parts that arrive after it.
        self._pool.shutdown(cancel_futures=True)
        self._call("abort_multipart_upload")


def _aware(time: datetime) -> datetime:
    """Return a time with a time zone; times of stores without one are in UTC."""
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _age_s(time: datetime) -> float:
    return (datetime.now(UTC) - time).total_seconds()


def _may_pass(error: Exception) -> bool:
    """Return whether an error is transient, so that another try may succeed."""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        return _may_pass(error.__cause__)  # fsspec's HTTP file system raises it for lost connections, too
    if isinstance(error, OSError):
        return not isinstance(error, _FINAL)
    names = _class_names(error)
    if "botocore.exceptions.ClientError" in names:  # a response of the store that s3fs has not translated
        return _PASSING_CODES.search(str(error)) is not None
    return not names.isdisjoint(_PASSING)


def _class_names(error: Exception) -> set[str]:
    """Return the full names of an error's class and of its base classes."""
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}


class _GaveUp(ConnectionError):
    """All tries to reach the store have failed. A type of its own, so that an outer retry does not repeat them."""


def _size_of_object(info: dict[str, Any], path: str) -> int:
    """Return the size of an object from fsspec's info; raises ValueError for a prefix of other objects."""
    if info["type"] != "file":
        raise ValueError(f"{path} is not a file but a {info['type']}")
    return int(info["size"])


class _RemoteWriter(_StreamWriter):
    def __init__(self, file: Any, remove: Callable[[], None]) -> None:
        self._file, self._remove = file, remove
        # fsspec's uploads become visible when they are closed, all other files (such as local ones) at once.
        self._is_upload = isinstance(file, fsspec.spec.AbstractBufferedFile)
        self._is_visible = not self._is_upload

    def write_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        for view in self._in_order(offset_bytes, buffers):
            # A copy: some clients keep a reference until a part is full, and training may change the tensor by then.
            self._file.write(bytes(view))

    def close(self) -> None:
        self._file.close()
        self._is_visible = True

    def _discard(self) -> None:
        # An incomplete upload stays invisible, even if `discard` fails.
        try:
            if self._is_visible:
                self._remove()
            else:
                self._file.discard()
        finally:
            if self._is_upload:
                # Marked as closed, because otherwise the garbage collector closes the file, which publishes it.
                self._file.closed = True


class _RemoteReader(FileReader):
    """Reads an object. If its size is unknown, the size is requested only after a response that is too short."""

    def __init__(self, storage: RemoteStorage, path: str, size: int | None = None) -> None:
        self._storage, self._path, self._size = storage, path, size

    @property
    def size_bytes(self) -> int:
        if self._size is None:
            self._size = _size_of_object(self._storage.ask("info", self._path), self._path)
        return self._size

    def read_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        data = self.view(offset_bytes, offset_bytes + sum(map(len, views)))
        for view in views:
            view[:] = data[: len(view)]
            data = data[len(view) :]

    def _check_end(self, stop_bytes: int) -> None:
        """Raise EOFError if the object ends before ``stop_bytes``."""
        if stop_bytes > self.size_bytes:
            raise EOFError(f"{self._path} ends at byte {self._size}")

    def view(self, start_bytes: int, stop_bytes: int) -> memoryview:
        if self._size is not None:
            self._check_end(stop_bytes)
        if stop_bytes == start_bytes:  # needs no request
            return memoryview(b"")

        def read() -> memoryview:
            data = self._storage.read_range(self._path, start_bytes, stop_bytes)
            answer = f"{len(data)} bytes of {stop_bytes - start_bytes} at byte {start_bytes} of {self._path}"
            # An HTTP server that ignores Range headers sends the whole file.
            if len(data) > stop_bytes - start_bytes:
                raise ConversionError(
                    "The server does not support reads of parts of files.",
                    expected="as many bytes as were requested",
                    got=answer,
                    where=self._storage.where,
                    todo="download the checkpoint first, or use a server that supports range requests",
                )
            if len(data) < stop_bytes - start_bytes:
                self._check_end(stop_bytes)
                # `retrying` repeats the read: only the response is short, not the object.
                raise OSError(answer)
            return memoryview(data)

        return self._storage.retrying(read)

    def close(self) -> None:
        pass


class RemoteStorage(Storage):
    """A prefix of an object store.

    Args:
        url: URL of the prefix, such as ``s3://bucket/prefix``.
        tries: maximum number of tries of each request.
        explains: whether permanent errors of the store's client become a `ConnectionError` too; otherwise they are
            raised unchanged.
        options: passed to the fsspec file system (credentials, endpoint, ..).
    """

    in_order = True
    is_shared = visible_is_durable = True
    max_gap_bytes = 1 << 20  # 1 MiB: to read and discard them costs less than the latency of another request
    abandoned_after_s = 86_400.0  # a day: object stores have no locks, so younger uploads may be in use
    write_threads = 1  # a stream has only one writer
    read_threads = far_read_threads = 8  # not limited by the cores: threads mostly wait for responses

    def __init__(self, url: str, *, tries: int = _TRIES, explains: bool = False, **options: Any) -> None:
        self._url = url.rstrip("/")
        self._tries, self._explains = tries, explains
        self._options = {"tries": tries, "explains": explains, **options}
        protocol = self._url.partition("://")[0].rpartition("::")[2]
        # Imported here, so that the time of a large package's import does not count as a wait for credentials.
        fsspec.get_filesystem_class(protocol)
        make = partial(fsspec.core.url_to_fs, self._url, **options)
        try:
            credentials_answer(make, protocol, self._url)
            self.filesystem, root = make()
        except NoAnswer as error:
            raise self._unreachable("", error, protocol) from error
        except ValueError as error:  # adlfs raises it for an account without a key
            if _CREDENTIALS.get(protocol) != _AZURE:
                raise
            raise self._unreachable("", error, protocol) from error
        self._root = root.rstrip("/")

    @property
    def where(self) -> str:
        return self._url

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def retrying(self, work: Callable[[], T]) -> T:
        return super().retrying(partial(self._try, work))

    def _try(self, work: Callable[[], T], is_first: bool = False) -> T:
        """Call ``work`` until it succeeds, and return its result.

        Args:
            is_first: whether `first_answer` logs instead of this method.

        Raises:
            ConnectionError: after the last try, instead of the transient error.
            Exception: at once, an error that another try would raise again.
        """
        started_s, is_logged = time.monotonic(), is_first
        for attempt in range(self._tries):
            try:
                return work()
            except (_GaveUp, SourceError):
                raise  # a nested call has used all its tries, or the data source has failed
            except Exception as error:  # file systems of fsspec raise errors of any class
                if not _NO_CREDENTIALS.isdisjoint(_class_names(error)):
                    raise self._unreachable("", error, self.location[0]) from error
                if not _may_pass(error):
                    # Callers handle these types themselves, such as FileNotFoundError.
                    if not self._explains or isinstance(error, (OSError, EOFError, VescaleError)):
                        raise
                    raise self._unreachable("", error) from error
                elapsed_s = time.monotonic() - started_s
                if attempt == self._tries - 1 or elapsed_s >= _PATIENCE_S:
                    raise self._unreachable(f"gave up after {attempt + 1} tries: ", error) from error
                if elapsed_s >= _SILENT_S and not is_logged:
                    _log.warning("%s: %s: %s; trying again", self._url, type(error).__name__, error)
                    is_logged = True
                # Random pauses, so that ranks whose requests failed at the same time do not repeat them together.
                time.sleep(_FIRST_PAUSE_S * 2**attempt * random.uniform(0.75, 1.25))
        raise AssertionError("the last try returns or raises")

    def _unreachable(self, effort: str, error: Exception, without: str = "") -> _GaveUp:
        """Return the error for a store that cannot be used.

        Args:
            effort: start of the text about the cause.
            without: the protocol, if credentials are missing.
        """
        if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
            error = error.__cause__  # see `_may_pass`
        return _GaveUp(
            explain(
                "A remote file system cannot be used.",
                expected="a reachable store and valid credentials",
                got=f"{effort}{type(error).__name__}: {error}",
                where=self._url,
                todo=f"set {_CREDENTIALS[without]}; see Storage in docs/launch.md"
                if without in _CREDENTIALS
                else "check the URL, the endpoint (for S3: AWS_ENDPOINT_URL), credentials and the network",
            )
        )

    def ask(self, question: str, name: str, **arguments: Any) -> Any:
        """Call the fsspec method of this name for a path, with retries. The first call checks the store's address."""
        work = partial(getattr(self.filesystem, question), name, **arguments)
        if has_answered(self.filesystem, self._url):
            return self.retrying(work)
        try:
            trying = partial(self._try, work, is_first=True)
            return first_answer(trying, self.filesystem, self.location[0], self._url)
        except NoAnswer as error:
            raise self._unreachable("", error) from error

    def read_range(self, path: str, start_bytes: int, stop_bytes: int) -> bytes:
        """Read a range of an object by one request, without retries."""
        return bytes(self.filesystem.cat_file(path, start=start_bytes, end=stop_bytes))

    def child(self, name: str) -> RemoteStorage:
        return RemoteStorage(f"{self._url}/{name}", **self._options)

    def create(self, name: str, size_bytes: int) -> FileWriter:
        if size_bytes > PART_BYTES and self.location[0] == "s3":  # `MultipartWriter` calls methods of s3fs
            return MultipartWriter(self.filesystem, self._path(name), size_bytes, self.retrying)
        file = self.filesystem.open(self._path(name), "wb", block_size=PART_BYTES)
        return _RemoteWriter(file, lambda: self.remove(name))

    def open_file(self, name: str) -> FileReader:
        self.filesystem.invalidate_cache()  # otherwise the size may be that of an older object
        size = _size_of_object(self.ask("info", self._path(name)), self._path(name))
        return _RemoteReader(self, self._path(name), size)

    def _reader(self, name: str) -> FileReader:
        return _RemoteReader(self, self._path(name))

    def read_small(self, name: str, *, limit_bytes: int) -> bytes:
        path = self._path(name)

        def read() -> bytes:
            self.filesystem.invalidate_cache()  # in every try: the object may be replaced between two tries
            size = _size_of_object(self.ask("info", path), path)
            if size > limit_bytes:
                raise ValueError(f"{path} is larger than {limit_bytes} bytes")
            data = bytes(self.ask("cat_file", path))
            # A short response, or the object was replaced between the two requests: `retrying` tries again.
            if len(data) != size:
                raise OSError(f"{path} gave {len(data)} bytes of {size}")
            return data

        return self.retrying(read)

    def commit(self, name: str, data: bytes, *, replace: bool) -> None:
        if not replace and self.exists(name):
            raise FileExistsError(self._path(name))
        # With "create", stores with conditional writes refuse to replace; for all others the check above must do.
        mode = "overwrite" if replace else "create"
        try:
            self.retrying(lambda: self.filesystem.pipe_file(self._path(name), data, mode=mode))
        except FileNotFoundError as error:
            if self.location[0] not in WITH_BUCKETS:
                raise
            raise self._no_bucket() from error

    def exists(self, name: str) -> bool:
        self.filesystem.invalidate_cache()  # other processes may have written or removed the object
        try:
            self.ask(
                "info", self._path(name)
            )  # not "exists", which some file systems answer without a connection
        except FileNotFoundError:
            return False
        return True

    def list_folder(self, name: str) -> list[str]:
        self.filesystem.invalidate_cache()  # other processes may have written or removed objects
        try:
            paths = self.ask("ls", self._path(name), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Some stores append a slash to the names of folders.
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    @property
    def location(self) -> tuple[str, ...]:
        protocol = self.filesystem.protocol  # the same for s3:// and s3a://, unlike the URL's protocol
        name = protocol if isinstance(protocol, str) else protocol[0]
        return (name, *filter(None, self._root.split("/")))

    def list_files(self) -> list[str]:
        self.filesystem.invalidate_cache()  # other processes may have written or removed objects
        try:
            paths = self.ask("find", self._root)
        except FileNotFoundError:
            return []
        prefix = self._root.lstrip("/") + "/"  # some file systems begin paths with a slash, some do not
        names = (str(path).lstrip("/") for path in paths)
        return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def info(self, name: str) -> FileInfo | None:
        try:
            info = self.ask("info", self._path(name))
        except FileNotFoundError:
            return None
        # Each store names its change marks differently; absent keys become "None".
        stamp = " ".join(str(info.get(key)) for key in ("size", "ETag", "LastModified", "mtime", "created"))
        return FileInfo(int(info["size"]), stamp) if info["type"] == "file" else None

    def append(self, name: str, data: bytes) -> None:
        # Object stores cannot append: the object is written again as a whole.
        old = self.read(name) if self.size(name) is not None else b""
        self.commit(name, old + data, replace=True)

    def sync_folder(self, name: str) -> None:
        """Do nothing: an object is durable once it exists."""

    def check_bucket(self) -> None:
        if self.location[0] in WITH_BUCKETS:
            self.check_root()

    def check_root(self) -> str | None:
        bucket = self._root.lstrip("/").partition("/")[0]
        try:
            # Some stores list a missing bucket as empty, so list the bucket itself then.
            # Other protocols, such as memory://, create their folders when they write.
            if not self.list_folder("") and self.location[0] in WITH_BUCKETS:
                self.ask("ls", bucket, detail=False)
        except PermissionError as error:
            # A user without the right to list the bucket may still be allowed to write to one of its prefixes.
            _log.info("%s may not be listed: %s", bucket, error)
        except FileNotFoundError:
            # `from None`: fsspec's error adds nothing, and each rank would print its 60-line traceback.
            raise self._no_bucket() from None
        return None

    def _no_bucket(self) -> StorageError:
        """Return the error for a bucket that does not exist."""
        bucket = self._root.lstrip("/").partition("/")[0]
        return StorageError(
            "The bucket does not exist.",
            expected="a prefix of a bucket that exists",
            got=f"no bucket {bucket!r}",
            where=self.where,
            todo="make the bucket, or pass another path",
        )

    def is_older(self, name: str, seconds: float) -> bool:
        self.filesystem.invalidate_cache()
        objects = self.retrying(lambda: self.filesystem.find(self._path(name), detail=True))
        # Each store has another key for the time of the last change.
        times = [
            info.get(key)
            for info in objects.values()
            for key in ("LastModified", "mtime", "updated", "created")
        ]
        known = [time for time in times if isinstance(time, datetime)]
        return seconds <= 0 or (bool(known) and _age_s(max(map(_aware, known))) > seconds)

    def remove_abandoned(self, folders: Sequence[str], older_than_s: float) -> list[str]:
        """Remove open uploads of S3; Google and Azure remove open uploads themselves within a week."""
        if self.location[0] != "s3":
            return []
        bucket, prefix, _ = self.filesystem.split_path(f"{self._root}/")
        query: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
        removed: list[str] = []
        while True:  # one page of up to 1,000 uploads per response
            answer = self.retrying(lambda: self.filesystem.call_s3("list_multipart_uploads", **query))
            for upload in answer.get("Uploads", ()):
                if older_than_s > 0 and _age_s(_aware(upload["Initiated"])) <= older_than_s:
                    continue
                target = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                self.retrying(partial(self.filesystem.call_s3, "abort_multipart_upload", **target))
                removed.append(upload["Key"].removeprefix(prefix))
            if not answer.get("IsTruncated"):
                return removed
            query["KeyMarker"] = answer["NextKeyMarker"]
            query["UploadIdMarker"] = answer["NextUploadIdMarker"]

    def remove(self, name: str) -> None:
        self.filesystem.invalidate_cache()
        try:
            self.retrying(lambda: self.filesystem.rm(self._path(name), recursive=True))
        except FileNotFoundError:
            return
