"""All-gather hooks of tensor subclasses: detection, checks, and the scales of float8 weights.

If a parameter's class has these hooks, they gather the parameter. Each is called on this rank's rows of the parameter::

    fsdp_pre_all_gather(mesh)                                                  -> (inputs, metadata)
    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)     -> (inputs, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype)                       -> (tensor, tensors to free)
    fsdp_post_all_gather(outputs, metadata, param_dtype, out=tensor)           in place, from the second time on

The signatures are those of torch 2.13 (fsdp/_fully_shard/_fsdp_param.py:603-657, 837-909). torchao's float8 weights are
the best-known example.

The class must be a wrapper subclass whose ``__tensor_flatten__`` names one inner tensor, of the wrapper's shape and
dtype. The runtime makes this inner tensor a view of the shard. So the optimizer and checkpoints work on plain memory,
and the hooks read the values that the optimizer has written.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard, cast, runtime_checkable

import torch
import torch.distributed as dist

from vescale_fsdp.collectives.operations import all_reduce_in_place
from vescale_fsdp.collectives.slice_exchange import wait_for
from vescale_fsdp.errors import MisuseError, UnsupportedOpError
from vescale_fsdp.torch_private import foreach_norm_of, is_wrapper


@runtime_checkable
class _Before(Protocol):
    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return the tensors that this rank sends, and metadata for ``fsdp_post_all_gather``."""


@runtime_checkable
class _After(Protocol):
    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the full parameter, made from the tensors of all ranks, and tensors to free; or write into ``out``."""


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's class has at least one of the two all-gather hooks; `check_hooks` requires both."""
    return isinstance(tensor, (_Before, _After))


# The way out for classes of quantized weights, such as torchao's NF4Tensor under LoRA.
STAYS_WHOLE = (
    "if the parameter is frozen, keep it whole on every rank: ignored_params={param} in every fully_shard call on a "
    "module that contains it"
)


def check_hooks(fqn: str, tensor: torch.Tensor) -> None:
    """Check that a tensor can be gathered by the hooks of its class.

    Raises:
        MisuseError: if the class has only one of the hooks, or ``fsdp_pre_all_gather`` does not take 1 or 5
            parameters.
        UnsupportedOpError: if the tensor does not wrap exactly one tensor of its own shape and dtype.
    """
    cls = type(tensor).__name__
    if not (isinstance(tensor, _Before) and isinstance(tensor, _After)):
        raise MisuseError(
            "This tensor subclass has only one of the two all-gather hooks.",
            expected="both fsdp_pre_all_gather and fsdp_post_all_gather, or neither",
            got=cls,
            where=fqn,
            todo="define the missing hook",
        )
    arguments = list(inspect.signature(tensor.fsdp_pre_all_gather).parameters)
    if len(arguments) not in (1, 5):  # the two signatures that FSDP2 calls
        raise MisuseError(
            "fsdp_pre_all_gather has the wrong parameters.",
            expected="(mesh) or (mesh, outer_size, outer_stride, module, mp_policy)",
            got=f"({', '.join(arguments)})",
            where=f"{fqn}, {cls}",
        )
    inner = _inner_tensors(tensor)
    if len(inner) != 1 or (inner[0].shape, inner[0].dtype) != (tensor.shape, tensor.dtype):
        raise UnsupportedOpError(
            "This tensor subclass does not wrap one tensor of its own shape and dtype.",
            expected=f"a wrapper subclass whose __tensor_flatten__ names one inner tensor of shape "
            f"{tuple(tensor.shape)} and {tensor.dtype}",
            got=f"{cls} with the inner tensors {[(tuple(t.shape), t.dtype) for t in inner]}",
            where=fqn,
            todo=f"{STAYS_WHOLE}; or keep the high-precision values in one inner tensor, and convert in "
            "fsdp_pre_all_gather",
        )


