"""Random states of every kind of leaf that a checkpoint takes: what is saved, what it is loaded into, how it compares.

The same seed gives the same state on every rank, but for what lies in a `PerRank`.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tests.support.distributed import cpu_mesh
from vescale_fsdp import RaggedDTensor, RaggedShard
from vescale_fsdp.checkpoint import PerRank
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, carrier_of
from vescale_fsdp.torch_private import StridedShard, local_of

SHAPES = [(), (0,), (1,), (3,), (7,), (2, 3), (5, 4), (0, 4), (3, 0, 2), (5, 1, 2), (1, 1), (2, 3, 4)]
KEYS: list[Any] = ["", " ", "a/b", "~", "~1", "$x", "$", "ü☃", "\n", "a\x00", "..", ".", "c", "a" * 60]
KEYS += [
    0,
    -7,
    10**30,
    1.5,
    -0.0,
    math.inf,
    True,
    None,
    (1, "a"),
    (None, (2.5, b"k", frozenset({3}))),
    "w",
    "x",
    "y",
]
NUMBERS: list[Any] = [
    0,
    1,
    -1,
    2**63,
    -(2**64),
    10**2000,
    0.0,
    -0.0,
    0.1,
    1e308,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
]
NUMPY_DTYPES = [
    "bool",
    "int8",
    "uint16",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


class Pair(NamedTuple):
    """A tuple with names."""

    left: Any
    right: Any


class Box:
    """An object with a state."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def state_dict(self) -> Any:
        """What it holds."""
        return self.inner

    def load_state_dict(self, state: Any) -> None:
        """Hold it."""
        self.inner = state


def torch_dtypes() -> list[torch.dtype]:
    """Every dtype of this torch that a tensor can have."""
    found = []
    for name in sorted(vars(torch)):
        dtype = getattr(torch, name)
        if isinstance(dtype, torch.dtype) and dtype not in found and not name.startswith(("q", "bits")):
            found.append(dtype)
    return found


DTYPES = torch_dtypes()


def _tensor(draw: Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits; 0 and 1 for bool."""
    nbytes = math.prod(shape) * dtype.itemsize
    data = bytes(draw.randrange(2 if dtype == torch.bool else 256) for _ in range(nbytes))
    tensor = torch.empty(shape, dtype=dtype)
    bytes_of(tensor).numpy()[:] = np.frombuffer(data, dtype=np.uint8)
    return tensor


def _viewed(draw: Random, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or one that lies otherwise in its memory, or says otherwise what is there."""
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda t: t]
    if tensor.ndim:
        ways += [
            lambda t: t[::2],
            lambda t: t[1:],
            lambda t: t[None].expand(3, *t.shape),
            lambda t: t[..., :1],
        ]
    if tensor.ndim > 1:
        ways += [lambda t: t.transpose(0, 1), lambda t: t.permute(*reversed(range(t.ndim)))]
    if tensor.dtype in (torch.complex64, torch.complex128):
        ways += [lambda t: t.conj(), lambda t: t.conj().imag, lambda t: t.real] * 2
    if tensor.dtype in (torch.float32, torch.bfloat16):
        ways += [torch.nn.Parameter, lambda t: t.clone().requires_grad_() * 2]
    return draw.choice(ways)(tensor)


