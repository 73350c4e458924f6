"""The result of `match`: which leaves of a state and a checkpoint correspond, and the errors if they do not fit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name, stored_dtype
from vescale_fsdp.checkpoint.state.matching.catalogue import Catalogue
from vescale_fsdp.checkpoint.state.matching.new_tensor import NewTensor
from vescale_fsdp.checkpoint.state.per_rank import PerRank
from vescale_fsdp.errors import CheckpointError, callers_level, some

Finish = Callable[[], Any]
Strict = bool | Literal["missing"]
"""What is an error: all that does not fit, nothing, or all but leaves of the checkpoint that the state lacks."""
# Limits the time to find a renamed prefix: this many missing names are compared, each with as many unexpected names.
_TRIED_NAMES = 64
_RENAME_IN_A_COPY = (
    "if leaves were renamed, rename them in a copy: vescale-convert to-native .. --rules FILE; or "
)


class TensorRead(NamedTuple):
    """A read of the catalogue's tensor ``number`` into ``tensor``, which has ``name`` in the state."""

    name: str
    number: int
    tensor: torch.Tensor


@dataclass
class Match:
    """The corresponding leaves of a state and a checkpoint.

    Attributes:
        catalogue: the checkpoint's content, by the names of the state.
        reads: tensors of the state to fill, each with the number of the stored tensor; only tensors that fit.
        fresh: tensors of the checkpoint that an object of the state lacks; the caller allocates and fills them.
        per_rank: name in the manifest -> per-rank leaf of the state.
        per_rank_values: name in the manifest -> value to load; set by the caller.
        missing: leaves of the state that the checkpoint lacks.
        of_class: leaves that the checkpoint lacks because the model's class computes them.
        of_adapter: leaves of an adapter over a base model, if the checkpoint has only the base model.
        unfilled: tensors of modules on the meta device without a value; set by the caller.
        unexpected: leaves of the checkpoint that the state lacks in what it has, such as a module.
        ignored: leaves of the checkpoint under keys that the state lacks, such as another object's.
        problems: (name, kind in the checkpoint, kind in the state) of each leaf whose kinds differ.
        mismatched: tensors with different shapes or dtypes: name -> (in the checkpoint, in the state).
        containers: names of the dicts and lists that were visited, in the state or the checkpoint.
        apart: name of a module or a dict of tensors -> its missing leaves, if the checkpoint has no name of it.
        unused: name patterns that match no leaf of the state or the checkpoint.
        other_classes: param groups that an optimizer of another class saved: (name, class of the state's optimizer,
            options that only the state has, options that only the checkpoint has).
        finish: assigns plain values and loads the state of objects; called once, after all tensors are read.
    """

    catalogue: Catalogue
    reads: list[TensorRead] = field(default_factory=list)
    fresh: list[NewTensor] = field(default_factory=list)
    per_rank: dict[str, PerRank] = field(default_factory=dict)
    per_rank_values: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    of_class: list[str] = field(default_factory=list)
    of_adapter: list[str] = field(default_factory=list)
    unfilled: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    mismatched: dict[str, tuple[str, str]] = field(default_factory=dict)
    containers: set[str] = field(default_factory=set)
    apart: dict[str, list[str]] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    other_classes: list[tuple[str, str, list[str], list[str]]] = field(default_factory=list)
    finish: Finish = field(default=lambda: None)

    def fits(self, read: TensorRead) -> bool:
        """Return whether a tensor of the state has the stored dtype and shape; if not, add it to ``mismatched``."""
        found = self.catalogue.stored(read.number, read.tensor.dtype)
        stored = f"{found.dtype} {list(found.shape)}"
        own = f"{dtype_name(read.tensor.dtype)} {list(read.tensor.shape)}"
        if stored != own:
            self.mismatched[read.name] = (stored, own)
        return stored == own

    def require_fit(self, strict: Strict, *, whole: bool = False) -> None:
        """Check that the checkpoint fits the state.

        Args:
            strict: False allows leaves that are missing, unexpected or mismatched, and patterns that match no leaf;
                ``"missing"`` allows only unexpected leaves.
            whole: whether leaves under keys that the state lacks are unexpected, too.

        Raises:
            CheckpointError: if the checkpoint does not fit; names the leaves.
        """
        where = self.catalogue.where
        if self.problems:  # even if not strict: no value of one kind can replace a value of the other
            name, stored, own = self.problems[0]
            raise CheckpointError(
                f"{len(self.problems)} leaves of the state are of another kind than in the checkpoint.",
                expected=f"{stored} (as saved)",
                got=own,
                where=f"{name} in {where}",
                todo="build the state as it was at the save",
            )
        self._require_common_names()
        if not strict and self.mismatched:
            # A warning, because strict=False is usually meant for different names: another shape may be a mistake.
            warnings.warn(
                f"{len(self.mismatched)} tensors keep their values, because they have another shape or dtype in "
                f"{where}: {some(self.mismatched)}",
                stacklevel=callers_level(),
            )
        if not strict:
            return
        if self.mismatched:
            # The first that no cast cures, if there is one: the remedy must be enough for all.
            uncured = (name for name, pair in self.mismatched.items() if not _is_cast(*pair))
            name = next(uncured, next(iter(self.mismatched)))
            stored, own = self.mismatched[name]
            others = [other for other in self.mismatched if other != name]
            raise CheckpointError(
                f"{len(self.mismatched)} tensors have another shape or dtype than in the checkpoint.",
                expected=f"{stored} (as saved)",
                got=f"{own}; others that differ: {some(others, 6)}" if others else own,
                where=f"{name} in {where}",
                # A call of `load`, because a manager's `restore` does not cast.
                todo="load(path, state, dtype='state') casts floats to the state's dtypes"
                if _is_cast(stored, own)
                else "build the state as it was at the save, with the same shapes and dtypes",
            )
        if self.other_classes:
            name, kind, own_options, stored_options = self.other_classes[0]
            raise CheckpointError(
                "The checkpoint has the state of an optimizer of another class.",
                expected=f"an optimizer with the options {', '.join(stored_options)} (as saved)",
                got=f"{kind}, with {', '.join(own_options)} instead",
                where=f"{name} in {where}",
                todo="create the optimizer of the class that was saved, or load without it: leave it out of the state",
            )
        if self.unused:
            raise CheckpointError(
                "A name pattern matches no leaf.",
                expected="patterns for names of leaves: their keys, joined by dots",
                got=", ".join(map(repr, sorted(self.unused))),
                where=where,
                todo="'model.*' matches all leaves of 'model'; strict=False allows patterns that match none",
            )
        if self.missing or (strict != "missing" and (self._only_stored if whole else self.unexpected)):
            raise CheckpointError(
                "The state and the checkpoint do not have the same leaves.",
                expected="equal names",
                got=self._different_names(),
                where=where,
                todo=self._how_to_fit(),
            )

    def _require_common_names(self) -> None:
        """Raise if an object of the state has no name in common with the checkpoint: nothing of it would be loaded."""
        missing = set(self.missing)  # without leaves that the checkpoint may lack
        apart = [name for name, leaves in self.apart.items() if not missing.isdisjoint(leaves)]
        if apart:
            raise CheckpointError(
                f"The checkpoint has only other names for {apart[0] or 'the state'}.",
                expected="at least one common name, also with strict=False",
                got=self._different_names(),
                where=f"{apart[0] or 'the state'} in {self.catalogue.where}",
                todo=f"{self._how_to_rename() or _RENAME_IN_A_COPY}"
                f"leave {apart[0] or 'its tensors'} out of the state to keep its values",
            )

    def require_filled(self, strict: Strict, *, has_init: bool) -> None:
        """Check that modules on the meta device have a value for each tensor; warns if not ``strict``.

        Args:
            has_init: whether the caller has passed ``init``.

        Raises:
            CheckpointError: if ``strict`` and a tensor has none.
        """
        if not self.unfilled:
            return
        todo = (
            "let init= write to each of them; zeros, where a buffer needs no values"
            if has_init
            else "create the model with its weights instead of on the meta device, where first values of these adapter "
            "tensors cannot be computed; for LoRA, init_lora_weights=True without DoRA works on meta too"
            if set(self.unfilled) <= set(self.of_adapter)
            else "pass init=, which is called with each module that owns such tensors: often lambda module: "
            "module.reset_parameters()"
        )
        error = CheckpointError(
            f"{len(self.unfilled)} tensors of modules on the meta device have no value.",
            expected="a value from the checkpoint, from the model's class or from init=",
            got=some(self.unfilled),
            where=self.catalogue.where,
            todo=f"{todo}. strict=False leaves them without values",
        )
        if strict:
            raise error
        warnings.warn(str(error), stacklevel=callers_level())

    @property
    def _only_stored(self) -> list[str]:
        """Names in the checkpoint alone. If leaves are missing, they may be stored under a key that is ignored."""
        return [*self.unexpected, *self.ignored]

    def _different_names(self) -> str:
        return (
            f"missing in the checkpoint: {some(self.missing, 5)}; "
            f"unexpected, only in the checkpoint: {some(self._only_stored, 5)}"
        )

    def _how_to_fit(self) -> str:
        """Return what to do if the state and the checkpoint do not have the same leaves."""
        if not self.missing:
            # A pattern for a whole model would include what it lacks.
            example = "" if self.unexpected else " ('model.*' for a model alone)"
            return (
                "pass strict='missing' to load all of the state, and ignore what only the checkpoint has; or "
                f"include= with patterns of what to load{example}"
            )
        if self._only_stored and self._renaming is None:
            return f"{_RENAME_IN_A_COPY}pass strict=False to load what both have and keep the values of missing leaves"
        return (
            f"{self._how_to_rename()}pass strict=False to load what both have and keep the values of missing leaves, "
            "or include= with patterns"
        )

    @property
    def _renaming(self) -> tuple[str, str] | None:
        return renaming(self.missing, self._only_stored)

    def _how_to_rename(self) -> str:
        """Return advice for a message: how to load the checkpoint under its names; empty without a `renaming`."""
        if self._renaming is None:
            return ""
        own, stored = self._renaming
        text = f"the checkpoint has {stored!r} where the state has {own!r}: "
        if stored[:-1] in self.containers and own == "":  # [:-1]: without the dot
            return f"{text}pass {{{stored[:-1]!r}: state}}, or "
        if own[:-1] in self.containers and stored == "":
            return f"{text}pass the value of the key {own[:-1]!r} as the state, or "
        container = self._container_of(own)
        # The name of a nested container is no key of the state.
        if container and "." not in container and self._container_of(stored) == container:
            old, new = own[len(container) + 1 :], stored[len(container) + 1 :]
            named = (f"{new!r} + " if new else "") + (f"name.removeprefix({old!r})" if old else "name")
            renamed = f"{{{named}: value for name, value in model.state_dict().items()}}"
            return f"{text}pass {{{container!r}: {renamed}}}, or "
        return f"{text}rename it, or "

    def _container_of(self, start: str) -> str:
        """Return the innermost container whose children have this prefix; empty if there is none."""
        return max((name for name in self.containers if start.startswith(f"{name}.")), key=len, default="")


