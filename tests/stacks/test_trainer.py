"""Trainer under `as_fsdp2`: stock FSDP2's losses and weights, both kinds of resumes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import Trainer, TrainingArguments

from examples.accelerate_on_cpu import allow_fsdp_on_cpu
from examples.tiny_llm import Sequences, tiny_llama
from examples.trainer.train import Options, arguments, train
from tests.stacks.example_ranks import divide_once_more, run_example
from vescale_fsdp.conversion.cli.main import cli as vescale_convert
from vescale_fsdp.integrations import as_fsdp2

HALF = 25
# The largest gradient, whose value does not depend on how gradients are cut: a sum of squares does, in its last bits.
CLIP = {"max_norm": 0.1, "norm_type": math.inf}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs of this file."""
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def stock(folder: Path) -> list[tuple[float, float]]:
    """Stock FSDP2's losses and norms, uninterrupted."""
    return run_example(2, train, Options(folder / "stock", runtime="fsdp2", **CLIP))


@pytest.mark.parametrize(("kind", "efficient"), [("SHARDED_STATE_DICT", False), ("FULL_STATE_DICT", True)])
def test_losses_are_fsdp2s(
    kind: str, efficient: bool, folder: Path, stock: list[tuple[float, float]]
) -> None:
    """To the last bit, over 50 steps with two micro-batches and clipping, resumed in the middle; weights too."""
    options = Options(folder / kind, state_dict_type=kind, cpu_ram_efficient_loading=efficient, **CLIP)
    whole = run_example(2, train, options)
    again = replace(options, out=folder / f"{kind}_again", resume=options.out / f"checkpoint-{HALF}")
    resumed = run_example(2, train, again)
    others = run_example(3, train, replace(again, out=folder / f"{kind}_others"))

    assert len(stock) == 50 and stock[-1][0] < stock[0][0] / 2
    assert max(norm for _, norm in stock) > CLIP["max_norm"]  # clipped now and then
    assert whole == stock
    assert resumed[-HALF:] == stock[HALF:]
    torch.testing.assert_close(torch.tensor(others[-HALF:]), torch.tensor(stock[HALF:]), rtol=2e-3, atol=1e-4)
    if kind == "FULL_STATE_DICT":  # of sharded states Trainer's `save_model` saves nothing
        weights, expected = (
            load_file(out / "final" / "model.safetensors") for out in (again.out, folder / "stock")
        )
        assert len(expected) > 10 and weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_gradients_at_one_nth_are_seen(folder: Path, stock: list[tuple[float, float]]) -> None:
    """The comparison can fail: gradients divided once more give other losses."""
    options = Options(folder / "control", steps=10, save_at=100, **CLIP)

    assert run_example(2, train, options, prepared=divide_once_more)[1:] != stock[1:10]


def _generates(folder: Path) -> tuple[list[int], list[int]]:
    """What the sharded model of a Trainer writes, and the same model whole."""
    args = TrainingArguments(**arguments(Options(folder, steps=2, save_at=100)))
    allow_fsdp_on_cpu()
    with as_fsdp2():
        trainer = Trainer(tiny_llama(), args, train_dataset=Sequences(24))
        trainer.train()
    prompt = Sequences(1)[0]["input_ids"][None, :4]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 1}
    written = trainer.model.generate(input_ids=prompt, **options)[0].tolist()
    whole = tiny_llama()
    state = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True))
    whole.load_state_dict(state)
    return written, whole.generate(input_ids=prompt, **options)[0].tolist()


def test_a_trained_model_generates(folder: Path) -> None:
    """Trainer registers ``generate`` with torch's function; the sharded model writes what the whole one does."""
    written, expected = run_example(2, _generates, folder / "generate")

    assert written == expected and len(written) > 4


def test_the_converter_opens_a_save(folder: Path) -> None:
    """vescale-convert reads what Trainer saved."""
    saved = folder / "SHARDED_STATE_DICT" / f"checkpoint-{HALF}" / "pytorch_model_fsdp_0"
    shown = CliRunner().invoke(vescale_convert, ["inspect", str(saved)])

    assert shown.exit_code == 0 and "model.layers.1.mlp.down_proj.weight" in shown.output


def test_bf16_trains_as_stock(folder: Path) -> None:
    """Mixed precision: the losses of stock FSDP2, to bf16's rounding of sums."""
    stock, ours = (
        run_example(2, train, Options(folder / f"bf16_{runtime}", runtime, 6, 100, bf16=True))
        for runtime in ("fsdp2", "vescale")
    )

    torch.testing.assert_close(torch.tensor(ours), torch.tensor(stock), rtol=1e-2, atol=1e-2)
