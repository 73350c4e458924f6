"""NeMo Automodel: its parallelizers shard with this package's runtime.

    with automodel_with_vescale(granularity=Rows(32)):
        model = NeMoAutoModelForCausalLM.from_pretrained(...)      # or a recipe's setup

Automodel 0.7 imports ``fully_shard`` at the top of its modules, so `as_fsdp2` would be too late.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# These modules call fully_shard. They are imported here, because names are replaced in imported modules only.
import nemo_automodel.components.distributed.parallelizer
import nemo_automodel.components.moe.parallelizer  # noqa: F401

from vescale_fsdp.integrations.installation import ours_within
from vescale_fsdp.integrations.tried_versions import check_version
from vescale_fsdp.layout.granularity import GranularityRule
from vescale_fsdp.layout.padding import PaddingPolicy


@contextmanager
def automodel_with_vescale(
    *,
    granularity: GranularityRule = None,
    padding_policy: PaddingPolicy = PaddingPolicy(),  # noqa: B008 (frozen)
) -> Iterator[None]:
    """A context in which Automodel builds and shards a model. The model stays sharded by this package afterwards.

    Args:
        granularity, padding_policy: as for `vescale_fsdp.fully_shard`, for every call by Automodel.

    Examples:
        >>> def build(recipe):
        ...     with automodel_with_vescale(granularity="rows:32"):
        ...         return recipe.setup()
    """
    check_version("nemo_automodel")
    with ours_within("nemo_automodel", granularity=granularity, padding_policy=padding_policy):
        yield
