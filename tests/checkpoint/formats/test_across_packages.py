"""Every pair of a writer and a reader of one format, engine and converter: values, moments and types bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.checkpoint_states import assert_equal, erase, mixed_state, plain
from tests.support.distributed import run_ranks
from tests.support.dtype_zoo import make_tensor, same_bytes
from vescale_fsdp.checkpoint import PerRank, load, read_state, verify
from vescale_fsdp.checkpoint.memory.ram_tier import RamTier
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.tensor_view import SourceView, read_range
from vescale_fsdp.checkpoint.ranks.coordinator import coordinator_for
from vescale_fsdp.checkpoint.save import Saver
from vescale_fsdp.checkpoint.state.nesting import flatten, name_of
from vescale_fsdp.checkpoint.steps.run_file import RunFile
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.conversion.convert import ConvertOptions, convert
from vescale_fsdp.conversion.diff import diff
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.conversion.report.describe import describe

SAVED = ("native", "zarr", "unsplit", "unsplit-zarr", "ram", "dcp")  # by the engine, and by torch
CONVERTED = {"to-zarr": "zarr", "to-vescale": "native", "to-dcp": "dcp", "to-torch": "torch"}
TARGETS = ("hf", "dcp", "torch", "zarr", "native")
STEP = "vescale-run/step-00000004"


def _state() -> dict[str, Any]:
    """Ragged, sharded, replicated, 0-d and empty tensors, moments, bf16, fp8, bool."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    more = {
        "fp8": make_tensor((6, 5), torch.float8_e4m3fn),
        "bools": distribute_tensor(torch.arange(21).view(7, 3) % 2 == 0, mesh, [Shard(0)]),
        "bf16": distribute_tensor(make_tensor((5, 9), torch.bfloat16), mesh, [Shard(1)]),
        "half": torch.tensor(1.5, dtype=torch.float16),
    }
    return {**mixed_state(2), "more": more}


def _save_all(folder: Path) -> None:
    state = {**_state(), "rng": PerRank(dist.get_rank())}
    for name, form, split in (("native", "native", 16), ("zarr", "zarr", 16), ("unsplit", "native", None)):
        Saver(open_storage(folder / name), coordinator_for(), format=form, split_bytes=split).save(state)  # type: ignore[arg-type]
    Saver(open_storage(folder / "unsplit-zarr"), coordinator_for(), format="zarr", split_bytes=None).save(
        state
    )
    run = RunFile((("0123abcd", None),))  # the same on all ranks
    tier, ranks = RamTier("run", folder=folder / "ram"), coordinator_for()
    save_id, _ = tier.begin(ranks, run)
    assert tier.save(ranks, 4, state, None, save_id=save_id, run=run, behind=ranks)
    state.pop("rng")
    dcp.save(
        {key: value for key, value in state.items() if key != "step"} | {"step": 7},
        checkpoint_id=folder / "dcp",
    )
    whole = plain(state)
    if dist.get_rank() == 0:
        torch.save(whole, folder / "state.pt")


