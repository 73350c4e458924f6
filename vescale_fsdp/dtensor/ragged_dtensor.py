"""RaggedDTensor: a DTensor whose ranks own flat pieces of any length.

Stock DTensor dispatch does not support `RaggedShard`: it would try to redistribute to Replicate and fail. So a ragged
tensor is a subclass with its own ``__torch_dispatch__``. It keeps DTensor's interface: ``.shape`` is global, and
``.to_local()``, ``.full_tensor()``, ``.redistribute()``, ``.device_mesh`` and ``.placements`` work.

`operators.dispatch_table` selects a rule for each operator, which runs the operator on the pieces (see
dtensor/operators/OPERATORS.md). An operator without a rule raises instead of returning a wrong value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, overload

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Partial, Placement, Shard
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vescale_fsdp.collectives.operations import broadcast_in_place
from vescale_fsdp.collectives.slice_exchange import wait_for
from vescale_fsdp.dtensor.dcp_hooks import chunk_of_box, tensor_shard, write_items
from vescale_fsdp.dtensor.meeting import explained, meet
from vescale_fsdp.dtensor.redistribute import (
    Redistribution,
    exchange,
    groups_of_move,
    move_text,
    redistribute_local,
    start_redistribution,
)
from vescale_fsdp.dtensor.spec import (
    axis_text,
    boxes_of,
    group_ranks_in,
    inner_box,
    is_ragged_spec,
    make_spec,
    piece_of,
    piece_text,
    ragged_axis,
    shape_of_local,
    spec_with,
)
from vescale_fsdp.dtensor.waiting_grad import waiting_in
from vescale_fsdp.errors import MisuseError, PlacementError, UnsupportedOpError, some
from vescale_fsdp.layout.geometry import Box, Range
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.placement import OWNER_OPTIMIZER, RaggedShard
from vescale_fsdp.lazy import set_module
from vescale_fsdp.torch_modes import is_traced
from vescale_fsdp.torch_private import (
    DTensorSpec,
    NotForTorchSave,
    dispatch_to_subclass,
    grad_dtype_of,
    local_of,
    local_slot,
    never_compile,
    piece_in,
    refuse_set_state_dict,
    register_foreach_type,
    taken_by_ddp,
)

Op = torch._ops.OpOverload
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Op, Args, Kwargs], Any]

# Rules create tensors of this class, so the modules of rules import this module, and this module cannot import them.
# Instead, `dispatch_table` registers the rules with `set_rules`. The package's ``__init__`` imports that module, so the
# rules are set whenever a module of `vescale_fsdp.dtensor` is imported.
_rule_of: Callable[[Op], Rule]


def set_rules(rule_of: Callable[[Op], Rule]) -> None:
    """Set the function that returns the rule of an operator on ragged tensors."""
    global _rule_of
    _rule_of = rule_of


# Set in the same way, by `operators.replicated_results`.
_as_whole: Callable[[torch.Tensor, DTensorSpec], DTensor]


def set_as_whole(as_whole: Callable[[torch.Tensor, DTensorSpec], DTensor]) -> None:
    """Set the function that returns a gathered tensor as a replicated DTensor."""
    global _as_whole
    _as_whole = as_whole


# One entry per `identified_by_address` that is active, in any thread.
_identified_by_address: list[None] = []


@contextmanager
def identified_by_address() -> Iterator[None]:
    """Context manager: in the whole process, every ragged tensor and its ``_local_tensor`` have their own address.

    Outside of it, ragged tensors have the address 0, as every DTensor, and so do pieces without memory. accelerate
    (1.15) finds parameters by their address.
    """
    _identified_by_address.append(None)
    try:
        yield
    finally:
        _identified_by_address.pop()


# One entry per `pieces_in_torch_save` that is active, in any thread.
_pieces_in_torch_save: list[None] = []


@contextmanager
def pieces_in_torch_save() -> Iterator[None]:
    """Context manager: in the whole process, ``torch.save`` stores the rank's piece of a ragged tensor, and its boxes.

    For training stacks that save one file per rank. ``torch.load`` gives ragged tensors to the same number of ranks;
    `vescale_fsdp.checkpoint.load` reads the files of all ranks on any number of ranks.
    """
    _pieces_in_torch_save.append(None)
    try:
        yield
    finally:
        _pieces_in_torch_save.pop()


_AS_GIVEN = "_vescale_as_given"  # attribute of a piece, set by `show_as_given`


class WriteCount:
    """Counts writes to a tensor and its views.

    Attributes:
        number: number of the writes so far.
        then: called after each write with the tensor that was written, whose version torch raises after the call; None
            for tensors that are not parameters of a unit.
    """

    number = 0
    then: Callable[[torch.Tensor], None] | None = None


@set_module("vescale_fsdp")
class RaggedDTensor(DTensor):
    """A DTensor with one `RaggedShard` among its placements; the local tensor is this rank's flat piece.

    Create one with `distribute_tensor`, `RaggedDTensor.from_local` or `fully_shard`, not with the constructor.

    Attributes:
        layout_ref: the layout of the tensor's group and the tensor's name in this layout; None for a tensor that the
            planner did not lay out. Elementwise results inherit it, so optimizer state has a layout, too.
        writes: counts writes through views and ``.data``, which share it with the tensor that they are views of:
            torch's version counters do not see these writes. None without views.
        keeps_grad_placed: whether a hook brings the tensor's gradient to the tensor's placements.
        is_expanded: whether the tensor is the result of ``expand``, which may not be written to.

    Examples:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> piece = torch.arange(6.0)
        >>> tensor = RaggedDTensor.from_local(piece, mesh, [RaggedShard((0,), (1,))], shape=(2, 3))
        >>> tensor.shape, tensor.to_local().shape, tensor.full_tensor()[1].tolist()
        (torch.Size([2, 3]), torch.Size([6]), [3.0, 4.0, 5.0])
    """

    layout_ref: tuple[GroupLayout, str] | None = None
    writes: WriteCount | None = None
    keeps_grad_placed: bool = False
    is_expanded: bool = False

    @staticmethod
    def wrap(
        local: torch.Tensor,
        spec: DTensorSpec,
        *,
        layout_ref: tuple[GroupLayout, str] | None = None,
        requires_grad: bool = False,
    ) -> RaggedDTensor:
        """Return a ragged tensor with spec ``spec`` that shares the memory of ``local``."""
        # `__new__` skips DTensor's __init__, which does nothing but takes time: an optimizer wraps hundreds of tensors
        # per step.
        tensor: Any = RaggedDTensor.__new__(RaggedDTensor, local, spec, requires_grad=requires_grad)
        if layout_ref is not None:
            tensor.layout_ref = layout_ref
        return tensor  # type: ignore[no-any-return]

    @staticmethod
    def from_local(  # type: ignore[override]
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        shape: Sequence[int],
    ) -> RaggedDTensor:
        """Return a ragged tensor that shares the memory of this rank's piece. No communication; differentiable.

        Args:
            local_tensor: the piece: contiguous, and as many elements as the placement assigns to this rank.
            device_mesh: the mesh.
            placements: one per mesh axis, exactly one of them a RaggedShard.
            shape: global shape.

        Raises:
            PlacementError: if the size of the piece does not match the placement.
        """
        spec = make_spec(device_mesh, tuple(placements), torch.Size(shape), local_tensor.dtype)
        expected = shape_of_local(spec)
        if tuple(local_tensor.shape) != expected or not local_tensor.is_contiguous():
            raise PlacementError(
                "The local tensor is not this rank's piece.",
                expected=f"a contiguous tensor of shape {expected}",
                got=f"shape {tuple(local_tensor.shape)}, strides {local_tensor.stride()}",
                where=f"rank {device_mesh.get_coordinate()} of {spec.placements}",
                todo="flatten the piece: tensor.reshape(-1)[range]",
            )
        return _FromLocal.apply(local_tensor, spec)  # type: ignore[no-any-return]

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        # torch's set_*_state_dict functions would write wrong ranges into ragged tensors. The functions read this
        # attribute first, and on all ranks, so they are refused here.
        refuse_set_state_dict(f"a tensor of shape {tuple(self.shape)}")
        return self._spec.mesh

    @property
    def piece(self) -> Range:
        """This rank's half-open range of the flattened tensor.

        If other mesh axes cut the tensor, too, the range is of the flattened inner box (see the module `spec`).
        """
        return piece_of(self._spec)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """This rank's boxes of the global tensor, in the order of its local elements."""
        return boxes_of(self._spec)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return this rank's piece, 1-D, in shared memory. Differentiable.

        Args:
            grad_placements: placements of the incoming gradient; None: the tensor's placements.
        """
        # Without autograd no new tensor is needed.
        if not torch.is_grad_enabled() or not self.requires_grad:
            return piece_in(self)
        placements = self.placements if grad_placements is None else grad_placements
        return _ToLocal.apply(self, spec_with(self._spec, placements=placements))  # type: ignore[no-any-return]

    def redistribute(  # type: ignore[override]
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Return the tensor under other placements of its mesh. Differentiable.

        A collective, in which ranks meet first (see `vescale_fsdp.dtensor.meeting`), unless replicas are only cut.

        Args:
            device_mesh: None, or the tensor's own mesh.
            placements: one per mesh axis, at most one of them a RaggedShard.
            async_op: as False, because ranks exchange pieces in several steps. The function
                `vescale_fsdp.dtensor.redistribute` has a form that overlaps with computation.
            forward_dtype: dtype of the messages and of the result; None: the tensor's.
            backward_dtype: dtype of the messages of the backward; None: the tensor's.

        Raises:
            PlacementError: for another mesh, for placements that do not fit the tensor, and for a new Partial.
            LifecycleError: if not all ranks call it.
        """
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise PlacementError(
                "A tensor cannot move to another mesh.", expected=self.device_mesh, got=device_mesh
            )
        if placements is None:
            raise PlacementError(
                "redistribute needs placements.", expected="one placement per mesh axis", got=None
            )
        return _moved(self, placements, "redistribute", forward_dtype, backward_dtype)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The tensor without autograd, in shared memory, as in torch.

        A tensor that is assigned must be sharded like this tensor, or replicated.
        """
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # torch's setter would change this wrapper's metadata and silently keep the old piece.
        if isinstance(value, DTensor) and all(placement.is_replicate() for placement in value.placements):
            value = redistribute(value, self.placements)
        if not isinstance(value, RaggedDTensor) or (
            (value._spec, value.dtype, value.device) != (self._spec, self.dtype, self.device)
        ):
            raise PlacementError(
                "A tensor that is assigned to .data must be sharded like the tensor itself.",
                expected=f"a ragged tensor of shape {tuple(self.shape)}, {self.dtype} on {self.device}, placed "
                f"{tuple(map(str, self.placements))}",
                got=f"{type(value).__name__} of shape {tuple(value.shape)}, {value.dtype} on {value.device}",
                todo="shard the full tensor with vescale_fsdp.distribute_tensor, and copy_ it into the tensor",
            )
        self._local_tensor = piece_in(value).detach()  # `.data` has no autograd history
        if self.writes is not None and self.writes.then is not None:
            self.writes.then(self)

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of gradients, as in torch. It is always the tensor's dtype; assigning another dtype raises."""
        return grad_dtype_of(self)

    @grad_dtype.setter
    def grad_dtype(self, wanted: torch.dtype | None) -> None:
        check_grad_dtype(wanted, self.dtype, f"a tensor of shape {tuple(self.shape)}")

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Gather the whole tensor on every rank, in new memory. A collective; differentiable.

        Ranks meet before anything is sent (see `vescale_fsdp.dtensor.meeting`).

        In a loss that differs between ranks, the gradient is the mean over the ranks, as that of any parameter under
        `fully_shard`. So the backward is a collective, too. Where another mesh axis has a Shard (tensor parallelism),
        the ranks of this axis must have the same gradient, as in torch.

        Args:
            grad_placements: placements of the incoming gradient; None: the mean over the ranks. With ``[Partial()]``
                the backward sums over the ranks. With ``[Replicate()]`` the gradient must be the same on all ranks, and
                nothing is sent.

        Raises:
            LifecycleError: if not all ranks call it.
        """
        if grad_placements is None:
            grad_placements = _pending_mean(self._spec)
        replicated = _moved(self, [Replicate()] * self.device_mesh.ndim, "full_tensor")
        return replicated.to_local(grad_placements=grad_placements)

    def data_ptr(self) -> int:
        """Return 0, as for torch's DTensors, since the tensor has no storage of its own.

        ``to_local().data_ptr()`` is the address of the piece. While accelerate prepares a model under `as_fsdp2`, the
        tensor has an address of its own (`identified_by_address`).
        """
        # torch's DCP stager, and RNNs on CUDA, take the storage of a tensor with another address.
        return self._local_tensor.data_ptr() if _identified_by_address else 0

    @property
    def _local_tensor(self) -> torch.Tensor:
        # torchao (0.18) recognizes its weights by the class of this tensor. The attribute is the piece's, not this
        # tensor's, because torch's swap_tensors swaps attributes before it reads the local tensors.
        local = piece_in(self)
        local = vars(local).get(_AS_GIVEN, local)
        if not _identified_by_address or (local.numel() and not local.is_meta):
            return local
        alias: Any = local.detach()  # a piece without memory has the address 0
        alias.data_ptr = lambda: id(self)
        return alias  # type: ignore[no-any-return]

    @_local_tensor.setter
    def _local_tensor(self, local: torch.Tensor) -> None:
        local_slot.__set__(self, local)

    # torch's FSDP reads the next three attributes of parameters, and not those of other classes. They are how it is
    # refused before it shards a ragged parameter, while parameters that it is told to ignore stay.

    @property
    def _fsdp_orig_uid(self) -> NoReturn:
        # FSDP2 reads it of each parameter that it is about to shard (torch 2.12-2.15).
        raise _refuse_wrapper(_FSDP2, f"a parameter of shape {tuple(self.shape)}")

    @property
    def _fsdp_flattened(self) -> bool:
        # FSDP1 reads it of each parameter, in its constructor only (torch 2.11-2.15).
        self._is_in_fsdp1_constructor = True  # until `_check_wrapper`
        return False

    @property
    def _is_flat_param(self) -> bool:
        # FSDP1's constructor reads it of each parameter that it is about to flatten, and later calls of all.
        if self._is_in_fsdp1_constructor:
            raise _refuse_wrapper(_FSDP1, f"a parameter of shape {tuple(self.shape)}")
        return False

    _is_in_fsdp1_constructor = False

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        mesh = self.device_mesh
        axes = [repr(name) for name in mesh.mesh_dim_names or range(mesh.ndim)]
        return (
            f"RaggedDTensor(shape={tuple(self.shape)}, dtype={self.dtype}{grad},\n"
            f"  {'; '.join(map(axis_text, axes, mesh.shape, self.placements))},\n"
            f"  {piece_text(self._spec, piece_in(self))})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_parameter = isinstance(self, torch.nn.Parameter)
        local = piece_in(self).detach()  # without the attribute `_AS_GIVEN`
        if _pieces_in_torch_save:
            boxes = tuple((box.offsets, box.sizes) for box in self.boxes)
            given = (local, tuple(self.shape), boxes, self._spec, self.requires_grad, is_parameter)
            return _rebuild_piece, given
        # pickle, multiprocessing and DCP's process writer store the piece; torch.save raises, whatever its protocol.
        guard = NotForTorchSave(self._torch_save_refusal)
        return _rebuild, (local, self._spec, self.layout_ref, self.requires_grad, is_parameter, guard)

    def _torch_save_refusal(self) -> UnsupportedOpError:
        return UnsupportedOpError(
            "torch.save cannot store a ragged tensor in a way that loads anywhere else.",
            expected="a checkpoint of the global tensor",
            got="torch.save, which would store this rank's piece only",
            where=f"tensor of shape {tuple(self.shape)} placed {tuple(map(str, self.placements))}",
            todo="save it with vescale_fsdp.checkpoint.save or torch.distributed.checkpoint.save, "
            "or torch.save(tensor.full_tensor()) on one rank",
        )

    def share_memory_(self) -> NoReturn:
        """Raise: torch's method would crash the process, because this tensor has no storage of its own."""
        raise UnsupportedOpError(
            "A ragged tensor cannot be moved into shared memory.",
            expected="plain tensors",
            got="share_memory_(), which Module.share_memory() also calls",
            where=f"tensor of shape {tuple(self.shape)} placed {tuple(map(str, self.placements))}",
            todo="share what .to_local() or .full_tensor() returns, or share the model before fully_shard",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # torch's method (2.11-2.13) would also copy the mesh and the layout, which the copy shares here.
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # raises torch's own error for a tensor that is not a leaf
        is_parameter = isinstance(self, torch.nn.Parameter)
        local = piece_in(self).detach().clone()
        clone = memo[id(self)] = _rebuild(
            local, self._spec, self.layout_ref, self.requires_grad, is_parameter
        )
        # Attributes of the user are copied, but not the mark of a hook, which the copy does not have.
        for name in vars(self).keys() - {"keeps_grad_placed", "writes"}:
            # setdefault keeps what `_rebuild` has set.
            vars(clone).setdefault(name, copy.deepcopy(vars(self)[name], memo))
        # A gradient that waits for a reduction has no values yet.
        if self.grad is not None and waiting_in(self.grad) is None:
            clone.grad = copy.deepcopy(self.grad, memo)
        return clone

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Any], flatten_spec: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> RaggedDTensor:
        first, requires_grad = flatten_spec[0], flatten_spec[-1]
        if isinstance(first, DTensorSpec):  # torch 2.11 and 2.12
            mesh, placements, meta = first.mesh, first.placements, first.tensor_meta
        else:  # torch 2.13 has `shard_order` between these items; it has no meaning for a ragged placement
            mesh, placements, meta = inner_tensors["device_mesh"], first, flatten_spec[1]
        assert meta is not None
        spec = make_spec(mesh, placements, torch.Size(outer_size), meta.dtype)
        return RaggedDTensor.wrap(inner_tensors["_local_tensor"], spec, requires_grad=requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Op, types: tuple[type, ...], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = _rule_of(func)(func, args, kwargs)
        if func.is_view or func is torch.ops.aten.detach.default:
            _share_count(args[0], result)
        elif func._schema.is_mutable:
            _count_write(func, args, kwargs)
        return result

    # DCP's hooks (torch/distributed/_checkpointable.py). They compute without communication, and return nothing for an
    # empty piece (see `dcp_hooks`). They are methods of the class, because DCP copies tensors, and a copy would lose
    # hooks that are set on an instance.

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return write_items(fqn, piece_in(self), self.boxes, self._spec)

    def __create_chunk_list__(self) -> list[Any]:
        return [chunk_of_box(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return tensor_shard(piece_in(self), self.boxes, index)


def _share_count(source: Any, views: Any) -> None:
    """Let views of a tensor count their writes where the tensor does."""
    if isinstance(source, RaggedDTensor):
        if source.writes is None:
            source.writes = WriteCount()
        for view in views if isinstance(views, (list, tuple)) else (views,):
            if isinstance(view, RaggedDTensor):
                view.writes = source.writes


def _count_write(func: Op, args: Args, kwargs: Kwargs) -> None:
    """Count a write by an operator."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            for tensor in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(tensor, RaggedDTensor) and tensor.writes is not None:
                    tensor.writes.number += 1
                    if tensor.writes.then is not None:
                        tensor.writes.then(tensor)


register_foreach_type(RaggedDTensor)  # torch's optimizers use foreach and fused steps for known types only
never_compile(RaggedDTensor.__torch_dispatch__)
dispatch_to_subclass(RaggedDTensor)  # torch 2.11 would not call the subclass's `__torch_dispatch__`


@set_module("vescale_fsdp.dtensor")
def _rebuild(
    local: torch.Tensor,
    spec: DTensorSpec,
    layout_ref: tuple[GroupLayout, str] | None,
    requires_grad: bool,
    is_parameter: bool,
    guard: object = None,
) -> torch.Tensor:
    """Return an unpickled or copied tensor. Pickles contain this function's name."""
    tensor = RaggedDTensor.wrap(local, spec, layout_ref=layout_ref)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


@set_module("vescale_fsdp.dtensor")
def _rebuild_piece(
    local: torch.Tensor,
    shape: tuple[int, ...],
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...],
    spec: DTensorSpec,
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    """Return a tensor of a file that `pieces_in_torch_save` made. Such files contain this function's name.

    Args:
        shape, boxes: the global shape and the rank's boxes (offsets, sizes), in the order of the items of ``local``.
            For readers of the files of all ranks, which know no placements (`conversion.formats.torch_save`).
    """
    return _rebuild(local, spec, None, requires_grad, is_parameter)


def show_as_given(tensor: RaggedDTensor, piece: torch.Tensor) -> None:
    """Make ``tensor._local_tensor`` this rank's piece as a tensor of the user's class, as it is under FSDP2.

    Operators still compute on the plain piece. For parameters whose class has all-gather hooks.
    """
    setattr(piece_in(tensor), _AS_GIVEN, piece)


def wrap_like(local: torch.Tensor, spec: DTensorSpec, like: DTensor | None = None) -> DTensor:
    """Return ``local`` as a ragged DTensor if ``spec`` has a ragged placement, else as a stock DTensor.

    A ragged result gets the layout of ``like`` if both have the same placements.
    """
    if not is_ragged_spec(spec.placements):
        return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]
    # A layout describes one set of placements, so a tensor with other placements has none.
    ref = like.layout_ref if isinstance(like, RaggedDTensor) and like.placements == spec.placements else None
    return RaggedDTensor.wrap(local, spec, layout_ref=ref)


def _moved_to(local: torch.Tensor, spec: DTensorSpec, source: DTensor) -> DTensor:
    """Return the result of a redistribution of ``source``."""
    if all(placement.is_replicate() for placement in spec.placements):
        return _as_whole(local, spec)
    return wrap_like(local, spec, like=source)


# -- creating and moving ------------------------------------------------------------------------------


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    src_data_rank: int | None = None,
) -> RaggedDTensor:
    """Return this rank's part of a tensor, sharded by a `RaggedShard`.

    Args:
        tensor: the full tensor. Its shape and dtype must be the same on all ranks.
        device_mesh: the mesh.
        placements: one per mesh axis, exactly one of them a RaggedShard.
        src_data_rank: None if all ranks have the same values: each rank copies its piece, without communication.
            Otherwise the rank with this group rank on every mesh axis sends every other rank its piece. A group rank is
            the rank's number in the process group of a mesh axis.

    Returns:
        A leaf tensor that requires gradients if ``tensor`` does.

    Raises:
        PlacementError: if the placements do not fit the mesh, the shape or each other, or one is Partial; or if
            ``tensor`` is a DTensor under other placements.

    Examples:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> distribute_tensor(torch.ones(4, 2), mesh, [RaggedShard((0,), (1,))]).sum().item()
        8.0
    """
    spec = make_spec(device_mesh, placements, tensor.shape, tensor.dtype)
    axis, placement = ragged_axis(spec.placements)
    if any(p.is_partial() for p in spec.placements):
        raise PlacementError(
            "A tensor cannot be made Partial.", expected="Replicate or Shard", got=spec.placements
        )
    if isinstance(tensor, DTensor):
        # As in torch, the tensor itself if it is distributed like this.
        if isinstance(tensor, RaggedDTensor) and tensor._spec == spec:
            return tensor
        raise PlacementError(
            "The tensor is distributed already.",
            expected="a plain tensor with all values",
            got=f"a {type(tensor).__name__} placed {tuple(map(str, tensor.placements))}",
            where=f"distribute_tensor to {spec.placements}",
            todo="vescale_fsdp.dtensor.redistribute(tensor, placements)",
        )
    full = tensor.detach()  # the result is a leaf
    groups = [] if src_data_rank is None or is_traced(full) else device_mesh.get_all_groups()
    if src_data_rank is not None:
        # Broadcast along every axis except the ragged axis, one after the other. A rank takes part only if its group
        # ranks on the later axes and on the ragged axis are those of the source: then the process group has a rank with
        # the values. `exchange` then sends the pieces along the ragged axis. The tensor is cloned, because broadcasts
        # write to it, and need it contiguous.
        meet(groups, move_text(f"distribute_tensor from rank {src_data_rank}", spec, spec))
        full = full.clone(memory_format=torch.contiguous_format)
        group_ranks = group_ranks_in(device_mesh)
        others = [other for other in range(device_mesh.ndim) if other != axis]
        for index, other in enumerate(others):
            if all(group_ranks[later] == src_data_rank for later in (*others[index + 1 :], axis)):
                with explained(groups):
                    wait_for(broadcast_in_place(full, device_mesh.get_group(other), src_data_rank))
    inner = inner_box(spec)
    # A box that is cut in a later dim is strided, and pieces are flat.
    part = full[inner.slices()].contiguous()
    if src_data_rank is None:
        start, stop = placement.piece(inner.sizes, device_mesh.get_local_rank(axis))
        # Cloned, because a view would keep the full tensor in memory.
        local = part.view(-1)[start:stop].clone().view(shape_of_local(spec))
    else:
        # The source owns everything. All other ranks of the ragged axis own nothing, and so pass no elements.
        owner = tuple(int(rank == src_data_rank) for rank in range(placement.num_shards))
        steps = exchange(
            part.view(-1)[: part.numel() * owner[device_mesh.get_local_rank(axis)]],
            RaggedShard((), owner),
            RaggedShard.of_runs(placement.dims, placement.units),
            inner.sizes,
            device_mesh.get_group(axis),
        )
        with explained(groups):
            local = Redistribution(steps).wait()
    return RaggedDTensor.wrap(local, spec, requires_grad=tensor.requires_grad)


@overload
def redistribute(tensor: DTensor, placements: Sequence[Placement]) -> DTensor: ...


@overload
def redistribute(
    tensor: DTensor, placements: Sequence[Placement], *, async_op: Literal[True]
) -> PendingTensor: ...


def redistribute(
    tensor: DTensor, placements: Sequence[Placement], *, async_op: bool = False
) -> DTensor | PendingTensor:
    """Return a DTensor under other placements of its mesh. Differentiable.

    Both the tensor and the placements may be ragged or stock. torch's ``DTensor.redistribute`` supports ragged
    placements under `vescale_fsdp.integrations.as_fsdp2` only.

    If the tensor becomes whole on every rank, and ``to_local()`` leads to a loss that differs between ranks, its
    gradient is the mean over the ranks, as for `RaggedDTensor.full_tensor`.

    Args:
        tensor: a DTensor. With ``async_op``, it must not be written before the wait.
        placements: one per mesh axis, at most one of them a RaggedShard.
        async_op: return a `PendingTensor` at once. The result is not differentiable, and all ranks must start and wait
            in the same order. If several mesh axes change, only the first collective overlaps with computation.

    Raises:
        PlacementError: if the placements do not fit the mesh, or have a Partial where the tensor has none.
        LifecycleError: if the call communicates, and not all ranks make it.

    Examples:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor import Replicate
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> ragged = distribute_tensor(torch.ones(4, 2), mesh, [RaggedShard((0,), (1,))])
        >>> redistribute(ragged, [Replicate()]).to_local().shape
        torch.Size([4, 2])
        >>> pending = redistribute(ragged, [Replicate()], async_op=True)  # ... other work meanwhile ...
        >>> pending.wait().to_local().shape
        torch.Size([4, 2])
    """
    return PendingTensor(tensor, placements) if async_op else _moved(tensor, placements, "redistribute")


def _moved(
    tensor: DTensor,
    placements: Sequence[Placement],
    call: str,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """Return a DTensor under other placements, for a function of the user that is named ``call``.

    The other arguments are those of `RaggedDTensor.redistribute`.
    """
    target = make_spec(tensor.device_mesh, placements, tensor.shape, forward_dtype or tensor.dtype)
    if not isinstance(tensor, RaggedDTensor) and not is_ragged_spec(target.placements):
        return tensor.redistribute(placements=placements)
    return _Redistribute.apply(tensor, target, backward_dtype or tensor.dtype, call)  # type: ignore[no-any-return]


class PendingTensor:
    """A redistribution in progress, started by `redistribute` with ``async_op``; `wait` returns the tensor.

    Examples:
        >>> import torch
        >>> from torch.distributed.tensor import Replicate
        >>> from vescale_fsdp import fully_shard
        >>> model = fully_shard(torch.nn.Linear(2, 4))
        >>> pending = redistribute(model.weight, [Replicate()], async_op=True)
        >>> pending.wait().to_local().shape
        torch.Size([4, 2])
    """

    def __init__(self, tensor: DTensor, placements: Sequence[Placement]) -> None:
        self._source = tensor
        self._target = make_spec(tensor.device_mesh, placements, tensor.shape, tensor.dtype)
        self._groups = [] if is_traced(local_of(tensor)) else groups_of_move(tensor._spec, self._target)
        meet(self._groups, move_text("redistribute", tensor._spec, self._target))
        self._move = start_redistribution(local_of(tensor), tensor._spec, self._target)

    def wait(self) -> DTensor:
        """Wait for the redistribution and return the tensor under its new placements."""
        with explained(self._groups):
            return _moved_to(self._move.wait(), self._target, self._source)


# -- autograd -----------------------------------------------------------------------------------------


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: DTensorSpec) -> RaggedDTensor:
        ctx.spec = spec
        # A new tensor on the same memory, as in torch's from_local.
        return RaggedDTensor.wrap(local.view_as(local), spec, requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return redistribute_local(local_of(grad), grad._spec, ctx.spec, "backward of from_local"), None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedDTensor, grad_spec: DTensorSpec) -> torch.Tensor:
        ctx.spec = grad_spec
        # A new tensor on the same memory, as in torch's to_local.
        return piece_in(tensor).view_as(piece_in(tensor))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[DTensor, None]:  # type: ignore[override]
        # autograd may pass a strided gradient, but pieces are contiguous.
        return wrap_like(grad.contiguous(), spec_with(ctx.spec, dtype=grad.dtype)), None


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: DTensor, target: DTensorSpec, backward_dtype: torch.dtype, call: str
    ) -> DTensor:
        ctx.spec, ctx.backward_dtype, ctx.call = tensor._spec, backward_dtype, call
        local = local_of(tensor).to(target.tensor_meta.dtype)  # type: ignore[union-attr]
        # The classes of graphs are torch's, whose `to_local` does not take the mean.
        ctx.takes_mean = is_traced(local) and all(p.is_replicate() for p in target.placements)
        source = spec_with(tensor._spec, dtype=local.dtype)
        if source.placements == target.placements:
            # A view, because autograd treats an input that is returned unchanged specially.
            return _moved_to(local.view_as(local), target, tensor)
        return _moved_to(redistribute_local(local, source, target, call), target, tensor)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None, None]:  # type: ignore[override]
        local = local_of(grad).to(ctx.backward_dtype)
        source = spec_with(grad._spec, dtype=local.dtype)
        if ctx.takes_mean and all(p.is_replicate() for p in source.placements):
            source = spec_with(source, placements=_pending_mean(ctx.spec))
        # Each rank has one summand of a Partial tensor. The gradient of every summand equals the gradient of the sum,
        # so the gradient is Replicate.
        placements = [Replicate() if p.is_partial() else p for p in ctx.spec.placements]
        target = spec_with(ctx.spec, placements=placements, dtype=local.dtype)
        # A rank whose loss does not read the tensor has no such backward, so ranks meet before they reduce.
        local = redistribute_local(local, source, target, f"backward of {ctx.call}")
        local = local.to(ctx.spec.tensor_meta.dtype)
        return wrap_like(local, spec_with(target, dtype=local.dtype)), None, None, None


