"""`NativeForm`: writes a live state as a native checkpoint; each rank writes one file, then one publishes the manifest.

write       every rank: several threads hash stripes and write them while they are in the cache
commit      one rank: check that all files exist, sync the folder, publish ``manifest.json``, remove older data
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch

from vescale_fsdp.checkpoint.manifest.file_names import (
    ARRAYS_NODE,
    CHECKPOINT_NODE,
    MANIFEST_NAME,
    ZARR_NAME,
    manifest_file,
)
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile, pack_table
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, carrier_of
from vescale_fsdp.checkpoint.native.form import Commit, Form, RankShare, lock_errors, root_errors
from vescale_fsdp.checkpoint.ranks.threads import for_each
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.state.host_copies import CopyStream, PinnedSlots, copy_stream_of
from vescale_fsdp.checkpoint.storage.base import Buffer, Storage
from vescale_fsdp.checkpoint.storage.checksums import RunningChecksum, checksum_of
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.errors import CheckpointError, callers_level
from vescale_fsdp.layout.geometry import Range, boxes_of_range, round_up

_RUN_BYTES = 4 << 20  # 4 MiB: consecutive stripes that one thread writes at a time
_ALIGN_BYTES = 64  # a multiple of every item size, for views of a shared buffer with any dtype


class NativeForm(Form):
    """``data-<save_id>/`` with one file per rank, and a manifest next to that folder."""

    name = "native"
    has_manifest: ClassVar[bool] = True

    def arguments(self) -> Json:
        """Return the form's name; there are no options."""
        return self.name

    def claim(self, storage: Storage, held: ExitStack, *, overwrite: bool) -> None:
        """Lock the folder. Raises CheckpointError if it has a manifest that must not be replaced."""
        with lock_errors(storage):
            held.enter_context(storage.lock())
        # Checked under the lock: no other job can commit afterward.
        if not overwrite and (old := manifest_file(storage)) is not None:
            raise CheckpointError(
                "The path already holds a checkpoint.",
                expected="a path without a manifest",
                got=old,
                where=storage.where,
                todo="save to another path, or pass overwrite=True",
            )

    def write(self, plan: Callable[[], Manifest], share: RankShare) -> Commit:
        """Plan the files, and write this rank's file."""
        doing = f"writing to {share.storage.where}"
        with share.coordinator.together(doing), root_errors(share.storage):
            with gc_paused():  # planning creates many objects and no cycles
                manifest = plan()
                file = RankFile(manifest, share.coordinator.rank)
                share.check_room(file.total_bytes if share.every_node else manifest.num_bytes)
                image = FileImage(file, share.locals_by_name, share.blob)
            write_rank_file(share.storage, image, share.meter)
        run = partial(
            self.commit,
            share.storage,
            manifest,
            replace=share.replace,
            check_files=not share.every_node,
            sealed=share.sealed,
        )
        return Commit(manifest.num_bytes, run)

    def commit(
        self,
        storage: Storage,
        manifest: Manifest,
        *,
        replace: bool,
        check_files: bool = True,
        sealed: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    ) -> None:
        """Publish the manifest, and remove the data of older saves.

        Args:
            check_files: check that every rank's file exists; False if the storage has the files of one node only.
            sealed: see `RankShare`.

        Raises:
            CheckpointError: if a file is missing, or a manifest exists that must not be replaced.
        """
        folder = manifest.files_folder
        try:
            if check_files:
                _check_files(storage, manifest, folder)
            # Names must be durable before the manifest: those of the files, then that of their folder.
            storage.sync_folder(folder)
            storage.sync_folder("")
        except BaseException as error:  # Ctrl-C too: the note says what the disk contains
            error.add_note(f"nothing was committed: {storage.where} is as it was before")
            raise
        _publish(storage, sealed(manifest).to_bytes(), replace)
        try:
            # Only after the commit: until then, older data was the checkpoint.
            names = storage.list_folder("")
            replaced_arrays = (CHECKPOINT_NODE, ARRAYS_NODE, ZARR_NAME) if CHECKPOINT_NODE in names else ()
            for name in names:
                if (name.startswith("data-") and name != folder) or name in replaced_arrays:
                    storage.remove(name)
        except Exception as error:  # noqa: BLE001  not fatal: the next save to this path tries again
            warnings.warn(
                f"{storage.where} is saved; data of an older save could not be removed: "
                f"{type(error).__name__}: {error}",
                stacklevel=callers_level(),
            )
        except BaseException as error:  # Ctrl-C: the user must know that the save is complete
            error.add_note(f"{storage.where} is saved and durable")
            raise

    def clear_away(self, storage: Storage, save_id: str) -> None:
        """Remove the attempt's own data folder; the data of an older checkpoint stays."""
        if save_id:
            storage.remove(f"data-{save_id}")


