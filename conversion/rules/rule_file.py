"""Key rules: files that describe how tensors of one framework become tensors of another.

A rule file is TOML: [let] has sizes, [[rule]] has rules, [[drop]] has keys to drop, and [[zeros]] has tensors of
zeros that only the other framework has. It is written once, from Hugging Face's names ("hf") to another framework's
("ours"), and used in both directions: every operation has an inverse.

    format = 1
    [let]
    kv = "num_key_value_heads ?? num_attention_heads"
    [[rule]]
    hf   = "model.layers.{l}.self_attn.k_proj.weight"
    ours = "layers.{l}.attention.wk.weight"
    ops  = [{ rope = { heads = "kv" } }]
    [[drop]]
    hf = "model.layers.{l}.self_attn.rotary_emb.inv_freq"
    [[drop]]
    hf = "model.layers.{l}.*"
    from = { l = "num_hidden_layers" }           # only keys whose {l} is at least this value
    warn = "modules for multi-token prediction"  # a warning says that these were dropped
    [[refuse]]
    hf = "*.weight_scale_inv"
    todo = "convert a copy in bf16"
    [[zeros]]
    ours  = "layers.{l}.moe.expert_bias_E"       # added for each hf key that matches "beside"; dropped on the way to hf
    beside = "model.layers.{l}.mlp.gate.weight"
    shape = ["num_experts"]
    dtype = "float32"

``{l}`` matches a whole number. ``*``, which only drops and refusals may contain, matches any text. A rule with
``optional = true`` may match nothing. With ``tie = "NAME"``, our tensor is made from hf's NAME if hf omits the tied
weight. A key that no rule matches is an error, unless the file contains ``keep_others = true``.

A file may extend a shipped one: ``extends = "torchtitan-llama"`` adds the rules of that file. A rule of this file
replaces all shipped rules that have one of its hf names, and [rename] changes our names in the shipped rules.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from itertools import chain
from typing import Any

from vescale_fsdp.checkpoint.storage.open import open_parent
from vescale_fsdp.conversion.rules.operations import Operation, StackCounted, UnstackCounted, parse_operation
from vescale_fsdp.errors import ConversionError, some
from vescale_fsdp.layout.dtypes import DType, dtype_from_torch

_FORMAT = 1
_CAPTURE = re.compile(r"\{(\w+)\}")  # ``{l}`` in a pattern


@dataclass(frozen=True)
class Pattern:
    """A pattern of names, such as ``layers.{l}.w``: ``{l}`` captures a whole number, ``*`` matches any text."""

    text: str

    def __post_init__(self) -> None:
        for name in self.names:
            if not name.isidentifier():  # a regular expression's group cannot have it
                raise _bad(
                    self.text, "captures named by letters, digits and _, no digit first", f"{{{name}}}"
                )

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the captures."""
        return frozenset(_CAPTURE.findall(self.text))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts = _CAPTURE.split(self.text)
        seen: set[str] = set()
        regex = ""
        for index, part in enumerate(parts):  # texts and names of captures alternate
            if index % 2 == 0:
                regex += ".*".join(map(re.escape, part.split("*")))
            else:
                # No leading zeros, so that `fill` restores the same name. A repeated capture must have one value.
                regex += f"(?P={part})" if part in seen else f"(?P<{part}>0|[1-9][0-9]*)"
                seen.add(part)
        return re.compile(regex)

    def match(self, name: str) -> dict[str, int] | None:
        """Return the value of each capture; None if the name does not match."""
        if not self.names and "*" not in self.text:  # a file may have thousands of names: compile none
            return {} if name == self.text else None
        match = self._regex.fullmatch(name)
        return {key: int(value) for key, value in match.groupdict().items()} if match else None

    def like(self, names: Iterable[str]) -> str | None:
        """Return this pattern for the first name with a word, without dots, in place of a capture; None without one.

        In it, captures that stand for words are replaced by these words.
        """
        parts = _CAPTURE.split(self.text)
        regex = re.compile(
            "".join(
                "([^.]+)" if i % 2 else ".*".join(map(re.escape, p.split("*"))) for i, p in enumerate(parts)
            )
        )
        for match in filter(None, map(regex.fullmatch, names)):
            words = [p if w.isdecimal() else w for p, w in zip(parts[1::2], match.groups(), strict=True)]
            if words != parts[1::2]:
                named = (w if w not in self.names else f"{{{w}}}" for w in words)
                return "".join(chain.from_iterable(zip(parts[::2], (*named, ""), strict=True)))
        return None

    def fill(self, captures: Mapping[str, object]) -> str:
        """Return the name that has these values in place of the captures."""
        return _CAPTURE.sub(lambda match: str(captures[match[1]]), self.text)


