"""Byte sums against the specification in integers, and against the changes that simpler sums miss."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.house.conftest import ROOT
from tests.support.async_device import TYPE, needs_device, run_on_device
from tests.support.dtype_zoo import DTYPES, make_tensor
from vescale_fsdp.byte_sums import ROW_BYTES, bytes_sums, pack_sums, region_sums, run_sums
from vescale_fsdp.layout.geometry import Box, Range
from vescale_fsdp.layout.region import Region, whole_region

MASK = (1 << 64) - 1
COLUMNS = 1 << 12
REGIONS = (
    whole_region((600, 700)),
    Region(Box((0, 0), (600, 700)), Range(12_345, 400_001)),
    Region.of_box(Box((0, 100), (600, 33))),
    Region(Box((5, 1), (590, 699)), Range(700, 300_000)),
    Region.of_box(Box((3, 699), (590, 1))),
    Region.of_box(Box((3, 0), (0, 700))),
)


@cache
def mixed(counter: int) -> int:
    """Number ``counter`` of splitmix64 with seed 0."""
    z = (counter + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


@cache
def weight(k: int, column: int) -> int:
    """W_k of a column: 8 digits between -64 and 63, of 7 bits each."""
    z = mixed(k * COLUMNS + column)
    return sum((((z >> 7 * j) & 127) - 64) << 7 * j for j in range(8))


def specified(data: bytes) -> str:
    """The sums of a tensor's bytes, byte by byte, in Python's integers."""
    sums = [0, 0]
    for i, byte in enumerate(data):
        r, c = divmod(i, COLUMNS)
        x = byte - 256 if byte > 127 else byte
        for k in range(2):
            sums[k] = (sums[k] + (mixed(((k + 1) << 48) + r) | 1) * x * weight(k, c)) & MASK
    return b"".join(each.to_bytes(8, "little") for each in sums).hex()


def pattern(nbytes: int, seed: int = 1) -> torch.Tensor:
    """Bytes that differ from seed to seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)


def raw_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def sums_of(tensor: torch.Tensor) -> str:
    return pack_sums(run_sums(raw_of(tensor))).hex()


def vectors() -> Iterator[tuple[bytes, str]]:
    """The test vectors of the specification: descriptions of bytes, and sums."""
    spelled = {"none": b"", "`01`": b"\x01", "0, 1, .. 255": bytes(range(256))}
    spelled["i*i mod 251 for i < 300,000"] = bytes(i * i % 251 for i in range(300_000))
    text = (ROOT / "checkpoint" / "FORMAT.md").read_text()
    for name, data in spelled.items():
        yield data, text.split(f"| {name} | `")[1].split("`")[0]


def test_sums_are_those_of_the_specification() -> None:
    for data, expected in vectors():
        raw = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8)
        )
        assert specified(data) == expected
        assert pack_sums(run_sums(raw)).hex() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_every_dtype_are_those_of_its_bytes(dtype: torch.dtype) -> None:
    tensor = make_tensor((3, 5, 7), dtype, seed=3)
    assert sums_of(tensor) == specified(bytes(raw_of(tensor).tolist()))


def cut_at(total: int, rng: random.Random, most: int) -> list[int]:
    return [0, *sorted(rng.sample(range(1, total), rng.randrange(1, most))), total]


def test_sums_of_any_cut_add_up() -> None:
    """Runs at odd offsets, in memory at odd addresses, and of several rows."""
    rng = random.Random(5)
    data = pattern(70 * ROW_BYTES + 1234)
    whole = run_sums(data)
    for _ in range(30):
        ends = cut_at(data.numel(), rng, 9)
        total = torch.zeros(2, dtype=torch.int64)
        for start, stop in pairwise(ends):
            shift = rng.randrange(8)
            moved = torch.zeros(shift + stop - start, dtype=torch.uint8)[shift:].copy_(data[start:stop])
            total += run_sums(moved, start)
        assert torch.equal(total, whole)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128], ids=str)
