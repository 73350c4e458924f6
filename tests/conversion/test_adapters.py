"""Adapters: merged by the formulas of peft, exported from training states, loaded into sharded models and back.

peft itself is asked in tests/stacks/conversion/test_peft_folders.py.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.command import vescale_convert
from tests.support.distributed import run_ranks
from tests.support.dtype_zoo import same_bytes
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import SourceOptions, load, save
from vescale_fsdp.conversion import open_source
from vescale_fsdp.conversion.convert import ConvertOptions, convert
from vescale_fsdp.errors import CheckpointError, ConversionError, VescaleError, option

ROOT = "base_model.model."
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q", "up"]}


def _base(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {
        "emb.weight": (31, 24),
        "l.0.q.weight": (20, 24),
        "l.0.q.bias": (20,),
        "l.1.up.weight": (40, 24),
    }
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return tensors


def _adapter(path: Path, shapes: dict[str, tuple[int, ...]], **config: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    path.mkdir()
    save_file({ROOT + name: tensor for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(LORA | config))
    return tensors


def _pair(module: str, rank: int, rows: int, cols: int) -> dict[str, tuple[int, ...]]:
    return {f"{module}.lora_A.weight": (rank, cols), f"{module}.lora_B.weight": (rows, rank)}


def _merge(tmp_path: Path, *options: str) -> dict[str, torch.Tensor]:
    args = [
        "merge-adapter",
        str(tmp_path / "base"),
        str(tmp_path / "adapter"),
        str(tmp_path / "out"),
        *options,
    ]
    result = vescale_convert(*args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "config.json").exists()
    return load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("is_rank_stabilized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lora_adapter_is_merged_by_its_ranks_and_alphas(
    tmp_path: Path, dtype: torch.dtype, is_rank_stabilized: bool
) -> None:
    """Ranks and alphas by pattern; whole weights that were trained beside; all else as it was."""
    base = _base(tmp_path / "base", dtype)
    shapes = _pair("l.0.q", 2, 20, 24) | _pair("l.1.up", 4, 40, 24) | {"emb.weight": (31, 24)}
    patterns = {"rank_pattern": {"0.q": 2}, "alpha_pattern": {"l.1.up": 9}, "use_rslora": is_rank_stabilized}
    adapter = _adapter(tmp_path / "adapter", shapes, **patterns)
    found = _merge(tmp_path)
    assert found.keys() == base.keys() and same_bytes(found["l.0.q.bias"], base["l.0.q.bias"])
    assert same_bytes(found["emb.weight"], adapter["emb.weight"].to(dtype))
    for module, alpha, rank in (("l.0.q", 6, 2), ("l.1.up", 9, 4)):
        expected = base[f"{module}.weight"].clone()
        a, b = adapter[f"{module}.lora_A.weight"], adapter[f"{module}.lora_B.weight"]
        expected += (b @ a) * (alpha / (math.sqrt(rank) if is_rank_stabilized else rank))
        assert same_bytes(found[f"{module}.weight"], expected)
        assert (expected - base[f"{module}.weight"]).norm() > 0


def test_a_wider_dtype_is_merged_in(tmp_path: Path) -> None:
    """As peft merges into a base that is loaded in float32: the sum is not rounded to the base's bfloat16."""
    base = _base(tmp_path / "base", torch.bfloat16)
    shapes = _pair("l.0.q", 4, 20, 24) | {"emb.weight": (31, 24)}
    adapter = _adapter(tmp_path / "adapter", shapes)
    found = _merge(tmp_path, "--dtype", "float32")
    delta = (adapter["l.0.q.lora_B.weight"] @ adapter["l.0.q.lora_A.weight"]) * 1.5
    assert same_bytes(found["l.0.q.weight"], base["l.0.q.weight"].float() + delta)
    assert same_bytes(found["emb.weight"], adapter["emb.weight"])
    assert same_bytes(found["l.1.up.weight"], base["l.1.up.weight"].float())


def test_scales_keep_their_dtype_in_a_wider_merge(tmp_path: Path) -> None:
    """Codes and scales of other weights stay as they are stored."""
    _base(tmp_path / "base", torch.bfloat16)
    file = tmp_path / "base" / "model.safetensors"
    coded = {
        "l.1.down.weight": torch.randn(8, 16).to(torch.float8_e4m3fn),
        "l.1.down.weight_scale_inv": torch.rand(1, 1).bfloat16() + 0.1,
    }
    save_file({**load_file(file), **coded}, file, {"format": "pt"})
    _adapter(tmp_path / "adapter", _pair("l.0.q", 4, 20, 24))
    found = _merge(tmp_path, "--dtype", "float32")
    assert all(same_bytes(found[name], tensor) for name, tensor in coded.items())
    assert found["l.1.up.weight"].dtype is torch.float32


