"""Key rules: bits against plain torch operations, both ways, streamed in small parts; and every check."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests.dtype_zoo import same_bytes
from vescale_fsdp.conversion.box_maps import (
    ConcatView,
    IndexView,
    InterleaveView,
    PadView,
    PermuteView,
    ReshapeView,
    SliceView,
    StackView,
)
from vescale_fsdp.conversion.convert import ConvertOptions, ConvertReport, convert
from vescale_fsdp.conversion.copying import CopyLimits
from vescale_fsdp.conversion.dtypes import dtype_from_torch
from vescale_fsdp.conversion.execution import RunOptions
from vescale_fsdp.conversion.expressions import evaluate
from vescale_fsdp.conversion.key_rules import Pattern, load_rules, shipped_rules
from vescale_fsdp.conversion.open_source import open_source
from vescale_fsdp.conversion.source import Source
from vescale_fsdp.conversion.tensors import TensorInfo
from vescale_fsdp.conversion.view import TensorView, read_range
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.geometry import Box


class _Array(TensorView):
    """A tensor in memory."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array.astype(np.int32)

    @property
    def info(self) -> TensorInfo:
        return TensorInfo("x", self._array.shape, dtype_from_torch("int32"))

    def read_into(self, box: Box, out: np.ndarray) -> None:
        index: tuple[Any, ...] = (*box.slices(), ...)
        out[...] = self._array[index].view(out.dtype)

    def sources(self) -> Iterator[tuple[Source, str]]:
        return iter(())

    def identity(self) -> str:
        return "array"


def _count(*shape: int) -> np.ndarray:
    return np.arange(int(np.prod(shape))).reshape(shape)


A, B = _count(6, 8), _count(6, 8) + 1000
VIEWS: dict[str, tuple[TensorView, np.ndarray]] = {
    "concat 0": (ConcatView((_Array(A), _Array(B[:2])), 0), np.concatenate([A, B[:2]])),
    "concat 1": (ConcatView((_Array(A), _Array(B)), 1), np.concatenate([A, B], 1)),
    "slice": (SliceView(_Array(A), 1, 3, 4), A[:, 3:7]),
    "stack 0": (StackView((_Array(A), _Array(B)), 0), np.stack([A, B])),
    "stack 1": (StackView((_Array(A), _Array(B)), 1), np.stack([A, B], 1)),
    "stack of scalars": (StackView((_Array(np.array(3)), _Array(np.array(4))), 0), np.array([3, 4])),
    "index": (IndexView(_Array(_count(3, 4, 5)), 1, 2), _count(3, 4, 5)[:, 2]),
    "permute": (PermuteView(_Array(_count(3, 4, 5)), (2, 0, 1)), _count(3, 4, 5).transpose(2, 0, 1)),
    "reshape": (ReshapeView(_Array(_count(3, 4, 5)), (6, 10)), _count(6, 10)),
    "reshape of permuted": (
        ReshapeView(PermuteView(_Array(_count(3, 4, 5)), (1, 0, 2)), (2, 30)),
        _count(3, 4, 5).transpose(1, 0, 2).reshape(2, 30),
    ),
    "permute of reshape": (
        PermuteView(ReshapeView(_Array(_count(12, 5)), (3, 4, 5)), (2, 1, 0)),
        _count(3, 4, 5).transpose(2, 1, 0),
    ),
    "interleave": (
        InterleaveView(_Array(_count(12, 3)), 0, 1, 2),
        _count(12, 3).reshape(2, 6, 3).swapaxes(0, 1).reshape(12, 3),
    ),
    "interleave back in groups": (
        InterleaveView(_Array(_count(3, 24)), 1, 2, 3, back=True),
        _count(3, 24).reshape(3, 2, 4, 3).swapaxes(2, 3).reshape(3, 24),
    ),
    "interleave in groups": (
        InterleaveView(_Array(_count(24, 3)), 0, 2, 3),
        _count(24, 3).reshape(2, 3, 4, 3).swapaxes(1, 2).reshape(24, 3),
    ),
    "interleave back": (
        InterleaveView(_Array(_count(12, 3)), 0, 1, 2, back=True),
        _count(12, 3).reshape(6, 2, 3).swapaxes(0, 1).reshape(12, 3),
    ),
    "pad": (PadView(_Array(A), 0, 9), np.pad(A, ((0, 3), (0, 0)))),
    "pad 1": (PadView(_Array(A), 1, 11), np.pad(A, ((0, 0), (0, 3)))),
}


