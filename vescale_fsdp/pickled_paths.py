"""Class paths that pickles of 0.1's flat modules hold, and where the classes stand now.

``torch.save`` and ``dcp.save`` pickle a value of ours by the path of its class, such as
``vescale_fsdp.placement.RaggedShard``. What any 0.x wrote, every later 0.x reads: a pickle that asks for an old path
gets a module with the classes of `CLASSES` and nothing else. `install`, called by the package's ``__init__``, puts one
finder into ``sys.meta_path``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

from vescale_fsdp.lazy import lazily_export

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # importlib.abc brings tempfile and shutil: 10 ms of every start

# Old module -> {new module: classes that pickles may name}.
CLASSES = {
    "vescale_fsdp.checkpoint.per_rank": {"vescale_fsdp.checkpoint.state.per_rank": "PerRank"},
    "vescale_fsdp.granularity": {
        "vescale_fsdp.layout.granularity": "Element Flat Granularity Rows Tiles Whole"
    },
    "vescale_fsdp.layout.report": {},  # the package of the next
    "vescale_fsdp.layout.report.plan_report": {
        "vescale_fsdp.layout.plan_report": "PlanReport PlanRow PlannedGroup PlannedParam"
    },
    "vescale_fsdp.optim.base": {"vescale_fsdp.optim.structured_optimizer": "AdamWOptions"},
    "vescale_fsdp.optim.flat": {"vescale_fsdp.optim.flat_optimizer": "FlatOptimizer"},
    "vescale_fsdp.padding": {"vescale_fsdp.layout.padding": "PaddingPolicy"},
    "vescale_fsdp.placement": {"vescale_fsdp.layout.placement": "RaggedShard StridedRaggedShard"},
    "vescale_fsdp.planner": {"vescale_fsdp.layout.planner": "TensorSpec"},
    "vescale_fsdp.quantize.gather": {"vescale_fsdp.quantize.quantized_gather": "QuantizedGather"},
    "vescale_fsdp.quantize.grid": {"vescale_fsdp.quantize.codec": "BlockGrid"},
    "vescale_fsdp.quantize.quantized": {"vescale_fsdp.quantize.codec": "Quantized"},
    "vescale_fsdp.report": {
        "vescale_fsdp.layout.plan_report": "PlanReport PlanRow PlannedGroup PlannedParam"
    },
}


class _OldPaths(Loader):
    """Makes a module of `CLASSES` when something asks for it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in CLASSES else None

    def create_module(self, spec: ModuleSpec) -> None:
        """None asks for a plain module."""

    def exec_module(self, module: ModuleType) -> None:
        lazily_export(module.__name__, CLASSES[module.__name__])


def install() -> None:
    """Let old class paths be found, once per process."""
    if not any(isinstance(finder, _OldPaths) for finder in sys.meta_path):
        # In front: a file of an older version that an upgrade left behind would define each class a second time.
        sys.meta_path.insert(0, _OldPaths())
