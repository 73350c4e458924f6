"""The record of a conversion in progress, kept beside its output so that a killed one can go on.

One JSON object per line: first what is being converted (a fingerprint of the plan), then one line per
finished file. A line is appended only after its file is complete; a torn last line is a file that will be
written again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import ConversionError

__all__ = ["Journal", "is_journal", "parts_of"]

_VERSION = 1
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

    @property
    def name(self) -> str:
        """Its file name."""
        return f".{self.stem}{_SUFFIX}" if self.stem else _SUFFIX

    def start(self) -> None:
        """Write the first line; an older journal of that name is replaced."""
        self.store.remove(self.name)
        folders = self.store.folders
        folders.make()
        self.add(version=_VERSION, plan=self.fingerprint, made_folders=folders.levels, asked=dict(self.asked))

    def add(self, **line: Any) -> None:
        """One more line: a finished ``file`` with its ``digest`` and ``segment_bytes``, or ``complete``."""
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
        """
        if self.store.size(self.name) is None:
            return False
        lines = list(_parse(self.store.read(self.name)))
        if not lines:
            return False
        head = lines[0]
        if (head.get("version"), head.get("plan")) != (_VERSION, self.fingerprint):
            raise self._another(head)
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