def test_dora_and_transposed_weights(tmp_path: Path) -> None:
    """Rows of the sum get their magnitudes; Conv1D keeps weights as [in, out]."""
    base = _base(tmp_path / "base")
    shapes = _pair("l.1.up", 4, 24, 40) | {"l.1.up.lora_magnitude_vector": (24,)}
    adapter = _adapter(tmp_path / "adapter", shapes, use_dora=True, fan_in_fan_out=True)
    found = _merge(tmp_path)["l.1.up.weight"]
    weight, delta = (
        base["l.1.up.weight"],
        (adapter["l.1.up.lora_B.weight"] @ adapter["l.1.up.lora_A.weight"]).T * 1.5,
    )
    norms = torch.linalg.norm(weight.T + delta.T, dim=1)
    factors = (adapter["l.1.up.lora_magnitude_vector"] / norms).view(1, -1)
    assert same_bytes(found, factors * (weight + delta))


def test_a_merge_says_what_it_cannot_hold(tmp_path: Path) -> None:
    """Finite values of a base in float16 that the adapter makes infinite are counted by weight."""
    _base(tmp_path / "base", torch.float16)
    adapter = {
        f"{ROOT}l.0.q.lora_A.weight": torch.ones(4, 24),
        f"{ROOT}l.0.q.lora_B.weight": torch.zeros(20, 4),
    }
    adapter[f"{ROOT}l.0.q.lora_B.weight"][:3] = 2.0**16
    (tmp_path / "adapter").mkdir()
    save_file(adapter, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(LORA))
    options = ConvertOptions(merge=str(tmp_path / "adapter"))
    report = convert(open_source(str(tmp_path / "base")), tmp_path / "out", "hf", options)
    (warning,) = (each for each in report.warnings if "infinite" in each)
    assert "l.0.q.weight (72 of 480" in warning and "l.1" not in warning


def test_embeddings_and_ia3(tmp_path: Path) -> None:
    """A LoRA of an embedding is the other way round; IA3 scales what comes in, or goes out with its bias."""
    base = _base(tmp_path / "base")
    adapter = _adapter(
        tmp_path / "adapter", {"emb.lora_embedding_A": (4, 31), "emb.lora_embedding_B": (24, 4)}
    )
    delta = (adapter["emb.lora_embedding_B"] @ adapter["emb.lora_embedding_A"]).T * 1.5
    assert same_bytes(_merge(tmp_path)["emb.weight"], base["emb.weight"] + delta)

    (tmp_path / "adapter").rename(tmp_path / "before")
    shapes = {"l.0.q.ia3_l": (20, 1), "l.1.up.ia3_l": (1, 24)}
    adapter = _adapter(tmp_path / "adapter", shapes, peft_type="IA3")
    found = _merge(tmp_path, "--overwrite")
    assert same_bytes(found["l.0.q.weight"], base["l.0.q.weight"] * adapter["l.0.q.ia3_l"])
    assert same_bytes(found["l.0.q.bias"], base["l.0.q.bias"] * adapter["l.0.q.ia3_l"].view(-1))
    assert same_bytes(found["l.1.up.weight"], base["l.1.up.weight"] * adapter["l.1.up.ia3_l"])


def test_a_base_whose_files_have_other_names(tmp_path: Path) -> None:
    """Rules lead to the names that the model has in memory, which are the adapter's, and back."""
    base = _base(tmp_path / "base")
    adapter = _adapter(tmp_path / "adapter", _pair("model.text.0.q", 4, 20, 24))
    args = ["merge-adapter", *(str(tmp_path / name) for name in ("base", "adapter", "out"))]
    assert "with --rules" in str(vescale_convert(*args).exception)
    rules = tmp_path / "rules.toml"
    rules.write_text('format = 1\nkeep_others = true\n[[prefix]]\nhf = "l."\nours = "model.text."\n')
    found = _merge(tmp_path, "--rules", str(rules))
    a, b = adapter["model.text.0.q.lora_A.weight"], adapter["model.text.0.q.lora_B.weight"]
    assert found.keys() == base.keys()
    assert same_bytes(found["l.0.q.weight"], base["l.0.q.weight"] + (b @ a) * 1.5)
    assert all(same_bytes(found[name], base[name]) for name in base.keys() - {"l.0.q.weight"})


