"""Whole tensors of a sharded trainer, for inference engines that do not expose their sharding.

`Transfer` sends shards directly to the shards of an engine, without whole tensors. `WholeTensors` gathers whole
tensors, in buckets, for engines that accept nothing else (``load_weights`` of most engines, checkpoint-engine)::

    tensors = WholeTensors(model, receivers=(0,))
    for step in range(steps):
        ...
        for name, tensor in tensors:        on all ranks of the trainer
            engine.load_weights([(name, tensor)])

A `WholeTensors` plans its transfers once. A receiver needs memory for one bucket in addition to its shards. Ranks that
are not receivers get tensors on the meta device.

    for bucket in tensors.buckets():        checkpoint-engine: its workers read a shared buffer
        buffer.copy_(bucket.data)           1D bytes
        socket.send_pyobj(bucket.metadata())

    for bucket in tensors.buckets():        SGLang's update_weights_from_tensor and _from_distributed
        flattened = sglang_bucket(bucket)

    source = vllm_source(model)             vLLM's trainer engines, the m2n engine for local shards too
    trainer = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)

The results of `sglang_bucket` and `vllm_source` were given to classes of the released packages. The engines, which need
GPUs, were not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.manifest.structure import Structure
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name, dtype_named
from vescale_fsdp.errors import CheckpointError, PlacementError
from vescale_fsdp.integrations.tried_versions import check_version
from vescale_fsdp.layout.distribution import Axis, Distribution, RankSet, ShardCut
from vescale_fsdp.layout.geometry import numel_of
from vescale_fsdp.torch_private import local_of, versions_of
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

if TYPE_CHECKING:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
    from vllm.distributed.weight_transfer.base import WeightSource

BUCKET_BYTES = 256 << 20  # 256 MiB: default size of a bucket
_WHOLE = Distribution((), ())  # no axis cuts the tensor


class WholeTensor(NamedTuple):
    """The name, dtype and shape of a whole tensor, and the chunk that each receiver gets.

    Attributes:
        shard_dim: the dim of which the i-th receiver gets the i-th of ``num_shards`` equal chunks; None: each receiver
            gets the whole tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    shard_dim: int | None = None
    num_shards: int = 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what a receiver gets."""
        return tuple(
            size // self.num_shards if dim == self.shard_dim else size for dim, size in enumerate(self.shape)
        )

    @property
    def nbytes(self) -> int:
        """Number of bytes that a receiver gets."""
        return numel_of(self.local_shape) * self.dtype.itemsize

    def sharded(self, num_shards: int) -> WholeTensor:
        """Return the tensor cut along the first dim that ``num_shards`` divides; itself if there is none."""
        dims = [dim for dim, size in enumerate(self.shape) if size and size % num_shards == 0]
        return self._replace(shard_dim=dims[0], num_shards=num_shards) if dims else self


class TensorBucket(NamedTuple):
    """Several whole tensors, or chunks of whole tensors, in one buffer.

    Attributes:
        data: 1D uint8; on the meta device if this rank receives nothing.
        offsets: the first byte of each tensor in ``data``, in the order of the tensors.
    """

    data: torch.Tensor
    offsets: Mapping[WholeTensor, int]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name of each tensor, and the tensor as a view of the bucket."""
        for tensor, offset in self.offsets.items():
            shape, dtype = tensor.local_shape, tensor.dtype
            if self.data.is_meta:
                yield tensor.name, torch.empty(shape, dtype=dtype, device="meta")
                continue
            yield tensor.name, self.data[offset : offset + tensor.nbytes].view(dtype).view(shape)

    def metadata(self) -> list[dict[str, Any]]:
        """Return name, shape, dtype and first byte of each tensor, as checkpoint-engine's workers read them."""
        return [
            {"name": each.name, "shape": torch.Size(each.local_shape), "dtype": each.dtype, "offset": offset}
            for each, offset in self.offsets.items()
        ]


class _PlannedBucket(NamedTuple):
    """A bucket and the transfer that fills it."""

    offsets: dict[WholeTensor, int]
    nbytes: int
    reads: list[str]  # names of the source tensors that the transfer reads
    transfer: Transfer


