"""How many ranks share the cores of this machine, so that a storage takes its part of them."""

from __future__ import annotations

import torch.distributed as dist


def num_neighbours() -> int:
    """Ranks that may be on this machine: which are is not known, so all are counted."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
