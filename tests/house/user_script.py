"""What users write, typed: train, save, load, resume, convert. Type checkers and torchrun get this file.

torchrun --nproc-per-node 2 user_script.py FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save  # type checkers see no dcp.save

import vescale_fsdp
from vescale_fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    PaddingPolicy,
    PlanReport,
    RaggedDTensor,
    RaggedShard,
    Rows,
    Tiles,
    UnshardHandle,
    Whole,
    distribute_tensor,
    fully_shard,
    manual_seed,
    plan_report,
    register_fsdp_forward_method,
)
from vescale_fsdp.checkpoint import (
    CheckpointManager,
    LoadReport,
    PerRank,
    Restored,
    SaveHandle,
    async_save,
    load,
    read_state,
    save,
    verify,
)
from vescale_fsdp.checkpoint.dcp import check_storage_writer
from vescale_fsdp.conversion import ConvertOptions, ConvertReport, convert, diff, open_source
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.optim import AdamW8bit, Muon, step_in_backward
from vescale_fsdp.quantize import Fp8Blocks, QuantizedGather


class Net(nn.Module):
    """Two layers and a method of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """The first layer alone."""
        y: torch.Tensor = self.layers[0](x)
        return y


def shard() -> Net:
    """Units bottom-up, and the methods that a sharded module has beside its own."""
    model = Net()
    manual_seed(1)
    for layer in model.layers:
        fully_shard(layer, granularity=Rows(2), padding_policy=PaddingPolicy(scatter="never"))
    sharded = fully_shard(
        model,
        granularity=lambda name, param: Whole() if param.ndim == 1 else Tiles(2, 2),
        mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
    )
    y: torch.Tensor = sharded(torch.ones(2, 8))
    y.sum().backward()
    handle: UnshardHandle | None = sharded.unshard(async_op=True)
    if handle is not None:
        handle.wait()
    sharded.reshard()
    sharded.set_requires_gradient_sync(False)
    with sharded.no_sync():
        sharded(torch.ones(2, 8))
    sharded.set_requires_gradient_sync(True, recurse=True)
    print(sharded.model_layout().groups[0][1].shard_numel, sharded.training, len(sharded.state_dict()))
    sharded.zero_grad()
    register_fsdp_forward_method(model, "first")
    assert isinstance(model, FSDPModule)
    model.first(torch.ones(2, 8)).sum().backward()
    model.set_modules_to_forward_prefetch([fully_shard(nn.Linear(2, 2))])
    model.set_modules_to_forward_prefetch([])
    print([type(unit).__name__ for unit in fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])])
    return model


def train(model: Net) -> torch.optim.Optimizer:
    """A step by each optimizer; torch's own is kept."""
    matrices, others = Muon.split_params(model)
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=1e-3),
        AdamW8bit(others, lr=1e-3),
        torch.optim.AdamW(model.parameters(), lr=1e-3),
    ]
    for optimizer in optimizers:
        loss: torch.Tensor = model(torch.randn(2, 8)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    step_in_backward(model, optimizers[-1])
    model(torch.randn(2, 8)).sum().backward()
    optimizers[-1].step()
    return optimizers[-1]


def checkpoint(model: Net, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Stock DCP, the native format, a manager."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    writer = FileSystemWriter(folder / "dcp")
    check_storage_writer(writer, model_state)
    dcp_save({"model": model_state, "optim": optimizer_state}, storage_writer=writer)

    state = {"model": model, "optim": optimizer, "seed": PerRank(dist.get_rank())}
    save(folder / "native", state, metadata={"step": 3}, format="native")
    handle: SaveHandle = async_save(str(folder / "async"), state)
    handle.wait()
    report: LoadReport = load(folder / "native", state, strict=True, verify="before")
    print(report, verify(folder / "native").problems, read_state(folder / "native").metadata)
    try:
        load(folder / "nothing", state)
    except CheckpointError as error:
        print(type(error).__name__)

    manager = CheckpointManager(folder / "steps", retention=2)
    manager.save(1, state, force=True)
    manager.wait()
    restored: Restored | None = manager.restore(state)
    print(manager.steps(), restored.step if restored is not None else None)


def export(folder: Path) -> None:
    """The converter as a library."""
    source = open_source(str(folder / "native"))
    options = ConvertOptions(dtype=["bf16"], optimizer="drop", overwrite=True)
    done: ConvertReport = convert(source, str(folder / "hf"), "hf", options)
    differences, compared = diff(source, open_source(str(folder / "dcp")))
    print(done.plan.tensor_nbytes, len(differences), compared)


def plan() -> None:
    """What needs no process group, and values of the layout."""
    with torch.device("meta"):
        report: PlanReport = plan_report(Net(), [2, 4], Rows(2))
    policy = QuantizedGather(codecs=Fp8Blocks())
    print(vescale_fsdp.__version__, len(str(report)), type(policy).__name__)


def pieces() -> None:
    """Ragged tensors on their own."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    ragged: RaggedDTensor = distribute_tensor(torch.arange(8.0), mesh, [RaggedShard((0,), (1, 3))])
    print(ragged.to_local().numel(), ragged.full_tensor().sum().item())


def main() -> None:
    """Everything in turn."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    plan()
    pieces()
    model = shard()
    checkpoint(model, train(model), folder)
    if dist.get_rank() == 0:
        export(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
