"""Muon on ragged shards: momentum is sharded like the parameter; a matrix that is cut over ranks is sent to one owner.

Each rank computes on its pieces the momentum ``m <- lerp(m, g)``, the update ``u = lerp(g, m)``, weight decay, and at
the end ``p -= lr' * o``. Here ``o`` is the Newton-Schulz iteration of the whole matrix ``u``. Only this iteration needs
whole matrices:

    matrix                                       where the iteration runs          collectives
    plain tensor, or whole on one rank           on that rank                      0
    cut over ranks (ragged, or FSDP2 Shard(0))   one owner, balanced by FLOPs      2 per bucket of matrices
    DTensor with other placements (TP)           every rank                        torch's own, per matrix

Buckets form a pipeline::

    bucket 0   gather | iterate         | scatter           | subtract
    bucket 1            gather          | iterate           | scatter    | subtract
                        ^ in flight while 0 is iterated       ^ in flight while 1 is iterated

The result has the same bits as `torch.optim.Muon` on one process (fp32 on CPU), because the same function runs on the
same whole matrix. Matrices of equal shape are iterated as a stack, with torch's operations in torch's order. On CPU,
stacks and single matrices give the same bits (a test compares them); on accelerators, batched and single matrix
products may round differently.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale_fsdp.dtensor.piece_map import PieceMap, local_grad, local_part_of, local_tensor, pieces_of
from vescale_fsdp.errors import ArgumentError, LayoutError
from vescale_fsdp.layout.geometry import Range
from vescale_fsdp.layout.granularity import Element, Granularity, Whole
from vescale_fsdp.lazy import set_module
from vescale_fsdp.optim.hidden_matrices import split_hidden
from vescale_fsdp.optim.muon_plan import (
    WIRE_DTYPE,
    Bucket,
    Matrix,
    MuonPlan,
    Pending,
    Ranks,
    SteppedParam,
    matrices_of,
    plan_step,
    start_exchange,
)
from vescale_fsdp.optim.structured_optimizer import (
    AdamWOptions,
    StructuredOptimizer,
    batches_of,
    check_rates,
    launches,
)
from vescale_fsdp.torch_private import (
    MUON_COEFFICIENTS,
    MUON_EPS,
    MUON_STEPS,
    foreach_add_,
    foreach_copy_,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul_,
    foreach_norm_of,
    muon_adjust_lr,
    zeropower_via_newtonschulz,
)

BUCKET_BYTES = 8 << 20  # 8 MiB
_ADJUST_LR = (None, "original", "match_rms_adamw")


@set_module("vescale_fsdp.optim")
class Muon(StructuredOptimizer):
    """One optimizer that steps matrices and stacks of matrices with Muon, and other parameters with AdamW.

    Muon is by K. Jordan et al. (2024), https://kellerjordan.github.io/posts/muon; the arithmetic is that of
    `torch.optim.Muon`.

    Args:
        params: 2-D and 3-D parameters (3-D: a stack, one matrix per expert), or param groups of them. A group with
            ``row_splits=(q_rows, k_rows, v_rows)`` treats a fused matrix as several matrices.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in
            `torch.optim.Muon`, with its defaults.
        adamw_params: parameters for AdamW: embeddings, output head, norms, biases.
        adamw: options of AdamW.
        bucket_bytes: approximate bytes that a rank receives per collective. Two buckets are in memory at a time.

    Raises:
        LayoutError: for a parameter that is not a matrix, or arguments that are not valid.

    Examples:
        >>> from vescale_fsdp import fully_shard
        >>> model = fully_shard(torch.nn.Linear(8, 8), granularity=Muon.granularity())
        >>> matrices, others = Muon.split_params(model)
        >>> optimizer = Muon(matrices, lr=0.02, adamw_params=others)
        >>> model(torch.randn(2, 8)).sum().backward()
        >>> optimizer.step()
    """

    algorithm: ClassVar[str] = "muon"
    recorded: ClassVar[tuple[str, ...]] = ("momentum_form",)
    pickled: ClassVar[tuple[str, ...]] = ("_adamw", "_bucket_bytes")

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
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if isinstance(lr, (list, tuple)):
            raise ArgumentError(
                "The learning rate of Muon cannot be a list.",
                expected="a number",
                got=f"{len(lr)} values",
                todo="Muon(matrices, lr=0.02, adamw_params=others): other parameters are named",
                where="Muon(lr=..)",
            )
        # Momentum must be in [0, 1), like a beta. float, since a learning rate may be a tensor.
        check_rates(float(lr), (momentum, 0.0), eps, weight_decay)
        if adjust_lr_fn not in _ADJUST_LR or not 0 <= ns_steps < 100:  # 100, as in torch.optim.Muon
            raise LayoutError(
                "Muon does not accept these arguments.",
                expected=f"adjust_lr_fn in {_ADJUST_LR} and 0 <= ns_steps < 100",
                got=f"adjust_lr_fn={adjust_lr_fn!r}, ns_steps={ns_steps}",
            )
        self._bucket_bytes = bucket_bytes
        self._plans: dict[tuple[int, ...], MuonPlan] = {}  # key: indices of the parameters with a gradient
        # Kept, since making an entry may create a process group.
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
            # m <- mu m + (1 - mu) g. Recorded in checkpoints, because momentum of the other common form, mu m + g, is
            # 1 / (1 - mu) times larger.
            "momentum_form": "ema",
        }
        super().__init__(params, defaults, adamw_params=adamw_params, adamw=adamw)

    @staticmethod
    def granularity(*, whole: Sequence[str] = ()) -> Callable[[str, Any], Granularity]:
        """Make a rule for cutting parameters: ``fully_shard(model, granularity=Muon.granularity())``.

        Stacks of matrices (3-D) are cut only between matrices, so that steps of experts need no communication. Other
        parameters may be cut anywhere: sending a cut matrix to its owner costs less than the padding that whole
        matrices would need.

        Args:
            whole: name patterns (fnmatch) of 2-D parameters that must not be cut.
        """

        def rule(fqn: str, param: Any) -> Granularity:
            if len(param.shape) == 3 or any(fnmatch.fnmatchcase(fqn, pattern) for pattern in whole):
                return Whole("matrix")
            return Element()

        return rule

    @staticmethod
    def split_params(
        model: torch.nn.Module, *, muon: str | Sequence[str] = (), adamw: str | Sequence[str] = ()
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Split a model's parameters into those for Muon (hidden matrices and stacks) and those for AdamW (all others).

        The classes of modules decide, ties and shapes, and never names. Muon gets the matrices of linear, recurrent and
        attention modules of torch, their subclasses, and `transformers.pytorch_utils.Conv1D`; and 3-D parameters of
        other modules, which are stacks of matrices, such as experts. AdamW gets

        - embeddings, and every module that is tied to one
        - the input and output embeddings of transformers models, and the linear layer of their classifiers
        - an output head that is not tied: the only linear weight with the shape of an embedding
        - vectors, also those of a stack (biases of experts), filters of convolutions (as `torch.optim.Muon`, which
          takes matrices only), and weights of norms
        - a 2-D parameter of any other module, such as a table of positions or a router. Its class does not say what it
          is, so a warning is logged that names it

        Other output heads, such as the last linear layer of a classifier of your own, look like hidden layers: name
        them in ``adamw``. If several linear weights have the shape of an embedding, and no output head is known, a
        warning names them. Rank 0 logs at INFO, to the logger ``vescale_fsdp``, which parameters went where and why.

        Args:
            model: a module, before or after `fully_shard`. Parameters that do not require a gradient are omitted; a
                shared one is listed once.
            muon: name patterns (fnmatch) of parameters that Muon gets in any case.
            adamw: name patterns of parameters that AdamW gets in any case.

        Returns:
            The parameters for Muon, and the parameters for AdamW.

        Raises:
            LayoutError: if a pattern matches no parameter, or a parameter is named in both arguments.

        Examples:
            >>> matrices, others = Muon.split_params(torch.nn.Linear(8, 4))
            >>> [p.shape for p in matrices], [p.shape for p in others]
            ([torch.Size([4, 8])], [torch.Size([4])])
            >>> body_and_head = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
            >>> [p.shape for p in Muon.split_params(body_and_head, adamw=["1.*"])[0]]
            [torch.Size([8, 8])]
        """
        patterns = [(each,) if isinstance(each, str) else tuple(each) for each in (muon, adamw)]
        return split_hidden(model, muon=patterns[0], adamw=patterns[1])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and create their state."""
        super().add_param_group(param_group)
        self._plans.clear()  # their keys, indices of parameters, may now mean other parameters

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Not copied or pickled: plans belong to the old layout, and process groups cannot be copied.
        self._plans, self._ranks = {}, {}

    def _init_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Make the initial state of a parameter: a momentum of zeros."""
        matrices_of(tuple(param.shape), group["row_splits"])  # raises if Muon does not support the shape
        return {"momentum_buffer": torch.zeros_like(param)}

    def _step_groups(self, groups: list[dict[str, Any]]) -> None:
        """Step all parameters that have a gradient, by a plan that is made at the first step and reused."""
        # A plan is valid for the parameters that have a gradient, so their indices are its key.
        members = [(p, group) for group in groups for p in group["params"]]
        present = tuple(index for index, (p, _) in enumerate(members) if p.grad is not None)
        if present not in self._plans:
            params = [
                SteppedParam(
                    pieces_of(param),
                    matrices_of(tuple(param.shape), group["row_splits"], number),
                    group["ns_steps"],
                )
                for number, (param, group) in enumerate(members[index] for index in present)
            ]
            self._plans[present] = plan_step(params, self._bucket_bytes, self._ranks)
        plan = self._plans[present]
        stepped = [members[index] for index in present]
        jobs = [
            ParamJob(param, group, planned.pieces, update)
            for (param, group), planned, update in zip(
                stepped, plan.params, self._updates(stepped), strict=True
            )
        ]
        run_step(plan, jobs, meanwhile=self._step_adamw)

    def _updates(self, stepped: Sequence[tuple[torch.Tensor, dict[str, Any]]]) -> list[torch.Tensor]:
        """Update the momenta.

        Returns:
            For each parameter, this rank's elements of the update that is to be orthogonalized, 1-D.
        """
        momenta = [local_tensor(self.state[p]["momentum_buffer"], "state") for p, _ in stepped]
        grads = [local_grad(p).to(m.dtype) for (p, _), m in zip(stepped, momenta, strict=True)]
        updates = list(momenta)
        kinds = [
            (m.dtype, m.device, group["momentum"], group["nesterov"])
            for (_, group), m in zip(stepped, momenta, strict=True)
        ]
        numels = [m.numel() for m in momenta]
        # Without a limit of size, since all updates stay in memory until the step uses them.
        for alike in batches_of(zip(kinds, numels, range(len(kinds)), strict=True), sum(numels)):
            _, _, momentum, nesterov = kinds[alike[0]]
            some_grads, some = [grads[index] for index in alike], [momenta[index] for index in alike]
            foreach_lerp_(some, some_grads, 1 - momentum)
            if nesterov:
                for index, update in zip(alike, foreach_lerp(some_grads, some, momentum), strict=True):
                    updates[index] = update
        return updates


