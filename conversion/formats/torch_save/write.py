"""Write torch.save files without torch: a pickle as opcodes, in a zip archive whose tensor bytes are streamed.

    local header | data.pkl | ... | local header, padded | storage 0 | descriptor | ... | directory | end

The pickle contains plain values, torch's records by name, and tensors as references to storage records of the archive
(protocol 2, like torch.save; see `pickletools`). Sizes are known before the data is copied, but checksums only
afterwards. So each storage is followed by a descriptor with its CRC-32, as in streamed zip files, and the directory is
computed last. Like torch, the writer aligns storages to 64 bytes, so that ``torch.load(mmap=True)`` gets aligned
tensors. Format: PKWARE's APPNOTE, sections 4.3 and 4.5.3 (zip64).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import count
from typing import Any, NamedTuple

from vescale_fsdp.checkpoint.state.nesting import Path, nest
from vescale_fsdp.checkpoint.storage.checksums import CRC32
from vescale_fsdp.conversion.engine.carried_state import CarriedState
from vescale_fsdp.conversion.engine.plan import (
    ComputedBytes,
    Content,
    CrcOf,
    FilePlan,
    FixedBytes,
    OutputPlan,
    TensorItems,
    whole,
)
from vescale_fsdp.conversion.engine.tensor_view import repeated_dims, without_repeats
from vescale_fsdp.conversion.formats.torch_save.archive_reader import (
    CENTRAL_HEADER,
    CENTRAL_SIGNATURE,
    END,
    END64,
    END64_LOCATOR,
    END64_LOCATOR_SIGNATURE,
    END64_SIGNATURE,
    END_SIGNATURE,
    LOCAL_HEADER,
    LOCAL_SIGNATURE,
    MAX_32,
    ZIP64_TAG,
    ZipRecord,
)
from vescale_fsdp.conversion.formats.torch_save.pickle_reader import STORAGE_TYPES
from vescale_fsdp.errors import ConversionError, option
from vescale_fsdp.layout.dtypes import DType
from vescale_fsdp.layout.geometry import contiguous_strides, numel_of


class Global(NamedTuple):
    """A class or function that the reader of the pickle imports by name."""

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """The result of ``func(*args)``; the call is made when the pickle is read."""

    func: Global
    args: tuple[Any, ...]


@dataclass(frozen=True)
class New:
    """An instance of a record type, created without ``__init__``.

    Attributes:
        state: a dict of attributes, or the argument of the type's ``__setstate__``.
    """

    cls: Global
    state: Any


@dataclass(frozen=True)
class TensorOut:
    """A tensor that uses all items of one storage record, in row-major order.

    Attributes:
        storage_key: the name of the storage record.
        repeated: dims with stride 0, along which the items are stored only once.
    """

    storage_key: str
    dtype: DType
    shape: tuple[int, ...]
    repeated: tuple[int, ...] = ()


_INT, _UINT = struct.Struct("<i").pack, struct.Struct("<I").pack
_STORAGE_CLASSES = {dtype: name for name, dtype in STORAGE_TYPES.items()}


def torch_dtype(dtype: DType) -> Global:
    """Return torch's object for a dtype; raises ConversionError if torch has no such dtype."""
    return Global("torch", dtype.required_torch_name)


def torch_size(sizes: tuple[int, ...]) -> Call:
    """Return a torch.Size."""
    return Call(Global("torch", "Size"), (tuple(sizes),))


def dump_pickle(value: Any, *, where: str) -> bytes:
    """Pickle a value that consists of plain Python data and the classes of this module.

    Raises:
        ConversionError: if the value contains other objects.
    """
    writer = _Writer(where)
    writer.put(value)
    return bytes(writer.out + b".")  # STOP


