"""Damaged and hostile metadata of every format: a checkpoint opens, or ends in an error of ours.

Mutations are seeded. ``FUZZ_ROUNDS=2000 pytest tests/conversion/formats/test_fuzz.py`` tries more of them.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from vescale_fsdp.checkpoint import save as save_native
from vescale_fsdp.checkpoint import verify
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.conversion.report.describe import describe
from vescale_fsdp.errors import CorruptCheckpointError, VescaleError

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "60"))
DEEP = b"[" * 100_000
ODD = [
    *(b"1.5", b"1e999", b"-1", b"true", b"null", b'"3"', b"[1.5]", b"{}", b"[]", b"NaN", b"0", b"-0", b"7"),
    *(
        b"9223372036854775807",
        b"9223372036854775808",
        b"1" * 5000,
        b"18446744073709551616",
        b'"\\u0000"',
        b'"../x"',
    ),
]
STATE = {"a.w": torch.arange(24.0).view(4, 6), "a.b": torch.tensor(3.5), "e": torch.zeros(0, 3)}


def _safetensors(folder: Path) -> list[Path]:
    save_file(STATE, folder / "model.safetensors", metadata={"format": "pt"})
    return [folder / "model.safetensors"]


def _index(folder: Path) -> list[Path]:
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    save_file({"a.w": STATE["a.w"]}, folder / names[0], metadata={"format": "pt"})
    save_file({"a.b": STATE["a.b"]}, folder / names[1], metadata={"format": "pt"})
    index = {"metadata": {"total_size": 100}, "weight_map": {"a.w": names[0], "a.b": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return [folder / "model.safetensors.index.json"]


def _shards(folder: Path) -> list[Path]:
    for rank in range(2):
        info = json.dumps({"a.w": {"saved_offsets": [2 * rank, 0]}})
        file = folder / f"shard-0000{rank}-model-00001-of-00001.safetensors"
        part = STATE["a.w"][2 * rank : 2 * rank + 2].clone()
        save_file({"a.w": part}, file, metadata={"DCP_SHARDING_INFO": info})
    return sorted(folder.iterdir())


def _torch(folder: Path) -> list[Path]:
    torch.save(
        {"model": STATE, "list": [1, {"x": 2}], "c": torch.zeros(2, dtype=torch.cfloat).conj()},
        folder / "m.pt",
    )
    return [folder / "m.pt"]


def _ranks(folder: Path) -> list[Path]:
    for rank in range(2):
        torch.save(STATE, folder / f"model_world_size_2_rank_{rank}.pt")
    return sorted(folder.iterdir())


def _dcp(folder: Path) -> list[Path]:
    dcp.save({"model": STATE, "step": 3}, checkpoint_id=folder, no_dist=True)
    return [folder / ".metadata", folder / "__0_0.distcp"]


def _native(folder: Path) -> list[Path]:
    save_native(folder, {"model": STATE, "step": 3, "list": [1, (2, b"x")]})
    return [file for file in sorted(folder.iterdir()) if file.suffix == ".json"]


MAKERS: dict[str, Callable[[Path], list[Path]]] = {
    "safetensors": _safetensors,
    "index": _index,
    "shards": _shards,
    "torch": _torch,
    "ranks": _ranks,
    "dcp": _dcp,
    "native": _native,
}


def _mutated(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut, doubled or moved, or a token of JSON replaced by an odd one."""
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.choice((1, 2, 8, 40)))
    kind = rng.randrange(7)
    if kind == 0:
        return data[:at] + bytes(rng.randrange(256) for _ in range(end - at)) + data[end:]
    if kind == 1:
        return data[:at] + data[end:]
    if kind == 2:
        return data[:end] + data[at:end] + data[end:]
    if kind == 3:
        return data[:at]
    tokens = list(re.finditer(rb'-?\d+(?:\.\d+)?|"[^"\\]*"|\[[^\[\]]*\]|true|null', data[: 2**14]))
    if kind == 4 or not tokens:
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    found = rng.choice(tokens)
    return data[: found.start()] + rng.choice(ODD) + data[found.end() :]


def _with_length(data: bytes) -> bytes:
    """A safetensors file whose header length fits its header again, so that the header is read at all."""
    end = data.rfind(b"}") + 1
    head = data[8:end] + b" " * (-(end - 8) % 8)
    return len(head).to_bytes(8, "little") + head + data[end:].lstrip(b" ")


