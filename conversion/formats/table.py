"""The table of formats that can be written, and the reader of the zarr format.

A new format needs a row in `vescale_fsdp.formats`, which names its reader, and a row here if it can be written. The
planner of a format is imported only when a conversion to this format runs. So a conversion to DCP does not import the
libraries of other formats, and ``--help``, which reads this table, imports none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vescale_fsdp.lazy import lazy_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_fsdp.checkpoint.formats.huggingface.repository import Assets
    from vescale_fsdp.checkpoint.moves.carried_state import CarriedState
    from vescale_fsdp.checkpoint.moves.plan import OutputPlan
    from vescale_fsdp.checkpoint.moves.source import Source
    from vescale_fsdp.checkpoint.storage.base import Storage
    from vescale_fsdp.conversion.convert_options import ConvertOptions

    Plan = Callable[[CarriedState, ConvertOptions, Assets, str], OutputPlan]

OPTIMIZER_FORMS = ("keep", "nested", "flattened", "drop")


class Target(NamedTuple):
    """A format that can be written.

    Args:
        command: the command that converts to the format; empty if there is only an option of another command.
        summary: help text of the command.
        plan: returns the plan of the files to write; its last argument is the file name of the output.
        options: names of the command's options, except those that all commands have.
        keeps_repeats: whether items that the source's strides repeat (expanded tensors) are written only once.
    """

    command: str
    summary: str
    plan: Plan
    options: tuple[str, ...] = ("prefix", "optimizer")
    keeps_repeats: bool = False


_granularities = lazy_function("vescale_fsdp.layout.granularity", "parse_granularities")
_plan_native = lazy_function("vescale_fsdp.checkpoint.formats.native.plan", "plan_native")
_plan_dcp = lazy_function("vescale_fsdp.checkpoint.formats.dcp.plan", "plan_dcp")
_plan_zarr = lazy_function("vescale_fsdp.checkpoint.formats.zarr.plan", "plan_zarr")
_plan_adapter = lazy_function("vescale_fsdp.conversion.formats.peft", "plan_adapter")
_plan_hf = lazy_function("vescale_fsdp.checkpoint.formats.huggingface.plan", "plan_hf")
_plan_torch = lazy_function("vescale_fsdp.checkpoint.formats.torch_save.write", "plan_torch")

# By the names of `vescale_fsdp.formats.FORMATS`, and in the same order.
TARGETS = {
    "native": Target(
        "to-vescale",
        "Write SRC to OUT as a native checkpoint.",
        lambda state, o, *_: _plan_native(state, o.ranks, _granularities(o.granularity)),
        ("prefix", "optimizer", "ranks", "granularity"),
    ),
    "dcp": Target(
        "to-fsdp2",
        "Write SRC to OUT as a stock torch.distributed.checkpoint folder, which FSDP2 loads.",
        lambda state, o, *_: _plan_dcp(state, o.max_shard_bytes),
    ),
    "zarr": Target(
        "to-zarr",
        "Write SRC to OUT as a native checkpoint in its zarr v3 form, one array per tensor.",
        lambda state, *_: _plan_zarr(state),
    ),
    "adapter": Target(
        "",
        "Write an adapter of the model in SRC to OUT as peft would.",
        lambda state, o, *_: _plan_adapter(state, o.assets),
    ),
    "hf": Target(
        "to-hf",
        "Write the model in SRC to OUT as a Hugging Face repository.",
        lambda state, o, assets, _: _plan_hf(
            list(state.views.values()), assets, o.max_shard_bytes, state.file_metadata
        ),
        ("include_asset", "no_assets", "adapter", "adapter_name", "require_check"),
    ),
    "torch": Target(
        "to-torch",
        "Write SRC to the file OUT as torch.save would.",
        lambda state, _, assets, file: _plan_torch(state, file),
        keeps_repeats=True,
    ),
}


def open_zarr(store: Storage) -> Source:
    """Open a zarr hierarchy. If it has a manifest, it is a native checkpoint in zarr form, and opened as such.

    Raises:
        CorruptCheckpointError: if the hierarchy is damaged.
    """
    # Imported here, so that `--help` does not import readers.
    from vescale_fsdp.checkpoint.formats.source import open_native
    from vescale_fsdp.checkpoint.formats.zarr import hierarchy

    return open_native(store) if hierarchy.has_manifest(store) else hierarchy.open_zarr(store)
