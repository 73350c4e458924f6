"""Optimizers that know how parameters lie over ranks: Muon, Shampoo and AdamW with 8-bit state."""

from vescale_fsdp.optim.adamw8bit import AdamW8bit
from vescale_fsdp.optim.base import AdamWOptions
from vescale_fsdp.optim.muon import Muon, split_params
from vescale_fsdp.optim.shampoo import Shampoo

__all__ = ["AdamW8bit", "AdamWOptions", "Muon", "Shampoo", "split_params"]
