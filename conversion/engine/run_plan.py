"""Execute an output plan: write the missing files, verify them, and publish the result.

`vescale_fsdp.conversion.engine.output` handles the target: temporary names, the journal, parts and publication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from vescale_fsdp.checkpoint.ranks.threads import for_each
from vescale_fsdp.checkpoint.storage.base import FileWriter
from vescale_fsdp.conversion.engine.copying import (
    Copier,
    CopyLimits,
    Progress,
    no_progress,
    verify_rest,
    written_digest,
)
from vescale_fsdp.conversion.engine.journal import SOURCE, SOURCE_FILES
from vescale_fsdp.conversion.engine.output import ComparedFile, OtherBytesError, Output
from vescale_fsdp.conversion.engine.plan import DataFile, FilePlan, OutputPlan
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.errors import CorruptCheckpointError


@dataclass(frozen=True)
class Outcome:
    """The outcome of `run_plan`.

    Attributes:
        written: names of the files that this run wrote.
        kept: names of the files that an earlier run had finished.
        published: whether the result is published: all files have their final names.
    """

    written: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    published: bool = False


def run_plan(
    plan: OutputPlan,
    sources: Sequence[Source],
    url: str,
    *,
    limits: CopyLimits,
    overwrite: bool,
    resume: bool,
    dry_run: bool,
    part: tuple[int, int],
    requested: Mapping[str, object],
    progress: Progress,
    announce: Progress,
) -> Outcome:
    """Write this process's part of a plan, and publish the result if all other parts are complete.

    After an error, all files of this run are removed. One exception: after an OSError, such as a full disk, or Ctrl-C,
    finished files are kept under their temporary names, for ``resume``.

    Args:
        plan: the output plan.
        sources: the sources. None of them may contain the target, and the target may contain none of them.
        url: path or URL of the target.
        limits: limits for memory and threads.
        overwrite: replace an existing target.
        resume: continue an interrupted run of the same plan, or start a new one if there was none.
        dry_run: check the target, but write nothing.
        part: (index, count): this process writes share number ``index`` of ``count`` shares.
        requested: the options that determine the plan, by name, as JSON values.
        progress: called with the number of tensor bytes written since the last call, from several threads.
        announce: called once, before the first write, with the total number of tensor bytes.

    Raises:
        ConversionError: if the target cannot be used, or an interrupted run had another plan.
        CorruptCheckpointError: if the source is damaged.
    """
    output = Output(
        url,
        plan,
        source_urls=[source.url for source in sources],
        overwrite=overwrite,
        resume=resume,
        part=part,
        # The sources' files too, so that the error of a resumed run says that they have changed.
        requested={
            SOURCE: ", ".join(source.url for source in sources),
            SOURCE_FILES: ", ".join(source.metadata_digest for source in sources),
            **requested,
        },
    )
    announce(plan.tensor_nbytes)
    if dry_run:  # only now, because `Output` has checked the target
        return Outcome()
    index, count = part
    files = plan.files[index::count]
    if resume and output.had_journal and output.is_published:
        return Outcome(published=True)  # another part has published since the target was listed
    # Without a journal, the target may have a published result: of this conversion, or of an older source.
    if resume and not output.had_journal and _is_written(plan, files, output, limits):
        progress(sum(file.tensor_nbytes for file in files))  # all of them are done
        return Outcome(kept=output.share, published=True)
    kept = output.resume(partial(_intact_files, files, output, limits)) if resume else ()
    todo = [file for file in files if file.name not in kept]
    with output.writing([file.name for file in todo]):
        progress(sum(file.tensor_nbytes for file in files if file.name in kept))
        copier = Copier(
            limits,
            lambda file: _wrapped(plan, file, output.create(file.name)),
            output.store.retrying,
            progress,
            lambda file, digest: output.finish(file.name, digest, limits.buffer_bytes),
        )
        copier.copy(todo, in_order=output.store.in_order)
        # All files, also those that an earlier run has finished: a tensor may be split across both kinds. Before
        # publication, so that no damaged result gets its final names.
        verify_rest(files, limits.usable_threads)
        published = output.publish()
    return Outcome(
        tuple(file.name for file in todo), tuple(name for name in output.share if name in kept), published
    )


def _wrapped(plan: OutputPlan, file: FilePlan, writer: FileWriter) -> FileWriter:
    """Return the writer that the plan uses for a file."""
    return plan.wrap(file.name, writer) if plan.wrap else writer


def _is_written(plan: OutputPlan, files: tuple[DataFile, ...], output: Output, limits: CopyLimits) -> bool:
    """Return whether the target already contains this result, because an earlier run was stopped after publication.

    Files of every step of a training run have the same names and sizes. Therefore all bytes are computed again from the
    source and compared.

    Raises:
        ConversionError: if bytes differ, and there is neither an interrupted run nor ``overwrite``, which allow
            replacing the files.
    """
    if not output.may_be_complete:
        return False

    def compare(file: FilePlan) -> FileWriter:
        return _wrapped(plan, file, ComparedFile(output.store, file.name))

    copier = Copier(limits, compare, output.store.retrying, no_progress, lambda *_: None)
    try:
        copier.copy(files, in_order=output.store.in_order)
        plan.when_written(output.store.read)
        for closing in plan.closing:
            ComparedFile(output.store, closing.name).write_at(0, [b"".join(closing.pieces())])
    except OtherBytesError:
        if output.may_replace:
            return False
        raise output.other_result() from None  # the message says all that the user needs
    verify_rest(files, limits.usable_threads)
    return True


def _intact_files(
    files: tuple[DataFile, ...], output: Output, limits: CopyLimits, finished: Mapping[str, tuple[str, int]]
) -> frozenset[str]:
    """Return the names of the finished files that still match their recorded digests; reads all these files.

    Args:
        finished: file name -> (digest, buffer size that the digest was computed with), from the journal.
    """
    intact: set[str] = set()

    def check(file: DataFile) -> int:
        digest, buffer_bytes = finished[file.name]
        plan = file.planned()
        for name in output.finished_copies(file.name):
            read = partial(output.store.read, name)
            # The file is missing if another process has just renamed it.
            with suppress(CorruptCheckpointError):
                if written_digest(plan, read, buffer_bytes, in_order=output.store.in_order) == digest:
                    intact.add(file.name)
                    break
        return plan.nbytes

    for_each(limits.usable_threads, check, [file for file in files if file.name in finished], name="convert")
    return frozenset(intact)
