"""The native form: one file per rank. Stripes are hashed while in the cache, then written by several threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

from vescale_fsdp.checkpoint.checksums import RunningChecksum, checksum_of
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile, pack_table
from vescale_fsdp.checkpoint.saving.form import Commit, RankShare, told_if_unusable
from vescale_fsdp.checkpoint.saving.manifest_form import ManifestForm, commit_manifest
from vescale_fsdp.checkpoint.saving.rank_file_bytes import FileImage
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.storage.base import Buffer, Storage
from vescale_fsdp.checkpoint.storage.progress import Meter

_RUN_BYTES = 4 << 20  # 4 MiB of stripes to a piece of work


class NativeForm(ManifestForm):
    """Every rank writes its pieces of all tensors into its own file."""

    name = "native"

    def write(self, plan: Callable[[], Manifest], share: RankShare) -> Commit:
        """Plan, and write this rank's file."""
        with share.coordinator.together(f"writing to {share.storage.where}"), told_if_unusable(share.storage):
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
        return checksum_of(buffers[0])
    state = RunningChecksum()
    for buffer in buffers:
        state.update(buffer)
    return state.intdigest()
