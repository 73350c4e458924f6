"""The lines of Python that shard a model as a candidate of a plan does."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn

from vescale_fsdp.layout.granularity import Granularity, GranularityRule
from vescale_fsdp.planning.meta_step import is_of_transformers, models_of_transformers

if TYPE_CHECKING:
    from vescale_fsdp.planning.training_plan import PlanSetup, ShardingCandidate


def code_lines(
    model: nn.Module, blocks: Collection[str], setup: PlanSetup, best: ShardingCandidate
) -> Iterator[str]:
    """Yield the lines that shard ``model`` as a candidate does.

    Args:
        blocks: names of the modules whose activations are recomputed with ``setup.checkpointing``.
    """
    axes: tuple[str, ...] = ("shard",)
    sizes: tuple[int, ...] = (best.shard_size,)
    if best.is_hybrid:
        axes, sizes = ("node", "local"), (best.shard_size // best.gather_size, best.gather_size)
    elif best.replicas > 1:
        axes, sizes = ("replicate", "shard"), (best.replicas, best.shard_size)
    dtype = setup.param_dtype
    if setup.checkpointing and blocks:
        yield "from functools import partial"
        yield ""
    yield "import torch"
    yield "from torch.distributed.device_mesh import init_device_mesh"
    yield "from torch.distributed.fsdp import MixedPrecisionPolicy"
    if setup.checkpointing and blocks:
        yield "from torch.utils.checkpoint import checkpoint"
    yield "from vescale_fsdp import fully_shard"
    optimizer = {"muon": "Muon", "adamw8bit": "AdamW8bit"}.get(setup.optimizer)
    if optimizer is not None or setup.steps_early:
        yield f"from vescale_fsdp.optim import {optimizer or 'step_in_backward'}"
    yield ""
    yield from _dtype_lines(model)
    device = '"cpu"'
    if not setup.cluster.on_cpu:
        device = "device.type"
        yield "device = torch.accelerator.current_accelerator(check_available=True)"
        yield "if device is None:"
        problem = (
            "this plan is for GPUs, but no accelerator is available; for CPUs: vescale-convert plan --on-cpu"
        )
        problem += ", or Cluster(on_cpu=True)"
        yield f'    raise RuntimeError("{problem}")'
    yield f"mesh = init_device_mesh({device}, {sizes}, mesh_dim_names={axes!r})"
    yield f"policy = MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype=torch.float32)"
    options = ["mesh=mesh", "mp_policy=policy"]
    if best.is_hybrid:
        options.append('shard_optimizer_over="node"')
    if setup.granularity is not None:
        yield from _granularity_lines(setup.granularity)
        options.append("granularity=granularity")
    elif optimizer is not None:
        options.append(f"granularity={optimizer}.granularity()")
    root = ", ".join(options)
    if best.keeps != 1:
        options.append(f"reshard_after_forward={best.keeps or False}")
    inner = ", ".join(options)
    recomputed = set(blocks) if setup.checkpointing else set()
    caching = models_of_transformers(model) if recomputed else []
    if caching:
        yield "# a block that is recomputed would append to a cache of keys and values again"
    for name in caching:
        yield f"{_path(model, name)}.config.get_text_config(decoder=True).use_cache = False"
    for name in blocks:
        if name in recomputed and name not in best.units:
            yield from _recomputed_lines(model, name)
    parents = dict.fromkeys(name.rpartition(".")[0] for name in best.units)
    for parent in sorted(parents, key=lambda name: -len(name.split(".")) if name else 0):  # inner units first
        module = model.get_submodule(parent)
        names = [f"{parent}.{name}" if parent else name for name, _ in module.named_children()]
        units = [name for name in best.units if name.rpartition(".")[0] == parent]
        is_alike = recomputed.isdisjoint(names) or recomputed.issuperset(names)
        if isinstance(module, nn.ModuleList | nn.Sequential) and set(names) == set(units) and is_alike:
            yield f"for block in {_path(model, parent)}:"
            if recomputed.issuperset(names):
                yield f"    {_RECOMPUTED}"
            yield f"    fully_shard(block, {inner})"
            continue
        for name in units:
            if name in recomputed:
                yield from _recomputed_lines(model, name)
            yield f"fully_shard({_path(model, name)}, {inner})"
    yield f"fully_shard(model, {root})"
    if is_of_transformers(model):
        yield "# from vescale_fsdp.checkpoint import load"
        yield "# load(FOLDER, model, dtype='state')  # each rank reads its shards, in the model's dtype"
    count = setup.micro_batches
    if count > 1 and (best.is_hybrid or best.replicas > 1):
        yield f"# before backward number i of {count}: model.set_requires_all_reduce(i == {count})"
    params = "model.parameters()"
    if not all(param.requires_grad for param in model.parameters()):
        params = "(param for param in model.parameters() if param.requires_grad)"
    if setup.optimizer == "adamw":
        yield f"optimizer = torch.optim.AdamW({params}, lr=1e-4, fused=True)"
        if setup.steps_early:
            yield "step_in_backward(model, optimizer)"
    elif setup.optimizer == "adamw8bit":
        yield f"optimizer = AdamW8bit({params}, lr=1e-4)"
    elif setup.optimizer == "muon":
        yield "matrices, others = Muon.split_params(model)"
        yield "optimizer = Muon(matrices, lr=0.02, adamw_params=others)"


_RECOMPUTED = "block.forward = partial(checkpoint, block.forward, use_reentrant=False)"


def _recomputed_lines(model: nn.Module, name: str) -> Iterator[str]:
    """Yield the lines that recompute the activations of a module."""
    yield f"block = {_path(model, name)}"
    yield _RECOMPUTED


def _dtype_lines(model: nn.Module) -> Iterator[str]:
    """Yield the lines that refuse a model in other dtypes than the plan's, with which it would train differently."""
    dtypes = sorted({str(param.dtype) for param in model.parameters()})
    name = ", ".join(dtypes)
    if is_of_transformers(model) and len(dtypes) == 1:  # whose weights `load` reads
        cls, home = type(model).__name__, type(model).__module__
        if home.startswith("transformers."):  # all model classes are in the package itself, too
            yield f"# from transformers import AutoConfig, {cls}"
        else:
            yield f"# from {home} import {cls}"
            yield "# from transformers import AutoConfig"
        yield "# with torch.device('meta'):  # from_pretrained would read all weights on each rank"
        yield f"#     model = {cls}(AutoConfig.from_pretrained(FOLDER)).to({name})"
    yield "dtypes = {param.dtype for param in model.parameters()}"
    yield f"if dtypes != {{{name}}}:"
    yield f'    raise TypeError(f"the plan is for weights in {name}, not {{dtypes}}: build the model in this dtype")'


