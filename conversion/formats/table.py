"""The table of checkpoint formats: the file names that identify a format, its opener, and how it is written.

`checkpoint.load` and ``vescale-convert`` read this table. An opener, and the planner of the files to write, is imported
when a checkpoint of its format is opened or written. So a conversion to DCP does not import the libraries of other
formats, and ``--help``, which reads this table, imports none of them. Other packages add formats with entry points of
the group ``vescale_fsdp.formats``: the entry point has the format's name and loads to a `Format`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from vescale_fsdp.lazy import function_named, lazy_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_fsdp.checkpoint.storage.base import Storage
    from vescale_fsdp.conversion.convert_options import ConvertOptions
    from vescale_fsdp.conversion.engine.carried_state import CarriedState
    from vescale_fsdp.conversion.engine.plan import OutputPlan
    from vescale_fsdp.conversion.engine.source import Source
    from vescale_fsdp.conversion.formats.huggingface.repository import Assets

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
        keeps_metadata: whether the format stores the ``metadata`` argument of `save`.
    """

    command: str
    summary: str
    plan: Plan
    options: tuple[str, ...] = ("prefix", "optimizer")
    keeps_repeats: bool = False
    keeps_metadata: bool = False


class Format(NamedTuple):
    """A checkpoint format: how to recognize and how to open its checkpoints.

    Args:
        file: regular expression; a folder with a file name that matches as a whole is a checkpoint of this format.
        opener: ``module:function``; called with the folder's storage and the arguments of ``takes``, it returns a
            `Source` after reading metadata only.
        is_file: whether the checkpoint is the file itself, not the folder around it.
        takes: names of the opener's keyword arguments: ``file`` (name of the file; empty for a folder),
            ``trust_pickle`` (whether pickles may import the classes and functions that they name) and
            ``checks_files`` (as in `open_source`).
        target: how the format is written; None if it is only read.

    Examples:
        >>> from vescale_fsdp.conversion import Format
        >>> numbers = Format(r".*\\.number", "our_package.numbers:open_numbers")
        >>> numbers.is_file, numbers.target
        (False, None)
    """

    file: str
    opener: str
    is_file: bool = False
    takes: tuple[str, ...] = ("file", "trust_pickle")
    target: Target | None = None

    def open(self, store: Storage, file: str, trust_pickle: bool, *, checks_files: bool = True) -> Source:
        """Return the `Source` of a checkpoint of this format; only metadata is read."""
        arguments = {"file": file, "trust_pickle": trust_pickle, "checks_files": checks_files}
        opened: Source = function_named(self.opener)(store, **{name: arguments[name] for name in self.takes})
        return opened


_granularities = lazy_function("vescale_fsdp.layout.granularity", "parse_granularities")
_plan_native = lazy_function("vescale_fsdp.conversion.formats.native.plan", "plan_native")
_plan_dcp = lazy_function("vescale_fsdp.conversion.formats.dcp.plan", "plan_dcp")
_plan_zarr = lazy_function("vescale_fsdp.conversion.formats.native.zarr_plan", "plan_zarr")
_plan_adapter = lazy_function("vescale_fsdp.conversion.formats.peft", "plan_adapter")
_plan_hf = lazy_function("vescale_fsdp.conversion.formats.huggingface.plan", "plan_hf")
_plan_torch = lazy_function("vescale_fsdp.conversion.formats.torch_save.write", "plan_torch")

