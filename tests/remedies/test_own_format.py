"""Remedies of saves, loads and the manager."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from tests.remedies.applied import argument, command, commands, refused, runs, text_in
from tests.support.distributed import run_threads
from vescale_fsdp.checkpoint import (
    CheckpointManager,
    EverySteps,
    OnSignal,
    PerRank,
    RamTier,
    SavePolicy,
    load,
    read_state,
    save,
)
from vescale_fsdp.checkpoint.data import ReshardableSampler, Resharded
from vescale_fsdp.checkpoint.dcp import RaggedLoadPlanner, RaggedReader, RaggedSavePlanner, RaggedWriter
from vescale_fsdp.checkpoint.state_dict import set_model_state_dict
from vescale_fsdp.conversion import HuggingFace
from vescale_fsdp.errors import VescaleError

ONES = torch.ones(2, 2)


def _ones(*names: str) -> dict[str, torch.Tensor]:
    return {name: ONES.clone() for name in names}


def _zeros(*names: str) -> dict[str, Any]:
    return {name: torch.zeros(2, 2) for name in names}


def _is_filled(state: dict[str, Any]) -> bool:
    return all(bool((tensor == 1).all()) for tensor in state.values())


def _model(*, ones: bool = False, names: tuple[str, ...] = ("a", "b")) -> nn.ModuleDict:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})
    for param in model.parameters():
        nn.init.constant_(param, float(ones))
    return model


# Targets of saves


@runs("checkpoint/native/write.py::NativeForm.claim")
def test_a_checkpoint_is_there(tmp_path: Path) -> None:
    """It is replaced when that is asked for; another path is free."""
    save(tmp_path / "c", _zeros("w"))
    remedy = refused(save, tmp_path / "c", _ones("w"))
    save(tmp_path / "other", _ones("w"))
    save(tmp_path / "c", _ones("w"), **argument(remedy, "overwrite"))
    for path in ("c", "other"):
        load(tmp_path / path, state := _zeros("w"))
        assert _is_filled(state)


@pytest.mark.parametrize("kind", ["dcp", "hf"])
@runs("checkpoint/native/written_folder.py::WrittenFolder._prove_free[3]")
def test_a_folder_of_another_library_is_there(kind: str, tmp_path: Path) -> None:
    """The same for the formats of others."""
    (tmp_path / "config.json").write_text("{}")
    format_: Any = "dcp" if kind == "dcp" else HuggingFace(assets=tmp_path)
    save(tmp_path / "c", _zeros("w"), format=format_)
    remedy = refused(save, tmp_path / "c", _ones("w"), format=format_)
    save(tmp_path / "c", _ones("w"), format=format_, **argument(remedy, "overwrite"))
    load(tmp_path / "c", state := _zeros("w"))
    assert _is_filled(state)


@runs("checkpoint/native/written_folder.py::WrittenFolder._prove_free[2]")
def test_a_zarr_checkpoint_is_there_in_an_object_store() -> None:
    """It is not replaced; another path is free, and the old one can be removed afterward."""
    save("memory://zarr/c", _zeros("w"), format="zarr")
    refused(save, "memory://zarr/c", _ones("w"), format="zarr", overwrite=True)
    save("memory://zarr/other", _ones("w"), format="zarr")
    fsspec.filesystem("memory").rm("/zarr/c", recursive=True)
    load("memory://zarr/other", state := _zeros("w"))
    assert _is_filled(state)


@runs(
    "checkpoint/native/written_folder.py::WrittenFolder._prove_free",
    "checkpoint/native/written_folder.py::WrittenFolder._prove_free[1]",
)
def test_other_files_are_there(tmp_path: Path) -> None:
    """A file in the folder's place, and files of somebody else in it."""
    (tmp_path / "file").write_text("x")
    refused(save, tmp_path / "file", _ones("w"), format="dcp")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/notes").write_text("x")
    refused(save, tmp_path / "c", _ones("w"), format="dcp")
    (tmp_path / "c/notes").rename(tmp_path / "notes")  # moved away
    save(tmp_path / "c", _ones("w"), format="dcp")
    load(tmp_path / "c", state := _zeros("w"))
    assert _is_filled(state)


@runs("checkpoint/storage/open.py::checked_path")
def test_the_state_comes_first(tmp_path: Path) -> None:
    """As in torch.save."""
    remedy = refused(save, _ones("w"), tmp_path / "c")  # type: ignore[arg-type]
    for call in re.findall(r"(?:save|load)\(path, state\)", remedy):
        state = _ones("w") if call.startswith("save") else _zeros("w")
        eval(call, {"save": save, "load": load, "path": tmp_path / "c", "state": state})
        assert _is_filled(state)


