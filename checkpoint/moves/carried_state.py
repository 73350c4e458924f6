"""A conversion's state between source and target: tensors and values by name, and which are the model's.

Frameworks nest the model at different depths: at the root (torchtitan), under ``model`` (the DCP tutorials,
VeOmni), ``pytorch_model_fsdp_0`` (accelerate's file), ``app.model`` (a Stateful wrapper). The path of each
entry in the saved state distinguishes containers from dots inside a parameter's name; where paths are missing,
only names can be used.

A state of several models (``generator`` and ``discriminator``) can be converted to formats that hold them all.
Formats that hold one require a choice: `ModelNames.require_one`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property

from vescale_fsdp.checkpoint.moves.source import Source, StoredValue
from vescale_fsdp.checkpoint.moves.tensor_view import RenamedView, SourceView, TensorView
from vescale_fsdp.checkpoint.state.nesting import Path, name_of, without_wrappers
from vescale_fsdp.errors import ConversionError, some

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
# What accelerate saves for the user: a model in it is not the model.
_USERS = re.compile(r"^custom_checkpoint_\d+$")
_OUTERMOST = "module."  # of DDP
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
    found = {old: without_wrappers(new) for old, new in names.items()}
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


@dataclass(frozen=True)
class CarriedState:
    """Tensors and values by flattened name.

    Args:
        views: the tensors.
        values: everything else.
        paths: where each name sits in the nested state.
        model: how the source's entries split into model, optimizer and others; ``model.names`` has this state's
            names of the former.
        is_model: names (of this state) that belong to the model.
        left_out: names of the source that are not in this state.
        warnings: what people must know of those.
        file_metadata: what safetensors files of it say in ``__metadata__``.
    """

    views: Mapping[str, TensorView]
    values: Mapping[str, StoredValue]
    paths: Mapping[str, Path]
    model: ModelNames
    is_model: frozenset[str]
    left_out: tuple[str, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())
    file_metadata: Mapping[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """Where the entry sits in the nested state."""
        return self.paths.get(name, (name,))

    @cached_property
    def container(self) -> Path:
        """Where the one model sits in the nested state; key rules leave it there."""
        name, fqn = next(iter(self.model.names.items()))
        return container_of(name.removesuffix(fqn), map(self.path, self.model.names))

    def filtered(self, include: Sequence[str], exclude: Sequence[str]) -> CarriedState:
        """Only names that match an ``include`` pattern (if any are given) and no ``exclude`` pattern.

        Raises:
            ConversionError: for a pattern that matches nothing, or if nothing is left.
        """
        if not include and not exclude:
            return self
        names = [*self.views, *self.values]
        for pattern in (*include, *exclude):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise _no_match(pattern, names)
        kept = {n for n in names if _matches(n, include, default=True) and not _matches(n, exclude)}
        if not kept.intersection(self.views):
            raise _no_match(" ".join((*include, *exclude)), names)
        return replace(
            self,
            views={n: v for n, v in self.views.items() if n in kept},
            values={n: v for n, v in self.values.items() if n in kept},
            left_out=(*self.left_out, *(n for n in names if n not in kept)),
        )

    def without(self, names: Iterable[str]) -> CarriedState:
        """All but these tensors."""
        dropped = set(names)
        if not dropped:
            return self
        return replace(self, views={n: v for n, v in self.views.items() if n not in dropped})

    def with_replaced(
        self, made: Mapping[str, tuple[TensorView, str]], gone: Set[str], warnings: tuple[str, ...] = ()
    ) -> CarriedState:
        """The model with some tensors in place of others: new name -> (tensor, one of those that it stands for)."""
        views = {name: view for name, view in self.views.items() if name not in gone or name in made}
        views |= {name: view for name, (view, _) in made.items()}
        paths = {
            new: (*self.path(old)[:-1], _renamed(str(self.path(old)[-1]), old, new))
            for new, (_, old) in made.items()
        }
        names = {new: _renamed(self.model.names.get(old, old), old, new) for new, (_, old) in made.items()}
        kept = {name: short for name, short in self.model.names.items() if name not in gone}
        return replace(
            self,
            views=views,
            paths={**self.paths, **paths},
            model=replace(self.model, names={**kept, **names}),
            is_model=self.is_model.difference(gone).union(made),
            warnings=(*self.warnings, *warnings),
        )

    def with_names_of(self, twins: Mapping[str, str]) -> CarriedState:
        """The same tensors, some of the model's under further names too: name -> the one that it has."""
        if not twins:
            return self
        made = {new: RenamedView(self.views[old], new) for new, old in twins.items()}
        paths = {new: (*self.path(old)[:-1], new) for new, old in twins.items()}
        return replace(
            self,
            views={**self.views, **made},
            paths={**self.paths, **paths},
            model=replace(self.model, names={**self.model.names, **{new: new for new in made}}),
            is_model=self.is_model.union(made),
        )

    @cached_property
    def twins(self) -> dict[str, str]:
        """Names of tensors that are an earlier one under another name -> the name of that."""
        first: dict[object, str] = {}
        found = {}
        for name, view in self.views.items():
            if view.info.numel and (kept := first.setdefault(view.sameness, name)) != name:
                found[name] = kept
        return found

    def with_model_views(self, change: Callable[[list[TensorView]], Iterable[TensorView]]) -> CarriedState:
        """The model's tensors replaced one for one by what ``change`` makes of them (names kept)."""
        old = [view for name, view in self.views.items() if name in self.is_model]
        changed = {view.info.name: view for view in change(old)}
        return replace(self, views={name: changed.get(name, view) for name, view in self.views.items()})


