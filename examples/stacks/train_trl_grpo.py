"""TRL's GRPO; the one line for this package is ``with as_fsdp2(...)``. After each step an engine gets the weights.

    torchrun --nproc-per-node 2 -m examples.stacks.train_trl_grpo --out /tmp/run --steps 12           on CPUs

TRL generates with transformers here, since vLLM needs GPUs. The engine is whole tensors of rank 1, filled by
`Transfer`; OUT/losses.json has each step's loss, reward and norm of gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.stacks.options import GLOBAL_BATCH, Options, parse_options, write_losses
from examples.stacks.tiny_llm import CONFIG, tiny_llama
from examples.stacks.train_trainer import Watched, arguments, runtime
from examples.stacks.train_trl_lora import tokenizer
from vescale_fsdp.transfer import Transfer, describe_states, plan_transfer

GENERATIONS = 3  # samples of each prompt


class _Trainer(Watched, GRPOTrainer):
    pass


def rewards(completion_ids: list[list[int]], **unused: Any) -> list[float]:
    """For each completion, the part of its tokens that are below a third of the vocabulary."""
    return [
        sum(token < CONFIG.vocab_size // 3 for token in tokens) / len(tokens) for tokens in completion_ids
    ]


class Feed(TrainerCallback):
    """Sends the weights to the engine at the start and after each step.

    Attributes:
        engine: the engine's whole tensors on rank 1; None on other ranks.
        versions: the steps whose weights the engine has had.
    """

    def __init__(self) -> None:
        self.engine: dict[str, torch.Tensor] | None = None
        self.versions: list[int | None] = []
        self._transfer: Transfer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Plan the transfer once, for the sharded model."""
        weights = dict(more["model"].named_parameters())
        if dist.get_rank() == 1:
            self.engine = {name: torch.zeros(param.shape) for name, param in weights.items()}
        plan = plan_transfer(*describe_states(weights, self.engine))
        self._transfer = Transfer(plan, delta=True)
        self.on_step_end(args, state, control, **more)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Send the weights of this step."""
        assert self._transfer is not None
        weights = dict(more["model"].named_parameters())
        self._transfer.run(weights, self.engine, version=state.global_step)
        self.versions.append(self._transfer.version)


def train(options: Options, feed: Feed | None = None) -> list[tuple[float, float, float]]:
    """Train; return loss, mean reward and norm of the gradients per step.

    Args:
        options: what to run.
        feed: sends the weights to an engine.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    more = arguments(
        options,
        num_generations=GENERATIONS,
        max_completion_length=8,
        temperature=1.0,
        beta=0.0,
        save_strategy="no",
    )
    prompts = [" ".join(str((start + step) % CONFIG.vocab_size) for step in range(4)) for start in range(60)]
    rows = Dataset.from_list([{"prompt": prompt} for prompt in prompts[: GLOBAL_BATCH * options.steps]])
    words = tokenizer()
    words.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    with runtime(options):
        trainer = _Trainer(
            tiny_llama(),
            rewards,
            GRPOConfig(**more),
            train_dataset=rows,
            processing_class=words,
            callbacks=[] if feed is None else [feed],
        )
        trainer.norm_type = options.norm_type
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(entry["loss"], entry["reward"], entry["grad_norm"]) for entry in logs]


def main() -> None:
    """Train and write the losses."""
    options = parse_options("TRL's GRPO with vescale_fsdp, on CPUs")
    history = train(options, Feed() if options.runtime == "vescale" else None)
    write_losses(options.out, history)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
