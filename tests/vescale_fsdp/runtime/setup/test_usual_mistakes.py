"""Mistakes that users make in passing end in an error that names the usual cause, before anything is changed."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
)
from torch.distributed.fsdp import (
    fully_shard as torch_fully_shard,
)

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.models import refused
from vescale_fsdp import (
    PaddingPolicy,
    RaggedDTensor,
    Rows,
    Tiles,
    distribute_tensor,
    fully_shard,
    register_fsdp_forward_method,
)
from vescale_fsdp.checkpoint.state_dict import set_model_state_dict
from vescale_fsdp.errors import (
    ArgumentError,
    LayoutError,
    LifecycleError,
    MisuseError,
    PlacementError,
    UnsupportedOpError,
    VescaleError,
)


class Decoder(models.Stack):
    """A model that is also called by other methods than forward."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x)

    def generate_step(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Decoder:
    model = models.build()
    model.__class__ = Decoder
    return model  # type: ignore[return-value]


def sharded() -> Decoder:
    model = build()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=cpu_mesh())
    return model


def methods() -> None:
    x, hidden = torch.randn(2, 5), torch.randn(2, 7)
    model, plain = sharded(), build()
    for call, given in ((model.encode, x), (model.generate_step, hidden)):
        with refused(UnsupportedOpError, todo="register_fsdp_forward_method(module, name)"):
            call(given)
    with refused(LifecycleError, todo="register_fsdp_forward_method"):
        model(x)  # the blocks have run before, in the method that has failed
    model = sharded()
    model.unshard()
    torch.testing.assert_close(model.encode(x), plain.encode(x))
    model.reshard()
    for name in ("encode", "generate_step"):
        register_fsdp_forward_method(model, name)
    torch.testing.assert_close(model.encode(x), plain.encode(x))
    torch.testing.assert_close(model.generate_step(hidden), plain.generate_step(hidden))
    torch.testing.assert_close(model(x), plain(x))


def full_states() -> None:
    model, other = sharded(), models.build(seed=5)
    before = [param.full_tensor() for param in model.parameters()]
    for module, prefix in ((model, "embed.weight"), (model.blocks[1], "scale")):
        state = other.state_dict() if module is model else other.blocks[1].state_dict()
        with pytest.raises(LifecycleError) as error:
            module.load_state_dict(state)
        assert f"{len(state)} parameters: {prefix}" in str(error.value.got)
        for way in ("set_model_state_dict", "checkpoint.load", "distribute_tensor", "broadcast_from_rank0"):
            assert str(error.value.todo).count(way) == 1
    wrapper = nn.Sequential(model)
    with refused(LifecycleError, got="21 parameters: 0.embed.weight"):
        wrapper.load_state_dict({f"0.{name}": value for name, value in other.state_dict().items()})
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.full_tensor(), value)
    # Each of the ways that the error names.
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, other.state_dict(), options=options)
    for param, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), twin)
    for way in ("sharded", "copied"):
        for name, param in model.named_parameters():
            assert isinstance(param, RaggedDTensor)
            ones = distribute_tensor(torch.ones(param.shape), param.device_mesh, param.placements)
            if way == "copied":
                param.detach().copy_(ones)
            else:
                model.load_state_dict({name: ones}, strict=False)
            assert torch.equal(param.full_tensor(), torch.ones(param.shape))
        set_model_state_dict(model, other.state_dict(), options=options)
    model.load_state_dict(model.state_dict())


