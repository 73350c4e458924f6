"""The files of a conversion's result while they are written: temporary names, a journal, publication.

    state                     data files          other files
    before                    absent, or the old ones if overwriting
    while converting          .NAME.partial       a journal
    killed                    .NAME.partial       the journal: --resume goes on
    failed                    (removed)           (removed, and the folders that were made)
    done                      NAME                old weights and journal removed, index last

Object stores cannot rename: there each object appears complete when its upload ends, the deciding one last, and an
old result's index is removed before the first new object appears.

Parts: process i of n writes every n-th file, and its own journal. The process that finds all n journals complete writes
the closing files and publishes. No process waits for another, so array jobs may run in any order, at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from vescale_fsdp.checkpoint.storage.base import Buffer, FileWriter, StagedFile, Storage
from vescale_fsdp.checkpoint.storage.journal import Journal, is_journal, journal_name, parts_of
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.checkpoint.storage.open import open_parent, open_store
from vescale_fsdp.errors import ConversionError

Read = Callable[[str, int, int], bytes]
"""Reads bytes of a data file: name, offset, number of bytes."""

Pieces = Callable[[], Iterable[bytes]]
"""Makes the bytes of a small file."""


@dataclass(frozen=True)
class ResultFiles:
    """The files of a result, by name.

    Args:
        sizes: bytes of each data file, by name. Processes take the files in turn, in this order (see ``part``).
        closing: the small files that are written after all data files; the last one makes the result valid.
        is_stale: whether an old file must be removed when the result is published.
        single_file: whether the target is one file rather than a folder.
        fingerprint: equal for equal results.
    """

    sizes: Mapping[str, int]
    closing: tuple[str, ...]
    is_stale: Callable[[str], bool]
    single_file: bool
    fingerprint: str


class Output:
    """One process's share of a result that is being written.

    Args:
        url: where the result goes.
        files: the files of the result.
        source_url: the source, which must not be written to.
        overwrite: replace what is in the target.
        resume: continue an interrupted run of the same conversion, or start if there was none.
        part: (index, count): this process writes every ``count``-th data file, from number ``index`` on.
        requested: the options that determine the result, by the command line's names; errors name options that differ.

    Attributes:
        store: the storage of the target.
        share: names of the data files that this process writes.

    Raises:
        ConversionError: if the target is refused.
    """

    def __init__(
        self,
        url: str,
        files: ResultFiles,
        *,
        source_url: str,
        overwrite: bool,
        resume: bool,
        part: tuple[int, int],
        requested: Mapping[str, str],
    ) -> None:
        index, count = part
        self._url, self._files, self._part, self._overwrite = url, files, part, overwrite
        self.store, name = _open_target(url, source_url, single_file=files.single_file)
        stems = [name] if count == 1 else [f"{name}part-{each}-of-{count}" for each in range(count)]
        self._journals = [Journal(self.store, stem, files.fingerprint, requested) for stem in stems]
        self._own = self._journals[index]
        self.share = tuple(files.sizes)[index::count]
        self._writers: dict[str, FileWriter] = {}
        # Parts may start in any order, so files of other parts may be there already.
        self._old = self._list_old(name, resume=resume or count > 1, may_be_result=resume)

    def _list_old(self, name: str, *, resume: bool, may_be_result: bool) -> list[str]:
        """The files in the target; raises if some of them may be neither replaced nor continued."""
        if self._files.single_file:
            names = dict.fromkeys((name, self.store.working_name(name), journal_name(name)))
            old = [each for each in names if self.store.size(each) is not None]
        else:
            old = self.store.list_files()
        if self._overwrite:
            return old
        interrupted = any(map(is_journal, old))
        blocking = [each for each in old if not (resume and is_leftover(each))]
        if blocking and not (resume and interrupted) and not (may_be_result and self.may_be_complete):
            todo = (
                "continue the interrupted conversion with --resume, or start over with --overwrite"
                if interrupted
                else "choose another target, or pass --overwrite to replace what is there"
            )
            got = f"{len(blocking)} files: {', '.join(blocking[:3])}"
            raise _refusal(self._url, "an empty or new target", got, todo)
        # With another number of parts, two runs would write the same file.
        index, count = self._part
        if counts := {parts_of(each) for each in old} - {None, count}:
            others = ("no --part" if n == 1 else f"--part I/{n}" for n in sorted(filter(None, counts)))
            raise ConversionError(
                "The interrupted conversion had another number of parts.",
                expected=" or ".join(others),
                got=f"part {index} of {count}",
                where=self._url,
                todo="resume with as many parts as it had, or start over with --overwrite",
            )
        return old

    @property
    def may_be_complete(self) -> bool:
        """Whether all files exist under their final names, and data files have the planned sizes."""
        return all(self.store.size(name) == nbytes for name, nbytes in self._files.sizes.items()) and all(
            self.store.size(name) is not None for name in self._files.closing
        )

    @property
    def had_journal(self) -> bool:
        """Whether this part's journal was there when the target was listed."""
        return self._own.name in self._old

    @property
    def is_published(self) -> bool:
        """Whether another part has published the result: publication ends with the removal of all journals."""
        return self.store.size(self._own.name) is None

    @property
    def may_replace(self) -> bool:
        """Whether a result with other bytes may be replaced."""
        return self._overwrite or any(map(is_journal, self._old))

    def resume(
        self, find_intact: Callable[[Mapping[str, tuple[str, int]]], Collection[str]]
    ) -> Collection[str]:
        """Lock and read the journal of an earlier run.

        Args:
            find_intact: takes each file that the run finished, with its digest and the buffer size that the digest
                depends on; returns the names of the files that still have these digests.

        Returns:
            What ``find_intact`` returns.

        Raises:
            ConversionError: if that run was of another conversion, or another run is writing to the target.
        """
        try:
            self._own.claim()
            if not self._own.load():
                return ()
            self.store.folders.adopt_parents(self.share)
            finished = self._own.finished
            return find_intact({name: finished[name] for name in self.share if name in finished})
        except BaseException:
            self._own.release()
            raise

    def finished_copies(self, name: str) -> Iterator[str]:
        """The names under which a finished file exists: the temporary name, or the final one if a run was interrupted
        while it published. A generator, since another part may rename the file between two look-ups."""
        for each in dict.fromkeys((self.store.working_name(name), name)):  # streams have one name for both
            if self.store.size(each) == self._files.sizes[name]:
                yield each

    @contextmanager
    def writing(self, names: Sequence[str]) -> Iterator[None]:
        """Write these files inside the block; the target is unlocked after it.

        After an error nothing of this run is left, except that finished files of a run that ran out of space or was
        stopped by hand are kept for ``--resume``.

        Raises:
            ConversionError: if there is no room, another run is writing to the target, or the target has files that may
                not be overwritten.
        """
        try:
            self._check_room(names)
            is_new = not self._own.is_started
            if is_new:
                self._start()
            try:
                # A new object appears at once: the old index must not describe it.
                if is_new and self.store.in_order:
                    self._remove_old(leftovers=False)
                yield
            except BaseException as error:
                # A full disk or a stop by hand: the finished files are good.
                self._clean_up(keep_finished=isinstance(error, (OSError, KeyboardInterrupt)))
                raise
            finally:
                self.store.folders.remove_empty()
        finally:
            self._own.release()

    def _check_room(self, names: Sequence[str]) -> None:
        """Refuse a result that does not fit, before its first byte is written."""
        free_bytes, needed_bytes = self.store.free_bytes, sum(self._files.sizes[name] for name in names)
        if free_bytes is None or needed_bytes <= free_bytes:
            return
        # Files that a killed run left are removed before they are written again, which frees their space.
        left_bytes = sum(self.store.size(self.store.working_name(name)) or 0 for name in names)
        if needed_bytes > free_bytes + left_bytes:
            raise ConversionError(
                "There is no room for the result.",
                expected=f"{needed_bytes} bytes free",
                got=f"{free_bytes + left_bytes}",
                where=self.store.where,
                todo="remove what is not needed, or write to another disk; nothing was written",
            )

    def _start(self) -> None:
        """Begin the journal, and list the target again: another run may have ended since the first listing."""
        try:
            self._own.start()
        except BaseException:
            self.store.folders.remove_empty()
            raise
        if len(self._journals) > 1 or self._files.single_file:
            return  # other parts' new files belong there; a single file is replaced as a whole
        listed = [name for name in self.store.list_files() if name != self._own.name]
        new = [name for name in listed if name not in self._old and not is_leftover(name)]
        if new and not self._overwrite:
            self.store.remove(self._own.name)
            raise self.other_result()
        self._old = [*dict.fromkeys([*self._old, *new])]

    def create(self, name: str) -> FileWriter:
        """Open a data file for writing, under its temporary name."""
        working = self.store.working_name(name)
        if name in self._writers:
            self._writers[name].abort()  # left by a failed attempt
        elif not self.store.in_order:
            self.store.remove(working)  # left by a killed run
        self._writers[name] = self.store.create(working, self._files.sizes[name])
        return self._writers[name]

    def finish(self, name: str, digest: str, buffer_bytes: int) -> None:
        """Record a complete file in the journal."""
        self._own.add(file=name, digest=digest, segment_bytes=buffer_bytes)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Bytes of a data file under its temporary name, or its final one: another part may be publishing."""
        working = self.store.working_name(name)
        return self.store.read(name if self.store.size(working) is None else working, offset, nbytes)

    def publish(self, closing: Mapping[str, Pieces], when_written: Callable[[Read], None]) -> bool:
        """Record that this process's share is complete. If all other parts are complete too, give all files their
        final names; two processes may do so at once.

        Args:
            closing: the small files, which are written now; the last one makes the result valid.
            when_written: called with a function that reads the data files, before the first small file is made.

        Returns:
            Whether the result is published.
        """
        if not self._own.is_complete:
            self._own.add(complete=True)
        others = (journal for journal in self._journals if journal is not self._own)
        if not all(journal.load() and journal.is_complete for journal in others):
            return self.is_published
        if self.store.in_order:  # object stores have no locks
            self._own.require_mine()
        when_written(self.read)
        index, count = self._part
        staged: dict[str, StagedFile] = {}
        published: list[str] = []
        try:
            for name, pieces in closing.items():  # work that may fail comes before the first final name
                staged[name] = self.store.stage(name, pieces, str(index))
            self._remove_old(leftovers=True)  # an old index must not describe the new files
            for name in self._files.sizes:
                self.store.rename(self.store.working_name(name), name)
            for name, file in staged.items():
                file.publish()
                published.append(name)
        except BaseException:
            for file in staged.values():
                file.abort()
            for name in published if count == 1 else ():  # another part may have published the same file
                self.store.remove(name)
            raise
        # Remove the staged files of a part that was killed while it published.
        for name in self._staged_names.intersection(self._old):
            self.store.remove(name)
        for journal in self._journals:
            self.store.remove(journal.name)  # last: without journals, the result counts as published
        return True

    @property
    def _staged_names(self) -> set[str]:
        """The temporary names of the closing files of all parts."""
        owners = () if self.store.in_order else range(len(self._journals))
        return {self.store.working_name(name, str(owner)) for name in self._files.closing for owner in owners}

    def _remove_old(self, *, leftovers: bool) -> None:
        """Remove old files that are not part of the result, and closing files of an old result."""
        kept, closing = set(self._files.sizes), set(self._files.closing)
        kept |= {self.store.working_name(name) for name in kept}
        kept |= {journal.name for journal in self._journals} | self._staged_names  # needed until the end
        old = [name for name in self._old if name not in kept]
        stale = self._files.is_stale
        old = [name for name in old if name in closing or stale(name) or (leftovers and is_leftover(name))]
        for name in old:
            self.store.remove(name)
        self.store.folders.adopt_parents(old)

    def _clean_up(self, *, keep_finished: bool) -> None:
        """Remove what this run and the interrupted run before it have written."""
        finished = self._own.finished if keep_finished else {}
        for name, writer in self._writers.items():
            if name not in finished:
                writer.abort()
        if finished:
            return
        for name in self.share:
            # Objects have no temporary names: one that this run has not finished may be an old object.
            if not self.store.in_order or name in self._own.finished:
                self.store.remove(self.store.working_name(name))
        self.store.remove(self._own.name)

    def other_result(self) -> ConversionError:
        """The error for a target whose files have the names, but not the bytes, of this conversion's result."""
        return _refusal(
            self._url,
            "the result of this conversion, or of one that was interrupted",
            "the result of another conversion, or of a source that has changed",
            "choose another target, or pass --overwrite to replace what is there",
        )


