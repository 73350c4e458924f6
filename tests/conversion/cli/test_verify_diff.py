"""verify finds damage, diff finds differences, and both find nothing where there is nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import save_file

from tests.support.dtype_zoo import zoo
from vescale_fsdp.checkpoint import save, verify
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.conversion.cli.main import cli
from vescale_fsdp.conversion.convert import ConvertOptions, convert
from vescale_fsdp.conversion.diff import diff
from vescale_fsdp.conversion.formats.detect import open_source


def _dcp(path: Path, tensors: dict[str, Any]) -> Path:
    dcp.save({"model": tensors, "step": 1}, checkpoint_id=path, no_dist=True)
    return path


def test_verify_accepts_what_torch_and_we_write(tmp_path: Path) -> None:
    """Sound checkpoints of every format, ours and torch's: no problem, every byte read."""
    tensors = zoo()
    total = sum(t.nbytes for t in tensors.values())
    source = _dcp(tmp_path / "dcp", tensors)
    torch.save({"model": tensors}, tmp_path / "theirs.pt")
    for kind, target in (("dcp", "again"), ("torch", "ours.pt"), ("zarr", "zarr"), ("hf", "hf")):
        convert(open_source(str(source)), str(tmp_path / target), kind)
    for name in ("dcp", "again", "theirs.pt", "ours.pt", "zarr", "hf"):
        report = verify(open_source(str(tmp_path / name)))
        assert report.problems == () and report.num_bytes == total, name
        assert (report.num_checksums > 80) == (name != "hf"), name
        assert verify(tmp_path / name) == report, name
        assert verify(tmp_path / name, deep=False).num_bytes == 0, name


@pytest.mark.parametrize("deep", [False, True])
def test_verify_of_an_open_storage(tmp_path: Path, deep: bool) -> None:
    """A good checkpoint has tensors and no problem; one that lacks a file has a problem, and nothing is raised."""
    save(tmp_path / "c", {"w": torch.ones(4)})
    assert verify(LocalStorage(tmp_path / "c"), deep=deep).num_tensors == 1
    assert verify(LocalStorage(tmp_path / "c"), deep=deep).ok
    next((tmp_path / "c").glob("data-*/*")).unlink()
    assert len(verify(LocalStorage(tmp_path / "c"), deep=deep).problems) == 1


@pytest.mark.parametrize("command", ["to-vescale", "to-zarr"])
@pytest.mark.parametrize("options", [(), ("--from", "native"), ("--quick",)])
def test_the_command_lists_every_missing_or_cut_file(
    tmp_path: Path, options: tuple[str, ...], command: str
) -> None:
    """A native checkpoint that cannot be opened: the problems of `verify`, of the newest step of a run folder too."""
    save(tmp_path / "one", {"w": torch.ones(4000)})
    newest = tmp_path / "run/step-00000002"
    for folder in (tmp_path / "run/step-00000001", newest):
        folder.parent.mkdir(exist_ok=True)
        args = [command, str(tmp_path / "one"), str(folder), "-q"]
        args += ["--ranks", "2"] if command == "to-vescale" else []
        assert CliRunner().invoke(cli, args).exit_code == 0
    if command == "to-vescale":
        missing, cut = newest.glob("data-*/*.safetensors")
    else:
        (missing,), (cut,) = newest.glob("data-*/*.safetensors"), newest.glob("**/c/0")
    missing.unlink()
    cut.write_bytes(cut.read_bytes()[:-1])
    problems = verify(newest, deep="--quick" not in options).problems
    expected = [str(problem) for problem in problems]
    assert {problem.where for problem in problems} == {
        str(file.relative_to(newest)) for file in (missing, cut)
    }
    assert len(problems) == 2 and not any("verify(" in problem.text for problem in problems)
    for src in (newest, tmp_path / "run"):
        result = CliRunner().invoke(cli, ["verify", str(src), "--json", *options])
        assert json.loads(result.stdout)["problems"] == expected and result.exit_code == 1


def test_the_command_prints_the_first_problems_and_their_number(tmp_path: Path) -> None:
    """Of 30 missing files 20; all of them with --json, quick or not."""
    save(tmp_path / "one", {f"w{number}": torch.ones(30) for number in range(30)})
    args = ["to-vescale", str(tmp_path / "one"), str(tmp_path / "native"), "--ranks", "30", "-q"]
    assert CliRunner().invoke(cli, args).exit_code == 0
    for file in (tmp_path / "native").glob("data-*/*.safetensors"):
        file.unlink()
    for options in ((), ("--quick",)):
        command = ["verify", str(tmp_path / "native"), *options]
        shown, listed = CliRunner().invoke(cli, command), CliRunner().invoke(cli, [*command, "--json"])
        assert shown.stdout.count("what to do:") == 20 and "10 more" in shown.stdout
        assert len(json.loads(listed.stdout)["problems"]) == 30
        assert shown.exit_code == listed.exit_code == 1


