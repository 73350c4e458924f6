"""Suggest a rule file for a checkpoint (ours) whose tensors have other names than those of a model (hf).

Only names and shapes are compared. Names that differ in numbers only are one *family*. Two families are a pair if their
numbers, their shapes and the words of their names (`name_words`) agree, and no other family has the same; several are
joined if their words are in the name of a larger one. What is not certain is printed as a comment, with the candidates.

Families are looked up by words, numbers and shape, so the time grows with the number of tensors, not with its square.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from vescale_fsdp.conversion.engine.tensor_view import TensorView
from vescale_fsdp.conversion.rules.apply_to_tensors import apply_rules
from vescale_fsdp.conversion.rules.name_words import ROLES, plain_words, similarity, words_of
from vescale_fsdp.conversion.rules.rule_file import Pattern, RuleSet, load_rules, shipped_rules
from vescale_fsdp.errors import ConversionError, some
from vescale_fsdp.layout.model_shapes import natural_key

Shape = tuple[int, ...]
Index = tuple[int, ...]
_LETTERS = "lemnijk"  # names of captures, from the left
_MOST_LISTED = 60  # families that the comments list
_MOST_COMPARED = 50  # families that are compared with one of them
_MOST_CANDIDATES = 6
_META_ROTARY = frozenset(("wq", "wk"))  # names of Meta's Llama, whose rotary embedding rotates pairs of rows
_PLAIN = ("qkv_proj", "qkv")  # modules that have all rows of q first, then those of k, then those of v
_HEADER = """\
# Suggested from names and shapes: hf has the names of MODEL, ours those of SRC. Values were not compared, so compare
# the outputs of both models before you rely on the result of
#   vescale-convert to-hf SRC OUT --rules THIS_FILE --assets MODEL
format = 1
"""


@dataclass(frozen=True)
class NamedShapes:
    """The tensors of MODEL.

    Args:
        shapes: name -> shape, including names that files omit because their tensor is tied.
        ties: alias -> stored name of the same tensor.
        config: the config.json; empty without one.
    """

    shapes: Mapping[str, Shape]
    ties: Mapping[str, str]
    config: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class NameFamily:
    """Tensors of one shape whose names differ only in numbers.

    Args:
        parts: the parts of the names between dots; None in place of numbers.
        indices: the numbers of each name, sorted; of a stack, without the counted number.
        shape: the shape; of a stack, with the new dim 0.
        counted: which of the numbers a stack counts over; None without a stack.
        base: the family whose tensors are stacked; None without a stack.
    """

    parts: tuple[str | None, ...]
    indices: tuple[Index, ...]
    shape: Shape
    counted: int | None = None
    base: NameFamily | None = None

    @cached_property
    def text(self) -> str:
        """The pattern of the names."""
        letters = [_letter(place) for place in range(self.parts.count(None))]
        if (
            self.counted is not None
        ):  # the other numbers have the letters that they have in a name without this one
            letters.insert(self.counted, letters.pop())
        left = iter(letters)
        return ".".join(f"{{{next(left)}}}" if part is None else part for part in self.parts)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words of the names, in the common spelling."""
        return words_of(self.text)

    @property
    def plain(self) -> NameFamily:
        """The family itself, or the one that is stacked."""
        return self.base or self


@dataclass(frozen=True)
class _Suggestion:
    """A suggested rule.

    Args:
        hf, ours: the families of both sides.
        ops: the operations; of a doubtful rule, all lists of operations that would fit.
        comment: a reason for doubt, or for care; None if there is none.
    """

    hf: tuple[NameFamily, ...]
    ours: tuple[NameFamily, ...]
    ops: tuple[str, ...] = ("",)
    comment: str | None = None


