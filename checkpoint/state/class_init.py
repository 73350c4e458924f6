"""First values of what no file of a transformers model contains, by the model's own classes.

A model may contain others (a vision tower, a text model), each with an ``_init_weights`` of its own for the modules in
it. For each module, transformers calls that of the nearest model around it, and so does `ClassInitializer`. The
function of the outermost model leaves buffers of the inner ones as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_DONE = "_is_hf_initialized"  # transformers initializes no tensor with this attribute


class ClassInitializer:
    """Initializes the modules in a module that belong to models of transformers.

    Args:
        root: the module; a model of transformers, or one that contains some.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        transformers = sys.modules.get("transformers")  # not imported: then there is no model of it
        self._class: Any = None if transformers is None else transformers.PreTrainedModel

    def _model_around(self, path: str) -> Any:
        """Return the nearest model of transformers around a module, or the module itself if it is one; None without."""
        if self._class is None:
            return None
        while True:
            if isinstance(module := self._root.get_submodule(path), self._class):
                return module
            if not path:
                return None
            path = path.rpartition(".")[0]

    def covers(self, path: str) -> bool:
        """Return whether the module at this path belongs to a model of transformers."""
        return self._model_around(path) is not None

    def run(self, paths: Iterable[str]) -> None:
        """Initialize the tensors of the modules at these paths that belong to models of transformers."""
        with torch.no_grad():
            for path in paths:
                if (model := self._model_around(path)) is not None:
                    model._init_weights(self._root.get_submodule(path))

    @contextmanager
    def sparing(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Context manager, in which `run` does not initialize these tensors: they have values, or get stored ones."""
        marked = (
            [tensor for tensor in tensors if _DONE not in vars(tensor)] if self._class is not None else []
        )
        for tensor in marked:
            setattr(tensor, _DONE, True)
        try:
            yield
        finally:
            for tensor in marked:
                vars(tensor).pop(_DONE, None)  # a tensor that has two names is listed twice