def test_verify_reports_what_cannot_be_opened(tmp_path: Path) -> None:
    """A damaged header and a path without a checkpoint are problems of the report, not exceptions."""
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    for path in (tmp_path, tmp_path / "model.safetensors", tmp_path / "absent"):
        assert len(verify(path).problems) == 1, path


def test_verify_finds_every_flipped_bit_of_the_data(tmp_path: Path) -> None:
    """One bit of a tensor's bytes in a .distcp file: a problem that names tensor, file and place."""
    source = _dcp(tmp_path / "dcp", {"w": torch.zeros(5000), "b": torch.ones(3)})
    file = source / "__0_0.distcp"
    good = file.read_bytes()
    start = good.index(b"\0" * 20_000)
    for at in (start, start + 9_999, start + 19_999):
        bad = bytearray(good)
        bad[at] ^= 0x10
        file.write_bytes(bad)
        report = verify(open_source(str(source)))
        assert len(report.problems) == 1
        assert "model.w" in report.problems[0].where and "__0_0.distcp" in report.problems[0].text
        assert verify(open_source(str(source)), deep=False).problems == ()


def test_verify_finds_stale_weights_and_a_wrong_total(tmp_path: Path) -> None:
    """What loaders do not check: files the index does not name, and its total_size; weights in the formats of other
    loaders may lie beside."""
    source = _dcp(tmp_path / "dcp", {f"w{i}": torch.ones(400) for i in range(3)})
    save_file({"w": torch.ones(2)}, tmp_path / "old.safetensors")
    out = tmp_path / "out"
    convert(open_source(str(source)), str(out), "hf", ConvertOptions(max_shard_bytes=1600))
    for other in ("pytorch_model.bin", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors"):
        (out / other).write_bytes((tmp_path / "old.safetensors").read_bytes())
    assert verify(open_source(str(out))).problems == ()
    (out / "model-00009-of-00009.safetensors").write_bytes((tmp_path / "old.safetensors").read_bytes())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    index["metadata"]["total_size"] = 7
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    problems = verify(open_source(str(out))).problems
    assert len(problems) == 2
    assert "00009-of-00009" in problems[0].text and "total_size 7" in problems[1].text


def test_diff_across_formats(tmp_path: Path) -> None:
    """A model equals itself in another format under another prefix; a change of one value is found."""
    tensors = zoo()
    source = _dcp(tmp_path / "dcp", tensors)
    convert(open_source(str(source)), str(tmp_path / "hf"), "hf")
    found, compared = diff(open_source(str(source)), open_source(str(tmp_path / "hf")))
    assert found == () and compared == len(tensors)
    changed = {**tensors, "float32.matrix": tensors["float32.matrix"].clone(), "new": torch.ones(1)}
    changed["float32.matrix"][2, 3] += 1
    changed["int8.vector"] = tensors["int8.vector"].to(torch.int16)
    changed["bool.cube"] = torch.zeros(2, dtype=torch.bool)
    del changed["int64.scalar"]
    torch.save({"state_dict": changed}, tmp_path / "b.pt")
    found, _ = diff(open_source(str(source)), open_source(str(tmp_path / "b.pt")), model_only=True)
    assert {(d.name, d.kind) for d in found} == {
        ("float32.matrix", "value"),
        ("int8.vector", "dtype"),
        ("bool.cube", "shape"),
        ("int64.scalar", "only_a"),
        ("new", "only_b"),
    }
    assert next(d for d in found if d.kind == "value").text.startswith("1 of 30 values")


def test_diff_with_tolerances(tmp_path: Path) -> None:
    """bfloat16 against float32: different bitwise, equal as numbers within the rounding error."""
    weights = {"w": torch.randn(1000), "nan": torch.tensor([float("nan"), float("inf")])}
    a = open_source(str(_dcp(tmp_path / "a", weights)))
    b = open_source(str(_dcp(tmp_path / "b", {n: w.bfloat16() for n, w in weights.items()})))
    assert [d.kind for d in diff(a, b)[0]] == ["dtype", "dtype"]
    assert diff(a, b, rtol=2**-7, ignore_dtype=True)[0] == ()
    assert [d.name for d in diff(a, b, rtol=2**-12, ignore_dtype=True)[0]] == ["w"]


def test_diff_of_values_that_are_no_tensors(tmp_path: Path) -> None:
    """Learning rates and counters are part of a training state: compared across formats, left alone by model_only."""
    for name, lr in (("a", 0.1), ("b", 0.2)):
        groups = [{"lr": lr, "betas": (0.9, 0.95), "params": ["w"]}]
        state = {"model": {"w": torch.ones(2)}, "optimizer": {"param_groups": groups}, "step": 3}
        dcp.save(state if name == "a" else {**state, "epoch": 1}, checkpoint_id=tmp_path / name, no_dist=True)
    a = open_source(str(tmp_path / "a"))
    for kind in ("torch", "zarr", "native"):
        convert(a, str(tmp_path / kind), kind)
        assert diff(a, open_source(str(tmp_path / kind))) == ((), 1)
    found, _ = diff(a, open_source(str(tmp_path / "b")))
    assert [(d.name, d.kind) for d in found] == [
        ("epoch", "only_b"),
        ("optimizer.param_groups.0.lr", "value"),
    ]
    assert found[1].text == "0.1 and 0.2"
    assert diff(a, open_source(str(tmp_path / "b")), model_only=True)[0] == ()


def test_tolerances_are_of_the_second_side(tmp_path: Path) -> None:
    """|a - b| <= atol + rtol * |b|: relative to b, not to a, and not to one."""
    a = open_source(
        str(_dcp(tmp_path / "a", {"large": torch.tensor([1010.0]), "small": torch.tensor([0.02])}))
    )
    b = open_source(
        str(_dcp(tmp_path / "b", {"large": torch.tensor([1000.0]), "small": torch.tensor([0.01])}))
    )

    def differing(left: Source, right: Source, **tolerance: float) -> list[str]:
        return [d.name for d in diff(left, right, **tolerance)[0]]

    assert differing(a, b, rtol=0.02) == ["small"]
    assert differing(a, b, atol=0.02) == ["large"]
    assert differing(a, b, rtol=0.6) == ["small"] and differing(b, a, rtol=0.6) == []


def test_no_tolerance_reaches_infinity_or_nan(tmp_path: Path) -> None:
    """A share of infinity is infinite, and no comparison with NaN holds: neither makes values equal."""
    inf, nan = float("inf"), float("nan")
    a = _dcp(tmp_path / "a", {"w": torch.tensor([1.0, inf, nan, 1.0, inf, inf, nan])})
    b = _dcp(tmp_path / "b", {"w": torch.tensor([inf, 1.0, 1.0, nan, -inf, inf, nan])})
    found, _ = diff(open_source(str(a)), open_source(str(b)), rtol=0.5, atol=1.0)
    assert len(found) == 1 and found[0].text.startswith("5 of 7 ")


def test_verify_and_diff_exit_with_0_or_1(tmp_path: Path) -> None:
    """verify and diff: 0 if all is well, 1 if not, results on stdout."""
    a = str(_dcp(tmp_path / "a", {"w": torch.ones(3)}))
    b = str(_dcp(tmp_path / "b", {"w": torch.zeros(3)}))
    run = CliRunner()
    assert run.invoke(cli, ["verify", a]).exit_code == 0
    assert run.invoke(cli, ["diff", a, a]).exit_code == 0
    different = run.invoke(cli, ["diff", a, b, "--json"])
    assert different.exit_code == 1
    assert json.loads(different.stdout)["differences"][0]["kind"] == "value"
    data = tmp_path / "a" / "__0_0.distcp"
    one = torch.ones(3).numpy().tobytes()
    data.write_bytes(data.read_bytes().replace(one, b"\1" + one[1:]))
    broken = run.invoke(cli, ["verify", a])
    assert broken.exit_code == 1 and "checksum" in broken.stdout


def test_a_nan_among_the_values_is_equal_to_itself(tmp_path: Path) -> None:
    """As in tensors; what is another value, kind or length is not."""
    sides = {
        "a": {"loss": float("nan"), "seen": [1.0, {"best": float("nan")}]},
        "b": {"loss": float("nan"), "seen": [1.0, {"best": 2.0}]},
        "c": {"loss": 3.0, "seen": [1.0]},
    }
    for name, values in sides.items():
        torch.save({"model": {"w": torch.ones(2)}, **values}, tmp_path / f"{name}.pt")
    a, b, c = (open_source(str(tmp_path / f"{name}.pt")) for name in sides)
    assert [each.name for each in diff(a, a)[0]] == []
    assert [each.name for each in diff(a, b)[0]] == ["seen.1.best"]
    assert {"loss", "seen.1.best"} <= {each.name for each in diff(a, c)[0]}