def suggest_rules(views: Mapping[str, TensorView], model: NamedShapes) -> str:
    """Return the text of a rule file from the names of ``views`` (ours) to those of ``model`` (hf).

    Args:
        views: the tensors of the checkpoint, by name.
        model: the names and shapes that the rules should make.
    """
    shapes = {name: view.info.shape for name, view in views.items()}
    stored = {name: tuple(shape) for name, shape in model.shapes.items() if name not in model.ties}
    if shapes.items() <= model.shapes.items() and stored.keys() <= shapes.keys():
        return f"# The names are the same, except for those that wrappers add.\n{_HEADER}keep_others = true\n"
    if (prefix := _prefix(shapes, stored)) is not None:
        of_hf, of_ours = map(_quoted, prefix)
        return f"{_HEADER}keep_others = true\n\n[[prefix]]\nhf = {of_hf}\nours = {of_ours}\n"
    fitting = _shipped_that_fit(views, model)
    if len(fitting) == 1:
        return f"{_HEADER}extends = {_quoted(fitting[0])} # these rules make all {len(stored)} tensors of MODEL\n"
    hf, hf_odd = _families(model.shapes)
    ours, ours_odd = _families(shapes)
    pairing = _Pairing(dict.fromkeys(hf), dict.fromkeys(ours), model)
    pairing.run()
    texts = [
        _HEADER,
        *(f"# These shipped rules fit, with different results: {', '.join(fitting)}\n" for _ in fitting[:1]),
    ]
    order = {family: place for place, family in enumerate(hf)}
    texts += [
        _table(each, each.ops[0], model.ties)
        for each in sorted(pairing.certain, key=lambda each: order[each.hf[0].plain])
    ]
    return "\n".join([*texts, *_comments(pairing, (*hf_odd, *ours_odd))])


def _letter(place: int) -> str:
    return _LETTERS[place] if place < len(_LETTERS) else f"n{place}"


def _quoted(text: str) -> str:
    """Return a string of TOML."""
    return json.dumps(text, ensure_ascii=False)


def _prefix(ours: Mapping[str, Shape], hf: Mapping[str, Shape]) -> tuple[str, str] | None:
    """Return the prefixes of (hf, ours) if all names differ by the prefix of one side; None otherwise."""
    if len(ours) != len(hf) or not hf:
        return None
    for longer, shorter, is_hf in ((hf, ours, True), (ours, hf, False)):
        prefix = min(longer)[: len(min(longer)) - len(min(shorter))]
        renamed = {f"{prefix}{name}": tuple(shape) for name, shape in shorter.items()}
        # A name of the other side that begins with the prefix would be taken for one of this side.
        if (
            prefix.isprintable()
            and renamed == longer
            and not any(name.startswith(prefix) for name in shorter)
        ):
            return (prefix, "") if is_hf else ("", prefix)
    return None


def _shipped_that_fit(views: Mapping[str, TensorView], model: NamedShapes) -> list[str]:
    """Return the names of shipped rules that make MODEL's tensors; of several with one result, only the first."""
    fitting: dict[str, Mapping[str, TensorView]] = {}
    kinds = {_kind(name) for name in views}
    for name in shipped_rules():
        rules = load_rules(name)
        if kinds <= {_kind(pattern.text) for pattern in _patterns_of_ours(rules)}:
            made = _made(rules, views, model)
            if made is not None and made not in fitting.values():
                fitting[name] = made
    return list(fitting)


def _kind(text: str) -> tuple[str | None, ...]:
    """Return the parts of a name or pattern, with None in place of numbers and captures."""
    return tuple(None if _is_number(part) or part.startswith("{") else part for part in text.split("."))


def _patterns_of_ours(rules: RuleSet) -> Iterator[Pattern]:
    for rule in rules.rules:
        yield from rule.ours
    yield from (drop.pattern for drop in rules.drops_ours)
    yield from (zeros.ours for zeros in rules.zeros)


def _made(
    rules: RuleSet, views: Mapping[str, TensorView], model: NamedShapes
) -> Mapping[str, TensorView] | None:
    """Apply shipped rules; returns the tensors of MODEL, or None if they do not make all of these or make others."""
    try:
        made = apply_rules(rules, views, model.config, to_hf=True).views
    except ConversionError:  # that the rules do not fit is an answer here
        return None
    may_be_tied = {
        pattern.text for rule in rules.rules if rule.tie for pattern in rule.hf
    } | model.ties.keys()
    shapes = {name: view.info.shape for name, view in made.items()}
    expected = {name: tuple(shape) for name, shape in model.shapes.items()}
    is_complete = expected.keys() - model.ties.keys() <= shapes.keys()
    has_others = shapes.keys() - expected.keys() - may_be_tied
    agree = all(expected.get(name, shape) == shape for name, shape in shapes.items())
    return made if is_complete and agree and not has_others else None


