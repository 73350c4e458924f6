"""Averages and expressions of checkpoints: equal to the same arithmetic of torch, from and to every format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.command import vescale_convert
from tests.support.dtype_zoo import same_bytes
from vescale_fsdp.checkpoint import CheckpointManager, save
from vescale_fsdp.conversion import ConvertOptions, Source, average, combine, convert, open_source
from vescale_fsdp.errors import ArgumentError, ConversionError

Tensors = dict[str, torch.Tensor]
ROWS, COLUMNS = 61, 67  # odd, so that files and ranks cut rows


def _model(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    """A model with values of very different sizes, so that another order of sums has other bits."""
    noise = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> torch.Tensor:
        value, power = (torch.randn(shape, generator=noise, dtype=torch.float64) for _ in range(2))
        return (value * 8**power).to(dtype)

    floats = {f"layers.{i}.weight": weights(ROWS + i, COLUMNS) for i in range(3)}
    return floats | {"norm.weight": weights(COLUMNS), "scale": weights(), "positions": torch.arange(9)}


def _write(path: Path, kind: str, tensors: Tensors, **more: Any) -> Source:
    """Write a model and other entries in a format, and open it."""
    source = path.parent / f"{path.name}.source.pt"
    torch.save({"model": tensors, **more}, source)
    if kind == "torch":
        return open_source(source)
    options = ConvertOptions(ranks=3) if kind == "native" else ConvertOptions(max_shard_bytes=20_000)
    convert(open_source(source), path, kind, options)
    if kind == "hf":
        (path / "config.json").write_text("{}")
    return open_source(path)


def _read(path: Path, kind: str) -> Tensors:
    """Read a model in any format, by names without a prefix."""
    if kind != "torch":
        convert(open_source(path), path.parent / f"{path.name}.read.pt", "torch")
        path = path.parent / f"{path.name}.read.pt"
    found = torch.load(path)
    model: Tensors = found.get("model", found)
    return model


def _expected(models: list[Tensors], value: Callable[..., torch.Tensor], compute: torch.dtype) -> Tensors:
    """What torch computes in memory; tensors that are not of floats are those of the first model."""
    return {
        name: value(*(model[name].to(compute) for model in models)).to(first.dtype)
        if first.is_floating_point()
        else first
        for name, first in models[0].items()
    }


def _equal(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(same_bytes(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        pytest.param(torch.float16, marks=pytest.mark.part("formats")),
        torch.float32,
        pytest.param(torch.float64, marks=pytest.mark.part("formats")),
    ],
)
@pytest.mark.parametrize("target", ["native", "dcp", "zarr", "hf", "torch"])
def test_an_average_is_that_of_torch(tmp_path: Path, target: str, dtype: torch.dtype) -> None:
    """Inputs of five formats, sums in the given order, one rounding; small buffers, which cut tensors."""
    kinds = ["native", "dcp", "hf", "zarr", "torch"]
    models = [_model(seed, dtype) for seed in range(5)]
    inputs = [_write(tmp_path / f"in-{kind}", kind, m) for kind, m in zip(kinds, models, strict=True)]
    options = ConvertOptions(ranks=2, max_shard_bytes=30_000)
    average(inputs, tmp_path / "out", target, options)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    expected = _expected(models, lambda a, b, c, d, e: (a + b + c + d + e) / 5, compute)
    assert _equal(_read(tmp_path / "out", target), expected)
    other_order = _expected(models, lambda a, b, c, d, e: (e + d + c + b + a) / 5, compute)
    assert dtype.itemsize < 4 or not _equal(expected, other_order)


EXPRESSIONS: dict[str, Callable[..., torch.Tensor]] = {
    "a": lambda a: a,
    "-a": lambda a: -a,
    "a - b": lambda a, b: a - b,
    "a + 0.7 * (b - a)": lambda a, b: a + 0.7 * (b - a),
    "a * 3 / 7 - (1 - 0.9) * b": lambda a, b: a * 3 / 7 - (1 - 0.9) * b,
    "-(a - 2*b) * -1e-3 + (+c)": lambda a, b, c: -(a - 2 * b) * -1e-3 + c,
    "a - (b - (c - a))": lambda a, b, c: a - (b - (c - a)),
    "a + -b": lambda a, b: a + -b,
}


@pytest.mark.parametrize("compute", ["float32", "float64"])
@pytest.mark.parametrize("text", EXPRESSIONS)
def test_an_expression_is_computed_as_python_does(tmp_path: Path, text: str, compute: str) -> None:
    """With every input in the type of the operations; each input once in the file, however often it is named."""
    value = EXPRESSIONS[text]
    names = "abc"[: value.__code__.co_argcount]
    models = [_model(seed, torch.bfloat16) for seed in range(len(names))]
    inputs = {
        name: _write(tmp_path / name, "torch", model) for name, model in zip(names, models, strict=True)
    }
    combine(inputs, text, tmp_path / "out.pt", "torch", compute_dtype=compute)
    expected = _expected(models, value, getattr(torch, compute))
    assert _equal(_read(tmp_path / "out.pt", "torch"), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_of_several_blocks_of_which_the_last_is_short(tmp_path: Path, dtype: torch.dtype) -> None:
    models = [{"w": torch.randn(100_003).to(dtype)} for _ in range(3)]
    inputs = {name: _write(tmp_path / name, "torch", each) for name, each in zip("abc", models, strict=True)}
    combine(inputs, "a - (b - -c)", tmp_path / "out.pt", "torch")
    expected = _expected(models, lambda a, b, c: a - (b - -c), torch.float32)
    assert _equal(_read(tmp_path / "out.pt", "torch"), expected)


def test_one_rounding_to_the_type_of_the_result(tmp_path: Path) -> None:
    """bf16 inputs, fp16 and fp32 results: the sum is not rounded to bf16 before; the same for both names of a tie."""
    models = [{"embed": _model(seed, torch.bfloat16)["layers.0.weight"]} for seed in range(2)]
    for model in models:
        model["head"] = model["embed"]
    inputs = [_write(tmp_path / str(number), "torch", model) for number, model in enumerate(models)]
    options = ConvertOptions(dtype=["float32"])
    report = average(inputs, tmp_path / "out.pt", "torch", options)
    found = torch.load(tmp_path / "out.pt")["model"]
    expected = (models[0]["embed"].float() + models[1]["embed"].float()) / 2
    assert same_bytes(found["embed"], expected)
    assert found["head"].data_ptr() == found["embed"].data_ptr()
    assert report.casts["model.embed"] == ("bfloat16", "float32")
    wide = [{"w": model["embed"].double() * (1 + 2**-20)} for model in models]
    inputs = [_write(tmp_path / f"wide{number}", "torch", model) for number, model in enumerate(wide)]
    average(inputs, tmp_path / "narrow.pt", "torch", ConvertOptions(dtype=["bf16"]))
    exact = (wide[0]["w"] + wide[1]["w"]) / 2
    assert same_bytes(torch.load(tmp_path / "narrow.pt")["model"]["w"], exact.to(torch.bfloat16))


def test_overflows_are_reported(tmp_path: Path) -> None:
    """Finite values of inputs that the result's type cannot hold."""
    inputs = [_write(tmp_path / str(i), "torch", {"w": torch.full((40_000,), 6e4).half()}) for i in range(2)]
    report = combine(dict(zip("ab", inputs, strict=True)), "a + b", tmp_path / "out.pt", "torch")
    assert any("w (40000 of 40000" in warning for warning in report.warnings)


