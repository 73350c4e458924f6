"""Dequantize the blocks of GGUF, by the reference functions of the package ``gguf`` (extra ``gguf``).

    metadata  "blk.0.attn_q.weight": {"_type": "GGUF", "_data": {"type": "Q4_K"}}
    tensor    blk.0.attn_q.weight u8 [n, k / 256 * 144]

A tensor of F32, F16, BF16 or F64 is an ordinary tensor, without a description.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from vescale_fsdp.conversion.engine.coded_tensors import BlocksView
from vescale_fsdp.conversion.quantization.model import Floats, QuantizedModel, refusal
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError

if TYPE_CHECKING:
    import numpy as np

_KIND = "GGUF"


def description(type_name: str) -> str:
    """Return the text that describes a tensor of blocks of this type in a source's metadata."""
    return json.dumps({"_type": _KIND, "_data": {"type": type_name}})


def rows(model: QuantizedModel, name: str) -> Floats | None:
    """Dequantize a tensor of blocks.

    Raises:
        ConversionError: if the package is not installed, or cannot dequantize the type.
        CorruptCheckpointError: if rows are not whole blocks.
    """
    text = model.described.get(name)
    if text is None or not text.startswith(f'{{"_type": "{_KIND}"'):
        return None
    type_name, codes = str(json.loads(text)["_data"]["type"]), model.views[name]
    block_values, block_bytes = block_sizes(type_name, f"tensor {name}")
    if codes.info.dtype.name != "uint8" or not codes.info.shape or codes.info.shape[-1] % block_bytes:
        raise CorruptCheckpointError(
            "The rows of a tensor of GGUF are not whole blocks.",
            expected=f"uint8, with rows of a multiple of {block_bytes} bytes",
            got=f"{codes.info.dtype.name} of shape {codes.info.shape}",
            where=f"tensor {name}",
        )
    _require_decoder(type_name, block_bytes, f"tensor {name}")
    decode = partial(_decoded, type_name)
    return model.floats(
        name, BlocksView(codes, block_bytes, block_values, decode, f"GGUF {type_name}"), codes
    )


def name_of_type(number: int, where: str) -> str:
    """Return the name of a type that a file names by number.

    Raises:
        ConversionError: if the package is not installed, or does not know the type.
    """
    found = {int(member): name for name, member in _package(where).GGMLQuantizationType.__members__.items()}
    if number not in found:
        raise refusal("a type of the package gguf", f"type {number}", where)
    return found[number]


def block_sizes(type_name: str, where: str) -> tuple[int, int]:
    """Return the values and the bytes of a block of this type.

    Raises:
        ConversionError: if the package is not installed, or does not know the type.
    """
    gguf = _package(where)
    if type_name not in gguf.GGMLQuantizationType.__members__:
        raise refusal("a type of the package gguf", f"type {type_name}", where)
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    return int(block_values), int(block_bytes)


def _require_decoder(type_name: str, block_bytes: int, where: str) -> None:
    """Check that the package can dequantize a type.

    Raises:
        ConversionError: if it cannot.
    """
    import numpy as np

    try:
        _decoded(type_name, np.zeros((1, block_bytes), np.uint8))
    except NotImplementedError as error:
        raise refusal("a type that the package gguf dequantizes", f"type {type_name}", where) from error


def _package(where: str) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ConversionError(
            "Blocks of GGUF cannot be read without the package gguf.",
            expected="the package gguf",
            got=f"{type(error).__name__}: {error}",
            where=where,
            todo="install it: pip install 'vescale-fsdp[gguf]'",
        ) from error
    return gguf


def _decoded(type_name: str, blocks: np.ndarray) -> np.ndarray:
    """Return the values of rows of blocks."""
    import numpy as np

    gguf = _package(type_name)
    with np.errstate(all="ignore"):  # scales may be infinite or NaN
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type_name])
    return np.asarray(values, dtype=np.float32)
