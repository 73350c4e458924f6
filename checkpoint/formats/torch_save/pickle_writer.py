"""Writing pickles that torch reads, without importing torch and without pickling objects.

What is written is data: plain values, references to torch's records by name, and tensors as references to
storage records of the archive around the pickle. Protocol 2 opcodes, as torch.save writes; see the
`pickletools` module.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from vescale_fsdp.checkpoint.formats.torch_save.pickle_reader import STORAGE_TYPES
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.layout.dtypes import DType
from vescale_fsdp.layout.geometry import contiguous_strides, numel_of


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
    """A row-major tensor that is the whole of one storage record, whose items may be repeated along some dims."""

    storage_key: str
    dtype: DType
    shape: tuple[int, ...]
    repeated: tuple[int, ...] = ()


_INT, _UINT = struct.Struct("<i").pack, struct.Struct("<I").pack
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
        self._written: dict[object, bytes] = {}

    def put(self, value: Any) -> None:
        kind = type(value)
        if kind not in _OPCODES_OF:
            known = next((base for base in _OPCODES_OF if issubclass(kind, base)), None)
            if known is None and not isinstance(value, Mapping):
                raise self._refused(kind)
            _OPCODES_OF[kind] = _OPCODES_OF[known or dict]
        _OPCODES_OF[kind](self, value)

    def _refused(self, kind: type) -> ConversionError:
        return ConversionError(
            "A value cannot be written in this format.",
            expected="numbers, strings, bytes, lists, tuples, sets and dicts",
            got=f"{kind.__module__}.{kind.__qualname__}",
            where=self._where,
            todo="leave the value out with --exclude",
        )

    def _put_constant(self, value: bool | None) -> None:
        self.out += b"N" if value is None else b"\x88" if value else b"\x89"

    def _put_int(self, value: int) -> None:
        if -(2**31) <= value < 2**31:
            self.out += b"J" + _INT(value)
        else:
            value = int(value)
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += b"\x8a" + bytes([len(data)]) + data

    def _put_float(self, value: float) -> None:
        self.out += b"G" + struct.pack(">d", value)

    def _put_bytes(self, value: bytes) -> None:
        self.put(Call(Global("_codecs", "encode"), (value.decode("latin1"), "latin1")))

    def _put_tuple(self, items: Iterable[Any]) -> None:
        self.out += b"("
        for item in items:
            self.put(item)
        self.out += b"t"

    def _put_list(self, items: Iterable[Any]) -> None:
        self.out += b"]("
        for item in items:
            self.put(item)
        self.out += b"e"

    def _put_complex(self, value: complex) -> None:
        self.put(Call(Global("builtins", "complex"), (value.real, value.imag)))

    def _put_set(self, items: Set[Any]) -> None:
        # Sorted: the same bytes in every process, so that an interrupted conversion goes on.
        self.put(Call(Global("builtins", type(items).__name__), (tuple(sorted(items, key=repr)),)))

    def _put_mapping(self, mapping: Mapping[Any, Any]) -> None:
        self.out += b"}("
        for key, item in mapping.items():
            self.put(key)
            self.put(item)
        self.out += b"u"

    # Names repeat thousands of times in metadata: the second time a reference will do.

    def _put_str(self, value: str) -> None:
        if not self._put_reference(value):
            data = value.encode("utf-8", "surrogatepass")
            self._put_new(value, b"X" + _UINT(len(data)) + data)

    def _put_global(self, value: Global) -> None:
        if not self._put_reference(value):
            self._put_new(value, f"c{value.module}\n{value.name}\n".encode())

    def _put_reference(self, value: Global | str) -> bool:
        place = self._memo.get(value)
        if place is None:
            return False
        self.out += b"j" + _UINT(place)
        return True

    def _put_new(self, value: Global | str, opcodes: bytes) -> None:
        self.out += opcodes + b"r" + _UINT(len(self._memo))
        self._memo[value] = len(self._memo)

    # So do sizes and types, which are written of nothing but references and numbers the second time.

    def _put_again(self, key: object, write: Callable[[], None]) -> None:
        """What ``write`` writes, from what it wrote before for the same key if that can be said again."""
        known = self._written.get(key)
        if known is not None:
            self.out += known
            return
        start, names = len(self.out), len(self._memo)
        write()
        if len(self._memo) == names:
            self._written[key] = bytes(self.out[start:])

    def _put_call(self, value: Call) -> None:
        def write() -> None:
            self.put(value.func)
            self.put(value.args)
            self.out += b"R"

        self._put_again(value, write)

    def _put_instance(self, value: New) -> None:
        def write() -> None:
            self.put(value.cls)
            self.out += b")\x81"
            self.put(value.state)
            self.out += b"b"

        if type(value.state) is tuple:
            self._put_again(value, write)
        else:
            write()

    # A tensor is torch's call, whose first argument is a persistent id: only the key of the storage in it is new.

    def _put_tensor(self, value: TensorOut) -> None:
        dtype, shape = value.dtype, value.shape
        kept = tuple(1 if dim in value.repeated else size for dim, size in enumerate(shape))
        strides = tuple(
            0 if dim in value.repeated else stride for dim, stride in enumerate(contiguous_strides(kept))
        )
        typed = _STORAGE_CLASSES.get(dtype.name)

        def write_before() -> None:
            self.put(Global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"))
            self.out += b"(("
            self.put("storage")
            self.put(Global("torch", typed) if typed else Global("torch.storage", "UntypedStorage"))

        def write_after() -> None:
            self.put("cpu")
            self.put(numel_of(kept) * (1 if typed else dtype.itemsize))
            self.out += b"tQ"
            hooks = Call(Global("collections", "OrderedDict"), ())
            for argument in (0, shape, strides, False, hooks):
                self.put(argument)
            if not typed:
                self.put(torch_dtype(dtype))
            self.out += b"tR"

        self._put_again(dtype, write_before)
        self.put(value.storage_key)
        self._put_again((dtype, shape, value.repeated), write_after)


# How the values of a type are written, and those of types made from it; the first that fits.
_OPCODES_OF: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): _Writer._put_constant,
    bool: _Writer._put_constant,
    int: _Writer._put_int,
    float: _Writer._put_float,
    complex: _Writer._put_complex,
    Global: _Writer._put_global,
    str: _Writer._put_str,
    bytes: _Writer._put_bytes,
    tuple: _Writer._put_tuple,
    list: _Writer._put_list,
    dict: _Writer._put_mapping,
    set: _Writer._put_set,
    frozenset: _Writer._put_set,
    Call: _Writer._put_call,
    New: _Writer._put_instance,
    TensorOut: _Writer._put_tensor,
}