def _families(shapes: Mapping[str, Shape]) -> tuple[list[NameFamily], list[str]]:
    """Group names that differ only in numbers and have one shape.

    Numbers by which shapes differ (``mlp.0``, ``mlp.2``) stay in the names, the last number first.

    Returns:
        The families in the natural order of their patterns, and the names that patterns cannot contain.
    """
    groups: dict[tuple[str | None, ...], dict[Index, Shape]] = defaultdict(dict)
    odd = []
    for name, shape in shapes.items():
        if not name.isprintable() or any(character in name for character in "{}*"):
            odd.append(name)
            continue
        numbers = tuple(int(part) for part in name.split(".") if _is_number(part))
        groups[tuple(None if _is_number(part) else part for part in name.split("."))][numbers] = tuple(shape)
    families = [family for parts, members in groups.items() for family in _of_one_shape(parts, members)]
    return sorted(families, key=lambda family: natural_key(family.text)), sorted(odd)


def _is_number(part: str) -> bool:
    """Whether a capture matches this part of a name."""
    # isascii: the digits of other scripts are decimal digits too. Longer numbers are not those of layers.
    return part.isascii() and part.isdecimal() and (part == "0" or part[0] != "0") and len(part) < 10


def _of_one_shape(parts: tuple[str | None, ...], members: Mapping[Index, Shape]) -> Iterator[NameFamily]:
    if len(set(members.values())) == 1:
        yield NameFamily(parts, tuple(sorted(members)), next(iter(members.values())))
        return
    last = len(parts) - 1 - parts[::-1].index(None)
    by_number: dict[int, dict[Index, Shape]] = defaultdict(dict)
    for index, shape in members.items():
        by_number[index[-1]][index[:-1]] = shape
    for number, inner in by_number.items():
        yield from _of_one_shape((*parts[:last], str(number), *parts[last + 1 :]), inner)


def _stacks(family: NameFamily) -> Iterator[NameFamily]:
    """Yield the stacks over each number that counts from 0, equally far for all values of the other numbers."""
    for place in range(len(family.indices[0])):
        by_rest: dict[Index, list[int]] = defaultdict(list)
        for index in family.indices:
            by_rest[(*index[:place], *index[place + 1 :])].append(index[place])
        count = len(family.indices) // len(by_rest)
        if count > 1 and all(sorted(numbers) == list(range(count)) for numbers in by_rest.values()):
            yield NameFamily(family.parts, tuple(sorted(by_rest)), (count, *family.shape), place, family)


def _joined_dim(pieces: Sequence[Shape], whole: Shape) -> int | None:
    """Return the dim along which tensors of these shapes become one of shape ``whole``; None if there is none."""
    for dim in range(len(whole)):
        rest = (*whole[:dim], *whole[dim + 1 :])
        if all(len(each) == len(whole) and (*each[:dim], *each[dim + 1 :]) == rest for each in pieces):
            return dim if sum(each[dim] for each in pieces) == whole[dim] else None
    return None


Table = Mapping[tuple[tuple[str, ...], tuple[Index, ...]], Sequence[NameFamily]]
"""(sorted words, numbers) -> families and stacks of families."""


