"""Apply key rules to tensors. The result is planned and checked from metadata, before any data is read.

The checks: every source key is used once or dropped by name, every result is made once, no rule is unused, and undoing
a rule restores the original shapes. A converter that silently skipped a key would produce a broken model.

Sizes in rules are arithmetic expressions over the numbers of a config.json:

    "heads * head_dim"      names are [let] entries or keys of the config
    "text_config.heads"     a key of a table in the config
    "a ?? b / c"            the value of the first alternative whose names all exist

Only numbers, names, + - * / // and brackets are allowed. The result must be a whole number.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import Any

from vescale_fsdp.conversion.engine.stored_tensor import TensorInfo
from vescale_fsdp.conversion.engine.tensor_view import RenamedView, TensorView, ZerosView
from vescale_fsdp.conversion.rules.operations import Bundle, Cast, Node, Trim
from vescale_fsdp.conversion.rules.rule_file import Drop, KeyRule, Pattern, RuleSet, shipped_rules
from vescale_fsdp.errors import ConversionError, option, some

# (capture, value) pairs, which identify a group of keys that a rule matches.
Key = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Applied:
    """The result of `apply_rules`.

    Args:
        views: the new tensors by new name.
        origins: new name -> the old names that it was made from; tensors of zeros have none.
        aliases: new names of tied weights that hf does not store. They have no optimizer state: a tied parameter has
            one state, under the new name of the weight that hf stores.
        dropped: names that [[drop]] matched.
        warnings: messages about names that were dropped and padding that was removed.
    """

    views: dict[str, TensorView]
    origins: dict[str, tuple[str, ...]]
    aliases: frozenset[str]
    dropped: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def made_from(self, names: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield (new parameter, its first origin) for each first origin in ``names``."""
        for origin, fqns in self.by_first_origin.items():
            if origin in names:
                yield from ((fqn, origin) for fqn in fqns)

    @cached_property
    def by_first_origin(self) -> Mapping[str, Sequence[str]]:
        """First origin -> the new parameters that are made from it; without aliases and zeros."""
        by_origin: dict[str, list[str]] = {}
        for fqn, origins in self.origins.items():
            if fqn not in self.aliases and origins:
                by_origin.setdefault(origins[0], []).append(fqn)
        return by_origin


def apply_rules(
    rules: RuleSet,
    views: Mapping[str, TensorView],
    config: Mapping[str, Any],
    *,
    to_hf: bool,
    partial: bool = False,
) -> Applied:
    """Convert tensors between Hugging Face's names and layouts ("hf") and another framework's ("ours").

    Args:
        rules: the rules.
        views: all tensors of the model, by their names before the rules.
        config: the model's config.json.
        to_hf: whether to convert from ours to hf; otherwise from hf to ours.
        partial: whether rules may match nothing (optimizer state need not exist for every parameter).

    Raises:
        ConversionError: if the rules do not fit the tensors; one error lists all problems.
    """
    return _Application(rules, views, config, to_hf, partial).run()