class WholeTensors:
    """An iterable of the whole tensors of a sharded state. The constructor and each iteration are collectives.

    Args:
        state: a module, or nested dicts and lists of live tensors, which each iteration reads again; None on ranks
            that store nothing of the state. The tensors of a module are its parameters, shared ones once, and its
            persistent buffers.
        links: for the name of each whole tensor, the link that makes it from tensors of the state (see
            `vescale_fsdp.transfer`). Default: every tensor of the state.
        dtype: dtype of floating-point results other than codes and scales. Default: the dtype of the source.
        receivers: the ranks that get the values of whole tensors. Default: all ranks.
        bucket_bytes: size of a bucket. A larger tensor gets a bucket of its own.
        budget_bytes: memory for messages, as for `plan_transfer`.
        sharded: give each receiver a chunk of each tensor instead of the whole: of the first dim that the number of
            receivers divides (`WholeTensor.shard_dim`). Tensors without such a dim stay whole.
        ranks, group, verify: as for `Transfer`.

    Attributes:
        tensors: name, dtype and shape of the whole tensors, in the order of iteration: that of ``links``, else of the
            state.

    Raises:
        PlacementError: on all ranks; lists every tensor that cannot be made, or the receivers that are not valid.

    Examples:
        >>> whole = WholeTensors({"w": torch.ones(4), "b": torch.zeros(2)})
        >>> {name: tensor.sum().item() for bucket in whole.buckets() for name, tensor in bucket.tensors()}
        {'w': 4.0, 'b': 0.0}
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
        sharded: bool = False,
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
        all_tensors = {name: name for name in source.numbers_by_name}  # a name alone is a link
        self._links = dict(links or all_tensors)
        arguments = {"receivers": self._receivers, "bucket_bytes": bucket_bytes, "links": repr(self._links)}
        arguments["sharded"] = sharded
        with own.together("planning whole tensors", alike=arguments):
            valid = all(0 <= rank < own.world_size for rank in self._receivers)
            # No rank twice (set), and at least one receiver (max).
            if not valid or len(set(self._receivers)) != max(1, len(self._receivers)):
                raise PlacementError(
                    "These ranks cannot receive.",
                    expected=f"some of the {own.world_size} ranks, each once",
                    got=list(self._receivers),
                )
            reads: dict[str, list[str]] = {name: [] for name in self._links}  # whole tensor -> source tensors
            tensors = tuple(self._described(source, name, dtype, reads[name]) for name in self._links)
            self.tensors = (
                tuple(each.sharded(len(self._receivers)) for each in tensors) if sharded else tensors
            )
            # A plan of all tensors, so that an error lists every problem. Each bucket gets a plan of its own below.
            self._plan(source, self.tensors, budget_bytes)
        pool = StagingPool()  # shared by all transfers, since buckets are filled one after another
        self._buckets = []
        for bucket in _buckets_of(self.tensors, bucket_bytes):
            names = list(dict.fromkeys(name for tensor in bucket for name in reads[tensor.name]))
            transfer = Transfer(
                self._plan(_only(source, set(names)), bucket, budget_bytes),
                ranks=own,
                verify=verify,
                group=group,
                pool=pool,
            )
            # Without gaps, since SGLang's receiver computes offsets from sizes. Wide items first: each is aligned.
            placed, nbytes = {}, 0
            for tensor in sorted(bucket, key=lambda each: -each.dtype.itemsize):
                placed[tensor] = nbytes
                nbytes += tensor.nbytes
            offsets = {tensor: placed[tensor] for tensor in bucket}
            self._buckets.append(_PlannedBucket(offsets, nbytes, names, transfer))

    def _described(
        self, source: StateDescription, name: str, dtype: torch.dtype | None, reads: list[str]
    ) -> WholeTensor:
        """Return the dtype and shape of the whole tensor called ``name``; placeholders if its link is not valid.

        ``reads`` gets the names of the source tensors.
        """
        leaves: list[SourceTensor] = []

        def shape_of(item: Any) -> tuple[int, ...]:
            leaves.append(SourceTensor(source, item))
            reads.append(leaves[-1].name)
            return leaves[-1].shape

        try:
            shape, _ = leaves_of(self._links[name], shape_of)
        except (KeyError, PlacementError):  # `_plan` raises an error that lists the problems of all links
            shape = ()
        if not leaves:
            return WholeTensor(name, torch.float32, shape)
        own_dtype = dtype_named(leaves[0].dtype)
        # The codec determines the dtype of codes and scales.
        casts = dtype is not None and own_dtype.is_floating_point and leaves[0].codec is None
        return WholeTensor(name, dtype if casts and dtype is not None else own_dtype, shape)

    def _plan(
        self, source: StateDescription, tensors: Sequence[WholeTensor], budget_bytes: int
    ) -> TransferPlan:
        """Plan the transfer of some whole tensors to all receivers."""
        receivers = RankSet.of(self._receivers)
        axis = Axis(len(self._receivers), 1)

        def distribution(tensor: WholeTensor) -> Distribution:
            return (
                _WHOLE if tensor.shard_dim is None else Distribution((axis,), (ShardCut(tensor.shard_dim),))
            )

        target = StateDescription.of(
            DescribedTensor(
                tensor.name, dtype_name(tensor.dtype), tensor.shape, distribution(tensor), receivers
            )
            for tensor in tensors
        )
        links: dict[str, Link] = {tensor.name: self._links[tensor.name] for tensor in tensors}
        return plan_transfer(source, target, links=links, cast=self._cast, budget_bytes=budget_bytes)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name of each whole tensor and the tensor. A collective: every rank must iterate to the end.

        Raises:
            CheckpointError: on all ranks, if any rank failed, or if the state was modified between two buckets.
        """
        for bucket in self.buckets():
            yield from bucket.tensors()

    def buckets(self) -> Iterator[TensorBucket]:
        """Yield the whole tensors in buckets, each in new memory. A collective: every rank must iterate to the end.

        Raises:
            CheckpointError: on all ranks, if any rank failed, or if the state was modified between two buckets.
        """
        own, first_versions = self._coordinator, self._versions()
        receives = own.rank in self._receivers
        locals_ = map(local_of, self._state.values())
        device = next((local.device for local in locals_), torch.device("cpu"))
        for planned in self._buckets:
            # Buckets of different versions would give the engine a mixture of weights.
            with own.together(
                "filling a bucket of whole tensors", "all earlier buckets have the same version"
            ):
                if self._versions() != first_versions:
                    raise CheckpointError(
                        "The state was written to between two buckets.",
                        expected="no optimizer step before the last bucket",
                        got="a tensor with another version than at the first bucket",
                        where=f"rank {own.rank}",
                        todo="iterate to the end before the next optimizer step",
                    )
                data = torch.empty(
                    planned.nbytes, dtype=torch.uint8, device=device if receives else torch.device("meta")
                )
                bucket = TensorBucket(data, planned.offsets)
            state = {name: self._state[name] for name in planned.reads if name in self._state}
            planned.transfer.run(state or None, dict(bucket.tensors()) if receives else None)
            yield bucket
            del data, bucket, state  # so that the memory is freed before the next bucket is allocated

    def _versions(self) -> list[int]:
        """Return the version counters of all tensors, which change when a tensor is written to."""
        # DTensors and their local tensors have counters of their own, and a write may go through either. Inference
        # tensors have no counter.
        watched = (item for tensor in self._state.values() for item in (tensor, local_of(tensor)))
        return versions_of(item for item in watched if not item.is_inference())


