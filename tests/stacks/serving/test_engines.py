"""What `weight_sync` gives to inference engines is taken by their own classes.

Modules are loaded from the files of the packages, one by one, since importing the packages needs GPUs and much else.
Set ``ENGINE_PACKAGES`` to folders, separated by colons, with unpacked wheels of vllm, sglang and pybase64, or install
them.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import RaggedShard, distribute_tensor, fully_shard
from vescale_fsdp.integrations.weight_sync import (
    ChangedItems,
    WholeTensors,
    sglang_bucket,
    vllm_patches,
    vllm_source,
)
from vescale_fsdp.quantize import Fp8Blocks
from vescale_fsdp.torch_private import local_of
from vescale_fsdp.transfer.links import codes, scales

# Modules that are loaded from their files; their parents are empty modules, whose own code is not run.
LOADED = {
    "vllm": (
        "vllm",
        "vllm.distributed",
        "vllm.distributed.weight_transfer",
        "vllm.distributed.device_communicators",
        "vllm.config",
        "vllm.utils",
        "vllm.model_executor",
        "vllm.model_executor.model_loader",
    ),
    "sglang": ("sglang", "sglang.srt", "sglang.srt.weight_sync"),
}


def folder_of(package: str) -> Path | None:
    """The folder of a package's files; None if there is none."""
    for folder in os.environ.get("ENGINE_PACKAGES", "").split(":"):
        if folder and Path(folder, package).is_dir():
            return Path(folder)
    found = importlib.util.find_spec(package)
    return Path(found.origin).parents[1] if found and found.origin else None


@contextmanager
def modules_of(package: str) -> Iterator[None]:
    """Make modules of a package importable from its files, and forget them afterwards."""
    folder = folder_of(package)
    assert folder is not None
    before = set(sys.modules)
    for name in LOADED[package]:
        parent = ModuleType(name)
        parent.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = parent
    if package == "vllm":  # what annotations name, a logger, and a function that only NCCL needs
        for name, content in {
            "vllm.config.parallel": ("ParallelConfig", object),
            "vllm.config.weight_transfer": ("WeightTransferConfig", object),
            "vllm.logger": ("init_logger", logging.getLogger),
            "vllm.utils.nccl": ("unpinned_nccl_env", None),
            "vllm.distributed.device_communicators.pynccl_wrapper": ("NCCL_UNIQUE_ID_BYTES", 128),
            "ray": (
                "method",
                lambda **options: lambda made: made,
            ),  # what the sharded RDT engine is decorated with
        }.items():
            sys.modules[name] = ModuleType(name)
            setattr(sys.modules[name], *content)
    # Where the metadata of the package is, with its version; and what its modules import.
    folders = dict.fromkeys([str(folder), *os.environ.get("ENGINE_PACKAGES", "").split(":")])
    sys.path += folders
    try:
        yield
    finally:
        del sys.path[-len(folders) :]
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in (package, "ray"):
                del sys.modules[name]


def trained() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors, and this rank's ragged shards of them."""
    full = {
        "layers.0.w": torch.randn(6, 8).bfloat16(),
        "layers.0.norm": torch.randn(7),
        "layers.0.odd": torch.randn(5, 4),
    }
    cut = [RaggedShard((0,), (1, 2))]
    return full, {
        "layers.0.w": distribute_tensor(full["layers.0.w"].clone(), cpu_mesh(), cut),
        "layers.0.norm": distribute_tensor(
            full["layers.0.norm"].clone(), cpu_mesh(), [RaggedShard((0,), (3, 4))]
        ),
        "layers.0.odd": distribute_tensor(
            full["layers.0.odd"].clone(), cpu_mesh(), [RaggedShard((0,), (0, 5))]
        ),
    }


def sends_to_vllm() -> dict[str, str]:
    """vLLM's factory makes a trainer engine without a config; its checks accept the source's metadata and tensors."""
    full, state = trained()
    rank = dist.get_rank()
    with modules_of("vllm"):
        source = vllm_source(state, bucket_bytes=256)
        base = importlib.import_module("vllm.distributed.weight_transfer.base")
        m2n = importlib.import_module("vllm.distributed.weight_transfer.m2n_common")
        factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
        assert isinstance(source, base.WeightSource)
        assert source.implements_iter_full() and source.implements_iter_local()
        names = source.owned_names(rank)
        assert sorted(names) == sorted(full)

        @dataclass
        class InitInfo(base.TrainerInitInfo):  # type: ignore[misc, name-defined]
            backend: ClassVar[str] = "kept"

        class Engine(base.TrainerWeightTransferEngine):  # type: ignore[misc, name-defined]
            """Keeps what it would send."""

            init_info_cls = InitInfo

            @classmethod
            def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
                return cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)

            def send_weights(self) -> None:
                for name, tensor in self.source.iter_full():
                    self.client.append((name, tensor.clone()))

        factory.WeightTransferTrainerFactory.register_engine("kept", Engine)
        sent: list[tuple[str, torch.Tensor]] = []
        engine = factory.WeightTransferTrainerFactory.trainer_init(
            InitInfo(rank=rank), client=sent, source=source
        )
        for step in range(2):  # each round reads the weights again
            for tensor in state.values():
                local_of(tensor).mul_(-1 if step else 1)
            sent.clear()
            engine.send_weights()
            wanted = {name: -value if step else value for name, value in full.items()}
            assert [name for name, _ in sent] == names
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in sent)
        # Local shards, as the m2n engine checks and plans them.
        local = dict(source.iter_local())
        found = {}
        for meta in source.metadata:
            param = m2n.m2n_param_meta(meta, dist.get_world_size())
            m2n.check_transferable(param.name, param.dtype, param.shape)
            assert m2n.expected_local_shape(param) == tuple(local[meta.name].shape)
            assert local[meta.name].dtype == meta.dtype and meta.shape == full[meta.name].shape
            placement = meta.placements[0] if meta.placements else None
            own = -full[meta.name]
            if placement is not None:
                own = own.chunk(dist.get_world_size(), placement.dim)[rank]
            assert torch.equal(local[meta.name], own)
            found[meta.name] = "whole" if placement is None else f"dim {placement.dim}"
    return found


