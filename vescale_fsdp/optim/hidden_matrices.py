"""Which parameters of a model are hidden matrices, which `Muon` is for.

Decided by the classes of the modules that own a parameter, by ties and by shapes. Names decide only where the caller
passes patterns. In this order:

    parameter                                                                    optimizer
    ---------------------------------------------------------------------------  ---------
    a pattern of the caller matches one of its names                             the caller's
    fewer than two dims, more than three, or a dim of size 1                     AdamW
    of an input or output layer, see `_outer_layers`; also if tied to one        AdamW
    a filter of a convolution, or the weight of a norm                           AdamW
    2-D, of a linear, recurrent or attention module                              Muon
    3-D, of any other module: a stack of matrices, such as experts               Muon
    2-D next to a stack, with one row per matrix: biases of experts              AdamW
    2-D, of any other module: a table of positions, a router; logged, a warning  AdamW

Shapes are global, so the result is the same before and after `fully_shard`, and for FSDP2.
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp.errors import LayoutError, explain, some

_logger = logging.getLogger("vescale_fsdp")

# All parameters of these modules belong to an input or output layer.
_OUTER = (nn.Embedding, nn.EmbeddingBag, nn.AdaptiveLogSoftmaxWithLoss)
# `torch.optim.Muon` takes 2-D parameters only, so filters are not for Muon here. K. Jordan's Muon flattens hidden 2-D
# filters to [out, in * height * width], but not those of the first convolution, which no class tells from the others.
_FILTERS_AND_NORMS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.LayerNorm,
    nn.RMSNorm,
)
_MATRICES = (nn.Linear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
_BARE = "2-D, of a class that is not known"


@dataclass
class _Uses:
    """The uses of a parameter: its names and the modules that own it, several each for a tied one."""

    names: list[str] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)


def split_hidden(
    model: nn.Module, *, muon: Sequence[str], adamw: Sequence[str]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Split the parameters that require a gradient into hidden matrices and all others, each in the model's order.

    Rank 0 logs which parameters went where, and why.

    Args:
        muon, adamw: name patterns (fnmatch) of parameters that the caller assigns.

    Raises:
        LayoutError: if a pattern matches no parameter, or a pattern of each list matches the same parameter.
    """
    uses: defaultdict[nn.Parameter, _Uses] = defaultdict(_Uses)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False):
            uses[param].names.append(f"{prefix}.{name}" if prefix else name)
            uses[param].owners.append(module)
    chosen = _chosen_by_name(uses, muon, adamw)
    outer = _outer_layers(model)
    matrices: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    reasons: dict[tuple[str, str], list[_Uses]] = {}
    for param in model.parameters():
        if param.requires_grad:
            is_hidden, reason = chosen.get(param) or _by_class(param, uses[param].owners, outer)
            (matrices if is_hidden else rest).append(param)
            reasons.setdefault(("Muon" if is_hidden else "AdamW", reason), []).append(uses[param])
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log(reasons)
        if heads := [uses[param].names[0] for param in _doubtful_heads(model, outer, chosen)]:
            _logger.warning(
                explain(
                    "Muon.split_params gives linear weights with the shape of an embedding to Muon. If one of them is "
                    "the output head, AdamW should have it.",
                    expected="one linear weight with the shape of an embedding: the output head",
                    got=f"{len(heads)}: {some(heads)}",
                    todo="name the output head in adamw=[...], or, if there is none, these weights in muon=[...]",
                )
            )
    return matrices, rest


def _chosen_by_name(
    uses: Mapping[nn.Parameter, _Uses], muon: Sequence[str], adamw: Sequence[str]
) -> dict[nn.Parameter, tuple[bool, str]]:
    """Return (whether it is for Muon, the reason) for each parameter that a pattern of the caller matches."""
    names = [name for use in uses.values() for name in use.names]
    chosen: dict[nn.Parameter, tuple[bool, str]] = {}
    for is_hidden, argument, patterns in ((True, "muon", muon), (False, "adamw", adamw)):
        for pattern in patterns:
            matched = [p for p, use in uses.items() if fnmatch.filter(use.names, pattern)]
            if not matched:
                # 0.3 is below difflib's default (0.6), because wildcards make a pattern unlike the intended name.
                near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:5]
                raise LayoutError(
                    "A name pattern of Muon.split_params matches no parameter.",
                    expected="patterns (fnmatch) that each match a name of model.named_parameters()",
                    got=f"{argument}=[{pattern!r}]",
                    where=f"near it: {', '.join(near)}",
                    todo="correct the pattern",
                )
            for param in matched:
                if chosen.get(param, (is_hidden, ""))[0] != is_hidden:
                    raise LayoutError(
                        "Name patterns of Muon.split_params assign a parameter to both optimizers.",
                        expected="each parameter in one of muon= and adamw= at most",
                        got=f"{argument}=[{pattern!r}], and a pattern of the other argument",
                        where=uses[param].names[0],
                        todo="make one of the patterns narrower",
                    )
                chosen[param] = (is_hidden, f"{argument}=[{pattern!r}]")
    return chosen


