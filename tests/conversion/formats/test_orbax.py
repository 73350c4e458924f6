"""Orbax checkpoints of JAX models, and zarr of version 2. Made by hand as orbax-checkpoint 0.12 makes them, by zarr and
numcodecs; `tests/stacks/conversion` has its own."""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from numcodecs import get_codec
from safetensors.torch import load_file

from tests.support.command import vescale_convert
from vescale_fsdp.conversion import ConvertOptions, convert
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.errors import ConversionError, VescaleError, option
from vescale_fsdp.layout.geometry import Box

ZSTD = {"id": "zstd", "level": 1}
NUMPY = {
    torch.float32: "<f4",
    torch.int32: "<i4",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
}
RULES = """
format = 1
[[rule]]
hf = "layers.{l}.weight"
ours = "layers_{l}.kernel"
ops = [{ transpose = [1, 0] }]
[[rule]]
hf = "layers.{l}.bias"
ours = "layers_{l}.bias"
[[rule]]
hf = "embed.weight"
ours = "embed.embedding"
"""


def _raw(tensor: torch.Tensor) -> np.ndarray:
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.element_size()]
    return (
        tensor.contiguous().view(unsigned).numpy()
        if tensor.ndim
        else tensor.reshape(1).view(unsigned).numpy()[0]
    )


