"""The table of checkpoint formats that can be read: the file names that identify a format, and its opener.

`checkpoint.load` and ``vescale-convert`` read this table. An opener is imported when a checkpoint of its format is
opened, so that native loads import no other format. Other packages add formats with entry points of the group
``vescale_fsdp.formats``: the entry point has the format's name and loads to a `Format`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from vescale_fsdp.lazy import function_named


class Format(NamedTuple):
    """A checkpoint format: how to recognize and how to open its checkpoints.

    Args:
        file: regular expression; a folder with a file name that matches as a whole is a checkpoint of this format.
        opener: ``module:function``; called with the folder's storage and the arguments of ``takes``, it returns a
            `conversion.Source` after reading metadata only.
        is_file: whether the checkpoint is the file itself, not the folder around it.
        takes: names of the opener's keyword arguments: ``file`` (name of the file; empty for a folder) and
            ``trust_pickle`` (whether pickles may import the classes and functions that they name).
    """

    file: str
    opener: str
    is_file: bool = False
    takes: tuple[str, ...] = ("file", "trust_pickle")

    def open(self, store: Any, file: str, trust_pickle: bool) -> Any:
        """Return the `conversion.Source` of a checkpoint of this format; only metadata is read."""
        arguments = {"file": file, "trust_pickle": trust_pickle}
        return function_named(self.opener)(store, **{name: arguments[name] for name in self.takes})


# The order matters: a folder has the first format with a matching file. So if folders of format A also contain files
# that match format B, A comes before B.
FORMATS = {
    "native": Format(r"manifest\.json", "vescale_fsdp.checkpoint.formats.source:open_native", takes=()),
    "megatron": Format(
        r"common\.pt", "vescale_fsdp.conversion.formats.megatron:open_megatron", takes=("trust_pickle",)
    ),
    "dcp": Format(
        r"\.metadata", "vescale_fsdp.checkpoint.formats.dcp.source:open_dcp", takes=("trust_pickle",)
    ),
    "zarr": Format(
        # zarr 3, then zarr 2
        r"zarr\.json|\.z(group|array|metadata)",
        "vescale_fsdp.conversion.formats.table:open_zarr",
        takes=(),
    ),
    # In an item's own folder, or one folder deeper: a step's folder has a subfolder for each item.
    "orbax": Format(r"([^/]+/)?_METADATA", "vescale_fsdp.conversion.formats.orbax:open_orbax", takes=()),
    # `conversion.formats.detect` skips this row if the folder contains a model too.
    "adapter": Format(
        r"adapter_model\.safetensors", "vescale_fsdp.conversion.formats.peft:open_adapter", takes=()
    ),
    "shards": Format(
        # One file per rank: transformers 5, torch's HuggingFaceStorageWriter.
        r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors",
        "vescale_fsdp.checkpoint.formats.huggingface.read:open_shards",
        takes=(),
    ),
    "hf": Format(
        r"[^/]*\.safetensors(\.index\.json)?",
        "vescale_fsdp.checkpoint.formats.huggingface.read:open_hf_folder",
        takes=(),
    ),
    "bin": Format(
        r"(diffusion_)?pytorch_model(_fsdp)?\.bin(\.index\.json)?",  # diffusion_: diffusers; _fsdp: accelerate
        "vescale_fsdp.checkpoint.formats.huggingface.read:open_bin_folder",
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
        "vescale_fsdp.checkpoint.formats.torch_save.read:open_ranks",
        takes=("trust_pickle",),
    ),
    "safetensors": Format(
        r".*\.safetensors",
        "vescale_fsdp.checkpoint.formats.huggingface.read:open_safetensors",
        is_file=True,
        takes=("file",),
    ),
    "gguf": Format(
        r".*\.gguf", "vescale_fsdp.conversion.formats.gguf:open_gguf", is_file=True, takes=("file",)
    ),
    "torch": Format(
        r".*\.(pt|pth|bin|ckpt)", "vescale_fsdp.checkpoint.formats.torch_save.read:open_torch", is_file=True
    ),
}
# Matches files of a folder that contains a model and its optimizer as two checkpoints of torch.distributed.checkpoint.
DCP_INSIDE = r"[^/]+/\.metadata"


@lru_cache  # looking up entry points reads the metadata of all installed packages
def added_formats() -> dict[str, Format]:
    """Return the formats of other packages, by name. Called only if no format of this package matches."""
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


def open_foreign(url: Any) -> Any:
    """Return the `conversion.Source` of a checkpoint of any format; ``url`` is a path or a URL."""
    return function_named("vescale_fsdp.conversion.formats.detect:open_source")(url)


def open_for_load(url: Any, options: Any) -> Any:
    """Return the `OpenedSource` of a checkpoint of any format, for a load with these `SourceOptions`."""
    return function_named("vescale_fsdp.conversion.source_state:open_for_load")(url, options)
