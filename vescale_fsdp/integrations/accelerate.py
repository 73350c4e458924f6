"""accelerate's FSDP plugin with this package's runtime behind it.

    accelerator = Accelerator(fsdp_plugin=VescalePlugin(granularity={"*.down_proj.weight": Rows(32)}))

The plugin is accelerate's own with ``fsdp_version=2``; making one calls `install`, so torch's names are replaced in the
whole process until ``plugin.installation.uninstall()``. accelerate knows one plugin per process, so the newest counts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from accelerate import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp.errors import UnsupportedOpError
from vescale_fsdp.integrations.installation import Installation, install
from vescale_fsdp.layout.granularity import GranularityRule
from vescale_fsdp.layout.padding import PaddingPolicy
from vescale_fsdp.runtime.group_plan import check_policies


@dataclass
class VescalePlugin(FullyShardedDataParallelPlugin):
    """``FullyShardedDataParallelPlugin`` that shards with `vescale_fsdp.fully_shard`.

    Args:
        granularity: as for `vescale_fsdp.integrations.install`.
        padding_policy: likewise.

    Raises:
        UnsupportedOpError: for flags that cannot be honoured, before anything is replaced.

    Examples:
        >>> def accelerator():
        ...     from accelerate import Accelerator
        ...     return Accelerator(fsdp_plugin=VescalePlugin(granularity={"*mlp*": "rows:32"}))
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
        check_policies(self.mixed_precision_policy or MixedPrecisionPolicy(), self.cpu_offload)
        self.installation = install(granularity=self.granularity, padding_policy=self.padding_policy)


def _fsdp1_refused(version: int) -> UnsupportedOpError:
    return UnsupportedOpError(
        "vescale_fsdp takes the place of FSDP2.",
        expected="fsdp_version=2",
        got=f"fsdp_version={version}, as an argument or in the variable FSDP_VERSION",
        todo="say fsdp_version: 2 in the plugin, the YAML file or the launcher's options",
    )
