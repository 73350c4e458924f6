"""Remedies of ``vescale-convert`` and of `convert`: sources, targets, and how a conversion runs."""

from __future__ import annotations

import json
import os
import shlex
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.remedies.applied import argument, command, commands, flag, refused, runs, text_in
from tests.remedies.made import MODEL, hf_folder, native_tensors, same, torch_file, written
from vescale_fsdp.checkpoint import CheckpointManager
from vescale_fsdp.conversion import ConvertOptions, combine, convert, open_source
from vescale_fsdp.errors import ConversionError

# Sources


@runs("checkpoint/state/model_names.py::ModelNames.require_one")
@pytest.mark.parametrize("keys", [("student", "teacher"), ("a model", "it's")])
def test_several_models(keys: tuple[str, str], tmp_path: Path) -> None:
    """One by its prefix, as a shell would read it; or both as one."""
    other = {name: value + 1 for name, value in MODEL.items()}
    source = torch_file(tmp_path / "a.pt", {keys[0]: MODEL, keys[1]: other})
    remedy = refused(command, "to-hf", source, tmp_path / "out")
    first, second = remedy.split(", or ")
    command("to-hf", source, tmp_path / "one", *flag(first, "--model-prefix"))
    assert same(written(tmp_path / "one"), MODEL)
    command("to-hf", source, tmp_path / "both", *flag(second, "--model-prefix"))
    assert len(written(tmp_path / "both")) == 4


@runs("checkpoint/state/model_names.py::split_entries")
def test_no_weights_by_this_prefix(tmp_path: Path) -> None:
    """The option that the remedy names, with a prefix that is there."""
    source = torch_file(tmp_path / "a.pt", {"net": MODEL})
    remedy = refused(command, "to-hf", source, tmp_path / "out", "--model-prefix", "x")
    name = text_in(remedy, r"--[\w-]+")
    command("to-hf", source, tmp_path / "out", name, "net")
    assert same(written(tmp_path / "out"), MODEL)


@runs("checkpoint/state/model_names.py::unwrapped_names")
def test_names_that_wrappers_made(tmp_path: Path) -> None:
    """One of the two, by its prefix."""
    state = {"a": {"_orig_mod.w": torch.ones(3)}, "b": {"w": torch.zeros(3)}}
    both = {"m": {"_orig_mod": {"w": torch.ones(3)}, "w": torch.zeros(3)}}
    source = torch_file(tmp_path / "a.pt", both)
    assert "--model-prefix" in refused(command, "to-hf", source, tmp_path / "out")
    command("to-hf", source, tmp_path / "out", "--model-prefix", "m._orig_mod")
    assert same(written(tmp_path / "out"), {"w": state["a"]["_orig_mod.w"]})


@pytest.mark.parametrize(
    ("site", "options"),
    [
        ("conversion/engine/carried_state.py::CarriedState._no_match", ("--include", "x.*")),
        ("conversion/engine/casting.py::_bad", ("--dtype", "x.*=bf16")),
        ("conversion/quantization/quantize.py::newly_quantized[1]", ("--quantize", "x=fp8-128x128")),
    ],
)
@runs(
    "conversion/engine/carried_state.py::CarriedState._no_match",
    "conversion/engine/casting.py::_bad",
    "conversion/quantization/quantize.py::newly_quantized[1]",
)
def test_patterns_that_match_nothing(site: str, options: tuple[str, str], tmp_path: Path) -> None:
    """The command lists a name, and a pattern for that name is accepted."""
    weights = {"up.weight": torch.ones(256, 128)}
    source = torch_file(tmp_path / "a.pt", weights)
    remedy = refused(command, "to-hf", source, tmp_path / "out", *options)
    listed = command(*commands(remedy, SRC=source))
    assert "up.weight" in listed
    pattern = options[1].replace("x.*", "up.*").replace("x=", "up.*=")
    command("to-hf", source, tmp_path / "out", options[0], pattern)
    assert "up.weight" in written(tmp_path / "out")


@runs("conversion/engine/source.py::Source.info")
def test_no_such_tensor(tmp_path: Path) -> None:
    """The command lists the names."""
    source = torch_file(tmp_path / "a.pt", MODEL)
    remedy = refused(open_source(str(source)).info, "x")
    assert "up.weight" in command(*commands(remedy, SRC=source))


@runs("conversion/engine/source.py::check_source")
def test_a_path_is_no_source(tmp_path: Path) -> None:
    """The call of the remedy opens it."""
    source = str(torch_file(tmp_path / "a.pt", MODEL))
    remedy = refused(convert, source, str(tmp_path / "out"), "hf")
    names = {"convert": convert, "open_source": open_source, "path": source}
    names |= {"target": str(tmp_path / "out"), "kind": "hf"}
    eval(remedy, names)
    assert same(written(tmp_path / "out"), MODEL)


