"""A demonstration on real text: train sharded, get killed, continue on more ranks, export, load elsewhere.

    make demo            or: python -m tools.demo [--ranks 2 3] [--steps 200] [--save-at 70] [--out demo_output]

    killed/              2 ranks; checkpoint at step k; all ranks SIGKILLed some steps later
    restarted/           3 ranks; loads that checkpoint and runs to the end
    uninterrupted/       2 ranks, from start to end: the other two runs together must give the same losses
    hugging_face/        the restarted run's model, converted; transformers loads it
    losses.json, loss.svg   the losses of all three runs, and their picture

Every printed statement is checked; the first wrong one ends the demo with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, NamedTuple

from tools.torchrun_job import Job, JobFailed, losses_of
from vescale_fsdp.layout.pictures import CURVE_COLORS, QUIET, RULE, Canvas

# The runs differ only in the order in which floats are added. At the first step after the restart that is the order of
# fp32 sums over ranks. Later it is also the rounding of each rank's bf16 gradients (8 bits), over 4 windows on 3 ranks
# and 6 windows on 2 ranks, which accumulates during training.
FIRST_STEP_BOUND = 1e-5  # of the loss, relative
LATER_STEPS_BOUND = 2**-8  # of the loss, relative: one unit in the last place of bf16

# What other packages print while transformers is imported and loads weights.
NOISE = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
NOISY_LOGGERS = ("torchao", "torch.utils._pytree")


class Plan(NamedTuple):
    """What the demo trains: ``before`` ranks die ``lost`` steps after a checkpoint, and ``after`` ranks go on."""

    out: Path
    before: int
    after: int
    steps: int
    save_at: int
    lost: int

    @property
    def arguments(self) -> list[str]:
        """Arguments of every run. All numbers of ranks divide the batch; of 2 and 3 ranks it has 12 windows."""
        windows = 12 * math.lcm(self.before, self.after) // math.gcd(12, math.lcm(self.before, self.after))
        return ["--steps", str(self.steps), "--windows", str(windows)]


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


def train(out: Path, ranks: int, steps: range, *arguments: str) -> None:
    """One training job from start to end."""
    job = Job("examples.train", ranks, ["--out", str(out), *arguments], out / "logs")
    job.follow(out, f"{ranks} ranks", steps)
    job.wait()


def train_with_a_kill(plan: Plan, report: Report) -> int:
    """Train until shortly after the checkpoint, SIGKILL, then on other ranks to the end; returns the last step lost."""
    heading(
        f"1. Train on {plan.before} ranks, save at step {plan.save_at}, kill all ranks {plan.lost} steps later"
    )
    killed, restarted = plan.out / "killed", plan.out / "restarted"
    arguments = ["--out", str(killed), *plan.arguments, "--save-at", str(plan.save_at)]
    job = Job("examples.train", plan.before, arguments, killed / "logs")
    enough = plan.save_at + plan.lost
    last = job.follow(killed, f"{plan.before} ranks", range(plan.steps), until=lambda step: step >= enough)
    if job.process.poll() is not None:
        job.wait()  # the job ended by itself: raise its error
    job.kill_ranks(killed)
    print(f"  killed at step {last}; {last - plan.save_at} steps are lost, the checkpoint is not", flush=True)
    heading(f"2. Go on from the checkpoint, on {plan.after} ranks")
    checkpoint = killed / f"step_{plan.save_at}"
    steps = range(plan.save_at, plan.steps)
    train(restarted, plan.after, steps, *plan.arguments, "--resume", str(checkpoint))
    report.row("killed at step, restarted from", f"{last}, {plan.save_at}")
    return last


def compare_losses(plan: Plan, report: Report) -> None:
    """Print both loss curves side by side, check that their difference is within the bounds, and draw them."""
    heading("4. Both loss curves")
    steps, save_at = plan.steps, plan.save_at
    straight, before, after = (losses_of(plan.out / run) for run in ("uninterrupted", "killed", "restarted"))
    joined = {step: (after if step > save_at else before)[step] for step in range(1, steps + 1)}
    throughout, changed = f"{plan.before} ranks throughout", f"{plan.before} ranks, kill, {plan.after} ranks"
    print(f"  {'step':>6}{throughout:>20}{changed:>24}{'relative':>14}")
    shown = {1, save_at, save_at + 1, steps, *range(0, steps, max(1, steps // 12))} - {0}
    for step in sorted(shown):
        mark = "  <- restarted here" if step == save_at + 1 else ""
        delta = joined[step] / straight[step] - 1
        print(f"  {step:>6}{straight[step]:>20.5f}{joined[step]:>24.5f}{delta:>14.1e}{mark}")
    relative = {step: abs(joined[step] / straight[step] - 1) for step in joined}
    first, largest = relative[save_at + 1], max(relative.values())
    report.check(
        all(relative[step] == 0 for step in range(1, save_at + 1)),
        f"the two {plan.before}-rank runs agree bit by bit up to step {save_at}",
    )
    report.check(
        first <= FIRST_STEP_BOUND,
        f"the first step on {plan.after} ranks differs by {first:.0e} of the loss <= 1e-5",
    )
    within = all(
        each <= LATER_STEPS_BOUND for each in relative.values()
    )  # False for NaN, which `max` would ignore
    report.check(
        within, f"no step differs by more than {largest:.1e} of the loss <= 3.9e-03, the precision of bf16"
    )
    learnt = straight[1] - straight[steps]
    report.check(learnt > 1, f"the model learnt: loss fell by {learnt:.2f}")
    report.row("loss, first and last step", f"{straight[1]:.4f}  {straight[steps]:.4f} ({throughout})")
    report.row("loss, last step", f"{joined[steps]:.4f} ({plan.before} ranks, killed, {plan.after} ranks)")
    report.row("largest difference of losses", f"{largest:.1e} relative, bound {LATER_STEPS_BOUND:.1e}")
    runs = {"uninterrupted": straight, "killed": before, "restarted": after}
    results = {**plan._asdict(), "out": plan.out.name, "runs": runs}
    (plan.out / "losses.json").write_text(json.dumps(results) + "\n")
    (plan.out / "loss.svg").write_text(loss_picture(plan.out / "losses.json").svg())


def loss_picture(results: Path) -> Canvas:
    """Draw the losses of the three runs by step. The text is readable at a width of 400 pixels."""
    values = json.loads(results.read_text())
    straight, before, after = (
        {int(step): loss for step, loss in values["runs"][run].items()}
        for run in ("uninterrupted", "killed", "restarted")
    )
    plan = Plan(**{key: values[key] for key in Plan._fields})
    left, top, width, height = 52, 62, 568, 226
    canvas = Canvas("Training loss across a kill and a change of ranks", left + width + 20, top + height + 58)
    canvas.text(20, 32, f"Killed on {plan.before} ranks, continued on {plan.after}", size=22, bold=True)
    highest = math.ceil(max(straight.values()))

    def places(losses: dict[int, float]) -> list[tuple[float, float]]:
        return [
            (left + width * step / plan.steps, top + height * (1 - loss / highest))
            for step, loss in sorted(losses.items())
        ]

    for level in range(0, highest + 1, 2):
        ((_, y),) = places({0: level})
        canvas.line([(left, y), (left + width, y)], RULE, width=0.8)
        canvas.text(left - 8, y + 6, str(level), size=17, color=QUIET, anchor="end")
    for step in range(0, plan.steps + 1, max(1, plan.steps // 4)):
        ((x, y),) = places({step: 0})
        canvas.text(x, y + 22, str(step), size=17, color=QUIET, anchor="middle")
    canvas.text(left + width, top + height + 46, "step", size=17, color=QUIET, anchor="end")
    canvas.text(
        left, top + height + 46, f"loss; gray: never killed, {plan.before} ranks", size=17, color=QUIET
    )
    first, second = CURVE_COLORS[0], CURVE_COLORS[1]
    kept, lost = (
        {step: loss for step, loss in before.items() if (step <= plan.save_at) is is_kept}
        for is_kept in (True, False)
    )
    lost |= {plan.save_at: before[plan.save_at]}
    canvas.line(places(straight), "#98a2b3", width=7)
    canvas.line(places(kept), first, width=2.5)
    canvas.line(places(lost), first, width=2.5, dashed=True)
    canvas.line(places({plan.save_at: before[plan.save_at], **after}), second, width=2.5)
    (saved_x, saved_y), (killed_x, killed_y) = places(lost)[0], places(lost)[-1]
    for sign in (-1, 1):
        ends = [(killed_x - 8, killed_y - 8 * sign), (killed_x + 8, killed_y + 8 * sign)]
        canvas.line(ends, "#d0453a", width=3.5)
    canvas.dot(saved_x, saved_y, 5, second, tip=f"checkpoint of step {plan.save_at}")
    canvas.text(killed_x + 14, killed_y - 62, f"{plan.before} ranks killed", size=18, color="#d0453a")
    canvas.line([(killed_x + 3, killed_y - 10), (killed_x + 16, killed_y - 56)], "#d0453a", width=1.2)
    canvas.text(
        killed_x + 14,
        killed_y - 36,
        f"{plan.after} ranks continue from the checkpoint",
        size=18,
        color=second,
    )
    return canvas


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
    arguments = ["to-hf", str(run / "final"), str(target), "--assets", str(assets)]
    subprocess.run([*command, *arguments], env={**os.environ, **NOISE}, check=True)
    report.row("converted in", f"{time.monotonic() - start_s:.1f} s")


def load_with_transformers(run: Path, repository: Path, summary: dict[str, Any], report: Report) -> None:
    """transformers reads the repository: weights, logits, and a line of text."""
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from examples.train import PROMPT, digests

    heading("6. transformers loads it")
    disable_progress_bar()
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


def final_rows(plan: Plan, summary: dict[str, Any], report: Report) -> None:
    """Sizes, times and paths."""
    out, run = plan.out, plan.out / "restarted"
    files = [file for file in (run / "final").iterdir() if file.is_file()]
    seconds = [json.loads(line)["seconds"] for line in (run / "progress.jsonl").read_text().splitlines()]
    report.row("parameters", f"{summary['numel']:,}")
    report.row(f"elements per rank ({plan.after} ranks)", f"{summary['shard_numel']:,}")
    report.row("padding (blocks of 32 rows)", f"{summary['padding_ratio']:.3%}")
    report.row(
        f"step time, median ({plan.after} ranks)", f"{sorted(seconds)[len(seconds) // 2] * 1e3:.0f} ms"
    )
    report.row("load, save of a checkpoint", "{load:.2f} s, {save:.2f} s".format(**summary["seconds"]))
    report.row("checkpoint, with optimizer", f"{sum(file.stat().st_size for file in files):,} bytes")
    report.row("whole demo", f"{time.monotonic() - report.start_s:.0f} s")
    report.row("the checkpoint", run / "final")
    report.row("Hugging Face repository", out / "hugging_face")
    report.row("picture of one block's layout", draw(run))
    report.row("picture of the losses", out / "loss.svg")


def main() -> None:
    """Run all parts in order."""
    parser = argparse.ArgumentParser(description="train, kill, restart on other ranks, export, compare")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="folder, replaced if it exists")
    parser.add_argument("--ranks", type=int, nargs=2, default=(2, 3), help="before the kill, and after")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-at", type=int, default=70)
    parser.add_argument("--lost", type=int, default=10, help="steps between the checkpoint and the kill")
    options = parser.parse_args()
    before, after = options.ranks
    plan = Plan(options.out.absolute(), before, after, options.steps, options.save_at, options.lost)
    os.environ.update(NOISE)
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    shutil.rmtree(plan.out, ignore_errors=True)
    report = Report()
    try:
        train_with_a_kill(plan, report)
        heading(f"3. The same training on {before} ranks, not interrupted")
        train(plan.out / "uninterrupted", before, range(plan.steps), *plan.arguments)
        compare_losses(plan, report)
        run = plan.out / "restarted"
        summary = json.loads((run / "summary.json").read_text())
        export(run, plan.out / "hugging_face", report)
        load_with_transformers(run, plan.out / "hugging_face", summary, report)
        load_with_fsdp2(plan.out, run / "final", summary, report)
    except JobFailed as failure:
        sys.exit(f"FAILED: {failure}")
    final_rows(plan, summary, report)
    report.print_table()


if __name__ == "__main__":
    main()
