"""`DcpForm`: save a folder that stock torch.distributed.checkpoint (DCP) can load, without DCP's planning.

Every rank writes one file with its boxes (a ragged piece is a few boxes). The manifest determines the layout of all
ranks' files, so rank 0 can write ``.metadata``, the last file, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.native.form import Commit, Form, RankShare
from vescale_fsdp.checkpoint.native.written_folder import WrittenFolder
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.checkpoint.storage.base import FileWriter, Storage
from vescale_fsdp.conversion.engine.carried_state import whole_state
from vescale_fsdp.conversion.engine.copying import Copier, CopyLimits, no_progress
from vescale_fsdp.conversion.engine.plan import FilePlan, OutputPlan
from vescale_fsdp.conversion.formats.dcp.plan import file_of_rank, plan_dcp_by_rank
from vescale_fsdp.conversion.formats.dcp.source import METADATA_FILE
from vescale_fsdp.conversion.live.held_shards import HeldShards
from vescale_fsdp.errors import ConversionError, some
from vescale_fsdp.layout.geometry import Box


@dataclass(frozen=True)
class DcpForm(Form):
    """``format="dcp"``: makes a save write a folder that ``torch.distributed.checkpoint.load`` reads.

    A DCP folder cannot contain `PerRank` values: a save of such values raises an error that names them.
    """

    def arguments(self) -> Json:
        """Return the arguments of this form, which ranks compare; there are no options."""
        return {"form": "DCP"}

    def claim(self, storage: Storage, held: ExitStack, *, overwrite: bool) -> None:
        """Lock the folder; refuse a folder that contains files other than DCP's."""
        _folder(storage).claim(held, overwrite=overwrite)

    def write(self, plan: Callable[[], Manifest], share: RankShare) -> Commit:
        """Plan the folder and write this rank's file; a collective."""
        storage, coordinator, folder = share.storage, share.coordinator, _folder(share.storage)
        world_size = coordinator.world_size
        with coordinator.together("planning a DCP folder"), gc_paused():
            shards = HeldShards(plan(), coordinator.rank, share.locals_by_name, storage)
            if shards.source.unsupported:
                raise ConversionError(
                    "A DCP folder cannot contain all entries of this state.",
                    expected="values that are the same on all ranks",
                    got=f"{some(shards.source.unsupported, 8)}: PerRank",
                    where=storage.where,
                    todo="leave them out, or save in the native form",
                )
            state = whole_state(shards.source, "")
            nbytes = sum(view.info.nbytes for name, view in state.views.items() if name not in state.aliases)
            share.check_room(nbytes)
            boxes = partial(_boxes, shards, state.aliases)
            output = plan_dcp_by_rank(state, boxes, world_size, coordinator.rank)
        with coordinator.together(f"making {storage.where}"):
            if coordinator.rank == 0:
                folder.begin()
        # A separate block, so that no rank writes before rank 0 has created the folder.
        with coordinator.together(f"writing to {storage.where}"):
            _write(folder.working, output)
        names = [file_of_rank(rank) for rank in range(world_size)]
        closing = {file.name: file.pieces for file in output.closing}
        return Commit(nbytes, partial(folder.commit, closing, names))

    def clear_away(self, storage: Storage, save_id: str) -> None:
        """Remove all files of a failed save."""
        _folder(storage).clear_away()


def _folder(storage: Storage) -> WrittenFolder:
    """Return the folder of a DCP checkpoint; `.metadata` is the file that makes it valid."""
    return WrittenFolder(
        storage,
        "a DCP folder",
        METADATA_FILE,
        lambda name: name == METADATA_FILE or ("/" not in name and name.endswith(".distcp")),
    )


def _boxes(shards: HeldShards, twins: Collection[str], rank: int) -> Iterator[tuple[str, Box]]:
    """Yield (name, box) for each box that a rank writes; a tensor with several names has only its first name here."""
    file = shards.file if rank == shards.rank else RankFile(shards.manifest, rank)
    for name, place in shards.places.items():
        region = file.pieces.get(place) if name not in twins else None
        for box, _ in region.pieces() if region is not None else ():
            yield name, box


def _write(storage: Storage, output: OutputPlan) -> None:
    """Write this rank's file; on return it is durable."""
    outputs: list[FileWriter] = []

    def give_up() -> None:
        """Remove the file that is being written, if there is one."""
        while outputs:
            outputs.pop().abort()

    def create(file: FilePlan) -> FileWriter:
        give_up()  # after a failed attempt, `Copier` calls `create` again: removes the incomplete file
        outputs.append(storage.create(file.name, file.nbytes))
        return outputs[0]

    # One thread if the storage's files are streams, which are written from front to back.
    limits = CopyLimits(threads=1 if storage.in_order else max(1, storage.write_threads))
    try:
        copier = Copier(limits, create, storage.retrying, no_progress, lambda *_: None)
        copier.copy(output.files, in_order=storage.in_order)
    except BaseException:  # BaseException: also after Ctrl-C, no incomplete file is left
        give_up()
        raise
