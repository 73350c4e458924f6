"""Pickles name the package of a class, so that the class can move inside the package.

``torch.save`` of values of ours (placements, layouts, policies) and of optimizers, and what ``dcp.save`` pickles into
its ``.distcp`` files, contain such names.
``python -m tests.checkpoint.manifest.test_golden_pickles`` writes the folder, if it is missing.
"""

from __future__ import annotations

import importlib
import pickle
import pickletools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import vescale_fsdp
from tests.support.checkpoint_states import SHAPES, full, ragged_group
from tests.support.distributed import run_ranks
from vescale_fsdp import optim, quantize
from vescale_fsdp.checkpoint import PerRank

GOLDEN = Path(__file__).parent.parent / "golden_pickles"
# Further classes that users pickle, by package.
CLASSES = {
    "vescale_fsdp": ("PlanReport",),
    "vescale_fsdp.layout": ("PlanRow", "PlannedGroup", "PlannedParam"),
    "vescale_fsdp.optim": ("AdamWOptions",),
    "vescale_fsdp.quantize": ("BlockGrid", "Quantized", "QuantizedGather"),
}


def values() -> dict[str, Any]:
    """Every kind of value of ours that people put into states and configurations."""
    slots = (
        vescale_fsdp.layout.TensorSlot("w", (6, 4), "float32", 4, 0),
        vescale_fsdp.layout.TensorSlot("b", (5,), "float32", 1, 24),
    )
    layout = vescale_fsdp.layout.GroupLayout(2, 16, slots)
    return {
        "ragged": vescale_fsdp.RaggedShard((0,), (1, 2)),
        "strided": vescale_fsdp.layout.StridedRaggedShard((0,), (1, 2), 2),
        "granularity": [
            vescale_fsdp.Element(),
            vescale_fsdp.Flat(16),
            vescale_fsdp.Rows(2),
            vescale_fsdp.Tiles(2, 2),
            vescale_fsdp.Whole(),
        ],
        "slot": layout.slots[0],
        "layout": layout,
        "padding": vescale_fsdp.PaddingPolicy(),
        "spec": vescale_fsdp.layout.TensorSpec("w", (6, 4), "float32", 4),
        "codecs": [quantize.Fp8Blocks(), quantize.Mxfp8()],
        "per rank": PerRank([1, "two"]),
    }


def write(folder: Path) -> None:
    """Write the golden folder, on each of two ranks."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    model = ragged_group(mesh, block_rows=2)
    dcp.save(
        {"model": model, "values": values()["ragged"], "layout": values()["layout"]},
        checkpoint_id=folder / "dcp",
    )
    if rank == 0:
        torch.save(values(), folder / "values.pt")
        net = torch.nn.Linear(8, 4)
        for optimizer in (
            optim.AdamW8bit(net.parameters()),
            optim.Muon([net.weight]),
            optim.Shampoo(net.parameters()),
        ):
            torch.save(optimizer, folder / f"{type(optimizer).__name__}.pt")


def test_values_are_read() -> None:
    """`torch.load` finds every class, and each value equals the one made today."""
    found, expected = torch.load(GOLDEN / "values.pt", weights_only=False), values()
    assert found.pop("per rank").value == expected.pop("per rank").value

    assert expected == found


def test_new_pickles_name_public_packages() -> None:
    """Not the modules that define the classes, so that these can move."""
    strings = [arg for _, arg, _ in pickletools.genops(pickle.dumps(values())) if isinstance(arg, str)]
    named = {text for text in strings if text.startswith("vescale_fsdp")}

    assert named == {f"vescale_fsdp{name}" for name in ("", ".layout", ".quantize", ".checkpoint")}
    for package, names in CLASSES.items():
        found = [getattr(importlib.import_module(package), name) for name in names]
        assert [value.__module__ for value in found] == [package] * len(found)


@pytest.mark.parametrize("name", ["AdamW8bit", "Muon", "Shampoo"])
def test_optimizers_are_read(name: str) -> None:
    """An optimizer that was saved whole comes back as one."""
    found = torch.load(GOLDEN / f"{name}.pt", weights_only=False)

    assert type(found) is getattr(optim, name)
    assert found.param_groups[0]["params"][0].shape == (4, 8)


def _load_dcp() -> None:
    model = ragged_group(init_device_mesh("cpu", (dist.get_world_size(),)))
    for tensor in model.values():
        tensor.to_local().zero_()
    state = {"model": model, "values": None, "layout": None}
    dcp.load(state, checkpoint_id=GOLDEN / "dcp")
    for name, shape in SHAPES.items():
        start, stop = model[name].piece
        assert torch.equal(full(name, shape).reshape(-1)[start:stop], model[name].to_local())
    assert state["values"] == values()["ragged"] and state["layout"] == values()["layout"]


def test_a_dcp_folder_is_read() -> None:
    """Stock ``dcp.load`` reads tensors and pickled values on another number of ranks."""
    run_ranks(3, _load_dcp)


def main() -> None:
    """Write the folder, if it is missing."""
    if not GOLDEN.exists():
        with tempfile.TemporaryDirectory() as temporary:
            run_ranks(2, write, Path(temporary))
            shutil.copytree(temporary, GOLDEN)


if __name__ == "__main__":
    import tests.checkpoint.manifest.test_golden_pickles as importable  # workers find functions by this name

    importable.main()