def inner_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor inside a tensor that `check_hooks` has accepted."""
    (inner,) = _inner_tensors(tensor)
    return inner


def _inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the inner tensors of a wrapper subclass; none for other tensors."""
    if not is_wrapper(tensor):
        return []
    names, _ = cast(Any, tensor).__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def takes_mesh_only(tensor: Any) -> bool:
    """Return whether ``fsdp_pre_all_gather`` has the older signature, ``(mesh)``."""
    return len(inspect.signature(tensor.fsdp_pre_all_gather).parameters) == 1


def rows_of(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the class of ``like`` whose inner tensor is a view of ``values``.

    Args:
        like: a tensor that `check_hooks` has accepted.
        values: plain and contiguous, with the shape, dtype and device of the result.
    """
    # By new_zeros, which every class with these hooks implements, because FSDP2 creates shards with it.
    rows = like.new_zeros(values.shape, dtype=values.dtype, device=values.device)
    inner_of(rows).data = values
    return rows


_LEAST = 1e-12  # lower bound of the largest magnitude, to avoid a division by zero; the same as in torchao


@runtime_checkable
class TakesScale(Protocol):
    """A float8 weight whose hook uses a precomputed scale if there is one, as the hook of torchao's weights does."""

    _precomputed_scale: torch.Tensor | None
    _dtype: torch.dtype


def takes_scale(tensor: object) -> TypeGuard[TakesScale]:
    """Return whether a tensor is a `TakesScale` of an 8-bit float dtype. Slow: it reads attributes of a subclass."""
    return isinstance(tensor, TakesScale) and tensor._dtype.is_floating_point and tensor._dtype.itemsize == 1


@contextmanager
def scaled_together(weights: Sequence[TakesScale], ranks: dist.ProcessGroup) -> Iterator[None]:
    """Return a context in which all of a unit's weights have scales; it computes missing scales together.

    All ranks encode a weight in float8 with the same scale: the largest value of the dtype, divided by the largest
    magnitude in the whole weight. Here one all-reduce per dtype finds the magnitudes of all weights; without it, the
    hook of each weight would start a small all-reduce of its own at each gather. Weights that have a scale (torchao's
    ``precompute_float8_dynamic_scale_for_fsdp``) keep it.

    Args:
        weights: this rank's rows of a unit's weights. On every rank, the same weights must lack a scale.
        ranks: the process group that shards the weights.
    """
    without = [weight for weight in weights if weight._precomputed_scale is None]
    # A dict, because it keeps the order, which all ranks need to reduce in. A model usually has one dtype.
    for dtype in {weight._dtype: None for weight in without}:
        alike = [weight for weight in without if weight._dtype is dtype]
        for weight, scale in zip(alike, _scales(alike, dtype, ranks), strict=True):
            weight._precomputed_scale = scale
    try:
        yield
    finally:
        for weight in without:  # an optimizer may step before the next gather: scales would be stale
            weight._precomputed_scale = None


def _scales(weights: Sequence[Any], dtype: torch.dtype, ranks: dist.ProcessGroup) -> Sequence[torch.Tensor]:
    """Return the scale of each weight, 0-d, with the same bits as torchao's."""
    rows = [inner_of(weight) for weight in weights]
    filled = [each for each in rows if each.numel()]  # torch raises for the infinity norm of an empty tensor
    norms = iter(foreach_norm_of(filled, math.inf) if filled else ())
    zero = rows[0].new_zeros(())  # the magnitude of a weight of which this rank has no rows
    largest = torch.stack([next(norms) if each.numel() else zero for each in rows])
    largest = largest.to(torch.promote_types(largest.dtype, torch.float32))
    wait_for(all_reduce_in_place(largest, dist.ReduceOp.MAX, ranks))
    # As in torchao, the quotient is computed in fp64 and then rounded to fp32.
    scales = torch.finfo(dtype).max / largest.double().clamp(min=_LEAST)
    return scales.float().unbind()
