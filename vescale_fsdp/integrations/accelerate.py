"""accelerate's FSDP plugin on this package's runtime.

    accelerator = Accelerator(fsdp_plugin=VescalePlugin(granularity={"*.down_proj.weight": Rows(32)}))

The plugin is a subclass of accelerate's own, with ``fsdp_version=2``. Its constructor calls `install`, which replaces
torch's functions in the whole process until ``plugin.installation.uninstall()``. accelerate uses the newest plugin of
a process.
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
        padding_policy: as for `vescale_fsdp.integrations.install`.

    Raises:
        UnsupportedOpError: for options that are not supported, before anything is replaced.

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
            # The launcher sets this variable.
            self.fsdp_version = int(os.environ.get("FSDP_VERSION", "2"))
        if self.fsdp_version != 2:
            raise UnsupportedOpError(
                "vescale_fsdp replaces FSDP2 only.",
                expected="fsdp_version=2",
                got=f"fsdp_version={self.fsdp_version}, as an argument or in the variable FSDP_VERSION",
                todo="set fsdp_version: 2 in the plugin, the YAML file or the launcher's options",
            )
        super().__post_init__()  # fills in the policies that are checked next
        check_policies(self.mixed_precision_policy or MixedPrecisionPolicy(), self.cpu_offload)
        self.installation = install(granularity=self.granularity, padding_policy=self.padding_policy)
