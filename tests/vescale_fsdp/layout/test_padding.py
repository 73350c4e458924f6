"""Too few blocks for the ranks: said once with the cures, refused above the hard limit, silent when small."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import pytest
from torch import nn

from tests.support.distributed import cpu_mesh, run_ranks
from tests.vescale_fsdp.layout.test_planner import layer
from vescale_fsdp import PaddingPolicy, Rows, Whole, fully_shard
from vescale_fsdp.errors import LayoutError, PaddingWarning
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.padding import _warn_once, check_padding, find_remedies, remedy_texts
from vescale_fsdp.layout.planner import TensorSpec, padding_ratio, plan_buffers, plan_group

NEVER = PaddingPolicy(scatter="never")


@pytest.fixture(autouse=True)
def _forget_warnings() -> Iterator[None]:
    _warn_once.cache_clear()
    yield
    _warn_once.cache_clear()


def gpt_oss(num_shards: int) -> GroupLayout:
    return plan_group(layer("gpt-oss-120B", Rows(128)), num_shards, scatter="never")


def test_cures_are_found_by_planning() -> None:
    """Each cure, planned, has the padding it promises, and that is below the limit."""
    layout = gpt_oss(1024)
    specs = layer("gpt-oss-120B", Rows(128))

    cures = find_remedies(layout, 0.25, "never")

    assert cures.num_shards is not None
    assert cures.modules_per_unit is not None
    assert cures.smaller_blocks is not None
    shards, ratio = cures.num_shards
    assert (shards, ratio) == (512, padding_ratio(plan_buffers(specs, 512, scatter="never")))
    modules, ratio = cures.modules_per_unit
    twice = [TensorSpec(f"{i}.{s.fqn}", s.shape, s.dtype, s.block_numel) for i in range(2) for s in specs]
    assert (modules, ratio) == (2, padding_ratio(plan_buffers(twice, 1024, scatter="never")))
    names, divisor, ratio = cures.smaller_blocks
    assert (names, divisor) == (("self_attn.o_proj.weight",), 4)
    fewer = [
        TensorSpec(s.fqn, s.shape, s.dtype, s.block_numel // (4 if s.fqn in names else 1)) for s in specs
    ]
    assert ratio == padding_ratio(plan_buffers(fewer, 1024, scatter="never")) < 0.25


def test_cures_that_do_not_exist_are_left_out() -> None:
    """One matrix that stays whole: no smaller block, and only the default granularity is left to name."""
    layout = plan_group([TensorSpec("w", (8, 28), "float32", 224)], 5)

    cures = find_remedies(layout, 0.25)

    assert (cures.num_shards, cures.smaller_blocks) == (None, None)
    assert cures.modules_per_unit == (4, 0.25)  # one each on four of five ranks
    assert any("granularity" in text for text in remedy_texts(cures, layout))


def test_all_blocks_are_made_smaller_where_no_single_class_helps() -> None:
    """Where every matrix is in the way, the offer is for all of them."""
    cures = find_remedies(plan_group(layer("Llama-3-8B", Rows(128)), 1024), 0.25)

    assert cures.smaller_blocks is not None
    assert len(cures.smaller_blocks[0]) == 7


def test_above_the_limit_warns_once_with_numbers_and_cures() -> None:
    """The layers of a model are alike: one warning, with padding, blocks per rank and every cure."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            check_padding(gpt_oss(1024), NEVER)

    (warning,) = caught
    assert warning.category is PaddingWarning
    for word in (
        "111%",
        "1,024 shards",
        "512 ranks (HSDP, 2 replicas)",
        "Rows(32)",
        "o_proj",
    ):
        assert word in str(warning.message)


@pytest.mark.parametrize("policy", [NEVER, PaddingPolicy(warn_above=1.2)])
def test_below_the_limit_is_silent(policy: PaddingPolicy) -> None:
    """No word at 5.7 % by default, nor at 111 % where 120 % are allowed, nor on other ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_padding(gpt_oss(512 if policy is NEVER else 1024), policy)
        check_padding(gpt_oss(1024), NEVER, warn=False)


def test_small_groups_are_not_worth_a_word() -> None:
    """Padding of a few bytes per rank is ignored, whatever its ratio."""
    tiny = plan_group([TensorSpec("w", (7, 5), "float32", 35)], 100)
    assert tiny.padding_ratio > 99

    check_padding(tiny, PaddingPolicy())
    with pytest.raises(LayoutError):
        check_padding(tiny, PaddingPolicy(ignore_below_bytes=0))


def test_above_the_hard_limit_is_refused_with_cures_and_the_way_out() -> None:
    """The error has the numbers, the place, the cures and the argument that overrides it; inf accepts."""
    layout = gpt_oss(8192)
    with pytest.raises(LayoutError) as error:
        check_padding(layout, NEVER)

    assert "1000%" in str(error.value.expected) and "1592%" in str(error.value.got)
    assert error.value.where == layout.slots[0].fqn
    assert "HSDP" in str(error.value.todo) and "PaddingPolicy(refuse_above=...)" in str(error.value.todo)
    with pytest.warns(PaddingWarning):
        check_padding(layout, PaddingPolicy(scatter="never", refuse_above=math.inf))


@pytest.mark.parametrize(
    "options", [{"warn_above": -0.1}, {"warn_above": 2.0, "refuse_above": 1.0}, {"scatter": "perhaps"}]
)
def test_policies_that_cannot_be(options: dict[str, object]) -> None:
    """Limits in the wrong order and unknown modes are refused."""
    with pytest.raises(LayoutError) as refused:
        PaddingPolicy(**options)  # type: ignore[arg-type]
    assert all(f"{name}={value!r}" in str(refused.value.got) for name, value in options.items())


def shard_whole(policy: PaddingPolicy) -> list[str]:
    model = nn.Linear(1024, 1024, bias=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard(model, mesh=cpu_mesh(), granularity=Whole(), padding_policy=policy)
    return [f"{warning.category.__name__} {warning.filename}" for warning in caught]


def test_fully_shard_warns_on_one_rank_at_the_caller() -> None:
    """A 4 MiB matrix kept whole on 2 ranks pads 100 %: rank 0 warns, pointing at the fully_shard call."""
    first, second = run_ranks(2, shard_whole, PaddingPolicy())

    assert second == []
    assert len(first) == 1
    assert first[0].startswith("PaddingWarning")
    assert first[0].endswith("test_padding.py")


def refuse() -> object:
    with pytest.raises(LayoutError) as refused:
        shard_whole(PaddingPolicy(refuse_above=0.5))
    return refused.value.expected


def test_fully_shard_refuses_on_every_rank() -> None:
    """Above the hard limit no rank goes on."""
    for expected in run_ranks(2, refuse):
        assert "50%" in expected
