"""Read pickles without running the code that they name.

A pickle is a program that may call anything importable. Checkpoints need only a few names: some record types, sizes,
dtypes, numpy's numbers and arrays, and the functions that rebuild a tensor. The unpicklers here know only these names
and replace them by plain stand-ins, so that opening an unknown checkpoint runs none of its code and imports neither
torch nor numpy. Any other name is refused. ``trust=True`` imports it instead, as torch would, and ``stand_ins=True``
replaces it by an `UnreadObject`: trainers pickle loss scalers and arguments together with the weights, and refusing
these objects would refuse the weights.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, option
from vescale_fsdp.layout.dtypes import DTYPES, DType, dtype_from_numpy, dtype_from_torch
from vescale_fsdp.layout.geometry import Box, contiguous_strides

if TYPE_CHECKING:
    import numpy as np


class _NotDenseError(Exception):
    """The pickle contains a tensor or an array that cannot be read as dense items."""


class NumpyType:
    """Stand-in for numpy.dtype: a code such as ``f4``, and the byte order."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code, self.order = code, "<"

    def __setstate__(self, state: Any) -> None:
        self.order = ">" if state[1] == ">" else "<"  # "|" is for items of one byte, which have no order


class ArrayRef:
    """Stand-in for a numpy array, whose bytes are stored in the pickle itself."""

    def __init__(self) -> None:
        # numpy's pickles create an empty array first, and then set its state.
        self.dtype, self.shape = dtype_from_torch("uint8"), (0,)
        self._code, self._order, self.data = "u1", "C", b""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, data = state
        self.fill(data, kind, shape, "F" if is_fortran else "C")

    def fill(self, data: Any, kind: Any, shape: Any, order: str) -> None:
        """Set the bytes, the dtype (a `NumpyType`), the shape, and the order: "C" (row-major) or "F" (column-major)."""
        code = kind.code if isinstance(kind, NumpyType) else str(kind)
        dtype = dtype_from_numpy(code)
        if dtype is None:
            raise _NotDenseError(f"a numpy array of type {code!r}")
        self.dtype, self.shape = dtype, tuple(shape)
        self._code, self._order, self.data = kind.order + code, order, bytes(data)
        if len(self.data) != math.prod(self.shape) * self.dtype.itemsize:
            raise pickle.UnpicklingError(f"{len(self.data)} bytes of an array of shape {self.shape}")

    def read(self, box: Box) -> np.ndarray:
        """Return the items of a box as raw bits, little-endian."""
        import numpy as np

        values = np.frombuffer(self.data, dtype=self._code).reshape(self.shape, order=self._order)  # type: ignore[call-overload]
        part = values[box.slices()].astype(np.dtype(self._code).newbyteorder("<"))
        # numpy cannot view a 0-d array as another type.
        raw: np.ndarray = np.ascontiguousarray(part).reshape(box.sizes or (1,)).view(self.dtype.raw)
        return raw.reshape(box.sizes)


def _empty_array(*_: Any) -> ArrayRef:
    return ArrayRef()


def _array_of_buffer(data: Any, kind: Any, shape: Any, order: str) -> ArrayRef:
    """Rebuild an array from a pickle of protocol 5."""
    array = ArrayRef()
    array.fill(data, kind, shape, order)
    return array


def _numpy_scalar(kind: Any, data: bytes) -> int | float | complex | bool:
    """Rebuild a numpy scalar, as a Python number of the same value."""
    letters = _NUMPY_NUMBERS.get(kind.code) if isinstance(kind, NumpyType) else None
    if letters is None:
        raise pickle.UnpicklingError(f"a numpy scalar of type {getattr(kind, 'code', kind)!r}")
    parts: tuple[Any, ...] = struct.unpack(kind.order + letters, data)
    return complex(*parts) if len(parts) > 1 else parts[0]


_NUMPY_NUMBERS = {  # numpy's type code -> format of the struct module
    "f2": "e",
    "f4": "f",
    "f8": "d",
    "c8": "ff",
    "c16": "dd",
    "b1": "?",
    **{
        f"{sign}{size}": letter
        for sign in "iu"
        for size, letter in zip("1248", "bhiq" if sign == "i" else "BHIQ", strict=True)
    },
}
_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")  # of numpy 1 and of numpy 2
NUMBER_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): NumpyType,
    **{(module, "scalar"): _numpy_scalar for module in _MULTIARRAY},
}
ARRAY_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): ArrayRef,
    **{(module, "_reconstruct"): _empty_array for module in _MULTIARRAY},
    **{(module, "_frombuffer"): _array_of_buffer for module in ("numpy.core.numeric", "numpy._core.numeric")},
}


