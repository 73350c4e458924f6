"""Answers of model classes on disk, so that a class is asked once, and not by every conversion of a model.

    ~/.cache/vescale-fsdp/classes/DIGEST.json      $XDG_CACHE_HOME in place of ~/.cache; $VESCALE_FSDP_CACHE in place of
                                                   both, and empty for no cache

The digest covers the question (the class, config.json, and the tensors of a check) and everything that may change the
answer: the versions of transformers, torch and accelerate, and the file `class_child`.

An answer decides whether a result is published, so it is used only if its file and the folder belong to this user, and
no other user can write to them. Files are written under temporary names and then renamed, so that concurrent
conversions read complete answers. Without a usable folder, classes are asked each time.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vescale_fsdp.checkpoint.formats.huggingface import class_child

_log = logging.getLogger(__name__)
CACHE = "VESCALE_FSDP_CACHE"  # name of the environment variable
_MOST_BYTES = 4 * 2**20  # 4 MiB: larger answers are not stored
_MOST_FILES = 64  # the oldest answers beyond these are removed


def stored_answer(question: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the answer to a question for `class_child`; None if there is none, or another user could have written it.

    Args:
        question: ``class``, ``config`` and, for a check, ``tensors``.
    """
    folder = _folder()
    if folder is None:
        return None
    try:
        if not _is_own(os.lstat(folder), stat.S_ISDIR):
            return None
        # The opened file is examined, since the name could refer to another file afterwards.
        handle = os.open(folder / _name(question), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            if not _is_own(os.fstat(file.fileno()), stat.S_ISREG):
                return None
            answer = json.loads(file.read(_MOST_BYTES + 1))
    except (OSError, ValueError) as error:  # no answer, or a damaged one, which the next one replaces
        _log.debug("no stored answer of %s: %s", question["class"], error)
        return None
    return answer if isinstance(answer, dict) and _is_answer(answer) else None


def store_answer(question: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Store an answer, unless it is none, too large, or there is no folder of this user."""
    import tempfile  # takes milliseconds, and few runs store an answer

    text = json.dumps({key: value for key, value in answer.items() if key != "peak_bytes"}).encode()
    folder = _folder()
    if folder is None or not _is_answer(answer) or len(text) > _MOST_BYTES:
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(os.lstat(folder), stat.S_ISDIR):
            return
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")  # readable by this user only
        try:
            with open(handle, "wb") as file:
                file.write(text)
            os.replace(temporary, folder / _name(question))
        except BaseException:  # Ctrl-C too leaves no temporary file
            Path(temporary).unlink(missing_ok=True)
            raise
        files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in files[_MOST_FILES:]:
            path.unlink(missing_ok=True)
    except OSError as error:  # such as a full disk, or a home that cannot be written to
        _log.debug("the answer of %s is not stored: %s", question["class"], error)


def _folder() -> Path | None:
    """Return the folder of answers; None if the user wants no cache, or has no home."""
    named = os.environ.get(CACHE)
    if named is not None:
        return Path(named) / "classes" if named else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The specification ignores relative paths.
        home = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return home / "vescale-fsdp" / "classes"


def _is_own(info: os.stat_result, is_kind: Any) -> bool:
    """Whether a file or folder is of a kind, belongs to this user, and is not writable by others."""
    return bool(is_kind(info.st_mode)) and info.st_uid == os.geteuid() and not info.st_mode & 0o022


def _is_answer(answer: Mapping[str, Any]) -> bool:
    """Whether this is the answer to a check, or a description of a class; a reason for no answer is neither."""
    return isinstance(answer.get("problems"), list) or {"forms", "ties", "modules"} <= answer.keys()


def _name(question: Mapping[str, Any]) -> str:
    """Return the file name of a question's answer."""
    import hashlib  # imports OpenSSL, and few runs look for an answer

    # Without `path`, which says where modules are searched.
    asked = {key: value for key, value in question.items() if key != "path"}
    versions = [_version(package) for package in ("transformers", "torch", "accelerate")]
    code = Path(class_child.__file__).read_bytes()
    text = json.dumps([versions, asked], sort_keys=True).encode()
    return f"{hashlib.sha256(code + text).hexdigest()}.json"


def _version(package: str) -> str:
    # Imported here, since it takes 20 ms, and few runs look for an answer.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""