@runs("checkpoint/storage/open.py::_open_url")
def test_a_url_without_a_bucket() -> None:
    """The remedy ends with what must stand before the name."""
    remedy = refused(save, "gs://", _ones("w"))
    with pytest.raises(VescaleError) as error:  # another one: here is no such server, or no package for it
        save(f"{remedy.split()[-1]}file://x", _ones("w"))
    assert error.value.todo != remedy


@runs("checkpoint/storage/local.py::check_not_planted")
def test_a_link_at_a_temporary_name(tmp_path: Path) -> None:
    """It is removed."""
    (tmp_path / "c.partial").symlink_to(tmp_path)
    (tmp_path / ".c.saving").symlink_to(tmp_path)
    refused(save, tmp_path / "c", _ones("w"), format="dcp")
    (tmp_path / ".c.saving").unlink()
    save(tmp_path / "c", _ones("w"), format="dcp")
    load(tmp_path / "c", state := _zeros("w"))
    assert _is_filled(state)


@runs("checkpoint/storage/local.py::make_private")
def test_a_folder_that_others_may_enter(tmp_path: Path) -> None:
    """A tier in memory under a name whose folder this user made for all to see."""
    with CheckpointManager(tmp_path / "run", ram=RamTier("x", folder=tmp_path / "shm")) as manager:
        manager.save(1, _ones("w"))
        (folder,) = (tmp_path / "shm").iterdir()
    folder.chmod(0o755)

    def again(name: str) -> None:
        with CheckpointManager(tmp_path / "run", ram=RamTier(name, folder=tmp_path / "shm")) as manager:
            assert manager.restore(state := _zeros("w")) is not None and _is_filled(state)

    refused(again, "x")
    again("y")
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    again("x")


# What is saved


class _Unknown:
    """An object that nothing is known of."""

    value = 3


class _Known(_Unknown):
    """The same with the two methods that the remedy names."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class _Outer(_Known):
    """An object whose state contains another object, or its state."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner = state["inner"]


def _deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


_PARTIAL = "checkpoint/state/tensor_description.py::Describer._distribution"
_CAPTURE = "checkpoint/state/capture.py::"
# site -> (a value that is refused, the value that its remedy describes)
VALUES: dict[str, tuple[Any, Any]] = {
    f"{_CAPTURE}_HashableSink._refused": ({(ONES,)}, [ONES]),
    f"{_CAPTURE}_encode_int": (1 << 20000, (1 << 20000).to_bytes(2501, "big")),
    f"{_CAPTURE}_too_deep": (_deep(900), [[1]]),
    f"{_CAPTURE}_refuse": (_Unknown(), _Known()),
    f"{_CAPTURE}_Taker._claim": ({1: 2 * ONES, "1": ONES}, {1: 2 * ONES, "one": ONES}),
    f"{_CAPTURE}_LeafTaker.stateful": (
        PerRank(_Outer(_Known())),
        PerRank(_Outer(_Known().state_dict())),
    ),
    "checkpoint/state/tensor_description.py::_check_plain": (
        ONES.to_sparse(),
        {"indices": ONES.to_sparse().indices(), "values": ONES.to_sparse().values()},
    ),
}


@pytest.mark.parametrize("site", VALUES)
@runs(*VALUES)
def test_values_that_cannot_be_saved(site: str, tmp_path: Path) -> None:
    """Each in the form that its remedy names is saved, and loaded."""
    bad, good = VALUES[site]
    refused(save, tmp_path / "c", {"x": bad})
    save(tmp_path / "c", {"x": good})
    assert load(tmp_path / "c", {"x": good}).missing == ()


@pytest.mark.parametrize("like", ["module", "tensor"])
def test_tensors_without_memory(like: str, tmp_path: Path) -> None:
    """The remedy of a tensor on the meta device is not that of a sparse one: it is loaded, or allocated."""
    save(tmp_path / "c", {"model": _model(ones=True)})
    with torch.device("meta"):
        model = _model()
    remedy = refused(load, tmp_path / "c", {"model": dict(model.state_dict())})
    assert "to_empty" in remedy
    if like == "tensor":
        model.to_empty(device="cpu")
    load(tmp_path / "c", {"model": model if like == "module" else dict(model.state_dict())})
    assert _is_filled(model.state_dict())


