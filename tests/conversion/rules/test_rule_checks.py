"""Key rules that do not fit their source or their own two sides are refused, and each error says what to do."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch

from tests.support.rule_cases import GROUPED_EXPERTS, RULES, STACKED, convert_in_parts, deepseek, hf_folder
from vescale_fsdp.conversion.rules.rule_file import Pattern
from vescale_fsdp.errors import ConversionError, option

THREE = """
format = 1
[[rule]]
hf = ["a", "b", "c"]
ours = "d"
ops = [{ rope = { heads = [1, 0] } }, { concat = { dim = 0, sizes = [2, 2, 2] } }]
"""


@pytest.mark.parametrize(
    ("names", "rules", "text"),
    [
        ({"a.0.q": 4, "a.0.k": 2, "other": 1}, RULES, "none for other"),
        ({"a.0.q": 4, "a.0.k": 2, "a.1.q": 4}, RULES, r"only a\.1\.q"),
        ({"a.0.q": 4, "a.0.k": 3}, RULES, "size in the rule"),
        ({"a.0.q": 4, "a.0.k": 3}, RULES, r"2 in dim 0 \(2\)(.|\n)*where: a\.0\.k"),
        ({"c": 1}, RULES + '[[rule]]\nhf = "c"\nours = "d"\n', r"nothing matches a\.\{l\}\.q"),
        (
            {"b.0.norm.weight": 1, "b.0.norm.bias": 1},
            'format = 1\n[[rule]]\nhf="b.{l}.norm.{w}"\nours="n.{l}.{w}"\n',
            r"nothing matches b\.\{l\}\.norm\.\{w\}(.|\n)*a number: write one rule .* such as b\.\{l\}\.norm\.bias",
        ),
        (  # a word has no dots
            {"b.0.x.norm": 1},
            'format = 1\n[[rule]]\nhf="b.{l}.norm"\nours="n.{l}"\n',
            "nothing matches b(.|\\n)*optional = true",
        ),
        ({"a.0.q": 4, "a.0.k": 2}, RULES + '[[rule]]\nhf = "a.{x}.q"\nours = "z.{x}"\n', "two for a.0.q"),
        (
            {"c": 1, "e": 1},
            'format = 1\n[[rule]]\nhf="c"\nours="d"\n[[rule]]\nhf="e"\nours="d"\n',
            "made twice",
        ),
        ({"c": 1}, 'format = 1\n[[rule]]\nhf="c.{l}"\nours="d"\n', "do not match"),
        ({"c": 1}, 'format = 1\n[[rule]]\nhf="c"\nours="d"\nops=[{exec="x"}]\n', "does not exist"),
        ({"c": 1}, "format = 2\n", "format = 1"),
        ({"c": 1}, "format = 1\n[[rules]]\n", "the tables"),
        ({"c": 1}, "not toml", "cannot be read"),
        ({"a.0.q": 4, "a.0.k": 2}, RULES.replace('"2"', '"kv_rows"'), "kv_rows"),
        ({"a.0.q": 4, "a.0.k": 2}, RULES.replace('["4", "2"]', '["4"]'), "2 names"),
        ({"c": 1}, 'format = 1\nextends = "nothing"\n', "extends = one of"),
        ({"c": 1}, 'format = 1\n[rename]\n"a" = "b"\n', "extends = one of"),
        ({"c": 1}, 'format = 1\nextends = "torchtitan-llama"\n[rename]\n"wq" = "b"\n', r"wq(.|\n)*rename"),
        ({"c": 3}, 'format = 1\n[[rule]]\nhf="c"\nours="d"\nops=[{rope={heads="1"}}]\n', "multiple of 1 x 2"),
        ({"a": 2, "b": 2, "c": 2}, THREE, "only some of its names"),
        (
            {"c": 6},
            'format = 1\n[[rule]]\nhf="c"\nours="d"\nops=[{reshape={hf=[6, 2], ours=[5, 2]}}]\n',
            "shape",
        ),
        (
            {"c": 3},
            'format = 1\n[[rule]]\nhf="c"\nours="d"\nops=[{reshape={hf=[2, 3], ours=[6]}}]\n',
            "after undoing",
        ),
        (
            {"c": 6},
            'format = 1\n[[rule]]\nhf="c"\nours="d"\nops=[{pad={dim=0, from=5, to=8}}]\n',
            "5 in dim 0",
        ),
        ({"c": 1}, 'format = 1\n[[rule]]\nhf="c"\nours="d.*"\n', "no \\*"),
        ({"c": 1}, 'format = 1\n[[drop]]\nhf="c"\nfrom={l=1}\n', "names in c"),
        ({"c.q": 1}, 'format = 1\nkeep_others = true\n[[refuse]]\nhf="c.*"\ntodo="ask"\n', r"c\.q(.|\n)*ask"),
        (
            {"e": 1},
            'format = 1\n[[rule]]\nhf="h"\nours="h"\ntie="e"\n[[rule]]\nhf="e"\nours="e"\n',
            "nothing matches h",
        ),
    ],
)
def test_rules_that_do_not_fit(tmp_path: Path, names: dict[str, int], rules: str, text: str) -> None:
    """Unused keys and rules, incomplete groups, wrong sizes, doubles and bad files: named before a byte
    moves."""
    source = hf_folder(tmp_path / "hf", {name: torch.ones(size, 2) for name, size in names.items()})
    (tmp_path / "r.toml").write_text(rules)
    with pytest.raises(ConversionError, match=text):
        convert_in_parts(source, tmp_path / "out.pt", "torch", rules=str(tmp_path / "r.toml"))
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize(
    ("names", "wrong", "right"), [({"b.0.qk": 6}, "ours", "hf"), ({"a.0.q": 4, "a.0.k": 2}, "hf", "ours")]
)
def test_rules_for_the_other_direction(tmp_path: Path, names: dict[str, int], wrong: str, right: str) -> None:
    """Where the keys are those of the other side, one error names the direction, and its advice works."""
    source = hf_folder(tmp_path / "hf", {name: torch.ones(size, 2) for name, size in names.items()})
    (tmp_path / "r.toml").write_text(RULES)
    options = {"rules": str(tmp_path / "r.toml"), "rules_to": wrong}
    with pytest.raises(ConversionError, check=lambda error: option("rules_to", right) in error.todo):
        convert_in_parts(source, tmp_path / "out.pt", "torch", **options)
    convert_in_parts(source, tmp_path / "out.pt", "torch", **options | {"rules_to": right})
    assert len(torch.load(tmp_path / "out.pt")) == 3 - len(names)


@pytest.mark.parametrize(
    ("rules", "shape", "text"),
    [
        (STACKED, (13, 3, 2), r"12 in dim 1 \(12\)"),
        (RULES.replace("{l}", "0"), (7, 2), r"6 in dim 0 \(4 \+ 2\)"),
    ],
)
def test_what_does_not_come_apart_is_named(
    tmp_path: Path, rules: str, shape: tuple[int, ...], text: str
) -> None:
    """Ours are too large for what the rule makes of them: which size was expected, and why."""
    name = "w" if rules is STACKED else "b.0.qk"
    torch.save({name: torch.ones(shape)}, tmp_path / "ours.pt")
    (tmp_path / "r.toml").write_text(rules)
    with pytest.raises(ConversionError, match=text):
        convert_in_parts(tmp_path / "ours.pt", tmp_path / "out", "hf", rules=str(tmp_path / "r.toml"))


@pytest.mark.parametrize(
    ("rules", "name", "todo"),
    [
        ("torchtitan-deepseek-v3", "model.layers.0.self_attn.o_proj.weight_scale_inv", "fp8_cast_bf16"),
        (GROUPED_EXPERTS, "model.layers.0.mlp.experts.0.up_proj.weight_scale_inv", "bf16"),
        ("torchtitan-gpt-oss", "model.layers.0.mlp.experts.gate_up_proj_blocks", "dequantize"),
    ],
)
def test_quantized_weights_are_refused_with_the_way_on(
    tmp_path: Path, rules: str, name: str, todo: str
) -> None:
    """Scales would not follow what is stacked or renamed: refused, with what to do; carried over without rules."""
    tensors = {**deepseek(1), name: torch.ones(3, 3, dtype=torch.uint8)}
    source = hf_folder(tmp_path / "hf", tensors, num_hidden_layers=1)
    with pytest.raises(ConversionError, match=f"{name}(.|\n)*{todo}"):
        convert_in_parts(source, tmp_path / "out.pt", "torch", rules=rules)
    convert_in_parts(source, tmp_path / "out.pt", "torch")
    assert torch.load(tmp_path / "out.pt", weights_only=True)[name].dtype == torch.uint8


def _refused(tmp_path: Path, sizes: dict[str, int], rules: str) -> ConversionError:
    """The error of a conversion from Hugging Face, of tensors with this many rows."""
    source = hf_folder(tmp_path / "hf", {name: torch.ones(size, 2) for name, size in sizes.items()})
    (tmp_path / "r.toml").write_text(rules)
    with pytest.raises(ConversionError) as refused:
        convert_in_parts(source, tmp_path / "out.pt", "torch", rules=str(tmp_path / "r.toml"))
    return refused.value


def _parts(error: ConversionError) -> dict[str, list[str]]:
    """The parts of an error and its problems as lines of its text: name -> values."""
    pairs = [line.strip().split(": ", 1) for line in str(error).splitlines() if ": " in line]
    return {name: [value for key, value in pairs if key == name] for name in ("expected", "got", "where")}


def test_layers_with_one_mistake_are_one_problem(tmp_path: Path) -> None:
    """40 layers have a tensor of a wrong size, and one of another; two kinds of keys have no rule."""
    sizes = {f"a.{layer}.{name}": 4 for layer in range(41) for name in ("q", "x", "y")}
    sizes |= {f"a.{layer}.k": 3 if layer else 5 for layer in range(41)}
    error = _refused(tmp_path, sizes, RULES)
    lone, layers, unused = error.problems
    assert (lone.expected, lone.got) == ("2 in dim 0 (2)", "shape (5, 2)")
    assert (layers.expected, layers.got) == ("2 in dim 0 (2)", "shape (3, 2)")
    assert "a.0.k" in str(lone.where) and "{" not in str(lone.where)
    assert "a.{l}.k" in str(layers.where) and {"40", "1", "l=1"} <= set(
        re.findall(r"[\w=]+", str(layers.where))
    )
    assert {"a.*.x", "a.*.y", "41"} <= set(re.findall(r"[\w.*]+", str(unused.got)))
    assert all("r.toml" in str(each.where) for each in error.problems)
    for name, values in _parts(error).items():  # one part a line
        assert values == [str(getattr(each, name)) for each in (error, *error.problems)]
    again = pickle.loads(pickle.dumps(error))  # as it is sent to other ranks
    assert str(again) == str(error) and len(again.problems) == 3


def test_a_mistake_of_all_layers_alone_is_the_error(tmp_path: Path) -> None:
    """Its place is the pattern, the layers and the rule."""
    error = _refused(tmp_path, {f"a.{n}.{k}": 4 if k == "q" else 3 for n in (1, 4, 9) for k in "qk"}, RULES)
    assert error.problems == () and error.got == "shape (3, 2)"
    assert {"a.{l}.k", "3", "l=1", "l=4", "l=9"} <= set(re.findall(r"[^\s,]+", str(error.where)))


def test_layers_of_experts_that_lack_one(tmp_path: Path) -> None:
    """Each layer has one group per capture that is not counted: the lists of missing experts are one problem."""
    rule = STACKED.replace("e.{e}", "a.{l}.{e}").replace('"w"', '"b.{l}"')
    error = _refused(tmp_path, {f"a.{layer}.{expert}": 1 for layer in range(30) for expert in (0, 2)}, rule)
    assert error.problems == () and {"a.{l}.0", "a.{l}.1", "a.{l}.2"} <= set(
        re.findall(r"[^\s,]+", str(error.got))
    )


def test_a_capture_has_the_name_of_a_group() -> None:
    """A number is no name of a group in a regular expression."""
    with pytest.raises(ConversionError) as error:
        Pattern("layers.{0}.w")
    assert error.value.got == "{0}" and error.value.where == "layers.{0}.w"
