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
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from vescale_fsdp.checkpoint.moves.source import Source, StoredValue, constant
from vescale_fsdp.checkpoint.moves.tensor_view import RenamedView, SourceView, TensorView
from vescale_fsdp.checkpoint.state.nesting import Path, flatten, name_of, nest, without_wrappers
from vescale_fsdp.checkpoint.state.optimizer_state import optimizer_state
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


_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_BARE = {"opt", "optim", "optimizer", "optimizers", "model", "models", "module", "net", "state", "dict"}
_BARE |= {"pytorch", "fsdp"}

Shapes = Mapping[str, tuple[int, ...]]


def home_of(path: Path) -> Path | None:
    """The container of an optimizer's entry: what stands before ``state`` or ``param_groups``."""
    for depth, part in enumerate(path):
        if str(part).split(".", 1)[0] in ("state", "param_groups"):
            return path[:depth]
    return None


def optimizers_of(state: CarriedState) -> dict[Path, list[str]]:
    """Names of optimizer entries, by the container that they are in."""
    entries = {name: state.path(name) for name in (*state.views, *state.values) if name not in state.is_model}
    by_content, found = optimizer_homes(entries.values()), dict[Path, list[str]]()
    for name, path in entries.items():
        home = home_of(path)
        if home is not None and is_optimizer(path, by_content):
            found.setdefault(home, []).append(name)
    return found


class _Entry(NamedTuple):
    """A leaf of an optimizer's tree: the carried entry of this name."""

    name: str


def with_optimizer_form(state: CarriedState, form: str) -> CarriedState:
    """The same state with its optimizers' entries in another of torch's forms, or without them.

    Args:
        form: ``"keep"``, ``"drop"``, ``"nested"`` or ``"flattened"`` (see `optimizer_state`).

    Raises:
        ConversionError: if the optimizer's entries have neither form, or one belongs to no parameter.
    """
    if form == "keep":
        return state
    if form == "drop":  # whatever form they have, torch's or not
        gone = set(state.model.optimizer)
        return replace(
            state,
            views={name: view for name, view in state.views.items() if name not in gone},
            values={name: value for name, value in state.values.items() if name not in gone},
            paths={name: path for name, path in state.paths.items() if name not in gone},
            left_out=(*state.left_out, *(n for n in (*state.views, *state.values) if n in gone)),
        )
    params = frozenset(str(state.path(name)[-1]) for name in state.is_model)
    for home, names in optimizers_of(state).items():
        is_nested = all(len(state.path(name)) - len(home) >= 3 for name in names)
        if is_nested != (form == "nested"):
            state = _with_form(state, home, names, form, params)
    return state


def _with_form(
    state: CarriedState, home: Path, names: list[str], form: str, params: frozenset[str]
) -> CarriedState:
    """The state with one optimizer's entries in the other form."""
    leaves: dict[Path, Any] = {}
    for name in names:
        path = state.path(name)[len(home) :]
        is_option = str(path[0]).split(".", 1)[0] == "param_groups"  # groups are compared by their values
        leaves[path] = state.values[name]() if is_option and name in state.values else _Entry(name)
    found = optimizer_state(nest(leaves), params)
    stray = sorted(set(found.names) - params) if found is not None and form == "nested" else []
    if found is None or stray:
        raise ConversionError(
            "An optimizer entry belongs to no parameter.",
            expected="state.PARAMETER.KIND or param_groups.PARAMETER.OPTION",
            got=stray[0] if stray else name_of(home),
            todo="keep the form (--optimizer keep), or leave the entry out with --exclude",
        )
    tree = found.nested() if form == "nested" else found.flattened()
    if not found.groups:
        tree.pop("param_groups", None)
    views = {name: view for name, view in state.views.items() if name not in names}
    values = {name: value for name, value in state.values.items() if name not in names}
    paths = {name: path for name, path in state.paths.items() if name not in names}
    made = []
    for path, leaf in flatten(tree, lambda value: isinstance(value, _Entry)).items():
        paths[name := name_of((*home, *path))] = (*home, *path)
        made.append(name)
        if isinstance(leaf, _Entry) and leaf.name in state.views:
            views[name] = state.views[leaf.name]
        else:
            values[name] = state.values[leaf.name] if isinstance(leaf, _Entry) else constant(leaf)
    others = (name for name in state.model.optimizer if name not in names)
    model = replace(state.model, optimizer=(*others, *made))
    return replace(state, views=views, values=values, paths=paths, model=model)


