"""The safetensors header reader: what the reference library writes, and every way a header can lie."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_fsdp.errors import ConversionError, CorruptCheckpointError
from vescale_fsdp.layout.safetensors_header import HeaderEntry, read_header


def read(data: bytes, *, whole: bool = True) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    return read_header(lambda offset, nbytes: data[offset : offset + nbytes], len(data), "here", whole=whole)


def file_of(table: Any, nbytes: int) -> bytes:
    head = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(head).to_bytes(8, "little") + head + bytes(nbytes)


def entry(dtype: Any = "F32", shape: Any = (2,), places: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": places}


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=6).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.lists(st.integers(0, 4), max_size=3),
            st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]),
        ),
        max_size=6,
    ),
    st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3),
)
def test_what_the_library_writes(
    wanted: dict[str, tuple[list[int], torch.dtype]], metadata: dict[str, str]
) -> None:
    """Any file of the reference writer is read, and each tensor's bytes are where the header says."""
    tensors = {name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in wanted.items()}
    data = safetensors.torch.save(tensors, metadata or None)

    found, texts = read(data)

    assert texts == metadata
    assert {name: (each.shape, each.dtype.name) for name, each in found.items()} == {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }
    for name, each in found.items():
        stored = data[each.start_bytes : each.start_bytes + each.nbytes]
        assert stored == bytes(tensors[name].reshape(-1).view(torch.uint8).tolist())


GOOD = {"a": entry(), "b": entry("U8", [4], [8, 12])}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "length -1 in a file of 0 bytes"),
        (bytes(8), "length 0"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "in a file of 10 bytes"),
        (file_of(b"nope", 0), "JSONDecodeError"),
        (file_of(b"\xff\xfe{}", 0), "UnicodeDecodeError"),
        (file_of('{"__metadata__":{}}'.encode("utf-16-le"), 0), "JSONDecodeError"),
        (file_of(b"[1]", 0), "TypeError"),
        (file_of(b"[" * 200_000, 0), "nested too deeply"),
        (file_of(b'{"a":' * 100_000, 0), "nested too deeply"),
        (file_of(b'{"a":1,"a":2}', 0), "appears twice"),
        (
            file_of(json.dumps(GOOD).replace('"shape"', '"dtype": "F32", "shape"').encode(), 12),
            "appears twice",
        ),
        (file_of({"__metadata__": {"a": 1}}, 0), "__metadata__"),
        (file_of({"__metadata__": ["a"]}, 0), "__metadata__"),
        (file_of({"a": 1}, 0), "TypeError"),
        (file_of({"a": {"dtype": "F32", "shape": [2]}}, 8), "data_offsets"),
        (file_of({"a": entry(shape=["2"])}, 8), "sizes"),
        (file_of({"a": entry(shape=[2.0])}, 8), "sizes"),
        (file_of({"a": entry(shape=[True, 2])}, 8), "sizes"),
        (file_of({"a": entry(shape=[-2])}, 8), "sizes"),
        (file_of({"a": entry(shape="22")}, 8), "sizes"),
        (file_of({"a": entry(places=[-8, 0])}, 8), "sizes"),
        (file_of({"a": entry(places=[8, 0])}, 8), "bytes 8 to 0"),
        (file_of({"a": entry(places=[0, 12])}, 12), "bytes 0 to 12"),
        (file_of({"a": entry(places=[0, 8, 16])}, 16), "ValueError"),
        (file_of({"a": entry(dtype=["F32"])}, 8), "TypeError"),
        (file_of({"a": entry(places=[4, 12])}, 12), "tensor a in here"),
        (file_of({"a": entry(), "b": entry()}, 8), "tensor b in here"),
        (file_of({"a": entry(), "b": entry(places=[12, 20])}, 20), "tensor b in here"),
        (file_of(GOOD, 11), "11 bytes|a file of"),
        (file_of(GOOD, 13), "a file of"),
    ],
    ids=range(30),
)
def test_lies_are_refused(data: bytes, words: str) -> None:
    """Lengths, types, names, nesting and offsets that cannot be are one error that says which."""
    with pytest.raises(CorruptCheckpointError) as refused:
        read(data)
    assert re.search(words, f"{refused.value.expected}; {refused.value.got}; {refused.value.where}")


def test_shapes_without_data() -> None:
    """A plan needs headers alone: the data may be cut off, the header not."""
    data = file_of(GOOD, 12)

    assert list(read(data)[0]) == ["a", "b"]
    assert read(data[:-12], whole=False) == read(data)
    with pytest.raises(CorruptCheckpointError):
        read(data[:-13], whole=False)


def test_a_type_that_is_not_in_the_format() -> None:
    """It is no damage, and is told as what it is."""
    with pytest.raises(ConversionError) as refused:
        read(file_of({"a": entry(dtype="F7")}, 8))
    assert refused.value.got == "F7"
