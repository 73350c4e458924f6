"""A file is finished when the checksums of all that it was made from have been compared.

Reading compares them in passing (see `checked_ranges`). What is left to do here is to read the bytes around: of a
storage larger than its tensor, or of a record that other files hold the rest of. So a tensor that is whole in a
file is proven before that file is finished, and one that is cut into several files when they all are: the file
that holds its first item answers for it. So of several processes each answers for a share, none waits for another,
and together they read nothing more than twice.

Sources without checksums can only be asked whether somebody wrote to them meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from vescale_fsdp.checkpoint.moves.plan import FilePlan
from vescale_fsdp.checkpoint.moves.threads import Shared, in_threads
from vescale_fsdp.checkpoint.moves.source import Source


def answered_for(plan: FilePlan, *, whole: bool) -> Iterator[tuple[Source, str]]:
    """The stored tensors that a file answers for: those whose items it holds all, or those that are cut."""
    held = Counter[str]()
    for _, items in plan.tensors:
        held[items.view.info.name] += items.stop - items.start
    for _, items in plan.tensors:
        info = items.view.info
        if items.start == 0 < items.stop and (held[info.name] == info.numel) == whole:
            yield from items.view.sources()


def prove_rest(plans: Sequence[FilePlan], threads: int) -> None:
    """What can be proven only when all is read: tensors that are cut into several files, and that no source was
    written to meanwhile, as most formats have no checksums that would tell.

    Raises:
        CorruptCheckpointError: if bytes are not those that were saved.
        ConversionError: if files of a source were replaced.
    """

    def work(stored: Shared[tuple[Source, str]]) -> None:
        for source, name in stored:
            source.prove(name)

    if cut := [each for plan in plans for each in answered_for(plan, whole=False)]:
        in_threads(threads, work, cut)
    views = (items.view for plan in plans for _, items in plan.tensors)
    for source in {id(source): source for view in views for source, _ in view.sources()}.values():
        source.require_unchanged()