RULES = """
format = 1
[[rule]]
hf = ["q.weight", "k.weight"]
ours = "qk.weight"
ops = [{ concat = { dim = 0, sizes = [5, 3] } }]
[[rule]]
hf = "up.weight"
ours = "w1"
ops = [{ transpose = [1, 0] }]
"""


def test_rules_are_applied_to_every_input(tmp_path: Path) -> None:
    """Another split and transposed; the first input's prefix, the second one's wrappers."""
    (tmp_path / "rules.toml").write_text(RULES)
    models = [{"qk.weight": torch.randn(8, 6), "w1": torch.randn(4, 9)} for _ in range(2)]
    inputs = [
        _write(tmp_path / "0", "dcp", models[0]),
        _write(tmp_path / "1", "torch", {f"_orig_mod.{name}": each for name, each in models[1].items()}),
    ]
    average(inputs, tmp_path / "out", "hf", ConvertOptions(rules=str(tmp_path / "rules.toml")))
    mean = {name: (models[0][name] + models[1][name]) / 2 for name in models[0]}
    q, k = mean["qk.weight"].split([5, 3])
    expected = {"q.weight": q, "k.weight": k, "up.weight": mean["w1"].T}
    assert _equal(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_names_that_a_folder_leaves_out_as_tied(tmp_path: Path) -> None:
    """In one input only, first or second; the settings files are those of the first."""
    models = [_model(seed) for seed in range(2)]
    for model in models:
        model["model.embed_tokens.weight"] = model.pop("layers.0.weight")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    save_file(models[0], tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    tied = models[1] | {"lm_head.weight": models[1]["model.embed_tokens.weight"]}
    inputs = [open_source(tmp_path / "hf"), _write(tmp_path / "pt", "torch", tied)]
    mean = _expected(models, lambda a, b: (a + b) / 2, torch.float32)
    average(inputs, tmp_path / "one", "hf")
    assert _equal(load_file(tmp_path / "one" / "model.safetensors"), mean)
    assert json.loads((tmp_path / "one" / "config.json").read_text())["tie_word_embeddings"]
    average(inputs[::-1], tmp_path / "two.pt", "torch")
    found = torch.load(tmp_path / "two.pt")["model"]
    assert _equal(found, mean | {"lm_head.weight": mean["model.embed_tokens.weight"]})


def test_only_the_model_is_written(tmp_path: Path) -> None:
    """Moments and step counts have no mean: they are left out, and named."""
    models = [_model(seed) for seed in range(2)]
    inputs = []
    for number, model in enumerate(models):
        state = {name: {"exp_avg": torch.ones(3), "step": torch.tensor(number)} for name in model}
        save(tmp_path / str(number), {"model": model, "optimizer": {"state": state}, "step": number})
        inputs.append(open_source(tmp_path / str(number)))
    report = average(inputs, tmp_path / "out", "native")
    assert report.dropped_optimizer == 2 * len(models[0]) and report.dropped_others == ("step",)
    found = open_source(tmp_path / "out")
    assert found.tensors.keys() == {f"model.{name}" for name in models[0]} and not found.values


def test_quantized_inputs_are_dequantized_if_asked(tmp_path: Path) -> None:
    """An FP8 input next to one of floats; without the option its codes are refused."""
    models = [{"up.weight": torch.randn(128, 256)} for _ in range(2)]
    inputs = [_write(tmp_path / str(number), "hf", model) for number, model in enumerate(models)]
    convert(inputs[0], tmp_path / "q", "hf", ConvertOptions(quantize=["fp8-128x128"]))
    convert(open_source(tmp_path / "q"), tmp_path / "d", "hf", ConvertOptions(dequantize="float32"))
    codes = open_source(tmp_path / "q")
    with pytest.raises(ConversionError, check=lambda error: error.where == codes.url):
        average([inputs[1], codes], tmp_path / "out", "hf")
    average([inputs[1], codes], tmp_path / "out", "hf", ConvertOptions(dequantize="float32"))
    models[0] = load_file(tmp_path / "d" / "model.safetensors")
    expected = {"up.weight": (models[1]["up.weight"] + models[0]["up.weight"]) / 2}
    assert _equal(load_file(tmp_path / "out" / "model.safetensors"), expected)


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("a + c", "c"),
        ("a", "none with b"),
        ("2 * 3", "no name"),
        ("a * b", "a * b"),
        ("a / b", "a / b"),
        ("1 / a + b", "1 / a"),
        ("a + b + 1", "a + b + 1"),
        ("a + b / (1 - 1)", "b / (1 - 1)"),
        ("a ** 2 + b", "a ** 2"),
        ("a @ b", "a @ b"),
        ("a.x + b", "a.x"),
        ("f(a) + b", "f(a)"),
        ("a + b * True", "True"),
        ("a + b * 1j", "1j"),
        ("a + b * 1e39", "1e39"),
        ("a + b * 1" + "0" * 400, "1" + "0" * 400),
        ("a if b else a", "a if b else a"),
    ],
)
def test_expressions_that_are_refused(tmp_path: Path, text: str, got: str) -> None:
    """The part that cannot be computed is named, and nothing is written."""
    source = _write(tmp_path / "a", "torch", {"w": torch.ones(2)})
    with pytest.raises(ConversionError, check=lambda error: error.got == got and text in str(error.where)):
        combine({"a": source, "b": source}, text, tmp_path / "out", "torch")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "a +", "a b", "(" * 5000 + "a" + ")" * 5000, "-" * 20000 + "a", "a\0"])
