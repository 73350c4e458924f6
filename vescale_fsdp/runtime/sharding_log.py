"""What was sharded, told to `logging`: one line per unit and one for the model, when its root is first used.

The logger is "vescale_fsdp". The job's rank 0 says it at INFO, the others at DEBUG; nobody is given a handler, so that
nothing is printed unless the program, or the stack it runs in, asks for INFO.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from vescale_fsdp.runtime.param_group import ParamGroup

_logger = logging.getLogger("vescale_fsdp")


def log_sharding(model: str, units: Sequence[tuple[str, Sequence[ParamGroup]]]) -> None:
    """Log how a model was sharded.

    Args:
        model: what to call it.
        units: its units' names and groups.
    """
    level = logging.INFO if dist.get_rank() == 0 else logging.DEBUG
    if not _logger.isEnabledFor(level):
        return
    for name, groups in units:
        _logger.log(level, "unit %s: %s", name, _described(groups))
    every = [group for _, groups in units for group in groups]
    _logger.log(level, "model %s: %d units, %s", model, len(units), _described(every))


def _described(groups: Sequence[ParamGroup]) -> str:
    """Sizes of these groups together. Of what tensor parallelism has cut, this rank's part counts."""
    sizes = [(group.layout, group.shard.dtype.itemsize) for group in groups]
    payload = sum(layout.payload_numel * itemsize for layout, itemsize in sizes)
    padding = sum((layout.numel - layout.payload_numel) * itemsize for layout, itemsize in sizes)
    scattered = sum(layout.copied_numel * itemsize for layout, itemsize in sizes)
    per_rank = sum(layout.shard_numel * itemsize for layout, itemsize in sizes)
    return (
        f"{sum(len(group.params) for group in groups)} parameters of "
        f"{sum(layout.payload_numel for layout, _ in sizes):,} elements over {_ranks(groups)}, "
        f"padding {padding / payload if payload else 0:.2%}, {scattered:,} bytes scattered, "
        f"{per_rank:,} bytes per rank"
    )


def _ranks(groups: Sequence[ParamGroup]) -> str:
    """How many ranks hold these groups; several numbers where their meshes differ."""
    found = []
    for group in groups:
        replicas = group.data.mesh.size() // group.data.num_shards
        found.append(f"{group.data.num_shards} ranks" + (f" in {replicas} replicas" if replicas > 1 else ""))
    return " and ".join(dict.fromkeys(found)) or "no ranks"
