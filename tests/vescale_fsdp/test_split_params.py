"""Muon.split_params: hidden matrices of every kind of model, by class, tie and shape; never by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.support.distributed import run_threads
from vescale_fsdp import fully_shard
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.optim import Muon

_LLAMA: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40,
}
_GPT2 = {
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "n_positions": 64,
    "vocab_size": 40,
}  # 64: as the rows of c_fc
_T5 = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 40}
_VIT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 7,
}


class _Own(nn.Module):
    """A user's transformer: no name says what it is; tables of positions of every kind, a head that is not tied."""

    def __init__(self, table: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.tok = nn.Embedding(11, 6)
        self.pos = table
        self.headless = nn.ModuleList(nn.Linear(6, 24) for _ in range(2))
        self.embedding_projector = nn.Linear(24, 6, bias=False)
        self.up = nn.Linear(6, 11, bias=False)  # the head
        self.value = nn.Linear(6, 1)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(3, 6, 10))
        self.w2 = nn.Parameter(torch.zeros(3, 10, 6))
        self.bias = nn.Parameter(torch.zeros(3, 10))


_OWN = {"headless.0.weight", "headless.1.weight", "embedding_projector.weight"}
_MLP = {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
_ATTENTION = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}

# Of each model: what Muon gets, as the last two words of each name; for own modules the whole name.
MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2)),
        {"c_attn.weight", "c_proj.weight", "c_fc.weight"},
    ),
    "gpt2, not tied": (
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2, tie_word_embeddings=False)),
        {"c_attn.weight", "c_proj.weight", "c_fc.weight"},
    ),
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5)),
        {"q.weight", "k.weight", "v.weight", "o.weight", "wi.weight", "wo.weight"},
    ),
    "llama": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA)),
        _MLP | _ATTENTION,
    ),
    "llama, a classifier": (
        lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**_LLAMA, num_labels=5)),
        _MLP | _ATTENTION,
    ),
    "gpt-oss": (
        lambda: transformers.GptOssForCausalLM(
            transformers.GptOssConfig(**_LLAMA, num_local_experts=4, head_dim=8)
        ),
        {"experts.gate_up_proj", "experts.down_proj"} | _ATTENTION,
    ),
    "vit": (
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**_VIT)),
        {"fc1.weight", "fc2.weight"} | _ATTENTION,
    ),
    "own, positions as a module": (lambda: _Own(nn.Embedding(24, 6)), _OWN),
    "own, positions as a matrix": (lambda: _Own(nn.Parameter(torch.zeros(24, 6))), _OWN),
    "own, positions of a batch": (lambda: _Own(nn.Parameter(torch.zeros(1, 24, 6))), _OWN),
    "experts": (_Experts, {"w1", "w2"}),
    "attention": (lambda: nn.MultiheadAttention(6, 2), {"in_proj_weight", "out_proj.weight"}),
    "attention of other widths": (
        lambda: nn.MultiheadAttention(6, 2, kdim=4, vdim=4, add_bias_kv=True),
        {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"},
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.Conv2d(4, 6, 3), nn.ConvTranspose1d(4, 6, 3)),
        set(),
    ),
    "a norm of a matrix": (lambda: nn.Sequential(nn.LayerNorm((3, 4)), nn.Linear(4, 4)), {"1.weight"}),
    "recurrent": (lambda: nn.LSTM(4, 6), {"weight_ih_l0", "weight_hh_l0"}),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 4)), {"1.weight"}),
    "adaptive softmax": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10], 2.0)),
        {"0.weight"},
    ),
}


def _matrices(model: nn.Module, **patterns: Any) -> set[str]:
    """The names of what Muon gets; the rest is AdamW's, and nothing is lost or double."""
    names = {param: name for name, param in model.named_parameters()}
    matrices, rest = Muon.split_params(model, **patterns)
    assert {*matrices, *rest} == {*model.parameters()} and len(matrices) + len(rest) == len(names)
    return {names[param] for param in matrices}


def _sharded(build: Callable[[], nn.Module], shard: Callable[..., Any]) -> set[str]:
    model = build()
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    for layer in [layer for each in reversed(lists) for layer in each]:  # inner lists first
        shard(layer)
    shard(model)
    return _matrices(model)


