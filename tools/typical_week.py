"""Run a user's typical week, and print which share of the product's function bodies it runs.

    python -m tools.typical_week [--json FILE]      a minute and a half on two cores

| day | what runs |
|---|---|
| train | 2 ranks: bf16, accumulation, clipping, a schedule, an asynchronous `CheckpointManager` |
| resume | 3 ranks: the same script, from the newest step |
| DCP | stock `dcp.save` and `dcp.load` of a model, on 2 ranks; a load of the folder by this library |
| Hugging Face | 3 ranks: a repository into shards, and the shards as a repository |
| commands | inspect, verify, diff, report, to-hf, to-fsdp2, to-torch, to-zarr, to-native, rules, plan |

Only public names and commands are used, and this script does not change, so that two versions of the product can be
compared. Every process, ranks and commands too, loads the product through `tools.mutate.loading`, which notes each
statement that begins. Lines are those of statements in functions, without docstrings, comments, declarations and
``raise`` statements; of a compound statement only its header counts as its own. The packages are folders: see `AREAS`.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.mutate import loading
from tools.mutate.mutants import product_files
from tools.mutate.running import hooked
from tools.torchrun_job import ROOT, Job

STEPS, MICRO_BATCHES = 6, 2  # of each training job
TIMEOUT_S = 240.0  # of each job and command

# The first that a file's path begins with; ALL is their sum.
AREAS = {
    "checkpoint/": "checkpoint",
    "conversion/": "conversion",
    "vescale_fsdp/dtensor/operators/": "operators",
    "vescale_fsdp/elastic/": "extras",
    "vescale_fsdp/integrations/": "extras",
    "vescale_fsdp/optim/": "extras",
    "vescale_fsdp/quantize/": "extras",
    "vescale_fsdp/transfer/": "extras",
    "vescale_fsdp/": "runtime",
}
ALL = "all"
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


# --- The lines that count


def body_lines(text: str) -> dict[int, frozenset[int]]:
    """First line of each statement in functions -> the statement's own lines.

    Example:
        >>> body_lines("def f(x):\\n    if x:\\n        return g(\\n            x\\n        )\\n")
        {2: frozenset({2}), 3: frozenset({3, 4, 5})}
    """
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    found = {}
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in (statement for block in loading.blocks_of(function) for statement in block):
                if not _is_left_out(statement):
                    own = range(_first_line(statement), _end_of_header(statement) + 1)
                    found[statement.lineno] = frozenset(code.intersection(own))
    return found


def _is_left_out(statement: ast.stmt) -> bool:
    """Docstrings, declarations, and what raises."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    return isinstance(statement, ast.Raise | ast.Global | ast.Nonlocal)


def _first_line(node: ast.stmt) -> int:
    """The line where a statement begins, with its decorators."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])


def _end_of_header(statement: ast.stmt) -> int:
    """The last line of a statement that is not in a block of its own."""
    if isinstance(statement, ast.Match):
        return statement.subject.end_lineno or statement.lineno
    body: list[ast.stmt] | None = getattr(statement, "body", None)
    return _first_line(body[0]) - 1 if body else statement.end_lineno or statement.lineno


def shares(root: Path, hits: Mapping[str, set[int]]) -> dict[str, dict[str, float]]:
    """Lines, lines that ran and their share in percent, by area.

    Args:
        root: the checkout.
        hits: file of the product -> first lines of the statements that began.
    """
    lines = dict.fromkeys([*dict.fromkeys(AREAS.values()), ALL], 0)
    ran = dict(lines)
    for file in product_files(root):
        area = next(area for start, area in AREAS.items() if file.startswith(start))
        for first, own in body_lines((root / file).read_text()).items():
            for name in (area, ALL):
                lines[name] += len(own)
                ran[name] += len(own) * (first in hits.get(file, ()))
    return {
        name: {
            "lines": lines[name],
            "ran": ran[name],
            "percent": round(100 * ran[name] / max(1, lines[name]), 2),
        }
        for name in ("runtime", "checkpoint", "conversion", "operators", "extras", ALL)
    }


def hits_of(folder: Path) -> dict[str, set[int]]:
    """File -> first lines of the statements that began, from the notes of `tools.mutate.loading.Marks`."""
    hits: dict[str, set[int]] = {}
    for notes in folder.glob("*.hits"):
        for note in notes.read_text().splitlines():
            file, line, _ = note.rsplit(" ", 2)
            hits.setdefault(file, set()).add(int(line))
    return hits


# --- What ranks do


def rank_main(day: str, folder: Path) -> None:
    """One rank of a job."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    {"train": _train, "dcp": _stock_dcp, "hf": _hugging_face}[day](folder)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # not a plain return: interpreter shutdown races with gloo's threads


def _shape() -> Any:
    from examples.llama import LlamaShape

    return LlamaShape(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, mlp_size=96)


