"""Write vescale_fsdp/dtensor/operators/OPERATORS.md from the dispatch table of ragged tensors.

python tools/operators_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from vescale_fsdp.dtensor.operators.dispatch_table import operator_table

ROOT = Path(__file__).parents[1]

if __name__ == "__main__":
    (ROOT / "vescale_fsdp/dtensor/operators/OPERATORS.md").write_text(operator_table())
