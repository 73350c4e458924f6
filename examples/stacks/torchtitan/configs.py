"""A configuration for torchtitan's own command line (``--module examples.stacks.torchtitan.configs --config ...``).

The line that is ours: ``with_vescale(config, ...)`` around what torchtitan's user has written.
"""

from __future__ import annotations

import os

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models import deepseek_v3, llama3
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from examples.stacks.torchtitan.byte_data import ByteLoader, ByteTokenizer
from vescale_fsdp import Rows
from vescale_fsdp.integrations.torchtitan import with_vescale

WINDOWS = 6
MICRO_BATCHES = 2


def stock(spec: ModelSpec | None = None) -> Trainer.Config:
    """torchtitan's debug Llama on bytes, in fp32 on CPU ranks; nothing of ours in it."""
    spec = spec or llama3.model_registry("debugmodel")
    del spec.model.layers[2:]  # a minute's work
    for _, _, owner, name in spec.traverse(FlexAttention.Config):
        setattr(owner, name, ScaledDotProductAttention.Config())  # flex attention on a CPU must be compiled
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(
            num_chunks=2, loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
        ),
        tokenizer=ByteTokenizer.Config(),
        dataloader=ByteLoader.Config(windows=WINDOWS),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=5),
        training=TrainingConfig(
            local_batch_size=WINDOWS // int(os.environ["WORLD_SIZE"]),
            global_batch_size=WINDOWS * MICRO_BATCHES,
            seq_len=32,
            steps=60,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=None,
        checkpoint=CheckpointManager.Config(enable=True, interval=30, last_save_model_only=False),
    )


def stock_moe() -> Trainer.Config:
    """The same with a DeepSeek, whose second layer routes tokens to experts."""
    return stock(deepseek_v3.model_registry("debugmodel"))


def vescale() -> Trainer.Config:
    """The same with our runtime and our checkpoints."""
    return with_vescale(stock(), granularity={"*w2.weight": Rows(32)})


def vescale_moe() -> Trainer.Config:
    """Experts under our runtime: cut by rows, whatever their number."""
    return with_vescale(stock_moe(), granularity={"*inner_experts*": Rows(8)})
