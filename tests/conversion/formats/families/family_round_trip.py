"""One family of transformers from its own files into live shards, into every format, and back to the same bytes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from tests.support.distributed import cpu_mesh
from tests.support.dtype_zoo import same_bytes
from tests.support.tiny_families import build
from vescale_fsdp import RaggedDTensor, fully_shard
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.conversion import ConvertOptions, HuggingFace, convert, open_source
from vescale_fsdp.conversion.formats.huggingface.class_child import answer

WEIGHTS = "model.safetensors"


def saved(class_name: str, folder: Path) -> PreTrainedModel:
    """A small model with random weights, which transformers has saved to the folder."""
    model = build(class_name)
    with torch.no_grad():
        for tensor in _distinct(model):  # many weights begin as zeros or ones, which would hide an exchange
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape).to(tensor.dtype))
    dtype = model.config.dtype
    model.save_pretrained(folder)
    model.config.dtype = dtype  # which saving makes a text, that Apertus does not take
    return model


def _distinct(model: nn.Module) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}.values())


def stored_names(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What the class has in memory, without the weights that it keeps out of files."""
    computed = set(model._keys_to_ignore_on_save or ())
    return {name: tensor for name, tensor in model.state_dict().items() if name not in computed}


def check_formats(model: PreTrainedModel, hf: Path) -> None:
    """Native and DCP have the names and bytes in memory, and give back the bytes of transformers' file."""
    wanted = stored_names(model)
    for kind in ("native", "dcp"):
        there, back = hf.with_name(kind), hf.with_name(f"{kind}_back")
        convert(open_source(str(hf)), str(there), kind, ConvertOptions(ranks=2))
        state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        report = load(there, state)
        assert not report.unexpected, report.unexpected
        differ = [name for name in wanted if not same_bytes(state[name], wanted[name])]
        assert not differ, f"{kind}: {differ}"
        made = convert(open_source(str(there)), str(back), "hf", ConvertOptions(assets=str(hf)))
        assert not made.check or not made.check.problems
        assert (back / WEIGHTS).read_bytes() == (hf / WEIGHTS).read_bytes(), f"{kind}: back"


def check_shards(class_name: str, config: Any, wanted: dict[str, torch.Tensor], hf: Path) -> None:
    """On every rank: the folder fills shards on the meta device with the model's values, which save the same bytes.

    What no file contains has the values of the class.

    Args:
        wanted: `stored_names` of the model; hooks and parametrizations keep some models from being sent to a process.
    """
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        model = model_class(copy.deepcopy(config))
    scalars = {param for param in model.parameters() if not param.ndim}  # which cannot be sharded
    fully_shard(model, mesh=cpu_mesh(), ignored_params=scalars)
    report = load(hf, model)
    assert not report.unexpected and set(report.missing).isdisjoint(wanted)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    state = model.state_dict()
    differ = []
    for name, tensor in wanted.items():
        ours = state[name]
        ours = ours.full_tensor() if isinstance(ours, RaggedDTensor) else ours
        differ += [] if same_bytes(ours, tensor) else [name]
    own = dict(model.named_buffers())
    differ += [
        name
        for name, buffer in model_class(copy.deepcopy(config)).named_buffers()
        if name not in state and not same_bytes(own[name], buffer)
    ]
    assert not differ, f"shards: {differ}"
    save(hf.with_name("live"), {"model": model}, format=HuggingFace(assets=hf))
    assert (hf.with_name("live") / WEIGHTS).read_bytes() == (hf / WEIGHTS).read_bytes(), "live: back"


def mapping_of(model: PreTrainedModel, hf: Path) -> str:
    """What differs between the names and layouts in files and in memory."""
    said = answer({"class": type(model).__name__, "config": model.config.to_dict()})
    stored = {
        name: (t.shape, str(t.dtype).removeprefix("torch.")) for name, t in load_file(hf / WEIGHTS).items()
    }
    taken = answer({"class": type(model).__name__, "config": model.config.to_dict(), "stored": stored})
    kinds = {"renamed"} if any(name != made for name, made in said["in_files"].items()) else set()
    for expression in (*said["in_files"].values(), *taken["in_memory"].values()):
        kinds |= _operations(expression)
    return ", ".join(
        text for kind, text in _KINDS.items() if kind in kinds or (kind == "unsaved" and said["unsaved"])
    )


_KINDS = {
    "renamed": "names",
    "stack": "lists stacked",
    "concat": "tensors joined or split",
    "permute": "items permuted",
    "unsaved": "weights not in files",
}


def _operations(expression: Any) -> set[str]:
    if isinstance(expression, str):
        return set()
    return {expression[0]}.union(*map(_operations, expression[2]))
