"""Stand-ins for what engines and trainers define, written from their published signatures; each checks its calls.

verl: ``verl/workers/engine/spec.py`` at e39177f13beb. vLLM: ``vllm/distributed/weight_transfer/base.py`` of
aoshen02/vllm at 0a61d2c7d220. checkpoint-engine: ``checkpoint_engine/worker.py`` at 1f14a07fa749.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


@dataclass
class ShardSpec:
    """verl's: where a rank's part of a parameter lies."""

    full_shape: tuple[int, ...]
    mesh: Any = None
    placements: tuple[Any, ...] | None = None
    place: Any = None
    gather_group: dist.ProcessGroup | None = None
    contributes: bool = True
    to_hf_chunk: Callable[..., Any] | None = None
    hf_slots: list[Any] | None = None

    @classmethod
    def from_param(cls, param: torch.Tensor) -> ShardSpec:
        """Of a tensor whose placements say all."""
        if isinstance(param, DTensor):
            return cls(tuple(param.shape), param.device_mesh, tuple(param.placements))
        return cls(tuple(param.shape))


def gather_flat(local: torch.Tensor, spec: ShardSpec) -> torch.Tensor | None:
    """A full tensor from flat pieces as verl's engine makes it, on the gather group's first rank; None elsewhere."""
    assert type(spec.place) is int and isinstance(spec.gather_group, dist.ProcessGroup)
    assert local.dim() == 1 and local.is_contiguous()
    index = torch.arange(local.numel()) + spec.place
    pairs = (index, local) if spec.contributes else (index[:0], local[:0])
    found: list[Any] = [None] * spec.gather_group.size()
    dist.all_gather_object(found, pairs, group=spec.gather_group)
    if spec.gather_group.rank():
        return None
    full = torch.full((torch.Size(spec.full_shape).numel(),), float("nan"), dtype=local.dtype)
    for places, values in found:
        assert full[places].isnan().all(), "two ranks send one item"
        full[places] = values
    return full.view(spec.full_shape)


@dataclass(frozen=True)
class ParamMeta:
    """vLLM's: one parameter as it is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert isinstance(self.name, str) and isinstance(self.dtype, torch.dtype)
        assert type(self.shape) is tuple and all(type(size) is int for size in self.shape)


class WeightSource(ABC):
    """vLLM's: what a trainer's engine reads, in each round anew."""

    @abstractmethod
    def metadata(self) -> list[ParamMeta]:
        """What iteration yields."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class TrainerEngine:
    """vLLM's engine on one rank of a trainer: rank 0 sends, the others take part."""

    def __init__(self, source: WeightSource, *, is_sender: bool) -> None:
        assert isinstance(source, WeightSource)
        self._source = source
        self._is_sender = is_sender

    def send_weights(self) -> dict[str, torch.Tensor]:
        """One round; what a worker then has."""
        metas = self._source.metadata()
        assert isinstance(metas, list) and all(isinstance(meta, ParamMeta) for meta in metas)
        received = {}
        for meta, (name, tensor) in zip(metas, self._source, strict=True):
            assert (name, tensor.dtype, tuple(tensor.shape)) == (meta.name, meta.dtype, meta.shape)
            if self._is_sender:  # kept for packing while the next ones come
                assert tensor.is_contiguous() and not tensor.is_meta and not isinstance(tensor, DTensor)
                received[name] = tensor
        return received


def extract_weights(payload: list[dict[str, Any]], buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Tensors of a shared buffer, as checkpoint-engine's worker reads them."""
    assert buffer.dtype == torch.uint8 and buffer.dim() == 1
    found = []
    for item in payload:
        assert isinstance(item["shape"], torch.Size) and isinstance(item["dtype"], torch.dtype)
        stop = item["offset"] + item["dtype"].itemsize * item["shape"].numel()
        assert stop <= buffer.numel()
        found.append((item["name"], buffer[item["offset"] : stop].view(item["dtype"]).view(item["shape"])))
    return found
