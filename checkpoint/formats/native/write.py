"""The native form: one file per rank. Stripes are hashed while in the cache, then written by several threads."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple, NoReturn

import numpy as np
import torch
import xxhash

from vescale_fsdp.checkpoint.formats.form import Commit, Form, RankShare, told_if_busy
from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile, pack_table
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, carrier_of
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.state.host_copies import CopyStream, PinnedSlots, copy_stream_of
from vescale_fsdp.checkpoint.storage.base import Buffer, Storage
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.layout.geometry import boxes_of_range


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


_RUN_BYTES = 4 << 20  # 4 MiB of stripes to a piece of work


class NativeForm(ManifestForm):
    """Every rank writes its pieces of all tensors into its own file."""

    name = "native"

    def write(self, plan: Callable[[], Manifest], share: RankShare) -> Commit:
        """Plan, and write this rank's file."""
        with share.coordinator.together(f"writing to {share.storage.where}"):
            with gc_paused():
                manifest = plan()
                file = RankFile(manifest, share.coordinator.rank)
                share.prove_room(file.total_bytes if share.every_node else manifest.num_bytes)
                image = FileImage(file, share.locals_by_name, share.blob)
            write_rank_file(share.storage, image, share.meter)
        commit = partial(
            commit_manifest,
            share.storage,
            manifest,
            form=self,
            replace=share.replace,
            check_files=not share.every_node,
        )
        return Commit(manifest.num_bytes, commit, manifest.save_id)

    def finish(self, storage: Storage, manifest: Manifest) -> None:
        """Nothing is left."""


