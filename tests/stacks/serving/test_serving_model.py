"""A transformers model that serves tensor-parallel in processes of its own gets a trainer's weights in every step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaForCausalLM

from examples.stacks.tiny_llm import CONFIG, tiny_llama
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import Rows, fully_shard
from vescale_fsdp.transfer import Transfer, describe_states, joint_ranks, plan_transfer

TOKENS = torch.arange(24).view(2, 12) % CONFIG.vocab_size
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
STEPS = 3


def own_job(folder: str, rank: int) -> None:
    """Two trainers and two servers, each pair a world of its own."""
    dist.barrier()  # all have come, so none finds the others gone
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/job{rank // 2}", 2)
    dist.init_process_group("gloo", store=store, rank=rank % 2, world_size=2)


def served_model() -> LlamaForCausalLM:
    """Tensor-parallel over the job's ranks, with weights of its own."""
    model = tiny_llama(seed=7)
    plan: dict[str, ColwiseParallel | RowwiseParallel] = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, cpu_mesh(), plan)
    return model.eval()


def trained_model() -> LlamaForCausalLM:
    """Sharded by rows, whole groups of three."""
    model = tiny_llama(seed=3)
    for layer in model.model.layers:
        fully_shard(layer, granularity=Rows(3))
    fully_shard(model, granularity=Rows(3), reshard_after_forward=True)
    return model


def job(folder: str) -> list[torch.Tensor]:
    """Logits before any transfer, and after each step and transfer; and a matrix at the end."""
    rank = dist.get_rank()
    own_job(folder, rank)
    is_trainer = rank < 2
    model = trained_model() if is_trainer else served_model()
    ranks = joint_ranks(
        f"file://{folder}/meet", first_rank=0 if is_trainer else 2, num_ranks=4, timeout_s=300
    )
    params = dict(model.named_parameters())
    state, into = (params, None) if is_trainer else (None, params)
    plan = plan_transfer(*describe_states(state, into, ranks=ranks), budget_bytes=1 << 16)
    transfer = Transfer(plan, ranks=ranks, verify=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            found = model(TOKENS).logits
        if is_trainer:
            model.reshard()  # type: ignore[operator]  # it is an FSDPModule
        return found.clone()

    seen = [logits()]
    for _ in range(STEPS):
        if is_trainer:
            model(TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        transfer.run(state, into)
        seen.append(logits())
    matrix = dict(model.named_parameters())["model.layers.1.mlp.down_proj.weight"]
    assert isinstance(matrix, DTensor)
    return [*seen, matrix.full_tensor().detach()]


def test_logits_are_the_trainers(tmp_path: object) -> None:
    """Three steps, three transfers: the served logits are the trainer's, and were not before."""
    *trainers, served, again = run_ranks(4, job, str(tmp_path), timeout_s=400)

    assert all(map(torch.equal, served, again))
    assert (served[0] - trainers[0][0]).abs().max() > 1e-3
    for step in range(1, STEPS + 1):
        torch.testing.assert_close(served[step], trainers[0][step], rtol=0, atol=2e-6)
        assert (served[step] - served[step - 1]).abs().max() > 1e-4
    assert torch.equal(served[-1], trainers[0][-1])