def test_sums_of_regions_are_those_of_the_tensor_with_zeros_elsewhere(dtype: torch.dtype) -> None:
    tensor = make_tensor((600, 700), dtype, seed=4)
    for region in REGIONS:
        masked = torch.zeros_like(tensor)
        items = []
        for box, _ in region.pieces():
            masked[box.slices()] = tensor[box.slices()]
            items.append(tensor[box.slices()].reshape(-1))
        local = torch.cat(items) if items else tensor.new_empty(0)
        found = region_sums(raw_of(local), region, (600, 700), dtype.itemsize)
        assert torch.equal(found, run_sums(raw_of(masked)))


def test_regions_with_large_gaps() -> None:
    """A box of each of three matrices that are far apart, in runs of 80 KB."""
    tensor = pattern(3 * 500 * 1000).view(3, 500, 1000)
    region = Region.of_box(Box((0, 100, 0), (3, 80, 1000)))
    masked = torch.zeros_like(tensor)
    masked[region.box.slices()] = tensor[region.box.slices()]
    found = region_sums(raw_of(tensor[region.box.slices()]), region, (3, 500, 1000), 1)
    assert torch.equal(found, run_sums(raw_of(masked)))


def test_a_delta_updates_the_sums() -> None:
    """The sums of a tensor change by those of the old and the new elements at the changed places."""
    before = make_tensor((300, 700), torch.bfloat16, seed=6)
    after = before.clone()
    after[7:9, 3:200] += 1
    change = torch.zeros(2, dtype=torch.int64)
    for row in (7, 8):
        start = (row * 700 + 3) * 2
        change += run_sums(raw_of(after[row, 3:200]), start) - run_sums(raw_of(before[row, 3:200]), start)
    assert torch.equal(run_sums(raw_of(before)) + change, run_sums(raw_of(after)))


