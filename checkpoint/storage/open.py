"""How a path or URL finds its storage: on disk, or wherever fsspec knows the way."""

from __future__ import annotations

import os

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import ArgumentError, ConversionError


def open_storage(path: str | os.PathLike[str] | Storage, *, neighbours: int = 1) -> Storage:
    """The storage behind a path, a URL (``s3://``, ``gs://``, ``memory://``, ..) or a storage itself.

    Args:
        path: what the user gave.
        neighbours: ranks that share the machine's cores.
    """
    if isinstance(path, Storage):
        return path
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str) or not text:
        raise ArgumentError(
            "This is no path.", expected="a folder or a URL, as str or os.PathLike", got=repr(path)
        )
    folder = _on_disk(text)
    if folder is not None:
        return LocalStorage(folder, neighbours=neighbours)
    from vescale_fsdp.checkpoint.storage.remote import RemoteStorage  # 0.1 s that local folders do without

    return RemoteStorage(text)


def open_store(url: str) -> Storage:
    """The storage of a converter: files of a folder are read and written whole, and none is synced.

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
    """The folder that a path or URL names, if it is on disk."""
    protocol, separator, folder = url.partition("://")
    if not separator:
        return url
    return folder if protocol in ("file", "local") else None


def open_parent(url: str) -> tuple[Storage, str]:
    """The storage of the folder that a file is in, as `open_store`, and the file's name there."""
    folder, _, name = url.rpartition("/")
    return open_store(folder or ("/" if url.startswith("/") else ".")), name
