"""`RunFile`, the content of ``run.json`` in a run's root folder: the run's branches, and its abandoned steps.

    {"branches": [["3f0c91aa", 90], ["b7e2405d", null]], "abandoned": {"100": "<checksum of its manifest>"},
     "checksum": "<of the same JSON without this key>"}

A rollback ends the run's current branch, begins a new one, and abandons the later steps on disk, all in one commit. So
does every restart of a run with a `RamTier`, because lost nodes may return with later steps in memory. A
branch has an id and the number of its newest valid step; null means that all steps of the branch are valid. The save_id
of a step in memory starts with the id of the step's branch. `restore` therefore never reads memory of another run, or
an invalid step of an ended branch. Abandoned steps are kept on disk, but `restore` and `latest` skip them. A step that
is saved again has a new manifest, which the checksum of the old entry does not match.
"""

from __future__ import annotations

import json
import os
import warnings
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from vescale_fsdp.checkpoint.manifest.file_names import manifest_file, step_name
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import hex_digest_of
from vescale_fsdp.errors import callers_level

RUN_FILE_NAME = "run.json"
BRANCH_DIGITS = 8  # the branch's id is this many hex digits at the start of a save_id
_MOST_BRANCHES = 64  # bounds the file; memory has no steps of branches older than that
_LIMIT_BYTES = 1 << 20  # 1 MiB: largest run file to read


@dataclass(frozen=True)
class RunFile:
    """The content of ``run.json``.

    Attributes:
        branches: (id, newest valid step) of each branch, or (id, None) if all steps are valid; the last is the current
            branch.
        abandoned: step number -> checksum of the abandoned manifest, for steps on disk.

    Raises:
        ValueError: for invalid content.
    """

    branches: tuple[tuple[str, int | None], ...]
    abandoned: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_good = bool(self.branches) and self.branches[-1][1] is None
        for branch, newest in self.branches:
            is_good &= isinstance(branch, str) and len(branch) == BRANCH_DIGITS
            is_good &= newest is None or type(newest) is int  # not isinstance, which accepts a bool
        is_good &= all(isinstance(digest, str) for digest in self.abandoned.values())
        if not is_good:
            raise ValueError(f"invalid branches or abandoned steps: {self.branches}, {dict(self.abandoned)}")

    @classmethod
    def new(cls) -> RunFile:
        """Return the content for a new run: one branch, and no abandoned steps."""
        return cls(((_new_branch(), None),))

    @property
    def branch(self) -> str:
        """The id of the current branch, for new steps."""
        return self.branches[-1][0]

    def includes(self, step: int, save_id: str) -> bool:
        """Return whether a step in memory belongs to this run and is not abandoned."""
        newest_by_branch = dict(self.branches)
        branch = save_id[:BRANCH_DIGITS]
        if branch not in newest_by_branch:
            return False
        newest = newest_by_branch[branch]
        return newest is None or step <= newest

    def rolled_back(self, step: int, abandoned: Mapping[int, str]) -> RunFile:
        """Return the content after a rollback to ``step``: the run continues on a new branch.

        Args:
            abandoned: number -> manifest checksum of each later step on disk.
        """
        ended = [
            # `min`: an earlier rollback may have gone further back.
            (branch, step if newest is None else min(step, newest))
            for branch, newest in self.branches[1 - _MOST_BRANCHES :]  # one less, for the new branch
        ]
        # If the run continues from a step that was abandoned, the step is valid again.
        kept = {number: digest for number, digest in self.abandoned.items() if number != step}
        return RunFile((*ended, (_new_branch(), None)), {**kept, **abandoned})

    def to_bytes(self) -> bytes:
        """Return the JSON of the file, with its checksum."""
        abandoned = {str(step): digest for step, digest in sorted(self.abandoned.items())}
        content = {"branches": self.branches, "abandoned": abandoned}
        return json.dumps({**content, "checksum": hex_digest_of(json.dumps(content).encode())}).encode()

    def write(self, root: Storage) -> None:
        """Replace the root's run file atomically."""
        root.commit(RUN_FILE_NAME, self.to_bytes(), replace=True)


def _new_branch() -> str:
    # Two digits per byte. Not by `secrets`, which imports OpenSSL: every conversion imports this module.
    return os.urandom(BRANCH_DIGITS // 2).hex()


def read_run_file(root: Storage) -> RunFile | None:
    """Read the root's run file; returns None if it does not exist, and with a warning if it is damaged."""
    try:
        raw = root.read_small(RUN_FILE_NAME, limit_bytes=_LIMIT_BYTES)
    except (FileNotFoundError, NotADirectoryError):  # NotADirectoryError: a part of the root's path is a file
        return None
    try:
        data = json.loads(raw)
        abandoned = {int(step): digest for step, digest in data["abandoned"].items()}
        run = RunFile(tuple((branch, newest) for branch, newest in data["branches"]), abandoned)
        if run.to_bytes() != raw:
            raise ValueError("the checksum does not fit the content")
        return run
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        # The errors that JSON of another form can raise.
        warnings.warn(
            f"{root.where}/{RUN_FILE_NAME} is damaged ({error}): abandoned steps are restored again, and steps in "
            "memory are ignored",
            stacklevel=callers_level(),
        )
        return None


def manifest_digest(root: Storage, step: int) -> str | None:
    """Return the checksum of a step's manifest; None if there is no manifest."""
    name = manifest_file(root, step_name(step))
    return None if name is None else hex_digest_of(root.read(name))


def abandoned_steps(root: Storage, among: Iterable[int]) -> set[int]:
    """Return those of the given steps that a rollback has abandoned and no job has saved again since."""
    wanted = set(among)
    run = read_run_file(root) if wanted else None  # no read if there is nothing to look up
    if run is None:
        return set()
    # The manifest of a step that was saved again has another checksum. A step without a manifest stays abandoned.
    return {
        step
        for step in wanted & run.abandoned.keys()
        if manifest_digest(root, step) in (run.abandoned[step], None)
    }


class RootHold:
    """The lock of a root folder, shared by this process's managers; released with the last reference to this object."""

    def __init__(self, root: Storage) -> None:
        # `pop_all` keeps the lock beyond the `with` block.
        with ExitStack() as stack:
            stack.enter_context(root.lock())
            self._close = weakref.finalize(self, stack.pop_all().close)  # runs at exit too, unlike `__del__`


# By the root's location. Weak values, so that the lock is released when the last manager is gone.
_holds: weakref.WeakValueDictionary[tuple[str, ...], RootHold] = weakref.WeakValueDictionary()


def hold_root(root: Storage) -> RootHold:
    """Lock a root folder against other jobs, for as long as the returned object is referenced.

    Raises:
        BlockingIOError: if another job has locked it.
    """
    hold = _holds.get(root.location)
    if hold is None:
        hold = _holds[root.location] = RootHold(root)
    return hold
