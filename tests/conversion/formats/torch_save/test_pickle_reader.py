"""What torch's pickles say of a tensor besides its bytes: flags of lazy conjugation and negation, odd strides,
wrappers. Each is read as torch reads it, or refused by name."""

from __future__ import annotations

import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp.checkpoint import load as load_native
from vescale_fsdp.checkpoint import verify
from vescale_fsdp.conversion import convert, diff, open_source
from vescale_fsdp.errors import ConversionError, option


def _complex(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    z = torch.randn(6, 5, dtype=dtype)
    z[0, 0], z[1, 1] = complex(0.0, -0.0), complex(float("nan"), float("inf"))
    return z


def _states() -> dict[str, torch.Tensor]:
    """Tensors whose values differ from the bytes of their storage, and some that do not.

    torch does not say which sign a negated complex zero or NaN has, so those are left to conjugation.
    """
    found: dict[str, torch.Tensor] = {}
    for dtype in (torch.complex64, torch.complex128):
        z = _complex(dtype)
        name = str(dtype).removeprefix("torch.")
        found |= {
            f"{name}.plain": z,
            f"{name}.conj": z.conj(),
            f"{name}.imag_of_conj": z.clone().conj().imag,
            f"{name}.real_of_conj": z.clone().conj().real,
            f"{name}.adjoint": z.mH,
            f"{name}.part": z.conj()[1:5:2, 2:],
            f"{name}.scalar": z.conj()[2, 3],
            f"{name}.negative": torch._neg_view(z[2:]),
            f"{name}.negative_conj": torch._neg_view(z[2:].conj()),
            f"{name}.twice": z.conj().conj(),
            f"{name}.none": z.conj()[:0],
        }
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.randn(4, 3).to(dtype)
        found[f"negative.{str(dtype)[6:]}"] = torch._neg_view(x)
        found[f"negative_turned.{str(dtype)[6:]}"] = torch._neg_view(x).t()
    return found


def _bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _save(kind: str, state: dict[str, Any], folder: Path) -> str:
    if kind == "dcp":
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        return str(folder)
    folder.mkdir()
    names = {"torch": ["model.pt"], "ranks": [f"model_world_size_2_rank_{rank}.pt" for rank in range(2)]}
    for name in names[kind]:
        torch.save(state, folder / name)
    return str(folder / "model.pt") if kind == "torch" else str(folder)


def _load(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """By the format's own reader."""
    if kind == "torch":
        return dict(torch.load(folder, weights_only=True))
    infos = {name: tensor.info for name, tensor in open_source(str(folder)).tensors.items()}
    found = {name: torch.empty(i.shape, dtype=getattr(torch, i.dtype.name)) for name, i in infos.items()}
    if kind == "dcp":
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    else:
        load_native(folder, found)
    return found


@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("target", ["torch", "dcp", "native"])
def test_lazy_flags_are_resolved(tmp_path: Path, kind: str, target: str) -> None:
    """Every target holds, bit for bit, what torch makes of the tensor."""
    state = _states()
    expected = {name: _bits(tensor) for name, tensor in state.items()}
    assert expected["complex64.conj"] != expected["complex64.plain"]
    source = _save(kind, state, tmp_path / "src")
    out = tmp_path / ("out.pt" if target == "torch" else "out")
    convert(open_source(source), str(out), target)
    found = _load(target, out)
    assert found.keys() == expected.keys()
    assert {name: _bits(tensor) for name, tensor in found.items()} == expected


@pytest.mark.parametrize("kind", ["torch", "dcp", "ranks"])
def test_lazy_flags_in_verify_and_diff(tmp_path: Path, kind: str) -> None:
    """A lazy tensor is sound, equals its resolved self, and differs from the tensor it was made of."""
    z = _complex(torch.complex64)[2:]
    states = {"lazy": z.conj(), "resolved": z.conj().resolve_conj(), "original": z}
    sources = {
        name: open_source(_save(kind, {"w": value}, tmp_path / name)) for name, value in states.items()
    }
    report = verify(sources["lazy"])
    assert not report.problems and report.num_checksums == 1
    assert diff(sources["lazy"], sources["resolved"]) == ((), 1)
    assert [d.kind for d in diff(sources["lazy"], sources["original"])[0]] == ["value"]


def test_ranks_that_differ_by_a_flag_alone(tmp_path: Path) -> None:
    """Equal bytes, other values: nothing says which rank is right."""
    z = _complex(torch.complex64)
    torch.save({"w": z}, tmp_path / "model_rank_0.pt")
    torch.save({"w": z.conj()}, tmp_path / "model_rank_1.pt")
    with pytest.raises(ConversionError, match="differ"):
        open_source(str(tmp_path))


def _save_sharded(ranks: str, whole: str) -> bytes:
    sharded = distribute_tensor(_complex(torch.complex64), cpu_mesh(), [Shard(0)]).conj()
    torch.save({"w": sharded}, f"{ranks}/model_world_size_2_rank_{dist.get_rank()}.pt")
    dcp.save({"w": sharded}, checkpoint_id=whole)
    return _bits(sharded.full_tensor())


def test_sharded_lazy_tensors(tmp_path: Path) -> None:
    """A DTensor's flag is its local tensors' flag."""
    folders = [tmp_path / "ranks", tmp_path / "dcp"]
    folders[0].mkdir()
    expected = run_ranks(2, _save_sharded, *map(str, folders))[0]
    for folder in folders:
        out = tmp_path / f"{folder.name}.pt"
        convert(open_source(str(folder)), str(out), "torch")
        assert [_bits(tensor) for tensor in _tensors(torch.load(out, weights_only=True))] == [expected]


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    return [tensor for value in state.values() for tensor in _tensors(value)]


@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("target", ["torch", "dcp", "native"])
def test_windows_on_storages(tmp_path: Path, kind: str, target: str) -> None:
    """Expanded, overlapping, turned and shared storages, small and larger than a covering read."""
    base = torch.arange(3000.0)
    wide = torch.arange(1_500_000, dtype=torch.int32)
    state = {
        "expanded": base[:7].expand(5, 7),
        "expanded_scalar": torch.tensor(2.5).expand(3, 4),
        "overlapping": base.as_strided((20, 10), (3, 2), 5),
        "turned": base.view(30, 100).t()[::7],
        "shared": base[100:],
        "wide": wide.view(1500, 1000).t(),
        "wide_expanded": wide[::500].expand(4, 3000),
        "parameter": torch.nn.Parameter(base[:6].view(2, 3)),
        "buffer": torch.nn.Buffer(base[6:9]),
    }
    expected = {name: _bits(tensor.detach()) for name, tensor in state.items()}
    out = tmp_path / ("out.pt" if target == "torch" else "out")
    convert(open_source(_save(kind, state, tmp_path / "src")), str(out), target)
    assert {name: _bits(tensor) for name, tensor in _load(target, out).items()} == expected


def _with_attribute() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tag = "x"  # type: ignore[attr-defined]
    return parameter


class _Marked(torch.Tensor):
    """A subclass of the user's."""


_REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "sparse_csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized|QInt8"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "nested",
    ),
    "meta": (lambda: torch.empty(3, device="meta"), "meta device"),
    "wrapper": (lambda: TwoTensor(torch.ones(2), torch.ones(2)), "TwoTensor"),
    "subclass": (lambda: torch.ones(2).as_subclass(_Marked), "_Marked"),
    "negative integers": (lambda: torch._neg_view(torch.ones(2, dtype=torch.int32)), "int32"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of sparse, quantized and nested tensors
@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("name", sorted(_REFUSED))
def test_what_is_not_dense_is_refused_by_name(tmp_path: Path, name: str, trust: bool) -> None:
    """Nothing is read as something else; trusting the pickle does not change what a format can hold."""
    make, match = _REFUSED[name]
    torch.save({"w": make(), "v": torch.ones(1)}, tmp_path / "model.pt")
    if name == "subclass" and trust:
        convert(open_source(str(tmp_path / "model.pt"), trust_pickle=True), str(tmp_path / "o.pt"), "torch")
        assert torch.load(tmp_path / "o.pt")["w"].tolist() == [1.0, 1.0]
        return
    with pytest.raises(ConversionError, match=match):
        open_source(str(tmp_path / "model.pt"), trust_pickle=trust)


def test_a_flag_of_the_future_is_refused(tmp_path: Path) -> None:
    """Metadata of a tensor that is unknown here may change its values."""
    torch.save({"w": _complex(torch.complex64).conj()}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive, zipfile.ZipFile(tmp_path / "b.pt", "w") as other:
        assert b"conj" in archive.read("a/data.pkl")
        for name in archive.namelist():  # with checksums of their own
            other.writestr(name, archive.read(name).replace(b"conj", b"gonj"))
    with pytest.raises(ConversionError, match="gonj"):
        open_source(str(tmp_path / "b.pt"))


def test_attributes_of_parameters_are_no_values(tmp_path: Path) -> None:
    """A parameter with Python attributes is its tensor."""
    torch.save({"w": _with_attribute()}, tmp_path / "a.pt")
    convert(open_source(str(tmp_path / "a.pt")), str(tmp_path / "o.pt"), "torch")
    assert torch.load(tmp_path / "o.pt", weights_only=True)["w"].tolist() == [1.0, 1.0]


def test_what_torch_reads_with_weights_only_can_be_read(tmp_path: Path) -> None:
    """A scheduler with a Counter, Parameters and tensors with attributes."""
    weight, tagged = torch.nn.Parameter(torch.randn(3)), torch.randn(2)
    weight.tag = tagged.tag = "x"  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD([weight])
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    state = {
        "model": OrderedDict(w=weight, t=tagged),
        "scheduler": scheduler.state_dict(),
        "few": [{"n": Counter("aa")}],
    }
    torch.save(state, tmp_path / "a.pt")
    dcp.save(
        {**state, "model": {"w": weight.data, "t": tagged}}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    for source in ("a.pt", "dcp"):
        out = tmp_path / f"from {source}.pt"
        convert(open_source(str(tmp_path / source)), str(out), "torch")
        loaded = torch.load(out, weights_only=True)
        assert torch.equal(loaded["model"]["w"], weight) and torch.equal(loaded["model"]["t"], tagged)
        milestones = {
            int(key): count for key, count in loaded["scheduler"]["milestones"].items()
        }  # DCP: texts
        assert milestones == {3: 1, 5: 1} and loaded["few"] == [{"n": {"a": 2}}]


def test_values_that_are_no_data_are_refused(tmp_path: Path) -> None:
    """A trusted value that is an object cannot be written: the error names it and its type."""
    torch.save({"w": torch.randn(2), "bad": Path("x")}, tmp_path / "a.pt")
    source = open_source(str(tmp_path / "a.pt"), trust_pickle=True)
    with pytest.raises(
        ConversionError, check=lambda error: "Path" in error.got and option("exclude") in error.todo
    ):
        convert(source, str(tmp_path / "b.pt"), "torch")
    assert not (tmp_path / "b.pt").exists()
