"""as_fsdp2: torch's names find ours while it stands, only then, and only for what is ours."""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state_dict
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.tensor as torch_tensor
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import vescale_fsdp
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.processes import join
from vescale_fsdp import PaddingPolicy, RaggedDTensor, RaggedShard, Rows
from vescale_fsdp.errors import (
    BoundNamesWarning,
    LayoutError,
    PlacementError,
    UnshardedWarning,
    UnsupportedOpError,
    UntriedVersionWarning,
)
from vescale_fsdp.integrations import as_fsdp2, install
from vescale_fsdp.integrations.installation import Installation, ours_within
from vescale_fsdp.integrations.replaced_names import AfterImport

NAMES = {
    "fully_shard": torch_fsdp,
    "register_fsdp_forward_method": torch_fsdp,
    "share_comm_ctx": torch_fsdp,
    "distribute_tensor": torch_tensor,
    "from_local": DTensor,
    "get_model_state_dict": torch_state_dict,
    "get_optimizer_state_dict": torch_state_dict,
    "get_state_dict": torch_state_dict,
    "redistribute": DTensor,
    "set_model_state_dict": torch_state_dict,
    "set_optimizer_state_dict": torch_state_dict,
    "set_state_dict": torch_state_dict,
}
TORCHS_OWN = [vars(home)[name] for name, home in NAMES.items()]  # in a list, where `install` does not look


@pytest.fixture(autouse=True)
def _other_tests_may_hold_torchs_names() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BoundNamesWarning)
        warnings.simplefilter(
            "ignore", UntriedVersionWarning
        )  # what is installed here need not be of the table
        warnings.simplefilter("ignore", UnshardedWarning)  # most blocks here shard nothing
        yield


def _are_torchs() -> list[bool]:
    return [vars(home)[name] is own for (name, home), own in zip(NAMES.items(), TORCHS_OWN, strict=True)]


def test_names_are_replaced_inside_only() -> None:
    """All names on the way in, none before and after, also where torch re-exports them."""
    import torch.distributed._composable.fsdp as re_exported

    assert all(_are_torchs())
    with as_fsdp2():
        assert not any(_are_torchs())
        assert re_exported.fully_shard is torch_fsdp.fully_shard
    assert all(_are_torchs()) and re_exported.fully_shard is TORCHS_OWN[0]


@pytest.mark.parametrize("rule", ["row:32", Rows, {"*": Rows}, {"*": "rows"}, 32])
def test_a_granularity_that_is_none_replaces_nothing(rule: Any) -> None:
    """Whatever is no granularity is refused by the installation, not by a stack's first call."""
    with pytest.raises(LayoutError) as refused:
        install(granularity=rule)
    assert refused.value.got == repr(next(iter(rule.values())) if isinstance(rule, dict) else rule)
    assert all(_are_torchs())


def test_installations_are_counted() -> None:
    """Nested and out of order: the names are torch's again when the last one has gone, by an exception too."""
    outer = install(granularity=Rows(2))
    with pytest.raises(ZeroDivisionError):
        _fail_inside(outer)
    assert all(_are_torchs())


def _fail_inside(outer: Installation) -> None:
    with as_fsdp2():
        outer.uninstall()
        outer.uninstall()  # a second time: nothing
        assert not any(_are_torchs())
        raise ZeroDivisionError


@pytest.mark.part("jobs")
def test_threads_share_the_count() -> None:
    """Eight threads that come and go leave the names as they were, and never see torch's inside."""
    seen: list[bool] = []

    def come_and_go() -> None:
        for _ in range(10):
            with as_fsdp2():
                seen.append(any(_are_torchs()))

    threads = [threading.Thread(target=come_and_go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)

    assert len(seen) == 80 and not any(seen)
    assert all(_are_torchs())


def test_modules_that_bound_a_name_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning says which module holds which name; as an error it comes before anything is replaced."""
    stack = ModuleType("a_stack")
    vars(stack)["shard_it"] = TORCHS_OWN[0]
    monkeypatch.setitem(sys.modules, "a_stack", stack)
    with pytest.warns(BoundNamesWarning, match=r"\ba_stack\b.*\bshard_it\b") as caught:
        install().uninstall()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", BoundNamesWarning)
        with pytest.raises(BoundNamesWarning):
            install()
    assert all(_are_torchs())


def test_a_function_is_called_after_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, when the module's code has run; not if the wait has ended. accelerate's own is in tests/stacks."""
    for name in ("imported_later", "imported_after_the_end"):
        tmp_path.joinpath(f"{name}.py").write_text("value = 3")
    monkeypatch.syspath_prepend(tmp_path)
    values: list[int] = []
    finders = [*sys.meta_path]
    AfterImport("imported_later", lambda: values.append(sys.modules["imported_later"].value))
    ended = AfterImport("imported_after_the_end", lambda: values.append(4))
    ended.end()
    ended.end()

    for name in ("imported_after_the_end", "imported_later", "imported_later"):
        importlib.import_module(name)
    assert values == [3] and sys.meta_path == finders
    for name in ("imported_later", "imported_after_the_end"):
        del sys.modules[name]


def test_fsdp1_is_refused() -> None:
    """A stack that falls back on FSDP1 is told how to switch; outside FSDP1 is torch's business."""
    with as_fsdp2(), pytest.raises(UnsupportedOpError) as refused:
        torch_fsdp.FullyShardedDataParallel(nn.Linear(2, 2))
    assert "fsdp_version=2" in str(refused.value.expected)
    with pytest.raises((RuntimeError, ValueError), match=r"accelerator|group"):
        torch_fsdp.FullyShardedDataParallel(nn.Linear(2, 2))


def _stack_shards(model: nn.Sequential) -> nn.Sequential:
    """What stacks do: look torch's names up inside a function."""
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    for block in list(model):
        fully_shard(block)
    fully_shard(model)
    register_fsdp_forward_method(model, "encode")
    assert isinstance(model, FSDPModule)
    return model


class _Encoder(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 26), nn.Linear(26, 6))
        self.scale = nn.Parameter(torch.randn(6))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.scale


