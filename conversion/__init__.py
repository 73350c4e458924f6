"""Checkpoints of any format into any other, in bounded memory: the library behind ``vescale-convert``.

    source = open_source("checkpoint")  # native, DCP, Hugging Face, torch.save, zarr; path or URL
    convert(source, "out", "hf", ConvertOptions(assets="original_repo"))

Pickles run no code unless the caller allows it, no training code is imported, and memory stays within
``memory_budget_bytes``.
"""

from vescale_fsdp.lazy import lazily_export

lazily_export(__name__)  # public names are in __init__.pyi