@runs("conversion/formats/detect.py::step_url")
def test_a_run_without_a_step(tmp_path: Path) -> None:
    """The folder and the option that the remedy names."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, {"model": MODEL})
    remedy = refused(command, "to-hf", tmp_path / "run", tmp_path / "out")
    command("to-hf", tmp_path / "run", tmp_path / "out", *flag(remedy, "--step"))
    assert same(written(tmp_path / "out"), MODEL)
    folder = text_in(remedy, r"\S+/step-\d+")
    command("to-hf", folder, tmp_path / "other")
    assert same(written(tmp_path / "other"), MODEL)
    remedy = refused(command, "to-hf", folder, tmp_path / "third", "--step", "3")
    assert flag(remedy, "--step") == ["--step"]


@runs("conversion/report/run_steps.py::urls_of_steps", "conversion/report/run_steps.py::urls_of_steps[1]")
def test_steps_that_cannot_be_compared(tmp_path: Path) -> None:
    """A checkpoint without steps gets its page without the option; a step of the list that is printed is compared."""
    folder = tmp_path / "it's a run"  # remedies quote it
    folder.mkdir()
    torch_file(folder / "m.pt", MODEL)
    page = ("--out", tmp_path / "report.html")

    def follow(remedy: str) -> None:
        report = text_in(remedy, r"vescale-convert (report .*)")
        command(*shlex.split(report.replace("report.html", str(page[1]))))

    follow(refused(command, "report", folder / "m.pt", "--steps", "1", *page))
    with CheckpointManager(folder / "run") as manager:
        manager.save(3, {"model": MODEL})
    remedy = refused(command, "report", folder / "run", "--steps", "3,4", *page)
    assert "3 " in command(*shlex.split(text_in(remedy, r"ls [^;]+")))
    follow(remedy)


@runs("conversion/formats/detect.py::_refuse_other_kind")
def test_another_kind_of_source(tmp_path: Path) -> None:
    """Without the option that the remedy names."""
    source = torch_file(tmp_path / "a.pt", MODEL)
    given = ["--from", "hf"]
    remedy = refused(command, "to-hf", source, tmp_path / "out", *given)
    assert flag(remedy, "--from") == given
    command("to-hf", source, tmp_path / "out")
    assert same(written(tmp_path / "out"), MODEL)


@runs("conversion/formats/detect.py::_unreadable")
def test_a_file_of_an_unknown_format(tmp_path: Path) -> None:
    """A name that says nothing, until the option of the remedy names its format."""
    save_file(MODEL, tmp_path / "weights.x", {"format": "pt"})
    remedy = refused(command, "to-hf", tmp_path / "weights.x", tmp_path / "out")
    name = text_in(remedy, r"--from")
    command("to-hf", tmp_path / "weights.x", tmp_path / "out", name, "safetensors")
    assert same(written(tmp_path / "out"), MODEL)


@runs("conversion/formats/detect.py::_detect")
def test_an_id_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The path of the remedy, with a folder in the place of the Hub."""
    source = hf_folder(tmp_path / "hub", MODEL)
    monkeypatch.chdir(tmp_path)
    remedy = refused(command, "to-hf", "org/name", tmp_path / "out")
    assert text_in(remedy, r"hf://org/name") == "hf://org/name"  # run by tests/conversion/formats/test_hub.py
    command("to-hf", source, tmp_path / "out")
    assert same(written(tmp_path / "out"), MODEL)


class _Args:
    """Settings of a trainer, which a pickle refers to by name."""

    lr = 0.1


@runs("conversion/formats/torch_save/pickle_reader.py::_AllowListUnpickler.find_class")
@pytest.mark.parametrize("what", ["settings", "module"])
def test_code_in_a_pickle(what: str, tmp_path: Path) -> None:
    """The option for settings; for a module, the calls that the remedy writes."""
    source = tmp_path / "a.pt"
    if what == "settings":
        torch_file(source, {"model": MODEL, "args": _Args()})
        remedy = refused(command, "to-hf", source, tmp_path / "out")
        command("to-hf", source, tmp_path / "out", *flag(remedy, "--trust-pickle"))
        assert same(written(tmp_path / "out"), MODEL)
        return
    module = torch.nn.Linear(2, 2)
    torch_file(source, module)
    remedy = refused(command, "to-hf", source, tmp_path / "out")
    call = text_in(remedy, r"torch\.load\(.*?\)")
    assert ".state_dict()" in remedy.replace(" ", " .")
    names = {"torch": torch, "source": source}
    state = eval(call.replace("..", "source"), names).state_dict()
    command("to-hf", torch_file(tmp_path / "b.pt", state), tmp_path / "out")
    assert same(written(tmp_path / "out"), dict(module.state_dict()))


