"""Codes of a whole group at many ranks: the bits of single tensors, and numbers of launches that do not grow."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.vescale_fsdp.optim.test_launches_of_steps import LargestToo
from tests.vescale_fsdp.runtime.comm.test_launches import VIEWS
from vescale_fsdp import torch_modes
from vescale_fsdp.layout import GroupLayout, TensorSpec, plan_group
from vescale_fsdp.layout.group_layout import PieceRun, TensorSlot
from vescale_fsdp.quantize import BlockCodec, Fp8Blocks, Int8Rows, Mxfp8
from vescale_fsdp.quantize.coded_layout import coded_layout_of
from vescale_fsdp.quantize.quantized_gather import _CodedGather, _kernels_of
from vescale_fsdp.runtime.comm.dbuffer import DBuffer
from vescale_fsdp.torch_modes import CompiledFunction

FP8, ROWS = Fp8Blocks(4, 16), Int8Rows()
SHAPES = {
    "up": (40, 64),
    "down": (64, 48),
    "norm": (48,),
    "stack": (3, 8, 32),
    "head": (100, 48),
    "bias": (7,),
}


@dataclass(frozen=True)
class Case:
    """Tensors and their codecs; tensors that are not named have none."""

    codecs: dict[str, BlockCodec]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    master: str = "float32"
    odd: int = 0  # tensors that are decoded one by one

    def layout(self, world: int) -> GroupLayout:
        specs = [
            TensorSpec(fqn, shape, self.master, self._block(fqn, shape)) for fqn, shape in self.shapes.items()
        ]
        return plan_group(specs, world)

    def _block(self, fqn: str, shape: tuple[int, ...]) -> int:
        codec = self.codecs.get(fqn)
        return 1 if codec is None else codec.grid(shape).band_numel


MATRICES = [fqn for fqn, shape in SHAPES.items() if len(shape) > 1]
CASES = {
    "fp8": Case(dict.fromkeys(MATRICES, FP8)),
    "bf16 masters": Case(dict.fromkeys(MATRICES, FP8), master="bfloat16"),
    "mxfp8": Case(dict.fromkeys(MATRICES, Mxfp8())),
    "int8 rows": Case(dict.fromkeys(MATRICES, ROWS)),
    "vectors too": Case(dict.fromkeys(SHAPES, FP8), odd=1),  # 7 elements have no longer granule
    "two codecs": Case({"up": ROWS, "down": ROWS, "head": FP8, "stack": FP8}, odd=2),
    "short lines": Case({"conv": FP8, "up": FP8}, {"conv": (50, 2, 3, 3), "up": (40, 64)}, odd=1),
    "short lines alone": Case({"conv": FP8}, {"conv": (50, 2, 3, 3)}, odd=1),
}
# Two scattered tensors between others; the second one has lines of 5 elements.
SCATTERED = GroupLayout(
    num_shards=5,
    shard_numel=96,
    slots=(
        TensorSlot("a", (5, 32), "float32", 32, 0),
        TensorSlot("u", (6, 40), "float32", 40, 192, (PieceRun(2, 3, 80, 0),)),
        TensorSlot("v", (4, 5), "float32", 5, 160, (PieceRun(1, 1, 10, 64), PieceRun(3, 1, 10, 80))),
    ),
)


def gathered(layout: GroupLayout, codecs: dict[str, BlockCodec]) -> tuple[DBuffer, dict[str, torch.Tensor]]:
    """The full buffer in bf16 that every rank would decode, and the tensors."""
    torch.manual_seed(4)
    master = getattr(torch, layout.slots[0].dtype)
    tensors = {slot.fqn: torch.randn(slot.shape).to(master) for slot in layout.slots}
    coded = coded_layout_of(layout, codecs, torch.bfloat16)
    codes = torch.full((layout.num_shards, layout.shard_numel), 7, dtype=torch.uint8)
    rest = torch.full((layout.num_shards, coded.rest_bytes), 255, dtype=torch.uint8)
    for rank in range(layout.num_shards):
        shard = torch.full((layout.shard_numel,), torch.nan, dtype=master)  # padding may have any values
        for slot, piece in layout.pieces_of(rank):
            values = tensors[slot.fqn].view(-1)[piece.range.start : piece.range.stop]
            shard[piece.local_offset :][: piece.numel] = values
        gather_of(layout, codecs, rank)._encode(shard, codes[rank], rest[rank])
    full = torch.full((layout.numel,), torch.nan, dtype=torch.bfloat16)
    gather_of(layout, codecs, 0).decode(full, codes.view(-1), rest.view(-1))
    return DBuffer(layout, full), tensors


def gather_of(layout: GroupLayout, codecs: dict[str, BlockCodec], rank: int) -> _CodedGather:
    comm: Any = SimpleNamespace(rank=rank)
    return _CodedGather(coded_layout_of(layout, codecs, torch.bfloat16), comm, torch.bfloat16)


def check_bits(layout: GroupLayout, codecs: dict[str, BlockCodec]) -> None:
    """Every tensor of the buffer is what its codec makes of the full tensor, alone."""
    buffer, tensors = gathered(layout, codecs)
    for slot in layout.slots:
        codec, values = codecs.get(slot.fqn), tensors[slot.fqn]
        expected = values if codec is None else codec.quantize(values).dequantize(torch.bfloat16)
        got = torch.cat([piece.reshape(-1) for piece in buffer.pieces(slot)])
        assert torch.equal(got, expected.to(torch.bfloat16).view(-1)), slot.fqn


@pytest.mark.parametrize("world", [1, 3, 8, 64])
@pytest.mark.parametrize("name", CASES)
def test_tensors_have_the_bits_of_their_codec(name: str, world: int) -> None:
    """At every number of ranks, also of ranks that own nothing, and next to padding with NaN."""
    case = CASES[name]
    layout = case.layout(world)
    check_bits(layout, case.codecs)
    coded = coded_layout_of(layout, case.codecs, torch.bfloat16)
    assert len({part.slot for part in coded.odd}) == case.odd


@pytest.mark.parametrize("codecs", [{"u": FP8, "a": FP8}, {"u": FP8, "v": FP8}, {"a": ROWS, "u": FP8}])
def test_pieces_of_scattered_tensors_are_a_shard_apart(codecs: dict[str, BlockCodec]) -> None:
    """Their pieces are one shard apart; with and without a codec, and of odd lines."""
    check_bits(SCATTERED, {fqn: type(codec)(1, codec.cols) for fqn, codec in codecs.items()})


# Operators that launch nothing.
HOST = {f"aten.{name}" for name in ("empty", "as_strided", "slice", "select", "split", "alias", "reshape")}


def launches(layout: GroupLayout, codecs: dict[str, BlockCodec]) -> tuple[int, int, int]:
    """Launches of rank 0's encoding and of decoding, and elements of the largest new tensor while decoding."""
    coded = coded_layout_of(layout, codecs, torch.bfloat16)
    gather = gather_of(layout, codecs, 0)
    codes = torch.zeros(layout.numel, dtype=torch.uint8)
    rest = torch.zeros(layout.num_shards * coded.rest_bytes, dtype=torch.uint8)
    full = torch.zeros(layout.numel, dtype=torch.bfloat16)
    gather.decode(full, codes, rest)  # creates the table
    with LargestToo() as encoding:
        gather._encode(torch.zeros(layout.shard_numel), codes[: layout.shard_numel], rest[: coded.rest_bytes])
    with LargestToo() as decoding:
        gather.decode(full, codes, rest)
    counts = [
        sum(seen.names[name] for name in seen.names if name not in VIEWS | HOST)
        for seen in (encoding, decoding)
    ]
    return counts[0], counts[1], decoding.largest


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_launches_do_not_grow(name: str) -> None:
    """With 8, 64, 256 and 1,024 ranks, and with three times the tensors, they are as many as with one rank."""
    case = CASES[name]
    more = {f"{fqn}{number}": shape for fqn, shape in SHAPES.items() for number in range(3)}
    many = Case({fqn: next(iter(case.codecs.values())) for fqn in more if len(more[fqn]) > 1}, more)
    _, alone, _ = launches(case.layout(1), case.codecs)
    counts = {
        launches(each.layout(world), each.codecs)[:2] for world in (8, 64, 256, 1024) for each in (case, many)
    }
    assert {decoding for _, decoding in counts} == {alone}
    # Only a rank with tensors without a codec copies their values.
    assert max(encoding for encoding, _ in counts) - min(encoding for encoding, _ in counts) <= 1


