"""Write vescale_fsdp/dtensor/operators/OPERATORS.md from the dispatch table of ragged tensors.

python tools/operators_table.py
"""

from __future__ import annotations

from pathlib import Path

from vescale_fsdp.dtensor.operators.table import operator_table

if __name__ == "__main__":
    (Path(__file__).parent.parent / "vescale_fsdp" / "OPERATORS.md").write_text(operator_table())
