"""A file is finished when the checksums of all that it was made from have been compared.

Reading compares them in passing (see `checked_runs`). What is left to do here is to read the bytes around: of a
storage larger than its tensor, or of a record that other files hold the rest of. So a tensor that is whole in a
file is proven before that file is finished, and one that is cut into several files when they all are: the file
that holds its *pivot*, an item chosen by its name, answers for it. So of several processes each answers for a
share, none waits for another, and together they read nothing more than twice.

Sources without checksums can only be asked whether somebody wrote to them meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import xxhash

from vescale_fsdp.conversion.output.file_plan import FilePlan, TensorPart
from vescale_fsdp.conversion.output.threads import Shared, in_threads
from vescale_fsdp.conversion.views.tensor_view import TensorView

__all__ = ["prove_cut", "prove_unchanged", "prove_whole"]


def prove_whole(plan: FilePlan) -> None:
    """Prove the sources of all tensors that are whole in a file.

    Raises:
        CorruptCheckpointError: if bytes are not those that were saved.
    """
    for view, is_whole in _answered(plan):
        if is_whole:
            _prove(view)


def prove_unchanged(plans: Iterable[FilePlan]) -> None:
    """Refuse sources that were written to meanwhile: most formats have no checksums that would tell.

    Raises:
        ConversionError: if files of a source were replaced.
    """
    views = (part.view for plan in plans for part in plan.parts if isinstance(part, TensorPart))
    for source in {id(source): source for view in views for source, _ in view.sources()}.values():
        source.require_unchanged()


def prove_cut(plans: Iterable[FilePlan], threads: int) -> None:
    """Prove the sources of all tensors that these files hold a part of and answer for; raises as `prove_whole`."""
    cut = [view for plan in plans for view, is_whole in _answered(plan) if not is_whole]

    def work(views: Shared[TensorView]) -> None:
        for view in views:
            _prove(view)

    if cut:
        in_threads(threads, work, cut)


def _answered(plan: FilePlan) -> Iterator[tuple[TensorView, bool]]:
    """Tensors a file answers for, and whether it holds all of their items."""
    parts = [part for part in plan.parts if isinstance(part, TensorPart) and part.nbytes]
    held = Counter[str]()
    for part in parts:
        held[part.view.info.name] += part.stop - part.start
    for part in parts:
        info = part.view.info
        pivot = xxhash.xxh3_64_intdigest(info.name.encode()) % info.numel
        if part.start <= pivot < part.stop:
            yield part.view, held[info.name] == info.numel


def _prove(view: TensorView) -> None:
    for source, name in view.sources():
        source.prove(name)
