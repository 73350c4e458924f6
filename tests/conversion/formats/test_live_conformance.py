"""Every format straight into every way of sharding, other ranks than saved: model, optimizer, tie, bit for bit."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import fully_shard as fully_shard_2
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtype_zoo import same_bytes
from tests.support.s3_server import Weather, bucket_client, s3_server
from vescale_fsdp import Rows, fully_shard
from vescale_fsdp.checkpoint import SourceOptions, load, save
from vescale_fsdp.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from vescale_fsdp.conversion import ConvertOptions, convert, open_source

# format -> whether it holds the optimizer
SOURCES = {
    "dcp": True,
    "flat_dcp": True,
    "ranks": True,
    "fsdp1": True,
    "native": True,
    "zarr": True,
    "whole.pt": True,
    "numbered.pt": True,
    "hf": False,
    "bin": False,
}
RANK_FILES = ("ranks", "fsdp1")  # a model and an optimizer, and nothing beside them
TARGETS = ("ours", "rows", "fsdp2", "plain", "meta", "meta_fsdp2", "meta_plain", "columns")


class Tied(nn.Module):
    """Sizes that 2 and 3 ranks cut unevenly, a buffer, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 6, bias=False)])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.arange(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    inner = list(model.blocks.parameters())
    outer = [p for p in model.parameters() if all(p is not other for other in inner)]
    return torch.optim.AdamW([{"params": outer}, {"params": inner, "weight_decay": 0.5}], lr=lr)


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Tied()
    optimizer = _optimizer(model, 0.25)
    model(torch.arange(11)).sum().backward()
    optimizer.step()
    return model, optimizer


def _sharded(kind: str) -> nn.Module:
    torch.manual_seed(6)
    with torch.device("meta" if kind.startswith("meta") else "cpu"):
        model = Tied()
    shard = {"ours": fully_shard, "meta": fully_shard, "fsdp2": fully_shard_2, "meta_fsdp2": fully_shard_2}
    if kind == "rows":
        fully_shard(model, mesh=cpu_mesh(), granularity=Rows(2))
    elif kind in shard:
        for block in model.blocks:
            shard[kind](block, mesh=cpu_mesh())
        shard[kind](model, mesh=cpu_mesh())
    return model


FULL = StateDictOptions(full_state_dict=True)


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": model_state, "optimizer": optimizer_state, "epoch": 3}


def _save_all(folder: Path) -> None:
    """Each format as its own library writes it, from two ranks where ranks write it."""
    whole, whole_optimizer = _trained()
    full = _state_of(whole, whole_optimizer)
    for kind in ("ours", "fsdp2"):
        model = _sharded(kind)
        optimizer = _optimizer(model, 1.0)
        states = copy.deepcopy(full)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
            options=FULL,
        )
        if kind == "ours":
            save(folder / "native", _state_of(model, optimizer))
            save(folder / "zarr", _state_of(model, optimizer), format="zarr")
            continue
        dcp.save(_state_of(model, optimizer), checkpoint_id=folder / "dcp")
        flat = _state_of(model, optimizer, flatten_optimizer_state_dict=True)
        dcp.save({"epoch": flat.pop("epoch"), "app": flat}, checkpoint_id=folder / "flat_dcp")
        (folder / "ranks").mkdir(exist_ok=True)
        rank = dist.get_rank()
        torch.save(model.state_dict(), folder / "ranks" / f"pytorch_model_fsdp_rank{rank}.bin")
        torch.save(optimizer.state_dict(), folder / "ranks" / f"optimizer_0_rank{rank}.bin")
    _save_fsdp1(folder / "fsdp1")
    if dist.get_rank() == 0:
        torch.save(full, folder / "whole.pt")
        numbered = {"net": whole.state_dict(), "optimizer": whole_optimizer.state_dict(), "epoch": 3}
        torch.save(numbered, folder / "numbered.pt")
        once = {name: value for name, value in whole.state_dict().items() if name != "head.weight"}
        (folder / "hf").mkdir()
        save_file(once, folder / "hf" / "model.safetensors")
        (folder / "bin").mkdir()
        torch.save(once, folder / "bin" / "pytorch_model.bin")


