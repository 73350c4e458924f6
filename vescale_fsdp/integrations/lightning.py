"""Lightning and Fabric: `ModelParallelStrategy` of both, on this package's runtime and checkpoints.

    trainer = Trainer(strategy=VescaleStrategy(data_parallel_size=8, tensor_parallel_size=1))
    fabric = Fabric(strategy=VescaleFabricStrategy(parallelize, data_parallel_size=8, tensor_parallel_size=1))

``configure_model`` (in Fabric: ``parallelize_fn``) runs under `as_fsdp2`. So if it imports ``fully_shard`` from torch,
it gets this package's function. A checkpoint is one folder of `vescale_fsdp.checkpoint`, not Lightning's ``.distcp``
files, with these keys:

    state_dict, optimizer_0 ..     shards, loadable on any number of ranks (in Fabric: the keys of the user's dict)
    epoch, loops, callbacks ..     rank 0's values that can be stored as JSON or tensors
    pickled                        rank 0's other values, in the format of ``torch.save`` (in Lightning: ``meta.pt``)

The strategies also load the folders and single files that Lightning's own strategies have written.
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

from vescale_fsdp.checkpoint.load import load
from vescale_fsdp.checkpoint.ranks.coordinator import coordinator_for
from vescale_fsdp.checkpoint.save import save
from vescale_fsdp.checkpoint.state.live_objects import LiveObjects
from vescale_fsdp.checkpoint.state.torch_state_dicts import get_model_state_dict
from vescale_fsdp.errors import ArgumentError, MisuseError, UnknownNameError, some
from vescale_fsdp.integrations.installation import as_fsdp2
from vescale_fsdp.integrations.plain_values import holds_checkpoint, read_values, split_storable
from vescale_fsdp.integrations.tried_versions import check_version
from vescale_fsdp.layout.granularity import GranularityRule
from vescale_fsdp.layout.padding import PaddingPolicy
from vescale_fsdp.runtime.fsdp_module import FSDPModule

_PICKLED = "pickled"  # key of the values in the format of torch.save
Filters = Mapping[str, Callable[[str, Any], bool]]


class VescaleStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2 and tensor parallelism, on this package's runtime and checkpoints.

    Args:
        granularity, padding_policy: as for `vescale_fsdp.fully_shard`, for every call of torch's ``fully_shard`` in
            ``configure_model``.
        options: keyword arguments of ``ModelParallelStrategy``. With ``save_distributed_checkpoint=False``, checkpoints
            are Lightning's single files.

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
        # A function that makes a new context for each use, since a context can be entered only once.
        self._ours = partial(as_fsdp2, granularity=granularity, padding_policy=padding_policy)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Replace torch's ``fully_shard`` by this package's in the context in which ``configure_model`` runs."""
        with super().model_sharded_context(), self._ours():
            yield

    def setup(self, trainer: Any) -> None:
        """Check that torch's own FSDP2 has sharded no module, then set up as Lightning's strategy does.

        Raises:
            MisuseError: if torch's FSDP2 has sharded a module.
        """
        _check_sharded_by_us(self.model, "configure_model")
        super().setup(trainer)

    @property
    def checkpoint_io(self) -> Any:
        """Lightning's default CheckpointIO, which removes checkpoints and writes single files."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        # Raise instead of ignoring the plugin: the user would expect its files.
        raise ArgumentError(
            "This strategy does not use a CheckpointIO plugin: its ranks write their shards themselves.",
            expected="no CheckpointIO plugin",
            got=type(plugin).__name__,
            where="Trainer(plugins=..)",
            todo="remove the plugin, or use Lightning's ModelParallelStrategy(save_distributed_checkpoint=False)",
        )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state dict with its shards, not copied; for single files, with whole tensors."""
        if not self._save_distributed_checkpoint:
            return super().lightning_module_state_dict()
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state dict with its shards, not copied; for single files, with whole tensors."""
        if not self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        # Lightning's wrapper has no parameters and state of its own.
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return _optimizer_state(self.model, inner)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write the trainer's state to a folder, or to Lightning's single file. A collective.

        Args:
            checkpoint: the trainer's state; its entries for model and optimizers are removed.
            filepath: the folder or file to write.
            storage_options: not supported; Lightning's method raises an error if they are given.
        """
        # Lightning's method raises the error for storage_options, and writes single files.
        if storage_options is not None or not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        shards = {"state_dict": checkpoint.pop("state_dict")}
        # With save_weights_only, the trainer passes no optimizer states.
        for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
            shards[f"optimizer_{index}"] = state
        _save(self, filepath, shards, checkpoint)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the model and its optimizers from a checkpoint of this package or of Lightning. A collective.

        Returns:
            The other values of the checkpoint.
        """
        path = self.broadcast(checkpoint_path)
        if not holds_checkpoint(path):
            with self._ours():  # so that torch's setters of state dicts accept ragged shards
                return super().load_checkpoint(path, weights_only)
        # The keys under which `save_checkpoint` has written the optimizers.
        optimizers = {f"optimizer_{index}": each for index, each in enumerate(self.optimizers)}
        strict = self.lightning_module.strict_loading
        return _load(path, ("state_dict", self.model), optimizers, strict, weights_only)


class VescaleFabricStrategy(FabricModelParallelStrategy):
    """Fabric's strategy for FSDP2 and tensor parallelism, on this package's runtime and checkpoints.

    Args:
        parallelize_fn: function that is called as ``parallelize_fn(model, mesh)``, and shards and returns the model.
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
        # A function that makes a new context for each use, since a context can be entered only once.
        self._ours = partial(as_fsdp2, granularity=granularity, padding_policy=padding_policy)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the model with ``parallelize_fn``, during which this package's `fully_shard` replaces torch's.

        Raises:
            MisuseError: if torch's own FSDP2 has sharded a module.
        """
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
        """Write a dict with one model, its optimizers and other values. A collective.

        Args:
            path: the folder or file to write.
            state: the dict.
            storage_options: not supported; Fabric's method raises an error if they are given.
            filter: for keys of ``state``, a function that tells which entries of the value to save.
        """
        # Fabric's method raises the error for storage_options, and writes single files.
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
        """Load into the model and the optimizers of ``state``, and replace its other values. A collective.

        Returns:
            The values of the checkpoint whose keys are not in ``state``.

        Raises:
            UnknownNameError: if ``strict`` and the checkpoint lacks a key of ``state``.
        """
        path = self.broadcast(path)
        # Fabric's own method reads other formats, and loads into a single module.
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

    Args:
        where: name of the user's function that shards the model, for the error.

    Raises:
        MisuseError: names the first module that torch's FSDP2 has sharded.
    """
    for name, module in model.named_modules() if model is not None else ():
        # This package's FSDPModule is a subclass of torch's.
        if isinstance(module, TorchFSDPModule) and not isinstance(module, FSDPModule):
            raise MisuseError(
                "A module was sharded by torch's own fully_shard.",
                expected="vescale_fsdp.fully_shard, under this strategy",
                got=type(module).__name__,
                where=name or "the root module",
                todo=f"import fully_shard from vescale_fsdp, or from torch inside {where}",
            )


