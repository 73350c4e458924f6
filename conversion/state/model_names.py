"""Which entries of a training checkpoint are the model, which the optimizer, and which neither.

Frameworks nest the model at different depths: at the root (torchtitan), under ``model`` (the DCP tutorials,
VeOmni), ``pytorch_model_fsdp_0`` (accelerate's file), ``app.model`` (a Stateful wrapper). The path of each
entry in the saved state tells containers from dots inside a parameter's name; where paths are missing,
names are all there is.

A state of several models (``generator`` and ``discriminator``) goes through whatever can hold them all. What
can hold one only asks which: `ModelNames.require_one`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vescale_fsdp.checkpoint.state.nesting import Path, name_of
from vescale_fsdp.errors import ConversionError, some

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint.moves.source import Source

# opt_state: of JAX's train states
_OPTIMIZER = re.compile(r"^((optim|optimizer|optimizers)(_?\d+|_state_dict)?|opt_state)$")
# params: of JAX; one beside params_ema is one of two models
_MODEL = re.compile(r"^(model|model_state_dict|module|state_dict|pytorch_model_fsdp(_\d+)?|params(_\w+)?)$")
_OPTIMIZER_KEYS = ("state", "param_groups")
# What lies beside a model at the root and may hold tensors, such as torchtitan's train_state.step.
_TRAINING = re.compile(
    r"^(train(er|ing)?(_state)?|progress|data_?loader|sampler|(lr_)?schedulers?|(rng|random)(_states?)?|"
    r"dl_state_dict(_\d+)?|custom_checkpoint_\d+)$"
)
_USERS = re.compile(
    r"^custom_checkpoint_\d+$"
)  # what accelerate saves for the user: a model in it is not the model
# Modules that torch.compile, FSDP1 and activation checkpointing put around others, and DDP around all.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_OUTERMOST = "module."
_PROGRESS = "loops"  # Lightning's counters, of which some are called after an optimizer


@dataclass(frozen=True)
class ModelNames:
    """The model's part of a checkpoint.

    Args:
        prefix: what its names begin with in the source, with the trailing dot; empty at the root.
        names: source name -> name in the model, tensors only.
        optimizer: names of optimizer entries, tensors and values.
        others: names of everything else (schedulers, counters, random states).
        candidates: the containers, if there are several models and nothing says which is meant; ``names`` are those of
            them all then, in full.
    """

    prefix: str
    names: dict[str, str]
    optimizer: tuple[str, ...] = field(default=())
    others: tuple[str, ...] = field(default=())
    candidates: tuple[str, ...] = field(default=())

    def require_one(self, reason: str, where: str) -> None:
        """Refuse several models.

        Raises:
            ConversionError: if there are several; ``reason`` says what cannot hold them.
        """
        if self.candidates:
            raise ConversionError(
                "The source holds several models.",
                expected=f"one model, since {reason}",
                got=some(self.candidates, 8),
                where=where,
                todo=f"pick one with --model-prefix {self.candidates[0]}, or say with --model-prefix '' that "
                "they are one model",
            )


def find_model(source: Source, prefix: str | None = None) -> ModelNames:
    """Split a source's entries; ``prefix`` overrides the detection.

    Raises:
        ConversionError: if no tensor is left for the model.
    """
    paths = {name: source.path(name) for name in (*source.tensors, *source.values)}
    shapes = {name: tensor.info.shape for name, tensor in source.tensors.items()}
    return split_entries(paths, shapes, prefix, source.url)


def split_entries(
    paths: Mapping[str, Path], shapes: Mapping[str, Sequence[int]], prefix: str | None, where: str
) -> ModelNames:
    """Split a state's entries.

    Args:
        paths: of all entries, by flattened name.
        shapes: of the tensors among them.
        prefix: what the model's names begin with; None to detect it.
        where: the state, for messages.

    Raises:
        ConversionError: if no tensor is left for the model.
    """
    homes = optimizer_homes(paths.values())
    optimizer = dict.fromkeys(name for name, path in paths.items() if is_optimizer(path, homes))
    rest = [name for name in shapes if name not in optimizer]
    candidates: tuple[str, ...] = ()
    if prefix is None:
        counters = {name for name in rest if not shapes[name]}
        models = _find_models({name: paths[name] for name in rest}, counters)
        prefix = _prefix(models[0]) if len(models) == 1 else ""
        if not prefix:
            rest = [name for name in rest if not _is_training(paths[name])]
        if len(models) > 1:
            candidates = tuple(name_of(model) for model in models)
            rest = [name for name in rest if name.startswith(tuple(map(_prefix, models)))]
    elif prefix and not prefix.endswith("."):
        prefix += "."
    names = {name: name[len(prefix) :] for name in rest if name.startswith(prefix)}
    if not names:
        raise ConversionError(
            "No model weights were found in the source.",
            expected=f"tensors whose names begin with {prefix!r}" if prefix else "tensors of a model",
            got=f"{len(shapes)} tensors, such as {some(shapes, 3)}",
            where=where,
            todo="pass --model-prefix with what the names of the model's weights begin with",
        )
    others = tuple(name for name in paths if name not in names and name not in optimizer)
    return ModelNames(prefix, names, tuple(optimizer), others, candidates)


def container_of(prefix: str, paths: Iterable[Path]) -> Path:
    """The path of the container whose flattened name, and a dot, is the prefix of a model's names.

    Args:
        paths: of the model's tensors.
    """
    name = prefix.rstrip(".")
    heads = (path[:depth] for path in paths for depth in range(len(path)))
    return next((head for head in heads if name_of(head) == name), (name,))


def unwrapped_names(names: Mapping[str, str], counters: Collection[str], where: str) -> dict[str, str]:
    """The same names without the modules that wrappers (torch.compile, DDP, FSDP1, checkpointing) added.

    Args:
        names: name in the source -> name in the model.
        counters: names in the source of 0-d tensors, such as the ``n_averaged`` of an averaged model.

    Raises:
        ConversionError: if two names would become one.
    """
    found = {
        old: ".".join(part for part in new.split(".") if part not in _WRAPPERS) for old, new in names.items()
    }
    weights = [old for old in found if old not in counters]
    while weights and all(found[old].startswith(_OUTERMOST) for old in weights):
        found = {old: new.removeprefix(_OUTERMOST) for old, new in found.items()}
    first: dict[str, str] = {}
    for old, new in found.items():
        if (other := first.setdefault(new, old)) != old:
            raise ConversionError(
                "Two tensors have the same name without the wrappers of torch.compile, DDP or FSDP1.",
                expected="each weight once",
                got=f"{other} and {old} become {new}",
                where=where,
                todo="say which model is meant with --model-prefix, or save the unwrapped module",
            )
    return found


def optimizer_homes(paths: Iterable[Path]) -> frozenset[Path]:
    """Containers that are an optimizer's state by what is in them, whatever they are called. More paths, no fewer."""
    groups = re.compile(r"param_groups(\.|$)")
    return frozenset(
        path[:depth]
        for path in paths
        for depth, part in enumerate(path)
        if depth and type(part) is str and groups.match(part)
    )


