"""Shampoo over ragged shards. Pickles know the optimizer under this name."""

from vescale_fsdp.lazy import lazily_export

lazily_export(__name__, {"vescale_fsdp.optim.shampoo.optimizer": "Shampoo"})
