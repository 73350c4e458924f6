"""What the command line says of things that are not what they seem: pointers, unfinished saves, runs, parts."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from tests.support.rule_cases import GROUPED_EXPERTS, experts, hf_folder
from vescale_fsdp.checkpoint import CheckpointManager, latest, load, save
from vescale_fsdp.conversion import open_source
from vescale_fsdp.conversion.cli import main as entry
from vescale_fsdp.conversion.cli.commands import cli
from vescale_fsdp.errors import ConversionError, NoCheckpointError, VescaleError, option

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456789\n"


def _run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def _error(*args: str | Path) -> str:
    result = _run(*args)
    assert isinstance(result.exception, VescaleError), result.output
    return str(result.exception)


def _dcp(path: Path) -> Path:
    dcp.save({"model": {"w": torch.ones(4)}}, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize(
    "files", [["model.safetensors"], ["pytorch_model.bin"], [".metadata", "__0_0.distcp"], ["state.pt"]]
)
def test_pointers_of_git_lfs(tmp_path: Path, files: list[str]) -> None:
    """Whatever the format, as a folder and as a file."""
    for file in files:
        (tmp_path / file).write_bytes(POINTER)
    for source in {tmp_path, tmp_path / files[-1]}:
        with pytest.raises(
            ConversionError, check=lambda error: files[-1] in error.got and "git" in error.todo
        ):
            open_source(str(source))


def test_settings_that_are_pointers(tmp_path: Path) -> None:
    """They would be copied as they are; nothing is written."""
    source = _dcp(tmp_path / "dcp")
    assets = hf_folder(tmp_path / "assets", {"w": torch.ones(4)})
    (assets / "tokenizer.json").write_bytes(POINTER)
    assert "tokenizer.json" in _error("to-hf", source, tmp_path / "out", "--assets", assets)
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    (assets / "config.json").write_bytes(POINTER)  # which other targets read for ties
    told = _error("to-torch", assets, tmp_path / "a.pt")
    assert "git-lfs" in told and "config.json" in told
    (assets / "config.json").write_text("{}")
    (assets / "tokenizer.json").write_bytes(b"{}" + b" " * len(POINTER))
    assert _run("to-hf", source, tmp_path / "out", "--assets", assets).exit_code == 0


def _unfinished_native(path: Path) -> None:
    save(path, {"w": torch.ones(4)})
    (path / "manifest.json").unlink()


def _unfinished_dcp(path: Path) -> None:
    (_dcp(path) / ".metadata").unlink()


def _unfinished_copy(path: Path) -> None:
    path.mkdir(parents=True)
    save_file({"w": torch.ones(4)}, path / "model-00002-of-00003.safetensors")


def _unfinished_conversion(path: Path) -> None:
    path.mkdir(parents=True)
    (path / ".model.safetensors.partial").write_bytes(b"1")
    (path / ".vescale-convert.jsonl").write_text("{}\n")


def _unfinished_download(path: Path) -> None:
    (path / ".cache/huggingface/download").mkdir(parents=True)
    (path / ".cache/huggingface/download/x.incomplete").write_bytes(b"1")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_unfinished_native, r"native save did not finish: its manifest\.json(.|\n)*older step"),
        (_unfinished_dcp, r"did not finish: its \.metadata(.|\n)*__0_0\.distcp(.|\n)*older checkpoint"),
        (_unfinished_copy, r"copy or download(.|\n)*no model-00001-of-00003(.|\n)*00003-of-00003"),
        (_unfinished_conversion, r"conversion did not finish(.|\n)*resume=True"),
        (_unfinished_download, r"download did not finish(.|\n)*again"),
    ],
)
def test_an_unfinished_save_is_named_with_the_way_on(tmp_path: Path, make: object, told: str) -> None:
    """Named as unfinished, of what, and what to do; alone and as a step of a run."""
    make(tmp_path / "one")  # type: ignore[operator]
    with pytest.raises(ConversionError, match=told):
        open_source(str(tmp_path / "one"))
    make(tmp_path / "run" / "step-00000010")  # type: ignore[operator]
    with pytest.raises(ConversionError):
        open_source(str(tmp_path / "run"))


def test_steps_of_a_run(tmp_path: Path) -> None:
    """What only looks takes the newest finished step, all others want to be told which."""
    root = tmp_path / "run"
    manager = CheckpointManager(root)
    for step in (3, 20):
        manager.save(step, {"model": {"w": torch.full((4,), float(step))}})
    manager.close()
    _unfinished_native(root / "step-00000030")
    found = json.loads(_run("inspect", root, "--json").stdout)
    assert found["url"].endswith("step-00000020")
    assert json.loads(_run("inspect", root, "--json", "--step", "3").stdout)["url"].endswith("step-00000003")
    assert _run("verify", root).exit_code == 0
    assert _run("report", root, "--out", tmp_path / "page.html").exit_code == 0
    assert "step-00000020" in (tmp_path / "page.html").read_text()
    assert "--step 20" in _error("to-hf", root, tmp_path / "out")
    assert " 3, 20" in _error("to-hf", root, tmp_path / "out", "--step", "30")
    assert _run("to-hf", root, tmp_path / "out", "--step", "3").exit_code == 0
    assert open_source(str(tmp_path / "out")).kind == "hf"
    assert "--step" in _error("inspect", tmp_path / "out", "--step", "3")


def test_steps_that_a_rollback_abandoned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All who pick the newest step skip them, as `restore` does, and say so in one line; asked for by number they are
    there."""
    root = tmp_path / "run"
    state = {"model": {"w": torch.zeros(4)}}
    with CheckpointManager(root) as manager:
        for step in (10, 20):
            manager.save(step, state)
        manager.restore(state, step=10)
        manager.save(11, state)
    caplog.clear()
    newest = latest(root)
    assert newest is not None and newest.endswith("step-00000011")
    assert open_source(str(root), step="newest").url == newest
    assert len(caplog.messages) == 1 and "20" in caplog.messages[0]
    for command in (("inspect", root, "--json"), ("report", root, "--out", tmp_path / "page.html")):
        assert _run(*command).exit_code == 0
    assert json.loads(_run("inspect", root, "--json").stdout)["url"] == newest
    assert "step-00000011" in (tmp_path / "page.html").read_text()
    with pytest.raises(ConversionError, check=lambda error: option("step", 11) in error.todo):
        open_source(str(root))
    with pytest.raises(NoCheckpointError):
        load(root, {"model": state["model"]})
    assert open_source(str(root), step=20).url.endswith("step-00000020")
    with CheckpointManager(root) as manager:  # saved anew it counts again
        manager.save(20, state)
    assert open_source(str(root), step="newest").url.endswith("step-00000020")