class UnreadObject:
    """Stand-in for an object of any class: accepts all operations of its pickle, and keeps only the attributes."""

    has_items = False  # whether the object is of a subclass of dict

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        # The state is a dict of attributes, or (attributes, slots).
        for part in state if isinstance(state, tuple) else (state,):
            self.__dict__.update(part if isinstance(part, dict) else {})

    def __call__(self, *args: Any, **options: Any) -> UnreadObject:
        return UnreadObject()

    def __setitem__(self, key: Any, value: Any) -> None:
        """Pickles of dict subclasses call this."""
        self.has_items = True

    def append(self, item: Any) -> None:
        """Pickles of list subclasses call this."""

    def extend(self, items: Any) -> None:
        """Pickles of list subclasses call this."""

    def add(self, item: Any) -> None:
        """Pickles of set subclasses call this."""


def is_plain(value: Any) -> bool:
    """Whether a value consists of numbers, strings and containers of them."""
    if isinstance(value, Mapping):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


# Errors that the unpickler raises for damaged pickles, determined by tests that flip and remove bytes.
_DAMAGE = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


class Record:
    """Stand-in for a record type of torch: its pickled attributes, without behavior."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    if TYPE_CHECKING:  # for the type checker only: the unpickler would take its result for a `__setstate__`

        def __getattr__(self, name: str) -> Any: ...


class _PropertiesRecord(Record):
    """Stand-in for TensorProperties; its pickled state is a tuple that begins with the dtype, or a dict."""

    dtype: DType

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) else state["dtype"]


@dataclass(frozen=True, slots=True)  # slots: a checkpoint may have a hundred thousand of these objects
class TensorRef:
    """The file's side of a copy, as a torch.save pickle describes a tensor: a strided view of one storage record."""

    storage_key: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in items
    storage_offset: int  # in items
    signs: int = 0  # the bits to flip in every item, for a lazy conjugation or negation


@dataclass(frozen=True)
class ShardRef:
    """Stand-in for a DTensor in a rank's pickle: the rank's part and its placements."""

    local: TensorRef
    shape: tuple[int, ...]  # of the full tensor
    placements: tuple[Record, ...]  # stand-ins that have the class names of torch's placements
    coordinates: tuple[int, ...]  # the rank's coordinate on each mesh axis


@dataclass(frozen=True)
class PiecesRef:
    """Stand-in for a ShardedTensor (of FSDP1) in a rank's pickle: the rank's boxes."""

    shape: tuple[int, ...]  # of the full tensor
    dtype: DType
    pieces: tuple[tuple[tuple[int, ...], TensorRef], ...]  # (offsets in the full tensor, the box's items)


def _rebuild_piece(
    local: TensorRef,
    shape: tuple[int, ...],
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    *_: Any,
) -> PiecesRef:
    """Rebuild a ragged tensor of this package: the boxes follow each other in the rank's flat piece."""
    pieces, start = [], local.storage_offset
    for offsets, sizes in boxes:
        ref = replace(local, shape=sizes, strides=contiguous_strides(sizes), storage_offset=start)
        pieces.append((offsets, ref))
        start += math.prod(sizes)
    num_items = start - local.storage_offset
    if local.shape != (num_items,) or local.strides != (1,):
        raise pickle.UnpicklingError(
            f"boxes of {num_items} items in a piece of {local.shape} by {local.strides}"
        )
    return PiecesRef(shape, local.dtype, tuple(pieces))


class _Fields(tuple[Any, ...]):
    """Stand-in for torch's named tuples, whose pickles call the class with the fields."""

    def __new__(cls, *args: Any) -> _Fields:
        return super().__new__(cls, args)


def _rebuild_wrapper(*args: Any) -> Any:
    """Return the arguments: `_rebuild_typed` needs them together with the tensor's state."""
    return args