def _granularity_lines(rule: GranularityRule) -> Iterator[str]:
    """Yield the lines that define ``granularity``, the caller's rule."""
    values = list(rule.values()) if isinstance(rule, Mapping) else [rule]
    classes = {type(each).__name__ for each in values if isinstance(each, Granularity)}
    classes |= {"Element"} if isinstance(rule, Mapping) else set()
    if classes:
        yield f"from vescale_fsdp import {', '.join(sorted(classes))}"
    if isinstance(rule, Mapping):  # as a function, since not every unit has a match for every pattern
        yield "from fnmatch import fnmatchcase"
        yield f"rules = {dict(rule)!r}"
        yield "granularity = lambda fqn, param: next("
        yield "    (rule for pattern, rule in rules.items() if fnmatchcase(fqn, pattern)), Element()"
        yield ")"
    elif callable(rule) and not isinstance(rule, Granularity):
        yield "# granularity is the function that was passed to plan_training"
    else:
        yield f"granularity = {rule!r}"


def _path(model: nn.Module, name: str) -> str:
    """Return the expression for a module of ``model``."""
    path, module = "model", model
    for part in name.split(".") if name else ():
        is_item = part.isdecimal() and isinstance(module, nn.ModuleList | nn.Sequential)
        if not is_item and (not part.isidentifier() or keyword.iskeyword(part)):
            return f"model.get_submodule({name!r})"
        path += f"[{part}]" if is_item else f".{part}"
        module = module.get_submodule(part)
    return path