def _looks(target: Path) -> bool:
    """Whether it opens; any error that is not ours comes out."""
    try:
        source = open_source(str(target))
        describe(source)
        report = verify(source)
    except VescaleError:
        return False
    return not report.problems


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_mutations_end_in_errors_of_ours(tmp_path: Path, kind: str) -> None:
    """Never a traceback of another kind, and most damage is noticed."""
    (tmp_path / "src").mkdir()
    files = MAKERS[kind](tmp_path / "src")
    target = tmp_path / "src" / "m.pt" if kind == "torch" else tmp_path / "src"
    assert _looks(target)
    noticed = 0
    for number in range(ROUNDS):
        rng = random.Random(f"{kind} {number}")
        file = rng.choice(files)
        data = file.read_bytes()
        changed = _mutated(data, rng)
        if file.suffix == ".safetensors" and number % 2:
            changed = _with_length(changed)
        file.write_bytes(changed)
        try:
            noticed += not _looks(target)
        except Exception as error:
            shutil.copytree(tmp_path / "src", tmp_path / "bad", dirs_exist_ok=True)
            raise AssertionError(f"{kind} {number}: {type(error).__name__}: {error}") from error
        file.write_bytes(data)
    assert _looks(target) and noticed > ROUNDS // 4


def _header(folder: Path, table: bytes, nbytes: int) -> Path:
    (folder / "model.safetensors").write_bytes(len(table).to_bytes(8, "little") + table + b"\0" * nbytes)
    return folder / "model.safetensors"


@pytest.mark.parametrize(
    "bad", [b"1.5", b"true", b"-1", b"1e999", b"2e0", b"9223372036854775808", b'"2"', b"null", DEEP]
)
@pytest.mark.parametrize("place", ["shape", "start", "stop"])
def test_numbers_of_headers_are_whole(tmp_path: Path, bad: bytes, place: str) -> None:
    """Nothing is rounded, and nothing overflows: each is one sentence that names the file."""
    values = {"shape": b"2", "start": b"0", "stop": b"8"}

    def table(given: dict[str, bytes]) -> bytes:
        text = b'{"w":{"dtype":"F32","shape":[%b],"data_offsets":[%b,%b]}}'
        return text % (given["shape"], given["start"], given["stop"])

    assert _looks(_header(tmp_path, table(values), 8))
    file = _header(tmp_path, table(values | {place: bad}), 8)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        open_source(str(file))


@pytest.mark.parametrize(
    "shape", [b"[2,1.0]", b'"2"', b"2", b"{}", b"[[2]]", b"[4294967296,4294967296,4294967296]"]
)
def test_shapes_of_headers(tmp_path: Path, shape: bytes) -> None:
    """Lists of sizes whose product a file can have."""
    table = b'{"w":{"dtype":"F32","shape":%b,"data_offsets":[0,8]}}' % shape
    with pytest.raises(CorruptCheckpointError):
        open_source(str(_header(tmp_path, table, 8)))


def test_nested_json_everywhere(tmp_path: Path) -> None:
    """A parser's stack ends before such a file does."""
    for kind, name in (("index", "model.safetensors.index.json"), ("native", None), ("shards", None)):
        folder = tmp_path / kind
        folder.mkdir()
        (first, *_) = MAKERS[kind](folder)
        file = folder / name if name else first
        deep = b'{"weight_map":' + DEEP
        file.write_bytes(deep if file.suffix == ".json" else len(deep).to_bytes(8, "little") + deep)
        with pytest.raises(VescaleError):
            open_source(str(folder))
    (tmp_path / "hf").mkdir()
    _safetensors(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_bytes(DEEP)
    from vescale_fsdp.conversion import convert
    from vescale_fsdp.errors import ConversionError

    with pytest.raises(ConversionError, check=lambda error: "config.json" in str(error.where)):
        convert(open_source(str(tmp_path / "hf")), str(tmp_path / "out"), "hf")


def test_a_state_that_holds_itself(tmp_path: Path) -> None:
    """Pickles can, and no format here can."""
    state: dict[str, object] = {"w": torch.ones(1)}
    state["self"] = state
    torch.save(state, tmp_path / "m.pt")
    with pytest.raises(CorruptCheckpointError, check=lambda error: error.where == str(tmp_path / "m.pt")):
        open_source(str(tmp_path / "m.pt"))


def test_a_record_that_is_not_there(tmp_path: Path) -> None:
    """The pickle of a rank speaks of a storage that its archive lacks."""
    *_, last = _ranks(tmp_path)
    data = last.read_bytes()
    name = f"{last.stem}/data/0".encode()
    assert data.count(name) == 2
    last.write_bytes(data.replace(name, name[:-1] + b"9"))
    with pytest.raises(CorruptCheckpointError, match="storage 0"):
        open_source(str(tmp_path))