def test_what_is_no_adapter(tmp_path: Path) -> None:
    """A checkpoint in its place, nothing at all, and settings that git-lfs has not fetched."""
    _base(tmp_path / "base")
    args = ["merge-adapter", str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "out")]
    refused = vescale_convert(*args)
    assert isinstance(refused.exception, VescaleError) and refused.exception.got == "none"
    shutil.copytree(tmp_path / "base", tmp_path / "adapter")
    refused = vescale_convert(*args)
    assert isinstance(refused.exception, VescaleError)
    assert refused.exception.got == "config.json, model.safetensors"
    assert "ADAPTER" in str(refused.exception.todo)
    shutil.rmtree(tmp_path / "adapter")
    _adapter(tmp_path / "adapter", _pair("l.0.q", 4, 20, 24))
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 77\n"
    (tmp_path / "adapter/adapter_config.json").write_text(pointer)
    assert "git-lfs" in str(vescale_convert(*args).exception)


def test_a_killed_merge_goes_on(tmp_path: Path) -> None:
    """By parts, the second of which finds the first done: the bytes of one run."""
    _base(tmp_path / "base")
    _adapter(tmp_path / "adapter", _pair("l.0.q", 4, 20, 24) | _pair("l.1.up", 4, 40, 24))
    whole = _merge(tmp_path)
    for part in ("0/2", "0/2", "1/2"):
        args = ["merge-adapter", *(str(tmp_path / name) for name in ("base", "adapter", "parts"))]
        more = ("--max-shard-size", "3000", "--part", part, "--resume")
        assert vescale_convert(*args, *more, catch_exceptions=False).exit_code == 0
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 2 and all(same_bytes(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("shapes", "config", "told"),
    [
        (_pair("l.9.q", 4, 24, 24), {}, r"a base with l\.9\.q\.weight"),
        (_pair("l.0.q", 3, 20, 24), {}, r"matrices \(4, 24\)"),
        (_pair("l.0.q", 4, 20, 40), {}, r"l\.0\.q: \(4, 40\)"),
        ({"l.0.q.lora_A.weight": (4, 24)}, {}, "A and B"),
        (_pair("l.0.q", 4, 20, 24), {"use_dora": True}, "A, B and magnitudes"),
        ({"l.0.q.bias": (25,)}, {}, r"l\.0\.q\.bias of shape \(20,\)"),
        ({"l.0.q.token_adapter.trainable_tokens_delta": (2, 2)}, {}, "token_adapter"),
        (_pair("l.0.q", 4, 20, 24), {"peft_type": "LOHA"}, "peft_type LOHA"),
        (_pair("l.0.q", 4, 20, 24), {"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        (_pair("l.0.q", 4, 20, 24), {"target_parameters": ["experts.w"]}, "target_parameters"),
        (_pair("l.0.q", 4, 20, 24), {"r": "four"}, "cannot be read"),
        ({"l.0.q.ia3_l": (7, 1)}, {"peft_type": "IA3"}, r"factors \(20, 1\)"),
    ],
)
def test_what_is_refused(tmp_path: Path, shapes: Any, config: Any, told: str) -> None:
    """Before a byte is written."""
    _base(tmp_path / "base")
    _adapter(tmp_path / "adapter", shapes, **config)
    with pytest.raises(ConversionError, match=told):
        convert(
            open_source(str(tmp_path / "base")),
            str(tmp_path / "out"),
            "hf",
            ConvertOptions(merge=str(tmp_path / "adapter")),
        )
    assert not (tmp_path / "out").exists()


TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize(
    "changes", ["embedding", "head", "lora of the embedding", "lora of the head", "both"]
)
def test_a_tied_weight_that_the_adapter_changes_is_parted(tmp_path: Path, changes: str) -> None:
    """The other name keeps the base's values, as in the model that was trained; the class, asked by `from_pretrained`,
    takes both. An adapter that changes both names alike leaves them tied."""
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY_LLAMA))
    base.save_pretrained(tmp_path / "base")
    old = base.model.embed_tokens.weight.detach().clone()
    embed, head = EMBED.removesuffix(".weight"), HEAD.removesuffix(".weight")
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": {EMBED: (31, 24)},
        "head": {HEAD: (31, 24)},
        "lora of the embedding": {f"{embed}.lora_embedding_A": (4, 31), f"{embed}.lora_embedding_B": (24, 4)},
        "lora of the head": _pair(head, 4, 31, 24),
        "both": {EMBED: (31, 24), HEAD: (31, 24)},
    }[changes]
    adapter = _adapter(tmp_path / "adapter", shapes)
    if changes == "both":
        same = {ROOT + name: adapter[EMBED] for name in adapter}
        save_file({n: t.clone() for n, t in same.items()}, tmp_path / "adapter/adapter_model.safetensors")
    _merge(tmp_path)
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    delta = {name: old.clone() for name in (EMBED, HEAD)}
    if changes in ("embedding", "both"):
        delta[EMBED] = adapter[EMBED]
    if changes == "head":
        delta[HEAD] = adapter[HEAD]
    if changes == "both":
        delta[HEAD] = adapter[EMBED]
    if changes == "lora of the embedding":
        delta[EMBED] = (
            old + (adapter[f"{embed}.lora_embedding_B"] @ adapter[f"{embed}.lora_embedding_A"]).T * 1.5
        )
    if changes == "lora of the head":
        delta[HEAD] = old + adapter[f"{head}.lora_B.weight"] @ adapter[f"{head}.lora_A.weight"] * 1.5
    state = found.state_dict()
    assert all(same_bytes(state[name], value) for name, value in delta.items())
    is_tied = found.lm_head.weight is found.model.embed_tokens.weight
    assert is_tied == (changes == "both") == found.config.tie_word_embeddings


