"""Execute an output plan: write the missing files, verify them, and publish the result.

`vescale_fsdp.checkpoint.storage.output` handles the target: temporary names, the journal, parts and publication.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from vescale_fsdp.checkpoint.moves.copying import (
    Copier,
    CopyLimits,
    Progress,
    no_progress,
    verify_rest,
    written_digest,
)
from vescale_fsdp.checkpoint.moves.plan import FilePlan, OutputPlan
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.threads import Shared, in_threads
from vescale_fsdp.checkpoint.storage.base import FileWriter
from vescale_fsdp.checkpoint.storage.output import ComparedFile, OtherBytesError, Output, ResultFiles
from vescale_fsdp.errors import CorruptCheckpointError


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        written: names of the files that this run wrote.
        kept: names of the files that an earlier run had finished.
        published: whether the result is published.
    """

    written: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    published: bool = False


def run_plan(
    plan: OutputPlan,
    source: Source,
    url: str,
    *,
    limits: CopyLimits,
    overwrite: bool,
    resume: bool,
    dry_run: bool,
    part: tuple[int, int],
    requested: Mapping[str, str],
    progress: Progress,
    announce: Progress,
) -> Outcome:
    """Write this process's part of a plan, and publish the result if all other parts are complete.

    Args:
        plan: the output plan.
        source: the source. The source must not contain the target, and the target must not contain the source.
        url: the target.
        limits: limits for memory and threads.
        overwrite: replace an existing target.
        resume: continue an interrupted run of the same plan, or start a new one if there was none.
        dry_run: check the target, but write nothing.
        part: index and number of shares: this process writes share ``index``.
        requested: the options that determine the plan, by their command-line names.
        progress: called with the tensor bytes written since the last call, from several threads.
        announce: called once, before the first write, with the total number of tensor bytes.

    Raises:
        ConversionError: if the target cannot be used, or an interrupted run had another plan.
        CorruptCheckpointError: if the source is damaged. After an error all files of this run are removed. One
            exception: if the run ran out of space or was stopped by the user, finished files are kept for ``resume``
            (under their temporary names).
    """
    result = ResultFiles(
        {file.name: file.nbytes for file in plan.files},
        tuple(file.name for file in plan.closing),
        plan.is_stale,
        plan.single_file,
        plan.fingerprint(),
    )
    output = Output(
        url,
        result,
        source_url=source.url,
        overwrite=overwrite,
        resume=resume,
        part=part,
        requested={"SRC": source.url, "files of SRC": source.fingerprint, **requested},
    )
    announce(plan.tensor_nbytes)
    if dry_run:
        return Outcome()
    index, count = part
    files = plan.files[index::count]
    if resume and output.had_journal and output.is_published:
        return Outcome(published=True)  # another part has published since the target was listed
    if resume and not output.had_journal and _is_written(plan, files, output, limits):
        progress(sum(file.tensor_nbytes for file in files))
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
        # Before publishing. All files, also those kept from an earlier run: a tensor can be split across both.
        verify_rest(files, limits.usable_threads)
        published = output.publish({file.name: file.pieces for file in plan.closing}, plan.when_written)
    return Outcome(
        tuple(file.name for file in todo), tuple(name for name in output.share if name in kept), published
    )


def _wrapped(plan: OutputPlan, file: FilePlan, writer: FileWriter) -> FileWriter:
    return plan.wrap(file.name, writer) if plan.wrap else writer


def _is_written(plan: OutputPlan, files: tuple[FilePlan, ...], output: Output, limits: CopyLimits) -> bool:
    """Whether the target already contains this result, because an earlier run was stopped after publishing.

    Names and sizes are the same for every step of a training run, so all bytes are computed again from the source and
    compared.

    Raises:
        ConversionError: if bytes differ, and neither an interrupted run nor ``overwrite`` allows replacing them.
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
        raise output.other_result() from None
    verify_rest(files, limits.usable_threads)
    return True


def _intact_files(
    files: tuple[FilePlan, ...], output: Output, limits: CopyLimits, finished: Mapping[str, tuple[str, int]]
) -> frozenset[str]:
    """Names of the finished files that still match their recorded digests; reads every file."""
    intact: set[str] = set()

    def is_intact(file: FilePlan) -> bool:
        digest, buffer_bytes = finished[file.name]
        for name in output.finished_copies(file.name):
            read = partial(output.store.read, name)
            with suppress(CorruptCheckpointError):  # another process has just renamed the file
                if written_digest(file, read, buffer_bytes, in_order=output.store.in_order) == digest:
                    return True
        return False

    def check(shared: Shared[FilePlan]) -> None:
        intact.update(file.name for file in shared if is_intact(file))

    in_threads(limits.usable_threads, check, [file for file in files if file.name in finished])
    return frozenset(intact)
