"""What Orbax itself saves of a JAX tree: every leaf bit for bit, in both versions of zarr, with OCDBT and without."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch

from vescale_fsdp.checkpoint import verify
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError


def _tree() -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 9))
    params = {
        "layers": [
            {"kernel": jax.random.normal(next(keys), (5, 3), dtype)} for dtype in (jnp.float32, jnp.bfloat16)
        ],
        "norm": {"scale": jnp.ones(3, jnp.float16)},
    }
    moments = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), params)
    return {
        "params": params,
        "opt_state": (jnp.int32(4), {"mu": moments}),
        "step": 7,
        "name": "run",
        "none": None,
    }


@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("ocdbt", [False, True])
def test_every_leaf(tmp_path: Path, ocdbt: bool, zarr3: bool) -> None:
    """Of a step of its manager, under dotted names."""
    tree = _tree()
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    with ocp.CheckpointManager(
        tmp_path / "run", item_names=("state",), item_handlers={"state": handler}
    ) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree)))
        manager.wait_until_finished()
    source = open_source(str(tmp_path / "run"), step="newest")
    convert(source, str(tmp_path / "a.pt"), "torch")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert loaded["name"] == "run" and loaded["none"] is None and loaded["step"] == 7
    leaves = jax.tree_util.tree_flatten_with_path({key: tree[key] for key in ("params", "opt_state")})[0]
    assert len(leaves) == 7
    for path, leaf in leaves:
        first, *rest = (str(getattr(part, "key", getattr(part, "idx", ""))) for part in path)
        found = loaded[first][".".join(rest)]
        assert str(found.dtype) == f"torch.{leaf.dtype}" and found.shape == leaf.shape
        assert np.array_equal(found.float().numpy(), np.asarray(leaf, np.float32))
    report = convert(source, str(tmp_path / "hf"), "hf")
    assert set(report.state.views) == {"layers.0.kernel", "layers.1.kernel", "norm.scale"}


@pytest.mark.parametrize("zarr3", [False, True])
def test_chunks_of_ocdbt_within_the_memory_budget(tmp_path: Path, zarr3: bool) -> None:
    """An array of 24 MiB is read within 8 MiB in chunks of 1 MiB; as one chunk it is refused."""
    values = np.random.default_rng(0).standard_normal((3072, 2048), dtype=np.float32)
    for folder, chunk_bytes in (("chunks", 1 << 20), ("whole", None)):
        args = {"w": ocp.SaveArgs(chunk_byte_size=chunk_bytes)}
        saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=zarr3))
        saver.save(tmp_path / folder, args=ocp.args.PyTreeSave({"w": jnp.asarray(values)}, save_args=args))
    small = ConvertOptions(memory_budget_bytes=8 << 20)
    chunks = open_source(str(tmp_path / "chunks"))
    assert chunks.decoded["w"] <= 3 << 20 and not verify(chunks).problems
    convert(chunks, str(tmp_path / "a.pt"), "torch", small)
    assert np.array_equal(torch.load(tmp_path / "a.pt", weights_only=True)["w"].numpy(), values)
    whole = open_source(str(tmp_path / "whole"))
    assert whole.decoded["w"] == 3 * values.nbytes
    with pytest.raises(ConversionError, check=lambda error: error.where == "tensor w"):
        convert(whole, str(tmp_path / "b.pt"), "torch", small)


def test_what_two_hosts_saved(tmp_path: Path) -> None:
    """Arrays whose shards the processes wrote into trees of their own, and arrays of one of them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    job = [sys.executable, "-m", "tests.stacks.jobs.orbax_job", str(tmp_path / "run"), str(port)]
    hosts = [subprocess.Popen([*job, str(host)]) for host in range(2)]
    try:
        assert [host.wait(300) for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
    files = {str(file.relative_to(tmp_path / "run")) for file in (tmp_path / "run").rglob("manifest.ocdbt")}
    assert files == {"manifest.ocdbt", "ocdbt.process_0/manifest.ocdbt", "ocdbt.process_1/manifest.ocdbt"}
    convert(open_source(str(tmp_path / "run")), str(tmp_path / "a.pt"), "torch")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(loaded["cut"], torch.arange(32.0).view(8, 4))
    assert torch.equal(loaded["whole"], torch.arange(6.0).bfloat16())
    (tmp_path / "run" / "manifest.ocdbt").unlink()
    with pytest.raises(CorruptCheckpointError, check=lambda error: "process_1" in str(error.got)):
        open_source(str(tmp_path / "run"))


@pytest.mark.parametrize("lost", ["manifest.ocdbt", "ocdbt.process_0/d/*"])
def test_a_damaged_tree_is_an_error(tmp_path: Path, lost: str) -> None:
    """Of the whole, or of the chunks alone: found by reading."""
    ocp.PyTreeCheckpointer().save(tmp_path / "run", {"w": jnp.arange(4096.0)})
    assert not verify(open_source(str(tmp_path / "run"))).problems
    for file in (tmp_path / "run").glob(lost):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CorruptCheckpointError):
        convert(open_source(str(tmp_path / "run")), str(tmp_path / "a.pt"), "torch")
    assert not (tmp_path / "a.pt").exists()
