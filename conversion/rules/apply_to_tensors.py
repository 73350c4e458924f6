"""Apply key rules to tensors: planned and checked from metadata, before any data is read.

Every source key is used once or dropped by name, every target is made once, no rule is unused, and undoing a rule
gives back the shapes that it started from. A converter that silently skips a key produces a broken model.

Sizes in rules are small arithmetic over the numbers of a config.json:

    "heads * head_dim"      names are [let] entries or keys of the config
    "a ?? b / c"            the first alternative whose names all exist

Only numbers, names, + - * / and brackets are allowed. A division must leave no remainder.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import Any

from vescale_fsdp.checkpoint.moves.stored_tensor import TensorInfo
from vescale_fsdp.checkpoint.moves.tensor_view import RenamedView, TensorView, ZerosView
from vescale_fsdp.conversion.rules.operations import Bundle, Cast, Node, Trim
from vescale_fsdp.conversion.rules.rule_file import Drop, KeyRule, Pattern, RuleSet, shipped_rules
from vescale_fsdp.errors import ConversionError, some

_MOST_MISFITS = 20  # that an error lists
Key = tuple[tuple[str, int], ...]  # captures that make one group of a rule


@dataclass(frozen=True)
class Applied:
    """What rules made.

    Args:
        views: the new tensors by new name.
        origins: new name -> names it was made from; tensors of zeros have none.
        twins: new names of tied weights that hf leaves out. An optimizer knows a tied parameter once, by its other
            name.
        dropped: names that [[drop]] let go.
        warnings: what people must know of those.
    """

    views: dict[str, TensorView]
    origins: dict[str, tuple[str, ...]]
    twins: frozenset[str]
    dropped: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def made_from(self, names: Collection[str]) -> Iterator[tuple[str, str]]:
        """(new parameter, the first that it was made from) where that is one of these."""
        for origin, made in self.by_first_origin.items():
            if origin in names:
                yield from ((fqn, origin) for fqn in made)

    @cached_property
    def by_first_origin(self) -> Mapping[str, Sequence[str]]:
        """The first name that a parameter was made from -> all that were made from it."""
        found: dict[str, list[str]] = {}
        for fqn, origins in self.origins.items():
            if fqn not in self.twins and origins:
                found.setdefault(origins[0], []).append(fqn)
        return found


def apply_rules(
    rules: RuleSet,
    views: Mapping[str, TensorView],
    config: Mapping[str, Any],
    *,
    to_hf: bool,
    partial: bool = False,
) -> Applied:
    """Turn tensors of one side into tensors of the other.

    Args:
        rules: the rules.
        views: all tensors of the model, by the names of the side they come from.
        config: the model's config.json.
        to_hf: from ours to hf, or the other way.
        partial: whether rules may go unused (optimizer state need not exist for every parameter).

    Raises:
        ConversionError: if any of the checks above fails.
    """
    return _Application(rules, views, config, to_hf, partial).run()


@dataclass
class _Application:
    """The arguments of `apply_rules`, and how far it has come."""

    rules: RuleSet
    views: Mapping[str, TensorView]
    config: Mapping[str, Any]
    to_hf: bool
    partial: bool
    _used: dict[str, KeyRule] = field(default_factory=dict)
    _made: dict[str, TensorView] = field(default_factory=dict)
    _origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _twins: set[str] = field(default_factory=set)
    _idle: list[str] = field(default_factory=list)  # what rules look for that found nothing
    _misfits: list[ConversionError] = field(default_factory=list)
    _trimmed: list[str] = field(default_factory=list)

    def run(self) -> Applied:
        self._keep(self._refuse)
        zeros = tuple(Drop(zeros.ours) for zeros in self.rules.zeros)
        drops = (*self.rules.drops_ours, *zeros) if self.to_hf else self.rules.drops_hf
        by_drop = [drop.among(self.views, self._size) for drop in drops]
        let_go = set(chain.from_iterable(by_drop))
        dropped = tuple(name for name in self.views if name in let_go)
        for rule in self.rules.rules:
            names = [name for name in self.views if name not in let_go]
            self._keep(lambda rule=rule, names=names: self._apply(rule, names))  # type: ignore[misc]
        unused = [name for name in self.views if name not in self._used and name not in let_go]
        if self.rules.keep_others:
            self._move(unused)
        elif unused:
            todo = f"add a rule or a [[drop]], or choose among {', '.join(shipped_rules())}"
            self._misfits.append(self._bad("rules for every key", f"none for {some(unused)}", todo))
        if self._idle:
            todo = (
                "remove the rule or mark it optional = true; if the source is another model, take its rules"
            )
            misfit = self._bad("rules that match something", f"nothing matches {some(self._idle)}", todo)
            self._misfits.append(misfit)
        self._raise_misfits()
        if not (self.to_hf or self.partial):
            self._add_zeros()
        warned = zip(drops, by_drop, strict=True)
        warnings = tuple(
            f"{drop.warn}: left out {some(names)}" for drop, names in warned if drop.warn and names
        )
        return Applied(
            self._made, self._origins, frozenset(self._twins), dropped, (*warnings, *self._trimmed)
        )

    def _keep(self, work: Callable[[], None]) -> None:
        """Do something; what does not fit is kept, to be raised with all else that does not."""
        try:
            work()
        except ConversionError as misfit:
            self._misfits.append(misfit)

    def _raise_misfits(self) -> None:
        """Raise what was kept: one as it is, several as one error that tells them all."""
        if len(self._misfits) < 2:
            for misfit in self._misfits:
                raise misfit
            return
        told = [" ".join(str(misfit).split()) for misfit in self._misfits]
        shown = "\n    ".join(told[:_MOST_MISFITS])
        more = len(told) - _MOST_MISFITS
        raise self._bad(
            "rules that fit all of the model",
            f"{len(told)} that do not\n    {shown}" + (f"\n    and {more} more" if more > 0 else ""),
            "see what is said of each",
        ) from self._misfits[0]

    def _move(self, names: list[str]) -> None:
        """Keys without a rule: under other prefixes, if there are any."""
        moved = {name: self.rules.moved(name, to_hf=self.to_hf) for name in names}
        for name, new in moved.items():
            if self.rules.is_of_other_side(name, to_hf=self.to_hf):
                todo = "take the rules of this model, or leave --rules out if its names are those that are wanted"
                self._misfits.append(self._bad("names that are yet to be changed", name, todo))
            else:
                self._add(new, self.views[name], (name,))
        is_idle = self.rules.prefixes and all(name == new for name, new in moved.items())
        if is_idle and not self.partial:
            self._idle.append(" or ".join(pair[1 if self.to_hf else 0] for pair in self.rules.prefixes) + "*")

    def _refuse(self) -> None:
        for refusal in () if self.to_hf else self.rules.refusals:
            if found := [name for name in self.views if refusal.pattern.match(name) is not None]:
                raise self._bad(f"no {refusal.pattern.text}", some(found), refusal.todo)

    def _add_zeros(self) -> None:
        for zeros in self.rules.zeros:
            for name in self.views:
                captures = zeros.beside.match(name)
                if captures is not None:
                    made = zeros.ours.fill(captures)
                    shape = tuple(self._size(size) for size in zeros.shape)
                    self._add(made, ZerosView(TensorInfo(made, shape, zeros.dtype)), ())

    def _apply(self, rule: KeyRule, names: list[str]) -> None:
        sources = rule.ours if self.to_hf else rule.hf
        groups = self._groups(rule, sources, names)
        if not groups and not rule.optional and not self.partial:
            self._idle.append(sources[0].text)
        for key, found in groups.items():
            self._keep(lambda key=key, found=found: self._make(rule, sources, dict(key), found))  # type: ignore[misc]

    def _groups(
        self, rule: KeyRule, sources: tuple[Pattern, ...], names: list[str]
    ) -> dict[Key, list[dict[int, str]]]:
        """Names by what they capture: per source pattern, the names by counted index (0 if none counts)."""
        groups: dict[Key, list[dict[int, str]]] = {}
        for place, pattern in enumerate(sources):
            for name in names:
                captures = pattern.match(name)
                if captures is None:
                    continue
                if name in self._used:
                    raise self._bad("one rule for each key", f"two for {name}", "make the patterns distinct")
                self._used[name] = rule
                index = captures.pop(rule.over, 0) if rule.over and not self.to_hf else 0
                row = groups.setdefault(tuple(sorted(captures.items())), [{} for _ in sources])
                row[place][index] = name
        self._add_twin(rule, groups)
        return groups

    def _add_twin(self, rule: KeyRule, groups: dict[Key, list[dict[int, str]]]) -> None:
        """Where hf leaves a tied weight out, its twin stands in."""
        twin = rule.tie
        if groups or self.to_hf or self.partial or twin is None or twin not in self.views:
            return
        if self.config.get("tie_word_embeddings") is True:
            groups[()] = [{0: twin}]
            self._twins.update(pattern.text for pattern in rule.ours)

    def _make(
        self,
        rule: KeyRule,
        sources: tuple[Pattern, ...],
        captures: dict[str, int],
        found: list[dict[int, str]],
    ) -> None:
        for pattern, row in zip(sources, found, strict=True):
            if not row or sorted(row) != list(range(len(row))):
                have = [name for row in found for name in row.values()]
                raise self._bad(
                    f"all tensors of {pattern.text} with {captures or 'no captures'}",
                    f"only {some(have)}, not {some(self._absent(rule, pattern, captures, found, row))}",
                    "the source is not complete, or the pattern of the rule is wrong",
                )
        counts = rule.over is not None and not self.to_hf
        bundle: Bundle = [
            [self.views[row[i]] for i in sorted(row)] if counts else self.views[row[0]] for row in found
        ]
        made = self._run_ops(rule, bundle, to_hf=self.to_hf)
        if not self._is_trimmed(rule, bundle, made):
            self._prove_inverse(rule, bundle, made)
        origins = tuple(name for row in found for _, name in sorted(row.items()))
        targets, over = rule.hf if self.to_hf else rule.ours, rule.over
        if len(made) != len(targets):
            raise self._bad(f"{len(targets)} results", f"{len(made)} from {some(origins)}", "correct the ops")
        for pattern, node in zip(targets, made, strict=True):
            items = enumerate(node) if isinstance(node, list) else [(0, node)]
            for index, view in items:
                counted = {over: index} if over is not None else {}
                self._add(pattern.fill({**captures, **counted}), view, origins)

    def _absent(
        self,
        rule: KeyRule,
        pattern: Pattern,
        captures: Mapping[str, int],
        found: list[dict[int, str]],
        row: Mapping[int, str],
    ) -> list[str]:
        """The names that a pattern should have and has not, as far as the others' counts tell."""
        counted = rule.over if rule.over and not self.to_hf else None
        indices = range(1 + max(index for each in found for index in each))
        absent = [index for index in indices if index not in row]
        return [pattern.fill({**captures, counted: index} if counted else captures) for index in absent]

    def _run_ops(self, rule: KeyRule, bundle: Bundle, *, to_hf: bool) -> Bundle:
        for op in reversed(rule.ops) if to_hf else rule.ops:
            if self.partial and isinstance(op, Cast):
                continue  # moments keep the type the optimizer chose
            bundle = (op.backward if to_hf else op.forward)(bundle, self._size)
        return bundle

    def _size(self, text: str | int) -> int:
        return evaluate(text, self.rules.lets, self.config)

    def _prove_inverse(self, rule: KeyRule, bundle: Bundle, made: Bundle) -> None:
        again = self._run_ops(rule, made, to_hf=not self.to_hf)
        before, after = _shapes(bundle), _shapes(again)
        if before != after:
            raise self._bad(f"shapes {before} after undoing the rule", after, "correct the sizes in the rule")

    def _is_trimmed(self, rule: KeyRule, bundle: Bundle, made: Bundle) -> bool:
        """Whether padding is left out, which is said and cannot be undone."""
        found = self.to_hf and any(isinstance(op, Trim) for op in rule.ops)
        before, after = _shapes(bundle), _shapes(made)
        if found and before != after and not self.partial:
            names = " and ".join(view.info.name for view in bundle)
            self._trimmed.append(
                f"{names}: of shape {before[0]} only {after[0]} is taken, the rest for padding"
            )
        return found and before != after

    def _add(self, name: str, view: TensorView, origins: tuple[str, ...]) -> None:
        if name in self._made:
            first, second = (
                some(made_of) if made_of else "zeros" for made_of in (self._origins.get(name), origins)
            )
            got = f"{name} made twice, of {first} and of {second}"
            raise self._bad("each result made once", got, "make the patterns distinct")
        self._made[name] = RenamedView(view, name)
        if origins:
            self._origins[name] = origins

    def _bad(self, expected: str, got: object, todo: str) -> ConversionError:
        where = f"{self.rules.name}, {'to' if self.to_hf else 'from'} Hugging Face"
        return ConversionError(
            "The key rules do not fit the source.", expected=expected, got=got, where=where, todo=todo
        )


