"""What Orbax itself saves of a JAX tree: every leaf bit for bit, in both versions of zarr; OCDBT by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch

from vescale_fsdp.conversion.convert import convert
from vescale_fsdp.conversion.formats.detect import open_source
from vescale_fsdp.errors import ConversionError


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
def test_every_leaf(tmp_path: Path, zarr3: bool) -> None:
    """Of a step of its manager, under dotted names."""
    tree = _tree()
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=zarr3)
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


def test_its_default_is_refused(tmp_path: Path) -> None:
    """With what to do."""
    ocp.PyTreeCheckpointer().save(tmp_path / "run", _tree())
    with pytest.raises(ConversionError, match=r"OCDBT(.|\n)*use_ocdbt=False"):
        open_source(str(tmp_path / "run"))
