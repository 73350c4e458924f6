"""Formats that `vescale_fsdp.checkpoint` does not read itself: what opens them, imported when it is called."""

from __future__ import annotations

from vescale_fsdp.lazy import lazy_function

# (path or URL) -> vescale_fsdp.checkpoint.moves.source.Source
open_foreign = lazy_function("vescale_fsdp.conversion.formats.detect", "open_source")
