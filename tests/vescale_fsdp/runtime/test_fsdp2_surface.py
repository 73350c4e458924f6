"""FSDP2's switches, one by one, against one process."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.models import check_steps, refused, shard
from vescale_fsdp import RaggedDTensor, Rows, fully_shard, register_fsdp_forward_method, share_comm_ctx
from vescale_fsdp.errors import ArgumentError, LifecycleError
from vescale_fsdp.runtime.fsdp_state import state_of
from vescale_fsdp.runtime.param_group import GroupState, ParamGroup


def reshard_to_part() -> int:
    model = shard(models.build(), reshard_after_forward=2)
    seen = []
    block = state_of(model.blocks[0]).groups[0]
    model.blocks[1].register_forward_pre_hook(lambda *_: seen.append(block.state))
    states: list[GroupState] = []
    handle = model.embed.register_full_backward_hook(lambda *_: states.append(block.state))
    check_steps(model, models.build(), 1)
    handle.remove()  # the part went when the gather of the backward had read it
    check_steps(model, _copy_of(model), 2)
    with torch.no_grad():
        model(models.batch(0, 0))
        states.append(block.state)
        assert states == [GroupState.SHARDED, GroupState.PARTLY_SHARDED]
        for param in model.parameters():
            param.mul_(0.5)  # as an optimizer would: the parts are out of date
        x, plain = torch.ones(4, 7), _copy_of(model)
        torch.testing.assert_close(model.blocks[0](x), plain.blocks[0](x))  # without a forward of the root
    check_steps(model, _copy_of(model), 1)
    return sum(state is GroupState.PARTLY_SHARDED for state in seen)


def _copy_of(model: nn.Module) -> nn.Module:
    plain = models.build()
    with torch.no_grad():
        for (name, param), mine in zip(plain.named_parameters(), model.parameters(), strict=True):
            param.copy_(mine.full_tensor())
            assert name
    return plain


def test_reshard_after_forward_to_a_smaller_group() -> None:
    """A number keeps parameters over groups of that many ranks between forward and backward."""
    assert run_ranks(4, reshard_to_part) == [5] * 4  # 3 steps, 1 forward, 1 step


def bad_part_sizes() -> None:
    with refused(ArgumentError, got=3, expected=2):
        fully_shard(models.build(), mesh=cpu_mesh(), reshard_after_forward=3)
    with pytest.warns(UserWarning, match="reshard_after_forward=1"):
        fully_shard(models.build(), mesh=cpu_mesh(), reshard_after_forward=1)


def test_reshard_after_forward_numbers_are_checked() -> None:
    """A number that does not divide the ranks is refused; 1 means False, with a warning."""
    run_ranks(2, bad_part_sizes)


def offloaded() -> None:
    model = shard(models.build(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    check_steps(model, models.build())
    assert all(p.device.type == "cpu" and p.to_local().device.type == "cpu" for p in model.parameters())


def test_a_model_with_cpu_offload_trains_alike() -> None:
    """CPUOffloadPolicy is accepted and trains alike (on a CPU mesh everything is on the host anyway)."""
    run_ranks(2, offloaded)


def offloaded_from_an_accelerator() -> None:
    for pin in (True, False):
        model = fully_shard(nn.Linear(5, 3), mesh=cpu_mesh(), offload_policy=CPUOffloadPolicy(pin))
        group = state_of(model).groups[0]
        with mock.patch.object(ParamGroup, "is_offloaded", True):
            with mock.patch("torch.zeros") as zeros, mock.patch("torch.empty_like") as empty:
                group.new_shard(torch.float32, torch.device("cuda"))
                group._room_on_host(group.shard)
            for asked in (zeros, empty):
                assert torch.device(asked.call_args.kwargs["device"]).type == "cpu"
                assert asked.call_args.kwargs["pin_memory"] is pin
            group.shard = mock.Mock(is_meta=False, device=torch.device("cuda:0"))
            with refused(LifecycleError, got="cuda:0", where="weight"):
                model(models.batch(0, 0))


def test_memory_that_offloading_asks_for() -> None:
    """Shards and reduced gradients of an accelerator's unit lie on the host, pinned if asked, or are refused."""
    run_ranks(1, offloaded_from_an_accelerator)


def list_unit() -> None:
    model = models.build()
    fully_shard([model.embed, model.blocks[0]], mesh=cpu_mesh())
    fully_shard(list(model.blocks)[1:], mesh=cpu_mesh(), granularity=Rows(2))
    fully_shard(model, mesh=cpu_mesh())
    assert state_of(model.embed) is state_of(model.blocks[0])
    assert len(state_of(model.embed).groups[0].params) > 6
    check_steps(model, models.build())


def test_a_list_of_modules_is_one_unit() -> None:
    """Modules of a list share one gather and one reduction."""
    run_ranks(2, list_unit)