@dataclass
class _Application:
    """One call of `apply_rules`: its arguments and its state."""

    rules: RuleSet
    views: Mapping[str, TensorView]
    config: Mapping[str, Any]
    to_hf: bool
    partial: bool
    _used: dict[str, KeyRule] = field(default_factory=dict)  # source key -> the rule that matches it
    _results: dict[str, TensorView] = field(default_factory=dict)
    _origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _made_by: dict[str, KeyRule] = field(default_factory=dict)  # result -> its rule
    _aliases: set[str] = field(default_factory=set)
    _unmatched: list[str] = field(default_factory=list)  # patterns of rules that match no key
    _worded: str | None = None  # a key that a pattern without match has words for, where it needs numbers
    _errors: list[ConversionError] = field(default_factory=list)
    _kept: frozenset[str] = frozenset()  # source keys that are not dropped
    _trimmed: list[str] = field(default_factory=list)  # warnings about removed padding

    def run(self) -> Applied:
        self._collect_errors(self._refuse)
        zeros = tuple(Drop(zeros.ours) for zeros in self.rules.zeros)  # hf lacks these tensors
        drops = (*self.rules.drops_ours, *zeros) if self.to_hf else self.rules.drops_hf
        by_drop = [drop.among(self.views, self._size) for drop in drops]
        matched = set(chain.from_iterable(by_drop))
        dropped = tuple(name for name in self.views if name in matched)
        names = [name for name in self.views if name not in matched]
        self._kept = frozenset(names)
        for rule in self.rules.rules:
            self._collect_errors(lambda rule=rule: self._apply(rule, names))  # type: ignore[misc]
        unused = [name for name in names if name not in self._used]
        if self.rules.keep_others:
            self._rename(unused)
        elif self._is_reversed(unused):
            # Alone, since every rule and every key would be an error too.
            side = "names of Hugging Face" if not self.to_hf else "our names"
            way = "ours" if self.to_hf else "hf"
            todo = f"convert in the other direction: {option('rules_to', way)}"
            raise self._bad(side, f"names of the rules' other side: {some(_by_layer(unused))}", todo)
        elif unused:
            todo = f"add a rule or a [[drop]], or choose among {', '.join(shipped_rules())}"
            self._errors.append(self._bad("rules for every key", f"none for {some(_by_layer(unused))}", todo))
        if self._unmatched:
            todo = "remove the rule or mark it optional = true; if the source is another model, use its rules"
            if self._worded is not None:
                todo = (
                    f"a placeholder stands for a number: write one rule for each name, such as {self._worded}"
                )
            got = f"nothing matches {some(self._unmatched)}"
            self._errors.append(self._bad("rules that match a key", got, todo))
        self._raise_errors()
        if not (self.to_hf or self.partial):  # neither hf nor optimizer state has these tensors
            self._add_zeros()
        warnings = tuple(
            f"{drop.warn}: dropped {some(names)}"
            for drop, names in zip(drops, by_drop, strict=True)
            if drop.warn and names
        )
        aliases = frozenset(self._aliases)
        return Applied(self._results, self._origins, aliases, dropped, (*warnings, *self._trimmed))

    def _is_reversed(self, unused: Sequence[str]) -> bool:
        """Whether the rules match no key, but would match one in the other direction."""
        others = [pattern for rule in self.rules.rules for pattern in (rule.hf if self.to_hf else rule.ours)]
        return not self._used and any(
            pattern.match(name) is not None for name in unused for pattern in others
        )

    def _collect_errors(self, work: Callable[[], None]) -> None:
        """Call ``work`` and keep its error, so that one message can list all errors of a rule set."""
        try:
            work()
        except ConversionError as error:
            self._errors.append(error)

    def _raise_errors(self) -> None:
        """Raise a single error unchanged, several as the ``problems`` of a new one."""
        if len(self._errors) < 2:
            for error in self._errors:
                raise error
            return
        got = f"{len(self._errors)} problems"
        error = self._bad("rules that fit the whole model", got, "follow the advice of each problem:")
        error.problems = tuple(self._errors)
        raise error from self._errors[0]

    def _rename(self, names: list[str]) -> None:
        """Add keys that no rule matches, with their prefixes replaced; keys without a known prefix are unchanged."""
        renamed = {name: self.rules.moved(name, to_hf=self.to_hf) for name in names}
        wrong = [name for name in names if self.rules.is_of_other_side(name, to_hf=self.to_hf)]
        if wrong:
            side = "our names" if self.to_hf else "names of Hugging Face"
            todo = f"use the rules of this model, or leave out {option('rules')} if it has the names you want"
            self._errors.append(self._bad(side, some(_by_layer(wrong)), todo))
            return
        for name, new in renamed.items():
            self._add(new, self.views[name], (name,))
        changes_none = all(name == new for name, new in renamed.items())  # no key has a known prefix
        if self.rules.prefixes and changes_none and not self.partial:
            prefixes = [pair[1 if self.to_hf else 0] for pair in self.rules.prefixes]
            self._unmatched.append(" or ".join(prefixes) + "*")

    def _refuse(self) -> None:
        """Raise an error for keys that a [[refuse]] matches."""
        for refusal in () if self.to_hf else self.rules.refusals:  # refusals name keys of hf
            if matches := [name for name in self.views if refusal.pattern.match(name) is not None]:
                raise self._bad(f"no {refusal.pattern.text}", some(_by_layer(matches)), refusal.todo)

    def _add_zeros(self) -> None:
        """Add the tensors of [[zeros]]."""
        for zeros in self.rules.zeros:
            for name in self.views:
                captures = zeros.beside.match(name)
                if captures is not None:
                    new = zeros.ours.fill(captures)
                    shape = tuple(self._size(size) for size in zeros.shape)
                    self._add(new, ZerosView(TensorInfo(new, shape, zeros.dtype)), ())

    def _apply(self, rule: KeyRule, names: list[str]) -> None:
        """Apply one rule to each group of keys that it matches."""
        sources = rule.ours if self.to_hf else rule.hf
        groups = self._groups(rule, sources, names)
        if not groups and not rule.optional and not self.partial:
            self._unmatched.append(sources[0].text)
            self._worded = self._worded or sources[0].like(names)
        # Layers with the same mistake have the same parts, with patterns in place of names.
        failed: dict[tuple[object, ...], list[tuple[Key, ConversionError]]] = {}
        for key, rows in groups.items():
            try:
                self._apply_to_group(rule, sources, dict(key), rows)
            except ConversionError as error:
                parts = (error.problem, error.expected, error.got, error.where, error.todo)
                general = tuple(_with_patterns(part, rule, dict(key)) for part in parts)
                failed.setdefault(general, []).append((key, error))
        place = self._where(rule)
        for (_, expected, got, where, todo), errors in failed.items():
            _, first = errors[0]
            if len(errors) > 1:
                first = first.with_parts(expected=expected, got=got, where=where, todo=todo)
            places = [str(first.where)] if first.where not in (None, place) else []  # such as a tensor
            if len(errors) > 1:
                places.append(f"{len(errors)} times: {_values(key for key, _ in errors)}")
            self._errors.append(first.with_parts(where=", ".join((*places, place))))

    def _groups(
        self, rule: KeyRule, sources: tuple[Pattern, ...], names: list[str]
    ) -> dict[Key, list[dict[int, str]]]:
        """Group the keys that a rule matches by the values of their captures.

        Returns:
            For each group one dict per source pattern: counted index -> key. The index is 0 if the rule counts nothing.
        """
        groups: dict[Key, list[dict[int, str]]] = {}
        over = rule.over_ours if self.to_hf else rule.over_hf
        for row, pattern in enumerate(sources):
            # A pattern without captures is one name: a file may have a rule for each of thousands of names.
            for name in names if pattern.names else [pattern.text] * (pattern.text in self._kept):
                captures = pattern.match(name)
                if captures is None:
                    continue
                if name in self._used:
                    both = f"{self._used[name].text} and {rule.text}"
                    todo = "remove one of the two rules, or make the patterns distinct"
                    raise self._bad("one rule for each key", f"two for {name}: {both}", todo, rule)
                self._used[name] = rule
                index = captures.pop(over, 0) if over else 0
                # Sorted: the patterns of a rule may have their captures in different orders.
                rows = groups.setdefault(tuple(sorted(captures.items())), [{} for _ in sources])
                rows[row][index] = name
        # If hf does not store a tied weight, the rule is applied to the weight that hf stores.
        may_tie = not (groups or self.to_hf or self.partial) and rule.tie in self.views
        if may_tie and rule.tie is not None and self.config.get("tie_word_embeddings") is True:
            groups[()] = [{0: rule.tie}]
            self._aliases.update(pattern.text for pattern in rule.ours)
        return groups

    def _apply_to_group(
        self,
        rule: KeyRule,
        sources: tuple[Pattern, ...],
        captures: dict[str, int],
        rows: list[dict[int, str]],
    ) -> None:
        """Make the results of one rule from one group of keys.

        Args:
            captures: the values that all keys of the group share.
            rows: for each source pattern, counted index -> key.
        """
        # None: the tensors of this side are stacked already, or never.
        counted, over = (rule.over_ours, rule.over_hf) if self.to_hf else (rule.over_hf, rule.over_ours)
        for pattern, row in zip(sources, rows, strict=True):
            if not row or sorted(row) != list(range(len(row))):  # the indices must be 0, 1, 2, ..
                # Up to the largest index of any pattern, since all patterns must have the same number of tensors.
                indices = range(1 + max(index for each in rows for index in each))
                absent = [
                    pattern.fill({**captures, counted: index} if counted else captures)
                    for index in indices
                    if index not in row
                ]
                present = [name for each in rows for name in each.values()]
                raise self._bad(
                    f"all tensors of {pattern.text}",
                    f"only {some(present)}, not {some(absent)}",
                    "the source is not complete, or the pattern of the rule is wrong",
                    rule,
                )
        bundle: Bundle = [
            [self.views[row[i]] for i in sorted(row)] if counted else self.views[row[0]] for row in rows
        ]
        results = self._run_ops(rule, bundle, to_hf=self.to_hf)
        if not self._is_trimmed(rule, bundle, results):  # a removal of padding has no inverse
            self._check_inverse(rule, bundle, results)
        origins = tuple(name for row in rows for _, name in sorted(row.items()))
        targets = rule.hf if self.to_hf else rule.ours
        if len(results) != len(targets):
            raise self._bad(
                f"{len(targets)} results", f"{len(results)} from {some(origins)}", "correct the ops", rule
            )
        for pattern, node in zip(targets, results, strict=True):
            for index, view in enumerate(node) if isinstance(node, list) else [(0, node)]:
                counts = {over: index} if over is not None else {}
                self._add(pattern.fill({**captures, **counts}), view, origins, rule)

    def _run_ops(self, rule: KeyRule, bundle: Bundle, *, to_hf: bool) -> Bundle:
        """Apply a rule's operations to a bundle in hf's layout; with ``to_hf``, their inverses to a bundle in ours."""
        for op in reversed(rule.ops) if to_hf else rule.ops:  # inverses, in reverse order
            if self.partial and isinstance(op, Cast):
                continue  # moments keep the dtype that the optimizer chose
            bundle = (op.backward if to_hf else op.forward)(bundle, self._size)
        return bundle

    def _size(self, text: str | int) -> int:
        """Compute the value of a size expression in the rules."""
        return evaluate(text, self.rules.lets, self.config)

    def _check_inverse(self, rule: KeyRule, bundle: Bundle, results: Bundle) -> None:
        """Check that undoing a rule restores the shapes of ``bundle``."""
        again = self._run_ops(rule, results, to_hf=not self.to_hf)
        before, after = _shapes(bundle), _shapes(again)
        if before != after:
            expected = f"shapes {before} after undoing the rule"
            raise self._bad(expected, after, "correct the sizes in the rule", rule)

    def _is_trimmed(self, rule: KeyRule, bundle: Bundle, results: Bundle) -> bool:
        """Whether a rule removed padding, which cannot be undone; adds a warning if so."""
        before, after = _shapes(bundle), _shapes(results)
        is_trimmed = self.to_hf and any(isinstance(op, Trim) for op in rule.ops) and before != after
        if is_trimmed and not self.partial:
            names = " and ".join(view.info.name for view in bundle)
            self._trimmed.append(f"{names}: padding removed, from shape {before[0]} to {after[0]}")
        return is_trimmed

    def _add(
        self, name: str, view: TensorView, origins: tuple[str, ...], rule: KeyRule | None = None
    ) -> None:
        if name in self._results:
            made = ((self._origins.get(name), self._made_by.get(name)), (origins, rule))
            first, second = (
                (some(names) if names else "zeros") + (f" ({by.text})" if by else "") for names, by in made
            )
            got = f"{name} made twice, from {first} and from {second}"
            todo = "remove one of the two rules, or give their patterns different names"
            raise self._bad("each result made once", got, todo, rule)
        if rule is not None:
            self._made_by[name] = rule
        self._results[name] = RenamedView(view, name)
        if origins:
            self._origins[name] = origins

    def _bad(self, expected: str, got: object, todo: str, rule: KeyRule | None = None) -> ConversionError:
        return ConversionError(
            "The key rules do not fit the source.",
            expected=expected,
            got=got,
            where=self._where(rule),
            todo=todo,
        )

    def _where(self, rule: KeyRule | None) -> str:
        """Return the place of an error: the rule or the file, and the direction."""
        place = (rule and rule.where) or self.rules.name
        return f"{place}, {'to' if self.to_hf else 'from'} Hugging Face"