def _rebuild_typed(function: Any, kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    """Rebuild a tensor subclass or a tensor with attributes.

    Returns a `ShardRef` for a DTensor, a `PiecesRef` for a ShardedTensor, and a `TensorRef` for others.
    """
    if function is not _rebuild_wrapper:
        return function(*args)
    # DTensor by its name: it has been in several modules of torch, and each has its own stand-in.
    if kind is not _SHARDED_TENSOR and getattr(kind, "__name__", "") != "DTensor":
        raise _NotDenseError(f"a {getattr(kind, '__qualname__', kind)}, which wraps other tensors")
    if kind is _SHARDED_TENSOR:
        shards, metadata = state[0], state[1]
        pieces = tuple((tuple(shard.metadata.shard_offsets), shard.tensor) for shard in shards)
        return PiecesRef(tuple(metadata.size), metadata.tensor_properties.dtype, pieces)
    merged: dict[str, Any] = {}
    # The state is a dict of attributes, or (attributes, slots).
    for part in state if isinstance(state, tuple) else (state,):
        merged |= part or {}
    spec = merged["_spec"]
    return ShardRef(
        merged["_local_tensor"], tuple(args[2]), tuple(spec.placements), tuple(spec.mesh._coordinate_on_dim)
    )


@dataclass(frozen=True)
class _StorageRef:
    """Stand-in for a storage."""

    key: str  # name of the storage's record in the archive
    dtype: DType | None  # None for an untyped storage


def _path(*parts: str) -> str:
    """Rebuild a pathlib path, as text."""
    return "/".join(parts)


def _device(*parts: str | int) -> str:
    """Rebuild a torch.device, as text; its pickle contains the type, and the index if there is one."""
    return ":".join(map(str, parts))


def _first(value: Any, *_: Any) -> Any:
    """Return the first argument of a call; its other arguments are not needed to read tensors."""
    return value


def _rebuild_v2(
    storage: _StorageRef, offset: int, shape: Any, strides: Any, grad: bool, hooks: Any, flags: Any = None
) -> TensorRef:
    """Rebuild a tensor whose dtype is that of its storage."""
    if storage.dtype is None:
        raise pickle.UnpicklingError("an untyped storage in place of a typed one")
    return _rebuild_v3(storage, offset, shape, strides, grad, hooks, storage.dtype, flags)


def _rebuild_v3(
    storage: _StorageRef,
    offset: int,
    shape: Any,
    strides: Any,
    grad: bool,
    hooks: Any,
    dtype: DType,
    flags: Any = None,
) -> TensorRef:
    """Rebuild a tensor whose dtype is an argument, since torch has no typed storage for it."""
    sizes, steps = tuple(shape), tuple(strides)
    # ``type(n) is int``: a bool is not a size.
    if len(sizes) != len(steps) or not all(type(n) is int and n >= 0 for n in (*sizes, *steps, offset)):
        raise pickle.UnpicklingError(f"a tensor of shape {sizes}, strides {steps} and offset {offset}")
    return TensorRef(storage.key, dtype, sizes, steps, offset, _signs(dtype, flags or {}))


def _signs(dtype: DType, flags: Any) -> int:
    """Return the bits in which a stored item differs from its value.

    torch conjugates and negates lazily: the storage keeps the original values, and the tensor gets a flag.
    """
    if unknown := set(flags) - {"conj", "neg"}:
        raise _NotDenseError(f"a tensor with unknown flags: {', '.join(sorted(map(str, unknown)))}")
    conj, neg = bool(flags.get("conj")), bool(flags.get("neg"))
    if (conj and dtype.kind != "complex") or (neg and dtype.kind not in ("float", "complex")):
        raise _NotDenseError(f"a {dtype.name} tensor that is lazily conjugated or negated")
    # The sign bits of the real and of the imaginary part, which is in the high bits of a little-endian item.
    real, last = 1 << (dtype.bits // 2 - 1), 1 << (dtype.bits - 1)
    if dtype.kind == "float":
        return last if neg else 0
    # Both conjugation and negation flip the imaginary sign, so together they do not.
    return (real if neg else 0) | (last if conj != neg else 0)


def _encode(text: str, encoding: str) -> bytes:
    """Rebuild bytes, which protocol 2 pickles as latin1 text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"unknown encoding {encoding!r}")
    return text.encode("latin1")


def _nested_class(outer: Any, name: str) -> type[Record]:
    """Stand-in for ``getattr``, by which protocol 2 pickles nested classes; torch's pickles need only this class."""
    if (outer, name) != (_SHARDED_TENSOR, "ProcessGroupState"):
        raise pickle.UnpicklingError(f"an attribute {name!r} of {outer!r}")
    return Record


def _stand_in_attribute(outer: Any, name: str) -> Any:
    """Stand-in for ``getattr`` with ``stand_ins``: attributes of unknown classes (such as enums) are `UnreadObject`."""
    if isinstance(outer, type) and issubclass(outer, UnreadObject):
        return UnreadObject()
    return _nested_class(outer, name)


_SHARDED_TENSOR = type("ShardedTensor", (Record,), {"ProcessGroupState": Record})


STORAGE_TYPES = {  # name of torch's storage class -> dtype of its items
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


def _no_bytes(*args: Any) -> bytes:
    """Rebuild empty bytes, which protocol 2 pickles as ``bytes()``."""
    if args:
        raise pickle.UnpicklingError("bytes of something else")
    return b""


def _default_dict(*_: Any) -> dict[Any, Any]:
    """Rebuild a defaultdict as a dict, since its factory is code."""
    return {}


_BUILTINS: dict[str, Any] = {
    each.__name__: each for each in (set, frozenset, list, dict, tuple, int, float, complex, str, bool)
}
_BUILTINS |= {"long": int, "unicode": str, "bytes": _no_bytes}  # names in pickles of protocol 2
# Names in pickles of plain values.
_PLAIN_NAMES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): dict,  # the milestones of torch's MultiStepLR
    ("collections", "defaultdict"): _default_dict,
    ("_codecs", "encode"): _encode,
    **NUMBER_NAMES,
    **{(module, name): kind for module in ("builtins", "__builtin__") for name, kind in _BUILTINS.items()},
}
# Names both in pickles of tensors and in DCP's metadata.
_TORCH_NAMES: dict[tuple[str, str], Any] = {
    **{("torch", dtype.torch_name): dtype for dtype in DTYPES if dtype.torch_name},
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _first,
    ("collections", "OrderedDict"): OrderedDict,
}
# Names in DCP's ``.metadata``.
_METADATA_NAMES: dict[tuple[str, str], Any] = {
    **_TORCH_NAMES,
    **{
        ("torch.distributed.checkpoint.metadata", name): type(name, (Record,), {})
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
        )
    },
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): _PropertiesRecord,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _first,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): type(
        "_StorageInfo", (Record,), {}
    ),  # a class of its own for each record: readers check the class name
    **{
        (module, name): _path
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
    },
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
}
# Names in the ``data.pkl`` of torch.save archives.
_TENSOR_NAMES: dict[tuple[str, str], Any] = {
    **_PLAIN_NAMES,
    **_TORCH_NAMES,
    **{("torch", name): dtype_from_torch(dtype) for name, dtype in STORAGE_TYPES.items()},
    **ARRAY_NAMES,
    # None: an untyped storage has no dtype, so `_StorageRef.dtype` is None.
    ("torch.storage", "UntypedStorage"): None,
    ("torch", "UntypedStorage"): None,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,  # a parameter with attributes
    ("torch", "Tensor"): type("Tensor", (Record,), {}),  # the class of a tensor with attributes
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_typed,
    ("torch._utils", "_rebuild_wrapper_subclass"): _rebuild_wrapper,
    ("vescale_fsdp.dtensor", "_rebuild_piece"): _rebuild_piece,
    ("torch", "device"): _device,
    **{
        (module, name): type(name, (Record,), {})
        for module, names in {
            "torch.distributed.tensor": ("DTensor",),
            "torch.distributed._tensor.api": ("DTensor",),
            "torch.distributed.tensor._api": ("DTensor",),
            "torch.distributed.device_mesh": ("DeviceMesh",),
            "torch.distributed._mesh_layout": ("_MeshLayout", "_FlatLayout"),
            "torch.distributed.tensor._dtensor_spec": ("DTensorSpec",),
            "torch.distributed.tensor.placement_types": ("Shard", "_StridedShard", "Replicate", "Partial"),
            "vescale_fsdp": ("RaggedShard",),
            "vescale_fsdp.layout": ("StridedRaggedShard",),
            "torch.distributed.remote_device": ("_remote_device",),
            "torch.distributed._shard.metadata": ("ShardMetadata",),
            "torch.distributed._shard.sharded_tensor.api": (
                "ShardedTensor",
                "ShardedTensor.ProcessGroupState",  # protocol 4 names nested classes in this way
            ),
            "torch.distributed._shard.sharded_tensor.shard": ("Shard",),
            "torch.distributed._shard.sharded_tensor.metadata": ("ShardedTensorMetadata",),
            "torch.distributed._shard.sharding_spec.api": ("EnumerableShardingSpec",),
            "torch.distributed._shard.sharding_spec.chunk_sharding_spec": ("ChunkShardingSpec",),
        }.items()
        for name in names
    },
    ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"): _SHARDED_TENSOR,
    **{(module, "getattr"): _nested_class for module in ("builtins", "__builtin__")},
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _PropertiesRecord,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _first,
    ("torch.distributed.tensor._dtensor_spec", "TensorMeta"): _Fields,
    ("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry"): _Fields,
}