@pytest.mark.parametrize("name", ["step-{}", "checkpoint-{}", "global_step{}", "iter_000{}"])
def test_steps_of_others(tmp_path: Path, name: str) -> None:
    """torchtitan, transformers' Trainer, verl: numbers are compared as numbers."""
    for step in (9, 10):
        _dcp(tmp_path / name.format(step))
    assert open_source(str(tmp_path), step="newest").url.endswith(name.format(10))
    assert open_source(str(tmp_path), step=9).url.endswith(name.format(9))


def test_a_pair_of_folders_is_no_run(tmp_path: Path) -> None:
    """What accelerate leaves has numbers in its names too."""
    _dcp(tmp_path / "pytorch_model_fsdp_0")
    assert open_source(str(tmp_path)).kind == "dcp"


def test_a_part_says_what_it_wrote(tmp_path: Path) -> None:
    """Its files by name, not those of others."""
    state = {f"w{i}": torch.ones(4) for i in range(5)}
    torch.save(state, tmp_path / "a.pt")
    said = _run(
        "to-hf", tmp_path / "a.pt", tmp_path / "out", "--max-shard-size", "16", "--part", "1/3"
    ).stdout
    assert re.findall(r"model-(\d+)-of-00005", said) == ["00002", "00005"]
    assert "00003-of" not in said and not (tmp_path / "out" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("command", ["report {} --out {}", "to-torch {} {}", "to-torch {} {} --overwrite"])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, command: str) -> None:
    """A file in the place of /dev/null would end every program on the machine; a pipe stands for it here."""
    os.mkfifo(tmp_path / "pipe")
    source = _dcp(tmp_path / "dcp")
    result = _run(*command.format(source, tmp_path / "pipe").split())
    assert isinstance(result.exception, (FileExistsError, VescaleError))
    assert f"{tmp_path}/pipe" in str(result.exception) and (tmp_path / "pipe").is_fifo()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["dcp", "pipe"]


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    """In the middle, and at the end, where the config alone knows."""
    tensors = experts("mlp", "gate_proj", "up_proj", "down_proj")
    config = {"num_experts": 3, "moe_intermediate_size": 10}
    for number, others in (
        (1, "not model.layers.0.mlp.experts.1.down"),
        (2, "to model.layers.0.mlp.experts.1.down"),
    ):
        missing = f"model.layers.0.mlp.experts.{number}.down_proj.weight"
        kept = {name: tensor for name, tensor in tensors.items() if name != missing}
        folder = hf_folder(tmp_path / str(number), kept, **config)
        assert others in _error("to-fsdp2", folder, tmp_path / "out", "--rules", GROUPED_EXPERTS)


def test_what_differs_from_the_run_that_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option, and the value that it had; or the source."""
    source = tmp_path / "a.pt"
    torch.save({f"w{i}": torch.ones(4) for i in range(3)}, source)
    options = ("--max-shard-size", "16", "--part", "0/2")
    assert _run("to-hf", source, tmp_path / "out", *options, "--dtype", "bf16").exit_code == 0
    told = _error("to-hf", source, tmp_path / "out", *options, "--dtype", "fp16", "--resume")
    assert "expected: --dtype bf16\n" in told and "got: --dtype fp16\n" in told and "shard" not in told
    torch.save({f"w{i}": torch.zeros(5) for i in range(3)}, source)
    told = _error("to-hf", source, tmp_path / "out", *options, "--dtype", "bf16", "--resume")
    assert "files of the source" in told and "--dtype" not in told


def test_without_assets_settings_stay_behind_unchecked(tmp_path: Path) -> None:
    """A repository's own settings stay behind; that nobody can check the result then is said. Not beside --assets."""
    folder = hf_folder(tmp_path / "hf", {"w": torch.ones(4)})
    result = _run("to-hf", folder, tmp_path / "out", "--no-assets")
    assert result.exit_code == 0 and "check" in result.stderr and "warning" not in result.stderr
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["model.safetensors"]
    assert _run("to-hf", folder, tmp_path / "other", "--no-assets", "--assets", folder).exit_code == 2


