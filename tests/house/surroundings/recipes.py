"""A small call of every public function: made ready in plain surroundings, called in others, looked at in plain ones.

A recipe takes an empty folder, prepares, and returns the call. What the call returns is described in full (values,
dtypes, devices, types), so that two descriptions are equal where a user would see the same. Recipes after `GROUP`
need a process group of one rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.data import DataLoader

import vescale_fsdp
from tests.support.distributed import cpu_mesh
from vescale_fsdp import RaggedDTensor, RaggedShard, Rows, fully_shard, integrations, optim, quantize
from vescale_fsdp import checkpoint as ck
from vescale_fsdp import conversion as conv
from vescale_fsdp.checkpoint import data as ck_data
from vescale_fsdp.checkpoint import dcp as ck_dcp
from vescale_fsdp.checkpoint import state_dict as ck_state
from vescale_fsdp.transfer import (
    Delta,
    Transfer,
    describe_states,
    links_from_loader,
    plan_transfer,
    share_links,
)
from vescale_fsdp.transfer import links as links_of

Call = Callable[[], Any]
Recipe = Callable[[Path], Call]


def describe(value: Any) -> Any:
    """A value as nested tuples that are equal where it is the same to a user."""
    if isinstance(value, DTensor):
        return (type(value).__name__, str(value.placements), describe(value.to_local()))
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return (type(value).__name__, value.dtype, value.device, tuple(value.shape), data)
    if isinstance(value, np.ndarray):
        return ("ndarray", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, nn.Module):
        return (type(value).__name__, describe(value.state_dict()))
    if isinstance(value, torch.optim.Optimizer):
        return (type(value).__name__, describe(value.state_dict()))
    if isinstance(value, ck.CheckpointReader.Tensor):
        return describe(value.read())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (
            type(value).__name__,
            describe({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}),
        )
    if isinstance(value, Mapping):
        return tuple((str(key), describe(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(describe, value))
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(str, value)))
    if isinstance(value, (str, int, float, bytes, torch.dtype, torch.device, type(None))):
        return value
    return type(value).__name__


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def _stepped(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    optimizer = kind(model.parameters(), lr=0.1, **options)
    _backward(model)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _backward(model: nn.Module) -> None:
    model(torch.linspace(-1, 1, 64).reshape(2, 32)).square().sum().backward()


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """In plain surroundings: what the call left can be trained on."""
    _backward(model)
    optimizer.step()
    return model.state_dict()


def _state(filled: bool) -> dict[str, Any]:
    def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        numbers = torch.arange(int(np.prod(shape)) if filled else 0)
        return (numbers if filled else torch.zeros(int(np.prod(shape)))).to(dtype).reshape(shape)

    return {
        "f32": tensor(40, 500, dtype=torch.float32),
        "half": [tensor(3, 5, dtype=torch.bfloat16), tensor(7, dtype=torch.float64)],
        "int": tensor(4, dtype=torch.int64),
        "bool": tensor(4, dtype=torch.bool),
        "scalar": torch.tensor(3.5 if filled else 0.0),
        "array": np.arange(5.0) if filled else np.zeros(5),
        "rng": ck.PerRank(torch.arange(6) if filled else None),
        "step": 3 if filled else 0,
    }


# -- checkpoints of one process -----------------------------------------------------------------------------


def save_and_load(folder: Path) -> Call:
    state, into, told = _state(True), _state(False), list[Any]()

    def call() -> Any:
        ck.save(folder / "c", state, metadata={"by": "me"}, progress=told.append)
        report = ck.load(folder / "c", into, verify="before")
        reader = ck.read_state(folder / "c")
        rates = [(done.bytes_per_s is None, done.remaining_s is None) for done in told]
        return [
            {**into, "rng": into["rng"].value},
            dataclasses.replace(report, num_bytes_read=0),
            reader.names(),
            reader.per_rank_values(),
            [(t.name, t.shape, t.dtype, t.read()) for t in map(reader.__getitem__, ("f32", "half/0"))],
            reader["f32"].read_flat(3, 90),
            ck.verify(folder / "c").ok,
            ck.latest(folder) is None,
            reader.tree(),
            bool(rates),
            str(own := ck.fingerprint(state)),
            own.differences(ck.fingerprint(into)),
            own.to_json()["digest"],
        ]

    return call


def zarr_and_async(folder: Path) -> Call:
    state, into, other = {"w": _state(True)["f32"]}, {"w": _state(False)["f32"]}, {"w": _state(False)["f32"]}

    def call() -> Any:
        ck.save(folder / "z", state, format="zarr")
        ck.load(folder / "z", into)
        handle = ck.async_save(folder / "a", state)
        handle.wait()
        ck.load(folder / "a", other)
        return [into, other, handle.done(), handle.exception(), ck.verify(folder / "z").ok]

    return call


def live_objects(folder: Path) -> Call:
    model, again = _net(), _net(1)
    optimizer, other = _stepped(model), torch.optim.AdamW(again.parameters(), lr=0.3)

    def call() -> Any:
        ck.save(folder / "c", {"model": model, "optimizer": optimizer})
        ck.load(folder / "c", {"model": again, "optimizer": other})
        return lambda: [other, _trained(again, other)]

    return call


def manager(folder: Path) -> Call:
    state, into = {"w": torch.arange(9.0)}, {"w": torch.zeros(9)}

    def call() -> Any:
        found: list[Any] = []
        with ck.CheckpointManager(
            folder / "run", retention=2, asynchronous=True, save_policy=ck.EverySteps(2)
        ) as run:
            for step in range(1, 7):
                if run.should_save(step):
                    run.save(step, state, metric=1.0 / step)
            run.wait()
            found += [run.steps(), run.should_stop, len(run.history()), sorted(run.metrics())]
            run.pin(4)
            run.unpin(4)
            run.remove(4)
            restored = run.restore(into)
            found += [None if restored is None else restored.step, run.steps()]
            run.clean()
            run.close()
        return [found, into, ck.latest(folder / "run") is not None]

    return call


def ram_tier(folder: Path) -> Call:
    state, into = {"w": torch.arange(9.0)}, {"w": torch.zeros(9)}
    ram = ck.RamTier("walk", folder=folder / "shm")

    def call() -> Any:
        (folder / "shm").mkdir()
        with ck.CheckpointManager(folder / "run", ram=ram, save_policy=ck.EverySteps(2)) as run:
            run.save(1, state)
            run.wait()
            restored = run.restore(into)
            run.abandon()
        found = [ram.is_due(1), None if restored is None else restored.step, into]
        ram.clear()
        return found

    return call


def samplers(folder: Path) -> Call:
    def call() -> Any:
        samplers = [ck_data.ReshardableSampler(20, rank=rank, world_size=2, seed=3) for rank in (0, 1)]
        first = [list(zip(range(3), sampler, strict=False)) for sampler in samplers]
        whole = samplers[0].merge([sampler.state_dict() for sampler in samplers])
        part = samplers[0].split(whole, 0, 1)
        one = ck_data.ReshardableSampler(20, rank=0, world_size=1, seed=3)
        one.load_state_dict(part)
        rest = list(one)
        one.set_epoch(1)
        one.begin()
        ck.save(
            folder / "c", {"data": ck_data.Resharded(ck_data.ReshardableSampler(9, rank=0, world_size=1))}
        )
        one.renew(0, 1)
        return [first, rest, one.state_dict(), one.state_at(0, has_ended=False), len(one)]

    return call


def loaders(folder: Path) -> Call:
    sampler = ck_data.ReshardableSampler(6, rank=0, world_size=1)
    loader: ck_data.ReshardableLoader[Any] = ck_data.ReshardableLoader(
        DataLoader(range(6), batch_size=3, sampler=sampler)
    )  # type: ignore[arg-type]

    def call() -> Any:
        loader.set_epoch(1)
        batches = [batch.tolist() for batch in loader]
        loader.load_state_dict(loader.split(loader.merge([loader.state_dict()]), 0, 1))
        loader.renew(0, 1)
        return [batches, loader.state_dict()]

    return call


def full_state_dicts(folder: Path) -> Call:
    model, again, third = _net(), _net(1), _net(2)
    optimizer, other, last = _stepped(model), _stepped(again), _stepped(third)
    options = StateDictOptions(full_state_dict=True)
    weights, moments = ck_state.get_state_dict(model, optimizer, options=options)

    def call() -> Any:
        ck_state.set_model_state_dict(again, weights, options=options)
        ck_state.set_optimizer_state_dict(again, other, moments, options=options)
        ck_state.set_state_dict(
            third, last, model_state_dict=weights, optim_state_dict=moments, options=options
        )
        return lambda: [other, last, _trained(again, other), _trained(third, last)]

    return call


# -- conversion ---------------------------------------------------------------------------------------------


def conversion(folder: Path) -> Call:
    ck.save(folder / "native", {"model": _net()})
    torch.save(_net().state_dict(), folder / "plain.pt")

    def call() -> Any:
        found: list[Any] = []
        for kind in ("hf", "zarr", "dcp", "torch"):
            source = conv.open_source(str(folder / "native"))
            options = conv.ConvertOptions(assets=None)
            target = str(folder / kind) + (".pt" if kind == "torch" else "")
            report = conv.convert(source, target, kind, options)
            made = conv.open_source(target)
            found += [report.dropped_optimizer, report.dropped_others, bool(report.to_json())]
            found += [conv.diff(made, made), ck.verify(made).problems, ck.verify(made).damaged_tensors]
            found += [sorted(made.tensors), made.nbytes > 0]
        return found

    return call


def from_files(folder: Path) -> Call:
    torch.save(_net().state_dict(), folder / "plain.pt")
    model, lazy = _net(1), None
    with torch.device("meta"):
        lazy = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    def call() -> Any:
        reports = [ck.load(str(folder / "plain.pt"), into) for into in (model, lazy)]
        ck.save(folder / "dcp", {"model": model}, format="dcp")
        return lambda: [
            [report.missing for report in reports],
            model,
            _trained(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1)),
        ]

    return call


# -- tensors ------------------------------------------------------------------------------------------------


def linked_transfers(folder: Path) -> Call:
    codec = quantize.Fp8Blocks()
    trained = {"a": torch.arange(8.0).view(2, 4), "b": torch.ones(2, 4)}
    served = {
        "joined": torch.zeros(4, 4),
        "cut": torch.zeros(1, 4),
        "stacked": torch.zeros(2, 2, 4),
        "row": torch.zeros(4),
        "turned": torch.zeros(4, 2),
        "codes": torch.zeros(2, 4, dtype=codec.code_dtype),
        "scales": torch.zeros(1, 1),
        "padded": torch.ones(3, 4),
        "loaded": torch.zeros(2, 4),
    }
    engine = torch.nn.Module()
    engine.register_buffer("loaded", torch.zeros(2, 4))

    def load(weights: Any) -> None:
        rows = dict(weights)
        engine.get_buffer("loaded").copy_(torch.stack([rows["b"][0], rows["a"][1]]))

    def call() -> Any:
        links = share_links(links_from_loader(engine, load, trained)) | {
            "padded": links_of.concatenate("b", links_of.zeros((1, 4))),
            "joined": links_of.concatenate("a", "b"),
            "cut": links_of.slice("a", 1, 1),
            "stacked": links_of.stack("a", "b"),
            "row": links_of.index("a", 1),
            "turned": links_of.permute("b"),
            "codes": links_of.codes("a", codec),
            "scales": links_of.scales("a", codec),
        }
        Transfer(plan_transfer(*describe_states(trained, served), links=links)).run(trained, served)
        return served

    return call


def transfers(folder: Path) -> Call:
    trained, served = {"w": torch.arange(8.0)}, {"w": torch.zeros(8)}

    def call() -> Any:
        plan = plan_transfer(*describe_states(trained, served))
        same = plan_transfer(*describe_states(trained, served)).to_json() == plan.to_json()
        moving = Transfer(plan, delta=Delta(on_host=True))
        moving.run(trained, served)
        whole = moving.delta.sent_bytes, moving.delta.base_bytes  # type: ignore[union-attr]  # given above
        moving.run(trained, served)
        moving.delta.forget()  # type: ignore[union-attr]
        handle = moving.start(trained, served)
        handle.wait(timeout_s=60)
        return [
            same,
            served,
            whole,
            handle.done(),
            moving.version,
            plan.total_bytes,
            plan.relayed_bytes,
            plan.imbalance,
            plan.pair_bytes(),
        ]

    return call


def codecs(folder: Path) -> Call:
    values = torch.linspace(-3, 3, 128 * 256).reshape(128, 256)

    def call() -> Any:
        found: list[Any] = []
        for codec in (quantize.Fp8Blocks(128, 128), quantize.Int8Rows(), quantize.Mxfp8()):
            made = codec.quantize(values)
            grid = codec.grid((128, 256))
            codes, scales = codec.encode(values.reshape(-1), grid)
            found += [
                made.codes,
                made.scales,
                made.dequantize(),
                made.full(),
                codes,
                scales,
                str(codec.granularity),
            ]
        return found

    return call


def optimizers(folder: Path) -> Call:
    made = []
    for kind, options in (
        (optim.AdamW8bit, {"min_8bit_numel": 256}),
        (optim.Shampoo, {"block_size": 32, "update_every": 1}),
    ):
        model = _net()
        _backward(model)
        made.append((model, kind(model.parameters(), lr=0.01, **options)))  # type: ignore[operator]
    model = _net()
    _backward(model)
    matrices, others = optim.Muon.split_params(model)
    made.append((model, optim.Muon(matrices, lr=0.02, adamw_params=others)))

    def call() -> Any:
        for _, optimizer in made:
            optimizer.step()
        return [(model, optimizer) for model, optimizer in made]

    return call


# -- with a process group of one rank -----------------------------------------------------------------------


def _sharded(seed: int = 0, **options: Any) -> Any:
    model = _net(seed)
    for module in (*model, model):
        fully_shard(module, mesh=cpu_mesh(), **options)
    return model


def sharding(folder: Path) -> Call:
    model, mesh = _net(), cpu_mesh()

    def call() -> Any:
        fully_shard(model[0], mesh=mesh, granularity=Rows(4))
        fully_shard(model, mesh=mesh)
        layout = model.model_layout()
        return lambda: [layout.to_json(), _trained(model, torch.optim.AdamW(model.parameters(), lr=0.1))]

    return call


def switches(folder: Path) -> Call:
    model, other, x = _sharded(), _sharded(1), torch.ones(2, 32)

    def call() -> Any:
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)
        model.set_reshard_after_forward(True)
        model.set_reshard_after_backward(True)
        model.set_modules_to_forward_prefetch([model[1]])
        model.set_modules_to_backward_prefetch([model[0]])
        model.set_unshard_in_backward(True)
        model.set_gradient_divide_factor(2.0)
        model.set_force_sum_reduction_for_comms(True)
        model.set_narrow_reduction(True)
        model.set_reduce_scatter_max_input_buffers(2)
        model.set_requires_all_reduce(True)
        model.set_all_reduce_hook(lambda shard: None)
        model.set_reduce_scatter_unused_params(True)
        model.set_keep_unsharded_storage(False)
        vescale_fsdp.register_fsdp_forward_method(model, "forward")
        vescale_fsdp.share_comm_ctx([model, other])
        with model.no_sync():
            pass
        model.unshard(async_op=True).wait()
        model.reshard()
        model.zero_grad()
        out = model(x).detach()
        model.reset_iter_state()
        names = [name for name, _ in model.named_parameters()]
        return lambda: [out, names, _trained(model, torch.optim.AdamW(model.parameters(), lr=0.1))]

    return call


def ragged_tensors(folder: Path) -> Call:
    full, mesh = torch.arange(32.0).reshape(8, 4), cpu_mesh()
    placement = RaggedShard((0,), (1,))

    def call() -> Any:
        ragged = vescale_fsdp.distribute_tensor(full, mesh, [placement])
        made = RaggedDTensor.from_local(full.reshape(-1), mesh, [placement], shape=(8, 4))
        whole = vescale_fsdp.dtensor.redistribute(ragged, [Replicate()])
        later = vescale_fsdp.dtensor.redistribute(ragged, [Replicate()], async_op=True).wait()
        assert vescale_fsdp.dtensor.set_implicit_gathers(True)
        vescale_fsdp.manual_seed(5)
        state = vescale_fsdp.get_rng_state()
        drawn = made.clone().normal_()
        vescale_fsdp.set_rng_state(state)
        again = made.clone().uniform_()
        results = [ragged, made, whole, later, drawn, again, ragged * 2, ragged.sum(), ragged.full_tensor()]
        return [
            results,
            state,
            ragged.is_contiguous(),
            str(ragged.piece),
            str(ragged.boxes),
        ]

    return call


def sharded_checkpoints(folder: Path) -> Call:
    model, again, third = _sharded(), _sharded(1), _sharded(2)
    optimizer, other = _stepped(model), torch.optim.AdamW(again.parameters(), lr=0.3)
    saved, weights = model.state_dict(), third.state_dict()

    def call() -> Any:
        ck.save(folder / "c", {"model": model, "optimizer": optimizer})
        ck.load(folder / "c", {"model": again, "optimizer": other})
        dcp.save(
            {"m": saved}, storage_writer=ck_dcp.RaggedWriter(folder / "d"), planner=ck_dcp.RaggedSavePlanner()
        )
        dcp.load(
            {"m": weights},
            storage_reader=ck_dcp.RaggedReader(folder / "d"),
            planner=ck_dcp.RaggedLoadPlanner(),
        )
        ck_dcp.check_storage_writer(dcp.FileSystemWriter(folder / "e"), {"m": weights})
        return lambda: [_trained(again, other), weights, ck.verify(folder / "d").ok]

    return call


def sharded_optimizers(folder: Path) -> Call:
    made = []
    for kind, options in (
        (optim.AdamW8bit, {"min_8bit_numel": 256}),
        (optim.Shampoo, {"block_size": 32, "update_every": 1}),
    ):
        model = _sharded(granularity=Rows(32))
        _backward(model)
        made.append((model, kind(model.parameters(), lr=0.01, **options)))  # type: ignore[operator]

    def call() -> Any:
        for _, optimizer in made:
            optimizer.step()
        return [(model, optimizer) for model, optimizer in made]

    return call


def steps_in_backward(folder: Path) -> Call:
    model = _sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    loss = model(torch.linspace(-1, 1, 64).reshape(2, 32)).square().sum()

    def call() -> Any:
        optim.step_in_backward(model, optimizer)
        loss.backward()
        optimizer.step()
        return model, optimizer

    return call


def quantized_gathers(folder: Path) -> Call:
    codec, mesh, x = quantize.Fp8Blocks(32, 32), cpu_mesh(), torch.ones(2, 32)
    model = _net()

    def call() -> Any:
        policy = quantize.QuantizedGather(codecs=codec, param_dtype=torch.bfloat16)
        fully_shard(model, mesh=mesh, mp_policy=policy, granularity=codec.granularity)
        return model(x).detach()

    return call


def replaced_names(folder: Path) -> Call:
    def call() -> Any:
        with integrations.as_fsdp2():
            inside = torch.distributed.fsdp.fully_shard
        installed = integrations.install()
        installed.uninstall()
        return [inside is fully_shard, type(installed).__name__]

    return call


def plans(folder: Path) -> Call:
    model, batch = _net().to("meta"), torch.empty(4, 32, device="meta")

    def call() -> Any:
        cluster = vescale_fsdp.Cluster(4, 2)
        plan = vescale_fsdp.plan_training(model, cluster, batch=batch)
        plan.save(folder)
        wires = [cluster.gathered(8, 4), cluster.replicated(8, 2), cluster.library_bytes(1)]
        return [plan.fits, plan.to_json(), cluster.num_nodes, list(cluster.shard_sizes()), wires]

    return call


SOLO: tuple[Recipe, ...] = (
    save_and_load,
    zarr_and_async,
    live_objects,
    manager,
    ram_tier,
    samplers,
    loaders,
    full_state_dicts,
    conversion,
    from_files,
    transfers,
    linked_transfers,
    codecs,
    optimizers,
    plans,
)
GROUP: tuple[Recipe, ...] = (
    sharding,
    switches,
    ragged_tensors,
    sharded_checkpoints,
    sharded_optimizers,
    steps_in_backward,
    quantized_gathers,
    replaced_names,
)
