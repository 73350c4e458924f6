"""Optimizers for ragged shards: Muon, Shampoo, 8-bit AdamW, and optimizers of torch and other packages on pieces."""

from vescale_fsdp.optim.adamw8bit import AdamW8bit
from vescale_fsdp.optim.in_backward import step_in_backward
from vescale_fsdp.optim.muon import Muon
from vescale_fsdp.optim.owner_optimizer import OwnerOptimizer
from vescale_fsdp.optim.shampoo import Shampoo
from vescale_fsdp.optim.structured_optimizer import AdamWOptions

__all__ = ["AdamW8bit", "AdamWOptions", "Muon", "OwnerOptimizer", "Shampoo", "step_in_backward"]
