"""Carrying out an output plan: safely, resumably, and shared among processes if asked.

    state                     data files          other files
    before                    absent, or the old ones if overwriting
    while converting          .NAME.partial       a journal
    killed                    .NAME.partial       the journal: --resume goes on
    failed                    (removed)           (removed, and the folders that were made)
    done                      NAME                old weights and journal removed, index last

Object stores cannot rename: there each object appears complete when its upload ends, the deciding one last, and an
old result's index is removed before the first new object appears.

Parts: process i of n writes every n-th file, and its own journal. Whoever finds all n journals complete
writes the closing files and publishes; no process waits for another, so array jobs may run in any order, at
any time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial

from vescale_fsdp.checkpoint.moves.copying import Copier, CopyLimits, Progress, verify_rest, written_digest
from vescale_fsdp.checkpoint.moves.plan import FilePlan, OutputPlan
from vescale_fsdp.checkpoint.moves.threads import Shared, in_threads
from vescale_fsdp.checkpoint.storage.base import Buffer, FileWriter, StagedFile, Storage
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.checkpoint.storage.open import open_parent, open_store
from vescale_fsdp.conversion.journal import Journal, is_journal, parts_of
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError

_MAX_PARTS = 65_536  # each part has a journal, which all others look for


@dataclass(frozen=True)
class Part:
    """Which share of the files this process writes: ``index`` of ``count``, from 0.

    Examples:
        >>> Part.parse("2/8")
        Part(index=2, count=8)
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count <= _MAX_PARTS:
            raise ConversionError(
                "There is no such part.",
                expected=f"--part I/N with 0 <= I < N, and N at most {_MAX_PARTS:,}",
                got=f"{self.index}/{self.count}",
                todo="number the parts from 0",
            )

    @classmethod
    def parse(cls, text: str) -> Part:
        """From ``i/n``, or ``env`` for the numbers that torchrun gives its processes.

        Raises:
            ConversionError: for any other text, and for an environment without those numbers.
        """
        if text.strip() == "env":
            return cls._from_environment()
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None:
            raise ConversionError(
                "This is not a valid part.",
                expected="I/N, or env",
                got=repr(text),
                todo="write 0/4, for example",
            )
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def _from_environment(cls) -> Part:
        rank, count = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        if not (rank.isdecimal() and count.isdecimal()):
            raise ConversionError(
                "The environment does not say which part is wanted.",
                expected="RANK and WORLD_SIZE, numbers, as torchrun sets them",
                got=f"RANK={rank!r}, WORLD_SIZE={count!r}",
                where="--part env",
                todo="start the command with torchrun, or pass --part I/N",
            )
        return cls(int(rank), int(count))


