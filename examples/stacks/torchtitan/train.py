"""torchtitan's own command line, on CPU ranks.

    torchrun --nproc-per-node 2 -m examples.stacks.torchtitan.train \
        --module examples.stacks.torchtitan.configs --config vescale --dump_folder demo_output/torchtitan

``--config stock`` is the same job without a line of ours. With accelerators: ``-m torchtitan.train`` and the same rest.
"""

from __future__ import annotations

from examples.stacks.torchtitan.cpu_device import use_cpu


def main() -> None:
    """One rank of the job."""
    use_cpu()
    from torchtitan.train import main as train  # after the device is chosen

    train()


if __name__ == "__main__":
    main()
