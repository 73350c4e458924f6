"""Codes in transfers are those of the whole tensor, wherever it is cut, and would not be without the agreement.

Experts of a fused tensor are quantized one by one, whole or in parts.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor as distribute_stock

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtype_zoo import same_bytes
from vescale_fsdp import RaggedShard, distribute_tensor
from vescale_fsdp.errors import PlacementError
from vescale_fsdp.quantize import BlockCodec, Fp8Blocks, Int8Rows, Mxfp8
from vescale_fsdp.torch_private import local_of
from vescale_fsdp.transfer.description import describe_states
from vescale_fsdp.transfer.links import codes, concatenate, index, permute, scales, stack
from vescale_fsdp.transfer.links import slice as part_of
from vescale_fsdp.transfer.memory import CutBlocks
from vescale_fsdp.transfer.plan import plan_transfer
from vescale_fsdp.transfer.transfer import Transfer

ROWS, COLS = 300, 320
CODECS: dict[str, BlockCodec] = {"fp8": Fp8Blocks(), "mxfp8": Mxfp8(), "int8": Int8Rows()}
# Items of the first rank: up to a boundary of blocks of all kinds, into the middle of a row, of a block of rows.
CUTS = {"whole blocks": 128 * COLS, "inside a row": 130 * COLS + 7, "inside a block": 200 * COLS}


def moved(codec: BlockCodec, first: int) -> tuple[bool, int]:
    """Whether both ranks get the whole tensor's codes and scales, and how many blocks are cut."""
    mesh = cpu_mesh()
    # Each row is larger than the one before: what one rank knows of a cut block is not what the other knows.
    full = (torch.randn(ROWS, COLS) * torch.linspace(1, 60, ROWS)[:, None]).bfloat16()
    wanted = codec.quantize(full.float())
    cut = RaggedShard.from_piece_numels(full.shape, [first, full.numel() - first])
    state = {"w": distribute_tensor(full, mesh, [cut])}
    parts = {"c": wanted.codes, "s": wanted.scales}
    into = {name: distribute_stock(torch.zeros_like(part), mesh, [Shard(0)]) for name, part in parts.items()}
    plan = plan_transfer(
        *describe_states(state, into), links={"c": codes("w", codec), "s": scales("w", codec)}
    )
    transfer = Transfer(plan)
    transfer.run(state, into)
    same = True
    for name, part in parts.items():
        local = local_of(into[name])
        assert local.numel() and plan.demand.sent.sum() > 0
        expected = local_of(distribute_stock(part, mesh, [Shard(0)]))
        same &= same_bytes(local, expected)
    return same, transfer._cut_blocks.total


def all_cuts() -> dict[str, tuple[bool, int, bool]]:
    """For each codec and cut: same codes, number of cut blocks, and same codes without the agreement."""
    real = CutBlocks.agree
    found = {}
    for name, codec in CODECS.items():
        for where, first in CUTS.items():
            torch.manual_seed(0)
            same, total = moved(codec, first)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(CutBlocks, "agree", lambda *_: None)
                torch.manual_seed(0)
                alone, _ = moved(codec, first)
            assert CutBlocks.agree is real
            found[f"{name} {where}"] = (same, total, alone)
    return found


def test_codes_are_those_of_the_whole_tensor() -> None:
    """FP8 by 128 x 128, MXFP8 and int8 rows. Cut blocks need the magnitudes of both ranks, whole blocks do not."""
    for found in run_ranks(2, all_cuts, timeout_s=120):
        assert all(same for same, _, _ in found.values()), found
        for where, (_, total, alone) in found.items():
            # Rows of int8 are cut where a row is, MXFP8's 32 items of a row likewise.
            is_cut = "inside a row" in where or where == "fp8 inside a block"
            assert (total > 0) is is_cut, (where, total)
            if not is_cut:
                assert alone, where
    # A cut block without an agreement has wrong codes on some rank.
    assert not all(found[where][2] for where in ("fp8 inside a block", "int8 inside a row"))


EXPERTS, OUT, IN, BLOCK = 3, 200, 96, (64, 40)  # no dim is a multiple of its block, nor half of OUT


def formula(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of one matrix, block by block, from the definition."""
    codes = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty([-(-size // step) for size, step in zip(matrix.shape, BLOCK, strict=True)])
    for row, col in np.ndindex(*scales.shape):
        block = tuple(slice(at * step, (at + 1) * step) for at, step in zip((row, col), BLOCK, strict=True))
        values = matrix[block].float()
        factor = 448 / values.abs().max()
        codes[block] = (values * factor).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales[row, col] = 1 / factor
    return codes.view(torch.uint8), scales


def fused_experts(first: int) -> dict[str, bool]:
    """Whether this rank's part of each target tensor has the formula's bits; the source is cut at item ``first``."""
    codec, half = Fp8Blocks(*BLOCK), OUT // 2
    full = (
        torch.randn(EXPERTS, OUT, IN) * torch.logspace(-3, 3, EXPERTS * OUT).view(EXPERTS, OUT, 1)
    ).bfloat16()
    cut = RaggedShard.from_piece_numels(full.shape, [first, full.numel() - first])
    state = {"w13": distribute_tensor(full, cpu_mesh(), [cut])}
    each = [formula(expert) for expert in full]
    parts = {"codes": torch.stack([one[0] for one in each]), "scales": torch.stack([one[1] for one in each])}
    links = {"codes": codes("w13", codec), "scales": scales("w13", codec)}
    for name, rows in (("gate", (0, half)), ("up", (half, OUT))):
        link = part_of("w13", rows[0], half, dim=1)
        wanted = [formula(expert[slice(*rows)]) for expert in full]
        for kind, of, place in (("codes", codes, 0), ("scales", scales, 1)):
            links[f"{name} {kind}"] = of(link, codec)
            parts[f"{name} {kind}"] = torch.stack([one[place] for one in wanted])
            links[f"expert 1 {name} {kind}"] = of(index(link, 1), codec)
            parts[f"expert 1 {name} {kind}"] = wanted[1][place]
    into = {
        name: distribute_stock(torch.zeros_like(wanted), cpu_mesh(), [Shard(wanted.dim() - 1)])
        for name, wanted in parts.items()
    }
    plan = plan_transfer(*describe_states(state, into), links=links)
    Transfer(plan).run(state, into)
    return {
        name: local_of(into[name]).equal(
            local_of(distribute_stock(wanted, cpu_mesh(), [Shard(wanted.dim() - 1)]))
        )
        for name, wanted in parts.items()
    }


def test_experts_are_quantized_one_by_one() -> None:
    """Codes and scales of a fused [experts, out, in] are those of each expert alone, also of halves of experts."""
    for first in (OUT * IN, OUT * IN + 130 * IN + 7):  # between two experts, inside a block of the second
        for found in run_ranks(2, fused_experts, first):
            assert len(found) == 10 and all(found.values()), found


def test_codes_of_joined_tensors_are_refused() -> None:
    """Blocks of a concatenation would span its tensors. An expert that does not exist is one of the plan's problems."""
    for link in (concatenate("q", "k"), permute("q"), index(stack("q", "k"), 0)):
        for kind in (codes, scales):
            with pytest.raises(PlacementError):
                kind(link, Fp8Blocks())
    source, target = describe_states({"w": torch.ones(2, 4, 4)}, {"c": torch.zeros(4, 4, dtype=torch.uint8)})
    with pytest.raises(PlacementError):
        plan_transfer(source, target, links={"c": codes(index("w", 2), Fp8Blocks())})
