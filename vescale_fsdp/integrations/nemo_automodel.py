"""NeMo Automodel: its parallelizers call this package's `fully_shard`.

    with automodel_with_vescale(granularity=Rows(32)):
        model = NeMoAutoModelForCausalLM.from_pretrained(...)      # or a recipe's setup

Automodel 0.7 imports ``fully_shard`` at the top of its modules, so `as_fsdp2` would come too late. Inside the context,
Automodel's loaders of weights and adapters (``set_model_state_dict``, ``DTensor.redistribute``) fill the shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# The modules that call fully_shard. Imported here, because names are replaced only in modules that are imported.
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
    """Context manager: models that Automodel builds in it are sharded by this package, and stay so afterwards.

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