def _is_cast(stored: str, own: str) -> bool:
    """Return whether ``dtype='state'`` casts a tensor: the shapes are equal, and both dtypes are floats."""
    (old, old_shape), (new, new_shape) = stored.split(" ", 1), own.split(" ", 1)
    return old_shape == new_shape and all(stored_dtype(dtype).kind == "float" for dtype in (old, new))


def _different_starts(name: str, other: str) -> tuple[str, str]:
    """Return what is left of two names when their equal last parts are removed."""
    parts, others = (re.split(r"(?<=[.])", text) for text in (name, other))  # each part keeps its dot
    while parts and others and parts[-1] == others[-1]:
        parts.pop()
        others.pop()
    return "".join(parts), "".join(others)


def renaming(missing: Sequence[str], only_stored: Sequence[str]) -> tuple[str, str] | None:
    """(prefix of missing names, the checkpoint's prefix for them); None if less than half of the missing names fit.

    >>> renaming(["model.0.bias", "model.1.bias"], ["model.m.0.bias", "model.m.1.bias"])
    ('model.', 'model.m.')
    """
    left, best, most = set(only_stored), None, 0
    # Last part -> names: two names with different prefixes have the same last part.
    by_end: dict[str, list[str]] = {}
    for name in only_stored:
        by_end.setdefault(name.rpartition(".")[2], []).append(name)
    tried: set[tuple[str, str]] = set()
    for name in missing[:_TRIED_NAMES]:  # a part of the names, because the loops take quadratic time
        for other in by_end.get(name.rpartition(".")[2], ())[:_TRIED_NAMES]:
            start = _different_starts(name, other)
            if start in tried:
                continue
            tried.add(start)
            own, stored = start
            num = sum(m.startswith(own) and stored + m[len(own) :] in left for m in missing)
            if num > most:
                best, most = start, num
    return best if 2 * most >= len(missing) else None
