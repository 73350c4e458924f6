"""Sources of conversions, and what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vescale_fsdp.checkpoint import read_state

ROOT = "base_model.model."
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
MODEL = {"up.weight": torch.arange(48.0).view(8, 6), "norm.weight": torch.ones(6)}
PAIR = {"up.lora_A.weight": torch.ones(2, 6), "up.lora_B.weight": torch.ones(8, 2)}


def torch_file(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


def hf_folder(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def adapter_folder(path: Path, tensors: dict[str, torch.Tensor] = PAIR, **config: Any) -> Path:
    path.mkdir()
    save_file({ROOT + name: value for name, value in tensors.items()}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(LORA | config))
    return path


def written(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def native_tensors(path: Path) -> dict[str, torch.Tensor]:
    state = read_state(path)
    return {name: state[name].read() for name in state.names()}


def in_training(*names: str) -> dict[str, torch.Tensor]:
    return MODEL | {
        f"{ROOT}{key.removesuffix('.weight')}.{name}.weight": value
        for name in names
        for key, value in PAIR.items()
    }
