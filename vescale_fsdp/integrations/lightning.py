"""Lightning and Fabric: their `ModelParallelStrategy` on this package's runtime and checkpoints.

    trainer = Trainer(strategy=VescaleStrategy(data_parallel_size=8, tensor_parallel_size=1))
    fabric = Fabric(strategy=VescaleFabricStrategy(parallelize, data_parallel_size=8, tensor_parallel_size=1))

``configure_model`` (in Fabric: ``parallelize_fn``) runs under `as_fsdp2`, so a ``fully_shard`` that it imports from
torch is this package's. A checkpoint is one folder of `vescale_fsdp.checkpoint` instead of Lightning's ``.distcp``:

    state_dict, optimizer_0 ..     (in Fabric: the keys of the user's dict) shards, loadable on any number of ranks
    epoch, loops, callbacks ..     rank 0's values, as JSON where possible
    pickled                        rank 0's other values, in the format of ``torch.save`` (Lightning's ``meta.pt``)

The strategies also load the folders and single files of Lightning's own strategies.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vescale_fsdp.checkpoint.formats.dcp.state_dict import get_model_state_dict
from vescale_fsdp.checkpoint.load import load
from vescale_fsdp.checkpoint.ranks.coordinator import coordinator_for
from vescale_fsdp.checkpoint.save import save
from vescale_fsdp.checkpoint.state.live_objects import LiveObjects
from vescale_fsdp.errors import ArgumentError, MisuseError, UnknownNameError, some
from vescale_fsdp.integrations.installation import as_fsdp2
from vescale_fsdp.integrations.plain_values import holds_checkpoint, read_values, split_storable
from vescale_fsdp.integrations.tried_versions import check_version
from vescale_fsdp.layout.granularity import GranularityRule
from vescale_fsdp.layout.padding import PaddingPolicy
from vescale_fsdp.runtime.fsdp_module import FSDPModule

_PICKLED = "pickled"
Filters = Mapping[str, Callable[[str, Any], bool]]


class VescaleStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2 and tensor parallelism, on this package's runtime and checkpoints.

    Args:
        granularity, padding_policy: as for `vescale_fsdp.fully_shard`, for every call of torch's ``fully_shard`` in
            ``configure_model``.
        options: keyword arguments of ``ModelParallelStrategy``. ``save_distributed_checkpoint=False`` writes
            Lightning's single file.

    Examples:
        >>> def trainer():
        ...     from lightning import Trainer
        ...     return Trainer(strategy=VescaleStrategy(granularity="rows:32"), devices=8)
    """

    def __init__(
        self,
        *,
        granularity: GranularityRule = None,
        padding_policy: PaddingPolicy = PaddingPolicy(),  # noqa: B008 (frozen)
        **options: Any,
    ) -> None:
        check_version("lightning")
        super().__init__(**options)
        # A new context for each use: an installation ends with its context.
        self._ours = partial(as_fsdp2, granularity=granularity, padding_policy=padding_policy)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """The context of ``configure_model``, in which torch's ``fully_shard`` is this package's."""
        with super().model_sharded_context(), self._ours():
            yield

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning's strategy does, after a check that torch's FSDP2 has sharded no module."""
        _check_sharded_by_us(self.model, "configure_model")
        super().setup(trainer)

    @property
    def checkpoint_io(self) -> Any:
        """Lightning's default CheckpointIO, which removes checkpoints and writes single files."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        raise ArgumentError(
            "This strategy does not use a CheckpointIO plugin: its ranks write their shards themselves.",
            expected="no CheckpointIO plugin",
            got=type(plugin).__name__,
            where="Trainer(plugins=...)",
            todo="remove the plugin, or use Lightning's ModelParallelStrategy(save_distributed_checkpoint=False)",
        )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's shards, not copied."""
        if not self._save_distributed_checkpoint:
            return super().lightning_module_state_dict()
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's shards, not copied."""
        if not self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        # Parameters and state are in the wrapped optimizer.
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return _optimizer_state(self.model, inner)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write the trainer's state. A collective."""
        # Lightning's method refuses storage_options, and writes the single file.
        if storage_options is not None or not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        shards = {"state_dict": checkpoint.pop("state_dict")}
        # Absent with save_weights_only.
        for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
            shards[f"optimizer_{index}"] = state
        _save(self, filepath, shards, checkpoint)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the model and its optimizers; return the other values. A collective."""
        path = self.broadcast(checkpoint_path)
        if not holds_checkpoint(path):
            with self._ours():  # so that torch's setters of state dicts accept ragged shards
                return super().load_checkpoint(path, weights_only)
        # The names that `save_checkpoint` has written.
        optimizers = {f"optimizer_{index}": each for index, each in enumerate(self.optimizers)}
        strict = self.lightning_module.strict_loading
        return _load(path, ("state_dict", self.model), optimizers, strict, weights_only)


class VescaleFabricStrategy(FabricModelParallelStrategy):
    """Fabric's strategy for FSDP2 and tensor parallelism, on this package's runtime and checkpoints.

    Args:
        parallelize_fn: called as ``parallelize_fn(model, mesh)``; it shards the model and returns it.
        granularity, padding_policy: as for `vescale_fsdp.fully_shard`, for every call of torch's ``fully_shard`` in
            ``parallelize_fn``.
        options: other keyword arguments of ``ModelParallelStrategy``.

    Examples:
        >>> def fabric(parallelize_fn):
        ...     from lightning import Fabric
        ...     return Fabric(strategy=VescaleFabricStrategy(parallelize_fn, granularity="rows:32"))
    """

    def __init__(
        self,
        parallelize_fn: Callable[[Any, Any], nn.Module],
        *,
        granularity: GranularityRule = None,
        padding_policy: PaddingPolicy = PaddingPolicy(),  # noqa: B008 (frozen)
        **options: Any,
    ) -> None:
        check_version("lightning")
        super().__init__(parallelize_fn, **options)
        self._ours = partial(as_fsdp2, granularity=granularity, padding_policy=padding_policy)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the model with ``parallelize_fn``, under which torch's ``fully_shard`` is this package's."""
        with self._ours():
            module = super().setup_module(module)
        _check_sharded_by_us(module, "parallelize_fn")
        return module

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Filters | None = None,
    ) -> None:
        """Write a dict of one model, its optimizers and other values. A collective."""
        # Fabric's method refuses storage_options, and writes the single file.
        if storage_options is not None or not self._save_distributed_checkpoint:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        _, model = _model_of(state)
        shards, values = {}, {}
        for key, value in state.items():
            if isinstance(value, nn.Module):
                shards[key] = _kept(get_model_state_dict(value), filter, key)
            elif isinstance(value, Optimizer):
                shards[key] = _kept(_optimizer_state(model, value), filter, key)
            else:
                values[key] = _kept(value.state_dict() if isinstance(value, Stateful) else value, filter, key)
        _save(self, path, shards, values)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load into the model and optimizers of ``state``; replace its other values by loaded ones. A collective.

        Returns:
            Values of the checkpoint whose keys ``state`` does not have.
        """
        path = self.broadcast(path)
        if not isinstance(state, dict) or not state or not holds_checkpoint(path):
            with self._ours():  # so that torch's setters of state dicts accept ragged shards
                return super().load_checkpoint(path, state, strict, weights_only)
        optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
        key, model = _model_of(state)
        values = _load(path, (key, model), optimizers, strict, weights_only)
        wanted = state.keys() - optimizers.keys() - {key}
        missing = sorted(wanted - values.keys())
        if missing and strict:
            raise UnknownNameError(
                "The checkpoint lacks keys of the state.",
                expected=some(sorted(wanted)),
                got=f"no {', '.join(map(repr, missing))}",
                where=path,
                todo="pass strict=False to load without these keys",
            )
        for name in wanted & values.keys():
            state[name] = values.pop(name)
        return values


def _check_sharded_by_us(model: nn.Module | None, where: str) -> None:
    """Check that torch's own FSDP2 has sharded no module of a model.

    Raises:
        MisuseError: with the first such module.
    """
    for name, module in model.named_modules() if model is not None else ():
        if isinstance(module, TorchFSDPModule) and not isinstance(module, FSDPModule):
            raise MisuseError(
                "A module was sharded by torch's own fully_shard.",
                expected="vescale_fsdp.fully_shard, under this strategy",
                got=type(module).__name__,
                where=name or "the root module",
                todo=f"import fully_shard from vescale_fsdp, or from torch inside {where}",
            )


def _kept(value: Any, filters: Filters | None, key: str) -> Any:
    """The entries of a state that the user's filter for ``key`` accepts."""
    if filters is None or key not in filters or not isinstance(value, Mapping):
        return value
    return {name: item for name, item in value.items() if filters[key](name, item)}


