"""One device as 8 and as 64 ranks: training on the accelerator's branch has the bits of a plain model."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from tools.mirror import Case, check, mirrored, train
from vescale_fsdp.collectives import operations, slice_exchange
from vescale_fsdp.runtime.comm.unsharded_grads import UnshardedGrads

CPU = torch.device("cpu")
IN_A_PART = pytest.mark.part("numerics")


@pytest.fixture(autouse=True)
def small_pieces() -> Iterator[None]:
    """Slices are received in several pieces."""
    with mock.patch.object(slice_exchange, "_PIECE_BYTES", 1 << 13):
        yield


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        (8, "bf16 narrow"),
        (8, "fp32"),
        (8, "bf16 sums"),
        (8, "accumulate"),
        (8, "two groups"),
        (64, "bf16 narrow"),
        *(pytest.param(*row, marks=IN_A_PART) for row in ((8, "bf16"), (8, "recompute"), (64, "fp32"))),
    ],
)
def test_bits_of_a_plain_model(world_size: int, name: str) -> None:
    """Whatever travels, in whichever dtype."""
    with mirrored(world_size) as group:
        assert check(name, CPU) == {"training moves parameters": True, "plain model": True}
        # All parameters of a block are one gather; a forward and a backward of 5 units take 9.
        assert group.calls["all_gather"] + group.calls["all_gather in place"] >= 27
        is_narrow = name == "bf16 narrow"
        assert (group.calls["all_to_all"] > 50) == is_narrow
        num_groups = 9 if name == "two groups" else 5  # in three steps
        assert group.calls["reduce_scatter"] == (0 if is_narrow else 3 * num_groups)
        assert group.calls["all_gather coalesced"] == (24 if name == "two groups" else 0), group.calls


def test_a_gradient_that_is_lost_is_seen() -> None:
    """The plain model tells what the mirror has trained on."""

    def lose(grads: UnshardedGrads) -> None:
        grads._kept.pop("down.bias", None)
        write(grads)

    write = UnshardedGrads.write_kept
    with mirrored(8), mock.patch.object(UnshardedGrads, "write_kept", lose):
        assert not check("fp32", CPU)["plain model"]


def test_the_group_holds_callers_to_its_contract() -> None:
    """A buffer that starts between packs of 16 bytes is refused, and one of another size."""
    with mirrored(8) as group:
        room = torch.zeros(8 * 512 + 1)
        with pytest.raises(AssertionError, match=r"\b16 bytes\b"):
            group._allgather_base(room[1:], torch.zeros(512))
        with (
            mock.patch.object(operations, "runs_beside", return_value=True),
            pytest.raises(AssertionError, match="communicator"),
        ):
            train(Case(steps=1), "cpu")
        with pytest.raises(AssertionError):
            group._allgather_base(room[:-2], torch.zeros(512))
        outcome, _, _ = train(Case(steps=1), "cpu")
        assert outcome.moved
