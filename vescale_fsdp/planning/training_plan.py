"""`plan_training`: whether a model fits, and how to shard it, without GPU, process group or weights.

A candidate is a number of ranks that share one copy of the model, the modules that are units, what stays gathered
between forward and backward, and whether gathers stay in a node (a hybrid cut). The planner's layouts give the bytes of
its buffers and messages, `meta_step` the activations and the arithmetic, `optimizer_step` what the optimizer allocates,
`step_memory` the peak.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from vescale_fsdp.errors import ArgumentError, format_bytes
from vescale_fsdp.layout.dtypes import itemsize_of
from vescale_fsdp.layout.geometry import numel_of
from vescale_fsdp.layout.granularity import GranularityRule, resolve_granularity
from vescale_fsdp.layout.model_shapes import shapes_of, units_of
from vescale_fsdp.layout.plan_report import PlanReport, largest_layouts_html, plan_report
from vescale_fsdp.lazy import set_module
from vescale_fsdp.optim.adamw8bit import AdamW8bit
from vescale_fsdp.optim.muon import Muon
from vescale_fsdp.planning.cluster import Cluster, WireBytes
from vescale_fsdp.planning.meta_step import MetaStep, measure_step
from vescale_fsdp.planning.optimizer_step import SteppedShape, step_bytes
from vescale_fsdp.planning.plan_code import code_lines
from vescale_fsdp.planning.plan_text import in_unit, text_lines
from vescale_fsdp.planning.step_memory import PeakMemory, UnitMemory, Window, peak_of
from vescale_fsdp.torch_private import pytree

OptimizerName = Literal["adamw", "adamw8bit", "muon", "none"]
_REDUCED = 4  # bytes per element of reductions, which are in fp32
_VERDICTS = ("fits", "tight", "does not fit")  # from best to worst
_TIGHT = 0.9  # a fuller memory than this leaves no room for fragments, which are not planned
_END_SHARE = 0.01  # a module of the root with more of the root's bytes may be a unit


@dataclass(frozen=True)
class PlanSetup:
    """The arguments of `plan_training` but the model and its batch."""

    cluster: Cluster
    optimizer: OptimizerName
    param_dtype: torch.dtype
    checkpointing: bool
    granularity: GranularityRule
    units: tuple[str, ...] | None
    micro_batches: int
    steps_early: bool = False  # whether each unit steps as soon as its gradients are reduced

    @property
    def rule(self) -> GranularityRule:
        """The user's granularity, or the one that the optimizer needs."""
        if self.granularity is not None:
            return self.granularity
        return {"adamw8bit": AdamW8bit.granularity(), "muon": Muon.granularity()}.get(self.optimizer)


