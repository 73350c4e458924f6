"""Everything a conversion carries over, between the source and the target: tensors, other values, their
nesting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property

from vescale_fsdp.checkpoint.moves.source import Source, StoredValue
from vescale_fsdp.checkpoint.moves.tensor_view import RenamedView, SourceView, TensorView
from vescale_fsdp.conversion.state.model_names import ModelNames, container_of, find_model, unwrapped_names
from vescale_fsdp.errors import ConversionError, some

Path = tuple[str | int, ...]


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
