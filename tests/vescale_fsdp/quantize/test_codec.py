"""FP8 and MXFP8 blocks: the reference functions' bits, and a shard's codes are the full tensor's."""

from __future__ import annotations

import importlib
import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.optim_cases import as_fsdp2, as_ragged, full_tensors, full_value
from vescale_fsdp import Element
from vescale_fsdp.conversion.quantization.float_codes import Fp8Encoding
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.quantize import BlockCodec, Fp8Blocks, Int8Rows, Mxfp8, Quantized

CODECS = {
    "fp8-128x128": Fp8Blocks(),
    "fp8-1x128": Fp8Blocks(1, 128),
    "mxfp8": Mxfp8(),
    "mx-32x32": Mxfp8(32, 32),
    "int8": Int8Rows(),
}
# Whole blocks, ragged edges both ways, a stack, a vector.
SHAPES = ((640, 400), (300, 200), (130, 70), (4, 128, 64), (1000,))


def reference_fp8(x: torch.Tensor, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of each block, by loops over the definition."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = []
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], cols):
            area = (slice(top, top + rows), slice(left, left + cols))
            factor = 448.0 / x[area].abs().max()
            codes[area] = (x[area] * factor).clamp(-448, 448).to(torch.float8_e4m3fn)
            scales.append((1 / factor).item())
    return codes, torch.tensor(scales)


@pytest.mark.parametrize("block", [(128, 128), (1, 128)])
@pytest.mark.parametrize("shape", [(256, 384), (130, 70)])
def test_fp8_is_the_definition(shape: tuple[int, int], block: tuple[int, int]) -> None:
    """Codes and scales equal a block-by-block reference, short blocks included."""
    x = full_tensors([shape], 0)[f"p0_{shape[0]}x{shape[1]}"]
    expected_codes, expected_scales = reference_fp8(x, *block)
    got = Fp8Blocks(*block).quantize(x)

    assert torch.equal(got.codes, expected_codes.view(torch.uint8))
    assert torch.equal(got.scales.view(-1), expected_scales)


# Zero, the least and the greatest subnormal, the least block whose factor is finite and its neighbor, 1, the greatest
# finite value, infinity and two NaNs; of both signs.
_CORNERS = (
    0,
    1,
    0x7FFFFF,
    0x03E00000,
    0x03E00001,
    0x3F800000,
    0x7F7FFFFF,
    0x7F800000,
    0x7F800001,
    0x7FC00000,
)
_ANY_BITS = st.sampled_from(_CORNERS).flatmap(lambda bits: st.sampled_from((bits, bits | 1 << 31)))


@given(st.lists(st.one_of(_ANY_BITS, st.integers(0, 2**32 - 1)), min_size=24, max_size=24))
def test_fp8_has_the_bits_of_the_converter(bits: list[int]) -> None:
    """Torch's codec and numpy's agree on every block: zeros, subnormals, infinities and NaNs too."""
    x = np.array(bits, dtype=np.uint32).view(np.float32).reshape(2, 2, 3, 2)  # [bands, rows, blocks, cols]
    got = Fp8Blocks(2, 2).quantize(torch.from_numpy(x.reshape(4, 6)))
    encoding = Fp8Encoding(2, 2)
    factors, scales = encoding.scales(np.abs(x).max((1, 3)))
    with np.errstate(invalid="ignore", over="ignore"):
        codes = encoding.codes(x * factors[:, None, :, None])

    assert got.codes.numpy().tobytes() == codes.tobytes()
    np.testing.assert_array_equal(got.scales.numpy(), scales)
    np.testing.assert_array_equal(np.isnan(scales), ~np.isfinite(x).all((1, 3)))
    is_broken = got.dequantize().isnan().numpy().reshape(x.shape).any((1, 3))
    np.testing.assert_array_equal(is_broken, np.isnan(scales))


def test_int8_rows_are_the_definition() -> None:
    """One scale per row, codes rounded to the nearest, ties to even; a row with a NaN stays visible."""
    x = full_tensors([(5, 70)], 0)["p0_5x70"]
    got = Int8Rows().quantize(x)

    scales = 1 / (127 / x.abs().amax(1))
    assert torch.equal(got.scales.view(-1), scales)
    assert torch.equal(got.codes.view(torch.int8), (x / scales[:, None]).round().to(torch.int8))
    assert (got.dequantize() - x).abs().max() <= scales.max() / 2 * 1.001
    x[3, 4] = torch.nan
    assert Int8Rows().quantize(x).dequantize()[3].isnan().all()
    assert Int8Rows(1, 32).quantize(x).scales.shape == (5, 3)


def test_mxfp8_is_torchaos() -> None:
    """Codes and E8M0 scales equal torchao's to_mx, from tiny to huge blocks and zeros."""
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    pytest.importorskip("torchao", reason="the oracle of this test: pip install torchao")
    mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    x = full_tensors([(64, 256)], 0)["p0_64x256"] * torch.logspace(-30, 30, 64).view(64, 1)
    x[3] = 0
    x[5, 40] = float("nan")
    scales, codes = mx.to_mx(x, torch.float8_e4m3fn, 32)
    got = Mxfp8().quantize(x)

    assert torch.equal(got.scales, scales.view(torch.uint8))
    finite = torch.ones(64, 256, dtype=torch.bool)
    finite[5, 32:64] = False
    assert torch.equal(got.codes[finite], codes.view(torch.uint8)[finite])
    assert got.dequantize()[~finite].isnan().all()