def ignored() -> None:
    model = models.build()
    left = model.blocks[0].up.weight
    fully_shard(model, mesh=cpu_mesh(), ignored_params={left})
    assert model.blocks[0].up.weight is left
    assert not isinstance(left, RaggedDTensor)
    models.loss_of(model, models.batch(0, dist.get_rank())).backward()
    plain = models.build()
    models.loss_of(plain, models.batch(0, dist.get_rank())).backward()
    torch.testing.assert_close(left.grad, plain.blocks[0].up.weight.grad)  # this rank's own, unreduced


def test_ignored_params_are_left_alone() -> None:
    """Ignored parameters stay plain and are not reduced."""
    run_ranks(2, ignored)


class TwoWays(models.Stack):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(2):  # reads the root's parameters before, between and behind its forward
                x = self(x + self.embed.bias.mean()) @ self.head.weight[:, :5]
        return x


def other_methods() -> None:
    model = models.build()
    model.__class__ = TwoWays
    shard(model)
    for method in ("encode", "generate"):
        register_fsdp_forward_method(model, method)
    plain = models.build()
    with torch.no_grad():
        torch.testing.assert_close(
            model.generate(models.batch(1, 0)), TwoWays.generate(plain, models.batch(1, 0))
        )
    assert isinstance(model.embed.weight, RaggedDTensor)
    x = models.batch(0, dist.get_rank())
    torch.testing.assert_close(model.encode(x), plain.embed(x))
    model.encode(x).pow(2).mean().backward()
    torch.stack([plain.embed(models.batch(0, r)).pow(2).mean() for r in range(2)]).mean().backward()
    torch.testing.assert_close(model.embed.weight.grad.full_tensor(), plain.embed.weight.grad)
    with refused(ArgumentError, got="no_such"):
        register_fsdp_forward_method(model, "no_such")
    register_fsdp_forward_method(plain, "anything")  # no-op on a plain module


def test_registered_methods_gather_and_reduce_like_forward() -> None:
    """A registered method gathers, reshards and reduces like forward."""
    run_ranks(2, other_methods)


def pipeline_stages() -> None:
    stages = [shard(models.build(seed)) for seed in (1, 1)]
    share_comm_ctx(stages)
    assert state_of(stages[0]).comm is state_of(stages[1].blocks[2]).comm
    for stage in stages:
        check_steps(stage, models.build(), 2)


def test_roots_that_share_communication_train_as_alone() -> None:
    """Two roots with one context train as alone."""
    run_ranks(2, pipeline_stages)


def optimizer_in_backward() -> None:
    model, reference = shard(models.build()), models.build()
    fired = []
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)

        def step(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()
            fired.append(id(p))

        param.register_post_accumulate_grad_hook(step)
    for s in range(2):
        _, grads = models.reference_grads(reference, s, 2)
        models.loss_of(model, models.batch(s, dist.get_rank())).backward()
        with torch.no_grad():
            for name, plain in reference.named_parameters():
                plain -= 0.1 * grads[name]
    assert len(fired) == 2 * len(list(model.parameters()))
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.full_tensor(), reference.get_parameter(name), msg=name)


def test_post_accumulate_hooks_can_step_in_the_backward() -> None:
    """Post-accumulate hooks of the sharded parameters fire after each reduction."""
    run_ranks(2, optimizer_in_backward)


def explicit_prefetch() -> None:
    model = shard(models.build(num_blocks=4))
    blocks = list(model.blocks)
    for block, following in zip(blocks, blocks[2:], strict=False):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    inside: list[GroupState] = []
    watched = state_of(blocks[2]).groups[0]
    blocks[0].register_forward_hook(lambda *_: inside.append(watched.state))
    check_steps(model, models.build(num_blocks=4))
    assert inside[0] is not GroupState.SHARDED  # gathered two blocks ahead, in the first forward already
    with refused(ArgumentError, got="Linear"):
        blocks[0].set_modules_to_forward_prefetch([nn.Linear(1, 1)])


def test_lists_say_what_is_gathered_ahead() -> None:
    """A user's lists say what is gathered ahead."""
    run_ranks(2, explicit_prefetch)


def by_hand() -> None:
    model = shard(models.build())
    plain = models.build()
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    weight = model.blocks[0].up.weight
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, plain.blocks[0].up.weight)
    model.blocks[0].reshard()
    assert isinstance(model.blocks[0].up.weight, RaggedDTensor)
    check_steps(model, plain)
    with torch.inference_mode():
        model(models.batch(0, 0))
    model.eval()
    with torch.no_grad():
        model(models.batch(0, 0))
    model.reshard()
    check_steps(model, _copy_of(model), 1)


def test_unshard_and_reshard_by_hand_and_inference() -> None:
    """Parameters can be gathered before the first forward; inference leaves training as it was."""
    run_ranks(2, by_hand)


def inference_before_training() -> None:
    model, plain = shard(models.build()), models.build()
    x = models.batch(0, 0)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), plain(x))
    for param in model.parameters():
        assert not param.is_inference()
    assert all(isinstance(param, RaggedDTensor) for param in model.parameters())
    check_steps(model, plain)


def test_the_first_forward_may_be_one_in_inference_mode() -> None:
    """Buffers made for it serve training as well (torch 2.13's FSDP2 fails there)."""
    run_ranks(2, inference_before_training)


