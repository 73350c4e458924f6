"""`CarriedState`: the state that a conversion carries from a source to a target: models, optimizers, other values.

Entries have flattened names. Frameworks nest the model at different depths: at the root (torchtitan), under ``model``
(the DCP tutorials, VeOmni), ``pytorch_model_fsdp_0`` (accelerate's file), ``app.model`` (a Stateful wrapper). The path
of each entry in the saved state shows which dots in a name separate containers, and which are part of a parameter's
name. If a format does not store paths, only names can be used.

A state of several models (``generator`` and ``discriminator``) can be converted to formats that store several models.
Formats for one model require a choice: `ModelNames.require_one`. An optimizer belongs to the model that has the
optimizer's parameters, with the same shapes. If several models match, the position decides
(``{"generator": {"model": ..., "optimizer": ...}}``), then the name (``optim_g``). If neither decides, an error is
raised.
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

from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.state.model_names import (
    OPTIMIZER_KEYS,
    ModelNames,
    container_of,
    optimizer_names,
    split_entries,
    unwrapped_names,
)
from vescale_fsdp.checkpoint.state.nesting import Path, flatten, name_of, nest
from vescale_fsdp.checkpoint.state.optimizer_forms import optimizer_state
from vescale_fsdp.conversion.engine.source import Source, StoredValue, constant
from vescale_fsdp.conversion.engine.tensor_view import RenamedView, SourceView, TensorView
from vescale_fsdp.errors import ConversionError, as_pattern, option, some


def find_model(source: Source, prefix: str | None = None) -> ModelNames:
    """Split a source's entries into model, optimizers and others.

    Args:
        prefix: prefix of the model's names; None to detect it.

    Raises:
        ConversionError: if the model would have no tensor.
    """
    paths = {name: source.path(name) for name in (*source.tensors, *source.values)}
    shapes = {name: tensor.info.shape for name, tensor in source.tensors.items()}
    return split_entries(paths, shapes, prefix, source.url)


@dataclass(frozen=True)
class CarriedState:
    """Tensors and values by flattened name.

    Args:
        views: name -> tensor.
        values: name -> value, for all other entries.
        paths: name -> path in the nested state; names without a path are at the root.
        model: the split of the entries into model, optimizer and others, by their names in this state.
        is_model: names in this state that belong to the model.
        dropped: names in the source that are not in this state.
        warnings: messages to the user about changes of the state.
        file_metadata: ``__metadata__`` of the source's safetensors files.
        metadata: the ``metadata`` argument of the `save` that wrote the source, for native targets.
    """

    views: Mapping[str, TensorView]
    values: Mapping[str, StoredValue]
    paths: Mapping[str, Path]
    model: ModelNames
    is_model: frozenset[str]
    dropped: tuple[str, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())
    file_metadata: Mapping[str, str] = field(default_factory=dict)
    metadata: Json = None

    def path(self, name: str) -> Path:
        """Return the path of an entry in the nested state."""
        return self.paths.get(name, (name,))

    @cached_property
    def container(self) -> Path:
        """The path of the only model's container in the nested state. Renaming rules do not change it."""
        name, fqn = next(iter(self.model.names.items()))
        return container_of(name.removesuffix(fqn), map(self.path, self.model.names))

    def filtered(
        self, include: Sequence[str], exclude: Sequence[str], others: Collection[str] = ()
    ) -> CarriedState:
        """Return the state with only the entries that match an ``include`` pattern, if any, and no ``exclude`` pattern.

        An ``exclude`` pattern may match ``dropped`` names alone, such as those of an optimizer that is not written.

        Args:
            others: names that this state lacks, and that patterns may match.

        Raises:
            ConversionError: if a pattern matches no name, or no tensor is left.
        """
        if not include and not exclude:
            return self
        names = [*self.views, *self.values]
        included, excluded = (*names, *others), (*names, *others, *self.dropped)
        for patterns, known in ((include, included), (exclude, excluded)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in known):  # probably misspelled
                    raise self._no_match(pattern)
        kept = {n for n in names if _matches(n, include, default=True) and not _matches(n, exclude)}
        if not kept.intersection(self.views):
            raise self._no_match(" ".join((*include, *exclude)))
        return self.restricted_to(kept)

    def _no_match(self, pattern: str) -> ConversionError:
        """Return the error for a name pattern that matches none of the names."""
        names = [*self.views, *self.values]
        renamed = [
            as_pattern(name)
            for name, view in self.views.items()
            if any(fnmatchcase(old, pattern) for _, old in view.sources())
        ]
        return ConversionError(
            "A name pattern selects no tensor to convert.",
            expected=f"patterns that match names such as {', '.join(names[:3])}",
            got=pattern,
            todo=f"use the names that the result has: {some(renamed)}"
            if renamed
            else "list the names with: vescale-convert inspect SRC",
        )

    def restricted_to(self, kept: Set[str]) -> CarriedState:
        """Return the state with only these entries; the names of all other entries are added to ``dropped``."""
        return replace(
            self,
            views={name: view for name, view in self.views.items() if name in kept},
            values={name: value for name, value in self.values.items() if name in kept},
            dropped=(*self.dropped, *(name for name in (*self.views, *self.values) if name not in kept)),
        )

    def without(self, names: Iterable[str]) -> CarriedState:
        """Return the state without these tensors, which other entries contain; ``dropped`` does not change."""
        aliases = set(names)
        if not aliases:
            return self
        return replace(self, views={n: v for n, v in self.views.items() if n not in aliases})

    def with_replaced(
        self, made: Mapping[str, tuple[TensorView, str]], gone: Set[str], warnings: tuple[str, ...] = ()
    ) -> CarriedState:
        """Return the state with some of the model's tensors replaced.

        Args:
            made: new name -> (new tensor, name of a replaced tensor, from which the new path is derived).
            gone: names of all replaced tensors.
            warnings: messages to the user about the change.
        """
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

    def with_aliases(self, aliases: Mapping[str, str]) -> CarriedState:
        """Return the state with additional names for tensors of its model.

        Args:
            aliases: new name -> existing name of the tensor.
        """
        if not aliases:
            return self
        made = {new: RenamedView(self.views[old], new) for new, old in aliases.items()}
        paths = {new: (*self.path(old)[:-1], new) for new, old in aliases.items()}
        return replace(
            self,
            views={**self.views, **made},
            paths={**self.paths, **paths},
            model=replace(self.model, names={**self.model.names, **{new: new for new in made}}),
            is_model=self.is_model.union(made),
        )

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Additional name -> first name, for tensors with several names."""
        first: dict[object, str] = {}
        aliases = {}
        for name, view in self.views.items():
            # All empty tensors of one shape would have equal keys.
            if view.info.numel and (kept := first.setdefault(view.sameness, name)) != name:
                aliases[name] = kept
        return aliases

    def with_model_views(self, change: Callable[[list[TensorView]], Iterable[TensorView]]) -> CarriedState:
        """Return the state with changed views of its model.

        Args:
            change: takes the views of the model's tensors, and returns new views with the same names.
        """
        old = [view for name, view in self.views.items() if name in self.is_model]
        changed = {view.info.name: view for view in change(old)}
        return replace(self, views={name: changed.get(name, view) for name, view in self.views.items()})


@dataclass(frozen=True)
class InMemory:
    """A folder's model under the names of its class in memory.

    Attributes:
        state: the state with these names.
        ignored: names in ``state`` that the class ignores when it loads the folder.
        computed: the class's names of weights that files may lack, because the class computes them.
        unknown: why the class gave no answer; empty if it gave one. ``state`` then has the names of the files.
    """

    state: CarriedState
    ignored: frozenset[str] = frozenset()
    computed: frozenset[str] = frozenset()
    unknown: str = ""


def _renamed(text: str, old: str, new: str) -> str:
    """Rename a text that ends like ``old``.

    From the first letter in which ``old`` and ``new`` differ, the end of the text is replaced: ``model.a.x`` becomes
    ``model.a.y`` for ``a.x`` and ``a.y``.
    """
    # Not strict: the names may have different lengths.
    differ = (at for at, letters in enumerate(zip(old, new, strict=False)) if letters[0] != letters[1])
    same = next(differ, min(len(old), len(new)))
    return text.removesuffix(old[same:]) + new[same:]


def _matches(name: str, patterns: Sequence[str], *, default: bool = False) -> bool:
    """Return whether a name matches any of the patterns; ``default`` if there are none."""
    # Not `fnmatch`, which ignores case on some operating systems.
    return any(fnmatchcase(name, pattern) for pattern in patterns) if patterns else default


def model_state(source: Source, prefix: str | None = None) -> CarriedState:
    """Return only the model, under the model's names without the parts that wrappers add (``_orig_mod``).

    Args:
        prefix: prefix of the model's names in the source; None to detect it.
    """
    model = find_model(source, prefix)
    model.require_one("a Hugging Face repository has only one", source.url)
    counters = {name for name in model.names if not source.info(name).shape}  # may lack DDP's prefix
    names = unwrapped_names(model.names, counters, source.url)
    views = {new: SourceView(source, old, new) for old, new in names.items()}
    renamed = [f"{old} becomes {new}" for old, new in names.items() if new != model.names[old]]
    warnings = (
        (f"name parts of wrappers (torch.compile, DDP, FSDP1) are removed: {some(renamed, 1)}",)
        if renamed
        else ()
    )
    dropped = (*model.optimizer, *model.others, *source.unsupported)
    own = replace(model, names={name: name for name in views})
    # No values and no paths: a repository has only tensors, whose names are not nested.
    return CarriedState(views, {}, {}, own, frozenset(views), dropped, warnings, source.file_metadata)


def whole_state(source: Source, prefix: str | None = None, new_prefix: str | None = None) -> CarriedState:
    """Return the state of all entries of the source.

    Args:
        prefix: prefix of the model's names in the source; None to detect it.
        new_prefix: prefix of the model's names in the result; None to keep all names.

    Raises:
        ConversionError: if ``new_prefix`` is given and there are several models, or two entries would get one name.
    """
    model = find_model(source, prefix)
    if new_prefix is not None:
        model.require_one(f"{option('prefix')} renames only one", source.url)
    # An empty prefix moves the model to the root.
    if new_prefix is not None and new_prefix and not new_prefix.endswith("."):
        new_prefix += "."
    names: dict[str, str] = {}
    paths: dict[str, Path] = {}
    for name in (*source.tensors, *source.values):
        path = source.path(name)
        if new_prefix is not None and name in model.names:
            short = model.names[name]
            path = (*(part for part in new_prefix.split(".") if part), short)  # an empty prefix gives no key
            names[name] = f"{new_prefix}{short}"
        else:
            names[name] = name
        paths[names[name]] = path
    if len(set(names.values())) != len(names):
        raise ConversionError(
            "Two entries would get the same name.",
            expected="a prefix that no other entry has",
            got=new_prefix,
            todo=f"choose another {option('prefix')}",
        )
    views = {names[name]: SourceView(source, name, names[name]) for name in source.tensors}
    values = {names[name]: value for name, value in source.values.items()}
    own = replace(model, names={names[name]: short for name, short in model.names.items()})
    return CarriedState(
        views,
        values,
        paths,
        own,
        frozenset(own.names),
        source.unsupported,
        file_metadata=source.file_metadata,
    )


_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")  # a word in CamelCase or snake_case
# Words that are ignored when the name of an optimizer's container is compared with names of models' containers.
_COMMON_WORDS = {
    "opt",
    "optim",
    "optimizer",
    "optimizers",
    "model",
    "models",
    "module",
    "net",
    "state",
    "dict",
}
_COMMON_WORDS |= {"pytorch", "fsdp"}  # in accelerate's names, such as pytorch_model_fsdp_0

Shapes = Mapping[str, tuple[int, ...]]


def optimizer_container(path: Path) -> Path | None:
    """Return the container of an optimizer entry: its path up to ``state`` or ``param_groups``; None without these."""
    for depth, part in enumerate(path):
        # A flattened optimizer has keys such as "state.layer.weight.exp_avg".
        if str(part).split(".", 1)[0] in OPTIMIZER_KEYS:
            return path[:depth]
    return None


def optimizers_of(state: CarriedState) -> dict[Path, list[str]]:
    """Return the names of a state's optimizer entries, by the path of the optimizer's container."""
    entries = {name: state.path(name) for name in (*state.views, *state.values) if name not in state.is_model}
    by_container: dict[Path, list[str]] = {}
    for name in optimizer_names(entries):
        container = optimizer_container(entries[name])
        if container is not None:
            by_container.setdefault(container, []).append(name)
    return by_container


class _Entry(NamedTuple):
    """A leaf of an optimizer's nested state, which stands for the carried entry of this name."""

    name: str


