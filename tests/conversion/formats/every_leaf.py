"""One state with every kind of leaf that a checkpoint holds, whole or sharded over ranks, and its comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.checkpoint_states import SHAPES, full, ragged_group
from tests.support.dtype_zoo import DTYPES, make_tensor, same_bytes
from vescale_fsdp import RaggedDTensor
from vescale_fsdp.checkpoint import PerRank
from vescale_fsdp.torch_private import local_of

Mesh = DeviceMesh | None  # None: the whole state in one process
Tensors = dict[str, torch.Tensor]
Leaves = dict[str, Any]

ODD_NAMES = (
    "a b",
    "ä/ö",
    "x..y",
    ".hidden",
    "CON",
    "zarr.json",
    "%2e",
    "\N{GRINNING FACE}",
    "a/../b",
    "end.",
    "c.0",
    "0",
    "$x",
)
TIE = ("model.embed_tokens.weight", "lm_head.weight")  # as config.json ties them


def _of_dtypes(shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = DTYPES) -> Tensors:
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in dtypes}
    return {names[dtype]: make_tensor(shape, dtype, seed) for seed, dtype in enumerate(dtypes)}


def _special_floats(_: Mesh) -> Tensors:
    """Payloads of NaN, both zeros, infinities and the least numbers, by their bits."""
    bits = [0x7FC00001, 0xFFC12345 - 2**32, 0x7F800001, -(2**31), 0, 0x7F800000, 1]
    halves = [0x7FC1, 0xFF81 - 2**16, -(2**15), 1]
    return {
        "float32": torch.tensor(bits, dtype=torch.int32).view(torch.float32),
        "bfloat16": torch.tensor(halves, dtype=torch.int16).view(torch.bfloat16),
    }


def _strided(_: Mesh) -> Tensors:
    base = torch.arange(120.0)
    return {
        "transposed": base.view(10, 12).t(),
        "permuted": base.view(4, 5, 6).permute(2, 0, 1),
        "every_second": base[1::2],
        "columns": base.view(10, 12)[:, 3:7],
        "expanded": base[:3, None].expand(3, 5),
    }


def _views(_: Mesh) -> Tensors:
    base = torch.arange(200.0)
    return {"head": base[:50], "tail": base[50:].view(15, 10), "middle": base[40:60]}


def _ragged(mesh: Mesh) -> Tensors:
    if mesh is None:
        return {name: full(name, shape) for name, shape in SHAPES.items()}
    return dict(ragged_group(mesh, block_rows=2))


def _shard(tensor: torch.Tensor, mesh: Mesh, dim: int | None) -> torch.Tensor:
    placement = Replicate() if dim is None else Shard(dim)
    return tensor if mesh is None else distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


def _sharded(dim: int) -> Callable[[Mesh], Tensors]:
    shapes = {"uneven": (11, 7, 3), "few": (1, 1, 1), "narrow": (2, 2, 5)}

    def tensors(mesh: Mesh) -> Tensors:
        found = {name: _shard(full(name, shape), mesh, dim) for name, shape in shapes.items()}
        for dtype in (torch.bool, torch.float8_e4m3fn, torch.bfloat16):
            found[str(dtype).removeprefix("torch.")] = _shard(make_tensor((7, 9, 2), dtype), mesh, dim)
        return found

    return tensors


# Tensors of the model, by kind: the names of their leaves begin with it.
TENSORS: dict[str, Callable[[Mesh], Tensors]] = {
    "every dtype": lambda _: _of_dtypes((5, 6)),
    "0-d": lambda _: _of_dtypes((), DTYPES[:-1]),  # the last is packed, and has rows
    "empty": lambda _: {"rows": torch.empty(0, 4), "columns": torch.empty(3, 0, dtype=torch.float8_e5m2)},
    "four dims": lambda _: _of_dtypes((2, 3, 1, 4), (torch.float32, torch.bfloat16, torch.int8)),
    "beyond safetensors": lambda _: _of_dtypes((3, 2), (torch.complex128,)),
    "special floats": _special_floats,
    "strided": _strided,
    "views": _views,
    "odd names": lambda _: {name: make_tensor((3, 2), torch.bfloat16, i) for i, name in enumerate(ODD_NAMES)},
    "ragged": _ragged,
    "rows": _sharded(0),
    "columns": _sharded(1),
    "last dim": _sharded(2),
    "replicated": lambda mesh: {"large": _shard(full("large", (40, 500)), mesh, None)},
}


def _moments(mesh: Mesh) -> dict[str, Any]:
    states = {
        f"ragged.{name}": {"step": torch.tensor(3.0), "exp_avg": tensor + 1, "exp_avg_sq": tensor * 2}
        for name, tensor in _ragged(mesh).items()
    }
    first, *others = states
    groups = [
        {"lr": 0.1, "betas": (0.9, 0.95), "fused": None, "params": [first]},
        {"lr": 0.2, "amsgrad": True, "params": others},
    ]
    return {"state": states, "param_groups": groups}


# Other entries of the state, by kind.
OTHERS: dict[str, Callable[[Mesh], Any]] = {
    "optimizer": _moments,
    "tensors in lists": lambda _: {
        "history": [torch.arange(3), torch.arange(4.0)],
        "deep": [{"a": torch.ones(2)}],
    },
    "numbers": lambda _: {"step": 7, "large": 2**40, "negative": -(2**40), "yes": True, "real": 0.1},
    "beyond 64 bits": lambda _: {"large": 2**70, "negative": -(2**100)},
    "floats": lambda _: {"inf": math.inf, "nan": math.nan, "zero": -0.0, "least": 5e-324},
    "texts": lambda _: {"word": "räksmörgås", "empty": "", "lines": "a\nb\0"},
    "bytes": lambda _: {"some": b"\x00\xff"},
    "no bytes": lambda _: {"none": b""},
    "none": lambda _: {"value": None, "in": [None]},
    "containers": lambda _: {"list": [1, 2.5, "x"], "tuple": (0.9, 0.95), "no list": [], "no tuple": ()},
    "lists in lists": lambda _: {"mixed": [1, (2, "x")]},
    "empty dicts": lambda _: {"no": {}},
    "numbers as keys": lambda _: {1: "a", 2: None},
    "per rank": lambda mesh: {"seed": PerRank(0 if mesh is None else mesh.get_rank(), merge=_sum)},
}


def _sum(values: list[int], rank: int, world: int) -> int:
    return sum(values)


KINDS = (*TENSORS, "tied", *OTHERS)


def make_state(mesh: Mesh, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The state, but for some kinds; its DTensors are on ``mesh``."""
    model = {
        f"{kind}.{name}": tensor
        for kind, make in TENSORS.items()
        if kind not in without
        for name, tensor in make(mesh).items()
    }
    if "tied" not in without:
        kept, other = TIE
        model[kept] = model[other] = _shard(full("tied", (9, 4)), mesh, 0)
    return {"model": model} | {kind: make(mesh) for kind, make in OTHERS.items() if kind not in without}