class _Phase(IntEnum):
    """A number of a trainer's own class."""

    WARM_UP = 1


@runs("conversion/formats/torch_save/archive_reader.py::load_torch_bytes")
@pytest.mark.parametrize("way", ["--exclude", "--trust-pickle"])
def test_a_value_of_another_class(way: str, tmp_path: Path) -> None:
    """It is left out, or trusted."""
    dcp.save({"model": MODEL, "args": _Phase.WARM_UP}, checkpoint_id=tmp_path / "c", no_dist=True)
    remedy = refused(command, "to-torch", tmp_path / "c", tmp_path / "a.pt")
    words = [way, "args"] if way == "--exclude" else flag(remedy, way)
    assert way in remedy
    command("to-torch", tmp_path / "c", tmp_path / "a.pt", *words)
    found = torch.load(tmp_path / "a.pt")
    assert same(found.pop("model"), MODEL) and found == ({} if way == "--exclude" else {"args": 1})


@pytest.mark.parametrize(
    ("site", "target"),
    [
        ("conversion/formats/torch_save/write.py::_Writer.put", "to-torch"),
        ("conversion/formats/native/tree.py::_node", "to-native"),
        ("conversion/formats/native/tree.py::_node", "to-zarr"),
    ],
)
@runs("conversion/formats/torch_save/write.py::_Writer.put", "conversion/formats/native/tree.py::_node")
def test_a_value_that_no_format_has(site: str, target: str, tmp_path: Path) -> None:
    """A trusted object is left out, by the name in the error."""
    dcp.save({"model": MODEL, "args": _Args()}, checkpoint_id=tmp_path / "c", no_dist=True)
    given = [tmp_path / "c", tmp_path / "out", "--trust-pickle"]
    with pytest.raises(ConversionError, check=lambda error: error.where == "args"):
        command(target, *given)
    remedy = refused(command, target, *given)
    command(target, *given, *flag(remedy, "--exclude"), "args")
    assert open_source(str(tmp_path / "out")).values == {}


@runs("conversion/formats/torch_save/read.py::TorchFile.open")
def test_an_old_file_of_torch_save(tmp_path: Path) -> None:
    """The call of the remedy saves it again."""
    source = tmp_path / "a.pt"
    torch.save(MODEL, source, _use_new_zipfile_serialization=False)
    remedy = refused(command, "to-hf", source, tmp_path / "out")
    eval(remedy.split(": ", 1)[1], {"torch": torch})
    (again,) = set(tmp_path.glob("a.pt*")) - {source}
    command("to-hf", again, tmp_path / "out")
    assert same(written(tmp_path / "out"), MODEL)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")  # in torch 2.15
@runs("conversion/formats/torch_save/archive_reader.py::TorchArchive.pickle")
def test_a_program(tmp_path: Path) -> None:
    """The call of the remedy saves its weights."""
    module = torch.nn.Linear(2, 2)
    torch.jit.save(torch.jit.trace(module, torch.ones(1, 2)), tmp_path / "a.pt")
    remedy = refused(command, "to-hf", tmp_path / "a.pt", tmp_path / "out")
    eval(remedy.split(": ", 1)[1], {"torch": torch})
    (weights,) = set(tmp_path.glob("a.pt*")) - {tmp_path / "a.pt"}
    command("to-hf", weights, tmp_path / "out")
    assert same(written(tmp_path / "out"), {name: p.detach() for name, p in module.named_parameters()})


@runs("conversion/formats/torch_save/read.py::TorchFile.leaves")
def test_no_state_dict(tmp_path: Path) -> None:
    """A dict that contains it."""
    refused(command, "to-hf", torch_file(tmp_path / "a.pt", [MODEL["up.weight"]]), tmp_path / "out")
    command("to-hf", torch_file(tmp_path / "b.pt", {"model": MODEL}), tmp_path / "out")
    assert same(written(tmp_path / "out"), MODEL)


