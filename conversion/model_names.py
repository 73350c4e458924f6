"""Which entries of a training checkpoint are the model, which the optimizer, and which neither.

Frameworks nest the model at different depths: at the root (torchtitan), under ``model`` (the DCP tutorials,
VeOmni), ``pytorch_model_fsdp_0`` (accelerate's file), ``app.model`` (a Stateful wrapper). The path of each
entry in the saved state tells containers from dots inside a parameter's name; where paths are missing,
names are all there is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vescale_fsdp.conversion.source import Source
from vescale_fsdp.errors import ConversionError, explain

__all__ = ["ModelNames", "find_model"]

_OPTIMIZER = re.compile(r"^(optim|optimizer|optimizers)(_?\d+|_state_dict)?$")
_MODEL = re.compile(r"^(model|model_state_dict|module|state_dict|pytorch_model_fsdp(_\d+)?)$")
# What lies beside a model at the root and may hold tensors, such as torchtitan's train_state.step.
_TRAINING = re.compile(
    r"^(train(er|ing)?(_state)?|progress|data_?loader|sampler|(lr_)?schedulers?|(rng|random)(_states?)?)$"
)


@dataclass(frozen=True)
class ModelNames:
    """The model's part of a checkpoint.

    Args:
        prefix: what its names begin with in the source, with the trailing dot; empty at the root.
        names: source name -> name in the model, tensors only.
        optimizer: names of optimizer entries, tensors and values.
        others: names of everything else (schedulers, counters, random states).
    """

    prefix: str
    names: dict[str, str]
    optimizer: tuple[str, ...] = field(default=())
    others: tuple[str, ...] = field(default=())


def find_model(source: Source, prefix: str | None = None) -> ModelNames:
    """Split a source's entries; ``prefix`` overrides the detection.

    Raises:
        ConversionError: if no tensor is left for the model.
    """
    everything = [*source.tensors, *source.values]
    optimizer = [name for name in everything if _is_optimizer(source.path(name))]
    rest = [name for name in source.tensors if name not in set(optimizer)]
    if prefix is None:
        prefix = _detect_prefix([source.path(name) for name in rest])
        if not prefix:
            rest = [name for name in rest if not _is_training(source.path(name))]
    elif prefix and not prefix.endswith("."):
        prefix += "."
    names = {name: name[len(prefix) :] for name in rest if name.startswith(prefix)}
    if not names:
        raise ConversionError(
            explain(
                "no model weights found in the source",
                expected=f"tensors whose names begin with {prefix!r}" if prefix else "tensors of a model",
                got=f"{len(source.tensors)} tensors, such as {_some(source.tensors)}",
                where=source.url,
                todo="pass --model-prefix with what the names of the model's weights begin with",
            )
        )
    taken = {*names, *optimizer}
    others = tuple(name for name in everything if name not in taken)
    return ModelNames(prefix, names, tuple(optimizer), others)


def _some(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:3]) or "none"


def _is_optimizer(path: Sequence[str | int]) -> bool:
    """Whether an entry is optimizer state: under a container of that name, or named so at the root."""
    if len(path) == 1:  # no nesting known: a flattened name
        return re.match(r"^(optim|optimizer)\.(state|param_groups)\.", str(path[0])) is not None
    return any(_OPTIMIZER.match(str(part)) for part in path[:-1])


def _is_training(path: Sequence[str | int]) -> bool:
    return len(path) > 1 and _TRAINING.match(str(path[0])) is not None


def _detect_prefix(paths: Sequence[tuple[str | int, ...]]) -> str:
    """The container that holds most tensors among those named like a model; else the one that holds all."""
    containers = Counter(path[:-1] for path in paths)
    if not containers:
        return ""
    named = [c for c in containers if c and _MODEL.match(str(c[-1]))]
    if named:
        best = max(named, key=lambda container: containers[container])
    elif len(containers) == 1:
        best = next(iter(containers))
    else:
        best = ()
    return "".join(f"{part}." for part in best)
