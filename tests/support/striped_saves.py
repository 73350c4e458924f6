"""Checkpoints with stripes and parts of a test's size, so that small tensors have several of them."""

from __future__ import annotations

import os
from typing import Any

from vescale_fsdp.checkpoint.ranks.coordinator import coordinator_for
from vescale_fsdp.checkpoint.save import Saver
from vescale_fsdp.checkpoint.storage.open import open_storage


def save_striped(path: str | os.PathLike[str], state: Any, *, metadata: Any = None, **sizes: Any) -> None:
    """Save as `vescale_fsdp.checkpoint.save` does, on all ranks.

    Args:
        sizes: `stripe_bytes`, the bytes of a file that have one checksum; `split_bytes`, the most bytes of a replicated
            tensor that one rank writes; `format`.
    """
    Saver(open_storage(path), coordinator_for(), **sizes).save(state, metadata)
