"""How the bytes of an output file are read and written: every byte once, in the source's order, by stripes."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.support.striped_saves import save_striped
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.checkpoint.storage.open import open_store
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.conversion.engine.copy_jobs import CopyJob, jobs_of, reads_of, writes
from vescale_fsdp.conversion.engine.plan import FilePlan, FixedBytes, whole
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.conversion.engine.tensor_view import SourceView
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.layout.extent import Extent, ReadJob
from vescale_fsdp.layout.geometry import Box

BUFFER_BYTES = 2**20  # a quarter of a cell


class _Stripes:
    """A file with checksums; what it is asked to prove does not matter here."""

    def __init__(self, stripe_bytes: int, checked_bytes: int) -> None:
        self.stripe_bytes, self.checked_bytes = stripe_bytes, checked_bytes

    def hash_stripe(self, index: int, scratch: bytearray) -> int:
        raise AssertionError

    def verify_stripe(self, index: int, checksum: int) -> None:
        raise AssertionError


def make_plan(chunks: list[list[tuple[str, int, int]]], stripes: _Stripes | None = None) -> FilePlan:
    """One uint8 tensor per list of (file, offset, numel), in this order behind a header of 100 bytes."""
    tensors: dict[str, StoredTensor] = {}
    for number, pieces in enumerate(chunks):
        info = TensorInfo(f"t{number}", (sum(n for _, _, n in pieces),), dtype_from_torch("uint8"))
        stored, at = [], 0
        for file, offset, numel in pieces:
            stored.append(StoredChunk(Box((at,), (numel,)), Extent(file, offset, numel)))
            at += numel
        tensors[info.name] = StoredTensor(info, tuple(stored))
    source = Source("test", LocalStorage("."), tensors, checked=lambda _: stripes)
    parts = (whole(SourceView(source, name, name)) for name in tensors)
    return FilePlan("out", (FixedBytes(bytes(100)), *parts))


def moved(plan: FilePlan) -> dict[int, tuple[str, int]]:
    """Output byte -> (source file, its byte), by doing all jobs; a byte written twice is an error."""
    found: dict[int, tuple[str, int]] = {}
    for job in copy_jobs(plan, BUFFER_BYTES):
        at = job.extent.offset
        for extent, copies in reads_of(job, BUFFER_BYTES):
            assert extent.file == job.extent.file and at == extent.offset
            assert 0 < extent.nbytes <= BUFFER_BYTES
            at = extent.stop
            for copy in copies:
                assert extent.offset <= copy.start and copy.start + copy.nbytes <= extent.stop
                for byte in range(copy.nbytes):
                    assert copy.target + byte not in found
                    found[copy.target + byte] = (extent.file, copy.start + byte)
        assert at == job.extent.stop
    return found


def copy_jobs(plan: FilePlan, buffer_bytes: int) -> list[CopyJob]:
    """The jobs of a plan, all of which are copies."""
    jobs = []
    for job in jobs_of(plan, buffer_bytes, in_order=False):
        assert isinstance(job, ReadJob)
        jobs.append(job)
    return jobs


PIECES = st.lists(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 300), st.integers(1, 90)), max_size=4),
    max_size=6,
)


@given(PIECES, st.sampled_from([None, 16, 64, 4096]))
def test_every_byte_is_written_once_from_its_place(
    pieces: list[list[tuple[str, int, int]]], stripe_bytes: int | None
) -> None:
    """Whatever overlaps, repeats or leaves gaps in the source; with stripes or without."""
    stripes = _Stripes(stripe_bytes, 400) if stripe_bytes else None
    plan = make_plan(pieces, stripes)
    expected = [(file, offset + i) for tensor in pieces for file, offset, n in tensor for i in range(n)]

    found = moved(plan)
    assert [found[100 + i] for i in range(len(expected))] == expected and len(found) == len(expected)
    if stripe_bytes:
        read_extents = [job.extent for job in copy_jobs(plan, BUFFER_BYTES)]
        assert all(
            e.offset % stripe_bytes == 0 and (e.stop % stripe_bytes == 0 or e.stop == 400)
            for e in read_extents
        )
        read = [
            (e.file, at // stripe_bytes) for e in read_extents for at in range(e.offset, e.stop, stripe_bytes)
        ]
        wanted = {(file, byte // stripe_bytes) for file, byte in expected}
        assert len(read) == len(wanted) and set(read) == wanted  # each once, and none that nobody wants


def test_jobs_follow_the_source_and_skip_large_gaps() -> None:
    """Neighbors in the file are read together although others lie between them in the output."""
    mib = 2**20
    plan = make_plan([[("a", 5000, 1000)], [("a", 3 * mib, 10)], [("a", 0, 4000)], [("b", 7, 1)]])
    jobs = copy_jobs(plan, 8 * mib)

    assert [job.extent for job in jobs] == [
        ("a", 0, 6000),  # over the gap of 1000 bytes
        ("a", 3 * mib, 10),
        ("b", 7, 1),
    ]
    assert [(copy.start, copy.target) for copy in jobs[0].copies] == [(0, 1110), (5000, 100)]


def test_a_large_tensor_is_cut_at_cells() -> None:
    """Cells are 4 MiB of the source file, or the buffer if that is smaller."""
    mib = 2**20
    plan = make_plan([[("a", mib, 9 * mib)]])

    def spans(buffer_bytes: int) -> list[tuple[float, float]]:
        extents = [job.extent for job in copy_jobs(plan, buffer_bytes)]
        return [(extent.offset / mib, extent.stop / mib) for extent in extents]

    assert spans(8 * mib) == [(1, 4), (4, 8), (8, 10)]
    assert spans(3 * mib) == [(1, 3), (3, 6), (6, 9), (9, 10)]
    assert writes(plan, 8 * mib, in_order=False) == [("out", 100 + i * mib, mib) for i in range(9)]


def test_a_job_has_as_many_stripes_as_fit_a_cell() -> None:
    """At least one; a job covers whole stripes."""
    mib = 2**20
    pieces = [[("a", 3 * mib // 2, mib)], [("a", 7 * mib, 3 * mib - 5)]]

    def spans(stripe_bytes: int) -> list[tuple[float, float]]:
        jobs = copy_jobs(make_plan(pieces, _Stripes(stripe_bytes, 10 * mib - 5)), 8 * mib)
        return [(job.extent.offset / mib, (job.extent.stop + 5) // mib) for job in jobs]

    assert spans(mib) == [(1, 3), (7, 8), (8, 10)]
    assert spans(4 * mib) == [(0, 4), (4, 8), (8, 10)]
    assert spans(3 * mib // 2) == [(1.5, 3), (6, 9), (9, 10)]


@pytest.fixture(scope="module", params=[1, 4])
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native checkpoint of two tensors whose boundary lies inside a stripe of 1 MiB, or, as once, of 4 MiB."""
    path = tmp_path_factory.mktemp("native") / "ckpt"
    torch.manual_seed(0)
    state = {"model": {"a": torch.randn(1500, 1000), "b": torch.randn(1400, 1000)}}
    save_striped(path, state, stripe_bytes=request.param << 20)
    return path


