"""Killed conversions go on where they stopped; shared conversions write what one process writes."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.command import vescale_convert
from tests.support.faults.disks import disk_operation
from tests.support.processes import run_command
from tools.torchrun_job import Job
from vescale_fsdp.checkpoint import save, verify
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.checkpoint.storage.open import open_store
from vescale_fsdp.conversion import average, diff, open_source
from vescale_fsdp.conversion.convert import ConvertOptions, ConvertReport, convert
from vescale_fsdp.conversion.engine.journal import Journal
from vescale_fsdp.conversion.engine.output import Output
from vescale_fsdp.errors import ConversionError, option

LIMITS = {"memory_budget_bytes": 8 * 2**20, "threads": 2}  # buffers of 1 MiB
SHARD_BYTES = 3_000_000

# Converts one part, or averages, and kills itself when so many pieces of work are done. Imports no torch: ten start
# quickly.
KILLED = f"""
import itertools, os, signal, sys
from vescale_fsdp.conversion import ConvertOptions, average, convert, open_source
sources, out, moment, index, parts = sys.argv[1:]
count = itertools.count(1)
def progress(nbytes):
    if next(count) == int(moment):
        os.kill(os.getpid(), signal.SIGKILL)
part = (int(index), int(parts))
options = ConvertOptions(max_shard_bytes={SHARD_BYTES}, resume=True, part=part, **{LIMITS})
inputs = [open_source(source) for source in sources.split(",")]
if len(inputs) > 1:
    average(inputs, out, "hf", options, progress=progress)
else:
    convert(inputs[0], out, "hf", options, progress=progress)
"""


def run(source: str, target: str, *, progress: object = None, **options: object) -> ConvertReport:
    """Convert with small buffers and files; average several sources, which are joined by commas."""
    chosen = ConvertOptions(max_shard_bytes=SHARD_BYTES, **options, **LIMITS)  # type: ignore[arg-type]
    callback = progress or (lambda _: None)
    first, *others = [open_source(each) for each in source.split(",")]
    if others:
        return average([first, *others], target, "hf", chosen, progress=callback)  # type: ignore[arg-type]
    return convert(first, target, "hf", chosen, progress=callback)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 MB in tensors of many sizes, one larger than the shard limit, as DCP and native."""
    torch.manual_seed(0)
    tensors = {f"layers.{i}.w": torch.randn(100 + 37 * i, 500) for i in range(16)}
    tensors["layers.3.big"] = torch.randn(1100, 1000)
    folder = tmp_path_factory.mktemp("sources")
    dcp.save({"model": tensors}, checkpoint_id=folder / "dcp", no_dist=True)
    save(folder / "native", {"model": tensors})
    return folder


@pytest.fixture(scope="module")
def source(sources: Path) -> str:
    """The DCP one."""
    return str(sources / "dcp")