def how_to_trust() -> str:
    """Say how a user allows a pickle to run code."""
    trust = option("trust_pickle", True)
    return f"if you trust whoever made the file, convert it with {trust}: this runs code from the file"


_HOW_TO_SAVE_A_MODULE = (
    "all tensors are in objects, such as a module: save its state_dict(). If you trust whoever made the file, "
    "torch.load(.., weights_only=False) loads the object: this runs code from it"
)
# Functions that rebuild tensors that cannot be read as dense items; refused even in a trusted pickle.
_NOT_DENSE = {
    ("torch._utils", "_rebuild_sparse_tensor"): "a sparse tensor",
    ("torch._utils", "_rebuild_qtensor"): "a tensor of a quantized type",
    ("torch._utils", "_rebuild_nested_tensor"): "a nested tensor",
    ("torch.nested._internal.nested_tensor", "_rebuild_njt"): "a nested tensor",
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): "a tensor on the meta device, which has no values",
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): "a tensor of a device that saves numpy arrays",
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): "a tensor of a device that saves copies",
    ("torch._utils", "_rebuild_xla_tensor"): "a tensor of a device that saves numpy arrays",
}


class _PlainUnpickler(pickle.Unpickler):
    """Knows only numbers, strings and containers of Python, and numpy's scalars."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PLAIN_NAMES:  # not damage: the caller may have torch load the object
            raise LookupError(f"{module}.{name}")
        return _PLAIN_NAMES[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise LookupError("a tensor")


class _AllowListUnpickler(pickle.Unpickler):
    """Knows the given names; all other names are refused, imported (``trust``) or replaced (``stand_ins``)."""

    def __init__(
        self,
        data: bytes,
        names: dict[tuple[str, str], Any],
        where: str,
        *,
        trust: bool,
        stand_ins: bool = False,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._data, self._names, self._where, self._trust, self._stand_ins = (
            data,
            names,
            where,
            trust,
            stand_ins,
        )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NOT_DENSE:
            raise _NotDenseError(_NOT_DENSE[module, name])
        # The known `getattr` allows one nested class only; with ``trust`` or ``stand_ins``, any attribute is allowed.
        is_other = (module, name) not in self._names or name == "getattr"
        if self._stand_ins and is_other:
            # A class in every case: if the name is that of a function, the pickle's call makes an instance.
            unread = type(f"{module}.{name}", (UnreadObject,), {})
            return _stand_in_attribute if name == "getattr" else unread
        if self._trust and is_other:
            return super().find_class(module, name)
        if (module, name) in self._names:
            return self._names[module, name]
        raise ConversionError(
            "The checkpoint's pickle names code that is not needed to read tensors.",
            expected="only torch's checkpoint records, sizes, dtypes and tensor rebuilds",
            got=f"{module}.{name}",
            where=self._where,
            todo=how_to_trust() if self._may_be_trusted() else _HOW_TO_SAVE_A_MODULE,
        )

    def _may_be_trusted(self) -> bool:
        """Return whether tensors could be read from the trusted pickle: not all of them are in objects."""
        try:
            content = _AllowListUnpickler(
                self._data, self._names, self._where, trust=False, stand_ins=True
            ).load()
            return self._names is _METADATA_NAMES or _has_tensor(content)
        except (_NotDenseError, *_DAMAGE):  # unknown: the trusted pickle shows it
            return True

    def persistent_load(self, pid: Any) -> _StorageRef:
        if not (isinstance(pid, tuple) and len(pid) >= 3 and pid[0] == "storage"):
            raise pickle.UnpicklingError(f"unknown persistent id {pid!r}")
        dtype = pid[1]  # ``pid`` is ("storage", type, key, location, numel)
        if dtype is not None and not isinstance(dtype, DType):
            raise pickle.UnpicklingError(f"unknown storage type {dtype!r}")
        if len(pid) > 3 and pid[3] == "meta":
            raise _NotDenseError("a tensor on the meta device, which has no values")
        return _StorageRef(str(pid[2]), dtype)


def _has_tensor(value: Any) -> bool:
    """Return whether dicts and lists, nested in any way, contain a tensor."""
    if isinstance(value, Mapping | list | tuple):
        return any(map(_has_tensor, value.values() if isinstance(value, Mapping) else value))
    if isinstance(value, UnreadObject):
        return value.has_items
    return isinstance(value, TensorRef | ShardRef | PiecesRef | ArrayRef)


def _load(unpickler: pickle.Unpickler, what: str, where: str) -> Any:
    """Unpickle, and convert the unpickler's errors; ``what`` is the subject of the message for a damaged pickle."""
    try:
        return unpickler.load()
    except _NotDenseError as error:
        raise ConversionError(
            "The checkpoint contains a tensor that cannot be converted.",
            expected="dense tensors of torch's plain types",
            got=error,
            where=where,
            todo="save it dense (to_dense, dequantize), or do not save it",
        ) from error
    except _DAMAGE as error:
        raise CorruptCheckpointError(
            f"{what} cannot be read.",
            expected="a complete pickle",
            got=f"{type(error).__name__}: {error}",
            where=where,
        ) from error


