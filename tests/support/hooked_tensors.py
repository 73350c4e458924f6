"""Tensor subclasses with all-gather hooks, as users write them for FSDP2."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

_KEEP = {
    torch.ops.aten.detach.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.copy_.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten._pin_memory.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.clone.default,
}


class Wrapper(torch.Tensor):
    """Wraps one tensor; operators that a shard goes through keep the class, all others unwrap."""

    calls: ClassVar[list[tuple[Any, ...]]] = []  # what the hooks were called with, in this process

    @staticmethod
    def __new__(cls: type[Wrapper], data: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Wrapper, lambda x: x._data, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, out) if func in _KEEP else out

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return Wrapper(inner["_data"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)})"


class Int8Rows(Wrapper):
    """Sends int8 codes and a float32 scale per row: two inputs of two dtypes, a fresh full tensor."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], str]:
        Wrapper.calls.append(("pre", mesh.ndim, outer_size, outer_stride, type(module), mp_policy))
        scale = self._data.abs().amax(1, keepdim=True).float() / 127 + 1e-12
        return ((self._data / scale).round().to(torch.int8), scale), "note"

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        Wrapper.calls.append(("post", metadata, param_dtype, out))
        codes, scale = outputs
        if out is not None:
            out = out.data.to_local() if isinstance(out, DTensor) else out.data
            torch.mul(codes, scale, out=out)
            return None
        full = (codes * scale).to(param_dtype)
        return full, (full,)


class CarelessInt8(Int8Rows):
    """Writes into ``out`` as if autograd did not watch it."""

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is None:
            return super().fsdp_post_all_gather(outputs, metadata, param_dtype)
        out.copy_(outputs[0] * outputs[1])
        return None


class HalfRows(Wrapper):
    """Sends bfloat16 rows, padded where they do not divide (the older signature)."""

    pads = True

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor], int]:
        padded = torch.zeros(-(-7 // mesh.size()), *self._data.shape[1:], dtype=torch.bfloat16)
        if not self.pads:
            return (self._data.bfloat16(),), 0
        padded[: self._data.shape[0]].copy_(self._data)
        return (padded,), 0

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (rows,) = outputs
        if out is not None:
            out.data.copy_(rows[: out.shape[0]])
            return None
        full = rows.to(param_dtype)
        return full, (rows, full)


class Unpadded(HalfRows):
    """Forgets the padding."""

    pads = False


class OnlyBefore(Wrapper):
    """Half of the hooks."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._data,), None


class ThreeArguments(Int8Rows):
    """A signature that nobody calls."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any) -> Any:  # type: ignore[override]
        return (self._data,), None


class WrapsNothing(torch.Tensor):
    """Hooks without an inner tensor."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return outputs[0], ()


class HooklessCodes(torch.Tensor):
    """A quantized weight of two inner tensors, which reads as its values."""

    @staticmethod
    def __new__(cls: type[HooklessCodes], codes: torch.Tensor, scales: torch.Tensor) -> HooklessCodes:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self._codes, self._scales = codes, scales

    @classmethod
    def quantized(cls, values: torch.Tensor) -> Any:
        scales = values.abs().amax(1, keepdim=True) / 127
        return cls((values / scales).round().to(torch.int8), scales)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._codes, args[0]._scales)
        args, kwargs = pytree.tree_map_only(
            HooklessCodes, lambda x: x._codes * x._scales, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_codes", "_scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return HooklessCodes(inner["_codes"], inner["_scales"])


class CodesAndScales(HooklessCodes):
    """The same with FSDP2's hooks, as torchao's NF4Tensor has them."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._codes, self._scales), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return CodesAndScales(*outputs), outputs


class Float8Rows(Wrapper):
    """Sends float8 codes by a scale of the whole weight, which it computes unless somebody has, as torchao's do."""

    _dtype = torch.float8_e4m3fn

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__(data)
        self._precomputed_scale: torch.Tensor | None = None

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor], torch.Tensor]:
        scale = self._precomputed_scale
        if scale is None:
            largest = self._data.abs().max()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
            scale = (torch.finfo(self._dtype).max / largest.double().clamp(min=1e-12)).float()
        return ((self._data * scale).to(self._dtype).view(torch.uint8),), scale

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        values = outputs[0].view(self._dtype).to(param_dtype) / metadata.to(param_dtype)
        if out is not None:
            out.data.copy_(values)
            return None
        return values, (values,)