def test_texts_that_are_no_expressions(tmp_path: Path, text: str) -> None:
    """Whatever Python's parser raises."""
    source = _write(tmp_path / "a", "torch", {"w": torch.ones(2)})
    with pytest.raises(ConversionError):
        combine({"a": source}, text, tmp_path / "out", "torch")


def test_inputs_that_do_not_match(tmp_path: Path) -> None:
    """Each error names the input, and the tensor in it."""
    model = _model(0)
    base = _write(tmp_path / "base", "torch", model)
    shapes = _write(tmp_path / "shapes", "torch", model | {"norm.weight": torch.ones(COLUMNS, 1)})
    less = _write(tmp_path / "less", "torch", {n: t for n, t in model.items() if n != "scale"})
    more = _write(tmp_path / "more", "torch", model | {"head": torch.ones(2)})
    counts = _write(tmp_path / "counts", "torch", model | {"positions": torch.zeros(9, dtype=torch.int64)})
    bools = _write(tmp_path / "bools", "torch", model | {"scale": torch.tensor(True)})
    for second, where, name in [
        (shapes, shapes.url, "norm.weight"),
        (less, less.url, "scale"),
        (more, base.url, "head"),
        (counts, counts.url, "positions"),
        (bools, bools.url, "scale"),
    ]:
        with pytest.raises(ConversionError) as raised:
            average([base, second], tmp_path / "out.pt", "torch")
        assert (
            raised.value.where == where and f"model.{name}" in f"{raised.value.expected} {raised.value.got}"
        )
        # The remedy, copying or leaving it out, works in Python too.
        kept = ConvertOptions(exclude=[f"model.{name}"], overwrite=True)
        average([base, second], tmp_path / "out.pt", "torch", kept)
        assert name not in torch.load(tmp_path / "out.pt")["model"]
        if name != "head":
            again = ConvertOptions(overwrite=True)
            average([base, second], tmp_path / "out.pt", "torch", again, copy=[f"model.{name}"])
            assert same_bytes(torch.load(tmp_path / "out.pt")["model"][name], model[name])
    with pytest.raises(ConversionError, check=lambda error: error.got == "typo*"):
        average([base, base], tmp_path / "out2.pt", "torch", copy=["typo*"])
    with pytest.raises(ConversionError):
        average([base], tmp_path / "out2.pt", "torch")
    with pytest.raises(ConversionError):
        average([base, base], tmp_path / "out2.pt", "torch", compute_dtype="bfloat16")
    with pytest.raises(ArgumentError):
        average([base, str(tmp_path)], tmp_path / "out2.pt", "torch")  # type: ignore[list-item]
    with pytest.raises(ConversionError, check=lambda error: less.url in str(error.got)):
        average([base, less], less.url, "torch", ConvertOptions(overwrite=True), copy=["model.scale"])


