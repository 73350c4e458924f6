"""The private names of torch that this package uses, each with the torch versions that have it and the reason.

A tag such as "torch 2.11-2.13" gives the first supported version that has the name, and the last version for which the
comment was checked. Later versions may have the name too: the tests also pass on 2.15 (docs/compatibility.md).

Only this file and `torch_modes` import or reach names of torch with a leading underscore, as
tests/house/test_layering.py checks. Three other places depend on private names, and may have to change for a new torch:

    dtensor/                                          private attributes of DTensor, such as ``_spec``
    integrations/stand_ins.py                         paths of FSDP2's private modules, as strings
    conversion/formats/torch_save/pickle_reader.py    paths of private classes and functions in pickles, as strings
"""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta, timezone
from itertools import count
from types import FrameType, ModuleType
from typing import Any, NoReturn, Protocol, cast

import torch
import torch.distributed as dist
import torch.distributed.fsdp

# torch 2.11-2.15: says which functions torch.compile leaves alone.
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

# torch 2.11-2.13: print options for a block of code; the public function sets them for the whole process.
from torch._tensor_str import printoptions

# torch 2.11-2.13: the table of groups, the default group's store, and the timeout of a group have no public names. Only
# `_new_process_group_helper` can create a group over a given store, with processes outside the default group.
from torch.distributed import distributed_c10d

# torch 2.11-2.13: torch's records of which parallelism manages a module; FSDP2 skips modules that replicate manages.
from torch.distributed._composable.contract import REGISTRY_KEY as COMPOSABLE_KEY
from torch.distributed._composable.contract import STATE_KEY as COMPOSABLE_STATES
from torch.distributed._composable.contract import RegistryItem

# torch 2.11-2.15: the function that shards full tensors in torch's set_*_state_dict. It supports only torch's own
# placements, so `refuse_set_state_dict` must recognize its calls.
from torch.distributed._state_dict_utils import _distribute_tensors

# torch 2.11-2.13: DCP's names for the leaves of a nested state; its planners accept no other names.
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

# torch 2.11-2.15: maps names of parameters to their names in state dicts, without the parts that torch's wrappers add.
from torch.distributed.checkpoint.state_dict import _get_fqns

# torch 2.11-2.15: the function that runs each ``dcp.save``; `storage_writer_in_use` recognizes it on the stack.
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    _coalescing_manager,
    _get_default_store,
    _get_default_timeout,
    _new_process_group_helper,
    _resolve_process_group,
    _set_pg_timeout,
    _world,
)

# torch 2.11-2.13: classes with which trainers give one parameter its own mesh; torch exports them nowhere else.
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_state
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, _redistribute, debug

# torch 2.11-2.13: mesh, placements and metadata of a DTensor; no public constructor accepts a user's placement class.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# torch 2.11-2.13: the Partial placement of a vector norm, to combine norms of ragged DTensors and torch's DTensors.
from torch.distributed.tensor._ops._math_ops import _NormPartial as NormPartial

# torch 2.11-2.13: the placement of a dim that both FSDP and tensor parallelism cut; checkpoints treat it unlike Shard.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# torch 2.11-2.15: a weak reference to a tensor's memory; weak references to tensors end with views.
from torch.multiprocessing.reductions import StorageWeakRef

# torch 2.11-2.13: Muon's iteration, learning-rate rule and constants; imported so that they stay equal to torch's.
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C
from torch.optim._muon import DEFAULT_NS_STEPS as MUON_STEPS
from torch.optim._muon import EPS as MUON_EPS
from torch.optim._muon import _adjust_lr as muon_adjust_lr
from torch.optim._muon import _zeropower_via_newtonschulz as zeropower_via_newtonschulz

# torch 2.11-2.13: lists of the tensor types for which optimizers, and foreach utilities, choose their fast path.
from torch.optim.optimizer import _foreach_supported_types as _optim_types

# torch 2.11-2.13: functions on nested containers; the public torch.utils.pytree is newer than torch 2.11.
from torch.utils import _pytree as pytree
from torch.utils._foreach_utils import _foreach_supported_types as _util_types

# torch 2.11-2.13: recognizes tensor subclasses whose values are in inner tensors, and which have no storage.
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

