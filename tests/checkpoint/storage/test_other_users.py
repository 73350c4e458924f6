"""A second user of the machine: reads nothing that is private, plants nothing that is believed, redirects no write."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from vescale_fsdp.checkpoint import CheckpointManager, EverySteps, RamTier, save
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.checkpoint.storage.open import open_store
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.errors import CheckpointError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
OTHER = 65534


def as_other(work: Callable[[], Any]) -> bool:
    """Whether another user can do something; it is done in a forked child."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            work()
            code = 0
        except OSError:
            code = 2
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 2), "the other user's work has a defect of its own"
    return status == 0


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder outside of pytest's, which every session of pytest that starts closes to other users."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder like /tmp and /dev/shm: everybody writes, nobody removes what is another's."""
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    made = tmp_path / "shm"
    made.mkdir()
    made.chmod(0o1777)
    return made


def _state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((64,), value)}


def _manager(root: Path, shm: Path) -> CheckpointManager:
    return CheckpointManager(root, ram=RamTier("run", folder=shm), save_policy=EverySteps(100))


def test_steps_in_memory_are_private(shared: Path, tmp_path: Path) -> None:
    """Another user can neither read nor list nor change what lies in memory, whatever the umask."""
    before = os.umask(0)
    try:
        _manager(tmp_path / "root", shared).save(1, _state())
    finally:
        os.umask(before)
    folder = shared / "vescale-run"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) >= 2 and folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    assert not as_other(lambda: os.listdir(folder))
    assert not as_other(lambda: files[0].read_bytes())
    assert not as_other(lambda: (folder / "step-00000999").mkdir())
    assert as_other(lambda: (shared / "anything").mkdir()), "the other user can do nothing at all"


def test_a_planted_step_is_not_restored(shared: Path, tmp_path: Path) -> None:
    """A step that another user has put where ours would be is skipped on reading, and refused on writing."""
    planted = shared / "vescale-run"
    assert as_other(planted.mkdir)
    save(planted / "step-00000999", _state(666.0))
    for path in (planted, *planted.rglob("*")):
        os.chown(path, OTHER, OTHER)
    manager, state = _manager(tmp_path / "root", shared), _state()
    assert manager.restore(state) is None  # it is of no run of this root
    assert torch.equal(state["w"], _state()["w"])
    with pytest.warns(UserWarning, match=rf"\bvescale-run\b[\s\S]*\b{OTHER}\b"):
        manager.save(1, state)
    assert not (planted / "step-00000001").exists()


@pytest.mark.parametrize("kind", ["link", "open to others", "replaceable"])
def test_a_folder_in_memory_is_checked(kind: str, shared: Path, tmp_path: Path) -> None:
    """A link, a folder that others may enter, and one that others may replace are refused; the disk counts."""
    target = tmp_path / "elsewhere"
    target.mkdir()
    if kind == "link":
        assert as_other(lambda: (shared / "vescale-run").symlink_to(target))
    elif kind == "open to others":
        (shared / "vescale-run").mkdir(0o755)
    else:
        shared.chmod(0o777)
    with pytest.warns(UserWarning, match=r"\bvescale-run\b"):
        _manager(tmp_path / "root", shared).save(1, _state())
    assert not list(target.iterdir()) and not list(shared.rglob("step-*"))


def test_planted_links_redirect_no_write(shared: Path, tmp_path: Path) -> None:
    """Links under every name that can be foreseen: the file they point to keeps its bytes and is not made."""
    victim, absent = tmp_path / "victim", tmp_path / "absent"
    victim.write_text("precious")
    storage = LocalStorage(shared)
    names = [f".f.{os.getpid()}.tmp", ".lock", ".lock-owner", "journal", "laid"]
    for name in names:
        for target in (victim, absent):
            (shared / name).unlink(missing_ok=True)
            (shared / name).symlink_to(target)
            os.lchown(shared / name, OTHER, OTHER)
            for work in (
                lambda: storage.commit("f", b"x", replace=True),
                lambda: storage.lock().__enter__(),
                lambda: storage.append("journal", b"x"),
                lambda: storage.join("laid").write_at(0, [b"x"]),
                lambda: storage.create(name, 1),  # noqa: B023  called at once
            ):
                with contextlib.suppress(OSError, CheckpointError):
                    work()
            assert victim.read_text() == "precious" and not absent.exists(), name
    assert (shared / "f").read_bytes() == b"x"


def test_a_planted_journal_is_not_continued(shared: Path) -> None:
    """A conversion's journal of another user, in a folder for everybody, is not appended to."""
    store = open_store(str(shared))
    journal = shared / ".model.vescale-convert.jsonl"
    assert as_other(lambda: journal.write_text("{}\n"))
    with pytest.raises((CheckpointError, PermissionError)):
        store.append(journal.name, b"line")
    assert journal.read_text() == "{}\n"
    torch.save({"w": torch.ones(3)}, shared / "source.pt")

    def resumed(name: str) -> None:
        with pytest.raises(CheckpointError):
            convert(open_source(shared / "source.pt"), shared / name, "torch", ConvertOptions(resume=True))
        assert not (shared / name).exists()

    resumed("model")
    (shared / "elsewhere").write_text("{}\n")
    (shared / ".mine.vescale-convert.jsonl").symlink_to(shared / "elsewhere")  # refused whoever made it
    resumed("mine")
    assert (shared / "elsewhere").read_text() == "{}\n"
    store.append("own", b"1")
    store.append("own", b"2")
    assert store.read("own") == b"12"


