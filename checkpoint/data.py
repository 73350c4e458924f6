"""Positions in the training data that are restored on any number of ranks.

    sampler = ReshardableSampler(len(dataset), seed=1)
    loader = ReshardableLoader(DataLoader(dataset, batch_size=8, sampler=sampler))
    save(path, {"model": model, "data": Resharded(loader)})

A class of your own can take the place of the loader if it has the methods of `Reshardable`.
"""

from vescale_fsdp.checkpoint.state.per_rank import Reshardable, Resharded
from vescale_fsdp.checkpoint.state.reshardable_data import ReshardableLoader, ReshardableSampler

__all__ = ["Reshardable", "ReshardableLoader", "ReshardableSampler", "Resharded"]
