"""Every writer, every reader, every kind of leaf: what a format holds arrives bit for bit, and what it cannot hold is
refused or reported.

    `every_leaf`    the kinds of leaves, and one state that has all of them
    `WRITERS`       how folders and files of that state come to be: by a library, by our saves, by `convert`
    `LACKS`         the kinds that a format cannot hold
    `READERS`       how their leaves are read: by libraries, by our loads, through `convert`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.conversion.formats.every_leaf import (
    KINDS,
    OTHERS,
    TIE,
    Leaves,
    Mesh,
    blank,
    leaves_of,
    make_state,
    violations,
)
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.striped_saves import save_striped
from vescale_fsdp.checkpoint import RamTier, load, read_state, save, verify
from vescale_fsdp.checkpoint.manifest import zarr_layout
from vescale_fsdp.checkpoint.manifest.state_tree import dotted_name
from vescale_fsdp.checkpoint.ranks.coordinator import coordinator_for
from vescale_fsdp.checkpoint.steps.run_file import RunFile
from vescale_fsdp.conversion import (
    ConvertOptions,
    ConvertReport,
    HuggingFace,
    Source,
    convert,
    diff,
    open_source,
)
from vescale_fsdp.conversion.engine.tensor_view import SourceView, read_range
from vescale_fsdp.conversion.formats.native import zarr_plan as zarr_plan
from vescale_fsdp.conversion.report.describe import describe
from vescale_fsdp.errors import CheckpointError, ConversionError, NoCheckpointError
from vescale_fsdp.layout.dtypes import dtype_from_torch

SAVING_RANKS = 2
RAM_STEP = "vescale-run/step-00000004"

# Kinds of leaves that a format cannot hold. What we write of a library's format may hold more than what it writes.
_AS_TEXTS = "numbers as keys"  # what a DCP folder makes of them: keys that are texts
LACKS: dict[str, Collection[str]] = {
    "native": (),
    "zarr": (),
    "native of convert": ("per rank",),
    "zarr of convert": ("per rank",),
    "dcp": ("per rank", _AS_TEXTS, "lists in lists", "empty dicts"),  # the last two torch flattens otherwise
    "dcp of ours": ("per rank", _AS_TEXTS),
    "torch": ("per rank", "no bytes"),  # torch.load refuses what torch.save makes of b""
    "torch of ours": ("per rank",),
    "hf": (*OTHERS, "beyond safetensors"),
    "arrays": (*OTHERS, "odd names"),  # zarr without a manifest; of numpy's dtypes alone
}
_MODEL_ALONE = {"hf", "arrays"}


# --- Writers


def _save(path: Path, state: dict[str, Any], form: Any, split_bytes: int | None = 16) -> None:
    save_striped(path, state, format=form, split_bytes=split_bytes)


def _save_to_ram(path: Path, state: dict[str, Any]) -> None:
    run = RunFile((("0123abcd", None),))  # the same on all ranks
    tier, ranks = RamTier("run", folder=path), coordinator_for()
    save_id, _ = tier.begin(ranks, run)
    assert tier.save(ranks, 4, state, None, save_id=save_id, run=run, behind=ranks)


def _save_repository(path: Path, state: dict[str, Any]) -> None:
    save(path, state, format=HuggingFace(assets=path.parent / "assets"))


def _save_safetensors(path: Path, state: dict[str, Any]) -> None:
    path.mkdir()
    alone = {name: tensor.contiguous().clone() for name, tensor in state["model"].items() if name != TIE[1]}
    save_file(alone, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text((path.parent / "assets" / "config.json").read_text())


def _save_arrays(path: Path, state: dict[str, Any]) -> None:
    group = zarr.create_group(path)
    for name, tensor in _numpy_tensors(state["model"]).items():
        chunks = tuple(max(1, size // 2) for size in tensor.shape)
        group.create_array(name, shape=tensor.shape, dtype=tensor.dtype, chunks=chunks)[...] = tensor


def _numpy_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    is_numpy = {n: dtype_from_torch(str(tensor.dtype)).is_numpy for n, tensor in tensors.items()}
    return {name: tensor.numpy() for name, tensor in tensors.items() if is_numpy[name]}


class Writer(NamedTuple):
    """A way to write the state.

    Attributes:
        format: a row of `LACKS`.
        write: writes a state to a path. On all ranks if it is in `LIVE`.
    """

    format: str
    write: Callable[[Path, dict[str, Any]], object]


LIVE = {
    "save": Writer("native", lambda path, state: _save(path, state, "native")),
    "save zarr": Writer("zarr", lambda path, state: _save(path, state, "zarr")),
    "save unsplit": Writer("native", lambda path, state: _save(path, state, "native", None)),
    "save zarr unsplit": Writer("zarr", lambda path, state: _save(path, state, "zarr", None)),
    "RAM tier": Writer("native", _save_to_ram),
    "save DCP": Writer("dcp of ours", lambda path, state: save(path, state, format="dcp")),
    "save HuggingFace": Writer("hf", _save_repository),
    "dcp.save": Writer("dcp", lambda path, state: dcp.save(state, checkpoint_id=path)),
}
ALONE = {
    "torch.save": Writer("torch", lambda path, state: torch.save(state, path)),
    "save_file": Writer("hf", _save_safetensors),
    "zarr library": Writer("arrays", _save_arrays),
}
# What `convert` writes, of "save".
TARGETS = {
    "native": "native of convert",
    "zarr": "zarr of convert",
    "dcp": "dcp of ours",
    "torch": "torch of ours",
    "hf": "hf",
}
CONVERTED = {f"convert to {kind}": format_of for kind, format_of in TARGETS.items()}
FORMATS = {name: writer.format for name, writer in (LIVE | ALONE).items()} | CONVERTED


def _save_all(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_layout, "_TARGET_BYTES", 60)  # several chunks of small tensors
        for name, writer in LIVE.items():
            writer.write(folder / name, make_state(cpu_mesh(), LACKS[writer.format]))


class Written:
    """What all writers wrote of one state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "assets").mkdir()
        (folder / "assets" / "config.json").write_text('{"tie_word_embeddings": true}')
        with pytest.MonkeyPatch.context() as patch:
            run_ranks(SAVING_RANKS, _save_all, folder)
            for name, writer in ALONE.items():
                writer.write(folder / name, make_state(None, LACKS[writer.format]))
            patch.setattr(zarr_plan, "_CHUNK_BYTES", 60)
            for name, kind in zip(CONVERTED, TARGETS, strict=True):
                self.convert("save", kind, folder / name)
        self._loaded: dict[int, list[dict[str, list[str]]]] = {}

    def path(self, writer: str) -> str:
        return str(self.folder / writer / RAM_STEP if writer == "RAM tier" else self.folder / writer)

    def source(self, writer: str) -> Source:
        return open_source(self.path(writer))

    def convert(self, writer: str, kind: str, target: Path) -> ConvertReport:
        """Convert by two threads to small files, without the kinds that are not simply left out."""
        source, options = self.source(writer), ConvertOptions(ranks=3, threads=2)
        if kind in ("dcp", "hf"):
            left = "beyond safetensors." if kind == "hf" else f"{_AS_TEXTS}."
            excluded = [f"{left}*"] if any(left in name for name in (*source.tensors, *source.values)) else []
            assets = str(self.folder / "assets") if kind == "hf" else None
            options = replace(options, assets=assets, exclude=excluded, max_shard_bytes=3000)
        return convert(source, target, kind, options)

    def loaded(self, world_size: int) -> list[dict[str, list[str]]]:
        """For each rank, writer -> violations of a load; all writers in one call."""
        if world_size not in self._loaded:
            paths = {writer: self.path(writer) for writer in FORMATS}
            self._loaded[world_size] = run_ranks(world_size, _load_all, paths)
        return self._loaded[world_size]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The state by every writer."""
    return Written(tmp_path_factory.mktemp("written"))


def _held(*formats: str, mesh: Mesh = None) -> dict[str, Any]:
    """The part of the state that all of these formats hold, nested and named as the last one gives it back."""
    state = make_state(mesh, [kind for name in formats for kind in LACKS[name]])
    if "arrays" in formats:
        held = _numpy_tensors(make_state(None, LACKS["arrays"])["model"])
        state["model"] = {name: tensor for name, tensor in state["model"].items() if name in held}
    return state["model"] if _MODEL_ALONE & {*formats} else state


def _expected(*formats: str) -> Leaves:
    """The leaves of `_held`, but for what each rank has of its own."""
    leaves = leaves_of(_held(*formats, mesh=None))
    leaves.pop("per rank.seed", None)
    if formats[-1] == "hf":
        leaves.pop(TIE[1])  # config.json knows of it
    return leaves


def _is_tied(*formats: str) -> bool:
    """Whether what is written last, of what was written first, knows that two names are one tensor."""
    return not {"dcp", "arrays"} & {*formats} and formats[-1] != "hf"


# --- Readers
# Each returns violations: of what it reads at a path, from what these formats hold.


def _read_source(path: str, *formats: str) -> list[str]:
    source = open_source(path)
    found: Leaves = {name: value() for name, value in source.values.items()}
    for name, tensor in source.tensors.items():
        info = tensor.info
        buffer = np.empty(max(info.nbytes, 1), dtype=np.uint8)
        read_range(SourceView(source, name, name), 0, info.numel, buffer)
        raw = torch.from_numpy(buffer[: info.nbytes])
        found[name] = raw.view(getattr(torch, info.dtype.name)).reshape(info.shape)
    expected = _expected(*formats)
    wrong = violations(expected, found)
    prefix = "" if _MODEL_ALONE & {*formats} else "model."
    both = {frozenset(prefix + name for name in TIE)} if _is_tied(*formats) else set()
    if {frozenset(pair) for pair in source.ties.items()} != both:
        wrong.append(f"ties: {source.ties}")
    tensors = {name: leaf for name, leaf in expected.items() if isinstance(leaf, torch.Tensor)}
    table = {t["name"]: (t["dtype"], t["shape"]) for t in describe(source)["tensors"]}
    if table != {n: (str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()}:
        wrong.append("inspect: other names, types or shapes")
    return wrong


def _read_by_state(path: str, *formats: str) -> list[str]:
    tree = read_state(path).tree(read=True)
    tree.pop("per rank", None)
    return violations(_expected(*formats), leaves_of(tree))


def _read_by_dcp(path: str, *formats: str) -> list[str]:
    state = blank(_held(*formats, "dcp"))
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return violations(_expected(*formats, "dcp"), leaves_of(state))


def _read_by_torch(path: str, *formats: str) -> list[str]:
    state = torch.load(path, weights_only=True, mmap=True)
    model = state if _MODEL_ALONE & {*formats} else state["model"]
    is_tied = len({model[name].data_ptr() for name in TIE}) == 1
    wrong = [] if is_tied == _is_tied(*formats) else [f"ties: {is_tied}"]
    return wrong + violations(_expected(*formats), leaves_of(state))


def _read_by_safetensors(path: str, *formats: str) -> list[str]:
    files = [load_file(file) for file in sorted(Path(path).glob("*.safetensors"))]
    return violations(_expected(*formats), {name: tensor for file in files for name, tensor in file.items()})


def _read_by_zarr(path: str, *formats: str) -> list[str]:
    """Tensors alone; of tied ones the first."""
    root = zarr.open_group(path, mode="r")
    group = root[str(root.attrs["arrays"])]
    assert isinstance(group, zarr.Group)
    found: Leaves = {}
    members = list(group.members(max_depth=None))
    for _, array in members:
        if isinstance(array, zarr.Array):
            raw = torch.from_numpy(np.asarray(array[...]).reshape(-1)).view(torch.uint8)
            dtype = getattr(torch, str(array.attrs["logical_dtype"]))
            found[dotted_name(str(array.attrs["name"]))] = raw.view(dtype).reshape(array.shape)
    expected = {name: leaf for name, leaf in _expected(*formats).items() if isinstance(leaf, torch.Tensor)}
    if _is_tied(*formats):
        expected = {name: leaf for name, leaf in expected.items() if not name.endswith(TIE[1])}
    return violations(expected, found)


def _load(path: str, *formats: str, mesh: Mesh = None) -> list[str]:
    state = blank(_held(*formats, mesh=mesh))
    load(path, state)
    found = leaves_of(state)
    wrong: list[str] = []
    if "per rank" not in LACKS[formats[-1]]:
        same_ranks = mesh is not None and mesh.size() == SAVING_RANKS
        expected = mesh.get_rank() if same_ranks else math.comb(SAVING_RANKS, 2)  # their sum
        wrong += violations({"per rank": expected}, {"per rank": found.pop("per rank.seed", None)})
    if formats[-1] == "hf":
        found.pop(TIE[1])
    return wrong + violations(_expected(*formats), found)


def _load_all(paths: dict[str, str]) -> dict[str, list[str]]:
    """Writer -> violations of a load onto the ranks of this call."""
    return {writer: _load(path, FORMATS[writer], mesh=cpu_mesh()) for writer, path in paths.items()}


def _verify(path: str, *formats: str) -> list[str]:
    expected = _expected(*formats).items()
    tensors = [
        leaf for name, leaf in expected if isinstance(leaf, torch.Tensor) and not name.endswith(TIE[1])
    ]
    wrong = []
    for opened in (path, open_source(path)):
        report = verify(opened)
        wrong += [str(problem) for problem in report.problems]
        if report.num_bytes < sum(tensor.nbytes for tensor in tensors):
            wrong.append(f"{report.num_bytes} bytes were read")
    return wrong


class Reader(NamedTuple):
    """A way to read the state.

    Attributes:
        violations: what it finds at a path to be other than what the formats hold.
        formats: those that it can open.
    """

    violations: Callable[..., list[str]]
    formats: Collection[str] = tuple(LACKS)


_OURS = ("native", "zarr", "native of convert", "zarr of convert")
READERS = {
    "open_source": Reader(_read_source),
    "load": Reader(_load),
    "verify": Reader(_verify),
    "read_state": Reader(_read_by_state, _OURS),
    "dcp.load": Reader(_read_by_dcp, ("dcp", "dcp of ours")),
    "torch.load": Reader(_read_by_torch, ("torch", "torch of ours")),
    "load_file": Reader(_read_by_safetensors, ("hf",)),
    "zarr library": Reader(_read_by_zarr, ("zarr", "zarr of convert")),
}
# The library, or else the reader, that reads what `convert` makes.
LIBRARY = {
    "native": "read_state",
    "zarr": "zarr library",
    "dcp": "dcp.load",
    "torch": "torch.load",
    "hf": "load_file",
}
CORE_SOURCES = (
    "save",
    "save zarr",
    "dcp.save",
    "torch.save",
    "save_file",
)  # one of each format; others in a part


@pytest.mark.parametrize(
    ("writer", "reader"),
    [(w, r) for w, form in FORMATS.items() for r, reader in READERS.items() if form in reader.formats],
)
def test_a_reader_gives_what_a_writer_wrote(written: Written, writer: str, reader: str) -> None:
    """Names, types, shapes and bits of every leaf; values by type, NaN and signs of zeros included."""
    assert READERS[reader].violations(written.path(writer), FORMATS[writer]) == []


def test_torchs_converter_reads_a_dcp_folder(tmp_path: Path) -> None:
    """All but what torch's own planner and its own reader of pickles lack."""
    state = make_state(None, (*LACKS["dcp"], *LACKS["torch"]))
    save(tmp_path / "dcp", state, format="dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "state.pt")
    read = torch.load(tmp_path / "state.pt", weights_only=True)
    assert violations(leaves_of(state), leaves_of(read)) == []


@pytest.mark.parametrize(
    "ranks", [SAVING_RANKS, pytest.param(SAVING_RANKS + 1, marks=pytest.mark.part("formats"))]
)
@pytest.mark.parametrize("writer", FORMATS)
def test_ranks_load_what_a_writer_wrote(written: Written, writer: str, ranks: int) -> None:
    """Onto the ranks that saved and onto others, sharded every way; values of single ranks are merged there."""
    for violations_of in written.loaded(ranks):
        assert violations_of[writer] == []


def _rows_of_conversions() -> list[Any]:
    part = pytest.mark.part("formats")
    return [
        pytest.param(writer, target, marks=() if writer in CORE_SOURCES else part)
        for writer in FORMATS
        for target in TARGETS
    ]


@pytest.mark.parametrize(("writer", "target"), _rows_of_conversions())
def test_convert_carries_what_both_formats_hold(
    written: Written, writer: str, target: str, tmp_path: Path
) -> None:
    """Read by the target's own library, and by the converter again."""
    written.convert(writer, target, tmp_path / "out")
    formats = (FORMATS[writer], TARGETS[target])

    for reader in (LIBRARY[target], "open_source", "verify"):
        assert READERS[reader].violations(str(tmp_path / "out"), *formats) == [], reader


@pytest.mark.parametrize("writer", FORMATS)
def test_diff_finds_what_formats_lack_alone(written: Written, writer: str) -> None:
    """Beside the native save: nothing, but for leaves of kinds that the format lacks."""
    differences, compared = diff(written.source(writer), written.source("save"))

    expected, native = _expected(FORMATS[writer]), _expected("native")
    lacked = native.keys() - expected.keys()
    tensors = [name for name, leaf in expected.items() if isinstance(leaf, torch.Tensor)]
    assert compared >= len(tensors) > 50
    assert {difference.name for difference in differences} <= {
        name.removeprefix("model.") for name in lacked
    } | lacked


def test_the_comparison_sees_every_change() -> None:
    """The control: one bit, also of NaN and of a zero's sign, a type, a shape, a name more or less."""
    expected = _expected("native")
    changes: dict[str, Callable[[Any], Any]] = {
        "model.special floats.float32": lambda t: (
            t.view(torch.int32) ^ torch.tensor([1, 0, 0, 0, 0, 0, 0])
        ).view(torch.float32),
        "model.every dtype.float8_e4m3fn": lambda t: t.view(torch.float8_e5m2),
        "model.empty.rows": lambda t: t.reshape(4, 0),
        "floats.zero": lambda _: 0.0,
        "numbers.yes": lambda _: 1,
        "containers.tuple": list,
        "none.value": str,
        "no bytes.none": lambda _: "",
    }
    for name, change in changes.items():
        (problem,) = violations(expected, expected | {name: change(expected[name])})
        assert problem.startswith(name)
    for name in expected:
        less = {other: leaf for other, leaf in expected.items() if other != name}
        assert len(violations(expected, less)) == len(violations(less, expected)) == 1
    assert violations(expected, expected) == [] and {name.split(".")[0] for name in expected} >= {*OTHERS} - {
        "per rank"
    }


def _only(kind: str) -> dict[str, Any]:
    """A state of one kind, and a model beside it."""
    return make_state(None, [other for other in KINDS if other not in (kind, "replicated")])


@pytest.mark.parametrize("target", TARGETS)
def test_convert_refuses_or_reports_what_a_target_lacks(target: str, tmp_path: Path) -> None:
    """Kind by kind: an error names the leaf, or the report counts it; no leaf is changed on the way."""
    wrong = []
    for kind in LACKS[TARGETS[target]]:
        save(tmp_path / kind, _only(kind))
        source, out = open_source(str(tmp_path / kind)), tmp_path / f"{kind} out"
        names = [name for name in (*source.tensors, *source.values, *source.unsupported) if kind in name]
        try:
            report = convert(source, out, target)
        except ConversionError as error:
            if not names or kind not in f"{error.where} {error.got}" or out.exists():
                wrong.append(f"{kind}: {error}")
            continue
        if (
            kind == _AS_TEXTS and target == "dcp"
        ):  # reported by nothing, but no load takes a text for a number
            with pytest.raises(CheckpointError) as caught:
                load(out, blank(_only(kind)))
            assert kind in str(caught.value.got)
        elif not names or len(names) != report.dropped_optimizer + len(report.dropped_others):
            wrong.append(f"{kind}: {report.dropped_others} of {names}")
    assert wrong == []


@pytest.mark.parametrize(
    "kind", [kind for kind in LACKS["hf"] if kind != "optimizer"]
)  # which is always left out
def test_a_repository_of_other_kinds_is_refused(kind: str, tmp_path: Path) -> None:
    """`save` names what a repository cannot hold, and writes nothing."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConversionError) as caught:
        save(tmp_path / "out", _only(kind), format=HuggingFace(assets=tmp_path))
    assert kind in f"{caught.value.where} {caught.value.got}"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("writer", [name for name, form in FORMATS.items() if form not in _OURS])
def test_read_state_refuses_other_formats(written: Written, writer: str) -> None:
    """It reads native checkpoints alone."""
    with pytest.raises(NoCheckpointError):
        read_state(written.path(writer))


def test_zarr_by_name_is_the_checkpoint(written: Written) -> None:
    """--from zarr reads the manifest where there is one; a data folder alone still has names and types."""
    for writer in ("save zarr", "convert to zarr"):
        assert open_source(written.path(writer), kind="zarr").kind == "native"
        data = Path(written.path(writer)) / "arrays"
        alone, whole = open_source(str(data), kind="zarr"), written.source(writer)
        assert whole.tensors.keys() - alone.tensors.keys() == {f"model.{TIE[1]}"}  # one array of two names
        assert all(alone.tensors[name].info == whole.tensors[name].info for name in alone.tensors)
