"""`RunFile`, the root's ``run.json``: the branches of a run, and the steps that rollbacks have abandoned.

    {"branches": [["3f0c91aa", 90], ["b7e2405d", null]], "abandoned": {"100": "<checksum of its manifest>"}}

A branch has an id and the number of its newest valid step; null: all its steps are valid. The save_id of a step in
memory starts with its branch's id, so that `restore` never reads memory of another run or an invalid step of an ended
branch. A rollback ends a branch and abandons the later steps on disk, in one commit. Abandoned steps are kept, and
skipped by `restore` and `latest`. A step that is saved again has a new manifest, so its old entry no longer matches.
"""

from __future__ import annotations

import json
import secrets
import warnings
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME, step_name
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import hex_digest_of

RUN_FILE_NAME = "run.json"
BRANCH_DIGITS = 8  # the first hex digits of a save_id are the branch's id
_MOST_BRANCHES = 64  # older branches are dropped: they have no steps in memory
_LIMIT_BYTES = 1 << 20  # largest file to read


@dataclass(frozen=True)
class RunFile:
    """The content of the file.

    Attributes:
        branches: id and newest valid step (None: all steps) of each branch; the last one is the current branch.
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
            is_good &= newest is None or type(newest) is int
        is_good &= all(isinstance(digest, str) for digest in self.abandoned.values())
        if not is_good:
            raise ValueError(f"invalid branches or abandoned steps: {self.branches}, {dict(self.abandoned)}")

    @classmethod
    def new(cls) -> RunFile:
        """The file of a new run."""
        return cls(((_new_branch(), None),))

    @property
    def branch(self) -> str:
        """The id of the current branch, for new steps."""
        return self.branches[-1][0]

    def includes(self, step: int, save_id: str) -> bool:
        """Whether a step in memory belongs to this run and is not abandoned."""
        newest_by_branch = dict(self.branches)
        branch = save_id[:BRANCH_DIGITS]
        if branch not in newest_by_branch:
            return False
        newest = newest_by_branch[branch]
        return newest is None or step <= newest

    def rolled_back(self, step: int, abandoned: Mapping[int, str]) -> RunFile:
        """The run file after a rollback to ``step``: the run continues on a new branch.

        Args:
            abandoned: number and manifest checksum of each later step on disk.
        """
        ended = [
            (branch, step if newest is None else min(step, newest))
            for branch, newest in self.branches[1 - _MOST_BRANCHES :]  # 1: room for the new branch
        ]
        # The step that the run continues from is valid again.
        kept = {number: digest for number, digest in self.abandoned.items() if number != step}
        return RunFile((*ended, (_new_branch(), None)), {**kept, **abandoned})

    def to_bytes(self) -> bytes:
        """The JSON of the file."""
        abandoned = {str(step): digest for step, digest in sorted(self.abandoned.items())}
        return json.dumps({"branches": self.branches, "abandoned": abandoned}).encode()

    def write(self, root: Storage) -> None:
        """Replace the root's run file atomically."""
        root.commit(RUN_FILE_NAME, self.to_bytes(), replace=True)


def _new_branch() -> str:
    return secrets.token_hex(BRANCH_DIGITS // 2)


def read_run_file(root: Storage) -> RunFile | None:
    """The root's run file; None if it does not exist. Also None, with a warning, if it is damaged."""
    try:
        raw = root.read_small(RUN_FILE_NAME, limit_bytes=_LIMIT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        data = json.loads(raw)
        abandoned = {int(step): digest for step, digest in data["abandoned"].items()}
        return RunFile(tuple((branch, newest) for branch, newest in data["branches"]), abandoned)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        warnings.warn(
            f"{root.where}/{RUN_FILE_NAME} is damaged ({error}): abandoned steps are restored again, and steps in "
            "memory are ignored",
            stacklevel=3,
        )
        return None


def manifest_digest(root: Storage, step: int) -> str | None:
    """The checksum of a step's manifest; None if there is no manifest."""
    name = f"{step_name(step)}/{MANIFEST_NAME}"
    if not root.exists(name):
        return None
    return hex_digest_of(root.read(name))


def abandoned_steps(root: Storage, among: Iterable[int]) -> set[int]:
    """The given steps that a rollback has abandoned and no job has saved again since."""
    wanted = set(among)
    run = read_run_file(root) if wanted else None
    if run is None:
        return set()
    return {
        step
        for step in wanted & run.abandoned.keys()
        if manifest_digest(root, step) in (run.abandoned[step], None)
    }


class RootHold:
    """The lock of a root, shared by this process's managers; released with its last reference."""

    def __init__(self, root: Storage) -> None:
        with ExitStack() as stack:
            stack.enter_context(root.lock())
            self._close = weakref.finalize(self, stack.pop_all().close)  # runs at exit too, unlike `__del__`


_holds: weakref.WeakValueDictionary[tuple[str, ...], RootHold] = weakref.WeakValueDictionary()


def hold_root(root: Storage) -> RootHold:
    """Lock a root against other jobs while the result is referenced.

    Raises:
        BlockingIOError: if another job has locked it.
    """
    hold = _holds.get(root.location)
    if hold is None:
        hold = _holds[root.location] = RootHold(root)
    return hold