def _save_fsdp1(folder: Path) -> None:
    """Rank files of ShardedTensors, trained by FSDP1 itself."""
    torch.manual_seed(5)
    model = FullyShardedDataParallel(Tied(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = _optimizer(model.module, 0.25)
    model(torch.arange(11)).sum().backward()
    optimizer.step()
    sharded = (ShardedStateDictConfig(), ShardedOptimStateDictConfig())
    folder.mkdir(exist_ok=True)
    with (
        FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *sharded),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)  # ShardedTensor is on its way out
        rank = dist.get_rank()
        torch.save(model.state_dict(), folder / f"pytorch_model_fsdp_rank{rank}.bin")
        moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        torch.save(moments, folder / f"optimizer_0_rank{rank}.bin")


def _full(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _differences(found: Any, expected: Any, where: str = "") -> list[str]:
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            return [f"{where}: {found} has other keys than {expected}"]
        return [d for key in expected for d in _differences(found[key], expected[key], f"{where}/{key}")]
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return [where]
        pairs = zip(found, expected, strict=True)
        return [d for i, (a, b) in enumerate(pairs) for d in _differences(a, b, f"{where}/{i}")]
    if isinstance(expected, torch.Tensor):
        return [] if same_bytes(_full(found), expected) else [where]
    return [] if found == expected else [f"{where}: {found}, not {expected}"]


def _columns(expected: dict[str, Any]) -> dict[str, Any]:
    """The state as tensors alone, cut along their last dim; tied ones are one."""
    made: dict[int, torch.Tensor] = {}

    def blank(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: blank(item) for key, item in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        if value.data_ptr() not in made:
            empty = torch.full_like(value, 99)
            cut = distribute_tensor(empty, cpu_mesh(), [Shard(value.ndim - 1)]) if value.ndim else empty
            made[value.data_ptr()] = cut
        return made[value.data_ptr()]

    return blank(expected)


def _load_all(folder: Path) -> list[str]:
    """What differs after loading, for every pair."""
    expected = _state_of(*_trained())
    problems = []
    for source, has_optimizer in SOURCES.items():
        for kind in TARGETS:
            state: dict[str, Any] = {"epoch": 0}
            if kind == "columns":
                state = _columns(expected)
                wanted = {"model": state["model"]} if not has_optimizer else state
                load(folder / source, wanted, strict=source not in RANK_FILES, source=SourceOptions())
                found = wanted
            else:
                model = _sharded(kind)
                if kind.startswith("meta") or not has_optimizer:
                    load(folder / source, model, source=SourceOptions())
                    state = {"epoch": 3}
                optimizer = _optimizer(model, 7.0)
                if has_optimizer:
                    wanted = {"model": model, "optimizer": optimizer, "epoch": 0}
                    load(folder / source, wanted, strict=source not in RANK_FILES)
                    state = wanted
                found = _state_of(model, optimizer) | {"epoch": state["epoch"]}
                if model.head.weight is not model.embed.weight:
                    problems.append(f"{source} -> {kind}: untied")
            chosen = expected if has_optimizer else {"model": expected["model"]}
            if source in RANK_FILES:
                chosen = {key: value for key, value in chosen.items() if key != "epoch"}
            found = {key: found[key] for key in chosen}
            problems += [f"{source} -> {kind}: {text}" for text in _differences(found, chosen)]
    return problems


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All formats, by two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, _save_all, folder)
    return folder


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.part("formats"))])
def test_every_source_loads_into_every_way_of_sharding(saved: Path, ranks: int) -> None:
    """10 sources, 8 targets: ragged by element and by rows, Shard(0) and Shard(1), plain, on the meta device."""
    for problems in run_ranks(ranks, _load_all, saved):
        assert problems == []


def _load_from_a_bucket(endpoint: str) -> list[str]:
    settings = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_ENDPOINT_URL": endpoint}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**settings, "AWS_DEFAULT_REGION": "us-east-1"}.items():
            patch.setenv(name, value)
        expected = _state_of(*_trained())
        problems = []
        for source in ("hf", "dcp", "native", "fsdp1"):
            model = _sharded("rows")
            load(f"s3://bucket/{source}", model, source=SourceOptions())
            found = {"model": model.state_dict()}
            problems += [f"{source}: {text}" for text in _differences(found, {"model": expected["model"]})]
    return problems


@pytest.mark.part("formats")
def test_sources_load_from_an_object_store_by_ranges(saved: Path) -> None:
    """The same from an object store, by ranges."""
    weather = Weather()
    with s3_server(weather) as endpoint:
        client = bucket_client(endpoint)
        for path in saved.rglob("*"):
            if path.is_file():
                client.upload_file(str(path), "bucket", str(path.relative_to(saved)))
        weather.calm_down()
        assert run_ranks(2, _load_from_a_bucket, endpoint) == [[], []]
        assert any(asked for method, _, asked in weather.requests if method == "GET")


def test_a_difference_is_seen(saved: Path) -> None:
    """The comparison above finds one changed bit, one other option and a missing name."""
    expected = _state_of(*_trained())
    for change in (
        lambda s: s["model"]["blocks.0.bias"][0].add_(1e-6),
        lambda s: s["optimizer"]["param_groups"][1].update(weight_decay=0.1),
        lambda s: s["optimizer"]["state"].pop("embed.weight"),
    ):
        other = copy.deepcopy(expected)
        change(other)
        assert len(_differences(other, expected)) == 1
    assert _differences(expected, expected) == [] and open_source(str(saved / "hf")).kind == "hf"
    convert(open_source(str(saved / "dcp")), str(saved / "again"), "native", ConvertOptions())