@pytest.mark.skipif(folder_of("vllm") is None, reason="needs the files of vllm")
def test_vllm_takes_a_weight_source() -> None:
    """Whole tensors, and chunks of the first dim that the ranks divide; a tensor without such a dim is whole."""
    wanted = {"layers.0.w": "dim 0", "layers.0.norm": "whole", "layers.0.odd": "dim 1"}
    assert run_ranks(2, sends_to_vllm) == [wanted] * 2


class Layered(nn.Module):
    """Twelve layers of two dtypes, a tied head, a buffer that is saved, and one that is not."""

    bias: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8, bias=False, dtype=torch.bfloat16), nn.RMSNorm(8)) for _ in range(12)
        )
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("bias", torch.randn(3))
        self.register_buffer("cache", torch.randn(3), persistent=False)


def feeds_sharded_rdt() -> list[list[str]]:
    """vLLM's sharded RDT trainer takes a sharded module, and reads its groups, whose names are returned."""
    torch.manual_seed(0)
    model = Layered()
    wanted = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    fully_shard(model, mesh=cpu_mesh())
    with modules_of("vllm"):
        trainer = importlib.import_module("vllm.distributed.weight_transfer.sharded_rdt_trainer")

        class Engine(trainer.ShardedRDTTrainerWeightTransferEngine):  # type: ignore[misc, name-defined]
            """Without the server, which needs a GPU."""

            def _spawn_server(self, served_names: list[str]) -> None:
                assert set(served_names) == set(wanted)
                self._server_name = f"server {self.rank}"

            def _build_worker_init_info(self, server_names: list[str]) -> Any:
                assert server_names == ["server 0", "server 1"]
                return self._init_info

        class Client:
            """Hears of the engine's start."""

            def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
                assert info["num_consumers"] == 1

        engine = Engine.trainer_init(
            trainer.ShardedRDTTrainerInitInfo(rank=dist.get_rank(), num_consumers=1),
            client=Client(),
            source=vllm_source(model, bucket_bytes=300),
        )
        groups = []
        for names, tensors in engine._iter_owned_groups():
            groups.append(names)
            assert all(
                torch.equal(tensor, wanted.pop(name)) for name, tensor in zip(names, tensors, strict=True)
            )
    assert not wanted
    return groups


@pytest.mark.skipif(folder_of("vllm") is None, reason="needs the files of vllm")
def test_sharded_rdt_reads_layer_by_layer() -> None:
    """Layer 10 comes after layer 9, not after layer 1, and a wide dtype does not come before the others."""
    layers = [[f"layers.{i}.0.weight", f"layers.{i}.1.weight"] for i in range(12)]
    assert run_ranks(2, feeds_sharded_rdt) == [[["embed.weight"], *layers, ["bias"]]] * 2


