"""Reading a source's files forward, as one thread does that fills a run of the output.

Stripes with checksums are hashed as their parts come by, so that each byte is read once:

    stripe       |---------- 7 ----------|---------- 8 ----------|
    reads        |  1  |  2  |  3  |  4  |  5  |  6  |          7 is proven; 8 was begun and is read again
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_fsdp.checkpoint.checksums import RunningChecksum

if TYPE_CHECKING:
    from vescale_fsdp.conversion.source.source import Source


class ForwardReader:
    """Reads of one thread; what it has read is proven once `finish` has returned.

    Args:
        source: whose files are read.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._begun: dict[
            tuple[str, int], tuple[RunningChecksum, int]
        ] = {}  # stripe -> hash so far, next byte

    def read(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from a file.

        Raises:
            CorruptCheckpointError: if the file is too short, or a stripe that is complete by now is not what was saved.
        """
        checked = self._source.checked(file)
        if checked is None:
            self._source.read_bytes(file, offset, buffer)
            return
        self._source.store.read_into(file, offset, buffer)
        size, stop = checked.stripe_bytes, offset + len(buffer)
        while offset < min(stop, checked.checked_bytes):
            index = offset // size
            end = min((index + 1) * size, checked.checked_bytes)
            part = buffer[: end - offset]
            state, expected = self._begun.pop((file, index), (RunningChecksum(), index * size))
            if expected == offset and len(part) == end - offset:
                state.update(part)
                self._source.prove_stripe(file, index, state.intdigest())
            elif expected == offset:
                state.update(part)
                self._begun[file, index] = state, offset + len(part)
            else:  # from the middle
                self._source.prove_stripe(file, index)
            offset, buffer = end, buffer[len(part) :]

    def finish(self) -> None:
        """Prove the stripes that were read in part.

        Raises:
            CorruptCheckpointError: if one is not what was saved.
        """
        for file, index in self._begun:
            self._source.prove_stripe(file, index)
        self._begun.clear()
