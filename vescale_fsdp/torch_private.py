"""Every private name of torch that this package uses, with the versions it was seen in and the reason.

No other module imports a name with a leading underscore from torch (tests/house/test_layering.py holds this).
When a new torch release moves one, this is the only file to touch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.distributed.fsdp

# torch 2.11-2.13: how long tensors are printed, for a while; public is only the function that sets it for good.
from torch._tensor_str import printoptions

# torch 2.11-2.13: which of torch's own parallelisms have taken a module; FSDP2 leaves those of replicate alone.
from torch.distributed._composable.contract import REGISTRY_KEY as COMPOSABLE_KEY
from torch.distributed._composable.contract import STATE_KEY as COMPOSABLE_STATES
from torch.distributed._composable.contract import RegistryItem

# torch 2.11-2.15: what cuts full tensors inside torch's set_*_state_dict; it knows no foreign placements.
from torch.distributed._state_dict_utils import _distribute_tensors

# torch 2.11-2.13: how DCP names the leaves of a nested state; its planners take no other names.
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

# torch 2.11-2.15: names of parameters without what torch's wrappers add.
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.device_mesh import DeviceMesh

# torch 2.11-2.13: all groups there are, the default group's store, and the time-out of a group, which no public name
# tells or sets; and how a group is made over a store, the only way to one that reaches beyond the default group.
from torch.distributed.distributed_c10d import (
    _coalescing_manager,
    _get_default_store,
    _new_process_group_helper,
    _set_pg_timeout,
    _world,
)

# torch 2.11-2.13: what trainers import to give one parameter a mesh of its own; torch has it nowhere else.
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, _redistribute, debug

# torch 2.11-2.13: how far a DTensor is described; there is no public constructor for a foreign placement.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# torch 2.11-2.13: the Partial of a vector norm, so that norms of ragged and stock DTensors can be combined.
from torch.distributed.tensor._ops._math_ops import _NormPartial as NormPartial

# torch 2.11-2.13: FSDP inside tensor parallelism on one dim; checkpoints must tell it from a plain Shard.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# torch 2.11-2.13: Muon's own iteration, learning-rate rule and constants; retyping them would let them drift.
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C
from torch.optim._muon import DEFAULT_NS_STEPS as MUON_STEPS
from torch.optim._muon import EPS as MUON_EPS
from torch.optim._muon import _adjust_lr as muon_adjust_lr
from torch.optim._muon import _zeropower_via_newtonschulz as zeropower_via_newtonschulz

# torch 2.11-2.13: optimizers and foreach utilities choose their fast path by exact type.
from torch.optim.optimizer import _foreach_supported_types as _optim_types

# torch 2.11-2.13: trees of arguments; the public torch.utils.pytree is newer.
from torch.utils import _pytree as pytree
from torch.utils._foreach_utils import _foreach_supported_types as _util_types

# torch 2.11-2.13: tells tensor subclasses that keep their values in inner tensors, which have no bytes of their own.
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

from vescale_fsdp.errors import MisuseError, UnsupportedOpError

__all__ = [
    "MUON_COEFFICIENTS",
    "MUON_EPS",
    "MUON_STEPS",
    "REDUCES_AS_STORED",
    "SUMS_HALVES_AS_REDUCED",
    "DTensorSpec",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "HSDPMeshInfo",
    "NormPartial",
    "ShardPlacementResult",
    "StridedShard",
    "TensorMeta",
    "all_gather_single",
    "apply_to_tensors",
    "autograd_engine_callback",
    "coalesced",
    "concatenate_meshes",
    "default_store",
    "dispatch_to_subclass",
    "flatten_mesh",
    "flatten_state_dict",
    "foreach_add_",
    "foreach_copy_",
    "foreach_lerp",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm_of",
    "foreach_zero_",
    "forget_meshes",
    "fqn_of",
    "gloo_group",
    "grad_dtype_of",
    "groups_with_timeout_of",
    "is_asked_by",
    "is_noted_sharded",
    "is_replicated",
    "is_view",
    "is_wrapper",
    "loads_what_it_is_given",
    "local_of",
    "muon_adjust_lr",
    "newer_class",
    "note_sharded",
    "operator_names",
    "piece_in",
    "post_accumulate_grad_hooks",
    "printoptions",
    "pytree",
    "reduce_scatter_single",
    "refuse_set_state_dict",
    "refuse_takers",
    "register_foreach_type",
    "restore_version",
    "set_local",
    "spec_of",
    "spmd_mesh_of",
    "storage_id",
    "store_of",
    "takes_address_for_memory",
    "timeout_of",
    "unflatten_mesh",
    "unflatten_state_dict",
    "version_of",
    "zeropower_via_newtonschulz",
]

# torch 2.11-2.13: its states are noted under the function that its decorator has wrapped.
_torch_fully_shard = inspect.unwrap(torch.distributed.fsdp.fully_shard)

_LOCAL: Any = vars(DTensor)["_local_tensor"]  # the slot, for which a ragged tensor has a dearer property
piece_in = _LOCAL.__get__  # of a DTensor
MUON_COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)


def newer_class(home: ModuleType, name: str, instead: str) -> Any:
    """A class that not every supported torch has; where it is missing, one that cannot be built and says so.

    Args:
        home: the module of torch's that has it.
        instead: what to do without it.
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