@dataclass(frozen=True)
class KeyRule:
    """One [[rule]]: tensors of hf become tensors of ours. All patterns of both sides must have the same captures.

    Args:
        hf: name patterns of the tensors in Hugging Face's layout.
        ours: name patterns of the tensors in the other layout.
        ops: the operations from hf to ours.
        optional: whether the rule may match no key.
        tie: the hf name to use if hf does not store the tied weight; None if hf always stores it.
        where: the rule's place in its file, for messages.
    """

    hf: tuple[Pattern, ...]
    ours: tuple[Pattern, ...]
    ops: tuple[Operation, ...] = ()
    optional: bool = False
    tie: str | None = None
    where: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # Both sides need the same captures, since `fill` makes the names of one side from the captures of the other.
        # A stack counts over one more capture, which all patterns of its side have.
        sides = ((self.hf, self.over_hf), (self.ours, self.over_ours))
        is_counted = all(over is None or over in p.names for side, over in sides for p in side)
        is_same = is_counted and len({p.names - {over} for side, over in sides for p in side}) == 1
        has_star = any("*" in p.text for p in (*self.hf, *self.ours))
        if not self.hf or not self.ours or not is_same or has_star:
            raise ConversionError(
                "The two sides of a rule do not match.",
                expected="the same captures on both sides, and one more where a stack or unstack counts over it; no *",
                got=f"{[p.text for p in self.hf]} and {[p.text for p in self.ours]}",
                where=self.where,
                todo="correct the rule",
            )

    @property
    def text(self) -> str:
        """The rule in one line, for messages."""
        hf, ours = (some((p.text for p in side), 3) for side in (self.hf, self.ours))
        return f"rule {hf} <-> {ours}"

    @cached_property
    def over_hf(self) -> str | None:
        """The capture that a ``stack`` operation counts over, which only hf patterns have; None without a stack."""
        return next((op.over for op in self.ops if isinstance(op, StackCounted)), None)

    @cached_property
    def over_ours(self) -> str | None:
        """The capture of an ``unstack`` operation, which only our patterns have; None without one."""
        return next((op.operation.over for op in self.ops if isinstance(op, UnstackCounted)), None)


@dataclass(frozen=True)
class Drop:
    """Keys that are dropped from the result.

    Args:
        pattern: the keys' name pattern.
        least: capture -> size expression; keys whose capture has a smaller value are not dropped.
        warn: a description of the keys for a warning; None for no warning.
    """

    pattern: Pattern
    least: Mapping[str, str | int] = field(default_factory=dict)
    warn: str | None = None

    def __post_init__(self) -> None:
        if not self.pattern.names.issuperset(self.least):
            expected = f"[[drop]] from = names in {self.pattern.text}"
            raise _bad(self.pattern.text, expected, ", ".join(self.least))

    def among(self, names: Iterable[str], size: Callable[[str | int], int]) -> list[str]:
        """Return those of ``names`` that are dropped.

        Args:
            size: evaluates a size expression; called only if a name matches, since the config may lack the size.
        """
        matches = [(name, captures) for name in names if (captures := self.pattern.match(name)) is not None]
        least = {key: size(text) for key, text in self.least.items()} if matches else {}
        return [name for name, captures in matches if all(captures[key] >= least[key] for key in least)]


@dataclass(frozen=True)
class Refusal:
    """Keys of hf that no rule can convert; an error refuses them, with ``todo`` as its advice."""

    pattern: Pattern
    todo: str