@runs("conversion/formats/torch_save/pickle_reader.py::_load")
def test_a_sparse_tensor(tmp_path: Path) -> None:
    """The method that the remedy names."""
    sparse = MODEL["up.weight"].to_sparse()
    remedy = refused(command, "to-hf", torch_file(tmp_path / "a.pt", {"w": sparse}), tmp_path / "out")
    dense = getattr(sparse, "to_dense")() if "to_dense" in remedy else sparse  # noqa: B009
    command("to-hf", torch_file(tmp_path / "b.pt", {"w": dense}), tmp_path / "out")
    assert same(written(tmp_path / "out"), {"w": MODEL["up.weight"]})


@runs("conversion/formats/dcp/source.py::open_dcp")
def test_a_folder_of_several_dcp_checkpoints(tmp_path: Path) -> None:
    """One of them."""
    for name in ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1"):
        dcp.save({"model": MODEL}, checkpoint_id=tmp_path / "c" / name, no_dist=True)
    refused(open_source, str(tmp_path / "c"), kind="dcp")
    command("to-hf", tmp_path / "c/pytorch_model_fsdp_1", tmp_path / "out")
    assert same(written(tmp_path / "out"), MODEL)


@runs("conversion/formats/huggingface/read.py::open_hf_folder[1]")
def test_files_without_an_index(tmp_path: Path) -> None:
    """One of the files."""
    (tmp_path / "c").mkdir()
    for number in (1, 2):
        save_file(MODEL, tmp_path / f"c/part{number}.safetensors", {"format": "pt"})
    refused(open_source, str(tmp_path / "c"), kind="hf")
    command("to-hf", tmp_path / "c/part1.safetensors", tmp_path / "out")
    assert same(written(tmp_path / "out"), MODEL)


@runs("conversion/formats/huggingface/read.py::_two_models")
def test_two_models_in_a_folder(tmp_path: Path) -> None:
    """The outdated one is removed."""
    source = hf_folder(tmp_path / "c", MODEL)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "x.safetensors"}}))
    refused(command, "to-hf", source, tmp_path / "out")
    (source / "model.safetensors.index.json").unlink()
    command("to-hf", source, tmp_path / "out", "--no-assets")
    assert same(written(tmp_path / "out"), MODEL)


@runs("conversion/convert.py::_check_names")
def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """It is excluded."""
    source = torch_file(tmp_path / "a.pt", {"w": torch.ones(2), "\ud800": torch.ones(2)})
    remedy = refused(command, "to-hf", source, tmp_path / "out")
    assert "--exclude" in remedy
    options = ConvertOptions(exclude=["\ud800"])  # no argument of a process can be such a name
    convert(open_source(str(source)), str(tmp_path / "out"), "hf", options)
    assert same(written(tmp_path / "out"), {"w": torch.ones(2)})


@runs("conversion/convert.py::_check_growth")
@pytest.mark.parametrize("name", ["big", "big[0]"])
def test_a_tensor_of_repeats(name: str, tmp_path: Path) -> None:
    """It is excluded by the pattern of the remedy; ``to-torch`` writes it."""
    source = torch_file(tmp_path / "a.pt", {"w": torch.ones(2), name: torch.ones(1).expand(1 << 40)})
    remedy = refused(command, "to-hf", source, tmp_path / "out")
    command("to-hf", source, tmp_path / "out", *flag(remedy, "--exclude"))
    assert same(written(tmp_path / "out"), {"w": torch.ones(2)})
    assert "torch.save" in remedy
    command("to-torch", source, tmp_path / "b.pt")
    assert torch.load(tmp_path / "b.pt")[name].shape == (1 << 40,)


@runs("conversion/formats/huggingface/plan.py::make_header[1]")
@pytest.mark.parametrize("name", ["odd", "it's", "a[0]"])
def test_a_dtype_that_safetensors_lacks(name: str, tmp_path: Path) -> None:
    """It is excluded, as a shell or Python, and a pattern read the name; another format has it."""
    state = {"w": torch.ones(2), name: torch.ones(2, dtype=torch.complex128)}
    source = torch_file(tmp_path / "a.pt", {"model": state})
    remedy = refused(command, "to-hf", source, tmp_path / "out")
    command("to-hf", source, tmp_path / "out", *flag(remedy, "--exclude"))
    assert same(written(tmp_path / "out"), {"w": torch.ones(2)})
    remedy = refused(convert, open_source(source), tmp_path / "python", "hf")
    convert(open_source(source), tmp_path / "python", "hf", ConvertOptions(**argument(remedy, "exclude")))
    assert same(written(tmp_path / "python"), {"w": torch.ones(2)})
    command("to-torch", source, tmp_path / "b.pt")
    assert torch.equal(torch.load(tmp_path / "b.pt")["model"][name], state[name])