@dataclass(frozen=True)
class ShardingCandidate:
    """One way to shard the model.

    Attributes:
        shard_size: ranks that share one copy of the model.
        replicas: number of copies (HSDP), each on ``shard_size`` ranks.
        wrapping: which modules are units, as text.
        units: names of the units, without the root.
        keeps: what stays gathered between forward and backward: nothing of the units (1), all (0), or a part per rank,
            of this number of ranks.
        gather_size: ranks of a gather after the first one of a step: fewer than ``shard_size`` in a hybrid cut
            (``shard_optimizer_over``), whose nodes keep the weights.
        peak: memory of a rank.
        library_bytes: an estimate of the memory of CUDA, cuBLAS and NCCL.
        memory_bytes: memory of a GPU.
        wire: bytes that a GPU receives in a step.
        compute_s, link_s, network_s: least seconds of a step on each resource.
        padding_ratio, copied_ratio: of all units, as fractions of the parameters.
        code: the lines that shard so.
    """

    shard_size: int
    replicas: int
    wrapping: str
    units: tuple[str, ...]
    keeps: int
    gather_size: int
    peak: PeakMemory
    library_bytes: int
    memory_bytes: int
    wire: WireBytes
    compute_s: float
    link_s: float
    network_s: float
    padding_ratio: float
    copied_ratio: float
    code: str = ""

    @property
    def needed_bytes(self) -> int:
        """Memory that a GPU needs."""
        return self.peak.total + self.library_bytes

    @property
    def verdict(self) -> str:
        """Whether the model fits: "fits", "tight" (with less than a tenth free), or "does not fit"."""
        if self.needed_bytes > self.memory_bytes:
            return "does not fit"
        return "fits" if self.needed_bytes <= _TIGHT * self.memory_bytes else "tight"

    @property
    def step_s(self) -> float:
        """A bound of the step: no step is faster than its slowest resource."""
        return max(self.compute_s, self.link_s, self.network_s)

    @property
    def limit(self) -> str:
        """The resource that bounds the step."""
        seconds = {"compute": self.compute_s, "links": self.link_s, "network": self.network_s}
        return max(seconds, key=lambda name: seconds[name])

    @property
    def is_hybrid(self) -> bool:
        """Whether weights and states are sharded over all ranks, while each node keeps a copy of the weights."""
        return self.gather_size < self.shard_size

    @property
    def sharding(self) -> str:
        """The mesh as text."""
        if self.is_hybrid:
            return f"hybrid {self.shard_size // self.gather_size} x {self.gather_size}"
        return f"HSDP {self.replicas} x {self.shard_size}" if self.replicas > 1 else f"FSDP {self.shard_size}"

    @property
    def after_forward(self) -> str:
        """What happens to gathered weights after the forward, as text."""
        return {0: "keep", 1: "free"}.get(self.keeps, f"keep 1/{self.keeps}")

    def rank(self) -> tuple[Any, ...]:
        """Return the sort key: what fits comes first, then faster (two digits), then less traffic, then less memory.

        What fits tightly, or not at all, is sorted by memory: the next error of a run would be one of memory.
        """
        order = _VERDICTS.index(self.verdict)
        if order:
            return (order, self.needed_bytes)
        return (order, float(f"{self.step_s:.2g}"), self.network_s + self.link_s, self.needed_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return all fields and properties as JSON values."""
        names = ("needed_bytes", "verdict", "step_s", "limit", "sharding", "after_forward")
        fields = {**asdict(self), "peak": self.peak.to_json(), "wire": self.wire._asdict()}
        return {**fields, **{name: getattr(self, name) for name in names}}


@set_module("vescale_fsdp")
@dataclass(frozen=True)
class TrainingPlan:
    """Candidates for sharding a model, best first. ``str(plan)`` prints them.

    Attributes:
        model: the class of the model.
        numel: parameters of the model.
        candidates: the candidates.
        advice: what would help, one line each, if nothing fits.
        report: layouts of the best candidate, for tables and drawings.
        notes: assumptions, one line each.
        code: the lines that shard as the best candidate does; if it does not fit, those of the first change in
            ``advice``.
        cluster: the GPUs, or the processes on the CPU, for which no times are known.

    Examples:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> plan = plan_training(model, Cluster(8), batch=torch.empty(16, 64, device="meta"))
        >>> plan.candidates[0].sharding, plan.fits
        ('FSDP 8', True)
    """

    model: str
    numel: int
    candidates: tuple[ShardingCandidate, ...]
    advice: tuple[str, ...]
    report: PlanReport
    notes: tuple[str, ...]
    code: str
    cluster: Cluster

    @property
    def fits(self) -> bool:
        """Whether any candidate fits."""
        return self.candidates[0].verdict != "does not fit"

    def __str__(self) -> str:
        return "\n".join(text_lines(self))

    def _repr_html_(self) -> str:
        """Return the text and the best candidate's largest layouts, as a notebook shows them."""
        return f"<pre>{escape(str(self))}</pre>\n{largest_layouts_html(self.report)}"

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values. Times are None for ranks on the CPU."""
        unknown = dict.fromkeys(("compute_s", "link_s", "network_s", "step_s", "limit") * self.cluster.on_cpu)
        return {
            "model": self.model,
            "parameters": self.numel,
            "fits": self.fits,
            "candidates": [{**each.to_json(), **unknown} for each in self.candidates],
            "advice": list(self.advice),
            "notes": list(self.notes),
            "code": self.code,
            "units": self.report.to_json()["rows"],
        }

    def save(self, folder: Path | str) -> tuple[Path, ...]:
        """Draw the layouts of the best candidate; see `PlanReport.save`. Returns the files written."""
        return self.report.save(folder)


def plan_training(
    model: nn.Module,
    cluster: Cluster,
    *,
    batch: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: OptimizerName = "adamw",
    param_dtype: torch.dtype = torch.bfloat16,
    checkpointing: bool = False,
    granularity: GranularityRule = None,
    units: Sequence[str] | None = None,
    micro_batches: int = 1,
) -> TrainingPlan:
    """Plan the training of a model: memory, traffic and time of every way to shard it. Needs no GPU and no weights.

    Args:
        model: on the meta device, in the dtype in which its parameters are stored.
        cluster: the GPUs.
        batch: arguments of the model's forward on one GPU, on the meta device: a tuple, a dict of keyword arguments, or
            one tensor. None: activations and arithmetic are left out.
        loss: computes the loss from the model's output; None: the output's first number (as ``output.loss`` of
            transformers), or the sum of all outputs.
        optimizer: "adamw" is torch's, fused; "adamw8bit" and "muon" are those of `vescale_fsdp.optim`; "none" has no
            state.
        param_dtype: dtype of compute. Reductions are in fp32.
        checkpointing: whether the activations of each block are computed again in the backward.
        granularity: as for `fully_shard`; None: what the optimizer needs.
        units: names or patterns of the units; None: every block of a list of modules, with and without the embedding
            and the head.
        micro_batches: forwards and backwards of a step, each with a ``batch``. The last one reduces over replicas, and
            over the nodes of a hybrid cut (`FSDPModule.set_requires_all_reduce`).

    Raises:
        ArgumentError: if the model is not on the meta device or cannot run there.
        LayoutError: for patterns, names or granularities that are not valid.

    Examples:
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(4096, 4096, bias=False)
        >>> plan = plan_training(model, Cluster(8), batch=torch.empty(16, 4096, device="meta"))
        >>> plan.candidates[0].peak.weights == 4 * 4096 * 4096 // 8
        True
    """
    _check(model, optimizer, param_dtype, micro_batches)
    setup = PlanSetup(
        cluster,
        optimizer,
        param_dtype,
        checkpointing,
        granularity,
        None if units is None else tuple(units),
        micro_batches,
    )
    planner = _Planner(model, batch, loss, setup)
    candidates = planner.candidates()
    candidates = [replace(each, code="\n".join(planner.code_of(each))) for each in candidates]
    best, advice = candidates[0], list[str]()
    code = best.code
    remedies = _remedies(planner, best) if best.verdict != "fits" else []
    if best.verdict == "tight" and remedies:
        advice = ["What leaves more free:", *(each.text for each in remedies)]
    if best.verdict == "does not fit":
        advice = ["What helps:", *([each.text for each in remedies] or [_too_large(planner, best)])]
        comment = (
            "# No change that was tried makes this model fit. These lines are for the closest candidate."
        )
        if remedies:
            first = remedies[0]
            comment = f"# The first change that helps: {first.name} with {first.candidate.sharding}."
            code = "\n".join(first.planner.code_of(first.candidate))
        code = f"{comment}\n{code}"
    return TrainingPlan(
        type(model).__name__,
        sum(param.numel() for param in model.parameters()),
        tuple(candidates),
        tuple(advice),
        planner.report_of(best),
        tuple(_notes(planner)),
        code,
        cluster,
    )


def _check(model: nn.Module, optimizer: str, param_dtype: torch.dtype, micro_batches: int) -> None:
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ArgumentError(
            "A step has at least one batch.",
            expected="a whole number from 1 on",
            got=repr(micro_batches),
            where="plan_training(micro_batches=..)",
            todo="correct the number",
        )
    names = [name for name, param in model.named_parameters() if not param.is_meta]
    if names:
        raise ArgumentError(
            "The model of a plan is on the meta device, where it takes no memory.",
            expected="parameters on meta",
            got=f"{len(names)} others, such as {names[0]}",
            where=type(model).__name__,
            todo='build it in a block "with torch.device(\'meta\')", or pass model.to("meta")',
        )
    if optimizer not in get_args(OptimizerName):
        raise ArgumentError(
            "There is no plan for this optimizer.",
            expected=f"one of {', '.join(get_args(OptimizerName))}",
            got=repr(optimizer),
            todo="pass the one whose state is most like yours",
            where="optimizer=..",
        )
    if not isinstance(param_dtype, torch.dtype) or not param_dtype.is_floating_point:
        raise ArgumentError(
            "Parameters are computed with in a float type.",
            expected="a float type of torch, such as torch.bfloat16",
            got=repr(param_dtype),
            where="param_dtype=..",
            todo="pass the param_dtype of the MixedPrecisionPolicy",
        )


class _Planner:
    """The shapes of a model, its measured step, and the cost of a candidate."""

    def __init__(
        self, model: nn.Module, batch: Any, loss: Callable[[Any], torch.Tensor] | None, setup: PlanSetup
    ) -> None:
        self.model, self.batch, self.loss, self.setup = model, batch, loss, setup
        self.shapes = shapes_of(model)
        self.matrices: set[int] | None = None  # ids of the parameters that Muon steps
        self.special: set[str] = set()  # names of parameters that Muon or AdamW8bit steps in its own way
        self.states = self._states()
        self.blocks = tuple(name for name in units_of(self.shapes) if name)
        self.wraps = self._wraps()
        owners = {shape.fqn.rpartition(".")[0] for shape in self.shapes}
        units = [name for names in self.wraps.values() for name in names]
        # An owner inside of a block needs no window of its own, and one around a block ends with the block's.
        free = {
            owner
            for owner in owners
            if not any(f"{owner}.".startswith(f"{u}.") or f"{u}.".startswith(f"{owner}.") for u in units)
        }
        self.modules = tuple(dict.fromkeys([*units, *sorted(free - {""})]))
        self.step = self._measured()
        self.steps = {setup.checkpointing: self.step}  # of all variants

    def _wraps(self) -> dict[str, tuple[str, ...]]:
        """Return the units of each wrapping."""
        if self.setup.units is not None:
            return {"given": tuple(name for name in units_of(self.shapes, self.setup.units) if name)}
        wraps = {"blocks" if self.blocks else "root": self.blocks}
        sizes: Counter[str] = Counter()
        tied = set()
        for shape in units_of(self.shapes).get("", ()):
            module = shape.fqn.rpartition(".")[0]
            sizes[module] += numel_of(shape.shape)
            if shape.is_tied:
                tied.add(module)
        ends = [
            name
            for name, numel in sizes.items()
            if name
            and numel > _END_SHARE * sizes.total()
            and name not in tied  # tied weights stay as long as the root
            and not any(block.startswith(f"{name}.") for block in self.blocks)
        ]
        if self.blocks and ends:
            wraps["blocks, ends"] = (*self.blocks, *ends)
        return wraps

    def _measured(self) -> MetaStep:
        setup = self.setup
        if self.batch is not None:
            return measure_step(
                self.model,
                self.batch,
                self.modules,
                dtype=setup.param_dtype,
                recomputed=self.blocks if setup.checkpointing else (),
                loss=self.loss,
            )
        sizes = dict.fromkeys(("", *self.modules), 0)
        for shape in self.shapes:
            if shape.requires_grad:
                sizes[_deepest(shape.fqn, self.modules)] += numel_of(shape.shape) * setup.param_dtype.itemsize
        forward = [Window(module, False) for module in sizes]
        backward = [Window(each, True, nbytes, nbytes, 0, nbytes) for each, nbytes in reversed(sizes.items())]
        return MetaStep((*forward, *backward), {})

    def candidates(self) -> list[ShardingCandidate]:
        """Return all candidates, best first."""
        cluster, found = self.setup.cluster, []
        sizes = tuple(cluster.shard_sizes())
        for wrapping, units in self.wraps.items():
            report = plan_report(self.model, sizes, self.setup.rule, units=units)
            modules: dict[str, list[str]] = {name: [] for name in (*units, "")}
            for module in ("", *self.modules):
                modules[_deepest(module, modules)].append(module)
            for index, size in enumerate(sizes):
                temporaries = self._temporaries(report, index)
                plain, parts = ([1, 0], [cluster.per_node]) if units else ([0], [])
                ways = [(keeps, size) for keeps in plain + parts * (size > cluster.per_node)]
                if size == cluster.gpus > cluster.per_node > 1:  # a hybrid cut, whose gathers stay in a node
                    ways += [(keeps, cluster.per_node) for keeps in plain]
                found += [
                    self._candidate(report, index, wrapping, modules, *way, temporaries) for way in ways
                ]
        return sorted(found, key=ShardingCandidate.rank)

    def _candidate(
        self,
        report: PlanReport,
        index: int,
        wrapping: str,
        modules: Mapping[str, Sequence[str]],
        keeps: int,
        gather_size: int,
        temporaries: int,
    ) -> ShardingCandidate:
        """Return a candidate: the report's number of shards at ``index``, and ``modules`` with windows by unit."""
        setup, cluster, size = self.setup, self.setup.cluster, report.shards[index]
        replicas = cluster.gpus // size
        memory = {name: UnitMemory(name, tuple(each), 0, 0, 0, 0) for name, each in modules.items()}
        weights, states, wire = 0, 0.0, WireBytes(0, 0)
        item, on_cpu = setup.param_dtype.itemsize, cluster.on_cpu
        is_hybrid = gather_size < size
        for group in report.groups:
            layouts = group.layouts[index]
            numel, shard = sum(each.numel for each in layouts), sum(each.shard_numel for each in layouts)
            full = (numel + sum(each.copied_numel for each in layouts)) * item
            is_trained = not group.dtype.endswith(", frozen")
            stored = shard * itemsize_of(group.dtype.partition(",")[0])
            for name in group.units:
                unit, lasts = memory[name], not keeps or not name
                memory[name] = replace(
                    unit,
                    full_bytes=unit.full_bytes + full,
                    kept_bytes=unit.kept_bytes + (full if lasts else full // keeps if keeps > 1 else 0),
                    buffer_bytes=unit.buffer_bytes
                    + is_trained * numel * (min(item, _REDUCED) if on_cpu else _REDUCED)
                    + is_trained * setup.steps_early * stored,
                    reduced_bytes=unit.reduced_bytes + is_trained * (not setup.steps_early) * stored,
                    lasting_bytes=unit.lasting_bytes + is_hybrid * (numel // gather_size) * item,
                    sum_bytes=unit.sum_bytes + is_hybrid * is_trained * (numel // gather_size) * _REDUCED,
                )
                count = setup.micro_batches
                over = [size] + [gather_size] * (
                    count - 1
                )  # ranks of the forwards' gathers, and of reductions
                messages = [cluster.gathered(numel * item, ranks) for ranks in over]
                if not lasts:
                    again = gather_size if keeps == 1 else keeps
                    messages += [cluster.gathered(numel * item, again)] * count
                if is_trained:
                    messages += [cluster.gathered(numel * _REDUCED, ranks) for ranks in over]
                    messages.append(cluster.replicated(shard * _REDUCED, replicas))
                wire = WireBytes(*(sum(each) for each in zip(wire, *messages, strict=True)))
                weights += stored
            if is_trained:
                payload = sum(each.payload_numel for each in layouts)
                names = [f"{unit}.{p.fqn}" if unit else p.fqn for unit in group.units for p in group.params]
                # The state of a full shard: ranks with padding have less.
                states += sum(self.states[name] for name in names) * shard / max(payload, 1)
        peak = peak_of(
            self.step.windows,
            list(memory.values()),
            weights=weights,
            states=int(states),
            temporaries=temporaries,
            accumulates=setup.micro_batches > 1,
            on_cpu=on_cpu,
        )
        total = report.total(size)
        # The optimizer reads and writes weights and states, and reads gradients.
        step_traffic = 3 * weights + 2 * peak.states
        return ShardingCandidate(
            size,
            replicas,
            wrapping,
            tuple(name for name in modules if name),
            keeps,
            gather_size,
            peak,
            cluster.library_bytes(3 if is_hybrid else 1 + (replicas > 1)),  # hybrid: nodes, node, all ranks
            cluster.memory_bytes,
            wire,
            setup.micro_batches * self.step.seconds(cluster.flops_per_s, cluster.memory_bytes_per_s)
            + step_traffic / cluster.memory_bytes_per_s,
            wire.link / cluster.link_bytes_per_s,
            wire.network / cluster.network_bytes_per_s,
            total.padding_ratio,
            total.copied_ratio,
        )

    def _temporaries(self, report: PlanReport, index: int) -> int:
        """Return the bytes that the optimizer's step allocates, for the report's number of shards at ``index``."""
        params = []
        for group in report.groups:
            dtype, _, frozen = group.dtype.partition(", ")
            if frozen:
                continue
            lengths = {
                slot.fqn: layout.piece_lengths(slot)
                for layout in group.layouts[index]
                for slot in layout.slots
            }
            for unit in group.units:
                for each in group.params:
                    name = f"{unit}.{each.fqn}" if unit else each.fqn
                    params.append(
                        SteppedShape(
                            each.shape, getattr(torch, dtype), lengths[each.fqn], name in self.special
                        )
                    )
        replicas = self.setup.cluster.gpus // report.shards[index]
        return step_bytes(self.setup.optimizer, params, replicas, on_cpu=self.setup.cluster.on_cpu)

    def _states(self) -> dict[str, float]:
        """Return the bytes of each whole parameter's state; note which ones are not stepped as by AdamW."""
        name = self.setup.optimizer
        if name == "muon" and self.matrices is None:
            self.matrices = {id(each) for each in Muon.split_params(self.model)[0]}
        rule = AdamW8bit.granularity()
        states = {}
        self.special = set()
        for shape in self.shapes:
            per_item = 2.0 * itemsize_of(shape.dtype)
            block = resolve_granularity(rule, shape.fqn, shape).block_numel(shape.shape)
            if name == "none":
                per_item = 0
            elif name == "muon" and self.matrices is not None and id(shape.param) in self.matrices:
                per_item /= 2
                self.special.add(shape.fqn)
            elif name == "adamw8bit" and block > 1:  # two codes, and two fp32 scales per block
                per_item = 2 + 8 / block
                self.special.add(shape.fqn)
            elif name == "adamw8bit":
                per_item = 8
            states[shape.fqn] = per_item * numel_of(shape.shape)
        return states

    def report_of(self, candidate: ShardingCandidate) -> PlanReport:
        """Return the layouts of a candidate."""
        return plan_report(self.model, [candidate.shard_size], self.setup.rule, units=candidate.units)

    def code_of(self, candidate: ShardingCandidate) -> Iterator[str]:
        """Yield the lines of Python that shard the model as a candidate does."""
        return code_lines(self.model, self.blocks, self.setup, candidate)

    def variant(self, scale: float = 1, **changes: Any) -> _Planner:
        """Return the planner of a changed setup, with ``scale`` times the activations and arithmetic."""
        other = copy.copy(self)
        other.setup = replace(self.setup, **changes)
        other.states = other._states()
        is_recomputed = other.setup.checkpointing
        if is_recomputed not in self.steps:
            self.steps[is_recomputed] = other._measured()
        other.step = self.steps[is_recomputed]
        if scale != 1:
            other.step = other.step.scaled(scale)
        return other


def _deepest(name: str, modules: Collection[str]) -> str:
    """Return the deepest of the modules that is ``name`` or contains it; "" if none does."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


class _Remedy(NamedTuple):
    """A change with which the model fits, and its plan."""

    name: str
    planner: _Planner
    candidate: ShardingCandidate

    @property
    def text(self) -> str:
        free = format_bytes(self.candidate.memory_bytes - self.candidate.needed_bytes)
        rank = self.planner.setup.cluster.rank_name
        return (
            f"    {self.name}: {self.candidate.verdict}, {free} free per {rank} ({self.candidate.sharding})"
        )


def _remedies(planner: _Planner, best: ShardingCandidate) -> list[_Remedy]:
    """Return what helps a model that does not fit, or fits tightly, as its ``best`` candidate does.

    Single changes, or else pairs of changes, each planned again.
    """
    setup = planner.setup
    changes: dict[str, dict[str, Any]] = {}
    if planner.batch is not None and planner.blocks and not setup.checkpointing:
        changes["recomputed activations (checkpointing)"] = {"checkpointing": True}
    if setup.optimizer in ("adamw", "muon") and setup.granularity is None:
        changes["8-bit optimizer state (adamw8bit)"] = {"optimizer": "adamw8bit"}
    if setup.optimizer == "adamw" and setup.micro_batches == 1:
        changes["steps in the backward, step_in_backward(model, optimizer)"] = {"steps_early": True}
    if planner.batch is not None:
        changes[f"half the tokens per {setup.cluster.rank_name}"] = {"scale": 0.5}
    counts = [setup.cluster.gpus * factor // 2 for factor in (3, 4, 6, 8, 16, 32)]
    per_node = setup.cluster.per_node
    clusters = [
        replace(setup.cluster, gpus=count) for count in counts if count <= per_node or not count % per_node
    ]
    for count in (1, 2):
        found = []
        for chosen in combinations(changes, count):
            found += _helping(planner, best, "; ".join(chosen), [changes[name] for name in chosen])
        for chosen in combinations(changes, count - 1):
            for cluster in clusters:  # the least number that helps
                name = "; ".join((f"{cluster.gpus} {cluster.rank_name}s", *chosen))
                both = [{"cluster": cluster}, *(changes[each] for each in chosen)]
                if helping := _helping(planner, best, name, both):
                    found += helping
                    break
        if found:
            return found
    return []


def _helping(
    planner: _Planner, before: ShardingCandidate, name: str, changes: Sequence[Mapping[str, Any]]
) -> list[_Remedy]:
    """Return the remedy of some changes of the setup, if the model's verdict is better with them than ``before``."""
    merged = {key: value for each in changes for key, value in each.items()}
    if "steps_early" in merged and "optimizer" in merged:  # only torch's optimizers step in the backward
        return []
    changed = planner.variant(**merged)
    best = changed.candidates()[0]
    return (
        [_Remedy(name, changed, best)]
        if _VERDICTS.index(best.verdict) < _VERDICTS.index(before.verdict)
        else []
    )


def _too_large(planner: _Planner, best: ShardingCandidate) -> str:
    """Return the line of advice for a model that no change makes fit."""
    peak, setup = best.peak, planner.setup
    kept = peak.weights + peak.states
    if kept > best.memory_bytes:  # whatever the size of units
        return (
            f"    none of the changes that were tried: on {setup.cluster.gpus} {setup.cluster.rank_name}s, weights and "
            f"optimizer states alone take {format_bytes(kept)} per {setup.cluster.rank_name}, of "
            f"{format_bytes(best.memory_bytes)}. Use many more {setup.cluster.rank_name}s, or more memory for each"
        )
    if peak.activations > peak.gathered + peak.gradients:
        return (
            f"    none of the changes that were tried: activations take {format_bytes(peak.activations)}. Use fewer "
            "tokens per GPU, or divide them by tensor or context parallelism, which is not planned here"
        )
    unit = max(planner.report_of(best).rows, key=lambda row: row.payload_numel)
    nbytes = unit.payload_numel * setup.param_dtype.itemsize
    return (
        f"    none of the changes that were tried: {unit.group} takes {format_bytes(nbytes)} while it is gathered, the "
        f"unit after it as much, and its gradients {format_bytes(nbytes + unit.payload_numel * _REDUCED)}. Make units "
        "smaller, or divide them by tensor or expert parallelism, which is not planned here"
    )


def _notes(planner: _Planner) -> Iterator[str]:
    """Yield the assumptions of a plan."""
    setup, cluster = planner.setup, planner.setup.cluster
    dtype = str(setup.param_dtype).removeprefix("torch.")
    stored = ", ".join(sorted({shape.dtype for shape in planner.shapes}))
    yield f"weights in {stored}, compute in {dtype}, reductions in float32; optimizer: {setup.optimizer}"
    if planner.batch is None:
        yield "activations and arithmetic are left out, since there is no batch"
    else:
        how = (
            "recomputed per block"
            if setup.checkpointing and planner.blocks
            else "kept, as the model itself keeps them"
        )
        yield f"activations are measured on the meta device and {how}; attention by flash attention's formula"
        flops = in_unit(
            setup.micro_batches * planner.step.flops, (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))
        )
        yield f"{flops} per {cluster.rank_name} and step; operators one by one, as without a compiler"
        tensors = [each for each in pytree.tree_leaves(planner.batch) if isinstance(each, torch.Tensor)]
        kinds = dict.fromkeys(f"{each.dtype} {list(each.shape)}".removeprefix("torch.") for each in tensors)
        text = f"micro-batch of each {cluster.rank_name}: {', '.join(kinds)}; {setup.micro_batches} per step"
        if len(kinds) == 1 and tensors[0].dtype == torch.int64:  # indices of tokens
            text += f", {tensors[0].numel() * setup.micro_batches * cluster.gpus:,} tokens on all"
        yield text
    if setup.micro_batches > 1:
        yield "the last micro-batch also reduces over replicas and nodes, where the sharding has them"
    if cluster.on_cpu:
        yield "no times, because none are known of your CPUs"
    else:
        yield (
            f"bounds from {cluster.flops_per_s / 1e12:,.0f} TFLOP/s, memory at "
            f"{format_bytes(int(cluster.memory_bytes_per_s))}/s, links of a node at "
            f"{format_bytes(int(cluster.link_bytes_per_s))}/s, network at "
            f"{format_bytes(int(cluster.network_bytes_per_s))}/s per GPU: no step is faster, and most are slower"
        )
        yield "other: an estimate of CUDA, cuBLAS and NCCL, which no GPU has confirmed"
    yield (
        "not planned: fragmentation, memory of hosts, latencies, offloading, and tensor, pipeline, expert and context "
        f"parallelism{', messages of Muon' * (setup.optimizer == 'muon')}"
    )