from vescale_fsdp.errors import UnsupportedOpError

# torch 2.11-2.13: torch stores FSDP2's state of a module under this key, the function without its decorator.
_torch_fully_shard = inspect.unwrap(torch.distributed.fsdp.fully_shard)

# DTensor's own slot of the local tensor; RaggedDTensor hides it by a slower property of the same name.
local_slot: Any = vars(DTensor)["_local_tensor"]
piece_in = local_slot.__get__  # called as piece_in(dtensor), returns the local tensor
# Optimizers whose step of a parameter depends only on that parameter's gradient and state. The state has the shape of
# the parameter, or is a single number.
ELEMENTWISE_OPTIMIZERS = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
# Optimizers whose first step creates their state, in a method of its own.
_LAZY_OPTIMIZERS = (*ELEMENTWISE_OPTIMIZERS, torch.optim.Adafactor, torch.optim.Muon)
MUON_COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)


# Public since torch 2.15, where the private one warns.
_set_timeout: Any = vars(dist).get("set_timeout", _set_pg_timeout)


def newer_class(home: ModuleType, name: str, instead: str) -> Any:
    """Return a class that only newer torch versions have; in older versions, a class whose constructor raises.

    Args:
        home: torch's module that defines the class in newer versions.
        name: name of the class.
        instead: what the error advises users of older versions to do.
    """

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise UnsupportedOpError(
            f"This torch does not have {name}.",
            expected="torch 2.13 or newer",
            got=torch.__version__,
            todo=instead,
        )

    return vars(home).get(name) or type(name, (), {"__init__": refuse, "__module__": __name__})


ShardPlacementResult: Any = newer_class(
    _fsdp_common, "ShardPlacementResult", "shard parameters with a mesh of their own in a module of their own"
)

DataParallelMeshDims: Any = newer_class(
    torch.distributed.fsdp,
    "DataParallelMeshDims",
    'give the data-parallel axes as mesh=full_mesh["replicate", "shard"]',
)

# FSDP2 of torch 2.15 reduces gradients in the dtype in which parameters are stored, unless a policy sets
# ``reduce_dtype``; older versions use the compute dtype. The weight-gradient half of a pipeline's backward
# accumulates in that dtype too.
# Compared as numbers, because TorchVersion orders a pre-release of 2.15 before 2.15.
REDUCES_AS_STORED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
SUMS_HALVES_AS_REDUCED = REDUCES_AS_STORED

# torch 2.11-2.15: whether FSDP2's state of a unit has one parameter group, which torch's pipelines read, instead of a
# list of groups. In versions with a list, the name of the one group is a property for older callers.
STATES_HAVE_ONE_GROUP = "_fsdp_param_group" not in vars(_fsdp_state.FSDPState)

# torch 2.11-2.15: foreach operators (one call for many tensors) have private names only.
foreach_add_, foreach_mul_ = torch._foreach_add_, torch._foreach_mul_
foreach_lerp, foreach_lerp_ = torch._foreach_lerp, torch._foreach_lerp_
foreach_copy_, foreach_zero_ = torch._foreach_copy_, torch._foreach_zero_
foreach_norm_of = torch._foreach_norm


# torch 2.13 renamed these two functions and warns about the old names; torch 2.11 and 2.12 have only the old names.
all_gather_single = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = vars(dist).get("reduce_scatter_single", dist.reduce_scatter_tensor)


def register_foreach_type(cls: type[torch.Tensor]) -> None:
    """Let optimizers use their foreach and fused implementations by default for parameters of type ``cls``."""
    # torch compares exact types, so a subclass of Tensor must be in both lists.
    for types in (_optim_types, _util_types):
        if cls not in types:
            types.append(cls)  # type: ignore[arg-type]


class _Dispatching(Protocol):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any, /) -> Any: ...


