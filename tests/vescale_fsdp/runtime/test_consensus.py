"""Ranks that have sharded different models, or one model differently, hear of it at its first use: all of them."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode

from tests.support import models
from tests.support.distributed import cpu_mesh, run_cases, run_fresh, run_ranks
from vescale_fsdp import Rows, fully_shard
from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.optim import step_in_backward
from vescale_fsdp.runtime.comm.group_comm import SETTERS, GroupSettings
from vescale_fsdp.runtime.consensus import reach_consensus
from vescale_fsdp.runtime.fsdp_module import FSDPModule
from vescale_fsdp.runtime.fsdp_state import state_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def build(difference: str, odd: bool, mesh: Any) -> nn.Module:
    """A stack of sharded blocks; the odd rank builds or shards it otherwise."""
    blocks = 4 if odd and difference == "blocks" else 3
    model: nn.Module = models.build(num_blocks=blocks, dim=8 if odd and difference == "size" else 7)
    options: dict[str, Any] = {"mesh": mesh}
    if odd:
        options |= {
            "granularity": {"granularity": Rows(3)},
            "policy": {"mp_policy": BF16},
            "reshard": {"reshard_after_forward": False},
            "offload": {"offload_policy": CPUOffloadPolicy()},
        }.get(difference, {})
    if odd and difference == "frozen":
        model.blocks[1].up.weight.requires_grad_(False)  # type: ignore[index, union-attr]
    if odd and difference == "dtype":
        model.to(torch.float64)
    shards = list(model.blocks)  # type: ignore[arg-type]
    for block in shards[1:] if odd and difference == "units" else shards:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if odd and difference in SWITCHES:
        SWITCHES[difference](model)
    if odd and difference == "replaced":
        model.head.weight = nn.Parameter(torch.zeros(3, 7))  # type: ignore[union-attr]
    if odd and difference == "added":
        model.blocks[1].adapter = nn.Linear(7, 7)  # type: ignore[index, union-attr]
    if odd and difference == "replaced by what cannot be":
        model.head.weight = nn.Parameter(torch.zeros(3, 8))  # type: ignore[union-attr]
    return model


def first_use(difference: str, shape: tuple[int, ...], odd: int, use: str) -> tuple[str, str] | None:
    """What most ranks have and what others have, of the error that this rank raises."""
    is_odd = dist.get_rank() == odd
    model = build(difference, is_odd, cpu_mesh(*shape))
    try:
        if use == "unshard":
            model.unshard()  # type: ignore[operator]
        else:
            model(torch.randn(2, 5, dtype=torch.float64 if is_odd and difference == "dtype" else None))
    except LifecycleError as error:
        return str(error.expected), str(error.got)
    return None


class OwnGather:
    """Never called: the comparison comes first."""


def settings(**changes: Any) -> Callable[[Any], object]:
    """What a method sets that is a collective itself, or has never run on a GPU."""
    return lambda model: [group.comm.change(**changes) for group in state_of(model).groups]  # type: ignore[union-attr]


SWITCHES: dict[str, Callable[[Any], object]] = {
    "set_narrow_reduction False": lambda model: model.set_narrow_reduction(False),
    "set_gradient_divide_factor 3.0": lambda model: model.set_gradient_divide_factor(3.0),
    "set_force_sum_reduction_for_comms True": lambda model: model.set_force_sum_reduction_for_comms(True),
    "sums of micro-batches True": lambda model: model.set_requires_gradient_sync(False),
    "set_requires_gradient_sync False": lambda model: model.set_requires_gradient_sync(False),
    "set_requires_all_reduce False": lambda model: model.set_requires_all_reduce(False),
    "set_custom_all_gather OwnGather": lambda model: model.set_custom_all_gather(OwnGather()),
    "set_custom_reduce_scatter OwnGather": lambda model: model.set_custom_reduce_scatter(OwnGather()),
    "set_separate_reduce_scatter_group True": settings(separate_reductions=True),
    "fully_shard(check_collectives=) 2": settings(check_every=2),
    "set_all_reduce_hook True": lambda model: model.set_all_reduce_hook(print),
    "step_in_backward True": lambda model: step_in_backward(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    ),
    "set_keep_unsharded_storage True": lambda model: model.set_keep_unsharded_storage(True),
    "set_reduce_scatter_unused_params True": lambda model: model.set_reduce_scatter_unused_params(True),
    "set_unshard_in_backward False": lambda model: model.set_unshard_in_backward(False),
    "set_reshard_after_backward False": lambda model: model.set_reshard_after_backward(False),
    "set_is_last_backward False": lambda model: model.set_is_last_backward(False),
    "set_manual_backward_finalization True": lambda model: model.set_manual_backward_finalization(True),
    "set_reduce_scatter_max_input_buffers 2": lambda model: model.set_reduce_scatter_max_input_buffers(2),
    "reshard_after_forward False": lambda model: model.set_reshard_after_forward(False),
    "prefetch lists [['blocks.1'], None]": lambda model: model.set_modules_to_forward_prefetch(
        [model.blocks[1]]
    ),
    "prefetch lists [None, []]": lambda model: model.set_modules_to_backward_prefetch([]),
}
NOT_COMPARED = {
    "set_post_optim_event": "an event of this rank",
    "set_reduce_scatter_divide_factor": "the older name of set_gradient_divide_factor",
    "set_allocate_memory_from_process_group_for_comm": "refused",
    "set_symm_mem_for_comm": "refused",
    "set_reshard_after_forward": "as fully_shard's argument",
    "set_modules_to_forward_prefetch": "as lists",
    "set_modules_to_backward_prefetch": "as lists",
}
DIFFERENCES = {
    "granularity": "block",
    "policy": "bfloat16",
    "reshard": "reshard_after_forward False",
    "offload": "CPUOffloadPolicy",
    "frozen": "up.weight",
    "dtype": "float64",
    "blocks": "blocks.3",
    "size": "8",
    "units": "blocks.0",
    "replaced": "head.weight",
    "added": "blocks.1.adapter.weight",
    "replaced by what cannot be": "shape (3, 8)",
}


def test_every_rank_hears_of_a_difference() -> None:
    """The error names both sides and the first thing that differs."""
    found = run_cases(3, first_use, [(difference, (3,), 1, "forward") for difference in DIFFERENCES])

    for (difference, word), by_rank in zip(DIFFERENCES.items(), found, strict=True):
        for expected, got in by_rank:
            assert "ranks [0, 2]" in expected and "ranks [1]" in got, difference
            assert word in expected + got, difference


def test_every_rank_hears_of_a_switch_that_one_has_set() -> None:
    """What decides who sends what in which order: all-to-all here and reduce-scatter there would wait for ever."""
    found = run_cases(2, first_use, [(switch, (2,), 1, "forward") for switch in SWITCHES])

    for switch, by_rank in zip(SWITCHES, found, strict=True):
        for expected, got in by_rank:
            assert switch in got and switch not in expected


def test_every_switch_is_compared() -> None:
    """All that can be set on a unit, and every field of its groups' settings."""
    compared = {text.split()[0] for text in SWITCHES}
    for method in vars(FSDPModule):
        assert method in compared or method in NOT_COMPARED or not method.startswith("set_"), method
    changed = {text.rpartition(" ")[0] for text in SWITCHES}
    assert set(SETTERS) == {each.name for each in fields(GroupSettings)}
    assert set(SETTERS.values()) <= changed