def _model(seed: int) -> tuple[Any, Any]:
    """A small Llama in bf16, sharded in blocks of 16 rows, and its optimizer."""
    import torch

    from examples.llama import Llama, start_weights
    from vescale_fsdp import MixedPrecisionPolicy, Rows, fully_shard

    torch.manual_seed(seed)
    model = Llama(_shape())
    start_weights(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, granularity=Rows(16), mp_policy=policy)
    fully_shard(model, granularity=Rows(16), mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _step(model: Any, optimizer: Any, step: int) -> None:
    """Two micro-batches of this rank's samples, clipping, and the optimizer's step."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(256, (MICRO_BATCHES, 12, 17), generator=generator)
    for number, micro_batch in enumerate(tokens.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]):
        model.set_requires_gradient_sync(number == MICRO_BATCHES - 1)
        logits = model(micro_batch[:, :-1]).float()
        loss = cross_entropy(logits.flatten(0, 1), micro_batch[:, 1:].flatten())
        (loss / MICRO_BATCHES).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _train(folder: Path) -> None:
    """Steps from the newest checkpoint on; two are saved."""
    import torch

    from vescale_fsdp.checkpoint import CheckpointManager, EverySteps

    model, optimizer = _model(seed=0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with CheckpointManager(
        folder / "run", save_policy=EverySteps(STEPS // 2), retention=3, asynchronous=True
    ) as manager:
        restored = manager.restore(state)
        first = restored.step if restored else 0
        for step in range(first + 1, first + STEPS + 1):
            _step(model, optimizer, step)
            scheduler.step()
            manager.save(step, state)
    if manager.steps()[-1] != first + STEPS:
        raise RuntimeError(f"steps are {manager.steps()}, not up to {first + STEPS}")


def _stock_dcp(folder: Path) -> None:
    """torch's functions on this library's model; this library's `load` on torch's folder."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from vescale_fsdp.checkpoint import load

    trained, optimizer = _model(seed=1)
    _step(trained, optimizer, 1)
    weights, moments = get_state_dict(trained, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "dcp")

    model, optimizer = _model(seed=2)
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / "dcp")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    _assert_equal(model, trained)

    model, optimizer = _model(seed=3)
    load(folder / "dcp", {"model": model, "optimizer": optimizer})
    _assert_equal(model, trained)


def _hugging_face(folder: Path) -> None:
    """A repository into shards, a step, and the shards as another repository."""
    from vescale_fsdp.checkpoint import load, save
    from vescale_fsdp.conversion import HuggingFace

    model, optimizer = _model(seed=4)
    load(folder / "repository", {"model": model}, dtype="state")
    _step(model, optimizer, 1)
    save(folder / "tuned", {"model": model}, format=HuggingFace(assets=folder / "repository"))
    again, _ = _model(seed=5)
    load(folder / "tuned", {"model": again})
    _assert_equal(again, model)


def _assert_equal(model: Any, expected: Any) -> None:
    """Raise if a parameter of this rank differs."""
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        if not one.to_local().equal(other.to_local()):
            raise RuntimeError(f"{name} differs")


# --- The week


def commands() -> list[tuple[int, tuple[str, ...]]]:
    """Exit code and arguments of each ``vescale-convert``, in a folder with this week's run."""
    middle, last = f"run/step-{STEPS:08}", f"run/step-{2 * STEPS:08}"
    names = ("--rules", "torchtitan-llama", "--rules-to", "ours", "--config", "repository")
    return [
        (0, ("inspect", "run")),
        (0, ("inspect", "repository", "--json")),
        (0, ("verify", last)),
        (0, ("verify", "dcp")),
        (1, ("diff", middle, last, "--model-only")),
        (0, ("to-hf", last, "exported", "--assets", "repository")),
        (0, ("diff", last, "exported", "--model-only")),
        (0, ("to-fsdp2", last, "stock")),
        (0, ("to-torch", last, "model.pt")),
        (0, ("to-zarr", last, "arrays")),
        (0, ("to-native", "repository", "start", "--ranks", "4", "--granularity", "rows:16")),
        (0, ("to-native", "repository", "renamed", *names)),
        (0, ("diff", "repository", "start")),
        (0, ("report", last, "--out", "report.html")),
        (0, ("rules",)),
        (0, ("plan", "repository", "--shards", "8,64", "--granularity", "rows:16")),
    ]


def run_week(folder: Path, environment: dict[str, str]) -> None:
    """Run every day in a folder; the first that fails ends the week.

    Raises:
        RuntimeError: a job or a command did not end as it should.
    """
    _write_repository(folder / "repository")
    for day, ranks in (("train", 2), ("train", 3), ("dcp", 2), ("hf", 3)):
        begin_s = time.monotonic()
        logs = folder / f"logs-{day}-{ranks}"
        command = ["--rank", day, str(folder)]
        Job("tools.typical_week", ranks, command, logs, timeout_s=TIMEOUT_S, environment=environment).wait()
        print(f"{time.monotonic() - begin_s:5.1f} s  {day} on {ranks} ranks", flush=True)
    for number, arguments in commands():
        begin_s = time.monotonic()
        command = [sys.executable, "-m", "vescale_fsdp.conversion", *arguments]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if done.returncode != number:
            raise RuntimeError(
                f"exit code {done.returncode}, not {number}: {command}\n{done.stdout}\n{done.stderr}"
            )
        print(f"{time.monotonic() - begin_s:5.1f} s  vescale-convert {' '.join(arguments)}", flush=True)


def _write_repository(folder: Path) -> None:
    """A small Llama as Hugging Face stores it."""
    import torch
    from safetensors.torch import save_file

    from examples.llama import Llama, start_weights

    folder.mkdir()
    torch.manual_seed(9)
    model = Llama(_shape())
    start_weights(model)
    (folder / "config.json").write_text(json.dumps(_shape().hugging_face_config()))
    weights = {name: param.detach().bfloat16() for name, param in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """The shares as text."""
    lines = [f"{'':12}{'lines':>8}{'ran':>8}{'percent':>9}"]
    for name, row in rows.items():
        lines.append(f"{name:12}{row['lines']:8}{row['ran']:8}{row['percent']:9.1f}")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    parser.add_argument("--rank", nargs=2, metavar=("DAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank[0], Path(options.rank[1]))
    with (
        tempfile.TemporaryDirectory() as notes,
        tempfile.TemporaryDirectory() as folder,
        hooked(ROOT) as variables,
    ):
        run_week(
            Path(folder), variables | {"MUTATE_HITS": notes, "MUTATE_STATEMENTS": "1", "OMP_NUM_THREADS": "1"}
        )
        rows = shares(ROOT, hits_of(Path(notes)))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
