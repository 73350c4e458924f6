"""Memory that reading a part of a tensor takes, of every format: the buffers of a thread, whatever the tensor's size.

Targets do not matter: all of them are written from one buffer per thread, which a read like these fills.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.bench.conversion.memory_sources import QUANTIZED, SOURCES
from vescale_fsdp.conversion import open_source
from vescale_fsdp.conversion.convert import ConvertOptions, plan_conversion
from vescale_fsdp.conversion.engine.tensor_view import TensorView, read_range

BUFFER_BYTES = 1 << 20
BUFFERS = 4  # of a thread, as `CopyLimits` counts them
# Tiles of codes, or gaps between strided items; 4 threads may take 32 MiB beside the budget.
CONSTANT_BYTES = 4 << 20
SOURCE_BYTES = 56_000_000
NEEDS = {"ocdbt": "tensorstore", "ocdbt_3": "tensorstore", "q4_k.gguf": "gguf", "iq4_xs.gguf": "gguf"}
# "many" has no large tensor; "ranks", which two processes write, are files like "torch".
FORMATS = [name for name in SOURCES if name not in ("many", "ranks")]


def _held_bytes(view: TensorView, start: int) -> int:
    """Most bytes held while one buffer of items is read, the buffer included."""
    stop = start + BUFFER_BYTES // view.info.dtype.itemsize
    tracemalloc.start()
    read_range(view, start, stop, np.empty(BUFFER_BYTES, dtype=np.uint8))
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return held


@pytest.mark.part("formats")
@pytest.mark.parametrize("name", FORMATS)
def test_a_read_takes_the_buffers_of_a_thread(tmp_path: Path, name: str) -> None:
    """From the largest tensor, cast or dequantized: at its start, and in the middle of rows, chunks and blocks."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    torch.manual_seed(0)
    SOURCES[name](tmp_path / name, SOURCE_BYTES)
    source = open_source(str(tmp_path / name))
    how = ConvertOptions(dequantize="bf16") if name in QUANTIZED else ConvertOptions(dtype=["bf16"])
    views = plan_conversion(source, str(tmp_path / "out"), "torch", how).state.views.values()
    view = max(views, key=lambda each: each.info.numel)
    decoded = max((source.decoded.get(stored, 0) for _, stored in view.sources()), default=0)
    # The zarr library frees a chunk after it has decoded the next one.
    chunks = 2 if name == "compressed" else 1
    limit = BUFFERS * BUFFER_BYTES + chunks * decoded + CONSTANT_BYTES
    assert view.info.nbytes > limit - chunks * decoded  # else a whole tensor would pass
    _held_bytes(view, 0)  # imports and tables
    held = [_held_bytes(view, start) for start in (0, view.info.numel // 2 + 12345)]

    assert BUFFER_BYTES < max(held) < limit, (held, limit)
