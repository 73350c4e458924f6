"""Plans of a training: traffic and arithmetic by hand, ranking, advice, errors; the printed lines run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.support.distributed import run_ranks
from vescale_fsdp import Cluster, FSDPModule, Rows, TrainingPlan, plan_training
from vescale_fsdp.errors import ArgumentError, format_bytes
from vescale_fsdp.layout.geometry import RunLengths
from vescale_fsdp.planning.meta_step import StorageMeter, measure_step
from vescale_fsdp.planning.optimizer_step import SteppedShape, step_bytes

WIDTH, DEPTH = 64, 4
NUMEL = DEPTH * WIDTH**2


def stack() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


class Model(nn.Module):
    """An embedding, blocks in a list, others in a dict with a dot-free odd name, and a head."""

    def __init__(self, vocab: int = 512, depth: int = DEPTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.odd = nn.ModuleDict({"a-b": nn.Linear(WIDTH, WIDTH)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.embed(tokens)
        for block in self.blocks:
            rows = rows + block(rows)
        result: torch.Tensor = self.head(self.norm(self.odd["a-b"](rows)))
        return result


def on_meta(make: Any, *args: Any) -> Any:
    with torch.device("meta"):
        return make(*args)


def plan_of(model: nn.Module, cluster: Cluster, tokens: int = 256, **options: Any) -> TrainingPlan:
    batch = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    return plan_training(model, cluster, batch=batch, loss=lambda output: output.float().mean(), **options)


def test_traffic_is_the_least_of_each_wire() -> None:
    """Two gathers in bf16 and a reduction in fp32; with replicas an all-reduce of each shard."""
    plan = plan_training(on_meta(stack), Cluster(16, 4), batch=torch.empty(8, WIDTH, device="meta"))
    wire = {(each.shard_size, each.keeps): each.wire for each in plan.candidates if not each.is_hybrid}
    sent = NUMEL * (2 + 2 + 4)
    assert wire[16, 1] == pytest.approx((sent * 3 / 4, sent * 3 / 4 / 4))
    assert wire[4, 1] == pytest.approx((sent * 3 / 4, 2 * 4 * NUMEL / 4 * 3 / 4))
    kept = NUMEL * (2 + 4)  # gathered once
    assert wire[16, 0] == pytest.approx((kept * 3 / 4, kept * 3 / 4 / 4))
    # The second gather stays in the node.
    assert wire[16, 4] == pytest.approx((sent * 3 / 4, kept * 3 / 4 / 4))


def test_a_hybrid_cut_crosses_nodes_once() -> None:
    """With one gather and one reduction; it stores a node's share of bf16 weights, and else what FSDP does."""
    plan = plan_training(on_meta(stack), Cluster(16, 4), batch=torch.empty(8, WIDTH, device="meta"))
    hybrid, plain = (
        next(
            each
            for each in plan.candidates
            if each.keeps == 1 and each.shard_size == 16 and is_it is each.is_hybrid
        )
        for is_it in (True, False)
    )
    sent, crossing = NUMEL * (2 + 2 + 4), NUMEL * (2 + 4)
    assert hybrid.wire == pytest.approx((sent * 3 / 4, crossing * 3 / 4 / 4))
    assert (hybrid.peak.weights, hybrid.peak.states) == (plain.peak.weights, plain.peak.states)
    assert hybrid.peak.gathered - plain.peak.gathered == 2 * NUMEL // 4
    assert hybrid.sharding == "hybrid 4 x 4" and hybrid.code.count('shard_optimizer_over="node"') == 2
    # Further micro-batches stay in the node.
    four = plan_training(on_meta(stack), Cluster(16, 4), micro_batches=4)
    wires = {each.sharding: each.wire for each in four.candidates if each.keeps == 1}
    assert wires["hybrid 4 x 4"] == pytest.approx((4 * sent * 3 / 4, crossing * 3 / 4 / 4))
    assert wires["FSDP 16"] == pytest.approx((4 * sent * 3 / 4, 4 * sent * 3 / 4 / 4))
    assert wires["HSDP 4 x 4"] == pytest.approx((4 * sent * 3 / 4, 2 * 4 * NUMEL / 4 * 3 / 4))
    assert four.candidates[0].is_hybrid
    assert not any(each.is_hybrid for each in plan_training(on_meta(stack), Cluster(4, 4)).candidates)
    assert not any(each.is_hybrid for each in plan_training(on_meta(stack), Cluster(4, 1)).candidates)