class Converting(nn.Linear):
    """A module that makes shards of the full tensors it is given."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, param in self._parameters.items():
            assert isinstance(param, RaggedDTensor)
            state_dict[prefix + name] = distribute_tensor(
                state_dict[prefix + name], param.device_mesh, param.placements
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)


def converted() -> None:
    """Modules that know what to do with full tensors are left alone, by method or by hook; so is assign=True."""
    by_hook = nn.Linear(5, 3)

    def convert(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, param in module._parameters.items():
            assert isinstance(param, RaggedDTensor)
            state[prefix + name] = distribute_tensor(
                state[prefix + name], param.device_mesh, param.placements
            )

    for model in (nn.Sequential(Converting(5, 3)), nn.Sequential(by_hook)):
        fully_shard(model, mesh=cpu_mesh())
        if model[0] is by_hook:
            by_hook.register_load_state_dict_pre_hook(convert)
        twin = nn.Sequential(nn.Linear(5, 3))
        full = {name: torch.full_like(value, 3.0) for name, value in twin.state_dict().items()}
        model.load_state_dict(dict(full))
        assert all(bool((param.full_tensor() == 3.0).all()) for param in model.parameters())
    assigned = fully_shard(nn.Linear(5, 3), mesh=cpu_mesh())
    assigned.load_state_dict({"weight": torch.ones(3, 5), "bias": torch.ones(3)}, assign=True)
    assert torch.equal(assigned(torch.ones(1, 5)), torch.full((1, 3), 6.0))


def arguments() -> None:
    mesh = cpu_mesh()
    wrong: list[tuple[type[VescaleError], dict[str, str], dict[str, Any]]] = [
        (LayoutError, {"todo": "Rows(32)"}, {"granularity": Rows}),
        (LayoutError, {"todo": "Tiles"}, {"granularity": {"*": Tiles}}),
        (LayoutError, {"expected": "rows:32"}, {"granularity": "rows=32"}),
        *(
            (PlacementError, {"got": repr(m), "todo": "init_device_mesh("}, {"mesh": m})
            for m in ("cpu", 2, (2,), [0, 1], dist.group.WORLD)
        ),
        (ArgumentError, {"got": "CPUOffloadPolicy"}, {"offload_policy": CPUOffloadPolicy}),
        (
            ArgumentError,
            {"got": "bfloat16", "expected": "MixedPrecisionPolicy"},
            {"mp_policy": torch.bfloat16},
        ),
        (ArgumentError, {"got": "MixedPrecisionPolicy"}, {"mp_policy": MixedPrecisionPolicy}),
        (ArgumentError, {"got": "PaddingPolicy"}, {"padding_policy": PaddingPolicy}),
        (ArgumentError, {"got": "str among list"}, {"ignored_params": ["head.weight"]}),
        (ArgumentError, {"got": "Tensor among Parameter"}, {"ignored_params": models.build().head.weight}),
    ]
    for error, parts, given in wrong:
        model = models.build()
        before = [id(param) for param in model.parameters()]
        with refused(error, **parts):
            fully_shard(model, **{"mesh": mesh, **given})
        assert [id(param) for param in model.parameters()] == before and type(model) is models.Stack
    one = dist.device_mesh.DeviceMesh("cpu", [1])
    if dist.get_rank() == 0:
        with refused(PlacementError, got="rank 0"):
            fully_shard(models.build(), mesh=one)
    by_text = fully_shard(models.build(), mesh=mesh, granularity={"*.up.weight": "rows:4", "*": "element"})
    by_value = fully_shard(models.build(), mesh=mesh, granularity={"*.up.weight": Rows(4)})
    assert by_text.model_layout() == by_value.model_layout()
    assert by_text.model_layout() != fully_shard(models.build(), mesh=mesh).model_layout()


def taken_twice() -> None:
    mesh = cpu_mesh()
    root_first = fully_shard(models.build(), mesh=mesh)
    with refused(PlacementError, where="scale", got="Ragged"):
        fully_shard(root_first.blocks[0], mesh=mesh)
    root_first.unshard()
    around = nn.Sequential(root_first)
    with refused(MisuseError, got="FSDPStack"):
        fully_shard(root_first, mesh=mesh)
    root_first.reshard()
    fully_shard(around, mesh=mesh)  # one around it is fine
    for name, error in (("weight", LayoutError), ("", PlacementError)):  # a shared parameter, a shared module
        one, other = models.build(), models.build()
        if name:
            other.head.weight = one.head.weight
        else:
            other.head = one.head
        fully_shard(one, mesh=mesh)
        with refused(error, where="head.weight"):
            fully_shard(other, mesh=mesh)


def weights(model: nn.Module) -> list[tuple[str, int, int]]:
    """The parameters' identities and versions: what a refused call leaves as it was."""
    return [(name, id(param), param.numel()) for name, param in model.named_parameters()]