def test_version_and_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a report of a defect needs; and what --help says of completion works."""
    said = _run("--version").stdout
    assert f"torch {version('torch')}" in said and "format 1" in said and "Python 3." in said
    assert "_VESCALE_CONVERT_COMPLETE=bash_source" in " ".join(_run("--help").stdout.split())
    monkeypatch.setenv("_VESCALE_CONVERT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "vescale-convert to-h")
    monkeypatch.setenv("COMP_CWORD", "1")
    found = CliRunner().invoke(cli, [], prog_name="vescale-convert")
    assert "to-hf" in found.output


def _main(monkeypatch: pytest.MonkeyPatch, *args: str | Path) -> tuple[int, str]:
    """Exit code and message of the command as its entry point tells them."""
    told = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["vescale-convert", *map(str, args)])
    with redirect_stderr(told), redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as ended:
        entry.main()
    return int(str(ended.value.code)), told.getvalue()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("plan {source} --shards 4 --out {file}", "a file is in the place of a folder"),
        ("plan {source} --shards 4 --out {file}/inside", "a file is in the place of a folder"),
        ("report {source} --out {folder}", "choose another path"),
        ("report {source} --out {file}/inside.html", "a file is in the place of a folder"),
        ("to-hf {source} {loop}", "circle of links"),
        ("to-torch {source} {folder}/" + "x" * 300, "a shorter name"),
        ("inspect " + "x" * 300, "a shorter name"),
    ],
)
def test_errors_of_the_system_are_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, told: str
) -> None:
    """They name the file and what to do, and speak of --resume where a command has it; nothing is left."""
    source, folder, file, loop = (tmp_path / name for name in ("dcp", "folder", "file", "loop"))
    _dcp(source)
    folder.mkdir()
    file.touch()
    loop.symlink_to("loop")
    before = sorted(tmp_path.rglob("*"))
    words = line.format(source=source, folder=folder, file=file, loop=loop).split()
    code, message = _main(monkeypatch, *words)
    first, *rest = message.removeprefix("vescale-convert: ").splitlines()
    assert code == 1 and first[0].isupper() and first.endswith(".") and "Errno" not in message, message
    assert rest[-1].startswith("  what to do: ") and told in rest[-1], message
    assert ("--resume" in message) == line.startswith("to-")
    assert rest[0].startswith("  where: ") and sorted(tmp_path.rglob("*")) == before


def test_pages_and_plans_appear_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be finished leaves nothing that looks finished, and the file is named."""
    source = _dcp(tmp_path / "dcp")

    def full(old: Path, new: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(old), None, str(new))

    monkeypatch.setattr(os, "replace", full)
    for args in (["plan", source, "--shards", "4", "--out"], ["report", source, "--out"]):
        code, message = _main(monkeypatch, *args, tmp_path / "out")
        assert code == 1 and f"where: {tmp_path}/out" in message and " room\n" in message, message
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and source not in path.parents]


@pytest.mark.parametrize("rank", [None, "", "q", "-1", "\N{SUPERSCRIPT TWO}", "2"])
def test_part_env_needs_numbers_of_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str | None
) -> None:
    """Where RANK or WORLD_SIZE is missing, no number, or out of range, nothing is written."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    source = _dcp(tmp_path / "dcp")
    assert "--part" in _error("to-hf", source, tmp_path / "out", "--part", "env")
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_parts_are_written_only_where_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of a training job that calls the command writes all files; ``--part env`` writes its share."""
    source = tmp_path / "dcp"
    dcp.save({"model": {f"w{n}": torch.ones(4) for n in range(4)}}, checkpoint_id=source, no_dist=True)

    def files_after(name: str, *options: str) -> tuple[set[str], str]:
        result = _run("to-hf", source, tmp_path / name, "--max-shard-size", "16", *options)
        assert result.exit_code == 0, result.output
        return {file.name for file in (tmp_path / name).iterdir()}, result.stderr

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    whole, warnings = files_after("whole")
    assert len(whole) > 4 and "RANK" not in warnings
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")

    monkeypatch.setenv("RANK", "0")
    inside, warnings = files_after("inside")
    assert inside == whole and "RANK" in warnings

    first, warnings = files_after("parts", "--part", "env")
    assert first != whole and "RANK" not in warnings
    monkeypatch.setenv("RANK", "1")
    assert files_after("parts", "--part", "env")[0] == whole
