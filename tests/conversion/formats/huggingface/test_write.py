"""DCP checkpoints to Hugging Face repositories: every byte, every layout, and what loaders make of it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.array_views import without_values
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtype_zoo import make_tensor, same_bytes, zoo
from vescale_fsdp.checkpoint import verify
from vescale_fsdp.conversion import ConvertOptions, ConvertReport, convert, diff, open_source
from vescale_fsdp.conversion.formats.huggingface.plan import plan_shards
from vescale_fsdp.conversion.formats.huggingface.repository import Assets
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, option


def _save(state: dict[str, object], path: Path) -> str:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return str(path)


def _convert(source: Path | str, target: Path, **options: object) -> ConvertReport:
    chosen = ConvertOptions(**options)  # type: ignore[arg-type]
    return convert(open_source(str(source)), str(target), "hf", chosen)


def test_every_dtype_and_shape_arrives_unchanged(tmp_path: Path) -> None:
    """The file written from DCP is byte for byte the one safetensors writes for the same tensors."""
    tensors = zoo()
    _save({"model": tensors, "step": 3}, tmp_path / "dcp")
    report = _convert(tmp_path / "dcp", tmp_path / "out")
    assert report.state.model.prefix == "model." and report.dropped_others == ("step",)
    save_file(tensors, tmp_path / "reference.safetensors", metadata={"format": "pt"})
    written = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert written == (tmp_path / "reference.safetensors").read_bytes()
    assert len(written) > 10_000
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


def test_small_budget_cuts_large_tensors(tmp_path: Path) -> None:
    """A tensor many times larger than the buffers arrives whole, also when it is not one run in the file."""
    tensors = {"big": torch.randn(1000, 3001), "turned": torch.randn(3001, 700).t()}
    _save({"model": tensors}, tmp_path / "dcp")
    _convert(tmp_path / "dcp", tmp_path / "out", memory_budget_bytes=4 * 2**20, threads=3)
    assert (
        ConvertOptions(memory_budget_bytes=4 * 2**20, threads=3).limits.buffer_bytes * 8
        < tensors["turned"].nbytes
    )
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert all(same_bytes(loaded[name], tensor) for name, tensor in tensors.items())


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.register_buffer("count", torch.arange(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def _train_and_save(folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = _Net()
    for layer in model.layers:
        fully_shard(layer, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    full = {name: value for name, value in model_state.items() if isinstance(value, torch.Tensor)}
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in full.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_fsdp2_checkpoint_becomes_the_full_model(tmp_path: Path, ranks: int) -> None:
    """Shards of any world size are put together; the optimizer stays out and the report counts it."""
    full = run_ranks(ranks, _train_and_save, str(tmp_path / "dcp"))[0]
    report = _convert(tmp_path / "dcp", tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(loaded) == sorted(full) and len(full) == 6
    assert all(same_bytes(loaded[name], value) for name, value in full.items())
    assert report.dropped_optimizer >= 5 * 3 and report.dropped_others == ()


def _save_sharded_on_columns(folder: str) -> None:
    torch.manual_seed(1)
    mesh = cpu_mesh()
    state = {
        "columns": distribute_tensor(torch.randn(6, 10), mesh, [Shard(1)]),
        "middle": distribute_tensor(torch.randn(3, 7, 5), mesh, [Shard(1)]),
        "few_rows": distribute_tensor(torch.randn(2, 4), mesh, [Shard(0)]),
    }
    dcp.save({"model": state}, checkpoint_id=folder)


def test_column_shards_and_empty_ranks(tmp_path: Path) -> None:
    """Boxes that are not one run of the tensor, and ranks that hold nothing, land where they belong."""
    run_ranks(4, _save_sharded_on_columns, str(tmp_path / "dcp"))
    _convert(tmp_path / "dcp", tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    torch.manual_seed(1)
    expected = {"columns": torch.randn(6, 10), "middle": torch.randn(3, 7, 5), "few_rows": torch.randn(2, 4)}
    assert all(same_bytes(loaded[name], value) for name, value in expected.items())


def test_a_file_may_be_exactly_full() -> None:
    """The limit is met, not undercut; one tensor above it has a file of its own."""
    infos = [without_values(f"w{i}", (n,)).info for i, n in enumerate((100, 100, 100, 201, 1))]
    shards = plan_shards(infos, 800)
    assert [[info.name for info in shard.infos] for shard in shards] == [["w0", "w1"], ["w2"], ["w3"], ["w4"]]


def test_several_files_and_their_index(tmp_path: Path) -> None:
    """Above the limit: numbered files from 1, an index with total_size, one oversized tensor on its own."""
    tensors = {f"layers.{i}.w": make_tensor((10, 10), torch.float32, i) for i in range(12)}
    tensors["layers.3.huge"] = make_tensor((50, 50), torch.float32)
    _save({"model": tensors}, tmp_path / "dcp")
    _convert(tmp_path / "dcp", tmp_path / "out", max_shard_bytes=1000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) == 7 + 1
    assert index["metadata"]["total_size"] == 12 * 400 + 10_000
    merged: dict[str, torch.Tensor] = {}
    for file in files:
        found = load_file(tmp_path / "out" / file)
        assert all(index["weight_map"][name] == file for name in found)
        assert len(found) == 1 or sum(t.nbytes for t in found.values()) <= 1000
        merged |= found
    assert sorted(merged) == sorted(tensors)
    assert all(same_bytes(merged[name], value) for name, value in tensors.items())
    assert "model.safetensors" not in os.listdir(tmp_path / "out")


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_equal_tensors_and_logits(tmp_path: Path, tied: bool) -> None:
    """LlamaForCausalLM.from_pretrained on the result: bit-equal weights, equal logits, tie restored."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    config.save_pretrained(tmp_path / "assets")
    (tmp_path / "assets" / "tokenizer").mkdir()
    (tmp_path / "assets" / "tokenizer" / "vocab.txt").write_text("a b c")
    (tmp_path / "assets" / "model-00001-of-00002.safetensors").write_text("stale")
    _save({"model": model.state_dict(), "optimizer": {"state": {}}}, tmp_path / "dcp")
    report = _convert(tmp_path / "dcp", tmp_path / "out", assets=str(tmp_path / "assets"))
    assert report.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    assert (tmp_path / "out" / "tokenizer" / "vocab.txt").read_text() == "a b c"
    assert not (tmp_path / "out" / "model-00001-of-00002.safetensors").exists()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    state = loaded.state_dict()
    assert sorted(state) == sorted(model.state_dict())
    assert all(same_bytes(state[name], value) for name, value in model.state_dict().items())
    tokens = torch.arange(20)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_a_tie_the_bytes_deny_keeps_both_and_warns(tmp_path: Path) -> None:
    """tie_word_embeddings with other bytes, if only the last of many: nothing is lost, and the user hears of it."""
    state = {"model.embed_tokens.weight": torch.randn(1100, 1000)}  # more than is compared at once
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][-1, -1] += 1
    _save({"model": state}, tmp_path / "dcp")
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text('{"tie_word_embeddings": true}')
    report = _convert(tmp_path / "dcp", tmp_path / "out", assets=str(tmp_path / "assets"))
    assert report.tied == {} and any("lm_head.weight" in warning for warning in report.warnings)
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == 2