@pytest.mark.parametrize("said", [False, True])
def test_each_module_says_which_way_its_weight_lies(tmp_path: Path, said: bool) -> None:
    """GPT-2 has Conv1D ([in, out]), square ones too, and a Linear head: `fan_in_fan_out` holds for neither of all."""
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, n_positions=8, vocab_size=16, tie_word_embeddings=False
    )
    base = transformers.GPT2LMHeadModel(config)
    base.save_pretrained(tmp_path / "base")
    conv, head = "transformer.h.0.attn.c_proj", "lm_head"
    adapter = _adapter(
        tmp_path / "adapter", _pair(conv, 4, 16, 16) | _pair(head, 4, 16, 16), fan_in_fan_out=said
    )
    _merge(tmp_path)
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").state_dict()
    for module in (conv, head):
        delta = adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"] * 1.5
        expected = base.state_dict()[f"{module}.weight"] + (delta.T if module == conv else delta)
        assert same_bytes(found[f"{module}.weight"], expected)


def test_a_square_weight_of_an_unknown_class(tmp_path: Path) -> None:
    """It could be either: refused before anything is written."""
    _base(tmp_path / "base")
    save_file({"l.0.o.weight": torch.ones(24, 24)}, tmp_path / "base/model.safetensors", {"format": "pt"})
    _adapter(tmp_path / "adapter", _pair("l.0.o", 4, 24, 24))
    args = ["merge-adapter", *(str(tmp_path / name) for name in ("base", "adapter", "out"))]
    assert isinstance(vescale_convert(*args).exception, ConversionError)
    assert not (tmp_path / "out").exists()


