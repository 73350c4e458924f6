"""Values of numpy and of Python's collections in .pt files, through every format that holds values."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vescale_fsdp.conversion.convert import convert
from vescale_fsdp.conversion.formats.detect import open_source

VALUES: dict[str, Any] = {
    "half": np.float16(1.5),
    "single": np.float32(0.1),
    "double": np.float64(0.1),
    "swapped": np.dtype(">f8").type(2.5),
    "complex": np.complex64(1 + 2j),
    "long": np.int64(-(2**40)),
    "byte": np.uint8(200),
    "true": np.bool_(True),
    "set": {1, 2, 3},
    "frozen": frozenset({"x", "y"}),
    "empty": set(),
    "counter": Counter("abca"),
    "lists": defaultdict(list, {"a": [1, 2]}),
    "numbers": defaultdict(int, {"a": 2}),
    "dicts": defaultdict(dict, {"a": {"b": np.float32(3)}}),
    "ordered": OrderedDict(a=1, b=2),
    "inner": {"k": {5, 6}, "l": [np.int32(4), (np.float64(2.0), {7})]},
}


@pytest.mark.parametrize("target", ["dcp", "native", "zarr", "torch"])
def test_values_keep(tmp_path: Path, target: str) -> None:
    """Equal values, of Python's own kinds where they were numpy's; and back in a .pt file that torch opens."""
    kept = VALUES if target == "torch" else {name: v for name, v in VALUES.items() if name != "complex"}
    torch.save({"model": {"w": torch.ones(3)}, "more": kept}, tmp_path / "a.pt")
    out = tmp_path / ("b.pt" if target == "torch" else target)
    convert(open_source(str(tmp_path / "a.pt")), str(out), target)
    convert(open_source(str(out)), str(tmp_path / "back.pt"), "torch", None)
    found = torch.load(tmp_path / "back.pt", weights_only=False)["more"]
    assert found.keys() == kept.keys()
    for name, value in kept.items():
        assert found[name] == value, name
        assert type(found[name]).__module__ == "builtins", name
    assert type(found["set"]) is set and type(found["frozen"]) is frozenset and type(found["true"]) is bool
