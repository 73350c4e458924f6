"""The demo's model against transformers, and its data against the promise that ranks do not matter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from examples.corpus import Batches, python_sources, read_corpus
from examples.llama import Llama, LlamaShape, start_weights

SHAPE = LlamaShape(hidden_size=48, num_layers=2, num_heads=6, num_kv_heads=2, head_size=10, mlp_size=72)


def _model(shape: LlamaShape) -> Llama:
    model = Llama(shape)
    torch.manual_seed(0)
    start_weights(model)
    with torch.no_grad():
        for param in model.parameters():
            param *= 5  # far from the start, where all logits are near zero
    return model


def _transformers_twin(ours: Llama, folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    """The same model, loaded by transformers from a repository (which keeps rotary frequencies in fp32)."""
    (folder / "config.json").write_text(json.dumps(SHAPE.hugging_face_config()))
    save_file(ours.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.0)])
def test_logits_are_transformers(dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    """The same weights give the logits of LlamaForCausalLM, to rounding in fp32 and bit by bit in bf16."""
    ours = _model(SHAPE).to(dtype)
    theirs = _transformers_twin(ours, tmp_path, dtype)
    tokens = torch.randint(0, 256, (3, 37), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = ours(tokens)

        torch.testing.assert_close(theirs(tokens).logits, logits, rtol=0, atol=tolerance)
    assert logits.std() > 0.1


def test_the_demo_model_has_one_to_three_million_parameters() -> None:
    """The demo's model has between 1 and 3 million parameters, built without memory on meta."""
    with torch.device("meta"):
        numel = sum(p.numel() for p in Llama(LlamaShape()).parameters())

    assert 1e6 < numel < 3e6


def test_start_weights_have_the_deviations_of_llama() -> None:
    """Norms start at one, matrices at their deviation: 0.02, less where they end in a residual."""
    model = Llama(SHAPE)
    start_weights(model)
    block = model.get_submodule("model.layers.1")

    assert torch.equal(block.get_parameter("input_layernorm.weight"), torch.ones(48))
    assert block.get_parameter("self_attn.q_proj.weight").std().item() == pytest.approx(0.02, rel=0.1)
    assert block.get_parameter("mlp.down_proj.weight").std().item() == pytest.approx(0.007, rel=0.1)


@pytest.mark.part("jobs")
def test_corpus_is_python() -> None:
    """The corpus is megabytes of the standard library's sources, the same every time it is read."""
    corpus = read_corpus()

    assert corpus.numel() == 4 << 20
    assert torch.equal(corpus, read_corpus())
    assert b"def __init__(self" in bytes(corpus.tolist())
    assert {"abc.py", "dataclasses.py"} <= {file.name for file in python_sources()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_global_batch_does_not_depend_on_ranks(world_size: int) -> None:
    """The ranks' shares, put together, are one and the same global batch; steps differ."""
    batches = Batches(torch.arange(1000).to(torch.uint8), batch_size=12, seq_len=16)
    shares = [batches.of_rank(7, rank, world_size) for rank in range(world_size)]
    inputs, targets = (torch.cat(parts) for parts in zip(*shares, strict=True))

    assert torch.equal(inputs, batches.of_rank(7, 0, 1)[0])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert (inputs != batches.of_rank(8, 0, 1)[0]).any()


def test_ranks_must_divide_the_batch() -> None:
    """A world size that would lose windows is refused."""
    with pytest.raises(ValueError, match=r"\b12\b.*\b5\b"):
        Batches(torch.zeros(1000, dtype=torch.uint8)).of_rank(0, 0, 5)