@pytest.mark.parametrize("name", CODECS)
def test_round_trip_is_close(name: str) -> None:
    """Decoded values are within e4m3's half step of the block's scale; zeros and signs stay."""
    x = full_tensors([(300, 200)], 0)["p0_300x200"]
    x[0] = 0
    back = CODECS[name].quantize(x).dequantize()

    assert ((back - x).norm() / x.norm()).item() < 0.04
    assert (back[0] == 0).all()


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_broken_weight_stays_visible(codec: BlockCodec) -> None:
    """NaN and infinity decode to NaN in their block, and nowhere else."""
    x = torch.ones(256, 256)
    x[0, 0], x[200, 200] = float("nan"), float("inf")
    back = codec.quantize(x).dequantize()

    assert back[0, 0].isnan()
    assert back[200, 200].isnan()
    assert (back[140:190, :100] == 1).all()


def sharded_run(name: str, kind: str) -> list[tuple[bool, bool, bool, int]]:
    """Per tensor: full codes, full scales and values equal those of the full tensor; elements held."""
    codec = CODECS[name]
    mesh = cpu_mesh(2, 2) if kind == "hybrid" else cpu_mesh()
    shapes = [(256, 384), (512, 130)] if kind == "fsdp2" else SHAPES
    tensors = full_tensors(shapes, 0)
    params = as_fsdp2(tensors, mesh) if kind == "fsdp2" else as_ragged(tensors, mesh, codec.granularity)
    results = []
    for fqn, param in params.items():
        whole, local = codec.quantize(tensors[fqn]), codec.quantize(param)
        gathered = local.full()
        results.append(
            (
                torch.equal(gathered.codes, whole.codes),
                torch.equal(gathered.scales.view(-1), whole.scales.view(-1)),
                torch.equal(full_value(local.dequantize()), whole.dequantize()),
                param.to_local().numel(),  # type: ignore[attr-defined]
            )
        )
    return results


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("world", "kind"), [(2, "ragged"), (4, "ragged"), (4, "hybrid"), (2, "fsdp2")])
def test_gathered_codes_are_the_full_tensors(name: str, world: int, kind: str) -> None:
    """Quantize-then-gather equals gather-then-quantize, bit for bit: codes, scales, values."""
    results = run_ranks(world, sharded_run, name, kind)
    for rank in results:
        assert all(codes and scales and values for codes, scales, values, _ in rank)
    assert any(sum(rank[i][3] > 0 for rank in results) > 1 for i in range(len(results[0])))


def misaligned_run() -> tuple[object, float]:
    """Which cut was refused, and the share of values that cut blocks would change."""
    full = full_tensors([(300, 200)], 0)["p0_300x200"]
    param = as_ragged({"w": full}, cpu_mesh(), Element())["w"]
    with pytest.raises(LayoutError) as caught:
        Fp8Blocks().quantize(param)
    parts = [Fp8Blocks().quantize(part).dequantize() for part in full.split([150, 150])]
    return caught.value.got, (
        torch.cat(parts) != Fp8Blocks().quantize(full).dequantize()
    ).float().mean().item()


def test_a_cut_block_is_refused_because_it_would_differ() -> None:
    """Negative control: blocks cut at row 150 give other values; so a cut inside a block is refused."""
    cut, differing = run_ranks(2, misaligned_run)[0]
    assert cut == "[0, 30016) of 60000"
    assert differing > 0.1


def test_square_blocks_commute_with_transposition() -> None:
    """128 x 128 blocks of the transpose are the transposed blocks: one copy serves forward and backward."""
    x = full_tensors([(256, 384)], 0)["p0_256x384"]
    straight, turned = Fp8Blocks().quantize(x), Fp8Blocks().quantize(x.t().contiguous())

    assert torch.equal(straight.codes.t(), turned.codes)
    assert torch.equal(straight.scales.t(), turned.scales)


@pytest.mark.parametrize("codec", [Fp8Blocks(), Mxfp8()])
def test_bytes_per_element(codec: BlockCodec) -> None:
    """1.0002 bytes per element in 128 x 128 blocks, 1.031 in MX."""
    parts: Quantized = codec.quantize(torch.zeros(1024, 1024))
    total = sum(t.numel() * t.element_size() for t in (parts.codes, parts.scales))

    assert total / 1024**2 == pytest.approx(1.00024 if isinstance(codec, Fp8Blocks) else 1.03125, rel=1e-5)


def test_powers_of_two_are_exact() -> None:
    """Every E8M0 code decodes to its power of two, and 255 to NaN."""
    codec, codes = Mxfp8(), torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([2.0 ** (code - 127) for code in range(255)])

    assert torch.equal(codec.factors_of(codes)[:255], expected)
    assert codec.factors_of(codes)[255].isnan()


def test_empty_blocks_are_refused() -> None:
    """A block must have at least one element."""
    with pytest.raises(LayoutError) as caught:
        Fp8Blocks(0, 128)
    assert (caught.value.got, caught.value.where) == ("0 x 128", "Fp8Blocks")
