"""Measure the power of the tests: how many small defects of the product they notice.

    python -m tools.mutate draw mutants.json --count 100 --seed 0     defects of the product in this checkout
    python -m tools.mutate cover coverage.json                        which tests execute which lines (20 minutes)
    python -m tools.mutate run mutants.json coverage.json out.json    runs the tests that execute each defect (an hour)
    python -m tools.mutate compare old.json new.json                  what one suite notices and the other does not

A mutant is one change of one expression or statement: a comparison turned, a sign or a constant changed, a condition
negated, a call left out. It is killed if a test fails or does not end. ``run`` chooses the tests that execute the
mutant's block of statements: those of the mirrored file first, then the quickest, together at most ``--seconds``. At
the end it runs every test that failed once more, without the mutant: one that fails there too has killed nothing.

``sample.json`` here has 100 mutants of a fixed version. To see whether the tests of a later one are as strong:

    python -m tools.mutate place tools/mutate/sample.json mutants.json     where they are now; lists those that are gone
    python -m tools.mutate cover coverage.json --only mutants.json         faster: only blocks of the mutants' files
    python -m tools.mutate run mutants.json coverage.json out.json

To compare two suites on one product, draw the mutants once, and run them in two checkouts that differ in ``tests/``
only (``--root``). Where the product has changed too, ``share`` draws mutants of the functions that both have.

Packages for mutation tests do not see which test the code of a warm rank ran for; here every process of a test loads
the product through `tools.mutate.loading`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import click

from tools.mutate import mutants, running

_FILE = click.Path(path_type=Path)
_ROOT = click.option(
    "--root", type=click.Path(path_type=Path), default=Path(), help="the checkout", show_default=True
)
_JOBS = click.option("--jobs", default=2, help="runs at a time", show_default=True)


@click.group(help=__doc__.splitlines()[0])
def main() -> None:
    pass


@main.command()
@click.argument("out", type=_FILE)
@click.option("--count", default=100, show_default=True)
@click.option("--seed", default=0, show_default=True)
@_ROOT
def draw(out: Path, count: int, seed: int, root: Path) -> None:
    """Draw mutants of the product."""
    _write(out, [mutant._asdict() for mutant in mutants.draw(root, count, seed)])


@main.command("place")
@click.argument("sample", type=_FILE)
@click.argument("out", type=_FILE)
@_ROOT
def place_(sample: Path, out: Path, root: Path) -> None:
    """Find the mutants of another version in this one; null for those that are gone."""
    wanted = [mutants.Mutant(**row) for row in json.loads(sample.read_text())]
    found = mutants.place(root, wanted)
    _write(out, [mutant and mutant._asdict() for mutant in found])
    for mutant, now in zip(wanted, found, strict=True):
        if now is None:
            click.echo(f"gone: {mutant.file}:{mutant.line} {mutant.function}: {mutant.statement[:80]}")


@main.command()
@click.argument("other", metavar="CHECKOUT", type=_FILE)
@click.argument("out", type=_FILE)
@click.argument("other_out", type=_FILE)
@click.option("--count", default=100, show_default=True)
@click.option("--seed", default=0, show_default=True)
@_ROOT
def share(other: Path, out: Path, other_out: Path, count: int, seed: int, root: Path) -> None:
    """Draw mutants of functions that another checkout has too; write them for both."""
    pairs = mutants.shared(root.resolve(), other.resolve())
    chosen = random.Random(seed).sample(pairs, min(count, len(pairs)))
    _write(out, [pair[0]._asdict() for pair in chosen])
    _write(other_out, [pair[1]._asdict() for pair in chosen])


@main.command()
@click.argument("out", type=_FILE)
@click.argument("tests", nargs=-1)
@click.option("--only", type=_FILE, metavar="MUTANTS", help="note only the files of these mutants")
@click.option(
    "--part", default="core", help="the part of the tests; empty for suites without parts", show_default=True
)
@_ROOT
@_JOBS
def cover(out: Path, tests: tuple[str, ...], only: Path | None, part: str, root: Path, jobs: int) -> None:
    """Run the tests once (all, or the given files) and record which blocks of statements each executes."""
    chosen = None if only is None else sorted({row["file"] for row in json.loads(only.read_text()) if row})
    rows = running.cover(root.resolve(), part, jobs, tests, chosen)
    _write(out, {test: row._asdict() for test, row in rows.items()})


@main.command()
@click.argument("chosen", metavar="MUTANTS", type=_FILE)
@click.argument("coverage", type=_FILE)
@click.argument("out", type=_FILE)
@click.option("--seconds", default=40.0, help="of tests per mutant", show_default=True)
@_ROOT
@_JOBS
def run(chosen: Path, coverage: Path, out: Path, seconds: float, root: Path, jobs: int) -> None:
    """Run the tests that execute each mutant."""
    covered = {test: running.Covered(**row) for test, row in json.loads(coverage.read_text()).items()}
    wanted = [row and mutants.Mutant(**row) for row in json.loads(chosen.read_text())]
    found = [mutant for mutant in wanted if mutant]
    rows = running.run(root.resolve(), found, covered, seconds, jobs)
    following = iter(rows)
    _write(out, [next(following) if mutant else {"mutant": None, "result": "gone"} for mutant in wanted])
    click.echo(f"{sum(row['result'] == 'killed' for row in rows)} of {len(rows)} killed")


@main.command()
@click.argument("first", type=_FILE)
@click.argument("second", type=_FILE)
def compare(first: Path, second: Path) -> None:
    """Print how many mutants each suite kills, and those that only one of them kills."""
    click.echo(running.compare(json.loads(first.read_text()), json.loads(second.read_text())))


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    main()
