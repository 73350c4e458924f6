"""Whole tensors of a sharded trainer, for inference engines that do not expose their sharding.

`Transfer` sends shards to the shards of an engine and gathers nothing. `WholeTensors` gives every tensor whole, in
buckets, to engines that accept whole tensors only (``load_weights`` of most engines, checkpoint-engine)::

    tensors = WholeTensors(dict(model.named_parameters()), receivers=(0,))
    for step in range(steps):
        ...
        for name, tensor in tensors:        on all ranks of the trainer
            engine.load_weights([(name, tensor)])

A `WholeTensors` plans once. A receiver stores one bucket at a time next to its shards. Ranks that are not receivers get
tensors on the meta device.

    for bucket in tensors.buckets():        checkpoint-engine: its workers read a shared buffer
        buffer.copy_(bucket.data)           1D bytes
        socket.send_pyobj([part._asdict() for part in bucket.parts])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.manifest.distribution import Distribution, RankSet
from vescale_fsdp.checkpoint.manifest.structure import Structure
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name, dtype_named
from vescale_fsdp.errors import CheckpointError, PlacementError
from vescale_fsdp.layout.geometry import numel_of, round_up
from vescale_fsdp.torch_private import local_of, version_of
from vescale_fsdp.transfer.description import (
    DescribedTensor,
    Ranks,
    StateDescription,
    describe_states,
    named_tensors,
    transfer_ranks,
)
from vescale_fsdp.transfer.exchange import StagingPool
from vescale_fsdp.transfer.links import Link, SourceTensor, leaves_of
from vescale_fsdp.transfer.plan import BUDGET_BYTES, TransferPlan, plan_transfer
from vescale_fsdp.transfer.transfer import Transfer

BUCKET_BYTES = 256 << 20  # 256 MiB
_ALIGN_BYTES = 256  # every tensor of a bucket starts at a multiple: enough for any kernel of an engine
_WHOLE = Distribution((), ())


class WholeTensor(NamedTuple):
    """Name, dtype and shape of a whole tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return numel_of(self.shape) * self.dtype.itemsize


class BucketPart(NamedTuple):
    """The position of a tensor in a bucket."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int  # in bytes


class TensorBucket(NamedTuple):
    """Several tensors in one buffer."""

    data: torch.Tensor  # 1D uint8; on the meta device if this rank receives nothing
    parts: list[BucketPart]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors; the tensors are views of the bucket."""
        for name, shape, dtype, offset in self.parts:
            if self.data.is_meta:
                yield name, torch.empty(shape, dtype=dtype, device="meta")
                continue
            nbytes = shape.numel() * dtype.itemsize
            yield name, self.data[offset : offset + nbytes].view(dtype).view(shape)


class _PlannedBucket(NamedTuple):
    """A bucket and the transfer that fills it."""

    parts: list[BucketPart]
    nbytes: int
    reads: list[str]  # names of the source tensors that the transfer reads
    transfer: Transfer