# torch 2.15 reduces gradients in the dtype that parameters are stored in, unless a policy says ``reduce_dtype``;
# before, in the one they compute in. Gradients of the weights' half of a pipeline's backward add up in it, too.
REDUCES_AS_STORED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
SUMS_HALVES_AS_REDUCED = REDUCES_AS_STORED

# torch 2.11-2.15: foreach operators, one call for many tensors, are documented and still spelled as private.
foreach_add_, foreach_mul_ = torch._foreach_add_, torch._foreach_mul_
foreach_lerp, foreach_lerp_ = torch._foreach_lerp, torch._foreach_lerp_
foreach_copy_, foreach_zero_ = torch._foreach_copy_, torch._foreach_zero_
foreach_norm_of = torch._foreach_norm

# torch 2.13 renamed these two and warns about the old names; 2.11 and 2.12 have only those.
all_gather_single = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = vars(dist).get("reduce_scatter_single", dist.reduce_scatter_tensor)


def register_foreach_type(cls: type[torch.Tensor]) -> None:
    """Let ``cls`` keep optimizers' foreach and fused implementations as their default."""
    for types in (_optim_types, _util_types):
        if cls not in types:
            types.append(cls)  # type: ignore[arg-type]


class _Dispatching(Protocol):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any, /) -> Any: ...


def dispatch_to_subclass(cls: _Dispatching) -> None:
    """Let operators on a subclass of DTensor reach the subclass's own ``__torch_dispatch__``.

    torch 2.10 and 2.11 take every instance of DTensor, subclasses too, down DTensor's own path in C++ and
    never ask the subclass (pytorch issue 177716, mended in 2.12). A rule registered for an operator and the
    class is asked before that path; so there it is registered for every operator this torch knows.
    """
    if torch.__version__ >= "2.12":
        return
    libraries: dict[str, torch.library.Library] = {}
    for name in operator_names():
        namespace = name.partition("::")[0]
        if namespace not in libraries:
            libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        rules = torch.library.register_torch_dispatch(name, cls, lib=libraries[namespace])
        rules(_ask_subclass)
    _dispatch_rules.extend(libraries.values())


_dispatch_rules: list[torch.library.Library] = []  # rules go when their library does


def _ask_subclass(cls: _Dispatching, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return cls.__torch_dispatch__(func, types, args, kwargs)


def is_asked_by(package: str) -> bool:
    """Whether the caller's caller is of this package: it asks a ragged tensor for more than its piece."""
    return str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0] == package


_COPY_BY_ADDRESS = ("torch.distributed.checkpoint._state_dict_stager", "torch.nn.modules.rnn")


def takes_address_for_memory() -> bool:
    """Whether the caller's caller takes any address but 0 for memory of the tensor's own (torch 2.11-2.13)."""
    # DCP's stager is given a tensor and copies its storage, if it has an address, else its attributes and so the
    # piece. RNNs on CUDA join weights of different addresses into one storage.
    return sys._getframe(2).f_globals.get("__name__") in _COPY_BY_ADDRESS


_TAKERS = {
    "torch.distributed.fsdp._fully_shard._fsdp_init": "torch.distributed.fsdp.fully_shard (FSDP2)",
    "torch.distributed.fsdp._fully_shard._fsdp_param": "torch.distributed.fsdp.fully_shard (FSDP2)",
    "torch.distributed.fsdp._flat_param": "torch.distributed.fsdp.FullyShardedDataParallel (FSDP1)",
    "torch.nn.parallel.distributed": "torch.nn.parallel.DistributedDataParallel",
}


def refuse_takers(what: str) -> None:
    """Raise if one of torch's data parallelisms is taking what ours has (torch 2.11-2.13).

    For methods that they call first, of modules before they change anything and of parameters before they change
    them: what they would say themselves, if they say anything, speaks of names of mesh axes or of operators.
    """
    frame = sys._getframe(2)  # the caller's caller; FSDP1 asks through a helper
    names = [part.f_globals.get("__name__") for part in (frame, frame.f_back) if part is not None]
    taker = next((_TAKERS[name] for name in names if name in _TAKERS), None)
    if taker is not None:
        raise MisuseError(
            f"{taker} cannot take what vescale_fsdp has sharded.",
            expected="vescale_fsdp.fully_shard alone: it reduces gradients over all ranks of its mesh",
            got=what,
            where=taker,
            todo="leave the wrapper out, import fully_shard from vescale_fsdp wherever the model is sharded, and build "
            "the model anew; replicas are an axis of the mesh: init_device_mesh(device, (replicas, shards))",
        )


