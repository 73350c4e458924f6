"""Answers of model classes on disk: asked once, never taken from other users, never half."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vescale_fsdp.checkpoint.formats.huggingface.class_cache import CACHE, store_answer, stored_answer
from vescale_fsdp.checkpoint.formats.huggingface.model_class import ask_child

QUESTION = {"class": "BertModel", "config": {"hidden_size": 4}, "path": ["here"]}
ANSWER: dict[str, Any] = {"problems": ["missing: w"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of answers, which is not there yet."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "classes"


def _only(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_a_class_is_asked_once(child: None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answer needs no child, whatever the search path; other settings or tensors are another question."""
    asked: list[dict[str, Any]] = []

    def run(*_: object, input: str, **__: object) -> Any:
        asked.append(json.loads(input))
        return SimpleNamespace(stdout=json.dumps({**ANSWER, "peak_bytes": 7}), stderr="", returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    config = {"architectures": ["BertModel"]}
    assert ask_child(config, "BertModel", {"w": ((2,), "float32")}) == {**ANSWER, "peak_bytes": 7}
    monkeypatch.syspath_prepend("/elsewhere")
    assert ask_child(config, "BertModel", {"w": ((2,), "float32")}) == ANSWER and len(asked) == 1
    ask_child(config, "BertModel", {"w": ((3,), "float32")})
    ask_child({**config, "hidden_size": 3}, "BertModel", {"w": ((2,), "float32")})
    ask_child(config, "BertModel")
    assert len(asked) == 4
    assert (folder.stat().st_mode & 0o777, _modes(folder)) == (0o700, {0o600})


def _modes(folder: Path) -> set[int]:
    return {file.stat().st_mode & 0o777 for file in folder.iterdir()}


@pytest.mark.parametrize("package", ["transformers", "torch", "accelerate"])
def test_another_version_is_another_question(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every package that may change the answer."""
    store_answer(QUESTION, ANSWER)
    assert stored_answer(QUESTION) == ANSWER
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99" if name == package else "1")
    assert stored_answer(QUESTION) is None


def test_what_others_could_have_written_is_not_used(folder: Path) -> None:
    """A file or folder that others may write to, and a link, which may lead to another user's file."""
    store_answer(QUESTION, ANSWER)
    file = _only(folder)
    for path, mode in ((file, 0o620), (file, 0o602), (folder, 0o770), (folder, 0o777)):
        before = path.stat().st_mode
        path.chmod(mode)
        assert stored_answer(QUESTION) is None
        path.chmod(before)
        assert stored_answer(QUESTION) == ANSWER
    file.rename(folder / "elsewhere")
    file.symlink_to(folder / "elsewhere")
    assert stored_answer(QUESTION) is None
    folder.chmod(0o777)
    store_answer({**QUESTION, "class": "other"}, ANSWER)
    assert {path.name for path in folder.iterdir()} == {file.name, "elsewhere"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_file_of_another_user_is_not_used(folder: Path) -> None:
    """And neither is a folder of another user."""
    store_answer(QUESTION, ANSWER)
    for path in (_only(folder), folder):
        os.chown(path, 1234, 1234)
        assert stored_answer(QUESTION) is None
        os.chown(path, 0, 0)
    assert stored_answer(QUESTION) == ANSWER


@pytest.mark.parametrize("damage", [b"", b"[1]", b'{"problems": 3}', b'{"unknown": "x"}', b"{" * 10, b"\xff"])
def test_a_damaged_answer_is_asked_again(folder: Path, damage: bytes) -> None:
    """And replaced."""
    store_answer(QUESTION, ANSWER)
    _only(folder).write_bytes(damage)
    assert stored_answer(QUESTION) is None
    store_answer(QUESTION, ANSWER)
    assert stored_answer(QUESTION) == ANSWER


def test_no_answer_is_not_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason, an answer that is too large, no cache, and a folder that cannot be made."""
    store_answer(QUESTION, {"unknown": "planted"})
    store_answer(QUESTION, {"problems": ["x" * 2**23]})
    monkeypatch.setenv(CACHE, "")
    store_answer(QUESTION, ANSWER)
    assert stored_answer(QUESTION) is None and not folder.exists()
    (folder.parent.parent / "file").touch()
    monkeypatch.setenv(CACHE, str(folder.parent.parent / "file"))
    store_answer(QUESTION, ANSWER)
    assert stored_answer(QUESTION) is None


def test_concurrent_runs_read_whole_answers(folder: Path) -> None:
    """Of two writers of one question, and at most 64 answers are kept."""
    answers = [{"problems": [str(number)] * 2000} for number in range(40)]
    store_answer(QUESTION, answers[0])
    with ThreadPoolExecutor(4) as pool:
        written = pool.map(lambda answer: store_answer(QUESTION, answer), answers)
        found = list(pool.map(lambda _: stored_answer(QUESTION), range(200)))
        assert len(list(written)) == 40
    assert all(answer in answers for answer in found)
    for number in range(80):
        store_answer({**QUESTION, "class": str(number)}, ANSWER)
    assert len(list(folder.iterdir())) == 64
    assert stored_answer({**QUESTION, "class": "79"}) == ANSWER
