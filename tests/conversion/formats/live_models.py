"""Models on live ranks, cut in every way, that are written as folders others read; and what is made of them by way of a
native checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.checkpoint_states import ragged_group, stock_tensors
from vescale_fsdp import RaggedDTensor, RaggedShard
from vescale_fsdp.conversion import ConvertOptions, HuggingFace, convert, open_source

RULES = """
format = 1
keep_others = true
[[rule]]
hf = ["{l}.q", "{l}.k", "{l}.v"]
ours = "{l}.qkv"
ops = [{ rope = { heads = [2, 1, 0] } }, { concat = { dim = 0, sizes = ["16", "8", "8"] } }]
[[rule]]
hf = "{l}.e.{e}.up"
ours = "{l}.experts"
ops = [{ stack = { over = "e", dim = 0, count = 3 } }, { transpose = [0, 2, 1] }]
[[rule]]
hf = "embed"
ours = "padded"
ops = [{ pad = { dim = 0, from = 13, to = 16 } }]
[[rule]]
hf = ["gate", "up"]
ours = "pairs"
ops = [{ concat = { dim = 0, sizes = ["10", "10"] } }, { interleave = { dim = 0 } }, { transpose = [1, 0] }]
[[rule]]
hf = "half"
ours = "wide"
ops = [{ cast = { to = "float32", back = "bfloat16" } }]
"""


class Case(NamedTuple):
    """A model and how it is written.

    Attributes:
        kind: one of those that `model` knows.
        options: of `HuggingFace`, but for its assets.
        ties: what config.json says of ties.
    """

    kind: str
    options: dict[str, Any] = {}  # noqa: RUF012  never changed
    ties: bool = False


CASES = {
    "stock": Case("stock"),
    "ragged": Case("ragged", {"max_shard_bytes": 300}),
    "small budget": Case("stock", {"budget_bytes": 6 << 10}),
    "replicas": Case("replicas", {"dtype": torch.bfloat16}),
    "columns": Case("columns", {"budget_bytes": 6 << 10}),
    "cast": Case("ragged", {"dtype": ("bfloat16", "*wide=float64")}),
    "one tensor, two names": Case("shared", ties=True),
    "equal tensors": Case("equal", ties=True),
    "a tie that is none": Case("unequal", ties=True),
    "rules": Case("rules", {"rules": "rules.toml", "budget_bytes": 12 << 10}),
    "rules and cast": Case("rules", {"rules": "rules.toml", "dtype": "float16", "max_shard_bytes": 20_000}),
}


def settings(folder: Path) -> None:
    """Folders of settings, and the rules."""
    for ties in (False, True):
        assets = folder / f"assets-{ties}"
        (assets / "tokenizer").mkdir(parents=True)
        (assets / "config.json").write_text(
            json.dumps({"tie_word_embeddings": ties, "torch_dtype": "float32"})
        )
        (assets / "tokenizer.json").write_text("{}")
        (assets / "tokenizer" / "vocab.json").write_text('{"a": 0}')
        (assets / "optimizer.pt").write_bytes(b"stays behind")
    (folder / "rules.toml").write_text(RULES)


def form(case: Case, folder: Path) -> HuggingFace:
    """The form of a case, with what `settings` made."""
    options = dict(case.options)
    if "rules" in options:
        options["rules"] = str(folder / options["rules"])
    return HuggingFace(assets=folder / f"assets-{case.ties}", **options)


def converted(case: Case, folder: Path, source: Path, target: Path) -> None:
    """What the converter makes of a native checkpoint, for the same case."""
    chosen = form(case, folder)
    options = ConvertOptions(
        assets=str(chosen.assets),
        rules=chosen.rules,
        dtype=chosen._casts,
        max_shard_bytes=chosen.max_shard_bytes,
    )
    convert(open_source(str(source)), str(target), "hf", options)


def bytes_of_folder(folder: Path) -> dict[str, bytes]:
    """All files, hidden ones too."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def ragged(mesh: DeviceMesh, full: torch.Tensor) -> RaggedDTensor:
    """A tensor cut anywhere, also inside rows; the first rank holds nothing of small ones."""
    size, numel = mesh.size(), full.numel()
    ends = [numel * (rank + 1) // size // 3 * 3 - (1 if rank % 2 else 0) for rank in range(size - 1)]
    ends = [0 if numel < 8 * size and rank == 0 else max(0, end) for rank, end in enumerate(ends)] + [numel]
    starts = [0, *ends[:-1]]
    placement = RaggedShard.from_piece_numels(
        tuple(full.shape), [b - a for a, b in zip(starts, ends, strict=True)]
    )
    rank = mesh.get_local_rank()
    local = full.reshape(-1)[starts[rank] : ends[rank]].clone()
    return RaggedDTensor.from_local(local, mesh, [placement], shape=tuple(full.shape))


def _stock(mesh: DeviceMesh) -> dict[str, Any]:
    return {**stock_tensors(mesh), "bits": torch.arange(7, dtype=torch.uint8), "truth": torch.tensor([True])}


def _columns(mesh: DeviceMesh) -> dict[str, Any]:
    """Cut along other dims than the first, by two meshes, and more than a budget of them."""
    found = {"big": distribute_tensor(torch.randn(40, 130), mesh, [Shard(1)])}
    if mesh.size() == 4:
        grid = init_device_mesh("cpu", (2, 2))
        found["both"] = distribute_tensor(torch.randn(9, 11), grid, [Shard(1), Shard(0)])
        found["copies"] = distribute_tensor(torch.randn(9, 11), grid, [Replicate(), Shard(1)])
    return found


def _rules(mesh: DeviceMesh) -> dict[str, Any]:
    tensors = {f"{layer}.qkv": torch.randn(32, 12) for layer in range(2)}
    tensors |= {f"{layer}.experts": torch.randn(3, 10, 30) for layer in range(2)}
    tensors |= {"padded": torch.randn(16, 9), "pairs": torch.randn(33, 20), "wide": torch.randn(11, 5)}
    tensors["padded"][13:] = 0
    found: dict[str, Any] = {name: ragged(mesh, tensor) for name, tensor in tensors.items()}
    found["0.qkv"] = distribute_tensor(tensors["0.qkv"], mesh, [Shard(0)])
    found["1.experts"] = distribute_tensor(tensors["1.experts"], mesh, [Shard(2)])
    found["other"] = torch.arange(5)
    return found


def _tied(mesh: DeviceMesh, kind: str) -> dict[str, Any]:
    full = torch.randn(23, 7)
    embed = ragged(mesh, full)
    head: Any = embed
    if kind != "shared":
        head = distribute_tensor(full.clone(), mesh, [Shard(0)])
    if kind == "unequal":
        head.to_local()[-1:] += 1
    return {"model.embed_tokens.weight": embed, "lm_head.weight": head, "norm": torch.ones(7)}


def model(kind: str, mesh: DeviceMesh) -> dict[str, Any]:
    """A model of a kind on the ranks of a mesh."""
    torch.manual_seed(sum(map(ord, kind)))
    if kind == "stock":
        return _stock(mesh)
    if kind == "ragged":
        return {
            **ragged_group(mesh),
            "any": ragged(mesh, torch.randn(5, 3, 11)),
            "wide": ragged(mesh, torch.randn(90)),
        }
    if kind == "replicas":
        grid = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("replicate", "shard"))
        large = distribute_tensor(
            torch.randn(300, 70), grid, [Replicate(), Shard(0)]
        )  # shared between replicas
        return {**ragged_group(grid, axis=1), "large": large}
    if kind == "columns":
        return _columns(mesh)
    if kind == "rules":
        return _rules(mesh)
    return _tied(mesh, kind)