def test_the_commands(tmp_path: Path) -> None:
    """The newest steps of a run, the newest first; the format of the first input, or another."""
    models = {step: _model(step) for step in (1, 2, 3, 4)}
    with CheckpointManager(tmp_path / "run", retention=10) as manager:
        for step, model in models.items():
            manager.save(step, {"model": model | {"batches": torch.tensor(step)}})
    out = tmp_path / "out"
    args = ["average", tmp_path / "run", out, "--last", 3, "--copy", "*.batches", "--ranks", 2, "--json"]
    assert json.loads(vescale_convert(*args, catch_exceptions=False).stdout)["target"]["kind"] == "native"
    newest = [models[4], models[3], models[2]]
    mean = _expected(newest, lambda a, b, c: (a + b + c) / 3, torch.float32)
    assert _equal(_read(out, "native"), mean | {"batches": torch.tensor(4)})
    steps = [tmp_path / "run" / f"step-{step:08d}" for step in (4, 1)]
    args = ["combine", tmp_path / "hf", "base + 0.7 * (tuned - base)"]
    args += [f"base={steps[0]}", f"tuned={steps[1]}", "--to", "hf", "--exclude", "batches", "--dtype", "bf16"]
    vescale_convert(*args, catch_exceptions=False)
    expected = _expected([models[4], models[1]], lambda a, b: a + 0.7 * (b - a), torch.float32)
    bf16 = {n: t.bfloat16() if t.is_floating_point() else t for n, t in expected.items()}
    assert _equal(load_file(tmp_path / "hf" / "model.safetensors"), bf16)