@pytest.mark.parametrize("config", ["{}", '{"tie_word_embeddings": false}', '{"tie_word_embeddings": null}'])
def test_equal_bytes_alone_are_no_tie(tmp_path: Path, config: str) -> None:
    """Two weights may start equal and be trained apart: without the config's word both are kept."""
    state = {"model.embed_tokens.weight": torch.ones(4, 3), "lm_head.weight": torch.ones(4, 3)}
    _save({"model": state}, tmp_path / "dcp")
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text(config)
    report = _convert(tmp_path / "dcp", tmp_path / "out", assets=str(tmp_path / "assets"))
    assert report.tied == {} and report.warnings == ()
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == 2


def test_the_model_is_found_under_every_prefix(tmp_path: Path) -> None:
    """The model is found at the root, in one container, in two, and where the user says."""
    weights = {"model.layers.0.w": torch.ones(2)}
    optimizer = {"state": {"layers.0.w": {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 1}]}
    cases: dict[str, tuple[dict[str, object], str | None, str]] = {
        "root": ({**weights, "optimizer": optimizer, "step": 1}, None, ""),
        "torchtitan": (
            {**weights, "optimizer": optimizer, "train_state": {"step": torch.tensor(1)}},
            None,
            "",
        ),
        "one": ({"model": weights, "optimizer": optimizer}, None, "model."),
        "two": ({"app": {"model": weights, "optim": optimizer}}, None, "app.model."),
        "given": ({"teacher": weights, "student": weights}, "student", "student."),
    }
    for case, (state, prefix, expected) in cases.items():
        _save(state, tmp_path / case)
        report = _convert(tmp_path / case, tmp_path / f"{case}_out", model_prefix=prefix)
        assert report.state.model.prefix == expected, case
        with safe_open(tmp_path / f"{case}_out" / "model.safetensors", "pt") as file:
            assert list(file.keys()) == ["model.layers.0.w"], case


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    """Files are as readable as the user's umask says, not 0600."""
    _save({"model": {"w": torch.ones(3)}}, tmp_path / "dcp")
    old = os.umask(0o027)
    try:
        _convert(tmp_path / "dcp", tmp_path / "out")
    finally:
        os.umask(old)
    mode = stat.S_IMODE((tmp_path / "out" / "model.safetensors").stat().st_mode)
    assert mode == 0o640


