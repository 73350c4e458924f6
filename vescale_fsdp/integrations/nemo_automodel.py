"""NeMo Automodel: its parallelizers shard with our runtime.

    with automodel_with_vescale(granularity=Rows(32)):
        model = NeMoAutoModelForCausalLM.from_pretrained(...)      # or a recipe's setup

Release 0.7 binds ``fully_shard`` at the top of its modules; other releases take it as an argument:

    strategy.parallelize(model, ..., fully_shard_fn=fully_shard_fn(granularity=Rows(32)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# The modules that shard: they must be loaded to be told.
import nemo_automodel.components.distributed.parallelizer
import nemo_automodel.components.moe.parallelizer  # noqa: F401

from vescale_fsdp.integrations.installation import ours_within
from vescale_fsdp.integrations.tried_versions import check_version
from vescale_fsdp.layout.granularity import GranularityRule
from vescale_fsdp.layout.padding import PaddingPolicy
from vescale_fsdp.runtime.fully_shard import fully_shard


@contextmanager
def automodel_with_vescale(
    *,
    granularity: GranularityRule = None,
    padding_policy: PaddingPolicy = PaddingPolicy(),  # noqa: B008 (frozen)
) -> Iterator[None]:
    """Around what builds and shards a model; the model stays ours afterwards.

    Args:
        granularity, padding_policy: as for `vescale_fsdp.fully_shard`, for each of Automodel's calls.

    Examples:
        >>> def build(recipe):
        ...     with automodel_with_vescale(granularity="rows:32"):
        ...         return recipe.setup()
    """
    check_version("nemo_automodel")
    with ours_within("nemo_automodel", granularity=granularity, padding_policy=padding_policy):
        yield


def fully_shard_fn(
    *,
    granularity: GranularityRule = None,
    padding_policy: PaddingPolicy = PaddingPolicy(),  # noqa: B008 (frozen)
) -> Callable[..., Any]:
    """Our `fully_shard` as Automodel calls it: policies that were not chosen come as None.

    Examples:
        >>> def parallelize(parallelizer, model):
        ...     return parallelizer(model, fully_shard_fn=fully_shard_fn(granularity="rows:32"))
    """

    def shard(module: Any, **given: Any) -> Any:
        chosen = {name: value for name, value in given.items() if value is not None}
        return fully_shard(module, granularity=granularity, padding_policy=padding_policy, **chosen)

    return shard