def _model() -> _Encoder:
    torch.manual_seed(0)
    return _Encoder()


def _kinds(model: nn.Module) -> set[type]:
    return {type(param.data) for param in model.parameters()}


def _on_ranks() -> dict[str, Any]:
    torchs_class, x, plain = torch_fsdp.FSDPModule, torch.ones(2, 6), _model()
    full = {name: value * 2 for name, value in plain.state_dict().items()}
    options = torch_state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with as_fsdp2(granularity={"*weight": Rows(4)}, padding_policy=PaddingPolicy(warn_above=9.0)):
        from torch.distributed.fsdp import fully_shard as kept

        ours: Any = _stack_shards(_model())
        weight = ours[0].weight
        mesh, placements = weight.device_mesh, weight.placements
        again = torch_tensor.distribute_tensor(plain[0].weight.detach(), mesh, placements)
        stock = torch_tensor.distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        torch_state_dict.set_model_state_dict(ours, full, options=options)
        torch_state_dict.set_model_state_dict(plain, full)  # not ours: torch's own
        torch_fsdp.share_comm_ctx([ours])
        same = torch_tensor.distribute_tensor(weight, mesh, placements) is weight
        piece: Any = DTensor.from_local(
            weight.to_local(), mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
        rows = DTensor.from_local(torch.ones(1, 2), mesh, [Shard(0)], run_check=False)
        with pytest.raises(PlacementError) as refused:
            DTensor.from_local(weight.to_local(), mesh, placements)
    stock_model = _model()
    kept(stock_model)  # bound while it stood, called after it went
    return {
        "is_ours": isinstance(ours, vescale_fsdp.FSDPModule) and isinstance(ours[0], torchs_class),
        "kinds": _kinds(ours),
        "cut_at": placements[0].local_units,
        "todo": refused.value.todo,
        "again": again.full_tensor(),
        "stock": (type(stock), tuple(stock.placements)),
        "same": same,
        "from_local": torch.equal(piece.full_tensor(), weight.full_tensor()) and tuple(rows.shape) == (2, 2),
        "loaded": [torch.equal(v.full_tensor(), full[n]) for n, v in ours.state_dict().items()],
        "plain": [torch.equal(v, full[n]) for n, v in plain.state_dict().items()],
        "encode": torch.equal(ours.encode(x), x @ full["scale"]),
        "kept": (_kinds(stock_model), isinstance(stock_model, vescale_fsdp.FSDPModule)),
    }


def test_a_stack_finds_ours() -> None:
    """Sharding, registered methods, distribution and full states go to ours, all else to torch."""
    for rank in run_ranks(2, _on_ranks):
        assert rank["is_ours"] and rank["kinds"] == {RaggedDTensor}
        assert rank["cut_at"] == (8, 5)  # of 2 rows: blocks of 4 rows, the last of 2
        assert torch.equal(rank["again"], _model()[0].weight.detach())
        assert rank["stock"] == (DTensor, (Shard(0),))
        assert rank["same"] and rank["from_local"]
        assert rank["loaded"] == [True] * 5 and rank["plain"] == [True] * 5
        assert rank["encode"] and "shape=p.shape" in rank["todo"]
        assert rank["kept"] == ({DTensor}, False)


def _first_rank_counts() -> list[bool]:
    """The values torch's function takes: those of the first rank."""
    with as_fsdp2():
        placements = _stack_shards(_model())[0].weight.placements
        mesh = cpu_mesh()
        mine = torch.full((26, 6), float(dist.get_rank()))
        got = [torch_tensor.distribute_tensor(mine, mesh, kind) for kind in (placements, [Replicate()])]
    return [torch.equal(each.full_tensor(), torch.zeros(26, 6)) for each in got]


def _fill(param: Any, full: torch.Tensor) -> None:
    """How adapters and checkpoint loaders of stacks fill a parameter of torch's from a full tensor."""
    mesh = param.data.device_mesh
    whole = DTensor.from_local(full, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
    param.data.to_local().copy_(whole.redistribute(placements=param.data.placements).to_local())


def _redistributed() -> list[bool]:
    """Parameters of 2 x 2 ranks with and without tensor parallelism, from whole tensors, pending sums and shards."""
    grid, rank = cpu_mesh(2, 2, names=("dp", "tp")), dist.get_rank()
    model = _Encoder()
    parallelize_module(model[0], grid["tp"], ColwiseParallel())
    equal = []
    with as_fsdp2(granularity={"*weight": Rows(4), "*": Rows(1)}):
        torch_fsdp.fully_shard(model, mesh=grid["dp"])
        for index, param in enumerate(model.parameters()):
            full = torch.arange(float(param.numel())).view(param.shape) + index
            _fill(param, full)
            equal.append(torch.equal(param.full_tensor(), full))  # type: ignore[operator]
            mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
            sums = DTensor.from_local(full * (rank + 1), mesh, [Partial()] * mesh.ndim)
            total = sums.redistribute(mesh, placements, async_op=True)
            ranks = mesh.mesh.flatten().tolist()
            equal.append(torch.equal(total.full_tensor(), full * sum(r + 1 for r in ranks)))
            rows = torch_tensor.distribute_tensor(full, mesh, [Shard(0)] * mesh.ndim)
            half = rows.redistribute(placements=placements, forward_dtype=torch.bfloat16)
            equal.append(torch.equal(half.full_tensor(), full.bfloat16()) and half.dtype == torch.bfloat16)
            with pytest.raises(PlacementError):  # as torch, which names redistribute too
                torch_tensor.distribute_tensor(rows, mesh, placements)
        kept = DTensor.redistribute
    stock = torch_tensor.distribute_tensor(torch.ones(4), grid["dp"], [Replicate()])
    equal.append(type(kept(stock, placements=[Shard(0)])) is DTensor)
    with pytest.raises(UnsupportedOpError) as refused:
        stock.redistribute(placements=[RaggedShard((0,), (1, 3))])
    found = vescale_fsdp.dtensor.redistribute(stock, [RaggedShard((0,), (1, 3))])  # as the todo says
    return [
        *equal,
        "vescale_fsdp.dtensor.redistribute(tensor, placements)" in refused.value.todo,
        found.numel() == 4,
    ]


def test_redistribute_makes_pieces() -> None:
    """What stacks write for torch's parameters fills ours; without an installation the error names the function."""
    for equal in run_ranks(4, _redistributed):
        assert len(equal) == 5 * 3 + 3 and all(equal)


def _through_a_package() -> list[bool]:
    """A stack whose modules import names at their top, as NeMo Automodel's do."""
    stack = ModuleType("a_stack.loaders")
    for name in ("fully_shard", "set_model_state_dict"):
        vars(stack)[name] = vars(NAMES[name])[name]
    sys.modules["a_stack.loaders"] = stack
    policy = PaddingPolicy()
    full = {name: value * 2 for name, value in _model().state_dict().items()}
    options = torch_state_dict.StateDictOptions(full_state_dict=True)
    with as_fsdp2(), ours_within("a_stack", granularity=None, padding_policy=policy):
        pass
    outside = [*_are_torchs(), stack.fully_shard is torch_fsdp.fully_shard]
    with ours_within("a_stack", granularity=None, padding_policy=policy):
        with as_fsdp2():
            pass
        outside.append(vars(torch_fsdp)["fully_shard"] is TORCHS_OWN[0])
        inside = [DTensor.redistribute is not TORCHS_OWN[list(NAMES).index("redistribute")]]
        model = stack.fully_shard(_model())
        stack.set_model_state_dict(model, full, options=options)
        inside += [torch.equal(p.full_tensor(), full[n]) for n, p in model.state_dict().items()]
        _fill(model.scale, torch.ones(6))
        inside.append(torch.equal(model.scale.full_tensor(), torch.ones(6)))
    del sys.modules["a_stack.loaders"]
    return [*outside, *_are_torchs(), *inside]


def test_a_package_finds_ours_at_its_top() -> None:
    """What chooses by its arguments is replaced too; installations may be nested in any order."""
    assert all(run_ranks(2, _through_a_package)[0])


def _with_patterns(pattern: str) -> None:
    with as_fsdp2(granularity={pattern: Rows(4), "*": Rows(1)}):
        _stack_shards(_model())


def _pattern_outcomes() -> tuple[list[str], object]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        _with_patterns("*weight")
        _with_patterns("*wieght")
    text = [str(w.message) for w in caught if "pattern" in str(w.message)]
    try:
        vescale_fsdp.fully_shard(_model(), granularity={"*wieght": Rows(4)})
    except LayoutError as error:
        return text, error.got
    return text, None


def test_patterns_and_sources() -> None:
    """A pattern may match in any call of the stack, not in none; values come from the first rank as in torch."""
    for equal, (texts, refused) in zip(
        run_ranks(2, _first_rank_counts), run_ranks(2, _pattern_outcomes), strict=True
    ):
        assert equal == [True, True]
        assert len(texts) == 1 and "'*wieght'" in texts[0]
        assert refused == "'*wieght'"
