"""A store that no rank runs: ``python -m vescale_fsdp.elastic.store_server --port 29500``, once per job.

Processes meet there (`StoreMembership`), so it must outlive all of them. On a cluster run it
beside the scheduler's script, on the machine that is least likely to go.

torch's store has no authentication, so it listens on the loopback address unless ``--host`` names another one. Then its
clients sign what they write: VESCALE_FSDP_SECRET must be set, here and in their environment.
"""

from __future__ import annotations

import argparse
import signal
from datetime import timedelta

from vescale_fsdp.checkpoint.ranks.stores import bound_store, check_exposure, secret_of

__all__: list[str] = []


def main() -> None:
    """Serve until somebody ends this process."""
    parser = argparse.ArgumentParser(description="The store of an elastic job, in a process of its own.")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=29500, help="0 takes any that is free")
    options = parser.parse_args()
    check_exposure(options.host, secret_of(None))
    store = bound_store(options.host, options.port, timedelta(seconds=300))
    print(f"port {store.port}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
