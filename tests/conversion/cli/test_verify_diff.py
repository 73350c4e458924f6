"""verify finds damage, diff finds differences, and both find nothing where there is nothing."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import save_file

from tests.support.command import vescale_convert
from tests.support.dtype_zoo import zoo
from vescale_fsdp.checkpoint import CheckpointManager, PerRank, save, verify
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.conversion import ConvertOptions, Source, convert, diff, open_source
from vescale_fsdp.conversion.cli.main import cli
from vescale_fsdp.errors import CheckpointError, ConversionError


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


@pytest.mark.parametrize("form", ["native", "zarr"])
def test_the_tensors_with_damaged_bytes_are_all_named(tmp_path: Path, form: str) -> None:
    """Those of one stripe or chunk, however many, and after a deletion those of the file; none of a good checkpoint."""
    numel = 1 << 18  # 1 MiB, a stripe
    tensors = {f"small{i}": torch.ones(64) for i in range(40)} | {
        f"large{i}": torch.ones(numel) for i in range(3)
    }
    path = tmp_path / "c"
    save(path, tensors, format=form)

    def damaged() -> list[str]:
        found = json.loads(vescale_convert("verify", path, "--json").stdout)["damaged_tensors"]
        assert tuple(found) == verify(path).damaged_tensors
        return list(found)

    assert damaged() == []
    pattern = "data-*/*.safetensors" if form == "native" else "arrays/large1/c/*"
    file, *_ = sorted(path.glob(pattern))
    data = bytearray(file.read_bytes())
    data[numel * 4 // 2] ^= 1
    file.write_bytes(data)
    first = damaged()
    assert first and set(first) < set(tensors)
    if form == "zarr":
        assert first == ["large1"]
    file.unlink()
    assert damaged() == (sorted(tensors) if form == "native" else ["large1"])


@pytest.mark.parametrize("command", ["to-native", "to-zarr"])
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
        args += ["--ranks", "2"] if command == "to-native" else []
        assert CliRunner().invoke(cli, args).exit_code == 0
    if command == "to-native":
        missing, cut = newest.glob("data-*/*.safetensors")
    else:
        (missing,), (cut,) = newest.glob("*/*.safetensors"), newest.glob("**/c/0")
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


def test_the_text_counts_and_says_how_to_list_the_damaged_tensors(tmp_path: Path) -> None:
    """Of a tensor and a checksum without a plural; the number of damaged tensors only if there are any."""
    save(tmp_path / "one", {"w": torch.ones(4)})
    good = vescale_convert("verify", tmp_path / "one").stdout
    assert "1 tensor," in good and "1 checksum " in good and "--json" not in good
    save(tmp_path / "c", {f"w{number}": torch.ones(4) for number in range(27)})
    next((tmp_path / "c").glob("data-*/*")).unlink()
    *_, last = vescale_convert("verify", tmp_path / "c").stdout.splitlines()
    assert "27" in last and "--json" in last


@pytest.mark.parametrize("name", ["native", "zarr", "torch.pt"])
def test_the_path_is_that_of_the_opened_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Given relative to the working folder, and printed alike whether a file is missing, short or good."""
    monkeypatch.chdir(tmp_path)
    if name == "torch.pt":
        torch.save({"w": torch.ones(400)}, name)
    else:
        save(name, {"w": torch.ones(400)}, format="zarr" if name == "zarr" else "native")

    def printed() -> str:
        shown, listed = vescale_convert("verify", name), vescale_convert("verify", name, "--json")
        url = str(json.loads(listed.stdout)["url"])
        assert f"{url}: " in shown.stdout
        return url

    url = printed()
    assert url == open_source(name).url == str(tmp_path / name)
    file = tmp_path / name if name == "torch.pt" else next((tmp_path / name).rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert printed() == url
    if name != "torch.pt":
        file.unlink()
        assert printed() == url


def test_an_incomplete_step_is_not_called_missing(tmp_path: Path) -> None:
    """The folder of a step that `ls` shows as incomplete is named; of a step without a folder, only the number."""
    save(tmp_path / "run/step-00000003", {"w": torch.ones(4)})
    save(tmp_path / "run/step-00000009", {"w": torch.ones(4)})
    (tmp_path / "run/step-00000009/manifest.json").unlink()
    (tmp_path / "run/step-00000010").mkdir()
    for step in (9, 10):
        refused = vescale_convert("verify", tmp_path / "run", "--step", step).exception
        assert isinstance(refused, ConversionError) and f"step-{step:08d}" in str(refused.got)
    absent = vescale_convert("verify", tmp_path / "run", "--step", 8).exception
    assert isinstance(absent, ConversionError) and absent.got == 8
    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(CheckpointError, check=lambda error: error.got == 8):
            manager.pin(8)
        with pytest.raises(
            CheckpointError, check=lambda error: str(error.got).startswith("9") and error.got != 9
        ):
            manager.pin(9)


def test_verify_of_a_run_names_later_steps_without_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr, whether the newest step with one is good or damaged; not if a step is named, nor of older ones."""
    monkeypatch.chdir(tmp_path)
    for step in (2, 3, 9):
        save(tmp_path / f"run/step-{step:08d}", {"w": torch.ones(4)})
    (tmp_path / "run/step-00000002/manifest.json").unlink()
    assert vescale_convert("verify", tmp_path / "run").stderr == ""
    (tmp_path / "run/step-00000009/manifest.json").unlink()
    for run in (f"{tmp_path}/run/", "run", "./run/", f"file://{tmp_path}/run"):
        good = vescale_convert("verify", run, "--json")
        assert good.exit_code == 0 and re.findall(r"\d+", good.stderr) == ["9"], run
    for src in (("run", "--step", 3), ("run/step-00000003",)):
        assert vescale_convert("verify", *src).stderr == ""
    next((tmp_path / "run/step-00000003").glob("data-*/*")).unlink()
    damaged = vescale_convert("verify", tmp_path / "run")
    assert damaged.exit_code == 1 and re.findall(r"\d+", damaged.stderr) == ["9"]


def test_inspect_names_the_values_of_ranks(tmp_path: Path) -> None:
    """`load` restores them, though no conversion writes them; a checkpoint without them has no such line."""
    save(tmp_path / "with", {"w": torch.ones(4), "rng": PerRank({"seed": 1})})
    save(tmp_path / "without", {"w": torch.ones(4)})
    with_them, without = (
        [line.split() for line in vescale_convert("inspect", tmp_path / name).stdout.splitlines()]
        for name in ("with", "without")
    )
    assert ["per-rank", "values:", "rng"] in with_them
    assert not any("per-rank" in line for line in without)


def test_the_command_prints_the_first_problems_and_their_number(tmp_path: Path) -> None:
    """Of 30 missing files 20; all of them with --json, quick or not."""
    save(tmp_path / "one", {f"w{number}": torch.ones(30) for number in range(30)})
    args = ["to-native", str(tmp_path / "one"), str(tmp_path / "native"), "--ranks", "30", "-q"]
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


def test_the_command_says_what_is_left_out(tmp_path: Path) -> None:
    """If one side is a model alone, or only models are compared: how many others there are, by first keys."""
    model, optimizer = {"a": torch.ones(2), "b": torch.ones(3)}, {"x.m": torch.ones(2), "x.v": torch.ones(2)}
    save(tmp_path / "all", {"model": model, "optimizer": optimizer, "step": 3})
    save(tmp_path / "model", {"model": model})
    run = CliRunner()
    for a, b, side, options in (
        ("all", "model", "a", []),
        ("model", "all", "b", []),
        ("all", "all", "a", ["--model-only"]),
    ):
        args = ["diff", str(tmp_path / a), str(tmp_path / b), "-q", *options]
        told, text = json.loads(run.invoke(cli, [*args, "--json"]).stdout), run.invoke(cli, args)
        out = told["not_compared"][0]
        assert (told["compared"], told["differences"], text.exit_code) == (2, [], 0)
        assert (out["side"], out["num_tensors"], out["num_values"]) == (side, 2, 1)
        assert out["groups"] == {"optimizer.x.*": 2, "step": 1} and "optimizer.x.* (2)" in text.stdout
    args = ["diff", str(tmp_path / "all"), str(tmp_path / "all"), "-q"]
    assert json.loads(run.invoke(cli, [*args, "--json"]).stdout)["not_compared"] == []


def test_the_command_groups_what_one_side_lacks(tmp_path: Path) -> None:
    """One line for each prefix, and few of many other differences; all of them with --all and --json."""
    state = {f"w{number}": torch.zeros(2) for number in range(30)}
    moments = {f"layers.{number}.m": torch.ones(2) for number in range(40)}
    save(tmp_path / "a", {"model": state, "optimizer": moments})
    save(tmp_path / "b", {"model": {n: t + 1 for n, t in state.items()}, "app": {"optim": moments}})
    run, args = CliRunner(), ["diff", str(tmp_path / "a"), str(tmp_path / "b"), "-q"]
    few, every = (run.invoke(cli, [*args, *more]).stdout.splitlines() for more in ([], ["--all"]))
    listed = json.loads(run.invoke(cli, [*args, "--json"]).stdout)["differences"]
    assert len(listed) == 30 + 2 * 40 == len(every) - 1
    grouped = [line.split(":")[0].split(maxsplit=1) for line in few if line.startswith("only_")]
    assert grouped == [["only_a", "optimizer.layers.* (40)"], ["only_b", "app.optim.layers.* (40)"]]
    assert sum(line.startswith("value ") for line in few) == 20 and "10 more" in few[-1]
    assert few[0] == every[0] and "110" in few[0]


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


DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128, torch.int8,
    torch.int64, torch.uint8, torch.uint64, torch.bool,
]  # fmt: skip


def _two(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of several blocks that differ in every 1000th item, some in the last block."""
    numel = 200_001
    if dtype == torch.bool:
        a = torch.rand(numel) < 0.5
        b = a.clone()
        b[::1000] ^= True
        return a, b
    a = (torch.randn(numel, dtype=torch.complex64 if dtype.is_complex else torch.float32) * 40).to(dtype)
    b = a.clone()
    b[::1000] = (torch.randn(201) * 30).to(dtype)
    return a, b


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tolerance", [{}, {"atol": 1e-300}], ids=["bits", "numbers"])
def test_how_large_a_difference_is(tmp_path: Path, dtype: torch.dtype, tolerance: dict[str, float]) -> None:
    """Largest absolute and relative difference, and norm: of all items, in both ways of comparing."""
    torch.manual_seed(0)
    a, b = _two(dtype)
    for name, tensor in (("a", a), ("b", b)):
        torch.save({"w": tensor, "same": torch.ones(3)}, tmp_path / f"{name}.pt")
    (found,), _ = diff(open_source(tmp_path / "a.pt"), open_source(tmp_path / "b.pt"), **tolerance)

    wide = np.complex128 if dtype.is_complex else np.longdouble
    p, q = (
        t.float().numpy().astype(wide) if dtype in (torch.bfloat16, torch.float16) else t.numpy().astype(wide)
        for t in (a, b)
    )
    apart, size = np.abs(p - q), np.abs(q)
    assert found.distance is not None and found.distance.not_finite == 0
    expected = (apart.max(), (apart[size > 0] / size[size > 0]).max(), np.sqrt(np.square(apart).sum()))
    measured = (found.distance.largest, found.distance.largest_relative, found.distance.norm)
    np.testing.assert_allclose(np.array(measured), np.array(expected, dtype=np.float64), rtol=1e-9)
    assert int(found.text.split()[0]) == np.count_nonzero(apart)


def _distance(tmp_path: Path, a: torch.Tensor, b: torch.Tensor, **options: Any) -> Any:
    for name, tensor in (("a", a), ("b", b)):
        torch.save({"w": tensor}, tmp_path / f"{name}.pt")
    found, _ = diff(open_source(tmp_path / "a.pt"), open_source(tmp_path / "b.pt"), **options)
    assert len(found) == 1
    return found[0].distance


def test_distances_at_the_edges(tmp_path: Path) -> None:
    """Integers beyond float64's digits, signs that overflow, infinities, NaNs, zeros, huge and tiny numbers, codes."""

    def distance(a: torch.Tensor, b: torch.Tensor, **options: Any) -> tuple[float | None, ...] | None:
        found = _distance(tmp_path, a, b, **options)
        return (
            None if found is None else (found.largest, found.largest_relative, found.norm, found.not_finite)
        )

    large = torch.tensor([2**60])
    assert distance(large, large + 1) == (1.0, 1 / (2**60 + 1), 1.0, 0)
    ends = torch.tensor([-(2**63), 2**63 - 1])
    assert distance(ends, ends.flip(0)) == (2.0**64, 2.0, 2.0**64 * 2**0.5, 0)
    inf, nan = float("inf"), float("nan")
    ours, theirs = torch.tensor([1.0, inf, nan, 1.0, inf, 3.0]), torch.tensor([inf, 1.0, nan, nan, inf, 1.0])
    for options in ({}, {"rtol": 1e-3}):
        assert distance(ours, theirs, **options) == (2.0, 2.0, 2.0, 3)
    assert distance(torch.tensor([1.0, -0.0]), torch.tensor([0.0, 0.0])) == (1.0, None, 1.0, 0)
    assert distance(torch.tensor([0.0]), torch.tensor([-0.0])) == (0.0, None, 0.0, 0)
    big = torch.full((4,), 1e300, dtype=torch.float64)
    assert distance(big, -big) == (2e300, 2.0, 4e300, 0)
    assert distance(big / 1e300 * 1e-300, big * 0) == (1e-300, None, 2e-300, 0)
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    assert distance(codes, (codes.float() * 2).to(torch.float8_e4m3fn)) is None
    wide = torch.tensor([1.0 + 2**-40], dtype=torch.float64)
    assert distance(wide, torch.ones(1), ignore_dtype=True) == (2**-40, 2**-40, 2**-40, 0)
    assert distance(torch.zeros(1).expand(9), torch.ones(1).expand(9)) == (1.0, 1.0, 3.0, 0)


def test_the_command_says_how_large(tmp_path: Path) -> None:
    """The numbers of `diff`, in text and in valid JSON, and whole values that are no tensors."""
    text = "x" * 200
    for name, tensor, value in (("a", [0.0, 2.0], text), ("b", [3.0, 6.0], f"{text}y")):
        torch.save({"model": {"w": torch.tensor(tensor)}, "note": value}, tmp_path / f"{name}.pt")
    args = ["diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "-q"]
    printed = CliRunner().invoke(cli, args).stdout
    assert {"5", "4", "1"} <= set(re.findall(r"\b\d+\b", printed)) and f"{text}y" in printed
    weight, note = json.loads(CliRunner().invoke(cli, [*args, "--json"]).stdout)["differences"]
    assert weight["distance"] == {"largest": 4.0, "largest_relative": 1.0, "norm": 5.0, "not_finite": 0}
    assert "distance" not in note


def test_diff_is_bounded_in_memory(tmp_path: Path) -> None:
    """256 MB of differences take less than an eighth of it, however small the items are."""
    torch.save({"w": torch.zeros(2**27, dtype=torch.int8)}, tmp_path / "a.pt")
    torch.save({"w": torch.ones(2**27, dtype=torch.int8)}, tmp_path / "b.pt")
    sides = open_source(tmp_path / "a.pt"), open_source(tmp_path / "b.pt")
    tracemalloc.start()
    (found,), _ = diff(*sides)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.distance is not None and found.distance.norm == pytest.approx(2**13.5)
    assert peak < 2**25


@pytest.mark.parametrize("kind", ["native", "dcp"])
def test_inspect_shows_every_value(tmp_path: Path, kind: str) -> None:
    """Long texts and lists, and None, as they are; the names of values of formats that store them elsewhere."""
    values = {"note": "word " * 100, "seen": list(range(200)), "best": None, "deep": {"x": {"y": 1.5}}}
    state = {"model": {"w" * 300: torch.ones(2)}, **values}
    if kind == "native":
        save(tmp_path / kind, state)
    else:
        dcp.save(state, checkpoint_id=tmp_path / kind, no_dist=True)
    lines = CliRunner().invoke(cli, ["inspect", str(tmp_path / kind)]).stdout.splitlines()
    assert any("w" * 300 in line for line in lines)
    described = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.split()[1:]}
    names = open_source(tmp_path / kind).values
    assert len(names) >= 4 and names.keys() <= described.keys()
    if kind == "native":
        told = json.loads(CliRunner().invoke(cli, ["inspect", str(tmp_path / kind), "--json"]).stdout)[
            "values"
        ]
        assert told["seen"] == values["seen"] and told["note"] == values["note"]
        assert {name: described[name] for name in names if name != "seen"} == {
            name: repr(value()) for name, value in names.items() if name != "seen"
        }
        start = described["seen"].partition(": ")[2].split(", ")
        assert "200" in described["seen"] and start[:3] == ["0", "1", "2"] and len(start) < 40


@pytest.mark.parametrize("form", ["native", "zarr"])
def test_inspect_describes_a_checkpoint_that_lacks_a_file(tmp_path: Path, form: str) -> None:
    """What the manifest lists, then the files that are missing, also as JSON; exit code 1."""
    save(tmp_path / "c", {"w": torch.ones(400), "step": 3}, format=form)  # type: ignore[arg-type]
    run, args = CliRunner(), ["inspect", str(tmp_path / "c")]
    good = run.invoke(cli, args)
    lost = next((tmp_path / "c").glob("data-*/*" if form == "native" else "arrays/w/c/0"))
    lost.unlink()
    found, listed = run.invoke(cli, args), run.invoke(cli, [*args, "--json"])
    assert (good.exit_code, found.exit_code, listed.exit_code) == (0, 1, 1)
    assert found.stdout.startswith(good.stdout)
    assert str(lost.relative_to(tmp_path / "c")) in found.stdout.removeprefix(good.stdout)
    told = json.loads(listed.stdout)
    assert told["values"]["step"] == 3 and len(told["problems"]) == 1