@dataclass(frozen=True)
class NewtonSchulz:
    """The Newton-Schulz iteration with its constants; the defaults are torch's.

    Args:
        coefficients: (a, b, c) of the quintic X <- a X + (b A + c A A) X with A = X X'.
        steps: number of iterations.
        eps: lower bound of the norm by which a matrix is divided.
    """

    coefficients: tuple[float, float, float] = MUON_COEFFICIENTS
    steps: int = MUON_STEPS
    eps: float = MUON_EPS

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        """Orthogonalize every matrix of a bf16 stack [n, rows, cols]; the stack may be overwritten."""
        if len(stack) == 1:  # torch's own function gives the bits of torch.optim.Muon
            return zeropower_via_newtonschulz(stack[0], self.coefficients, self.steps, self.eps).unsqueeze(0)
        a, b, c = self.coefficients
        # As in torch: with the short side first, A = X X' is the smaller of the two possible products.
        tall = stack.size(-2) > stack.size(-1)
        x = stack.mT if tall else stack
        # One norm per matrix, over all its elements, as in torch. A norm of the stack over two dims rounds differently.
        norms = torch.stack(foreach_norm_of(list(x.unbind()))).clamp(min=self.eps)
        x = x / norms.view(-1, 1, 1)
        for _ in range(self.steps):
            gram = torch.bmm(x, x.mT)
            update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, update, x, beta=a)
        return x.mT if tall else x


