"""Layouts: which rank owns which elements of each tensor. Layouts contain integers and names only, no tensors."""

from vescale_fsdp.lazy import lazily_export

# Public names are in __init__.pyi. The classes below are not constructed by users, but methods return their instances
# and pickles look them up in this package.
lazily_export(
    __name__,
    unlisted={
        "vescale_fsdp.layout.group_layout": "ModelLayout Piece PieceRun TensorSlot",
        "vescale_fsdp.layout.placement": "StridedRaggedShard",
        "vescale_fsdp.layout.plan_report": "PlanRow PlannedGroup PlannedParam",
    },
)