@runs("conversion/formats/huggingface/plan.py::make_header")
def test_a_reserved_name(tmp_path: Path) -> None:
    """It is excluded."""
    source = torch_file(tmp_path / "a.pt", {"w": torch.ones(2), "__metadata__": torch.ones(2)})
    remedy = refused(command, "to-hf", source, tmp_path / "out")
    command("to-hf", source, tmp_path / "out", *flag(remedy, "--exclude"))
    assert same(written(tmp_path / "out"), {"w": torch.ones(2)})


@runs("conversion/formats/huggingface/plan.py::plan_shards")
def test_a_shard_size_of_nothing(tmp_path: Path) -> None:
    """The size of the remedy."""
    source = torch_file(tmp_path / "a.pt", MODEL)
    remedy = refused(command, "to-hf", source, tmp_path / "out", "--max-shard-size", "0")
    size = text_in(remedy, r"\d+GB")
    command("to-hf", source, tmp_path / "out", "--max-shard-size", size)
    assert same(written(tmp_path / "out"), MODEL)


# Targets and how a conversion runs


@runs("conversion/engine/output.py::Output._list_old")
def test_a_target_with_files(tmp_path: Path) -> None:
    """They are replaced; another target is free."""
    source = torch_file(tmp_path / "a.pt", MODEL)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/other").write_text("x")
    remedy = refused(command, "to-hf", source, tmp_path / "out")
    command("to-hf", source, tmp_path / "out", *flag(remedy, "--overwrite"))
    assert same(written(tmp_path / "out"), MODEL)


