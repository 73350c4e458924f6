"""Exit 0 means usable: whatever is converted, transformers takes the folder that appears, or none appears."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file

from tests.support.command import vescale_convert
from tests.support.tiny_families import tiny_model
from vescale_fsdp.checkpoint import save, verify
from vescale_fsdp.conversion import ConvertOptions, ConvertReport, HuggingFace, convert, open_source
from vescale_fsdp.conversion.formats.huggingface import model_class, plan
from vescale_fsdp.conversion.formats.huggingface.class_check import ClassCheck
from vescale_fsdp.conversion.formats.huggingface.model_class import ask_child
from vescale_fsdp.errors import ConversionError, option

State = dict[str, torch.Tensor]

# Who is known to the table and who to transformers alone, with which settings.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "mixtral": ("MixtralForCausalLM", {}),
    "t5": ("T5ForConditionalGeneration", {}),
    "classifier": ("Qwen3ForTokenClassification", {"pad_token_id": 0}),
    "gemma3 with images": ("Gemma3ForConditionalGeneration", {}),
}


def _model(name: str) -> Any:
    class_name, settings = MODELS[name]
    model = tiny_model(class_name, **settings)
    assert model is not None, name
    return model


def _first(state: State, ending: str) -> str:
    return next(name for name in state if name.endswith(ending))


def _without_a_layer(state: State) -> State:
    matrix = max(n for n in state if state[n].ndim == 2 and any(part.isdecimal() for part in n.split(".")))
    head, number, _ = next(matrix.partition(f".{p}.") for p in matrix.split(".") if p.isdecimal())
    return {name: value for name, value in state.items() if not name.startswith(f"{head}{number}")}


def _without_a_norm(state: State) -> State:
    lost = next(n for n in reversed(state) if state[n].ndim == 1)
    return {name: value for name, value in state.items() if name != lost}


def _transposed(state: State) -> State:
    name = next(n for n in state if state[n].ndim == 2 and state[n].shape[0] != state[n].shape[1])
    return {**state, name: state[name].t().contiguous()}


def _other_vocabulary(state: State) -> State:
    sizes = [tuple(value.shape) for value in state.values() if value.ndim == 2]
    largest = max(sizes)[0]
    return {n: torch.cat([v, v[:1]]) if v.ndim and len(v) == largest else v for n, v in state.items()}


def _other_head(state: State) -> State:
    """Of a tied model, trained apart."""
    name = next((n for n in state if "head" in n or "decoder.weight" in n), None)
    return state if name is None else {**state, name: state[name] + 1}


CHANGES: dict[str, Callable[[State], State]] = {
    "none": lambda state: state,
    "wrapped by DDP": lambda state: {f"module.{name}": value for name, value in state.items()},
    "compiled": lambda state: {f"_orig_mod.{name}": value for name, value in state.items()},
    "an old buffer": lambda state: {**state, f"{next(iter(state))[:0]}rotary_emb.inv_freq": torch.ones(4)},
    "a key too many": lambda state: {**state, "value_head.weight": torch.ones(2, 2)},
    "no norm": _without_a_norm,
    "no layer": _without_a_layer,
    "transposed": _transposed,
    "other vocabulary": _other_vocabulary,
    "other head": _other_head,
    "other names": lambda state: {name.replace("weight", "kernel"): value for name, value in state.items()},
    "in capitals": lambda state: {name.upper(): value for name, value in state.items()},
    "without the model's own name": lambda state: {
        name.removeprefix("model.").removeprefix("transformer."): value for name, value in state.items()
    },
}
RIGHT = {"none", "wrapped by DDP", "compiled"}  # of every model the folder has to appear
SOURCES: dict[str, Callable[[State, Path], object]] = {
    "dcp": lambda state, path: dcp.save({"model": state}, checkpoint_id=path, no_dist=True),
    "native": lambda state, path: save(path, {"model": state}),
    "torch": lambda state, path: torch.save(state, path),
    "safetensors": lambda state, path: save_file({n: v.clone() for n, v in state.items()}, path),
}
ENDINGS = {"torch": ".pt", "safetensors": ".safetensors"}
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"dtype": ("bfloat16",)}, {"max_shard_bytes": 20_000})


def _takes(folder: Path, class_name: str) -> tuple[State, set[str]] | None:
    """What transformers makes of a folder, and what it ignores; None if it misses or refuses anything."""
    try:
        model, info = getattr(transformers, class_name).from_pretrained(folder, output_loading_info=True)
    except Exception:  # noqa: BLE001  of whatever kind it raises
        return None
    ignored = set(info.pop("unexpected_keys"))
    return None if any(info.values()) else (dict(model.state_dict()), ignored)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_appears_if_and_only_if_transformers_takes_it(
    name: str, change: str, tmp_path: Path
) -> None:
    """The walk: sources and options take turns, so that every pair of them occurs."""
    turn = list(MODELS).index(name) * len(CHANGES) + list(CHANGES).index(change)
    kind, options = list(SOURCES)[turn % len(SOURCES)], OPTIONS[turn % len(OPTIONS)]
    model, class_name = _model(name), MODELS[name][0]
    model.config.architectures = [class_name]
    model.config.save_pretrained(tmp_path / "assets")
    state = {key: value.detach() for key, value in model.state_dict().items()}
    changed, source = CHANGES[change](state), tmp_path / f"source{ENDINGS.get(kind, '')}"
    SOURCES[kind](changed, source)
    opened, out, other = open_source(str(source)), tmp_path / "out", tmp_path / "other"

    try:
        report = convert(opened, out, "hf", ConvertOptions(assets=str(tmp_path / "assets"), **options))
    except ConversionError:
        assert not out.exists() and change not in RIGHT
        convert(opened, other, "hf", ConvertOptions(no_assets=True, **options))
        (other / "config.json").write_bytes((tmp_path / "assets" / "config.json").read_bytes())
        assert _takes(other, class_name) is None
        return
    taken = _takes(out, class_name)
    assert taken is not None
    loaded, ignored = taken
    assert report.check is not None and report.check.problems == () and report.check.how != "not checked"
    assert set(report.check.extra) == {f"unexpected: {key}" for key in ignored}
    assert not ignored or any(all(key in text for key in ignored) for text in report.warnings)
    if change in {*RIGHT, "other head"}:
        wanted = changed if change == "other head" else state
        dtype = options.get("dtype", (None,))[0]
        for key, value in wanted.items():
            assert torch.equal(loaded[key].float(), value.to(getattr(torch, dtype or "float32")).float()), key


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder of a small tied Llama."""
    _model("llama tied").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def _run(*args: object) -> Any:
    return vescale_convert(*args)


