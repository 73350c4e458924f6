"""Weights of a sharded trainer for engines that ask for them in their own way.

`Transfer` fills the shards of an engine that has any; nothing is gathered. These are for engines that cannot say how
they shard:

    WholeTensors     every tensor whole, in buckets: checkpoint-engine, ``load_weights`` of most engines
    weight_source    the same as a ``WeightSource`` of vLLM's weight transfer
    shard_specs      every rank's own flat piece and its offset, as verl's ``ShardSpec``

    tensors = WholeTensors(dict(model.named_parameters()), receivers=(0,))
    for step in range(steps):
        ...
        for name, tensor in tensors:        on all ranks of the trainer
            engine.load_weights([(name, tensor)])

A `WholeTensors` plans once. A receiver holds one bucket at a time next to its shards. Ranks that are no receivers get
tensors on the meta device.

    for bucket in tensors.buckets():        checkpoint-engine: what its workers read from a shared buffer
        buffer.copy_(bucket.data)           1D bytes
        socket.send_pyobj([part._asdict() for part in bucket.parts])

Neither verl nor vLLM has run with this module: both need GPUs. `shard_specs` is written for verl at e39177f13beb (pull
request 7324), whose ``ShardSpec`` has ``contributes``; `weight_source` for aoshen02/vllm at 0a61d2c7d220 (pull request
48042).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.manifest.distribution import Distribution, RankSet
from vescale_fsdp.checkpoint.manifest.structure import Structure
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name, dtype_named
from vescale_fsdp.dtensor.piece_map import pieces_of
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import CheckpointError, PlacementError
from vescale_fsdp.layout.geometry import numel_of
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
from vescale_fsdp.transfer.plan import (
    BUDGET_BYTES,
    TransferPlan,
    plan_transfer,
)
from vescale_fsdp.transfer.transfer import Transfer

BUCKET_BYTES = 256 << 20  # 256 MiB
_ALIGN_BYTES = 256  # of tensors in a bucket
_WHOLE = Distribution((), ())


class WholeTensor(NamedTuple):
    """A tensor that is made."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its items."""
        return numel_of(self.shape) * self.dtype.itemsize


class BucketPart(NamedTuple):
    """Where a tensor lies in a bucket, in bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int


class TensorBucket(NamedTuple):
    """Tensors in one memory.

    Attributes:
        data: 1D uint8; of the meta device where this rank receives none.
    """

    data: torch.Tensor
    parts: list[BucketPart]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, views of the bucket."""
        for name, shape, dtype, offset in self.parts:
            if self.data.is_meta:
                yield name, torch.empty(shape, dtype=dtype, device="meta")
                continue
            nbytes = shape.numel() * dtype.itemsize
            yield name, self.data[offset : offset + nbytes].view(dtype).view(shape)


class _PlannedBucket(NamedTuple):
    """A bucket to be filled.

    Attributes:
        reads: names of the source's tensors that it is made of.
    """

    parts: list[BucketPart]
    nbytes: int
    reads: list[str]
    transfer: Transfer