def _only(source: StateDescription, names: Set[str]) -> StateDescription:
    """Reduce a description to the tensors with these names."""
    kept = [number for number, entry in enumerate(source.entries) if entry.name in names]
    structure = source.structure
    entries = tuple(source.entries[number] for number in kept)
    return StateDescription(
        Structure(None, entries, structure.axes, structure.layouts),
        tuple(source.ranks[number] for number in kept),
    )


def _buckets_of(tensors: Sequence[WholeTensor], bucket_bytes: int) -> Iterator[list[WholeTensor]]:
    """Divide tensors, in order, into buckets of at most ``bucket_bytes``; a larger tensor is a bucket of its own."""
    bucket: list[WholeTensor] = []
    room = bucket_bytes
    for tensor in tensors:
        if bucket and tensor.nbytes > room:
            yield bucket
            bucket, room = [], bucket_bytes
        bucket.append(tensor)
        room -= tensor.nbytes
    if bucket:
        yield bucket


def sglang_bucket(bucket: TensorBucket) -> FlattenedTensorBucket:
    """Return a bucket as SGLang's ``FlattenedTensorBucket``, without a copy.

    For ``update_weights_from_tensor(..., load_format="flattened_bucket")`` and ``update_weights_from_distributed`` with
    the same ``load_format``: the fields of the result are what SGLang serializes and broadcasts. The latter gets names,
    dtypes and shapes in the order of the metadata, and computes the offsets from them: tensors follow one another
    without gaps.

    Args:
        bucket: a bucket of `WholeTensors.buckets`, on a receiver.

    Examples:
        >>> bucket = next(WholeTensors({"w": torch.ones(4)}).buckets())
        >>> sglang_bucket(bucket).reconstruct_tensors()[0][0]  # doctest: +SKIP
        'w'
    """
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

    check_version("sglang")
    metadata = []
    # An empty tensor starts where the next one does; it comes first, where its item size still divides the offset.
    for tensor, start in sorted(bucket.offsets.items(), key=lambda item: (item[1], item[0].nbytes)):
        shape, stop = torch.Size(tensor.local_shape), start + tensor.nbytes
        metadata.append(FlattenedTensorMetadata(tensor.name, shape, tensor.dtype, start, stop, tensor.nbytes))
    return FlattenedTensorBucket(flattened_tensor=bucket.data, metadata=metadata)


