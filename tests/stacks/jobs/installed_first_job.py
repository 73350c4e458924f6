"""What `test_accelerate` asks of a process that installs first and imports accelerate later.

torchrun --nproc-per-node 2 -m tests.stacks.jobs.installed_first_job --out FOLDER
"""

# ruff: noqa: E402  the order of imports is what is tried
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from vescale_fsdp.integrations import install

assert "accelerate" not in sys.modules
install()

import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin

from tests.stacks.test_accelerate import prepare_with


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    found = prepare_with(FullyShardedDataParallelPlugin)
    (parser.parse_args().out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
