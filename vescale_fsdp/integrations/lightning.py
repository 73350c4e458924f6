"""Lightning and Fabric: their `ModelParallelStrategy`, with our runtime in the user's own hook and our checkpoints.

    trainer = Trainer(strategy=VescaleStrategy(data_parallel_size=8, tensor_parallel_size=1))
    fabric = Fabric(strategy=VescaleFabricStrategy(parallelize, data_parallel_size=8, tensor_parallel_size=1))

``configure_model`` (of Fabric: ``parallelize_fn``) runs under `as_fsdp2`: the ``fully_shard`` that it imports from
torch is ours. A checkpoint is one folder of `vescale_fsdp.checkpoint`, in place of Lightning's ``.distcp`` files:

    state_dict, optimizer_0 ..     (Fabric: the keys of the user's dict) shards, loadable on any number of ranks
    epoch, loops, callbacks ..     rank 0's values, as JSON where they can be
    pickled                        those that cannot, each as ``torch.save`` would write it (Lightning's ``meta.pt``)

What Lightning's own strategy wrote, folders and single files alike, is loaded as well.
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
from vescale_fsdp.checkpoint.loading.load import load
from vescale_fsdp.checkpoint.ranks.coordinator import coordinator_for
from vescale_fsdp.checkpoint.saving.save import save
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
    """Lightning's strategy for FSDP2 and tensor parallelism, with our runtime and checkpoints.

    Args:
        granularity, padding_policy: as for `vescale_fsdp.fully_shard`, for every call of torch's name in
            ``configure_model``.
        options: those of ``ModelParallelStrategy``, by name. ``save_distributed_checkpoint=False`` writes Lightning's
            single file.

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
        self._ours = partial(as_fsdp2, granularity=granularity, padding_policy=padding_policy)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around ``configure_model``: torch's ``fully_shard`` is ours there."""
        with super().model_sharded_context(), self._ours():
            yield

    def setup(self, trainer: Any) -> None:
        """Lightning's, once it is certain that the model was sharded by one runtime."""
        prove_ours(self.model, "configure_model")
        super().setup(trainer)

    @property
    def checkpoint_io(self) -> Any:
        """Lightning's own, which removes checkpoints and writes single files."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        raise _unused_plugin(io)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's shards where they are: a save copies nothing."""
        if not self._save_distributed_checkpoint:
            return super().lightning_module_state_dict()
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's shards where they are."""
        if not self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return _optimizer_state(self.model, inner)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write what the trainer collected; a collective."""
        if storage_options is not None or not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        shards = {"state_dict": checkpoint.pop("state_dict")}
        for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
            shards[f"optimizer_{index}"] = state
        _save(self, filepath, shards, checkpoint)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill the model and its optimizers; the rest is returned. A collective."""
        path = self.broadcast(checkpoint_path)
        if not holds_checkpoint(path):
            with self._ours():
                return super().load_checkpoint(path, weights_only)
        optimizers = {f"optimizer_{index}": each for index, each in enumerate(self.optimizers)}
        strict = self.lightning_module.strict_loading
        return _load(path, ("state_dict", self.model), optimizers, strict, weights_only)


class VescaleFabricStrategy(FabricModelParallelStrategy):
    """Fabric's strategy for FSDP2 and tensor parallelism, with our runtime and checkpoints.

    Args:
        parallelize_fn: called as ``parallelize_fn(model, mesh)``; it shards the model and returns it.
        granularity, padding_policy: as for `vescale_fsdp.fully_shard`, for every call of torch's name in
            ``parallelize_fn``.
        options: the others of ``ModelParallelStrategy``, by name.

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
        """Have ``parallelize_fn`` shard the model; torch's ``fully_shard`` is ours there."""
        with self._ours():
            module = super().setup_module(module)
        prove_ours(module, "parallelize_fn")
        return module

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Filters | None = None,
    ) -> None:
        """Write a dict of one model, its optimizers and other values; a collective."""
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
        """Fill the objects of a dict, and replace its other values; what it lacks is returned. A collective."""
        path = self.broadcast(path)
        if not isinstance(state, dict) or not state or not holds_checkpoint(path):
            with self._ours():
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
                todo="pass strict=False to go on without",
            )
        for name in wanted & values.keys():
            state[name] = values.pop(name)
        return values


