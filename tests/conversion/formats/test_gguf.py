"""GGUF files without the package gguf: plain numbers are read, blocks are refused by name, damage is reported.

Blocks are compared with the package in `tests/stacks/conversion/test_quantized_files.py`.
"""

from __future__ import annotations

import struct
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vescale_fsdp.conversion import ConvertOptions, convert
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError

F32, F16, Q4_0 = 0, 1, 2
Tensor = tuple[str, tuple[int, ...], int, bytes]  # name, shape, type, data
A = np.arange(35, dtype=np.float32).reshape(7, 5)
B = np.arange(6, dtype=np.float16).reshape(1, 2, 3)
PLAIN: list[Tensor] = [("blk.0.a", A.shape, F32, A.tobytes()), ("b", B.shape, F16, B.tobytes())]


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _settings(alignment: int) -> list[bytes]:
    """Settings of every kind: numbers, text, arrays of numbers, of texts, and of arrays."""
    words = struct.pack("<IIQ", 9, 8, 2) + _text("a") + _text("bc")
    numbers = struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3)
    nested = struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ2B", 0, 2, 7, 8)
    return [
        _text("general.architecture") + struct.pack("<I", 8) + _text("llama"),
        _text("general.alignment") + struct.pack("<II", 4, alignment),
        _text("tokenizer.ggml.tokens") + words,
        _text("tokenizer.ggml.scores") + numbers,
        _text("nested") + nested,
        _text("flag") + struct.pack("<I?", 7, True),
    ]


def _write(file: Path, tensors: list[Tensor], version: int = 3, alignment: int = 32) -> Path:
    settings = _settings(alignment)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(settings)) + b"".join(settings)
    data = b""
    for name, shape, kind, raw in tensors:
        head += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % alignment)
    file.write_bytes(head + bytes(-len(head) % alignment) + data)
    return file


@pytest.mark.parametrize(("version", "alignment"), [(2, 32), (3, 32), (3, 64), (3, 8)])
def test_plain_numbers(tmp_path: Path, version: int, alignment: int) -> None:
    """In their shapes and dtypes, at every alignment; the names are llama.cpp's."""
    source = open_source(str(_write(tmp_path / "model.gguf", PLAIN, version, alignment)))
    assert source.kind == "gguf" and source.facts["architecture"] == "llama"
    convert(source, str(tmp_path / "out"), "hf", ConvertOptions())
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"blk.0.a", "b"}
    assert torch.equal(found["blk.0.a"], torch.from_numpy(A)) and torch.equal(found["b"], torch.from_numpy(B))


def test_files_of_a_series_are_one_model(tmp_path: Path) -> None:
    """Any of their names opens all of them; one that is missing is named."""
    names = [f"m-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for name, tensor in zip(names, PLAIN, strict=True):
        _write(tmp_path / name, [tensor])
    for name in names:
        assert open_source(str(tmp_path / name)).tensors.keys() == {"blk.0.a", "b"}
    (tmp_path / names[0]).unlink()
    with pytest.raises((ConversionError, CorruptCheckpointError), check=lambda error: names[0] in str(error)):
        open_source(str(tmp_path / names[1]))


@pytest.mark.skipif(find_spec("gguf") is not None, reason="the package gguf is installed")
def test_blocks_need_the_package(tmp_path: Path) -> None:
    """The error says what to install."""
    file = _write(tmp_path / "model.gguf", [("q", (2, 32), Q4_0, bytes(36))])
    with pytest.raises(ConversionError, check=lambda error: "gguf" in str(error.todo)):
        open_source(str(file))


def _damages(good: bytes) -> dict[str, bytes]:
    huge = struct.pack("<Q", 2**62)
    return {
        "no magic": b"GGML" + good[4:],
        "version": good[:4] + struct.pack("<I", 1) + good[8:],
        "big-endian": good[:4] + struct.pack(">I", 3) + good[8:],
        "number of tensors": good[:8] + huge + good[16:],
        "number of settings": good[:16] + huge + good[24:],
        "length of a key": good[:24] + huge + good[32:],
        "empty": good[:3],
        "header cut off": good[:80],
        "data cut off": good[:-40],
        "alignment 0": good.replace(_settings(32)[1], _settings(0)[1]),
        "dims": good.replace(struct.pack("<I2Q", 2, 5, 7), struct.pack("<I2Q", 9, 5, 7)),
        "shape": good.replace(struct.pack("<I2Q", 2, 5, 7), struct.pack("<I2Q", 2, 2**40, 2**40)),
    }


def test_damage_is_reported(tmp_path: Path) -> None:
    """Wherever a number is wrong or bytes are missing, without allocating what it claims."""
    good = _write(tmp_path / "model.gguf", PLAIN).read_bytes()
    for name, raw in _damages(good).items():
        assert raw != good, name
        (tmp_path / "model.gguf").write_bytes(raw)
        with pytest.raises(CorruptCheckpointError):
            open_source(str(tmp_path / "model.gguf"))
    doubled = _write(tmp_path / "model.gguf", [PLAIN[0], PLAIN[0]])
    with pytest.raises(CorruptCheckpointError, check=lambda error: "twice" in str(error.got)):
        open_source(str(doubled))
