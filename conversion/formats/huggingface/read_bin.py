"""Reading folders whose weights are torch.save files: Hugging Face's of the time before safetensors, and the whole
models that accelerate gathers on one rank (``pytorch_model_fsdp.bin``)."""

from __future__ import annotations

from collections.abc import Callable

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.formats.huggingface.read import joined_files, weight_map
from vescale_fsdp.conversion.source.source import Source

__all__ = ["open_bin_folder"]

BIN_FILE = "pytorch_model.bin"
BIN_INDEX_FILE = "pytorch_model.bin.index.json"
FSDP_FILE = "pytorch_model_fsdp.bin"


def open_bin_folder(store: Storage, open_file: Callable[[str], Source]) -> Source:
    """Open a folder with ``pytorch_model.bin``, ``pytorch_model_fsdp.bin``, or an index and its shards; ``open_file``
    opens one of them.

    Raises:
        ConversionError: if a file holds no dict of tensors, or its pickle names more than tensors need.
        CorruptCheckpointError: if index and files disagree or a file is damaged.
    """
    has_index = store.size(BIN_INDEX_FILE) is not None
    mapped = weight_map(store, BIN_INDEX_FILE) if has_index else None
    alone = BIN_FILE if store.size(BIN_FILE) is not None else FSDP_FILE
    files = sorted(set(mapped.values())) if mapped is not None else [alone]
    tensors = joined_files(store, files, mapped, lambda file: open_file(file).tensors, BIN_INDEX_FILE)
    return Source("bin", store, tensors, facts={"weight files": str(len(files))})
