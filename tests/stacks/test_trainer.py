"""Trainer under `as_fsdp2`: stock FSDP2's losses and weights, both kinds of resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import Trainer, TrainingArguments

from examples.stacks.options import Options
from examples.stacks.tiny_llm import Sequences, tiny_llama
from examples.stacks.train_trainer import arguments, train
from tests.stacks.jobs.example_ranks import (
    HALF,
    KINDS,
    LARGEST,
    History,
    check_losses,
    control_of,
    converted,
    run_example,
)
from vescale_fsdp.integrations import as_fsdp2

CLIP = {"norm_type": LARGEST, "max_norm": 0.05}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs of this file."""
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def stock(folder: Path) -> History:
    """Stock FSDP2's losses and norms, uninterrupted."""
    return run_example(
        2, train, Options(folder / "stock", "fsdp2", state_dict_type="FULL_STATE_DICT", **CLIP)
    )


@pytest.mark.parametrize(("kind", "efficient"), KINDS)
def test_losses_are_fsdp2s(kind: str, efficient: bool, folder: Path, stock: History) -> None:
    """To the last bit, over 50 steps with two micro-batches and clipping, resumed in the middle; weights too."""
    options = Options(folder / kind, state_dict_type=kind, cpu_ram_efficient_loading=efficient, **CLIP)
    check_losses(train, options, f"checkpoint-{HALF}", stock)

    if kind == "FULL_STATE_DICT":  # of sharded states Trainer's `save_model` saves nothing
        weights, expected = (
            load_file(out / "final" / "model.safetensors")
            for out in (options.out / "again", folder / "stock")
        )
        assert len(expected) > 10 and weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_gradients_at_one_nth_are_seen(folder: Path, stock: History) -> None:
    """The comparison can fail: gradients divided once more give other losses."""
    assert control_of(train, Options(folder, **CLIP))[1:] != stock[1:10]


def _generates(folder: Path) -> tuple[list[int], list[int]]:
    """What the sharded model of a Trainer writes, and the same model whole."""
    args = TrainingArguments(**arguments(Options(folder, steps=2, save_at=100)))
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
    """vescale-convert makes of the sharded save in the middle what the full one holds."""
    full = torch.load(folder / "FULL_STATE_DICT" / f"checkpoint-{HALF}" / "pytorch_model_fsdp.bin")
    saved = folder / "SHARDED_STATE_DICT" / f"checkpoint-{HALF}" / "pytorch_model_fsdp_0"
    model = converted(saved, folder / "model.pt")

    assert len(full) > 10 and model.keys() == full.keys()
    assert all(torch.equal(model[name], full[name]) for name in full)


def test_bf16_trains_as_stock(folder: Path) -> None:
    """Mixed precision: the losses of stock FSDP2, to bf16's rounding of sums."""
    stock, ours = (
        run_example(2, train, Options(folder / f"bf16_{runtime}", runtime, 6, 100, bf16=True))
        for runtime in ("fsdp2", "vescale")
    )

    torch.testing.assert_close(torch.tensor(ours), torch.tensor(stock), rtol=1e-2, atol=1e-2)
