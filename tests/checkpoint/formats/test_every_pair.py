"""Stock torch reads what we write, we read what stock torch writes, and every pair of formats keeps every
bit."""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtype_zoo import make_tensor, same_bytes, zoo
from vescale_fsdp.checkpoint.storage.checksums import CRC32, CRC32C
from vescale_fsdp.conversion.convert import ConvertOptions, ConvertReport, convert
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError

SMALL = {"memory_budget_bytes": 4 * 2**20, "threads": 2}


def _convert(source: Path, target: Path, kind: str, **options: Any) -> ConvertReport:
    chosen = ConvertOptions(**options, **SMALL)
    return convert(open_source(str(source)), str(target), kind, chosen)


def _training_state() -> dict[str, Any]:
    """What a trainer saves: containers, counters, a list with tensors, an odd dict key or two."""
    return {
        "model": {**zoo(), "layers.0.big": make_tensor((1100, 1000), torch.float32)},
        "optimizer": {
            "state": {"layers.0.big": {"exp_avg": torch.randn(1100, 1000), "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["layers.0.big"], "on": True}],
        },
        "history": [torch.arange(3), torch.arange(4)],
        "step": 2**40,
        "negative": -(2**40),
        "name": "räksmörgås",
        "blob": b"\x00\xff",
        "nothing": None,
        "plain_list": [1, 2.5, "x"],
    }


def _same(a: Any, b: Any) -> bool:
    """Equal nested states: same types of containers, same bytes of tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and same_bytes(a, b)
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and sorted(map(str, a)) == sorted(map(str, b))
            and all(_same(a[k], b[k]) for k in a)
        )
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_crc_of_two_pieces(a: bytes, b: bytes) -> None:
    """The CRC of a whole follows from those of its pieces."""
    assert CRC32.combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)
    assert CRC32C.combine(CRC32C.of(a), CRC32C.of(b), len(b)) == CRC32C.of(a + b)


def test_torch_reads_our_torch_file(tmp_path: Path) -> None:
    """torch.load(weights_only) gives the state back as it was nested; with mmap too; the zip is sound."""
    state = _training_state()
    torch.save(state, tmp_path / "a.pt")
    _convert(tmp_path / "a.pt", tmp_path / "b.pt", "torch")
    for mmap in (False, True):
        loaded = torch.load(tmp_path / "b.pt", weights_only=True, mmap=mmap)
        assert _same(loaded, state)
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert archive.testzip() is None  # every CRC is right, also of tensors written in several segments
        assert len(archive.namelist()) > 100


def test_torch_file_with_views_and_strides(tmp_path: Path) -> None:
    """Tensors that share a storage, start inside one, or are transposed arrive with their own values."""
    base = torch.arange(200.0)
    state = {"head": base[:50], "tail": base[50:].view(15, 10), "turned": base.view(20, 10).t()}
    torch.save({"model": state}, tmp_path / "a.pt")
    _convert(tmp_path / "a.pt", tmp_path / "out", "hf")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert all(same_bytes(loaded[name], value) for name, value in state.items())


def test_torch_parameters_and_ordered_dicts(tmp_path: Path) -> None:
    """state_dicts as modules give them (OrderedDict with Parameters kept) are read."""
    module = torch.nn.Linear(3, 2)
    torch.save(module.state_dict(keep_vars=True), tmp_path / "a.pt")
    _convert(tmp_path / "a.pt", tmp_path / "out", "hf")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["weight"], module.weight)


def test_dcp_reads_our_dcp_folder(tmp_path: Path) -> None:
    """Stock dcp.load fills a state from what to-fsdp2 wrote, and torch's own converter agrees."""
    state = _training_state()
    torch.save(state, tmp_path / "a.pt")
    _convert(tmp_path / "a.pt", tmp_path / "dcp", "dcp", max_shard_bytes=2_000_000)
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 2

    def blank(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: blank(inner) for key, inner in value.items()}
        if isinstance(value, list) and any(isinstance(v, (dict, torch.Tensor)) for v in value):
            return [blank(inner) for inner in value]
        return torch.empty_like(value) if isinstance(value, torch.Tensor) else None

    target = blank(state)
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert _same(target, state)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "theirs.pt")
    assert _same(torch.load(tmp_path / "theirs.pt", weights_only=True), state)


def _state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _train(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    for layer in model:
        fully_shard(layer, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 7)).sum().backward()
    optimizer.step()
    return model, optimizer


def _save_training(folder: str) -> None:
    dcp.save(_state_of(*_train(0)), checkpoint_id=folder)


def _load_and_compare(ours: str, original: str) -> int:
    """Load both folders into two fresh FSDP2 models; count equal tensors."""
    found = []
    for folder in (ours, original):
        model, optimizer = _train(1)
        state = _state_of(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found.append(_state_of(model, optimizer))
    count = 0
    pairs = [(found[0]["model"], found[1]["model"])]
    states = [f["optimizer"]["state"] for f in found]
    pairs += [(states[0][name], states[1][name]) for name in states[0]]
    for a, b in pairs:
        for name in a:
            left, right = a[name], b[name]
            if isinstance(left, DTensor):
                left, right = left.full_tensor(), right.full_tensor()
            assert same_bytes(left, right), name
            count += 1
    assert found[0]["optimizer"]["param_groups"] == found[1]["optimizer"]["param_groups"]
    return count


def test_fsdp2_with_optimizer_through_torch_and_back(tmp_path: Path) -> None:
    """2 ranks save, we go DCP -> torch -> DCP, 3 ranks load: model, moments, steps and groups as saved."""
    run_ranks(2, _save_training, str(tmp_path / "dcp"))
    _convert(tmp_path / "dcp", tmp_path / "state.pt", "torch")
    _convert(tmp_path / "state.pt", tmp_path / "again", "dcp")
    counts = run_ranks(3, _load_and_compare, str(tmp_path / "again"), str(tmp_path / "dcp"))
    assert counts == [4 + 4 * 3] * 3


def test_prefix_moves_the_model(tmp_path: Path) -> None:
    """--prefix '' puts a model at the root (torchtitan), any other prefix where accelerate wants it."""
    state = {"model": {"layers.0.w": torch.ones(2)}, "step": 1}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    _convert(tmp_path / "dcp", tmp_path / "root", "dcp", prefix="")
    root: dict[str, Any] = {"layers.0.w": torch.zeros(2), "step": None}
    dcp.load(root, checkpoint_id=tmp_path / "root", no_dist=True)
    assert torch.equal(root["layers.0.w"], torch.ones(2)) and root["step"] == 1
    _convert(tmp_path / "dcp", tmp_path / "deep.pt", "torch", prefix="app.model")
    deep = torch.load(tmp_path / "deep.pt", weights_only=True)
    assert torch.equal(deep["app"]["model"]["layers.0.w"], torch.ones(2))


def test_optimizer_forms(tmp_path: Path) -> None:
    """Nested and flattened as torch writes them: each becomes exactly the other, options per parameter and
    all."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    first, second = (list(layer.parameters()) for layer in model)
    optimizer = torch.optim.AdamW([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.2}])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    states = {}
    for name, flat in (("nested", False), ("flattened", True)):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        states[name] = {"model": model_state, "optimizer": optimizer_state}
        dcp.save(states[name], checkpoint_id=tmp_path / name, no_dist=True)
    for name, other in (("nested", "flattened"), ("flattened", "nested")):
        _convert(tmp_path / name, tmp_path / f"{name}.pt", "torch", optimizer=other)
        loaded = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert _same(loaded, states[other]), name
        _convert(tmp_path / name, tmp_path / f"{name}_dcp", "dcp", optimizer=other)
        theirs, ours = (open_source(str(tmp_path / place)) for place in (other, f"{name}_dcp"))
        assert dict(theirs.paths) == dict(ours.paths)
    report = _convert(tmp_path / "nested", tmp_path / "none.pt", "torch", optimizer="drop")
    assert list(torch.load(tmp_path / "none.pt", weights_only=True)) == ["model"]
    assert report.dropped_optimizer > 12


def test_what_torch_reads_with_weights_only_can_be_read(tmp_path: Path) -> None:
    """A scheduler with a Counter, Parameters and tensors with attributes; what is no dense tensor is named."""
    weight, tagged = torch.nn.Parameter(torch.randn(3)), torch.randn(2)
    weight.tag = tagged.tag = "x"  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD([weight])
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    state = {
        "model": {"w": weight, "t": tagged},
        "scheduler": scheduler.state_dict(),
        "few": [{"n": Counter("aa")}],
    }
    torch.save(state, tmp_path / "a.pt")
    dcp.save(
        {**state, "model": {"w": weight.data, "t": tagged}}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    for source in ("a.pt", "dcp"):
        out = tmp_path / f"from {source}.pt"
        _convert(tmp_path / source, out, "torch")
        loaded = torch.load(out, weights_only=True)
        assert torch.equal(loaded["model"]["w"], weight) and torch.equal(loaded["model"]["t"], tagged)
        milestones = {
            int(key): count for key, count in loaded["scheduler"]["milestones"].items()
        }  # DCP: texts
        assert milestones == {3: 1, 5: 1} and loaded["few"] == [{"n": {"a": 2}}]
    torch.save({"w": torch.ones(2), "odd": torch.eye(2).to_sparse()}, tmp_path / "sparse.pt")
    with pytest.raises(ConversionError, match=r"sparse tensor(.|\n)*to_dense"):
        open_source(str(tmp_path / "sparse.pt"), trust_pickle=True)


def test_include_and_exclude(tmp_path: Path) -> None:
    """Patterns choose names; one that matches nothing is an error."""
    state = {"model": {"a": torch.ones(1), "b": torch.ones(2)}, "step": 1}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    report = _convert(tmp_path / "dcp", tmp_path / "x.pt", "torch", include=["model.*"], exclude=["*.b"])
    assert list(torch.load(tmp_path / "x.pt", weights_only=True)["model"]) == ["a"]
    assert report.dropped_others == ("model.b", "step")
    with pytest.raises(ConversionError, match=r"nope\.\*"):
        _convert(tmp_path / "dcp", tmp_path / "y.pt", "torch", exclude=["nope.*"])


def test_torch_file_damage(tmp_path: Path) -> None:
    """A truncated file, a file that is none, and a pickle that names code."""
    torch.save({"w": torch.randn(100)}, tmp_path / "a.pt")
    good = (tmp_path / "a.pt").read_bytes()
    for bad in (good[:-30], good[: len(good) // 2], good[:4]):
        (tmp_path / "a.pt").write_bytes(bad)
        with pytest.raises(CorruptCheckpointError, match=r"torch\.save archive"):
            open_source(str(tmp_path / "a.pt"))
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(ConversionError, match=r"since 1\.6"):
        open_source(str(tmp_path / "a.pt"))
    torch.save({"w": torch.randn(2), "where": Path("x")}, tmp_path / "b.pt")
    with pytest.raises(ConversionError, match=r"pathlib(.|\n)*--trust-pickle"):
        open_source(str(tmp_path / "b.pt"))


def test_values_that_are_no_data_are_refused(tmp_path: Path) -> None:
    """A trusted value that is an object cannot be written: the error names it and its type."""
    torch.save({"w": torch.randn(2), "bad": Path("x")}, tmp_path / "a.pt")
    source = open_source(str(tmp_path / "a.pt"), trust_pickle=True)
    with pytest.raises(ConversionError, match=r"Path(.|\n)*--exclude"):
        convert(source, str(tmp_path / "b.pt"), "torch")
    assert not (tmp_path / "b.pt").exists()
