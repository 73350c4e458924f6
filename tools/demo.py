"""A demonstration on real text: train sharded, get killed, continue on more ranks, export, load elsewhere.

    make demo            or: python -m tools.demo [--steps 200] [--save-at 70] [--lost 10] [--out demo_output]

    killed/              2 ranks; checkpoint at step k; all ranks SIGKILLed some steps later
    restarted/           3 ranks; loads that checkpoint and runs to the end
    uninterrupted/       2 ranks, from start to end: the other two runs together must give the same losses
    hugging_face/        the restarted run's model, converted; transformers loads it

Every printed statement is checked; the first wrong one ends the demo with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from tools.torchrun_job import Job, JobFailed, losses_of

# The runs differ only in the order in which floats are added. At the first step after the restart that is the order of
# fp32 sums over ranks. Later it is also the rounding of each rank's bf16 gradients (8 bits), over 4 windows on 3 ranks
# and 6 windows on 2 ranks, which accumulates during training.
FIRST_STEP_BOUND = 1e-5  # of the loss, relative
LATER_STEPS_BOUND = 2**-8  # of the loss, relative: one unit in the last place of bf16


class Report:
    """The demo's results: rows of the final table, and checks."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []
        self.start_s = time.monotonic()

    def row(self, name: str, value: object) -> None:
        """Add a row to the final table."""
        self.rows.append((name, str(value)))

    def check(self, holds: bool, claim: str) -> None:
        """Print a statement if it is true; else end the demo."""
        if not holds:
            sys.exit(f"FAILED: {claim}")
        print(f"  ok: {claim}", flush=True)

    def print_table(self) -> None:
        """All lines, names aligned."""
        width = max(len(name) for name, _ in self.rows)
        print("\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in self.rows))


def heading(text: str) -> None:
    """Print the title of the next part."""
    print(f"\n{text}", flush=True)


def train(out: Path, ranks: int, steps: range, *arguments: str, title: str) -> None:
    """One training job from start to end."""
    job = Job(
        "examples.train", ranks, ["--out", str(out), "--steps", str(steps.stop), *arguments], out / "logs"
    )
    job.follow(out, title, steps)
    job.wait()


def train_with_a_kill(out: Path, steps: int, save_at: int, lost: int, report: Report) -> None:
    """Two ranks until shortly after the checkpoint, SIGKILL, then three ranks to the end."""
    heading(f"1. Train on 2 ranks, save at step {save_at}, kill all ranks {lost} steps later")
    killed, restarted = out / "killed", out / "restarted"
    arguments = ["--out", str(killed), "--steps", str(steps), "--save-at", str(save_at)]
    job = Job("examples.train", 2, arguments, killed / "logs")
    last = job.follow(killed, "2 ranks", range(steps), until=lambda step: step >= save_at + lost)
    if job.process.poll() is not None:
        job.wait()  # the job ended by itself: raise its error
    job.kill_ranks(killed)
    print(f"  killed at step {last}; {last - save_at} steps are lost, the checkpoint is not", flush=True)
    heading("2. Go on from the checkpoint, on 3 ranks")
    checkpoint = killed / f"step_{save_at}"
    train(restarted, 3, range(save_at, steps), "--resume", str(checkpoint), title="3 ranks")
    report.row("killed at step, restarted from", f"{last}, {save_at}")


def compare_losses(out: Path, steps: int, save_at: int, report: Report) -> None:
    """Print both loss curves side by side and check that their difference is within the bounds."""
    heading("4. Both loss curves")
    straight, before, after = (losses_of(out / run) for run in ("uninterrupted", "killed", "restarted"))
    joined = {step: (after if step > save_at else before)[step] for step in range(1, steps + 1)}
    print(f"  {'step':>6}{'2 ranks throughout':>20}{'2 ranks, kill, 3 ranks':>24}{'difference':>14}")
    shown = {1, save_at, save_at + 1, steps, *range(0, steps, max(1, steps // 12))} - {0}
    for step in sorted(shown):
        mark = "  <- restarted here" if step == save_at + 1 else ""
        delta = joined[step] - straight[step]
        print(f"  {step:>6}{straight[step]:>20.5f}{joined[step]:>24.5f}{delta:>14.1e}{mark}")
    relative = {step: abs(joined[step] / straight[step] - 1) for step in joined}
    first, largest = relative[save_at + 1], max(relative.values())
    report.check(
        all(relative[step] == 0 for step in range(1, save_at + 1)),
        f"the two 2-rank runs agree bit by bit up to step {save_at}",
    )
    report.check(first <= FIRST_STEP_BOUND, f"first step on 3 ranks differs by {first:.0e} <= 1e-5")
    within = all(
        each <= LATER_STEPS_BOUND for each in relative.values()
    )  # False for NaN, which `max` would ignore
    report.check(within, f"no step differs by more than {largest:.1e} <= 2^-8")
    learnt = straight[1] - straight[steps]
    report.check(learnt > 1, f"the model learnt: loss fell by {learnt:.2f}")
    report.row("loss, first and last step", f"{straight[1]:.4f}  {straight[steps]:.4f} (2 ranks throughout)")
    report.row("loss, last step", f"{joined[steps]:.4f} (2 ranks, killed, 3 ranks)")
    report.row("largest difference of losses", f"{largest:.1e} relative, bound {LATER_STEPS_BOUND:.1e}")


def export(run: Path, target: Path, report: Report) -> None:
    """Convert the final checkpoint with `vescale-convert`."""
    from examples.train import SHAPE

    heading("5. vescale-convert to-hf")
    assets = run / "assets"
    assets.mkdir()
    (assets / "config.json").write_text(json.dumps(SHAPE.hugging_face_config(), indent=2))
    installed = shutil.which("vescale-convert", path=sysconfig.get_path("scripts"))
    command = [installed] if installed else [sys.executable, "-m", "vescale_fsdp.conversion"]
    start_s = time.monotonic()
    subprocess.run([*command, "to-hf", str(run / "final"), str(target), "--assets", str(assets)], check=True)
    report.row("converted in", f"{time.monotonic() - start_s:.1f} s")


def load_with_transformers(run: Path, repository: Path, summary: dict[str, Any], report: Report) -> None:
    """transformers reads the repository: weights, logits, and a line of text."""
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    from examples.train import PROMPT, digests

    heading("6. transformers loads it")
    torch.set_num_threads(1)  # as in training: the order of sums in a matmul depends on it
    model = LlamaForCausalLM.from_pretrained(repository, dtype=torch.float32)
    report.check(
        digests(model) == summary["digests"], f"all {len(summary['digests'])} weights are bit by bit the same"
    )
    model = LlamaForCausalLM.from_pretrained(repository, dtype=torch.bfloat16)
    tokens = torch.tensor([list(PROMPT)])
    trained = load_file(run / "logits.safetensors")["logits"]
    with torch.no_grad():
        worst = (model(tokens).logits - trained).abs().max().item()
    # On the CPU both use the same kernel; a GPU may choose another kernel for other sizes.
    bound = 0.0 if summary["device"] == "cpu" else 2**-4
    report.check(worst <= bound, f"logits of the sharded model, in bf16, differ by {worst} <= {bound}")
    torch.manual_seed(0)
    sampling = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 60, "pad_token_id": 0}
    text = bytes(model.generate(tokens, attention_mask=torch.ones_like(tokens), **sampling)[0].tolist())
    print(
        "  the model writes: " + text[len(PROMPT) - 7 :].decode(errors="replace").splitlines()[0], flush=True
    )
    report.row("weights in Hugging Face's repository", "equal, bit by bit")
    report.row("logits in transformers", f"differ by {worst}")


def load_with_fsdp2(out: Path, checkpoint: Path, summary: dict[str, Any], report: Report) -> None:
    """Stock FSDP2 reads the same checkpoint without this package."""
    heading("7. Stock FSDP2 loads the same checkpoint")
    found = out / "fsdp2_digests.json"
    Job("examples.load_with_fsdp2", 2, [str(checkpoint), str(found)], out / "fsdp2_logs").wait()
    same = json.loads(found.read_text()) == summary["digests"]
    report.check(same, f"all {len(summary['digests'])} weights are bit by bit the same")
    report.row("weights loaded by FSDP2", "equal, bit by bit")


def draw(run: Path) -> Path:
    """Draw the layout of the first block, next to the checkpoint."""
    from vescale_fsdp.layout.group_layout import ModelLayout
    from vescale_fsdp.layout.pictures import layout_svg

    layout = ModelLayout.from_json(json.loads((run / "layout.json").read_text()))
    name, block = next((name, group) for name, group in layout.groups if "layers.0" in name)
    picture = run / "layout.svg"
    picture.write_text(layout_svg(block, f"{name} on {block.num_shards} ranks"))
    return picture


def final_rows(out: Path, summary: dict[str, Any], report: Report) -> None:
    """Sizes, times and paths."""
    run = out / "restarted"
    files = [file for file in (run / "final").iterdir() if file.is_file()]
    seconds = [json.loads(line)["seconds"] for line in (run / "progress.jsonl").read_text().splitlines()]
    report.row("parameters", f"{summary['numel']:,}")
    report.row("elements per rank (3 ranks)", f"{summary['shard_numel']:,}")
    report.row("padding (blocks of 32 rows)", f"{summary['padding_ratio']:.3%}")
    report.row("step time, median (3 ranks)", f"{sorted(seconds)[len(seconds) // 2] * 1e3:.0f} ms")
    report.row("load, save of a checkpoint", "{load:.2f} s, {save:.2f} s".format(**summary["seconds"]))
    report.row(
        "checkpoint, with optimizer", f"{sum(file.stat().st_size for file in files):,} bytes, {run / 'final'}"
    )
    report.row("Hugging Face repository", out / "hugging_face")
    report.row("picture of one block", draw(run))
    report.row("whole demo", f"{time.monotonic() - report.start_s:.0f} s")


def main() -> None:
    """Run all parts in order."""
    parser = argparse.ArgumentParser(description="train, kill, restart on more ranks, export, compare")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="folder, replaced if it exists")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-at", type=int, default=70)
    parser.add_argument("--lost", type=int, default=10, help="steps between the checkpoint and the kill")
    options = parser.parse_args()
    out, steps, save_at = options.out.absolute(), options.steps, options.save_at
    shutil.rmtree(out, ignore_errors=True)
    report = Report()
    try:
        train_with_a_kill(out, steps, save_at, options.lost, report)
        heading("3. The same training on 2 ranks, not interrupted")
        train(out / "uninterrupted", 2, range(steps), title="2 ranks")
        compare_losses(out, steps, save_at, report)
        run = out / "restarted"
        summary = json.loads((run / "summary.json").read_text())
        export(run, out / "hugging_face", report)
        load_with_transformers(run, out / "hugging_face", summary, report)
        load_with_fsdp2(out, run / "final", summary, report)
    except JobFailed as failure:
        sys.exit(f"FAILED: {failure}")
    final_rows(out, summary, report)
    report.print_table()


if __name__ == "__main__":
    main()
