"""Granularities: blocks of shapes, rules that choose them, and their spelling on the command line."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import numel_of
from vescale_fsdp.layout.granularity import (
    Element,
    Flat,
    Granularity,
    GranularityRule,
    Rows,
    Tiles,
    Whole,
    check_patterns,
    parse_granularities,
    parse_granularity,
    resolve_granularity,
)

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
granularities = st.one_of(
    st.just(Element()),
    st.integers(1, 50).map(Flat),
    st.integers(1, 9).map(Rows),
    st.builds(Tiles, st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from([Whole(), Whole(per="matrix")]),
)


@pytest.mark.parametrize(
    ("granularity", "of_stack", "of_matrix"),
    [
        (Element(), 1, 1),
        (Flat(16), 16, 16),
        (Rows(3), 3 * 10, 3 * 10),
        (Tiles(2, 5), 2 * 10, 2 * 10),
        (Whole(), 240, 240),
        (Whole(per="matrix"), 40, 240),
    ],
)
def test_table_of_the_module(granularity: Granularity, of_stack: int, of_matrix: int) -> None:
    """The table in granularity's docstring: blocks of shapes (6, 4, 10) and (24, 10)."""
    assert granularity.block_numel((6, 4, 10)) == of_stack
    assert granularity.block_numel((24, 10)) == of_matrix


def test_blocks_larger_than_the_tensor_keep_it_whole() -> None:
    """Rows(128) on 100 rows is the whole tensor, as the docstring says."""
    assert Rows(128).block_numel((100, 10)) == 1000
    assert Flat(256).block_numel((7,)) == 7


def test_vectors_and_scalars() -> None:
    """Rows and tiles leave a vector's rows undefined: elements, or runs as long as a tile is wide."""
    assert Rows(32).block_numel((100,)) == 1
    assert Tiles(4, 16).block_numel((100,)) == 16
    assert Tiles(4, 16).block_numel((5,)) == 5
    assert Whole(per="matrix").block_numel((100,)) == 100
    assert [kind.block_numel(()) for kind in (Element(), Flat(8), Rows(2), Tiles(2, 2), Whole())] == [1] * 5


@given(granularities, shapes)
def test_a_block_fits_its_tensor(granularity: Granularity, shape: tuple[int, ...]) -> None:
    """At least one element, at most the tensor; one for a tensor without elements."""
    assert 1 <= granularity.block_numel(shape) <= max(1, numel_of(shape))


@given(granularities)
def test_granularities_are_values(granularity: Granularity) -> None:
    """Equal by content, hashable, survive pickle, deepcopy and eval(repr)."""
    twins = [pickle.loads(pickle.dumps(granularity)), copy.deepcopy(granularity), eval(repr(granularity))]

    assert twins == [granularity] * 3
    assert len({granularity, *twins}) == 1


def test_different_granularities_differ() -> None:
    """No two kinds or sizes are taken for each other."""
    kinds = [Element(), Flat(2), Flat(3), Rows(2), Tiles(2, 2), Tiles(2, 3), Whole(), Whole(per="matrix")]

    assert len(set(kinds)) == len(kinds)


