"""Names of an adapter's tensors: in a training run's state, which may hold several adapters, and in peft's folders.

in training   base_model.model.h.0.q.lora_A.default.weight          ..q.modules_to_save.default.weight
in a folder   base_model.model.h.0.q.lora_A.weight                  ..q.weight
of the base   h.0.q.base_layer.weight                               ..q.original_module.weight
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from vescale_fsdp.errors import ConversionError, some

ROOT = "base_model.model."
_PARTS = "lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|ia3_l|modules_to_save"
_TRAINED = re.compile(rf"(?P<module>.+)\.(?P<part>{_PARTS})\.(?P<adapter>[^.]+)(?P<rest>\..+)?")


class TrainedName(NamedTuple):
    """A tensor of an adapter in training: which adapter's, and its name in a folder."""

    adapter: str
    saved: str


def trained_names(names: Iterable[str]) -> dict[str, TrainedName]:
    """Those that are an adapter's; models without peft's wrapper (transformers' ``add_adapter``) get its prefix."""
    found = {}
    for name in names:
        match = _TRAINED.fullmatch(name)
        if match is None:
            continue
        part, rest = match["part"], match["rest"] or ""
        ends = {"modules_to_save": rest, "lora_magnitude_vector": ".lora_magnitude_vector"}
        short = match["module"].removeprefix(ROOT) + ends.get(part, f".{part}{rest}")
        found[name] = TrainedName(match["adapter"], ROOT + short)
    return found


def trained_biases(names: Iterable[str], adapter: Collection[str], which: str) -> dict[str, str]:
    """The base's biases that were trained beside an adapter: name in training -> name in a folder."""
    modules = {match["module"] for match in map(_TRAINED.fullmatch, adapter) if match}
    found = {}
    for name in names:
        module = name.removesuffix(".bias").removesuffix(".base_layer")
        if name.endswith("bias") and name not in adapter and (which == "all" or module in modules):
            found[name] = ROOT + name.removeprefix(ROOT)
    return found if which != "none" else {}


def one_adapter(found: dict[str, TrainedName], wanted: str | None, where: str) -> dict[str, str]:
    """Name in training -> name in a folder, of the adapter that is meant.

    Raises:
        ConversionError: if there is none, or several and nobody says which.
    """
    adapters = sorted({name.adapter for name in found.values()})
    chosen = wanted if wanted is not None else adapters[0] if len(adapters) == 1 else None
    if chosen not in adapters:
        raise ConversionError(
            "The source holds several adapters."
            if adapters and wanted is None
            else "There is no such adapter.",
            expected=f"one of {some(adapters, 8)}"
            if adapters
            else "tensors such as q_proj.lora_A.default.weight",
            got=wanted or (some(adapters, 8) if adapters else "a state without an adapter"),
            where=where,
            todo=f"pass --adapter-name {adapters[0]}"
            if adapters
            else "leave out --adapter, or pass another source",
        )
    return {name: each.saved for name, each in found.items() if each.adapter == chosen}