@runs(_PARTIAL)
def test_a_partial_tensor(tmp_path: Path) -> None:
    """It is reduced by the call that the remedy shows."""

    def on_a_rank() -> None:
        mesh = init_device_mesh("cpu", (1,))
        tensor = DTensor.from_local(ONES, mesh, [Partial()], run_check=False)
        remedy = refused(save, tmp_path / "c", {"w": tensor})
        call = text_in(remedy, r"tensor\.redistribute\(.*\)")
        names = {"tensor": tensor, "Replicate": Replicate}
        save(tmp_path / "c", {"w": eval(call.replace(", ...", ""), names)})

    run_threads(1, on_a_rank)
    load(tmp_path / "c", state := _zeros("w"))
    assert _is_filled(state)


@runs("checkpoint/save.py::plain_json")
def test_metadata_that_is_not_json(tmp_path: Path) -> None:
    """It belongs to the state."""
    refused(save, tmp_path / "c", _ones("w"), metadata=ONES)  # type: ignore[arg-type]
    save(tmp_path / "c", {**_ones("w"), "metadata": ONES})
    load(tmp_path / "c", state := _zeros("w", "metadata"))
    assert _is_filled(state)


@runs("conversion/formats/dcp/form.py::DcpForm.write")
def test_values_by_rank_in_a_dcp_folder(tmp_path: Path) -> None:
    """The native form keeps them."""
    state = {**_ones("w"), "seed": PerRank(3)}
    refused(save, tmp_path / "c", state, format="dcp")
    save(tmp_path / "dcp", _ones("w"), format="dcp")
    save(tmp_path / "c", state)
    again = {**_zeros("w"), "seed": PerRank(0)}
    load(tmp_path / "c", again)
    assert again["seed"].value == 3


@runs("checkpoint/state/live_objects.py::LiveObjects._names_of")
def test_two_parameters_of_one_name(tmp_path: Path) -> None:
    """Keys that differ where a dot made them equal."""
    inner = nn.ModuleDict({"b": nn.Linear(2, 2, bias=False)})
    other = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD([*inner.parameters(), *other.parameters()], lr=0.1)
    refused(save, tmp_path / "c", {"a": inner, "a.b": other, "optimizer": optimizer})
    state = {"a": inner, "other": other, "optimizer": optimizer}
    save(tmp_path / "c", state)
    assert load(tmp_path / "c", state).missing == ()


