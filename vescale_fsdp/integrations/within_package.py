"""ours_within: our `fully_shard` in the modules of one stack, and nowhere else, while that stack shards a model.

For stacks whose modules bind ``fully_shard`` at their top, where `as_fsdp2` comes too late.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

from vescale_fsdp.integrations.installation import Installation
from vescale_fsdp.integrations.names.pattern_rule import PatternRule
from vescale_fsdp.integrations.stand_ins import STAND_INS, Settings
from vescale_fsdp.layout.granularity import GranularityRule
from vescale_fsdp.layout.padding import PaddingPolicy


@contextmanager
def ours_within(
    package: str, *, granularity: GranularityRule, padding_policy: PaddingPolicy
) -> Iterator[None]:
    """Have the loaded modules of a package find ours under the name ``fully_shard``.

    Args:
        package: its top-level name.
        granularity, padding_policy: as for `vescale_fsdp.fully_shard`, for all its calls; a pattern of a mapping must
            match in one of them.
    """
    (stand_in,) = (each for each in STAND_INS if each.name == "fully_shard")
    homes = tuple(
        name
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == package
        and isinstance(module, ModuleType)
        and vars(module).get(stand_in.name) is stand_in.original
    )
    rule = PatternRule(granularity) if isinstance(granularity, Mapping) else granularity
    installation = Installation(Settings(rule, padding_policy), [stand_in._replace(homes=homes)])
    try:
        yield
    finally:
        installation.uninstall()