class WholeTensors:
    """The whole tensors of a sharded state. All ranks construct it, and all ranks iterate over it (collectives).

    Args:
        state: nested dicts and lists of live tensors, read again in each pass; None on ranks without a part of it.
        links: name of each whole tensor -> the source tensors that it is computed from (see `vescale_fsdp.transfer`);
            default: every tensor of the state.
        dtype: dtype of floating-point results other than codes; default: the dtype of the source.
        receivers: ranks that get values; default: all.
        bucket_bytes: size of a bucket; a larger tensor gets a bucket of its own.
        budget_bytes: memory for messages, as for `plan_transfer`.
        ranks, group, verify: as for `Transfer`.

    Attributes:
        tensors: the whole tensors, in the order of iteration.

    Raises:
        PlacementError: on all ranks, with every tensor that cannot be computed.

    Examples:
        >>> whole = WholeTensors({"w": torch.ones(4), "b": torch.zeros(2)})
        >>> {name: tensor.sum().item() for bucket in whole.buckets() for name, tensor in bucket.tensors()}
        {'b': 0.0, 'w': 4.0}
    """

    def __init__(
        self,
        state: Any,
        *,
        links: Mapping[str, Link] | None = None,
        dtype: torch.dtype | None = None,
        receivers: Sequence[int] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        budget_bytes: int = BUDGET_BYTES,
        ranks: Ranks = None,
        group: dist.ProcessGroup | None = None,
        verify: bool = False,
    ) -> None:
        own = transfer_ranks(ranks)
        self._coordinator = own
        self._cast = dtype is not None
        source, _ = describe_states(state, None, ranks=own)
        self._state = {} if state is None else dict(named_tensors(state))
        self._receivers = tuple(range(own.world_size)) if receivers is None else tuple(sorted(receivers))
        all_tensors = {name: name for name in source.numbers_by_name}
        self._links = dict(links or all_tensors)
        arguments = {"receivers": self._receivers, "bucket_bytes": bucket_bytes, "links": repr(self._links)}
        with own.together("planning whole tensors", alike=arguments):
            valid = all(0 <= rank < own.world_size for rank in self._receivers)
            # At least one receiver (max), and no rank twice (set).
            if not valid or len(set(self._receivers)) != max(1, len(self._receivers)):
                raise PlacementError(
                    "These ranks cannot receive.",
                    expected=f"some of the {own.world_size} ranks, each once",
                    got=list(self._receivers),
                )
            self.tensors = tuple(self._described(source, name, dtype) for name in self._links)
            # One plan of all tensors, so that an error lists every problem; each bucket is planned again below.
            plan = self._plan(source, self.tensors, budget_bytes)
        reads: dict[str, list[str]] = {}  # whole tensor -> source tensors
        for leaf in plan.leaves:
            reads.setdefault(plan.target.entries[leaf.target].name, []).append(leaf.source.name)
        pool = StagingPool()  # shared: buckets are filled one after another
        self._buckets = []
        for tensors in _buckets_of(self.tensors, bucket_bytes):
            names = list(dict.fromkeys(name for tensor in tensors for name in reads.get(tensor.name, ())))
            transfer = Transfer(
                self._plan(_only(source, set(names)), tensors, budget_bytes),
                ranks=own,
                verify=verify,
                group=group,
                pool=pool,
            )
            parts, offset = [], 0
            for tensor in tensors:
                parts.append(BucketPart(tensor.name, torch.Size(tensor.shape), tensor.dtype, offset))
                offset += round_up(tensor.nbytes, _ALIGN_BYTES)
            self._buckets.append(_PlannedBucket(parts, offset, names, transfer))

    def _described(self, source: StateDescription, name: str, dtype: torch.dtype | None) -> WholeTensor:
        """Dtype and shape of the whole tensor of this name; placeholders if its link is not valid."""
        leaves: list[SourceTensor] = []

        def shape_of(item: Any) -> tuple[int, ...]:
            leaves.append(SourceTensor(source, item))
            return leaves[-1].shape

        try:
            shape, _ = leaves_of(self._links[name], shape_of)
        except (KeyError, PlacementError):  # `_plan` raises again, with the problems of all links
            shape = ()
        if not leaves:
            return WholeTensor(name, torch.float32, shape)
        own_dtype = dtype_named(leaves[0].dtype)
        casts = dtype is not None and own_dtype.is_floating_point and leaves[0].codec is None
        return WholeTensor(name, dtype if casts and dtype is not None else own_dtype, shape)

    def _plan(
        self, source: StateDescription, tensors: Sequence[WholeTensor], budget_bytes: int
    ) -> TransferPlan:
        receivers = RankSet.of(self._receivers)
        target = StateDescription.of(
            DescribedTensor(tensor.name, dtype_name(tensor.dtype), tensor.shape, _WHOLE, receivers)
            for tensor in tensors
        )
        links: dict[str, Link] = {tensor.name: self._links[tensor.name] for tensor in tensors}
        return plan_transfer(source, target, links=links, cast=self._cast, budget_bytes=budget_bytes)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors. A collective: every rank iterates to the end.

        Raises:
            CheckpointError: on all ranks, if one failed, or if the state was modified between two buckets.
        """
        for bucket in self.buckets():
            yield from bucket.tensors()

    def buckets(self) -> Iterator[TensorBucket]:
        """The whole tensors, a bucket at a time, each bucket in new memory. A collective; raises like iteration."""
        own, first_versions = self._coordinator, self._versions()
        receives = own.rank in self._receivers
        locals_ = map(local_of, self._state.values())
        device = next((local.device for local in locals_), torch.device("cpu"))
        for planned in self._buckets:
            with own.together(
                "filling a bucket of whole tensors", "the buckets before it are of one version"
            ):
                if self._versions() != first_versions:
                    raise CheckpointError(
                        "The state was written to between two buckets.",
                        expected="no optimizer step before the last bucket",
                        got="another version of some tensor",
                        where=f"rank {own.rank}",
                        todo="iterate to the end, then step",
                    )
                data = torch.empty(
                    planned.nbytes, dtype=torch.uint8, device=device if receives else torch.device("meta")
                )
                bucket = TensorBucket(data, planned.parts)
            state = {name: self._state[name] for name in planned.reads if name in self._state}
            planned.transfer.run(state or None, dict(bucket.tensors()) if receives else None)
            yield bucket
            del data, bucket, state  # freed before the next bucket is allocated

    def _versions(self) -> list[int]:
        # A write may go through the DTensor or through its local tensor. Inference tensors have no version counter.
        watched = (item for tensor in self._state.values() for item in (tensor, local_of(tensor)))
        return [version_of(item) for item in watched if not item.is_inference()]


def _only(source: StateDescription, names: Set[str]) -> StateDescription:
    """The description of a source, reduced to the named tensors."""
    kept = [number for number, entry in enumerate(source.entries) if entry.name in names]
    structure = source.structure
    entries = tuple(source.entries[number] for number in kept)
    return StateDescription(
        Structure(None, entries, structure.axes, structure.layouts),
        tuple(source.ranks[number] for number in kept),
    )


def _buckets_of(tensors: Sequence[WholeTensor], bucket_bytes: int) -> Iterator[list[WholeTensor]]:
    """Consecutive tensors that share a bucket."""
    bucket: list[WholeTensor] = []
    room = bucket_bytes
    for tensor in tensors:
        needed = round_up(tensor.nbytes, _ALIGN_BYTES)
        if bucket and needed > room:
            yield bucket
            bucket, room = [], bucket_bytes
        bucket.append(tensor)
        room -= needed
    if bucket:
        yield bucket