def autograd_engine_callback(callback: Callable[[], None]) -> None:
    """Call ``callback()`` when the running backward pass ends (torch 2.11-2.13; the public API has no such hook)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor without an autograd node (``to_local`` adds one); a plain tensor is its own."""
    return _LOCAL.__get__(tensor) if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def default_store() -> dist.Store:
    """What the default group's ranks met over (torch 2.11-2.15)."""
    return _get_default_store()


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a group's ranks wait for each other; None if its backend knows no such thing (torch 2.11-2.13)."""
    # Where a group has several backends, the CPU's: who asks is about to make a gloo group, or has one backend.
    for device in sorted(group._device_types, key=lambda device: device.type != "cpu"):
        try:
            options = group._get_backend(device).options
        except RuntimeError:  # the base class's own answer, of backends that have no options
            continue
        if options is not None:
            return options._timeout
    return None


@contextmanager
def coalesced(group: dist.ProcessGroup) -> Iterator[None]:
    """Collectives of one kind that are started inside become one launch (torch 2.11-2.15)."""
    try:
        with _coalescing_manager(group):
            yield
    except BaseException:
        _world.pg_coalesce_state.pop(
            group, None
        )  # else later collectives would be noted there, and never run
        raise


@contextmanager
def groups_with_timeout_of(base: dist.ProcessGroup) -> Iterator[None]:
    """Groups that are made inside get the time-out of ``base``.

    torch gives a new group its backend's default, whatever `init_process_group` was told, and the groups of a
    mesh take no time-out at all (torch 2.11-2.13).
    """
    before = set(_world.pg_map)
    yield
    timeout = timeout_of(base)
    for group in _world.pg_map:
        if timeout is not None and group not in before and timeout_of(group) is not None:
            _set_pg_timeout(timeout, group)


def gloo_group(
    rank: int, numbers: dict[int, int], name: str, timeout: timedelta, store: dist.Store | None = None
) -> dist.ProcessGroup:
    """A gloo group under a name that is the caller's (torch 2.11-2.15).

    Args:
        rank: of this process, in the group.
        numbers: by number in the default group, all in the group. Strangers to it get numbers that no rank of it has.
        name: the same for all, and new in this process.
        store: where they meet; default: the default group's, none of them being a stranger.
    """
    world = dist.group.WORLD
    assert world is not None
    members = list(numbers) if store is None else []
    where = _world.pg_map[world][1] if store is None else store
    make: Any = _new_process_group_helper  # newer torch has a type of its own for names, and other arguments
    group, _ = make(
        len(numbers), rank, members, dist.Backend("gloo"), where, group_name=name, timeout=timeout
    )
    _world.pg_group_ranks[group] = numbers
    return group  # type: ignore[no-any-return]


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store in which the ranks of a group met (torch 2.11-2.15)."""
    return _world.pg_map[group][1]


def forget_meshes() -> None:
    """Drop what DTensor remembers of decisions by mesh (torch 2.11-2.15): an equal mesh may have other groups now."""
    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


def set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Point a DTensor at other memory of the same shape (torch 2.11-2.13)."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def spec_of(tensor: torch.Tensor) -> DTensorSpec:
    """Mesh, placements and global metadata of a DTensor (torch 2.11-2.13)."""
    return tensor._spec  # type: ignore[attr-defined, no-any-return]


def grad_dtype_of(param: torch.Tensor) -> torch.dtype | None:
    """The dtype that autograd gives a parameter's gradient; torch 2.11 has no such attribute (2.13-2.15)."""
    own = vars(torch._C.TensorBase).get("grad_dtype")
    return param.dtype if own is None else own.__get__(param)  # type: ignore[no-any-return]


def storage_id(tensor: torch.Tensor) -> int:
    """A number that two living tensors share if they share memory (torch 2.11-2.13)."""
    return tensor.untyped_storage()._cdata  # not the address: that is 0 for every storage without memory


def spmd_mesh_of(info: FSDPMeshInfo) -> DeviceMesh | None:
    """The full mesh of a parameter's mesh, newer than torch 2.11; None if there is none."""
    mesh: DeviceMesh | None = vars(info).get("spmd_mesh")
    return mesh


