"""The dynamic map and its rounding equal torchao's, and nothing is nearer than what is chosen."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import pytest
import torch

from vescale_fsdp import Flat
from vescale_fsdp.optim import adamw8bit
from vescale_fsdp.optim.adamw8bit import DynamicMap, decoded, dynamic_map, encoded, zero_code
from vescale_fsdp.quantize.codec import grid_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def torchao_quant() -> ModuleType:
    """torchao's quantizer; its import reports kernels that this machine cannot load."""
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    pytest.importorskip("torchao", reason="the oracle of these tests: pip install torchao")
    return importlib.import_module("torchao.optim.quant_utils")


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_is_torchaos(signed: bool, torchao_quant: ModuleType) -> None:
    """All 256 values have torchao's bits."""
    expected = torch.tensor(torchao_quant.create_dynamic_map(signed), dtype=torch.float32)

    assert torch.equal(dynamic_map(signed, CPU), expected)


def test_the_tables_facts() -> None:
    """Ends, zeros and steps as published."""
    signed, unsigned = dynamic_map(True, CPU), dynamic_map(False, CPU)
    assert len(signed) == len(unsigned) == 256
    assert signed[zero_code(True)] == unsigned[zero_code(False)] == 0
    assert signed[-1] == unsigned[-1] == 1
    assert signed[0].item() == pytest.approx(-0.99297, abs=1e-5)
    assert signed[128].item() == pytest.approx(5.5e-7)
    assert unsigned[1].item() == pytest.approx(3.25e-7)


def hard_values(signed: bool) -> torch.Tensor:
    """Random values, every entry, every midpoint, and the neighbors of both, in [-1, 1]."""
    table = dynamic_map(signed, CPU)
    middles = (table[:-1] + table[1:]) / 2
    exact = torch.cat([table, middles, table[:-1] + (table[1:] - table[:-1]) * 0.5])
    near = [exact]
    for direction in (torch.inf, -torch.inf):
        step = exact
        for _ in range(3):
            step = torch.nextafter(step, torch.tensor(direction))
            near.append(step)
    random = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    values = torch.cat([*near, random / random.abs().max(), random.sign() * 10 ** (-4 + random)]).clamp(-1, 1)
    return values if signed else values.abs()


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_torchaos(signed: bool, torchao_quant: ModuleType) -> None:
    """Every hard value gets torchao's code."""
    values = torch.cat([torch.ones(1), hard_values(signed)])  # one block with scale 1
    codes, scales = encoded(values.view(1, 1, 1, -1), DynamicMap.of(signed, CPU))

    assert scales.item() == 1
    assert torch.equal(
        codes.view(-1), torchao_quant.quantize_8bit_with_qmap(values, dynamic_map(signed, CPU))
    )


@pytest.mark.parametrize("signed", [True, False])
def test_any_number_has_an_index_in_bounds(signed: bool) -> None:
    """Also NaN and numbers beyond 1, which never occur: compiled look-ups would read other memory."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    values = bits.view(torch.float32)
    codes = adamw8bit._codes_of(values, adamw8bit._bins(signed, CPU))

    assert (codes[values > 1] == 255).all()
    assert (codes[values < -1] == (0 if signed else 255)).all()


@pytest.mark.parametrize("signed", [True, False])
def test_no_entry_is_nearer(signed: bool) -> None:
    """Brute force: the chosen entry is at the least distance, up to fp32 rounding of the distance."""
    values = torch.cat([torch.ones(1), hard_values(signed)])
    codes, scales = encoded(values.view(1, 1, 1, -1), DynamicMap.of(signed, CPU))
    chosen = decoded(codes, scales, DynamicMap.of(signed, CPU)).view(-1)
    least = (values.double()[:, None] - dynamic_map(signed, CPU).double()).abs().amin(1)

    assert ((values.double() - chosen.double()).abs() <= least * (1 + 1e-6) + 1e-12).all()


def test_zero_blocks_stay_zero() -> None:
    """A block of zeros decodes to zeros, and has a scale that is a number."""
    for signed in (True, False):
        codes, scales = encoded(torch.zeros(2, 1, 1, 8), DynamicMap.of(signed, CPU))
        assert (codes == zero_code(signed)).all()
        assert (decoded(codes, scales, DynamicMap.of(signed, CPU)) == 0).all()


def test_a_cut_inside_a_block_changes_values() -> None:
    """Negative control: quantized in misaligned halves, a quarter and more of all values differ."""
    full = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    grid, map_ = grid_of((4096,), Flat(256)), DynamicMap.of(True, CPU)

    def round_trip(part: torch.Tensor) -> torch.Tensor:
        return grid.untiled(decoded(*encoded(grid.tiled(part), map_), map_), part.numel())

    whole = round_trip(full)
    aligned = torch.cat([round_trip(part) for part in full.split([1024, 3072])])
    cut = torch.cat([round_trip(part) for part in full.split([1000, 3096])])

    assert torch.equal(aligned, whole)
    assert (cut != whole).float().mean() > 0.25
