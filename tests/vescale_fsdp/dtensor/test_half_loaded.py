"""A load that fails when tensors have been overwritten: named, refused by the next forward, made good by the next."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import CheckpointManager, load, read_state, save, verify
from vescale_fsdp.dtensor.half_loaded import _marks
from vescale_fsdp.errors import DamagedLoadError, LifecycleError

_WIDTH = 8


def _model(value: float, shard: Any = fully_shard) -> nn.Sequential:
    """Units of a layer each; rank 1 has nothing of the last one's single element."""
    model = nn.Sequential(
        nn.Linear(_WIDTH, _WIDTH),
        nn.Linear(_WIDTH, 2, bias=False),
        nn.Linear(2, 1, bias=False),
        nn.Linear(1, 1, bias=False),
    )
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    for layer in model:
        shard(layer, mesh=cpu_mesh())
    shard(model, mesh=cpu_mesh())
    return model


def _held(model: nn.Module) -> set[str]:
    """Parameters of which this rank has anything."""
    return {name for name, parameter in model.named_parameters() if parameter.to_local().numel()}  # type: ignore[operator]


def _damage(path: Path, rank: int) -> None:
    """One flipped bit in the first tensor of a rank's file."""
    dist.barrier()
    if dist.get_rank() == 0:
        (file,) = path.glob(f"data-*/{rank:05d}-*")
        data = bytearray(file.read_bytes())
        data[8 + int.from_bytes(data[:8], "little")] ^= 1
        file.write_bytes(data)
    dist.barrier()


def _values(model: nn.Module) -> set[float]:
    return {value for parameter in model.parameters() for value in parameter.to_local().flatten().tolist()}  # type: ignore[operator]


def _refuses(model: nn.Module) -> str:
    """Parameters that the forward names as it refuses to run."""
    with pytest.raises(LifecycleError) as caught:
        model(torch.ones(1, _WIDTH if isinstance(model, nn.Sequential) else 1))
    return str(caught.value.got)


def _every_ending(root: Path) -> str:
    """How the forward refuses; all ways back are gone."""
    for value in (1, 2):
        save(root / f"step-{value:08d}", {"model": _model(value), "other": torch.full((3,), float(value))})
    _damage(root / "step-00000002", rank=1)
    model = _model(0.5)
    model(torch.ones(1, _WIDTH))
    state = {"model": model, "other": torch.zeros(3)}
    with pytest.raises(DamagedLoadError) as caught:
        load(root / "step-00000002", state, include="model/*")
    assert {*caught.value.overwritten} == {f"model.{name}" for name in _held(model)}
    assert len(_held(model)) < 5
    refused = _refuses(model)
    assert "model.3.weight" in _refuses(model[3])  # of which this rank may hold nothing
    load(root / "step-00000001", state, include="other")
    assert _refuses(model) == refused  # what it had overwritten is still there
    load(root / "step-00000001", state)
    assert model(torch.ones(1, _WIDTH)).item() == 2 * _WIDTH * (_WIDTH + 1) and _values(model) == {1.0}

    with pytest.raises(DamagedLoadError):
        load(root / "step-00000002", {"model": model.state_dict()}, strict=False)
    _refuses(model)
    model.load_state_dict(_model(3).state_dict())
    model(torch.ones(1, _WIDTH))

    with pytest.raises(DamagedLoadError):
        load(root / "step-00000002", state)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        restored = CheckpointManager(root).restore(state)
    assert restored is not None and (restored.step, [step for step, _ in restored.skipped]) == (1, [2])
    assert [str(one.message)[:13] for one in told] == ["step 2 (disk)"] * (dist.get_rank() == 0)
    model(torch.ones(1, _WIDTH))
    assert _values(model) == {1.0} and state["other"].tolist() == [1.0] * 3 and not _marks

    with pytest.raises(DamagedLoadError):
        load(root / "step-00000002", state)
    _refuses(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(4)
    damaged = verify(root / "step-00000002").damaged_tensors
    undamaged = [name for name in read_state(root / "step-00000002") if name not in damaged]
    load(root / "step-00000002", state, include=undamaged)
    model(torch.ones(1, _WIDTH))
    for name, param in model.named_parameters():
        value = 4.0 if f"model.{name}" in damaged else 2.0
        assert {*param.full_tensor().flatten().tolist()} == {value}  # type: ignore[operator]
    assert damaged == ("model.0.bias",) and "model.0.weight" in undamaged
    return refused


def test_a_half_loaded_model_is_refused(tmp_path: Path) -> None:
    """On all ranks, those with sound or empty pieces too, until a load has filled all of it."""
    for refused in run_ranks(2, _every_ending, tmp_path):
        assert "model.0." in refused


def _nothing_of_ours(root: Path) -> None:
    """FSDP2's parameters, optimizers and models that are gone."""
    model = _model(1, torch_fully_shard)
    save(root / "fsdp2", model.state_dict())
    _damage(root / "fsdp2", rank=1)
    with pytest.raises(DamagedLoadError) as caught:
        load(root / "fsdp2", model.state_dict())
    assert {*caught.value.overwritten} == _held(model) and not _marks
    model(torch.ones(1, _WIDTH))

    ours = _model(1)
    moments = {name: torch.zeros_like(value) for name, value in ours.state_dict().items()}
    save(root / "moments", moments)
    _damage(root / "moments", rank=0)
    with pytest.raises(DamagedLoadError):
        load(root / "moments", moments)
    ours(torch.ones(1, _WIDTH))
    assert _marks
    del moments
    gc.collect()
    assert not _marks


def test_what_nobody_watches(tmp_path: Path) -> None:
    """Of tensors not ours the error is all there is, moments stop no forward, and no mark outlives its tensor."""
    run_ranks(2, _nothing_of_ours, tmp_path)


def _in_mid_air(root: Path) -> bool:
    model = _model(1)
    save(root, model.state_dict())

    class Stops:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyboardInterrupt

    state = {**model.state_dict(), "stops": Stops()}
    save(root, state, overwrite=True)
    with pytest.raises(KeyboardInterrupt) as caught:
        load(root, state)
    assert "0.weight" in _refuses(model)
    return any("overwritten: " in note for note in caught.value.__notes__)


def test_ctrl_c_in_mid_air(tmp_path: Path) -> None:
    """Ctrl-C stays Ctrl-C, says what was overwritten, and the model is refused all the same."""
    assert run_ranks(2, _in_mid_air, tmp_path) == [True, True]


def test_an_older_step_fills_what_a_newer_one_has_lost(tmp_path: Path) -> None:
    """As the page of faults says: restore the older step, then what is undamaged of the newer one."""
    saved = nn.Linear(1024, 1024)
    for step in (1, 2):
        for parameter in saved.parameters():
            nn.init.constant_(parameter, step)
        save(tmp_path / f"step-{step:08d}", {"model": saved, "step": step})
    (file,) = tmp_path.glob("step-00000002/data-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[1 << 20] ^= 1
    file.write_bytes(data)
    assert verify(tmp_path / "step-00000002").damaged_tensors == ("model.weight",)
    state = {"model": nn.Linear(1024, 1024), "step": 0}
    with CheckpointManager(tmp_path) as manager:
        manager.restore(state, step=1)
        manager.restore(state, step=2, include=["model.bias", "step"])
    model = state["model"]
    assert isinstance(model, nn.Linear) and state["step"] == 2
    assert (model.weight == 1).all() and (model.bias == 2).all()
