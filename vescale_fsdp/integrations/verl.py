"""verl: what its FSDP engine asks of FSDP2 beside its public functions, for models that this package shards.

    import verl.workers.engine            # first: what is imported later is not replaced
    with as_fsdp2():
        engine = EngineRegistry.new("language_model", "fsdp2", ...)

verl saves one file per rank: ``torch.save`` of sharded states (``FSDPCheckpointManager``). Here such a file contains
the rank's pieces and their boxes, so that

- the same number of ranks load it by verl's own ``load_checkpoint``. Another number is refused with the way out;
- `vescale_fsdp.checkpoint.load` and ``vescale-convert`` read the files of all ranks on any number of ranks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from verl.utils import fsdp_utils
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from vescale_fsdp.checkpoint.ranks.coordinator import coordinator_for
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, pieces_in_torch_save
from vescale_fsdp.errors import PlacementError
from vescale_fsdp.integrations.replaced_names import StandIn
from vescale_fsdp.runtime.fsdp_module import FSDPModule
from vescale_fsdp.torch_private import spec_of

_UTILS = "verl.utils.fsdp_utils"
_MANAGER = "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager"

_verl_save = FSDPCheckpointManager.save_checkpoint
_verl_load = FSDPCheckpointManager.load_checkpoint
_verl_set_reshard = fsdp_utils.set_reshard_after_forward
_verl_load_from_cpu = fsdp_utils.fsdp2_sharded_load_from_cpu


@functools.wraps(_verl_set_reshard)
def set_reshard_after_forward(module: Any, reshard_after_forward: bool, recurse: bool = True) -> None:
    """Call the method of a module that this package sharded; verl's copy of it sets FSDP2's private attributes."""
    if isinstance(module, FSDPModule):
        module.set_reshard_after_forward(reshard_after_forward, recurse)
    else:
        _verl_set_reshard(module, reshard_after_forward, recurse)


@functools.wraps(_verl_load_from_cpu)
@torch.no_grad()
def fsdp2_sharded_load_from_cpu(
    model: nn.Module, cpu_sharded_state: Mapping[str, tuple[torch.Tensor, Any]], target_spec: Any
) -> None:
    """Copy the pieces of ``fsdp2_sharded_save_to_cpu`` back into ragged parameters; call verl's for other models.

    verl's function expects the placements of the first parameter of all parameters. Here each parameter is compared
    with its own.

    Raises:
        PlacementError: if a parameter is placed differently than when it was saved, before any is written. The other
            ranks raise a `CheckpointError`.
    """
    params = {name: param for name, param in model.named_parameters() if name in cpu_sharded_state}
    if not any(isinstance(param, RaggedDTensor) for param in params.values()):
        _verl_load_from_cpu(model, cpu_sharded_state, target_spec)
        return
    with coordinator_for().together("comparing placements with those of saved pieces", "nothing was loaded"):
        for name, param in params.items():
            found = spec_of(param) if isinstance(param, DTensor) else None
            saved = cpu_sharded_state[name][1]
            if found != saved:
                raise PlacementError(
                    "A parameter is placed differently than in the saved pieces.",
                    expected=str(saved),
                    got=str(found),
                    where=name,
                    todo="load pieces into the model from which they were saved",
                )
    for name, param in params.items():
        target = param.to_local() if isinstance(param, DTensor) else param
        target.copy_(cpu_sharded_state[name][0])
    dist.barrier()


@functools.wraps(_verl_save)
def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:
    """Call verl's function with `pieces_in_torch_save`."""
    with pieces_in_torch_save():
        _verl_save(self, *args, **kwargs)


@functools.wraps(_verl_load)
def load_checkpoint(self: Any, local_path: str | None, *args: Any, **kwargs: Any) -> None:
    """Call verl's function.

    Raises:
        PlacementError: if a model that this package sharded was saved by another number of ranks. Ranks that see no
            such files raise a `CheckpointError`.
    """
    is_ours = any(isinstance(module, FSDPModule) for module in self.model.modules())
    if local_path is not None and is_ours:
        # verl ends with a barrier, at which the others would wait for a rank that alone sees other files.
        with coordinator_for().together(f"looking for verl's files in {local_path}", "nothing was loaded"):
            _check_world_size(Path(local_path), self.world_size)
    _verl_load(self, local_path, *args, **kwargs)


def _check_world_size(folder: Path, world_size: int) -> None:
    """Compare the number of ranks with that in the names of the folder's files. Remote folders are left to verl."""
    names = (file.name for file in folder.glob("model_world_size_*_rank_0.pt"))
    saved = sorted(int(re.findall(r"\d+", name)[0]) for name in names)
    if saved and world_size not in saved:
        raise PlacementError(
            "verl's checkpoint was saved by another number of ranks.",
            expected=f"files of {world_size} ranks, of which verl loads one each",
            got=f"files of {' and of '.join(map(str, saved))} ranks",
            where=str(folder),
            todo="vescale_fsdp.checkpoint.load(folder, {'model': model, 'optimizer': optimizer}) reads them on any "
            "number of ranks",
        )


VERL = (
    StandIn(_verl_set_reshard, set_reshard_after_forward, (_UTILS,)),
    StandIn(_verl_load_from_cpu, fsdp2_sharded_load_from_cpu, (_UTILS,)),
    StandIn(_verl_save, save_checkpoint, (_MANAGER,)),
    StandIn(_verl_load, load_checkpoint, (_MANAGER,)),
)