def _kept(value: Any, filters: Filters | None, key: str) -> Any:
    """Return the entries of ``value`` that the user's filter for ``key`` accepts; without a filter, all entries."""
    if filters is None or key not in filters or not isinstance(value, Mapping):
        return value
    return {name: item for name, item in value.items() if filters[key](name, item)}


def _model_of(state: Mapping[str, Any]) -> tuple[str, nn.Module]:
    """Return the key and the value of the sharded model in a dict.

    Raises:
        ArgumentError: if the dict does not have exactly one.
    """
    models = [
        (key, value)
        for key, value in state.items()
        if isinstance(value, nn.Module) and any(isinstance(each, DTensor) for each in value.parameters())
    ]
    if len(models) != 1:
        raise ArgumentError(
            "A checkpoint must contain exactly one sharded model.",
            expected="a dict with one sharded model, such as {'model': model, 'optimizer': optimizer}",
            got=", ".join(key for key, _ in models) or "none",
            todo="set up the model with this strategy first; save several models in several checkpoints",
            where="state=..",
        )
    return models[0]


def _save(
    strategy: Any, path: str | os.PathLike[str], shards: dict[str, Any], values: dict[str, Any]
) -> None:
    """Write shards, and rank 0's other values. Only rank 0's, as in Lightning: timers and paths differ between ranks.

    Args:
        shards: state dicts of the model and the optimizers, by key.
        values: the other values, by key.
    """
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
    # `overwrite`, since Lightning saves to the same path repeatedly.
    save(path, {**strategy.broadcast(stored), **shards}, overwrite=True)


def _optimizer_state(model: Any, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer, by parameter name.

    torch's ``get_optimizer_state_dict`` is not used, because it steps an optimizer that has no state yet.
    """
    named = LiveObjects(model).named(optimizer, type(optimizer).__name__)
    return optimizer.state_dict() if named is None else named.value()


def _load(
    path: str | os.PathLike[str],
    model: tuple[str, nn.Module],
    optimizers: dict[str, Optimizer],
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Load a model and its optimizers, and return the other values of the checkpoint.

    Args:
        model: the key and the model.
    """
    state: dict[str, Any] = {**dict([model]), **optimizers}
    # Only these keys: the other values of the checkpoint have no object to load into, and are read below.
    load(path, state, strict=strict, include=[f"{name}.*" for name in state])
    # Without the state of optimizers that this run lacks, whose tensors would be read whole on every rank.
    values = read_values(path, lambda name: name not in state and not name.startswith("optimizer_"))
    for name, data in values.pop(_PICKLED, {}).items():
        # To the CPU, since rank 0 may have saved tensors on its own GPU.
        values[name] = torch.load(io.BytesIO(data), weights_only=weights_only, map_location="cpu")
    return values
