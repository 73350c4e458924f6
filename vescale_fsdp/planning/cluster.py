"""The machine that a plan is for, and the traffic of its wires. Integers and numbers only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from vescale_fsdp.errors import ArgumentError
from vescale_fsdp.lazy import set_module

_CONTEXT_BYTES = 512 << 20  # of CUDA, and its kernels
_CUBLAS_BYTES = 2 * 32 << 20  # a workspace of 32 MiB on Hopper, for the forward's thread and for autograd's
_NCCL_BYTES = 128 << 20  # per mesh axis: 16 channels with two buffers of 4 MiB (NCCL_BUFFSIZE's default)


class WireBytes(NamedTuple):
    """Bytes that a GPU receives in a step: from GPUs of its node, and from other nodes."""

    link: float
    network: float


@set_module("vescale_fsdp")
@dataclass(frozen=True)
class Cluster:
    """The GPUs of a training job. The default rates are the data sheet's of an H100 SXM with 400 Gb/s per GPU.

    Args:
        gpus: number of GPUs, a multiple of ``per_node`` if there are several nodes.
        per_node: GPUs of a node.
        memory_bytes: memory of a GPU; one that is sold with 80 GB has about ``79 * 2**30``.
        on_cpu: whether ranks are processes on the CPU, and not GPUs.
        flops_per_s: arithmetic operations of a GPU in the dtype of compute.
        memory_bytes_per_s: memory bandwidth of a GPU.
        link_bytes_per_s: bandwidth between the GPUs of a node, per GPU and direction.
        network_bytes_per_s: bandwidth between nodes, per GPU and direction.

    Raises:
        ArgumentError: for numbers that no cluster can have.

    Examples:
        >>> Cluster(16, 8, memory_bytes=80 * 10**9).num_nodes
        2
    """

    gpus: int
    per_node: int = 8
    memory_bytes: int = 80 * 10**9
    on_cpu: bool = False
    flops_per_s: float = 989e12
    memory_bytes_per_s: float = 3.35e12
    link_bytes_per_s: float = 450e9
    network_bytes_per_s: float = 50e9

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_count = field.name in ("gpus", "per_node", "memory_bytes")
            if field.name != "on_cpu" and not (
                isinstance(value, int if is_count else int | float)
                and not isinstance(value, bool)
                and 0 < value < math.inf
            ):
                raise ArgumentError(
                    "A cluster has positive numbers of GPUs and bytes.",
                    expected=f"a positive {'whole ' if is_count else ''}number",
                    got=f"{field.name}={value!r}",
                    where=f"Cluster({field.name}=..)",
                    todo="correct the number",
                )
        if self.gpus > self.per_node and self.gpus % self.per_node:
            raise ArgumentError(
                "The GPUs do not fill whole nodes.",
                expected=f"gpus a multiple of per_node={self.per_node}",
                got=self.gpus,
                where="Cluster(gpus=.., per_node=..)",
                todo=f"pass {self.gpus // self.per_node * self.per_node} or "
                f"{-(-self.gpus // self.per_node) * self.per_node} GPUs, or another per_node",
            )

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return max(1, self.gpus // self.per_node)

    def shard_sizes(self) -> Iterator[int]:
        """Yield the numbers of ranks that may share one copy of the model: all GPUs, and fewer whole nodes."""
        yield self.gpus
        counts = range(self.num_nodes - 1, 0, -1)
        yield from (self.per_node * count for count in counts if self.num_nodes % count == 0)

    def gathered(self, nbytes: float, ranks: int) -> WireBytes:
        """Return the least traffic of an all-gather of ``nbytes`` over neighboring ranks, or of a reduce-scatter."""
        in_node = min(ranks, self.per_node)
        nodes = ranks // in_node
        return WireBytes(nbytes * (in_node - 1) / in_node, nbytes * (nodes - 1) / nodes / in_node)

    def replicated(self, nbytes: float, replicas: int) -> WireBytes:
        """Return the least traffic of an all-reduce of ``nbytes`` over ranks of different nodes."""
        return WireBytes(0, 2 * nbytes * (replicas - 1) / replicas)

    def library_bytes(self, num_axes: int) -> int:
        """Return an estimate of the memory of CUDA, cuBLAS and NCCL; no GPU has confirmed it."""
        return 0 if self.on_cpu else _CONTEXT_BYTES + _CUBLAS_BYTES + num_axes * _NCCL_BYTES

    @property
    def rank_name(self) -> str:
        """What a rank runs on, for texts."""
        return "CPU rank" if self.on_cpu else "GPU"
