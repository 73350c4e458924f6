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

    changed = ChangedItems(model)           vLLM's sparse trainer engine, after vLLM has loaded these weights
    for step in range(steps):
        ...
        trainer.send_weights(vllm_patches(changed))
        changed.commit()

The results of `sglang_bucket`, `vllm_source` and `vllm_patches` were given to classes of the released packages. The
engines, which need GPUs, were not run.
"""

from __future__ import annotations

import sys
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
from vescale_fsdp.transfer.delta import SentBits
from vescale_fsdp.transfer.description import (
    DescribedTensor,
    Ranks,
    StateDescription,
    describe_states,
    named_tensors,
    transfer_ranks,
)
from vescale_fsdp.transfer.exchange import StagingPool, each_batch
from vescale_fsdp.transfer.links import Link, PlacedLeaf, SourceTensor, leaves_of
from vescale_fsdp.transfer.memory import Origin, Stage, local_pieces, regions_of
from vescale_fsdp.transfer.patches import (
    Change,
    Segment,
    bits_of,
    by_width,
    changed_positions,
    changes,
    indices_in,
)
from vescale_fsdp.transfer.plan import BUDGET_BYTES, TransferPlan, plan_transfer
from vescale_fsdp.transfer.rank_transfers import OrderedCopies, RankTransfers, nbytes_of
from vescale_fsdp.transfer.transfer import Transfer

if TYPE_CHECKING:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
    from vllm.distributed.weight_transfer.base import WeightSource
    from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch

BUCKET_BYTES = 256 << 20  # 256 MiB: default size of a bucket
_WHOLE = Distribution((), ())  # no axis cuts the tensor
# 1 MiB: bits are compared in parts, since several numbers of 8 bytes per item are computed.
_PART_BYTES = 1 << 20


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
        plan: of one transfer of all whole tensors.

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
            self.plan = self._plan(source, self.tensors, budget_bytes)
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


class Items(NamedTuple):
    """Some items of a whole tensor.

    Attributes:
        shape: of the whole tensor.
        indices: int64, 1D, each once: numbers of the items in the row-major order of the whole tensor.
        values: 1D, in the dtype of the whole tensor. Like the indices, on the device of the state.
    """

    shape: tuple[int, ...]
    indices: torch.Tensor
    values: torch.Tensor


class ChangedItems:
    """The items of a sharded state that have changed, as items of whole tensors, for engines that take patches.

    Each rank compares the bits of its shards, as they are sent, with the bits at the last `commit`, and sends what
    differs to the receiver. No rank gathers a tensor. The constructor, which takes the present weights as those that
    the engine has, and `take` are collectives.

    Args:
        state: a module, or nested dicts and lists of live tensors, which each `take` reads again.
        links, dtype, ranks: as for `WholeTensors`; links without codes and scales.
        receiver: the rank that gets the changes.
        on_host: keep the compared bits in host memory. Default: on the device of the state.

    Attributes:
        coordinator: the ranks.
        receiver: the rank that gets the changes.
        tensors: name, dtype and shape of the whole tensors.

    Raises:
        PlacementError: on all ranks; lists every tensor that cannot be made, or names a link that quantizes.

    Examples:
        >>> weight = torch.zeros(2, 3)
        >>> changed = ChangedItems({"w": weight})
        >>> weight[1, 2] = 5
        >>> changed.take()["w"].indices.tolist(), changed.take()["w"].values.tolist()
        ([5], [5.0])
        >>> changed.commit()
        >>> changed.take()
        {}
    """

    def __init__(
        self,
        state: Any,
        *,
        links: Mapping[str, Link] | None = None,
        dtype: torch.dtype | None = None,
        ranks: Ranks = None,
        receiver: int = 0,
        on_host: bool = False,
    ) -> None:
        self.coordinator = own = transfer_ranks(ranks)
        whole = WholeTensors(
            state, links=links, dtype=dtype, ranks=own, receivers=(receiver,), bucket_bytes=sys.maxsize
        )
        self.receiver, self.tensors, self._plan = receiver, whole.tensors, whole.plan
        self._state = state
        with own.together("planning patches"):
            coded = [
                self._plan.target.entries[leaf.target].name
                for leaf in self._plan.leaves
                if leaf.source.codec is not None
            ]
            if coded:
                raise PlacementError(
                    "Codes and scales cannot be sent as changed items.",
                    expected="links that move or cast",
                    got=coded[:16],
                    where="ChangedItems(links=..)",
                    todo="use Transfer(plan, delta=True), which sends the changes of codes and scales",
                )
            numbers = (leaf.source.number for leaf in self._plan.leaves)
            self._regions = regions_of(self._plan.source, numbers, own.rank)
            self._stage = Stage(self._plan.source, {}, 0)
            transfers = RankTransfers(self._plan, own.rank)
            streams = [copies for (sender, _), copies in transfers.streams.items() if sender == own.rank]
            streams.append(OrderedCopies(transfers.kept))
            self._segments = [
                Segment(
                    itemsize, nbytes_of(copies) // itemsize, copies, transfers.batches(copies, (True,)), None
                )
                for stream in streams
                for message in stream.messages(_PART_BYTES, is_coded=True)
                for itemsize, copies in by_width(message)
            ]
            numels = {
                placed: self._regions[placed.source.number].numel
                for segment in self._segments
                for placed, _ in segment.copies
            }
            self._bits = SentBits(numels, self._stage, None)
            self._changes: list[Change] = []  # since the last commit
            locals_ = self._locals()
            self._device = next((local.device for local in locals_.values()), torch.device("cpu"))
            self._bits.fit(torch.device("cpu") if on_host else self._device)
            self._bits.copy_from(Origin(self._plan, own.rank, locals_, self._stage), self._device)

    def _locals(self) -> dict[int, torch.Tensor]:
        tensors = {} if self._state is None else dict(named_tensors(self._state))
        return local_pieces(tensors, self._plan.source, self._regions, self.coordinator.rank)

    def take(self) -> dict[str, Items]:
        """Return the items that have changed since the last `commit`, by the names of whole tensors. A collective.

        Ranks other than the receiver get an empty dict.

        Raises:
            CheckpointError: on all ranks, if the state of any rank is not the one that the constructor got.
        """
        own = self.coordinator
        # By number of the whole tensor, ascending: parts of this rank's items, on the CPU.
        found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        with own.together("finding what has changed"):
            self._changes = list(self._changed())
            for change in self._changes:
                placed, copy = change.copy
                indices = indices_in(copy.sizes, copy.target_strides, copy.target, change.positions)
                found.setdefault(placed.target, []).append((indices.cpu(), self._stored(change).cpu()))
        entries, dtypes = self._plan.target.entries, self._plan.target.dtypes
        counts = [sum(part.numel() for part, _ in found.get(number, ())) for number in range(len(entries))]
        parts = [
            torch.cat(side).view(torch.uint8)
            for _, each in sorted(found.items())
            for side in zip(*each, strict=True)
        ]
        # Of each tensor first all indices, then all values.
        data = torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *parts])
        by_rank = own.everyone(counts)
        if own.rank != self.receiver:
            own.exchange([(data, self.receiver)] if data.numel() else [], [])
            return {}
        sizes = [
            [
                nbytes
                for count, dtype in zip(own_counts, dtypes, strict=True)
                for nbytes in (8 * count, dtype.itemsize * count)
            ]
            for own_counts in by_rank
        ]
        received = [torch.empty(sum(each), dtype=torch.uint8, device="cpu") for each in sizes]
        received[own.rank] = data
        incoming = [(each, rank) for rank, each in enumerate(received) if rank != own.rank and each.numel()]
        own.exchange([], incoming)
        split = [each.split(size) for each, size in zip(received, sizes, strict=True)]
        items = {}
        for number, entry in enumerate(entries):
            indices, values = (
                torch.cat([part[2 * number + side] for part in split]).to(self._device) for side in (0, 1)
            )
            if indices.numel():
                items[entry.name] = Items(entry.shape, indices.view(torch.int64), values.view(dtypes[number]))
        return items

    def _changed(self) -> Iterator[Change]:
        """Yield this rank's items whose bits differ from those at the last commit, as they are sent."""
        locals_ = self._locals()
        origin = Origin(self._plan, self.coordinator.rank, locals_, self._stage)
        most = max((segment.nbytes for segment in self._segments), default=0)
        sides = [torch.empty(most, dtype=torch.uint8, device=self._device) for _ in range(2)]
        for segment in self._segments:
            new, room = (side[: segment.nbytes] for side in sides)
            each_batch(origin.pack, segment.batches, new)
            positions = changed_positions(new, self._bits.read(segment, room), segment.itemsize)
            bits = bits_of(new.view(dtype_named(segment.copies[0][0].wire_dtype)))
            yield from changes(segment.copies, positions, bits.index_select(0, positions))

    def _stored(self, change: Change) -> torch.Tensor:
        """Return changed items in the dtype of the whole tensor."""
        placed: PlacedLeaf = change.copy[0]
        return change.values.view(dtype_named(placed.wire_dtype)).to(self._plan.target.dtypes[placed.target])

    def commit(self) -> None:
        """Record that the engine has the items of the last `take`. Not a collective; call it on all ranks, or on none.

        Without this call, such as after a failure, the next `take` returns these items again, with their newest values.
        """
        for change in self._changes:
            self._bits.put(change)
        self._changes = []


