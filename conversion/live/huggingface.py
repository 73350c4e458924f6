"""`HuggingFace`: a format for `save` that writes a Hugging Face repository directly from live shards.

The save is a conversion whose source is the ranks' shards. `plan_conversion` plans key rules, casts and ties, so the
folder has the same bytes as one converted from a native checkpoint. The class is in ``conversion`` because it uses key
rules. The reader, the writer and the checks of the format are in `conversion.formats.huggingface`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.manifest.structure import Structure, dump_json
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name
from vescale_fsdp.checkpoint.native.form import Commit, Form, RankShare
from vescale_fsdp.checkpoint.native.leaves import NativeLeaves
from vescale_fsdp.checkpoint.state.model_names import optimizer_names
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import hex_checksum_of
from vescale_fsdp.conversion.convert import plan_conversion
from vescale_fsdp.conversion.convert_options import ConvertOptions
from vescale_fsdp.conversion.engine.carried_state import find_model
from vescale_fsdp.conversion.engine.casting import CastRules
from vescale_fsdp.conversion.engine.plan import OutputPlan
from vescale_fsdp.conversion.formats.huggingface.class_check import check_planned
from vescale_fsdp.conversion.formats.huggingface.repository import CONFIG_FILE, Assets
from vescale_fsdp.conversion.formats.huggingface.tied_weights import Compare
from vescale_fsdp.conversion.formats.huggingface.write_from_ranks import (
    MIN_BUDGET_BYTES,
    repository_folder,
    write_repository,
)
from vescale_fsdp.conversion.live.held_shards import HeldShards
from vescale_fsdp.conversion.quantization.names import find_quantized
from vescale_fsdp.conversion.rules.rule_file import load_rules
from vescale_fsdp.errors import ConversionError, some

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class HuggingFace(Form):
    """Write a Hugging Face repository; an argument of ``save(..., format=)`` and ``CheckpointManager(export=)``.

    Examples:
        >>> from vescale_fsdp.conversion import HuggingFace
        >>> form = HuggingFace(assets="original_repo", dtype="bfloat16")
        >>> save("out", {"model": model, "optimizer": optimizer}, format=form)  # doctest: +SKIP

    The optimizer is dropped. Each rank writes its part of the files, and no tensor is gathered. Ranks exchange small
    parts only where the bytes of several ranks alternate in a file: after some key rules, and for shards along other
    dims than the first.

    Args:
        assets: folder or URL whose config.json, tokenizer files and so on are copied.
        rules: key rules from the model's names to Hugging Face's: the name of a shipped set, or a TOML file.
        dtype: the type that floats are cast to, or several texts such as ``"*.gate.bias=float32"``.
        model_prefix: prefix of the model's names in the state, such as ``"model"``; all other entries are dropped.
            By default the model is detected, and a state with entries outside the model and its optimizer is refused.
        max_shard_bytes: maximum bytes of tensors per file.
        budget_bytes: maximum bytes of other ranks' tensors that a rank buffers.
        require_check: raise unless the shipped table shows that the class in config.json loads the result. By default
            a mismatch is only a warning: the class itself may accept other names too, but is not imported during
            training.
        fingerprint: also write ``fingerprints.json``, with the fingerprints of all tensors as the files have them. The
            ranks share the written files, and read them once more.

    Raises:
        ConversionError: if floats cannot be cast to ``dtype``, or a limit is too small.
    """

    assets: str | os.PathLike[str]
    rules: str | None = None
    dtype: str | torch.dtype | Sequence[str] = ()
    model_prefix: str | None = None
    max_shard_bytes: int = 5 * 10**9  # as for conversions, so that both write the same files
    budget_bytes: int = 64 << 20  # 64 MiB
    require_check: bool = False
    fingerprint: bool = False

    def __post_init__(self) -> None:
        CastRules.parse(self._casts)  # raises an error now instead of in the first save
        if self.budget_bytes < MIN_BUDGET_BYTES or self.max_shard_bytes < 1:
            raise ConversionError(
                "A limit is too small.",
                expected=f"budget_bytes >= {MIN_BUDGET_BYTES} and max_shard_bytes >= 1",
                got=f"{self.budget_bytes} and {self.max_shard_bytes}",
                where="HuggingFace(..)",
            )

    @property
    def _casts(self) -> tuple[str, ...]:
        """``dtype`` as texts for `CastRules.parse`."""
        if isinstance(self.dtype, (str, Sequence)):
            return (self.dtype,) if isinstance(self.dtype, str) else tuple(self.dtype)
        return (dtype_name(self.dtype),)

    def arguments(self) -> Json:
        """Return all options, with checksums of config.json and the rules, whose files may differ between nodes.

        Raises:
            ConversionError: if the assets have no config.json, or the rules cannot be read.
        """
        url = os.fspath(self.assets)
        config = Assets(url).config
        if config is None:
            raise ConversionError(
                f"{CONFIG_FILE} is missing in the assets.",
                expected=f"a folder with {CONFIG_FILE}, without which no loader reads the weights",
                got="no such file",
                where=url,
                todo="check the path given as assets=",
            )
        rules = repr(load_rules(self.rules)) if self.rules is not None else ""
        return {
            "form": "HuggingFace",
            "assets": url,
            CONFIG_FILE: hex_checksum_of(dump_json(config)),
            "rules": [self.rules, hex_checksum_of(rules.encode())],
            "dtype": list(self._casts),
            "model_prefix": self.model_prefix,
            "max_shard_bytes": self.max_shard_bytes,
            "budget_bytes": self.budget_bytes,
            "require_check": self.require_check,
            "fingerprint": self.fingerprint,
        }

    def claim(self, storage: Storage, held: ExitStack, *, overwrite: bool) -> None:
        """Lock the folder; raise if it has files that do not belong to a Hugging Face repository."""
        repository_folder(storage).claim(held, overwrite=overwrite)

    def write(self, plan: Callable[[], Manifest], share: RankShare) -> Commit:
        """Plan a conversion of the ranks' shards, and write this rank's part of all files."""
        class_warnings = partial(self._class_warnings, share.storage.where)
        return write_repository(
            plan, share, self._planned, class_warnings, self.budget_bytes, fingerprint=self.fingerprint
        )

    def clear_away(self, storage: Storage, save_id: str) -> None:
        """Remove all files of a failed save."""
        repository_folder(storage).clear_away()

    def dropped(self, structure: Structure) -> Collection[str]:
        """Return the names of the optimizer's tensors. `_planned` may drop further tensors, such as tied ones."""
        leaves = NativeLeaves(structure, "the state")
        optimizer = set(optimizer_names(leaves.paths))
        kept = {number for name, number in leaves.tensors.items() if name not in optimizer}
        return [entry.name for number, entry in enumerate(structure.entries) if number not in kept]

    def _planned(self, shards: HeldShards, is_equal: Compare) -> tuple[OutputPlan, Sequence[str]]:
        """Return the plan of the repository's files, and warnings.

        Raises:
            ConversionError: without ``model_prefix``, for entries outside the model and its optimizer.
        """
        # An unexpected entry may be data that the user wants to keep, so only `model_prefix` drops it without an error.
        others = (*find_model(shards.source, self.model_prefix).others, *shards.source.unsupported)
        if others and self.model_prefix is None:
            raise ConversionError(
                "A Hugging Face repository cannot contain all of this state.",
                expected="a model, and an optimizer, which is dropped",
                got=some(others, 8),
                where=shards.source.url,
                todo="save the model alone, or name it: HuggingFace(.., model_prefix='model') drops all else",
            )
        options = ConvertOptions(
            assets=os.fspath(self.assets),
            model_prefix=self.model_prefix,
            dtype=self._casts,
            rules=self.rules,
            max_shard_bytes=self.max_shard_bytes,
        )
        report = plan_conversion(shards.source, shards.source.url, "hf", options, is_equal)
        return report.plan, report.warnings

    def _class_warnings(self, where: str, plan: OutputPlan) -> Sequence[str]:
        """Compare the repository with the class in config.json, by the shipped table; returns warnings.

        Raises:
            ConversionError: with ``require_check``, if they differ, or the table lacks the class.
        """
        # "never": training must not wait for a child process that imports the class.
        check = check_planned(plan, find_quantized, asks="never")
        problems = () if check is None else check.problems
        is_unknown = check is None or check.how == "not checked"
        if self.require_check and (problems or is_unknown):
            reason = "" if check is None else check.reason
            raise ConversionError(
                "The class that config.json names is not known to load this model.",
                expected="the names and shapes of the class in the shipped table",
                got=some(problems, 6) if problems else reason or "a class that is not in the table",
                where=where,
                todo="pass the model's own config.json as assets=, or rules= to its names; or leave out "
                "require_check=True, and convert a native checkpoint with vescale-convert to-hf, which runs the class",
            )
        if check is None:
            return ()
        texts = []
        if problems:
            loads_not = (
                f"{check.class_name} of config.json does not load" if check.class_name else "no class loads"
            )
            texts.append(f"{loads_not} {where} as it is: {some(problems, 6)}")
        if check.extra:
            texts.append(
                f"{check.class_name} of config.json ignores tensors of {where}: {some(check.extra, 6)}"
            )
        return texts
