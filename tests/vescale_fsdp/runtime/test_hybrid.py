"""A hybrid cut: what crosses nodes and when, which writes make kept parts stale, what goes with it or is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.hooked_tensors import Wrapper
from tests.support.units import groups_of
from vescale_fsdp import DataParallelMeshDims, Rows, fully_shard
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.conversion import HuggingFace, convert, open_source
from vescale_fsdp.elastic.renewal import renew_model, renew_optimizer
from vescale_fsdp.errors import LifecycleError, PlacementError, UnsupportedOpError
from vescale_fsdp.optim import Muon, OwnerOptimizer, Shampoo, step_in_backward
from vescale_fsdp.quantize import Fp8Blocks, QuantizedGather
from vescale_fsdp.runtime.comm import group_comm
from vescale_fsdp.torch_private import newer_class
from vescale_fsdp.transfer import Transfer, describe_states, plan_transfer

NODES = {"2 x 2": (2, 2), "zero1": (2, 1), "one node": (1, 2)}
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def nodes(*shape: int) -> DeviceMesh:
    return cpu_mesh(*shape, names=("node", "local"))


def hybrid(*shape: int, **options: Any) -> models.Stack:
    return models.shard(models.build(), nodes(*shape), shard_optimizer_over="node", **options)


def full(model: nn.Module) -> list[torch.Tensor]:
    return [param.full_tensor().detach().clone() for param in model.parameters()]  # type: ignore[operator]


def close(found: list[torch.Tensor], expected: list[torch.Tensor], **bounds: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **bounds)


@contextmanager
def sent(model: nn.Module) -> Iterator[Counter[str]]:
    """Counts gathers and reductions over nodes, and inside of them, and the elements that a rank receives."""
    counts: Counter[str] = Counter()
    comm = groups_of(model)[0].comm
    names = {comm.replicate_group: "over nodes", comm.shard_group: "in the node"}

    def counted(kind: str, function: Any) -> Any:
        def call(out: torch.Tensor, given: torch.Tensor, *more: Any) -> Any:
            where = names[more[-1]]
            counts[f"{kind} {where}"] += 1
            ranks = more[-1].size()
            counts[f"elements of {kind}s {where}"] += max(out.numel(), given.numel()) * (ranks - 1) // ranks
            return function(out, given, *more)

        return call

    with (
        mock.patch.object(group_comm, "all_gather_into", counted("gather", group_comm.all_gather_into)),
        mock.patch.object(
            group_comm, "reduce_scatter_into", counted("reduction", group_comm.reduce_scatter_into)
        ),
    ):
        yield counts


def train(model: Any, optimizer: torch.optim.Optimizer, step: int, micros: int, *, delays: bool) -> None:
    for micro in range(micros):
        model.set_requires_all_reduce(not delays or micro == micros - 1)
        models.loss_of(model, models.batch(10 * step + micro, dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def crossings(shape: tuple[int, int], micros: int, delays: bool) -> None:
    model = hybrid(*shape)
    groups = groups_of(*model.modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 0, micros, delays=delays)
    with sent(model) as counts:
        train(model, optimizer, 1, micros, delays=delays)
    num, units, total = shape[0], len(groups), sum(group.layout.numel for group in groups)
    assert counts["gather over nodes"] == units
    assert counts["reduction over nodes"] == units * (1 if delays else micros)
    # The root stays gathered until the backward.
    assert counts["gather in the node"] == (0 if shape[1] == 1 else (2 * units - 1) * micros)
    assert counts["reduction in the node"] == units * micros
    # The least: each parameter once, and each gradient once, of the other nodes' slices of this rank's part.
    least = total // shape[1] * (num - 1) // num
    assert counts["elements of gathers over nodes"] == least
    assert counts["elements of reductions over nodes"] == least * (1 if delays else micros)
    for group in groups:
        assert group.shard.numel() * num * shape[1] == group.layout.numel  # weights, gradients and states


@pytest.mark.parametrize("name", NODES)
def test_what_crosses_nodes(name: str) -> None:
    """Per step one gather and one reduction of each unit, however many micro-batches; both of the least size."""
    shape = NODES[name]
    for micros, delays in ((1, True), (3, True), (3, False)):
        run_ranks(shape[0] * shape[1], crossings, shape, micros, delays)


def frozen_and_evaluated() -> None:
    """What is gathered over nodes: units that were stepped, and no others."""
    model = hybrid(2, 2)
    model.blocks[1].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(model, optimizer, 0, 1, delays=False)
    units = len(groups_of(*model.modules()))
    with sent(model) as counts:
        train(model, optimizer, 1, 2, delays=True)
    assert counts["gather over nodes"] == units - 1
    train(model, optimizer, 2, 1, delays=False)
    for mode in (torch.no_grad, torch.inference_mode):
        with sent(model) as counts, mode():
            model(models.batch(0, 0))
        assert counts["gather over nodes"] == (units - 1 if mode is torch.no_grad else 0)
    with sent(model) as counts:
        model.unshard()
        model.reshard()
        model(models.batch(0, 0))
    assert counts["gather over nodes"] == 0
    model.reshard()
    if dist.get_rank() == 0:
        model.state_dict()  # whose tensors a user may write
    with sent(model) as counts:
        model(models.batch(0, 0))
    assert counts["gather over nodes"] == units


def test_parts_are_gathered_again_after_a_step_only() -> None:
    run_ranks(4, frozen_and_evaluated)


def _by_view(param: Any) -> None:
    param.view(-1).mul_(2)


def _by_data(param: Any) -> None:
    param.data.mul_(2)


def _by_piece(param: Any) -> None:
    param.to_local().mul_(2)


def _by_new_data(param: Any) -> None:
    param.data = param.data * 2


WRITES: dict[str, Callable[[Any], object]] = {
    "operator": lambda param: param.mul_(2),
    "view": _by_view,
    "data": _by_data,
    "piece": _by_piece,
    "new data": _by_new_data,
    "foreach": lambda param: torch._foreach_mul_([param], 2),
}


def written(folder: Path) -> None:
    """After each way to write, a forward has the new values, and gathers the units over nodes that changed."""
    for alone in (False, True):
        for name, write in WRITES.items():
            model, plain = hybrid(2, 2), models.build()
            x = models.batch(0, 0)
            model(x)
            model.reshard()
            with torch.no_grad():
                param = model.blocks[1].up.weight
                # A rank that owns nothing of a parameter may leave the write out.
                if not alone or param.to_local().numel():
                    write(param)
                plain.blocks[1].up.weight.mul_(2)
            with sent(model) as counts:
                torch.testing.assert_close(model(x), plain(x), msg=lambda text: f"{name}: {text}")  # noqa: B023
            assert counts["gather over nodes"] == 1, name
    for read, form in ((load, save), (_load_by_dcp, _save_by_dcp)):
        model, other = hybrid(2, 2), models.shard(models.build(seed=7))
        x = models.batch(0, 0)
        model(x)
        form(folder / form.__name__, {"model": other})
        read(folder / form.__name__, {"model": model})
        torch.testing.assert_close(model(x), models.build(seed=7)(x))


def _save_by_dcp(folder: Path, state: dict[str, Any]) -> None:
    dcp.save({"model": state["model"].state_dict()}, checkpoint_id=folder)


def _load_by_dcp(folder: Path, state: dict[str, Any]) -> None:
    dcp.load({"model": state["model"].state_dict()}, checkpoint_id=folder)


def test_every_write_makes_parts_stale(tmp_path: Path) -> None:
    """Also of some ranks only: an all-reduce in each forward tells the others."""
    run_ranks(4, written, tmp_path)


def written_inside() -> None:
    """In a forward: all ranks write a later unit; then one rank alone does, which ends in an error of all ranks."""
    model, plain = hybrid(2, 2), models.build()
    x = models.batch(0, 0)
    alone = False

    def write(*unused: Any) -> None:
        if not alone or dist.get_rank() == 3:
            with torch.no_grad():
                model.blocks[2].up.weight.data.mul_(2)

    model(x)
    model.blocks[0].register_forward_hook(write)
    with torch.no_grad():
        plain.blocks[2].up.weight.mul_(2)
        model.set_modules_to_forward_prefetch([])
        model.blocks[0].set_modules_to_forward_prefetch([])
        model.blocks[1].set_modules_to_forward_prefetch([])
        torch.testing.assert_close(model(x), plain(x))
    alone = True

    def forwards() -> None:  # ranks of the other node come through the first
        with torch.no_grad():
            for _ in range(2):
                model(x)

    with pytest.raises(LifecycleError):
        forwards()


def test_a_write_inside_a_forward() -> None:
    run_ranks(4, written_inside)


def in_place() -> None:
    """Writes to gathered parameters reach the shard, the parts and the next forward without a gather over nodes."""
    for shape in ((2, 2), (4, 1)):
        model, plain = hybrid(*shape, mp_policy=HALF), models.build()
        x = models.batch(0, 0)
        model(x)

        def write(module: Any, *unused: Any) -> None:
            with torch.no_grad():
                module.up.weight.data.clamp_(-0.125, 0.125)  # exact in bf16
                module.up.bias.fill_(0.5)

        model.blocks[1].register_forward_pre_hook(write)
        with torch.no_grad():
            model(x)
            write(plain.blocks[1])
            with sent(model) as counts:
                found = model(x)
        assert counts["gather over nodes"] == 0
        torch.testing.assert_close(found.float(), plain(x), rtol=0.05, atol=0.05)
        model.reshard()
        torch.testing.assert_close(
            model.blocks[1].up.weight.full_tensor(), plain.blocks[1].up.weight, rtol=1e-2, atol=1e-2
        )


def test_writes_to_gathered_parameters() -> None:
    run_ranks(4, in_place)


def optimized(kind: str, on_nodes: bool) -> list[torch.Tensor]:
    granularity = {"shampoo": Shampoo.granularity(block_size=4), "muon": Rows(3), "owner": "whole"}.get(kind)
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if kind == "offload" else {}
    mesh = nodes(2, 2) if on_nodes else cpu_mesh()
    over = "node" if on_nodes else None
    model: Any = models.shard(
        models.build(), mesh, granularity=granularity, shard_optimizer_over=over, **offload
    )
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim != 2]
    match kind:
        case "shampoo":
            optimizer: Any = Shampoo(list(model.parameters()), lr=1e-2, block_size=4, update_every=1)
        case "muon":
            optimizer = Muon(matrices, lr=0.02, adamw_params=others)
        case "owner":
            optimizer = OwnerOptimizer(torch.optim.Muon, matrices, lr=0.02)
        case _:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if kind == "in backward":
        step_in_backward(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        loss = models.loss_of(model, models.batch(step, dist.get_rank()))
        if kind == "scaled":
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    return full(model)


def optimized_alike() -> None:
    for kind in ("shampoo", "muon", "owner", "in backward", "scaled", "offload"):
        close(optimized(kind, True), optimized(kind, False), rtol=2e-3, atol=2e-4)


def test_optimizers_step_the_spread_shard() -> None:
    """The weights of plain sharding over as many ranks."""
    run_ranks(4, optimized_alike)


def with_tensor_parallelism() -> None:
    """Three axes: nodes, ranks of a node, tensor parallelism inside of them."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("node", "local", "tp"))
    model: Any = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(2))
    )
    reference: Any = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(2))
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            theirs.copy_(torch.randn(theirs.shape))
            ours.copy_(theirs)
    for block in model:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh["node", "local"], shard_optimizer_over="node")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, reference)]
    for step in range(3):
        rows = [torch.randn(3, 6, generator=torch.Generator().manual_seed(9 * step + r)) for r in range(4)]
        model(rows[dist.get_rank() // 2]).square().mean().backward()
        torch.stack([reference(each).square().mean() for each in rows]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    close(full(model), [param.detach() for param in reference.parameters()], rtol=1e-4, atol=1e-5)


def test_tensor_parallelism() -> None:
    run_ranks(8, with_tensor_parallelism)


def elsewhere(folder: Path) -> None:
    """Checkpoints in every format and transfers, from a hybrid cut and to one."""
    assets = folder / "assets"
    if dist.get_rank() == 0:
        assets.mkdir()
        (assets / "config.json").write_text('{"model_type": "unknown", "tie_word_embeddings": false}')
    dist.barrier()
    target_meshes = ((nodes(2, 2), "node"), (cpu_mesh(), None))
    for number, (mesh, over) in enumerate(target_meshes):
        other, other_over = target_meshes[1 - number]
        source = models.shard(models.build(seed=3), mesh, shard_optimizer_over=over)
        for form in ("native", "zarr", "dcp"):
            save(folder / f"{form}{number}", {"model": source}, format=form)  # type: ignore[arg-type]
            target = models.shard(models.build(seed=4), other, shard_optimizer_over=other_over)
            load(folder / f"{form}{number}", {"model": target})
            close(full(target), full(source), rtol=0, atol=0)
        if dist.get_rank() == 0:
            convert(open_source(str(folder / f"dcp{number}")), str(folder / f"{number}.pt"), "torch")
        save(folder / f"hf{number}", {"model": source}, format=HuggingFace(assets=assets))
        for path in (folder / f"hf{number}", folder / f"{number}.pt"):
            target = models.shard(models.build(seed=4), other, shard_optimizer_over=other_over)
            load(path, target if path.suffix else {"model": target})
            close(full(target), full(source), rtol=0, atol=0)
        target = models.shard(models.build(seed=4), other, shard_optimizer_over=other_over)
        target(models.batch(0, 0))
        states = [dict(each.named_parameters()) for each in (source, target)]
        target.reshard()  # type: ignore[operator]
        states[1] = dict(target.named_parameters())
        Transfer(plan_transfer(*describe_states(*states))).run(*states)
        close(full(target), full(source), rtol=0, atol=0)
        torch.testing.assert_close(target(models.batch(0, 0)), models.build(seed=3)(models.batch(0, 0)))


def test_checkpoints_and_transfers(tmp_path: Path) -> None:
    run_ranks(4, elsewhere, tmp_path)
    manifest = (tmp_path / "native0" / "manifest.json").read_text()
    assert '"minor"' in manifest and '"table"' not in manifest  # a rule, whatever the number of ranks


def renewed() -> None:
    """Nodes of equal size, then of unequal size, then equal again: hybrid, plain, hybrid."""
    model: Any = hybrid(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for mesh, is_hybrid in ((cpu_mesh(), False), (nodes(2, 2), True)):
        renew_model(model, mesh)
        renew_optimizer(optimizer)
        with torch.no_grad():
            for param, value in zip(model.parameters(), models.build().parameters(), strict=True):
                start, stop = param.piece
                param.to_local().copy_(value.reshape(-1)[start:stop])
        for step in range(2):
            train(model, optimizer, step, 2, delays=True)
        with sent(model) as counts:
            model(models.batch(0, 0))
        assert bool(counts["gather over nodes"]) == is_hybrid
        model.reshard()
        seen.append(full(model))
    close(*seen, rtol=1e-4, atol=1e-5)


def test_elastic_renewal() -> None:
    run_ranks(4, renewed)


class _Hooked(Wrapper):
    """Gathers itself."""

    def fsdp_pre_all_gather(self, *unused: Any) -> Any:
        return (self._data,), None

    def fsdp_post_all_gather(self, *unused: Any, **more: Any) -> Any:
        return None


def refused() -> None:
    mesh = nodes(2, 2)

    def shard(module: nn.Module | None = None, **options: Any) -> Any:
        given = {"mesh": mesh, "shard_optimizer_over": "node", **options}
        return fully_shard(module or nn.Linear(8, 8), **given)

    with models.refused(PlacementError, expected="node", got="local", todo="init_device_mesh"):
        shard(shard_optimizer_over="local")
    with models.refused(PlacementError, expected="names", todo="mesh_dim_names"):
        shard(mesh=cpu_mesh(2, 2))
    if DataParallelMeshDims.__module__ != newer_class.__module__:  # else torch has none
        with models.refused(UnsupportedOpError, got="DataParallelMeshDims", todo="mesh="):
            shard(dp_mesh_dims=DataParallelMeshDims(shard="local", replicate="node"))
    with models.refused(UnsupportedOpError, got=2, todo="True"):
        shard(reshard_after_forward=2)
    with models.refused(UnsupportedOpError, got="QuantizedGather", todo="one of the two"):
        shard(mp_policy=QuantizedGather(codecs=Fp8Blocks(1, 4)), granularity=Rows(1))
    linear = nn.Linear(8, 8)
    linear.weight = nn.Parameter(_Hooked(linear.weight.detach()))
    with models.refused(UnsupportedOpError, got="shard_optimizer_over", expected="no shard_optimizer_over"):
        shard(linear)
    for method in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        with models.refused(UnsupportedOpError, got=method, todo=method):
            getattr(shard(), method)(object())
    assert groups_of(shard(mesh=cpu_mesh()))[0].kept is None  # one axis: nothing to spread over


def test_what_does_not_go_with_it_is_refused() -> None:
    run_ranks(4, refused)