class _Lora(nn.Module):
    """A layer with two adapters under the names that peft gives them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.base_layer = nn.Linear(24, 24)
        self.lora_A = nn.ModuleDict({name: nn.Linear(24, 4, bias=False) for name in names})
        self.lora_B = nn.ModuleDict({name: nn.Linear(4, 24, bias=False) for name in names})


def _wrapped(*names: str) -> nn.Module:
    model, inner = nn.Module(), nn.Module()
    inner.model = nn.Module()
    inner.model.q = _Lora(names or ("default",))
    model.base_model = inner
    return model


def test_an_adapter_is_exported_with_its_config(tmp_path: Path) -> None:
    """The adapter of a training state alone, its config beside it; of several the one that is named."""
    assets = tmp_path / "assets"
    expected = _adapter(assets, _pair("q", 4, 24, 24))
    for names in (("default",), ("a", "b")):
        model = _wrapped(*names)
        for name in names:
            model.base_model.model.q.lora_A[name].weight.data = expected["q.lora_A.weight"] * (name != "b")
            model.base_model.model.q.lora_B[name].weight.data = expected["q.lora_B.weight"]
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / names[0], no_dist=True)
        args = ["to-hf", str(tmp_path / names[0]), str(tmp_path / f"out-{names[0]}"), "--adapter"]
        more = ["--adapter-name", "a"] if "a" in names else []
        refused = vescale_convert(*args, *more)
        assert "adapter_config.json" in str(refused.exception)
        if more:
            refused = vescale_convert(*args, "--assets", str(assets))
            assert "--adapter-name" in str(refused.exception)
        assert vescale_convert(*args, *more, "--assets", str(assets)).exit_code == 0
        out = tmp_path / f"out-{names[0]}"
        assert sorted(file.name for file in out.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        assert (out / "adapter_config.json").read_bytes() == (assets / "adapter_config.json").read_bytes()
        found = load_file(out / "adapter_model.safetensors")
        assert found.keys() == {ROOT + name for name in expected}
        assert all(same_bytes(found[ROOT + name], tensor) for name, tensor in expected.items())


def test_export_with_the_config_of_another(tmp_path: Path) -> None:
    """A rank that the matrices do not have; and an adapter is no model."""
    _adapter(tmp_path / "adapter", _pair("q", 4, 24, 24))
    _adapter(tmp_path / "other", _pair("q", 8, 24, 24), r=8)
    source = open_source(str(tmp_path / "adapter"))
    assert source.kind == "adapter"
    options = ConvertOptions(assets=str(tmp_path / "other"))
    with pytest.raises(ConversionError, match=r"\b4\b.*\bbase_model(.|\n)*\b8\b"):
        convert(source, str(tmp_path / "out"), "adapter", options)
    with pytest.raises(ConversionError, check=lambda error: option("merge", source.url) in error.todo):
        convert(source, str(tmp_path / "out"), "hf")


def _load_and_save(folder: str, out: str) -> list[float]:
    model = _wrapped()
    before = model.base_model.model.q.base_layer.weight.detach().clone()
    fully_shard(model)
    report = load(folder, model, source=SourceOptions())
    assert report.missing == () and report.unexpected == ()
    save(out, {"model": model})
    layer = model.base_model.model.q
    kept = torch.equal(layer.base_layer.weight.full_tensor(), before)
    return [layer.lora_B["default"].weight.full_tensor().sum().item(), float(kept)]


def test_into_a_sharded_model_and_back(tmp_path: Path) -> None:
    """A folder, a native checkpoint of all, the folder again; and of an adapter made native."""
    expected = _adapter(tmp_path / "adapter", _pair("q", 4, 24, 24))
    convert(open_source(str(tmp_path / "adapter")), str(tmp_path / "native"), "native")
    for name in ("adapter", "native"):
        found = run_ranks(2, _load_and_save, str(tmp_path / name), str(tmp_path / f"run-{name}"))
        total = expected["q.lora_B.weight"].sum().item()
        assert all(rank == [pytest.approx(total, abs=1e-4), 1.0] for rank in found)
        options = ConvertOptions(assets=str(tmp_path / "adapter"))
        convert(
            open_source(str(tmp_path / f"run-{name}")), str(tmp_path / f"back-{name}"), "adapter", options
        )
        back = load_file(tmp_path / f"back-{name}" / "adapter_model.safetensors")
        assert back.keys() == {ROOT + each for each in expected}
        assert all(same_bytes(back[ROOT + each], tensor) for each, tensor in expected.items())


# Config of the adapter -> name in a folder -> (name in training, shape), of what peft itself writes: see tests/stacks.
KINDS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]] = {
    "fused experts": (
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "r": 4},
        {
            "experts.base_layer.lora_A.weight": ("experts.base_layer.lora_A.{}.weight", (12, 5)),
            "experts.lora_A.weight": ("experts.lora_A.{}.weight", (12, 6)),
            "experts.lora_B.weight": ("experts.lora_B.{}.weight", (5, 12)),
        },
    ),
    "tokens beside LoRA": (
        {"trainable_token_indices": [1, 5], "r": 4},
        {
            "emb.token_adapter.trainable_tokens_delta": (
                "emb.token_adapter.trainable_tokens_delta.{}",
                (2, 8),
            ),
            "q.lora_A.weight": ("q.lora_A.{}.weight", (4, 8)),
        },
    ),
    "tokens": (
        {"peft_type": "TRAINABLE_TOKENS"},
        {"emb.trainable_tokens_delta": ("emb.trainable_tokens_delta.{}", (2, 8))},
    ),
    "PiSSA": ({"init_lora_weights": "pissa"}, {"q.lora_B.weight": ("q.lora_B.{}.weight", (8, 4))}),
    "OLoRA": ({"init_lora_weights": "olora"}, {"q.lora_B.weight": ("q.lora_B.{}.weight", (8, 4))}),
    "replicated layers": (
        {"layer_replication": [[0, 1], [0, 2]]},
        {"q.lora_B.weight": ("q.lora_B.{}.weight", (8, 4))},
    ),
    "biases, DoRA, a whole module": (
        {"bias": "all", "use_dora": True},
        {
            "q.lora_magnitude_vector": ("q.lora_magnitude_vector.{}.weight", (8,)),
            "q.lora_A.weight": ("q.lora_A.{}.weight", (4, 8)),
            "q.base_layer.bias": ("q.base_layer.bias", (8,)),
            "up.bias": ("up.bias", (3,)),
            "head.weight": ("head.modules_to_save.{}.weight", (9, 8)),
        },
    ),
}
_OF_BASE = {
    "q.base_layer.weight": torch.full((8, 8), 7.0),
    "head.original_module.weight": torch.full((9, 8), 7.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_that_is_copied_comes_out_and_back(kind: str, tmp_path: Path) -> None:
    """Of two adapters in a training state the one that is named; a folder without peft's prefix is the same folder."""
    config, names = KINDS[kind]
    assets = tmp_path / "assets"
    stored = _adapter(assets, {name: shape for name, (_, shape) in names.items()}, **config)
    in_training = {
        ROOT + name.format(adapter): stored[saved] * (adapter == "a" or "{}" not in name)
        for saved, (name, _) in names.items()
        for adapter in ("a", "b")
    } | {ROOT + name: value for name, value in _OF_BASE.items()}
    save(tmp_path / "run", {"model": in_training})
    out = tmp_path / "out"
    convert(
        open_source(str(tmp_path / "run")),
        str(out),
        "adapter",
        ConvertOptions(assets=str(assets), adapter_name="a"),
    )
    found = load_file(out / "adapter_model.safetensors")
    assert found.keys() == {ROOT + name for name in stored}
    assert all(same_bytes(found[ROOT + name], value) for name, value in stored.items())
    bare = tmp_path / "bare"
    shutil.copytree(out, bare)
    save_file(stored, bare / "adapter_model.safetensors")
    for folder, prefix in ((out, ROOT), (bare, ROOT), (out, ""), (bare, "")):
        state = {
            name.removeprefix(ROOT) if not prefix else name: value * 0 for name, value in in_training.items()
        }
        with pytest.raises(ConversionError, check=lambda error: "adapter_name" in str(error.todo)):
            load(folder, {"model": state})
        load(folder, {"model": state}, source=SourceOptions(adapter_name="a"))
        for saved, (name, _) in names.items():
            assert same_bytes(state[prefix + name.format("a")], stored[saved])
            assert "{}" not in name or not state[prefix + name.format("b")].any()
        assert not any(state[prefix + name].any() for name in _OF_BASE)