def mixtures() -> None:
    mesh, named = cpu_mesh(), cpu_mesh(2, names=("dp",))
    Shard = Callable[..., Any]
    cases: list[tuple[Shard, Shard, bool]] = [
        (fully_shard, torch_fully_shard, True),
        (torch_fully_shard, fully_shard, True),
        (fully_shard, torch_fully_shard, False),
        (torch_fully_shard, fully_shard, False),
    ]
    for first, second, block_first in cases:
        for over in (mesh, named):
            model = models.build()
            inner, outer = (model.blocks[1], model) if block_first else (model, model.blocks[1])
            first(inner, mesh=over)
            before = weights(model)
            if (
                second is torch_fully_shard and torch.__version__ < "2.12"
            ):  # it fails with an error of its own
                continue
            with pytest.raises(MisuseError) as mixed:
                second(outer, mesh=over)
            assert "vescale_fsdp" in mixed.value.problem and "FSDP2" in mixed.value.problem
            # FSDP2 looks at parameters one by one, and shards each before the next.
            assert second is torch_fully_shard or weights(model) == before
    same = torch_fully_shard(models.build(), mesh=mesh)
    with refused(MisuseError, got="FSDPStack"):
        fully_shard(same, mesh=mesh)
    with pytest.raises(AssertionError, match=r"\bonce\b"):
        torch_fully_shard(sharded(), mesh=mesh)
    for wrap, name in (
        (partial(FullyShardedDataParallel, device_id=torch.device("cpu")), "FullyShardedDataParallel"),
        (nn.parallel.DistributedDataParallel, "DistributedDataParallel"),
    ):
        model = models.build()
        model.head = wrap(model.head)  # type: ignore[operator]
        with pytest.raises(MisuseError) as error:
            fully_shard(model, mesh=mesh)
        assert name in error.value.problem and error.value.got.startswith("head")


class Around(nn.Module):
    """A module around a sharded one, with parameters of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.more = inner, nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(self.inner(x))


def wrappers() -> None:
    for wrap, name in (
        (
            partial(FullyShardedDataParallel, device_id=torch.device("cpu")),
            "FullyShardedDataParallel (FSDP1)",
        ),
        (nn.parallel.DistributedDataParallel, "DistributedDataParallel"),
    ):
        for around in (lambda model: model, Around, lambda model: nn.Sequential(model)):
            model = around(sharded())
            before = weights(model)
            with pytest.raises(MisuseError) as error:
                wrap(model)  # type: ignore[operator]
            assert name in str(error.value.where) and weights(model) == before


def copies() -> None:
    for model in (sharded(), Around(sharded())):
        for take in (lambda m: torch.save(m, io.BytesIO()), pickle.dumps, copy.deepcopy):
            with pytest.raises(MisuseError) as error:
                take(model)
            assert "FSDPDecoder" in error.value.got and error.value.todo
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(sharded())
    with pytest.raises(UnsupportedOpError):
        sharded().share_memory()


def ties() -> None:
    for units in ("blocks", "root"):
        model = sharded() if units == "blocks" else fully_shard(build(), mesh=cpu_mesh())
        before = {name: param.full_tensor() for name, param in model.named_parameters()}
        model.blocks[1].up.weight = model.blocks[0].up.weight
        with pytest.raises(LifecycleError) as error:
            model(torch.randn(2, 5))
        assert "up.weight" in error.value.where and "up.weight" in error.value.got
        for name, param in model.named_parameters():
            assert torch.equal(param.full_tensor(), before[name])
    model = build()
    fully_shard(model.blocks[0], mesh=cpu_mesh())
    model.blocks[1].up.weight = model.blocks[0].up.weight
    with pytest.raises(PlacementError) as late:
        fully_shard(model, mesh=cpu_mesh())
    assert "blocks.1.up.weight" in str(late.value.where) and "tie" in str(late.value.todo)


def full_moments() -> None:
    plain, model = models.build(), sharded()
    theirs = torch.optim.Adam(plain.parameters())
    plain(models.batch(0, 0)).sum().backward()
    theirs.step()
    ours = torch.optim.Adam(model.parameters())
    ours.load_state_dict(theirs.state_dict())
    model(models.batch(0, 0)).sum().backward()
    with pytest.raises(UnsupportedOpError) as error:
        ours.step()
    assert "set_optimizer_state_dict" in str(error.value.todo)


def test_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain ``python script.py`` is told of torchrun."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    model = nn.Linear(2, 2)
    for given in ({}, {"RANK": "0"}):
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(LifecycleError) as error:
            fully_shard(model)
        for way in ("torchrun", "init_process_group", "init_device_mesh"):
            assert way in str(error.value.todo)
        assert ("WORLD_SIZE" if given else "RANK") in str(error.value.got)
    assert type(model) is nn.Linear and not dist.is_initialized()


def everything() -> None:
    methods()
    full_states()
    converted()
    arguments()
    taken_twice()
    mixtures()
    wrappers()
    copies()
    ties()
    full_moments()


def test_usual_mistakes_are_refused_with_the_way_out() -> None:
    """Methods beside forward, full states, wrong arguments, modules taken twice or by two libraries, copies, ties."""
    run_ranks(2, everything)
