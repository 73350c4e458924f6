"""Which files hold a tensor, in few numbers: at 1,024 ranks a tensor has 1,024 chunks, most of one size.

[first file, files, items of each]      in the tensor's order; equal chunks of files in a row are joined
"""

from __future__ import annotations

from vescale_fsdp.checkpoint.moves.stored_tensor import StoredTensor
from vescale_fsdp.layout.group_layout import GroupLayout

_MOST_RUNS = 64  # of a tensor; more could not be told apart on a page


class FileNumbers:
    """Numbers of files, in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, name: str) -> int:
        """The file's number."""
        return self._numbers.setdefault(name, len(self._numbers))

    @property
    def names(self) -> list[str]:
        """All files, by number."""
        return list(self._numbers)


def holders_of(tensor: StoredTensor, files: FileNumbers) -> list[list[int]]:
    """Runs of chunks; those behind the last that is shown are left out."""
    runs: list[list[int]] = []
    items: list[list[int]] = []  # per file, boxes of one piece joined
    for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.box.offsets):
        number = files.of(chunk.file) if chunk.file else -1
        if items and items[-1][0] == number:
            items[-1][1] += chunk.box.numel
        else:
            items.append([number, chunk.box.numel])
    for number, numel in items:
        last = runs[-1] if runs else None
        if last and last[2] == numel and last[0] + last[1] == number:
            last[1] += 1
        else:
            runs.append([number, 1, numel])
    return runs[:_MOST_RUNS]


def layout_to_json(layout: GroupLayout) -> dict[str, object]:
    """What the page draws lanes from: for each slot its place in the buffer, or its pieces where it is scattered."""
    slots = [
        [slot.fqn, slot.offset, slot.numel, slot.block_numel, [list(run) for run in slot.runs]]
        for slot in layout.slots
    ]
    return {"shards": layout.num_shards, "size": layout.shard_numel, "slots": slots}