def _model_of(state: Mapping[str, Any]) -> tuple[str, nn.Module]:
    """The key and the value of the one sharded model in a dict."""
    models = [
        (key, value)
        for key, value in state.items()
        if isinstance(value, nn.Module) and any(isinstance(each, DTensor) for each in value.parameters())
    ]
    if len(models) != 1:
        raise ArgumentError(
            "A checkpoint contains exactly one sharded model.",
            expected="a dict with one, such as {'model': model, 'optimizer': optimizer}",
            got=", ".join(key for key, _ in models) or "none",
            todo="set up the model with this strategy first; save several models in several checkpoints",
        )
    return models[0]


def _save(
    strategy: Any, path: str | os.PathLike[str], shards: dict[str, Any], values: dict[str, Any]
) -> None:
    """Write shards, and rank 0's other values, as Lightning does: timers and paths differ between ranks."""
    path = strategy.broadcast(path)
    stored: dict[str, Any] = {}
    with coordinator_for().together(f"collecting the values of {path}"):
        if strategy.global_rank == 0:
            stored, others = split_storable(values)
            if others:
                stored[_PICKLED] = {}
            for key, value in others.items():
                buffer = io.BytesIO()
                torch.save(value, buffer)
                stored[_PICKLED][key] = buffer.getvalue()
            if os.path.isfile(path):
                os.unlink(path)  # a single file of Lightning's own strategy, which this folder replaces
    save(
        path, {**strategy.broadcast(stored), **shards}, overwrite=True
    )  # Lightning saves to the same path repeatedly


def _optimizer_state(model: Any, optimizer: Optimizer) -> dict[str, Any]:
    """State by parameter name. torch's getter is not used, because it steps an optimizer that has no state yet."""
    named = LiveObjects(model).named(optimizer, type(optimizer).__name__)
    return optimizer.state_dict() if named is None else named.value()


def _load(
    path: str | os.PathLike[str],
    model: tuple[str, nn.Module],
    optimizers: dict[str, Optimizer],
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Load a model and its optimizers; returns the other values of the checkpoint."""
    state: dict[str, Any] = {**dict([model]), **optimizers}
    # The checkpoint's other values have no live object, and are read below.
    load(path, state, strict=strict, include=[f"{name}.*" for name in state])
    # State of optimizers that this run lacks is skipped: its tensors would be read whole.
    values = read_values(path, lambda name: name not in state and not name.startswith("optimizer_"))
    for name, data in values.pop(_PICKLED, {}).items():
        # map_location: rank 0 saved these values, perhaps on its own GPU.
        values[name] = torch.load(io.BytesIO(data), weights_only=weights_only, map_location="cpu")
    return values
