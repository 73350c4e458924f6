"""Block-wise codecs: tensors as 8-bit codes and one scale per block, cut where ragged shards are cut."""

from vescale_fsdp.quantize.grid import BlockGrid, grid_of

__all__ = ["BlockGrid", "grid_of"]