def cause_of(difference: str) -> tuple[str, str | None]:
    """The problem and the remedy of the error of this rank, where rank 1 differs."""
    model = build(difference, dist.get_rank() == 1, cpu_mesh(3))
    with pytest.raises(LifecycleError) as caught:
        model(torch.randn(2, 5))
    return caught.value.problem, caught.value.todo


def test_what_one_rank_cannot_use_is_the_problem_of_all() -> None:
    """Not that ranks differ: whoever reads any rank's error reads what to do on the one that failed."""
    cases = ("added", "replaced by what cannot be", "granularity", "policy")
    found = {}
    for case, by_rank in zip(cases, run_cases(3, cause_of, [(each,) for each in cases]), strict=True):
        (found[case],) = set(by_rank)
    assert found["granularity"] == found["policy"]  # ranks that differ, and no rank that fails
    assert len({problem for problem, _ in found.values()}) == len({todo for _, todo in found.values()}) == 3


def set_late() -> None:
    model: Any = build("none", False, cpu_mesh())
    model.set_narrow_reduction(False)
    model.blocks[0].set_narrow_reduction(True, recurse=False)
    models.loss_of(model, models.batch(0, 0)).backward()
    for module in (model, model.blocks[0]):
        with pytest.raises(LifecycleError) as late:
            module.set_narrow_reduction(True)
        assert "set_narrow_reduction" in str(late.value.todo)
    narrow = [
        [group.comm.settings.narrow for group in state_of(each).groups] for each in (*model.blocks, model)
    ]  # type: ignore[union-attr]
    assert narrow == [[True], [False], [False], [False]], "a refused call changes nothing"


