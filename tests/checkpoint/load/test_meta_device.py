"""Modules on the meta device: nothing keeps what its memory happened to contain, whatever initializes it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from tests.support.distributed import cpu_mesh, run_threads
from tests.support.tiny_families import build, small_config
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import CheckpointManager, load, save
from vescale_fsdp.checkpoint.load import Loader, Verify
from vescale_fsdp.checkpoint.state import allocation
from vescale_fsdp.errors import CheckpointError

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
    "complex": torch.complex64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


class Scratch(nn.Module):
    """A weight, and a buffer that no checkpoint contains."""

    def __init__(self, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (5, 40)) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.register_buffer("table", torch.zeros(shape, dtype=dtype), persistent=False)


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def _fill(module: Any) -> None:
    module.table.copy_(torch.arange(module.table.numel()).view(module.table.shape).to(module.table.dtype))


def _compute(module: Any) -> None:
    module.table.mul_(2)


@pytest.mark.parametrize("keyed", [True, False])
def test_native_files_need_no_other_format(
    keyed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read as into allocated modules, in every way to verify; only casts and options ask conversion."""
    weights = torch.arange(6.0).view(2, 3)
    save(tmp_path / "c", {"model": {"weight": weights}})

    def refused() -> None:
        raise AssertionError("conversion was asked")

    monkeypatch.setattr(sys.modules[Loader.__module__], "foreign_formats", refused)
    ways: tuple[Verify, ...] = ("before", "while", "never")
    for verify in ways:
        model = _on_meta(lambda: nn.Linear(3, 2, bias=False))
        load(tmp_path / "c", {"model": model} if keyed else model, verify=verify, read="once")
        assert torch.equal(model.weight, weights)
    with pytest.raises(AssertionError, match="asked"):
        load(tmp_path / "c", {"model": model}, dtype="state")


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_without_a_value_is_found(dtype: str, tmp_path: Path) -> None:
    """Of every dtype: whole, or computed from what was there; refused under strict, and put back."""
    save(tmp_path / "c", {"w": torch.ones(3)})
    model: Any = _on_meta(lambda: Scratch(DTYPES[dtype]))
    # Arithmetic makes another NaN in bfloat16.
    computes = DTYPES[dtype] in allocation._NANS and dtype != "bfloat16"
    inits: list[Any] = [None, lambda module: None, *([_compute] if computes else [])]
    for init in inits:
        with pytest.raises(CheckpointError, check=lambda error: error.got == "table"):
            load(tmp_path / "c", model, init=init)
        assert model.w.is_meta and model.table.is_meta
    report = load(tmp_path / "c", model, init=_fill)
    assert report.unfilled == () and model.w.eq(1).all()
    assert model.table.view(-1)[2].to(torch.complex64) == torch.tensor(2).to(DTYPES[dtype]).to(
        torch.complex64
    )


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 3), (41, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_pattern_is_no_value(dtype: str, shape: tuple[int, ...]) -> None:
    """It is found in any size, in the last element too, and never in counts, constants or random values."""
    memory = torch.empty(shape, dtype=DTYPES[dtype])
    allocation._write_pattern(memory)
    assert allocation.has_pattern(memory) == bool(memory.numel())
    for value in (
        torch.arange(memory.numel()),
        torch.zeros(memory.numel()),
        torch.full((memory.numel(),), -1),
    ):
        assert not allocation.has_pattern(value.view(shape).to(DTYPES[dtype]))
    if memory.nbytes > 16:
        flat = memory.view(-1)
        flat[: -max(1, 8 // memory.dtype.itemsize)] = torch.zeros(1).to(memory.dtype)
        assert allocation.has_pattern(memory)


def test_the_pattern_goes_on_in_the_next_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are written and checked in parts."""
    monkeypatch.setattr(allocation, "_CHUNK_BYTES", 192)
    memory = torch.empty(100, dtype=torch.int64)
    allocation._write_pattern(memory)
    memory[:-1] = 3
    assert allocation.has_pattern(memory)
    memory[-1] = 3
    assert not allocation.has_pattern(memory)


def test_without_strict_what_has_no_value_is_named(tmp_path: Path) -> None:
    """A warning and the report; without an initializer the tensor stays on the meta device."""
    save(tmp_path / "c", {"w": torch.ones(3)})
    for init, is_meta in ((None, True), (lambda module: None, False)):
        model: Any = _on_meta(Scratch)
        with pytest.warns(UserWarning, match="table"):
            report = load(tmp_path / "c", model, init=init, strict=False)
        assert report.unfilled == ("table",) and model.table.is_meta is is_meta and model.w.eq(1).all()
    assert model.table.isnan().all()
    model = _on_meta(Scratch)
    assert load(tmp_path / "c", model, include="w").unfilled == () and model.table.is_meta  # not selected


def test_an_initializer_fills_what_is_missing_and_nothing_else(tmp_path: Path) -> None:
    """A weight that the checkpoint lacks; a tensor in memory keeps its value, and a stored one gets its own."""
    save(tmp_path / "c", {"layer.weight": torch.full((2, 2), 3.0)})
    with torch.device("meta"):
        model: Any = nn.ModuleDict({"layer": nn.Linear(2, 2), "kept": Scratch()})
    model["kept"].w = nn.Parameter(torch.full((3,), 5.0))

    def init(module: Any) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.detach().fill_(7)

    report = load(tmp_path / "c", model, init=init, strict=False)
    assert set(report.missing) == {"layer.bias", "kept.w"} and report.unfilled == ()
    assert model["layer"].weight.eq(3).all() and model["layer"].bias.eq(7).all()
    assert model["kept"].w.eq(5).all() and model["kept"].table.eq(7).all()


def test_tied_weights_stay_tied_across_the_modules_of_a_state(tmp_path: Path) -> None:
    """A parameter of two modules is one after the load, as it was before."""
    save(tmp_path / "c", {name: {"weight": torch.ones(2, 2)} for name in ("one", "two")})
    with torch.device("meta"):
        one, two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    two.weight = one.weight
    load(tmp_path / "c", {"one": one, "two": two})
    assert two.weight is one.weight and one.weight.eq(1).all()


def test_a_restore_fills_modules_on_the_meta_device(tmp_path: Path) -> None:
    """As `load`, with an initializer too."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"model": {"w": torch.ones(3)}})
    model: Any = _on_meta(Scratch)
    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(CheckpointError, check=lambda error: error.got == "model.table"):
            manager.restore({"model": model})
        manager.restore({"model": model}, init=_fill)
    assert model.w.eq(1).all() and model.table.view(-1)[3] == 3


class Tower(nn.Module):
    """A module of the user's around a model of transformers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.own = inner, nn.Linear(2, 2)


@pytest.mark.parametrize("init", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    "class_name", ["Gemma3ForConditionalGeneration", "FalconH1ForCausalLM", "LlamaForCausalLM"]
)
def test_models_of_transformers_initialize_themselves(
    class_name: str, wrapped: bool, init: bool, tmp_path: Path
) -> None:
    """Each module by the nearest model around it, inside a module of the user's too, and whatever ``init`` is."""
    whole: Any = build(class_name)
    save(tmp_path / "c", Tower(whole) if wrapped else whole)
    model_class = getattr(transformers, class_name)
    model: Any = _on_meta(lambda: model_class(small_config(model_class)))
    options = {"init": model._init_weights} if init and not wrapped else {}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    report = load(tmp_path / "c", _on_meta(lambda: Tower(model)) if wrapped else model, **options)
    assert report.missing == report.unfilled == ()
    if not options:
        assert torch.equal(torch.get_rng_state(), before)  # no weight is initialized that gets a stored value
    expected = dict(whole.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_a_head_that_the_folder_lacks_is_initialized(tmp_path: Path) -> None:
    """With strict=False, as by from_pretrained; the other weights are the folder's."""
    whole: Any = build("LlamaForCausalLM")
    whole.save_pretrained(tmp_path / "hf")
    model_class = transformers.LlamaForSequenceClassification
    model: Any = _on_meta(lambda: model_class(small_config(model_class)))
    report = load(tmp_path / "hf", model, strict=False)
    assert report.missing == ("score.weight",) and report.unfilled == ()
    assert not model.score.weight.is_meta and 0 < model.score.weight.std() < 0.1
    assert torch.equal(model.model.embed_tokens.weight, whole.model.embed_tokens.weight)


def _load_sharded(path: Path) -> list[bool]:
    model = _on_meta(lambda: nn.Sequential(Scratch(), Scratch()))
    for layer in model:
        fully_shard(layer, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    try:
        load(path, model, init=lambda module: _fill(module) if module is model[0] else None)
    except CheckpointError as error:
        return [error.got == "1.table", all(tensor.is_meta for tensor in model.parameters())]
    return []


def test_all_ranks_refuse_what_one_leaves(tmp_path: Path) -> None:
    """Nothing has been read, and the shards are on the meta device again."""
    save_file({f"{layer}.w": torch.ones(3) for layer in range(2)}, tmp_path / "model.safetensors")
    assert run_threads(2, _load_sharded, tmp_path / "model.safetensors") == [[True, True]] * 2
