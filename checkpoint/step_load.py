"""Loading the newest step that is good: those that turn out damaged, lost or removed are passed over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vescale_fsdp.checkpoint.loading.load import Loader, LoadReport, Read, Verify
from vescale_fsdp.checkpoint.manifest.manifest import NoCheckpointError
from vescale_fsdp.checkpoint.memory.peer_memory import LostPartError
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.exchange import FileMove
from vescale_fsdp.checkpoint.step_search import Candidate, StepSearch
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.errors import CorruptCheckpointError, PartialLoadError


@dataclass(frozen=True)
class Restored:
    """What `CheckpointManager.restore` did.

    Attributes:
        step: the step that was restored.
        skipped: newer steps that were not restored, with the reason: damaged, or lost from the memory of a node.
        report: what the load left untouched, and the JSON given to `save`.
        tier: where it was read from: "disk" or "ram".
        moves: files that did not lie in the memory of the node that needed them: from which rank's memory they came, or
            that they were put together of the same step on disk (`FROM_DISK`), and which rank received them.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.checkpoint import CheckpointManager
        >>> manager = CheckpointManager("run_to_restore")
        >>> _ = manager.save(5, {"w": torch.ones(4)}, metadata={"loss": 2.5})
        >>> restored = manager.restore({"w": torch.zeros(4)})
        >>> restored.step, restored.tier, restored.report.metadata
        (5, 'disk', {'loss': 2.5})
    """

    step: int
    skipped: tuple[tuple[int, str], ...]
    report: LoadReport
    tier: str
    moves: tuple[FileMove, ...] = ()


@dataclass
class StepLoad:
    """How steps are loaded, and what those that failed have left in the state."""

    state: Any
    strict: bool
    include: tuple[str, ...] | None
    verify: Verify
    read: Read
    meter: Meter
    overwritten: dict[str, None] = field(default_factory=dict)

    def of(self, found: Candidate, coordinator: Coordinator) -> LoadReport:
        """Load one step."""
        if found.supply is not None:
            found.supply.bring_manifest()
        loader = Loader(found.storage, coordinator, self.verify, found.supply, self.read, self.meter)
        try:
            return loader.load(self.state, strict=self.strict, include=self.include)
        except PartialLoadError as error:
            self.overwritten |= dict.fromkeys(error.overwritten)
            raise


def first_good(search: StepSearch, load: Callable[[Candidate], LoadReport]) -> Restored | None:
    """The newest step that can be loaded, which makes up for what others overwrote in part; None if none is left."""
    while (found := search.newest()) is not None:
        stored, supply = found.step, found.supply
        try:
            report = load(found)
        except LostPartError as error:
            search.lost(stored, error)
        except NoCheckpointError:
            search.vanished()
        except CorruptCheckpointError as error:
            if not search.mended(found, error):
                search.pass_over(stored, error)
        except Exception as error:
            error.add_note(
                f"step {stored.number} ({stored.tier}) was not restored; older ones were not tried, since this is "
                "no damage: pass step= to go back to one"
            )
            raise
        else:
            moves = supply.moves if supply is not None else ()
            return Restored(stored.number, search.skipped, report, stored.tier, moves)
    return None
