"""Carrying out an output plan: safely, resumably, and shared among processes if asked.

Parts: process i of n writes every n-th file, and its own journal. Whoever finds all n journals complete
writes the closing files and publishes; no process waits for another, so array jobs may run in any order, at
any time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from vescale_fsdp.checkpoint.storage.base import FileWriter, StagedFile, Storage, partial_name
from vescale_fsdp.conversion.output.copying import CopyLimits, Progress, copy_files, written_digest
from vescale_fsdp.conversion.output.journal import Journal
from vescale_fsdp.conversion.output.plan import FilePlan, OutputPlan
from vescale_fsdp.conversion.output.prove_sources import prove_cut, prove_unchanged
from vescale_fsdp.conversion.output.target_folder import is_leftover, open_target
from vescale_fsdp.conversion.output.threads import Shared, in_threads
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError

__all__ = ["Outcome", "Part", "RunOptions", "run_plan"]


@dataclass(frozen=True)
class Part:
    """Which share of the files this process writes: ``index`` of ``count``, from 0."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConversionError(
                "There is no such part.",
                expected="--part I/N with 0 <= I < N",
                got=f"{self.index}/{self.count}",
                todo="number the parts from 0",
            )

    @classmethod
    def parse(cls, text: str) -> Part:
        """From ``i/n``."""
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None:
            raise ConversionError(
                "This is not a part.", expected="I/N", got=repr(text), todo="write for example 0/4"
            )
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def from_environment(cls) -> Part:
        """As torchrun numbers its processes; the whole work outside of torchrun."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return cls()
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


@dataclass(frozen=True)
class RunOptions:
    """How a plan is carried out.

    Args:
        overwrite: replace what is in the target.
        resume: go on where an interrupted run of the same plan stopped; start if there was none.
        dry_run: check the target, write nothing.
        part: this process's share.
        limits: memory and threads.
    """

    overwrite: bool = False
    resume: bool = False
    dry_run: bool = False
    part: Part = field(default_factory=Part)
    limits: CopyLimits = field(default_factory=CopyLimits)


@dataclass(frozen=True)
class Outcome:
    """What a run did: files written now, files kept from before, and whether the result is published."""

    written: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    published: bool = False


def run_plan(
    plan: OutputPlan, url: str, *, source_url: str, options: RunOptions, progress: Progress = lambda _: None
) -> Outcome:
    """Write everything the plan names to ``url``.

    Raises:
        ConversionError: if the target is refused, or an interrupted run was of another plan.
        CorruptCheckpointError: if the source turns out damaged. After an error nothing of this run is left
            behind, except that finished files of a run that was short of space or stopped by hand are kept
            for ``--resume`` (under their partial names).
    """
    is_shared = options.part.count > 1
    store, stem, old_files = open_target(
        url,
        source_url=source_url,
        single_file=plan.single_file,
        overwrite=options.overwrite,
        resume=options.resume or is_shared,
    )
    if options.dry_run:
        return Outcome()
    return _Execution(plan, store, stem, options, old_files, progress).run()


class _Execution:
    """One process's share of one plan."""

    def __init__(
        self,
        plan: OutputPlan,
        store: Storage,
        stem: str,
        options: RunOptions,
        old_files: Sequence[str],
        progress: Progress,
    ) -> None:
        self._plan, self._store, self._options = plan, store, options
        self._old_files, self._progress = old_files, progress
        count, fingerprint = options.part.count, plan.fingerprint()
        stems = [stem] if count == 1 else [f"{stem}part-{index}-of-{count}" for index in range(count)]
        self._journals = [Journal(store, each, fingerprint) for each in stems]
        self._mine = self._journals[options.part.index]
        self._files = plan.files[options.part.index :: options.part.count]
        self._outputs: dict[str, FileWriter] = {}

    def run(self) -> Outcome:
        if self._options.resume and self._mine.name in self._old_files and self._is_published():
            return Outcome(published=True)
        kept, limits = self._keep_finished(), self._options.limits
        todo = [file for file in self._files if file.name not in kept]
        try:
            if not self._mine.is_started:
                self._mine.start()
                if self._store.in_order:  # new data appears at once: the old index must not vouch for it
                    self._remove_old(leftovers=False)
            self._progress(sum(file.tensor_nbytes for file in self._files if file.name in kept))
            copy_files(
                todo,
                limits,
                create=self._create,
                retrying=self._store.retrying,
                in_order=self._in_order,
                progress=self._progress,
                on_finished=lambda file, digest: self._mine.record(file.name, digest, limits.buffer_bytes),
            )
            prove_cut(self._files, limits.usable_threads)
            prove_unchanged(self._files)
            if not self._mine.is_complete:
                self._mine.complete()
            published = self._publish_if_last()
        except BaseException as error:
            self._clean_up(keep_finished=isinstance(error, (OSError, KeyboardInterrupt)))
            raise
        finally:
            self._store.folders.remove_empty()
        return Outcome(tuple(file.name for file in todo), tuple(kept), published)

    def _keep_finished(self) -> list[str]:
        """Files an earlier run finished, each read again and compared with its digest."""
        if not self._options.resume or not self._mine.load():
            return []
        self._store.folders.adopt_parents(file.name for file in self._files)
        intact: set[str] = set()

        def check(files: Shared[FilePlan]) -> None:
            intact.update(file.name for file in files if self._is_intact(file))

        in_threads(self._options.limits.usable_threads, check, self._files)
        return [file.name for file in self._files if file.name in intact]

    def _is_intact(self, file: FilePlan) -> bool:
        """Under its partial name, or its final one: publishing was interrupted, or another part is at it."""
        if file.name not in self._mine.finished:
            return False
        names = dict.fromkeys((self._store.working_name(file.name), file.name))
        return any(self._is_intact_as(name, file) for name in names)

    def _is_intact_as(self, name: str, file: FilePlan) -> bool:
        if self._store.size(name) != file.nbytes:
            return False
        digest, buffer_bytes = self._mine.finished[file.name]
        try:
            found = written_digest(
                file, lambda at, n: self._store.read(name, at, n), buffer_bytes, in_order=self._in_order
            )
        except CorruptCheckpointError:  # another part renamed it just now
            return False
        return digest == found

    def _is_published(self) -> bool:
        """Whether another part has put all in place: it removes the journals after that."""
        return self._store.size(self._mine.name) is None

    @property
    def _in_order(self) -> bool:
        return self._plan.wrap is not None or self._store.in_order

    def _create(self, file: FilePlan) -> FileWriter:
        name = self._store.working_name(file.name)
        if file.name in self._outputs:
            self._outputs[file.name].abort()  # a try that failed
        elif not self._store.in_order:
            self._store.remove(name)  # of a run that was killed
        out = self._store.create(name, file.nbytes)
        self._outputs[file.name] = self._plan.wrap(file.name, out) if self._plan.wrap else out
        return self._outputs[file.name]

    def _publish_if_last(self) -> bool:
        """Give everything its final name once all parts are there. Harmless if two processes do it at
        once."""
        for journal in self._journals:
            if journal is not self._mine and not (journal.load() and journal.is_complete):
                return self._is_published()
        part = self._options.part
        staged: dict[str, StagedFile] = {}
        committed: list[str] = []
        try:
            self._plan.when_written(self._read_written)
            for closing in self._plan.closing:  # what may fail comes before the first final name
                staged[closing.name] = self._store.stage(closing.name, closing.pieces, str(part.index))
            self._remove_old(leftovers=True)
            for file in self._plan.files:
                self._store.publish(file.name)
            for name, ready in staged.items():
                ready.publish()
                committed.append(name)
        except BaseException:
            for ready in staged.values():
                ready.abort()
            for name in committed if part.count == 1 else ():  # another part may have committed the same
                self._store.remove(name)
            raise
        for name in self._staged_names.intersection(self._old_files):  # of a part that was killed here
            self._store.remove(name)
        for journal in self._journals:
            self._store.remove(journal.name)
        return True

    def _read_written(self, name: str, offset: int, nbytes: int) -> bytes:
        """Bytes of a file under its partial name, or its final one: another part may be publishing."""
        working = self._store.working_name(name)
        found = name if self._store.size(working) is None else working
        return self._store.read(found, offset, nbytes)

    @cached_property
    def _staged_names(self) -> set[str]:
        """The names that closing files have, in any part, before their final ones."""
        owners = [str(index) for index in range(self._options.part.count)]
        return {partial_name(closing.name, owner) for closing in self._plan.closing for owner in owners}

    def _remove_old(self, *, leftovers: bool) -> None:
        """Old files that are no part of the result, and those that would vouch for what they do not know."""
        ours = {file.name for file in self._plan.files}
        ours |= {self._store.working_name(name) for name in ours}
        ours |= {
            journal.name for journal in self._journals
        } | self._staged_names  # needed until all is in place
        closing = {file.name for file in self._plan.closing}
        old = [name for name in self._old_files if name not in ours]
        old = [n for n in old if n in closing or self._plan.is_stale(n) or (leftovers and is_leftover(n))]
        for name in old:
            self._store.remove(name)
        self._store.folders.adopt_parents(old)

    def _clean_up(self, *, keep_finished: bool) -> None:
        finished = self._mine.finished if keep_finished else {}
        for name, out in self._outputs.items():
            if name not in finished:
                out.abort()
        if finished:
            return
        for file in self._files:  # what an interrupted run left goes too
            if not self._store.in_order or file.name in self._mine.finished:
                self._store.remove(self._store.working_name(file.name))
        self._store.remove(self._mine.name)