def _by_class(
    param: nn.Parameter, owners: Sequence[nn.Module], outer: Mapping[nn.Parameter, str]
) -> tuple[bool, str]:
    """Return whether a parameter is a hidden matrix or a stack of them, and the reason."""
    if len(param.shape) not in (2, 3) or min(param.shape) < 2:
        return False, "no matrix"
    if param in outer:
        return False, outer[param]
    if any(isinstance(owner, _FILTERS_AND_NORMS) for owner in owners):
        return False, "filter or norm"
    if len(param.shape) == 3:
        return True, "stack of matrices"
    linear = (*_MATRICES, *_linear_of_transformers())
    if any(isinstance(owner, linear) for owner in owners):
        return True, "linear, recurrent or attention module"
    neighbors = (each.shape for owner in owners for each in owner._parameters.values() if each is not None)
    if any(len(shape) == 3 and shape[0] == param.shape[0] for shape in neighbors):
        return False, "a row per matrix of a stack"
    return False, _BARE


def _outer_layers(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the parameters of input and output layers, each with the reason.

    These are the parameters of

    - embeddings (`_OUTER`), and so of every module that is tied to one
    - what ``get_input_embeddings()`` and ``get_output_embeddings()`` of a transformers model return
    - a linear module that a transformers model owns next to its base model: the head of a classifier
    - the only linear weight of the model with the shape of an embedding: an output head that is not tied
    """
    outer: dict[nn.Parameter, str] = {}
    for module in model.modules():
        if isinstance(module, _OUTER):
            outer |= dict.fromkeys(module.parameters(), "embedding, or tied to one")
    for module in model.modules():
        if isinstance(module, _loaded("transformers.modeling_utils", "PreTrainedModel")):
            for layer in _outer_layers_of(module):
                outer |= dict.fromkeys(layer.parameters(), "input or output layer of a transformers model")
    shapes = {weight.shape for weight in _weights_of(model, nn.Embedding)}
    linear = dict.fromkeys(_weights_of(model, nn.Linear))
    counts = Counter(weight.shape for weight in linear)
    for weight in linear:
        # Several such weights are hidden ones whose size happens to be that of a table of positions.
        if weight.shape in shapes and counts[weight.shape] == 1:
            outer.setdefault(weight, "the only linear weight with the shape of an embedding")
    return outer


def _doubtful_heads(
    model: nn.Module, outer: Mapping[nn.Parameter, str], chosen: Mapping[nn.Parameter, tuple[bool, str]]
) -> list[nn.Parameter]:
    """Return the linear weights with the shape of an embedding, if no output head is known by now."""
    linear = dict.fromkeys(_weights_of(model, nn.Linear))
    if any(weight in outer or not chosen.get(weight, (True, ""))[0] for weight in linear):
        return []
    shapes = {weight.shape for weight in _weights_of(model, nn.Embedding)}
    return [weight for weight in linear if weight.shape in shapes and weight not in chosen]


def _weights_of(model: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the parameter ``weight`` of each module of a class, if the module has it."""
    for module in model.modules():
        if isinstance(module, kind) and (weight := module._parameters.get("weight")) is not None:
            yield weight


def _outer_layers_of(model: Any) -> list[nn.Module]:
    """Return the input and output layers that a transformers model declares."""
    layers = [model.get_output_embeddings()]  # None without such a layer
    with suppress(NotImplementedError):  # raised by models without such a layer (transformers 5)
        layers.append(model.get_input_embeddings())
    if model.base_model is not model:
        linear = (nn.Linear, *_linear_of_transformers())
        layers += (child for child in model.children() if isinstance(child, linear))
    return [layer for layer in layers if layer is not None]


def _linear_of_transformers() -> tuple[type, ...]:
    """Return GPT-2's linear class, whose weight is [in, out]."""
    return _loaded("transformers.pytorch_utils", "Conv1D")


def _loaded(module: str, name: str) -> tuple[type, ...]:
    """Return a class for `isinstance`; nothing if its module is not imported, since no object is of the class then."""
    loaded = sys.modules.get(module)
    return () if loaded is None else (vars(loaded)[name],)


def _log(reasons: Mapping[tuple[str, str], Sequence[_Uses]]) -> None:
    """Log one line per optimizer and reason; warn about matrices whose use no class tells."""
    for (optimizer, reason), params in reasons.items():
        counted = Counter(re.sub(r"(?<![^.])\d+(?=\.)", "*", use.names[0]) for use in params)
        names = some((f"{name} x {count}" if count > 1 else name for name, count in counted.items()), 8)
        _logger.info("Muon.split_params, to %s, %s: %s", optimizer, reason, names)
    if bare := reasons.get(("AdamW", _BARE)):
        kinds = sorted({type(owner).__name__ for use in bare for owner in use.owners})
        _logger.warning(
            explain(
                "Muon.split_params gives 2-D parameters to AdamW whose classes do not say whether they are matrices.",
                expected="parameters of nn.Linear, or other modules of torch",
                got=f"{some(use.names[0] for use in bare)}, of {some(kinds)}",
                todo="name them in muon=[...] if they multiply hidden activations, or else in adamw=[...]",
            )
        )