def _shapes(node: Node) -> Any:
    return [_shapes(item) for item in node] if isinstance(node, list) else node.info.shape


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
}


class _MissingName(Exception):
    """A name that is neither a let nor in the config."""


def evaluate(text: str | int, lets: Mapping[str, str], config: Mapping[str, Any]) -> int:
    """The whole number an expression stands for.

    Raises:
        ConversionError: if it is no expression, a name is missing, or the result is no whole number >= 0.
    """
    try:
        found = _first(str(text), lets, config, depth=0)
    except (SyntaxError, ZeroDivisionError, _MissingName) as error:
        raise _bad(text, f"{type(error).__name__.lstrip('_')}: {error}") from error
    if found.denominator != 1 or found < 0:
        raise _bad(text, str(found))
    return int(found)


def _bad(text: str | int, got: str) -> ConversionError:
    return ConversionError(
        "A size in the key rules cannot be computed.",
        expected="numbers, + - * /, and names that are in [let] or in config.json",
        got=f"{text!r}: {got}",
        todo="pass --assets with the model's config.json, or correct the rule",
    )


def _first(text: str, lets: Mapping[str, str], config: Mapping[str, Any], *, depth: int) -> Fraction:
    if depth > 20:
        raise _MissingName(f"{text} is defined by itself")
    alternatives = text.split("??")
    for number, alternative in enumerate(alternatives):
        try:
            return _value(ast.parse(alternative.strip(), mode="eval").body, lets, config, depth)
        except _MissingName:
            if number == len(alternatives) - 1:
                raise
    raise AssertionError("split never gives an empty list")


def _value(node: ast.expr, lets: Mapping[str, str], config: Mapping[str, Any], depth: int) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if isinstance(node, ast.Name):
        if node.id in lets:
            return _first(str(lets[node.id]), lets, config, depth=depth + 1)
        found = config.get(node.id)
        if not isinstance(found, int) or isinstance(found, bool):
            raise _MissingName(f"{node.id} is {found!r}")
        return Fraction(found)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = (_value(side, lets, config, depth) for side in (node.left, node.right))
        return _OPERATORS[type(node.op)](left, right)
    raise SyntaxError(f"{ast.unparse(node)} is not allowed")