STACK_NUMEL = 32 << 20
"""Maximum elements of a stack, 64 MiB in bf16. An iteration needs up to four such tensors: X, A, B and the next X."""

_WIDENED_NUMEL = 8 << 20
"""Maximum elements to subtract in one launch: bounds fp32 copies to 32 MiB, or to 64 MiB for 16-bit parameters."""


class ParamJob(NamedTuple):
    """A parameter in one step, with its param group and this rank's part of its update."""

    param: torch.Tensor
    group: dict[str, Any]
    pieces: PieceMap | None  # None: the parameter's placements give no contiguous pieces
    update: torch.Tensor  # 1D [own piece], the update to orthogonalize

    def own(self, flat: torch.Tensor, wanted: Range) -> torch.Tensor:
        """Return a view of the elements ``wanted`` of the parameter.

        Args:
            flat: 1-D, the elements of this rank's piece.
            wanted: a range of the parameter, inside of this rank's piece.
        """
        assert self.pieces is not None
        start = self.pieces.own_piece.start
        return flat[wanted.start - start : wanted.stop - start]

    def iteration(self) -> NewtonSchulz:
        """Return the iteration with the constants of the param group."""
        # A tuple, so that iterations can be hashed: a loaded checkpoint may have a list.
        return NewtonSchulz(tuple(self.group["ns_coefficients"]), self.group["ns_steps"], self.group["eps"])

    def scaled_lr(self, matrix: Matrix) -> float:
        """Return the learning rate of a matrix, which depends on the shape of the whole matrix."""
        shape = torch.Size((matrix.rows, matrix.cols))
        return muon_adjust_lr(float(self.group["lr"]), self.group["adjust_lr_fn"], shape)

    def term(self, matrix: Matrix, wanted: Range, orthogonal: torch.Tensor) -> _Term:
        """Return the term for the elements ``wanted`` of a matrix.

        Args:
            orthogonal: 1-D, these elements of the orthogonalized update.
        """
        return _Term(self.own(local_tensor(self.param), wanted), orthogonal, self.scaled_lr(matrix))