def own_optimizer(state: CarriedState, container: Path, params: Shapes) -> frozenset[str]:
    """Names of the optimizer entries that belong to the model in ``container`` with these parameters.

    Raises:
        ConversionError: if an optimizer may belong to this model or to another.
    """
    others, homes = other_models(state), optimizers_of(state)
    if not others:
        return frozenset(name for names in homes.values() for name in names)
    models = {container: params, **others}
    mine: set[str] = set()
    for home, names in homes.items():
        owners = _owners(state, home, names, models)
        if (len(owners) > 1 and container in owners) or not owners:
            raise _unclear(home, owners or list(models))
        if owners == [container]:
            mine.update(names)
    return frozenset(mine)


def other_models(state: CarriedState) -> dict[Path, Shapes]:
    """Containers of tensors that are neither the model nor an optimizer's."""
    known = {*state.is_model, *state.model.optimizer}
    found: dict[Path, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, view in state.views.items():
        path = state.path(name)
        if name not in known and len(path) > 1:
            found[path[:-1]][str(path[-1])] = view.info.shape
    return {home: shapes for home, shapes in found.items() if any(shapes.values())}


def _owners(
    state: CarriedState, home: Path, names: Iterable[str], models: Mapping[Path, Shapes]
) -> list[Path]:
    """Models that the optimizer may belong to; one, if anything tells."""
    spoken_of = [
        (rest, state.views[name].info.shape)
        for name in names
        if name in state.views and (rest := parameter_key(state.path(name), home)) is not None
    ]
    named = [model for model, params in models.items() if all(_find(rest, params) for rest, _ in spoken_of)]
    fitting = [
        model
        for model in named
        if all(
            shape in ((), (1,), models[model][str(_find(rest, models[model]))]) for rest, shape in spoken_of
        )
    ]
    found = fitting or named
    for tell in (_by_place, _by_name):
        if len(found) > 1:
            found = tell(home, found)
    return found


def parameter_key(path: Path, home: Path) -> str | None:
    """What an optimizer's tensor says of its parameter: its name, which is the whole text or its beginning."""
    kind, *rest = path[len(home) :]
    if kind == "state" and rest:
        return str(rest[0])
    return str(kind).removeprefix("state.") if str(kind).startswith("state.") else None


def _find(text: str, params: Shapes) -> str | None:
    """The parameter that a text names or begins with; the longest."""
    while text not in params and "." in text:
        text = text.rpartition(".")[0]
    return text if text in params else None


def _by_place(home: Path, models: list[Path]) -> list[Path]:
    shared = {model: _shared(home, model) for model in models}
    return [model for model in models if shared[model] == max(shared.values())]


def _shared(*paths: Path) -> int:
    """Number of parts that all paths begin with."""
    return sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))


def _by_name(home: Path, models: list[Path]) -> list[Path]:
    common = _shared(home, *models)
    own = _words(home[common:])
    found = [model for model in models if _alike(own, _words(model[common:]))]
    return found if len(found) == 1 else models


def _words(path: Path) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORD.findall(name_of(path))) - _BARE


def _alike(left: frozenset[str], right: frozenset[str]) -> bool:
    if not left or not right:
        return left == right
    return any(a.startswith(b) or b.startswith(a) for a in left for b in right)


def _unclear(home: Path, owners: list[Path]) -> ConversionError:
    return ConversionError(
        "It is not clear which model an optimizer belongs to.",
        expected="an optimizer with the parameters of one model, beside it, or named after it",
        got=f"{name_of(home) or 'one at the root'}, which may belong to "
        + " or ".join(name_of(owner) or "the root" for owner in owners[:4]),
        todo="leave the optimizers out with --optimizer drop",
    )
