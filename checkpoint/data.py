"""Save the position in the training data, and restore it on any number of ranks.

    sampler = ReshardableSampler(len(dataset), seed=1)
    loader = ReshardableLoader(DataLoader(dataset, batch_size=8, sampler=sampler))
    save(path, {"model": model, "data": Resharded(loader)})

Any class with the methods of `Reshardable` can be used instead of the loader.
"""

from vescale_fsdp.checkpoint.state.per_rank import Reshardable, Resharded
from vescale_fsdp.checkpoint.state.reshardable_data import ReshardableLoader, ReshardableSampler

__all__ = ["Reshardable", "ReshardableLoader", "ReshardableSampler", "Resharded"]
