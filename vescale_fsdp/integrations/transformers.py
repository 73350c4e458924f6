"""transformers 5: what ``from_pretrained(distributed_config=...)`` needs beside torch's names, to load into shards.

    with as_fsdp2():
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=8))

It shards the model on the meta device and cuts each tensor of the files by torch's placements. Under `as_fsdp2` the
loader knows ragged placements, and tied weights are tied first:

    a tensor of the files that is a parameter as it is      each rank reads its boxes alone (at most 2 * ndim - 1)
    tensors that become a parameter (merged experts)        each rank reads and merges all, then keeps its piece
    a parameter that the files lack                         initialised on the shards
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import core_model_loading
from transformers.distributed import fsdp, sharding_utils

from vescale_fsdp.dtensor.piece_map import local_part_of
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.integrations.replaced_names import StandIn


class _PieceOperation:
    """Reads one parameter's piece from a tensor of the files (an array of safetensors, or a tensor)."""

    def __init__(self, param: RaggedDTensor) -> None:
        self._boxes = param.boxes
        self._shape = tuple(param.shape)

    def shard_tensor(
        self, source: Any, tensor_idx: int | None = None, device: Any = None, dtype: Any = None
    ) -> torch.Tensor:
        """This rank's piece, flat; all of the source if it is to be merged with others first."""
        shape = tuple(source.shape) if isinstance(source, torch.Tensor) else tuple(source.get_shape())
        if tensor_idx is not None or shape != self._shape:
            return source[...].to(device=device, dtype=dtype)
        parts = [source[box.slices()].reshape(-1) for box in self._boxes]
        piece = torch.cat(parts) if parts else source[tuple(slice(0, 0) for _ in shape)].reshape(-1)
        return piece.to(device=device, dtype=dtype)


_their_apply = fsdp.apply_fully_sharded_data_parallelism
_their_operation = sharding_utils.DtensorShardOperation
_their_wrap = sharding_utils._dtensor_from_local_like
_their_set_param = core_model_loading.set_param_for_module


def _apply(model: Any, mesh_manager: Any, fsdp_plan: dict[str, str], ep_plan: dict[str, str]) -> Any:
    """transformers' own, with tied embeddings in one unit: the root's, which keeps full weights as their plan asks.

    transformers shards before it ties, and ties the weight of one unit to that of another, which lies otherwise.
    """
    model.tie_weights()
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    if len({getattr(each, "weight", None) for each in embeddings}) == 1:
        fsdp_plan = {name: s for name, s in fsdp_plan.items() if model.get_submodule(name) not in embeddings}
    return _their_apply(model, mesh_manager, fsdp_plan, ep_plan)


def _operation(param: Any) -> Any:
    return _PieceOperation(param) if isinstance(param, RaggedDTensor) else _their_operation(param)


def ragged_like(local: torch.Tensor, ref: RaggedDTensor) -> RaggedDTensor:
    """A piece, placed as another tensor is."""
    ragged = RaggedDTensor.from_local(
        local.contiguous(), ref.device_mesh, ref.placements, shape=tuple(ref.shape)
    )
    ragged.layout_ref = ref.layout_ref
    return ragged


def _wrap_local_like(local: torch.Tensor, ref: Any) -> Any:
    return ragged_like(local, ref) if isinstance(ref, RaggedDTensor) else _their_wrap(local, ref)


def _set_param(model: nn.Module, target_name: str, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """transformers' own, after cutting what was merged whole."""
    owner, _, name = target_name.rpartition(".")
    ref = model.get_submodule(owner)._parameters.get(name)
    if isinstance(ref, RaggedDTensor) and value.shape == ref.shape and value.shape != ref.to_local().shape:
        value = local_part_of(value.detach(), ref)
    return _their_set_param(model, target_name, value, *args, **kwargs)


# What of transformers is replaced.
LOADER = (
    StandIn(_their_apply, _apply, ("transformers.distributed.mixin",)),
    StandIn(
        _their_operation,
        _operation,
        (
            "transformers.core_model_loading",
            "transformers.distributed.sharding_utils",
        ),  # peft asks the latter
    ),
    StandIn(
        _their_wrap, _wrap_local_like, ("transformers.core_model_loading", "transformers.modeling_utils")
    ),
    StandIn(_their_set_param, _set_param, ("transformers.core_model_loading",)),
)