def test_what_an_export_and_a_load_of_an_adapter_refuse(tmp_path: Path) -> None:
    """Kinds whose tensors have names that are not known; an adapter that the model lacks; a name for no adapter."""
    _adapter(tmp_path / "loha", {"q.hada_w1_a": (8, 4)}, peft_type="LOHA")
    options = ConvertOptions(assets=str(tmp_path / "loha"))
    with pytest.raises(ConversionError, check=lambda error: error.got == "peft_type LOHA"):
        convert(open_source(str(tmp_path / "loha")), str(tmp_path / "out"), "adapter", options)
    _adapter(tmp_path / "lora", _pair("q", 4, 24, 24))
    state = _wrapped().state_dict()
    for folder, model in (("lora", state), ("base", state)):
        if folder == "base":
            save_file({"q.weight": torch.ones(24, 24)}, tmp_path / "base.safetensors")
            folder = "base.safetensors"
        with pytest.raises(ConversionError, check=lambda error: "adapter" in error.problem):
            load(tmp_path / folder, model, source=SourceOptions(adapter_name="c"))
    smaller = {name: value for name, value in state.items() if "lora_A" not in name}
    with pytest.raises(CheckpointError, check=lambda error: "lora_A" in str(error.got)):
        load(tmp_path / "lora", smaller)  # else a matrix of the folder would be left out
