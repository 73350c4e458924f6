"""``fingerprints.json``: the fingerprints of a repository's tensors, next to its weights.

    {"files": {file: size}, "tensors": {name: {dtype, shape, sums}}, "digest": ..}

The sizes show most replacements of weights by other programs, which do not know this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from vescale_fsdp.checkpoint.manifest.fingerprints import Fingerprint, TensorFingerprint
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.engine.plan import ClosingFile, DataFile, OutputPlan, Written
from vescale_fsdp.conversion.engine.stored_tensor import StoredTensor
from vescale_fsdp.layout.foreign_json import parse_json

FINGERPRINTS_FILE = "fingerprints.json"
_READ_BYTES = 4 * 2**20  # 4 MiB
_MOST_BYTES = 64 * 2**20  # of the file itself


def recording(plan: OutputPlan) -> OutputPlan:
    """Return a plan that also writes the fingerprints of its tensors; reads the written files once more."""
    found: list[Fingerprint] = []

    def when_written(read: Written) -> None:
        plan.when_written(read)
        found.append(Fingerprint({name: each for file in plan.files for name, each in _sums_in(file, read)}))

    def content() -> tuple[bytes]:
        sizes = {file.name: file.nbytes for file in plan.files}
        return (json.dumps({"files": sizes, **found[-1].to_json()}, indent=1).encode(),)

    closing = (ClosingFile(FINGERPRINTS_FILE, content), *plan.closing)
    return replace(plan, when_written=when_written, closing=closing)


def _sums_in(file: DataFile, read: Written) -> list[tuple[str, TensorFingerprint]]:
    """Read the tensors of a written file, and return their fingerprints. Each tensor is complete in one file."""
    import torch  # late: a conversion that records no fingerprints needs neither torch nor `byte_sums`

    from vescale_fsdp.byte_sums import pack_sums, run_sums

    plan, found = file.planned(), []
    for index, items in plan.tensors:
        info, offset = items.view.info, plan.offsets[index]
        total = torch.zeros(2, dtype=torch.int64, device="cpu")
        for start in range(0, items.nbytes, _READ_BYTES):
            data = read(file.name, offset + start, min(_READ_BYTES, items.nbytes - start))
            total += run_sums(torch.frombuffer(bytearray(data), dtype=torch.uint8), start)
        found.append((info.name, TensorFingerprint(info.dtype.name, info.shape, pack_sums(total).hex())))
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
