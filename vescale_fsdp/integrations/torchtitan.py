"""torchtitan: runs its models on this package's runtime, and stores its checkpoints in this package's format.

    def my_config() -> Trainer.Config:                  # torchtitan.train --module my_package --config my_config
        return with_vescale(llama3_8b(), granularity=Rows(32))

The model's own ``parallelize_fn`` runs unchanged (tensor parallelism, activation checkpointing, compile, FSDP of
blocks, and of experts on their own mesh). While it runs, this package's `fully_shard` replaces torch's in torchtitan's
modules. The checkpoint manager keeps torchtitan's policies (interval, number of kept steps, contents of the last step,
initial loads). It writes and reads folders of `vescale_fsdp.checkpoint`, and also reads steps that DCP has written. The
converter's rules map names for Hugging Face checkpoints, of which each rank reads and writes only its own parts.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.components.checkpointer import MODEL, AsyncMode
from torchtitan.components.checkpointer import CheckpointManager as TitanCheckpointManager
from torchtitan.models.common.moe import MoE
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from vescale_fsdp.checkpoint.async_save import SaveHandle, async_save
from vescale_fsdp.checkpoint.foreign import SourceOptions
from vescale_fsdp.checkpoint.load import Loader, load
from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_FILES
from vescale_fsdp.checkpoint.ranks.coordinator import coordinator_for
from vescale_fsdp.checkpoint.save import Format, save
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.conversion.live.huggingface import HuggingFace
from vescale_fsdp.errors import ArgumentError, CheckpointError, UnsupportedOpError, some
from vescale_fsdp.integrations.installation import ours_within
from vescale_fsdp.integrations.plain_values import holds_checkpoint
from vescale_fsdp.integrations.tried_versions import check_version
from vescale_fsdp.layout.granularity import GranularityRule
from vescale_fsdp.layout.padding import PaddingPolicy

_STEP = re.compile(r"step-(\d+)")  # torchtitan's name of a step's folder
# For torchtitan's name of a model: the converter's rules for (models with experts, models without experts).
_RULES = {
    "llama3": ("torchtitan-llama", "torchtitan-llama"),
    "qwen3": ("torchtitan-qwen3-moe", "torchtitan-qwen"),
    "deepseek_v3": ("torchtitan-deepseek-v3", "torchtitan-deepseek-v3"),
    "gpt_oss": ("torchtitan-gpt-oss", "torchtitan-gpt-oss"),
}


def with_vescale(
    config: Any,
    *,
    granularity: GranularityRule = None,
    padding_policy: PaddingPolicy = PaddingPolicy(),  # noqa: B008 (frozen)
) -> Any:
    """Copy a ``Trainer.Config`` and put this package's runtime and checkpoints into the copy.

    Args:
        config: torchtitan's configuration; it does not change.
        granularity, padding_policy: as for `vescale_fsdp.fully_shard`. Patterns match names relative to each unit of
            torchtitan, so begin a pattern with ``*``: ``"*w2.weight"``.

    Returns:
        The new configuration.

    Raises:
        ValueError: if the checkpoint manager of the configuration is not torchtitan's own.

    Examples:
        >>> def llama3_debugmodel_vescale():
        ...     from torchtitan.models.llama3.config_registry import llama3_debugmodel
        ...     return with_vescale(llama3_debugmodel(), granularity={"*w2.weight": "rows:32"})
    """
    check_version("torchtitan")
    # Not isinstance: the behavior of a subclass would be lost.
    if type(config.checkpoint) is not TitanCheckpointManager.Config:
        raise ArgumentError(
            "with_vescale replaces torchtitan's own CheckpointManager only.",
            expected="checkpoint=CheckpointManager.Config(...) of torchtitan.components.checkpointer",
            got=f"{type(config.checkpoint).__module__}.{type(config.checkpoint).__qualname__}",
            todo="use parallelize_with alone to keep another manager",
            where="with_vescale(config=..)",
        )
    spec = config.model_spec
    parallelize = parallelize_with(
        spec.parallelize_fn, granularity=granularity, padding_policy=padding_policy
    )
    # None for other models: an error only if the configuration reads or writes Hugging Face checkpoints.
    with_experts, dense = _RULES.get(spec.name, (None, None))
    rules = with_experts if any(spec.model.traverse(MoE.Config)) else dense
    # Not asdict, which would turn nested configurations into dicts.
    fields = {
        each.name: getattr(config.checkpoint, each.name) for each in dataclasses.fields(config.checkpoint)
    }
    return dataclasses.replace(
        config,
        model_spec=dataclasses.replace(spec, parallelize_fn=parallelize),
        checkpoint=VescaleCheckpoints.Config(**fields, hf_rules=rules),
    )


def parallelize_with(
    parallelize_fn: Callable[..., nn.Module],
    *,
    granularity: GranularityRule = None,
    padding_policy: PaddingPolicy = PaddingPolicy(),  # noqa: B008 (frozen)
) -> Callable[..., nn.Module]:
    """Wrap a model's ``parallelize_fn``, so that it shards with `vescale_fsdp.fully_shard`; see `with_vescale`.

    Examples:
        >>> def parallelize_llama():
        ...     from torchtitan.models.llama3 import parallelize_llama
        ...     return parallelize_with(parallelize_llama, granularity="rows:32")
    """

    @functools.wraps(parallelize_fn)
    def parallelize(model: nn.Module, **options: Any) -> nn.Module:
        _check_flags(options["parallelism"])
        with ours_within("torchtitan", granularity=granularity, padding_policy=padding_policy):
            return parallelize_fn(model, **options)

    return parallelize


def _check_flags(parallelism: Any) -> None:
    """Raise an UnsupportedOpError for flags that are not supported, before the model is changed."""
    if parallelism.enable_fsdp_symm_mem:
        raise UnsupportedOpError(
            "torchtitan's symmetric memory is not supported: parameters are views of this package's own buffers.",
            expected="parallelism.enable_fsdp_symm_mem = False",
            got=True,
        )
    if parallelism.spmd_backend == "spmd_types":
        raise UnsupportedOpError(
            "spmd_types is not supported by fully_shard, neither by this package's nor by torch 2.13's.",
            expected="parallelism.spmd_backend = 'partial_dtensor' or 'full_dtensor'",
            got="spmd_types",
        )


class _SaveFuture(Future[None]):
    """An asynchronous save, in the form of a future, for which torchtitan waits before the next save."""

    def __init__(self, handle: SaveHandle) -> None:
        super().__init__()
        self._handle = handle

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is committed; raises the error of a failed save."""
        self._handle.wait(timeout)

    def done(self) -> bool:
        """Return whether the save has ended, successfully or with an error."""
        return self._handle.done()


