"""A cluster in a box: namespaces of this machine as nodes.

    python -m tools.lab up --nodes 4 --gbit 1              until `down`, the end of this session, or an hour
    python -m tools.lab run --nproc-per-node 2 -- train.py --steps 10
    python -m tools.lab cut 3                              pull node 3's cable; heal 3 plugs it in
    python -m tools.lab kill 3                             cut its power; heal 3 starts it, empty
    python -m tools.lab slow 3 --mbit 50
    python -m tools.lab bytes                              sent and received per node
    python -m tools.lab down

A command that does not fit prints one sentence and ends with exit code 2. See `tools.lab` for what a node is.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from tools.lab import Lab, LabError

_NAME = click.option(
    "--name", default="lab", show_default=True, help="which lab, if there are several at a time"
)
_NODE = click.argument("node", type=int)


def _in_one_sentence(command: Callable[..., None]) -> Callable[..., None]:
    """Print a `LabError` alone, and end with exit code 2."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except LabError as error:
            click.echo(str(error), err=True)
            sys.exit(2)

    return guarded


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.option("--nodes", default=2, show_default=True)
@click.option("--gbit", default=1.0, show_default=True, help="rate of every link, each way, in Gb/s")
@click.option("--cores-per-node", type=int, help="cores of each node, in turn; default: all nodes use all")
@click.option("--minutes", default=60.0, show_default=True, help="after which the lab is taken down")
@click.option("--owner", type=int, help="process with which it ends; default: the leader of this session")
@_NAME
@_in_one_sentence
def up(**options: Any) -> None:
    """Make the nodes and their links."""
    if options["owner"] is None:
        leader = os.getsid(0)  # 0: in another PID namespace
        options["owner"] = leader if leader not in (0, os.getpid()) else None
    lab = Lab(**options)
    click.echo(f"{lab.num_nodes} nodes, {lab.gbit:g} Gb/s each way")


@main.command(context_settings={"ignore_unknown_options": True})
@click.option("--nproc-per-node", default=1, show_default=True)
@click.option("--timeout", default=600.0, show_default=True, help="seconds after which the job is killed")
@_NAME
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED)
@_in_one_sentence
def run(argv: tuple[str, ...], nproc_per_node: int, timeout: float, name: str) -> None:
    """Run a script under torchrun on all nodes."""
    lab = Lab.attach(name)
    job = lab.start(
        argv, nproc_per_node=nproc_per_node, echo=lambda node, line: click.echo(f"[node{node}] {line}")
    )
    try:
        codes = job.wait(timeout)
    except BaseException:
        lab.clear()
        raise
    sys.exit(max(codes.values()))


@main.command()
@_NODE
@_NAME
@_in_one_sentence
def cut(node: int, name: str) -> None:
    """Pull a node's cable."""
    Lab.attach(name).cut(node)


@main.command()
@_NODE
@_NAME
@_in_one_sentence
def heal(node: int, name: str) -> None:
    """Plug a node's cable in, at its first rate; start a killed node."""
    Lab.attach(name).heal(node)


@main.command()
@_NODE
@_NAME
@_in_one_sentence
def kill(node: int, name: str) -> None:
    """Cut a node's power."""
    Lab.attach(name).kill(node)


@main.command()
@_NODE
@click.option("--mbit", type=float, required=True)
@_NAME
@_in_one_sentence
def slow(node: int, mbit: float, name: str) -> None:
    """Give a node's link another rate."""
    Lab.attach(name).slow(node, mbit)


@main.command(name="bytes")
@_NAME
@_in_one_sentence
def show_bytes(name: str) -> None:
    """Print what each link has carried, headers included."""
    for node, traffic in Lab.attach(name).bytes().items():
        click.echo(f"node{node}  sent {traffic.sent_bytes:,}  received {traffic.received_bytes:,} bytes")


@main.command()
@_NAME
@_in_one_sentence
def down(name: str) -> None:
    """End the lab and everything that runs in it."""
    Lab.attach(name).down()


if __name__ == "__main__":
    main()
