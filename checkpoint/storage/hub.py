"""Repositories of the Hugging Face Hub, by huggingface_hub's own file system: ``hf://org/model[@revision][/folder]``.

A storage is of one commit: the revision is resolved when it is opened, since a branch may move between two requests.
`RemoteStorage` then reads ranges of files, so nothing is written to the disk, and each rank reads only its own share.

With ``HF_HUB_OFFLINE=1``, as for huggingface_hub, files come from its cache, which a download has filled before. The
token is huggingface_hub's, too: ``HF_TOKEN``, or the one that ``hf auth login`` has stored.

The grammar is that of `huggingface_hub.HfFileSystem`; ``datasets/org/name`` is a repository of another type.
"""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import unquote

import huggingface_hub
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from vescale_fsdp.checkpoint.storage.base import FileWriter, Storage
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.checkpoint.storage.remote import RemoteStorage
from vescale_fsdp.errors import StorageError

# A name of a revision has no slashes, or has them as %2F; the Hub's own references are the exceptions.
_URL = re.compile(
    r"hf://(?:(?P<folder>models|datasets|spaces)/)?(?P<id>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/pr/\d+|refs/convert/\w+|[^/]+))?(?:/(?P<within>.*))?"
)


class HubStorage(RemoteStorage):
    """Files of one commit of a repository; read only.

    Attributes:
        revision: the commit, 40 hexadecimal digits.
    """

    def __init__(self, url: str, *, revision: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.revision = revision
        self._options["revision"] = revision  # for `child`

    def child(self, name: str) -> RemoteStorage:
        return HubStorage(f"{self._url}/{name}", **self._options)

    def read_range(self, path: str, start_bytes: int, stop_bytes: int) -> bytes:
        # Without a cache: huggingface_hub's would read 5 MiB more.
        return bytes(self.filesystem.cat_file(path, start=start_bytes, end=stop_bytes, cache_type="none"))

    def create(self, name: str, size_bytes: int) -> FileWriter:
        raise self._read_only()

    def commit(self, name: str, data: bytes, *, replace: bool) -> None:
        raise self._read_only()

    def check_root(self) -> str | None:
        return "a commit of the Hugging Face Hub cannot be changed"

    def _read_only(self) -> StorageError:
        return StorageError(
            "A commit of the Hugging Face Hub cannot be changed.",
            expected="a folder, or the URL of an object store",
            got=self.where,
            where=self.where,
            todo="write to a folder first; vescale-convert to-hf SRC OUT --push org/model uploads it as one commit",
        )


def open_hub(url: str, **options: Any) -> Storage:
    """Open a repository at one commit.

    Args:
        url: ``hf://org/model[@revision][/folder]``; without a revision the head of ``main``.
        options: as for `RemoteStorage`.

    Raises:
        StorageError: if there is no such repository or revision, the token may not read it, or the cache lacks it; if
            the URL names no repository.
        ConnectionError: if the Hub cannot be reached.
    """
    parts = _URL.fullmatch(url)
    if parts is None:
        raise StorageError(
            "This URL names no repository of the Hugging Face Hub.",
            expected="hf://org/model, hf://org/model@revision or hf://org/model/folder",
            got=url,
            where=url,
            todo="write the owner and the name, such as hf://openai-community/gpt2",
        )
    if huggingface_hub.is_offline_mode():
        return _open_cached(url, parts)
    asking = RemoteStorage(url, **options)

    def ask() -> tuple[str, str]:
        try:
            found = HfFileSystem().resolve_path(url)
            info = HfApi().repo_info(found.repo_id, revision=found.revision, repo_type=found.repo_type)
        except (
            FileNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
            GatedRepoError,
            HFValidationError,
        ) as error:
            cause = error.__cause__ or error  # the file system raises FileNotFoundError from the Hub's error
            raise StorageError(
                "This repository cannot be read.",
                expected="hf://org/model or hf://org/model@revision, and a token that may read it",
                got=f"{type(cause).__name__}: {str(cause).strip().splitlines()[-1]}",
                where=url,
                todo="check the id and the revision; for a private or gated one set HF_TOKEN, or run hf auth login",
            ) from error
        folder = {"model": "", "dataset": "datasets/", "space": "spaces/"}[found.repo_type]
        within = f"/{found.path_in_repo}" if found.path_in_repo else ""
        assert info.sha is not None
        return f"hf://{folder}{found.repo_id}@{info.sha}{within}", info.sha

    pinned, commit = asking.retrying(ask)
    return HubStorage(pinned, revision=commit, **options)


def _open_cached(url: str, parts: re.Match[str]) -> Storage:
    """Open the folder of a repository in huggingface_hub's cache; no request is made."""
    repository, repo_type = parts["id"], (parts["folder"] or "models").removesuffix("s")
    revision = None if parts["revision"] is None else unquote(parts["revision"])
    try:
        folder = huggingface_hub.snapshot_download(
            repository, repo_type=repo_type, revision=revision, local_files_only=True
        )
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise StorageError(
            "This repository is not in the cache.",
            expected="a repository that was downloaded before, because HF_HUB_OFFLINE is set",
            got="no such commit in the cache",
            where=url,
            todo=f"run hf download {repository} --repo-type {repo_type} --revision {revision or 'main'} on a machine "
            "with a network, or unset HF_HUB_OFFLINE",
        ) from error
    return LocalStorage(os.path.join(folder, parts["within"]) if parts["within"] else folder)