@pytest.mark.parametrize("name", VIEWS)
def test_any_range_of_a_view_is_that_of_the_array(name: str) -> None:
    """Every flat range of every view equals numpy's, so cutting a tensor anywhere changes nothing."""
    view, expected = VIEWS[name]
    assert view.info.shape == expected.shape
    buffer = np.empty(4 * expected.size, dtype=np.uint8)
    for start in range(expected.size):
        for stop in range(start + 1, expected.size + 1):
            buffer.fill(0xEE)
            found = read_range(view, start, stop, buffer).view(np.int32)
            assert np.array_equal(found, expected.reshape(-1)[start:stop]), (start, stop)


@pytest.mark.parametrize("name", VIEWS)
def test_any_box_of_a_view_is_that_of_the_array(name: str) -> None:
    """Boxes too, into an array with strides of its own."""
    view, expected = VIEWS[name]
    rng = np.random.default_rng(0)
    for _ in range(50):
        offsets = tuple(int(rng.integers(0, n)) for n in expected.shape)
        sizes = tuple(int(rng.integers(1, n - o + 1)) for n, o in zip(expected.shape, offsets, strict=True))
        box = Box(offsets, sizes)
        out = np.empty(sizes[::-1], dtype=np.uint32).T
        view.read_into(box, out)
        assert np.array_equal(out.view(np.int32), expected[box.slices()])


@pytest.mark.parametrize("back", [False, True])
def test_a_small_part_of_a_large_group_reads_little(back: bool) -> None:
    """Interleaving the halves of a whole tensor must not read it whole for every part of it."""
    asked: list[int] = []

    class Counting(_Array):
        def read_into(self, box: Box, out: np.ndarray) -> None:
            asked.append(box.numel)
            super().read_into(box, out)

    view = InterleaveView(Counting(_count(1000, 4)), 0, 1, 2, back)
    view.read_into(Box((300, 0), (10, 4)), np.empty((10, 4), dtype=np.uint32))
    assert 40 <= sum(asked) <= 80


def test_expressions() -> None:
    """Arithmetic over config values; alternatives; and nothing else."""
    config = {"hidden": 96, "heads": 4, "flag": True, "name": "x"}
    lets = {"kv": "num_kv ?? heads", "hd": "head_dim ?? hidden / heads", "loop": "loop"}
    assert evaluate("kv * hd", lets, config) == 96
    assert evaluate("(kv + 2) * hd // 5 - 1", lets, config) == 27
    assert evaluate(7, lets, config) == 7
    bad = (
        "hidden / 5",
        "missing",
        "flag",
        "name",
        "__import__('os')",
        "hidden ** 2",
        "1 - 2",
        "loop",
        "1 / 0",
        "(",
    )
    for text in bad:
        with pytest.raises(ConversionError, match="no value"):
            evaluate(text, lets, config)


def test_patterns() -> None:
    """Captures are whole numbers without leading zeros; a name twice must be the same number."""
    pattern = Pattern("layers.{l}.experts.{e}.w")
    assert pattern.match("layers.3.experts.12.w") == {"l": 3, "e": 12}
    assert pattern.match("layers.x.experts.12.w") is None and pattern.match("layers.03.experts.1.w") is None
    assert pattern.fill({"l": 3, "e": 12}) == "layers.3.experts.12.w"
    assert Pattern("a.{i}.b.{i}").match("a.1.b.2") is None


def _convert(source: Path, target: Path, kind: str, **options: Any) -> ConvertReport:
    run = RunOptions(limits=CopyLimits(memory_budget_bytes=4 * 2**20, threads=2))
    return convert(open_source(str(source)), str(target), kind, ConvertOptions(**options, run=run))


CONFIG = {
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 10,
    "moe_intermediate_size": 10,
    "num_experts": 3,
    "n_routed_experts": 3,
    "num_local_experts": 3,
}