def concatenate_meshes(*slices: DeviceMesh) -> DeviceMesh:
    """One mesh of the axes of several slices of the same mesh (torch 2.11-2.13, where FSDP2 does the same)."""
    return DeviceMesh._concatenate(list(slices))


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A 1-D mesh of all axes of a slice of a named mesh, in their order (torch 2.11-2.13). A collective call."""
    with groups_with_timeout_of(mesh.get_group(0)):
        return mesh._flatten(name)


def unflatten_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The only axis of a mesh split into several (torch 2.11-2.13). A collective call."""
    with groups_with_timeout_of(mesh.get_group(0)):
        return mesh._unflatten(0, sizes, names)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of another one for autograd (torch 2.11-2.13)."""
    return tensor._base is not None


def is_replicated(module: torch.nn.Module) -> bool:
    """Whether ``torch.distributed._composable.replicate`` has taken a module (torch 2.11-2.13)."""
    return "replicate" in _parallelisms_of(module)


def note_sharded(module: torch.nn.Module, state: object) -> None:
    """Enter "fully_shard" where torch notes which parallelisms have taken a module (torch 2.11-2.13).

    ``replicate`` leaves the parameters of such modules alone, and refuses to take one itself. ``state`` is what
    torch's own ``fully_shard.state(module)`` answers from now on, which its pipelines ask for.
    """
    attributes = vars(module)
    attributes.setdefault(COMPOSABLE_KEY, {}).setdefault("fully_shard", RegistryItem())
    attributes.setdefault(COMPOSABLE_STATES, {})[_torch_fully_shard] = state


def apply_to_tensors(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What `Module.to` does with another change than a move: all parameters and buffers (torch 2.11-2.15)."""
    module._apply(change)


def fqn_of(model: torch.nn.Module, name: str) -> str:
    """The name that torch's state dicts give to what a model's own calls ``name`` (torch 2.11-2.15)."""
    return next(iter(_get_fqns(model, name)))


def refuse_set_state_dict(what: str) -> None:
    """Raise if the caller's caller is what cuts full tensors in torch's ``set_*_state_dict`` (torch 2.11-2.15).

    Left alone it would copy ranges of its own making: an error where sizes differ, and the other ranks wait.
    """
    if sys._getframe(2).f_code is _distribute_tensors.__code__:
        raise UnsupportedOpError(
            "torch's set_*_state_dict cannot cut full tensors for ragged parameters.",
            expected="set_model_state_dict, set_optimizer_state_dict or set_state_dict of vescale_fsdp.checkpoint",
            got="the function of that name of torch.distributed.checkpoint.state_dict",
            where=what,
            todo="import them from vescale_fsdp.checkpoint: same arguments, full_state_dict and broadcast_from_rank0 "
            "included",
        )


def is_noted_sharded(module: torch.nn.Module) -> bool:
    """Whether a ``fully_shard``, ours or torch's, has been called on a module (torch 2.11-2.13)."""
    return "fully_shard" in _parallelisms_of(module)


def _parallelisms_of(module: torch.nn.Module) -> Mapping[str, RegistryItem]:
    # Of the module alone: wrappers (of checkpointing, torch.compile, peft) answer with attributes of what is inside.
    return cast(Mapping[str, RegistryItem], vars(module).get(COMPOSABLE_KEY, {}))


def loads_what_it_is_given(module: torch.nn.Module, *, num_own_hooks: int) -> bool:
    """Whether a module's own ``load_state_dict`` copies tensors as they are (torch 2.11-2.13).

    Args:
        num_own_hooks: how many of its hooks are known to leave them alone.
    """
    loader = type(module)._load_from_state_dict
    hooks = len(module._load_state_dict_pre_hooks)
    return hooks <= num_own_hooks and loader is torch.nn.Module._load_from_state_dict


def operator_names() -> list[str]:
    """Names of all operators of this torch (2.11-2.13), such as ``aten::add.Tensor``."""
    return torch._C._dispatch_get_all_op_names()  # type: ignore[no-any-return]


def foreach_types() -> set[Any]:
    """Types that both optimizers and gradient clipping treat as plain tensors (for tests)."""
    return set(_optim_types) & set(_util_types)


def version_of(tensor: torch.Tensor) -> int:
    """A tensor's version counter (torch 2.11-2.13); `restore_version` sets it back."""
    return tensor._version


def restore_version(tensor: torch.Tensor, version: int) -> None:
    """Set a tensor's version counter (torch 2.11-2.13): to fill a buffer with the values that autograd saved is no
    modification."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def post_accumulate_grad_hooks(param: torch.Tensor) -> Sequence[Callable[[Any], None]]:
    """Hooks a user registered with ``register_post_accumulate_grad_hook`` (torch 2.11-2.13).

    Autograd calls them for leaves it accumulates into; sharded gradients are set by us, so we call them.
    """
    return tuple((param._post_accumulate_grad_hooks or {}).values())  # type: ignore[attr-defined]
