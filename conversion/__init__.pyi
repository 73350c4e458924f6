"""The public names of the package. Type checkers and `vescale_fsdp.lazy` read this list."""

from vescale_fsdp.conversion.engine.source import Source as Source
from vescale_fsdp.conversion.diff import Difference as Difference, diff as diff
from vescale_fsdp.conversion.convert import ConvertReport as ConvertReport, convert as convert
from vescale_fsdp.conversion.combine import average as average, combine as combine
from vescale_fsdp.conversion.convert_options import ConvertOptions as ConvertOptions
from vescale_fsdp.conversion.fingerprint import (
    fingerprint_of as fingerprint_of,
    fingerprints_of as fingerprints_of,
)
from vescale_fsdp.conversion.formats.detect import open_source as open_source
from vescale_fsdp.conversion.formats.table import Format as Format
from vescale_fsdp.conversion.live.huggingface import HuggingFace as HuggingFace
