"""The all-gather hooks of tensor subclasses: who has them, and what is asked of such a class.

A parameter whose class says how it travels is gathered by its own hooks, called on this rank's rows of it::

    fsdp_pre_all_gather(mesh)                                                  -> (inputs, metadata)
    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)     -> (inputs, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype)                       -> (tensor, tensors to free)
    fsdp_post_all_gather(outputs, metadata, param_dtype, out=tensor)           in place, from the second time on

(torch 2.13, ``FS/_fsdp_param.py:603-657,837-909``; torchao's float8 weights are the best known of them.)

Here the class must be a wrapper with one inner tensor of its own shape and dtype, as ``__tensor_flatten__`` shows.
The runtime points that inner tensor at the shard: the optimizer and checkpoints then work on plain memory, and
the hooks read what the optimizer wrote.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol, cast, runtime_checkable

import torch

from vescale_fsdp.errors import MisuseError, UnsupportedOpError
from vescale_fsdp.torch_private import is_wrapper


@runtime_checkable
class _Before(Protocol):
    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        """What this rank sends, and a note for the other hook."""


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
        """The full parameter of what all ranks sent."""


class TensorHooks(_Before, _After, Protocol):
    """A tensor with both hooks."""

    shape: torch.Size


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class says how it is gathered (by either hook; `check_hooks` wants both)."""
    return isinstance(tensor, (_Before, _After))


def check_hooks(fqn: str, tensor: torch.Tensor) -> None:
    """Prove that a tensor with hooks can be gathered by them.

    Raises:
        MisuseError: if it has one hook only, or the first takes other arguments.
        UnsupportedOpError: unless it wraps exactly one tensor like itself.
    """
    cls = type(tensor).__name__
    if not (isinstance(tensor, _Before) and isinstance(tensor, _After)):
        raise MisuseError(
            "This tensor subclass has only one of the two all-gather hooks.",
            expected="both fsdp_pre_all_gather and fsdp_post_all_gather, or neither",
            got=cls,
            where=fqn,
            todo="define the other one",
        )
    if len(_arguments(tensor)) not in (1, 5):
        raise MisuseError(
            "fsdp_pre_all_gather takes other arguments than it will be given.",
            expected="(mesh) or (mesh, outer_size, outer_stride, module, mp_policy)",
            got=f"({', '.join(_arguments(tensor))})",
            where=f"{fqn}, {cls}",
        )
    inner = _inner_tensors(tensor)
    if len(inner) != 1 or (inner[0].shape, inner[0].dtype) != (tensor.shape, tensor.dtype):
        raise UnsupportedOpError(
            "This tensor subclass does not wrap one tensor like itself.",
            expected=f"a wrapper subclass whose __tensor_flatten__ names one inner tensor of shape "
            f"{tuple(tensor.shape)} and {tensor.dtype}",
            got=f"{cls} over {[(tuple(t.shape), t.dtype) for t in inner] or 'nothing it names'}",
            where=fqn,
            todo="keep the high-precision values in one inner tensor, and convert in fsdp_pre_all_gather",
        )


def inner_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that holds a checked subclass's values."""
    (inner,) = _inner_tensors(tensor)
    return inner


def _inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    if not is_wrapper(tensor):
        return []
    names, _ = cast(Any, tensor).__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def takes_mesh_only(tensor: TensorHooks) -> bool:
    """Whether ``fsdp_pre_all_gather`` has the older signature."""
    return len(_arguments(tensor)) == 1


def _arguments(tensor: _Before) -> list[str]:
    return list(inspect.signature(tensor.fsdp_pre_all_gather).parameters)


def rows_of(like: torch.Tensor, values: torch.Tensor) -> TensorHooks:
    """A tensor of the class of ``like`` over ``values``, whose memory it shares.

    It is made as FSDP2 makes a shard, by ``new_zeros``, which these classes are written to survive.

    Args:
        like: a checked tensor of the class.
        values: plain, contiguous, of the wanted shape, dtype and device.
    """
    made = like.new_zeros(values.shape, dtype=values.dtype, device=values.device)
    inner_of(made).data = values
    return cast(TensorHooks, made)
