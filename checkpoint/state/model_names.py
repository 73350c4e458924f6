"""Which entries of a state are the model's, by the names of containers: `split_entries`.

    app.model.a.weight        model        prefix "app.model."
    app.optimizer.state...    optimizer    a container with an optimizer's name or keys
    train_state.step          others

Saved states of any framework are split in this way, and so is a state that a load fills.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vescale_fsdp.checkpoint.state.nesting import Path, name_of, without_wrappers
from vescale_fsdp.errors import ConversionError, option, some

# Names of an optimizer's container; opt_state is used in JAX train states.
_OPTIMIZER = re.compile(r"^((optim|optimizer|optimizers)(_?\d+|_state_dict)?|opt_state)$")
# Names of a model's container. params is used in JAX train states; params and params_ema together are two models.
_MODEL = re.compile(r"^(model|model_state_dict|module|state_dict|pytorch_model_fsdp(_\d+)?|params(_\w+)?)$")
OPTIMIZER_KEYS = ("state", "param_groups")  # the keys of torch's optimizer state dicts
# Containers that may have tensors and are next to a model at the root, such as torchtitan's train_state.step.
_TRAINING = re.compile(
    r"^(train(er|ing)?(_state)?|progress|data_?loader|sampler|(lr_)?schedulers?|(rng|random)(_states?)?|"
    r"dl_state_dict(_\d+)?|custom_checkpoint_\d+)$"
)
# Objects that a user registers with accelerate. They may contain a model, but not the trained model.
_USERS = re.compile(r"^custom_checkpoint_\d+$")
_OUTERMOST = "module."  # the prefix that DDP adds to names
_PROGRESS = "loops"  # Lightning's counters, not an optimizer, although some names in it contain "optimizer"


@dataclass(frozen=True)
class ModelNames:
    """The model's part of a checkpoint.

    Args:
        prefix: prefix of the model's names in the source, with the trailing dot; empty at the root.
        names: name in the source -> name in the model, tensors only.
        optimizer: names of optimizer entries, tensors and values.
        others: names of all other entries (schedulers, counters, random states).
        candidates: names of the models' containers, if the source has several models and no prefix chose one of them.
            ``names`` then contains all models' tensors by their full names.
    """

    prefix: str
    names: dict[str, str]
    optimizer: tuple[str, ...] = field(default=())
    others: tuple[str, ...] = field(default=())
    candidates: tuple[str, ...] = field(default=())

    def require_one(self, reason: str, where: str) -> None:
        """Check that the source has only one model, or that one was chosen.

        Args:
            reason: why one model is needed, for the message.
            where: the source, for the message.

        Raises:
            ConversionError: if there are several models.
        """
        if self.candidates:
            raise ConversionError(
                "The source has several models.",
                expected=f"one model, because {reason}",
                got=some(self.candidates, 8),
                where=where,
                todo=f"choose one with {option('model_prefix', self.candidates[0])}, or treat them as one model with "
                f"{option('model_prefix', '')}",
            )


def split_entries(
    paths: Mapping[str, Path], shapes: Mapping[str, Sequence[int]], prefix: str | None, where: str
) -> ModelNames:
    """Split a state's entries into model, optimizers and others.

    Args:
        paths: flattened name -> path, of all entries.
        shapes: flattened name -> shape, of all tensors.
        prefix: prefix of the model's names; None to detect it.
        where: the state, for messages.

    Raises:
        ConversionError: if the model would have no tensor.
    """
    optimizer = dict.fromkeys(optimizer_names(paths))  # an ordered set
    rest = [name for name in shapes if name not in optimizer]
    candidates: tuple[str, ...] = ()
    if prefix is None:
        counters = {name for name in rest if not shapes[name]}  # 0-d tensors
        models = _find_models({name: paths[name] for name in rest}, counters)
        prefix = _prefix(models[0]) if len(models) == 1 else ""
        if not prefix:  # a model at the root, where training counters are too
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
            todo=f"pass the prefix of the model's names as {option('model_prefix')}"
            if shapes
            else "pass a checkpoint with tensors; vescale-convert inspect SRC lists what this one has",
        )
    others = tuple(name for name in paths if name not in names and name not in optimizer)
    return ModelNames(prefix, names, tuple(optimizer), others, candidates)


def container_of(prefix: str, paths: Iterable[Path]) -> Path:
    """Return the path of the container whose names have this prefix.

    Args:
        prefix: the container's flattened name and a dot.
        paths: paths of the model's tensors, which show how the name is split into keys.
    """
    name = prefix.rstrip(".")
    heads = (path[:depth] for path in paths for depth in range(len(path)))
    return next((head for head in heads if name_of(head) == name), (name,))


def unwrapped_names(names: Mapping[str, str], counters: Collection[str], where: str) -> dict[str, str]:
    """Remove the name parts that wrappers (torch.compile, DDP, FSDP1, activation checkpointing) have added.

    Args:
        names: name in the source -> name in the model.
        counters: source names of 0-d tensors, such as ``n_averaged`` of an averaged model. They may lack DDP's prefix,
            which is removed if all other names have it.

    Returns:
        Name in the source -> name in the unwrapped model.

    Raises:
        ConversionError: if two tensors would get the same name.
    """
    unwrapped = {old: without_wrappers(new) for old, new in names.items()}
    weights = [old for old in unwrapped if old not in counters]
    # Only if all weights have it, since a model may have a submodule named "module". A loop, because wrappers nest.
    while weights and all(unwrapped[old].startswith(_OUTERMOST) for old in weights):
        unwrapped = {old: new.removeprefix(_OUTERMOST) for old, new in unwrapped.items()}
    first: dict[str, str] = {}
    for old, new in unwrapped.items():
        if (other := first.setdefault(new, old)) != old:
            raise ConversionError(
                "Two tensors have the same name without the wrappers of torch.compile, DDP or FSDP1.",
                expected="each weight once",
                got=f"{other} and {old} become {new}",
                where=where,
                todo=f"choose the model with {option('model_prefix')}, or save the unwrapped module",
            )
    return unwrapped


def optimizer_names(paths: Mapping[str, Path]) -> list[str]:
    """Return the names of optimizer entries: in containers with an optimizer's name or keys, or so named at the root.

    Args:
        paths: flattened name -> path, of all entries of a state.
    """
    # A container with param_groups is an optimizer's, whatever its name.
    groups = re.compile(r"param_groups(\.|$)")
    containers = {
        path[:depth]
        for path in paths.values()
        for depth, part in enumerate(path)
        if depth and type(part) is str and groups.match(part)
    }

    def is_optimizer(path: Path) -> bool:
        """Return whether an entry at this path belongs to an optimizer."""
        if len(path) == 1:  # the path is only a flattened name, so its containers are unknown
            return re.match(r"^(optim|optimizer)\.(state|param_groups)\.", str(path[0])) is not None
        if path[0] == _PROGRESS:
            return False
        return any(
            _OPTIMIZER.match(str(part))
            or (path[: depth + 1] in containers and str(path[depth + 1]).split(".", 1)[0] in OPTIMIZER_KEYS)
            for depth, part in enumerate(path[:-1])
        )

    return [name for name, path in paths.items() if is_optimizer(path)]


def _is_training(path: Sequence[str | int]) -> bool:
    """Return whether an entry is in a container of counters, schedulers or random states at the root."""
    return len(path) > 1 and _TRAINING.match(str(path[0])) is not None


def _find_models(paths: Mapping[str, Path], counters: Collection[str]) -> list[Path]:
    """Return the containers of models: the outermost containers with a model's name, else the outermost containers.

    The root is not a model if it contains only counters and several containers.

    Args:
        paths: name -> path of the tensors outside of optimizers.
        counters: names of 0-d tensors.
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
