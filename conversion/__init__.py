"""Checkpoints of any format into any other, in bounded memory: the library behind ``vescale-convert``.

    source = open_source("checkpoint")  # native, DCP, Hugging Face, torch.save, zarr; path or URL
    convert(source, "out", "hf", ConvertOptions(assets="original_repo"))

Pickles run no code unless asked to, no training code is imported, and memory stays within
``memory_budget_bytes``.
"""

from typing import TYPE_CHECKING

from vescale_fsdp.lazy import lazily_export

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint.moves.source import Source
    from vescale_fsdp.conversion.convert import ConvertReport, convert
    from vescale_fsdp.conversion.convert_options import ConvertOptions
    from vescale_fsdp.conversion.diff import Difference, diff
    from vescale_fsdp.conversion.formats.detect import open_source
    from vescale_fsdp.conversion.huggingface import HuggingFace

__all__ = [
    "ConvertOptions",
    "ConvertReport",
    "Difference",
    "HuggingFace",
    "Source",
    "convert",
    "diff",
    "open_source",
]

lazily_export(
    __name__,
    {
        "vescale_fsdp.conversion.convert": "ConvertReport convert",
        "vescale_fsdp.conversion.diff": "Difference diff",
        "vescale_fsdp.conversion.huggingface": "HuggingFace",
        "vescale_fsdp.conversion.convert_options": "ConvertOptions",
        "vescale_fsdp.conversion.formats.detect": "open_source",
        "vescale_fsdp.checkpoint.moves.source": "Source",
    },
)
