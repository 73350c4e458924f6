"""The record of a conversion in progress, kept beside its output so that a killed one can go on.

One JSON object per line: first what is being converted (a fingerprint of the plan), then one line per
finished file. A line is appended only after its file is complete; a torn last line is a file that will be
written again.

One run at a time writes to a target: on a local disk the journal is created exclusively and locked (`flock`, which a
killed run gives back). Object stores have no locks; there the run that started first fails at its next file.
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
from vescale_fsdp.errors import ConversionError

_VERSION = 1
_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK)
_SUFFIX = ".vescale-convert.jsonl"
_OF_PART = re.compile(rf"(?:\.part-\d+-of-(\d+))?{re.escape(_SUFFIX)}")


def is_journal(name: str) -> bool:
    """Whether a file in a target folder is a journal of this module."""
    return name.endswith(_SUFFIX)


def parts_of(name: str) -> int | None:
    """How many parts a conversion is shared out among, one of whose journals has this name; None if it is none."""
    match = _OF_PART.fullmatch(name)
    return None if match is None else int(match[1] or 1)


@dataclass
class Journal:
    """The journal of one plan, or of one part of it.

    Args:
        store: where the output goes.
        stem: what the journal's name begins with.
        fingerprint: of the plan.
        asked: what was asked for, by the names that people know; says what differs if the fingerprint does.
        finished: file name -> (digest, bytes per segment it was made with).
    """

    store: Storage
    stem: str
    fingerprint: str
    asked: Mapping[str, str] = field(default_factory=dict)
    finished: dict[str, tuple[str, int]] = field(default_factory=dict)
    is_started: bool = False  # the first line is written
    is_complete: bool = False  # every file of this journal's part is finished
    _run: str = field(default_factory=lambda: os.urandom(8).hex())  # of this run, in the first line
    _file: int | None = None  # open and locked while this run writes

    @property
    def name(self) -> str:
        """Its file name."""
        return f".{self.stem}{_SUFFIX}" if self.stem else _SUFFIX

    def start(self) -> None:
        """Write the first line; an older journal of that name is replaced.

        Raises:
            ConversionError: if another run is writing to the target.
        """
        self.claim()
        self.store.remove(self.name)
        self.release()
        folders = self.store.folders
        folders.make()
        if isinstance(self.store, LocalStorage):
            self._lock(os.O_CREAT | os.O_EXCL)
        head = {"version": _VERSION, "plan": self.fingerprint, "run": self._run}
        try:
            self._append(head | {"made_folders": folders.levels, "asked": dict(self.asked)})
        except BaseException:
            self.store.remove(self.name)  # ours, and without a whole first line nothing to resume
            raise

    def claim(self) -> None:
        """Lock the journal that an earlier run left, if there is one; raises as `start`.

        Raises:
            CheckpointError: if it is a link, or another user's.
        """
        self._check_not_planted()
        if isinstance(self.store, LocalStorage) and self.store.size(self.name) is not None:
            self._lock(0)

    def _check_not_planted(self) -> None:
        self.store.child(self.name).check_not_planted()

    def release(self) -> None:
        """Let other runs write to the target."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _lock(self, flags: int) -> None:
        assert isinstance(self.store, LocalStorage)
        path = self.store.root / self.name
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o666)
        except FileNotFoundError:
            return  # the run that had it has just ended
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
            return
        if not is_there:  # another run has replaced it
            self.release()
            raise self._busy()

    def _busy(self) -> ConversionError:
        return ConversionError(
            "Another conversion is writing to this target.",
            expected="one conversion at a time",
            got=f"{self.name}, which another process holds",
            where=self.store.where,
            todo="wait for it to end, stop it, or choose another target",
        )

    def require_mine(self) -> None:
        """Refuse to go on if another run has replaced the journal, as runs on object stores can; raises as `start`."""
        head = (
            next(iter(_parse(self.store.read(self.name))), {})
            if self.store.size(self.name) is not None
            else {}
        )
        if head.get("run", self._run) != self._run:
            raise self._busy()

    def add(self, **line: Any) -> None:
        """One more line: a finished ``file`` with its ``digest`` and ``segment_bytes``, or ``complete``."""
        if self.store.in_order:
            self.require_mine()
        self._append(line)

    def _append(self, line: dict[str, Any]) -> None:
        self.store.append(self.name, json.dumps(line).encode() + b"\n")
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        """Know what a line says."""
        self.is_started = True
        if "file" in line:
            self.finished[str(line["file"])] = (str(line["digest"]), int(line["segment_bytes"]))
        self.is_complete |= bool(line.get("complete"))

    def load(self) -> bool:
        """Read what an earlier run left; False if there is no journal.

        Raises:
            ConversionError: if the earlier run was of another plan.
            CheckpointError: as `claim`.
        """
        self._check_not_planted()
        if self.store.size(self.name) is None:
            return False
        lines = list(_parse(self.store.read(self.name)))
        if not lines:
            return False
        head = lines[0]
        if (head.get("version"), head.get("plan")) != (_VERSION, self.fingerprint):
            raise self._another(head)
        self._run = str(head.get("run", self._run))
        for line in lines:
            self._take(line)
        self.store.folders.adopt_levels(int(head.get("made_folders", 0)))
        return True

    def _another(self, head: dict[str, Any]) -> ConversionError:
        """What differs between the run that is to be resumed and the one that was interrupted."""
        before = head.get("asked")
        before = before if isinstance(before, dict) else {}
        differ = [name for name in self.asked if name in before and before[name] != self.asked[name]]
        return ConversionError(
            "The interrupted conversion was a different one.",
            expected=", ".join(f"{name} {before[name]!r}" for name in differ) or f"plan {head.get('plan')}",
            got=", ".join(f"{name} {self.asked[name]!r}" for name in differ)
            or f"plan {self.fingerprint}: files beside the source have changed, or this package has",
            where=f"{self.store.where}/{self.name}",
            todo="repeat the options of the interrupted run, or start over with --overwrite",
        )


def _parse(data: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in data.split(b"\n"):
        try:
            value = json.loads(line)
        except ValueError:
            continue  # torn by a kill, or the empty rest after the last newline
        if isinstance(value, dict):
            found.append(value)
    return found
