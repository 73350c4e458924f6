"""Which rank owns which element: integers and names only. Pickles name the layout classes by this path."""

from typing import TYPE_CHECKING

from vescale_fsdp.lazy import lazily_export

if TYPE_CHECKING:
    from vescale_fsdp.layout.group_layout import GroupLayout, ModelLayout, Piece, PieceRun, TensorSlot
    from vescale_fsdp.layout.padding import PaddingWarning
    from vescale_fsdp.layout.placement import StridedRaggedShard
    from vescale_fsdp.layout.planner import TensorSpec, plan_group

__all__ = [
    "GroupLayout",
    "ModelLayout",
    "PaddingWarning",
    "Piece",
    "PieceRun",
    "StridedRaggedShard",
    "TensorSlot",
    "TensorSpec",
    "plan_group",
]

lazily_export(
    __name__,
    {
        "vescale_fsdp.layout.group_layout": "GroupLayout ModelLayout Piece PieceRun TensorSlot",
        "vescale_fsdp.layout.padding": "PaddingWarning",
        "vescale_fsdp.layout.placement": "StridedRaggedShard",
        "vescale_fsdp.layout.planner": "TensorSpec plan_group",
    },
)