class _Writer:
    """Writes the opcodes of one pickle."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.out = bytearray(b"\x80\x02")  # PROTO 2
        self._memo: dict[Global | str, int] = {}  # text or name -> its index in the pickle's memo
        self._written: dict[object, bytes] = {}  # key of `_put_again` -> opcodes

    def put(self, value: Any) -> None:
        kind = type(value)
        if kind not in _OPCODES_OF:
            base = next((base for base in _OPCODES_OF if issubclass(kind, base)), None)
            if base is None and not isinstance(value, Mapping):
                raise ConversionError(
                    "A value cannot be written in this format.",
                    expected="numbers, strings, bytes, lists, tuples, sets and dicts",
                    got=f"{kind.__module__}.{kind.__qualname__}",
                    where=self._where,
                    todo=f"leave the value out with {option('exclude')}",
                )
            _OPCODES_OF[kind] = _OPCODES_OF[base or dict]  # remembered for the next value of this type
        _OPCODES_OF[kind](self, value)

    def _put_constant(self, value: bool | None) -> None:
        self.out += b"N" if value is None else b"\x88" if value else b"\x89"  # NONE, NEWTRUE, NEWFALSE

    def _put_int(self, value: int) -> None:
        if -(2**31) <= value < 2**31:
            self.out += b"J" + _INT(value)  # BININT: 32 bits
        else:
            value = int(value)  # also for a subclass of int
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)  # room for the sign bit
            self.out += b"\x8a" + bytes([len(data)]) + data  # LONG1: at most 255 bytes

    def _put_float(self, value: float) -> None:
        self.out += b"G" + struct.pack(">d", value)  # BINFLOAT

    def _put_bytes(self, value: bytes) -> None:
        # Protocol 2 has no opcode for bytes; Python's pickler writes the same call.
        self.put(Call(Global("_codecs", "encode"), (value.decode("latin1"), "latin1")))

    def _put_tuple(self, items: Iterable[Any]) -> None:
        self.out += b"("  # MARK
        for item in items:
            self.put(item)
        self.out += b"t"  # TUPLE

    def _put_list(self, items: Iterable[Any]) -> None:
        self.out += b"]("  # EMPTY_LIST, MARK
        for item in items:
            self.put(item)
        self.out += b"e"  # APPENDS

    def _put_complex(self, value: complex) -> None:
        self.put(Call(Global("builtins", "complex"), (value.real, value.imag)))

    def _put_set(self, items: Set[Any]) -> None:
        # Sorted: a resumed conversion must write the same bytes, but the order of a set differs between processes.
        self.put(Call(Global("builtins", type(items).__name__), (tuple(sorted(items, key=repr)),)))

    def _put_mapping(self, mapping: Mapping[Any, Any]) -> None:
        self.out += b"}("  # EMPTY_DICT, MARK
        for key, item in mapping.items():
            self.put(key)
            self.put(item)
        self.out += b"u"  # SETITEMS

    # Metadata contains the same texts and names thousands of times. After the first time, they are written as
    # references to the pickle's memo.

    def _put_str(self, value: str) -> None:
        if not self._put_reference(value):
            data = value.encode("utf-8", "surrogatepass")
            self._put_new(value, b"X" + _UINT(len(data)) + data)

    def _put_global(self, value: Global) -> None:
        if not self._put_reference(value):
            self._put_new(value, f"c{value.module}\n{value.name}\n".encode())

    def _put_reference(self, value: Global | str) -> bool:
        """Write a reference if the value is in the memo; returns whether it is."""
        index = self._memo.get(value)
        if index is None:
            return False
        self.out += b"j" + _UINT(index)  # LONG_BINGET
        return True

    def _put_new(self, value: Global | str, opcodes: bytes) -> None:
        self.out += opcodes + b"r" + _UINT(len(self._memo))  # LONG_BINPUT
        self._memo[value] = len(self._memo)

    # Sizes and dtypes repeat, too. Once all names in a value are in the memo, the value has the same opcodes each time.

    def _put_again(self, key: object, write: Callable[[], None]) -> None:
        """Call ``write``, or repeat the opcodes that it wrote for the same key if they added nothing to the memo."""
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
            self.out += b"R"  # REDUCE

        self._put_again(value, write)

    def _put_instance(self, value: New) -> None:
        def write() -> None:
            self.put(value.cls)
            self.out += b")\x81"  # EMPTY_TUPLE, NEWOBJ
            self.put(value.state)
            self.out += b"b"  # BUILD

        if type(value.state) is tuple:  # a dict cannot be a key of `_written`
            self._put_again(value, write)
        else:
            write()

    def _put_tensor(self, value: TensorOut) -> None:
        """Write a call that rebuilds a tensor, with the persistent id of its storage as the first argument.

        It is written in three parts, since the opcodes of equal tensors differ only in the key of the storage.
        """
        dtype, shape = value.dtype, value.shape
        # The shape of the storage: repeated items are stored once.
        kept = tuple(1 if dim in value.repeated else size for dim, size in enumerate(shape))
        strides = tuple(
            0 if dim in value.repeated else stride for dim, stride in enumerate(contiguous_strides(kept))
        )
        typed = _STORAGE_CLASSES.get(dtype.name)  # None: torch has no typed storage for this dtype

        def write_before() -> None:
            self.put(Global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"))
            self.out += b"(("  # MARK of the arguments, MARK of the persistent id
            self.put("storage")
            self.put(Global("torch", typed) if typed else Global("torch.storage", "UntypedStorage"))

        def write_after() -> None:
            self.put("cpu")
            self.put(numel_of(kept) * (1 if typed else dtype.itemsize))
            self.out += b"tQ"  # TUPLE, BINPERSID
            hooks = Call(Global("collections", "OrderedDict"), ())
            for argument in (0, shape, strides, False, hooks):
                self.put(argument)
            if not typed:
                self.put(torch_dtype(dtype))
            self.out += b"tR"  # TUPLE, REDUCE

        self._put_again(dtype, write_before)
        self.put(value.storage_key)
        self._put_again((dtype, shape, value.repeated), write_after)


# The method that writes values of a type. A subclass uses the first of these types that is its base.
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


_ALIGNMENT_BYTES = 64  # of storages, as torch.save aligns them
_UTF8, _HAS_DESCRIPTOR = 0x0800, 0x0008  # flags of a record: its name is UTF-8; a descriptor follows its data
_DESCRIPTOR, _WIDE_DESCRIPTOR = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
_VERSION_NEEDED = 45  # version 4.5 of the zip format, which has zip64
_PADDING_TAG = b"FB"  # the tag of torch's extra field for padding


def _descriptor_of(record: ZipRecord) -> struct.Struct:
    """Return the format of the descriptor that follows a storage."""
    return _WIDE_DESCRIPTOR if record.is_wide else _DESCRIPTOR


def plan_archive(pickle: bytes, storages: Sequence[TensorItems], first_index: int) -> list[Content]:
    """Plan the contents of one archive.

    Args:
        pickle: the content of ``data.pkl``.
        storages: the items of each storage.
        first_index: the number of contents in the file before this archive.

    Returns:
        The contents in order. Storage i is the record ``data/i``, and content ``first_index + 2 * i + 1`` of the file.
    """
    sizes = tuple(items.nbytes for items in storages)
    # A DCP file has thousands of archives with one tensor each, mostly of equal pickles and sizes: plans are cached.
    plan = (_small_archive if len(sizes) < 2 else _ArchivePlan)(pickle, sizes)
    contents: list[Content] = [FixedBytes(plan.head)]
    for number, items in enumerate(storages):
        contents.append(TensorItems(items.view, items.start, items.stop, crc=CRC32))
        nbytes = plan.nbytes_after(number)
        contents.append(ComputedBytes(nbytes, partial(plan.after, number, first_index)))
    return contents


class _ArchivePlan:
    """The bytes of one archive apart from its storages: before the first storage, and after each storage."""

    def __init__(self, pickle: bytes, sizes: tuple[int, ...]) -> None:
        self._records: dict[bytes, ZipRecord] = {}  # by name; the CRC-32 of a storage is None
        self._position = 0
        self._fixed = [b""]  # bytes before the first storage, then bytes after each storage's descriptor
        self._add("data.pkl", pickle)
        self._add(".format_version", b"1")
        self._add(".storage_alignment", str(_ALIGNMENT_BYTES).encode())
        self._add("byteorder", b"little")
        self._storages = [self._add_storage(number, nbytes) for number, nbytes in enumerate(sizes)]
        self._add("version", b"3\n")  # the version of the file format that torch writes

    def _add(self, name: str, data: bytes) -> None:
        self._append(name, ZipRecord(self._position, len(data), CRC32.of(data)), data)

    def _add_storage(self, number: int, nbytes: int) -> ZipRecord:
        record = ZipRecord(self._position, nbytes, None)
        self._append(f"data/{number}", record)
        self._position += nbytes + _descriptor_of(record).size
        self._fixed.append(b"")
        return record

    def _append(self, name: str, record: ZipRecord, data: bytes = b"") -> None:
        encoded = f"archive/{name}".encode()
        self._records[encoded] = record
        data = _local_header(encoded, record) + data
        self._fixed[-1] += data
        self._position += len(data)

    @property
    def head(self) -> bytes:
        """The bytes before the first storage; the whole archive if it has no storages."""
        return self._fixed[0] if self._storages else self._fixed[0] + self._directory(lambda _: 0)

    def nbytes_after(self, number: int) -> int:
        """Return the number of bytes from the end of a storage to the next storage, or to the end of the archive."""
        is_last = number == len(self._storages) - 1
        known = _descriptor_of(self._storages[number]).size + len(self._fixed[number + 1])
        return known + (self._directory_bytes if is_last else 0)

    def after(self, number: int, first_index: int, crc_of: CrcOf) -> bytes:
        """Return the bytes that `nbytes_after` counts.

        Args:
            first_index: as in `plan_archive`.
            crc_of: returns the CRC-32 of a content of the file, which has been written.
        """

        def crc_of_storage(storage: int) -> int:
            return crc_of(first_index + 2 * storage + 1)

        record = self._storages[number]
        sizes = (record.nbytes, record.nbytes)  # compressed and uncompressed size: records are not compressed
        data = _descriptor_of(record).pack(_DESCRIPTOR_SIGNATURE, crc_of_storage(number), *sizes)
        data += self._fixed[number + 1]
        return data + self._directory(crc_of_storage) if number == len(self._storages) - 1 else data

    @cached_property
    def _directory_bytes(self) -> int:
        return len(self._directory(lambda _: 0))  # any CRC: the size does not depend on it

    def _directory(self, crc_of_storage: CrcOf) -> bytes:
        """Return the central directory and the end of the archive."""
        storages = count()
        entries = b"".join(
            _directory_entry(
                name, record, crc_of_storage(next(storages)) if record.crc is None else record.crc
            )
            for name, record in self._records.items()
        )
        return entries + _end(len(self._records), len(entries), self._position)


_small_archive = lru_cache(maxsize=256)(_ArchivePlan)


def _local_header(name: bytes, record: ZipRecord) -> bytes:
    """Return a record's local header, padded so that the record's data begins at a multiple of 64 bytes."""
    wide = struct.pack("<HHQQ", ZIP64_TAG, 16, 0, 0) if record.is_wide else b""
    before = record.header_offset + LOCAL_HEADER.size + len(name) + len(wide)
    padding = -(before + 4) % _ALIGNMENT_BYTES  # 4: bytes of the padding field's tag and size
    extra = wide + _PADDING_TAG + struct.pack("<H", padding) + b"Z" * padding  # torch pads with Z, too
    # The size of a storage is in its descriptor. Here it is 0, or MAX_32 to refer to the zip64 field.
    nbytes = record.nbytes if record.crc is not None else MAX_32 if record.is_wide else 0
    fields = _shared_fields(name, record, record.crc or 0, nbytes, extra)
    return LOCAL_HEADER.pack(LOCAL_SIGNATURE, *fields) + name + extra


def _shared_fields(name: bytes, record: ZipRecord, crc: int, nbytes: int, extra: bytes) -> tuple[int, ...]:
    """Return the fields of both headers: version, flags, method, time, date, checksum, two sizes, two lengths."""
    date = 0x21  # always 1 January 1980, so that equal states have equal files
    lengths = (len(name), len(extra))
    flags = _UTF8 | (_HAS_DESCRIPTOR if record.crc is None else 0)
    return (_VERSION_NEEDED, flags, 0, 0, date, crc, nbytes, nbytes, *lengths)


def _directory_entry(name: bytes, record: ZipRecord, crc: int) -> bytes:
    """Return the entry of a record in the central directory."""
    is_far = record.header_offset >= MAX_32
    # Of size, compressed size and offset, the zip64 field contains only the values that do not fit into 32 bits.
    values = [record.nbytes, record.nbytes] * record.is_wide + [record.header_offset] * is_far
    extra = struct.pack(f"<HH{len(values)}Q", ZIP64_TAG, 8 * len(values), *values) if values else b""
    fields = _shared_fields(name, record, crc, MAX_32 if record.is_wide else record.nbytes, extra)
    ends = (0, 0, 0, 0, MAX_32 if is_far else record.header_offset)
    head = CENTRAL_HEADER.pack(CENTRAL_SIGNATURE, _VERSION_NEEDED, *fields, *ends)
    return head + name + extra


def _end(count: int, nbytes: int, start: int) -> bytes:
    """Return the end of an archive whose directory has ``count`` entries in ``nbytes`` bytes from ``start`` on."""
    wide = b""
    if count >= 0xFFFF or nbytes >= MAX_32 or start >= MAX_32:  # a value does not fit into the fields of END
        wide = END64.pack(
            END64_SIGNATURE,
            END64.size - 12,  # bytes after this field
            *(_VERSION_NEEDED, _VERSION_NEEDED, 0, 0, count, count, nbytes, start),
        )
        # 0: the number of the disk; 1: the number of disks.
        wide += END64_LOCATOR.pack(END64_LOCATOR_SIGNATURE, 0, start + nbytes, 1)
    short = (min(count, 0xFFFF), min(count, 0xFFFF), min(nbytes, MAX_32), min(start, MAX_32))
    return wide + END.pack(END_SIGNATURE, 0, 0, *short, 0)


def plan_torch(state: CarriedState, file: str) -> OutputPlan:
    """Plan one file that ``torch.load(file, weights_only=True)`` reads.

    Items that a stride of 0 repeats are stored once, and so are tied tensors.

    Raises:
        ConversionError: for values that are not plain data.
    """
    leaves: dict[Path, Any] = {}
    storages: list[TensorItems] = []
    keys: dict[str, str] = {}  # tensor -> key of its storage; tied tensors share one
    for name, view in state.views.items():
        info, first = view.info, state.aliases.get(name, name)
        if first not in keys:
            keys[first] = str(len(storages))
            storages.append(whole(without_repeats(view, repeated_dims(view))))
        leaves[state.path(name)] = TensorOut(keys[first], info.dtype, info.shape, repeated_dims(view))
    for name, read in state.values.items():
        leaves[state.path(name)] = read()
    try:
        pickled = dump_pickle(nest(leaves), where=file)
    except ConversionError:
        for name, read in state.values.items():
            dump_pickle(read(), where=name)  # raises with the name, which `exclude` needs
        raise
    contents = plan_archive(pickled, storages, 0)
    return OutputPlan(
        "torch", (FilePlan(file, tuple(contents)),), (), is_stale=lambda _: False, single_file=True
    )
