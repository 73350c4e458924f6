"""Which rank owns which element: integers and names only. Pickles name the layout classes by this path."""

from vescale_fsdp.lazy import lazily_export

lazily_export(
    __name__, {"vescale_fsdp.layout.group_layout": "GroupLayout ModelLayout Piece PieceRun TensorSlot"}
)
