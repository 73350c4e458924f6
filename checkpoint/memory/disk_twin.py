"""`DiskTwin`: a step on disk that was saved together with one in memory, from which lost files are made anew.

A manager that saves a step to both gives both the same save_id: they hold the same state, and nothing else proves that.
Their files are not the same, since in memory every rank stores all that it holds, while on disk replicas share the
work. So a file of memory that is lost with its node is put together of the disk's pieces, verified as they are read.
"""

from __future__ import annotations

import torch

from vescale_fsdp.checkpoint.formats.native.write import FileImage, write_rank_file
from vescale_fsdp.checkpoint.loading.read_state import CheckpointReader, read_manifest
from vescale_fsdp.checkpoint.manifest.manifest import Manifest, NoCheckpointError
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_named
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.errors import CheckpointError


class DiskTwin:
    """The folder of a step on disk, which may be its twin, another attempt at it, or nothing.

    Args:
        storage: the folder.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def has(self, manifest: Manifest) -> bool:
        """Whether the folder holds the same state as a step in memory."""
        try:
            found = read_manifest(self._storage)
        except NoCheckpointError:
            return False
        except CheckpointError:
            return False  # damaged: the search comes to it by itself, and says so
        return (found.save_id, found.world_size, found.blob_bytes, found.entries) == (
            manifest.save_id,
            manifest.world_size,
            manifest.blob_bytes,
            manifest.entries,
        )

    def make(self, manifest: Manifest, saved_rank: int, memory: Storage) -> None:
        """Make a rank's file in memory anew. Takes as much memory beside it while it is at it.

        Raises:
            CorruptCheckpointError: if the disk's pieces are damaged.
            OSError: if they cannot be read, or there is no room.
        """
        file = RankFile(manifest, saved_rank)
        reader = CheckpointReader(self._storage)
        locals_by_name = {}
        wanted = []
        for piece in file.pieces:
            entry = manifest.entries[piece.place]
            tensor = torch.empty(piece.region.numel, dtype=dtype_named(entry.dtype), device="cpu")
            locals_by_name[entry.name] = tensor
            wanted.append((piece.place, piece.region, tensor))
        reader.fill(wanted, verify=True)
        blob = bytes(reader.blobs([saved_rank])[0])
        working = memory.working_name(file.name, "disk")
        memory.remove(working)  # of a run that was killed
        write_rank_file(memory, FileImage(file, locals_by_name, blob), Meter(), name=working)
        memory.rename(working, file.name)
