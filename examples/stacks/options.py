"""What the examples on accelerate, Trainer and TRL run: their options, and the command line that fills them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GLOBAL_BATCH = 12
MICRO_BATCHES = 2


@dataclass(frozen=True)
class Options:
    """What to run."""

    out: Path
    runtime: str = "vescale"  # or stock "fsdp2", for comparing
    steps: int = 50
    save_at: int = 25
    resume: Path | None = None
    state_dict_type: str = "SHARDED_STATE_DICT"
    cpu_ram_efficient_loading: bool = False
    tied: bool = False
    bf16: bool = False
    replicas: int = 1  # HSDP, of accelerate
    activation_checkpointing: bool = False  # of accelerate
    # Of the clipping. The largest gradient (inf) is the same however gradients are cut; a sum is not, in its last bits.
    norm_type: float = 2.0
    max_norm: float = 1.0


def parse_options(description: str) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runtime", choices=["vescale", "fsdp2"], default="vescale")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--save-at", type=int, default=25)
    parser.add_argument("--resume", type=Path)
    return Options(**vars(parser.parse_args()))


def write_losses(out: Path, history: Sequence[object]) -> None:
    """Write what each step gave to OUT/losses.json, on rank 0."""
    # A file, since lines that several ranks print can run together.
    if os.environ["RANK"] == "0":
        file = out / "losses.json"
        file.write_text(json.dumps(history))
        print(f"first {history[0]}, last {history[-1]}; all in {file}", flush=True)
