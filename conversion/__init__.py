"""Checkpoints of any format into any other, in bounded memory: the library behind ``vescale-convert``.

    source = open_source("checkpoint")  # native, DCP, Hugging Face, torch.save, zarr; path or URL
    convert(source, "out", "hf", ConvertOptions(assets="original_repo"))

Nothing is unpickled that could run code, nothing is imported that trains, and memory is what `CopyLimits`
says.
"""

from typing import TYPE_CHECKING

from vescale_fsdp.lazy import lazily_export

if TYPE_CHECKING:
    from vescale_fsdp.conversion.convert import TARGETS, ConvertOptions, ConvertReport, convert
    from vescale_fsdp.conversion.copying import CopyLimits
    from vescale_fsdp.conversion.difference import Difference, Tolerance, diff
    from vescale_fsdp.conversion.execution import Part, RunOptions
    from vescale_fsdp.conversion.key_rules import RuleSet, load_rules, shipped_rules
    from vescale_fsdp.conversion.open_source import KINDS, open_source
    from vescale_fsdp.conversion.source import Source
    from vescale_fsdp.conversion.verification import VerifyReport, verify

__all__ = [
    "KINDS",
    "TARGETS",
    "ConvertOptions",
    "ConvertReport",
    "CopyLimits",
    "Difference",
    "Part",
    "RuleSet",
    "RunOptions",
    "Source",
    "Tolerance",
    "VerifyReport",
    "convert",
    "diff",
    "load_rules",
    "open_source",
    "shipped_rules",
    "verify",
]

lazily_export(
    __name__,
    {
        "vescale_fsdp.conversion.convert": "TARGETS ConvertOptions ConvertReport convert",
        "vescale_fsdp.conversion.copying": "CopyLimits",
        "vescale_fsdp.conversion.difference": "Difference Tolerance diff",
        "vescale_fsdp.conversion.execution": "Part RunOptions",
        "vescale_fsdp.conversion.key_rules": "RuleSet load_rules shipped_rules",
        "vescale_fsdp.conversion.open_source": "KINDS open_source",
        "vescale_fsdp.conversion.source": "Source",
        "vescale_fsdp.conversion.verification": "VerifyReport verify",
    },
)
