"""Compute docs/gpu_expectations.json, and print it.

python -m tools.replay --cache /tmp/recordings       four CPU minutes, of which most go to recordings, made once
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from tools.replay.figures import RESULTS
from tools.replay.models import BLOCKSHARD, FSDP2, OURS, SHARD1
from tools.replay.predict import ASSUMPTIONS, SERIES, Study, padding


@click.command(help=__doc__)
@click.option("--cache", type=click.Path(path_type=Path), help="folder of recordings that are made once")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(cache: Path | None, out: Path) -> None:
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
    start_s = time.process_time()
    study = Study(cache)
    results: dict[str, Any] = {"assumptions": ASSUMPTIONS, "table_1": study.table_1()}

    def done(name: str, value: Any) -> None:
        results[name] = value
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{time.process_time() - start_s:.0f} CPU s: {name} {json.dumps(value)}", flush=True)

    machine = study.machine
    done(
        "machine",
        {
            name: vars(machine)[name]
            for name in ("gather_bytes_s", "reduce_bytes_s", "copy_out_bytes_s", "copy_in_bytes_s")
        },
    )
    done("bounds", {ranks: study.bounds("gpt-oss-120B", ranks) for ranks in (64, 128)})
    done(
        "memory",
        {ranks: study.memory("gpt-oss-120B", ranks, 8192, (OURS, FSDP2)) for ranks in (64, 128, 256, 1024)},
    )
    done(
        "by_tokens",
        {
            model: {ranks: study.by_tokens(model, ranks) for ranks in counts}
            for model, counts in (("Llama-3-70B", (64, 1024)), ("gpt-oss-120B", (64, 128)))
        },
    )
    done(
        "by_ranks",
        {f"{model}, {library}": study.by_ranks(model, 8192, library) for model, library in SERIES},
    )
    done("narrow", {model: study.narrow(model, 64, 8192) for model in ("Llama-3-70B", "gpt-oss-120B")})
    done(
        "padding",
        {
            model: {
                library: {ranks: padding(model, ranks, library) for ranks in (64, 128, 256, 512, 1024)}
                for library in (FSDP2, SHARD1, BLOCKSHARD)
            }
            for model in ("gpt-oss-120B", "DeepSeek-V3 grouped")
        },
    )


if __name__ == "__main__":
    main()
