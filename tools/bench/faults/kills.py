"""Time from a death to the next step of an elastic job, over all phases of the job, against a bound.

    python tools/bench/faults/kills.py                      100 kills in ten jobs; half an hour
    python tools/bench/faults/kills.py --jobs 2 --seed 3

The jobs of `tests.vescale_fsdp.elastic.killed_ranks`: four processes on two nodes, under HSDP, with Muon, an average of
the weights, a data loader and a RAM tier. A process, a node, or a process of each node is killed: while a round agrees,
before and while groups form, in renewal, restore and forward, while large messages are on their way, in backward, the
optimizer's step and a save, and at the end. Some are replaced at once. All jobs end, and their losses and weights have
the bits of a job that is restarted from the same steps, which the test of that file compares.

Time is from a cell's last death to the end of the first step of the next epoch. A cell at the end of a job has a next
step only if its processes are replaced. On a busy machine ranks wait for a processor: "without" estimates the time from
the share of its time for which the main thread of a rank has waited so, of the rank with the most. The bound is 2
keep-alives and 5 s, plus the time to restore, which is nothing here: the state has a few kilobytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.vescale_fsdp.elastic.killed_ranks import (
    KEEP_ALIVE_S,
    PHASES,
    Recovery,
    drawn,
    launch,
    recoveries,
    step_of,
)
from tools.bench.rows import Row, print_table, write_json

BOUND_S = 2 * KEEP_ALIVE_S + 5


def measure(num_jobs: int, seed: int) -> list[Row]:
    """Run jobs; returns rows. Prints each recovery as a line of JSON."""
    found: list[Recovery] = []
    failed: list[int] = []
    num_cells, state_bytes = 0, 0
    for number, cells in enumerate(drawn(seed)[:num_jobs]):
        folder = Path(tempfile.mkdtemp(prefix="bench-kills-"))
        began_s = time.monotonic()
        try:
            launch(folder, cells, step_of(len(cells) - 1) + 4, limit_s=900)
        except AssertionError as failure:  # other jobs count; the folder is kept
            failed.append(number)
            print(f"job {number} of seed {seed} failed, see {folder}: {failure}", flush=True)
            continue
        new = recoveries(folder, cells)
        newest = max(folder.glob("steps/step-*"))
        state_bytes = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
        if max((each.seconds * (1 - each.queued) for each in new), default=0.0) > BOUND_S:
            print(f"job {number} of seed {seed} exceeded the bound, see {folder}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        num_cells += len(cells)
        found += new
        for each in new:
            print(
                json.dumps(
                    {
                        "job": number,
                        **each.cell._asdict(),
                        "seconds": round(each.seconds, 2),
                        "queued": round(each.queued, 2),
                    }
                ),
                flush=True,
            )
        print(f"job {number}: {len(cells)} cells in {time.monotonic() - began_s:.0f} s", flush=True)
    seconds = sorted(each.seconds for each in found)
    unqueued = sorted(each.seconds * (1 - each.queued) for each in found)
    by_phase: dict[str, list[float]] = defaultdict(list)
    for each in found:
        by_phase[each.cell.phase].append(each.seconds)
    case, target = f"{num_cells} cells, {len(found)} with a next step", f"<= {BOUND_S:g}"
    rows = [
        Row(case, "death to next step, median", "s", statistics.median(seconds), target=target),
        Row(case, "95 of 100", "s", seconds[int(0.95 * len(seconds))], target=target),
        Row(case, "worst", "s", seconds[-1], target=target),
        Row(case, "over the bound", "cells", sum(each > BOUND_S for each in seconds), target="<= 0"),
        Row(
            case,
            "without waits for a processor: 95 of 100",
            "s",
            unqueued[int(0.95 * len(unqueued))],
            target=target,
        ),
        Row(case, "without waits for a processor: worst", "s", unqueued[-1], target=target),
        Row(case, "jobs that failed", "jobs", len(failed), target="<= 0"),
        Row(case, "state restored", "bytes", state_bytes),
    ]
    rows += [
        Row(
            f"killed in {phase}", f"worst of {len(by_phase[phase])}", "s", max(by_phase[phase]), target=target
        )
        for phase in PHASES
        if by_phase[phase]
    ]
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=10, help="of ten cells each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options.jobs, options.seed)
    print_table(rows)
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
