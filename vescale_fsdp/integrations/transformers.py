"""transformers 5: loading into ragged shards by ``from_pretrained(distributed_config=...)``.

    with as_fsdp2():
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=8))

transformers shards the model on the meta device and cuts each tensor of the files by torch's placements. Under
`as_fsdp2`, functions for ragged placements replace functions of its loader, and weights are tied before sharding:

    one tensor of the files is one parameter                each rank reads its own boxes (at most 2 * ndim - 1)
    several tensors become one parameter (merged experts)   each rank reads and merges all of them, and keeps its piece
    the files lack a parameter                              transformers initializes the parameter's shards
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
    """Replaces transformers' ``DtensorShardOperation`` for one ragged parameter: reads this rank's piece from files."""

    def __init__(self, param: RaggedDTensor) -> None:
        self._boxes = param.boxes
        self._shape = tuple(param.shape)

    def shard_tensor(
        self, source: Any, tensor_idx: int | None = None, device: Any = None, dtype: Any = None
    ) -> torch.Tensor:
        """Read this rank's piece of a tensor of the files.

        Args:
            source: a slice object of safetensors, or a tensor.
            tensor_idx: not None if the tensor will be merged with other tensors.

        Returns:
            The piece, 1-D. For a tensor that will be merged, the whole tensor: `_set_param` cuts the merged result.
        """
        shape = tuple(source.shape) if isinstance(source, torch.Tensor) else tuple(source.get_shape())
        if tensor_idx is not None or shape != self._shape:
            return source[...].to(device=device, dtype=dtype)
        parts = [source[box.slices()].reshape(-1) for box in self._boxes]
        # For an empty piece, an empty slice of the source, which has its dtype.
        piece = torch.cat(parts) if parts else source[tuple(slice(0, 0) for _ in shape)].reshape(-1)
        return piece.to(device=device, dtype=dtype)


_hf_apply = fsdp.apply_fully_sharded_data_parallelism
_hf_operation = sharding_utils.DtensorShardOperation
_hf_wrap = sharding_utils._dtensor_from_local_like
_hf_set_param = core_model_loading.set_param_for_module


def _apply(model: Any, mesh_manager: Any, fsdp_plan: dict[str, str], ep_plan: dict[str, str]) -> Any:
    """Shard a model as transformers does, but leave tied embeddings in the unit of the root module.

    transformers ties weights after sharding. It would then tie weights of two units, which have different layouts. So
    weights are tied before sharding here, and tied embeddings are removed from the plan of units.
    """
    model.tie_weights()
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    if len({getattr(each, "weight", None) for each in embeddings}) == 1:  # one weight: they are tied
        fsdp_plan = {name: s for name, s in fsdp_plan.items() if model.get_submodule(name) not in embeddings}
    return _hf_apply(model, mesh_manager, fsdp_plan, ep_plan)


def ragged_like(local: torch.Tensor, ref: RaggedDTensor) -> RaggedDTensor:
    """Make a ragged tensor from this rank's piece ``local``, with the placements and layout of ``ref``."""
    ragged = RaggedDTensor.from_local(
        local.contiguous(), ref.device_mesh, ref.placements, shape=tuple(ref.shape)
    )
    ragged.layout_ref = ref.layout_ref  # checkpoints record the layout
    return ragged


def _set_param(model: nn.Module, target_name: str, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Set a parameter as transformers does. If the value is whole, since it was merged, cut this rank's piece out."""
    owner, _, name = target_name.rpartition(".")
    ref = model.get_submodule(owner)._parameters.get(name)
    # A value with the shape of the local piece is a piece already.
    if isinstance(ref, RaggedDTensor) and value.shape == ref.shape and value.shape != ref.to_local().shape:
        value = local_part_of(value.detach(), ref)
    return _hf_set_param(model, target_name, value, *args, **kwargs)


# The functions of transformers that `install` replaces.
LOADER = (
    StandIn(_hf_apply, _apply, ("transformers.distributed.mixin",)),
    StandIn(
        _hf_operation,
        lambda param: (_PieceOperation if isinstance(param, RaggedDTensor) else _hf_operation)(param),
        (
            "transformers.core_model_loading",
            "transformers.distributed.sharding_utils",  # peft imports the name from here
        ),
    ),
    StandIn(
        _hf_wrap,
        lambda local_tensor, ref: (ragged_like if isinstance(ref, RaggedDTensor) else _hf_wrap)(
            local_tensor, ref
        ),
        ("transformers.core_model_loading", "transformers.modeling_utils"),
    ),
    StandIn(_hf_set_param, _set_param, ("transformers.core_model_loading",)),
)