def _hf_folder(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return path


def _llama() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"model.embed_tokens": (11, 24), "model.norm": (24,), "lm_head": (11, 24)}
    for layer in range(2):
        p = f"model.layers.{layer}."
        shapes |= {p + "self_attn.q_proj": (24, 24), p + "self_attn.o_proj": (24, 24)}
        shapes |= {p + f"self_attn.{x}_proj": (8, 24) for x in "kv"}
        shapes |= {p + f"mlp.{x}_proj": (10, 24) for x in ("gate", "up")} | {p + "mlp.down_proj": (24, 10)}
        shapes |= {p + "input_layernorm": (24,), p + "post_attention_layernorm": (24,)}
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def test_llama_to_torchtitan_and_back(tmp_path: Path) -> None:
    """RoPE rows move per head, with the number of kv heads for k; the way back gives the same file."""
    tensors = _llama()
    source = _hf_folder(tmp_path / "hf", tensors)
    _convert(source, tmp_path / "dcp", "dcp", rules="torchtitan-llama", prefix="")
    wk = "layers.1.attention.qkv_linear.wk.weight"
    state = {wk: torch.empty(8, 24), "tok_embeddings.weight": torch.empty(11, 24)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    k = tensors["model.layers.1.self_attn.k_proj.weight"]
    pairs = k.view(2, 2, 2, 24).transpose(1, 2).reshape(8, 24)  # 2 kv heads of 4 rows: halves -> pairs
    assert torch.equal(state[wk], pairs)
    assert torch.equal(state["tok_embeddings.weight"], tensors["model.embed_tokens.weight"])
    report = _convert(tmp_path / "dcp", tmp_path / "back", "hf", rules="torchtitan-llama", assets=str(source))
    ours, theirs = (tmp_path / p / "model.safetensors" for p in ("back", "hf"))
    assert ours.read_bytes() == theirs.read_bytes()
    assert report.dropped_others == ()


def test_a_tied_weight_is_made_from_its_twin(tmp_path: Path) -> None:
    """Hugging Face leaves lm_head out if tied: torchtitan's output is made of the embedding, and goes
    again."""
    tensors = _llama()
    del tensors["lm_head.weight"]
    source = _hf_folder(tmp_path / "hf", tensors, tie_word_embeddings=True)
    _convert(source, tmp_path / "a.pt", "torch", rules="torchtitan-llama")
    made = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(made["lm_head.weight"], tensors["model.embed_tokens.weight"])
    _convert(tmp_path / "a.pt", tmp_path / "back", "hf", rules="torchtitan-llama", assets=str(source))
    assert "lm_head.weight" not in load_file(tmp_path / "back" / "model.safetensors")


def _experts(path: str, gate: str, up: str, down: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    found = {"model.embed_tokens.weight": torch.randn(11, 24)}
    for layer in range(2):
        for e in range(3):
            p = f"model.layers.{layer}.{path}.experts.{e}."
            found |= {f"{p}{gate}.weight": torch.randn(10, 24), f"{p}{up}.weight": torch.randn(10, 24)}
            found[f"{p}{down}.weight"] = torch.randn(24, 10)
        found[f"model.layers.{layer}.{path}.gate.weight"] = torch.randn(3, 24)
    return found


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ("transformers-moe", ("mlp", "gate_proj", "up_proj", "down_proj")),
        ("transformers-mixtral", ("block_sparse_moe", "w1", "w3", "w2")),
    ],
)
def test_experts_grouped_and_taken_apart(tmp_path: Path, rules: str, names: tuple[str, ...]) -> None:
    """Per-expert tensors <-> the grouped ones transformers 5 holds in memory."""
    tensors = _experts(*names)
    source = _hf_folder(tmp_path / "hf", tensors)
    _convert(source, tmp_path / "a.pt", "torch", rules=rules)
    made = torch.load(tmp_path / "a.pt", weights_only=True)
    path, gate, up, down = names
    p = f"model.layers.1.{path}.experts."
    fused = [torch.cat([tensors[f"{p}{e}.{gate}.weight"], tensors[f"{p}{e}.{up}.weight"]]) for e in range(3)]
    assert torch.equal(made["model.layers.1.mlp.experts.gate_up_proj"], torch.stack(fused))
    stacked = torch.stack([tensors[f"{p}{e}.{down}.weight"] for e in range(3)])
    assert torch.equal(made["model.layers.1.mlp.experts.down_proj"], stacked)
    assert "model.layers.1.mlp.gate.weight" in made and len(made) == 7
    _convert(tmp_path / "a.pt", tmp_path / "back", "hf", rules=rules, assets=str(source))
    ours, theirs = (tmp_path / q / "model.safetensors" for q in ("back", "hf"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("name", shipped_rules())
def test_shipped_rules_invert(tmp_path: Path, name: str) -> None:
    """A model made to fit every pattern of a shipped file goes to the other side and back, bit for bit."""
    rules = load_rules(name)
    torch.manual_seed(2)
    tensors: dict[str, torch.Tensor] = {}
    for rule in rules.rules:
        for pattern in rule.hf:
            for layer in range(2 if "l" in pattern.names else 1):
                for e in range(3 if rule.over else 1):
                    key = pattern.fill({"l": layer, "e": e})
                    is_3d = "gpt-oss" in name and "experts" in key and "bias" not in key
                    down = any(part in key for part in ("down_proj", ".w2."))
                    shape = (
                        (3, 10, 20)
                        if is_3d
                        else (24, 10)
                        if down
                        else (10, 24)
                        if "experts" in key
                        else (24, 24)
                    )
                    tensors[key] = torch.randn(shape)
    source = _hf_folder(tmp_path / "hf", tensors)
    _convert(source, tmp_path / "ours.pt", "torch", rules=name)
    ours = torch.load(tmp_path / "ours.pt", weights_only=True)
    made = [p for rule in rules.rules for p in rule.ours] + [zeros.ours for zeros in rules.zeros]
    assert len(ours) == sum((2 if "l" in p.names else 1) for p in made)
    for zeros in rules.zeros:
        assert same_bytes(ours[zeros.ours.fill({"l": 1})], torch.zeros(3))
    _convert(tmp_path / "ours.pt", tmp_path / "back", "hf", rules=name, assets=str(source))
    left, right = (tmp_path / p / "model.safetensors" for p in ("back", "hf"))
    assert left.read_bytes() == right.read_bytes()


@pytest.mark.parametrize("flat", [False, True])
def test_moments_follow_their_parameters(tmp_path: Path, flat: bool) -> None:
    """Optimizer state takes the same rules, steps and groups the new names, nested and flattened."""
    source = _hf_folder(tmp_path / "hf", _llama())
    _convert(source, tmp_path / "ours.pt", "torch", rules="torchtitan-llama")
    model = torch.load(tmp_path / "ours.pt", weights_only=True)
    moments = {name: torch.randn_like(value) for name, value in model.items()}
    if flat:
        optimizer: dict[str, Any] = {}
        for name in model:
            optimizer |= {f"state.{name}.exp_avg": moments[name], f"state.{name}.step": torch.tensor(5.0)}
            optimizer[f"param_groups.{name}.lr"] = 0.5
    else:
        state = {name: {"exp_avg": moments[name], "step": torch.tensor(5.0)} for name in model}
        optimizer = {"state": state, "param_groups": [{"lr": 0.5, "params": list(model)}]}
    dcp.save(
        {"model": model, "optimizer": optimizer, "epoch": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    options = {"rules": "torchtitan-llama", "rules_to": "hf", "assets": str(source)}
    _convert(tmp_path / "dcp", tmp_path / "out.pt", "torch", **options)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert sorted(loaded["model"]) == sorted(_llama()) and loaded["epoch"] == 3
    key = "model.layers.0.self_attn.q_proj.weight"
    expected = (
        moments["layers.0.attention.qkv_linear.wq.weight"].view(6, 2, 2, 24).transpose(1, 2).reshape(24, 24)
    )
    if flat:
        assert torch.equal(loaded["optimizer"][f"state.{key}.exp_avg"], expected)
        assert (
            loaded["optimizer"][f"state.{key}.step"] == 5
            and loaded["optimizer"][f"param_groups.{key}.lr"] == 0.5
        )
        assert len(loaded["optimizer"]) == 3 * len(model)
    else:
        assert torch.equal(loaded["optimizer"]["state"][key]["exp_avg"], expected)
        assert loaded["optimizer"]["state"][key]["step"] == 5
        (group,) = loaded["optimizer"]["param_groups"]
        assert group["lr"] == 0.5 and sorted(group["params"]) == sorted(_llama())


def test_moments_of_experts_are_taken_apart_and_grouped(tmp_path: Path) -> None:
    """Moments of a grouped tensor go to its experts, every one with its step and options; grouped again they are the
    same state."""
    source = _hf_folder(tmp_path / "hf", _experts("mlp", "gate_proj", "up_proj", "down_proj"))
    _convert(source, tmp_path / "grouped.pt", "torch", rules="transformers-moe")
    model = torch.load(tmp_path / "grouped.pt", weights_only=True)
    moments = {name: torch.randn_like(value) for name, value in model.items()}
    state = {name: {"exp_avg": moments[name], "step": torch.tensor(4.0)} for name in model}
    optimizer = {"state": state, "param_groups": [{"lr": 0.5, "params": list(model)}]}
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    options = {"rules": "transformers-moe", "assets": str(source)}
    _convert(tmp_path / "dcp", tmp_path / "apart.pt", "torch", rules_to="hf", **options)
    apart = torch.load(tmp_path / "apart.pt", weights_only=True)
    prefix = "model.layers.1.mlp.experts."
    up = apart["optimizer"]["state"][f"{prefix}2.up_proj.weight"]
    assert same_bytes(up["exp_avg"], moments[f"{prefix}gate_up_proj"][2, 10:]) and up["step"] == 4
    assert len(apart["model"]) == len(apart["optimizer"]["state"]) == 2 * (3 * 3 + 1) + 1
    assert sorted(apart["optimizer"]["param_groups"][0]["params"]) == sorted(apart["model"])
    _convert(tmp_path / "apart.pt", tmp_path / "again.pt", "torch", rules_to="ours", **options)
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert sorted(again["optimizer"]["param_groups"][0]["params"]) == sorted(model)
    for name, value in state.items():
        assert same_bytes(again["model"][name], model[name])
        assert same_bytes(again["optimizer"]["state"][name]["exp_avg"], value["exp_avg"])
        assert again["optimizer"]["state"][name]["step"] == 4


def test_counters_of_parameters_of_one_item(tmp_path: Path) -> None:
    """A parameter with a single item (a scale) is no reason to take steps for moments, nor moments for steps."""
    weights = {"scale": torch.ones(1), "w": torch.ones(3)}
    state = {name: {"exp_avg": torch.rand_like(w), "step": torch.tensor(5.0)} for name, w in weights.items()}
    for number, kept in enumerate((["scale", "w"], ["scale"])):
        mine = {name: state[name] for name in kept}
        folder = tmp_path / str(number)
        dcp.save({"model": weights, "optimizer": {"state": mine}}, checkpoint_id=folder, no_dist=True)
        rules = 'format = 1\nkeep_others = true\n[[rule]]\nhf = "scale"\nours = "s"\n'
        (tmp_path / "r.toml").write_text(rules)
        options = {"rules": str(tmp_path / "r.toml"), "rules_to": "ours"}
        _convert(folder, tmp_path / f"{number}.pt", "torch", **options)
        made = torch.load(tmp_path / f"{number}.pt", weights_only=True)["optimizer"]["state"]
        assert sorted(made) == ["s", "w"][: len(kept)]
        assert same_bytes(made["s"]["exp_avg"], state["scale"]["exp_avg"]) and made["s"]["step"] == 5


def test_state_that_cannot_follow_is_refused(tmp_path: Path) -> None:
    """Row-factored state is not guessed at."""
    source = _hf_folder(tmp_path / "hf", _llama())
    state = {name: {"row": torch.ones(value.shape[0], 1)} for name, value in _llama().items()}
    dcp.save({"model": _llama(), "optimizer": {"state": state}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(ConversionError, match="does not follow"):
        _convert(tmp_path / "dcp", tmp_path / "x.pt", "torch", rules="torchtitan-llama", assets=str(source))


RULES = """
format = 1
[[rule]]
hf = ["a.{l}.q", "a.{l}.k"]
ours = "b.{l}.qk"
ops = [{ concat = { dim = 0, sizes = ["4", "2"] } }]
"""
THREE = """
format = 1
[[rule]]
hf = ["a", "b", "c"]
ours = "d"
ops = [{ rope = { heads = [1, 0] } }, { concat = { dim = 0, sizes = [2, 2, 2] } }]
"""


@pytest.mark.parametrize(
    ("names", "rules", "text"),
    [
        ({"a.0.q": 4, "a.0.k": 2, "other": 1}, RULES, "none for other"),
        ({"a.0.q": 4, "a.0.k": 2, "a.1.q": 4}, RULES, r"only a\.1\.q"),
        ({"a.0.q": 4, "a.0.k": 3}, RULES, "size that the rule says"),
        ({"c": 1}, RULES + '[[rule]]\nhf = "c"\nours = "d"\n', r"nothing matches a\.\{l\}\.q"),
        ({"a.0.q": 4, "a.0.k": 2}, RULES + '[[rule]]\nhf = "a.{x}.q"\nours = "z.{x}"\n', "two for a.0.q"),
        (
            {"c": 1, "e": 1},
            'format = 1\n[[rule]]\nhf="c"\nours="d"\n[[rule]]\nhf="e"\nours="d"\n',
            "made twice",
        ),
        ({"c": 1}, 'format = 1\n[[rule]]\nhf="c.{l}"\nours="d"\n', "do not fit together"),
        ({"c": 1}, 'format = 1\n[[rule]]\nhf="c"\nours="d"\nops=[{exec="x"}]\n', "does not exist"),
        ({"c": 1}, "format = 2\n", "format = 1"),
        ({"c": 1}, "format = 1\n[[rules]]\n", "the tables"),
        ({"c": 1}, "not toml", "cannot be read"),
        ({"a.0.q": 4, "a.0.k": 2}, RULES.replace('"2"', '"kv_rows"'), "kv_rows"),
        ({"a.0.q": 4, "a.0.k": 2}, RULES.replace('["4", "2"]', '["4"]'), "2 names"),
        ({"c": 1}, 'format = 1\nextends = "nothing"\n', "extends = one of"),
        ({"c": 1}, 'format = 1\n[rename]\n"a" = "b"\n', "extends = one of"),
        ({"c": 1}, 'format = 1\nextends = "torchtitan-llama"\n[rename]\n"wq" = "b"\n', r"wq(.|\n)*rename"),
        ({"c": 3}, 'format = 1\n[[rule]]\nhf="c"\nours="d"\nops=[{rope={heads="1"}}]\n', "multiple of 1 x 2"),
        ({"a": 2, "b": 2, "c": 2}, THREE, "fewer tensors"),
        (
            {"c": 6},
            'format = 1\n[[rule]]\nhf="c"\nours="d"\nops=[{reshape={hf=[6, 2], ours=[5, 2]}}]\n',
            "shape",
        ),
        (
            {"c": 3},
            'format = 1\n[[rule]]\nhf="c"\nours="d"\nops=[{reshape={hf=[2, 3], ours=[6]}}]\n',
            "after undoing",
        ),
        (
            {"c": 6},
            'format = 1\n[[rule]]\nhf="c"\nours="d"\nops=[{pad={dim=0, from=5, to=8}}]\n',
            "5 in dim 0",
        ),
    ],
)
def test_rules_that_do_not_fit(tmp_path: Path, names: dict[str, int], rules: str, text: str) -> None:
    """Unused keys and rules, incomplete groups, wrong sizes, doubles and bad files: named before a byte
    moves."""
    source = _hf_folder(tmp_path / "hf", {name: torch.ones(size, 2) for name, size in names.items()})
    (tmp_path / "r.toml").write_text(rules)
    with pytest.raises(ConversionError, match=text):
        _convert(source, tmp_path / "out.pt", "torch", rules=str(tmp_path / "r.toml"))
    assert not (tmp_path / "out.pt").exists()


FUSED = """
format = 1
extends = "torchtitan-llama"
[rename]
"norm.weight" = "final_norm.weight"
[let]
hd = "head_dim ?? hidden_size / num_attention_heads"
[[rule]]
hf = [
    "model.layers.{l}.self_attn.q_proj.weight",
    "model.layers.{l}.self_attn.k_proj.weight",
    "model.layers.{l}.self_attn.v_proj.weight",
]
ours = "layers.{l}.attention.qkv.weight"
ops = [
    { rope = { heads = ["heads", "kv", 0] } },
    { concat = { dim = 0, sizes = ["heads / kv * hd", "hd", "hd"], groups = "kv" } },
]
"""


def test_a_file_that_extends_a_shipped_one(tmp_path: Path) -> None:
    """Its rules take the place of the base's, names are spelled anew; here q, k and v in one tensor, group by
    group, q and k moved for rotary pairs; and all of it backwards."""
    tensors = _llama()
    source = _hf_folder(tmp_path / "hf", tensors)
    (tmp_path / "r.toml").write_text(FUSED)
    _convert(source, tmp_path / "a.pt", "torch", rules=str(tmp_path / "r.toml"))
    made = torch.load(tmp_path / "a.pt", weights_only=True)
    assert "final_norm.weight" in made and "norm.weight" not in made
    assert not any("qkv_linear" in name for name in made) and len(made) == len(tensors) - 2 * 2
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    q = q.view(6, 2, 2, 24).transpose(1, 2).reshape(2, 3 * 4, 24)  # two groups of three heads of four rows
    k = k.view(2, 2, 2, 24).transpose(1, 2).reshape(2, 4, 24)
    expected = torch.cat([q, k, v.view(2, 4, 24)], 1).reshape(40, 24)
    assert same_bytes(made["layers.1.attention.qkv.weight"], expected)
    options = {"rules": str(tmp_path / "r.toml"), "assets": str(source)}
    _convert(tmp_path / "a.pt", tmp_path / "back", "hf", **options)
    ours, theirs = (tmp_path / p / "model.safetensors" for p in ("back", "hf"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_cast_is_for_weights_not_for_moments(tmp_path: Path) -> None:
    """Every other operation moves items; a cast would spoil what the optimizer keeps in float32."""
    state = {"model": {"a": torch.ones(2)}, "optimizer": {"state": {"a": {"exp_avg": torch.rand(2)}}}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    cast = 'ops = [{ cast = { to = "bfloat16", back = "float32" } }]'
    (tmp_path / "r.toml").write_text(f'format = 1\n[[rule]]\nhf = "a"\nours = "b"\n{cast}\n')
    options = {"rules": str(tmp_path / "r.toml"), "rules_to": "ours"}
    _convert(tmp_path / "dcp", tmp_path / "out.pt", "torch", **options)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded["model"]["b"].dtype == torch.bfloat16
    assert same_bytes(
        loaded["optimizer"]["state"]["b"]["exp_avg"], state["optimizer"]["state"]["a"]["exp_avg"]
    )


def test_unequal_parts_are_joined_and_cut(tmp_path: Path) -> None:
    """q and k of different sizes in one tensor, in a user's own file; drops are reported."""
    tensors = {"a.0.q": torch.randn(4, 2), "a.0.k": torch.randn(2, 2), "old.0": torch.ones(1)}
    source = _hf_folder(tmp_path / "hf", tensors)
    (tmp_path / "r.toml").write_text(RULES + '[[drop]]\nhf = "old.{i}"\n')
    report = _convert(source, tmp_path / "out.pt", "torch", rules=str(tmp_path / "r.toml"))
    assert report.dropped_others == ("old.0",)
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert same_bytes(made["b.0.qk"], torch.cat([tensors["a.0.q"], tensors["a.0.k"]])) and len(made) == 1
    _convert(tmp_path / "out.pt", tmp_path / "back", "hf", rules=str(tmp_path / "r.toml"))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert same_bytes(back["a.0.q"], tensors["a.0.q"]) and same_bytes(back["a.0.k"], tensors["a.0.k"])
