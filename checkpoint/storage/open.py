"""Open the storage of a path or URL: a local folder, or a store that fsspec supports."""

from __future__ import annotations

import os
import re
from typing import Any

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import ArgumentError, StorageError

# The owner and the name, as in "org/model". Not paths such as ../model.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# The Hub's own references have slashes: hf://org/model@refs/pr/3.
_REPOSITORY = re.compile(r"hf://((models|datasets|spaces)/)?[^/]+/[^/]+(@refs/(pr/\d+|convert/\w+))?")


def open_storage(path: str | os.PathLike[str] | Storage, *, neighbors: int = 1) -> Storage:
    """Open the storage of a path or URL (``s3://``, ``gs://``, ``hf://``, ..) for saves and loads.

    Args:
        path: the path or URL. A `Storage` is returned unchanged.
        neighbors: number of ranks that share the machine's cores.

    Raises:
        ArgumentError: if ``path`` is not a path.
        StorageError: if fsspec does not know the URL's protocol, or the protocol's package is not installed.
        ConnectionError: if the store's file system cannot be made without credentials.
    """
    if isinstance(path, Storage):
        return path
    text = checked_path(path)
    folder = _on_disk(text)
    return _open_url(text) if folder is None else LocalStorage(folder, neighbors=neighbors)


def checked_path(path: object) -> str:
    """Return a path or URL as a text.

    Raises:
        ArgumentError: if ``path`` is not a path, or is empty.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str) or not text:
        raise ArgumentError(
            "This is not a path.",
            expected="a folder or a URL, as str or os.PathLike",
            got=repr(path) if isinstance(path, str) else path_text(path),
            # torch.save and dcp.save take the state first.
            todo="pass the path first: save(path, state), load(path, state), CheckpointManager(root)",
            where="path=.., root=..",
        )
    return text


def path_text(path: object) -> str:
    """Return a path or URL as a text for messages; for another object its type, since it may be a whole state."""
    if isinstance(path, Storage):
        return path.where
    return str(path) if isinstance(path, (str, os.PathLike)) else f"a value of type {type(path).__name__}"


def open_store(url: str) -> Storage:
    """Open the storage of a path or URL for a conversion, which reads and writes local files whole, without fsync.

    Raises:
        StorageError: as `open_storage`.
    """
    folder = _on_disk(url)
    if folder is None:
        return _open_url(url, explains=True)
    return LocalStorage(folder, durable=False, whole_files=True)


def how_to_download(path: str) -> str | None:
    """Return advice for a path that does not exist but may be the id of a repository on the Hugging Face Hub."""
    name = os.path.relpath(path) if os.path.isabs(path) else path
    if _HUB_ID.fullmatch(name) is None or os.path.exists(name.partition("/")[0]):
        return None
    return f"for a repository on the Hub, pass hf://{name}"


def _on_disk(url: str) -> str | None:
    """Return the local folder of a path or of a ``file://`` URL; None for all other URLs."""
    protocol, separator, folder = url.partition("://")
    if not separator:
        return url
    return folder if protocol in ("file", "local") else None


def _open_url(url: str, **options: Any) -> Storage:
    """Open a URL with fsspec; ``options`` are those of `RemoteStorage`."""
    from vescale_fsdp.checkpoint.storage.remote import WITH_BUCKETS, RemoteStorage  # late: fsspec takes 0.1 s

    protocol, _, rest = url.partition("://")
    if protocol == "hf":
        return _open_hub(url, **options)
    if protocol in WITH_BUCKETS and not rest.strip("/"):
        raise StorageError(
            "The URL names no bucket.",
            expected=f"{protocol}://BUCKET/PATH",
            got=url,
            where=url,
            todo=f"write the bucket's name after {protocol}://",
        )
    try:
        return RemoteStorage(url, **options)
    except (ValueError, ImportError) as error:
        # fsspec raises these for an unknown protocol and for a package that is not installed.
        install = (
            f"the package that brings {protocol}:// to fsspec, such as s3fs for s3:// and gcsfs for gs://"
        )
        raise StorageError(
            f"URLs that begin with {protocol}:// cannot be opened.",
            expected="a local path, or a URL of a protocol that fsspec knows, with its package installed",
            got=f"{type(error).__name__}: {error}",
            where=url,
            todo=f"check the spelling, or install {install}",
        ) from error


def _open_hub(url: str, **options: Any) -> Storage:
    """Open a repository of the Hugging Face Hub, see `vescale_fsdp.checkpoint.storage.hub`."""
    try:
        from vescale_fsdp.checkpoint.storage.hub import open_hub  # huggingface_hub is optional
    except ImportError as error:
        raise StorageError(
            "URLs that begin with hf:// cannot be opened.",
            expected="the package huggingface_hub",
            got=f"{type(error).__name__}: {error}",
            where=url,
            todo='install it: pip install "vescale-fsdp[hf]"',
        ) from error
    return open_hub(url, **options)


def open_parent(url: str) -> tuple[Storage, str]:
    """Open the storage of a file's folder, as `open_store`; returns it with the file's name in the folder."""
    folder, _, name = url.rpartition("/")
    if _REPOSITORY.fullmatch(url):  # it is in no folder, and has no file of its own name
        folder = url
    # An empty folder: the file is in the root of the file system, or in the working directory.
    return open_store(folder or ("/" if url.startswith("/") else ".")), name
