"""`Catalogue`: what a checkpoint has for a state, for `match`: a tree of leaves, and what is known of each tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import NamedTuple

import torch

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.state_tree import Json


class Stored(NamedTuple):
    """A stored tensor.

    Attributes:
        dtype: torch's name of the dtype.
        is_sharded: whether it was sharded when it was saved; False if the checkpoint does not say.
    """

    shape: tuple[int, ...]
    dtype: str
    is_sharded: bool = False


class Catalogue(ABC):
    """The content of a checkpoint, by the names of one state.

    Attributes:
        where: the checkpoint's path or URL.
        tree: the leaves as in a manifest; its tensor nodes have the numbers of `stored`.
        ignored: names of the checkpoint that are not in ``tree``, since the state has no object for them.
    """

    where: str
    tree: Json
    ignored: tuple[str, ...] = ()

    @abstractmethod
    def stored(self, number: int, wanted: torch.dtype | None) -> Stored:
        """Return tensor ``number`` as a load delivers it.

        Args:
            wanted: the dtype of the tensor to fill, which floats are cast to if the load casts; None for no cast.
        """

    @abstractmethod
    def identity(self, number: int) -> Hashable:
        """Return a key of a tensor's bytes: tensors with equal keys have the same stored bytes."""

    def may_lack(self, name: str) -> bool:
        """Return whether a complete checkpoint may lack this leaf of the state, such as the base of an adapter."""
        return False

    def leaves_to_class(self, name: str) -> bool:
        """Return whether the class of the model computes this weight and keeps it out of its files."""
        return False

    def leaves_to_adapter(self, name: str) -> bool:
        """Return whether this leaf belongs to an adapter of the state, and the checkpoint has only the base model."""
        return False


class ManifestCatalogue(Catalogue):
    """The content of a native checkpoint.

    Args:
        tree: the manifest's tree, or the part of it that one module is loaded from.
        ignored: names of the leaves outside of ``tree``.
    """

    def __init__(self, manifest: Manifest, where: str, tree: Json, ignored: tuple[str, ...] = ()) -> None:
        self._entries, self.where, self.tree, self.ignored = manifest.entries, where, tree, ignored

    def stored(self, number: int, wanted: torch.dtype | None) -> Stored:
        entry = self._entries[number]
        return Stored(entry.shape, entry.dtype, bool(entry.cuts))

    def identity(self, number: int) -> Hashable:
        # A tensor that ranks shard in different ways has several entries of one name, all with the same values.
        return self._entries[number].name