def test_the_report_says_who_checked(llama: Path, tmp_path: Path) -> None:
    """In JSON, in the summary, and of a dry run."""
    for more in ((), ("--dry-run",)):
        found = json.loads(_run("to-hf", llama, tmp_path / f"out{more}", "--json", *more).stdout)["check"]
        assert found == {
            "how": "table",
            "class_name": "LlamaForCausalLM",
            "problems": [],
            "reason": "",
            "child_bytes": 0,
            "extra": [],
        }
        done = _run("to-hf", llama, tmp_path / "again", *more, "--overwrite")
        assert "LlamaForCausalLM" in done.stdout and "check" not in done.stderr


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (None, "no config.json"),
        ({}, "names no class"),
        ({"_class_name": "UNet2DModel"}, "names no class"),
        ({"architectures": ["NoSuchModel"]}, "has no class NoSuchModel"),
        ({"architectures": ["PreTrainedTokenizer"]}, "has no class PreTrainedTokenizer"),
    ],
)
def test_what_cannot_be_checked(
    config: dict[str, Any] | None, reason: str, llama: Path, tmp_path: Path
) -> None:
    """It is written and said; with --require-check it is refused, and nothing appears."""
    (llama / "config.json").unlink()
    if config is not None:
        (llama / "config.json").write_text(json.dumps(config))
    done = _run("to-hf", llama, tmp_path / "out", "--json")
    assert done.exit_code == 0 and reason in done.stderr
    found = json.loads(done.stdout)["check"]
    assert found["how"] == "not checked" and reason in found["reason"]
    refused = _run("to-hf", llama, tmp_path / "other", "--require-check")
    assert isinstance(refused.exception, ConversionError) and reason in str(refused.exception.got)
    assert not (tmp_path / "other").exists()
    resumed = _run("to-hf", llama, tmp_path / "out", "--resume", "--require-check")
    assert isinstance(resumed.exception, ConversionError)


