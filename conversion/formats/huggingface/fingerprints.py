"""``fingerprints.json``: the fingerprints of a repository's tensors, next to its weights.

    {"files": {file: size}, "tensors": {name: {dtype, shape, sums}}, "digest": ..}

The sizes show most replacements of weights by other programs, which do not know this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vescale_fsdp.checkpoint.manifest.fingerprints import Fingerprint, TensorFingerprint
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.engine.plan import ClosingFile, DataFile, OutputPlan, Written
from vescale_fsdp.conversion.engine.stored_tensor import StoredTensor
from vescale_fsdp.conversion.engine.written_sums import sums_as_hex, written_sums
from vescale_fsdp.layout.foreign_json import parse_json

FINGERPRINTS_FILE = "fingerprints.json"
_MOST_BYTES = 64 * 2**20  # of the file itself


def recording(plan: OutputPlan) -> OutputPlan:
    """Return a plan that also writes the fingerprints of its tensors; reads the written files once more."""
    found: list[dict[str, TensorFingerprint]] = []

    def when_written(read: Written) -> None:
        plan.when_written(read)
        found.append(fingerprints_in(plan.files, read))

    closing = ClosingFile(FINGERPRINTS_FILE, lambda: fingerprints_file(plan, found[-1]).pieces())
    return replace(plan, when_written=when_written, closing=(closing, *plan.closing))


def fingerprints_file(plan: OutputPlan, found: Mapping[str, TensorFingerprint]) -> ClosingFile:
    """Return the file with the fingerprints of a repository's tensors."""
    sizes = {file.name: file.nbytes for file in plan.files}
    data = json.dumps({"files": sizes, **Fingerprint(found).to_json()}, indent=1).encode()
    return ClosingFile(FINGERPRINTS_FILE, lambda: (data,))


def fingerprints_in(files: Sequence[DataFile], read: Written) -> dict[str, TensorFingerprint]:
    """Read the tensors of written files, and return their fingerprints. Each tensor is complete in one file."""
    found = {}
    for file in files:
        for items, sums in written_sums(file, read):
            info = items.view.info
            found[info.name] = TensorFingerprint(info.dtype.name, info.shape, sums_as_hex(sums))
    return found


def recorded_sums(store: Storage, tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return name -> sums as a repository's file has recorded them; nothing if weights have been replaced since."""
    size = store.size(FINGERPRINTS_FILE)
    if size is None or size > _MOST_BYTES:
        return {}
    try:
        data = parse_json(store.read(FINGERPRINTS_FILE))
        if any(store.size(file) != nbytes for file, nbytes in data["files"].items()):
            return {}
        return {
            name: str(each["sums"])
            for name, each in data["tensors"].items()
            if name in tensors
            and (each["dtype"], tuple(each["shape"]))
            == (tensors[name].info.dtype.name, tensors[name].info.shape)
        }
    except (ValueError, KeyError, TypeError, AttributeError):  # another program's file of this name
        return {}
