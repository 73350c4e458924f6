"""A file is finished when the checksums of all that it was made from have been compared.

Reading compares them in passing (see `checked_runs`). What is left to do here is to read the bytes around: of a
storage larger than its tensor, or of a record that other files hold the rest of. So a tensor that is whole in a
file is proven before that file is finished, and one that is cut into several files when they all are: the file
that holds its first item answers for it. So of several processes each answers for a share, none waits for another,
and together they read nothing more than twice.

Sources without checksums can only be asked whether somebody wrote to them meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from vescale_fsdp.conversion.output.plan import FilePlan
from vescale_fsdp.conversion.output.threads import Shared, in_threads
from vescale_fsdp.conversion.source.source import Source

__all__ = ["prove_cut", "prove_unchanged", "prove_whole"]


def prove_whole(plan: FilePlan) -> None:
    """Prove the sources of all tensors that are whole in a file.

    Raises:
        CorruptCheckpointError: if bytes are not those that were saved.
    """
    for source, name, is_whole in _answered(plan):
        if is_whole:
            source.prove(name)


def prove_cut(plans: Iterable[FilePlan], threads: int) -> None:
    """Prove the sources of all tensors that these files hold a part of and answer for; raises as `prove_whole`."""

    def work(stored: Shared[tuple[Source, str]]) -> None:
        for source, name in stored:
            source.prove(name)

    if cut := [
        (source, name) for plan in plans for source, name, is_whole in _answered(plan) if not is_whole
    ]:
        in_threads(threads, work, cut)


def prove_unchanged(plans: Iterable[FilePlan]) -> None:
    """Refuse sources that were written to meanwhile: most formats have no checksums that would tell.

    Raises:
        ConversionError: if files of a source were replaced.
    """
    views = (items.view for plan in plans for _, items in plan.tensors)
    for source in {id(source): source for view in views for source, _ in view.sources()}.values():
        source.require_unchanged()


def _answered(plan: FilePlan) -> Iterator[tuple[Source, str, bool]]:
    """(source, name, whether the file holds all of its items) of every stored tensor that a file answers for."""
    held = Counter[str]()
    for _, items in plan.tensors:
        held[items.view.info.name] += items.stop - items.start
    for _, items in plan.tensors:
        info = items.view.info
        if items.start == 0 < items.stop:
            for source, name in items.view.sources():
                yield source, name, held[info.name] == info.numel