def _pending_mean(spec: DTensorSpec) -> list[Placement]:
    """Return the placements of the gradient of a ragged tensor that every rank has read whole.

    torch's default takes the gradients for equal on all ranks. But code that reads a whole parameter mostly computes
    with the rank's own data. The mean of equal gradients is the gradient itself. Ranks of an axis with a Shard, as of
    tensor parallelism, have the same data.
    """
    return [Replicate() if type(placement) is Shard else Partial("avg") for placement in spec.placements]


# -- what is refused ----------------------------------------------------------------------------------

# Names of torch's data parallelisms -> how to make them leave parameters out.
_DDP = "torch.nn.parallel.DistributedDataParallel"
_FSDP1 = "torch.distributed.fsdp.FullyShardedDataParallel (FSDP1)"
_FSDP2 = "torch.distributed.fsdp.fully_shard (FSDP2)"
_LEFT_OUT = {
    _DDP: "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, their names)",
    _FSDP1: "FullyShardedDataParallel(model, ignored_states=the modules that vescale_fsdp has sharded)",
    _FSDP2: "fully_shard(model, ignored_params=the parameters that vescale_fsdp has sharded)",
}


def _refuse_wrapper(wrapper: str, got: str) -> MisuseError:
    """Return the error for a data parallelism of torch that takes a ragged parameter. The caller raises it."""
    return MisuseError(
        f"{wrapper} cannot take parameters that vescale_fsdp has sharded.",
        expected="vescale_fsdp.fully_shard alone: it reduces gradients over all ranks of its mesh",
        got=got,
        where=wrapper,
        todo="remove the wrapper, import fully_shard from vescale_fsdp wherever the model is sharded, and build "
        "the model again; for replicas, add a mesh axis: init_device_mesh(device, (replicas, shards)). To wrap the "
        f"other parameters of the model only: {_LEFT_OUT[wrapper]}",
    )


