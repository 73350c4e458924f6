"""Manage the files of a conversion's result while they are written: temporary names, a journal, publication.

    state                     data files          other files
    before                    absent, or files of an old result if overwriting
    while converting          .NAME.partial       a journal
    killed                    .NAME.partial       the journal, with which --resume continues
    failed                    (removed)           (removed, like the folders that were made)
    done                      NAME                old weights and journal removed, index written last

Object stores cannot rename. There each object becomes visible when its upload is complete; the index or manifest, which
makes the result valid, is written last. The index of an old result is removed before the first new object appears.

Parts: process i of n writes every n-th file and its own journal. The process that finds all n journals complete writes
the closing files and publishes the result. No process waits for another, so array jobs may run in any order, at any
time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from vescale_fsdp.checkpoint.storage.base import Buffer, FileWriter, StagedFile, Storage
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.checkpoint.storage.open import open_parent, open_store
from vescale_fsdp.conversion.engine.journal import Journal, is_journal, journal_name, parts_of
from vescale_fsdp.conversion.engine.plan import OutputPlan
from vescale_fsdp.errors import ConversionError, option


class Output:
    """One process's share of a result that is being written.

    Args:
        url: path or URL of the target.
        plan: the plan of the result. Processes take its data files in turn, in this order (see ``part``).
        source_urls: paths or URLs of the sources, which must not be written to.
        overwrite: replace existing files in the target.
        resume: continue an interrupted run of the same conversion, or start a new run if there was none.
        part: (index, count): this process writes every ``count``-th data file, from number ``index`` on.
        requested: name -> value of the options that determine the result; errors name options that differ.

    Attributes:
        store: the storage of the target.
        share: names of the data files that this process writes.

    Raises:
        ConversionError: if the target is refused.
    """

    def __init__(
        self,
        url: str,
        plan: OutputPlan,
        *,
        source_urls: Iterable[str],
        overwrite: bool,
        resume: bool,
        part: tuple[int, int],
        requested: Mapping[str, object],
    ) -> None:
        index, count = part
        self._url, self._plan, self._part, self._overwrite = url, plan, part, overwrite
        self._sizes = {file.name: file.nbytes for file in plan.files}
        self.store, name = _open_target(url, source_urls, single_file=plan.single_file)
        digest = plan.digest()  # computed once: it takes time
        stems = [name] if count == 1 else [f"{name}part-{each}-of-{count}" for each in range(count)]
        self._journals = [Journal(self.store, stem, digest, requested) for stem in stems]
        self._own = self._journals[index]
        self.share = tuple(self._sizes)[index::count]
        self._writers: dict[str, FileWriter] = {}
        # With several parts, files of other parts may exist already, since parts start in any order.
        self._old = self._list_old(name, resume=resume or count > 1, may_be_result=resume)

    def _list_old(self, name: str, *, resume: bool, may_be_result: bool) -> list[str]:
        """Return the files in the target; raises if they may be neither replaced nor continued.

        Args:
            name: name of the target if it is a single file, else empty.
            resume: whether leftovers of other processes or runs are allowed.
            may_be_result: whether a complete result is allowed, which is then compared with this one.
        """
        if self._plan.single_file:
            # A dict, because streams have the same name twice.
            names = dict.fromkeys((name, self.store.working_name(name), journal_name(name)))
            old = [each for each in names if self.store.size(each) is not None]
        else:
            old = self.store.list_files()
        if self._overwrite:
            return old
        interrupted = any(map(is_journal, old))
        blocking = [each for each in old if not (resume and is_leftover(each))]
        # With a journal, files may have final names because an earlier run was interrupted during publication.
        if blocking and not (resume and interrupted) and not (may_be_result and self.may_be_complete):
            todo = (
                f"continue the interrupted conversion with {option('resume', True)}, or start over with "
                f"{option('overwrite', True)}"
                if interrupted
                else f"choose another target, or pass {option('overwrite', True)} to replace the existing files"
            )
            got = f"{len(blocking)} files: {', '.join(blocking[:3])}"
            raise _refusal(self._url, "an empty or new target", got, todo)
        # Two runs with different numbers of parts would write the same file.
        index, count = self._part
        if counts := {parts_of(each) for each in old} - {None, count}:
            raise ConversionError(
                "The interrupted conversion had another number of parts.",
                expected=" or ".join(map(str, sorted(filter(None, counts)))) + " in all",
                got=f"part {index} of {count}",
                where=self._url,
                todo=f"resume with as many parts as it had, or start over with {option('overwrite', True)}",
            )
        return old

    @property
    def may_be_complete(self) -> bool:
        """Whether all files exist under their final names, and data files have their planned sizes."""
        return all(self.store.size(name) == nbytes for name, nbytes in self._sizes.items()) and all(
            self.store.size(file.name) is not None for file in self._plan.closing
        )

    @property
    def had_journal(self) -> bool:
        """Whether this part's journal existed when the target was listed."""
        return self._own.name in self._old

    @property
    def is_published(self) -> bool:
        """Whether another part has published the result: publication ends with the removal of all journals."""
        return self.store.size(self._own.name) is None

    @property
    def may_replace(self) -> bool:
        """Whether an existing result with other bytes may be replaced."""
        return self._overwrite or any(map(is_journal, self._old))

    def resume(
        self, find_intact: Callable[[Mapping[str, tuple[str, int]]], Collection[str]]
    ) -> Collection[str]:
        """Lock and read the journal of an earlier run.

        Args:
            find_intact: takes a dict: name of each file that the run finished -> (digest, size of the buffers that the
                digest depends on). Returns the names of the files that still have their digests.

        Returns:
            The result of ``find_intact``; empty if there was no earlier run.

        Raises:
            ConversionError: if the earlier run was another conversion, or another run is writing to the target.
        """
        try:
            self._own.claim()
            if not self._own.load():
                return ()
            # If this run fails, it removes the earlier run's folders too.
            self.store.folders.adopt_parents(self.share)
            finished = self._own.finished
            return find_intact({name: finished[name] for name in self.share if name in finished})
        except BaseException:  # Ctrl-C too must release the lock
            self._own.release()
            raise

    def finished_copies(self, name: str) -> Iterator[str]:
        """Return the names under which a finished file exists: its temporary name, or its final name if a run was
        interrupted during publication.

        A generator, because another part may rename the file between the two look-ups.
        """
        for each in dict.fromkeys((self.store.working_name(name), name)):  # streams have one name for both
            if self.store.size(each) == self._sizes[name]:
                yield each

    @contextmanager
    def writing(self, names: Sequence[str]) -> Iterator[None]:
        """Prepare the target for writing these files in the block, and unlock it afterward.

        After an error, all files of this run are removed. One exception: after a full disk, another OSError or Ctrl-C,
        finished files are kept for ``--resume``.

        Raises:
            ConversionError: if the disk has too little space, another run is writing to the target, or the target has
                files that may not be overwritten.
        """
        try:
            self._check_room(names)
            is_new = not self._own.is_started  # otherwise `resume` has read the journal of an earlier run
            if is_new:
                self._start()
            try:
                # New objects are visible at once, and an old index must not describe them.
                if is_new and self.store.in_order:
                    self._remove_old(leftovers=False)
                yield
            except BaseException as error:  # after a full disk or Ctrl-C, the finished files are good
                self._clean_up(keep_finished=isinstance(error, (OSError, KeyboardInterrupt)))
                raise
            finally:
                self.store.folders.remove_empty()
        finally:
            self._own.release()

    def _check_room(self, names: Sequence[str]) -> None:
        """Raise if the disk has too little space for these files, before the first byte is written."""
        free_bytes, needed_bytes = self.store.free_bytes, sum(self._sizes[name] for name in names)
        if free_bytes is None or needed_bytes <= free_bytes:
            return
        # Files of a killed run are removed before they are written again, which frees their space.
        left_bytes = sum(self.store.size(self.store.working_name(name)) or 0 for name in names)
        if needed_bytes > free_bytes + left_bytes:
            raise ConversionError(
                "There is not enough free space for the result.",
                expected=f"{needed_bytes} bytes free",
                got=f"{free_bytes + left_bytes}",
                where=self.store.where,
                todo="remove files that are not needed, or write to another disk; nothing was written",
            )

    def _start(self) -> None:
        """Create the journal, and list the target again: another run may have published since the first listing."""
        try:
            self._own.start()
        except BaseException:  # Ctrl-C too leaves no empty folders
            self.store.folders.remove_empty()  # the journal's folders
            raise
        if len(self._journals) > 1 or self._plan.single_file:
            return  # new files may be those of other parts; a single file is replaced as a whole
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
        elif not self.store.in_order:  # an object store replaces an old object itself
            self.store.remove(working)  # left by a killed run
        self._writers[name] = self.store.create(working, self._sizes[name])
        return self._writers[name]

    def finish(self, name: str, digest: str, buffer_bytes: int) -> None:
        """Record a complete file in the journal."""
        self._own.add(file=name, digest=digest, segment_bytes=buffer_bytes)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return bytes of a data file, under its temporary name or, if another part has renamed it, its final name."""
        working = self.store.working_name(name)
        return self.store.read(name if self.store.size(working) is None else working, offset, nbytes)

    def publish(self) -> bool:
        """Record that this process's share is complete. If all other parts are complete too, publish the result.

        Two processes may publish at the same time: renames that another process has done are skipped.

        Returns:
            Whether the result is published.
        """
        if not self._own.is_complete:
            self._own.add(complete=True)
        others = (journal for journal in self._journals if journal is not self._own)
        if not all(journal.load() and journal.is_complete for journal in others):
            return self.is_published
        if self.store.in_order:  # an object store, without locks: another run may have begun
            self._own.require_mine()
        self._plan.when_written(self.read)
        index, count = self._part
        staged: dict[str, StagedFile] = {}
        published: list[str] = []
        try:
            for closing in self._plan.closing:  # before the first rename, because this work may fail
                staged[closing.name] = self.store.stage(closing.name, closing.pieces, str(index))
            self._remove_old(leftovers=True)  # an old index must not describe the new files
            for name in self._sizes:
                self.store.rename(self.store.working_name(name), name)
            for name, file in staged.items():
                file.publish()
                published.append(name)
        except BaseException:  # Ctrl-C too: a result is published as a whole, or not at all
            for file in staged.values():
                file.abort()
            # Not with several parts: another part may have published the same files.
            for name in published if count == 1 else ():
                self.store.remove(name)
            raise
        # Remove the staged files of a part that was killed while it published.
        for name in self._staged_names.intersection(self._old):
            self.store.remove(name)
        for journal in self._journals:
            self.store.remove(journal.name)  # last, because `is_published` looks for journals
        return True

    @property
    def _staged_names(self) -> set[str]:
        """Temporary names of the closing files, for all parts; streams have none."""
        owners = () if self.store.in_order else range(len(self._journals))
        closing = self._plan.closing
        return {self.store.working_name(file.name, str(owner)) for file in closing for owner in owners}

    def _remove_old(self, *, leftovers: bool) -> None:
        """Remove stale files and closing files of an old result.

        Args:
            leftovers: whether to remove temporary files and journals of interrupted conversions too.
        """
        kept, closing = set(self._sizes), {file.name for file in self._plan.closing}
        kept |= {self.store.working_name(name) for name in kept}
        # Journals and staged files are needed until publication ends.
        kept |= {journal.name for journal in self._journals} | self._staged_names
        old = [name for name in self._old if name not in kept]
        stale = self._plan.is_stale
        old = [name for name in old if name in closing or stale(name) or (leftovers and is_leftover(name))]
        for name in old:
            self.store.remove(name)
        self.store.folders.adopt_parents(old)

    def _clean_up(self, *, keep_finished: bool) -> None:
        """Remove the files of this run and of the interrupted run that it resumed.

        Args:
            keep_finished: keep finished files, if any, and the journal.
        """
        finished = self._own.finished if keep_finished else {}
        for name, writer in self._writers.items():
            if name not in finished:
                writer.abort()
        if finished:
            return
        for name in self.share:
            # Objects have no temporary names. An object that the journal does not list may belong to an old result.
            if not self.store.in_order or name in self._own.finished:
                self.store.remove(self.store.working_name(name))
        self.store.remove(self._own.name)

    def other_result(self) -> ConversionError:
        """Return the error for a target whose files have the names but not the bytes of this conversion's result."""
        return _refusal(
            self._url,
            "the result of this conversion, or of one that was interrupted",
            "the result of another conversion, or of a source that has changed",
            f"choose another target, or pass {option('overwrite', True)} to replace the existing files",
        )