@pytest.fixture(scope="module")
def expected(source: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed conversion writes."""
    path = tmp_path_factory.mktemp("expected")
    run(source, str(path))
    found = contents(path)
    assert len(found) > 5
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder, hidden ones too."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("kind", "parts"),
    # The average of two checkpoints with the same values has their bytes.
    [("native", 1), ("dcp", 1), ("dcp", 3), ("native,dcp", 1), ("dcp,native", 2)],
)
@pytest.mark.part("formats")
def test_killed_at_ten_moments(
    kind: str, parts: int, sources: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """SIGKILL, then --resume: byte for byte the undisturbed result, and finished files were not redone.

    With parts, the last one to run is the one killed: nothing has a final name while it is not resumed.
    """
    source, kept, chance = ",".join(str(sources / each) for each in kind.split(",")), 0, random.Random(1)
    works = []  # how many pieces of work each part is
    for index in range(parts):
        done: list[int] = []
        run(source, str(tmp_path / "count"), progress=done.append, part=(index, parts))
        works.append(len(done) - 1)  # the first call reports files that were kept
    for moment in range(10):
        out, victim = tmp_path / str(moment), chance.randrange(parts)
        for index in set(range(parts)) - {victim}:
            run(source, str(out), part=(index, parts))
        at = chance.randint(2, works[victim])
        command = [sys.executable, "-c", KILLED, source, str(out), str(at), str(victim), str(parts)]
        dead = run_command(command, cwd=Path(__file__).parents[2])
        assert dead.returncode == -signal.SIGKILL
        assert not any(name in expected for name in os.listdir(out))  # nothing has a final name
        report = run(source, str(out), resume=True, part=(victim, parts))
        kept += len(report.outcome.kept)
        assert report.outcome.published and contents(out) == expected
    assert kept > (10 if parts == 1 else 0)


def _interrupt(source: str, out: Path, after: int) -> None:
    """Stop by Ctrl-C after some segments: finished files stay, under partial names."""
    left = after

    def progress(_: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, str(out), progress=progress)


@pytest.mark.parametrize("damage", ["changed", "cut", "longer"])
def test_resume_redoes_a_finished_file_that_was_damaged(
    source: str, expected: dict[str, bytes], tmp_path: Path, damage: str
) -> None:
    """Finished files are read again before they are believed."""
    _interrupt(source, tmp_path / "out", 18)
    finished = sorted(file for file in (tmp_path / "out").iterdir() if file.name.endswith(".partial"))
    assert len(finished) >= 2
    size = finished[0].stat().st_size
    with finished[0].open("r+b") as file:
        if damage == "changed":
            file.seek(size // 2)
            file.write(b"\xff\xff\xff\xff\x00")
        else:
            file.truncate(size - 1 if damage == "cut" else size + 1)
    report = run(source, str(tmp_path / "out"), resume=True)
    assert len(report.outcome.kept) == len(finished) - 1
    assert contents(tmp_path / "out") == expected


def test_resume_refuses_other_parameters(source: str, tmp_path: Path) -> None:
    """Another plan than the interrupted one is an error; so is starting over without saying so."""
    _interrupt(source, tmp_path / "out", 18)
    chosen = ConvertOptions(max_shard_bytes=4_000_000, resume=True)
    with pytest.raises(ConversionError, check=lambda error: "4000000" in error.got):
        convert(open_source(source), str(tmp_path / "out"), "hf", chosen)
    with pytest.raises(ConversionError, check=lambda error: option("resume", True) in error.todo):
        run(source, str(tmp_path / "out"))


def test_overwrite_starts_anew_and_clears_leftovers(
    source: str, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """--overwrite on an interrupted target: same result, no partial file or journal left."""
    _interrupt(source, tmp_path / "out", 18)
    (tmp_path / "out" / ".old.safetensors.partial").write_bytes(b"x")
    report = run(source, str(tmp_path / "out"), overwrite=True)
    assert report.outcome.kept == ()
    assert contents(tmp_path / "out") == expected


def test_a_torn_journal_line_is_ignored(source: str, expected: dict[str, bytes], tmp_path: Path) -> None:
    """A kill while a line is written costs one file, not the resume."""
    _interrupt(source, tmp_path / "out", 18)
    journal = next(file for file in (tmp_path / "out").iterdir() if file.name.endswith(".jsonl"))
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) >= 3 and json.loads(lines[1])["file"]
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:9])
    report = run(source, str(tmp_path / "out"), resume=True)
    assert len(report.outcome.kept) == len(lines) - 2
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_parts_write_what_one_process_writes(
    source: str, expected: dict[str, bytes], tmp_path: Path, order: tuple[int, ...]
) -> None:
    """Three shares in any order: published by the last one, byte for byte the same."""
    reports = [run(source, str(tmp_path / "out"), part=(i, 3)) for i in order]
    assert [report.outcome.published for report in reports] == [False, False, True]
    assert contents(tmp_path / "out") == expected


def test_a_part_that_is_not_done_holds_back_the_others(
    source: str, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """One share was stopped after some of its files: whoever ends meanwhile publishes nothing."""
    out = tmp_path / "out"
    journal = out / ".part-0-of-2.vescale-convert.jsonl"

    def stop(_: int) -> None:
        if '"file"' in journal.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(
            open_source(source),
            str(out),
            "hf",
            ConvertOptions(max_shard_bytes=SHARD_BYTES, part=(0, 2), **{**LIMITS, "threads": 1}),
            progress=stop,
        )
    assert "complete" not in journal.read_text()
    assert not run(source, str(out), part=(1, 2)).outcome.published
    assert not any(name.startswith("model") for name in os.listdir(out))
    assert run(source, str(out), part=(0, 2), resume=True).outcome.published
    assert contents(out) == expected


def test_an_old_index_never_stands_over_new_files(source: str, tmp_path: Path) -> None:
    """Publishing fails after the first file: readers find no index rather than one for a mixture."""
    index = tmp_path / "out" / "model.safetensors.index.json"
    run(source, str(tmp_path / "out"))
    assert index.exists()
    done: list[str] = []

    def second_fails(rename: Any, store: LocalStorage, old: str, new: str) -> None:
        if done:
            raise OSError("planted")
        done.append(new)
        rename(store, old, new)

    with disk_operation("rename", second_fails), pytest.raises(OSError, match="planted"):
        run(source, str(tmp_path / "out"), overwrite=True)
    assert len(done) == 1 and not index.exists()


def test_settings_that_cannot_be_read_are_found_before_anything_has_its_name(
    source: str, tmp_path: Path
) -> None:
    """A tokenizer that breaks off while it is copied: no weights and no config.json stand there as if complete."""
    assets = tmp_path / "assets"
    assets.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (assets / name).write_text("{}")

    def breaks(read_into: Any, store: LocalStorage, name: str, offset: int, buffer: memoryview) -> None:
        if name == "tokenizer.json":
            raise ConversionError("planted")
        read_into(store, name, offset, buffer)

    options = ConvertOptions(assets=str(assets), max_shard_bytes=SHARD_BYTES)
    with disk_operation("read_into", breaks), pytest.raises(ConversionError, match="planted"):
        convert(open_source(source), str(tmp_path / "out"), "hf", options)
    assert not (tmp_path / "out").exists()


def test_an_old_result_goes_with_its_folders(source: str, tmp_path: Path) -> None:
    """--overwrite with other tensors: no empty folders of arrays that are no more."""
    out = tmp_path / "out"
    convert(open_source(source), str(out), "zarr", ConvertOptions(include=("*.w",)))
    assert len(list(out.glob("arrays/model/*"))) > 10
    more = ConvertOptions(include=("*big",), overwrite=True)
    convert(open_source(source), str(out), "zarr", more)
    assert sorted(path.name for path in out.iterdir()) == ["arrays", "vescale-checkpoint", "zarr.json"]
    assert [path.name for path in (out / "arrays/model").iterdir() if path.is_dir()] == ["layers.3.big"]


# Kills itself when so many files have their final names.
KILLED_PUBLISHING = f"""
import itertools, os, signal, sys
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.checkpoint.storage.open import open_store
source, out, moment = sys.argv[1:]
count, rename = itertools.count(), LocalStorage.rename
def rename_or_die(store, old, new):
    if next(count) == int(moment):
        os.kill(os.getpid(), signal.SIGKILL)
    rename(store, old, new)
LocalStorage.rename = rename_or_die
options = ConvertOptions(max_shard_bytes={SHARD_BYTES}, resume=True, **{LIMITS})
convert(open_source(source), out, "hf", options)
"""


def test_a_run_killed_while_it_publishes_goes_on(
    source: str, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """Twice: some files have their names, the index waits under a partial one, and nothing is copied again."""
    out = tmp_path / "out"
    for moment in ("1", "3"):
        command = [sys.executable, "-c", KILLED_PUBLISHING, source, str(out), moment]
        dead = run_command(command, cwd=Path(__file__).parents[2])
        assert dead.returncode == -signal.SIGKILL
        assert 0 < len(set(os.listdir(out)) & set(expected)) < len(expected)
    report = run(source, str(out), resume=True)
    assert not report.outcome.written and contents(out) == expected


@pytest.mark.parametrize("moment", ["listed", "loaded", "copied"])
def test_a_part_that_resumes_while_another_publishes(
    moment: str, source: str, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts were done when all were killed: whoever comes first publishes, and the others change nothing."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Output, "publish", lambda self, *_: self._own.add(complete=True))
        for index in range(2):
            run(source, str(out), part=(index, 2))
    name = {"listed": "__init__", "loaded": "finished_copies", "copied": "publish"}[moment]
    original, first = getattr(Output, name), [True]

    def with_the_other(self: Output, *args: Any, **named: Any) -> object:
        result = original(self, *args, **named) if moment == "listed" else None
        if first:
            first.clear()
            assert run(source, str(out), resume=True, part=(1, 2)).outcome.published
        return result if moment == "listed" else original(self, *args, **named)

    monkeypatch.setattr(Output, name, with_the_other)
    assert run(source, str(out), resume=True, part=(0, 2)).outcome.published
    assert not first and contents(out) == expected


def test_parts_of_different_conversions_do_not_mix(source: str, tmp_path: Path) -> None:
    """A share run with other options is found before anything is published."""
    run(source, str(tmp_path / "out"), part=(0, 2))
    chosen = ConvertOptions(max_shard_bytes=4_000_000, part=(1, 2))
    with pytest.raises(ConversionError, check=lambda error: "4000000" in error.got):
        convert(open_source(source), str(tmp_path / "out"), "hf", chosen)
    assert not any(name.startswith("model") for name in os.listdir(tmp_path / "out"))


def test_shares_of_another_number_do_not_mix(source: str, expected: dict[str, bytes], tmp_path: Path) -> None:
    """They have files in common: one would write what the other has finished. Starting over takes the place of both."""
    out = str(tmp_path / "out")
    for part, told in (((0, 3), "3"), ((0, 1), "1")):
        if part[1] == 1:
            _interrupt(source, Path(out), 18)  # files are finished by then
        else:
            run(source, out, part=part)
        for other in {(0, 1), (1, 2)} - {part}:
            with pytest.raises(ConversionError, match=rf"expected: {told} "):
                run(source, out, resume=True, part=other)
        run(source, out, overwrite=True)
        assert contents(Path(out)) == expected
        shutil.rmtree(out)


@pytest.mark.part("jobs")
def test_torchrun_shares_the_work(source: str, expected: dict[str, bytes], tmp_path: Path) -> None:
    """Two processes at once under torchrun: the same files."""
    sizes = ["--max-shard-size", str(SHARD_BYTES), "--memory-budget", "8MiB", "--part", "env"]
    arguments = ["to-hf", source, str(tmp_path / "out"), *sizes]
    Job("vescale_fsdp.conversion", 2, arguments, tmp_path / "logs").wait()
    assert contents(tmp_path / "out") == expected


def test_progress_adds_up(source: str, tmp_path: Path) -> None:
    """The bytes announced are the bytes reported, also when finished files are kept."""
    announced: list[int] = []
    done: list[int] = []
    chosen = ConvertOptions(max_shard_bytes=SHARD_BYTES, **LIMITS, resume=True)
    _interrupt(source, tmp_path / "out", 18)
    report = convert(
        open_source(source),
        str(tmp_path / "out"),
        "hf",
        chosen,
        progress=done.append,
        announce=announced.append,
    )
    assert report.outcome.kept and announced == [report.plan.tensor_nbytes]
    assert sum(done) == announced[0]


def _state_at(step: int) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.w": torch.full((40, 500), float(i + step)) for i in range(4)}


@pytest.mark.parametrize("kind", ["hf", "native", "dcp", "torch", "zarr"])
def test_a_result_that_is_whole_leaves_nothing_to_do(kind: str, tmp_path: Path) -> None:
    """Killed after the last step, journals gone: every part resumes to success, and no byte is written."""
    for step in (1, 2):
        dcp.save(_state_at(step), checkpoint_id=tmp_path / f"step{step}", no_dist=True)
    out = tmp_path / "out.pt" if kind == "torch" else tmp_path / "out"

    def resume(step: int, part: tuple[int, int], **more: bool) -> ConvertReport:
        chosen = ConvertOptions(max_shard_bytes=100_000, resume=True, part=part, **LIMITS, **more)
        return convert(open_source(str(tmp_path / f"step{step}")), str(out), kind, chosen)

    assert resume(1, (0, 1)).outcome.written
    files = [out] if out.is_file() else sorted(file for file in out.rglob("*") if file.is_file())
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files}

    for part in ((0, 1), (0, 2), (1, 2)):
        report = resume(1, part)
        assert report.outcome.published and not report.outcome.written
    command = {"native": "to-native", "dcp": "to-fsdp2"}.get(kind, f"to-{kind}")
    shown = vescale_convert(command, tmp_path / "step1", out, "--resume", "--max-shard-size", 100_000)
    assert shown.exit_code == 0 and "nothing" in shown.output
    assert before == {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files}

    # The files of another step have the same names and sizes.
    with pytest.raises(ConversionError, check=lambda error: option("overwrite", True) in error.todo):
        resume(2, (0, 1))
    assert before == {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files}
    assert resume(2, (0, 1), overwrite=True).outcome.written
    found = open_source(str(out)).tensors
    assert found.keys() == _state_at(2).keys()
    again = ConvertOptions(**LIMITS)
    convert(open_source(str(out)), str(tmp_path / "again.pt"), "torch", again)
    assert all(
        bool((w == int(n.split(".")[1]) + 2).all()) for n, w in torch.load(tmp_path / "again.pt").items()
    )


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_runs_into_one_target(tmp_path: Path, overwrite: bool) -> None:
    """The second is refused while the first writes, and neither its files nor its journal are touched; when it has
    ended, the target can be written to again."""
    for name in ("one", "two"):
        torch.save({f"{name}.{i}": torch.randn(64, 64) for i in range(4)}, tmp_path / f"{name}.pt")
    target, refused = str(tmp_path / "out"), list[BaseException]()
    options = ConvertOptions(max_shard_bytes=20_000, no_assets=True, overwrite=True)
    others = replace(options, overwrite=overwrite, resume=not overwrite)

    def begin_another(nbytes: int) -> None:
        if not refused:
            with pytest.raises(ConversionError) as error:
                convert(open_source(str(tmp_path / "two.pt")), target, "hf", others)
            refused.append(error.value)

    convert(open_source(str(tmp_path / "one.pt")), target, "hf", options, progress=begin_another)
    assert refused
    one = torch.load(tmp_path / "one.pt", weights_only=True)
    folder = open_source(target)
    assert folder.tensors.keys() == one.keys() and diff(folder, open_source(str(tmp_path / "one.pt"))) == (
        (),
        4,
    )
    convert(open_source(str(tmp_path / "two.pt")), target, "hf", options)
    assert open_source(target).tensors.keys() == {f"two.{i}" for i in range(4)}


def test_two_runs_that_begin_at_once_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has no `flock`, one of two journals is created."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr("fcntl.flock", no_locks)
    first, second = (Journal(open_store(str(tmp_path / "out")), "", "the same plan") for _ in range(2))
    begun: list[str] = []

    def begin_first(remove: Any, store: LocalStorage, name: str) -> None:
        remove(store, name)
        if store is second.store and not begun:
            begun.append(name)
            first.start()

    with disk_operation("remove", begin_first), pytest.raises(ConversionError):
        second.start()
    assert begun and first.is_started and not second.is_started


def test_a_run_that_ended_while_another_was_planned(tmp_path: Path) -> None:
    """Its result is not mixed with the next: refused without ``overwrite``, replaced whole with it."""
    for name in ("one", "two"):
        torch.save({f"{name}.{i}": torch.randn(64, 64) for i in range(4)}, tmp_path / f"{name}.pt")
    source = open_source(str(tmp_path / "two.pt"))
    for overwrite in (False, True):
        target = str(tmp_path / f"out-{overwrite}")
        options = ConvertOptions(no_assets=True, overwrite=overwrite)
        other = ConvertOptions(no_assets=True, max_shard_bytes=20_000)

        def write_another(_: int, target: str = target, other: ConvertOptions = other) -> None:
            convert(open_source(str(tmp_path / "one.pt")), target, "hf", other)

        if not overwrite:
            with pytest.raises(ConversionError):
                convert(source, target, "hf", options, announce=write_another)
            assert open_source(target).tensors.keys() == {f"one.{i}" for i in range(4)}
        else:
            convert(source, target, "hf", options, announce=write_another)
            assert open_source(target).tensors.keys() == {f"two.{i}" for i in range(4)}
        assert not verify(open_source(target)).problems