class _Term(NamedTuple):
    """What a step subtracts from some elements of a parameter: ``target -= lr * orthogonal``."""

    target: torch.Tensor  # 1D, a view of the parameter's local tensor
    orthogonal: torch.Tensor  # 1D, bf16
    lr: float


def run_step(plan: MuonPlan, jobs: Sequence[ParamJob], *, meanwhile: Callable[[], None]) -> None:
    """Orthogonalize all updates and subtract them.

    Args:
        plan: the plan for the same parameters, in the same order.
        jobs: one job per parameter.
        meanwhile: other work of the step, which hides the time of the first gather.
    """
    gathering = _start_gather(plan.buckets[0], jobs) if plan.buckets else None
    meanwhile()
    _decay(jobs)  # before any subtraction: as in torch, decay multiplies the old values
    _orthogonalize_here(plan.here, jobs)
    for index in plan.gathered:
        _orthogonalize_everywhere(index, jobs)
    scattering: Pending | None = None
    for number, bucket in enumerate(plan.buckets):
        assert gathering is not None
        arrived = gathering
        if number + 1 < len(plan.buckets):
            gathering = _start_gather(plan.buckets[number + 1], jobs)
        results = _orthogonalize_arrived(bucket, arrived.wait(), jobs)
        # This scatter starts before the wait for the previous one, so that it is in flight during the subtraction.
        before, scattering = scattering, _start_scatter(bucket, results, jobs)
        if before is not None:
            _subtract_arrived(plan.buckets[number - 1], before.wait(), jobs)
    if scattering is not None:
        _subtract_arrived(plan.buckets[-1], scattering.wait(), jobs)