def _sharded(draw: Random) -> DTensor:
    """A DTensor, stock or ragged, even or not, some ranks with nothing."""
    shape = draw.choice([shape for shape in SHAPES if shape])
    dtype = draw.choice(DTYPES)
    full = _tensor(draw, shape, dtype).view(carrier_of(dtype))
    world = dist.get_world_size()
    strides = full.stride()
    if draw.random() < 0.5:
        mesh = cpu_mesh()
        cuts = sorted(draw.randint(0, full.numel()) for _ in range(world - 1))
        bounds = [0, *cuts, full.numel()]
        numels = [b - a for a, b in pairwise(bounds)]
        if full.numel():
            placement = RaggedShard.from_piece_numels(shape, numels)
            start, stop = placement.piece(shape, dist.get_rank())
            buffer = torch.empty(full.numel() + 3, dtype=full.dtype)[3 : 3 + stop - start]
            buffer.copy_(full.reshape(-1)[start:stop])
            return RaggedDTensor.from_local(buffer.view(dtype), mesh, [placement], shape=shape)
    mesh = cpu_mesh(2, 2) if world == 4 and draw.random() < 0.7 else cpu_mesh()
    dims = range(len(shape))
    placements: list[Placement] = [
        draw.choice([Shard(draw.choice(dims)), Replicate()]) for _ in range(mesh.ndim)
    ]
    local = _local_of(full, mesh, placements)
    if mesh.ndim == 2 and draw.random() < 0.3:  # what FSDP inside tensor parallelism makes of one dim
        placements = [StridedShard(0, split_factor=2), Shard(0)]
        inner = _local_of(full, mesh["tp"] if mesh.mesh_dim_names else mesh, [Replicate(), Shard(0)])
        parts = list(torch.chunk(inner, 2)) if inner.shape[0] else []
        place = mesh.get_local_rank(0)
        local = parts[place] if place < len(parts) else inner[:0]
    return DTensor.from_local(
        local.contiguous().view(dtype),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )


def _local_of(full: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> torch.Tensor:
    return local_of(distribute_tensor(full, mesh, placements, src_data_rank=None))


def _array(draw: Random) -> np.ndarray:  # type: ignore[type-arg]
    dtype = np.dtype(draw.choice(NUMPY_DTYPES))
    shape = draw.choice(SHAPES)
    data = bytes(
        draw.randrange(2) if dtype.kind == "b" else draw.randrange(256)
        for _ in range(math.prod(shape) * dtype.itemsize)
    )
    array = np.frombuffer(data, dtype=dtype).reshape(shape)
    ways: list[Callable[[Any], Any]] = [lambda a: a, lambda a: a.copy(), lambda a: a.T]
    if array.ndim:
        ways += [lambda a: a[::-1], lambda a: a[::2], lambda a: np.broadcast_to(a, (2, *a.shape))]
    return draw.choice(ways)(array)  # type: ignore[no-any-return]


def _number_of_numpy(draw: Random) -> Any:
    dtype = np.dtype(draw.choice(NUMPY_DTYPES))
    value = draw.choice([0, 1, 0.5, math.nan, math.inf]) if dtype.kind in "fc" else draw.choice([0, 1])
    return dtype.type(value)


def _plain(draw: Random) -> Any:
    letters = 'aé☃\x00\n"\\/$~\ud800\U0001f600 '
    text = "".join(draw.choice(letters) for _ in range(draw.randrange(5)))
    data = bytes(draw.randrange(256) for _ in range(draw.randrange(4)))
    number = draw.choice(NUMBERS)
    members: list[Any] = [{1, 2.5, "x"}, frozenset({None, b"k", (1, "a")}), {np.float32(1.5)}, set()]
    sizes = [torch.Size((2, 3)), torch.Size(())]
    kinds: list[Any] = [draw.choice(DTYPES), torch.device(draw.choice(["cpu", "cuda:1", "meta"]))]
    numbers = [number, number, _number_of_numpy(draw), complex(draw.choice([0.0, -0.0, math.inf]), 1.5)]
    return draw.choice([None, True, False, text, data, bytearray(data), *numbers, *kinds, *members, *sizes])


def _leaf(draw: Random, sharded: bool) -> Any:
    kind = draw.random()
    if kind < 0.35:
        return _viewed(draw, _tensor(draw, draw.choice(SHAPES), draw.choice(DTYPES)))
    if kind < 0.5 and sharded:
        return _sharded(draw)
    if kind < 0.6:
        return _array(draw)
    return _plain(draw)


def _nested(draw: Random, depth: int, leaf: Callable[[], Any]) -> Any:
    if depth == 0 or draw.random() < 0.3:
        return leaf()
    items = [_nested(draw, depth - 1, leaf) for _ in range(draw.randrange(4))]
    kind = draw.choice(["dict", "dict", "ordered", "default", "counter", "list", "tuple", "pair", "box"])
    if kind == "list":
        return items
    if kind == "tuple":
        return tuple(items)
    if kind == "pair":
        return Pair(*[*items, None, None][:2])
    if kind == "box":  # none in another, which a PerRank does not take
        return Box(leaf() if depth == 1 else {"in": leaf()})
    keyed = dict(zip(draw.sample(KEYS, len(items)), items, strict=True))
    if kind == "counter":
        return Counter({key: place for place, key in enumerate(keyed)})
    return {"dict": dict, "ordered": OrderedDict}.get(kind, lambda d: defaultdict(int, d))(keyed)


def draw_state(seed: int) -> dict[str, Any]:
    """A state of the running ranks."""
    draw = Random(seed)
    own = Random(seed * 10 + dist.get_rank())

    def leaf() -> Any:
        if draw.random() < 0.12:
            return PerRank(_nested(own, 3, lambda: _leaf(own, sharded=False)))
        return _leaf(draw, sharded=True)

    return {f"part{place}": _nested(draw, 3, leaf) for place in range(5)}


def fresh(value: Any) -> Any:
    """What a state is loaded into: of the same kinds, with none of the values."""
    if isinstance(value, DTensor):
        local = torch.zeros_like(local_of(value).view(carrier_of(value.dtype))).view(value.dtype)
        if isinstance(value, RaggedDTensor):
            return RaggedDTensor.wrap(local, value._spec)
        return DTensor(local, value._spec, requires_grad=False)  # type: ignore[call-arg]
    if isinstance(value, torch.Tensor):
        tensor = torch.empty(value.shape, dtype=value.dtype)
        bytes_of(tensor).zero_()
        return tensor
    if isinstance(value, np.ndarray):
        return np.zeros(value.shape, value.dtype)
    if isinstance(value, PerRank):
        return PerRank(fresh(value.value))
    if isinstance(value, Box):
        return Box(fresh(value.inner))
    if isinstance(value, Mapping):
        copy = value.copy()  # type: ignore[attr-defined]
        copy.update(dict.fromkeys(copy, 17)) if isinstance(copy, Counter) else copy.update(
            {key: fresh(item) for key, item in value.items()}
        )
        return copy
    if isinstance(value, Pair):
        return Pair(*map(fresh, value))
    if isinstance(value, (list, tuple)):
        return (
            type(value)(map(fresh, value)) if type(value) is not torch.Size else torch.Size((9,) * len(value))
        )
    return "not loaded"


def _bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return bytes_of(plain.view(carrier_of(plain.dtype)).contiguous()).numpy().tobytes()


def assert_same(saved: Any, found: Any, where: str = "", *, typed: bool = True) -> int:
    """Compare bit for bit and by type; returns how many leaves were compared.

    Args:
        typed: containers are of one type; not so in a `PerRank`, where they come back as Python's own.
    """
    if isinstance(saved, torch.Tensor):
        if isinstance(saved, DTensor) and typed:
            assert found._spec == saved._spec, where
            saved, found = local_of(saved), local_of(found)
        assert isinstance(found, torch.Tensor) and (saved.shape, saved.dtype) == (found.shape, found.dtype), (
            where
        )
        assert _bits(saved) == _bits(found), where
        return 1
    if isinstance(saved, np.ndarray):
        assert type(found) is np.ndarray and (saved.shape, saved.dtype) == (found.shape, found.dtype), where
        assert saved.tobytes() == found.tobytes(), where
        return 1
    if isinstance(saved, PerRank):
        return assert_same(saved.value, found.value, where, typed=False)
    if isinstance(saved, Box):
        return assert_same(saved.inner, found.inner, where, typed=typed)
    if typed or not isinstance(saved, (dict, tuple)):
        assert type(saved) is type(found), (where, saved, found)
    if isinstance(saved, Mapping):
        assert list(map(repr, saved)) == list(map(repr, found)), where
        return sum(assert_same(saved[key], found[key], f"{where}/{key}", typed=typed) for key in saved)
    if isinstance(saved, (list, tuple)):
        assert len(saved) == len(found), where
        pairs = enumerate(zip(saved, found, strict=True))
        return sum(assert_same(a, b, f"{where}/{place}", typed=typed) for place, (a, b) in pairs)
    if isinstance(saved, (set, frozenset)):
        assert sorted(map(repr, saved)) == sorted(map(repr, found)), where
        return 1
    assert repr(saved) == repr(found), where  # nan is nan, and -0.0 is not 0.0
    return 1