def is_optimizer(path: Path, homes: Collection[Path]) -> bool:
    """Whether an entry is optimizer state: under a container of that name or kind, or named so at the root."""
    if len(path) == 1:  # no nesting known: a flattened name
        return re.match(r"^(optim|optimizer)\.(state|param_groups)\.", str(path[0])) is not None
    if path[0] == _PROGRESS:
        return False
    for depth, part in enumerate(path[:-1]):
        if _OPTIMIZER.match(str(part)):
            return True
        if path[: depth + 1] in homes and str(path[depth + 1]).split(".", 1)[0] in _OPTIMIZER_KEYS:
            return True
    return False


def _is_training(path: Sequence[str | int]) -> bool:
    return len(path) > 1 and _TRAINING.match(str(path[0])) is not None


def _find_models(paths: Mapping[str, Path], counters: Collection[str]) -> list[Path]:
    """Containers of models: the outermost of those named like one, else the outermost of all.

    Counters at the root beside several containers make no model of the root.
    """
    containers = list(dict.fromkeys(path[:-1] for path in paths.values()))
    if named := [c for c in containers if c and _MODEL.match(str(c[-1])) and not _USERS.match(str(c[0]))]:
        depth = min(map(len, named))
        return [container for container in named if len(container) == depth]
    nested = [container for container in containers if container and not _is_training((*container, ""))]
    at_root = {name for name, path in paths.items() if len(path) == 1}
    if at_root and (len(nested) < 2 or at_root.difference(counters)):
        return [()]
    inside = set(nested)
    return [c for c in nested if not any(c[:depth] in inside for depth in range(1, len(c)))]


def _prefix(container: Path) -> str:
    return "".join(f"{part}." for part in container)
