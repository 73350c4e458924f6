"""torchtitan: any of its models under our runtime, and its CheckpointManager with our checkpoints behind it.

    def my_config() -> Trainer.Config:                  # torchtitan.train --module my_package --config my_config
        return with_vescale(llama3_8b(), granularity=Rows(32))

The model's own ``parallelize_fn`` does what it does (tensor parallelism, activation checkpointing, compile, FSDP of
blocks, and of experts on their own mesh); while it runs, the ``fully_shard`` of torchtitan's modules is ours. The
checkpoint manager keeps torchtitan's policies (interval, how many steps are kept, what the last one holds, initial
loads) and writes and reads folders of `vescale_fsdp.checkpoint`; steps that DCP wrote are read as well. Hugging Face
comes in and goes out by the converter's rules, straight into shards and out of them: each rank reads and writes its
own parts.
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
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from vescale_fsdp.checkpoint.async_save import SaveHandle, async_save
from vescale_fsdp.checkpoint.load import Loader, LoadReport, SourceOptions, load
from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME
from vescale_fsdp.checkpoint.ranks.coordinator import coordinator_for
from vescale_fsdp.checkpoint.save import Format, save
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.conversion.huggingface import HuggingFace
from vescale_fsdp.errors import ArgumentError, CheckpointError, UnsupportedOpError, some
from vescale_fsdp.integrations.installation import ours_within
from vescale_fsdp.integrations.plain_values import holds_checkpoint
from vescale_fsdp.integrations.tried_versions import check_version
from vescale_fsdp.layout.granularity import GranularityRule
from vescale_fsdp.layout.padding import PaddingPolicy

_STEP = re.compile(r"step-(\d+)")
# torchtitan's name of a model -> the converter's rules; with experts and without
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
    """A ``Trainer.Config`` with our runtime in its ``model_spec`` and our checkpoints in its ``checkpoint``.

    Args:
        config: torchtitan's; it stays as it is.
        granularity, padding_policy: as for `vescale_fsdp.fully_shard`. Names in patterns begin at each of
            torchtitan's units: ``"*w2.weight"`` is right for all of them.

    Raises:
        ValueError: if the configuration has another checkpoint manager than torchtitan's own.

    Examples:
        >>> def llama3_debugmodel_vescale():
        ...     from torchtitan.models.llama3.config_registry import llama3_debugmodel
        ...     return with_vescale(llama3_debugmodel(), granularity={"*w2.weight": "rows:32"})
    """
    check_version("torchtitan")
    if type(config.checkpoint) is not TitanCheckpointManager.Config:
        raise ArgumentError(
            "Our checkpoints take the place of torchtitan's CheckpointManager.",
            expected="checkpoint=CheckpointManager.Config(...) of torchtitan.components.checkpointer",
            got=f"{type(config.checkpoint).__module__}.{type(config.checkpoint).__qualname__}",
            todo="use parallelize_with alone to keep another manager",
        )
    spec = config.model_spec
    given = {
        field.name: getattr(config.checkpoint, field.name) for field in dataclasses.fields(config.checkpoint)
    }
    return dataclasses.replace(
        config,
        model_spec=dataclasses.replace(
            spec,
            parallelize_fn=parallelize_with(
                spec.parallelize_fn, granularity=granularity, padding_policy=padding_policy
            ),
        ),
        checkpoint=VescaleCheckpoints.Config(**given, hf_rules=_rules_of(spec)),
    )


def _rules_of(spec: ModelSpec) -> str | None:
    with_experts, dense = _RULES.get(spec.name, (None, None))
    return with_experts if any(spec.model.traverse(MoE.Config)) else dense


def parallelize_with(
    parallelize_fn: Callable[..., nn.Module],
    *,
    granularity: GranularityRule = None,
    padding_policy: PaddingPolicy = PaddingPolicy(),  # noqa: B008 (frozen)
) -> Callable[..., nn.Module]:
    """A model's ``parallelize_fn`` that shards with our `fully_shard`; see `with_vescale`.

    Examples:
        >>> def parallelize_llama():
        ...     from torchtitan.models.llama3 import parallelize_llama
        ...     return parallelize_with(parallelize_llama, granularity="rows:32")
    """

    @functools.wraps(parallelize_fn)
    def parallelize(model: nn.Module, **given: Any) -> nn.Module:
        _prove_flags(given["parallelism"])
        with ours_within("torchtitan", granularity=granularity, padding_policy=padding_policy):
            return parallelize_fn(model, **given)

    return parallelize


def _prove_flags(parallelism: Any) -> None:
    """Refuse by name what cannot be honoured, before the model is touched."""
    if parallelism.enable_fsdp_symm_mem:
        raise UnsupportedOpError(
            "Symmetric memory cannot lie under buffers that double as parameters.",
            expected="parallelism.enable_fsdp_symm_mem = False",
            got=True,
        )
    if parallelism.spmd_backend == "spmd_types":
        raise UnsupportedOpError(
            "fully_shard does not understand the annotations of spmd_types: neither ours nor that of torch 2.13.",
            expected="parallelism.spmd_backend = 'partial_dtensor' or 'full_dtensor'",
            got="spmd_types",
        )


class _SaveFuture(Future[None]):
    """A save behind training, as torchtitan asks for it."""

    def __init__(self, handle: SaveHandle) -> None:
        super().__init__()
        self._handle = handle

    def result(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is committed; raise what became of it otherwise."""
        self._handle.wait(timeout)

    def done(self) -> bool:
        """Whether the save has ended."""
        return self._handle.done()


