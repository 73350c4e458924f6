"""Ray Train with our runtime: elastic workers, one of which is killed with its node; training continues on fewer.

    python -m examples.stacks.train_ray --out demo_output/ray --kill-at 12

Ray starts three workers on two nodes, both on this machine. After step 12 the second node and its worker are killed.
Ray calls the training function again, on the two workers of the other node, which restore the newest checkpoint.

The mean loss of each step and the number of workers are in OUT/progress.jsonl. On a real cluster, ``ray.init()`` takes
the place of `start_cluster`. Ray's messages are in /tmp/ray/session_latest/logs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

# Ray's processes inherit these variables.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Ray reports nothing over the network
os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = (
    "10"  # it first waits for as many workers as before the loss
)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # all nodes are on this machine

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer
from torch.nn import functional as F

from examples.corpus import Batches, read_corpus
from examples.llama import Llama, LlamaShape
from vescale_fsdp import Rows, fully_shard
from vescale_fsdp.checkpoint import CheckpointManager, latest

SHAPE = LlamaShape(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_size=32, mlp_size=128)
MIN_WORKERS, MAX_WORKERS = 2, 3
SAVE_EVERY = 5


def train(config: dict[str, Any]) -> None:
    """The training function of each worker. Ray has created the process group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Llama(SHAPE)
    for block in model.model.layers:
        fully_shard(block, granularity=Rows(8))
    fully_shard(model, granularity=Rows(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    batches = Batches(read_corpus())  # 12 sequences in each step, which the workers divide

    with CheckpointManager(config["checkpoints"]) as manager:
        restored = manager.restore(state)  # a step that any number of workers saved; None in a new run
        for step in range(restored.step + 1 if restored else 1, config["steps"] + 1):
            inputs, targets = batches.of_rank(step, rank, ranks)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            metrics = {"step": step, "loss": mean.item(), "workers": ranks}
            if rank == 0:
                with open(config["progress"], "a") as progress:
                    progress.write(json.dumps(metrics) + "\n")
            if step % SAVE_EVERY == 0:
                manager.save(step, state)  # each worker writes its shards into one folder of Ray's storage
                checkpoint = ray.train.Checkpoint(latest(config["checkpoints"]))
                written = ray.train.CheckpointUploadMode.NO_UPLOAD  # it is in Ray's storage already
                ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=written)
            if step == config["kill_at"] and ray.get_runtime_context().get_node_id() == config["lost_node"]:
                os.kill(os.getppid(), signal.SIGKILL)  # Ray's process of the node
                os.kill(os.getpid(), signal.SIGKILL)


def start_cluster(cluster: Cluster) -> str:
    """Start two nodes on this machine, of two workers and of one; return the id of the second node."""
    cluster.add_node(node_ip_address="127.0.0.2", num_cpus=MIN_WORKERS, include_dashboard=False)
    second = cluster.add_node(node_ip_address="127.0.0.3", num_cpus=MAX_WORKERS - MIN_WORKERS)
    ray.init(address=cluster.address, log_to_driver=False)
    return str(second.node_id)


def main() -> None:
    """Start Ray, train, stop Ray."""
    parser = argparse.ArgumentParser(description="train the small Llama with Ray Train")
    parser.add_argument("--out", type=Path, required=True, help="folder of Ray's runs")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kill-at", type=int, default=0, help="kill a node after this step")
    options = parser.parse_args()
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    cluster = Cluster()
    try:
        config = {
            "checkpoints": str(out / "llama" / "checkpoints"),
            "progress": str(out / "progress.jsonl"),
            "steps": options.steps,
            "kill_at": options.kill_at,
            "lost_node": start_cluster(cluster),
        }
        trainer = TorchTrainer(
            train,
            train_loop_config=config,
            scaling_config=ray.train.ScalingConfig(num_workers=(MIN_WORKERS, MAX_WORKERS)),
            run_config=ray.train.RunConfig(
                name="llama",
                storage_path=str(out),
                failure_config=ray.train.FailureConfig(max_failures=3),
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            ),
        )
        result = trainer.fit()
        for line in (out / "progress.jsonl").read_text().splitlines():
            print(line)
        print(f"newest checkpoint: {result.checkpoint.path}")
        kept = [reported for _, reported in result.best_checkpoints]
        (out / "result.json").write_text(json.dumps({"last": result.metrics, "kept": kept}))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