class OtherBytesError(Exception):
    """A file's bytes differ from the bytes that would be written."""


class ComparedFile(FileWriter):
    """Compares a file with the bytes that would be written to it; raises `OtherBytesError` if they differ."""

    def __init__(self, store: Storage, name: str) -> None:
        self._store, self._name = store, name

    def write_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            expected = memoryview(buffer).cast("B")
            stop = offset_bytes + len(expected)
            if (
                stop > self._store.required_info(self._name).size_bytes
                or self._store.read(self._name, offset_bytes, len(expected)) != expected
            ):
                raise OtherBytesError(self._name)
            offset_bytes = stop

    def close(self) -> None:
        """Nothing was opened."""

    def abort(self) -> None:
        """Nothing was written."""


def _open_target(url: str, source_url: str, *, single_file: bool) -> tuple[Storage, str]:
    """The storage of a target, and the file's name there if the target is one file.

    Raises:
        ConversionError: if the target is the source, is inside or around the source, or is of the wrong kind: writing
            could destroy something.
    """
    target, source = open_store(url).location, open_store(source_url).location
    shared = min(len(target), len(source))
    # A single file has nothing inside it: it may be in a folder around the source.
    if target[:shared] == source[:shared] and not (single_file and len(target) < len(source)):
        expected = "a target that is neither inside nor around the source"
        raise _refusal(url, expected, f"the source is {source_url}", "choose another target")
    store, name = open_parent(url) if single_file else (open_store(url), "")
    if single_file and not name:
        raise _refusal(url, "a file", "a folder", "add a file name to the target")
    if isinstance(store, LocalStorage):
        path = store.root / name
        blocking = next((each for each in (store.root, *store.root.parents) if each.is_file()), None)
        if blocking is not None:
            raise _refusal(url, "a folder", f"a file {blocking}", "choose another target")
        if path.exists() and not (path.is_dir() or path.is_file()):
            raise _refusal(
                url, "a new name, or that of a file", "a device or a pipe", "choose another target"
            )
        if single_file and path.is_dir():
            raise _refusal(url, "a file", "a folder", "add a file name to the target")
    return store, name


def is_leftover(name: str) -> bool:
    """Whether a file was left by an interrupted conversion."""
    base = name.rpartition("/")[2]
    return is_journal(name) or (base.startswith(".") and base.endswith(".partial"))


def _refusal(url: str, expected: str, got: str, todo: str) -> ConversionError:
    return ConversionError(
        "The result cannot be written there.", expected=expected, got=got, where=url, todo=todo
    )