class VescaleCheckpoints(TitanCheckpointManager):
    """torchtitan's manager, with our checkpoints in its steps.

    Examples:
        >>> def checkpoint_config():
        ...     return VescaleCheckpoints.Config(interval=500, hf_rules="torchtitan-llama")
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanCheckpointManager.Config):
        """torchtitan's; ``async_with_pinned_mem`` means ``async``, whose staging buffer is reused in any case."""

        hf_rules: str | None = None
        """The converter's rules between torchtitan's names and Hugging Face's: a shipped set or a TOML file."""

    def __init__(self, config: Config, **components: Any) -> None:
        super().__init__(config, **components)
        if not self.enable:
            return
        if (self.last_save_in_hf or self.initial_load_in_hf) and config.hf_rules is None:
            raise CheckpointError(
                "There are no rules for this model's names in Hugging Face.",
                expected=f"one of the models {', '.join(_RULES)}, or rules of your own",
                got="checkpoint.hf_rules = None",
                where="checkpoint.last_save_in_hf, checkpoint.initial_load_in_hf",
                todo="write a rule file (conversion/DESIGN.md) and name it in checkpoint.hf_rules",
            )
        self._hf_rules = config.hf_rules
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
        """Write a step; torchtitan's policies have decided which, and what of it."""
        if async_mode is not AsyncMode.DISABLED:
            return _SaveFuture(async_save(checkpoint_id, state_dict, overwrite=True))
        form: Format = "native"
        if to_hf:
            form = HuggingFace(assets=self.sd_adapter.hf_assets_path, rules=self._hf_rules)
        save(checkpoint_id, state_dict, overwrite=True, format=form)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return None

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Fill what torchtitan asks for from a step of ours or of DCP's, or from a Hugging Face folder."""
        if from_hf:
            self._load_hf(state_dict, checkpoint_id)
        elif holds_checkpoint(checkpoint_id):
            self._load_ours(checkpoint_id, state_dict, strict="missing")
        else:
            return super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)  # of fused weights the state holds copies
        return None

    def _load_ours(self, path: str, state_dict: dict[str, Any], *, strict: Any) -> LoadReport:
        loader = Loader(open_storage(path), coordinator_for())
        return loader.load(state_dict, strict=strict, include=None)

    def _load_hf(self, state_dict: dict[str, Any], checkpoint_id: str) -> None:
        names = SourceOptions(rules=self._hf_rules)
        report = load(checkpoint_id, state_dict, source=names, dtype="state", strict=False)
        buffers = {name for part in self.states[MODEL].model for name, _ in part.named_buffers()}
        misfits = [f"{name}: {stored}, not {held}" for name, (stored, held) in report.mismatched.items()]
        missing = [f"without {name}" for name in report.missing if name not in buffers]
        with coordinator_for().together(f"loading {checkpoint_id}", "the model holds what fitted"):
            if misfits or missing:
                raise CheckpointError(
                    "The Hugging Face checkpoint is not of this model.",
                    expected="all parameters, in their shapes",
                    got=some([*misfits, *missing], 5),
                    where=checkpoint_id,
                    todo="see that the checkpoint and the model's configuration are of one model, and that its weights "
                    "are not quantised: vescale-convert to-hf --dequantize",
                )

    def _find_load_step(self, folder: str = "") -> int:
        """The newest complete step, ours or DCP's, which must be the same for all ranks."""
        folder = folder or self.folder
        alike: dict[str, Any] = {}
        with coordinator_for().together(f"looking for steps in {folder}", "nothing was loaded", alike):
            found = [TitanCheckpointManager._find_load_step(self, folder)]
            for name in filesystem.listdir(folder) if filesystem.isdir(folder) else ():
                step = _STEP.fullmatch(name)
                if step and filesystem.isfile(filesystem.join(filesystem.join(folder, name), MANIFEST_NAME)):
                    found.append(int(step[1]))
            alike["newest step"] = max(found)
        return max(found)
