"""Every kind of ragged placement keeps the promises of `tests.support.dtensor_conformance`."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Replicate, Shard

from tests.support.dtensor_conformance import Conformance, Cut
from vescale_fsdp import RaggedShard
from vescale_fsdp.layout.placement import StridedRaggedShard


def _one(shape: tuple[int, ...], *units: int, dims: tuple[int, ...] = (0,)) -> Cut:
    return Cut(shape, (len(units),), (RaggedShard(dims, units),))


@pytest.mark.parametrize(
    "cut",
    [
        _one((7, 5), 1),
        _one((6, 4), 1, 2),
        _one((7, 5), 13, 0, 22, dims=(0, 1)),
        _one((3, 2, 5), 0, 7, 0, 23, dims=(0, 1, 2)),
        _one((11,), 5, 0, 3, 1, 2),
        _one((4, 3, 2, 3), 5, 7, dims=(0, 1)),
    ],
    ids=str,
)
class TestRaggedShard(Conformance):
    """One mesh axis, whole rows or single elements per unit, empty ranks included."""


@pytest.mark.parametrize("cut", [_one((4, 3), 0, 1, 0, dims=()), _one((5,), 1, 0, dims=())], ids=str)
class TestWholeTensorOnOneRank(Conformance):
    """dims=() keeps the tensor uncut."""


@pytest.mark.parametrize(
    "cut",
    [
        Cut((6, 5), (2, 2), (Replicate(), RaggedShard((0, 1), (11, 19)))),
        Cut((6, 5), (2, 2), (RaggedShard((0,), (1, 5)), Replicate())),
    ],
    ids=str,
)
class TestHybrid(Conformance):
    """HSDP: replicas on one axis."""


@pytest.mark.parametrize(
    "cut",
    [
        Cut((6, 4), (2, 2), (RaggedShard((0,), (1, 2)), Shard(0))),
        Cut((6, 4), (2, 2), (StridedRaggedShard((0, 1), (5, 7), 2), Shard(0))),
        Cut((4, 3, 6), (2, 2), (RaggedShard((0, 1), (5, 7)), Shard(-1))),
        *(
            pytest.param(cut, marks=pytest.mark.part("numerics"))
            for cut in (
                Cut((8, 3), (2, 2), (Shard(0), RaggedShard((0,), (0, 1)))),
                Cut((4, 6), (2, 2), (RaggedShard((0, 1), (5, 7)), Shard(1))),
                Cut((5, 4), (2, 2), (RaggedShard((0, 1), (1, 1)), Shard(0))),
            )
        ),
    ],
    ids=str,
)
class TestBesideShard(Conformance):
    """Tensor and expert parallelism cut the tensor first, evenly or not."""


@pytest.mark.parametrize(
    "cut",
    [
        Cut((4, 6), (1, 2, 2), (Replicate(), RaggedShard((0, 1), (5, 1)), Shard(0))),
        pytest.param(
            Cut((8, 6), (2, 1, 2), (RaggedShard((0,), (1, 1)), Shard(1), Shard(0))),
            marks=pytest.mark.part("numerics"),
        ),
    ],
    ids=str,
)
class TestThreeAxes(Conformance):
    """Three mesh axes, at most one of them ragged."""
