"""Every optimizer class of some packages on a sharded model, beside one process.

Each class trains a small model for three steps: on one process, then on two ranks under `fully_shard` in each of
`WAYS`, granularities and `OwnerOptimizer`; if none of them steps it, under FSDP2. Both ranks have the same data, so
gradients have the bits of one process: what differs is the optimizer.

    python -m tests.stacks.optimizers.packages timm Muon        prints the verdicts of some classes
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from tests.support.distributed import cpu_mesh
from vescale_fsdp import fully_shard
from vescale_fsdp.errors import VescaleError
from vescale_fsdp.optim import OwnerOptimizer
from vescale_fsdp.torch_private import default_store

# Distribution -> module that has its classes.
PACKAGES = {
    "torch": "torch.optim",
    "adam-mini": "adam_mini",
    "apollo-torch": "apollo_torch",
    "bitsandbytes": "bitsandbytes.optim",
    "came-pytorch": "came_pytorch",
    "galore-torch": "galore_torch",
    "lion-pytorch": "lion_pytorch",
    "muon-optimizer": "muon",
    "prodigyopt": "prodigyopt",
    "pytorch_optimizer": "pytorch_optimizer",
    "schedulefree": "schedulefree",
    "timm": "timm.optim",
    "torch-optimi": "optimi",
    "torchao": "torchao.optim",
    "transformers": "transformers.optimization",
}
WAYS = ("element", "rows:8", "whole", "owner")
FSDP2 = "FSDP2"
STEPS_RIGHT = ("bits", "tolerance")
STEPS = 3
_WAIT_S = 60.0
# Differences that rounding explains, relative to the largest change of the parameter: up to this, or twice as much as
# losses on one process make that are larger by 0.1 %. Steps that decompose matrices in bf16 (Muon) amplify these.
TOLERANCE = 1e-2
_SCALE = 1.001

# Classes that are built otherwise than from parameters.
_WRAPPERS = (
    "Lookahead",
    "Magma",
    "OrthoGrad",
    "PCGrad",
    "SafeFP16Optimizer",
    "ScheduleFreeWrapper",
    "ScheduleFreeWrapperReference",
    "TRAC",
)
_BASED = ("FriendlySAM", "LookSAM", "SAM")
_WITH_FLAGS = ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon")  # of pytorch_optimizer
_OF_MODELS = ("AdaLOMO", "AdamMini", "Adam_mini", "GSAM", "LOMO", "WSAM")  # OwnerOptimizer takes parameters


class Net(nn.Module):
    """Matrices of three shapes, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16, bias=False), nn.LayerNorm(16)
        self.middle, self.last = nn.Linear(16, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(self.norm(self.first(x)))))


class Case(NamedTuple):
    """A class of a package."""

    package: str
    name: str  # in the package; the class may have another one
    kind: type[torch.optim.Optimizer]


def cases(package: str) -> Iterator[Case]:
    """All optimizer classes of an installed package."""
    if package == "timm":
        _import_timm_without_its_models()
    for attribute, kind in list(vars(importlib.import_module(PACKAGES[package])).items()):
        if (
            not inspect.isclass(kind)
            or not issubclass(kind, torch.optim.Optimizer)
            or attribute.startswith("_")
        ):
            continue
        is_own = package == "torch" or not kind.__module__.startswith("torch.")
        if is_own and kind is not torch.optim.Optimizer:
            yield Case(package, attribute, kind)


def _import_timm_without_its_models() -> None:
    """Let ``timm.optim`` be imported without ``timm``, whose models need a torchvision built for the same torch."""
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None or "timm" in sys.modules:
        return
    package, models = ModuleType("timm"), ModuleType("timm.models")
    package.__path__ = [str(Path(spec.origin).parent)]
    models.group_parameters = None  # type: ignore[attr-defined]
    sys.modules.update({"timm": package, "timm.models": models})