def vllm_patches(changed: ChangedItems) -> list[SparseWeightPatch]:
    """Return the changed items as vLLM's ``SparseWeightPatch``, one per tensor. A collective.

    Ranks other than the receiver get an empty list.

    For ``send_weights`` of the trainer engine of vLLM's backend ``sparse_nccl``, which broadcasts int32 indices and
    values from one rank. The names must be those that vLLM's ``load_weights`` expects, or ``links`` of
    `ChangedItems` gives them. vLLM refuses NaN, which stands for an unchanged item, tensors that are not floats, and
    models whose loading code does more than copy.

    Args:
        changed: the changes; call its `commit` after ``send_weights``.

    Raises:
        PlacementError: on all ranks, if a tensor has too many items for int32 indices.
        CheckpointError: on all ranks, if vLLM cannot be imported on one of them.

    Examples:
        >>> changed = ChangedItems({"w": torch.zeros(4)})
        >>> vllm_patches(changed)  # doctest: +SKIP
        []
    """
    with changed.coordinator.together("importing vLLM"):
        from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch

        check_version("vllm")
    large = [each.name for each in changed.tensors if numel_of(each.shape) > torch.iinfo(torch.int32).max]
    if large:
        raise PlacementError(
            "vLLM numbers the items of a tensor in 32 bits.",
            expected="at most 2**31 - 1 items",
            got=large[:16],
            where="ChangedItems(links=..)",
            todo="make these tensors of several links, such as one per expert: index('experts.w', 3)",
        )
    return [
        SparseWeightPatch(name, items.indices.to(torch.int32), items.values, items.shape)
        for name, items in changed.take().items()
    ]


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
    own = transfer_ranks(ranks)
    with own.together("importing vLLM"):
        from vllm.distributed.weight_transfer.base import (
            ParamMeta,
            Replicate,
            Shard,
            WeightSource,
            layerwise_groups,
        )

        check_version("vllm")
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
