"""accelerate's FSDP plugin on this package's runtime.

    accelerator = Accelerator(fsdp_plugin=VescalePlugin(granularity={"*.down_proj.weight": Rows(32)}))

The plugin is a subclass of accelerate's plugin, with ``fsdp_version=2``. Its constructor calls `install`, which
replaces torch's functions in the whole process until ``plugin.installation.uninstall()``. If a process makes several
plugins, accelerate uses the newest one.
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
    """accelerate's ``FullyShardedDataParallelPlugin``, with which models are sharded by `vescale_fsdp.fully_shard`.

    Args:
        granularity, padding_policy: as for `vescale_fsdp.integrations.install`.

    Raises:
        UnsupportedOpError: if an option is not supported, before anything is replaced.

    Examples:
        >>> def accelerator():
        ...     from accelerate import Accelerator
        ...     return Accelerator(fsdp_plugin=VescalePlugin(granularity={"*mlp*": "rows:32"}))
    """

    fsdp_version: int | None = None  # None means 2 here; accelerate's own default is 1
    granularity: GranularityRule = None
    padding_policy: PaddingPolicy | None = None
    installation: Installation = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.fsdp_version is None:
            # accelerate's launcher passes the user's choice in this variable.
            self.fsdp_version = int(os.environ.get("FSDP_VERSION", "2"))
        if self.fsdp_version != 2:
            raise UnsupportedOpError(
                "vescale_fsdp replaces FSDP2 only.",
                expected="fsdp_version=2",
                got=f"fsdp_version={self.fsdp_version}, as an argument or in the variable FSDP_VERSION",
                todo="set fsdp_version: 2 in the plugin, the YAML file or the launcher's options",
            )
        super().__post_init__()  # sets the policies that are checked next
        check_policies(self.mixed_precision_policy or MixedPrecisionPolicy(), self.cpu_offload)
        self.installation = install(granularity=self.granularity, padding_policy=self.padding_policy)
