"""Module paths that pickles of older versions contain, and the packages that export their classes now.

``torch.save`` and ``dcp.save`` pickle a value of this package by the path of its class. That path is a public package,
as in ``vescale_fsdp.RaggedShard``: `lazy.set_module` gives it to each class. Older pickles name modules, as in
``vescale_fsdp.placement.RaggedShard``. `install`, called by the package's ``__init__``, puts a finder into
``sys.meta_path`` that creates these modules, with the classes of `CLASSES` and nothing else.
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
    Loader = object  # importlib.abc imports tempfile and shutil, which takes 10 ms per start

# Old module -> {package that has the classes now: classes that pickles may name}. The packages do not change when a
# class moves inside them (`lazy.set_module`).
CLASSES = {
    "vescale_fsdp.checkpoint.per_rank": {"vescale_fsdp.checkpoint": "PerRank"},
    "vescale_fsdp.granularity": {"vescale_fsdp": "Element Flat Granularity Rows Tiles Whole"},
    "vescale_fsdp.layout.report": {},  # the parent package of the next entry
    "vescale_fsdp.layout.report.plan_report": {
        "vescale_fsdp": "PlanReport",
        "vescale_fsdp.layout": "PlanRow PlannedGroup PlannedParam",
    },
    "vescale_fsdp.optim.base": {"vescale_fsdp.optim": "AdamWOptions"},
    "vescale_fsdp.padding": {"vescale_fsdp": "PaddingPolicy"},
    "vescale_fsdp.placement": {"vescale_fsdp": "RaggedShard", "vescale_fsdp.layout": "StridedRaggedShard"},
    "vescale_fsdp.planner": {"vescale_fsdp.layout": "TensorSpec"},
    "vescale_fsdp.quantize.gather": {"vescale_fsdp.quantize": "QuantizedGather"},
    "vescale_fsdp.quantize.grid": {"vescale_fsdp.quantize": "BlockGrid"},
    "vescale_fsdp.quantize.quantized": {"vescale_fsdp.quantize": "Quantized"},
    "vescale_fsdp.report": {
        "vescale_fsdp": "PlanReport",
        "vescale_fsdp.layout": "PlanRow PlannedGroup PlannedParam",
    },
}


class _OldPaths(Loader):
    """An import finder and loader that creates the old modules, the keys of `CLASSES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # is_package: some old modules contain other old modules, and the flag does not matter for the rest.
        return ModuleSpec(fullname, self, is_package=True) if fullname in CLASSES else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, so that the import system creates a plain module."""

    def exec_module(self, module: ModuleType) -> None:
        lazily_export(module.__name__, CLASSES[module.__name__])


def install() -> None:
    """Make the old module paths importable; a second call does nothing."""
    if not any(isinstance(finder, _OldPaths) for finder in sys.meta_path):
        # Before all other finders: a file that an upgrade left at an old path would define its classes a second time.
        sys.meta_path.insert(0, _OldPaths())
