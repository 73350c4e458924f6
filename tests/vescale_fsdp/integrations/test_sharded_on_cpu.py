"""accelerate and Trainer on CPUs under `as_fsdp2` and `VescalePlugin`: sharded, with DDP's losses, or a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainingArguments

from examples.stacks.options import Options
from examples.stacks.tiny_llm import Sequences, tiny_llama
from examples.stacks.train_trainer import arguments
from tests.stacks.jobs.example_ranks import run_on_ranks
from vescale_fsdp import RaggedDTensor, fully_shard
from vescale_fsdp.errors import UnshardedWarning
from vescale_fsdp.integrations import as_fsdp2
from vescale_fsdp.integrations.accelerate import VescalePlugin


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 26), nn.Tanh(), nn.Linear(26, 3))


def _train(accelerator: Accelerator) -> dict[str, Any]:
    """Three steps with other data on each rank, as any script of accelerate's."""
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    data = torch.randn(3, 2, 4, 6, generator=torch.Generator().manual_seed(1))
    losses = []
    for batches in data:
        loss = model(batches[dist.get_rank()]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {
        "losses": losses,
        "sharded": sum(isinstance(param, RaggedDTensor) for param in model.parameters()),
        "type": accelerator.distributed_type.value,
        "ranks": accelerator.num_processes,
    }


def _ddp() -> dict[str, Any]:
    return _train(Accelerator(cpu=True))


def _plugin(**said: Any) -> dict[str, Any]:
    return _train(Accelerator(fsdp_plugin=VescalePlugin(), **said))


def _inside(**said: Any) -> dict[str, Any]:
    with as_fsdp2():
        return _train(Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), **said))


def _after_the_state() -> dict[str, Any]:
    """A script may ask for its rank first."""
    state = PartialState(cpu=True)
    found = _plugin(cpu=True)
    assert state.num_processes == 2 and state.distributed_type is DistributedType.FSDP
    return found


_WAYS: dict[str, tuple[Callable[..., dict[str, Any]], dict[str, Any]]] = {
    "plugin, cpu=True": (_plugin, {"cpu": True}),
    "plugin, nothing said": (_plugin, {}),
    "as_fsdp2, cpu=True": (_inside, {"cpu": True}),
    "as_fsdp2, nothing said": (_inside, {}),
    "after the state": (_after_the_state, {}),
}


@pytest.mark.parametrize("way", _WAYS)
def test_accelerate_shards_on_cpus(way: str) -> None:
    """By the user's plugin alone: every parameter sharded over both ranks, and the losses of data parallelism."""
    run, said = _WAYS[way]
    expected = run_on_ranks(2, _ddp)
    for found, plain in zip(run_on_ranks(2, run, **said), expected, strict=True):
        assert plain["sharded"] == 0 and plain["type"] == "MULTI_CPU"
        assert (found["sharded"], found["type"], found["ranks"]) == (4, "FSDP", 2)
        torch.testing.assert_close(found["losses"], plain["losses"])


def _trainer(folder: Path, use_cpu: bool, sharded: bool) -> dict[str, Any]:
    """Arguments are made before the block, as scripts do that parse them."""
    chosen = arguments(Options(folder, steps=2, save_at=100)) | {"use_cpu": use_cpu, "save_strategy": "no"}
    if not sharded:
        chosen |= {"fsdp": None, "fsdp_config": None}
    args = TrainingArguments(**chosen)
    with as_fsdp2() if sharded else nullcontext():
        trainer = Trainer(tiny_llama(), args, train_dataset=Sequences(24))
        trainer.train()
    params = list(trainer.model.parameters())
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "sharded": sum(isinstance(param, RaggedDTensor) for param in params) / len(params),
        "ranks": args.world_size,
    }


@pytest.mark.parametrize("use_cpu", [True, False])
def test_trainer_shards_on_cpus(use_cpu: bool, tmp_path: Path) -> None:
    """Whether or not its arguments say that there is no accelerator."""
    expected = run_on_ranks(2, _trainer, tmp_path / "plain", True, False)
    for found, plain in zip(
        run_on_ranks(2, _trainer, tmp_path / "ours", use_cpu, True), expected, strict=True
    ):
        assert (found["sharded"], found["ranks"], len(found["losses"])) == (1.0, 2, 2)
        assert plain["sharded"] == 0
        torch.testing.assert_close(found["losses"], plain["losses"], rtol=1e-4, atol=1e-4)


def _unsharded() -> dict[str, list[str]]:
    """What warns where nothing is sharded: of each way, the files that warnings point to."""
    files: dict[str, list[str]] = {}

    def noted(way: str, run: Callable[[], object]) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UnshardedWarning)
            run()
        files[way] = [each.filename for each in caught if issubclass(each.category, UnshardedWarning)]

    def empty() -> None:
        with as_fsdp2():
            pass

    def not_asked_for() -> None:
        with as_fsdp2():
            Accelerator(cpu=True).prepare(_model())

    def failed() -> None:
        with pytest.raises(ZeroDivisionError), as_fsdp2():
            raise ZeroDivisionError

    def by_hand() -> None:
        model = fully_shard(_model())
        with as_fsdp2():
            model.unshard()
            Accelerator(cpu=True).prepare(
                torch.optim.SGD(model.parameters(), lr=0.1)
            )  # no model: says nothing
            torch.distributed.fsdp.register_fsdp_forward_method(model, "forward")

    for way in (empty, not_asked_for, failed, by_hand):
        noted(way.__name__, way)
    return files


def test_a_block_that_shards_nothing_warns() -> None:
    """Once, at the user's line: by `prepare` before the training, else at the block's end; not after an error."""
    for files in run_on_ranks(2, _unsharded):
        assert files == {"empty": [__file__], "not_asked_for": [__file__], "failed": [], "by_hand": []}


def _a_state_that_fails() -> tuple[str, str, bool]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    with pytest.raises(ValueError, match="FSDP2"), as_fsdp2():
        Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(cp_size=2))
    kinds = [state._shared_state["distributed_type"].value for state in (PartialState, AcceleratorState)]
    return kinds[0], kinds[1], [AcceleratorState.__init__, Accelerator.prepare] == _OWN


_OWN = [AcceleratorState.__init__, Accelerator.prepare]


def test_the_choice_is_undone_after_an_error() -> None:
    """The type is the machine's again, and accelerate's functions are its own."""
    assert run_on_ranks(2, _a_state_that_fails) == [("MULTI_CPU", "MULTI_CPU", True)] * 2