@runs("checkpoint/state/live_objects.py::_no_owner")
def test_an_optimizer_without_its_module(tmp_path: Path) -> None:
    """The module instead of its state dict."""
    model = _model(ones=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    refused(save, tmp_path / "c", {"model": model.state_dict(), "optimizer": optimizer})
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = _model()
    fresh = torch.optim.SGD(other.parameters(), lr=0.1)
    load(tmp_path / "c", {"model": other, "optimizer": fresh})
    assert _is_filled(other.state_dict()) and fresh.param_groups[0]["lr"] == 0.5


# What is loaded


@runs("checkpoint/native/read_state.py::_no_checkpoint")
@pytest.mark.parametrize("what", ["steps", "dcp", "weights"])
def test_no_native_checkpoint(what: str, tmp_path: Path) -> None:
    """`read_state` reads our own format; the remedy has a call for each other one."""
    path, loads = tmp_path / "c", {"load": load, "dcp.load": dcp.load}
    if what == "steps":
        with CheckpointManager(path) as manager:
            manager.save(1, _ones("w"))
    elif what == "dcp":
        dcp.save(_ones("w"), checkpoint_id=path, no_dist=True)
    else:
        path.mkdir()
        torch.save(_ones("w"), path / "pytorch_model.bin")
    remedy = refused(read_state, path)
    if what == "steps":
        call = text_in(remedy, r"CheckpointManager\(path\)\.restore\(state\)")
        names = {"CheckpointManager": CheckpointManager, "path": path, "state": (state := _zeros("w"))}
        assert eval(call, names).step == 1 and _is_filled(state)
        return
    for name in {"load", "dcp.load"} & {*re.findall(r"[\w.]+", remedy)}:
        state = _zeros("w")
        loads[name](path, state) if name == "load" else dcp.load(state, checkpoint_id=path, no_dist=True)
        assert _is_filled(state)
    command(*commands(remedy), path, tmp_path / "out")
    assert torch.equal(read_state(tmp_path / "out")["w"].read(), ONES)


@runs("checkpoint/native/read_state.py::CheckpointReader.__getitem__")
def test_no_such_tensor(tmp_path: Path) -> None:
    """The names are those that the reader iterates over."""
    save(tmp_path / "c", {"model": _ones("w")})
    reader = read_state(tmp_path / "c")
    refused(lambda: reader["w"])
    assert [torch.equal(reader[name].read(), ONES) for name in reader] == [True]


@runs("checkpoint/load.py::_check_choices_of_views")
def test_choices_of_native_loads(tmp_path: Path) -> None:
    """Without the two arguments that the remedy names."""
    torch.save(_ones("w"), tmp_path / "a.pt")
    options = {"verify": "before", "read": "once"}
    remedy = refused(load, tmp_path / "a.pt", _zeros("w"), **options)
    load(tmp_path / "a.pt", state := _zeros("w"), **{k: v for k, v in options.items() if k not in remedy})
    assert _is_filled(state)


@runs("checkpoint/load.py::_require_sums")
def test_no_recorded_fingerprints(tmp_path: Path) -> None:
    """Another way to verify."""
    save(tmp_path / "c", _ones("w"), fingerprint=False)
    remedy = refused(load, tmp_path / "c", state := _zeros("w"), verify="end-to-end")
    load(tmp_path / "c", state, **argument(remedy, "verify"))
    assert _is_filled(state)


@runs("checkpoint/load.py::_check_writable")
def test_elements_that_share_memory(tmp_path: Path) -> None:
    """A clone has its own."""
    save(tmp_path / "c", _ones("w"))
    state = {"w": torch.zeros(2).expand(2, 2)}
    remedy = refused(load, tmp_path / "c", state)
    state["w"] = getattr(state["w"], remedy.split("()")[0])()
    load(tmp_path / "c", state)
    assert _is_filled(state)


_RESULT = "checkpoint/state/matching/result.py::Match."


@runs(f"{_RESULT}require_fit[1]")
@pytest.mark.parametrize("by", ["load", "manager"])
def test_another_dtype(by: str, tmp_path: Path) -> None:
    """Cast by the call that the remedy names: `restore` does not have its argument."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, _ones("w"))
        path, state = tmp_path / "run/step-00000001", {"w": torch.zeros(2, 2, dtype=torch.bfloat16)}
        remedy = refused(load, path, state) if by == "load" else refused(manager.restore, state)
    call = text_in(remedy, r"\bload\(path, .*?\)")
    eval(call, {"load": load, "path": path, "state": state})
    assert _is_filled(state)


@runs(f"{_RESULT}require_fit[2]")
def test_an_optimizer_of_another_class(tmp_path: Path) -> None:
    """The saved class; or none."""
    model = _model(ones=True)
    save(tmp_path / "c", {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.5)})
    model = _model()
    refused(load, tmp_path / "c", {"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    load(tmp_path / "c", {"model": model})
    optimizer = torch.optim.AdamW(model.parameters())
    load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert _is_filled(model.state_dict()) and optimizer.param_groups[0]["lr"] == 0.5


@runs(f"{_RESULT}require_fit[3]")
def test_a_pattern_without_a_leaf(tmp_path: Path) -> None:
    """The pattern of the remedy, and the argument."""
    save(tmp_path / "c", {"model": _ones("w")})
    remedy = refused(load, tmp_path / "c", {"model": _zeros("w")}, include=["model", "model.*"])
    pattern = remedy.split("'")[1]
    load(tmp_path / "c", {"model": (state := _zeros("w"))}, include=pattern)
    assert _is_filled(state)
    options = argument(remedy, "strict")
    load(tmp_path / "c", {"model": (state := _zeros("w"))}, include=["model", "model.*"], **options)
    assert _is_filled(state)


@runs(f"{_RESULT}require_fit[4]")
@pytest.mark.parametrize("by", ["load", "manager"])
def test_leaves_that_only_the_checkpoint_has(by: str, tmp_path: Path) -> None:
    """Both ways that the remedy names, in `load` and `restore`."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"model": _ones("a", "b")})

        def fill(state: dict[str, Any], **options: Any) -> None:
            if by == "load":
                load(tmp_path / "run/step-00000001", state, **options)
            else:
                manager.restore(state, **options)

        remedy = refused(fill, {"model": _zeros("a")})
        assert "include=" in remedy
        for options in (argument(remedy, "strict"), {"include": "model.a"}):
            fill({"model": (state := _zeros("a"))}, **options)
            assert _is_filled(state)
        if by == "load":
            return
        manager.save(2, {"model": _ones("a"), "optimizer": _ones("a")})
        remedy = refused(fill, {"model": _zeros("a")})
        pattern = text_in(remedy, r"'(model\.\*)'")
        fill({"model": (state := _zeros("a"))}, include=pattern)
        assert _is_filled(state)


@runs(f"{_RESULT}require_fit[4]")
def test_leaves_of_other_names(tmp_path: Path) -> None:
    """A copy with rules renames them; `strict=False` loads the rest."""
    save(tmp_path / "c", {"model": _ones("a", "old_b", "other")})
    remedy = refused(load, tmp_path / "c", {"model": _zeros("a", "new_c")})
    load(tmp_path / "c", {"model": (state := _zeros("a", "new_c"))}, **argument(remedy, "strict"))
    assert _is_filled({"a": state["a"]}) and not state["new_c"].any()
    rules = tmp_path / "rules.toml"
    rule = '[[rule]]\nhf = "{}"\nours = "{}"\n'
    rules.write_text("format = 1\nkeep_others = true\n" + rule.format("old_b", "new_c"))
    words = commands(remedy, FILE=rules)
    words[1:2] = [str(tmp_path / "c"), str(tmp_path / "copy")]  # in the place of the two dots
    command(*words)
    load(tmp_path / "copy", {"model": (state := _zeros("a", "new_c"))}, strict="missing")
    assert _is_filled(state)


@runs(f"{_RESULT}_require_common_names")
def test_an_object_with_other_names(tmp_path: Path) -> None:
    """Without the object that the remedy names, the rest is loaded; `strict=False` is no way around."""
    save(tmp_path / "c", {"model": _ones("a", "b"), "ema": _ones("a")})
    state = {"model": _zeros("c"), "ema": _zeros("a")}
    for strict in (True, "missing", False):
        remedy = refused(load, tmp_path / "c", state, strict=strict)
    del state[text_in(remedy, r"leave (\w+) out")]
    load(tmp_path / "c", state)
    assert _is_filled(state["ema"])


@runs(f"{_RESULT}_require_common_names")
@pytest.mark.parametrize("is_nested", [False, True])
def test_prefixes_that_differ(is_nested: bool, tmp_path: Path) -> None:
    """The state that the remedy writes out."""
    stored, start = ("teacher", "") if not is_nested else ("model", "x.")
    saved = _ones(f"{start}a.weight", f"{start}b.weight")
    save(tmp_path / "c", {stored: saved, "other": saved})
    model = _model() if not is_nested else nn.ModuleDict({"y": _model()})
    state = model.state_dict()
    remedy = refused(load, tmp_path / "c", {"model": state} if is_nested else state)
    found = text_in(remedy, r"pass (\{.*\}), or")
    load(tmp_path / "c", eval(found, {"state": state, "model": model}))
    assert _is_filled(state)


@runs(f"{_RESULT}require_filled")
def test_buffers_without_values(tmp_path: Path) -> None:
    """The function that the remedy writes; and the argument that leaves them so."""

    class WithTable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 2))
            self.register_buffer("table", torch.zeros(3), persistent=False)

        def reset_parameters(self) -> None:
            self.table.copy_(torch.arange(3.0))

    save(tmp_path / "c", {"weight": ONES})
    with torch.device("meta"):
        model = WithTable()
    remedy = refused(load, tmp_path / "c", model)
    function = text_in(remedy, r"lambda \w+: [\w.()]+\(\)")
    load(tmp_path / "c", model, init=eval(function))
    assert model.table.tolist() == [0, 1, 2] and bool((model.weight == 1).all())