@dataclass(frozen=True)
class RunOptions:
    """How a plan is carried out.

    Args:
        overwrite: replace what is in the target.
        resume: go on where an interrupted run of the same plan stopped; start if there was none.
        dry_run: check the target, write nothing.
        part: this process's share.
        limits: memory and threads.

    Examples:
        >>> RunOptions(resume=True, part=Part(0, 4)).dry_run
        False
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


def _may_be_result(plan: OutputPlan, store: Storage) -> bool:
    """Whether all files of a plan are there under their final names, those of tensors in their sizes."""
    return all(store.size(file.name) == file.nbytes for file in plan.files) and all(
        store.size(closing.name) is not None for closing in plan.closing
    )


def _require_shares(files: Sequence[str], part: Part, url: str) -> None:
    """Refuse to share files out in another way than a run that may still be at it: two would write the same one."""
    counts = {parts_of(file) for file in files} - {None, part.count}
    if counts:
        others = (
            "no --part" if count == 1 else f"--part I/{count}" for count in sorted(filter(None, counts))
        )
        raise ConversionError(
            "The interrupted conversion was shared out in another way.",
            expected=" or ".join(others),
            got=f"part {part.index} of {part.count}",
            where=url,
            todo="resume with as many parts as it had, or start over with --overwrite",
        )


class Execution:
    """One process's share of one plan.

    Args:
        plan: what is to be written.
        url: where to.
        source_url: what must not be written to.
        options: how.
        progress: called with bytes written since the last call, from several threads.
        asked: what the plan follows from, by the names that people know.

    Raises:
        ConversionError: if the target is refused.
    """

    def __init__(
        self,
        plan: OutputPlan,
        url: str,
        *,
        source_url: str,
        options: RunOptions,
        progress: Progress,
        asked: Mapping[str, str],
    ) -> None:
        self._store, stem, self._old_files = open_target(
            url,
            source_url=source_url,
            single_file=plan.single_file,
            overwrite=options.overwrite,
            resume=options.resume or options.part.count > 1,
            is_result=lambda store: options.resume and _may_be_result(plan, store),
        )
        if not options.overwrite:
            _require_shares(self._old_files, options.part, url)
        self._url = url
        self._plan, self._options, self._progress = plan, options, progress
        count, fingerprint = options.part.count, plan.fingerprint()
        stems = [stem] if count == 1 else [f"{stem}part-{index}-of-{count}" for index in range(count)]
        self._journals = [Journal(self._store, each, fingerprint, asked) for each in stems]
        self._mine = self._journals[options.part.index]
        self._files = plan.files[options.part.index :: count]
        self._outputs: dict[str, FileWriter] = {}

    def run(self) -> Outcome:
        """Write everything the plan names.

        Raises:
            ConversionError: if an interrupted run was of another plan.
            CorruptCheckpointError: if the source turns out damaged. After an error nothing of this run is left
                behind, except that finished files of a run that was short of space or stopped by hand are kept
                for ``--resume`` (under their partial names).
        """
        if self._options.dry_run:
            return Outcome()
        if self._options.resume and self._mine.name in self._old_files and self._is_published():
            return Outcome(published=True)
        if self._options.resume and self._mine.name not in self._old_files and self._is_done():
            return Outcome(kept=tuple(file.name for file in self._files), published=True)
        try:
            return self._write()
        finally:
            self._mine.release()

    def _write(self) -> Outcome:
        """`run`, from the moment that this process may write."""
        kept, limits = self._keep_finished(), self._options.limits
        todo = [file for file in self._files if file.name not in kept]
        self._prove_room(todo)
        is_new = not self._mine.is_started
        if is_new:
            self._start()
        try:
            if (
                is_new and self._store.in_order
            ):  # new data appears at once: the old index must not vouch for it
                self._remove_old(leftovers=False)
            self._progress(sum(file.tensor_nbytes for file in self._files if file.name in kept))
            copier = Copier(
                limits,
                self._create,
                self._store.retrying,
                self._progress,
                lambda file, digest: self._mine.add(
                    file=file.name, digest=digest, segment_bytes=limits.buffer_bytes
                ),
            )
            copier.copy(todo, in_order=self._in_order)
            verify_rest(self._files, limits.usable_threads)
            if not self._mine.is_complete:
                self._mine.add(complete=True)
            published = self._publish_if_last()
        except BaseException as error:
            self._clean_up(keep_finished=isinstance(error, (OSError, KeyboardInterrupt)))
            raise
        finally:
            self._store.folders.remove_empty()
        return Outcome(tuple(file.name for file in todo), tuple(kept), published)

    def _start(self) -> None:
        """Begin the journal, and look again at what is in the target: another run may have ended since.

        Raises:
            ConversionError: if another run is writing there, or has written there and may not be overwritten.
        """
        try:
            self._mine.start()
        except BaseException:
            self._store.folders.remove_empty()
            raise
        if self._options.part.count > 1 or self._plan.single_file:
            return  # other parts write there; and one file is replaced whole
        listed = [name for name in self._store.list_files() if name != self._mine.name]
        new = [name for name in listed if name not in self._old_files and not is_leftover(name)]
        if new and not self._options.overwrite:
            self._store.remove(self._mine.name)
            raise refuse_other_result(self._url)
        self._old_files = [*dict.fromkeys([*self._old_files, *new])]

    def _is_done(self) -> bool:
        """Whether the target has this very result: the run that made it was stopped after its last step.

        Nothing but the bytes can tell, since names and sizes are the same for every step of a training: they are
        read, and made again from the source.

        Raises:
            ConversionError: if they differ, and neither an interrupted run nor ``overwrite`` allows to replace them.
        """
        if not _may_be_result(self._plan, self._store):
            return False

        def create(file: FilePlan) -> FileWriter:
            out = ComparedFile(self._store, file.name)
            return self._plan.wrap(file.name, out) if self._plan.wrap else out

        limits = self._options.limits
        copier = Copier(limits, create, self._store.retrying, lambda _: None, lambda *_: None)
        try:
            copier.copy(self._files, in_order=self._in_order)
            self._plan.when_written(self._store.read)
            for closing in self._plan.closing:
                ComparedFile(self._store, closing.name).write_at(0, [b"".join(closing.pieces())])
        except OtherBytesError:
            if self._options.overwrite or any(is_journal(name) for name in self._old_files):
                return False
            raise refuse_other_result(self._url) from None
        verify_rest(self._files, limits.usable_threads)
        self._progress(sum(file.tensor_nbytes for file in self._files))
        return True

    def _prove_room(self, files: Sequence[FilePlan]) -> None:
        """Refuse what surely does not fit, before the first byte."""
        free_bytes, needed_bytes = self._store.free_bytes, sum(file.nbytes for file in files)
        if free_bytes is None or needed_bytes <= free_bytes:
            return
        # What a run that was killed has left is removed before it is written anew.
        left_bytes = sum(self._store.size(self._store.working_name(file.name)) or 0 for file in files)
        if needed_bytes > free_bytes + left_bytes:
            raise ConversionError(
                "There is no room for the result.",
                expected=f"{needed_bytes} bytes free",
                got=f"{free_bytes + left_bytes}",
                where=self._store.where,
                todo="remove what is not needed, or write to another disk; nothing was written",
            )

    def _keep_finished(self) -> list[str]:
        """Files an earlier run finished, each read again and compared with its digest."""
        if not self._options.resume:
            return []
        self._mine.claim()
        if not self._mine.load():
            return []
        self._store.folders.adopt_parents(file.name for file in self._files)
        intact: set[str] = set()

        def check(files: Shared[FilePlan]) -> None:
            intact.update(file.name for file in files if self._is_intact(file))

        in_threads(self._options.limits.usable_threads, check, self._files)
        return [file.name for file in self._files if file.name in intact]

    def _is_intact(self, file: FilePlan) -> bool:
        """Under its partial name, or its final one: publishing was interrupted, or another part is at it."""
        digest, buffer_bytes = self._mine.finished.get(file.name, ("", 0))
        for name in dict.fromkeys((self._store.working_name(file.name), file.name)):
            if digest and self._store.size(name) == file.nbytes:
                read = partial(self._store.read, name)
                with suppress(CorruptCheckpointError):  # another part renamed it just now
                    if written_digest(file, read, buffer_bytes, in_order=self._in_order) == digest:
                        return True
        return False

    def _is_published(self) -> bool:
        """Whether another part has put all in place: it removes the journals after that."""
        return self._store.size(self._mine.name) is None

    @property
    def _in_order(self) -> bool:
        return self._store.in_order

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
            if self._store.in_order:
                self._mine.require_mine()
            self._plan.when_written(self._read_written)
            for closing in self._plan.closing:  # what may fail comes before the first final name
                staged[closing.name] = self._store.stage(closing.name, closing.pieces, str(part.index))
            self._remove_old(leftovers=True)
            for file in self._plan.files:
                self._store.rename(self._store.working_name(file.name), file.name)
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
        owners = () if self._store.in_order else range(self._options.part.count)
        closing = [file.name for file in self._plan.closing]
        return {self._store.working_name(name, str(owner)) for name in closing for owner in owners}

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


class OtherBytesError(Exception):
    """A file has other bytes than those that were to be written."""


class ComparedFile(FileWriter):
    """Takes the place of an output; raises `OtherBytesError` where the file does not have the bytes."""

    def __init__(self, store: Storage, name: str) -> None:
        self._store, self._name = store, name

    def write_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            wanted = memoryview(buffer).cast("B")
            size = self._store.required_info(self._name).size_bytes
            if offset_bytes + len(wanted) > size:
                raise OtherBytesError(self._name)
            if self._store.read(self._name, offset_bytes, len(wanted)) != wanted:
                raise OtherBytesError(self._name)
            offset_bytes += len(wanted)

    def close(self) -> None:
        """Nothing was opened."""

    def abort(self) -> None:
        """Nothing was written."""


def open_target(
    url: str,
    *,
    source_url: str,
    single_file: bool,
    overwrite: bool,
    resume: bool,
    is_result: Callable[[Storage], bool],
) -> tuple[Storage, str, list[str]]:
    """The store a target is written to, the file's name if the target is one file, and the old files in it.

    Args:
        is_result: whether what is there may be the result of the same conversion.

    Raises:
        ConversionError: if the target is over, inside or around the source, of the wrong kind, or not empty
            (leftovers of an interrupted run do not count when resuming): where writing could harm anything.
    """
    target, source = open_store(url).location, open_store(source_url).location
    shared = min(len(target), len(source))
    # A single file has nothing inside it, so only being inside the source, or the source, is harmful.
    if target[:shared] == source[:shared] and not (single_file and len(target) < len(source)):
        expected = "a place outside of the source, and not around it"
        raise _refusal(url, expected, f"the source is {source_url}", "choose another target")
    store, name = open_parent(url) if single_file else (open_store(url), "")
    if isinstance(store, LocalStorage):
        in_the_way = next((path for path in (store.root, *store.root.parents) if path.is_file()), None)
        if in_the_way is not None:
            raise _refusal(url, "a folder", f"a file {in_the_way}", "choose another target")
    path = store.root / name if isinstance(store, LocalStorage) else None
    if path is not None and path.exists() and not (path.is_dir() or path.is_file()):
        raise _refusal(url, "a new name, or that of a file", "a device or a pipe", "choose another target")
    if single_file and (not name or (isinstance(store, LocalStorage) and (store.root / name).is_dir())):
        raise _refusal(url, "a file", "a folder", "add a file name to the target")
    ours = dict.fromkeys((name, store.working_name(name), f".{name}.vescale-convert.jsonl"))
    files = [file for file in ours if store.size(file) is not None] if single_file else store.list_files()
    interrupted = any(is_journal(file) for file in files)
    blocking = files if not resume else [file for file in files if not is_leftover(file)]
    if blocking and not overwrite and not (resume and interrupted) and not is_result(store):
        todo = (
            "continue the interrupted conversion with --resume, or start over with --overwrite"
            if interrupted
            else "choose another target, or pass --overwrite to replace what is there"
        )
        some = ", ".join(blocking[:3])
        raise _refusal(url, "an empty or new target", f"{len(blocking)} files: {some}", todo)
    return store, name, files


def is_leftover(name: str) -> bool:
    """Whether a file was left by an interrupted conversion."""
    base = name.rpartition("/")[2]
    return is_journal(name) or (base.startswith(".") and base.endswith(".partial"))


def refuse_other_result(url: str) -> ConversionError:
    """What is in the target has the files of this conversion, with other bytes."""
    return _refusal(
        url,
        "the result of this conversion, or of one that was interrupted",
        "that of another, or of a source that has changed",
        "choose another target, or pass --overwrite to replace what is there",
    )


def _refusal(url: str, expected: str, got: str, todo: str) -> ConversionError:
    return ConversionError(
        "The result cannot be written there.", expected=expected, got=got, where=url, todo=todo
    )