def _renamed(text: str, old: str, new: str) -> str:
    """A text that ends as the old name does, ending as the new one."""
    differ = (at for at, letters in enumerate(zip(old, new, strict=False)) if letters[0] != letters[1])
    same = next(differ, min(len(old), len(new)))
    return text.removesuffix(old[same:]) + new[same:]


def _matches(name: str, patterns: Sequence[str], *, default: bool = False) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns) if patterns else default


def _no_match(pattern: str, names: Sequence[str]) -> ConversionError:
    return ConversionError(
        "A name pattern matches nothing that could be converted.",
        expected=f"patterns that match names such as {', '.join(names[:3])}",
        got=pattern,
        todo="list the names with: vescale-convert inspect SRC",
    )


def model_state(source: Source, prefix: str | None = None) -> CarriedState:
    """The model alone, under its own names, without those of modules that wrap it (``_orig_mod``)."""
    model = find_model(source, prefix)
    model.require_one("a Hugging Face repository holds only one", source.url)
    counters = {name for name in model.names if not source.info(name).shape}
    names = unwrapped_names(model.names, counters, source.url)
    views = {new: SourceView(source, old, new) for old, new in names.items()}
    renamed = [f"{old} is {new}" for old, new in names.items() if new != model.names[old]]
    warnings = (
        (f"names of wrappers (torch.compile, DDP, FSDP1) are left out: {some(renamed, 1)}",)
        if renamed
        else ()
    )
    left_out = (*model.optimizer, *model.others, *source.omitted)
    own = replace(model, names={name: name for name in views})
    return CarriedState(views, {}, {}, own, frozenset(views), left_out, warnings, source.file_metadata)


def whole_state(source: Source, prefix: str | None = None, new_prefix: str | None = None) -> CarriedState:
    """Everything in the source; the model's container renamed to ``new_prefix`` if that is given."""
    model = find_model(source, prefix)
    if new_prefix is not None:
        model.require_one("--prefix moves only one", source.url)
    if new_prefix is not None and new_prefix and not new_prefix.endswith("."):
        new_prefix += "."
    names: dict[str, str] = {}
    paths: dict[str, Path] = {}
    for name in (*source.tensors, *source.values):
        path = source.path(name)
        if new_prefix is not None and name in model.names:
            short = model.names[name]
            path = (*(part for part in new_prefix.split(".") if part), short)
            names[name] = f"{new_prefix}{short}"
        else:
            names[name] = name
        paths[names[name]] = path
    if len(set(names.values())) != len(names):
        raise ConversionError(
            "Two entries would get the same name.",
            expected="a prefix that no other entry has",
            got=new_prefix,
            todo="choose another --prefix",
        )
    views = {names[name]: SourceView(source, name, names[name]) for name in source.tensors}
    values = {names[name]: value for name, value in source.values.items()}
    own = replace(model, names={names[name]: short for name, short in model.names.items()})
    return CarriedState(views, values, paths, own, frozenset(own.names), source.omitted)
