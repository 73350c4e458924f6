"""Optimizers that know how parameters lie over ranks: Muon, Shampoo, 8-bit AdamW, torch's own on flat shards."""

from vescale_fsdp.optim.adamw8bit import AdamW8bit
from vescale_fsdp.optim.base import AdamWOptions
from vescale_fsdp.optim.flat import FlatOptimizer
from vescale_fsdp.optim.muon import Muon, split_params
from vescale_fsdp.optim.shampoo import Shampoo

__all__ = ["AdamW8bit", "AdamWOptions", "FlatOptimizer", "Muon", "Shampoo", "split_params"]
