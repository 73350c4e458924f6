"""Conversions take time that grows with the number of tensors, not with its square; counted in calls."""

from __future__ import annotations

import cProfile
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from vescale_fsdp.checkpoint import verify
from vescale_fsdp.conversion import open_source
from vescale_fsdp.conversion.convert import ConvertOptions, convert
from vescale_fsdp.conversion.diff import diff
from vescale_fsdp.conversion.engine.carried_state import whole_state
from vescale_fsdp.conversion.engine.stored_tensor import TensorInfo
from vescale_fsdp.conversion.engine.tensor_view import ZerosView
from vescale_fsdp.conversion.report.describe import describe
from vescale_fsdp.conversion.rules.apply_to_state import state_with_rules
from vescale_fsdp.conversion.rules.apply_to_tensors import apply_rules
from vescale_fsdp.conversion.rules.rule_file import load_rules
from vescale_fsdp.conversion.rules.suggest import NamedShapes, suggest_rules
from vescale_fsdp.layout.dtypes import dtype_from_torch

RANKS = 64
LIMIT = 2.6  # of one growth to the next, for twice as many tensors: n gives 2, n log n 2.2, a square 4
FLOAT32 = dtype_from_torch("float32")
LIMITS = {"memory_budget_bytes": 4 * 2**20, "threads": 1}


def _num_calls(work: Callable[[], object]) -> int:
    """Calls of functions, generators and built-ins on all threads."""
    profiles: list[cProfile.Profile] = []

    def start(*_: object) -> None:
        profiles.append(cProfile.Profile())
        profiles[-1].enable()

    threading.setprofile(start)
    start()
    try:
        work()
    finally:
        profiles[0].disable()
        threading.setprofile(None)  # type: ignore[arg-type]
    return sum(row.callcount for profile in profiles for row in profile.getstats())


def _state(num_params: int) -> dict[str, Any]:
    """Experts of an Adam: four tensors per parameter."""
    names = [f"layers.{place // 32}.experts.{place % 32}.weight" for place in range(num_params)]
    moments = {"exp_avg": torch.ones(4, 4), "exp_avg_sq": torch.ones(4, 4), "step": torch.tensor(3.0)}
    groups = [{"params": names, "lr": 1e-3}]
    return {
        "model": {name: torch.full((4, 4), float(place)) for place, name in enumerate(names)},
        "optimizer": {"state": dict.fromkeys(names, moments), "param_groups": groups},
    }


def _convert(source: Path, target: Path, kind: str, **options: Any) -> None:
    chosen = ConvertOptions(ranks=RANKS, granularity=("rows:1",), **LIMITS, **options)
    report = convert(open_source(str(source)), str(target), kind, chosen)
    assert report.outcome.published


def _plan(source: Path, target: Path, kind: str, dry: ConvertOptions) -> None:
    convert(open_source(str(source)), str(target), kind, dry)


@pytest.mark.part("formats")
def test_calls_grow_with_the_number_of_tensors(tmp_path: Path) -> None:
    """From 512 to 1,024 tensors a conversion takes on about twice the calls that it takes on from 256 to 512."""
    calls: dict[str, list[int]] = {}

    def count(name: str, source: Path, target: str, kind: str, **options: Any) -> Path:
        made = source.parent / target
        calls.setdefault(name, []).append(_num_calls(lambda: _convert(source, made, kind, **options)))
        return made

    for num_params in (8, 64, 128, 256):  # imports are counted with the first
        file = tmp_path / str(num_params) / "file"
        file.parent.mkdir()
        torch.save(_state(num_params), file)
        native = count("torch to native", file, "native", "native")
        dcp = count("native to dcp, flattened", native, "dcp", "dcp", optimizer="flattened")
        count("dcp, flattened, to native", dcp, "native_again", "native")
        count("dcp to torch, nested", dcp, "file_again", "torch", optimizer="nested")
        count("native to hf", native, "hf", "hf")

    for name, (_, small, middle, large) in calls.items():
        assert small > 1000 and large - middle < LIMIT * (middle - small), (name, small, middle, large)


