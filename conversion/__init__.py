"""Checkpoints of any format into any other, in bounded memory: the library behind ``vescale-convert``.

    source = open_source("checkpoint")  # native, DCP, Hugging Face, torch.save, zarr; path or URL
    convert(source, "out", "hf", ConvertOptions(assets="original_repo"))

Nothing is unpickled that could run code, nothing is imported that trains, and memory is what `CopyLimits`
says.
"""

from typing import TYPE_CHECKING

from vescale_fsdp.lazy import lazily_export

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint.moves.copying import CopyLimits
    from vescale_fsdp.checkpoint.moves.source import Source
    from vescale_fsdp.conversion.checks.diff import Difference, Tolerance, diff
    from vescale_fsdp.conversion.convert import ConvertReport, convert
    from vescale_fsdp.conversion.formats.convert_options import ConvertOptions
    from vescale_fsdp.conversion.formats.detect import open_source
    from vescale_fsdp.conversion.formats.table import KINDS, TARGETS
    from vescale_fsdp.conversion.huggingface import HuggingFace
    from vescale_fsdp.conversion.rules.rule_file import RuleSet, load_rules, shipped_rules
    from vescale_fsdp.conversion.run_plan import Part, RunOptions

__all__ = [
    "KINDS",
    "TARGETS",
    "ConvertOptions",
    "ConvertReport",
    "CopyLimits",
    "Difference",
    "HuggingFace",
    "Part",
    "RuleSet",
    "RunOptions",
    "Source",
    "Tolerance",
    "convert",
    "diff",
    "load_rules",
    "open_source",
    "shipped_rules",
]

lazily_export(
    __name__,
    {
        "vescale_fsdp.conversion.convert": "ConvertReport convert",
        "vescale_fsdp.checkpoint.moves.copying": "CopyLimits",
        "vescale_fsdp.conversion.checks.diff": "Difference Tolerance diff",
        "vescale_fsdp.conversion.huggingface": "HuggingFace",
        "vescale_fsdp.conversion.run_plan": "Part RunOptions",
        "vescale_fsdp.conversion.rules.rule_file": "RuleSet load_rules shipped_rules",
        "vescale_fsdp.conversion.formats.convert_options": "ConvertOptions",
        "vescale_fsdp.conversion.formats.detect": "open_source",
        "vescale_fsdp.conversion.formats.table": "KINDS TARGETS",
        "vescale_fsdp.checkpoint.moves.source": "Source",
    },
)
