"""Values other than tensors, which torch stores as pickles.

Numbers, texts and containers of them are read here; anything more is left to torch's own safe loader, and only
checkpoints with such values pay for its import.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from vescale_fsdp.checkpoint.formats.torch_save.archive_reader import TorchArchive
from vescale_fsdp.checkpoint.formats.torch_save.pickle_reader import load_plain_pickle
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError


def load_torch_bytes(data: bytes, *, where: str, trust: bool = False) -> Any:
    """The object in ``data``, a torch.save archive; ``weights_only`` unless trusted.

    Raises:
        ConversionError: if the archive is damaged or holds more than plain values.
    """
    try:
        archive = TorchArchive(lambda offset, nbytes: data[offset : offset + nbytes], len(data), where=where)
        return load_plain_pickle(archive.pickle, where=where)
    except (LookupError, CorruptCheckpointError):
        pass  # torch knows more types and older forms, and judges what is damaged
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trust)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise ConversionError(
            "A stored value cannot be read safely.",
            expected="numbers, strings, lists and dicts",
            got=f"{type(error).__name__}: {first_line}",
            where=where,
            todo="pass --trust-pickle if you trust whoever made the file: that runs code from it",
        ) from error
