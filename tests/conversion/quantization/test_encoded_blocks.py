"""Blocks that several ranks' pieces share are encoded once, within their part of the memory budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.conversion.engine import copying
from vescale_fsdp.conversion.engine.coded_tensors import BlockCache, EncodedView
from vescale_fsdp.conversion.engine.copying import CopyLimits
from vescale_fsdp.conversion.quantization import quantize
from vescale_fsdp.conversion.quantization.float_codes import Fp8Encoding
from vescale_fsdp.layout.geometry import Box

BLOCK_BYTES = 128 * 128
SHAPES = [(128, 128)] * 5 + [(256, 384), (384, 128)]
NUM_BLOCKS = 5 + 6 + 3


@contextmanager
def _encoded() -> Iterator[list[int]]:
    """The number of blocks of each call of the encoder of codes."""
    counts: list[int] = []
    codes = Fp8Encoding.codes

    def counted(self: Fp8Encoding, scaled: np.ndarray) -> np.ndarray:
        counts.append(scaled.size // BLOCK_BYTES)
        return codes(self, scaled)

    with mock.patch.object(Fp8Encoding, "codes", counted):
        yield counts


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Matrices of a few blocks, each of which is a unit."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layers.{number}.w.weight": torch.randn(shape, generator=generator)
        for number, shape in enumerate(SHAPES)
    }
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    return tmp_path / "hf"


def _quantized(source: Path, max_cached_bytes: int | None, threads: int) -> tuple[dict[str, bytes], int]:
    """Files of a native checkpoint for 24 ranks, and the number of blocks encoded for them; None: without a cache."""
    out = source.parent / f"out-{max_cached_bytes}-{threads}"
    options = ConvertOptions(quantize=["fp8-128x128"], ranks=24, threads=threads, no_assets=True)
    cache_class = mock.Mock(return_value=None) if max_cached_bytes is None else BlockCache
    with (
        mock.patch.object(copying, "_MAX_CACHED_BYTES", max_cached_bytes or 0),
        mock.patch.object(quantize, "BlockCache", cache_class),
        _encoded() as counts,
    ):
        convert(open_source(str(source)), str(out), "native", options)
    files = {file.name: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    return files, sum(counts)


@pytest.mark.part("formats")
@pytest.mark.parametrize("threads", [1, 4])
def test_a_block_is_encoded_once_for_all_ranks(source: Path, threads: int) -> None:
    """With the bytes of a conversion that encodes it for each piece; without room for all blocks, some are repeated."""
    expected, num_without = _quantized(source, None, threads)
    assert num_without >= 24 * 7  # a piece of each matrix on every rank
    found, num_encoded = _quantized(source, NUM_BLOCKS * BLOCK_BYTES, threads)
    assert (found == expected, num_encoded) == (True, NUM_BLOCKS)
    for num_kept in (0, 3):
        found, num_encoded = _quantized(source, num_kept * BLOCK_BYTES, threads)
        assert found == expected
        assert NUM_BLOCKS < num_encoded <= num_without


def test_the_cache_is_empty_after_all_items_were_read() -> None:
    """It never holds more than its limit, and gives the codes back until the last item is read."""
    cache, view, codes = BlockCache(2 * 16), mock.Mock(EncodedView), np.arange(16, dtype=np.uint8)
    blocks = [Box((row, 0), (4, 4)) for row in (0, 4, 8)]
    for block in blocks:
        cache.add_read(view, block, codes.reshape(4, 4), 10)
    kept = [cache.get(view, block) for block in blocks]
    assert [None if each is None else each.ravel().tolist() for each in kept] == [codes.tolist()] * 2 + [None]
    for block in blocks[:2]:
        cache.add_read(view, block, codes.reshape(4, 4), 6)
    assert [cache.get(view, block) for block in blocks] == [None] * 3
    cache.add_read(view, blocks[2], codes.reshape(4, 4), 1)  # there is room again
    assert cache.get(view, blocks[2]) is not None


@pytest.mark.parametrize(
    "budget_mib, cached_mib", [(4, 0), (16, 0), (20, 2.5), (64, 8), (512, 64), (4096, 64)]
)
def test_the_cache_is_a_part_of_the_memory_budget(budget_mib: int, cached_mib: float) -> None:
    """The threads keep at least the buffers that they need, and none of them is left out for it."""
    limits = CopyLimits(budget_mib << 20, threads=4)
    caching = limits.caching()
    assert caching.cached_bytes == cached_mib * 2**20
    assert caching.usable_threads == limits.usable_threads
    buffers = 4 * caching.buffer_bytes * caching.usable_threads
    assert caching.cached_bytes + buffers <= budget_mib << 20
