"""A call that communicates, by one rank alone in training: all ranks raise and name it, and no data is mixed up."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.meetings import meetings, short_waits
from vescale_fsdp import RaggedShard, distribute_tensor, fully_shard
from vescale_fsdp.checkpoint import state_dict
from vescale_fsdp.collectives import group_log
from vescale_fsdp.collectives.process_groups import break_group
from vescale_fsdp.dtensor import redistribute
from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.integrations import as_fsdp2

FULL = StateDictOptions(full_state_dict=True)
pytestmark = pytest.mark.filterwarnings("ignore::vescale_fsdp.errors.GatherWarning")


def soon() -> AbstractContextManager[None]:
    """Ranks look for differences every tenth of a second, and late ones are reported."""
    return short_waits(order=0.8, ask=0.1, report=0.2)


def model_on(mesh: Any) -> Any:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


# What rank 0 calls -> a word of the error.
CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "full": (lambda model: model[0].weight.full_tensor(), "full_tensor"),
    "moved": (lambda model: model[0].weight.redistribute(placements=[Shard(0)]), "redistribute"),
    "async": (lambda model: redistribute(model[0].bias, [Replicate()], async_op=True), "redistribute"),
    "state": (lambda model: state_dict.get_model_state_dict(model, options=FULL), "get_model_state_dict"),
    "torch": (lambda model: torch_state_dict.get_model_state_dict(model, options=FULL), "redistribute"),
    "column": (lambda model: model[0].weight[:, 0], "aten.s"),
    "unshard": (lambda model: model[0].unshard(), "unshard of 0"),
    "sum": (lambda model: model[0].weight.sum().item(), "aten.sum"),
    "norm": (lambda model: model[0].weight.norm().item(), "norm"),
}
MOMENTS = ("first", "forward", "backward", "clip", "step", "stepped")


def alone(call: str, moment: str) -> tuple[str, bool]:
    """Rank 0 makes a call in the third step: the error on this rank, and whether all gathered weights were right."""
    model = model_on(cpu_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    start = 0 if moment == "first" else 2
    whole = {name: p.full_tensor() for name, p in model[0].named_parameters()}
    is_right = []
    model[0].register_forward_hook(
        lambda module, args, out: is_right.append(
            all(torch.equal(p, whole[name]) for name, p in module.named_parameters())
        ),
        prepend=True,  # before the unit reshards
    )

    def may_call(step: int, now: str) -> None:
        if step == start and now == moment and dist.get_rank() == 0:
            CALLS[call][0](model)

    def train() -> None:
        for step in range(6):
            may_call(step, "first")
            loss = model(torch.ones(4, 5)).sum()
            may_call(step, "forward")
            loss.backward()
            may_call(step, "backward")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            may_call(step, "clip")
            optimizer.step()
            optimizer.zero_grad()
            may_call(step, "stepped")

    # The step of a rank that raises in it is not ended: the hook is the optimizer's last one.
    optimizer.register_step_post_hook(lambda *args: may_call(len(is_right) - 1, "step"))
    with soon(), pytest.raises(LifecycleError) as caught:
        train()
    return f"{caught.value.expected} {caught.value.got}", all(is_right)


@pytest.mark.parametrize(
    ("call", "moment"),
    [("full", moment) for moment in MOMENTS] + [(call, "stepped") for call in CALLS if call != "full"],
)
def test_one_rank_alone_raises_on_all(call: str, moment: str) -> None:
    """Within the bound: the error names the call, and the collective that other ranks have started instead."""
    for text, is_right in run_ranks(2, alone, call, moment):
        assert CALLS[call][1] in text and is_right


# -- what stays allowed ---------------------------------------------------------------------------------


def one_replica() -> list[float]:
    """The ranks of one replica gather and reduce in every step, the others do not; then all train on."""
    mesh = cpu_mesh(2, 2)
    model = model_on(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with soon():
        for _ in range(3):
            model(torch.ones(4, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if mesh.get_local_rank(0) == 1:
                full = model[0].weight.full_tensor()
                torch.testing.assert_close(model[0].weight.sum().full_tensor(), full.sum())
        return model[0].weight.full_tensor().flatten().tolist()


def test_one_replica_may_call_alone() -> None:
    """A call needs the ranks that have the pieces, not their replicas."""
    first, *others = run_ranks(4, one_replica)
    assert all(other == first for other in others)


def in_a_thread() -> int:
    """A thread gathers over groups of its own, while the main thread trains and gathers over the same ranks."""
    model = model_on(cpu_mesh())
    ranks = list(range(dist.get_world_size()))
    other = DeviceMesh.from_group(dist.new_group(ranks), "cpu", torch.tensor(ranks))
    saved = distribute_tensor(torch.arange(12.0), other, [RaggedShard((0,), (1, 2))])

    def save() -> None:
        for _ in range(20):
            assert saved.full_tensor().tolist() == list(range(12))

    with ThreadPoolExecutor(1) as thread:
        saving = thread.submit(save)
        for _ in range(10):
            model(torch.ones(4, 5)).sum().backward()
            model[0].weight.full_tensor()
        saving.result(timeout=60.0)
    log = group_log.log_of(other.get_group())
    assert log is not None
    return log.count


def test_threads_meet_over_groups_of_their_own() -> None:
    """Each group counts its own calls."""
    assert run_ranks(2, in_a_thread) == [20, 20]


def in_steps() -> list[int]:
    """The meetings of two steps, and of unshards of a unit."""
    model = model_on(cpu_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    mesh, counts = cpu_mesh(), []

    def step() -> None:
        model(torch.ones(4, 5)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()

    unit = model[0]
    for call in (
        step,
        step,
        lambda: unit.unshard(async_op=True).wait(),
        unit.unshard,
        unit.reshard,
        unit.unshard,
    ):
        before = meetings(mesh)
        call()
        counts.append(meetings(mesh) - before)
    return counts


def test_training_does_not_meet() -> None:
    """Only the first use of a model does, and an unshard that gathers and waits."""
    assert run_ranks(2, in_steps) == [[1, 0, 0, 0, 0, 1]] * 2


# -- ranks that will not come ---------------------------------------------------------------------------


def without_the_other() -> str:
    """Rank 1 has closed its connections: the error of rank 0."""
    mesh = cpu_mesh()
    tensor = distribute_tensor(torch.arange(12.0), mesh, [RaggedShard((0,), (1, 2))])
    if dist.get_rank() == 1:
        break_group(mesh.get_group())
        return ""
    with soon(), pytest.raises(LifecycleError) as caught:
        tensor.full_tensor()
    return str(caught.value.got)


def test_a_rank_that_has_ended_is_named() -> None:
    """Long before the time-out."""
    first, _ = run_ranks(2, without_the_other)
    assert "ranks 1" in first


def installed() -> int:
    """The meetings of torch's getter under `as_fsdp2`, for four parameters."""
    model = model_on(cpu_mesh())
    with as_fsdp2():
        state = torch_state_dict.get_model_state_dict(model, options=FULL)
    assert len(state) == 4 and not any(isinstance(value, DTensor) for value in state.values())
    return meetings(cpu_mesh())


def test_torchs_getter_meets_once_under_as_fsdp2() -> None:
    """Training stacks call it for full states."""
    assert run_ranks(2, installed) == [1, 1]