def _check_files(storage: Storage, manifest: Manifest, folder: str) -> None:
    """Raise CheckpointError if a rank's file is missing."""
    listed = set(storage.list_folder(folder))
    names = [manifest.file_name(rank) for rank in range(manifest.world_size)]
    # Files that are not listed are also looked up by name, because some object stores list new files late.
    missing = [name for name in names if name.rpartition("/")[2] not in listed and not storage.exists(name)]
    if missing:
        raise CheckpointError(
            "A file that a rank has written is missing.",
            expected=f"{manifest.world_size} files in {folder}",
            got=f"{len(missing)} missing, first {missing[0].rpartition('/')[2]}",
            where=storage.where,
            todo="make sure that all ranks see the same file system",
        )


def _publish(storage: Storage, data: bytes, replace: bool) -> None:
    """Commit the manifest. After an error, read the published one, so that the error says what the path contains."""
    try:
        storage.commit(MANIFEST_NAME, data, replace=replace)
    except BaseException as error:  # Ctrl-C too must say which manifest is published
        published: bytes | Exception
        try:
            # Raises ValueError for a larger file, such as the manifest of another job.
            published = storage.read_small(MANIFEST_NAME, limit_bytes=len(data))
        except Exception as unread:  # noqa: BLE001  not raised: the error of the commit matters more
            published = unread
        if isinstance(error, Exception) and published == data:  # Ctrl-C is raised in any case
            # The new manifest is published: only the store's response was lost, or an NFS client repeated a request
            # that the server had already carried out.
            if storage.visible_is_durable:
                return
            if isinstance(error, FileExistsError):
                storage.sync_folder("")  # `commit` raised before it made the name durable
                return
        if isinstance(error, FileExistsError) and published != data:
            raise CheckpointError(
                "Another job has committed a checkpoint to this path during this save.",
                expected="no manifest",
                got=MANIFEST_NAME,
                where=storage.where,
                todo="save to another path",
            ) from error
        if published == data:
            outcome = f"{storage.where} holds the new checkpoint"
            if not storage.visible_is_durable:
                outcome += (
                    ", complete, but the disk did not confirm it: it may be lost after a loss of power. "
                    "Save again to be sure"
                )
        # Another manifest, none, or (ValueError) a larger one.
        elif isinstance(published, bytes | FileNotFoundError | ValueError):
            outcome = f"nothing was committed: {storage.where} is as it was before"
        else:
            unread_text = f"{type(published).__name__}: {published}"
            outcome = f"whether {storage.where} holds the new checkpoint is unknown: {unread_text}"
        # An OSError shows its errno and text, so the outcome goes into the text of a new one. Only Python's own classes
        # are created anew, since subclasses of other libraries may take other arguments.
        if isinstance(error, OSError) and error.errno and type(OSError(error.errno, "")) is type(error):
            raise OSError(error.errno, f"{error.strerror}; {outcome}") from error
        error.add_note(outcome)
        raise


