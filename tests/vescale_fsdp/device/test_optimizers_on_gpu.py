"""The optimizers and codecs on a GPU, beside their results on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.optim_cases import full_tensors
from vescale_fsdp.optim import AdamW8bit, Muon, Shampoo
from vescale_fsdp.optim.adamw8bit import DynamicMap, decoded, encoded
from vescale_fsdp.quantize import BlockCodec, Fp8Blocks, Mxfp8

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("codec", [Fp8Blocks(), Fp8Blocks(1, 128), Mxfp8()])
def test_codes_are_the_cpus(codec: BlockCodec) -> None:
    """Codes and scales have the CPU's bits."""
    x = full_tensors([(300, 200)], 0)["p0_300x200"]
    here, there = codec.quantize(x), codec.quantize(x.cuda())

    assert torch.equal(there.codes.cpu(), here.codes)
    assert torch.equal(there.scales.cpu(), here.scales)


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_is_the_cpus(signed: bool) -> None:
    """8-bit state has the CPU's bits."""
    x = full_tensors([(64, 256)], 0)["p0_64x256"].view(64, 1, 1, 256)
    x = x if signed else x.abs()
    here, there = DynamicMap.of(signed, x.device), DynamicMap.of(signed, torch.device("cuda"))
    codes, scales = encoded(x, here)
    there_codes, there_scales = encoded(x.cuda(), there)

    assert torch.equal(there_codes.cpu(), codes)
    assert torch.equal(there_scales.cpu(), scales)
    assert torch.equal(decoded(there_codes, there_scales, there).cpu(), decoded(codes, scales, here))


@pytest.mark.parametrize(
    ("cls", "options", "bound"),
    [
        (AdamW8bit, {"lr": 1e-2}, 1e-3),
        (Muon, {"lr": 1e-2}, 2e-2),
        (Shampoo, {"lr": 1e-2, "block_size": 32, "update_every": 2, "eps": 1e-6}, 2e-2),
    ],
)
def test_steps_are_near_the_cpus(cls: Any, options: dict[str, Any], bound: float) -> None:
    """Five steps lead to the CPU's parameters, within the rounding of matrix products."""
    ways = []
    for device in ("cpu", "cuda"):
        start = full_tensors([(96, 64)], 0)["p0_96x64"].to(device)
        param = torch.nn.Parameter(start.clone())
        optimizer = cls([param], **options)
        for step in range(5):
            param.grad = full_tensors([(96, 64)], 100 + step)["p0_96x64"].to(device)
            optimizer.step()
        ways.append((param.detach() - start).cpu())

    assert ((ways[1] - ways[0]).norm() / ways[0].norm()).item() < bound