def _flip(folder: Path, where: float) -> None:
    (file,) = folder.glob("data-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[int(len(data) * where)] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("options", [{}, {"dtype": ("bf16",)}], ids=["moved", "computed"])
def test_a_native_source_is_proven_while_it_is_read(
    native: Path, tmp_path: Path, options: dict[str, tuple[str, ...]]
) -> None:
    """One flipped bit stops the conversion and leaves nothing; a tensor in sound stripes still converts."""
    bad = tmp_path / "bad"
    for file in native.rglob("*"):
        if file.is_file() and file.name != ".lock":
            target = bad / file.relative_to(native)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())

    def run(source: Path, name: str, **more: object) -> dict[str, torch.Tensor]:
        chosen = ConvertOptions(memory_budget_bytes=8 * 2**20, threads=3, **options, **more)  # type: ignore[arg-type]
        convert(open_source(str(source)), str(tmp_path / name), "hf", chosen)
        return load_file(tmp_path / name / "model.safetensors")

    good = run(native, "good")
    _flip(bad, 0.95)  # in the last stripe, which holds the end of b
    with pytest.raises(CorruptCheckpointError, check=lambda error: str(error.got).endswith(": model.b")):
        run(bad, "all")
    assert not (tmp_path / "all").exists()
    assert torch.equal(run(bad, "a", include=("a",))["a"], good["a"]) and good["a"].shape == (1500, 1000)


def test_transposed_storage_is_not_moved(tmp_path: Path) -> None:
    """Bytes that lie in another order than the tensor's are computed, not moved (the control of `extents`)."""
    x = torch.arange(12.0).view(3, 4)
    torch.save({"t": x.t(), "x": x}, tmp_path / "x.pt")
    source = open_source(str(tmp_path / "x.pt"))

    assert source.extents("t", 0, 12) is None
    assert [run.nbytes for run in source.extents("x", 2, 9) or ()] == [28]
    convert(source, str(tmp_path / "out"), "hf", ConvertOptions())
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["t"], x.t())


def test_small_tensors_are_read_many_at_a_time(tmp_path: Path) -> None:
    """A thousand small tensors of a DCP file are a few reads, whatever their order in the output."""
    state = {f"w{i}": torch.full((8, 8), float(i)) for i in range(1000)}
    dcp.save(dict(reversed(state.items())), checkpoint_id=tmp_path / "dcp", no_dist=True)
    report = convert(open_source(str(tmp_path / "dcp")), str(tmp_path / "out"), "hf", ConvertOptions())
    (file,) = report.plan.files

    assert len(copy_jobs(file, 2**20)) <= 3
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert len(found) == 1000 and all(torch.equal(found[name], state[name]) for name in state)


def test_room_is_reserved_before_anything_is_written(tmp_path: Path) -> None:
    """A created file has its blocks; one that cannot fit is refused at once and leaves nothing."""
    store = open_store(str(tmp_path))
    out = store.create(".x.partial", 2**20)
    assert (tmp_path / ".x.partial").stat().st_blocks * 512 >= 2**20
    out.abort()
    with pytest.raises(OSError, check=lambda error: error.errno in (errno.ENOSPC, errno.EFBIG)):
        store.create("y", 2**60)
    assert list(tmp_path.iterdir()) == []