def _leaves(state: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and other values of a nested state by flattened name."""
    leaves = flatten(state, lambda value: isinstance(value, torch.Tensor))
    tensors = {name_of(p): leaf for p, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    return tensors, {name_of(p): leaf for p, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)}


class Written:
    """Folders by writer, and what all of them hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run_ranks(3, _save_all, folder)
        self.tensors, self.values = _leaves(torch.load(folder / "state.pt"))
        for writer, kind in CONVERTED.items():
            convert(open_source(self.path("native")), self.path(writer), kind, ConvertOptions(ranks=3))

    def path(self, writer: str) -> str:
        names = {"ram": f"ram/{STEP}", "to-torch": "to-torch.pt"}
        return str(self.folder / names.get(writer, writer))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """All writers' folders of one state."""
    return Written(tmp_path_factory.mktemp("written"))


def _read(source: Source) -> dict[str, torch.Tensor]:
    """Every tensor of a source, in full."""
    found = {}
    for name, tensor in source.tensors.items():
        info = tensor.info
        buffer = np.empty(max(info.nbytes, 1), dtype=np.uint8)
        read_range(SourceView(source, name, name), 0, info.numel, buffer)
        dtype = getattr(torch, info.dtype.name)
        raw = torch.from_numpy(buffer[: info.nbytes])
        found[name] = (
            raw.view(dtype).reshape(info.shape) if info.numel else torch.empty(info.shape, dtype=dtype)
        )
    return found


def _assert_same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys() and len(expected) > 4
    assert [name for name in expected if not same_bytes(expected[name], found[name])] == []


@pytest.mark.parametrize("writer", [*SAVED, *CONVERTED])
def test_the_converter_opens_what_anybody_wrote(written: Written, writer: str) -> None:
    """inspect knows names, types and shapes; all values come back; verify finds nothing, and diff."""
    source = open_source(written.path(writer))
    table = {t["name"]: (t["dtype"], tuple(t["shape"])) for t in describe(source)["tensors"]}

    assert table == {
        name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in written.tensors.items()
    }
    _assert_same(written.tensors, _read(source))
    assert {name: value() for name, value in source.values.items()} == written.values
    report = verify(source)
    assert report.problems == () and report.num_bytes > 3000
    found, compared = diff(source, open_source(written.path("native")))
    assert found == () and compared == len(written.tensors)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("writer", SAVED)
def test_the_converter_brings_it_to_every_format(
    written: Written, writer: str, target: str, tmp_path: Path
) -> None:
    """Opened again, the result holds the same bits."""
    out = str(tmp_path / "out.pt" if target == "torch" else tmp_path / "out")
    convert(open_source(written.path(writer)), out, target, ConvertOptions(ranks=2))
    expected = written.tensors
    if target == "hf":
        expected = {n.removeprefix("model."): t for n, t in expected.items() if n.startswith("model.")}
    _assert_same(expected, _read(open_source(out)))
    assert verify(open_source(out)).problems == ()


def _load_each(paths: list[str], way: str) -> int:
    state = _state()
    expected = plain(state)
    count = 0
    for path in paths:
        erase(state)
        (load if way == "engine" else _dcp_load)(path, state)  # type: ignore[operator]
        count += assert_equal(expected, plain(state))
    return count


def _dcp_load(path: str, state: Any) -> None:
    dcp.load(state, checkpoint_id=path)


ENGINE = ("native", "zarr", "unsplit", "unsplit-zarr", "ram", "to-zarr", "to-vescale")


@pytest.mark.parametrize(("way", "writers"), [("engine", ENGINE), ("dcp", ("dcp", "to-dcp"))])
def test_two_ranks_load_what_anybody_wrote(written: Written, way: str, writers: tuple[str, ...]) -> None:
    """`load` and `dcp.load` fill sharded states from folders of the engine, of torch and of the converter."""
    paths = [written.path(writer) for writer in writers]
    if way == "engine":  # values of three ranks belong to three ranks
        paths = [path for path in paths if not read_state(path).manifest.blob_bytes] or paths
        assert len(paths) == 2
        run_ranks(3, _load_saved, [written.path(writer) for writer in ENGINE[:5]])
    counts = run_ranks(2, _load_each, paths, way)
    assert min(counts) > 20_000 * len(paths)


def _load_saved(paths: list[str]) -> None:
    state = {**_state(), "rng": PerRank(-1)}
    expected = plain({key: value for key, value in state.items() if key != "rng"})
    for path in paths:
        erase(state)
        load(path, state)
        assert state["rng"].value == dist.get_rank()
        assert assert_equal(expected, plain({k: v for k, v in state.items() if k != "rng"})) > 20_000


@pytest.mark.parametrize("writer", ENGINE)
def test_the_engine_verifies_what_anybody_wrote(written: Written, writer: str) -> None:
    """Its own folders and the converter's: every byte hashed, nothing wrong, names and values as saved."""
    report = verify(written.path(writer))
    found = {
        stored.name.replace("/", "."): stored.read() for stored in read_state(written.path(writer)).values()
    }

    assert report.ok and report.num_bytes > 80_000
    expected = {
        name: t for name, t in written.tensors.items() if name != "stock.shared"
    }  # plain's other name
    _assert_same(expected, {name: t for name, t in found.items() if name != "stock.shared"})


def test_torch_and_safetensors_read_what_the_converter_wrote(written: Written, tmp_path: Path) -> None:
    """torch.load and safetensors.torch.load_file, from a zarr save of three ranks."""
    loaded = torch.load(written.path("to-torch"), weights_only=True)
    tensors, values = _leaves(loaded)
    _assert_same(written.tensors, tensors)
    assert values == written.values
    convert(open_source(written.path("zarr")), str(tmp_path / "hf"), "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    _assert_same(
        {f"model.{name}": t for name, t in weights.items()},
        {name: t for name, t in written.tensors.items() if name.startswith("model.")},
    )


@pytest.mark.parametrize("change", ["value", "type"])
def test_the_comparison_can_fail(written: Written, change: str) -> None:
    """The control: one bit, or one type, of one tensor."""
    found = _read(open_source(written.path("zarr")))
    name = "model.w"
    found[name] = -found[name] if change == "value" else found[name].view(torch.int32)
    with pytest.raises(AssertionError, match=r"model\.w"):
        _assert_same(written.tensors, found)


@pytest.mark.parametrize("writer", ["zarr", "to-zarr"])
def test_zarr_by_name_is_the_checkpoint(written: Written, writer: str, tmp_path: Path) -> None:
    """--from zarr reads the manifest where there is one; a data folder alone still has names and types."""
    _assert_same(written.tensors, _read(open_source(written.path(writer), kind="zarr")))
    (data,) = Path(written.path(writer)).glob("data-*")
    alone = open_source(str(data), kind="zarr")
    expected = {name: t for name, t in written.tensors.items() if name in alone.tensors}
    _assert_same(expected, _read(alone))
    assert len(written.tensors) - len(expected) == 1  # the shared one has one array


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def _swap(path: Path) -> None:
    size = path.stat().st_size
    alike = [
        other
        for other in sorted(path.parents[3].rglob("*"))
        if other.is_file() and other.stat().st_size == size and other.read_bytes() != path.read_bytes()
    ]
    assert alike
    path.write_bytes(alike[0].read_bytes())


@pytest.mark.parametrize("damage", [_flip, _swap])
@pytest.mark.parametrize("form", ["engine", "converter"])
def test_the_converter_finds_damage_in_zarr(
    form: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    """A flipped bit, and a sound chunk in another's place: verify names the file, and nothing is converted."""
    state = {"model": {name: torch.randn(9, 10) for name in ("a", "b", "d")}}
    Saver(open_storage(tmp_path / "engine"), coordinator_for(None), format="zarr").save(state)
    convert(open_source(str(tmp_path / "engine")), str(tmp_path / "converter"), "zarr")
    (chunk,) = (tmp_path / form).glob("data-*/model/b/c/0/0")
    damage(chunk)
    problems = verify(open_source(str(tmp_path / form))).problems
    assert len(problems) == 1 and "model/b/c/0/0" in problems[0].where
    for target in ("hf", "zarr", "native"):
        with pytest.raises(Exception, match=r"differs from the saved data(.|\n)*model\.b"):
            convert(open_source(str(tmp_path / form)), str(tmp_path / "out"), target)
        assert not (tmp_path / "out").exists()
    with pytest.raises(Exception, match=r"chunk of tensor model\.b"):
        load(tmp_path / form, state)