class Shallow(models.Stack):
    """Runs its first blocks only, as many as it is told."""

    depth = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks[: self.depth]:
            x = block(x)
        return self.head(x)


def weights_swapped_around_evaluation() -> None:
    model, plain = models.build(), models.build()
    model.__class__ = plain.__class__ = Shallow
    shard(model)
    rank, x = dist.get_rank(), models.batch(9, 0)
    outputs = []
    for each in (model, plain):
        params = list(each.parameters())
        with torch.no_grad():
            outputs.append(each(x))  # before, after and between changes: a forward without a backward
            raw = [param.clone() for param in params]
            for factor in (0.5, 2.0):
                each.depth = (
                    1  # the second block is gathered ahead, as it ran the last time, and does not run
                )
                each(x)
                each.depth = 3
                for param, value in zip(params, raw, strict=True):
                    param.copy_(value * factor)
                outputs.append(each(x))
            for param, value in zip(params, raw, strict=True):
                param.copy_(value)
    for mine, other in zip(outputs[:3], outputs[3:], strict=True):
        torch.testing.assert_close(mine, other)
    check_steps(model, plain, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, grads = models.reference_grads(plain, 1, dist.get_world_size())
    models.loss_of(model, models.batch(1, rank)).backward()
    with torch.no_grad():
        model(x)
        optimizer.step()
        for name, param in plain.named_parameters():
            param -= 0.1 * grads[name]
        torch.testing.assert_close(model(x), plain(x))


def test_forwards_without_a_backward_leave_nothing_out_of_date() -> None:
    """Weights may change behind an evaluation: the root's too are gathered anew (torch 2.13's FSDP2 keeps them)."""
    run_ranks(2, weights_swapped_around_evaluation)


def zeroed_between_forward_and_backward(set_to_none: bool) -> None:
    model, plain = shard(models.build()), models.build()
    for step in range(2):
        loss = models.loss_of(model, models.batch(step, dist.get_rank()))
        model.zero_grad(set_to_none)
        loss.backward()
        _, grads = models.reference_grads(plain, step, dist.get_world_size())
        for name, param in model.named_parameters():
            assert isinstance(param.grad, RaggedDTensor)
            torch.testing.assert_close(param.grad.full_tensor(), grads[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_forward_and_backward(set_to_none: bool) -> None:
    """The model's own zero_grad reaches sharded gradients while the root holds full parameters."""
    run_ranks(2, zeroed_between_forward_and_backward, set_to_none)


def frozen_then_thawed() -> None:
    model, reference = shard(models.build()), models.build()
    for m in (model, reference):
        m.blocks[1].requires_grad_(False)
    rank = dist.get_rank()
    models.loss_of(model, models.batch(0, rank)).backward()
    assert all(p.grad is None for p in model.blocks[1].parameters())
    model.zero_grad()
    for m in (model, reference):
        m.blocks[1].requires_grad_(True)
    check_steps(model, reference)


def test_requires_grad_may_change_between_iterations() -> None:
    """A frozen unit is gathered and not reduced; thawed, it trains."""
    run_ranks(2, frozen_then_thawed)


def labels() -> set[str]:
    model = shard(models.build())
    models.loss_of(model, models.batch(0, dist.get_rank())).backward()
    with torch.profiler.profile() as profile:
        models.loss_of(model, models.batch(0, dist.get_rank())).backward()
    return {event.key for event in profile.key_averages() if event.key.startswith("FSDP::")}


def test_traces_hold_the_ranges_that_tools_look_for() -> None:
    """Traces hold the ranges that trace tools look for."""
    for found in run_ranks(2, labels):
        for label in ("root_pre_forward", "root_post_backward_callback"):
            assert f"FSDP::{label}" in found
        for label in (
            "pre_forward",
            "all_gather",
            "all_gather_copy_out",
            "post_forward",
            "pre_backward",
            "post_backward_accumulate",
            "post_backward_reshard",
            "post_backward_rs_wait",
            "post_backward_reduce",
        ):
            assert f"FSDP::{label} (blocks.1)" in found, sorted(found)
        assert "FSDP::forward_prefetch for blocks.1" in found
        assert "FSDP::backward_prefetch for blocks.0" in found


def chunked_loss() -> None:
    model, reference = shard(models.build()), models.build()
    rank = dist.get_rank()
    for step in range(2):
        out = model(models.batch(step, rank))
        for part in range(2):
            model.set_is_last_backward(part == 1)
            out[2 * part : 2 * part + 2].pow(2).sum().backward(retain_graph=part == 0)
        for r in range(2):
            (reference(models.batch(step, r)).pow(2).sum() / 2).backward()
    for name, param in model.named_parameters():
        expected = reference.get_parameter(name).grad
        torch.testing.assert_close(param.grad.full_tensor(), expected, rtol=1e-4, atol=1e-5, msg=name)


def test_several_backwards_of_one_forward() -> None:
    """A loss taken in chunks: gradients of all backwards add up."""
    run_ranks(2, chunked_loss)