@pytest.mark.parametrize("case", MODELS)
def test_hidden_matrices_are_told_by_class(case: str) -> None:
    """Embeddings, heads, tables and vectors of any name are AdamW's; sharded by either runtime, as before."""
    build, expected = MODELS[case]
    plain = _matrices(build())

    if isinstance(build(), transformers.PreTrainedModel):
        assert {".".join(name.split(".")[-2:]) for name in plain} == expected
    else:
        assert plain == expected
    for shard in (fully_shard, torch_fully_shard):
        assert run_threads(2, _sharded, build, shard) == [plain, plain]


def test_a_tie_of_own_modules_is_an_embedding() -> None:
    """A head that shares the table of tokens, whatever its name."""
    model = _Own(nn.Embedding(24, 6))
    model.up.weight = model.tok.weight

    assert _matrices(model) == _OWN


def test_frozen_parameters_are_omitted() -> None:
    """They are in neither list."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).requires_grad_(False))

    assert Muon.split_params(model) == ([model[0].weight], [])


def test_names_of_the_caller_come_first() -> None:
    """Patterns decide against the class, also by the second name of a tied parameter."""
    model = _Own(nn.Parameter(torch.zeros(24, 6)))
    model.up.weight = model.tok.weight

    assert _matrices(model, muon="pos", adamw=["headless.*.weight"]) == {"pos", "embedding_projector.weight"}
    assert _matrices(model, muon=["up.*"]) == _OWN | {"tok.weight"}


@pytest.mark.parametrize(
    ("patterns", "got", "where"),
    [
        ({"muon": ["poss"]}, "muon=['poss']", "pos"),
        ({"adamw": ["*.wieght"]}, "adamw=['*.wieght']", "weight"),
        ({"muon": ["pos"], "adamw": ["p*"]}, "adamw=['p*']", "pos"),
    ],
)
def test_patterns_that_decide_nothing_are_refused(patterns: dict[str, Any], got: str, where: str) -> None:
    """One that matches no name, and two that disagree."""
    with pytest.raises(LayoutError) as refused:
        Muon.split_params(_Own(nn.Parameter(torch.zeros(24, 6))), **patterns)
    assert got in str(refused.value.got) and where in str(refused.value.where)


def _levels() -> None:
    Muon.split_params(_Own(nn.Parameter(torch.zeros(24, 6))))


def test_the_first_rank_logs_what_went_where(caplog: pytest.LogCaptureFixture) -> None:
    """Each parameter once; a table that no class tells is warned of, until the caller has named it."""
    caplog.set_level(logging.INFO, "vescale_fsdp")
    run_threads(2, _levels)
    info = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    for name in ("tok.weight", "headless.*.weight x 2", "up.weight", "value.weight", "value.bias"):
        assert sum(name in text for text in info) == 1, name
    assert len(warned) == 1 and "pos, of _Own" in warned[0]
    caplog.clear()
    Muon.split_params(_Own(nn.Parameter(torch.zeros(24, 6))), adamw=["pos"])
    assert {record.levelno for record in caplog.records} == {logging.INFO}


@pytest.mark.parametrize(
    ("patterns", "is_warned"),
    [
        ({}, True),
        ({"muon": ["headless.0.*"]}, True),
        ({"adamw": ["up.weight"]}, False),
        ({"muon": ["headless.*.weight", "up.*"]}, False),
    ],
)
def test_a_head_that_no_shape_tells_is_warned_of(
    patterns: dict[str, Any], is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Hidden weights with the shape of the table of tokens, until the caller has named the head or all of them."""
    model = _Own(nn.Parameter(torch.zeros(1, 24, 6)))
    model.tok, model.up = nn.Embedding(24, 6), nn.Linear(6, 24, bias=False)

    Muon.split_params(model, **patterns)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == is_warned
    assert all("up.weight" in text and "headless.1.weight" in text for text in warned)


@pytest.mark.parametrize("case", MODELS)
def test_a_known_head_is_not_warned_of(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of a transformers model, or with another shape than hidden weights: no warning names a linear weight."""
    model = MODELS[case][0]()
    linear = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)]

    Muon.split_params(model)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert not [name for name in linear for text in warned if name in text]
