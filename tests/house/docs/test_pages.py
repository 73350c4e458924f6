"""README and the site's pages: their code runs, every public name has its place, files they name exist."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.house.conftest import ROOT, failures
from tests.house.docs.page_blocks import Launcher, alone, blocks_of, run_page, torchrun, warm_ranks
from tests.house.docs.plain_training import assert_alike, assert_trained_alike, trained_by, trains
from tests.house.docs.public_names import OF_METHODS, OF_STACKS, PUBLIC
from tests.support.distributed import RankError
from tools.docs.pictures import FOLDER, pictures

PAGES = {
    file.relative_to(ROOT).as_posix(): file
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
ALL_BLOCKS = {name: blocks_of(file.read_text()) for name, file in PAGES.items()}
IN_THE_NOTEBOOK = "docs/start.md"  # whose blocks test_notebook.py runs
RUN = [
    name for name, blocks in ALL_BLOCKS.items() if name != IN_THE_NOTEBOOK and any(b.is_run for b in blocks)
]
OF_TORCH = ROOT / "docs" / "fsdp2_parity.md"  # names PyTorch's own test files
NOTES = [
    ROOT / "vescale_fsdp" / "DESIGN.md",
    ROOT / "conversion" / "DESIGN.md",
    ROOT / "checkpoint" / "DESIGN.md",
    ROOT / "checkpoint" / "FORMAT.md",
]


# Of the tests beside these, which have been imported too, many have bound torch's names.
pytestmark = pytest.mark.filterwarnings("ignore::vescale_fsdp.errors.BoundNamesWarning")


def test_code_of_pages_runs(tmp_path: Path) -> None:
    """All blocks of a page, in order, in one folder."""

    def check(name: str) -> None:
        folder = tmp_path / name
        with alone(folder):
            assert run_page(PAGES[name].read_text(), folder) > 0

    assert not (failed := failures(check, [name for name in RUN if name != "README.md"])), failed


@pytest.mark.parametrize("launcher", [warm_ranks, pytest.param(torchrun, marks=pytest.mark.part("pages"))])
def test_readme_trains_as_without_sharding_and_goes_on(launcher: Launcher, tmp_path: Path) -> None:
    """Its commands run; its checkpoints hold the weights, moments and steps of a run that nothing interrupted."""
    with alone(tmp_path):
        assert run_page(PAGES["README.md"].read_text(), tmp_path, launcher) > 1
        for last in (100, 200):
            assert_trained_alike(tmp_path / f"run/step-{last:08}", *_plain_readme(last), most=1e-2)


# Blocks that train and are compared elsewhere.
COMPARED = {
    ("README.md", "train.py"): "test_readme_trains_as_without_sharding_and_goes_on",
    (IN_THE_NOTEBOOK, "train.py"): "test_notebook.py",
}
TRAINING = [
    name
    for name, blocks in ALL_BLOCKS.items()
    if any(trains(b) and b.reason is None and (name, b.title) not in COMPARED for b in blocks)
]


def test_code_trains_as_without_sharding(tmp_path: Path) -> None:
    """Losses, gradients, weights and optimizer state of every block that trains are those of plain modules."""

    def check(name: str) -> None:
        blocks = [b for b in ALL_BLOCKS[name] if b.language == "python" and b.is_run and not b.title]
        last = max(place for place, block in enumerate(blocks) if trains(block))
        with alone(tmp_path / name):
            ours = list(trained_by(name, blocks[: last + 1]))
            plain = list(trained_by(name, blocks[: last + 1], ours))

        assert len(ours) == len(plain) == sum(map(trains, ALL_BLOCKS[name]))
        for found, expected in zip(ours, plain, strict=True):
            assert_alike(found, expected)

    assert not (failed := failures(check, TRAINING)), failed


WRONG_STEPS = {
    "Adam's step count": "for p in model.parameters():\n"
    "    optimizer.state[p] = {k: torch.zeros_like(p) for k in ('exp_avg', 'exp_avg_sq')} | {'step': torch.ones(())}",
    "a gradient": "model[0].bias.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))",
    "a NaN": "model[2].bias.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(torch.nan))",
}


def test_wrong_training_is_seen(tmp_path: Path) -> None:
    """Negative control: the same page with a line too many in its training."""
    (block,) = (b for b in ALL_BLOCKS["docs/from_fsdp2.md"] if trains(b))
    first, last = block.text.split("model(torch.randn", 1)

    def check(wrong: str) -> None:
        text = f"{first}{WRONG_STEPS[wrong]}\nmodel(torch.randn{last}"
        with alone(tmp_path):
            (ours,) = trained_by("", [block._replace(text=text)])
            (plain,) = trained_by("", [block], [ours])
        with pytest.raises(AssertionError):
            assert_alike(ours, plain)

    assert not (failed := failures(check, WRONG_STEPS)), failed


def test_no_block_that_trains_is_forgotten() -> None:
    """Each runs, or readers see why not, and is compared."""
    everywhere = {(name, b.title): b for name, blocks in ALL_BLOCKS.items() for b in blocks if trains(b)}
    assert set(COMPARED) < set(everywhere)
    assert [key for key, b in everywhere.items() if not b.is_run and b.reason is None] == []
    left = {key for key, b in everywhere.items() if b.reason is None} - set(COMPARED)
    assert left == {(name, "") for name in TRAINING}


def _plain_readme(last: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """README's training in one process, without sharding and never interrupted."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Flatten(), nn.Linear(16 * 64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, last + 1):
        torch.manual_seed(step % 25)
        windows = text.unfold(0, 17, 1)[torch.randint(len(text) - 16, (240,))]
        nn.functional.cross_entropy(model(windows[:, :16]), windows[:, 16]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_blocks_that_are_not_run_say_why() -> None:
    """Each has a reason that readers see; and every block says what it is."""
    not_run = [
        (name, b.reason) for name, blocks in ALL_BLOCKS.items() for b in blocks if b.reason is not None
    ]
    nameless = [name for name, blocks in ALL_BLOCKS.items() if any(not b.language for b in blocks)]

    print("\n".join([f"{len(not_run)} blocks are not run", *(f"  {name}: {why}" for name, why in not_run)]))
    assert all(reason for _, reason in not_run)
    assert nameless == []


def test_rows_that_are_shown_stand_in_their_tables() -> None:
    """Of tables of tests, which CONTRIBUTING.md quotes by file."""
    quoted = [b for b in ALL_BLOCKS["CONTRIBUTING.md"] if b.reason and b.reason.startswith("rows of ")]
    gone = [
        (file, row)
        for block in quoted
        for file in [str(block.reason).removeprefix("rows of ")]
        for row in block.text.splitlines()
        if row not in (ROOT / file).read_text().splitlines()
    ]

    assert quoted
    assert gone == []


def test_examples_of_stacks_are_tested() -> None:
    """A page of a stack names its example, whose package the stack's test runs, and shows an excerpt of it."""
    tests = "".join(file.read_text() for file in (ROOT / "tests" / "stacks").glob("test_*.py"))
    for page in (ROOT / "docs" / "stacks").glob("*.md"):
        named = re.findall(r"`(examples/stacks/[\w/]*train\w*\.py)`", page.read_text())
        excerpts = [
            b for b in blocks_of(page.read_text()) if b.reason and b.reason.startswith("an excerpt of ")
        ]

        assert named and excerpts, page.name
        assert [f for f in named if f.rpartition("/")[0].replace("/", ".") not in tests] == []


def test_every_fence_is_understood() -> None:
    """A block that the search misses would never run."""
    for name, file in PAGES.items():
        fences = re.findall(r"^ *```", file.read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(ALL_BLOCKS[name]), name


def test_every_public_name_has_its_page() -> None:
    """Each is in the API reference, once."""
    text = "\n".join(file.read_text() for file in (ROOT / "docs" / "api").glob("*.md"))
    there = re.findall(r"^(?:::: |### `)(vescale_fsdp\.[\w.]+)", text, re.MULTILINE)
    missing = sorted({*PUBLIC, *OF_STACKS} - set(there))

    print(f"{len({*PUBLIC, *OF_STACKS})} public names, {len(missing)} without a page")
    assert missing == []
    assert sorted(name for name in set(there) if there.count(name) > 1) == []
    assert set(there) - {*PUBLIC, *OF_STACKS} == {"vescale_fsdp.errors", *OF_METHODS}


def test_every_error_has_cause_and_cure() -> None:
    """The page on trouble has a row for each class of error."""
    classes = re.findall(r"^class (\w+)\(", (ROOT / "vescale_fsdp" / "errors.py").read_text(), re.MULTILINE)
    text = (ROOT / "docs" / "trouble.md").read_text()

    reference = (ROOT / "docs" / "api" / "errors.md").read_text()

    assert classes
    assert [name for name in classes if f"`{name}`" not in text] == []
    assert re.search(r"members: \[(.*)\]", reference)[1].split(", ") == classes  # type: ignore[index]


def missing_files(page: Path) -> list[str]:
    """Paths in backquotes that look like files of ours, alone or in a command, and patterns, that name none."""
    named = re.findall(r"`(?:python )?((?:[a-z_]+/)+[A-Za-z_0-9]+\.(?:py|md|txt|toml))[ `]", page.read_text())
    return [name for name in named if not any(list(place.glob(name)) for place in (ROOT, page.parent))]


def test_named_files_exist() -> None:
    pages = [*(page for page in PAGES.values() if page != OF_TORCH), *NOTES]

    assert {str(page): missing for page in pages if (missing := missing_files(page))} == {}


def test_pictures_are_drawn_by_this_code() -> None:
    """`python tools/docs/pictures.py` has been run since the pictures' code was changed."""
    drawn = pictures()

    assert {name: (FOLDER / name).read_text() for name in drawn} == drawn


def test_missing_files_are_seen(tmp_path: Path) -> None:
    """The search above finds a path that leads nowhere."""
    page = tmp_path / "page.md"
    page.write_text("See `tests/nothing/here.py` and `tests/conftest.py`.")
    assert missing_files(page) == ["tests/nothing/here.py"]


def test_wrong_code_is_seen(tmp_path: Path) -> None:
    """A block that raises, on one rank or on two, and a command that fails, end a page."""
    with pytest.raises(ZeroDivisionError):
        run_page("```python\n1 / 0\n```\n", tmp_path)
    with pytest.raises(RankError, match="ZeroDivisionError"):
        run_page(
            '```python title="train.py"\n1 / 0\n```\n```sh\ntorchrun --nproc-per-node 2 train.py\n```\n',
            tmp_path,
        )
    with pytest.raises(AssertionError, match="vescale-convert inspect nothing"):
        run_page("```sh\nvescale-convert inspect nothing\n```\n", tmp_path)
