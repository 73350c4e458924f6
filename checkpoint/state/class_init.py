"""First values of what no file of a model contains, by the classes of transformers and peft.

A model may contain others (a vision tower, a text model), each with an ``_init_weights`` of its own for the modules in
it. For each module, transformers calls that of the nearest model around it, and so does `ClassInitializer`. The
function of the outermost model leaves buffers of the inner ones as they are.

LoRA's matrices are linears too, but get the values that ``get_peft_model`` gives them, by the LoRA layer's own
``reset_lora_parameters``: one matrix of each pair is zero, so that the adapter changes nothing before training.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

_DONE = "_is_hf_initialized"  # transformers initializes no tensor with this attribute


class _Lora(NamedTuple):
    """A LoRA layer of peft around a module.

    Attributes:
        layer: peft's ``LoraLayer``.
        adapters: names of the adapters that the module belongs to.
        start: ``init_lora_weights`` of the adapters' config: how peft chooses first values.
    """

    layer: Any
    adapters: tuple[str, ...]
    start: object

    @property
    def needs_no_base(self) -> bool:
        """Whether peft chooses first values without the base weights, which are not read yet."""
        return isinstance(self.start, bool) or self.start == "gaussian"


def starts_from_base(root: nn.Module) -> bool:
    """Return whether an adapter of peft in a module has first values that are computed from the base weights.

    Such as PiSSA's and OLoRA's, which change the base too: they are wrong for base weights that are loaded later.
    """
    peft: Any = sys.modules.get("peft.config")  # not imported: then there is no adapter of it
    if peft is None:
        return False
    configs = (vars(module).get("peft_config") for module in root.modules())
    starts = (
        vars(config).get("init_lora_weights")
        for each in configs
        if isinstance(each, Mapping)
        for config in each.values()
        if isinstance(config, peft.PeftConfigMixin)
    )
    return any(start not in (None, True, False, "gaussian", "orthogonal") for start in starts)


class ClassInitializer:
    """Initializes the modules in a module that belong to models of transformers, or to LoRA layers of peft.

    Args:
        root: the module; a model of transformers or peft, or one that contains some.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        # Not imported: then there is no layer of it.
        self._lora: Any = sys.modules.get("peft.tuners.lora")
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

    def _lora_around(self, path: str) -> _Lora | None:
        """Return the LoRA layer whose adapters contain the module at this path; None without one.

        A path is ``...q_proj.lora_A.default``, or ``...embed_tokens.lora_embedding_A`` for matrices of all adapters.
        """
        parts = path.split(".")
        for at, part in enumerate(parts):
            if self._lora is None or not part.startswith("lora_"):
                continue
            layer = self._root.get_submodule(".".join(parts[:at]))
            if isinstance(layer, self._lora.LoraLayer):
                adapters = tuple(parts[at + 1 : at + 2]) or tuple(getattr(layer, part).keys())
                configs = [self._config_around(parts[:at], adapter) for adapter in adapters]
                starts = {True if config is None else config.init_lora_weights for config in configs}
                return _Lora(layer, adapters, starts.pop() if len(starts) == 1 else None)
        return None

    def _config_around(self, parts: list[str], adapter: str) -> Any:
        """Return peft's config of an adapter, which the models around its layers have; None if there is none."""
        for stop in range(len(parts), -1, -1):
            configs = vars(self._root.get_submodule(".".join(parts[:stop]))).get("peft_config")
            if isinstance(configs, Mapping) and adapter in configs:
                return configs[adapter]
        return None

    def covers(self, path: str) -> bool:
        """Return whether the module at this path belongs to a model of transformers or to a LoRA layer."""
        lora = self._lora_around(path)
        return self._model_around(path) is not None if lora is None else lora.needs_no_base

    def run(self, paths: Iterable[str]) -> None:
        """Initialize the tensors of the modules at these paths, if `covers` says so."""
        reset: set[tuple[int, str]] = set()
        with torch.no_grad():
            for path in paths:
                lora, module = self._lora_around(path), self._root.get_submodule(path)
                if lora is None:
                    if (model := self._model_around(path)) is not None:
                        model._init_weights(module)
                elif lora.start is False:  # peft keeps the values with which it creates these matrices
                    if isinstance(module, nn.ParameterDict):  # of an embedding
                        for adapter in lora.adapters:
                            if _DONE not in vars(module[adapter]):
                                nn.init.normal_(module[adapter])
                    elif isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                        module.reset_parameters()
                elif lora.needs_no_base:
                    new = [each for each in lora.adapters if (id(lora.layer), each) not in reset]
                    reset.update((id(lora.layer), each) for each in new)
                    for adapter in new:
                        _reset(lora, adapter)

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


def _reset(lora: _Lora, adapter: str) -> None:
    """Give an adapter of a LoRA layer the first values of peft, except tensors that `ClassInitializer.sparing` names.

    peft resets both matrices of a pair, although one of them may have a value.
    """
    own = [param for name, param in lora.layer.named_parameters() if name.startswith("lora_")]
    kept = [(param, param.detach().clone()) for param in own if _DONE in vars(param) and not param.is_meta]
    lora.layer.reset_lora_parameters(adapter, lora.start)
    for param, value in kept:
        param.detach().copy_(value)