def test_no_temporary_is_as_large_as_the_unit() -> None:
    """Uncompiled steps work on a limited number of elements; so do those of odd tensors."""
    for name in ("fp8", "short lines alone"):
        layout, codecs = CASES[name].layout(2), CASES[name].codecs
        with (
            mock.patch.dict(torch_modes._CHUNK_NUMEL, {"cpu": 256}),
            mock.patch("vescale_fsdp.quantize.quantized_gather._CHUNK_NUMEL", 256),
        ):
            check_bits(layout, codecs)
            _, _, bounded = launches(layout, codecs)
        _, _, free = launches(layout, codecs)
        assert bounded < layout.numel / 3 < free


def test_layouts_are_shared_while_they_are_used() -> None:
    """Equal layers have one table, and it ends with them."""
    case = CASES["fp8"]
    one, other = (gather_of(case.layout(8), case.codecs, 0) for _ in range(2))
    assert one.coded is other.coded
    table = one.coded.table(torch.device("cpu"), fake=False)
    assert table is other.coded.table(torch.device("cpu"), fake=False)
    assert table.nbytes * 4 <= one.coded.layout.numel  # granules of 16


def test_without_a_compiler_it_runs_as_written() -> None:
    """It warns once, computes the same, and does not try again."""

    def add(values: torch.Tensor, others: torch.Tensor) -> None:
        values.add_(others)

    failed = mock.Mock(side_effect=torch._dynamo.exc.TorchDynamoException("no compiler"))
    with (
        mock.patch.object(torch_modes, "_COMPILED_NUMEL", 1),
        mock.patch.object(torch_modes, "compiles_on", return_value=True),
        mock.patch.object(torch, "compile", return_value=failed),
    ):
        step, values = CompiledFunction(add), torch.ones(4, 2)
        with pytest.warns(UserWarning, match=add.__name__):
            step(values, torch.ones(2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(values, torch.ones(2))
    assert torch.equal(values, torch.full((4, 2), 3.0))
    assert failed.call_count == 1


def test_errors_of_a_compiled_step_are_raised() -> None:
    """Only failures to compile lead to another way."""

    def fail(values: torch.Tensor) -> None:
        raise AssertionError

    with (
        mock.patch.object(torch_modes, "_COMPILED_NUMEL", 1),
        mock.patch.object(torch_modes, "compiles_on", return_value=True),
        mock.patch.object(torch, "compile", return_value=mock.Mock(side_effect=RuntimeError)),
        pytest.raises(RuntimeError),
    ):
        CompiledFunction(fail)(torch.ones(4, 2))


@pytest.mark.part("numerics")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which torch.compile imports
@pytest.mark.parametrize("name", ["fp8", "bf16 masters", "mxfp8", "int8 rows"])
def test_compiled_steps_have_the_same_bits(name: str) -> None:
    """One kernel decodes all tensors of a unit, of any size, with the bits of the steps as written."""
    from torch._inductor import metrics

    case = CASES[name]
    gather = gather_of(case.layout(8), case.codecs, 0)
    codec, granule = gather.coded.main, gather.coded.granule
    torch.compiler.reset()
    _kernels_of.cache_clear()  # they know what has been compiled
    metrics.reset()
    with mock.patch.object(torch_modes, "_COMPILED_NUMEL", 1):
        for num_rows in (5, 70):
            values, codes = (
                torch.zeros(num_rows, granule, dtype=dtype) for dtype in (torch.bfloat16, torch.uint8)
            )
            blocks = torch.zeros(num_rows, dtype=torch.int32)
            _kernels_of(codec).decode(values, codes, blocks, torch.zeros(3, dtype=codec.scale_dtype))
            assert metrics.generated_kernel_count == 1
        for world in (8, 64):
            check_bits(case.layout(world), case.codecs)
    assert not _kernels_of(codec).decode._cannot_compile
