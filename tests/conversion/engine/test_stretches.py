"""Native files are written in stretches, by several threads: the same bytes as by one, each of the source read once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.striped_saves import save_striped
from vescale_fsdp.checkpoint import verify
from vescale_fsdp.checkpoint.storage.base import Buffer, FileReader
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.conversion.formats.native import plan
from vescale_fsdp.errors import CorruptCheckpointError

MIB = 2**20
LIMITS = {"memory_budget_bytes": 16 * MIB, "threads": 3}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native checkpoint of 25 MB: large tensors, small ones in the middle of stripes, odd sizes, several types.

    Its stripes are those of older checkpoints, larger than what is written now.
    """
    torch.manual_seed(0)
    model: dict[str, Any] = {f"layers.{i}.weight": torch.randn(1100, 1000) for i in range(4)}
    model |= {f"small.{i}": torch.randn(13).bfloat16() for i in range(200)}
    model |= {"mid": torch.randn(2_000_003), "codes": torch.randint(0, 99, (77, 3), dtype=torch.int8)}
    path = tmp_path_factory.mktemp("native") / "source"
    save_striped(path, {"model": model}, stripe_bytes=4 * MIB)
    return path


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MiB, so that files of some MB have several."""
    monkeypatch.setattr(plan, "_STRIPES_PER_JOB", 8)


def _written(source: Path, target: str, **options: Any) -> None:
    report = convert(open_source(str(source)), target, "native", ConvertOptions(**{**LIMITS, **options}))
    assert report.outcome.published


def _data(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("data-*/*"))}


@pytest.mark.parametrize(
    "options",
    [{}, {"ranks": 3, "granularity": ("rows:1",)}, {"dtype": ("bf16",)}],
    ids=["moved", "ranks", "cast"],
)
def test_the_bytes_of_a_stream(source: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """A remote file is a stream, written by one thread from front to back."""
    import fsspec

    _written(source, str(tmp_path / "local"), **options)
    _written(source, "memory://stretches", **options)
    remote = fsspec.filesystem("memory")
    try:
        files = {Path(name).name: remote.cat_file(name) for name in remote.glob("/stretches/data-*/*")}
        assert _data(tmp_path / "local") == files and len(files) == options.get("ranks", 1)
        assert max(map(len, files.values())) > 8 * MIB / options.get("ranks", 1)
        assert not verify(open_source(str(tmp_path / "local"))).problems
    finally:
        remote.rm("/stretches", recursive=True)


def test_each_byte_is_read_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for a stripe at the end of each stretch, which two threads have a part of."""
    (file,) = source.glob("data-*/*")
    size, read = file.stat().st_size, 0
    original = LocalStorage.open_file

    class Counting(FileReader):
        """Counts what is read of the data file."""

        def __init__(self, reader: FileReader) -> None:
            self._reader = reader

        @property
        def size_bytes(self) -> int:
            return self._reader.size_bytes

        def read_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
            nonlocal read
            read += sum(len(memoryview(buffer).cast("B")) for buffer in buffers)
            self._reader.read_at(offset_bytes, buffers)

        def close(self) -> None:
            self._reader.close()

    def counted(store: LocalStorage, name: str) -> FileReader:
        return Counting(original(store, name)) if name.endswith(file.name) else original(store, name)

    monkeypatch.setattr(LocalStorage, "open_file", counted)
    _written(source, str(tmp_path / "out"))
    stretches = -(-size // (8 * MIB))
    assert size - MIB < read < size + stretches * 4 * MIB + MIB


def _stripes(file: Path) -> Iterator[int]:
    yield from range(0, file.stat().st_size - MIB, 4 * MIB)


def test_damage_in_any_stripe_is_found(source: Path, tmp_path: Path) -> None:
    """Also in those that no thread has read whole; nothing is left behind."""
    (file,) = source.glob("data-*/*")
    sound = file.read_bytes()
    starts = list(_stripes(file))
    assert len(starts) > 5
    for start in starts:
        file.write_bytes(sound[: start + 70_000] + b"?!" + sound[start + 70_002 :])
        try:
            with pytest.raises(CorruptCheckpointError, check=lambda error: error.where == str(file)):
                _written(source, str(tmp_path / "out"), ranks=2)
        finally:
            file.write_bytes(sound)
        assert not (tmp_path / "out").exists()
    _written(source, str(tmp_path / "out"), ranks=2)


def test_a_finished_file_is_kept_by_its_digest(source: Path, tmp_path: Path) -> None:
    """Resumed, a part reads what it wrote and writes it no second time, unless it was damaged."""

    def part(index: int) -> Any:
        options = ConvertOptions(ranks=2, resume=True, part=(index, 2), **LIMITS)
        return convert(open_source(str(source)), str(tmp_path / "out"), "native", options)

    assert len(part(0).outcome.written) == 1
    kept = part(0).outcome
    assert (len(kept.kept), len(kept.written)) == (1, 0)
    (file,) = (tmp_path / "out").glob("data-*/.*.partial")
    data = bytearray(file.read_bytes())
    data[5 * MIB] ^= 1
    file.write_bytes(data)
    assert len(part(0).outcome.written) == 1
    assert part(1).outcome.published
    assert not verify(open_source(str(tmp_path / "out"))).problems
