"""The journal of a conversion in progress, a file next to its output, so that a killed conversion can be resumed.

The journal has one JSON object per line: first a digest of the plan, then one line per finished file. A line is
appended only after its file is complete. If a kill has cut off the last line, its file is written again.

Only one run writes to a target. On a local disk, the journal is created exclusively and locked with `flock`; the kernel
releases the lock when the run is killed. Object stores have no locks: there the run that started first fails at its
next file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import ConversionError, option

# Keys of ``requested`` that are no options.
SOURCE, SOURCE_FILES, EXPRESSION = "source", "files of the source", "expression"
_VERSION = 1  # of the journal's format; a journal of another version is not resumed
# Errors of file systems that do not support flock.
_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK)
_SUFFIX = ".vescale-convert.jsonl"
_OF_PART = re.compile(rf"(?:\.part-\d+-of-(\d+))?{re.escape(_SUFFIX)}")


def journal_name(stem: str) -> str:
    """Return the file name of a journal; ``stem`` is empty if one process writes the target, which is a folder."""
    return f".{stem}{_SUFFIX}" if stem else _SUFFIX


def is_journal(name: str) -> bool:
    """Return whether a file in a target folder is a journal."""
    return name.endswith(_SUFFIX)


def parts_of(name: str) -> int | None:
    """Return the number of parts of a conversion, from the name of a journal; None if the file is not a journal."""
    match = _OF_PART.fullmatch(name)
    return None if match is None else int(match[1] or 1)  # 1: the journal's name has no part


@dataclass
class Journal:
    """The journal of one plan, or of one part of it.

    Args:
        store: the storage of the target.
        stem: see `journal_name`.
        digest: identifies the plan.
        requested: name -> value of the options that determine the plan; errors name options that differ.
        finished: file name -> (digest, size of the buffers that the digest was computed with, in bytes).
    """

    store: Storage
    stem: str
    digest: str
    requested: Mapping[str, object] = field(default_factory=dict)
    finished: dict[str, tuple[str, int]] = field(default_factory=dict)
    is_started: bool = False  # the first line is written
    is_complete: bool = False  # every file of this journal's part is finished
    _run: str = field(default_factory=lambda: os.urandom(8).hex())  # identifies this run in the first line
    _file: int | None = None  # the descriptor, open and locked while this run writes

    @property
    def name(self) -> str:
        """The journal's file name."""
        return journal_name(self.stem)

    def start(self) -> None:
        """Replace an older journal of this name by a new one, and write its first line.

        Raises:
            ConversionError: if another run is writing to the target.
        """
        self.claim()  # raises if another run still uses the older journal
        self.store.remove(self.name)
        self.release()
        folders = self.store.folders
        folders.make()
        if isinstance(self.store, LocalStorage):
            self._lock(os.O_CREAT | os.O_EXCL)  # if two runs start at once, only one of them creates the file
        head = {"version": _VERSION, "plan": self.digest, "run": self._run}
        try:
            self._append(head | {"made_folders": folders.levels, "asked": dict(self.requested)})
        except BaseException:  # Ctrl-C too
            self.store.remove(self.name)  # without a complete first line there is nothing to resume
            raise

    def claim(self) -> None:
        """Lock the journal of an earlier run, if there is one.

        Raises:
            ConversionError: if another run is writing to the target.
            CheckpointError: if the journal is a link, or belongs to another user.
        """
        self.store.child(self.name).check_not_planted()  # it checks a storage's root: here the journal's path
        if isinstance(self.store, LocalStorage) and self.store.size(self.name) is not None:
            self._lock(0)  # without flags that create a file

    def release(self) -> None:
        """Unlock the journal, so that other runs can use the target."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _lock(self, flags: int) -> None:
        """Open the journal with these flags, and lock it; raises if another run has it."""
        assert isinstance(self.store, LocalStorage)
        path = self.store.root / self.name
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o666)
        except FileNotFoundError:
            return  # the run that owned the journal has just ended
        except FileExistsError as error:
            raise self._busy() from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.exists(path) and os.path.samestat(os.fstat(self._file), os.stat(path))
        except BlockingIOError as error:
            self.release()
            raise self._busy() from error
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                self.release()
                raise
            return  # exclusive creation is the only protection on this file system
        if not is_there:  # another run has replaced the journal between `open` and `flock`
            self.release()
            raise self._busy()

    def _busy(self) -> ConversionError:
        """Return the error for a target that another run is writing to."""
        return ConversionError(
            "Another conversion is writing to this target.",
            expected="one conversion at a time",
            got=f"{self.name}, which another process has locked or replaced",
            where=self.store.where,
            todo="wait for it to end, stop it, or choose another target",
        )

    def require_mine(self) -> None:
        """Raise as `claim` if another run has replaced the journal. Object stores have no locks to prevent that."""
        exists = self.store.size(self.name) is not None
        lines = _parse(self.store.read(self.name)) if exists else []
        if lines and lines[0].get("run", self._run) != self._run:
            raise self._busy()

    def add(self, **line: Any) -> None:
        """Append a line: a finished ``file`` with its ``digest`` and ``segment_bytes``, or ``complete``."""
        if self.store.in_order:  # an object store, without locks
            self.require_mine()
        self._append(line)

    def _append(self, line: dict[str, Any]) -> None:
        self.store.append(self.name, json.dumps(line).encode() + b"\n")
        self._apply(line)

    def _apply(self, line: dict[str, Any]) -> None:
        """Update the attributes from a line."""
        self.is_started = True
        if "file" in line:
            self.finished[str(line["file"])] = (str(line["digest"]), int(line["segment_bytes"]))
        self.is_complete |= bool(line.get("complete"))

    def load(self) -> bool:
        """Read the journal of an earlier run; returns False if there is none.

        Raises:
            ConversionError: if the earlier run had another plan.
            CheckpointError: as `claim`.
        """
        self.store.child(self.name).check_not_planted()
        if self.store.size(self.name) is None:
            return False
        lines = _parse(self.store.read(self.name))
        if not lines:
            return False
        head = lines[0]
        if (head.get("version"), head.get("plan")) != (_VERSION, self.digest):
            raise self._other_plan(head)
        self._run = str(head.get("run", self._run))  # for `require_mine`: this run continues that run
        for line in lines:
            self._apply(line)
        self.store.folders.adopt_levels(int(head.get("made_folders", 0)))
        return True

    def _other_plan(self, head: dict[str, Any]) -> ConversionError:
        """Return the error that names the options in which this run and the interrupted run differ."""
        before, now = head.get("asked"), self.requested
        before = before if isinstance(before, dict) else {}  # a journal may be damaged
        differ = [name for name in now if name in before and before[name] != now[name]]
        return ConversionError(
            "The interrupted conversion was a different one.",
            expected=", ".join(_said(name, before[name]) for name in differ) or f"plan {head.get('plan')}",
            got=", ".join(_said(name, now[name]) for name in differ)
            or f"plan {self.digest}: files next to the source have changed, or this package has",
            where=f"{self.store.where}/{self.name}",
            todo=f"repeat the options of the interrupted run, or start over with {option('overwrite', True)}",
        )


def _said(name: str, value: object) -> str:
    """Return an entry of ``requested`` for a message: an option as the user writes it, or a property of the source."""
    return f"{name} {value!r}" if name in (SOURCE, SOURCE_FILES, EXPRESSION) else option(name, value)


def _parse(data: bytes) -> list[dict[str, Any]]:
    """Return the complete lines of a journal."""
    lines: list[dict[str, Any]] = []
    for text in data.split(b"\n"):
        try:
            value = json.loads(text)
        except ValueError:
            continue  # cut off by a kill, or the empty text after the last newline
        if isinstance(value, dict):
            lines.append(value)
    return lines
