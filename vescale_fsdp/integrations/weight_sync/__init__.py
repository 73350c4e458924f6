"""Weights of a sharded trainer for engines that ask for them in their own way.

`vescale_fsdp.Transfer` fills the shards of an engine that has any; nothing is gathered. What stands here is for those
that cannot say how they shard:

    WholeTensors     every tensor whole, in buckets: checkpoint-engine, ``load_weights`` of most engines
    weight_source    the same as a ``WeightSource`` of vLLM's weight transfer
    shard_specs      every rank's own flat piece and where it lies, as verl's ``ShardSpec``
"""

from typing import TYPE_CHECKING

from vescale_fsdp.lazy import lazily_export

if TYPE_CHECKING:
    from vescale_fsdp.integrations.weight_sync.verl import shard_specs
    from vescale_fsdp.integrations.weight_sync.vllm import weight_source
    from vescale_fsdp.integrations.weight_sync.whole_tensors import (
        BucketPart,
        TensorBucket,
        WholeTensor,
        WholeTensors,
    )

__all__ = ["BucketPart", "TensorBucket", "WholeTensor", "WholeTensors", "shard_specs", "weight_source"]

lazily_export(
    __name__,
    {
        "vescale_fsdp.integrations.weight_sync.verl": "shard_specs",
        "vescale_fsdp.integrations.weight_sync.vllm": "weight_source",
        "vescale_fsdp.integrations.weight_sync.whole_tensors": "BucketPart TensorBucket WholeTensor WholeTensors",
    },
)