class VescaleCheckpoints(TitanCheckpointManager):
    """torchtitan's checkpoint manager, whose steps are folders of `vescale_fsdp.checkpoint`.

    Examples:
        >>> def checkpoint_config():
        ...     return VescaleCheckpoints.Config(interval=500, hf_rules="torchtitan-llama")
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanCheckpointManager.Config):
        """torchtitan's options. ``async_with_pinned_mem`` is the same as ``async``, which always reuses its buffer."""

        hf_rules: str | None = None
        """Rules that map torchtitan's names to Hugging Face's: the name of shipped rules, or a TOML file."""

    def __init__(self, config: Config, **components: Any) -> None:
        super().__init__(config, **components)
        if not self.enable:
            return
        if (self.last_save_in_hf or self.initial_load_in_hf) and config.hf_rules is None:
            raise CheckpointError(
                "There are no rules that map this model's names to Hugging Face's.",
                expected=f"one of the models {', '.join(_RULES)}, or a rule file",
                got="checkpoint.hf_rules = None",
                where="checkpoint.last_save_in_hf, checkpoint.initial_load_in_hf",
                todo="write a rule file (conversion/DESIGN.md) and name it in checkpoint.hf_rules",
            )
        self._hf_rules = config.hf_rules
        # This package pins its own staging buffer, so torchtitan has to keep none.
        if config.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM.value:
            self.async_mode = AsyncMode.ASYNC

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[None] | None:
        """Write the entries of a step that torchtitan has selected, synchronously or not. Replaces torchtitan's method.

        Returns:
            The future of an asynchronous save; None for a synchronous one.
        """
        # torchtitan saves in Hugging Face's format, or collects garbage, only in synchronous saves.
        if async_mode is not AsyncMode.DISABLED:
            return _SaveFuture(async_save(checkpoint_id, state_dict, overwrite=True))
        target: Format = "native"
        if to_hf:
            target = HuggingFace(assets=self.sd_adapter.hf_assets_path, rules=self._hf_rules)
        save(checkpoint_id, state_dict, overwrite=True, format=target)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return None

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load the entries that torchtitan has selected, from a step or a Hugging Face folder.

        A step may have the format of this package or of DCP.
        """
        if from_hf:
            self._load_hf(state_dict, checkpoint_id)
        elif holds_checkpoint(checkpoint_id):
            loader = Loader(open_storage(checkpoint_id), coordinator_for())
            # strict="missing" ignores entries that only the step has: torchtitan may select fewer.
            loader.load(state_dict, strict="missing", include=None)
        else:
            return super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        if MODEL in self.states:
            # The loaded state may have copies of fused weights, which torchtitan copies back into the model.
            self.states[MODEL].load_state_dict(state_dict)
        return None

    def _load_hf(self, state_dict: dict[str, Any], checkpoint_id: str) -> None:
        """Load the model from a Hugging Face folder.

        Raises:
            CheckpointError: if a parameter is missing or has another shape. Missing buffers are accepted.
        """
        names = SourceOptions(rules=self._hf_rules)
        # strict=False, since Hugging Face files lack buffers; the report is checked below.
        report = load(checkpoint_id, state_dict, source=names, dtype="state", strict=False)
        buffers = {name for part in self.states[MODEL].model for name, _ in part.named_buffers()}
        wrong = [f"{name}: {stored}, not {live}" for name, (stored, live) in report.mismatched.items()]
        missing = [f"without {name}" for name in report.missing if name not in buffers]
        with coordinator_for().together(f"loading {checkpoint_id}", "matching parameters were loaded"):
            if wrong or missing:
                raise CheckpointError(
                    "The Hugging Face checkpoint does not match this model.",
                    expected="all parameters, in their shapes",
                    got=some([*wrong, *missing], 5),
                    where=checkpoint_id,
                    todo="check that the checkpoint is of the configured model, and that its weights are not quantized "
                    "(vescale-convert to-hf --dequantize)",
                )

    def _find_load_step(self, folder: str = "") -> int:
        """Return the number of the newest complete step, in the format of this package or of DCP; -1 if none exists.

        Raises:
            CheckpointError: if ranks find different steps, as on a file system that is not shared.
        """
        folder = folder or self.folder
        alike: dict[str, Any] = {}  # its values are compared between ranks when the context ends
        with coordinator_for().together(f"looking for steps in {folder}", "nothing was loaded", alike):
            steps = [TitanCheckpointManager._find_load_step(self, folder)]
            for name in filesystem.listdir(folder) if filesystem.isdir(folder) else ():
                step = _STEP.fullmatch(name)
                inside = functools.partial(filesystem.join, filesystem.join(folder, name))
                if step and any(filesystem.isfile(inside(file)) for file in MANIFEST_FILES):
                    steps.append(int(step[1]))
            alike["newest step"] = max(steps)
        return max(steps)