def test_what_was_compared_cannot_change_on_a_rank() -> None:
    """After the first use nobody would hear of it."""
    run_ranks(1, set_late)


def test_replicas_are_compared_too() -> None:
    """HSDP: a rank that differs is heard of by those that share neither row nor column with it."""
    found = run_cases(4, first_use, [("granularity", (2, 2), odd, "forward") for odd in (0, 3)])

    for odd, by_rank in zip((0, 3), found, strict=True):
        others = [rank for rank in range(4) if rank != odd]
        for expected, got in by_rank:
            assert f"ranks [{odd}]" in expected + got and f"ranks {others}" in expected + got


def test_unshard_is_a_first_use() -> None:
    """Gathering by hand compares as a forward does."""
    for _, got in run_ranks(2, first_use, "policy", (2,), 1, "unshard", timeout_s=60.0):
        assert "ranks [1]" in got


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_equal_ranks_pass(shape: tuple[int, ...]) -> None:
    """The control: no error where nothing differs, on one axis and on two."""
    world = math.prod(shape)
    cases = [("none", shape, 1, use) for use in ("forward", "unshard")]
    assert run_cases(world, first_use, cases) == [[None] * world] * 2


def count_collectives(shape: tuple[int, ...]) -> list[int]:
    model = build("none", False, cpu_mesh(*shape))
    counts = []
    for step in range(3):
        with CommDebugMode() as counter:
            models.loss_of(model, models.batch(step, dist.get_rank())).backward()
        counts.append(counter.get_total_counts())
    return counts


@pytest.mark.parametrize(("shape", "axes"), [((2,), 1), ((2, 2), 2)])
def test_the_first_step_compares_once(shape: tuple[int, ...], axes: int) -> None:
    """One all-reduce per mesh axis at the first step for the whole model, none afterwards."""
    for first, second, third in run_ranks(2 * axes, count_collectives, shape):
        assert first == second + axes
        assert second == third > 0


def stages_run() -> float:
    """Two pipeline stages, each sharded over its own two ranks: they differ, and may."""
    mesh = cpu_mesh(2, 2, names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    torch.manual_seed(stage)
    model = models.MLP(7) if stage == 0 else nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 7), nn.Linear(7, 7))
    options: dict[str, Any] = {"mesh": mesh["dp"], "granularity": Rows(2) if stage else None}
    for child in list(model.children())[:stage]:
        fully_shard(child, **options)
    fully_shard(model, **options)
    return float(model(torch.ones(2, 7)).detach().sum())


def test_stages_may_differ() -> None:
    """Only ranks of a unit's own mesh are compared."""
    sums = run_ranks(4, stages_run)
    assert sums[0] == sums[1] != sums[2] == sums[3]


class Lines(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))


def logged(level: int) -> tuple[list[tuple[int, str]], list[int]]:
    """What two forwards of a model of four units log, and the bytes of the shards that this rank really has."""
    logger, kept = logging.getLogger("vescale_fsdp"), Lines()
    assert not logger.handlers and logger.level == logging.NOTSET
    logger.addHandler(kept)
    logger.setLevel(level)
    try:
        model = models.build()
        model.blocks[0].half()
        for block in model.blocks:
            fully_shard(block, granularity=Rows(4))
        fully_shard(model, mesh=cpu_mesh(2, 2))
        assert kept.lines == []
        model.blocks[0].float()
        for _ in range(2):
            model(models.batch(0, 0))
    finally:
        logger.removeHandler(kept)
        logger.setLevel(logging.NOTSET)
    units = [*model.blocks, model]
    return kept.lines, [sum(group.shard.nbytes for group in state_of(unit).groups) for unit in units]  # type: ignore[union-attr]


def numbers_of(text: str) -> list[int]:
    """The whole numbers in a text."""
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]


