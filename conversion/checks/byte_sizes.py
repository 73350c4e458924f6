"""Byte sizes as people type them (``5GB`` decimal, ``512MiB`` binary, ``1000000``) and as they read them."""

from __future__ import annotations

import re

from vescale_fsdp.errors import ConversionError

_UNITS = {"": 1, "B": 1} | {
    unit + end: base**power
    for power, unit in enumerate("KMGT", 1)
    for end, base in (("B", 1000), ("", 1000), ("IB", 1024))
}


def parse_bytes(text: str) -> int:
    """Number of bytes.

    Raises:
        ConversionError: if the text is no size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ConversionError(
            "This is not a size.",
            expected="a number and a unit such as 5GB, 512MiB or 1000000",
            got=repr(text),
            todo="write the size with a unit",
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(nbytes: int) -> str:
    """Decimal units, three digits: ``1.23 GB``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