def with_optimizer_form(state: CarriedState, form: str) -> CarriedState:
    """Return the state with its optimizers converted to another of torch's forms, or without optimizers.

    Args:
        form: ``"keep"``, ``"drop"``, ``"nested"`` or ``"flattened"`` (see `optimizer_state`).

    Raises:
        ConversionError: if an optimizer has none of torch's forms, or an entry belongs to no parameter.
    """
    if form == "keep":
        return state
    # Before the forms are detected, because other frameworks' optimizers have none of them.
    if form == "drop":
        return state.restricted_to({*state.views, *state.values}.difference(state.model.optimizer))
    params = frozenset(str(state.path(name)[-1]) for name in state.is_model)
    for container, names in optimizers_of(state).items():
        # In nested state, ``state``, the parameter and the kind are three separate keys of the path.
        is_nested = all(len(state.path(name)) - len(container) >= 3 for name in names)
        if is_nested != (form == "nested"):
            state = _with_form(state, container, names, form, params)
    return state


def _with_form(
    state: CarriedState, container: Path, names: list[str], form: str, params: frozenset[str]
) -> CarriedState:
    """Return the state with one optimizer converted to ``form``.

    Args:
        names: the optimizer's entries.
        params: names of the parameters, which may contain dots.
    """
    leaves: dict[Path, Any] = {}
    for name in names:
        path = state.path(name)[len(container) :]
        # Options are read now, because `optimizer_state` compares the values of groups. All other values stay unread.
        is_option = str(path[0]).split(".", 1)[0] == "param_groups"
        leaves[path] = state.values[name]() if is_option and name in state.values else _Entry(name)
    optimizer = optimizer_state(nest(leaves), params)
    unknown = sorted(set(optimizer.names) - params) if optimizer is not None and form == "nested" else []
    if optimizer is None or unknown:
        raise ConversionError(
            "An optimizer entry belongs to no parameter.",
            expected="state.PARAMETER.KIND or param_groups.PARAMETER.OPTION",
            got=unknown[0] if unknown else name_of(container),
            todo=f"keep the form: {option('optimizer', 'keep')}; or "
            f"leave the optimizer out: {option('optimizer', 'drop')}",
        )
    tree = optimizer.nested() if form == "nested" else optimizer.flattened()
    if not optimizer.groups:  # do not add an empty list that the source lacks
        tree.pop("param_groups", None)
    views = {name: view for name, view in state.views.items() if name not in names}
    values = {name: value for name, value in state.values.items() if name not in names}
    paths = {name: path for name, path in state.paths.items() if name not in names}
    new_names = []
    for path, leaf in flatten(tree, lambda value: isinstance(value, _Entry)).items():
        name = name_of((*container, *path))
        paths[name] = (*container, *path)
        new_names.append(name)
        if isinstance(leaf, _Entry) and leaf.name in state.views:
            views[name] = state.views[leaf.name]
        else:
            values[name] = state.values[leaf.name] if isinstance(leaf, _Entry) else constant(leaf)
    others = (name for name in state.model.optimizer if name not in names)
    model = replace(state.model, optimizer=(*others, *new_names))
    return replace(state, views=views, values=values, paths=paths, model=model)


