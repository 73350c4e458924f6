"""adapter_config.json of peft: what an adapter does to the weights of its base, or why that is not known here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.formats.huggingface.repository import refuse_pointers
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.layout.foreign_json import parse_json

ADAPTER_CONFIG = "adapter_config.json"
_TYPES = ("LORA", "IA3")
# Settings under which a merge is another one, or starts from another base, than what is computed here.
_OTHER_MERGES = (
    "use_bdlora",
    "use_qalora",
    "arrow_config",
    "alora_invocation_tokens",
    "velora_config",
    "monteclora_config",
    "kasa_config",
    "eva_config",
    "corda_config",
    "loftq_config",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "megatron_config",
)
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal")  # others change the base before training


@dataclass(frozen=True)
class PeftConfig:
    """What matters for merging.

    Args:
        kind: ``LORA`` or ``IA3``.
        rank, alpha: of LoRA, for all modules but those with a pattern.
        rank_patterns, alpha_patterns: a module's name or its end (a regular expression) -> its own.
        is_rank_stabilised: whether alpha is divided by the root of the rank.
        is_dora: whether rows have magnitudes of their own.
        biases: which of the base's were trained too: ``none``, ``all`` or ``lora_only``.
    """

    kind: str
    rank: int = 0
    alpha: float = 0.0
    rank_patterns: Mapping[str, int] = field(default_factory=dict)
    alpha_patterns: Mapping[str, float] = field(default_factory=dict)
    is_rank_stabilised: bool = False
    is_dora: bool = False
    biases: str = "none"

    @classmethod
    def read(cls, store: Storage, todo: str) -> PeftConfig:
        """Of a folder; ``todo`` is what to do if it has none.

        Raises:
            ConversionError: if there is none, or it is of a kind whose merge is not known.
        """
        where = f"{store.where}/{ADAPTER_CONFIG}"
        if store.size(ADAPTER_CONFIG) is None:
            raise ConversionError(
                "There is no adapter_config.json.",
                expected=f"a file {ADAPTER_CONFIG}, which says rank and alpha",
                got="none there",
                where=store.where,
                todo=todo,
            )
        try:
            data = parse_json(store.read(ADAPTER_CONFIG), is_text=True)
            _refuse_others(data, where)
            return cls(
                data["peft_type"],
                int(data.get("r") or 0),
                float(data.get("lora_alpha") or 0),
                {str(k): int(v) for k, v in (data.get("rank_pattern") or {}).items()},
                {str(k): float(v) for k, v in (data.get("alpha_pattern") or {}).items()},
                bool(data.get("use_rslora")),
                bool(data.get("use_dora")),
                str(data.get("bias") or "none"),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            refuse_pointers(store, [ADAPTER_CONFIG], error)
            raise ConversionError(
                "An adapter_config.json cannot be read.",
                expected="JSON as peft's save_pretrained writes it",
                got=f"{type(error).__name__}: {error}",
                where=where,
                todo="copy the file again from where it was made",
            ) from error

    def rank_of(self, module: str) -> int:
        """Of LoRA in a module."""
        return _of_pattern(self.rank_patterns, module, self.rank)

    def scaling_of(self, module: str) -> float:
        """What the product of its two matrices is multiplied by."""
        rank, alpha = self.rank_of(module), _of_pattern(self.alpha_patterns, module, self.alpha)
        return alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((v for key, v in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _refuse_others(data: Mapping[str, Any], where: str) -> None:
    start = data.get("init_lora_weights")
    other = next((f"{key} {data[key]!r:.60}" for key in _OTHER_MERGES if data.get(key)), None)
    if data["peft_type"] not in _TYPES:
        other = f"peft_type {data['peft_type']}"
    elif start not in _PLAIN_STARTS:
        other = f"init_lora_weights {start!r}, which changed the base before training"
    if other is not None:
        raise ConversionError(
            "How this kind of adapter changes its base is not known here.",
            expected="LoRA (rslora, DoRA, patterns of rank and alpha) or IA3",
            got=other,
            where=where,
            todo="merge it with peft itself: PeftModel.from_pretrained(base, adapter).merge_and_unload()",
        )