class OtherBytesError(Exception):
    """Raised by `ComparedFile`: a file's bytes differ from the bytes that would be written."""


class ComparedFile(FileWriter):
    """A writer that writes nothing: it compares a file with the bytes, and raises `OtherBytesError` if they differ."""

    def __init__(self, store: Storage, name: str) -> None:
        self._store, self._name = store, name

    def write_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            expected = memoryview(buffer).cast("B")
            stop = offset_bytes + len(expected)
            if (  # the size first: a read past the end would be reported as damage
                stop > self._store.required_info(self._name).size_bytes
                or self._store.read(self._name, offset_bytes, len(expected)) != expected
            ):
                raise OtherBytesError(self._name)
            offset_bytes = stop

    def close(self) -> None:
        """Do nothing: no file was opened."""

    def abort(self) -> None:
        """Do nothing: no file was written."""


def _open_target(url: str, source_urls: Iterable[str], *, single_file: bool) -> tuple[Storage, str]:
    """Open the storage of a target; returns it with the file's name if the target is a single file, else with "".

    Raises:
        ConversionError: if writing could destroy data: the target is a source, is inside it, contains it, or is a
            folder where a file is expected (or the reverse).
    """
    target = open_store(url).location
    for source_url in source_urls:
        source = open_store(source_url).location
        shared = min(len(target), len(source))
        # A single file contains nothing, so a source with a longer path cannot be inside it.
        if target[:shared] == source[:shared] and not (single_file and len(target) < len(source)):
            expected = "a target that is neither inside nor around the source"
            raise _refusal(url, expected, f"the source is {source_url}", "choose another target")
    store, name = open_parent(url) if single_file else (open_store(url), "")
    if single_file and not name:
        raise _refusal(url, "a file", "a folder", "add a file name to the target")
    if isinstance(store, LocalStorage):  # object stores have neither folders nor devices
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
    """Return whether a file was left by an interrupted conversion."""
    base = name.rpartition("/")[2]
    return is_journal(name) or (base.startswith(".") and base.endswith(".partial"))


def _refusal(url: str, expected: str, got: str, todo: str) -> ConversionError:
    """Return the error for a target that cannot be used."""
    return ConversionError(
        "The result cannot be written to this target.", expected=expected, got=got, where=url, todo=todo
    )