@dataclass(frozen=True)
class Zeros:
    """Tensors of zeros that only our side has: one for each key of hf that matches ``beside``."""

    ours: Pattern
    beside: Pattern
    shape: tuple[str | int, ...]
    dtype: DType


@dataclass(frozen=True)
class RuleSet:
    """All rules of one file, together with the rules of the file that it extends.

    Examples:
        >>> len(load_rules("torchtitan-llama").rules) > 5
        True
    """

    name: str
    lets: Mapping[str, str]
    rules: tuple[KeyRule, ...]
    drops_hf: tuple[Drop, ...] = field(default=())
    drops_ours: tuple[Drop, ...] = field(default=())
    refusals: tuple[Refusal, ...] = field(default=())
    zeros: tuple[Zeros, ...] = field(default=())
    keep_others: bool = False  # keys that no rule matches keep their names, except for their prefixes
    prefixes: tuple[tuple[str, str], ...] = field(default=())  # (hf's, ours)

    def moved(self, name: str, *, to_hf: bool) -> str:
        """Return the new name of a key that no rule matches: with the other side's prefix, or else unchanged."""
        for hf, ours in self.prefixes:
            old, new = (ours, hf) if to_hf else (hf, ours)
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    def is_of_other_side(self, name: str, *, to_hf: bool) -> bool:
        """Whether a key already has a prefix of the side that it would be converted to."""
        # The longest prefix decides: a prefix of one side may begin with a prefix of the other side.
        hf, ours = (
            max((len(pair[side]) for pair in self.prefixes if name.startswith(pair[side])), default=0)
            for side in (0, 1)
        )
        return hf > ours if to_hf else ours > hf

    def renamed(self, spellings: Mapping[str, str]) -> RuleSet:
        """Return the same rules with other names on our side.

        Args:
            spellings: name pattern on our side -> the pattern that replaces it.

        Raises:
            ConversionError: for a pattern that no rule has.
        """
        known = {p.text for r in self.rules for p in r.ours} | {d.pattern.text for d in self.drops_ours}
        known |= {zeros.ours.text for zeros in self.zeros}
        if unknown := set(spellings) - known:
            expected = f"names on our side of {self.name}, such as {min(known)}"
            raise _bad(f"[rename] over {self.name}", expected, ", ".join(sorted(unknown)))

        def spelled(patterns: tuple[Pattern, ...]) -> tuple[Pattern, ...]:
            return tuple(Pattern(spellings.get(p.text, p.text)) for p in patterns)

        return replace(
            self,
            rules=tuple(replace(rule, ours=spelled(rule.ours)) for rule in self.rules),
            drops_ours=tuple(replace(d, pattern=spelled((d.pattern,))[0]) for d in self.drops_ours),
            zeros=tuple(replace(z, ours=spelled((z.ours,))[0]) for z in self.zeros),
        )

    def extended_by(self, own: RuleSet) -> RuleSet:
        """Return these rules together with the rules of ``own``, the file that extends them.

        A rule of ``own`` replaces all rules here that share an hf name with it.
        """
        replaced = {pattern.text for rule in own.rules for pattern in rule.hf}
        kept = tuple(rule for rule in self.rules if not any(p.text in replaced for p in rule.hf))
        return RuleSet(
            own.name,
            {**self.lets, **own.lets},
            (*kept, *own.rules),
            (*self.drops_hf, *own.drops_hf),
            (*self.drops_ours, *own.drops_ours),
            (*self.refusals, *own.refusals),
            (*self.zeros, *own.zeros),
            self.keep_others or own.keep_others,
            (*own.prefixes, *self.prefixes),  # own first: `moved` uses the first prefix that matches
        )