def vllm_source(
    state: Any, *, links: Mapping[str, Link] | None = None, ranks: Ranks = None, **options: Any
) -> WeightSource:
    """Return vLLM's ``WeightSource`` of a sharded state, for the ``trainer_init`` of its trainer engines. A collective.

    The order is vLLM's: layer by layer (its ``layerwise_groups``), which the sharded RDT engine requires. ``iter_full``
    yields whole tensors on all ranks (engines that broadcast, IPC). ``iter_local`` yields each rank's
    chunk of the first dim that the number of ranks divides (the m2n engine); the metadata name that dim. Both fill one
    bucket after another, which is freed when the next one is filled.

    Args:
        state: the module or state whose tensors are sent; the names are those that vLLM's ``load_weights`` expects, or
            ``links`` gives them.
        links: as for `WholeTensors`.
        ranks: the trainer's ranks, numbered as vLLM's trainer ranks are.
        options: ``dtype``, ``bucket_bytes``, ``budget_bytes``, ``verify`` of `WholeTensors`.

    Examples:
        >>> source = vllm_source({"w": torch.ones(4)})  # doctest: +SKIP
        >>> [(meta.name, meta.shape) for meta in source.metadata]  # doctest: +SKIP
        [('w', (4,))]
    """
    from vllm.distributed.weight_transfer.base import (
        ParamMeta,
        Replicate,
        Shard,
        WeightSource,
        layerwise_groups,
    )

    check_version("vllm")
    own = transfer_ranks(ranks)
    if links is None:  # a name alone is a link
        links = {name: name for name in describe_states(state, None, ranks=own)[0].numbers_by_name}
    in_order = {name: links[name] for group in layerwise_groups(list(links)) for name in group}
    full = WholeTensors(state, links=in_order, ranks=own, **options)
    local = WholeTensors(state, links=in_order, ranks=own, sharded=True, **options)

    class ShardedWeights(WeightSource):  # type: ignore[misc]  # vLLM is not installed where types are checked
        """The weights of a trainer, as whole tensors and as chunks."""

        @cached_property  # vLLM requires it
        def metadata(self) -> list[Any]:
            owners = tuple(range(own.world_size))
            return [
                ParamMeta(
                    tensor.name,
                    tensor.dtype,
                    tensor.shape,
                    owners=owners,
                    placements=(Replicate() if tensor.shard_dim is None else Shard(tensor.shard_dim),),
                )
                for tensor in local.tensors
            ]

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(full)

        def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(local)

    return ShardedWeights()
