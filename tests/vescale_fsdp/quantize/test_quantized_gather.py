"""Gathering weights as 8-bit codes: what is computed with, what travels, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.faults.rounding_noise import exact_products
from tests.support.optim_cases import full_value
from vescale_fsdp import fully_shard
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.quantize import BlockCodec, Fp8Blocks, Mxfp8, QuantizedGather

CODECS: dict[str, BlockCodec] = {"fp8": Fp8Blocks(16, 16), "fp8-rows": Fp8Blocks(1, 16), "mxfp8": Mxfp8()}


def make_model() -> nn.Sequential:
    """An embedding, matrices of odd shapes and their biases."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(40, 24), nn.Linear(24, 70), nn.GELU(), nn.Linear(70, 40))


def run_model(model: nn.Module, dtype: torch.dtype | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and gradients on the same tokens on every rank."""
    tokens = torch.arange(32).view(4, 8)
    output = model(tokens)
    nn.functional.cross_entropy(output.float().flatten(0, 1), tokens.flatten()).backward()
    grads = {}
    for fqn, param in model.named_parameters():
        assert param.grad is not None
        grads[fqn] = full_value(param.grad).to(torch.float32)
    return output.detach(), grads


@exact_products()
def hybrid_run(name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The model on 2 replicas x 2 shards."""
    codec, mesh = CODECS[name], cpu_mesh(2, 2)
    policy = QuantizedGather(codecs=codec)
    model = make_model()
    fully_shard(model[1], mesh=mesh, mp_policy=policy, granularity=codec.granularity)
    fully_shard(model, mesh=mesh, mp_policy=policy, granularity=codec.granularity)
    return run_model(model, None)


@exact_products()
def sharded_run(name: str, dtype: torch.dtype | None) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Forward and backward, twice, of the model with 8-bit gathers."""
    codec = CODECS[name]
    policy = QuantizedGather(param_dtype=dtype, codecs={"*.weight": codec, "weight": codec})
    model = make_model()
    fully_shard(model[1], mp_policy=policy, granularity=codec.granularity)
    fully_shard(model, mp_policy=policy, granularity=codec.granularity)
    results = []
    for _ in range(2):
        results.append(run_model(model, dtype))
        model.zero_grad()
    return results


@exact_products()
def rounded_run(name: str, dtype: torch.dtype | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One process: the model with its matrices quantized and decoded beforehand."""
    model = make_model()
    for param in model.parameters():
        value = CODECS[name].quantize(param).dequantize() if param.ndim == 2 else param.detach()
        param.data = value.to(dtype) if dtype is not None else value
    return run_model(model, dtype)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("world", [1, 2])
def test_computing_is_with_the_full_tensors_codes(name: str, world: int) -> None:
    """Output and gradients equal a model whose weights are decode(encode(full)), bit for bit."""
    output, grads = rounded_run(name, None)
    for results in run_ranks(world, sharded_run, name, None):
        for got_output, got_grads in results:
            assert torch.equal(got_output, output)
            assert got_grads.keys() == grads.keys()
            assert all(torch.equal(got_grads[fqn], grads[fqn]) for fqn in grads)


def test_hybrid_meshes_compute_with_the_whole_tensors_codes() -> None:
    """2 replicas x 2 shards compute with the full tensor's codes too."""
    output, grads = rounded_run("fp8", None)
    for got_output, got_grads in run_ranks(4, hybrid_run, "fp8"):
        assert torch.equal(got_output, output)
        assert all(torch.equal(got_grads[fqn], grads[fqn]) for fqn in grads)


def test_master_weights_are_encoded_under_bf16_computing() -> None:
    """With param_dtype=bfloat16 master weights are encoded, not their bf16 copies."""
    output, grads = rounded_run("fp8", torch.bfloat16)
    for results in run_ranks(2, sharded_run, "fp8", torch.bfloat16):
        assert torch.equal(results[0][0], output)
        assert all(torch.equal(results[0][1][fqn], grads[fqn]) for fqn in grads)


def test_it_differs_from_not_quantizing() -> None:
    """Negative control: the plain model computes something else."""
    output, _ = rounded_run("fp8", None)
    assert (run_model(make_model(), None)[0] - output).norm() > 0


class Gathered(TorchDispatchMode):
    """Bytes that gathers fill on this rank, its own included (gloo gathers in place by broadcasts)."""

    def __init__(self) -> None:
        super().__init__()
        self.received_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and (
            "allgather" in func._schema.name or "broadcast" in func._schema.name
        ):
            filled = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.received_bytes += sum(t.numel() * t.element_size() for t in filled)
        return func(*args, **(kwargs or {}))


def traffic_run(quantized: bool) -> int:
    """Bytes gathered by one forward of a large matrix in bf16."""
    codec = Fp8Blocks()
    policy = QuantizedGather(param_dtype=torch.bfloat16, codecs=codec if quantized else {})
    model = nn.Linear(512, 512, bias=False)
    fully_shard(model, mp_policy=policy, granularity=codec.granularity)
    with Gathered() as gathered, torch.no_grad():
        model(torch.ones(1, 512))
    return gathered.received_bytes


def test_half_the_bytes_travel() -> None:
    """One byte per element and the scales, against two per element in bf16."""
    plain, coded = run_ranks(2, traffic_run, False)[0], run_ranks(2, traffic_run, True)[0]
    assert plain == 2 * 512 * 512
    assert 512 * 512 < coded < 0.501 * plain


def refused_run() -> str:
    """Element granularity under a block codec."""
    with pytest.raises(LayoutError) as caught:
        fully_shard(nn.Linear(65, 70, bias=False), mp_policy=QuantizedGather(codecs=Fp8Blocks(16, 16)))
    return str(caught.value)


def test_cut_blocks_are_refused_with_the_cure() -> None:
    """A layout that cuts blocks is refused by fully_shard; the text names the granularity."""
    assert "granularity" in run_ranks(2, refused_run)[0]


def choice_run() -> list[str]:
    """Which parameters a function rule quantizes."""
    asked = []

    def rule(fqn: str, shape: torch.Size) -> BlockCodec | None:
        asked.append(fqn)
        return None

    model = nn.Linear(8, 8)
    fully_shard(model, mp_policy=QuantizedGather(codecs=rule))
    model(torch.ones(1, 8))
    return asked


def test_a_function_chooses_per_parameter() -> None:
    """A function sees every floating-point parameter by name and may leave it alone."""
    assert run_ranks(2, choice_run) == [["weight", "bias"]] * 2