def test_overwrite_removes_stale_weights(tmp_path: Path) -> None:
    """A leftover single file would win over the new shards in loaders: it goes, other files stay."""
    _save({"model": {f"w{i}": torch.ones(100) for i in range(4)}}, tmp_path / "dcp")
    out = tmp_path / "out"
    out.mkdir()
    for name in ("model.safetensors", "pytorch_model.bin", "model-00001-of-00009.safetensors", "notes.txt"):
        (out / name).write_text("old")
    with pytest.raises(ConversionError, check=lambda error: option("overwrite", True) in error.todo):
        _convert(tmp_path / "dcp", out, max_shard_bytes=400)
    assert (out / "model.safetensors").read_text() == "old"
    _convert(tmp_path / "dcp", out, max_shard_bytes=400, overwrite=True)
    names = sorted(os.listdir(out))
    shards = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert names == sorted([*shards, "model.safetensors.index.json", "notes.txt"])


@pytest.mark.parametrize("place", ["dcp", "dcp/out", "."])
def test_target_may_not_touch_the_source(tmp_path: Path, place: str) -> None:
    """Over, inside and around the source are refused, with the source unharmed."""
    _save({"model": {"w": torch.ones(3)}}, tmp_path / "dcp")
    before = sorted(os.listdir(tmp_path / "dcp"))
    with pytest.raises(ConversionError, check=lambda error: error.where == str(tmp_path / place)):
        _convert(tmp_path / "dcp", tmp_path / place, overwrite=True)
    assert sorted(os.listdir(tmp_path / "dcp")) == before


def test_damage_found_while_copying_leaves_nothing(tmp_path: Path) -> None:
    """A record that disagrees with the metadata in the middle of the work: error, and an empty target."""
    _save({"model": {f"w{i}": torch.full((1000,), float(i)) for i in range(5)}}, tmp_path / "dcp")
    data = tmp_path / "dcp" / "__0_0.distcp"
    raw = bytearray(data.read_bytes())
    at = raw.rfind(b"FloatStorage")  # the pickle of the last tensor
    raw[at : at + 12] = b"FloatSt0rage"
    data.write_bytes(raw)
    with pytest.raises(
        CorruptCheckpointError, check=lambda error: "data.pkl" in error.expected and "model.w4" in error.where
    ):
        _convert(tmp_path / "dcp", tmp_path / "out", max_shard_bytes=4000)
    assert not (tmp_path / "out").exists()


def test_dry_run_writes_nothing_and_plans_the_same(tmp_path: Path) -> None:
    """The plan of a dry run is the plan of the run."""
    _save({"model": {"a": torch.ones(300), "b": torch.ones(300)}}, tmp_path / "dcp")
    plan = _convert(tmp_path / "dcp", tmp_path / "out", max_shard_bytes=1200, dry_run=True)
    assert not (tmp_path / "out").exists()
    done = _convert(tmp_path / "dcp", tmp_path / "out", max_shard_bytes=1200)
    assert done.plan.digest() == plan.plan.digest() and len(plan.plan.files) == 2
    assert (plan.outcome.published, done.outcome.published) == (False, True)