def prove_ours(model: nn.Module | None, where: str) -> None:
    """Refuse a model that torch's own FSDP2 has sharded, be it in part.

    Raises:
        MisuseError: naming the first such module.
    """
    for name, module in model.named_modules() if model is not None else ():
        if isinstance(module, TorchFSDPModule) and not isinstance(module, FSDPModule):
            raise MisuseError(
                "A module was sharded by torch's own fully_shard.",
                expected="vescale_fsdp's, under this strategy",
                got=type(module).__name__,
                where=name or "the root module",
                todo=f"import fully_shard from vescale_fsdp, or from torch inside {where}",
            )


def _unused_plugin(plugin: object) -> ValueError:
    return ArgumentError(
        "This strategy does not use a CheckpointIO plugin: its ranks write their shards themselves.",
        expected="no such plugin",
        got=type(plugin).__name__,
        where="Trainer(plugins=...)",
        todo="leave it out, or pass ModelParallelStrategy's save_distributed_checkpoint=False without us",
    )


def _kept(value: Any, filters: Filters | None, key: str) -> Any:
    """A state without the entries that the user's filter for it leaves out."""
    if filters is None or key not in filters or not isinstance(value, Mapping):
        return value
    return {name: item for name, item in value.items() if filters[key](name, item)}


def _model_of(state: Mapping[str, Any]) -> tuple[str, nn.Module]:
    """The one sharded model of a dict, with its key."""
    found = [
        (key, value)
        for key, value in state.items()
        if isinstance(value, nn.Module) and any(isinstance(each, DTensor) for each in value.parameters())
    ]
    if len(found) != 1:
        raise ArgumentError(
            "A checkpoint holds one sharded model.",
            expected="a dict with one, such as {'model': model, 'optimizer': optimizer}",
            got=", ".join(key for key, _ in found) or "none",
            todo="set the model up with this strategy first; save several one by one",
        )
    return found[0]


def _save(
    strategy: Any, path: str | os.PathLike[str], shards: dict[str, Any], values: dict[str, Any]
) -> None:
    """Write shards, and rank 0's other values: what ranks differ in (a timer, a path) Lightning takes from it too."""
    path = strategy.broadcast(path)
    stored: dict[str, Any] = {}
    with coordinator_for().together(f"collecting what goes to {path}"):
        if strategy.global_rank == 0:
            stored, others = split_storable(values)
            if others:
                stored[_PICKLED] = {key: _pickle(value) for key, value in others.items()}
            if os.path.isfile(path):
                os.unlink(path)  # one of Lightning's single files, which this checkpoint replaces
    save(path, {**strategy.broadcast(stored), **shards}, overwrite=True)


def _optimizer_state(model: Any, optimizer: Optimizer) -> dict[str, Any]:
    """State by parameter name, as it is: torch's getter takes a step with an optimizer that has not taken one."""
    named = LiveObjects(model).named(optimizer, type(optimizer).__name__)
    return optimizer.state_dict() if named is None else named.value()


def _pickle(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(
    path: str | os.PathLike[str],
    model: tuple[str, nn.Module],
    optimizers: dict[str, Optimizer],
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Fill a model and its optimizers; the values saved beside them."""
    state: dict[str, Any] = {**dict([model]), **optimizers}
    load(path, state, strict=strict, include=[f"{name}.*" for name in state])
    values = read_values(path, lambda name: name not in state and not name.startswith("optimizer_"))
    for name, data in values.pop(_PICKLED, {}).items():
        values[name] = torch.load(io.BytesIO(data), weights_only=weights_only, map_location="cpu")
    return values
