"""Checkpoints as DeepSpeed 0.19 leaves them, made by hand from whole tensors: the same files, keys, flat tensors,
paddings and pickled classes, so that tests need neither DeepSpeed nor ranks.
`tests/stacks/conversion/test_deepspeed.py` holds its files against DeepSpeed's own.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

_CLASSES = {
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
}


@dataclass
class ZeroState:
    """What there is to save.

    Args:
        groups: masters of each group of parameters.
        moments: by parameter.
        options: of each group.
        frozen: parameters that are not trained.
        buffers: the module's.
        shared: name -> the parameter that it is tied to.
        client: what a user hands in.
        round_robin: whether ``round_robin_gradients`` is set, which deals the parameters of a group out to the ranks.
    """

    groups: list[dict[str, Tensor]]
    moments: dict[str, dict[str, Tensor]]
    options: list[dict[str, Any]]
    frozen: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    step: int = 3
    round_robin: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def masters(self) -> dict[str, Tensor]:
        """Of all groups."""
        return {name: tensor for group in self.groups for name, tensor in group.items()}

    @property
    def model(self) -> dict[str, Tensor]:
        """What a reader should find."""
        found = {**self.masters, **self.frozen, **self.buffers}
        return found | {name: found[other] for name, other in self.shared.items()}


def some_state(seed: int = 0) -> ZeroState:
    """Odd sizes, a tie, a frozen weight, buffers, and a group of one element."""
    torch.manual_seed(seed)
    groups = [
        {"embed.weight": torch.randn(5, 3), "up.weight": torch.randn(7, 3), "scale": torch.randn(())},
        {"up.bias": torch.randn(7)},
        {"one": torch.randn(1)},
    ]
    masters = {name: tensor for group in groups for name, tensor in group.items()}
    moments = {
        name: {"exp_avg": torch.randn_like(t), "exp_avg_sq": torch.rand_like(t)}
        for name, t in masters.items()
    }
    options = [{"lr": 0.1 * n, "betas": (0.9, 0.99), "fused": None} for n in range(3)]
    frozen = {"fixed.weight": torch.randn(4, 5).bfloat16()}
    buffers = {"norm.mean": torch.randn(5).bfloat16(), "norm.count": torch.tensor(4)}
    return ZeroState(groups, moments, options, frozen, buffers, {"head.weight": "embed.weight"}, {"epoch": 7})


@contextmanager
def _pickled_classes() -> Iterator[dict[str, Any]]:
    """Classes under the names that DeepSpeed's pickles have."""
    classes, modules = {}, {}
    for module, name in _CLASSES.items():
        modules[module] = ModuleType(module)
        bases = (int,) if name == "ZeroStageEnum" else ()
        classes[name] = type(name, bases, {"__module__": module})
        setattr(modules[module], name, classes[name])
    with patch.dict(sys.modules, {**modules, "deepspeed": ModuleType("deepspeed")}):
        yield classes


def write_zero(folder: Path, state: ZeroState, *, stage: int, ranks: int, tag: str = "global_step3") -> Path:
    """Write a checkpoint and the file ``latest``; returns its folder."""
    target = folder / tag
    target.mkdir(parents=True, exist_ok=True)
    (folder / "latest").write_text(tag)
    with _pickled_classes() as classes:
        for rank in range(ranks):
            if stage == 3 or rank == 0:
                name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
                torch.save(_model_states(state, stage, rank, ranks), target / f"{name}_model_states.pt")
            held = _thirds(state, rank, ranks) if stage == 3 else _rows(state, rank, ranks, classes)
            held |= {
                "zero_stage": classes["ZeroStageEnum"](stage),
                "partition_count": ranks if stage == 3 else None,
            }
            if stage < 3:
                held["partition_count"] = [ranks] * len(state.groups)
            held["loss_scaler"] = classes["LossScaler"]()
            prefix = "bf16_" if state.dtype == torch.bfloat16 else ""
            file = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": held, "ds_config": {}, "ds_version": "0.19.8"}, target / file)
    return target


def _model_states(state: ZeroState, stage: int, rank: int, ranks: int) -> dict[str, Any]:
    weights = {**state.masters, **state.frozen}
    module = {
        n: t.to(state.dtype) if stage < 3 else torch.empty(0, dtype=state.dtype) for n, t in weights.items()
    }
    module |= {**state.buffers, **{name: module[other] for name, other in state.shared.items()}}
    shapes = [OrderedDict((name, t.shape) for name, t in group.items()) for group in state.groups]
    fragments = {name: _share(t, rank, ranks) if stage == 3 else t for name, t in state.frozen.items()}
    return {
        "module": OrderedDict(module),
        "buffer_names": list(state.buffers),
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": {n: t.shape for n, t in state.frozen.items()} if stage > 1 else None,
        "shared_params": state.shared,
        "frozen_param_fragments": fragments if stage > 1 else None,
        "lr_scheduler": {"last_epoch": state.step, "_last_lr": [0.1]},
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": state.step,
        "global_samples": 8 * state.step,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {"train_batch_size": 8},
        "ds_version": "0.19.8",
        **state.client,
    }


