"""Planning one torch.save file that holds a whole state, nested as it was."""

from __future__ import annotations

from typing import Any

from vescale_fsdp.checkpoint.moves.plan import FilePlan, OutputPlan, TensorItems, whole
from vescale_fsdp.checkpoint.moves.tensor_view import repeated_dims, without_repeats
from vescale_fsdp.checkpoint.state.nesting import Path, nest
from vescale_fsdp.conversion.formats.torch_save.archive_plan import plan_archive
from vescale_fsdp.conversion.formats.torch_save.pickle_writer import TensorOut, dump_pickle
from vescale_fsdp.conversion.state.carried_state import CarriedState


def plan_torch(state: CarriedState, file: str) -> OutputPlan:
    """One file that ``torch.load(file, weights_only=True)`` reads; what a source repeats by strides is stored once.

    Raises:
        ConversionError: for values that are no plain data.
    """
    leaves: dict[Path, Any] = {}
    storages: list[TensorItems] = []
    keys: dict[str, str] = {}  # of the storage of each tensor
    for name, view in state.views.items():
        info, first = view.info, state.twins.get(name, name)
        if first not in keys:
            keys[first] = str(len(storages))
            storages.append(whole(without_repeats(view, repeated_dims(view))))
        leaves[state.path(name)] = TensorOut(keys[first], info.dtype, info.shape, repeated_dims(view))
    for name, read in state.values.items():
        leaves[state.path(name)] = read()
    contents = plan_archive(dump_pickle(nest(leaves), where=file), storages, 0)
    return OutputPlan(
        "torch", (FilePlan(file, tuple(contents)),), (), is_stale=lambda _: False, single_file=True
    )
