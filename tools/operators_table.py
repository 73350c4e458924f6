"""Write vescale_fsdp/dtensor/operators/OPERATORS.md from the dispatch table of ragged tensors.

python tools/operators_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from vescale_fsdp.dtensor.operators.dispatch_table import FAMILIES, WITHOUT_LIST, rule_of
from vescale_fsdp.torch_private import operator_names

ROOT = Path(__file__).parents[1]
aten = torch.ops.aten


def operator_table() -> str:
    """Return the text of OPERATORS.md: every family, what it supports, and its operators in the installed torch."""
    names: dict[object, set[str]] = {}
    for full_name in operator_names():
        namespace, _, rest = full_name.partition("::")
        name, _, overload = rest.partition(".")
        if namespace != "aten":  # operators of other libraries have no rules
            continue
        func = getattr(getattr(aten, name), overload or "default")  # torch's name of an unnamed overload
        names.setdefault(rule_of(func), set()).add(name)
    lines = [
        "# Operators on ragged tensors",
        "",
        "Written by `python tools/operators_table.py` from the dispatch table; a test compares the two.",
        f"Operators are those of torch {torch.__version__.split('+')[0]}. Any other operator raises",
        "`UnsupportedOpError`, a `NotImplementedError` that names the operator, the placement and what to do instead.",
        "",
        "Operators that gather, or bring tensors to other placements, are collectives: all ranks that have pieces must",
        "call them. The ranks compare operator, placements and a counter first, and raise if they differ or if a rank",
        "does not come. Reductions are collectives, too; of several in a row, ranks compare the first.",
        "",
        "| family | support | operators |",
        "|---|---|---|",
    ]
    for rule, family in FAMILIES.items():
        listed = (
            "" if rule in WITHOUT_LIST else ", ".join(f"`{name}`" for name in sorted(names.get(rule, ())))
        )
        lines.append(f"| {family.title} | {family.support} | {listed} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "vescale_fsdp/dtensor/operators/OPERATORS.md").write_text(operator_table())