def _share(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's part of a parameter of ZeRO-3, padded."""
    size = -(-tensor.numel() // ranks)
    padded = torch.cat([tensor.flatten(), torch.zeros(size * ranks - tensor.numel(), dtype=tensor.dtype)])
    return padded[rank * size : (rank + 1) * size].clone()


def _groups(state: ZeroState, parts: list[list[int]]) -> list[dict[str, Any]]:
    return [{**options, "params": params} for options, params in zip(state.options, parts, strict=True)]


def _thirds(state: ZeroState, rank: int, ranks: int) -> dict[str, Any]:
    """ZeRO-3's: each group in one flat tensor of shares."""
    kinds = ("exp_avg", "exp_avg_sq")

    def flat(tensors: list[Tensor]) -> Tensor:
        return torch.cat([_share(tensor, rank, ranks) for tensor in tensors])

    states = {
        number: {
            "step": torch.tensor(float(state.step)),
            **{kind: flat([state.moments[name][kind] for name in group]) for kind in kinds},
        }
        for number, group in enumerate(state.groups)
    }
    groups = _groups(state, [[number] for number in range(len(state.groups))])
    return {
        "optimizer_state_dict": {"state": states, "param_groups": groups},
        "fp32_flat_groups": [flat(list(group.values())) for group in state.groups],
    }


def _rows(state: ZeroState, rank: int, ranks: int, classes: dict[str, Any]) -> dict[str, Any]:
    """ZeRO-1's and 2's: a part of each group's row, with padding in the moments and without in the masters."""
    masters, states, paddings, addresses = [], {}, [], []
    for number, group in enumerate(state.groups):
        if state.round_robin:
            names = list(group)
            group = {name: group[name] for first in range(ranks) for name in names[first::ranks]}
        numels = [tensor.numel() for tensor in group.values()]
        size = -(-sum(numels) // (2 * ranks)) * 2
        held = max(0, min(size, sum(numels) - rank * size))
        paddings.append(size - held)
        row = {kind: torch.zeros(size * ranks) for kind in ("fp32", "exp_avg", "exp_avg_sq")}
        said, at = OrderedDict(), 0
        for name, tensor in group.items():
            for kind, whole in {"fp32": tensor, **state.moments[name]}.items():
                row[kind][at : at + tensor.numel()] = whole.flatten()
            low, high = max(at, rank * size), min(at + tensor.numel(), (rank + 1) * size)
            if low < high:
                said[name] = classes["fragment_address"]()
                said[name].__dict__ |= {"numel": high - low, "start": low - rank * size}
            at += tensor.numel()
        part = {kind: whole[rank * size : (rank + 1) * size].clone() for kind, whole in row.items()}
        masters.append(part.pop("fp32")[:held])
        states[number] = {"step": torch.tensor(float(state.step)), **part}
        addresses.append(said)
    groups = _groups(state, [[number] for number in range(len(state.groups))])
    return {
        "base_optimizer_state": {"state": states, "param_groups": groups},
        "single_partition_of_fp32_groups": masters,
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(group) for group in state.groups],
        "param_slice_mappings": addresses,
    }


def write_universal(folder: Path, state: ZeroState, *, stage: int) -> Path:
    """Write a universal checkpoint, as ds_to_universal.py makes it of a checkpoint of a stage."""
    target = write_zero(folder, state, stage=stage, ranks=2, tag="global_step3_universal")
    for file in target.glob("*optim_states.pt"):
        file.unlink()
    groups = _groups(state, [[number] for number in range(len(state.groups))])
    common: dict[str, Any] = {"param_groups": groups}
    for name, master in state.masters.items():
        (target / "zero" / name).mkdir(parents=True)
        for kind, tensor in {"fp32": master, **state.moments[name]}.items():
            content = {"param": tensor, "cat_dim": 0} if stage < 3 else tensor.flatten()
            torch.save(content, target / "zero" / name / f"{kind}.pt")
        if stage < 3:
            torch.save(torch.tensor(float(state.step)), target / "zero" / name / "step.pt")
    if stage == 3:
        steps = {number: {"step": torch.tensor(float(state.step))} for number in range(len(state.groups))}
        common["optimizer_state_dict"] = {"state": steps}
    torch.save(common, target / "zero" / "optimizer_state.pt")
    (folder / "latest").rename(folder / "latest_universal")
    return target