@pytest.mark.part("formats")
def test_calls_of_planning_and_looking_grow_with_the_number_of_tensors(tmp_path: Path) -> None:
    """So do those of a plan for every target, and of what only looks, at 1,024, 2,048 and 4,096 tensors."""
    calls: dict[str, list[int]] = {}
    dry = ConvertOptions(ranks=RANKS, granularity=("rows:1",), dry_run=True)
    for num_params in (8, 256, 512, 1024):  # imports are counted with the first
        folder = tmp_path / str(num_params)
        folder.mkdir()
        torch.save(_state(num_params), folder / "file.pt")
        _convert(folder / "file.pt", folder / "native", "native")
        _convert(folder / "native", folder / "dcp", "dcp")
        for source, target in (("native", "native"), ("dcp", "torch"), ("file.pt", "dcp"), ("native", "hf")):
            plan = partial(_plan, folder / source, folder / "none", target, dry)
            calls.setdefault(f"plan {source} to {target}", []).append(_num_calls(plan))
        native, dcp = open_source(str(folder / "native")), open_source(str(folder / "dcp"))
        calls.setdefault("describe", []).append(_num_calls(lambda native=native: describe(native)))  # type: ignore[misc]
        calls.setdefault("verify", []).append(_num_calls(lambda dcp=dcp: verify(dcp)))  # type: ignore[misc]
        calls.setdefault("diff", []).append(_num_calls(lambda a=native, b=dcp: diff(a, b)))  # type: ignore[misc]

    for name, (_, small, middle, large) in calls.items():
        assert small > 1000 and large - middle < LIMIT * (middle - small), (name, small, middle, large)


def _num_lines(work: Callable[[], object]) -> int:
    """Lines that run, a loop's once per turn: what a search inside one call takes shows here alone."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def _named(names: Iterable[str], size: int = 4) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(names, (size, 2 * size))


def _letters(number: int) -> str:
    """A word without digits for each number."""
    return "z" + "".join(chr(ord("a") + int(digit)) for digit in str(number))


# Names of SRC and of MODEL: of experts; without numbers that differ, of one shape, certain and not.
SUGGESTED: dict[str, Callable[[int], tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]]] = {
    "experts": lambda count: (
        _named(f"blocks.{n // 64}.moe.experts.{n % 64}.w1" for n in range(count)),
        _named(f"model.layers.{n // 64}.mlp.experts.{n % 64}.gate_proj.weight" for n in range(count)),
    ),
    "same words": lambda count: (
        _named(f"{_letters(n)}.wo" for n in range(count)),
        _named(f"model.{_letters(n)}.o_proj" for n in range(count)),
    ),
    "no words in common": lambda count: (
        _named(f"x{_letters(n)}.w" for n in range(count)),
        _named(f"y{_letters(n)}.w" for n in range(count)),
    ),
}


@pytest.mark.part("formats")
@pytest.mark.parametrize("kind", ["experts", "no words in common"])
def test_calls_of_suggesting_rules_grow_with_the_number_of_tensors(kind: str) -> None:
    """40,000 names take four times the calls of 10,000 (n log n: 4.6), and at most 500 calls each."""

    def count(number: int) -> int:
        ours, hf = SUGGESTED[kind](number)
        views = {name: ZerosView(TensorInfo(name, shape, FLOAT32)) for name, shape in ours.items()}
        return _num_calls(lambda: suggest_rules(views, NamedShapes(hf, {}, {})))

    small, large = map(count, (10_000, 40_000))
    assert large < 4.6 * small and large < 500 * 40_000, (small, large)


@pytest.mark.part("formats")
def test_lines_of_rules_of_single_names_grow_with_their_number(tmp_path: Path) -> None:
    """A rule for each name: the name is looked up, not searched for."""
    lines = []
    for number in (10, 100, 200, 400):
        ours, hf = SUGGESTED["same words"](number)
        views = {name: ZerosView(TensorInfo(name, shape, FLOAT32)) for name, shape in ours.items()}
        (tmp_path / "r.toml").write_text(suggest_rules(views, NamedShapes(hf, {}, {})))
        rules = load_rules(str(tmp_path / "r.toml"))
        assert len(rules.rules) == number
        lines.append(_num_lines(lambda: apply_rules(rules, views, {}, to_hf=True)))  # noqa: B023
    _, small, middle, large = lines
    assert large - middle < LIMIT * (middle - small), lines


def test_lines_of_renaming_grow_with_the_number_of_tensors(tmp_path: Path) -> None:
    """Key rules on a model and its optimizer, whose entries have parameters' names inside of theirs in one form."""
    (tmp_path / "rules.toml").write_text(
        'format = 1\n[[rule]]\nhf = "h.{l}.{e}.w"\nours = "layers.{l}.experts.{e}.weight"\n'
    )
    lines: dict[str, list[int]] = {}
    for num_params in (8, 128, 256, 512):
        torch.save(_state(num_params), tmp_path / "nested")
        convert(
            open_source(str(tmp_path / "nested")),
            str(tmp_path / "flattened"),
            "torch",
            ConvertOptions(optimizer="flattened", overwrite=True),
        )
        for form in ("nested", "flattened"):
            source = open_source(str(tmp_path / form))
            state, rules = whole_state(source, None, None), load_rules(str(tmp_path / "rules.toml"))
            renamed = partial(state_with_rules, state, rules, {}, to_hf=True)
            assert len(renamed().views) == len(source.tensors) == 4 * num_params
            lines.setdefault(form, []).append(_num_lines(renamed))

    for name, (_, small, middle, large) in lines.items():
        assert small > 1000 and large - middle < LIMIT * (middle - small), (name, small, middle, large)