def _on_device() -> tuple[list[int], list[int], list[int], list[int]]:
    data = pattern(1100 * ROW_BYTES + 77)
    there = data.to(TYPE)
    odd = data[3:].clone().to(TYPE)
    region = Region.of_box(Box((0, 100), (600, 33)))
    items = make_tensor((600, 33), torch.float32)
    return (
        run_sums(there).tolist(),
        run_sums(odd, 3).tolist(),
        run_sums(data[: ROW_BYTES // 2].to(TYPE), ROW_BYTES + 8).tolist(),
        region_sums(raw_of(items).to(TYPE), region, (600, 700), 4).tolist(),
    )


@needs_device()
def test_sums_on_a_device_are_those_on_the_host() -> None:
    data = pattern(1100 * ROW_BYTES + 77)
    region = Region.of_box(Box((0, 100), (600, 33)))
    items = make_tensor((600, 33), torch.float32)
    expected = (
        run_sums(data).tolist(),
        run_sums(data[3:], 3).tolist(),
        run_sums(data[: ROW_BYTES // 2], ROW_BYTES + 8).tolist(),
        region_sums(raw_of(items), region, (600, 700), 4).tolist(),
    )
    assert run_on_device(1, _on_device) == [expected]


def floats(seed: int = 2) -> torch.Tensor:
    """Values of a model's weights, 2 KiB per row."""
    return make_tensor((512, 512), torch.float32, seed)


def negated_at(tensor: torch.Tensor, *places: tuple[int, int]) -> torch.Tensor:
    changed = tensor.clone()
    for place in places:
        changed[place] = -changed[place]
    return changed


def rectangle(tensor: torch.Tensor, amount: int) -> torch.Tensor:
    """Equal and opposite changes at the corners of a rectangle: words of 8 bytes, 2,048 columns and 1 row apart."""
    bits = tensor.clone().view(torch.int64).view(-1)
    for at, sign in ((9, 1), (265, -1), (9 + COLUMNS // 8, -1), (265 + COLUMNS // 8, 1)):
        bits[at] += sign * amount
    return bits.view(torch.float32).view(tensor.shape)


def with_nan(payload: int) -> torch.Tensor:
    changed = floats()
    changed.view(torch.int32)[5, 5] = 0x7FC00000 | payload
    return changed


def swapped(tensor: torch.Tensor, a: int, b: int) -> torch.Tensor:
    order = list(range(tensor.shape[0]))
    order[a], order[b] = b, a
    return tensor[order]


FAMILIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two signs, one row": lambda t: negated_at(t, (3, 5), (3, 9)),
    "two signs, one column": lambda t: negated_at(t, (3, 5), (5, 5)),
    "two signs, next to each other": lambda t: negated_at(t, (3, 4), (3, 5)),
    "x with -x": lambda t: negated_at(t, *((row, 7) for row in range(64))),
    "negated": torch.neg,
    "corners": lambda t: rectangle(t, 1),
    "corners, top bits": lambda t: rectangle(t, -(1 << 63)),
    "corners, bits of 32": lambda t: rectangle(t, 1 << 31),
    "swapped rows": lambda t: swapped(t, 0, 1),
    "swapped rows of the sums": lambda t: t.view(256, -1)[[1, 0, *range(2, 256)]].view(t.shape),
    "swapped bytes": lambda t: (
        t.view(torch.int16).view(-1, 2).flip(1).reshape(-1).view(t.dtype).view(t.shape)
    ),
    "rolled by 1": lambda t: t.roll(1, 0),
    "rolled by 2": lambda t: t.roll(2, 0),
    "transposed": lambda t: t.t().contiguous(),
    "NaN payloads": lambda t: with_nan(1),
}


def test_families_of_changes_are_seen() -> None:
    before = floats()
    seen = {name: sums_of(change(before)) for name, change in FAMILIES.items()}
    seen |= {"as it was": sums_of(before), "another payload": sums_of(with_nan(2))}
    assert len({*seen.values()}) == len(seen), seen


def tables() -> list[np.ndarray]:
    """W_0 and W_1 in numpy's integers."""
    return [np.array([weight(k, column) for column in range(COLUMNS)]) for k in range(2)]


def test_one_or_two_changed_bytes_of_a_row_are_never_missed_by_either_sum() -> None:
    """A property of the fixed tables: two changes of at most 255 times their weights do not cancel out."""
    for table in tables():
        changes = table.view(np.uint64)[:, None] * np.arange(1, 256, dtype=np.uint64)
        assert changes.all()
        either_sign = np.sort(np.minimum(changes, -changes), axis=None)
        assert np.all(either_sign[1:] != either_sign[:-1])


def test_a_million_random_changes_are_seen() -> None:
    """By linearity: what a change of one byte, or of two, adds to both sums."""
    rng = np.random.default_rng(11)
    columns = [table.view(np.uint64) for table in tables()]
    rows = [np.array([mixed(((k + 1) << 48) + r) | 1 for r in range(64)], np.uint64) for k in range(2)]

    def effects(count: int) -> list[np.ndarray]:
        """What ``count`` flips of random bits in random bytes add to the sums."""
        column, row = rng.integers(0, COLUMNS, count), rng.integers(0, 64, count)
        old = rng.integers(0, 256, count)
        new = old ^ (1 << rng.integers(0, 8, count))
        change = (new.astype(np.int8).astype(np.int64) - old.astype(np.int8)).view(np.uint64)
        return [rows[k][row] * change * columns[k][column] for k in range(2)]

    for effect in (
        effects(500_000),
        [a + b for a, b in zip(effects(500_000), effects(500_000), strict=True)],
    ):
        missed = np.logical_and(*(each == 0 for each in effect))
        assert not missed.any()


def test_single_bytes_are_summed_at_their_places() -> None:
    """In any order, over several rows and chunks, as the run that they are."""
    raw, start = pattern((1 << 22) + 12_345), 77
    order = torch.randperm(raw.numel(), generator=torch.Generator().manual_seed(0))
    assert torch.equal(bytes_sums(raw[order], start + order), run_sums(raw, start))
    assert bytes_sums(raw[:0], order[:0]).tolist() == [0, 0]