def _write_2(folder: Path, tensor: torch.Tensor, chunks: tuple[int, ...], **changes: Any) -> None:
    """An array of version 2: whole chunks at the edges too, those of zeros left out where it says so."""
    folder.mkdir(parents=True)
    metadata = {
        "zarr_format": 2,
        "shape": list(tensor.shape),
        "chunks": list(chunks),
        "dtype": NUMPY[tensor.dtype],
        "compressor": ZSTD,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "dimension_separator": ".",
        **changes,
    }
    (folder / ".zarray").write_text(json.dumps(metadata))
    raw = _raw(tensor)
    swapped = metadata["dtype"].startswith(">")
    for index in np.ndindex(*(-(-n // c) for n, c in zip(tensor.shape, chunks, strict=True))):
        chunk = np.zeros(chunks, dtype=raw.dtype)
        part = raw[tuple(slice(i * c, i * c + c) for i, c in zip(index, chunks, strict=True))]
        chunk[tuple(slice(0, n) for n in part.shape)] = part
        if not chunk.any():
            continue
        data = (chunk.byteswap() if swapped else chunk).tobytes(order=metadata["order"])
        compressor = metadata["compressor"]
        data = get_codec(dict(compressor)).encode(data) if compressor else data
        (folder / (".".join(map(str, index)) or "0")).write_bytes(data)


def _write_3(folder: Path, tensor: torch.Tensor, chunks: tuple[int, ...]) -> None:
    """An array of version 3 as tensorstore writes it: shards, zstd, and JAX's types by their names."""
    raw = _raw(tensor)
    shards = chunks or None  # zarr cuts no scalar into shards
    array = zarr.create_array(
        folder, shape=raw.shape, dtype=raw.dtype, chunks=chunks, shards=shards, fill_value=0
    )
    array[...] = raw
    text = (folder / "zarr.json").read_text()
    name = str(tensor.dtype).removeprefix("torch.")
    (folder / "zarr.json").write_text(json.dumps(json.loads(text) | {"data_type": name, "fill_value": 0.0}))


def _tree() -> dict[tuple[str, ...], torch.Tensor]:
    torch.manual_seed(0)
    params = {
        ("layers_0", "kernel"): torch.randn(5, 3),
        ("layers_0", "bias"): torch.randn(3).bfloat16(),
        ("layers_1", "kernel"): torch.randn(3, 4).bfloat16(),
        ("layers_1", "bias"): torch.zeros(4),
        ("embed", "embedding"): torch.randn(7, 5),
    }
    found: dict[tuple[str, ...], torch.Tensor] = {
        ("params", *keys): tensor for keys, tensor in params.items()
    }
    found |= {("opt_state", "0", "mu", *keys): torch.randn(tensor.shape) for keys, tensor in params.items()}
    return {**found, ("step",): torch.tensor(9, dtype=torch.int32)}


def write_orbax(folder: Path, version: int) -> dict[tuple[str, ...], torch.Tensor]:
    tree = _tree()
    entries: dict[str, Any] = {}
    for keys, tensor in tree.items():
        chunks = tuple(2 for _ in tensor.shape)
        if version == 2:
            _write_2(folder / ".".join(keys), tensor, chunks)
        else:
            _write_3(folder / ".".join(keys), tensor, chunks)
        entries[str(keys)] = _entry(keys, "jax.Array")
    entries["n"], entries["s"] = _entry(("none",), "None"), _entry(("name",), "string")
    (folder / "_strings.json").write_text('{"name": "a run"}')
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": entries, "use_ocdbt": False}))
    (folder / "_sharding").write_text("{}")
    return tree


def _entry(keys: tuple[str, ...], kind: str) -> dict[str, Any]:
    path = [{"key": key, "key_type": 1 if key.isdecimal() else 2} for key in keys]
    return {"key_metadata": path, "value_metadata": {"value_type": kind, "skip_deserialize": False}}


@pytest.mark.parametrize("version", [2, 3])
def test_a_train_state(tmp_path: Path, version: int) -> None:
    """Params are the model, by dotted names; the optimizer, step and text come along where they can. Key rules
    make torch's names and shapes of flax's."""
    tree = write_orbax(tmp_path / "run" / "12" / "default", version)
    source = open_source(str(tmp_path / "run"), step=12)
    assert source.kind == "orbax"
    convert(source, str(tmp_path / "all.pt"), "torch")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert loaded["name"] == "a run" and loaded["none"] is None and loaded["step"] == 9
    for keys, tensor in tree.items():
        found = loaded[keys[0]][".".join(keys[1:])] if len(keys) > 1 else loaded[keys[0]]
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), keys
    (tmp_path / "rules.toml").write_text(RULES)
    options = ConvertOptions(rules=str(tmp_path / "rules.toml"), dtype=["float32"])
    report = convert(source, str(tmp_path / "hf"), "hf", options)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert weights.keys() == {
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
        "embed.weight",
    }
    assert torch.equal(weights["layers.1.weight"], tree["params", "layers_1", "kernel"].t().float())
    assert report.dropped_optimizer == 5 and set(report.dropped_others) == {"step", "name", "none"}
    report = convert(source, str(tmp_path / "model.pt"), "torch", ConvertOptions(optimizer="drop"))
    assert "opt_state" not in torch.load(tmp_path / "model.pt", weights_only=True)


def test_a_tree_without_params(tmp_path: Path) -> None:
    """Is the model as a whole; arrays of one chunk, uncompressed, are read by range."""
    tensor = torch.randn(3, 4)
    _write_2(tmp_path / "run" / "a.kernel", tensor, (3, 4), compressor=None)
    _write_2(tmp_path / "run" / "b.kernel", -tensor, (2, 3))
    entries = {name: _entry((name, "kernel"), "jax.Array") for name in "ab"}
    (tmp_path / "run" / "_METADATA").write_text(json.dumps({"tree_metadata": entries}))
    source = open_source(str(tmp_path / "run"))
    assert set(source.readers) == {"b.kernel"} and source.extents("a.kernel", 0, 12) is not None
    convert(source, str(tmp_path / "hf"), "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(weights["a.kernel"], tensor) and torch.equal(weights["b.kernel"], -tensor)


@pytest.mark.parametrize("version", [2, 3])
def test_a_chunk_counts_in_the_budget(tmp_path: Path, version: int) -> None:
    """Decoding holds it as it is stored and as it is: refused by name, with the budget that is enough, which gives as
    many threads as it has room for. What was decoded last is kept once, not of every array."""
    tensors = {
        f"w{place}": torch.full((512, 1024), place + 1.0) for place in range(5)
    }  # 2 MiB each, in one chunk
    for name, tensor in tensors.items():
        if version == 2:
            _write_2(tmp_path / "run" / name, tensor, (512, 1024))
        else:
            zarr.create_array(tmp_path / "run" / name, data=tensor.numpy(), chunks=(512, 1024))
    if version == 3:
        zarr.open_group(tmp_path / "run", mode="a")
    source = open_source(str(tmp_path / "run"), kind="zarr")
    with pytest.raises(
        ConversionError,
        check=lambda error: "w4" in error.where and option("memory_budget_bytes", 8 * 2**20) in error.todo,
    ):
        convert(source, str(tmp_path / "out.pt"), "torch", ConvertOptions(memory_budget_bytes=7 << 20))
    assert not (tmp_path / "out.pt").exists()
    enough = ConvertOptions(memory_budget_bytes=17 << 20).limits
    assert enough.usable_threads == 4 and enough.decoding("w4", source.decoded["w4"]).usable_threads == 2
    convert(source, str(tmp_path / "out.pt"), "torch", ConvertOptions(memory_budget_bytes=17 << 20))
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    tracemalloc.start()
    for name in tensors:
        source.read_into(name, Box((0, 0), (1, 4)), np.empty((1, 4), dtype=source.info(name).dtype.raw))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 5 << 20


def test_zarr_of_version_2(tmp_path: Path) -> None:
    """Groups as zarr itself writes them, columns first, the other byte order, chunks of zeros that lie nowhere."""
    values = np.arange(35, dtype=np.float64).reshape(5, 7)
    group = zarr.open_group(tmp_path / "g", mode="w", zarr_format=2)
    group.create_array("a/plain", data=values, chunks=(2, 3), compressors=None)
    group.create_array("a/packed", data=values.astype(np.int16), chunks=(2, 3))
    group.create_array("columns", data=values, chunks=(2, 3), order="F")
    _write_2(tmp_path / "g" / "swapped", torch.arange(6.0).view(2, 3), (1, 3), dtype=">f4")
    convert(open_source(str(tmp_path / "g")), str(tmp_path / "a.pt"), "torch")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert loaded.keys() == {"a.plain", "a.packed", "columns", "swapped"}
    for name in ("a.plain", "a.packed", "columns"):
        assert np.array_equal(loaded[name].numpy(), values)
    assert loaded["a.packed"].dtype == torch.int16
    assert torch.equal(loaded["swapped"], torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("ocdbt.process_0/manifest.ocdbt", b"", "process_0"),
        ("w/.zarray", {"compressor": {"id": "pickle"}}, "codec pickle"),
        ("w/.zarray", {"filters": [{"id": "pickle"}]}, "codec pickle"),
        ("w/.zarray", {"zarr_format": 4}, "zarr_format is not 2"),
        ("w/.zarray", {"chunks": [0]}, "chunks of shape"),
        ("w/.zarray", {"fill_value": 7}, "fill value 7"),
        ("w/.zarray", {"dtype": ">c8"}, "dtype >c8"),
        ("w/.zarray", {"compressor": None}, "size|bytes"),
        ("w/.zarray", b"", "zarr hierarchy"),
        ("w/0", b"not zstd", "cannot be decoded"),
        ("_METADATA", b"{}", "tree_metadata"),
        ("_METADATA", b"[", "zarr hierarchy"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, file: str, content: Any, text: str) -> None:
    """Refused, each by what it is; never decoded by running a pickle."""
    run = tmp_path / "run"
    _write_2(run / "w", torch.ones(3), (3,))
    (run / "_METADATA").write_text(json.dumps({"tree_metadata": {"w": _entry(("w",), "jax.Array")}}))
    if isinstance(content, dict):
        found = json.loads((run / file).read_text())
        content = json.dumps(found | content).encode()
    (run / file).parent.mkdir(exist_ok=True)
    (run / file).write_bytes(content)
    with pytest.raises(VescaleError, match=text):
        convert(open_source(str(run)), str(tmp_path / "out.pt"), "torch")
    assert not (tmp_path / "out.pt").exists()


def test_items_without_a_tree_are_listed(tmp_path: Path) -> None:
    """A config's JSON and a data iterator's state, beside the state: a line of what is read, and of what is written."""
    step = tmp_path / "500"
    _write_2(step / "state" / "w", torch.ones(3), (3,))
    tree = {"tree_metadata": {"w": _entry(("w",), "jax.Array")}}
    (step / "state" / "_METADATA").write_text(json.dumps(tree))
    for item, file in (("config", "metadata"), ("dataset", "process_0-of-1.json")):
        (step / item).mkdir()
        (step / item / file).write_text("{}")
    source = open_source(str(step))
    assert list(source.tensors) == ["w"] and source.unsupported == ("config/", "dataset/")
    shown = vescale_convert("inspect", str(step)).output
    done = vescale_convert("to-torch", str(step), str(tmp_path / "a.pt")).output
    for text in (shown, done):
        assert any("config/" in line and "dataset/" in line for line in text.splitlines()), text


def test_an_array_that_is_missing(tmp_path: Path) -> None:
    """Named, with its folder."""
    (tmp_path / "_METADATA").write_text(json.dumps({"tree_metadata": {"w": _entry(("w",), "jax.Array")}}))
    with pytest.raises(VescaleError, match=r"w/zarr\.json"):
        open_source(str(tmp_path))
    with pytest.raises(ConversionError, check=lambda error: "nothing" in str(error.got)):
        open_source(str(tmp_path), kind="nothing")


def test_ocdbt_without_tensorstore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax's default needs a package of an extra, which the error names."""
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    (tmp_path / "_METADATA").write_text(json.dumps({"tree_metadata": {"w": _entry(("w",), "jax.Array")}}))
    (tmp_path / "manifest.ocdbt").write_bytes(b"")
    with pytest.raises(ConversionError, check=lambda error: "vescale-fsdp[orbax]" in error.todo):
        open_source(str(tmp_path))