def test_plans_take_little_memory_per_tensor(tmp_path: Path) -> None:
    """At its peak, what the source holds included; 120,000 tensors are to fit in 500 MiB beside the interpreter."""
    dry = ConvertOptions(ranks=RANKS, granularity=("rows:1",), dry_run=True)
    peaks: dict[str, list[int]] = {}
    for num_params in (64, 192):
        folder = tmp_path / str(num_params)
        folder.mkdir()
        torch.save(_state(num_params), folder / "file.pt")
        for kind in ("native", "dcp"):
            _convert(folder / "file.pt", folder / kind, kind)
            _plan(folder / kind, folder / "none", "native", dry)  # imports and caches, which are no tensor's
            tracemalloc.start()
            _plan(folder / kind, folder / "none", "native", dry)
            peaks.setdefault(kind, []).append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

    per_tensor = {kind: (large - small) / (4 * 128) for kind, (small, large) in peaks.items()}
    assert 1000 < per_tensor["native"] < 2100 and 1000 < per_tensor["dcp"] < 2700, per_tensor


@pytest.mark.part("formats")
def test_plans_take_little_memory_per_piece(tmp_path: Path) -> None:
    """Of matrices that are cut into 64 ranks' files: the contents of one file at a time are in memory."""
    dry = ConvertOptions(ranks=RANKS, dry_run=True)
    peaks = []
    for num_matrices in (100, 300):
        file = tmp_path / f"{num_matrices}.pt"
        torch.save({f"layers.{place}.weight": torch.ones(RANKS, 32) for place in range(num_matrices)}, file)
        _plan(file, tmp_path / "none", "native", dry)  # imports and caches, which are no tensor's
        tracemalloc.start()
        _plan(file, tmp_path / "none", "native", dry)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    per_piece = (peaks[1] - peaks[0]) / (200 * RANKS)
    assert 40 < per_piece < 180, per_piece


def test_the_count_shows_a_square() -> None:
    """A search through all names for each name exceeds the limit above."""

    def search(num_names: int) -> None:
        names = [str(place) for place in range(num_names)]
        for name in names:
            any(name == other for other in names)

    for counted in (_num_calls, _num_lines):
        small, middle, large = (counted(partial(search, number)) for number in (100, 200, 400))
        assert large - middle > LIMIT * (middle - small)
