"""A store server for an elastic job: run ``python -m vescale_fsdp.elastic.store_server --port 29500`` once per job.

The store of `StoreMembership` must outlive all ranks. On a cluster, run this server on the machine that is least likely
to fail, for example from the job's batch script.

torch's store has no authentication, so it listens on the loopback address unless ``--host`` names another one. Clients
on other machines sign their entries: set VESCALE_FSDP_SECRET in the environment of the store and of all clients.
"""

from __future__ import annotations

import argparse
import signal
from datetime import timedelta

from vescale_fsdp.checkpoint.ranks.stores import bound_store, check_exposure, secret_of


def main() -> None:
    """Run a store server, and print its port, until a signal ends this process."""
    parser = argparse.ArgumentParser(description="Run the store of an elastic job in its own process.")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=29500, help="the port; 0 for any free port")
    options = parser.parse_args()
    check_exposure(options.host, secret_of(None))
    store = bound_store(options.host, options.port, timedelta(seconds=300))
    print(f"port {store.port}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