class WholeTensors:
    """A state's tensors, whole. Made by all ranks that hold the state, and gone through by all of them alike.

    Args:
        state: nested dicts and lists of live tensors, read anew in each pass; None on ranks that have none of it.
        links: what is made, by name (see `vescale_fsdp.transfer`); default: every tensor
            of the state.
        dtype: of the floats that are made, where they are not codes; default: as they are.
        receivers: ranks that get values; default: all.
        bucket_bytes: of a bucket; a larger tensor is a bucket of its own.
        budget_bytes: of memory for messages, as for `plan_transfer`.
        ranks, group, verify: as for `Transfer`.

    Attributes:
        tensors: what is made, in the order in which it comes.

    Raises:
        PlacementError: on all ranks, if something cannot be made; lists all that cannot.

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
        source, _ = describe_states(state, None, ranks=own)
        self._state = {} if state is None else dict(named_tensors(state))
        self._receivers = tuple(range(own.world_size)) if receivers is None else tuple(sorted(receivers))
        self._links = dict(links or _every(source))
        asked = {"receivers": self._receivers, "bucket_bytes": bucket_bytes, "links": repr(self._links)}
        with own.together("planning whole tensors", alike=asked):
            _prove_ranks(self._receivers, own.world_size)
            self.tensors = tuple(self._made_of(source, name, dtype) for name in self._links)
            # All at once, so that an error lists all that is wrong.
            plan = self._plan(source, self.tensors, budget_bytes, dtype is not None)
        reads = _reads(plan)
        pool = StagingPool()
        self._buckets = []
        for made in _filled(self.tensors, bucket_bytes):
            names = list(dict.fromkeys(name for tensor in made for name in reads.get(tensor.name, ())))
            part = self._plan(_only(source, names), made, budget_bytes, dtype is not None)
            transfer = Transfer(part, ranks=own, verify=verify, group=group, pool=pool)
            self._buckets.append(_PlannedBucket(*_laid_out(made), names, transfer))

    def _made_of(self, source: StateDescription, name: str, dtype: torch.dtype | None) -> WholeTensor:
        """What the source makes under a name; if it makes nothing, planning says why."""

        def shape_of(item: Any) -> tuple[int, ...]:
            found.append(SourceTensor(source, item))
            return found[-1].shape

        found: list[SourceTensor] = []
        try:
            shape, _ = leaves_of(self._links[name], shape_of)
        except (KeyError, PlacementError):
            shape = ()
        if not found:
            return WholeTensor(name, torch.float32, shape)
        made = dtype_named(found[0].dtype)
        if dtype is not None and made.is_floating_point and found[0].codec is None:
            made = dtype
        return WholeTensor(name, made, shape)

    def _plan(
        self, source: StateDescription, made: Sequence[WholeTensor], budget_bytes: int, cast: bool
    ) -> TransferPlan:
        held = RankSet.of(self._receivers)
        target = StateDescription.of(
            DescribedTensor(tensor.name, dtype_name(tensor.dtype), tensor.shape, _WHOLE, held)
            for tensor in made
        )
        links: dict[str, Link] = {tensor.name: self._links[tensor.name] for tensor in made}
        return plan_transfer(source, target, links=links, cast=cast, budget_bytes=budget_bytes)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors. A collective: all ranks go through all of them.

        Raises:
            CheckpointError: on all ranks, if one failed, or the state was written to between two buckets.
        """
        for bucket in self.buckets():
            yield from bucket.tensors()

    def buckets(self) -> Iterator[TensorBucket]:
        """The same, a bucket at a time, each in new memory."""
        own, begun = self._coordinator, self._versions()
        receives = own.rank in self._receivers
        for planned in self._buckets:
            with own.together("filling a bucket of whole tensors", "what came before it is of one version"):
                if self._versions() != begun:
                    raise CheckpointError(
                        "The state was written to between two buckets.",
                        expected="no optimizer step before all tensors have come",
                        got="another version of some tensor",
                        where=f"rank {own.rank}",
                        todo="go through all of them, then step",
                    )
                device = self._device if receives else torch.device("meta")
                bucket = TensorBucket(
                    torch.empty(planned.nbytes, dtype=torch.uint8, device=device), planned.parts
                )
            state = {name: self._state[name] for name in planned.reads if name in self._state}
            planned.transfer.run(state or None, dict(bucket.tensors()) if receives else None)
            yield bucket
            del bucket, state  # not beside the next one

    @property
    def _device(self) -> torch.device:
        return next((local_of(tensor).device for tensor in self._state.values()), torch.device("cpu"))

    def _versions(self) -> list[int]:
        watched = (item for tensor in self._state.values() for item in (tensor, local_of(tensor)))
        return [version_of(item) for item in watched if not item.is_inference()]


def _every(source: StateDescription) -> dict[str, str]:
    return {name: name for name in source.numbers_by_name}


def _prove_ranks(receivers: Sequence[int], world_size: int) -> None:
    strangers = [rank for rank in receivers if not 0 <= rank < world_size]
    if strangers or not receivers or len(set(receivers)) < len(receivers):
        raise PlacementError(
            "These ranks cannot receive.",
            expected=f"some of the {world_size} ranks, each once",
            got=list(receivers),
        )


def _reads(plan: TransferPlan) -> dict[str, list[str]]:
    """Names of the source's tensors that each tensor of the target is made of."""
    found: dict[str, list[str]] = {}
    for leaf in plan.leaves:
        found.setdefault(plan.target.entries[leaf.target].name, []).append(leaf.source.name)
    return found