@dataclass
class _Pairing:
    """The search for pairs.

    Args:
        hf, ours: the families without a pair; ordered sets.
        model: the tensors of MODEL.
    """

    hf: dict[NameFamily, None]
    ours: dict[NameFamily, None]
    model: NamedShapes
    certain: list[_Suggestion] = field(default_factory=list)
    doubtful: list[_Suggestion] = field(default_factory=list)

    def run(self) -> None:
        """Pair what is certain, from the same names to the same words; then join; then pair what only one shape has."""
        self._pair(lambda family: family.parts)
        self._pair(lambda family: plain_words(family.text))
        self._pair(_sorted_words)
        self._pair(_sorted_words, is_transposed=True)
        for of_hf in (True, False):
            self._join(of_hf=of_hf)
        self._pair(lambda family: family.text not in self.model.ties, by_shape=True)
        self._doubt_squares()

    def _pair(
        self, key: Callable[[NameFamily], Hashable], *, is_transposed: bool = False, by_shape: bool = False
    ) -> None:
        """Pair families that are the only ones of both sides with their key, numbers and shape.

        Args:
            is_transposed: pair matrices whose shapes are each other's reverse.
            by_shape: the key says nothing about the names.
        """
        left, right = (
            self._grouped(side, key, is_turned=is_turned, is_matrix=is_transposed)
            for side, is_turned in ((self.hf, False), (self.ours, is_transposed))
        )
        comment = "by numbers and shape alone, which no other tensors have" if by_shape else None
        for found, families in left.items():
            if len(families) == len(right.get(found, ())) == 1:
                pair = (families[0], right[found][0])
                roles = [ROLES.intersection(family.words) for family in pair]
                # Names of different roles are not a pair, even if no other tensor has the shape.
                if not by_shape or not all(roles) or roles[0] == roles[1]:
                    ops = "{ transpose = [1, 0] }" if is_transposed else ""
                    self._take_pair(*pair, ops, comment)

    def _take_pair(self, hf: NameFamily, ours: NameFamily, ops: str, comment: str | None) -> None:
        """Add the rule of a pair; a doubtful one if the rows of rotary heads may have another order."""
        is_rotary = [not _META_ROTARY.isdisjoint(plain_words(family.text)) for family in (hf, ours)]
        if is_rotary[0] == is_rotary[1]:
            self._take(_Suggestion((hf,), (ours,), (ops,), comment), self.certain)
            return
        field = "num_attention_heads" if "q" in hf.words else "num_key_value_heads ?? num_attention_heads"
        rope = f"{{ rope = {{ heads = {_quoted(field)} }} }}"
        comment = "Meta's names: rows of each head may be in pairs (rope) instead of halves"
        self._take(
            _Suggestion((hf,), (ours,), (", ".join(filter(None, (ops, rope))), ops), comment), self.doubtful
        )

    def _grouped(
        self,
        side: Iterable[NameFamily],
        key: Callable[[NameFamily], Hashable],
        *,
        is_turned: bool,
        is_matrix: bool,
    ) -> dict[Hashable, list[NameFamily]]:
        groups: dict[Hashable, list[NameFamily]] = defaultdict(list)
        for family in side:
            found, shape = key(family), family.shape[::-1] if is_turned else family.shape
            if found and (not is_matrix or len(shape) == 2):  # no words: nothing to compare
                groups[found, family.indices, shape].append(family)
        return groups

    def _take(self, suggestion: _Suggestion, to: list[_Suggestion]) -> None:
        to.append(suggestion)
        for family in suggestion.hf:
            self.hf.pop(family.plain)
        for family in suggestion.ours:
            self.ours.pop(family.plain)

    def _join(self, *, of_hf: bool) -> None:
        """Find tensors of one side that consist of several tensors of the other side.

        Args:
            of_hf: whether the several tensors are hf's; otherwise ours.
        """
        pieces, wholes = (self.hf, self.ours) if of_hf else (self.ours, self.hf)
        table: dict[tuple[tuple[str, ...], tuple[Index, ...]], list[NameFamily]] = defaultdict(list)
        for family in pieces:
            for each in (family, *_stacks(family)):
                table[_sorted_words(family), each.indices].append(each)
        found = {whole: list(_consists_of(whole, table)) for whole in wholes}
        uses = Counter(piece.plain for options in found.values() for option in options for piece in option)
        for whole, options in found.items():
            if len(options) == 1 and all(uses[piece.plain] == 1 for piece in options[0]):
                self._take_joined(whole, options[0], of_hf=of_hf)

    def _take_joined(self, whole: NameFamily, pieces: tuple[NameFamily, ...], *, of_hf: bool) -> None:
        """Add the rule of a joined tensor; a doubtful one if its shape and name leave several orders of its items."""
        stack = ""
        if pieces[0].base is not None:
            over = _letter(pieces[0].parts.count(None) - 1)
            kind = "stack" if of_hf else "unstack"
            stack = f'{{ {kind} = {{ over = "{over}", dim = 0, count = {pieces[0].shape[0]} }} }}'
        joins, comment = [""], None
        if len(pieces) > 1:
            joins, comment = self._joins(whole, pieces, "concat" if of_hf else "split")
        if pieces[0].base is not None and pieces[0].shape[0] in pieces[0].shape[1:]:
            comment = f"which dim of {whole.shape} counts the tensors is not certain"
        # Joined after stacking, and split before unstacking.
        steps = [(stack, join) if of_hf else (join, stack) for join in joins]
        ops = tuple(", ".join(filter(None, pair)) for pair in steps)
        hf, ours = (pieces, (whole,)) if of_hf else ((whole,), pieces)
        self._take(_Suggestion(hf, ours, ops, comment), self.certain if comment is None else self.doubtful)

    def _joins(
        self, whole: NameFamily, pieces: Sequence[NameFamily], kind: str
    ) -> tuple[list[str], str | None]:
        """Return the operations that would join the pieces, and the reason for doubt if there are several."""
        dim = _joined_dim([piece.shape for piece in pieces], whole.shape)
        sizes = [piece.shape[dim] for piece in pieces if dim is not None]
        joins = [f"{{ {kind} = {{ dim = {dim}, sizes = {sizes} }} }}"]
        module = next((part for part in reversed(whole.parts) if part not in (None, "weight", "bias")), None)
        if {"k", "v"} <= set(whole.words) and module not in _PLAIN:
            groups = _num_groups(self.model.config)
            if groups and all(size % groups == 0 for size in sizes):
                parts = [size // groups for size in sizes]
                joins.append(f"{{ {kind} = {{ dim = {dim}, sizes = {parts}, groups = {groups} }} }}")
            return (
                joins,
                "rows may be ordered by tensor, or by groups of heads (groups = number of k's heads)",
            )
        if {"gate", "up"} <= set(whole.words) and self.model.config.get("model_type") == "gpt_oss":
            return joins, "gpt-oss alternates columns of gate and up; see the shipped rules for it"
        return joins, None

    def _doubt_squares(self) -> None:
        """If some matrices are transposed, square ones may be too, which shapes cannot show."""
        if not any("transpose" in each.ops[0] for each in self.certain):
            return
        squares = [
            each
            for each in self.certain
            if len(each.hf) == len(each.ours) == 1
            and len(each.hf[0].shape) == 2
            and len(set(each.hf[0].shape)) == 1
        ]
        self.certain = [each for each in self.certain if each not in squares]
        reason = "other matrices are transposed, and the shape of this one cannot show whether it is"
        self.doubtful += [
            _Suggestion(each.hf, each.ours, ("", "{ transpose = [1, 0] }"), reason) for each in squares
        ]


def _sorted_words(family: NameFamily) -> tuple[str, ...]:
    return tuple(sorted(family.words))


def _consists_of(whole: NameFamily, table: Table) -> Iterator[tuple[NameFamily, ...]]:
    """Yield the families that ``whole`` may consist of: a stack, or families named by consecutive words of its name."""
    for stack in table.get((_sorted_words(whole), whole.indices), ()):
        if stack.base is not None and stack.shape == whole.shape:
            yield (stack,)
    words = whole.words
    for start in range(len(words)):
        for stop in range(start + 2, len(words) + 1):
            common = (*words[:start], *words[stop:])
            options = [
                table.get((tuple(sorted((*common, word))), whole.indices), ()) for word in words[start:stop]
            ]
            for is_stacked in (False, True):
                kept = [[each for each in row if (each.base is not None) == is_stacked] for row in options]
                if prod(map(len, kept)) == 1:
                    pieces = tuple(row[0] for row in kept)
                    if _joined_dim([piece.shape for piece in pieces], whole.shape) is not None:
                        yield pieces


def _num_groups(config: Mapping[str, Any]) -> int | None:
    """Return the number of heads of k and v; None if the config does not say."""
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    number = text.get("num_key_value_heads") or text.get("num_attention_heads")
    return number if isinstance(number, int) and number > 1 else None


def _table(suggestion: _Suggestion, ops: str, ties: Mapping[str, str]) -> str:
    """Return the [[rule]] of a suggestion, with a line end."""
    lines = ["[[rule]]" if suggestion.comment is None else f"[[rule]] # {suggestion.comment}"]
    for side, families in (("hf", suggestion.hf), ("ours", suggestion.ours)):
        texts = [_quoted(family.text) for family in families]
        lines.append(f"{side} = {texts[0]}" if len(texts) == 1 else f"{side} = [{', '.join(texts)}]")
    if ops:
        lines.append(f"ops = [{ops}]")
    alias = suggestion.hf[0].text
    if alias in ties:
        lines.append(f"tie = {_quoted(ties[alias])}\noptional = true")
    return "".join(f"{line}\n" for line in lines)


def _comments(pairing: _Pairing, odd: Sequence[str]) -> Iterator[str]:
    """Yield comments about what is not certain: doubtful rules, families without a pair, names without a pattern."""
    left = [family for family in pairing.hf if family.text not in pairing.model.ties]
    if pairing.doubtful or pairing.ours or left or odd:
        yield "# NOT COMPLETE. Decide about the following, then remove the # in front of the lines that apply.\n"
    for each in pairing.doubtful[:_MOST_LISTED]:
        others = "".join(f"# or: ops = [{ops}]\n" for ops in each.ops[1:])
        yield _commented(_table(each, each.ops[0], pairing.model.ties)) + others
    by_shape: dict[Hashable, list[NameFamily]] = defaultdict(list)
    for family in left:
        by_shape[family.indices, family.shape].append(family)
    named: set[NameFamily] = set()
    for family in [*pairing.ours][:_MOST_LISTED]:
        near = by_shape[family.indices, family.shape][:_MOST_COMPARED]
        candidates = heapq.nsmallest(
            _MOST_CANDIDATES, near, key=lambda each: (-similarity(each.words, family.words), each.text)
        )
        named.update(candidates)
        yield _commented(_open_table(family, candidates))
    yield from _listed("More tensors of SRC", [*pairing.ours][_MOST_LISTED:])
    doubtful = [family for each in pairing.doubtful[_MOST_LISTED:] for family in each.ours]
    yield from _listed("Doubtful, too", doubtful)
    yield from _listed("MODEL also has", [family for family in left if family not in named])
    if odd:
        yield f"# Names that a pattern cannot contain: {some(map(ascii, odd), _MOST_LISTED)}\n"


def _open_table(family: NameFamily, candidates: Sequence[NameFamily]) -> str:
    """Return the table of a family of ours for which the user must choose a family of hf, or none."""
    ours = f"ours = {_quoted(family.text)} # {_described(family)}"
    if not candidates:
        return f"[[drop]] # MODEL has no tensors with these numbers and this shape\n{ours}"
    choice = "" if len(candidates) == 1 else "one of "
    return f"[[rule]]\nhf = {choice}{', '.join(_quoted(each.text) for each in candidates)}\n{ours}"


def _listed(title: str, families: Sequence[NameFamily]) -> Iterator[str]:
    if families:
        lines = [f"{_quoted(each.text)}, {_described(each)}" for each in families[:_MOST_LISTED]]
        more = len(families) - len(lines)
        yield _commented("\n  ".join([f"{title}:", *lines, *([f"and {more} more"] if more else [])]))


def _described(family: NameFamily) -> str:
    return f"{len(family.plain.indices)} x {list(family.shape)}"


def _commented(text: str) -> str:
    return "".join(f"# {line}\n" for line in text.splitlines())
