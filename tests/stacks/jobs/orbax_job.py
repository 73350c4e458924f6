"""A checkpoint that two processes of JAX save together with Orbax.

python -m tests.stacks.jobs.orbax_job FOLDER PORT HOST
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def main() -> None:
    """Save an array that is cut over the hosts, and one that both have."""
    folder, port, host = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, host)
    mesh = Mesh(np.array(jax.devices()), ("hosts",))
    values = {"cut": jnp.arange(32.0).reshape(8, 4), "whole": jnp.arange(6.0, dtype=jnp.bfloat16)}
    cuts = {"cut": PartitionSpec("hosts"), "whole": PartitionSpec()}
    tree = {
        name: jax.make_array_from_callback(
            value.shape, NamedSharding(mesh, cuts[name]), lambda index, value=value: np.asarray(value)[index]
        )
        for name, value in values.items()
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as saver:
        saver.save(folder, args=ocp.args.PyTreeSave(tree))


if __name__ == "__main__":
    main()