def _with_patterns(part: object, rule: KeyRule, captures: Mapping[str, int]) -> object:
    """Return a part of an error with patterns in place of one group's names: ``a.{l}.q`` for ``a.3.q``."""
    if not isinstance(part, str):
        return part

    def pattern_of(word: re.Match[str]) -> str:
        keys = word[0].split(".")
        for start in range(len(keys)):  # behind the model's prefix, if there is one
            name = ".".join(keys[start:])
            for pattern in (*rule.hf, *rule.ours):
                found = pattern.match(name)
                if found is not None and found.items() >= captures.items():  # else another group's name
                    filled = pattern.fill({**found, **{each: f"{{{each}}}" for each in captures}})
                    return ".".join((*keys[:start], filled))
        return word[0]

    return re.sub(r"[^\s,:;'\"()\[\]]+", pattern_of, part)


def _values(keys: Iterable[Key]) -> str:
    """Return the captures' values of several groups, as a range or the first few.

    >>> _values([(("l", 1),), (("l", 0),)]), _values([(("l", 1),), (("l", 3),)])
    ('l=0 to 1', 'l=1, l=3')
    """
    ordered = sorted(keys)
    (name, first), *inner = ordered[0]
    last = first + len(ordered) - 1
    if not inner and ordered[-1] == ((name, last),):  # no two groups have one value
        return f"{name}={first} to {last}"
    return some(" ".join(f"{name}={value}" for name, value in key) for key in ordered)


