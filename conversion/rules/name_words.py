"""The words of a tensor's name, in one spelling for the names that frameworks give to the same weight.

    model.layers.{l}.self_attn.q_proj.weight                    q
    decoder.layers.{l}.self_attention.linear_qkv.bias           q k v bias
    transformer.h.{l}.ln_2.weight                               norm-2

Words that say nothing about a weight's function (``model``, ``layers``, ``weight``) are left out. All others are kept,
so that two names with the same words most probably name the same weight, and unknown names have different words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

ROLES = frozenset(("q", "k", "v", "o", "gate", "up", "down", "embed", "head", "norm-1", "norm-2"))
"""Words for the function of a weight. Names with different ones name different weights."""
_TOKEN = re.compile(r"[a-z]+\d*|\d+[a-z]*")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_WEAK = re.compile(
    "model|module|transformer|decoder|language|text|base|net|network|backbone|layers?|h|blocks?|proj|linear|weights?|"
    "kernel|self"
)
# (words, replacement), applied in this order. The first of several alternatives that match is used.
_SPELLINGS = (
    (r"(?:self )?(?:attention|attn|att)(?: self)?", "attn"),
    (r"feed forward|feedforward|ffn|ff|block sparse moe|moe", "mlp"),
    (r"layer norm|layernorm|rms norm|rmsnorm|ln", "norm"),
    (r"(?:ln|norm|layernorm)([12f])", r"norm \1"),
    (r"post (?:attn|self attn) norm|pre mlp norm|mlp norm|norm 2|mlp linear fc1 norm", "norm-2"),
    (r"input norm|pre attn norm|attn norm|norm 1|attn linear qkv norm", "norm-1"),
    (r"final norm|norm f|norm final", "norm"),
    (r"wpe", "pos embed"),
    (
        r"(?:wte|tok|tokens?|words?|vocab|embed|embeddings?)(?: (?:tok|tokens?|words?|embed|embeddings?))*",
        "embed",
    ),
    (r"lm head|output layer|embed out", "head"),
    (r"query key value|wqkv|qkv", "q k v"),
    (r"query|wq", "q"),
    (r"key|wk", "k"),
    (r"value|wv", "v"),
    (r"o proj|wo|attn (?:linear |c )?(?:out|output|proj|dense)(?: proj)?", "o"),
    (r"w13", "gate up"),
    (r"gate proj|w1", "gate"),
    (r"router gate|router", "gate"),
    (r"up proj|w3|c fc|(?:linear )?fc1|dense h to 4h", "up"),
    (r"down proj|w2|(?:linear )?fc2|dense 4h to h|mlp (?:c )?proj", "down"),
    (r"experts", "expert"),
    (r"visual|vit", "vision"),
)
_PHRASES = tuple((re.compile(f"(?<= )(?:{words})(?= )"), new) for words, new in _SPELLINGS)
_HEAD = ("output", "weight")  # Llama's own name; inside a longer name, an output is something else


def plain_words(text: str) -> tuple[str, ...]:
    """Return the words of a name or pattern as they are spelled, without captures and weak words."""
    return _strong(_tokens(text))


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a name or pattern in the common spelling, in the order of the name."""
    tokens = _tokens(text)
    spelled = " head " if tuple(tokens) == _HEAD else f" {' '.join(tokens)} "
    for phrase, new in _PHRASES:
        spelled = phrase.sub(new, spelled)
    # The part of a block that a weight belongs to follows from its role.
    words = _strong(spelled.split())
    return tuple(word for word in words if word not in ("attn", "mlp")) or words


def similarity(left: Iterable[str], right: Iterable[str]) -> float:
    """Return the share of common words among all words of two names, from 0 to 1."""
    a, b = set(left), set(right)
    return len(a & b) / max(len(a | b), 1)


def _tokens(text: str) -> list[str]:
    without_captures = re.sub(r"\{\w+\}", "", text)
    return _TOKEN.findall(_CAMEL.sub("_", without_captures).lower())


def _strong(tokens: Iterable[str]) -> tuple[str, ...]:
    return tuple(token for token in tokens if not _WEAK.fullmatch(token))
