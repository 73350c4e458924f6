"""accelerate's FSDP plugin with this package's runtime behind it.

    accelerator = Accelerator(fsdp_plugin=VescalePlugin(granularity={"*.down_proj.weight": Rows(32)}))

The plugin is accelerate's own with ``fsdp_version=2``; making one calls `install`, so torch's names are replaced in the
whole process until ``plugin.installation.uninstall()``. accelerate knows one plugin per process, so the newest counts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy

from vescale_fsdp.errors import UnsupportedOpError
from vescale_fsdp.integrations.installation import Installation, install
from vescale_fsdp.integrations.replaced_names import StandIn
from vescale_fsdp.layout.granularity import GranularityRule
from vescale_fsdp.layout.padding import PaddingPolicy
from vescale_fsdp.runtime.comm.group_comm import GatherPolicy
from vescale_fsdp.runtime.fsdp_module import FSDPModule

__all__ = ["VescalePlugin"]


@dataclass
class VescalePlugin(FullyShardedDataParallelPlugin):
    """``FullyShardedDataParallelPlugin`` that shards with `vescale_fsdp.fully_shard`.

    Args:
        granularity: as for `vescale_fsdp.integrations.install`.
        padding_policy: likewise.

    Raises:
        UnsupportedOpError: for flags that cannot be honoured, before anything is replaced.
    """

    fsdp_version: int | None = None  # accelerate's own default is 1
    granularity: GranularityRule = None
    padding_policy: PaddingPolicy | None = None
    installation: Installation = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.fsdp_version is None:
            self.fsdp_version = int(os.environ.get("FSDP_VERSION", "2"))
        if self.fsdp_version != 2:
            raise _fsdp1_refused(self.fsdp_version)
        super().__post_init__()
        _refuse_offload_beside(self.mixed_precision_policy, self.cpu_offload)
        self.installation = install(
            granularity=self.granularity, padding_policy=self.padding_policy, also=(_PREPARE,)
        )


def _fsdp1_refused(version: int) -> UnsupportedOpError:
    return UnsupportedOpError(
        "vescale_fsdp takes the place of FSDP2.",
        expected="fsdp_version=2",
        got=f"fsdp_version={version}, as an argument or in the variable FSDP_VERSION",
        todo="say fsdp_version: 2 in the plugin, the YAML file or the launcher's options",
    )


def _refuse_offload_beside(policy: object, offload: object) -> None:
    if isinstance(offload, CPUOffloadPolicy) and isinstance(policy, GatherPolicy):
        raise UnsupportedOpError(
            "A gather policy of vescale_fsdp reads shards where they are computed with.",
            expected="cpu_offload=False, or a mixed_precision_policy of torch's own class",
            got=f"cpu_offload={offload} and mixed_precision_policy={policy}",
            todo="leave one of them out",
        )


_their_prepare = Accelerator._prepare_fsdp2


def _prepare_fsdp2(self: Accelerator, *args: Any) -> Any:
    """accelerate's own, and the optimizer of a model that was sharded by hand keeps its parameters.

    accelerate gives optimizers the sharded parameters by the address of the full ones. Where the model is sharded
    already these are the pieces' addresses, of which all empty ones are 0, so that one would stand for all.
    """
    is_sharded = any(isinstance(each, FSDPModule) for each in args)
    optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)] if is_sharded else []
    kept = [[list(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
    prepared = _their_prepare(self, *args)
    for optimizer, groups in zip(optimizers, kept, strict=True):
        for group, params in zip(
            optimizer.param_groups, groups, strict=True
        ):  # accelerate makes the dicts anew
            group["params"] = params
    return prepared


_PREPARE = StandIn(_their_prepare, _prepare_fsdp2, ("accelerate.accelerator:Accelerator",))