def own_optimizer(state: CarriedState, container: Path, params: Shapes) -> frozenset[str]:
    """Return the names of the optimizer entries that belong to one model.

    Args:
        container: path of the model's container.
        params: parameter name -> shape, of this model.

    Raises:
        ConversionError: if it is not clear whether an optimizer belongs to this model.
    """
    others, optimizers = other_models(state), optimizers_of(state)
    if not others:  # the only model: all optimizers are its own
        return frozenset(name for names in optimizers.values() for name in names)
    models = {container: params, **others}
    own: set[str] = set()
    for optimizer, names in optimizers.items():
        owners = _owners(state, optimizer, names, models)
        # If several other models remain, the optimizer is not this model's, and their ambiguity does not matter.
        if not owners or (len(owners) > 1 and container in owners):
            candidates = [name_of(owner) or "the root" for owner in owners or models][:4]
            raise ConversionError(
                "An optimizer may belong to several models.",
                expected="an optimizer with the parameters of one model, next to it, or named after it",
                got=f"{name_of(optimizer) or 'an optimizer at the root'}, which may belong to "
                + " or ".join(candidates),
                todo=f"leave the optimizers out with {option('optimizer', 'drop')}",
            )
        if owners == [container]:
            own.update(names)
    return frozenset(own)


def other_models(state: CarriedState) -> dict[Path, Shapes]:
    """Return further models: container -> name -> shape of tensors that are not the model's or an optimizer's."""
    known = {*state.is_model, *state.model.optimizer}
    shapes: dict[Path, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, view in state.views.items():
        path = state.path(name)
        if name not in known and len(path) > 1:
            shapes[path[:-1]][str(path[-1])] = view.info.shape
    # A container with only 0-d tensors contains counters, not a model.
    return {container: own for container, own in shapes.items() if any(own.values())}


def _owners(
    state: CarriedState, optimizer: Path, names: Iterable[str], models: Mapping[Path, Shapes]
) -> list[Path]:
    """Return the containers of the models that an optimizer may belong to.

    It is one container if the optimizer's parameters, their shapes, its position or its name decide.

    Args:
        optimizer: path of the optimizer's container.
        names: names of its entries.
        models: container -> parameter name -> shape.
    """
    entries = [
        (key, state.views[name].info.shape)
        for name in names
        if name in state.views and (key := parameter_key(state.path(name), optimizer)) is not None
    ]

    def parameter(key: str, params: Shapes) -> str | None:
        """Return the parameter that an entry's key begins with; None if there is none.

        In the flattened form, the key also contains the kind: ``layer.weight.exp_avg``.
        """
        while key not in params and "." in key:
            key = key.rpartition(".")[0]
        return key if key in params else None

    named = [model for model, params in models.items() if all(parameter(key, params) for key, _ in entries)]
    fitting = [
        model
        for model in named
        if all(
            # A step count has one item. A moment has the shape of its parameter.
            shape in ((), (1,), models[model][str(parameter(key, models[model]))])
            for key, shape in entries
        )
    ]
    owners = fitting or named  # some optimizers' moments have other shapes than the parameters
    if len(owners) > 1:  # the position: the models that share the longest path with the optimizer
        depths = {model: _num_shared(optimizer, model) for model in owners}
        owners = [model for model in owners if depths[model] == max(depths.values())]
    if len(owners) > 1:  # the name, without the part of the path that all share
        common = _num_shared(optimizer, *owners)
        own = _words(optimizer[common:])
        alike = [model for model in owners if _are_alike(own, _words(model[common:]))]
        owners = alike if len(alike) == 1 else owners
    return owners


def parameter_key(path: Path, container: Path) -> str | None:
    """Return the key, in an optimizer entry's path, that begins with a parameter's name; None for an option."""
    kind, *rest = path[len(container) :]
    if kind == "state" and rest:
        return str(rest[0])
    return str(kind).removeprefix("state.") if str(kind).startswith("state.") else None


def _num_shared(*paths: Path) -> int:
    """Return the length of the paths' common prefix."""
    return sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))


def _words(path: Path) -> frozenset[str]:
    """Return the words of a container's name, in lower case and without `_COMMON_WORDS`."""
    return frozenset(word.lower() for word in _WORD.findall(name_of(path))) - _COMMON_WORDS


def _are_alike(left: frozenset[str], right: frozenset[str]) -> bool:
    """Return whether the words of an optimizer's and a model's container are similar."""
    if not left or not right:  # ``model`` and ``optimizer``: only common words
        return left == right
    # A common beginning is enough: ``optim_g`` is the optimizer of ``generator``.
    return any(a.startswith(b) or b.startswith(a) for a in left for b in right)
