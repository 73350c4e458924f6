"""`MultipartWriter`: a large object of an S3 store, several of its parts on the way at once, in bounded memory.

s3fs has a file that sends each part when it is full and waits for the answer: one connection's speed. Here the next
parts are filled meanwhile. Nothing is visible before the last call; what meets a passing error is sent again alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from vescale_fsdp.checkpoint.storage.base import Buffer, FileWriter

PART_BYTES = 16 << 20  # 16 MiB
_MAX_PARTS = 10_000  # S3 takes no more: larger files have larger parts
_IN_FLIGHT = 4
_log = logging.getLogger(__name__)


class _Retrying(Protocol):
    def __call__(self, work: Callable[[], Any]) -> Any: ...


class MultipartWriter(FileWriter):
    """Written from front to back.

    Args:
        filesystem: s3fs's.
        path: of the object, with its bucket.
        size_bytes: that there will be.
        retrying: does work again where what stopped it may pass.
    """

    def __init__(self, filesystem: Any, path: str, size_bytes: int, retrying: _Retrying) -> None:
        bucket, key, _ = filesystem.split_path(path)
        self._filesystem, self._path, self._retrying = filesystem, path, retrying
        self._target = {"Bucket": bucket, "Key": key}
        self._part_bytes = max(PART_BYTES, -(-size_bytes // _MAX_PARTS))
        self._target["UploadId"] = self._call("create_multipart_upload")["UploadId"]
        self._pool = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="checkpoint-upload")
        self._parts: list[Future[dict[str, Any]]] = []
        self._filling = bytearray()
        self._at = 0

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        store, settings = self._filesystem, (self._filesystem.s3_additional_kwargs, self._filesystem.req_kw)
        return self._retrying(lambda: store.call_s3(method, *settings, **self._target, **arguments))

    def write_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        if offset_bytes != self._at:
            raise AssertionError(f"written in order only: at {self._at}, got {offset_bytes}")
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            self._at += len(view)
            while len(view):
                room = self._part_bytes - len(self._filling)
                self._filling += view[:room]
                view = view[room:]
                if len(self._filling) == self._part_bytes:
                    self._send()

    def _send(self) -> None:
        """Start to send what has been filled, once few enough parts are on their way."""
        number, body = len(self._parts) + 1, bytes(self._filling)
        self._filling = bytearray()
        if number > _IN_FLIGHT:
            self._parts[number - 1 - _IN_FLIGHT].result()
        self._parts.append(self._pool.submit(self._upload, number, body))

    def _upload(self, number: int, body: bytes) -> dict[str, Any]:
        answer = self._call("upload_part", PartNumber=number, Body=body)
        checksums = {key: answer[key] for key in ("ChecksumSHA256",) if key in answer}
        return {"PartNumber": number, "ETag": answer["ETag"], **checksums}

    def close(self) -> None:
        if self._filling or not self._parts:
            self._send()
        parts = [part.result() for part in self._parts]
        self._call("complete_multipart_upload", MultipartUpload={"Parts": parts})
        self._pool.shutdown()
        self._filesystem.invalidate_cache(self._path)

    def abort(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        try:
            self._call("abort_multipart_upload")
        except Exception as error:  # noqa: BLE001  what ended the upload is the error to raise
            _log.info("an upload could not be dropped: %s: %s", type(error).__name__, error)
