"""Muon on ragged shards: momentum stays where it is; cut matrices visit an owner for their iteration.

Per matrix: ``m <- lerp(m, g)``, ``u = lerp(g, m)`` on the pieces; Newton-Schulz on the whole of u; decay and
``p -= lr' * o`` on the pieces. Only the middle needs whole matrices:

    matrix                                       where the iteration runs          collectives
    plain tensor, or whole on one rank           where it lies                     0
    cut over ranks (ragged, or FSDP2 Shard(0))   one owner, balanced by FLOPs      2 per bucket of many
    DTensor placed otherwise (TP)                every rank                        torch's own, per matrix

While the owner iterates on one bucket, the next is on its way. The result equals `torch.optim.Muon` on one
process bit for bit (fp32 on CPU), because the same function runs on the same whole matrix.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.dtensor.piece_map import local_grad, local_tensor
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.granularity import Element, Granularity, Whole
from vescale_fsdp.optim.muon.bucket_exchange import Ranks
from vescale_fsdp.optim.muon.matrices import matrices_of
from vescale_fsdp.optim.muon.step import ParamJob, run_step, taking_part_of
from vescale_fsdp.optim.muon.step_plan import MuonPlan, plan_step
from vescale_fsdp.optim.structured_optimizer import (
    AdamWOptions,
    StructuredOptimizer,
    batches_of,
    check_rates,
)
from vescale_fsdp.torch_private import (
    MUON_COEFFICIENTS,
    MUON_EPS,
    MUON_STEPS,
    foreach_lerp,
    foreach_lerp_,
)

_ADJUST_LR = (None, "original", "match_rms_adamw")


class Muon(StructuredOptimizer):
    """Muon for matrices and stacks of matrices, AdamW for the rest, in one optimizer.

    Args:
        params: 2-D and 3-D parameters (3-D: a stack, one matrix per expert), or param groups of them. A
            group may carry ``row_splits=(q_rows, k_rows, v_rows)`` to treat a fused matrix as several.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in
            `torch.optim.Muon`, with its defaults.
        adamw_params: everything else: embeddings, output head, norms, biases.
        adamw: how those are stepped.
        bucket_bytes: bytes that a rank receives per collective, about; two buckets are in memory at a time.

    Raises:
        LayoutError: for a parameter that is not a matrix, or arguments that are not valid.

    Examples:
        >>> from vescale_fsdp import fully_shard
        >>> model = fully_shard(torch.nn.Linear(8, 8), granularity=Muon.granularity())
        >>> matrices, others = split_params(model)
        >>> optimizer = Muon(matrices, lr=0.02, adamw_params=others)
        >>> model(torch.randn(2, 8)).sum().backward()
        >>> optimizer.step()
    """

    algorithm: ClassVar[str] = "muon"
    recorded: ClassVar[tuple[str, ...]] = ("momentum_form",)
    kept: ClassVar[tuple[str, ...]] = ("_adamw", "_bucket_bytes")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = MUON_COEFFICIENTS,
        eps: float = MUON_EPS,
        ns_steps: int = MUON_STEPS,
        adjust_lr_fn: str | None = None,
        *,
        adamw_params: Iterable[Any] | None = None,
        adamw: AdamWOptions = AdamWOptions(),  # noqa: B008  (frozen)
        bucket_bytes: int = 8 << 20,  # 8 MiB
    ) -> None:
        check_rates(float(lr), (momentum, 0.0), eps, weight_decay)
        if adjust_lr_fn not in _ADJUST_LR or not 0 <= ns_steps < 100:
            raise LayoutError(
                "Muon cannot work with these arguments.",
                expected=f"adjust_lr_fn in {_ADJUST_LR} and 0 <= ns_steps < 100",
                got=f"adjust_lr_fn={adjust_lr_fn!r}, ns_steps={ns_steps}",
            )
        self._bucket_bytes = bucket_bytes
        self._plans: dict[tuple[int, ...], MuonPlan] = {}  # by which parameters have a gradient
        self._ranks: dict[tuple[DeviceMesh, int], Ranks] = {}
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "row_splits": None,
            # m <- mu m + (1 - mu) g. The other common form, mu m + g, is 1 / (1 - mu) times larger.
            "momentum_form": "ema",
        }
        super().__init__(params, defaults, adamw_params=adamw_params, adamw=adamw)

    @staticmethod
    def granularity(*, whole: Sequence[str] = ()) -> Callable[[str, Any], Granularity]:
        """The granularity rule for ``fully_shard(model, granularity=Muon.granularity())``.

        Stacks of matrices (3-D) are cut between matrices only, so that experts cost no communication. Other
        parameters may be cut anywhere: a cut matrix visits its owner, which for dense layers is cheaper than
        the padding that whole matrices need.

        Args:
            whole: name patterns (fnmatch) of matrices to keep whole as well.
        """

        def rule(fqn: str, param: Any) -> Granularity:
            if len(param.shape) == 3 or any(fnmatch.fnmatchcase(fqn, pattern) for pattern in whole):
                return Whole("matrix")
            return Element()

        return rule

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their state is made at once."""
        super().add_param_group(param_group)
        self._plans.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans, self._ranks = {}, {}  # a plan belongs to one layout, and process groups cannot be copied

    def _init_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        matrices_of(tuple(param.shape), group["row_splits"])
        return {"momentum_buffer": torch.zeros_like(param)}

    def _step_groups(self, groups: list[dict[str, Any]]) -> None:
        members = [(p, group) for group in groups for p in group["params"]]
        present = tuple(index for index, (p, _) in enumerate(members) if p.grad is not None)
        if present not in self._plans:
            taking_part = [taking_part_of(*members[index]) for index in present]
            self._plans[present] = plan_step(taking_part, self._bucket_bytes, self._ranks)
        plan = self._plans[present]
        stepped = [members[index] for index in present]
        jobs = [
            ParamJob(param, group, lies.pieces, update)
            for (param, group), lies, update in zip(stepped, plan.params, self._updates(stepped), strict=True)
        ]
        run_step(plan, jobs, meanwhile=self._step_adamw)

    def _updates(self, stepped: Sequence[tuple[torch.Tensor, dict[str, Any]]]) -> list[torch.Tensor]:
        """Update the momenta; return this rank's elements of what is to be orthogonalised."""
        momenta = [local_tensor(self.state[p]["momentum_buffer"], "state") for p, _ in stepped]
        grads = [local_grad(p).to(m.dtype) for (p, _), m in zip(stepped, momenta, strict=True)]
        updates = list(momenta)
        kinds = [
            (m.dtype, m.device, group["momentum"], group["nesterov"])
            for (_, group), m in zip(stepped, momenta, strict=True)
        ]
        numels = [m.numel() for m in momenta]
        for places in batches_of(zip(kinds, numels, range(len(kinds)), strict=True), sum(numels)):
            _, _, momentum, nesterov = kinds[places[0]]
            some_grads, some = [grads[place] for place in places], [momenta[place] for place in places]
            foreach_lerp_(some, some_grads, 1 - momentum)
            if nesterov:
                for place, update in zip(places, foreach_lerp(some_grads, some, momentum), strict=True):
                    updates[place] = update
        return updates


def split_params(
    model: torch.nn.Module, *, adamw: Sequence[str] = ("*embed*", "*head*")
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters for Muon (matrices and stacks) and for AdamW (all others), each once.

    Args:
        model: its parameters that require a gradient.
        adamw: name patterns (fnmatch) of matrices that belong to AdamW: embeddings and output heads.

    Examples:
        >>> matrices, others = split_params(torch.nn.Linear(8, 4))
        >>> [p.shape for p in matrices], [p.shape for p in others]
        ([torch.Size([4, 8])], [torch.Size([4])])
    """
    matrices: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    for fqn, param in model.named_parameters():
        if not param.requires_grad:
            continue
        hidden = param.ndim in (2, 3) and not any(fnmatch.fnmatchcase(fqn, pattern) for pattern in adamw)
        (matrices if hidden else rest).append(param)
    return matrices, rest
