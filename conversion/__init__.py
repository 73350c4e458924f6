"""Convert checkpoints from any supported format to any other, in bounded memory; behind ``vescale-convert``.

    source = open_source("checkpoint")  # native, DCP, Hugging Face, torch.save, zarr; path or URL
    convert(source, "out", "hf", ConvertOptions(assets="original_repo"))

Pickles run no code unless the caller allows it. No training code is imported. Working buffers stay within
``memory_budget_bytes``.
"""

from vescale_fsdp.lazy import lazily_export

lazily_export(__name__)  # public names are in __init__.pyi