def _make(case: Case, model: nn.Module, by_owner: bool) -> torch.optim.Optimizer:
    """Build the optimizer with its defaults; where it has no learning rate, with 0.01."""
    arguments = inspect.signature(case.kind).parameters
    options: dict[str, Any] = {}
    if (
        "lr" in arguments
        and not isinstance(arguments["lr"].default, float)
        and "relative_step" not in arguments
    ):
        options["lr"] = 0.01
    if case.package == "bitsandbytes" and "momentum" in arguments:
        options["momentum"] = 0.9
    options |= {name: 10 for name in ("num_iterations", "num_data") if name in arguments}
    if "triton" in arguments:  # where triton is installed, optimi's default is a kernel for GPUs
        options["triton"] = False
    params = _params(case, model)
    kind: Callable[..., Any] = functools.partial(OwnerOptimizer, case.kind) if by_owner else case.kind
    base = functools.partial(OwnerOptimizer, torch.optim.AdamW) if by_owner else torch.optim.AdamW
    if case.name in _WRAPPERS:
        return case.kind(base(params, lr=0.01), **options)
    if case.name in _BASED:
        return case.kind(params, base, **options)  # type: ignore[arg-type]
    if case.name == "WSAM":
        return case.kind(model, params, base, **options)
    if case.name == "CPUOffloadOptimizer":
        return case.kind(params, base)  # type: ignore[arg-type]
    if case.name in ("LOMO", "AdaLOMO", "AdamMini"):
        return case.kind(model, **options)
    if case.name == "Adam_mini":
        return case.kind(model.named_parameters(), lr=0.01, dim=16, n_heads=2)
    return kind(params, **options)


