"""Headers that claim what no tensor is: each ends at once in an error of ours, before anything is computed of it."""

from __future__ import annotations

import io
import json
import re
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoint_states import sealed_manifest
from vescale_fsdp.checkpoint import load, read_state, save
from vescale_fsdp.checkpoint import verify as verify_native
from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME
from vescale_fsdp.conversion import convert
from vescale_fsdp.conversion.cli import main as cli_main
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.conversion.formats.table import TARGETS
from vescale_fsdp.errors import CheckpointError, ConversionError, CorruptCheckpointError, VescaleError
from vescale_fsdp.layout.foreign_json import MAX_DIMS

_MANY = 100_000
_SHAPES: dict[str, str] = {
    "ones": json.dumps([1] * _MANY),
    "zeros": json.dumps([0] * _MANY),
    "huge": json.dumps([2**62] * _MANY),
    "huge and zero": json.dumps([2**62] * _MANY + [0]),
    "one dim too many": json.dumps([1] * (MAX_DIMS + 1)),
    "overflow": "[4611686018427387904,4611686018427387904]",
    "overflow hidden by zero": "[4611686018427387904,4611686018427387904,0]",
    "negative": "[-1,-4]",
    "400 digits": f"[{'9' * 400}]",
    "5000 digits": f"[{'9' * 5000}]",
    "NaN": "[NaN]",
    "Infinity": "[Infinity]",
    "nested": "[" * _MANY + "]" * _MANY,
}


def _safetensors(folder: Path, shape: str) -> Path:
    table = f'{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":[0,4]}}}}'.encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(table).to_bytes(8, "little") + table + b"\0" * 4)
    return file


def _native(folder: Path, shape: str) -> Path:
    """A checkpoint whose manifest has another shape, and a checksum that fits where one can be computed."""
    save(folder / "native", {"w": torch.zeros(1)})
    file = folder / "native" / MANIFEST_NAME
    text = re.sub(r'"shape":\[1\]', lambda _: f'"shape":{shape}', file.read_text())
    with suppress(ValueError, RecursionError):  # what is no JSON is refused whatever its checksum
        data = json.loads(text)
        text = sealed_manifest(data).decode()
    file.write_text(text)
    return folder / "native"


@pytest.mark.parametrize("case", sorted(_SHAPES))
def test_shapes_that_no_tensor_has(tmp_path: Path, case: str) -> None:
    """The converter and the native readers refuse the file, naming it, whatever would be done with it."""
    with pytest.raises(CorruptCheckpointError) as caught:
        open_source(_safetensors(tmp_path, _SHAPES[case]))
    assert "model.safetensors" in str(caught.value.where) and caught.value.todo
    folder = _native(tmp_path, _SHAPES[case])
    for read in (open_source, read_state, lambda path: load(path, {"w": torch.zeros(1)})):
        with pytest.raises(CorruptCheckpointError):
            read(folder)
    assert not verify_native(folder).ok


class _Pickled:
    """Pickled as a tensor of any sizes and strides."""

    def __init__(self, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.size, self.stride = size, stride

    def __reduce__(self) -> Any:
        storage = torch.ones(4)._typed_storage()
        rebuild = torch._utils._rebuild_tensor_v2  # type: ignore[attr-defined]
        return rebuild, (storage, 0, self.size, self.stride, False, OrderedDict())


@pytest.mark.parametrize(
    ("size", "stride"),
    [
        ((1,) * _MANY, (1,) * _MANY),
        ((0,) * _MANY, (1,) * _MANY),
        ((2**62,) * _MANY, (0,) * _MANY),
        ((2**62, 2**62, 0), (0, 0, 1)),
        ((2, 2), (2**62, 2**62)),
        ((10**400,), (1,)),
        ((-1, 4), (4, 1)),
    ],
    ids=["ones", "zeros", "huge", "hidden overflow", "strides", "400 digits", "negative"],
)
def test_shapes_in_pickles(tmp_path: Path, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Pickles are read without torch's own checks of them."""
    torch.save({"w": _Pickled(size, stride)}, tmp_path / "m.pt")
    with pytest.raises(CorruptCheckpointError):
        open_source(tmp_path / "m.pt")


def test_more_dims_than_readers_take_are_not_saved(tmp_path: Path) -> None:
    """What could not be loaded again is refused by name."""
    save(tmp_path / "most", {"w": torch.ones([1] * MAX_DIMS)})
    assert len(read_state(tmp_path / "most")["w"].shape) == MAX_DIMS
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path / "more", {"w": torch.ones([1] * (MAX_DIMS + 1))})
    assert caught.value.where == "w" and not (tmp_path / "more").exists()


def test_ranks_that_no_job_has(tmp_path: Path) -> None:
    """A manifest that counts a million ranks is refused before anything is computed for each."""
    save(tmp_path / "c", {"w": torch.zeros(1)})
    file = tmp_path / "c" / MANIFEST_NAME
    for ranks in (2**20, 2**24):
        data = json.loads(file.read_text()) | {"world_size": ranks}
        file.write_bytes(sealed_manifest(data))
        with pytest.raises(CorruptCheckpointError):
            open_source(tmp_path / "c")


_HALF_A_PAIR = "\ud800"


@pytest.mark.parametrize("raw", [rb"\ud800", b"\xed\xa0\x80"], ids=["escaped", "raw"])
def test_half_a_surrogate_pair_in_json(tmp_path: Path, raw: bytes) -> None:
    """In a header, its metadata, an index and a config: JSON of text alone, as the format's own parser has it."""
    entry = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    for table in (b'{"a%b":%b}' % (raw, entry), b'{"__metadata__":{"k":"%b"},"a":%b}' % (raw, entry)):
        (tmp_path / "model.safetensors").write_bytes(len(table).to_bytes(8, "little") + table + b"\0" * 4)
        with pytest.raises(CorruptCheckpointError):
            open_source(tmp_path)
    _safetensors(tmp_path, "[1]")
    (tmp_path / "config.json").write_bytes(b'{"architectures":["%b"]}' % raw)
    with pytest.raises(ConversionError) as caught:
        convert(open_source(tmp_path), tmp_path / "out", "hf")
    assert "config.json" in str(caught.value.where)
    index = tmp_path / "model.safetensors.index.json"
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    index.write_bytes(b'{"weight_map":{"w":"part%b.safetensors"}}' % raw)
    with pytest.raises(CorruptCheckpointError):
        open_source(tmp_path)
    pair = json.dumps("\U0001f600")  # a whole one is text
    index.write_text(f'{{"weight_map":{{"w":"part.safetensors"}},"metadata":{pair}}}')
    assert list(open_source(tmp_path).tensors) == ["w"]


def test_half_a_surrogate_pair_in_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that only look print it escaped; targets refuse the name, and take the state without it."""
    file = tmp_path / "m.pt"
    torch.save({f"a{_HALF_A_PAIR}": torch.ones(4), "b": torch.ones(2)}, file)
    looks = [["inspect"], ["verify"], ["plan", "--shards=2", f"--out={tmp_path}/plan"], ["diff", str(file)]]
    looks.append(["report", f"--out={tmp_path}/report.html"])
    for command, *rest in looks:
        monkeypatch.setattr("sys.argv", ["vescale-convert", command, str(file), *rest])
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
            with pytest.raises(SystemExit) as ended:
                cli_main.main()
        assert ended.value.code == 0, command
    for kind in sorted(TARGETS.keys() - {"adapter"}):
        with pytest.raises(VescaleError):
            convert(open_source(file), tmp_path / f"out-{kind}", kind)