def test_a_planted_working_folder_is_not_used(shared: Path, tmp_path: Path) -> None:
    """The folder beside an export has a name that can be foreseen: a link there would have its target emptied."""

    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("kept")
    (shared / ".out.saving").symlink_to(victim)
    os.lchown(shared / ".out.saving", OTHER, OTHER)
    with pytest.raises(CheckpointError):
        save(shared / "out", _state(), format="dcp")
    assert [path.name for path in victim.iterdir()] == ["precious"]
    (shared / ".out.saving").unlink()
    assert as_other((shared / ".out.saving").mkdir)
    with pytest.raises(CheckpointError):
        save(shared / "out", _state(), format="dcp")
    (shared / ".out.saving").rmdir()
    save(shared / "out", _state(), format="dcp")
    assert (shared / "out" / ".metadata").is_file()


def test_bad_paths_are_named(shared: Path, tmp_path: Path) -> None:
    """A save to a file, below one, or where this user may not write: one kind of error, with a cure, in every form."""
    (tmp_path / "file").write_text("")
    closed = shared / "closed"
    closed.mkdir(0o700)

    def refused(path: Path, format: Any) -> None:
        try:
            save(path, _state(), format=format)
        except CheckpointError as error:
            if str(path) not in str(error.where) or not error.todo:
                raise OSError(f"not named: {error}") from error
            return
        raise OSError("it was taken")

    for format in ("native", "zarr", "dcp"):
        for path in (tmp_path / "file", tmp_path / "file" / "c"):
            refused(path, format)
        assert as_other(partial(refused, closed / "c", format)), format
    assert (tmp_path / "file").read_text() == ""


def test_bad_roots_are_found_early(shared: Path, tmp_path: Path) -> None:
    """A root that cannot be used is refused when the manager is made; one with steps to read is a warning."""
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(CheckpointError) as caught:
            CheckpointManager(root)
        assert str(root) in str(caught.value)
    closed, readable = shared / "closed", shared / "readable"
    closed.mkdir(0o700)
    CheckpointManager(readable).save(1, _state())

    def refused(root: Path) -> Callable[[], None]:
        def work() -> None:
            try:
                CheckpointManager(root)
            except CheckpointError:
                return
            raise OSError("it was taken")

        return work

    def warned() -> None:
        with pytest.warns(UserWarning, match=re.escape(str(readable))):
            manager = CheckpointManager(readable)
        state = _state(0.0)
        restored = manager.restore(state)
        if restored is None or restored.step != 1 or not torch.equal(state["w"], _state()["w"]):
            raise OSError("it was not restored")

    for root in (closed, closed / "run", closed / "deep" / "run"):
        assert as_other(refused(root)), root
    assert as_other(warned)
    assert not as_other(refused(shared / "new"))
