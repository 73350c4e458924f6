"""Reading folders whose weights are torch.save files: transformers' and diffusers' of the time before safetensors, and
the whole models that accelerate gathers on one rank (``pytorch_model_fsdp.bin``)."""

from __future__ import annotations

from collections.abc import Callable

from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.formats.huggingface.read import joined_files, weight_map

_STEMS = ("pytorch_model", "diffusion_pytorch_model", "pytorch_model_fsdp")


def open_bin_folder(store: Storage, open_file: Callable[[str], Source]) -> Source:
    """Open a folder with ``pytorch_model.bin``, ``pytorch_model_fsdp.bin``, or an index and its shards; ``open_file``
    opens one of them.

    Raises:
        ConversionError: if a file holds no dict of tensors, or its pickle names more than tensors need.
        CorruptCheckpointError: if index and files disagree or a file is damaged.
    """
    indices = [f"{stem}.bin.index.json" for stem in _STEMS]
    index = next((file for file in indices if store.size(file) is not None), None)
    mapped = None if index is None else weight_map(store, index)
    alone = next(
        (f"{stem}.bin" for stem in _STEMS if store.size(f"{stem}.bin") is not None), f"{_STEMS[0]}.bin"
    )
    files = [alone] if mapped is None else sorted(set(mapped.values()))
    tensors, notes = joined_files(store, files, mapped, lambda file: open_file(file).tensors, index or alone)
    return Source("bin", store, tensors, facts={"weight files": str(len(files))}, warnings=notes)
