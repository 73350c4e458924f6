"""Key rules: files that describe how tensors of one framework become tensors of another.

A rule file is TOML with sizes in [let], rules in [[rule]], keys that may be left out in [[drop]] and keys that only the
other framework has in [[zeros]]. It is written once, from Hugging Face's names ("hf") to another framework's ("ours"),
and used in both directions: every operation has an inverse.

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
    from = { l = "num_hidden_layers" }           # only keys with {l} of at least this value
    warn = "modules for multi-token prediction"  # names the loss in a warning
    [[refuse]]
    hf = "*.weight_scale_inv"
    todo = "convert a copy in bf16"
    [[zeros]]
    ours  = "layers.{l}.moe.expert_bias_E"       # made for each match of "beside", dropped in the other direction
    beside = "model.layers.{l}.mlp.gate.weight"
    shape = ["num_experts"]
    dtype = "float32"

``{l}`` matches a whole number. ``*``, which only drops and refusals may contain, matches any text. A rule with
``optional = true`` may match nothing. With ``tie = "NAME"``, our tensor is made from hf's NAME if hf omits the tied
weight. Keys without a rule are an error, unless the file contains ``keep_others = true``.

A file may extend a shipped one: ``extends = "torchtitan-llama"`` adds the rules of that file, except rules whose hf
names have a rule in this file, and [rename] changes our names in that file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from typing import Any

from vescale_fsdp.checkpoint.storage.open import open_parent
from vescale_fsdp.conversion.rules.operations import Operation, StackCounted, parse_operation
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.layout.dtypes import DType, dtype_from_torch

_FORMAT = 1
_CAPTURE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Pattern:
    """A name with captures of whole numbers, such as ``layers.{l}.w``; ``*`` matches any text."""

    text: str

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
                # No leading zeros: `fill` must give the same name back.
                regex += f"(?P={part})" if part in seen else f"(?P<{part}>0|[1-9][0-9]*)"
                seen.add(part)
        return re.compile(regex)

    def match(self, name: str) -> dict[str, int] | None:
        """The captures of a name; None if it does not match."""
        match = self._regex.fullmatch(name)
        return {key: int(value) for key, value in match.groupdict().items()} if match else None

    def fill(self, captures: Mapping[str, int]) -> str:
        """The name with values in place of captures."""
        return _CAPTURE.sub(lambda match: str(captures[match[1]]), self.text)


@dataclass(frozen=True)
class KeyRule:
    """One rule. Both sides must have the same captures."""

    hf: tuple[Pattern, ...]
    ours: tuple[Pattern, ...]
    ops: tuple[Operation, ...] = ()
    optional: bool = False
    tie: str | None = None

    def __post_init__(self) -> None:
        ours = [pattern.names for pattern in self.ours]
        shared = {names | ({self.over} if self.over else set()) for names in ours}
        is_same = all(p.names in shared for p in self.hf) and len(shared) == 1
        has_star = any("*" in p.text for p in (*self.hf, *self.ours))
        if not self.hf or not self.ours or not is_same or has_star:
            raise ConversionError(
                "The two sides of a rule do not match.",
                expected="the same captures on both sides, and one more on hf's if a stack counts over it; no *",
                got=f"{[p.text for p in self.hf]} and {[p.text for p in self.ours]}",
                todo="correct the rule",
            )

    @cached_property
    def over(self) -> str | None:
        """The capture that a stack counts; only hf's side has it."""
        return next((op.over for op in self.ops if isinstance(op, StackCounted)), None)


@dataclass(frozen=True)
class Drop:
    """Keys that may be left out.

    Args:
        pattern: of the keys.
        least: capture -> an expression for its minimum.
        warn: a description of the keys, for a warning; None for no warning.
    """

    pattern: Pattern
    least: Mapping[str, str | int] = field(default_factory=dict)
    warn: str | None = None

    def __post_init__(self) -> None:
        if not self.pattern.names.issuperset(self.least):
            expected = f"[[drop]] from = names in {self.pattern.text}"
            raise _bad(self.pattern.text, expected, ", ".join(self.least))

    def among(self, names: Iterable[str], size: Callable[[str | int], int]) -> list[str]:
        """The names that are left out.

        Args:
            size: evaluates an expression; called only if a name matches.
        """
        matches = [(name, captures) for name in names if (captures := self.pattern.match(name)) is not None]
        least = {key: size(text) for key, text in self.least.items()} if matches else {}
        return [name for name, captures in matches if all(captures[key] >= least[key] for key in least)]


@dataclass(frozen=True)
class Refusal:
    """Keys of hf that no rule can convert, and what to do about them."""

    pattern: Pattern
    todo: str


@dataclass(frozen=True)
class Zeros:
    """A tensor of zeros that only our side has: one for each key of hf that matches ``beside``."""

    ours: Pattern
    beside: Pattern
    shape: tuple[str | int, ...]
    dtype: DType


@dataclass(frozen=True)
class RuleSet:
    """All rules of one file.

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
        """The new name of a key that no rule matches: with the other prefix, or unchanged."""
        for hf, ours in self.prefixes:
            old, new = (ours, hf) if to_hf else (hf, ours)
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    def is_of_other_side(self, name: str, *, to_hf: bool) -> bool:
        """Whether a key already has a prefix of the side that it would be converted to."""
        hf, ours = (
            max((len(pair[side]) for pair in self.prefixes if name.startswith(pair[side])), default=0)
            for side in (0, 1)
        )
        return hf > ours if to_hf else ours > hf

    def renamed(self, spellings: Mapping[str, str]) -> RuleSet:
        """The same rules with other names on our side.

        Args:
            spellings: name in the rules -> new name.

        Raises:
            ConversionError: for a name that no rule has.
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
        """These rules together with the rules of a file that extends them, which take precedence."""
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
            (*own.prefixes, *self.prefixes),
        )


def shipped_rules() -> tuple[str, ...]:
    """Names of the rule files that come with the package.

    Examples:
        >>> "torchtitan-llama" in shipped_rules()
        True
    """
    folder = resources.files("vescale_fsdp.conversion.rules.shipped")
    # endswith: the folder is a package, with a Python file.
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def load_rules(name: str) -> RuleSet:
    """A shipped rule set by name, or one from a file or URL that ends in ``.toml``.

    Raises:
        ConversionError: if there is no such file, or it is not valid.

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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise _bad(name, "a rule file of format 1", f"{type(error).__name__}: {error}") from error


def _bad(name: str, expected: str, got: object) -> ConversionError:
    return ConversionError(
        "The key rules cannot be read.", expected=expected, got=got, where=name, todo="correct --rules"
    )


def _parse(name: str, data: Mapping[str, Any]) -> RuleSet:
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
        raise _bad(name, "keep_others = true, as [[prefix]] applies to keys without a rule", "false")
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
    return KeyRule(_patterns(data["hf"]), _patterns(data["ours"]), ops, optional, tie)


def _patterns(value: str | list[str]) -> tuple[Pattern, ...]:
    return tuple(Pattern(text) for text in ([value] if isinstance(value, str) else value))
