"""`Fingerprint`: the byte sums of a state's tensors with their names, dtypes and shapes. Does not import torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.structure import dump_json
from vescale_fsdp.errors import CheckpointError, some
from vescale_fsdp.layout.model_shapes import natural_key
from vescale_fsdp.lazy import set_module


@set_module("vescale_fsdp.checkpoint")
class TensorFingerprint(NamedTuple):
    """The fingerprint of one tensor: tensors are equal bit for bit if these three fields are.

    Attributes:
        dtype: torch's name of the dtype, such as ``"bfloat16"``.
        shape: shape of the whole tensor.
        sums: the byte sums of the elements, 32 hex digits.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.checkpoint import fingerprint
        >>> fingerprint({"w": torch.zeros(2, 3)}).tensors["w"]
        TensorFingerprint(dtype='float32', shape=(2, 3), sums='00000000000000000000000000000000')
    """

    dtype: str
    shape: tuple[int, ...]
    sums: str


@set_module("vescale_fsdp.checkpoint")
@dataclass(frozen=True)
class Fingerprint:
    """The fingerprints of all tensors of a state, by name.

    Two states that are not equal have equal fingerprints with a chance of at most 2**-102; on purpose, such states
    can be constructed.

    Args:
        tensors: name -> fingerprint of the tensor; tied tensors under each of their names.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.checkpoint import fingerprint
        >>> model = torch.nn.Linear(2, 2)
        >>> before = fingerprint({"model": model})
        >>> with torch.no_grad():
        ...     _ = model.bias.add_(1)
        >>> before.differences(fingerprint({"model": model}))
        ('model.bias',)
    """

    tensors: Mapping[str, TensorFingerprint]

    @cached_property
    def digest(self) -> str:
        """One text of 32 hex digits for the whole state: names, dtypes, shapes and sums."""
        lines = [dump_json([name, *self.tensors[name]]) for name in sorted(self.tensors)]
        return hashlib.blake2b(b"\n".join(lines), digest_size=16).hexdigest()

    def __str__(self) -> str:
        return self.digest

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """Return the names of tensors that differ or that only one side has; layer 2 before layer 10."""
        names = {*self.tensors, *other.tensors}
        differing = (name for name in names if self.tensors.get(name) != other.tensors.get(name))
        return tuple(sorted(differing, key=natural_key))

    def to_json(self) -> dict[str, Any]:
        """Return the digest and the fingerprints as JSON values."""
        return {
            "digest": self.digest,
            "tensors": {name: each._asdict() for name, each in self.tensors.items()},
        }


def check_cuts(manifest: Manifest, sums: Sequence[str]) -> None:
    """Check that a tensor which groups of ranks cut in different ways has the same values in each group.

    Raises:
        CheckpointError: if the values differ.
    """
    for indices in manifest.indices_by_name.values():
        values = sorted({sums[index] for index in indices})
        if len(values) > 1:
            raise CheckpointError(
                "Groups of ranks have different values of a tensor.",
                expected="equal values, however they are cut",
                got=f"byte sums {some(values)}",
                where=manifest.entries[indices[0]].label,
                todo="give all groups the same values: the same seed before sharding, or a broadcast",
            )
