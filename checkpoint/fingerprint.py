"""`fingerprint`: 16 bytes per tensor of a state, which are equal wherever the state is.

Each rank adds up the byte sums (`vescale_fsdp.byte_sums`) of the regions that it would write to a checkpoint, and one
all-reduce of 16 bytes per tensor gives those of the whole tensors. Nothing is gathered, and a state has the same
fingerprint on any number of ranks, with any sharding, and in every file format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from vescale_fsdp.checkpoint.manifest.fingerprints import Fingerprint, check_cuts
from vescale_fsdp.checkpoint.manifest.manifest import Manifest, build_manifest
from vescale_fsdp.checkpoint.native.leaves import fingerprint_in
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, coordinator_for
from vescale_fsdp.checkpoint.ranks.replicas import begin_comparison
from vescale_fsdp.checkpoint.state.capture import take_state
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.torch_modes import plainly


@plainly  # not in the caller's autograd, inference or autocast mode
def fingerprint(state: Any, *, process_group: dist.ProcessGroup | None = None) -> Fingerprint:
    """Return the fingerprints of a live state's tensors, the same on all ranks. A collective.

    The ranks exchange 16 bytes per tensor, whatever the sharding; each rank reads its own part once. Of the replicas
    of a part, each reads a share, as in a save, so that a difference between replicas is not detected.

    Args:
        state: as for `save`; for example a module, or ``{"model": model, "optimizer": optimizer}``. Only its tensors
            count, not `PerRank` or other values.
        process_group: the ranks that have the state; default: all.

    Raises:
        CheckpointError: if a tensor cannot be described, or ranks disagree about the state.

    Examples:
        >>> import torch
        >>> state = {"w": torch.arange(6.0), "step": 3}
        >>> fingerprint(state) == fingerprint({"w": torch.arange(6.0)})
        True
        >>> from vescale_fsdp.checkpoint import save
        >>> from vescale_fsdp.conversion import fingerprint_of, open_source
        >>> save("fingerprinted", state)
        >>> fingerprint_of(open_source("fingerprinted")) == fingerprint(state)
        True
    """
    _, manifest, sums = sums_of_state(state, coordinator_for(process_group))
    check_cuts(manifest, sums)
    return fingerprint_in(manifest, sums)


def sums_of_state(
    state: Any, coordinator: Coordinator
) -> tuple[Mapping[str, torch.Tensor], Manifest, tuple[str, ...]]:
    """Return this rank's tensors by name, the manifest of a state, and the sums of its tensors. A collective."""
    taken = error = None
    try:
        taken = take_state(state, rank_of=coordinator.rank_of)
        _ = taken.structure.digest  # computed inside the try: an error reaches all ranks
    except BaseException as caught:  # noqa: BLE001  every error is raised on all ranks, by `agree`
        error = caught
    agreed = coordinator.agree(None if taken is None else taken.structure, 0, error)
    assert taken is not None  # else `agree` has raised
    with gc_paused():  # planning creates many objects and no cycles
        manifest = build_manifest(agreed.classes, save_id=agreed.save_id, world_size=coordinator.world_size)
    finish = begin_comparison(
        lambda: manifest,
        taken.locals_by_name,
        coordinator,
        check_replicas=False,
        dropped=lambda _: (),
        most_sums=len(manifest.entries),
    )
    return taken.locals_by_name, manifest, finish()
