"""What a load overwrites, from its first byte until all is well: what becomes of it, and which error says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from vescale_fsdp.checkpoint.formats.native.targets import LoadTarget
from vescale_fsdp.checkpoint.manifest.manifest import NoCheckpointError
from vescale_fsdp.dtensor.half_loaded import mark_half_loaded, mark_whole
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import (
    CorruptCheckpointError,
    DamagedLoadError,
    PartialLoadError,
    VescaleError,
    some,
)
from vescale_fsdp.torch_private import local_of


class VanishedLoadError(PartialLoadError, NoCheckpointError):
    """A checkpoint was removed while a load overwrote tensors with it."""


class _Filled(NamedTuple):
    name: str
    tensor: torch.Tensor  # of the state
    target: LoadTarget


class Overwriting:
    """The tensors of a state that one load fills."""

    def __init__(self) -> None:
        self._filled: list[_Filled] = []

    def add(self, name: str, tensor: torch.Tensor, target: LoadTarget) -> None:
        """One more; ``target`` brings its values into the tensor, or into its local part."""
        self._filled.append(_Filled(name, tensor, target))

    @contextmanager
    def together(self, num_ranks: int) -> Iterator[None]:
        """A block that overwrites them, and that all ranks leave in the same way.

        Raises:
            PartialLoadError: for any error but Ctrl-C and the like; on all ranks, since what another has overwritten
                nobody can use without it.
        """
        try:
            yield
        except BaseException as error:
            names = [filled.name for filled in self._filled if filled.target.is_overwritten]
            if not names and num_ranks == 1:
                raise
            for filled in self._filled:
                if isinstance(filled.tensor, RaggedDTensor):  # of others nobody asks before they are used
                    mark_half_loaded(local_of(filled.tensor), filled.name)
            if not isinstance(error, Exception):
                error.add_note(_told(names))
                raise
            raise partial_load(error, names) from error
        for filled in self._filled:
            if isinstance(filled.tensor, RaggedDTensor):
                mark_whole(local_of(filled.tensor))


def partial_load(error: Exception, overwritten: Iterable[str]) -> PartialLoadError:
    """What to raise in place of an error that came when tensors had been overwritten: of its kind too."""
    names = tuple(overwritten)
    kind = PartialLoadError
    if isinstance(error, CorruptCheckpointError):
        kind = DamagedLoadError
    elif isinstance(error, NoCheckpointError):
        kind = VanishedLoadError
    met = str(error) if isinstance(error, VescaleError) else f"{type(error).__name__}: {error}"
    return kind(f"{met}\n  {_told(names)}", overwritten=names)


def _told(names: Iterable[str]) -> str:
    return f"overwritten: {some(names)}; use none of the state until a load has gone well"
