"""The table of formats: how each is found in a folder, opened, and planned as a target.

Whoever adds a format adds a row here, and its reader and writer in a folder beside. These are imported when a
checkpoint of the format is met, so that looking at a DCP folder does not wait for the libraries that others need, and
``--help``, which is made from this table, for none.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME, ZARR_NAME
from vescale_fsdp.lazy import lazy_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_fsdp.checkpoint.moves.plan import OutputPlan
    from vescale_fsdp.checkpoint.moves.source import Source
    from vescale_fsdp.checkpoint.storage.base import Storage
    from vescale_fsdp.conversion.formats.convert_options import ConvertOptions
    from vescale_fsdp.conversion.formats.huggingface.assets import Assets
    from vescale_fsdp.conversion.state.carried_state import CarriedState

    Open = Callable[[Storage, str, bool], Source]  # (folder, file in it, whether its pickles are trusted)
    Plan = Callable[
        [CarriedState, ConvertOptions, Assets, str], OutputPlan
    ]  # the text is the target's file name

OPTIMIZER_FORMS = ("keep", "nested", "flattened", "drop")


class Target(NamedTuple):
    """How a format is written.

    Args:
        command: the command line's name for it; empty for what is an option of another command.
        summary: what that command does, for its help.
        plan: lists the files of a result.
        options: names of the command line's options that this target has beside those of all.
        keeps_repeats: whether items that a source repeats by strides are written once.
    """

    command: str
    summary: str
    plan: Plan
    options: tuple[str, ...] = ("prefix", "optimizer")
    keeps_repeats: bool = False


class Format(NamedTuple):
    """One row.

    Args:
        file: pattern of names; a folder that has such a file is a checkpoint of this format.
        open: reads metadata of a checkpoint.
        target: how it is written, if it is.
        is_file: the checkpoint is that file rather than a folder with it.
    """

    file: str
    open: Open
    target: Target | None = None
    is_file: bool = False


_granularities = lazy_function("vescale_fsdp.layout.granularity", "parse_granularities")
_open_native = lazy_function("vescale_fsdp.conversion.formats.native.read", "open_native")
_plan_native = lazy_function("vescale_fsdp.conversion.formats.native.write", "plan_native")
_open_dcp = lazy_function("vescale_fsdp.conversion.formats.dcp.read", "open_dcp")
_plan_dcp = lazy_function("vescale_fsdp.conversion.formats.dcp.write", "plan_dcp")
_has_manifest = lazy_function("vescale_fsdp.conversion.formats.zarr.read", "has_manifest")
_open_megatron = lazy_function("vescale_fsdp.conversion.formats.megatron", "open_megatron")
_open_deepspeed = lazy_function("vescale_fsdp.conversion.formats.deepspeed.read", "open_deepspeed")
_open_zarr = lazy_function("vescale_fsdp.conversion.formats.zarr.read", "open_zarr")
_plan_zarr = lazy_function("vescale_fsdp.conversion.formats.zarr.write", "plan_zarr")
_open_orbax = lazy_function("vescale_fsdp.conversion.formats.orbax", "open_orbax")
_open_shards = lazy_function("vescale_fsdp.conversion.formats.huggingface.read", "open_shards")
_open_hf = lazy_function("vescale_fsdp.conversion.formats.huggingface.read", "open_hf_folder")
_open_safetensors = lazy_function("vescale_fsdp.conversion.formats.huggingface.read", "open_safetensors")
_open_adapter = lazy_function("vescale_fsdp.conversion.adapters.peft_folder", "open_adapter")
_plan_adapter = lazy_function("vescale_fsdp.conversion.adapters.peft_folder", "plan_adapter")
_open_bin = lazy_function("vescale_fsdp.conversion.formats.huggingface.read", "open_bin_folder")
_plan_hf = lazy_function("vescale_fsdp.conversion.formats.huggingface.write", "plan_hf")
_open_ranks = lazy_function("vescale_fsdp.conversion.formats.torch_save.read", "open_ranks")
_open_torch = lazy_function("vescale_fsdp.conversion.formats.torch_save.read", "open_torch")
_plan_torch = lazy_function("vescale_fsdp.conversion.formats.torch_save.write", "plan_torch")

# In the order in which a folder is asked: what has another format's files beside its own comes before that other.
FORMATS = {
    "native": Format(
        re.escape(MANIFEST_NAME),
        lambda store, _, trust: _open_native(store),
        Target(
            "to-vescale",
            "Write SRC to OUT as a native checkpoint.",
            lambda state, o, *_: _plan_native(state, o.ranks, _granularities(o.granularity)),
            ("prefix", "optimizer", "ranks", "granularity"),
        ),
    ),
    "megatron": Format(r"common\.pt", lambda store, _, trust: _open_megatron(store, trust_pickle=trust)),
    "dcp": Format(
        r"\.metadata",
        lambda store, _, trust: _open_dcp(store, trust_pickle=trust),
        Target(
            "to-fsdp2",
            "Write SRC to OUT as a stock torch.distributed.checkpoint folder, which FSDP2 loads.",
            lambda state, o, *_: _plan_dcp(state, o.max_shard_bytes),
        ),
    ),
    "zarr": Format(
        rf"{re.escape(ZARR_NAME)}|\.z(group|array|metadata)",
        lambda store, _, trust: (_open_native if _has_manifest(store) else _open_zarr)(store),
        Target(
            "to-zarr",
            "Write SRC to OUT as a native checkpoint in its zarr v3 form, one array per tensor.",
            lambda state, *_: _plan_zarr(state),
        ),
    ),
    "orbax": Format(r"([^/]+/)?_METADATA", lambda store, *_: _open_orbax(store)),
    # A model beside its adapter is the model; see `detect`.
    "adapter": Format(
        r"adapter_model\.safetensors",
        lambda store, *_: _open_adapter(store),
        Target(
            "",
            "Write an adapter of the model in SRC to OUT as peft would.",
            lambda state, o, *_: _plan_adapter(state, o.assets),
        ),
    ),
    "shards": Format(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors", lambda store, *_: _open_shards(store)),
    "hf": Format(
        r"[^/]*\.safetensors(\.index\.json)?",
        lambda store, *_: _open_hf(store),
        Target(
            "to-hf",
            "Write the model in SRC to OUT as a Hugging Face repository.",
            lambda state, o, assets, _: _plan_hf(
                list(state.views.values()), assets, o.max_shard_bytes, state.file_metadata
            ),
            ("include_asset", "no_assets", "adapter", "adapter_name", "require_check"),
        ),
    ),
    "bin": Format(
        r"(diffusion_)?pytorch_model(_fsdp)?\.bin(\.index\.json)?",
        lambda store, _, trust: _open_bin(store, lambda file: _open_torch(store, file, trust_pickle=trust)),
    ),
    # Its folder, or the one around it, where `latest` is. Behind those of Hugging Face: what a Trainer has gathered
    # beside it is a model, and what it left in a model's folder may be old.
    "deepspeed": Format(
        r"([^/]+/)?((zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|\w*zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt"
        r"|layer_\d+-model_\d+-model_states\.pt|zero/.+/fp32\.pt)",
        lambda store, *_: _open_deepspeed(store),
    ),
    "ranks": Format(
        r"[^/]+_rank_?\d+\.(bin|pt|pth)",
        lambda store, _, trust: _open_ranks(store, trust_pickle=trust),
    ),
    "safetensors": Format(
        r".*\.safetensors", lambda store, file, _: _open_safetensors(store, file), is_file=True
    ),
    "torch": Format(
        r".*\.(pt|pth|bin|ckpt)",
        lambda store, file, trust: _open_torch(store, file, trust_pickle=trust),
        Target(
            "to-torch",
            "Write SRC to the file OUT as torch.save would.",
            lambda state, _, assets, file: _plan_torch(state, file),
            keeps_repeats=True,
        ),
        is_file=True,
    ),
}
KINDS = tuple(FORMATS)
TRAINED = (
    "dcp",
    "shards",
    "hf",
    "bin",
    "ranks",
)  # folders in which trainers leave more than the format's own files
TARGETS = {kind: form.target for kind, form in FORMATS.items() if form.target is not None}
