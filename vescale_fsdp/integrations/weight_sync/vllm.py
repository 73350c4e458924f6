"""vLLM: a ``WeightSource`` for its weight transfer.

    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    tensors = WholeTensors(dict(model.named_parameters()), receivers=(0,))
    engine = NCCLTrainerWeightTransferEngine.trainer_init(
        config, init_info, client=client, source=weight_source(tensors, WeightSource, ParamMeta)
    )
    engine.send_weights()      on every rank of the trainer, every step

vLLM's own ``ModuleSource`` gathers each tensor on every rank; here only the sender gets it, in buckets. Backends that
pass on what every rank has (``ipc``) need ``receivers=None``. Written for ``WeightSource`` as of aoshen02/vllm at
0a61d2c7d220 (pull request 48042); it has not run with vLLM itself, which needs GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vescale_fsdp.integrations.weight_sync.tensor_buckets import WholeTensors


def weight_source(tensors: WholeTensors, source_class: Any, meta_class: Any) -> Any:
    """Whole tensors under vLLM's interface.

    Args:
        tensors: what is sent. The sender, rank 0 to vLLM, must be among its receivers.
        source_class: vLLM's ``WeightSource``.
        meta_class: vLLM's ``ParamMeta``.

    Returns:
        A ``source_class``. Each pass over it is a collective of the trainer's ranks.

    Examples:
        >>> def source(model, WeightSource, ParamMeta):
        ...     from vescale_fsdp.integrations.weight_sync.tensor_buckets import WholeTensors
        ...     return weight_source(WholeTensors(model.state_dict()), WeightSource, ParamMeta)
    """

    def metadata(_self: Any) -> list[Any]:
        return [meta_class(*tensor) for tensor in tensors.tensors]

    def each(_self: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(tensors)

    # Made here, since the class it is to be one of cannot be imported where this package is.
    return type("WholeTensorSource", (source_class,), {"metadata": metadata, "__iter__": each})()
