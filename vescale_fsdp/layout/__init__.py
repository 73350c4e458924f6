"""Who holds which element: integers and names alone. Pickles know the layouts under this name."""

from vescale_fsdp.lazy import lazily_export

lazily_export(
    __name__, {"vescale_fsdp.layout.group_layout": "GroupLayout ModelLayout Piece PieceRun TensorSlot"}
)