@pytest.mark.parametrize(
    "line",
    [
        "average a.pt a.pt out --to hf --ranks 2",
        "average a.pt a.pt out --last 2",
        "average a.pt out --last 1",
        "average a.safetensors a.safetensors out",
        "combine out a+b a=a.pt b",
        "combine out a+b a=a.pt a=a.pt",
        "combine out a a=",
    ],
)
def test_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Exit code 2, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    _write(tmp_path / "a", "torch", {"w": torch.ones(2)})
    (tmp_path / "a.source.pt").rename("a.pt")
    save_file({"w": torch.ones(2)}, "a.safetensors")
    assert vescale_convert(*line.split()).exit_code == 2
    assert not (tmp_path / "out").exists()


def test_too_few_steps(tmp_path: Path) -> None:
    """The steps that there are."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(7, {"model": {"w": torch.ones(2)}})
    refused = vescale_convert("average", tmp_path / "run", tmp_path / "out", "--last", 2).exception
    assert isinstance(refused, ConversionError) and "7" in str(refused.got)


def test_resume_refuses_another_expression(tmp_path: Path) -> None:
    """The expression, the inputs' files and the type of the operations are part of what is resumed."""
    inputs = {name: _write(tmp_path / name, "torch", _model(ord(name))) for name in "ab"}
    options = ConvertOptions(max_shard_bytes=10_000, threads=1)
    out = tmp_path / "out"

    def stop(nbytes: int) -> None:
        if '"file"' in (out / ".vescale-convert.jsonl").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        combine(inputs, "a + 2 * b", out, "hf", options, progress=stop)
    resumed = ConvertOptions(max_shard_bytes=10_000, resume=True)
    with pytest.raises(ConversionError, check=lambda error: "a + 3 * b" in error.got):
        combine(inputs, "a + 3 * b", out, "hf", resumed)
    with pytest.raises(ConversionError, check=lambda error: "float64" in error.got):
        combine(inputs, "a + 2 * b", out, "hf", resumed, compute_dtype="float64")
    with pytest.raises(ConversionError, check=lambda error: inputs["b"].url in error.got):
        combine({"a": inputs["b"], "b": inputs["a"]}, "a + 2 * b", out, "hf", resumed)
    report = combine(inputs, "a + 2 * b", out, "hf", resumed)
    assert report.outcome.kept and report.outcome.published


def _linear(tensors: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """Model soup as mergekit's method ``linear`` defines it: the sum of weight times tensor, by the sum of weights."""
    stacked = torch.stack(tensors)
    factors = torch.tensor(weights).view(-1, *[1] * (stacked.dim() - 1))
    return (factors * stacked).sum(dim=0) / factors.sum(dim=0)


def _task_arithmetic(base: torch.Tensor, tensors: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """Task arithmetic as mergekit's ``task_arithmetic`` defines it: the base and the sum of weight times difference."""
    deltas = torch.stack([tensor - base for tensor in tensors])
    return base + (deltas * torch.tensor(weights).view(-1, *[1] * base.dim())).sum(dim=0)


def test_the_formulas_of_mergekit(tmp_path: Path) -> None:
    """The weights of its example of a linear merge, in fp32, by its published formulas: mergekit is not installed."""
    models = [_model(seed) for seed in range(4)]
    inputs = {n: _write(tmp_path / n, "torch", m) for n, m in zip("abcd", models, strict=True)}
    three = {name: inputs[name] for name in "abc"}
    combine(three, "(1.0*a + 0.3*b + 0.5*c) / (1.0 + 0.3 + 0.5)", tmp_path / "linear.pt", "torch")
    expected = _expected(models[:3], lambda *each: _linear([*each], [1.0, 0.3, 0.5]), torch.float32)
    found = _read(tmp_path / "linear.pt", "torch")
    torch.testing.assert_close(found, expected, rtol=2**-22, atol=0.0)
    arithmetic = "d + (1.0*(a - d) + 0.3*(b - d) + 0.5*(c - d))"
    combine({"d": inputs["d"], **three}, arithmetic, tmp_path / "task.pt", "torch")
    expected = _expected(
        [models[3], *models[:3]],
        lambda base, *each: _task_arithmetic(base, [*each], [1.0, 0.3, 0.5]),
        torch.float32,
    )
    assert _equal(_read(tmp_path / "task.pt", "torch"), expected)
