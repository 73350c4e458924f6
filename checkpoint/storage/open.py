"""The storage of a path or URL: a local folder, or a store that fsspec can open."""

from __future__ import annotations

import os

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import ArgumentError, ConversionError


def open_storage(path: str | os.PathLike[str] | Storage, *, neighbours: int = 1) -> Storage:
    """The storage of a path or URL (``s3://``, ``gs://``, ``memory://``, ..); a storage is returned as it is.

    Args:
        neighbours: ranks that share the machine's cores.
    """
    if isinstance(path, Storage):
        return path
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str) or not text:
        raise ArgumentError(
            "This is not a path.", expected="a folder or a URL, as str or os.PathLike", got=repr(path)
        )
    folder = _on_disk(text)
    if folder is not None:
        return LocalStorage(folder, neighbours=neighbours)
    from vescale_fsdp.checkpoint.storage.remote import RemoteStorage  # importing fsspec takes 0.1 s

    return RemoteStorage(text)


def open_store(url: str) -> Storage:
    """The storage of a conversion: local files are read and written whole, and never synced.

    Raises:
        ConversionError: if no file system is known for the URL.
    """
    folder = _on_disk(url)
    if folder is not None:
        return LocalStorage(folder, durable=False, whole_files=True)
    from vescale_fsdp.checkpoint.storage.remote import RemoteStorage

    try:
        return RemoteStorage(url, explains=True)
    except (ValueError, ImportError) as error:
        raise ConversionError(
            "This URL cannot be opened.",
            expected="a local path or a URL whose file system fsspec knows",
            got=f"{url} ({error})",
            todo="install the package the message names (for example s3fs for s3://)",
        ) from error


def _on_disk(url: str) -> str | None:
    """The local folder of a path or URL; None for other URLs."""
    protocol, separator, folder = url.partition("://")
    if not separator:
        return url
    return folder if protocol in ("file", "local") else None


def open_parent(url: str) -> tuple[Storage, str]:
    """The storage of a file's folder, as `open_store` opens it, and the file's name there."""
    folder, _, name = url.rpartition("/")
    return open_store(folder or ("/" if url.startswith("/") else ".")), name