def _check_wrapper(wrapper: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Raise if DistributedDataParallel has taken ragged parameters of the module that it registers as its own.

    It would broadcast them, or wait for gradients that this package reduces.

    Raises:
        MisuseError: names the parameters.
    """
    if isinstance(wrapper, DistributedDataParallel) and module is not None:
        taken = [name for name, param in taken_by_ddp(wrapper, module) if isinstance(param, RaggedDTensor)]
        if taken:
            raise _refuse_wrapper(_DDP, f"{len(taken)} parameters: {some(taken)}")
    elif isinstance(wrapper, FullyShardedDataParallel) and module is not None:
        # The constructor has flattened its parameters, and the ragged parameters in the module were left out.
        for param in module.parameters():
            if isinstance(param, RaggedDTensor):
                param._is_in_fsdp1_constructor = False


register_module_module_registration_hook(_check_wrapper)


def check_grad_dtype(wanted: torch.dtype | None, dtype: torch.dtype, where: str) -> None:
    """Check that the ``grad_dtype`` that a user assigns is the tensor's dtype.

    Raises:
        UnsupportedOpError: for another ``grad_dtype``.
    """
    if wanted is not dtype:
        raise UnsupportedOpError(
            "Gradients of another dtype than the parameter's are not supported.",
            expected=f"grad_dtype {dtype}",
            got=f"grad_dtype {wanted}",
            where=where,
            todo="do not set grad_dtype; MixedPrecisionPolicy(reduce_dtype=...) sets the dtype of reductions",
        )


_REPLACEMENTS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.Adafactor: "use vescale_fsdp.optim.AdamW8bit, whose state is small too, or "
    f"torch.optim.AdamW; or {OWNER_OPTIMIZER}",
    torch.optim.Muon: "use vescale_fsdp.optim.Muon, which gathers each matrix on one rank; or "
    f"{OWNER_OPTIMIZER}",
    torch.optim.SparseAdam: "use torch.optim.Adam: gradients of sharded parameters are dense",
}


def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise UnsupportedOpError for an optimizer of torch or torchao that does not support its ragged parameters.

    Without this hook an operator would raise in the middle of a step, after momenta and step counts have changed.
    """
    todo = next((text for kind, text in _REPLACEMENTS.items() if isinstance(optimizer, kind)), None)
    if any(base.__module__.startswith("torchao.optim") for base in type(optimizer).__mro__):
        # Its state is torch's own DTensors with the parameter's placements, which support no operator then.
        todo = f"use vescale_fsdp.optim.AdamW8bit; or {OWNER_OPTIMIZER}"
    if todo is None:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ragged = [param for param in params if isinstance(param, RaggedDTensor) and param.ndim > 1]
    if ragged:
        raise UnsupportedOpError(
            f"{type(optimizer).__name__} cannot step on ragged parameters.",
            expected="parameters that are whole on every rank, or an elementwise optimizer",
            got=f"{len(ragged)} of {len(params)} parameters are ragged, the first of shape {tuple(ragged[0].shape)}",
            todo=todo,
        )


register_optimizer_step_pre_hook(_check_optimizer)