def test_arithmetic_is_that_of_the_products() -> None:
    """Three products per weight, without the gradient of the batch; and the bound is the slowest resource."""
    rows = 8
    cluster = Cluster(16, 4, flops_per_s=1e6)
    batch = torch.empty(rows, WIDTH, device="meta")
    step = measure_step(on_meta(stack), batch, [], dtype=torch.bfloat16)
    assert step.flops == 6 * rows * NUMEL - 2 * rows * WIDTH**2
    slow = plan_training(on_meta(stack), cluster, batch=batch).candidates[0]
    assert slow.compute_s >= step.flops / 1e6 and slow.step_s == max(
        slow.compute_s, slow.link_s, slow.network_s
    )
    assert slow.limit == "compute"
    unbound = plan_training(
        on_meta(stack), Cluster(16, 4, flops_per_s=1e18, network_bytes_per_s=1e3), batch=batch
    )
    assert unbound.candidates[0].limit == "network"


class _Attention(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        heads = rows.view(1, 4, -1, WIDTH // 4)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def test_attention_follows_the_formula_of_flash() -> None:
    """No score is stored; half of all pairs are computed, and five products in the backward for two in the forward."""

    def measured(length: int) -> Any:
        rows = torch.empty(1, 4 * length, WIDTH // 4, device="meta", requires_grad=True)
        model = nn.Sequential(nn.Linear(WIDTH // 4, WIDTH // 4, bias=False), _Attention())
        return measure_step(model.to("meta"), rows, ["1"], dtype=torch.float32)

    short, long = measured(512), measured(1024)
    peaks = [max(window.peak_bytes for window in step.windows) for step in (short, long)]
    assert peaks[1] == pytest.approx(2 * peaks[0], rel=0.01)
    scores = 2 * 2 * 1024**2 * WIDTH // 2
    linear = 3 * 2 * 4 * 1024 * (WIDTH // 4) ** 2
    assert long.flops == scores * 7 // 2 + linear


def test_gradients_that_are_written_away_are_not_in_the_peak() -> None:
    """On the CPU; elsewhere all gradients of a window are kept to its end."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)]
    step = measure_step(
        nn.Sequential(*layers).to("meta"),
        torch.empty(1, WIDTH, device="meta"),
        [],
        dtype=torch.float32,
    )
    grad = 4 * WIDTH**2
    backward = max(step.windows, key=lambda window: window.peak_bytes)
    assert backward.is_backward and backward.peak_bytes >= 8 * grad and backward.grad_bytes == 8 * grad
    assert grad <= backward.written_peak_bytes < 3 * grad


def test_recomputed_activations_are_fewer_and_cost_a_forward() -> None:
    """Of the blocks; peaks fall, and arithmetic grows by at most a third."""
    plans = [plan_of(on_meta(Model), Cluster(8), 4096, checkpointing=each) for each in (False, True)]
    kept, recomputed = (plan.candidates[0] for plan in plans)
    assert recomputed.peak.activations < 0.8 * kept.peak.activations
    assert kept.compute_s < recomputed.compute_s < 1.4 * kept.compute_s


def test_what_fits_comes_first() -> None:
    """With memory the candidate with least traffic; with less, the next one that fits; then none, and by how much."""
    model = on_meta(Model)
    rich = plan_of(model, Cluster(8))
    needs = sorted(each.needed_bytes for each in rich.candidates)
    assert rich.candidates[0].keeps == 0 and rich.fits
    assert [each.verdict for each in rich.candidates] == ["fits"] * len(needs)

    poor = plan_of(model, Cluster(8, memory_bytes=needs[0] - 1))
    best = poor.candidates[0]
    assert not poor.fits and best.needed_bytes == needs[0] and best.verdict == "does not fit"
    tight = plan_of(model, Cluster(8, memory_bytes=needs[0])).candidates[0]
    assert (tight.verdict, tight.needed_bytes) == ("tight", needs[0])


def test_advice_is_planned_again() -> None:
    """Each line of it fits; what cannot help is not among them."""
    model, tokens = on_meta(Model, 64, 8), 16_384
    recomputed = plan_of(model, Cluster(8), tokens, checkpointing=True)
    least = min(each.needed_bytes for each in recomputed.candidates)
    plan = plan_of(model, Cluster(8, memory_bytes=int(least * 1.01)), tokens)
    assert not plan.fits and any("checkpointing" in line for line in plan.advice[1:])
    assert not any("GPUs" in line for line in plan.advice[1:])  # activations make up the peak
    hopeless = plan_of(model, Cluster(8, memory_bytes=1000), tokens)
    assert len(hopeless.advice) == 2 and hopeless.code.endswith(hopeless.candidates[0].code)

    # What is too large, is named: weights and states alone, or what comes to them.
    peak = hopeless.candidates[0].peak
    kept = peak.weights + peak.states
    assert format_bytes(kept) in hopeless.advice[1]
    larger = plan_of(model, Cluster(8, memory_bytes=kept), tokens)
    assert not larger.fits and not any(format_bytes(kept) in line for line in larger.advice)


def test_what_fits_tightly_gets_advice_too() -> None:
    """Each line of it is of a plan that fits; the printed lines are those of the best candidate, without a change."""
    model, tokens = on_meta(Model, 64, 8), 16_384
    rich = plan_of(model, Cluster(8), tokens)
    assert rich.candidates[0].verdict == "fits" and not rich.advice
    least = min(each.needed_bytes for each in rich.candidates)
    tight = plan_of(model, Cluster(8, memory_bytes=int(least * 1.01)), tokens)
    assert tight.candidates[0].verdict == "tight" and tight.code == tight.candidates[0].code
    assert tight.advice[1:] and all(": fits, " in line for line in tight.advice[1:])


def test_advice_has_the_least_number_of_gpus_that_was_tried() -> None:
    """Also one and a half times as many, if these fill whole nodes."""
    model = on_meta(Model, 4096)
    needs = [
        min(each.needed_bytes for each in plan_of(model, Cluster(gpus, 8)).candidates) for gpus in (16, 24)
    ]
    assert needs[1] < needs[0]
    for memory_bytes, gpus in ((needs[1], 24), (needs[1] - 1, 32)):
        advice = plan_of(model, Cluster(16, 8, memory_bytes=memory_bytes)).advice
        assert [line.split()[0] for line in advice if "GPUs:" in line] == [str(gpus)]
    advice = plan_of(model, Cluster(8, 8, memory_bytes=needs[1])).advice  # 12 GPUs are no whole nodes
    assert [line.split()[0] for line in advice if "GPUs:" in line] == ["24"]


@pytest.mark.parametrize("gpus", [3, 6])
def test_a_part_of_a_node_has_a_plan(gpus: int) -> None:
    """Advice of more GPUs names those that fill a node, or whole nodes."""
    assert not plan_of(on_meta(Model), Cluster(gpus, memory_bytes=1)).fits


def test_the_lines_of_a_plan_fit() -> None:
    """If the model does not fit as asked, they are those of the first change that helps: here 8-bit state."""
    model, cluster = on_meta(Model, 64, 32), Cluster(2, on_cpu=True)
    options: dict[str, Any] = {"tokens": 8, "checkpointing": True}
    smaller = plan_of(model, cluster, optimizer="adamw8bit", **options)
    cluster = replace(cluster, memory_bytes=min(each.needed_bytes for each in smaller.candidates))
    plan, fitting = (plan_of(model, cluster, optimizer=name, **options) for name in ("adamw", "adamw8bit"))
    assert fitting.fits and not plan.fits
    assert plan.code.splitlines()[1:] == fitting.code.splitlines()


def stepped_by_backward(code: str) -> int:
    """Run the lines of a plan and a backward, without a step; the number of parameters that have changed on a rank."""
    lines: dict[str, Any] = {"model": Model()}
    exec(code, lines)  # noqa: S102
    model = lines["model"]
    before = [param.to_local().detach().clone() for param in model.parameters()]
    model(torch.arange(16)[None]).float().pow(2).mean().backward()
    after = [param.to_local() for param in model.parameters()]
    return sum(bool((new - old).norm() > 0) for old, new in zip(before, after, strict=True))


def test_the_lines_of_a_plan_step_early() -> None:
    """If that is the first change that helps: a backward changes parameters."""
    cluster = Cluster(2, on_cpu=True)
    options: dict[str, Any] = {"tokens": 8, "checkpointing": True, "granularity": "element"}
    plan = plan_of(on_meta(Model), cluster, **options)
    needed = min(each.needed_bytes for each in plan.candidates)
    plan = plan_of(on_meta(Model), replace(cluster, memory_bytes=needed - 1), **options)
    assert not plan.fits and min(run_ranks(2, stepped_by_backward, plan.code)) > 0


def test_optimizers_differ_in_state() -> None:
    """Two fp32 numbers per weight, or two bytes, or one number for matrices."""
    states = {
        name: plan_of(on_meta(Model), Cluster(2), optimizer=name).candidates[0].peak.states
        for name in ("none", "adamw8bit", "muon", "adamw")
    }
    numel = sum(param.numel() for param in Model().parameters())
    matrices = DEPTH * 2 * 4 * WIDTH**2 + WIDTH**2
    assert states["none"] == 0
    assert states["adamw"] == pytest.approx(8 * numel / 2, rel=0.02)
    assert states["muon"] == pytest.approx((8 * numel - 4 * matrices) / 2, rel=0.02)
    assert states["adamw8bit"] == pytest.approx(2.03 * numel / 2, rel=0.05)


def step_of(optimizer: str, *pieces: list[int], is_special: bool = True, on_cpu: bool = True) -> int:
    """What a step of fp32 matrices of 64 columns allocates, by the elements on each rank."""
    params = [
        SteppedShape((sum(each) // 64, 64), torch.float32, RunLengths.of(each), is_special) for each in pieces
    ]
    return step_bytes(optimizer, params, 1, on_cpu=on_cpu)


def test_steps_of_muon_allocate() -> None:
    """An update of all pieces, and for one matrix: what was sent and received, and five matrices of an iteration."""
    matrix = 2 * 64 * 64  # in bf16
    assert step_of("muon", [2048, 2048]) == 4 * 2048 + 2 * 2048 + matrix + 5 * matrix
    assert step_of("muon", [4096, 0]) == 4 * 4096 + 5 * matrix  # whole, so nothing is sent
    # Of the rank that owns the larger matrix, which is the one with most of it.
    assert step_of("muon", [1024, 7168], [2048, 2048]) > 4 * (7168 + 2048) + 2 * 3 * 8192
    assert step_of("muon", [2048, 2048], is_special=False) == 0
    assert step_of("adamw", [2048, 2048]) == step_of("none", [2048, 2048]) == 0


@pytest.mark.parametrize("on_cpu", [True, False])
def test_steps_of_8_bit_adamw_allocate(on_cpu: bool) -> None:
    """Twelve fp32 copies of the largest piece; on an accelerator, of a batch, which is copied together itself."""
    one, two = (step_of("adamw8bit", *[[1024, 2048]] * count, on_cpu=on_cpu) for count in (1, 2))
    assert one == pytest.approx(48 * 2048, rel=0.01)
    assert two == one if on_cpu else two > 2.2 * one
    large = step_of("adamw8bit", *[[1 << 23, 1 << 23]] * 8, on_cpu=on_cpu)
    assert large == pytest.approx(48 << 23, rel=0.01)  # batches end
    assert step_of("adamw8bit", [2048, 2048], is_special=False, on_cpu=on_cpu) < one


def test_replicas_share_the_work_of_muon() -> None:
    """Four matrices over two ranks and two replicas, in a plan too."""
    params = [SteppedShape((WIDTH, WIDTH), torch.float32, RunLengths.of([2048] * 2), is_special=True)] * DEPTH
    alone, shared = (step_bytes("muon", params, replicas, on_cpu=False) for replicas in (1, 2))
    assert shared < alone
    plan = plan_training(on_meta(stack), Cluster(4, 2), optimizer="muon")
    peaks = {each.peak.temporaries for each in plan.candidates if each.sharding == "HSDP 2 x 2"}
    assert peaks == {shared}


def test_the_optimizers_traffic_and_the_libraries_memory() -> None:
    """Weights are read and written, gradients read, states read and written; each mesh axis has a communicator."""
    bytes_per_s, mib = 1e9, 1 << 20
    cluster = Cluster(16, 4, memory_bytes_per_s=bytes_per_s)
    for optimizer, states in (("none", 0), ("adamw", 8)):
        plan = plan_training(on_meta(stack), cluster, optimizer=optimizer)  # type: ignore[arg-type]
        plain = next(each for each in plan.candidates if each.sharding == "FSDP 16")
        assert plain.compute_s == pytest.approx((3 * 4 + 2 * states) * NUMEL / 16 / bytes_per_s)
    found = {each.sharding: each.library_bytes for each in plan.candidates}
    base = (512 + 64) * mib
    assert found["FSDP 16"] == base + 128 * mib and found["HSDP 4 x 4"] == base + 2 * 128 * mib
    assert found["hybrid 4 x 4"] == base + 3 * 128 * mib
    on_cpu = plan_training(on_meta(stack), Cluster(16, 4, on_cpu=True))
    assert {each.library_bytes for each in on_cpu.candidates} == {0}


def test_the_optimizers_step_has_the_peak_of_muon() -> None:
    """In plans, beside shards and gradients."""
    peak = plan_training(on_meta(Model), Cluster(2), optimizer="muon").candidates[-1].peak
    assert peak.moment == "optimizer's step" and peak.temporaries > 4 * DEPTH * 2 * 4 * WIDTH**2 / 2
    assert peak.gradients == peak.weights


def test_without_a_batch_weights_alone_are_planned() -> None:
    """Gradients and gathered weights, no activations and no arithmetic."""
    full = plan_of(on_meta(Model), Cluster(8), 1)
    bare = plan_training(on_meta(Model), Cluster(8))
    by_kind = {(each.wrapping, each.keeps): each for each in full.candidates}  # on one node
    for each in bare.candidates:
        assert each.peak.activations == 0
        other = by_kind[each.wrapping, each.keeps].peak
        assert each.peak.total == pytest.approx(other.total, rel=0.15)


def test_json_and_text_have_the_figures() -> None:
    """All candidates; what is printed names the best one first."""
    plan = plan_of(on_meta(Model), Cluster(16, 8))
    found = json.loads(json.dumps(plan.to_json()))
    assert [each["needed_bytes"] for each in found["candidates"]] == [c.needed_bytes for c in plan.candidates]
    assert found["candidates"][0]["peak"]["total"] == plan.candidates[0].peak.total
    assert found["candidates"][0]["step_s"] == plan.candidates[0].step_s > 0
    assert " --on-cpu," in plan.code and "Cluster(on_cpu=True)" in plan.code  # of the command, and of Python
    assert plan.code in str(plan) and plan.candidates[0].sharding in str(plan)
    (first, *_) = plan_of(on_meta(Model), Cluster(16, 8, on_cpu=True)).to_json()["candidates"]
    assert first["step_s"] is first["limit"] is None and first["needed_bytes"] > 0  # of CPUs nothing is known


def test_layouts_are_drawn(tmp_path: Any) -> None:
    """Those of the best candidate."""
    plan = plan_of(on_meta(Model), Cluster(8), granularity={"*weight": Rows(4)})
    files = plan.save(tmp_path)
    assert files and all(file.stat().st_size for file in files)
    assert plan.report.shards == (plan.candidates[0].shard_size,)


BAD_CLUSTERS: list[dict[str, Any]] = [
    {"gpus": 12},
    {"gpus": 0},
    {"gpus": 8, "per_node": -1},
    {"gpus": 8.0},
    {"gpus": True},
    {"gpus": 8, "memory_bytes": 0},
    {"gpus": 8, "network_bytes_per_s": float("nan")},
    {"gpus": 8, "flops_per_s": "fast"},
]


@pytest.mark.parametrize("fields", BAD_CLUSTERS, ids=str)
def test_impossible_clusters_are_refused(fields: dict[str, Any]) -> None:
    """By the value itself; fewer GPUs than a node are one node."""
    with pytest.raises(ArgumentError):
        Cluster(**fields)
    assert Cluster(3, 8).num_nodes == 1 and list(Cluster(3, 8).shard_sizes()) == [3]


class _Counting(nn.Module):
    """Reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.weight * rows.sum().item()


def test_models_that_cannot_be_planned_are_refused() -> None:
    """With weights, an unknown optimizer, an integer type, and a forward that reads values."""
    batch = torch.empty(2, 4, device="meta")
    with pytest.raises(ArgumentError):
        plan_training(nn.Linear(4, 4), Cluster(8))
    with pytest.raises(ArgumentError):
        plan_training(on_meta(nn.Linear, 4, 4), Cluster(8), optimizer="sgd")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError):
        plan_training(on_meta(nn.Linear, 4, 4), Cluster(8), param_dtype=torch.int8)
    for count in (0, -1, 1.5):
        with pytest.raises(ArgumentError):
            plan_training(on_meta(nn.Linear, 4, 4), Cluster(8), micro_batches=count)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError):
        plan_training(on_meta(_Counting), Cluster(8), batch=batch)


def train(code: str) -> tuple[int, list[int]]:
    """Run the lines of a plan and a step; the number of units, and gradients of each dtype size."""
    torch.manual_seed(0)
    lines: dict[str, Any] = {"model": Model()}
    exec(code, lines)  # noqa: S102
    model = lines["model"]
    model(torch.arange(16)[None]).float().pow(2).mean().backward()
    lines["optimizer"].step()
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    return units, [param.grad.to_local().numel() for param in model.parameters()]


@pytest.mark.parametrize(
    ("optimizer", "memory_bytes", "checkpointing"),
    [("adamw", 10**12, True), ("adamw8bit", 1, False), ("muon", 1, True)],
)
def test_the_printed_lines_run(optimizer: Any, memory_bytes: int, checkpointing: bool) -> None:
    """On two ranks: the units of the plan, each with a gradient."""
    cluster = Cluster(2, on_cpu=True, memory_bytes=memory_bytes)
    plan = plan_of(
        on_meta(Model),
        cluster,
        optimizer=optimizer,
        checkpointing=checkpointing,
        granularity={"0.weight": Rows(2), "*bias": "rows:4"} if optimizer == "adamw" else None,
    )
    ranks = run_ranks(2, train, plan.code)
    assert {units for units, _ in ranks} == {len(plan.candidates[0].units) + 1}
    numels = [sum(each) for each in zip(*(grads for _, grads in ranks), strict=True)]
    assert numels == [param.numel() for param in Model().parameters()]


def small_llama(**options: Any) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        **options,
    )


class OwnLlama(transformers.LlamaForCausalLM):
    """A subclass of a user, which transformers does not have."""


def logits_of_plan(code: str, folder: str) -> torch.Tensor:
    """Run the lines of a plan with those in comments, and a forward; the logits of a rank."""
    lines: dict[str, Any] = {"FOLDER": folder}
    exec(re.sub("^# ", "", code, flags=re.MULTILINE), lines)  # noqa: S102
    return lines["model"](torch.arange(16)[None]).logits.detach()


@pytest.mark.parametrize(
    ("make", "stored"), [(transformers.LlamaForCausalLM, torch.bfloat16), (OwnLlama, torch.float32)]
)
def test_the_lines_in_comments_load_the_weights(make: Any, stored: torch.dtype, tmp_path: Path) -> None:
    """On two ranks, of files in either dtype, into fp32: the logits are those of transformers' own loading."""
    config = small_llama()
    torch.manual_seed(0)
    make(config).to(stored).save_pretrained(tmp_path)
    plan = plan_training(on_meta(make, config), Cluster(2, on_cpu=True), param_dtype=torch.float32)
    plain = make.from_pretrained(tmp_path, dtype=torch.float32)
    expected = plain(torch.arange(16)[None]).logits
    for logits in run_ranks(2, logits_of_plan, plan.code, str(tmp_path)):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
    assert expected.abs().max() > 0.1


def grads_of(model: Any) -> list[Any]:
    """Train a step; the gradients of the embedding and of the first layer."""
    tokens = torch.arange(32)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    chosen = ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight")
    return [param.grad for name, param in model.named_parameters() if name.endswith(chosen)]


def grads_of_plan(code: str, make: Any) -> list[torch.Tensor]:
    """Run the lines of a plan on a seeded model; its gradients."""
    torch.manual_seed(0)
    lines: dict[str, Any] = {"model": make().train()}
    exec(code, lines)  # noqa: S102
    return [grad.full_tensor() for grad in grads_of(lines["model"])]


def eager_llama() -> Any:
    """A model whose recomputed blocks raise an error if they append to a cache of keys and values again."""
    return transformers.LlamaForCausalLM(small_llama(attn_implementation="eager"))


def trained_params(code: str) -> list[int]:
    """Run the lines of a plan on a model with a frozen embedding; the numbers of parameters that the optimizer gets."""
    lines: dict[str, Any] = {"model": half_frozen()}
    exec(code, lines)  # noqa: S102
    (group,) = lines["optimizer"].param_groups
    return [sum(param.requires_grad is wanted for param in group["params"]) for wanted in (True, False)]


def half_frozen() -> Model:
    model = Model()
    next(model.parameters()).requires_grad_(False)
    return model


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_frozen_parameters_are_not_given_to_the_optimizer(optimizer: Any) -> None:
    """A checkpoint can then leave them out, as under LoRA."""
    plan = plan_of(on_meta(half_frozen), Cluster(2, on_cpu=True), optimizer=optimizer)
    expected = [len([*Model().parameters()]) - 1, 0]
    assert run_ranks(2, trained_params, plan.code) == [expected, expected]


class Wrapped(nn.Module):
    """A module around a model of transformers, as peft's are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = eager_llama()

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


@pytest.mark.parametrize("make", [eager_llama, Wrapped])
def test_models_with_a_cache_are_recomputed(make: Any) -> None:
    """The plan is that of a forward without a cache, and the printed lines train like the plain model."""
    batch = dict.fromkeys(("input_ids", "labels"), torch.zeros(1, 32, dtype=torch.int64, device="meta"))
    cluster = Cluster(2, on_cpu=True)
    plan, without = (
        plan_training(on_meta(make), cluster, batch=each, checkpointing=True, param_dtype=torch.float32)
        for each in (batch, batch | {"use_cache": False})
    )
    assert plan.candidates == without.candidates
    torch.manual_seed(0)
    plain = make().train()
    assert any(
        isinstance(each, transformers.LlamaForCausalLM) and each.config.use_cache for each in plain.modules()
    )
    expected = grads_of(plain)
    for grads in run_ranks(2, grads_of_plan, plan.code, make):
        torch.testing.assert_close(grads, expected)
    assert len(expected) == 2 and all(grad.abs().max() > 0 for grad in expected)


def train_counting(code: str) -> tuple[int, int]:
    """Run the lines of a plan and a step; the number of units, and of forwards of the first layer."""
    lines: dict[str, Any] = {"model": Model()}
    exec(code, lines)  # noqa: S102
    model, calls = lines["model"], []
    inner = next(module for module in model.modules() if isinstance(module, nn.Linear))
    inner.register_forward_hook(lambda *_: calls.append(1))
    model(torch.arange(16)[None]).float().pow(2).mean().backward()
    lines["optimizer"].step()
    return sum(isinstance(module, FSDPModule) for module in model.modules()), len(calls)


@pytest.mark.parametrize("way", ["nested units", "units beside the blocks", "blocks"])
def test_blocks_are_recomputed_whatever_the_units_are(way: str) -> None:
    """Inner units are sharded first; a block that is no unit is recomputed too."""
    blocks = plan_of(on_meta(Model), Cluster(2, on_cpu=True), checkpointing=True).candidates[0].units
    inner = [name for name, _ in Model().named_modules() if name.rpartition(".")[0] in blocks]
    units = {"nested units": [*blocks, inner[0]], "units beside the blocks": [inner[0]], "blocks": None}[way]
    plan = plan_of(on_meta(Model), Cluster(2, on_cpu=True), checkpointing=True, units=units)
    for num_units, num_calls in run_ranks(2, train_counting, plan.code):
        assert num_units == len(plan.candidates[0].units) + 1 and num_calls == 2


@pytest.mark.part("numerics")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_printed_lines_run_with_a_hybrid_cut(optimizer: Any) -> None:
    """On four ranks, as two nodes: of every such candidate, whose parameters are sharded over all ranks."""
    plan = plan_of(on_meta(Model), Cluster(4, 2, on_cpu=True), optimizer=optimizer)
    candidates = [each for each in plan.candidates if each.is_hybrid]
    assert {each.keeps for each in candidates} == {0, 1}
    for each in candidates if optimizer == "adamw" else candidates[:1]:
        ranks = run_ranks(4, train, each.code)
        assert {units for units, _ in ranks} == {len(each.units) + 1}
        numels = [sum(each) for each in zip(*(grads for _, grads in ranks), strict=True)]
        assert numels == [param.numel() for param in Model().parameters()]


@pytest.mark.part("numerics")
def test_the_printed_lines_run_with_replicas() -> None:
    """On four ranks, as two nodes; whole matrices would be padded over all of them."""
    cluster = Cluster(4, 2, on_cpu=True, network_bytes_per_s=1.0)
    plan = plan_of(on_meta(Model), cluster, granularity="whole")
    assert plan.candidates[0].replicas == 2
    assert {units for units, _ in run_ranks(4, train, plan.code)} == {len(plan.candidates[0].units) + 1}


class Failing(nn.Linear):
    """A model whose settings lack what its forward needs, as configs of transformers may."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no decoder_start_token_id")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_error_of_the_forward_is_named(dtype: torch.dtype) -> None:
    """Of any class; in a dtype that few models can compute in on the meta device, the other one is advised."""
    model = Failing(4, 4, device="meta")
    with pytest.raises(ArgumentError) as caught:
        plan_training(model, Cluster(2), batch=torch.empty(2, 4, device="meta"), param_dtype=dtype)
    assert isinstance(caught.value.__cause__, AttributeError)
    assert "decoder_start_token_id" in str(caught.value)
    assert ("bf16" in str(caught.value)) is (dtype == torch.float16)


def test_memory_that_a_given_tensor_has_left_is_counted() -> None:
    """Storages that were there before are not counted; new ones are, even if they get the address of a freed one."""
    given = [torch.empty(100, device="meta") for _ in range(200)]
    with StorageMeter() as meter:
        for each in given:
            each.add_(1)
        assert meter.peak == 0
        given.clear()
        del each
        made = [torch.empty(100, device="meta") for _ in range(200)]
    assert meter.peak == 400 * len(made)


class Experts(nn.Module):
    """Rows of tokens in equal groups, each times the matrix of its expert."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 64, 64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        ends = torch.arange(1, 5, device=rows.device, dtype=torch.int32) * (rows.shape[0] // 4)
        return torch._grouped_mm(rows, self.weight.transpose(1, 2), offs=ends)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_grouped_products_are_planned_in_any_dtype(dtype: torch.dtype) -> None:
    """The same arithmetic as in bf16, and activations in proportion to the dtype."""
    steps = [
        measure_step(
            on_meta(lambda: nn.Sequential(Experts(), nn.ReLU(), Experts())),
            torch.empty(256, 64, device="meta", dtype=each),
            (),
            dtype=each,
            loss=lambda output: output.square().sum(),
        )
        for each in (torch.bfloat16, dtype)
    ]
    assert steps[0].flops == steps[1].flops == 2 * 3 * 2 * 256 * 64 * 64 - 2 * 256 * 64 * 64
    ratio = dtype.itemsize / 2
    peaks = [max(window.peak_bytes for window in step.windows) for step in steps]
    assert peaks[1] == pytest.approx(ratio * peaks[0], rel=0.01)


def test_candidates_that_fit_tightly_are_sorted_by_memory() -> None:
    """Those that fit are sorted by time; of tight ones the first has the most room."""
    roomy = plan_of(on_meta(Model), Cluster(16, 8, memory_bytes=10**10)).candidates
    assert {each.verdict for each in roomy} == {"fits"}
    assert [each.step_s for each in roomy] == pytest.approx(sorted(each.step_s for each in roomy), rel=0.05)
    most = int(min(each.needed_bytes for each in roomy) * 1.1)
    tight = plan_of(on_meta(Model), Cluster(16, 8, memory_bytes=most)).candidates
    sizes = [each.needed_bytes for each in tight if each.verdict == "tight"]
    assert len(sizes) > 2
    assert sizes == sorted(sizes)
    assert sizes != [each.needed_bytes for each in roomy if each.needed_bytes in sizes]


def test_a_plan_for_cpus_has_no_times() -> None:
    """Bandwidths of GPUs would bound nothing there."""
    on_cpu, on_gpu = (str(plan_of(on_meta(Model), Cluster(2, on_cpu=each))) for each in (True, False))
    assert "CPU" in on_cpu
    for word in ("TFLOP/s", "milliseconds", "no step is faster"):
        assert word in on_gpu
        assert word not in on_cpu
