"""What a path or URL of the user names: the store of a folder, the folder and name of a file."""

from __future__ import annotations

from vescale_fsdp.conversion.local_store import LocalStore
from vescale_fsdp.conversion.store import Store
from vescale_fsdp.errors import ConversionError, explain

__all__ = ["open_store", "split_file"]


def open_store(url: str) -> Store:
    """The store for a local path or an fsspec URL.

    Raises:
        ConversionError: if no file system is known for the URL.
    """
    if "://" not in url:
        return LocalStore(url)
    import fsspec  # 0.1 s that local conversions do without
    from fsspec.implementations.local import LocalFileSystem

    from vescale_fsdp.conversion.remote_store import RemoteStore

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
    if isinstance(fs, LocalFileSystem):  # file://, local://
        return LocalStore(root)
    return RemoteStore(fs, root, url)


def split_file(url: str) -> tuple[str, str]:
    """``folder/name`` of a file's path or URL, as (folder, name)."""
    folder, _, name = url.rpartition("/")
    return (folder or ("/" if url.startswith("/") else ".")), name