def write_rank_file(storage: Storage, image: FileImage, meter: Meter, *, name: str | None = None) -> None:
    """Write a rank's file with its checksums; durable on return, removed after an error.

    Args:
        name: a temporary name; default: the file's final name.

    Raises:
        OSError: if the storage fails.
    """
    file = image.file
    step = max(1, _RUN_BYTES // file.manifest.stripe_bytes)  # stripes per unit of work, at least one
    runs = range(0, file.num_stripes, step)
    # A store that is written front to back allows one thread.
    threads = 1 if storage.in_order else max(1, min(storage.write_threads, len(runs)))

    def write() -> None:
        meter.begin("saving", file.table_start)
        with storage.create(name or file.name, file.total_bytes) as writer:
            checksums = [0] * file.num_stripes

            def write_run(first: int) -> int:
                """Hash and write consecutive stripes from number ``first`` on. Returns the number of bytes."""
                nbytes = 0
                for index in range(first, min(first + step, file.num_stripes)):
                    stripe = file.stripe(index)
                    buffers = image.buffers(stripe.offset, stripe.stop)
                    # Most stripes are in one buffer, for which one call is a tenth faster than a running digest.
                    one_call = len(buffers) == 1
                    checksums[index] = checksum_of(buffers[0]) if one_call else _joint_checksum(buffers)
                    writer.write_at(stripe.offset, buffers)
                    nbytes += stripe.nbytes
                return nbytes

            for_each(threads, write_run, runs, name="checkpoint-write", advance=meter.advance)
            writer.write_at(file.table_start, [pack_table(checksums)])

    storage.retrying(write)


def _joint_checksum(buffers: Sequence[Buffer]) -> int:
    """Return the xxh3-64 of the bytes of all buffers, in order."""
    digest = RunningChecksum()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()


def _copied(tensor: torch.Tensor, items: Range, pinned: torch.Tensor | None) -> Buffer:
    """Copy a range of a tensor's row-major items to host memory, and return their bytes.

    Args:
        pinned: memory for the copy, which then runs on the current stream; None to allocate memory.
    """
    if pinned is None:
        out = torch.empty(items.numel, dtype=tensor.dtype, device="cpu")
    else:
        out = pinned[: items.numel * tensor.dtype.itemsize].view(tensor.dtype)
    if tensor.is_contiguous():
        out.copy_(tensor.view(-1)[items.start : items.stop], non_blocking=pinned is not None)
    else:
        boxes = boxes_of_range(tuple(tensor.shape), *items)
        for box, values in zip(boxes, out.split([box.numel for box in boxes]), strict=True):
            values.view(box.sizes).copy_(tensor[box.slices()], non_blocking=pinned is not None)
    return out.view(torch.uint8).numpy()


class FileImage:
    """The content of a rank's file up to its checksums, taken from live memory piece by piece.

    Contiguous tensors in CPU memory are not copied. Other tensors are copied range by range: from a device, through
    pinned memory of the calling thread, and after the work that was queued on the device before.

    Args:
        file: the layout.
        locals_by_name: this rank's tensors; each has the elements of the rank's whole region.
        blob: this rank's packed `PerRank` values; at most ``blob_bytes`` of the manifest long.
        chunk_table: checksums of the rank's chunks, in the zarr form.
    """

    def __init__(
        self,
        file: RankFile,
        locals_by_name: Mapping[str, torch.Tensor],
        blob: bytes,
        chunk_table: bytes = b"",
    ) -> None:
        self.file = file
        devices = {tensor.device for tensor in locals_by_name.values()}
        streams = {device: copy_stream_of(device) for device in devices}
        self._streams = {device: stream for device, stream in streams.items() if stream is not None}
        self._slots = PinnedSlots()
        for stream in self._streams.values():
            # Queued kernels may still write the tensors. On this thread, since others have other current streams.
            stream.wait_for_compute()
        # Bytes from `_starts[i]` to `_starts[i + 1]` of the file are in `_sources[i]`, host memory or a tensor to copy;
        # byte `_origins[i]` of the file would be the first byte of that source.
        self._starts, self._origins = [0], [0]
        self._sources: list[Buffer | torch.Tensor] = [file.header]
        for index, start in file.starts.items():
            entry = file.manifest.entries[index]
            # A lazily conjugated or negated tensor is a view with a flag; the file must have the computed values.
            tensor = locals_by_name[entry.name].detach().resolve_conj().resolve_neg()
            in_place = tensor.is_contiguous() and tensor.device not in self._streams
            source = bytes_of(tensor).numpy() if in_place else tensor.view(carrier_of(tensor.dtype))
            self._add(start, source, file.local_start(index) * entry.itemsize)
        if file.chunks:
            self._add(len(file.header), np.frombuffer(chunk_table, dtype=np.uint8))
        if file.manifest.blob_bytes:
            # Every file has a blob of the same size, that of the rank with the most bytes.
            padded = np.zeros(file.manifest.blob_bytes, dtype=np.uint8)
            padded[: len(blob)] = np.frombuffer(blob, dtype=np.uint8)
            self._add(file.blob_start, padded)
        self._starts.append(file.table_start)

    def _add(self, start: int, source: Buffer | torch.Tensor, skip: int = 0) -> None:
        """Add a source whose byte ``skip`` is byte ``start`` of the file."""
        self._starts.append(start)
        self._origins.append(start - skip)
        self._sources.append(source)

    def buffers(self, start: int, stop: int) -> list[Buffer]:
        """Return bytes [start, stop) of the file, in several buffers.

        The buffers are valid until the tensors change, or until this thread calls the method again.

        Args:
            start, stop: ends of stripes, which cut no element: stripes and pieces are aligned.
        """
        buffers: list[Buffer] = []
        pending: list[tuple[int, torch.Tensor, Range]] = []  # (index in `buffers`, tensor, items to copy)
        at = bisect_right(self._starts, start) - 1  # number of the source that contains `start`
        while start < stop:
            end, origin, source = min(stop, self._starts[at + 1]), self._origins[at], self._sources[at]
            if isinstance(source, torch.Tensor):
                itemsize = source.dtype.itemsize
                items = Range((start - origin) // itemsize, (end - origin) // itemsize)
                pending.append((len(buffers), source, items))
                buffers.append(b"")  # a placeholder: all copies are made together below
            else:
                buffers.append(source[start - origin : end - origin])
            start = end
            at += 1
        # All copies from devices share one pinned buffer; copies of CPU tensors (size 0 here) get memory of their own.
        sizes = [
            # Rounded up, so that the next copy in the buffer is aligned.
            round_up(items.numel * tensor.dtype.itemsize, _ALIGN_BYTES)
            if tensor.device in self._streams
            else 0
            for _, tensor, items in pending
        ]
        pinned = self._slots.lend(sum(sizes)) if any(sizes) else None
        used: dict[CopyStream, None] = {}
        for (number, tensor, items), size, end in zip(pending, sizes, accumulate(sizes), strict=True):
            if pinned is None or not size:
                buffers[number] = _copied(tensor, items, None)
                continue
            stream = self._streams[tensor.device]
            used[stream] = None
            with stream.on():
                buffers[number] = _copied(tensor, items, pinned[end - size : end])
        for stream in used:
            stream.record().synchronize()  # the caller reads the bytes next
        return buffers
