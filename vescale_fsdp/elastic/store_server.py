"""A store that no rank runs: ``python -m vescale_fsdp.elastic.store_server --port 29500``, once per job.

Processes meet there (`StoreMembership`), so it must outlive all of them. On a cluster run it
beside the scheduler's script, on the machine that is least likely to go.
"""

from __future__ import annotations

import argparse
import signal

import torch.distributed as dist

__all__: list[str] = []


def main() -> None:
    """Serve until somebody ends this process."""
    parser = argparse.ArgumentParser(description="The store of an elastic job, in a process of its own.")
    parser.add_argument("--host", default="0.0.0.0", help="the address to listen on")
    parser.add_argument("--port", type=int, default=29500, help="0 takes any that is free")
    options = parser.parse_args()
    store = dist.TCPStore(options.host, options.port, is_master=True, wait_for_workers=False)
    print(f"port {store.port}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
