"""Forms whose folder is a checkpoint of this project: a manifest, published last, tells what lies in it and where."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from contextlib import ExitStack
from typing import NoReturn

from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.saving.form import Form, told_if_busy
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import CheckpointError


class ManifestForm(Form):
    """Ranks' files or arrays in ``data-<save_id>/``, and a manifest beside that folder."""

    name: str

    def arguments(self) -> Json:
        """The name says all."""
        return self.name

    def claim(self, storage: Storage, held: ExitStack, *, overwrite: bool) -> None:
        """Lock the folder, and refuse one with a manifest."""
        with told_if_busy(storage):
            held.enter_context(storage.lock())
        if not overwrite and storage.exists(MANIFEST_NAME):
            raise CheckpointError(
                "The path already holds a checkpoint.",
                expected="a path without a manifest",
                got=MANIFEST_NAME,
                where=storage.where,
                todo="save to another path, or pass overwrite=True",
            )

    def clear_away(self, storage: Storage, save_id: str) -> None:
        """The attempt's own folder; older data stays."""
        if save_id:
            storage.remove(f"data-{save_id}")

    @abstractmethod
    def finish(self, storage: Storage, manifest: Manifest) -> None:
        """On one rank, when all have written: what is left to write before the manifest is published."""


def commit_manifest(
    storage: Storage,
    manifest: Manifest,
    *,
    form: ManifestForm,
    replace: bool,
    check_files: bool = True,
) -> None:
    """Check that every rank's file is there, publish the manifest, and remove what older attempts left.

    Raises:
        CheckpointError: if a file is missing, or a manifest exists that must not be replaced.
    """
    folder = f"data-{manifest.save_id}"
    try:
        present = set(storage.list_folder(folder))
        wanted = [manifest.file_name(rank).rpartition("/")[2] for rank in range(manifest.world_size)]
        missing = [name for name in wanted if name not in present] if check_files else []
        # Some stores list late what they give at once to who asks for it by name.
        missing = [name for name in missing if not storage.exists(f"{folder}/{name}")]
        if missing:
            raise CheckpointError(
                "A rank's file is not where it was written.",
                expected=f"{manifest.world_size} files in {folder}",
                got=f"{len(missing)} missing, first {missing[0]}",
                where=storage.where,
                todo="make sure that all ranks see the same file system",
            )
        form.finish(storage, manifest)
        storage.sync_folder(folder)  # the names of all files
        storage.sync_folder("")
    except BaseException as error:
        error.add_note(f"nothing was committed: {storage.where} is as it was before")
        raise
    _publish(storage, manifest.to_bytes(), replace)
    try:
        for name in storage.list_folder(""):
            if name.startswith("data-") and name != folder:
                storage.remove(name)
    except Exception as error:  # noqa: BLE001  the next save to this path tries again
        warnings.warn(
            f"{storage.where} is saved; what an older save left there could not be removed: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
    except BaseException as error:
        error.add_note(f"{storage.where} is saved and durable")
        raise


def _publish(storage: Storage, data: bytes, replace: bool) -> None:
    """Commit the manifest. After an error, look whether it is there, and say so with the error."""
    try:
        storage.commit(MANIFEST_NAME, data, replace=replace)
    except BaseException as error:
        found = _published(storage, data)
        if isinstance(error, Exception) and found == data:
            # The answer was lost, or a link that an NFS server had made before it was asked again.
            if storage.visible_is_durable:
                return
            if isinstance(error, FileExistsError):
                storage.sync_folder("")
                return
        if isinstance(error, FileExistsError) and found != data:
            raise CheckpointError(
                "Another job has committed a checkpoint to this path meanwhile.",
                expected="no manifest",
                got=MANIFEST_NAME,
                where=storage.where,
                todo="save to another path",
            ) from error
        _raise_with(error, _outcome(storage, found, data))


def _published(storage: Storage, data: bytes) -> bytes | Exception:
    """The manifest that readers find now, or why it cannot be ``data``."""
    try:
        return storage.read_small(MANIFEST_NAME, limit_bytes=len(data))
    except Exception as error:  # noqa: BLE001  the error behind which this is asked is the one to raise
        return error


def _outcome(storage: Storage, found: bytes | Exception, data: bytes) -> str:
    if found == data and storage.visible_is_durable:
        return f"{storage.where} holds the new checkpoint"
    if found == data:
        return (
            f"{storage.where} holds the new checkpoint, whole, but the disk did not confirm it: it may be gone after "
            "a loss of power. Save again to be sure"
        )
    if isinstance(found, bytes | FileNotFoundError | ValueError):  # too large to be ours
        return f"nothing was committed: {storage.where} is as it was before"
    return f"whether {storage.where} holds the new checkpoint is unknown: {type(found).__name__}: {found}"


def _raise_with(error: BaseException, outcome: str) -> NoReturn:
    """Raise an error again with what has become of the checkpoint: in the system's own text, else in a note."""
    if isinstance(error, OSError) and error.errno and type(OSError(error.errno, "")) is type(error):
        raise OSError(error.errno, f"{error.strerror}; {outcome}") from error
    error.add_note(outcome)
    raise error