def write_rank_file(storage: Storage, image: FileImage, meter: Meter, *, name: str | None = None) -> None:
    """Write a rank's file with its checksums; durable on return, gone again after an error.

    Args:
        name: another one than it will have in the end.

    Raises:
        OSError: whatever the storage says, unchanged.
    """
    file = image.file
    step = max(1, _RUN_BYTES // file.manifest.stripe_bytes)
    runs = range(0, file.num_stripes, step)
    threads = 1 if storage.in_order else max(1, min(storage.write_threads, len(runs)))

    def write() -> None:
        meter.begin("saving", file.table_start)
        with storage.create(name or file.name, file.total_bytes) as writer:

            def write_stripe(index: int) -> int:
                start, stop = file.stripe(index)
                buffers = image.buffers(start, stop)
                checksum = _checksum_of(buffers)
                writer.write_at(start, buffers)
                meter.advance(stop - start)
                return checksum

            def write_run(first: int) -> list[int]:
                return [write_stripe(index) for index in range(first, min(first + step, file.num_stripes))]

            # After an error, `map` begins none of the runs that are left.
            with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-write") as pool:
                checksums = list(chain.from_iterable(pool.map(write_run, runs)))
            writer.write_at(file.table_start, [pack_table(checksums)])

    storage.retrying(write)


def _checksum_of(buffers: Sequence[Buffer]) -> int:
    """xxh3-64 of buffers taken as one run of bytes."""
    if len(buffers) == 1:
        return xxhash.xxh3_64_intdigest(buffers[0])
    state = xxhash.xxh3_64()
    for buffer in buffers:
        state.update(buffer)
    return state.intdigest()


_ALIGN_BYTES = 64


class FileImage:
    """The content of a rank's file up to its checksums.

    Args:
        file: where everything lies.
        locals_by_name: this rank's tensors; each holds the elements of the rank's whole region.
        blob: per-rank values, at most as long as the file has room for.
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
        self._starts: list[int] = [0]
        self._stops: list[int] = [len(file.header)]
        self._parts: list[tuple[Buffer | torch.Tensor, int]] = [(file.header, 0)]
        devices = {tensor.device for tensor in locals_by_name.values()}
        streams = {device: copy_stream_of(device) for device in devices}
        self._streams = {device: stream for device, stream in streams.items() if stream is not None}
        self._slots = PinnedSlots()
        for stream in self._streams.values():
            stream.wait_for_compute()  # here: threads that write have current streams of their own
        for piece in file.pieces:
            entry = file.manifest.entries[piece.place]
            # Lazy conjugation and negation are flags on a view; the bytes must be what the tensor says.
            tensor = locals_by_name[entry.name].detach().resolve_conj().resolve_neg()
            in_place = tensor.is_contiguous() and tensor.device not in self._streams
            source = bytes_of(tensor).numpy() if in_place else tensor.view(carrier_of(tensor.dtype))
            self._add(piece.start_bytes, piece.stop_bytes, source, piece.local_start * entry.itemsize)
        if file.chunks:
            self._add(len(file.header), file.blob_start, np.frombuffer(chunk_table, dtype=np.uint8), 0)
        if file.manifest.blob_bytes:
            padded = np.zeros(file.manifest.blob_bytes, dtype=np.uint8)
            padded[: len(blob)] = np.frombuffer(blob, dtype=np.uint8)
            self._add(file.blob_start, file.table_start, padded, 0)

    def _add(self, start: int, stop: int, part: Buffer | torch.Tensor, skip: int) -> None:
        self._starts.append(start)
        self._stops.append(stop)
        self._parts.append((part, skip))

    def buffers(self, start: int, stop: int) -> list[Buffer]:
        """The bytes [start, stop) of the file, in order; valid until the tensors change, or the thread asks again."""
        found: list[Buffer] = []
        to_copy: list[_ToCopy] = []
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            part, skip = self._parts[at]
            end = min(stop, self._stops[at])
            first = start - self._starts[at] + skip
            last = end - self._starts[at] + skip
            if isinstance(part, torch.Tensor):
                to_copy.append(_ToCopy(len(found), part, first, last))
                found.append(b"")
            else:
                found.append(part[first:last])
            start = end
            at += 1
        if to_copy:
            self._copy(to_copy, found)
        return found

    def _copy(self, to_copy: Sequence[_ToCopy], found: list[Buffer]) -> None:
        """Put copies of parts where they belong: in pinned memory of this thread's, where the parts lie on a device."""
        sizes = [each.num_bytes if each.tensor.device in self._streams else 0 for each in to_copy]
        room = self._slots.lend(sum(sizes)) if any(sizes) else None
        used: dict[CopyStream, None] = {}
        for each, size, end in zip(to_copy, sizes, accumulate(sizes), strict=True):
            if room is None or not size:
                found[each.place] = _copied(each.tensor, each.start_bytes, each.stop_bytes, None)
                continue
            stream = self._streams[each.tensor.device]
            used[stream] = None
            with stream.on():
                found[each.place] = _copied(
                    each.tensor, each.start_bytes, each.stop_bytes, room[end - size : end]
                )
        for stream in used:
            stream.record().synchronize()


class _ToCopy(NamedTuple):
    """A part of a file that is no view of the host's memory: which of its own bytes, and its place among the parts."""

    place: int
    tensor: torch.Tensor
    start_bytes: int
    stop_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of a copy: whole elements, and room for the next one to begin at one."""
        itemsize = self.tensor.dtype.itemsize
        whole = (-(-self.stop_bytes // itemsize) - self.start_bytes // itemsize) * itemsize
        return -(-whole // _ALIGN_BYTES) * _ALIGN_BYTES


def _copied(tensor: torch.Tensor, start_bytes: int, stop_bytes: int, room: torch.Tensor | None) -> Buffer:
    """Bytes of a tensor on another device or with strides: the range asked for is copied, nothing more.

    Args:
        room: pinned memory for it, where the copy is to be work of the current stream.
    """
    itemsize = tensor.dtype.itemsize
    first, last = start_bytes // itemsize, -(-stop_bytes // itemsize)
    if room is None:
        out = torch.empty(last - first, dtype=tensor.dtype, device="cpu")
    else:
        out = room[: (last - first) * itemsize].view(tensor.dtype)
    if tensor.is_contiguous():
        out.copy_(tensor.view(-1)[first:last], non_blocking=room is not None)
    else:
        boxes = boxes_of_range(tuple(tensor.shape), first, last)
        for box, part in zip(boxes, out.split([box.numel for box in boxes]), strict=True):
            part.view(box.sizes).copy_(tensor[box.slices()], non_blocking=room is not None)
    skip = start_bytes - first * itemsize
    return out.view(torch.uint8).numpy()[skip : skip + stop_bytes - start_bytes]