def load_dcp_metadata(data: bytes, *, where: str, trust: bool = False, stand_ins: bool = False) -> Record:
    """Read the Metadata record of a DCP ``.metadata`` file; for the arguments see `load_tensor_pickle`.

    Raises:
        ConversionError: if the pickle names anything outside the allow-list, without ``trust`` and ``stand_ins``.
        CorruptCheckpointError: if the file is damaged or contains another object.
    """
    unpickler = _AllowListUnpickler(data, _METADATA_NAMES, where, trust=trust, stand_ins=stand_ins)
    loaded = _load(unpickler, "The checkpoint's metadata", where)
    if type(loaded).__name__ != "Metadata":
        raise CorruptCheckpointError(
            "The checkpoint's .metadata file was not written by DCP.",
            expected="a Metadata record",
            got=type(loaded).__name__,
            where=where,
            todo="check that the folder was written by torch.distributed.checkpoint",
        )
    assert isinstance(loaded, Record)
    return loaded


def load_tensor_pickle(data: bytes, *, where: str, trust: bool = False, stand_ins: bool = False) -> Any:
    """Read the object in the ``data.pkl`` of a torch.save archive, with a stand-in such as `TensorRef` for each tensor.

    Args:
        data: the pickle.
        where: path of the archive, for messages.
        trust: import names outside the allow-list, which may run any code.
        stand_ins: replace names outside the allow-list by `UnreadObject`, without importing them.

    Raises:
        ConversionError: if the pickle names anything outside the allow-list, without ``trust`` and ``stand_ins``.
        CorruptCheckpointError: if the pickle is damaged.
    """
    unpickler = _AllowListUnpickler(data, _TENSOR_NAMES, where, trust=trust, stand_ins=stand_ins)
    return _load(unpickler, "A torch.save pickle", where)


def load_plain_pickle(data: bytes, *, where: str) -> Any:
    """Read a value that consists only of numbers, strings and containers.

    Raises:
        LookupError: if the pickle names anything else.
        CorruptCheckpointError: if the pickle is damaged.
    """
    return _load(_PlainUnpickler(io.BytesIO(data)), "A stored value", where)