def test_settings_that_make_no_model(tmp_path: Path) -> None:
    """What the class raises is what from_pretrained would raise of the folder."""
    _model("t5").save_pretrained(tmp_path / "t5")
    config = json.loads((tmp_path / "t5" / "config.json").read_text()) | {"d_model": "wide"}
    (tmp_path / "t5" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError) as refused:
        convert(open_source(str(tmp_path / "t5")), tmp_path / "out", "hf")
    assert "d_model" in str(refused.value.got) and not (tmp_path / "out").exists()


def test_code_of_a_repository_is_not_run(llama: Path, tmp_path: Path) -> None:
    """A class that only the repository's own code has is not checked."""
    config = json.loads((llama / "config.json").read_text())
    config |= {"architectures": ["OwnModel"], "auto_map": {"AutoModelForCausalLM": "modeling.OwnModel"}}
    (llama / "config.json").write_text(json.dumps(config))
    trace = tmp_path / "ran"
    (llama / "modeling.py").write_text(f"open({str(trace)!r}, 'w')\nclass OwnModel: pass")
    report = convert(open_source(str(llama)), tmp_path / "out", "hf")
    assert (
        report.check is not None and report.check.how == "not checked" and "OwnModel" in report.check.reason
    )
    assert not trace.exists() and (tmp_path / "out" / "modeling.py").exists()


def test_an_adapter_alone_is_not_checked(tmp_path: Path) -> None:
    """peft takes it beside its base, which is not at hand."""
    (tmp_path / "assets").mkdir()
    adapter = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q"],
        "base_model_name_or_path": "b",
    }
    (tmp_path / "assets" / "adapter_config.json").write_text(json.dumps(adapter))
    state = {"q.base_layer.weight": torch.ones(4, 4), "q.lora_A.default.weight": torch.ones(2, 4)}
    torch.save({**state, "q.lora_B.default.weight": torch.ones(4, 2)}, tmp_path / "in.pt")
    options = ConvertOptions(assets=str(tmp_path / "assets"))
    report = convert(open_source(str(tmp_path / "in.pt")), tmp_path / "out", "adapter", options)
    assert report.check is not None and "adapter" in report.check.reason
    with pytest.raises(ConversionError):
        convert(
            open_source(str(tmp_path / "in.pt")),
            tmp_path / "no",
            "adapter",
            replace(options, require_check=True),
        )
    assert not (tmp_path / "no").exists()


