"""The record of a conversion in progress, kept beside its output so that a killed one can go on.

One JSON object per line: first what is being converted (a fingerprint of the plan), then one line per
finished file. A line is appended only after its file is complete; a torn last line is a file that will be
written again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import ConversionError

__all__ = ["Journal", "is_journal"]

_VERSION = 1
_SUFFIX = ".vescale-convert.jsonl"


def is_journal(name: str) -> bool:
    """Whether a file in a target folder is a journal of this module."""
    return name.endswith(_SUFFIX)


@dataclass
class Journal:
    """The journal of one plan, or of one part of it.

    Args:
        store: where the output goes.
        stem: what the journal's name begins with.
        fingerprint: of the plan.
        finished: file name -> (digest, bytes per segment it was made with).
    """

    store: Storage
    stem: str
    fingerprint: str
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
        folders.make_root()
        head = {"version": _VERSION, "plan": self.fingerprint, "made_folders": folders.levels}
        self.store.append(self.name, _line(head))
        self.is_started = True

    def record(self, file: str, digest: str, segment_bytes: int) -> None:
        """A file is finished."""
        line = {"file": file, "digest": digest, "segment_bytes": segment_bytes}
        self.store.append(self.name, _line(line))
        self.finished[file] = (digest, segment_bytes)

    def complete(self) -> None:
        """All files of this part are finished."""
        self.store.append(self.name, _line({"complete": True}))
        self.is_complete = True

    def load(self) -> bool:
        """Read what an earlier run left; False if there is no journal.

        Raises:
            ConversionError: if the earlier run was of another plan.
        """
        if self.store.size(self.name) is None:
            return False
        lines = list(_parse(self.store.read_file(self.name)))
        if not lines:
            return False
        head = lines[0]
        if (head.get("version"), head.get("plan")) != (_VERSION, self.fingerprint):
            raise ConversionError(
                "The interrupted conversion was another one.",
                expected=f"plan {self.fingerprint}",
                got=f"plan {head.get('plan')} of version {head.get('version')}",
                where=f"{self.store.where}/{self.name}",
                todo="repeat the options of the interrupted run, or start anew with --overwrite",
            )
        self.is_started = True
        files = [line for line in lines if "file" in line]
        self.finished = {str(f["file"]): (str(f["digest"]), int(f["segment_bytes"])) for f in files}
        self.is_complete = any(line.get("complete") for line in lines)
        self.store.folders.adopt_levels(int(head.get("made_folders", 0)))
        return True


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


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