def _stacks(
    matrices: Sequence[Matrix], jobs: Sequence[ParamJob]
) -> Iterator[tuple[NewtonSchulz, torch.Size, list[int]]]:
    """Group matrices of equal shape and equal iteration into stacks of bounded size.

    Yields:
        The iteration, the shape of the matrices, and their positions in ``matrices``.
    """
    items = (
        ((jobs[matrix.param].iteration(), matrix.rows, matrix.cols), matrix.numel, position)
        for position, matrix in enumerate(matrices)
    )
    for positions in batches_of(items, STACK_NUMEL):
        first = matrices[positions[0]]
        yield jobs[first.param].iteration(), torch.Size((first.rows, first.cols)), positions


def _decay(jobs: Sequence[ParamJob]) -> None:
    """Apply decoupled weight decay to this rank's elements of all parameters."""
    factors = [1 - float(job.group["lr"]) * job.group["weight_decay"] for job in jobs]
    kinds = [(job.param.dtype, job.param.device, factor) for job, factor in zip(jobs, factors, strict=True)]
    # Sizes of 0, since nothing is allocated: a batch may have any number of elements.
    for alike in batches_of(zip(kinds, (0 for _ in jobs), range(len(jobs)), strict=True), 0):
        locals_ = [local_tensor(jobs[index].param) for index in alike]
        if launches(locals_[0].device):
            foreach_mul_(locals_, factors[alike[0]])
            continue
        # One by one: on the CPU, torch 2.13's foreach rounds the factor to the dtype of 16-bit parameters.
        for local in locals_:
            local.mul_(factors[alike[0]])


def _subtract(terms: Iterable[_Term]) -> None:
    """Subtract the terms, with one launch per dtype and learning rate, in batches of bounded memory."""
    items = (((term.target.dtype, term.target.device, term.lr), term.target.numel(), term) for term in terms)
    for alike in batches_of(items, _WIDENED_NUMEL):
        targets = [term.target for term in alike]
        sums = targets
        if targets[0].dtype in (torch.bfloat16, torch.float16):
            # Subtract in fp32: torch's 16-bit CPU kernel rounds the last elements of a tensor differently from the
            # other elements, so the result would depend on where ranks cut the parameter.
            sums = _widened(targets)
        foreach_add_(sums, _widened([term.orthogonal for term in alike]), alpha=-alike[0].lr)
        if sums is not targets:
            foreach_copy_(targets, sums)