def _by_layer(names: Iterable[str]) -> list[str]:
    """Return names with one text for those that differ only in numbers.

    >>> _by_layer(["a.0.q", "b", "a.1.q"])
    ['a.*.q (2 names, such as a.0.q)', 'b']
    """
    forms: dict[str, list[str]] = {}
    for name in names:
        forms.setdefault(re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name), []).append(name)
    return [
        f"{form} ({len(each)} names, such as {each[0]})" if len(each) > 1 else each[0]
        for form, each in forms.items()
    ]


def _shapes(node: Node) -> Any:
    """Return the node with a shape in place of each tensor."""
    return [_shapes(item) for item in node] if isinstance(node, list) else node.info.shape


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),  # // of Fractions returns an int
}


_MAX_DEPTH = 20  # maximum nesting of [let] entries; deeper nesting is taken for a cycle


class _MissingName(Exception):
    """A name that is neither in [let] nor in the config."""


def evaluate(text: str | int, lets: Mapping[str, str], config: Mapping[str, Any]) -> int:
    """Compute the value of a size expression.

    Raises:
        ConversionError: if the text is not an expression, a name is missing, or the value is not a whole number >= 0.
    """
    try:
        value = _first(str(text), lets, config, depth=0)
    except (SyntaxError, ZeroDivisionError, _MissingName) as error:
        # lstrip: `_MissingName` is shown without its underscore.
        raise _bad(text, f"{type(error).__name__.lstrip('_')}: {error}") from error
    if value.denominator != 1 or value < 0:
        raise _bad(text, str(value))
    return int(value)