def _params(case: Case, model: nn.Module) -> list[Any]:
    params = list(model.parameters())
    matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
    if case.package in ("galore-torch", "apollo-torch"):
        options: dict[str, Any] = {"rank": 4, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
        if case.package == "apollo-torch":
            options |= {"proj": "random", "scale_type": "channel"}
        return [{"params": matrices, **options}, {"params": vectors}]
    if "WithAux" in case.name or (case.package == "pytorch_optimizer" and case.name in _WITH_FLAGS):
        return [{"params": matrices, "use_muon": True}, {"params": vectors, "use_muon": False}]
    return matrices if case.name in ("Muon", "SingleDeviceMuon") and case.package != "timm" else params


BATCHES = [torch.randn(6, 8, generator=torch.Generator().manual_seed(i)) for i in range(STEPS + 1)]


def _loss(model: nn.Module, step: int, scale: float) -> torch.Tensor:
    return scale * (model(BATCHES[step % STEPS]) - BATCHES[-1]).square().mean()


def _train(case: Case, model: nn.Module, by_owner: bool, calls: str, scale: float = 1.0) -> None:
    """Three steps; ``calls`` says how the optimizer is called."""
    torch.default_generator.manual_seed(1)
    optimizer: Any = _make(case, model, by_owner)
    if "ScheduleFree" in case.name and "train" in dir(optimizer):
        optimizer.train()
    # The first steps of these move nothing.
    for step in range(12 if "RAdam" in case.name or case.name == "AdaShift" else STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = _loss(model, step, scale)
                loss.backward()
            return loss

        if calls == "closure":
            if case.name in (*_BASED, "BSAM", "WSAM"):  # these step from gradients, and then evaluate again
                closure()
            optimizer.step(closure)
        elif calls == "fused backward":
            optimizer.fused_backward(_loss(model, step, scale), lr=0.01)
        elif calls == "several losses":
            optimizer.pc_backward([_loss(model, step, scale), _loss(model, step, scale)])
            optimizer.step()
        else:
            optimizer.zero_grad()
            _loss(model, step, scale).backward(create_graph=calls == "graph")
            optimizer.step()


def _calls_of(case: Case) -> tuple[str, ...]:
    special = {
        "AdaHessian": "graph",
        "AdaLOMO": "fused backward",
        "Adahessian": "graph",
        "LOMO": "fused backward",
        "PCGrad": "several losses",
        "SophiaH": "graph",
    }
    return (special[case.name],) if case.name in special else ("step", "closure")


def build() -> Net:
    torch.default_generator.manual_seed(5)
    return Net()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


class Reference(NamedTuple):
    """What a class does on one process.

    Attributes:
        values: the parameters after the steps.
        calls: how the optimizer is called.
        changes: the largest change of each parameter.
        sensitivity: the largest difference that losses make that are larger by 0.1 %, relative to the changes.
    """

    values: dict[str, torch.Tensor]
    calls: str
    changes: dict[str, torch.Tensor]
    sensitivity: float

    def difference(self, values: dict[str, torch.Tensor]) -> float:
        """The largest difference of other values, relative to the changes."""
        differences = [
            (values[name] - own).abs().max() / self.changes[name].clamp_min(1e-12)
            for name, own in self.values.items()
        ]
        return float(torch.stack(differences).max())


def _on_one_process(case: Case) -> Reference | str:
    """What the class does; or why it does not step here."""
    why = ""
    for calls in _calls_of(case):
        models = build(), build()
        start = values_of(models[0])
        try:
            for model, scale in zip(models, (1.0, _SCALE), strict=True):
                _train(case, model, False, calls, scale)
        except Exception as error:  # noqa: BLE001  not ours to judge
            why = why or f"{type(error).__name__}: {error}"
            continue
        values = values_of(models[0])
        changes = {name: (values[name] - start[name]).abs().max() for name in values}
        if not any(changes.values()):
            return "it does not change the parameters"
        reference = Reference(values, calls, changes, 0.0)
        return reference._replace(sensitivity=reference.difference(values_of(models[1])))
    return why


def _verdict(case: Case, way: str, alone: Reference) -> str:
    """bits, tolerance, refused, or what is wrong."""
    model = build()
    granularity: Any = {"element": None, "owner": "whole"}.get(way, way)
    try:
        if way == FSDP2:
            fsdp2(model, mesh=cpu_mesh())
        else:
            fully_shard(model, mesh=cpu_mesh(), granularity=granularity)
        _train(case, model, way == "owner", alone.calls)
        values = values_of(model)
    except VescaleError as error:
        names_it = case.kind.__name__ in str(error)
        return f"refused{'' if names_it else ', without its name'}: {error}"
    except Exception as error:  # noqa: BLE001  the finding
        return f"foreign: {type(error).__name__}: {error}"
    if all(torch.equal(values[name], own) for name, own in alone.values.items()):
        return "bits"
    difference = alone.difference(values)
    is_rounding = difference <= max(TOLERANCE, 2 * alone.sensitivity)
    return "tolerance" if is_rounding else f"wrong by {difference:.1e}, sensitivity {alone.sensitivity:.1e}"


def walk(package: str, only: tuple[str, ...] = ()) -> dict[str, dict[str, str]]:
    """Verdicts of a package by class and way, the worse of both ranks; "alone": why one process does not step it.

    Args:
        package: a name of `PACKAGES`.
        only: names of classes; all if there are none.
    """
    warnings.simplefilter("ignore")
    torch.compiler.set_stance("force_eager")  # torchao compiles its steps, for minutes
    store, rank, verdicts = default_store(), dist.get_rank(), {}
    for case in cases(package):
        if only and case.name not in only:
            continue
        alone = _on_one_process(case)
        if isinstance(alone, str):
            verdicts[case.name] = {"alone": alone}
            continue
        own: dict[str, str] = {}
        for way in (*WAYS, FSDP2):
            if way == "owner" and case.name in _OF_MODELS:
                continue
            if way == FSDP2 and any(verdict in STEPS_RIGHT for verdict in own.values()):
                continue
            own[way] = _verdict(case, way, alone)
            # By the store: a rank that raised alone does not take part in collectives.
            key = f"{case.name} {way} "
            store.set(f"{key}{rank}", own[way])
            store.wait([f"{key}{1 - rank}"], timedelta(seconds=_WAIT_S))
            own[way] = max(own[way], store.get(f"{key}{1 - rank}").decode(), key=_badness)
        verdicts[case.name] = own
    torch.compiler.set_stance("default")
    return verdicts


def _badness(verdict: str) -> int:
    order = ("bits", "tolerance", "refused:", "refused, without", "wrong", "foreign")
    return next(i for i, start in enumerate(order) if verdict.startswith(start))


if __name__ == "__main__":
    from tests.stacks.optimizers.packages import (
        walk as walk_of_module,
    )  # ranks find functions by their module
    from tests.support.distributed import run_ranks

    verdicts = run_ranks(2, walk_of_module, sys.argv[1], tuple(sys.argv[2:]), timeout_s=1800.0)[0]
    print(json.dumps({sys.argv[1]: verdicts}, indent=1))