def dispatch_to_subclass(cls: _Dispatching) -> None:
    """Send operators on a subclass of DTensor to the subclass's own ``__torch_dispatch__``.

    torch 2.11 handles subclasses of DTensor in DTensor's C++ path and never calls the subclass (pytorch issue 177716,
    fixed in 2.12). But a rule that is registered for an operator and a class takes precedence, so for every operator a
    rule is registered that calls the subclass.
    """
    if torch.__version__ >= "2.12":  # a TorchVersion, which compares numbers, not text
        return
    _dispatching.append(cls)
    libraries: dict[str, torch.library.Library] = {}
    for name in operator_names():
        namespace = name.partition("::")[0]
        if namespace not in libraries:
            libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        register = torch.library.register_torch_dispatch(name, cls, lib=libraries[namespace])
        register(_call_subclass)
    _dispatch_rules.extend(libraries.values())


_dispatch_rules: list[torch.library.Library] = []  # kept alive: torch removes the rules of a deleted library
_dispatching: list[_Dispatching] = []  # the classes that have rules


def _call_subclass(cls: _Dispatching, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    # After a rule that returns NotImplemented, torch 2.11 continues in DTensor's C++ path and not with the next class.
    # So the next classes are called here, in torch's order.
    for each in (cls, *(other for other in types if other is not cls and other in _dispatching)):
        result = each.__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            break
    return result


def taken_by_ddp(
    ddp: torch.nn.parallel.DistributedDataParallel, module: torch.nn.Module
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield name and parameter of what a DistributedDataParallel takes of its module (torch 2.11-2.15)."""
    delayed = set(map(id, ddp._delay_all_reduce_params))
    for name, param in module.named_parameters():
        if name not in ddp.parameters_to_ignore or id(param) in delayed:
            yield name, param


def never_compile(function: Any) -> None:
    """Let torch.compile run a function, and what it calls, as they are (torch 2.11-2.15).

    torch.compile compiles every function that runs below a compiled one, behind a break of the graph. It leaves torch's
    own code out, but not this package's. ``torch.compiler.disable`` would take two calls each time.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def autograd_engine_callback(callback: Callable[[], None]) -> None:
    """Call ``callback()`` when the running backward pass ends (torch 2.11-2.13; the public API has no such hook)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local tensor, without the autograd node of ``to_local``; a plain tensor is returned itself."""
    return local_slot.__get__(tensor) if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def default_store() -> dist.Store:
    """Return the store of the default group (torch 2.11-2.15)."""
    return _get_default_store()


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of a group; None if its backend has no timeout (torch 2.11-2.13)."""
    # If there are several backends, prefer the CPU's: callers mostly create gloo groups with this timeout.
    for device in sorted(group._device_types, key=lambda device: device.type != "cpu"):
        try:
            options = group._get_backend(device).options
        except RuntimeError:  # raised for backends without options
            continue
        if options is not None:
            return options._timeout
    return None


@contextmanager
def coalesced(group: dist.ProcessGroup) -> Iterator[None]:
    """Return a context whose collectives, all of one kind, are launched together at its end (torch 2.11-2.15)."""
    try:
        with _coalescing_manager(group):
            yield
    except BaseException:  # Ctrl-C too
        # torch keeps its list after an exception, and would add later collectives to it instead of running them.
        _world.pg_coalesce_state.pop(group, None)
        raise


def inherit_timeout(group: dist.ProcessGroup) -> None:
    """Give a group that has torch's default timeout the timeout of `init_process_group`, if that was given.

    A mesh of several axes creates its groups with the default, whatever the user gave `init_process_group`: a rank
    would wait half an hour for one that was lost (torch 2.11-2.15).
    """
    defaults = (default_pg_timeout, default_pg_nccl_timeout)
    given = timeout_of(dist.group.WORLD) if dist.group.WORLD is not None else None
    if given is not None and given not in defaults and timeout_of(group) in defaults:
        _set_timeout(given, group)


def named_group(
    rank: int,
    numbers: dict[int, int],
    name: str,
    timeout: timedelta | None,
    store: dist.Store | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """Create a group with a given name, by itself: no communicator of another group is split (torch 2.11-2.15).

    Args:
        rank: this process's rank in the new group.
        numbers: rank in the default group -> rank in the new group. Processes outside the default group are listed
            under numbers that the default group does not use.
        name: the same on all ranks, and not used before in this process.
        timeout: timeout of the group's collectives; None: the backend's default.
        store: rendezvous of the ranks; default: the default group's store, if that group contains all of them.
        backend: as in `torch.distributed.init_process_group`; None: as the default group was created.
    """
    world: Any = dist.group.WORLD
    assert world is not None
    # torch checks that this process's rank in the default group is in the list of members. A group with its own store
    # may have members outside the default group, so its list is left empty, which skips the check.
    members = list(numbers) if store is None else []
    groups = distributed_c10d._world  # read here: torch's tests, whose ranks are threads, replace it
    where = groups.pg_map[world][1] if store is None else store
    make: Any = _new_process_group_helper  # its types differ between versions of torch
    # Not `get_backend_config`: "gloo" would become a text of several backends, and `get_backend` would return that.
    kind = dist.Backend(groups.pg_map[world][0] if backend is None else backend)
    # With a bound device, torch would split the communicator of the default group, and wait for all of its ranks.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        group, _ = make(
            len(numbers),
            rank,
            members,
            kind,
            where,
            group_name=name,
            timeout=_get_default_timeout(kind) if timeout is None else timeout,
        )
    finally:
        world.bound_device_id = bound
    groups.pg_group_ranks[group] = numbers
    return group  # type: ignore[no-any-return]


def group_of(name: str) -> dist.ProcessGroup:
    """Return the group with a name, which compiled graphs contain in place of the group (torch 2.11-2.15)."""
    return _resolve_process_group(cast(Any, name))  # torch's type of names is private, too


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store of a group (torch 2.11-2.15)."""
    return _world.pg_map[group][1]


def forget_meshes() -> None:
    """Clear DTensor's caches (torch 2.11-2.15): entries of a mesh would be reused for an equal mesh with new groups."""
    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


def set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Replace the local tensor of a DTensor by a tensor of the same shape (torch 2.11-2.13)."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def spec_of(tensor: torch.Tensor) -> DTensorSpec:
    """Return the mesh, placements and global metadata of a DTensor (torch 2.11-2.13)."""
    return tensor._spec  # type: ignore[attr-defined, no-any-return]


def grad_dtype_of(param: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of a parameter's gradient: ``grad_dtype`` (torch 2.13-2.15), else the parameter's own dtype."""
    own = vars(torch._C.TensorBase).get("grad_dtype")  # None in torch 2.11 and 2.12
    return param.dtype if own is None else own.__get__(param)  # type: ignore[no-any-return]


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that is the same for all live tensors of one storage (torch 2.11-2.13)."""
    return tensor.untyped_storage()._cdata  # not the address, which is 0 for every storage without memory


def storage_ids(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return `storage_id` of thousands of tensors (torch 2.11-2.13), at the cost of one call."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def memory_mark(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a value that is equal as long as a tensor has the same memory and nothing has written to it.

    Does not keep the memory alive. Writes that autograd does not see (`tensor.data`) are not detected, and none of
    those to inference tensors.
    """
    version = None if tensor.is_inference() else tensor._version
    # A weak reference keeps the storage's number, not its memory: no other storage gets the number.
    return StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor.stride(), version


def spmd_mesh_of(info: FSDPMeshInfo) -> DeviceMesh | None:
    """Return the full mesh of which a parameter's mesh is a slice; None if the info has no full mesh."""
    # vars: in torch 2.11 the class has no such field.
    mesh: DeviceMesh | None = vars(info).get("spmd_mesh")
    return mesh


def concatenate_meshes(*slices: DeviceMesh) -> DeviceMesh:
    """Join slices of one mesh to a mesh of all their axes, as FSDP2 does (torch 2.11-2.13)."""
    return DeviceMesh._concatenate(list(slices))


def flatten_mesh(
    mesh: DeviceMesh,
    name: str,
    make_group: Callable[[list[int]], dist.ProcessGroup],
    *,
    last_first: bool = False,
) -> DeviceMesh:
    """Flatten all axes of a slice of a named mesh to a 1-D mesh (torch 2.11-2.15).

    Args:
        mesh: the slice.
        last_first: whether ranks are listed with the coordinate of the first axis changing fastest, not of the last.
        name: name of the axis of the new mesh.
        make_group: returns the process group of the given ranks; not called if the mesh was flattened before. torch
            would name the group by the number of groups of this process, or split the default group.
    """
    layout: Any = mesh._layout
    if "collapse" in vars(type(layout)):
        axes = [layout[axis] for axis in range(mesh.ndim)]
        flat = type(layout)([type(layout)(axes[::-1] if last_first else axes).collapse()])
    else:  # torch 2.11 and 2.12
        flat = type(layout)(layout.shape[::-1], layout.stride[::-1]) if last_first else layout
        flat = flat.coalesce()
        flat = flat.nest() if len(flat) > 1 else flat
    return _add_flattened(mesh, flat, name, make_group)


def mesh_of_one(
    mesh: DeviceMesh, name: str, make_group: Callable[[list[int]], dist.ProcessGroup]
) -> DeviceMesh:
    """Return a 1-D mesh of this rank alone, which can be concatenated with slices of ``mesh`` (torch 2.11-2.15).

    Args:
        mesh: a named mesh, or a slice of one.
        name: name of the axis of the new mesh.
        make_group: returns the process group of the given rank; not called if the mesh was made before.
    """
    kind: Any = type(mesh._layout)
    sizes = vars(kind).get("from_sizes_strides")
    one = kind((1,), (1,)) if sizes is None else kind.from_sizes_strides((1,))  # torch 2.11 and 2.12; later
    return _add_flattened(mesh, one, name, make_group)


def _add_flattened(
    mesh: DeviceMesh, layout: Any, name: str, make_group: Callable[[list[int]], dist.ProcessGroup]
) -> DeviceMesh:
    """Return the flattened mesh of this name, after adding it to those of the root mesh if it is new."""
    root = mesh._get_root_mesh()
    if name not in root._flatten_mapping:
        new = DeviceMesh(
            root.device_type,
            mesh_dim_names=(name,),
            _init_backend=False,
            _layout=layout,
            _rank_map=root._rank_map,
            _root_mesh=root,
        )
        group = make_group(new.mesh.tolist())
        new._dim_group_names = [group.group_name]
        root._pg_registry[group.group_name] = group  # read by torch.compile
        root._flatten_mapping[name] = new
    return root._flatten_mapping[name]


def mesh_of_world(device_type: str) -> DeviceMesh:
    """Return a 1-D mesh over the default group, on this process's device of a type (torch 2.11-2.15).

    ``init_device_mesh`` makes a group of all ranks in place of a default group of gloo, where torch supports CUDA.
    """
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, device_type)
    mesh._setup_world_group_and_device()  # selects the device by LOCAL_RANK, as init_device_mesh does
    return mesh


def sequence_number_of(tensor: torch.Tensor) -> int:
    """Return the number of the node that computed a tensor; later nodes have larger numbers (torch 2.11-2.15)."""
    assert tensor.grad_fn is not None
    return tensor.grad_fn._sequence_nr()


def node_behind(tensor: torch.Tensor, *, after: int) -> torch.autograd.graph.Node | None:
    """Return the autograd node of a view's base, or of a tensor itself; None for a leaf (torch 2.11-2.15).

    In-place operators replace the node of a view, but not the one that computed the base.

    Args:
        tensor: a tensor that requires a gradient.
        after: the node of the base counts only if its number is larger, so that it belongs to the same module.
    """
    base = tensor._base.grad_fn if tensor._base is not None else None
    return tensor.grad_fn if base is None or base._sequence_nr() <= after else base


def wrapper_like(cls: type[torch.Tensor], like: torch.Tensor) -> Any:
    """Return a tensor of a subclass without memory, with the shape, dtype and device of ``like`` (torch 2.11-2.15)."""
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls, like.shape, dtype=like.dtype, device=like.device
    )


def is_replicated(module: torch.nn.Module) -> bool:
    """Return whether ``torch.distributed._composable.replicate`` manages a module (torch 2.11-2.13)."""
    return "replicate" in _parallelisms_of(module)


def note_sharded(module: torch.nn.Module, state: object) -> None:
    """Record for torch that fully_shard manages a module (torch 2.11-2.13).

    ``replicate`` then skips the parameters of the module and refuses to wrap it. torch's own
    ``fully_shard.state(module)``, which torch's pipelines call, then returns ``state``.
    """
    # vars, not getattr: wrappers (of checkpointing, torch.compile, peft) forward getattr to the module inside.
    attributes = vars(module)
    attributes.setdefault(COMPOSABLE_KEY, {}).setdefault("fully_shard", RegistryItem())
    attributes.setdefault(COMPOSABLE_STATES, {})[_torch_fully_shard] = state


def apply_to_tensors(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace all parameters and buffers by ``change(tensor)``, as `Module.to` does (torch 2.11-2.15)."""
    module._apply(change)


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> bool:
    """Create the state that torch's optimizers have before their first step, for parameters with gradients.

    Returns False for other classes, derived ones included (torch 2.11-2.13).
    """
    if type(optimizer) not in _LAZY_OPTIMIZERS:
        return False
    # A group, and one list for each kind of tensor that a step uses.
    num_lists = len(inspect.signature(optimizer._init_group).parameters) - 1  # type: ignore[attr-defined]
    with torch.no_grad():
        for group in optimizer.param_groups:
            optimizer._init_group(group, *([] for _ in range(num_lists)))  # type: ignore[attr-defined]
    return True


def fqn_of(model: torch.nn.Module, name: str) -> str:
    """Return the name that DCP's state dicts use for the entry ``name`` of ``model.state_dict()`` (torch 2.11-2.15)."""
    return next(iter(_get_fqns(model, name)))  # a set of one name: only FSDP1's flat parameters have several


def frame_of(function: Callable[..., Any], most: int | None = None) -> FrameType | None:
    """Return the nearest frame that runs a function of torch, above the function that calls this one; None if none.

    The only look at callers in this package, besides `errors.callers_level`. It serves two checks that nothing else
    can make, `storage_writer_in_use` and `refuse_set_state_dict`. Both raise or do nothing.

    Args:
        most: number of frames to look at; None: all.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in count() if most is None else range(most):
        if frame is None or frame.f_code is function.__code__:
            return frame
        frame = frame.f_back
    return None


def storage_writer_in_use() -> object | None:
    """Return the storage writer of the ``dcp.save`` that this thread runs; None if it runs none (torch 2.11-2.15).

    DCP passes only a name and a tensor to the hook that plans a tensor, and the plan has torch's classes only. So
    before a file is written, nothing else leads to the writer.
    """
    frame = frame_of(_save_state_dict)
    return None if frame is None else frame.f_locals["storage_writer"]


def refuse_set_state_dict(what: str) -> None:
    """Raise if the caller's caller shards full tensors for torch's ``set_*_state_dict`` (torch 2.11-2.15).

    torch would cut the tensors at other offsets than the ragged pieces, so some ranks would raise, and the rest hang.

    Raises:
        UnsupportedOpError: names the functions to call instead.
    """
    if frame_of(_distribute_tensors, most=2) is not None:
        raise UnsupportedOpError(
            "torch's set_*_state_dict cannot shard full tensors for ragged parameters.",
            expected="the function of the same name in vescale_fsdp.checkpoint.state_dict",
            got="set_model_state_dict, set_optimizer_state_dict or set_state_dict of torch.distributed.checkpoint",
            where=what,
            todo="import it from vescale_fsdp.checkpoint.state_dict; the arguments are the same, including "
            "full_state_dict and broadcast_from_rank0",
        )


def is_noted_sharded(module: torch.nn.Module) -> bool:
    """Return whether this package's or torch's ``fully_shard`` was called on a module (torch 2.11-2.13)."""
    return "fully_shard" in _parallelisms_of(module)


def _parallelisms_of(module: torch.nn.Module) -> Mapping[str, RegistryItem]:
    # vars, not getattr: wrappers (of checkpointing, torch.compile, peft) forward getattr to the module inside.
    return cast(Mapping[str, RegistryItem], vars(module).get(COMPOSABLE_KEY, {}))


def loads_what_it_is_given(module: torch.nn.Module, *, num_own_hooks: int) -> bool:
    """Return whether a module's own ``load_state_dict`` copies tensors unchanged (torch 2.11-2.13).

    Args:
        num_own_hooks: number of the module's load pre-hooks that are known to leave tensors unchanged.
    """
    loader = type(module)._load_from_state_dict
    hooks = len(module._load_state_dict_pre_hooks)
    return hooks <= num_own_hooks and loader is torch.nn.Module._load_from_state_dict


class NotForTorchSave(torch.storage.TypedStorage):
    """A part of a pickle that ``torch.save`` refuses; every other pickler stores it, and restores it as None.

    torch.save stores storages apart from the pickle, so it asks each for its memory. Here this raises the error that
    ``refusal`` returns (torch 2.11-2.15).
    """

    def __new__(cls, refusal: Callable[[], Exception]) -> NotForTorchSave:
        return object.__new__(cls)

    def __init__(self, refusal: Callable[[], Exception]) -> None:
        self._refusal = refusal

    @property  # type: ignore[override]
    def _untyped_storage(self) -> NoReturn:  # type: ignore[override]
        raise self._refusal()

    def __reduce_ex__(self, protocol: Any) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def operator_names() -> list[str]:
    """Return the names of all operators of this torch (2.11-2.13), such as ``aten::add.Tensor``."""
    return torch._C._dispatch_get_all_op_names()  # type: ignore[no-any-return]


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to (torch 2.11-2.15)."""
    arguments = func._schema.arguments
    named = {
        **dict(zip((each.name for each in arguments), args, strict=False)),
        **kwargs,
    }  # some have defaults
    written = (each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write)
    return [named[name] for name in written if name in named]


def returns_nothing(func: Any) -> bool:
    """Return whether an operator only writes to its arguments (torch 2.11-2.15)."""
    return not func._schema.returns


def version_of(tensor: torch.Tensor) -> int:
    """Return a tensor's version counter (torch 2.11-2.13)."""
    return tensor._version


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and tensor of each buffer that ``state_dict`` includes (torch 2.11-2.15)."""
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the version counters of thousands of tensors (torch 2.11-2.13), at the cost of one call."""
    return [tensor._version for tensor in tensors]


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set the version counters of tensors (torch 2.11-2.15), whose memory has the same values as at these versions."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def is_view_of(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    """Return whether autograd knows a tensor as a view of another one."""
    return tensor._base is base


def increment_versions(tensors: Iterable[torch.Tensor]) -> None:
    """Raise the version counters of tensors, for writes that torch did not see."""
    torch.autograd.graph.increment_version(list(tensors))  # type: ignore[arg-type]  # a list since torch 2.8


def tensor_hooks(param: torch.Tensor) -> Sequence[Callable[[Any], Any]]:
    """Return the hooks that a user registered with ``register_hook`` (torch 2.11-2.15)."""
    return tuple((param._backward_hooks or {}).values())


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let ``target`` have the hooks of ``source``, a tensor that it replaces (torch 2.11-2.15).

    Both kinds of hooks are in dictionaries, to which the users' handles refer.
    """
    if source._backward_hooks and not target._backward_hooks:
        target._backward_hooks = source._backward_hooks
    hooks = source._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if hooks and not target._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
        target._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]


def post_accumulate_grad_hooks(param: torch.Tensor) -> Sequence[Callable[[Any], None]]:
    """Return the hooks that a user registered with ``register_post_accumulate_grad_hook`` (torch 2.11-2.13).

    Autograd calls these hooks only when it accumulates into a parameter. The runtime sets sharded gradients itself, so
    it must also call the hooks itself.
    """
    return tuple((param._post_accumulate_grad_hooks or {}).values())  # type: ignore[attr-defined]


def set_post_accumulate_grad_hooks(param: torch.Tensor, hooks: dict[int, Any]) -> None:
    """Let ``register_post_accumulate_grad_hook`` of a parameter add hooks to this dictionary (torch 2.11-2.15)."""
    param._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]


def restart_group_names() -> None:
    """Make torch number process groups from 0 again, while there is no default group (torch 2.11-2.15).

    Ranks of a group connect through store keys that contain the group's number. torch counts in each process, and also
    counts groups that could not be created, so ranks that were in different groups before would not find each other.
    torch counts from 0 again when a default group is destroyed, so this creates and destroys one.
    """
    if _world.group_count:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()


def process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups of this process that are not destroyed (torch 2.11-2.15)."""
    return list(_world.pg_map)


def rendezvous_handler(
    backend: Any, name: str, timeout: Any, keep_alive_s: float, missed: int
) -> _RendezvousHandler:
    """Return a handler of torch's dynamic rendezvous that opens no ports (torch 2.11-2.15).

    torch's own starts, in the process of rank 0, a store that listens on all addresses of the machine.

    Args:
        backend: a `RendezvousBackend`, which decides when a round is complete.
        name: name of this process, without spaces.
        timeout: a `RendezvousTimeout`.
        keep_alive_s: seconds between two keep-alives.
        missed: number of missed keep-alives after which a process is lost.
    """
    # Imported here, since only elastic jobs need it.
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    class Handler(DynamicRendezvousHandler):
        def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
            return _NoServer()

        # torch names the caller of each action in an event, which takes `inspect.stack` 50 ms.
        def _record(self, *unused: Any, **more: Any) -> None:
            pass

    # The store: torch publishes the address of its server there. `min_nodes`, `max_nodes`: the backend decides.
    from_backend: Any = Handler.from_backend  # whose stub wants whole seconds
    made = from_backend("elastic", _NoStore(), backend, 1, 1 << 31, name, timeout, keep_alive_s, missed)
    made._state_holder._record = made._op_executor._record = made._record
    # torch 2.11 makes it for the first round's rank 0 only, and asserts that any later rank 0 has it.
    made._shared_tcp_store_server = _NoServer()
    return made  # type: ignore[no-any-return]


class _RendezvousHandler(Protocol):
    def next_rendezvous(self) -> Any: ...

    def shutdown(self) -> bool: ...


class _NoServer:
    port = 1  # any: nobody connects


class _NoStore(dist.Store):
    """Takes the address of a server that nobody uses."""

    def set(self, key: str, value: Any) -> None:
        pass

    def get(self, key: str) -> bytes:
        return b"0"


def encode_rendezvous(fields: Mapping[str, Any]) -> bytes:
    """Return the pickle of a state of torch's dynamic rendezvous, for its handler (torch 2.11-2.15).

    Args:
        fields: as from `decode_rendezvous`.
    """
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

    def node(text: str) -> _NodeDesc:
        address, pid, local_id = text.split()
        return _NodeDesc(address, int(pid), int(local_id))

    def time_of(seconds: float) -> datetime:
        return datetime.fromtimestamp(seconds, UTC)

    state = _RendezvousState()
    # The handler sleeps for up to 0.3 s before it leaves a round 0.
    state.round, state.complete, state.closed = fields["round"] + 1, fields["complete"], fields["closed"]
    state.deadline = None if fields["deadline"] is None else time_of(fields["deadline"])
    state.participants = {node(text): rank for text, rank in fields["participants"].items()}
    state.wait_list = set(map(node, fields["waiting"]))
    state.redundancy_list = set(map(node, fields["redundant"]))
    state.last_heartbeats = {node(text): time_of(seconds) for text, seconds in fields["heartbeats"].items()}
    return pickle.dumps(state)


def decode_rendezvous(state: bytes) -> dict[str, Any]:
    """Return a state of torch's dynamic rendezvous as values that JSON has (torch 2.11-2.15).

    Times are seconds as given by `time.time`. Nodes are texts: name, process id, and number in the process.

    Args:
        state: what the handler of this process has pickled; never bytes of another process.
    """
    found = pickle.loads(state)

    def text(node: Any) -> str:
        return f"{node.addr} {node.pid} {node.local_id}"

    return {
        "round": max(0, found.round - 1),  # 0: no state was read yet
        "complete": found.complete,
        "closed": found.closed,
        "deadline": None if found.deadline is None else found.deadline.timestamp(),
        "participants": {text(node): rank for node, rank in found.participants.items()},
        "waiting": sorted(map(text, found.wait_list)),
        "redundant": sorted(map(text, found.redundancy_list)),
        "heartbeats": {text(node): beat.timestamp() for node, beat in found.last_heartbeats.items()},
    }
