"""`tools.mutate` on a product of one function, whose test starts a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutate.mutants import Mutant, draw, mutants_of, place, product_files, shared
from tools.mutate.running import compare, cover, run

PRODUCT = '''"""é: columns of syntax trees are bytes, offsets are characters."""

def is_small(number: int, limit: int = 3) -> bool:
    """Whether a number is below a limit."""
    if number < limit and not number == -1:
        return True
    unused = 5
    return False
'''
TESTS = """
import subprocess, sys
import pytest
from vescale_fsdp.sizes import is_small

@pytest.mark.parametrize("number", [0, 1])
def test_small_numbers(number):
    assert is_small(number)

def test_large_numbers():
    check = "from vescale_fsdp.sizes import is_small; assert is_small(9) is False"
    subprocess.run([sys.executable, "-c", check], check=True)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for file, text in {
        "vescale_fsdp/__init__.py": "",
        "vescale_fsdp/sizes.py": PRODUCT,
        "tests/test_sizes.py": TESTS,
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    (tmp_path / "pytest.ini").touch()
    return tmp_path.resolve()


def test_mutants_change_one_place_each(checkout: Path) -> None:
    """Every mutant is Python, and the places are those of the text; the same seed draws the same."""
    found = mutants_of("vescale_fsdp/sizes.py", PRODUCT)

    changed = set()
    for mutant in found:
        end = mutant.offset + len(mutant.before)
        assert PRODUCT[mutant.offset : end] == mutant.before
        text = PRODUCT[: mutant.offset] + mutant.after + PRODUCT[end:]
        compile(text, mutant.file, "exec")
        changed.add(text)
    assert len(changed) == len(found)
    assert {mutant.kind for mutant in found} == {
        "comparison", "logic", "negation", "condition", "constant", "result",
    }  # fmt: skip
    assert product_files(checkout) == ["vescale_fsdp/__init__.py", "vescale_fsdp/sizes.py"]
    assert draw(checkout, 5, seed=1) == draw(checkout, 5, seed=1) != draw(checkout, 5, seed=2)


def test_mutants_of_functions_that_two_checkouts_share(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """At their places in both; a function that differs has none."""
    other = tmp_path_factory.mktemp("other")
    (other / "vescale_fsdp").mkdir()
    text = "def first():\n    return 1\n\n" + PRODUCT[PRODUCT.index("def") :].replace("Whether", "If")
    (other / "vescale_fsdp/sizes.py").write_text(text)
    (checkout / "vescale_fsdp/sizes.py").write_text(PRODUCT + "\ndef first():\n    return 2\n")

    pairs = shared(checkout, other)

    assert {one.after for one, _ in pairs} == {one.after for one in mutants_of("", PRODUCT)}
    for one, same in pairs:
        assert text[same.offset :].startswith(one.before) and same.after == one.after
        assert text[same.offset :].count("\n") == PRODUCT[one.offset :].count("\n")


def test_mutants_are_found_again_in_a_changed_product(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In a file of another name and a statement that has changed; what is gone is None."""
    sample = mutants_of("vescale_fsdp/sizes.py", PRODUCT)
    assert place(checkout, sample) == sample
    other = tmp_path_factory.mktemp("other").resolve()
    (other / "checkpoint").mkdir()
    text = "def first(unused=5):\n    return False\n\n" + PRODUCT[PRODUCT.index("def") :]
    text = text.replace("unused = 5", "unused = 7").replace("== -1:", "== -1 and limit:")
    (other / "checkpoint/moved.py").write_text(text)

    found = place(other, sample)

    for one, again in zip(sample, found, strict=True):
        is_gone = one.statement == "unused = 5" or one.kind == "condition"
        assert (again is None) == is_gone, one
        if again is not None:
            assert (again.file, again.function) == ("checkpoint/moved.py", "is_small")
            assert text[again.offset :].startswith(one.before) and again.after == one.after
            assert text[again.offset :].count("\n") == PRODUCT[one.offset :].count("\n")


@pytest.mark.part("jobs")
def test_a_mutant_is_killed_by_the_tests_that_execute_it(checkout: Path) -> None:
    """Also where a subprocess executes it; a defect that no test sees survives."""
    covered = cover(checkout, part="", jobs=1)
    small, large = (f"tests/test_sizes.py::test_{name}" for name in ("small_numbers[0]", "large_numbers"))
    assert covered[small].blocks == {"vescale_fsdp/sizes.py": [4, 6]}
    assert covered[large].blocks == {"vescale_fsdp/sizes.py": [4]}
    (again,) = cover(checkout, "", 1, [f"{large}"], ["vescale_fsdp/others.py"]).items()
    assert again[0] == large and again[1].blocks == {}

    def mutant(before: str, after: str) -> Mutant:
        offset = PRODUCT.index(before)
        return Mutant("vescale_fsdp/sizes.py", PRODUCT[:offset].count("\n") + 1, offset, before, after, "")

    chosen = [mutant("False", "True"), mutant("True", "False"), mutant("unused = 5", "unused = 6")]
    rows = run(checkout, chosen, covered, budget_s=10.0, jobs=2)

    assert [row["result"] for row in rows] == ["killed", "killed", "survived"]
    assert rows[0]["killer"] == large and "small_numbers" in rows[1]["killer"]
    survivors = [row | {"result": "survived"} for row in rows]
    lines = compare(survivors, rows).splitlines()
    assert [int(line.split()[1]) for line in lines[:2]] == [0, 2] and len(lines) == 4