@runs("checkpoint/state/matching/shared_memory.py::_differ")
def test_tied_tensors_that_differ(tmp_path: Path) -> None:
    """One of them, or both apart."""
    save(tmp_path / "c", {"a": ONES, "b": 2 * ONES})
    tied = torch.zeros(2, 2)
    remedy = refused(load, tmp_path / "c", {"a": tied, "b": tied})
    assert "include=" in remedy
    load(tmp_path / "c", {"a": tied, "b": tied}, include="a")
    assert _is_filled({"a": tied})
    load(tmp_path / "c", state := _zeros("a", "b"))
    assert _is_filled({"a": state["a"], "b": state["b"] / 2})


@runs("checkpoint/state/matching/optimizers.py::_no_room")
def test_an_optimizer_state_dict_without_room(tmp_path: Path) -> None:
    """The optimizer itself."""
    model = _model(ones=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    sum(param.sum() for param in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = _model()
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    refused(load, tmp_path / "c", {"model": other, "optimizer": fresh.state_dict()})
    load(tmp_path / "c", {"model": other, "optimizer": fresh})
    assert all(bool((state["momentum_buffer"] == 1).all()) for state in fresh.state.values())


@runs("checkpoint/state/live_objects.py::require_memory")
@pytest.mark.parametrize("first", ["load", "to_empty"])
def test_an_optimizer_of_meta_parameters(first: str, tmp_path: Path) -> None:
    """Both ways."""
    saved = _model(ones=True)
    save(tmp_path / "c", {"model": saved, "optimizer": torch.optim.SGD(saved.parameters(), lr=0.5)})
    with torch.device("meta"):
        model = _model()
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    refused(load, tmp_path / "c", state)
    if first == "load":
        load(tmp_path / "c", {"model": model})
        state["optimizer"] = torch.optim.SGD(model.parameters())
    else:
        model.to_empty(device="cpu")
        state["optimizer"] = torch.optim.SGD(model.parameters())
    load(tmp_path / "c", state)
    assert _is_filled(model.state_dict()) and state["optimizer"].param_groups[0]["lr"] == 0.5


@runs("checkpoint/state/optimizer_forms.py::OptimizerState.options_for")
def test_groups_with_other_options(tmp_path: Path) -> None:
    """The state alone, by the pattern that the remedy writes; or the groups of the save."""
    model = _model(ones=True)
    groups = [{"params": [param], "lr": lr} for param, lr in zip(model.parameters(), (0.1, 0.2), strict=True)]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    sum(param.sum() for param in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    fresh = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9)
    state = {"model": model, "optimizer": fresh}
    remedy = refused(load, tmp_path / "c", state)
    load(tmp_path / "c", state, **argument(remedy, "include"))
    assert all(bool((state["momentum_buffer"] == 1).all()) for state in fresh.state.values())
    assert fresh.param_groups[0]["lr"] == 0.7 and len(fresh.state) == 2


# The manager


@runs("checkpoint/manager.py::CheckpointManager.restore", "checkpoint/manager.py::_step_number")
def test_arguments_in_another_order(tmp_path: Path) -> None:
    """Every call of both remedies."""
    with CheckpointManager(tmp_path) as manager:
        names = {"manager": manager, "state": _ones("w"), "step": 5}
        remedy = refused(manager.save, _ones("w"), 5)  # type: ignore[arg-type]
        manager.save(4, _ones("w"))
        for call in re.findall(r"manager\.\w+\([^)]*\)", remedy):
            eval(call, names)
        assert manager.steps() == [4, 5]
        names["state"] = _zeros("w")
        for call in re.findall(r"manager\.\w+\([^)]*\)", refused(manager.restore, 5)):
            assert eval(call, names).step == 5 and _is_filled(names["state"])  # type: ignore[arg-type]


@runs("checkpoint/restore.py::StepSearch.check_none")
def test_a_damaged_step_is_asked_for(tmp_path: Path) -> None:
    """Without the number an older one is restored."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, _ones("w"))
    manager.save(2, _zeros("w"))
    (file,) = (tmp_path / "step-00000002").glob("data-*/*")
    file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.warns(UserWarning, match="step 2"):
        remedy = refused(manager.restore, state := _zeros("w"), step=2, verify="before")
    assert text_in(remedy, r"without step=")
    with pytest.warns(UserWarning, match="step 2"):
        manager.restore(state)
    assert _is_filled(state)


@runs("checkpoint/steps/retention.py::remove_unpinned")
def test_a_pinned_step(tmp_path: Path) -> None:
    """It is unpinned by the call of the remedy."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, _ones("w"))
        manager.pin(1)
        remedy = refused(manager.remove, 1)
        call = text_in(remedy, r"unpin\(step\)")
        eval(f"manager.{call}", {"manager": manager, "step": 1})
        manager.remove(1)
        assert manager.steps() == [2]


@runs("checkpoint/steps/save_policy.py::check_policy")
def test_no_policy(tmp_path: Path) -> None:
    """Policies are combined by the operators of the remedy."""
    remedy = refused(CheckpointManager, tmp_path, save_policy=[EverySteps(2), OnSignal()])
    for sign, wanted in (("|", True), ("&", False)):
        assert sign in remedy
        policy = eval(f"EverySteps(2) {sign} OnSignal()", {"EverySteps": EverySteps, "OnSignal": OnSignal})
        with CheckpointManager(tmp_path, save_policy=policy) as manager:
            assert manager.should_save(2) is wanted


@runs("checkpoint/steps/save_schedule.py::_no_bool")
def test_an_answer_that_is_no_bool(tmp_path: Path) -> None:
    """`bool` of it."""

    class Mine(SavePolicy):
        def __init__(self, kind: type) -> None:
            self.kind = kind

        def should_save(self, context: Any) -> bool:
            return self.kind(1)  # type: ignore[no-any-return]

    with CheckpointManager(tmp_path / "a", save_policy=Mine(int)) as manager:
        refused(manager.should_save, 1)
    with CheckpointManager(tmp_path / "b", save_policy=Mine(bool)) as manager:
        assert manager.should_save(1) is True


# DCP's calls


@runs("checkpoint/state/torch_state_dicts.py::_check_model")
def test_the_model_comes_first() -> None:
    """The call as the remedy writes it."""
    model, state = _model(), _model(ones=True).state_dict()
    remedy = refused(set_model_state_dict, state, model)  # type: ignore[arg-type]
    names = {"set_model_state_dict": set_model_state_dict, "model": model, "model_state_dict": state}
    eval(remedy.removeprefix("call "), names)
    assert _is_filled(model.state_dict())


# Ranks


@runs("checkpoint/manifest/structure.py::_differ", "checkpoint/ranks/replicas.py::_raise_difference")
def test_values_that_differ_between_ranks(tmp_path: Path) -> None:
    """`PerRank` keeps each; `check_replicas=False` stores a mixture of tensors."""

    def on_a_rank() -> bool:
        rank = dist.get_rank()
        refused(save, tmp_path / "c", {"step": rank})
        remedy = refused(save, tmp_path / "c", {"w": torch.full((2, 2), float(rank))})
        save(tmp_path / "c", {"step": PerRank(rank), "w": PerRank(torch.full((2, 2), float(rank)))})
        state = {"step": PerRank(-1), "w": PerRank(torch.zeros(2, 2))}
        load(tmp_path / "c", state)
        mixed = {"w": torch.full((2, 2), float(rank))}
        save(tmp_path / "mixed", mixed, **argument(remedy, "check_replicas"))
        return state["step"].value == rank and bool((state["w"].value == rank).all())

    assert all(run_threads(2, on_a_rank))


def _refused_by_dcp(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """As `refused`, of the error that DCP's own error contains."""

    def unwrapped() -> None:
        try:
            call(*args, **options)
        except CheckpointException as error:
            raise error.failures[0][0] from error

    return refused(unwrapped)


_STORAGE = "checkpoint/dcp_storage.py::"


@runs(f"{_STORAGE}_wrong_storage", f"{_STORAGE}_state_of")
def test_planners_and_storages_of_dcp(tmp_path: Path) -> None:
    """The calls of the remedies."""
    names: dict[str, Any] = {
        "RaggedWriter": RaggedWriter,
        "RaggedReader": RaggedReader,
        "path": tmp_path / "c",
    }
    names["RaggedSavePlanner"] = RaggedSavePlanner
    plain = dcp.FileSystemWriter(tmp_path / "d")
    save_options = {"storage_writer": plain, "planner": RaggedSavePlanner()}
    remedy = _refused_by_dcp(dcp.save, _ones("w"), **save_options)
    writer = text_in(remedy, r"RaggedWriter\(path\)")
    dcp.save(_ones("w"), storage_writer=eval(writer, names), planner=RaggedSavePlanner())
    dcp.save(_ones("w"), storage_writer=plain)
    for number, path in enumerate(("c", "d")):
        state = _zeros("w")
        options: dict[str, Any] = {}
        if number == 0:
            options = {"storage_reader": RaggedReader(tmp_path / "c"), "planner": RaggedLoadPlanner()}
        dcp.load(state, checkpoint_id=tmp_path / path, **options)
        assert _is_filled(state)

    class Mine(SavePlanner):
        """A planner that the writer does not know."""

        set_up_planner = create_local_plan = create_global_plan = finish_plan = resolve_data = print

    writer_options = {"storage_writer": RaggedWriter(tmp_path / "e")}
    remedy = _refused_by_dcp(lambda: writer_options["storage_writer"].write_data(None, Mine()))  # type: ignore[arg-type, abstract]
    planner = text_in(remedy, r"planner=(RaggedSavePlanner\(\))")
    dcp.save(_ones("w"), **writer_options, planner=eval(planner, names))
    assert torch.equal(read_state(tmp_path / "e")["w"].read(), ONES)


@runs(f"{_STORAGE}RaggedReader._read_items")
def test_a_dtype_that_a_planner_of_dcp_cannot_cast(tmp_path: Path) -> None:
    """The dtype of the checkpoint, cast afterwards."""
    save(tmp_path / "c", _ones("w"))
    half = {"w": torch.zeros(2, 2, dtype=torch.bfloat16)}
    _refused_by_dcp(dcp.load, half, storage_reader=RaggedReader(tmp_path / "c"))
    state = _zeros("w")
    dcp.load(state, storage_reader=RaggedReader(tmp_path / "c"))
    assert _is_filled({"w": state["w"].bfloat16()})


# Objects that are built as they were at the save


@runs(f"{_RESULT}require_fit")
def test_a_leaf_of_another_kind(tmp_path: Path) -> None:
    """The kind that was saved."""
    save(tmp_path / "c", {"x": ONES})
    refused(load, tmp_path / "c", {"x": "text"})
    load(tmp_path / "c", state := _zeros("x"))
    assert _is_filled(state)


@runs("checkpoint/state/live_objects.py::load_into")
def test_an_object_of_another_kind(tmp_path: Path) -> None:
    """The class that was saved."""
    save(tmp_path / "c", {"x": _Known()})
    other, known = _Outer(3), _Known()
    known.value = 0
    refused(load, tmp_path / "c", {"x": other})
    load(tmp_path / "c", {"x": known})
    assert known.value == 3


@runs("checkpoint/state/optimizer_forms.py::OptimizerState.named")
def test_numbered_parameters_in_other_groups(tmp_path: Path) -> None:
    """The groups of the save."""
    model = _model(ones=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    groups = [{"params": [param]} for param in model.parameters()]
    refused(load, tmp_path / "a.pt", {"model": model, "optimizer": torch.optim.SGD(groups, lr=0.1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    load(tmp_path / "a.pt", {"model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.5


@runs("checkpoint/state/reshardable_data.py::ReshardableSampler.load_state_dict")
def test_a_sampler_of_other_data(tmp_path: Path) -> None:
    """The arguments of the save; `Resharded` for other ranks."""
    taken = ReshardableSampler(8, seed=1, rank=0, world_size=2)
    next(iter(taken))
    state = taken.state_dict()
    refused(ReshardableSampler(8, seed=2, rank=0, world_size=2).load_state_dict, state)
    same = ReshardableSampler(8, seed=1, rank=0, world_size=2)
    same.load_state_dict(state)
    assert [*same] == [*taken]
    one = ReshardableSampler(8, seed=1, rank=0, world_size=1)
    next(iter(one))
    save(tmp_path / "c", {"sampler": Resharded(one)})
    again = ReshardableSampler(8, seed=1, rank=0, world_size=1)
    load(tmp_path / "c", {"sampler": Resharded(again)})
    assert again.num_taken == 1


@runs("checkpoint/ranks/coordinator.py::unlike")
def test_arguments_that_differ_between_ranks(tmp_path: Path) -> None:
    """The same on every rank; what differs is in the state."""

    def on_a_rank() -> bool:
        rank = dist.get_rank()
        refused(save, tmp_path / "c", _ones("w"), metadata={"rank": rank})
        save(tmp_path / "c", {**_ones("w"), "rank": PerRank(rank)}, metadata={"rank": "in the state"})
        state = {**_zeros("w"), "rank": PerRank(-1)}
        load(tmp_path / "c", state)
        return state["rank"].value == rank and bool((state["w"] == 1).all())

    assert all(run_threads(2, on_a_rank))


@runs("checkpoint/memory/ram_tier.py::RamTier.__init__")
def test_a_mesh_of_two_dimensions(tmp_path: Path) -> None:
    """One of them, as the remedy writes it."""

    def on_a_rank() -> None:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        remedy = refused(RamTier, "x", replicas=1, mesh=mesh, folder=tmp_path)
        part = text_in(remedy, r"mesh\['\w+'\]")
        RamTier("x", replicas=1, mesh=eval(part, {"mesh": mesh}), folder=tmp_path)

    run_threads(1, on_a_rank)