class Fused(nn.Module):
    """An engine's model with an own ``load_weights``, as vLLM's: w and odd are parts of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(68), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(7), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parts = {
            "layers.0.w": self.fused.data[:48],
            "layers.0.odd": self.fused.data[48:],
            "layers.0.norm": self.norm.data,
        }
        for name, tensor in weights:
            parts[name].copy_(tensor.reshape(-1))
        return set(parts)


class Wire:
    """In place of NCCL: what is broadcast on the trainer's side is received, in order, on the engine's."""

    device = torch.device("cpu")

    def __init__(self, queue: SimpleQueue[torch.Tensor], *, sends: bool) -> None:
        self.queue, self.sends = queue, sends

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object) -> None:
        assert src == 0
        if self.sends:
            self.queue.put(tensor.clone())
        else:
            tensor.copy_(self.queue.get(timeout=60))


def sends_patches() -> list[int]:
    """vLLM's sparse trainer engine sends what has changed to vLLM's worker engine; returns the bytes of each step."""
    full, state = trained()
    with modules_of("vllm"), mock.patch("torch.cuda.current_stream"):
        sparse = importlib.import_module("vllm.distributed.weight_transfer.sparse_nccl_engine")
        changed = ChangedItems(state)
        model, wire = Fused(), SimpleQueue[torch.Tensor]()
        model.load_weights(full.items())
        worker = sparse.SparseNCCLWeightTransferEngine.__new__(sparse.SparseNCCLWeightTransferEngine)
        worker.model, worker.model_update_group = model, Wire(wire, sends=False)
        sizes: list[int] = []

        class Client:
            """Calls the worker, as the server does."""

            def start_weight_update(self) -> None:
                sizes.append(0)

            def update_weights(self, info: dict[str, Any]) -> None:
                sizes[-1] = sum(info["num_updates_list"])
                worker.receive_weights(sparse.SparseNCCLWeightTransferUpdateInfo(**info))

            finish_weight_update = start_weight_update

        is_sender = dist.get_rank() == 0
        engine = sparse.SparseNCCLTrainerWeightTransferEngine(client=Client(), is_sender=is_sender)
        engine.model_update_group = Wire(wire, sends=True)
        whole = WholeTensors(state)
        for step in range(3):
            for local in map(local_of, state.values()):
                local.view(-1)[step::7] += 1
            engine.send_weights(vllm_patches(changed))
            changed.commit()
            if is_sender:
                wanted = Fused()
                wanted.load_weights(whole)
                assert all(map(torch.equal, model.parameters(), wanted.parameters()))
            else:
                list(whole)
    return sizes[::2]


@pytest.mark.skipif(folder_of("vllm") is None, reason="needs the files of vllm")
def test_vllm_takes_patches() -> None:
    """The sender's engine sends every change once, to vLLM's own code that applies it; other ranks send nothing."""
    sizes, none = run_ranks(2, sends_patches)
    assert none == [] and len(sizes) == 3 and all(0 < size < 20 for size in sizes)


def received(bucket: Any, header: list[tuple[str, str, torch.Size]]) -> Any:
    """Allocate what is received, as SGLang's version does."""
    if "empty" in vars(bucket):  # 0.5.23
        return bucket.empty(*zip(*header, strict=True), "cpu")
    return bucket([(name, torch.empty(shape, dtype=getattr(torch, dtype))) for name, dtype, shape in header])


def broadcasts_to_sglang() -> None:
    """Rank 0 broadcasts buckets; rank 1 receives as `update_weights_from_distributed` does, by names and shapes."""
    full, state = trained()
    full["odd"] = torch.arange(5, dtype=torch.int8)
    state["odd"], state["none"], full["none"] = full["odd"].clone(), torch.ones(0), torch.ones(0)
    wanted = dict(full)
    with modules_of("sglang"):
        module = importlib.import_module("sglang.srt.weight_sync.tensor_bucket")
        for bucket in WholeTensors(state, receivers=(0,)).buckets():
            headers: list[Any] = [None]
            if dist.get_rank() == 0:
                flattened = sglang_bucket(bucket)
                headers = [
                    [(each.name, str(each.dtype)[6:], each.shape) for each in flattened.get_metadata()]
                ]
            dist.broadcast_object_list(headers)
            if dist.get_rank() == 1:
                flattened = received(module.FlattenedTensorBucket, headers[0])
            dist.broadcast(flattened.get_flattened_tensor(), 0)
            for name, tensor in flattened.reconstruct_tensors():
                assert torch.equal(tensor, wanted.pop(name)), name
    assert not wanted


@pytest.mark.skipif(folder_of("sglang") is None, reason="needs the files of sglang")
def test_sglang_receives_by_names_dtypes_and_shapes() -> None:
    """SGLang allocates what it receives itself: the bytes that are sent have its offsets."""
    run_ranks(2, broadcasts_to_sglang)


def sends_to_sglang() -> None:
    """SGLang's bucket gives back the tensors, codes too, from the memory of ours."""
    full, state = trained()
    codec = Fp8Blocks(4, 4)
    links: dict[str, Any] = {name: name for name in full}
    links |= {"codes": codes("layers.0.w", codec), "scale": scales("layers.0.w", codec)}
    quantized = codec.quantize(full["layers.0.w"].float())
    wanted = full | {"codes": quantized.codes, "scale": quantized.scales}
    found: dict[str, torch.Tensor] = {}
    with modules_of("sglang"):
        for bucket in WholeTensors(state, links=links, receivers=(0,), bucket_bytes=512).buckets():
            if dist.get_rank() == 0:
                flattened = sglang_bucket(bucket)
                assert flattened.get_flattened_tensor().data_ptr() == bucket.data.data_ptr()
                again = type(flattened)(
                    flattened_tensor=flattened.get_flattened_tensor().clone(),
                    metadata=flattened.get_metadata(),
                )
                found |= dict(again.reconstruct_tensors())
    if dist.get_rank() == 0:
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert tensor.shape == wanted[name].shape
            assert torch.equal(tensor.view(wanted[name].dtype), wanted[name]), name


@pytest.mark.skipif(folder_of("sglang") is None, reason="needs the files of sglang")
def test_sglang_takes_buckets() -> None:
    """As `update_weights_from_tensor` and `update_weights_from_distributed` rebuild them."""
    run_ranks(2, sends_to_sglang)