def _bad(text: str | int, got: str) -> ConversionError:
    return ConversionError(
        "A size in the key rules cannot be computed.",
        expected="numbers, + - * /, and names that are in [let] or in config.json",
        got=f"{text!r}: {got}",
        todo=f"pass the model's config.json with {option('config')}, or correct the rule",
    )


def _first(text: str, lets: Mapping[str, str], config: Mapping[str, Any], *, depth: int) -> Fraction:
    """Compute the first alternative (separated by ``??``) whose names all exist."""
    if depth > _MAX_DEPTH:
        raise _MissingName(f"{text} is defined by itself")
    alternatives = text.split("??")
    for number, alternative in enumerate(alternatives):
        try:
            # Parsed, never evaluated by Python: rule files may come from anyone.
            return _value(ast.parse(alternative.strip(), mode="eval").body, lets, config, depth)
        except _MissingName:
            if number == len(alternatives) - 1:
                raise
    raise AssertionError("split never gives an empty list")


def _setting(node: ast.expr, config: Mapping[str, Any]) -> Any:
    """Return the config's value of a dotted name, such as ``text_config.hidden_size``; None if there is none."""
    if isinstance(node, ast.Attribute):
        table = _setting(node.value, config)
        return table.get(node.attr) if isinstance(table, Mapping) else None
    if isinstance(node, ast.Name):
        return config.get(node.id)
    raise SyntaxError(f"{ast.unparse(node)} is not allowed")


def _value(node: ast.expr, lets: Mapping[str, str], config: Mapping[str, Any], depth: int) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)  # exact, so that `evaluate` can refuse a quotient that is no whole number
    if isinstance(node, ast.Name) and node.id in lets:
        return _first(str(lets[node.id]), lets, config, depth=depth + 1)
    if isinstance(node, ast.Name | ast.Attribute):
        setting = _setting(node, config)
        if not isinstance(setting, int) or isinstance(setting, bool):  # bool is a subclass of int
            shown = "a table" if isinstance(setting, Mapping) else f"{setting!r}"
            raise _MissingName(f"{ast.unparse(node)} is {shown}")
        return Fraction(setting)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = (_value(side, lets, config, depth) for side in (node.left, node.right))
        return _OPERATORS[type(node.op)](left, right)
    raise SyntaxError(f"{ast.unparse(node)} is not allowed")