@pytest.fixture
def misnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer whose files hold one name that the plan does not."""
    make = plan.make_header

    def broken(*args: Any) -> Any:
        header = make(*args)
        return replace(header, data=header.data.replace(b"model.norm.weight", b"model.n0rm.weight"))

    monkeypatch.setattr(plan, "make_header", broken)


def test_a_broken_writer_is_caught(misnamed: None, llama: Path, tmp_path: Path) -> None:
    """What is in the files counts, not what was planned; and an old result stays."""
    with pytest.raises(ConversionError) as refused:
        convert(open_source(str(llama)), tmp_path / "out", "hf")
    assert "n0rm" in str(refused.value.got) and not (tmp_path / "out").exists()
    (tmp_path / "old").mkdir()
    save_file({"kept": torch.ones(1)}, tmp_path / "old" / "model.safetensors")
    with pytest.raises(ConversionError):
        convert(open_source(str(llama)), tmp_path / "old", "hf", ConvertOptions(overwrite=True))
    assert list(load_file(tmp_path / "old" / "model.safetensors")) == ["kept"]
    assert [file.name for file in (tmp_path / "old").iterdir()] == ["model.safetensors"]


def test_a_broken_writer_leaves_nothing_in_an_object_store(misnamed: None, llama: Path) -> None:
    """Where nothing can be renamed, what was uploaded goes again."""
    import fsspec

    with pytest.raises(ConversionError):
        convert(open_source(str(llama)), "memory://checked/out", "hf")
    assert fsspec.filesystem("memory").find("/checked/out") == []


def test_parts_are_checked_by_the_one_that_publishes(misnamed: None, llama: Path, tmp_path: Path) -> None:
    """The first part cannot know; the last refuses, and no file has its final name."""

    def part(index: int) -> ConvertReport:
        return convert(
            open_source(str(llama)),
            tmp_path / "out",
            "hf",
            ConvertOptions(max_shard_bytes=9000, part=(index, 2)),
        )

    assert not part(0).outcome.published
    with pytest.raises(ConversionError):
        part(1)
    assert all(file.name.startswith(".") for file in (tmp_path / "out").iterdir())


def test_quantized_weights_and_a_config_that_does_not_say_so(tmp_path: Path) -> None:
    """And the other way round; where both agree, the quantizer of transformers is asked."""
    settings = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    config = transformers.LlamaConfig(vocab_size=128, num_key_value_heads=2, **settings)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "plain")
    plain = (tmp_path / "plain" / "config.json").read_bytes()
    report = convert(
        open_source(str(tmp_path / "plain")), tmp_path / "fp8", "hf", ConvertOptions(quantize=["fp8-128x128"])
    )
    assert report.check is not None and (report.check.how, report.check.problems) == ("class", ())
    said = (tmp_path / "fp8" / "config.json").read_bytes()
    for folder, wrong in (("plain", said), ("fp8", plain)):
        (tmp_path / folder / "config.json").write_bytes(wrong)
        with pytest.raises(ConversionError) as refused:
            convert(open_source(str(tmp_path / folder)), tmp_path / "out", "hf")
        assert "quantization" in str(refused.value.got)
    (tmp_path / "fp8" / "config.json").write_bytes(said)
    options = ConvertOptions(exclude=["*.mlp.up_proj.weight_scale_inv"])
    with pytest.raises(ConversionError) as refused:
        convert(open_source(str(tmp_path / "fp8")), tmp_path / "out", "hf", options)
    assert "up_proj" in str(refused.value.got)


def test_without_transformers(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's yes and no stand; of a class that it does not know nobody can say."""

    def ask(*_: Any) -> Any:
        return {"unknown": "planted", "is_absent": True}

    monkeypatch.setattr("vescale_fsdp.conversion.formats.huggingface.class_check.ask_child", ask)
    monkeypatch.setattr(model_class, "_ANSWERS", {})  # of other tests
    report = convert(open_source(str(llama)), tmp_path / "out", "hf")
    assert report.check is not None and report.check.how == "table"
    with pytest.raises(ConversionError) as refused:
        convert(open_source(str(llama)), tmp_path / "no", "hf", ConvertOptions(exclude=["model.norm.weight"]))
    assert refused.value.got == "missing: model.norm.weight"
    _model("classifier").save_pretrained(tmp_path / "classifier")
    unknown = convert(open_source(str(tmp_path / "classifier")), tmp_path / "written", "hf").check
    assert unknown is not None and "planted" in unknown.reason