# The order matters: a folder has the first format with a matching file. So if folders of format A also contain files
# that match format B, A comes before B.
FORMATS = {
    "native": Format(
        r"(vescale-checkpoint/)?manifest\.json",  # the native form, the zarr form
        "vescale_fsdp.conversion.formats.native.source:open_native",
        takes=("checks_files",),
        target=Target(
            "to-native",
            "Write SRC to OUT as a native checkpoint.",
            lambda state, o, *_: _plan_native(
                state, o.ranks, _granularities(o.granularity), fingerprint=o.fingerprint
            ),
            ("prefix", "optimizer", "ranks", "granularity", "fingerprint"),
            keeps_metadata=True,
        ),
    ),
    "megatron": Format(
        r"common\.pt", "vescale_fsdp.conversion.formats.megatron:open_megatron", takes=("trust_pickle",)
    ),
    "dcp": Format(
        r"\.metadata",
        "vescale_fsdp.conversion.formats.dcp.source:open_dcp",
        takes=("trust_pickle",),
        target=Target(
            "to-fsdp2",
            "Write SRC to OUT as a stock torch.distributed.checkpoint folder, which FSDP2 loads.",
            lambda state, o, *_: _plan_dcp(state, o.max_shard_bytes),
        ),
    ),
    "zarr": Format(
        # zarr 3, then zarr 2
        r"zarr\.json|\.z(group|array|metadata)",
        "vescale_fsdp.conversion.formats.table:open_zarr",
        takes=("checks_files",),
        target=Target(
            "to-zarr",
            "Write SRC to OUT as a native checkpoint in its zarr v3 form, one array per tensor.",
            lambda state, *_: _plan_zarr(state),
            keeps_metadata=True,
        ),
    ),
    # In an item's own folder, or one folder deeper: a step's folder has a subfolder for each item.
    "orbax": Format(r"([^/]+/)?_METADATA", "vescale_fsdp.conversion.formats.orbax:open_orbax", takes=()),
    # `conversion.formats.detect` skips this row if the folder contains a model too.
    "adapter": Format(
        r"adapter_model\.safetensors",
        "vescale_fsdp.conversion.formats.peft:open_adapter",
        takes=(),
        target=Target(
            "",
            "Write an adapter of the model in SRC to OUT as peft would.",
            lambda state, o, *_: _plan_adapter(state, o.assets),
        ),
    ),
    "shards": Format(
        # One file per rank: transformers 5, torch's HuggingFaceStorageWriter.
        r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors",
        "vescale_fsdp.conversion.formats.huggingface.read:open_shards",
        takes=(),
    ),
    "hf": Format(
        r"[^/]*\.safetensors(\.index\.json)?",
        "vescale_fsdp.conversion.formats.huggingface.read:open_hf_folder",
        takes=(),
        target=Target(
            "to-hf",
            "Write the model in SRC to OUT as a Hugging Face repository.",
            lambda state, o, assets, _: _plan_hf(
                list(state.views.values()),
                assets,
                o.max_shard_bytes,
                state.file_metadata,
                fingerprint=o.fingerprint,
            ),
            ("fingerprint", "include_asset", "no_assets", "adapter", "adapter_name", "require_check", "push"),
        ),
    ),
    "bin": Format(
        r"(diffusion_)?pytorch_model(_fsdp)?\.bin(\.index\.json)?",  # diffusion_: diffusers; _fsdp: accelerate
        "vescale_fsdp.conversion.formats.huggingface.read:open_bin_folder",
        takes=("trust_pickle",),
    ),
    # The files are in the checkpoint's folder, or one folder deeper in the run's folder, which has a file `latest`.
    # This row is below the formats of Hugging Face, because a Trainer saves a gathered model next to DeepSpeed's files,
    # which may be older than the model.
    "deepspeed": Format(
        r"([^/]+/)?((zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|\w*zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt"
        r"|layer_\d+-model_\d+-model_states\.pt|zero/.+/fp32\.pt)",
        "vescale_fsdp.conversion.formats.deepspeed:open_deepspeed",
        takes=(),
    ),
    "ranks": Format(
        # "_rank0" in files of accelerate, "_rank_0" in files of verl
        r"[^/]+_rank_?\d+\.(bin|pt|pth)",
        "vescale_fsdp.conversion.formats.torch_save.read:open_ranks",
        takes=("trust_pickle",),
    ),
    "safetensors": Format(
        r".*\.safetensors",
        "vescale_fsdp.conversion.formats.huggingface.read:open_safetensors",
        is_file=True,
        takes=("file",),
    ),
    "gguf": Format(
        r".*\.gguf", "vescale_fsdp.conversion.formats.gguf:open_gguf", is_file=True, takes=("file",)
    ),
    "torch": Format(
        r".*\.(pt|pth|bin|ckpt)",
        "vescale_fsdp.conversion.formats.torch_save.read:open_torch",
        is_file=True,
        target=Target(
            "to-torch",
            "Write SRC to the file OUT as torch.save would.",
            lambda state, _, assets, file: _plan_torch(state, file),
            keeps_repeats=True,
        ),
    ),
}
# The formats that can be written, in the same order.
TARGETS = {name: form.target for name, form in FORMATS.items() if form.target is not None}
# Matches files of a folder that contains a model and its optimizer as two checkpoints of torch.distributed.checkpoint.
DCP_INSIDE = r"[^/]+/\.metadata"


def added_formats() -> dict[str, Format]:
    """Return the formats of other packages, by name. Called only if no format of this package matches."""
    return _added_formats(tuple(sys.path))


@lru_cache(maxsize=1)  # looking up entry points reads the metadata of all installed packages
def _added_formats(path: tuple[str, ...]) -> dict[str, Format]:
    from importlib.metadata import entry_points  # takes 20 ms, which native loads need not spend

    return {point.name: point.load() for point in entry_points(group="vescale_fsdp.formats")}


def all_formats() -> Iterator[tuple[str, Format]]:
    """Yield (name, format), first the formats of this package, then those of other packages."""
    yield from FORMATS.items()
    yield from added_formats().items()


def is_known(files: Collection[str]) -> bool:
    """Return whether a folder with these file names may be a checkpoint of one of the formats."""
    if any(re.fullmatch(DCP_INSIDE, name) for name in files):
        return True
    return any(
        re.fullmatch(form.file, name) for _, form in all_formats() if not form.is_file for name in files
    )


def open_zarr(store: Storage, *, checks_files: bool = True) -> Source:
    """Open a zarr hierarchy. If it has a manifest, it is a native checkpoint in zarr form, and opened as such.

    Args:
        checks_files: as in `open_source`.

    Raises:
        CorruptCheckpointError: if the hierarchy is damaged.
    """
    # Imported here, so that `--help` does not import readers.
    from vescale_fsdp.conversion.formats.native.source import open_native
    from vescale_fsdp.conversion.formats.zarr import hierarchy

    if hierarchy.has_manifest(store):
        return open_native(store, checks_files=checks_files)
    return hierarchy.open_zarr(store)