def _only(source: StateDescription, names: Sequence[str]) -> StateDescription:
    """The description of some tensors of a source."""
    wanted = set(names)
    places = [place for place, entry in enumerate(source.entries) if entry.name in wanted]
    structure = source.structure
    entries = tuple(source.entries[place] for place in places)
    return StateDescription(
        Structure(None, entries, structure.axes, structure.layouts),
        tuple(source.ranks[place] for place in places),
    )


def _filled(tensors: Sequence[WholeTensor], bucket_bytes: int) -> Iterator[list[WholeTensor]]:
    """Tensors in buckets, in their order."""
    bucket: list[WholeTensor] = []
    room = bucket_bytes
    for tensor in tensors:
        needed = _aligned(tensor.nbytes)
        if bucket and needed > room:
            yield bucket
            bucket, room = [], bucket_bytes
        bucket.append(tensor)
        room -= needed
    if bucket:
        yield bucket


def _laid_out(tensors: Sequence[WholeTensor]) -> tuple[list[BucketPart], int]:
    """Where tensors lie in a bucket, and its size."""
    parts, offset = [], 0
    for tensor in tensors:
        parts.append(BucketPart(tensor.name, torch.Size(tensor.shape), tensor.dtype, offset))
        offset += _aligned(tensor.nbytes)
    return parts, offset


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def shard_specs(
    tensors: Iterable[tuple[str, torch.Tensor]], spec_class: Any
) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Each tensor's name, this rank's part of it, and a ``ShardSpec`` with the part's offset.

    verl derives boxes from a DTensor's placements, which a ragged piece does not have, but takes a flat offset as well
    (``ShardSpec(place=<int>)``).

    Args:
        tensors: names and tensors, in an order that is the same on all ranks: ``model.named_parameters()``.
        spec_class: verl's ``ShardSpec``.

    Raises:
        PlacementError: for a tensor whose pieces are no flat ranges: one that is sharded on a second axis too.

    Examples:
        >>> def specs(model, ShardSpec):
        ...     return list(shard_specs(model.named_parameters(), ShardSpec))
    """
    for name, tensor in tensors:
        local = local_of(tensor).detach()
        if not isinstance(tensor, RaggedDTensor):
            yield name, local, spec_class.from_param(tensor)
            continue
        pieces = pieces_of(tensor)
        if pieces is None:
            raise PlacementError(
                "verl has no name for these pieces.",
                expected="one flat range of the tensor on each rank",
                got=tuple(map(str, tensor.placements)),
                where=name,
                todo="send it by vescale_fsdp.transfer.Transfer, or whole (WholeTensors)",
            )
        if pieces.cut_over is None:
            yield name, local, spec_class(full_shape=pieces.shape)
            continue
        mesh, axis = pieces.cut_over
        first = [mesh.get_local_rank(other) == 0 for other in range(mesh.ndim) if other != axis]
        # A replica says so: values that come twice would be taken for changes twice.
        yield (
            name,
            local.view(-1),
            spec_class(
                full_shape=pieces.shape,
                place=pieces.own_piece.start,
                gather_group=mesh.get_group(axis),
                contributes=all(first),
            ),
        )


def weight_source(tensors: WholeTensors, source_class: Any, meta_class: Any) -> Any:
    """Whole tensors under vLLM's interface.

    ``NCCLTrainerWeightTransferEngine.trainer_init(..., source=weight_source(tensors, WeightSource, ParamMeta))`` takes
    it, and every rank of the trainer calls ``send_weights()`` after each step. vLLM's own ``ModuleSource`` gathers each
    tensor on every rank; here only the sender receives it, in buckets. Backends that pass on what every rank has
    (``ipc``) need ``receivers=None``.

    Args:
        tensors: what is sent. The sender, rank 0 to vLLM, must be among its receivers.
        source_class: vLLM's ``WeightSource``.
        meta_class: vLLM's ``ParamMeta``.

    Returns:
        A ``source_class``. Each pass over it is a collective of the trainer's ranks.

    Examples:
        >>> def source(model, WeightSource, ParamMeta):
        ...     from vescale_fsdp.integrations.weight_sync import WholeTensors
        ...     return weight_source(WholeTensors(model.state_dict()), WeightSource, ParamMeta)
    """

    def metadata(_self: Any) -> list[Any]:
        return [meta_class(*tensor) for tensor in tensors.tensors]

    def each(_self: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(tensors)

    # Made here, since the class it is to be one of cannot be imported where this package is.
    return type("WholeTensorSource", (source_class,), {"metadata": metadata, "__iter__": each})()