def _stopped(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    """A conversion that a full disk ends after its first file."""
    from vescale_fsdp.conversion.engine.output import Output

    with monkeypatch.context() as patch:

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(Output, "_publish" if "_publish" in vars(Output) else "publish", full)
        with pytest.raises(OSError, match="space"):
            command("to-hf", source, out, "--max-shard-size", "30", *options)


@runs("conversion/engine/output.py::Output._list_old", "conversion/engine/journal.py::Journal._other_plan")
@pytest.mark.parametrize("way", ["--resume", "--overwrite"])
def test_an_interrupted_conversion(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on with the same options, or starts over."""
    source, out = torch_file(tmp_path / "a.pt", MODEL), tmp_path / "out"
    _stopped(source, out, monkeypatch)
    options = ("--max-shard-size", "30")
    remedy = refused(command, "to-hf", source, out, *options)
    other = refused(command, "to-hf", source, out, "--resume", "--max-shard-size", "1000")
    command("to-hf", source, out, *options, *flag(remedy if way == "--resume" else other, way))
    assert same(written(out), MODEL)


@runs("conversion/engine/output.py::Output._list_old[1]")
@pytest.mark.parametrize("way", ["parts", "--overwrite"])
def test_other_parts(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there were, or a new start."""
    source, out = torch_file(tmp_path / "a.pt", MODEL), tmp_path / "out"
    command("to-hf", source, out, "--max-shard-size", "30", "--part", "0/2")
    options = ("--max-shard-size", "30")
    remedy = refused(command, "to-hf", source, out, *options, "--resume", "--part", "0/3")
    if way == "parts":
        command("to-hf", source, out, *options, "--resume", "--part", "1/2")
    else:
        command("to-hf", source, out, *options, *flag(remedy, "--overwrite"))
    assert same(written(out), MODEL)


@runs("conversion/engine/output.py::Output.other_result")
def test_another_result(tmp_path: Path) -> None:
    """The target has the names of this conversion, with other values."""
    other = {name: value + 1 for name, value in MODEL.items()}
    command("to-hf", torch_file(tmp_path / "b.pt", other), tmp_path / "out")
    source = torch_file(tmp_path / "a.pt", MODEL)
    remedy = refused(command, "to-hf", source, tmp_path / "out", "--resume")
    command("to-hf", source, tmp_path / "out", *flag(remedy, "--overwrite"))
    assert same(written(tmp_path / "out"), MODEL)


_OPEN_TARGET = "conversion/engine/output.py::_open_target"


@pytest.mark.parametrize(
    ("site", "bad", "good"),
    [
        (_OPEN_TARGET, "hf", "out"),
        (f"{_OPEN_TARGET}[1]", "", "out.pt"),
        (f"{_OPEN_TARGET}[2]", "file/out", "out"),
        (f"{_OPEN_TARGET}[3]", "pipe", "out.pt"),
        (f"{_OPEN_TARGET}[4]", "folder", "folder/out.pt"),
    ],
)
@runs(*(f"{_OPEN_TARGET}{end}" for end in ("", "[1]", "[2]", "[3]", "[4]")))
def test_targets_that_are_taken(site: str, bad: str, good: str, tmp_path: Path) -> None:
    """Another target; for a folder, a file in it."""
    source = hf_folder(tmp_path / "hf", MODEL)
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    to = "to-torch" if good.endswith(".pt") else "to-hf"
    # A name that ends in a slash names a folder.
    refused(command, to, source, tmp_path / bad if bad else f"{tmp_path}/new/")
    command(to, source, tmp_path / good, *(("--no-assets",) if to == "to-hf" else ()))
    found = torch.load(tmp_path / good) if to == "to-torch" else written(tmp_path / good)
    assert same(found, MODEL)


@runs("conversion/cli/options.py::part_of", "conversion/cli/options.py::part_of[1]")
def test_parts_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the remedies write them."""
    source = torch_file(tmp_path / "a.pt", MODEL)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    part = flag(refused(command, "to-hf", source, tmp_path / "out", "--part", "env"), "--part")
    command("to-hf", source, tmp_path / "out", part[0], part[1].replace("I", "0").replace("N", "1"))
    assert same(written(tmp_path / "out"), MODEL)
    example = text_in(refused(command, "to-hf", source, tmp_path / "two", "--part", "one"), r"\d/\d")
    command("to-hf", source, tmp_path / "two", "--part", example)


@runs("conversion/convert_options.py::ConvertOptions.__post_init__")
def test_the_last_part(tmp_path: Path) -> None:
    """Numbers begin with 0."""
    source = torch_file(tmp_path / "a.pt", MODEL)
    refused(command, "to-hf", source, tmp_path / "out", "--part", "1/1")
    command("to-hf", source, tmp_path / "out", "--part", "0/1")
    assert same(written(tmp_path / "out"), MODEL)


@runs("conversion/engine/copying.py::CopyLimits.__post_init__")
def test_a_small_budget(tmp_path: Path) -> None:
    """The least that the remedy names."""
    source = torch_file(tmp_path / "a.pt", MODEL)
    remedy = refused(command, "to-hf", source, tmp_path / "out", "--memory-budget", "1KB")
    command("to-hf", source, tmp_path / "out", *flag(remedy, "--memory-budget"))
    assert same(written(tmp_path / "out"), MODEL)


@runs("conversion/engine/copying.py::CopyLimits.decoding")
def test_a_chunk_that_is_larger_than_the_budget(tmp_path: Path) -> None:
    """The budget that the remedy computes."""
    import zarr

    array = np.arange(3 << 20, dtype=np.float32)
    group = zarr.open_group(str(tmp_path / "c"), mode="w", zarr_format=3)
    group.create_array("w", data=array, chunks=array.shape)  # compressed, as zarr does by default
    remedy = refused(command, "to-torch", tmp_path / "c", tmp_path / "a.pt", "--memory-budget", "5MB")
    command("to-torch", tmp_path / "c", tmp_path / "a.pt", *flag(remedy, "--memory-budget"))
    assert np.array_equal(torch.load(tmp_path / "a.pt")["w"].numpy(), array)


@runs("conversion/convert.py::plan_conversion")
def test_an_unknown_target(tmp_path: Path) -> None:
    """One of those that the error lists."""
    source = open_source(str(torch_file(tmp_path / "a.pt", MODEL)))
    refused(convert, source, str(tmp_path / "out"), "huggingface")
    convert(source, str(tmp_path / "out"), "hf")
    assert same(written(tmp_path / "out"), MODEL)


@runs("conversion/diff.py::matched_views[1]", "conversion/diff.py::matched_views")
def test_a_difference_of_nothing(tmp_path: Path) -> None:
    """The command lists what is there; without the option both are compared."""
    source = torch_file(tmp_path / "a.pt", MODEL)
    remedy = refused(command, "diff", source, source, "--model-prefix", "x")
    assert flag(remedy, "--model-prefix") == ["--model-prefix"]
    assert "up.weight" in command(*commands(remedy), source)
    assert "0 differences" in command("diff", source, source)
    empty = torch_file(tmp_path / "b.pt", {"step": 3})
    command(*commands(refused(command, "diff", empty, empty)), empty)


@runs("conversion/report/describe.py::draw")
def test_no_layout_to_draw(tmp_path: Path) -> None:
    """A conversion with the command of the remedy has one."""
    source = torch_file(tmp_path / "a.pt", MODEL)
    remedy = refused(command, "inspect", source, "--svg", tmp_path / "a.svg")
    command(*commands(remedy.split("first: ")[1], SRC=source, OUT=tmp_path / "out", N=2))
    command("inspect", tmp_path / "out", "--svg", tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


@runs("conversion/formats/detect.py::refuse_incomplete")
def test_a_source_that_a_conversion_did_not_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command with the option of the remedy completes it."""
    source, out = torch_file(tmp_path / "a.pt", MODEL), tmp_path / "out"
    _stopped(source, out, monkeypatch)
    remedy = refused(command, "inspect", out)
    command("to-hf", source, out, "--max-shard-size", "30", *flag(remedy, "--resume"))
    command("inspect", out)
    assert same(written(out), MODEL)


@runs("conversion/formats/native/plan.py::plan_native")
def test_too_many_ranks(tmp_path: Path) -> None:
    """Fewer."""
    source = torch_file(tmp_path / "a.pt", MODEL)
    refused(command, "to-native", source, tmp_path / "out", "--ranks", "100000")
    command("to-native", source, tmp_path / "out", "--ranks", "2")
    assert same(native_tensors(tmp_path / "out"), MODEL)


@runs("conversion/diff.py::_without_common_repeats")
def test_a_difference_of_repeats(tmp_path: Path) -> None:
    """The command of the remedy compares a sample."""
    tensor = torch.zeros(1 << 17).as_strided((1 << 15, 1 << 16), (1, 1))  # 8 GiB
    source = torch_file(tmp_path / "a.pt", {"w": tensor})
    remedy = refused(command, "diff", source, source)
    command(*commands(remedy, A=source, B=source, FILE=tmp_path / "a.html"))
    assert (tmp_path / "a.html").stat().st_size


@runs("conversion/fingerprint.py::_sums_of")
def test_a_fingerprint_of_repeats(tmp_path: Path) -> None:
    """Without the tensor that the remedy names."""
    tensor = torch.zeros(1 << 17).as_strided((1 << 15, 1 << 16), (1, 1))  # 8 GiB
    source = torch_file(tmp_path / "a.pt", {"w": tensor, **MODEL})
    remedy = refused(command, "fingerprint", source)
    rest = command("fingerprint", source, *flag(remedy, "--exclude"), "--json")
    whole = command("fingerprint", torch_file(tmp_path / "b.pt", MODEL), "--json")
    found, wanted = (json.loads(printed)["sides"][0]["tensors"] for printed in (rest, whole))
    assert found == wanted and found.keys() == MODEL.keys()


@runs("conversion/formats/huggingface/repository.py::Assets.__init__[1]")
def test_a_pattern_of_no_file(tmp_path: Path) -> None:
    """A pattern of one."""
    source, assets = torch_file(tmp_path / "a.pt", MODEL), hf_folder(tmp_path / "hf", MODEL)
    (assets / "notes.txt").write_text("x")
    given = [source, tmp_path / "out", "--assets", assets, "--include-asset"]
    refused(command, "to-hf", *given, "x*")
    command("to-hf", *given, "notes.*")
    assert (tmp_path / "out/notes.txt").exists() and same(written(tmp_path / "out"), MODEL)


@runs("conversion/formats/huggingface/repository.py::config_in")
@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("way", ["corrected", "moved"])
def test_a_config_that_is_no_json(way: str, is_own: bool, tmp_path: Path) -> None:
    """It is corrected, or moved out of the folder: of the source, or of the assets."""
    folder = hf_folder(tmp_path / "hf", MODEL)
    (folder / "config.json").write_text("<html>")
    (folder / "tokenizer.json").write_text("{}")
    source = folder if is_own else torch_file(tmp_path / "a.pt", MODEL)
    options = [] if is_own else ["--assets", folder]
    refused(command, "to-hf", source, tmp_path / "out", *options)
    if way == "corrected":
        (folder / "config.json").write_text("{}")
    else:
        (tmp_path / "elsewhere").mkdir()
        (folder / "config.json").rename(tmp_path / "elsewhere/config.json")
    command("to-hf", source, tmp_path / "out", *options)
    assert same(written(tmp_path / "out"), MODEL)


@runs("checkpoint/state/nesting.py::flatten")
def test_two_entries_of_one_name(tmp_path: Path) -> None:
    """Another key."""
    state = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}
    refused(command, "to-hf", torch_file(tmp_path / "a.pt", state), tmp_path / "out")
    state["c"] = state.pop("a.b")
    command("to-native", torch_file(tmp_path / "a.pt", state), tmp_path / "out")
    assert torch.equal(native_tensors(tmp_path / "out")["a.b"], torch.ones(2))


@runs("checkpoint/state/nesting.py::_inside")
@pytest.mark.parametrize("target", ["to-torch", "to-native", "to-zarr"])
def test_an_entry_inside_another(target: str, tmp_path: Path) -> None:
    """One of them is excluded."""
    source = torch_file(tmp_path / "a.pt", {"net": MODEL, "x": 3})
    given = [source, tmp_path / "out", "--prefix", "x"]
    assert "--exclude" in refused(command, target, *given)
    command(target, *given, "--exclude", "x")
    found = open_source(str(tmp_path / "out"))
    assert [*found.tensors] == [f"x.{name}" for name in MODEL] and not found.values


@runs("conversion/formats/torch_save/read.py::_joined_state")
def test_files_of_ranks_that_differ(tmp_path: Path) -> None:
    """The file that the remedy names, alone."""
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        state = {name: value + rank for name, value in MODEL.items()}
        torch_file(tmp_path / f"ranks/model_world_size_2_rank_{rank}.pt", state)
    remedy = refused(command, "to-hf", tmp_path / "ranks", tmp_path / "out")
    command("to-hf", tmp_path / "ranks" / text_in(remedy, r"\S+_rank_0\.pt"), tmp_path / "out")
    assert same(written(tmp_path / "out"), MODEL)


# Averages and expressions


@runs(
    "conversion/combine.py::average",
    "conversion/combine.py::Combination.__post_init__",
    "conversion/expressions.py::_invalid",
    "conversion/formats/detect.py::last_steps",
)
def test_too_few_inputs_and_expressions(tmp_path: Path) -> None:
    """The command lines that the remedies write."""
    with CheckpointManager(tmp_path / "run", retention=9) as manager:
        for step in range(5):
            manager.save(step, {"model": MODEL})
    remedy = refused(command, "average", tmp_path / "run" / "step-00000000", tmp_path / "out")
    command(*commands(remedy, RUN=tmp_path / "run", OUT=tmp_path / "out"))
    source = open_source(tmp_path / "out")
    remedy = refused(command, "combine", tmp_path / "out2", "base * tuned", f"base={source.url}")
    words = commands(remedy, OUT=tmp_path / "out2")
    command(*(word.replace("PATH", source.url) for word in words), "--to", "hf")
    assert same(written(tmp_path / "out2"), MODEL)
    inputs = {"a": source, "b": source}
    remedy = refused(combine, inputs, "a - b", tmp_path / "out3", "hf", compute_dtype="bfloat16")
    assert "compute_dtype" in remedy
    combine(inputs, "a - b", tmp_path / "out3", "hf")
    assert "steps" in refused(command, "average", tmp_path / "run", tmp_path / "out4", "--last", 6)
    command("average", tmp_path / "run", tmp_path / "out4", "--last", 5)


@runs(
    "conversion/combine.py::Combination.join",
    "conversion/combine.py::Combination._check_floats",
    "conversion/combine.py::Combination._problem",
    "conversion/combine.py::Combination._problem[1]",
    "conversion/combine.py::Combination._problem[2]",
)
def test_inputs_of_different_models(tmp_path: Path) -> None:
    """Tensors that are copied or left out, the other order, and quantized weights."""
    weight = torch.ones(128, 256)
    base = hf_folder(tmp_path / "base", {"up.weight": weight, "n[0]": torch.ones(2)})
    for name, more in {
        "less": {},
        "long": {"n[0]": torch.ones(3)},
        "whole": {"n[0]": torch.ones(2, dtype=torch.int64)},
    }.items():
        other = hf_folder(tmp_path / name, {"up.weight": weight, **more})
        remedy = refused(command, "average", base, other, tmp_path / "out")
        command("average", base, other, tmp_path / f"{name}-copy", *flag(remedy, "--copy"))
        assert same(written(tmp_path / f"{name}-copy"), {"up.weight": weight, "n[0]": torch.ones(2)})
        if "--exclude" in remedy:
            command("average", base, other, tmp_path / f"{name}-not", *flag(remedy, "--exclude"))
            assert same(written(tmp_path / f"{name}-not"), {"up.weight": weight})
    less = tmp_path / "less"
    remedy = refused(command, "average", less, base, tmp_path / "out")
    command("average", less, base, tmp_path / "out", *flag(remedy, "--exclude"))
    assert same(written(tmp_path / "out"), {"up.weight": weight})
    command("to-hf", less, tmp_path / "q", "--quantize", "fp8-128x128")
    remedy = refused(command, "average", less, tmp_path / "q", tmp_path / "floats")
    command("average", less, tmp_path / "q", tmp_path / "floats", *flag(remedy, "--dequantize"))
    assert same(written(tmp_path / "floats"), {"up.weight": weight})