def _widened(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of 1-D tensors in fp32, made in one launch."""
    numels = [part.numel() for part in parts]
    wide = list(torch.empty(sum(numels), dtype=torch.float32, device=parts[0].device).split(numels))
    foreach_copy_(wide, list(parts))
    return wide


def _orthogonalize_here(here: Sequence[Matrix], jobs: Sequence[ParamJob]) -> None:
    """Orthogonalize the updates of matrices that are whole on this rank, and subtract the results."""
    for iteration, shape, positions in _stacks(here, jobs):
        members = [(jobs[here[position].param], here[position]) for position in positions]
        stack = torch.empty(len(members), *shape, dtype=WIRE_DTYPE, device=members[0][0].update.device)
        rows = list(stack.flatten(1).unbind())
        foreach_copy_(rows, [job.own(job.update, matrix.range) for job, matrix in members])
        results = iteration(stack).flatten(1).unbind()
        _subtract(
            job.term(matrix, matrix.range, result)
            for (job, matrix), result in zip(members, results, strict=True)
        )


def _orthogonalize_everywhere(index: int, jobs: Sequence[ParamJob]) -> None:
    """Step a parameter without contiguous pieces: every rank gathers and orthogonalizes the whole update."""
    job = jobs[index]
    assert isinstance(job.param, DTensor)
    spread = torch.zeros_like(job.param)  # becomes the update as a DTensor, which torch can gather
    local_tensor(spread, "update").copy_(job.update)
    assert isinstance(spread, DTensor)
    update = spread.full_tensor()
    orthogonal = torch.zeros_like(update)
    matrices = matrices_of(tuple(job.param.shape), job.group["row_splits"], index)
    for iteration, shape, positions in _stacks(matrices, jobs):
        ranges = [matrices[position].range for position in positions]
        stack = torch.stack([update.reshape(-1)[start:stop].view(shape) for start, stop in ranges])
        results = iteration(stack.to(WIRE_DTYPE)).flatten(1).to(orthogonal.dtype)
        scaled = results.mul_(-job.scaled_lr(matrices[positions[0]])).unbind()
        foreach_copy_([orthogonal.view(-1)[start:stop] for start, stop in ranges], list(scaled))
    local_tensor(job.param).add_(local_part_of(orthogonal, job.param).reshape(-1))


def _device(bucket: Bucket, jobs: Sequence[ParamJob]) -> torch.device:
    """Return the device of a bucket's parameters; a bucket is never empty."""
    return jobs[next(iter(bucket.owner_of)).param].update.device


def _start_gather(bucket: Bucket, jobs: Sequence[ParamJob]) -> Pending:
    """Start to send this rank's parts of a bucket's updates to the owners of the matrices."""
    shard = bucket.ranks.shard
    parts = [
        jobs[matrix.param].own(jobs[matrix.param].update, part)
        for matrices in bucket.outbound
        for matrix in matrices
        if (part := bucket.part(matrix, shard)).numel
    ]
    return start_exchange(parts, bucket.gather_numels, bucket.ranks, _device(bucket, jobs))


def _orthogonalize_arrived(
    bucket: Bucket, arrived: torch.Tensor, jobs: Sequence[ParamJob]
) -> list[torch.Tensor]:
    """Orthogonalize the updates of the matrices that this rank owns.

    Args:
        arrived: 1-D, the parts that the gather has received.

    Returns:
        One flat tensor per matrix, in the order of `Bucket.owned`.
    """
    owned = bucket.owned
    # Parts arrive in the order of ranks, and from each rank in the order of the bucket. Inside a matrix, parts are in
    # the order of shards.
    keys = [(s, n) for r, s in bucket.everyone if r == bucket.ranks.replica for n in range(len(owned))]
    chunks = arrived.split([bucket.part(owned[n], s).numel for s, n in keys]) if keys else ()
    parts = dict(zip(keys, chunks, strict=True))
    # ``arrived`` is only a placeholder: stacks replace all entries, but not in the order of the bucket.
    results = [arrived] * len(owned)
    for iteration, shape, positions in _stacks(owned, jobs):
        stack = torch.empty(len(positions), *shape, dtype=WIRE_DTYPE, device=arrived.device)
        in_order = [
            parts[s, n] for n in positions for s in range(bucket.pieces_of[owned[n].param].num_shards)
        ]
        foreach_copy_(list(stack.view(-1).split([part.numel() for part in in_order])), in_order)
        for result, n in zip(iteration(stack).flatten(1), positions, strict=True):
            results[n] = result
    return results


def _start_scatter(bucket: Bucket, results: Sequence[torch.Tensor], jobs: Sequence[ParamJob]) -> Pending:
    """Start to send every rank its parts of the updates that this rank has orthogonalized."""
    wanted = [
        (result, bucket.part(matrix, shard).shift(-matrix.start))
        for _, shard in bucket.everyone
        for matrix, result in zip(bucket.owned, results, strict=True)
    ]
    parts = [result[part.start : part.stop] for result, part in wanted if part.numel]
    return start_exchange(parts, bucket.scatter_numels, bucket.ranks, _device(bucket, jobs))


def _subtract_arrived(bucket: Bucket, arrived: torch.Tensor, jobs: Sequence[ParamJob]) -> None:
    """Subtract this rank's parts of a bucket's orthogonalized updates, which the scatter has received."""
    shard = bucket.ranks.shard
    ranges = [bucket.part(matrix, shard) for matrix in bucket.inbound]
    parts = arrived.split([wanted.numel for wanted in ranges])
    _subtract(
        jobs[matrix.param].term(matrix, wanted, part)
        for matrix, wanted, part in zip(bucket.inbound, ranges, parts, strict=True)
        if wanted.numel
    )
