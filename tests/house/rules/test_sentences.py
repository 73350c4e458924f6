"""Tests compare facts of errors, warnings and logs, not sentences: a class, attributes, names, paths, numbers.

A literal with two words in a row counts as a sentence where it is the pattern of ``match=``, is searched for, or begins
or ends a text. Within ``where`` and ``got`` of an error, words name a thing: "mesh axis 1".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[2]

_WORDS = re.compile(r"[A-Za-z]{2,} [A-Za-z]{2,}")
_ESCAPES = re.compile(r"\\.|\.\*|\(\.\|\n\)\*")  # of regular expressions: `\b`, `.*`

PRINTED = "a page, picture, plan or `repr`, whose text is what the test is for"
COMMAND = "what a command or a tool prints"
TORCH = "torch's own text, or a name that it gives"
OURS = "texts of tests/support and of tables in tests"

# Files that may compare sentences, and whose sentences these are.
ALLOWED = {
    "conversion/formats/test_conformance.py": OURS,
    "checkpoint/state/test_host_copies.py": OURS,
    "conversion/cli/test_cli.py": COMMAND,
    "conversion/cli/test_messages.py": COMMAND,
    "conversion/cli/test_wrong_inputs.py": COMMAND,
    "conversion/report/test_report_page.py": PRINTED,
    "house/docs/page_blocks.py": PRINTED,
    "house/docs/test_notebook.py": PRINTED,
    "house/docs/test_pages.py": PRINTED,
    "house/rules/test_errors.py": PRINTED,
    "house/test_wheel.py": PRINTED,
    "vescale_fsdp/dtensor/test_op_db.py": TORCH,
    "vescale_fsdp/dtensor/test_tensor_as_value.py": PRINTED,
    "vescale_fsdp/integrations/test_refusals.py": TORCH,
    "vescale_fsdp/layout/test_plan_report.py": PRINTED,
    "vescale_fsdp/runtime/test_fsdp2_surface.py": TORCH,
}


def sentences_in(text: str) -> Iterator[str]:
    """Yield the expressions in Python source that compare a sentence."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.keyword(arg="match", value=pattern) if _is_sentence(pattern):
                yield f"match={ast.unparse(pattern)}"
            case ast.Compare(left=part, ops=[ast.In() | ast.NotIn()], comparators=[whole]):
                if _is_sentence(part) and not _is_named_thing(whole):
                    yield ast.unparse(node)
            case ast.Call(func=ast.Attribute(value=whole, attr="startswith" | "endswith"), args=[part, *_]):
                if _is_sentence(part) and not _is_named_thing(whole):
                    yield ast.unparse(node)
            case ast.Call(
                func=ast.Attribute(ast.Name("re"), "search" | "match" | "fullmatch"), args=[pattern, *_]
            ):
                if _is_sentence(pattern):
                    yield ast.unparse(node)


def _is_sentence(node: ast.expr) -> bool:
    """Whether two words follow each other in a literal, or in one of several."""
    match node:
        case ast.Constant(value=str(text)):
            return _WORDS.search(_ESCAPES.sub("\0", text)) is not None
        case ast.JoinedStr(values=parts) | ast.Tuple(elts=parts):
            return any(map(_is_sentence, parts))
        case ast.BinOp(left=one, right=other) | ast.IfExp(body=one, orelse=other):
            return _is_sentence(one) or _is_sentence(other)
    return False


def _is_named_thing(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr in ("where", "got") for part in ast.walk(node))


def test_no_test_compares_a_sentence() -> None:
    """Write ``check=lambda error: error.where == name``, or look for a name, a path or a number in the text."""
    found = {
        path.relative_to(FOLDER).as_posix(): sentences
        for path in sorted(FOLDER.rglob("*.py"))
        if path != Path(__file__) and (sentences := list(sentences_in(path.read_text())))
    }

    assert {file: sentences for file, sentences in found.items() if file not in ALLOWED} == {}
    assert ALLOWED.keys() == found.keys()


def test_what_counts_as_a_sentence() -> None:
    """Each of the first is one; the others look for facts."""
    sentences = (
        "pytest.raises(ValueError, match='no such tensor')",
        "pytest.raises(ValueError, match=rf'{name} is (.|\\n)*of two states')",
        "assert 'was skipped' in str(caught[0].message)",
        "assert text.startswith(('step 3 is damaged', 'two'))",
        "assert re.search('could not be read', text)",
        "assert 'make room' in str(error.todo)",
    )
    facts = (
        "pytest.raises(ValueError, match=rf'\\b{name}\\b.*\\b3 of 4\\b')",
        "pytest.raises(ValueError, check=lambda error: error.where == 'mesh axis 1')",
        "assert 'mesh axis 1' in str(error.where)",
        "assert f'rank {rank}' in text and '[Errno 28]' in text",
        "assert kind == 'two groups'",
    )
    assert [text for text in sentences if len(list(sentences_in(text))) != 1] == []
    assert [text for text in facts if list(sentences_in(text))] == []