def test_granularities_are_frozen() -> None:
    """A field cannot be set after the value was proven."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Rows(2).rows = 0  # type: ignore[misc]


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "8"])
def test_sizes_must_be_positive_ints(size: object) -> None:
    """Zero, negative, fractional, boolean and text sizes are refused by every kind, naming the field."""
    for build, field in [(Flat, "numel"), (Rows, "rows"), (lambda n: Tiles(1, n), "cols")]:
        with pytest.raises(LayoutError) as refused:
            build(size)  # type: ignore[arg-type]
        assert refused.value.got == repr(size) and f"({field}=" in str(refused.value.where)


def test_unknown_unit_of_whole_is_refused() -> None:
    """Whole knows tensors and matrices only."""
    with pytest.raises(LayoutError) as refused:
        Whole(per="row")  # type: ignore[arg-type]
    assert (refused.value.got, refused.value.where) == ("'row'", "Whole(per=...)")


def _by_size(fqn: str, param: SimpleNamespace) -> Granularity:
    return Rows(len(fqn)) if len(param.shape) == 2 else Element()


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (None, Element()),
        (Rows(4), Rows(4)),
        ({"*.bias": Flat(2), "layer.*": Rows(7), "*": Whole()}, Rows(7)),
        ({"*.bias": Flat(2)}, Element()),
        (_by_size, Rows(len("layer.weight"))),
        ("tiles:128x64", Tiles(128, 64)),
        ({"*.bias": Rows(2), "*.weight": "whole:matrix"}, Whole(per="matrix")),
        (lambda fqn, param: f"rows:{param.shape[0]}", Rows(8)),
    ],
)
def test_rules(rule: GranularityRule, expected: Granularity) -> None:
    """None, a value, a mapping (first match wins, Element if none does) and a function are rules."""
    assert resolve_granularity(rule, "layer.weight", SimpleNamespace(shape=(8, 8))) == expected


@pytest.mark.parametrize("rule", [32, {"*": 32}, lambda fqn, param: None])
def test_rules_that_give_no_granularity(rule: GranularityRule) -> None:
    """What is no granularity is refused, naming the parameter and what would do."""
    with pytest.raises(LayoutError) as failure:
        resolve_granularity(rule, "layer.weight", SimpleNamespace(shape=(8, 8)))
    assert failure.value.got in ("32", "None") and "layer.weight" in str(failure.value.where)


@pytest.mark.parametrize("wrong", [Element, Flat, Rows, Tiles, Whole])
@pytest.mark.parametrize("rule", [lambda kind: kind, lambda kind: {"*": kind}, lambda kind: lambda *_: kind])
def test_a_class_in_place_of_a_value(
    wrong: type[Granularity], rule: Callable[[type[Granularity]], GranularityRule]
) -> None:
    """The class itself is refused, with a value of it to copy."""
    with pytest.raises(LayoutError) as refused:
        resolve_granularity(rule(wrong), "layer.weight", SimpleNamespace(shape=(8, 8)))
    assert refused.value.got == repr(wrong) and f"{wrong.__name__}(" in str(refused.value.todo)


@pytest.mark.parametrize("rule", ["rows", {"*": "rows"}, lambda fqn, param: "rows"])
def test_wrong_texts_in_rules(rule: GranularityRule) -> None:
    """A text that names nothing is refused with all that can be written, wherever it stands."""
    with pytest.raises(LayoutError) as refused:
        resolve_granularity(rule, "layer.weight", SimpleNamespace(shape=(8, 8)))
    assert refused.value.got == "'rows'"
    texts = ("element", "flat:256", "rows:32", "tiles:128x128", "whole", "whole:matrix")
    assert [text for text in texts if text not in str(refused.value.expected)] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("element", Element()),
        ("flat:256", Flat(256)),
        ("rows:32", Rows(32)),
        (" Rows:32 ", Rows(32)),
        ("tiles:128x64", Tiles(128, 64)),
        ("whole", Whole()),
        ("whole:tensor", Whole()),
        ("whole:matrix", Whole(per="matrix")),
    ],
)
def test_texts(text: str, expected: Granularity) -> None:
    """Every kind has a text; case and outer blanks do not matter."""
    assert parse_granularity(text) == expected


@pytest.mark.parametrize(
    "text", ["", "row:3", "rows", "rows:", "rows:x", "element:1", "tiles:3", "whole:row"]
)
def test_texts_that_name_nothing(text: str) -> None:
    """Other texts are refused with the list of what can be written."""
    with pytest.raises(LayoutError) as refused:
        parse_granularity(text)
    assert refused.value.got == repr(text) and "tiles:128x128" in str(refused.value.expected)


def test_text_with_a_bad_size_keeps_the_reason() -> None:
    """rows:0 is a granularity with a bad size, and the error says just that."""
    with pytest.raises(LayoutError) as refused:
        parse_granularity("rows:0")
    assert (refused.value.got, refused.value.where) == ("0", "Rows(rows=...)")


NAMES = ["self_attn.q_proj.weight", "mlp.up_proj.weight", "mlp.up_proj.bias", "norm.weight"]


@pytest.mark.parametrize(
    "rule", [None, Rows(2), {"*.weight": Rows(2), "norm*": Element()}, lambda fqn, p: Rows(2)]
)
def test_patterns_that_match_are_accepted(rule: GranularityRule) -> None:
    """Only mappings are checked, and each of their patterns must match something."""
    check_patterns(rule, NAMES)


def test_a_pattern_that_matches_nothing_is_refused_with_near_names() -> None:
    """A typing error would silently cut by element: the error names it and what it may have meant."""
    with pytest.raises(LayoutError) as error:
        check_patterns({"*.weight": Rows(2), "mlp.upproj.weight": Rows(4), "MLP.*": Rows(3)}, NAMES)

    assert error.value.got == "'mlp.upproj.weight', 'MLP.*'"
    assert f"{'mlp.upproj.weight'!r}: {'mlp.up_proj.weight'}" in str(error.value.where)


def test_parse_patterns() -> None:
    """Patterns keep their order and come before what is for all, wherever that was written."""
    found = parse_granularities(["rows:2", "a.*=whole", "*.b=flat:4"])
    assert list(found.items()) == [("a.*", Whole()), ("*.b", Flat(4)), ("*", Rows(2))]
    with pytest.raises(LayoutError) as refused:
        parse_granularities(["a.*="])
    assert refused.value.got == "''"