def shipped_rules() -> tuple[str, ...]:
    """Return the names of the rule files that come with the package.

    Examples:
        >>> "torchtitan-llama" in shipped_rules()
        True
    """
    folder = resources.files("vescale_fsdp.conversion.rules.shipped")
    # endswith: the folder also contains __init__.py.
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def load_rules(name: str) -> RuleSet:
    """Load a rule set: a shipped one by its name, or a file or URL that ends in ``.toml``.

    Raises:
        ConversionError: if there is no such file, or it is not a valid rule file.

    Examples:
        >>> load_rules("torchtitan-llama").name
        'torchtitan-llama'
    """
    if name in shipped_rules():
        data = (resources.files("vescale_fsdp.conversion.rules.shipped") / f"{name}.toml").read_bytes()
    elif name.endswith(".toml"):
        store, file = open_parent(name)
        if store.size(file) is None:
            raise _bad(name, "a file of key rules", "no such file")
        data = store.read(file)
    else:
        raise _bad(name, f"a file ending in .toml, or one of {', '.join(shipped_rules())}", name)
    try:
        return _parse(name, tomllib.loads(data.decode()))
    # `_parse` reads the tables without checks: entries that are missing or have wrong types raise the last three.
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise _bad(name, "a rule file of format 1", f"{type(error).__name__}: {error}") from error


def _bad(name: str, expected: str, got: object) -> ConversionError:
    return ConversionError(
        "The key rules cannot be read.",
        expected=expected,
        got=got,
        where=name,
        todo="correct the file, or name a shipped set",
    )


def _parse(name: str, data: Mapping[str, Any]) -> RuleSet:
    """Make a rule set from the tables of a rule file."""
    if data.get("format") != _FORMAT:
        raise _bad(name, f"format = {_FORMAT}", data.get("format"))
    known = {"format", "extends", "rename", "let", "rule", "drop", "refuse", "zeros", "keep_others", "prefix"}
    if unknown := set(data) - known:
        raise _bad(name, f"the tables {', '.join(sorted(known))}", ", ".join(sorted(unknown)))
    drops = data.get("drop", ())
    own = RuleSet(
        name,
        {str(key): str(value) for key, value in data.get("let", {}).items()},
        tuple(_rule(name, number, rule) for number, rule in enumerate(data.get("rule", ()))),
        tuple(_drop(drop, "hf") for drop in drops if "hf" in drop),
        tuple(_drop(drop, "ours") for drop in drops if "ours" in drop),
        tuple(Refusal(Pattern(refuse["hf"]), str(refuse["todo"])) for refuse in data.get("refuse", ())),
        tuple(_zeros(zeros) for zeros in data.get("zeros", ())),
        bool(data.get("keep_others", False)),
        tuple((str(prefix["hf"]), str(prefix["ours"])) for prefix in data.get("prefix", ())),
    )
    if own.prefixes and not own.keep_others:
        raise _bad(name, "keep_others = true, since [[prefix]] applies to keys without a rule", "false")
    base = data.get("extends")
    if base is None and "rename" not in data:
        return own
    if base not in shipped_rules():
        raise _bad(name, f"extends = one of {', '.join(shipped_rules())}", base)
    return load_rules(base).renamed(data.get("rename", {})).extended_by(own)


def _drop(data: Mapping[str, Any], side: str) -> Drop:
    return Drop(Pattern(data[side]), dict(data.get("from", {})), data.get("warn"))


def _zeros(data: Mapping[str, Any]) -> Zeros:
    shape = tuple(data["shape"])
    return Zeros(Pattern(data["ours"]), Pattern(data["beside"]), shape, dtype_from_torch(data["dtype"]))


def _rule(name: str, number: int, data: Mapping[str, Any]) -> KeyRule:
    where = f"rule {number + 1} of {name}"
    if unknown := set(data) - {"hf", "ours", "ops", "optional", "tie"}:
        raise _bad(where, "hf, ours, ops, optional, tie", ", ".join(sorted(unknown)))
    ops = tuple(parse_operation(op, where=where) for op in data.get("ops", ()))
    optional, tie = bool(data.get("optional", False)), data.get("tie")
    return KeyRule(_patterns(data["hf"]), _patterns(data["ours"]), ops, optional, tie, where)


def _patterns(value: str | list[str]) -> tuple[Pattern, ...]:
    return tuple(Pattern(text) for text in ([value] if isinstance(value, str) else value))
