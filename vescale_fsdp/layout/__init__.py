"""Which rank owns which element: integers and names only."""

from vescale_fsdp.lazy import lazily_export

# Public names are in __init__.pyi. The names below are results of methods, and classes that pickles look up here.
lazily_export(
    __name__,
    unlisted={
        "vescale_fsdp.layout.group_layout": "ModelLayout Piece PieceRun TensorSlot",
        "vescale_fsdp.layout.placement": "StridedRaggedShard",
        "vescale_fsdp.layout.plan_report": "PlanRow PlannedGroup PlannedParam",
    },
)