def test_the_child(child: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers for a class that the table does not know, says what memory it took, and looks for no module in the
    folder that it was started in."""
    model = _model("classifier")
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "transformers.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.setattr(model_class, "_ANSWERS", {})  # of other tests
    monkeypatch.setattr(model_class, "_ANSWERED", {})
    check = convert(open_source("hf"), "out", "hf").check
    assert check is not None and (check.how, check.problems) == ("class", ())
    assert 2**27 < check.child_bytes < 2**31 and not os.path.exists("ran")


def test_a_question_is_asked_once(child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tensors, settings or names are another question, and a failure is no answer."""
    asked: list[dict[str, Any]] = []
    answers = [{"unknown": "planted"}, *({"problems": [str(number)]} for number in range(4))]

    def run(*_: object, input: str, **__: object) -> Any:
        asked.append(json.loads(input))
        return SimpleNamespace(stdout=json.dumps(answers[len(asked) - 1]), stderr="", returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(model_class, "_ANSWERED", {})  # of other tests
    small, large = {"w": ((2,), "float32")}, {"w": ((3,), "float32")}
    for _ in range(2):
        ask_child({}, "BertModel", small)
    got = [
        ask_child(*question)
        for question in (({}, "BertModel", small), ({}, "BertModel", large), ({"a": 1}, "BertModel", small))
        for _ in range(2)
    ]
    assert got == [answers[1]] * 2 + [answers[2]] * 2 + [answers[3]] * 2
    assert ask_child({}, "BertModel", stored=small) == answers[4] and len(asked) == 5


def test_a_child_that_gives_no_answer(child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs, dies or cannot be started: the reason is said."""
    config = {"architectures": ["BertModel"]}
    with monkeypatch.context() as patched:
        patched.setattr(model_class, "_LONGEST_S", 0.01)
        assert "TimeoutExpired" in ask_child(config, "BertModel", {})["unknown"]
    with monkeypatch.context() as patched:
        patched.setattr("sys.executable", "/bin/false")
        assert "status 1" in ask_child(config, "BertModel", {})["unknown"]
    with monkeypatch.context() as patched:
        patched.setattr("sys.executable", "/nowhere/python")
        assert "FileNotFoundError" in ask_child(config, "BertModel", {})["unknown"]


@pytest.mark.parametrize("extra", ["unexpected: l.0.q.base_layer.weight", "unexpected: l.0.q.kernel"])
def test_a_base_with_an_adapter_is_told_from_other_names(extra: str) -> None:
    """The names that peft gives to weights with an adapter: the error names the two commands that merge it."""
    check = ClassCheck("table", "LlamaForCausalLM", ("missing: l.0.q.weight",), extra=(extra,))
    with pytest.raises(ConversionError) as error:
        check.require("out", is_required=False)
    assert extra in str(error.value.got)
    assert (option("merge", "ADAPTER") in str(error.value.todo)) == ("base_layer" in extra)


def test_a_head_of_another_class_is_reported(llama: Path, tmp_path: Path) -> None:
    """By the command, and by a save from training; a weight that is missing is an error of both."""
    state = load_file(llama / "model.safetensors") | {"value_head.weight": torch.ones(2, 2)}
    save(tmp_path / "run", {"model": state})
    done = _run("to-hf", tmp_path / "run", tmp_path / "out", "--assets", llama, "--json")
    assert done.exit_code == 0 and "value_head.weight" in done.stderr
    assert json.loads(done.stdout)["check"]["extra"] == ["unexpected: value_head.weight"]
    assert "value_head.weight" in load_file(tmp_path / "out" / "model.safetensors")
    with pytest.warns(UserWarning, match=r"value_head\.weight"):
        save(tmp_path / "live", {"model": state}, format=HuggingFace(assets=llama, require_check=True))
    del state["model.norm.weight"]
    save(tmp_path / "less", {"model": state})
    refused = _run("to-hf", tmp_path / "less", tmp_path / "no", "--assets", llama)
    assert refused.exit_code != 0 and "missing: model.norm.weight" in str(refused.exception.got)
    with pytest.raises(ConversionError):
        save(tmp_path / "no", {"model": state}, format=HuggingFace(assets=llama, require_check=True))


@pytest.mark.part("formats")
@pytest.mark.parametrize("target", ["native", "zarr", "dcp", "torch"])
def test_a_folder_that_lacks_tensors_of_its_class(target: str, tmp_path: Path) -> None:
    """`verify` reports it, no target takes it without being asked, and a whole folder passes both."""
    model = _model("llama tied")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "torn")
    assert verify(tmp_path / "whole").ok
    convert(open_source(str(tmp_path / "whole")), str(tmp_path / "copy"), target)
    state = load_file(tmp_path / "torn/model.safetensors")
    lost = _first(state, "up_proj.weight")
    del state[lost]
    save_file(state, tmp_path / "torn/model.safetensors", {"format": "pt"})
    (problem,) = verify(tmp_path / "torn").problems
    assert lost in problem.text and "LlamaForCausalLM" in problem.text
    source = open_source(str(tmp_path / "torn"))
    with pytest.raises(ConversionError, check=lambda error: lost in str(error.got)):
        convert(source, str(tmp_path / "out"), target)
    assert not (tmp_path / "out").exists()
    convert(source, str(tmp_path / "out"), target, ConvertOptions(include=("*",)))
    assert len(open_source(str(tmp_path / "out")).tensors) == len(state) + 1  # with the tied head


def test_an_adapter_is_refused_where_config_json_names_no_class(tmp_path: Path) -> None:
    """No class loads peft's names of a base with an adapter, so exit code 0 would be wrong."""
    state = {"q.base_layer.weight": torch.ones(2, 2), "q.lora_A.default.weight": torch.ones(1, 2)}
    save(tmp_path / "in", {"model": state})
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets/config.json").write_text(json.dumps({"model_type": "llama"}))
    args = ["to-hf", str(tmp_path / "in"), str(tmp_path / "out")]
    refused = vescale_convert(*args, "--assets", str(tmp_path / "assets"))
    assert isinstance(refused.exception, ConversionError) and not (tmp_path / "out").exists()
    assert vescale_convert(*args, "--no-assets").exit_code == 0
    with pytest.warns(
        UserWarning, match=r"q\.base_layer\.weight"
    ):  # a save in training is not lost because of a name
        save(tmp_path / "live", {"model": state}, format=HuggingFace(assets=tmp_path / "assets"))