def leaves_of(state: Any, name: str = "") -> Leaves:
    """The leaves by flattened name; DTensors as whole tensors. A collective where there are any.

    Written here too, so that a leaf that the product's `flatten` loses is missed. Lists are leaves unless they hold
    tensors or containers.
    """
    items: Any = None
    if isinstance(state, Mapping):
        items = state.items()
    elif isinstance(state, (list, tuple)) and any(
        isinstance(item, (torch.Tensor, Mapping, list, tuple)) for item in state
    ):
        items = enumerate(state)
    if not items:
        return {name: _whole(state)}
    prefix = f"{name}." if name else ""
    return {n: leaf for key, item in items for n, leaf in leaves_of(item, f"{prefix}{key}").items()}


def _whole(value: Any) -> Any:
    if isinstance(value, PerRank):
        return value.value
    if not isinstance(value, DTensor):
        return value
    if value.dtype.itemsize > 1:
        return value.full_tensor()
    raw = local_of(value).view(torch.uint8)  # gloo lacks bool and float8
    mesh, placements = value.device_mesh, value.placements
    gathered = DTensor.from_local(raw, mesh, placements, shape=value.shape, stride=value.stride())
    return gathered.full_tensor().view(value.dtype)


def blank(value: Any, made: dict[int, torch.Tensor] | None = None) -> Any:
    """What a state is loaded into: the same kinds and shards, with none of the values; tied tensors are one."""
    made = {} if made is None else made
    if isinstance(value, torch.Tensor):
        if id(value) not in made:
            made[id(value)] = _blank_tensor(value)
        return made[id(value)]
    if isinstance(value, dict):  # a group of an optimizer is found by the names of its parameters
        return {key: item if key == "params" else blank(item, made) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(blank(item, made) for item in value)
    if isinstance(value, PerRank):
        return PerRank("not loaded", merge=value.merge)
    return "not loaded"


def _blank_tensor(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, RaggedDTensor):
        found = RaggedDTensor.wrap(torch.zeros_like(local_of(value)), value._spec)
        found.layout_ref = value.layout_ref
        return found
    if isinstance(value, DTensor):
        local = local_of(value)
        return DTensor.from_local(
            _zeros(local), value.device_mesh, value.placements, shape=value.shape, stride=value.stride()
        )
    return _zeros(value)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """Zeros, of types that torch cannot fill too."""
    nbytes = like.numel() * like.element_size()
    return torch.zeros(nbytes, dtype=torch.uint8).view(like.dtype).reshape(like.shape)


def violations(expected: Leaves, found: Leaves) -> list[str]:
    """Leaves that are missing, too many, of another type or shape, or differ in a bit; each with its name."""
    wrong = [f"{name}: missing" for name in expected.keys() - found.keys()]
    wrong += [f"{name}: not expected" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        if not _same(expected[name], found[name]):
            wrong.append(f"{name}: {_told(found[name])}, not {_told(expected[name])}")
    return sorted(wrong)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and same_bytes(a, b)
    return type(a) is type(b) and repr(a) == repr(b)  # nan is nan, and -0.0 is not 0.0


def _told(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value!r}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} {value.flatten()[:3].tolist()}.."
