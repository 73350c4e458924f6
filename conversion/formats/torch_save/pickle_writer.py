"""Writing pickles that torch reads, without importing torch and without pickling objects.

What is written is data: plain values, references to torch's records by name, and tensors as references to
storage records of the archive around the pickle. Protocol 2 opcodes, as torch.save writes; see the
`pickletools` module.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vescale_fsdp.conversion.formats.torch_save.pickle_reader import STORAGE_TYPES
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.layout.dtypes import DType
from vescale_fsdp.layout.geometry import contiguous_strides, numel_of

__all__ = ["Call", "Global", "New", "TensorOut", "dump_pickle", "torch_dtype", "torch_size"]


class Global(NamedTuple):
    """Something importable, by name."""

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """What ``func(*args)`` returns when the pickle is read."""

    func: Global
    args: tuple[Any, ...]


@dataclass(frozen=True)
class New:
    """An instance of a record type, made without calling it, with this state (a dict, or what it takes)."""

    cls: Global
    state: Any


@dataclass(frozen=True)
class TensorOut:
    """A row-major tensor that is the whole of one storage record."""

    storage_key: str
    dtype: DType
    shape: tuple[int, ...]


_STORAGE_CLASSES = {dtype: name for name, dtype in STORAGE_TYPES.items()}


def torch_dtype(dtype: DType) -> Global:
    """torch's object for a type; raises ConversionError if torch has no such type."""
    return Global("torch", dtype.required_torch_name)


def torch_size(sizes: tuple[int, ...]) -> Call:
    """A torch.Size."""
    return Call(Global("torch", "Size"), (tuple(sizes),))


def dump_pickle(value: Any, *, where: str) -> bytes:
    """The pickle of a value made of plain Python data and the classes of this module.

    Raises:
        ConversionError: for anything else.
    """
    writer = _Writer(where)
    writer.put(value)
    return bytes(writer.out + b".")


class _Writer:
    def __init__(self, where: str) -> None:
        self._where = where
        self.out = bytearray(b"\x80\x02")
        self._memo: dict[Global | str, int] = {}

    def put(self, value: Any) -> None:
        if value is None or isinstance(value, bool):
            self.out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif isinstance(value, int):
            self._put_int(int(value))
        elif isinstance(value, float):
            self.out += b"G" + struct.pack(">d", value)
        elif isinstance(value, Global):
            self._put_once(value, f"c{value.module}\n{value.name}\n".encode())
        elif isinstance(value, str):
            data = value.encode("utf-8", "surrogatepass")
            self._put_once(value, b"X" + struct.pack("<I", len(data)) + data)
        elif isinstance(value, bytes):
            self.put(Call(Global("_codecs", "encode"), (value.decode("latin1"), "latin1")))
        elif isinstance(value, tuple):
            self._put_marked(b"(", value, b"t")
        elif isinstance(value, list):
            self._put_marked(b"](", value, b"e")
        elif isinstance(value, Mapping):
            self._put_marked(b"}(", [item for pair in value.items() for item in pair], b"u")
        elif isinstance(value, Call):
            self.put(value.func)
            self.put(value.args)
            self.out += b"R"
        elif isinstance(value, New):
            self.put(value.cls)
            self.out += b")\x81"
            self.put(value.state)
            self.out += b"b"
        elif isinstance(value, TensorOut):
            self.put(self._rebuild(value))
        elif isinstance(value, _StorageId):
            self.put(value.parts)
            self.out += b"Q"
        else:
            raise ConversionError(
                "A value cannot be written in this format.",
                expected="numbers, strings, bytes, lists, tuples and dicts",
                got=f"{type(value).__module__}.{type(value).__qualname__}",
                where=self._where,
                todo="leave the value out with --exclude",
            )

    def _put_marked(self, before: bytes, items: Any, after: bytes) -> None:
        self.out += before
        for item in items:
            self.put(item)
        self.out += after

    def _put_int(self, value: int) -> None:
        if -(2**31) <= value < 2**31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += b"\x8a" + bytes([len(data)]) + data

    def _put_once(self, value: Global | str, opcodes: bytes) -> None:
        """Names repeat thousands of times in metadata: the second time a reference will do."""
        if value in self._memo:
            self.out += b"j" + struct.pack("<I", self._memo[value])
            return
        self.out += opcodes + b"r" + struct.pack("<I", len(self._memo))
        self._memo[value] = len(self._memo)

    def _rebuild(self, tensor: TensorOut) -> Call:
        dtype = tensor.dtype
        numel = numel_of(tensor.shape)
        typed = _STORAGE_CLASSES.get(dtype.name)
        cls = Global("torch", typed) if typed else Global("torch.storage", "UntypedStorage")
        count = numel if typed else numel * dtype.itemsize
        storage = _StorageId(("storage", cls, tensor.storage_key, "cpu", count))
        hooks = Call(Global("collections", "OrderedDict"), ())
        args = (storage, 0, tensor.shape, contiguous_strides(tensor.shape), False, hooks)
        if typed:
            return Call(Global("torch._utils", "_rebuild_tensor_v2"), args)
        return Call(Global("torch._utils", "_rebuild_tensor_v3"), (*args, torch_dtype(dtype)))


@dataclass(frozen=True)
class _StorageId:
    """A persistent id: which storage record holds a tensor's bytes."""

    parts: tuple[Any, ...]