def test_what_was_sharded_is_logged_once() -> None:
    """A line per unit and one for the model, at the first use: by rank 0 at INFO, by the others at DEBUG."""
    at_info, at_debug = run_cases(4, logged, [(logging.INFO,), (logging.DEBUG,)])

    assert [len(lines) for lines, _ in at_info] == [5, 0, 0, 0]
    for rank, (lines, shard_bytes) in enumerate(at_debug):
        assert [level for level, _ in lines] == [logging.DEBUG if rank else logging.INFO] * 5
        texts = [text for _, text in lines]
        assert [text.partition(":")[0].split() for text in texts] == [
            ["unit", "FSDPStack"],
            ["unit", "blocks.0"],
            ["unit", "blocks.1"],
            ["unit", "blocks.2"],
            ["model", "FSDPStack"],
        ]
        numbers = [numbers_of(text.partition(":")[2]) for text in texts]
        assert numbers[0][:4] == [3, 63, 2, 2]  # parameters, elements, ranks, replicas
        assert numbers[1][:3] == [6, 244, 4]
        assert [found[-1] for found in numbers[1:4] + numbers[:1]] == [*shard_bytes]
        assert numbers[4][:6] == [4, 21, 795, 2, 2, 4] and numbers[4][-1] == sum(shard_bytes)
        assert not all("padding 0.00%" in text for text in texts)


def uses_added(kind: str) -> str:
    """What the first forward of a model says of a parameter that sharding has left plain."""
    mesh = cpu_mesh(2)
    with torch.device("meta" if kind == "ignored on meta" else "cpu"):
        model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if kind == "before the root":
        fully_shard(model[0], mesh=mesh)  # type: ignore[index]
        model[0].adapter = nn.Linear(4, 4)  # type: ignore[index, union-attr]
    if kind == "replicated":
        replicate(model[1])  # type: ignore[index]
    kept = {*model[1].parameters()} if kind.startswith("ignored") else None  # type: ignore[index]
    fully_shard(model, mesh=mesh, ignored_params=kept)
    if kind == "ignored on meta":
        model.to_empty(device="cpu")  # new parameters in place of those of meta
    if kind == "ignored, moved":
        model[1] = nn.Sequential(model[1])  # type: ignore[index]
    if kind in ("added", "frozen"):
        model[1].adapter = nn.Linear(4, 4).requires_grad_(kind == "added")  # type: ignore[index, union-attr]
    if kind == "a new module":
        model[1] = nn.Linear(4, 4)  # type: ignore[index]
    try:
        model(torch.zeros(2, 4))
    except LifecycleError as error:
        return str(error.got)
    return ""


ADDED = {
    "added": "1.adapter.weight",
    "a new module": "1.weight",
    "before the root": "0.adapter.weight",
    "frozen": "",
    "ignored": "",
    "ignored, moved": "",
    "ignored on meta": "",
    "replicated": "",
}


@pytest.mark.parametrize("kind", ADDED)
def test_parameters_that_no_unit_reduces(kind: str) -> None:
    """Trainable ones are refused: each rank would train its own values."""
    for reported in run_ranks(2, uses_added, kind):
        assert ADDED[kind] in reported and bool(reported) == bool(ADDED[kind])


def overlapping_meshes(is_equal: bool) -> str | None:
    """The first error of ranks that share meshes by twos, where only the first two differ."""
    rank = dist.get_rank()
    units = {}
    for name, ranks in (("left", [0, 1]), ("right", [1, 2])):
        mesh = DeviceMesh("cpu", ranks)
        if rank in ranks:
            odd = name == "left" and rank == 0 and not is_equal
            units[state_of(fully_shard(nn.Linear(4, 4), mesh=mesh, reshard_after_forward=not odd))] = name
    try:
        reach_consensus(units)  # type: ignore[arg-type]
    except LifecycleError as error:
        return f"{error.expected} {error.got}"
    return None


def test_ranks_that_share_only_another_mesh_hear_of_it() -> None:
    """A rank in both meshes tells the ranks of the second what is wrong in the first; none of them waits."""
    assert run_ranks(3, overlapping_meshes, True) == [None] * 3

    assert all("'left'" in str(told) for told in run_ranks(3, overlapping_meshes, False, timeout_s=60.0))


SILENT = """
import logging, os, sys, warnings
warnings.simplefilter("error")
assert "vescale_fsdp" not in sys.modules
os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 1)
os.dup2(1, 2)
import vescale_fsdp, vescale_fsdp.checkpoint, vescale_fsdp.optim
from vescale_fsdp import fully_shard
logger = logging.getLogger("vescale_fsdp")
assert not logger.handlers and not logging.root.handlers and logger.level == logging.NOTSET, logger.handlers
"""


def test_importing_logs_nothing_and_installs_no_handler(tmp_path: Path) -> None:
    """Nothing is printed, and no logger is set up, by the import alone."""
    printed = tmp_path / "printed"

    run_fresh(exec, SILENT, {"path": str(printed)})

    assert printed.read_text() == ""