def test_hf_source_converts_too(tmp_path: Path) -> None:
    """A Hugging Face folder is a source like any other: here to split it into smaller files."""
    tensors = zoo()
    (tmp_path / "a").mkdir()
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    _convert(tmp_path / "a", tmp_path / "b", max_shard_bytes=500)
    _convert(tmp_path / "b", tmp_path / "c")
    assert len(os.listdir(tmp_path / "b")) > 5
    whole = [(tmp_path / place / "model.safetensors").read_bytes() for place in ("a", "c")]
    assert whole[0] == whole[1]


def test_complex128_is_refused_by_name(tmp_path: Path) -> None:
    """A type the format lacks is an error that names the tensor, before anything is written."""
    _save({"model": {"wave": torch.zeros(2, dtype=torch.complex128)}}, tmp_path / "dcp")
    with pytest.raises(ConversionError, match="wave"):
        _convert(tmp_path / "dcp", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_large_settings_files_are_streamed(tmp_path: Path) -> None:
    """Repositories hold other weights in subfolders (onnx, original): who wants them gets a few MiB at a time."""
    folder = tmp_path / "a" / "original"
    folder.mkdir(parents=True)
    save_file({"w": torch.ones(3)}, tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / "config.json").write_text("{}")
    large = bytes(range(256)) * (9 * 2**12)  # 9 MiB
    (folder / "consolidated.00.pth").write_bytes(large)
    pieces = list(Assets(str(tmp_path / "a")).reader("original/consolidated.00.pth")())
    assert b"".join(pieces) == large and max(map(len, pieces)) <= 4 * 2**20
    _convert(tmp_path / "a", tmp_path / "b", include_asset=["original/*"])
    assert (tmp_path / "b" / "original" / "consolidated.00.pth").read_bytes() == large


WRAPPED = {
    "module.{}": ("a.weight", "b.0.weight"),
    "_orig_mod.{}": ("a.weight", "b.0.weight"),
    "module._orig_mod.{}": ("a.weight", "b.0.weight"),
    "_fsdp_wrapped_module.b._checkpoint_wrapped_module.{}": ("0.weight", "1.weight"),
}


@pytest.mark.parametrize("pattern", WRAPPED)
def test_names_of_wrappers_do_not_go_out(tmp_path: Path, pattern: str) -> None:
    """DDP, torch.compile, FSDP1 and checkpointing: loaders know the names inside; and `diff` sees them as equal."""
    inner = pattern.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")
    inner = inner.replace("module.", "").replace("_orig_mod.", "")
    values = {name: torch.randn(3, 4) for name in WRAPPED[pattern]}
    torch.save({pattern.format(name): value for name, value in values.items()}, tmp_path / "run.pt")
    source = open_source(str(tmp_path / "run.pt"))
    report = convert(source, str(tmp_path / "hf"), "hf", ConvertOptions(no_assets=True))
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == {inner.format(name) for name in values} and report.warnings
    assert all(torch.equal(found[inner.format(name)], value) for name, value in values.items())
    assert diff(source, open_source(str(tmp_path / "hf"))) == ((), 2)


def test_a_module_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    """The control: a name that only some weights begin with is the model's own; two weights never become one."""
    torch.save({"module.a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "own.pt")
    convert(open_source(str(tmp_path / "own.pt")), str(tmp_path / "hf"), "hf", ConvertOptions(no_assets=True))
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"module.a", "b"}
    torch.save({"_orig_mod.b": torch.ones(2), "b": torch.ones(2)}, tmp_path / "two.pt")
    with pytest.raises(ConversionError):
        convert(open_source(str(tmp_path / "two.pt")), str(tmp_path / "hf2"), "hf")
    assert not (tmp_path / "hf2").exists()


def test_what_files_say_of_their_tensors_goes_along(tmp_path: Path) -> None:
    """torchao describes its tensors in ``__metadata__``: cut into other files, all say what all said; `diff` sees a
    loss; and what no longer holds, since tensors changed, is left out with a warning."""
    (tmp_path / "hf").mkdir()
    said = {"a": {"tensor_names": '["a"]', "a": '{"_type": "Int8Tensor"}'}, "b": {"tensor_names": '["b"]'}}
    tensors = {name: torch.randn(40, 40) for name in said}
    for name in said:
        save_file(
            {name: tensors[name]}, tmp_path / "hf" / f"{name}.safetensors", {"format": "pt", **said[name]}
        )
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in said}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    source = open_source(str(tmp_path / "hf"))
    convert(source, str(tmp_path / "out"), "hf", ConvertOptions(no_assets=True))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        found = file.metadata()
    assert found == {"format": "pt", "tensor_names": '["a", "b"]', "a": '{"_type": "Int8Tensor"}'}
    assert diff(source, open_source(str(tmp_path / "out"))) == ((), 2)

    save_file(tensors, tmp_path / "bare.safetensors", {"format": "pt"})
    differences, _ = diff(source, open_source(str(tmp_path / "bare.safetensors")))
    assert {difference.kind for difference in differences} == {"only_a"} and len(differences) == 2
    report = convert(source, str(tmp_path / "dcp"), "dcp")
    assert report.warnings


_UNET = {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.31.0", "in_channels": 4}


@pytest.mark.parametrize("max_shard_bytes", [10**9, 32])
def test_models_of_diffusers_keep_their_file_names(tmp_path: Path, max_shard_bytes: int) -> None:
    """One or several files, an old result of the other name removed; and what was written is read again."""
    pipeline = tmp_path / "pipeline" / "unet"
    pipeline.mkdir(parents=True)
    (pipeline / "config.json").write_text(json.dumps(_UNET))
    tensors = {"conv_in.weight": torch.randn(4, 4), "conv_out.weight": torch.randn(4, 4)}
    dcp_folder = _save({"model": tensors}, tmp_path / "dcp")
    out = tmp_path / "out" / "unet"
    out.mkdir(parents=True)
    for old in (
        "model.safetensors",
        "diffusion_pytorch_model.bin",
        "diffusion_pytorch_model.safetensors.index.json",
    ):
        (out / old).write_bytes(b"old")
    options = {"assets": str(pipeline), "max_shard_bytes": max_shard_bytes, "dtype": ["bf16"]}
    _convert(dcp_folder, out, overwrite=True, **options)
    single, several = (
        "diffusion_pytorch_model.safetensors",
        "diffusion_pytorch_model-00001-of-00002.safetensors",
    )
    names = {path.name for path in out.iterdir()}
    assert names == (
        {single, "config.json"}
        if max_shard_bytes > 32
        else {several, several.replace("00001-of", "00002-of"), f"{single}.index.json", "config.json"}
    )
    assert json.loads((out / "config.json").read_text()) == _UNET
    again = open_source(str(out))
    assert sorted(again.tensors) == sorted(tensors) and not verify(again).problems
    report = convert(again, str(tmp_path / "again"), "hf", ConvertOptions(max_shard_bytes=10**9))
    assert [file.name for file in report.plan.files] == [single]
    with pytest.raises(ConversionError) as caught:
        open_source(str(tmp_path / "out"))
    assert caught.value.where == str(tmp_path / "out") and single in str(caught.value.got)


def test_variants_beside_a_model_of_diffusers(tmp_path: Path) -> None:
    """Repositories have a half-precision copy beside the model, and files from before safetensors."""
    tensors = {"conv_in.weight": torch.randn(4, 4)}
    save_file(tensors, tmp_path / "diffusion_pytorch_model.safetensors")
    save_file({"conv_in.weight": torch.zeros(1)}, tmp_path / "diffusion_pytorch_model.fp16.safetensors")
    assert open_source(str(tmp_path)).info("conv_in.weight").shape == (4, 4)
    old = tmp_path / "old"
    old.mkdir()
    torch.save(tensors, old / "diffusion_pytorch_model.bin")
    assert open_source(str(old)).info("conv_in.weight").shape == (4, 4)
