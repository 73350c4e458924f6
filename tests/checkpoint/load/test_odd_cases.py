"""What users do now and then: odd names and paths, odd files in the folder, tensors that cannot be filled."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.faults.faulty_storage import FaultyStorage
from tests.support.processes import run_command
from vescale_fsdp.checkpoint import CheckpointManager, PerRank, async_save, load, read_state, save, verify
from vescale_fsdp.checkpoint.save import Format
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import ArgumentError, CheckpointError, CorruptCheckpointError, NoCheckpointError

NAMES = ["..", "../../x", "a/b", "a.b", "ü☃", "", ".", " ", "con", "a\nb", "a\x00b", "~", "$x", '"', "\\"]


@pytest.mark.parametrize("form", ["native", "zarr"])
def test_any_name_will_do(form: Format, tmp_path: Path) -> None:
    """Names with dots, slashes and worse stay inside the folder and come back."""
    path = tmp_path / "with space é" / "c"
    state = {name: torch.full((5,), float(place)) for place, name in enumerate(NAMES)}
    save(path, {"model": {name: state[name].clone() for name in NAMES}, **state}, format=form)
    back = {name: torch.zeros(5) for name in NAMES}
    nested = {name: torch.zeros(5) for name in NAMES}

    load(path, {"model": nested, **back})

    for found in (back, nested):
        assert all(torch.equal(state[name], found[name]) for name in NAMES)
    assert verify(path).ok
    assert sorted(os.listdir(tmp_path)) == ["with space é"]
    assert os.listdir(tmp_path / "with space é") == ["c"]
    if form == "native":
        (file,) = path.glob("data-*/*")
        assert len(load_file(file)) == 2 * len(NAMES) + 1


@pytest.mark.parametrize("name", ["__metadata__", "__checksums__", "__per_rank__"])
def test_names_of_the_files_themselves(name: str, tmp_path: Path) -> None:
    """A tensor under one of the header's own names would make a file nobody can open."""
    with pytest.raises(CheckpointError, match=name):
        save(tmp_path / "c", {name: torch.ones(2)})
    save(tmp_path / "c", {"x": {name: torch.ones(2)}})
    assert torch.equal(torch.ones(2), read_state(tmp_path / "c")[f"x/{name}"].read())


def test_two_keys_of_one_text(tmp_path: Path) -> None:
    """1 and "1" would be one name: refused, and nothing is written."""
    with pytest.raises(CheckpointError, check=lambda error: error.got == "'x.1'"):
        save(tmp_path / "c", {"x": {1: torch.ones(2), "1": torch.zeros(2)}})
    assert not list(tmp_path.glob("c/data-*"))


def _small() -> dict[str, Any]:
    return {"a": torch.arange(30.0).reshape(5, 6), "b": torch.ones(7), "step": 3}


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("which", ["manifest", "data"])
@pytest.mark.parametrize("change", [_folder, _loop, _dangling, lambda path: path.write_bytes(b"")])
def test_something_else_in_a_files_place(which: str, change: Callable[[Path], Any], tmp_path: Path) -> None:
    """Folders, links in circles, links to nowhere and empty files are damage, for loads and for verify."""
    save(tmp_path / "c", _small())
    (data,) = (tmp_path / "c").glob("data-*/*")
    change(tmp_path / "c" / "manifest.json" if which == "manifest" else data)
    state = {"a": torch.zeros(5, 6), "b": torch.zeros(7), "step": 0}

    with pytest.raises(CheckpointError, match="manifest" if which == "manifest" else data.name):
        load(tmp_path / "c", state)

    assert not state["a"].any() and state["step"] == 0
    assert not verify(tmp_path / "c").ok


def test_a_pipe_in_a_files_place(tmp_path: Path) -> None:
    """A load does not wait for somebody to write into a pipe."""
    save(tmp_path / "c", _small())
    (data,) = (tmp_path / "c").glob("data-*/*")
    _pipe(data)
    with pytest.raises(CorruptCheckpointError, check=lambda error: str(data) in f"{error.where} {error.got}"):
        load(tmp_path / "c", _small())


def test_linked_files_are_read(tmp_path: Path) -> None:
    """Links to the right files are as good as the files."""
    save(tmp_path / "c", _small())
    (data,) = (tmp_path / "c").glob("data-*/*")
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    state = {"a": torch.zeros(5, 6), "b": torch.zeros(7), "step": 0}
    load(tmp_path / "c", state)
    assert torch.equal(_small()["a"], state["a"])


def test_tensors_of_any_strides_are_filled(tmp_path: Path) -> None:
    """Transposed, sliced, leaf and inference tensors are filled where they are."""
    save(tmp_path / "c", _small())
    whole = torch.zeros(5, 12)
    leaf = torch.nn.Parameter(torch.zeros(7))
    state = {"a": whole[:, ::2], "b": leaf, "step": 0}
    load(tmp_path / "c", state)
    assert torch.equal(_small()["a"], whole[:, ::2]) and not whole[:, 1::2].any()
    assert torch.equal(torch.ones(7), leaf.detach()) and leaf.is_leaf and leaf.grad is None
    with torch.inference_mode():
        turned = torch.zeros(6, 5).t()
    load(tmp_path / "c", {"a": turned, "b": leaf, "step": 0})
    assert torch.equal(_small()["a"], turned)


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (lambda: torch.empty(7, device="meta"), "to_empty"),
        (lambda: torch.zeros(1).expand(7), "clone"),
        (lambda: torch.zeros(9).as_strided((7,), (0,)), "clone"),
        (lambda: torch.zeros(9).unfold(0, 3, 1), "clone"),
    ],
)
def test_tensors_without_memory_of_their_own(bad: Callable[[], Any], what: str, tmp_path: Path) -> None:
    """What cannot take the values is named before another tensor is overwritten."""
    save(tmp_path / "c", {**_small(), "b": torch.ones(bad().shape)})
    state = {"a": torch.zeros(5, 6), "b": bad(), "step": 0}
    with pytest.raises(CheckpointError, check=lambda error: error.where == "b" and what in str(error.todo)):
        load(tmp_path / "c", state)
    assert not state["a"].any()


def _lazy() -> dict[str, torch.Tensor]:
    numbers = torch.tensor([[1 + 2j, 3 - 1j], [5 + 4j, 7 - 6j]])
    return {
        "conj": numbers.conj(),
        "neg": numbers.conj().imag,
        "one of a column": torch.arange(6.0).view(2, 3)[1:, 0],
        "turned": numbers.t().conj(),
    }


@pytest.mark.parametrize("form", ["native", "zarr"])
def test_memory_that_is_not_what_it_says(form: Format, tmp_path: Path) -> None:
    """Lazily conjugated and negated tensors, and one element with a column's stride, are saved and filled."""
    expected = {name: tensor.clone() for name, tensor in _lazy().items()}
    save(tmp_path / "c", {**_lazy(), "own": PerRank(_lazy())}, format=form)
    back = _lazy()
    for tensor in back.values():
        tensor.zero_()

    load(tmp_path / "c", {**back, "own": PerRank(None)})

    for name, tensor in expected.items():
        assert back[name].any() and torch.equal(tensor, back[name]), name
        assert torch.equal(tensor, read_state(tmp_path / "c").per_rank_values()[0]["own"][name]), name
    assert back["conj"].is_conj() and back["neg"].is_neg()


def test_arrays_of_any_form(tmp_path: Path) -> None:
    """Arrays without dims keep them; arrays in another order are stored and filled by value."""
    values = np.arange(6.0).reshape(2, 3)
    frozen = values.copy()
    frozen.setflags(write=False)
    state = {"none": np.array(2.5), "turned": values.T, "back": values[::-1], "frozen": frozen}
    save(tmp_path / "c", state)
    into = {"none": np.array(0.0), "turned": np.zeros((3, 2)), "back": np.zeros((2, 3), order="F")}

    load(tmp_path / "c", {**into, "frozen": np.zeros((2, 3))})

    assert all(np.array_equal(into[name], state[name]) for name in into)
    assert read_state(tmp_path / "c").tree(read=True)["none"].shape == ()
    for bad, what in (
        (frozen, "read-only"),
        (np.zeros((2, 3))[::-1], "strides"),
        (np.zeros((2, 3), ">f8"), ">f8"),
    ):
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path / "c", {"frozen": bad}, strict=False)
        assert str(caught.value.where).startswith("frozen ") and what in str(caught.value.got)
    assert np.array_equal(frozen, values)


_circle: dict[str, Any] = {}
_circle["inside"] = _circle


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (np.arange(3, dtype=">f4"), "dtype >f4"),
        (np.longdouble(0.1), "numpy.longdouble"),
        (np.array([object()]), "dtype object"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
        (_circle, "inside itself"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_values_that_have_no_place(value: Any, what: str, tmp_path: Path) -> None:
    """What cannot be stored is refused in a sentence before anything is written."""
    with pytest.raises(CheckpointError, match=what):
        save(tmp_path / "c", {"x": value() if callable(value) else value})
    assert not (tmp_path / "c").exists()


def test_arguments_that_cannot_be(tmp_path: Path) -> None:
    """No path, and metadata that is no JSON, are refused with what was wrong."""
    with pytest.raises(ArgumentError, check=lambda error: error.got == "''"):
        save("", _small())
    for metadata in ({"x": float("nan")}, {"x": object()}, {"x": {1j: 2}}):
        with pytest.raises(CheckpointError, match="`metadata`"):
            save(tmp_path / "c", _small(), metadata=metadata)
    assert not list(tmp_path.glob("c/data-*"))


@pytest.mark.parametrize("at", range(8))
def test_control_c_in_a_save(at: int, tmp_path: Path) -> None:
    """An interrupt at any operation leaves the old checkpoint or the new one, no half one, no lock, no thread."""
    save(tmp_path / "c", _small())
    threads = set(threading.enumerate())
    storage = FaultyStorage(LocalStorage(tmp_path / "c"), fail_at=at, error=KeyboardInterrupt)  # type: ignore[arg-type]
    new = {**_small(), "step": 4}

    with pytest.raises(KeyboardInterrupt):
        save(storage, new, overwrite=True)

    assert read_state(tmp_path / "c").tree()["step"] in (3, 4)
    assert verify(tmp_path / "c").ok
    assert set(threading.enumerate()) <= threads
    save(tmp_path / "c", new, overwrite=True)
    assert read_state(tmp_path / "c").tree()["step"] == 4
    assert len(list((tmp_path / "c").glob("data-*"))) == 1


class _FullDisk(LocalStorage):
    """A root whose steps find no room."""

    full = True

    def child(self, name: str) -> Any:
        inner = super().child(name)
        return FaultyStorage(inner, fail_at=1) if self.full else inner


def test_a_full_disk_behind_training(tmp_path: Path) -> None:
    """An asynchronous save's error is raised by wait(), or by the next save, once; then saving goes on."""
    root = _FullDisk(tmp_path / "run")
    manager = CheckpointManager(root, asynchronous=True)
    manager.save(1, _small())
    with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOSPC):
        manager.wait()
    handle = manager.save(2, _small())
    assert handle is not None and handle.exception() is not None
    with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOSPC):
        manager.save(3, _small())
    root.full = False
    manager.save(4, _small())
    manager.wait()
    assert manager.steps() == [4]
    with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOSPC):
        async_save(FaultyStorage(LocalStorage(tmp_path / "c"), fail_at=1), _small()).wait()


def test_torn_steps_do_not_count(tmp_path: Path) -> None:
    """keep_last counts committed steps; torn ones are removed once a newer step is committed."""
    manager = CheckpointManager(tmp_path, retention=2)
    for step in (1, 2, 3):
        manager.save(step, _small())
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    (tmp_path / "step-00000009").mkdir()
    os.utime(tmp_path / "step-00000002", (2**33, 2**33))  # clocks do not matter, only numbers

    manager.save(4, _small())

    assert manager.steps() == [2, 4]
    manager.close()
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000002", "step-00000004", "step-00000009"]


class _Loader:
    """An object whose state has as many keys as it has read files."""

    def __init__(self, num_files: int) -> None:
        self.places = {f"file{number}": number for number in range(num_files)}
        self.seen = torch.full((2,), float(num_files))

    def state_dict(self) -> dict[str, Any]:
        return vars(self)  # its own dict, as careless objects do

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = {**state, "places": dict(state["places"])}


@pytest.mark.parametrize("now", [1, 5])
def test_an_object_gets_what_it_gave(now: int, tmp_path: Path) -> None:
    """Keys that an object has now and had not when it was saved are not mixed in; the object's own dict stays."""
    save(tmp_path / "c", {"loader": _Loader(3)})
    loader = _Loader(now)

    load(tmp_path / "c", {"loader": loader})

    assert loader.taken["places"] == {"file0": 0, "file1": 1, "file2": 2}
    assert loader.taken["seen"].tolist() == [3, 3] and len(loader.places) in (now, 3)


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that changes its folder while saves are in flight does not take them along."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    manager = CheckpointManager("run", asynchronous=True)
    manager.save(1, _small())
    handle = async_save("alone", _small())
    monkeypatch.chdir(tmp_path / "there")
    handle.wait()
    manager.save(2, _small())
    manager.wait()
    assert manager.steps() == [1, 2]
    assert sorted(os.listdir(tmp_path / "here")) == ["alone", "run"] and not os.listdir(tmp_path / "there")


def test_files_go_by_the_umask(tmp_path: Path) -> None:
    """What a group shares it can write to, lock included."""
    before = os.umask(0o002)
    try:
        save(tmp_path / "c", _small())
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "c").rglob("*") if path.is_file()}
    assert len(modes) == 3 and set(modes.values()) == {0o664}


def test_what_lies_there_instead(tmp_path: Path) -> None:
    """A folder that is no native checkpoint is named, with what reads it; `load` refuses what is of no format."""
    CheckpointManager(tmp_path / "steps").save(1, _small())
    for name, file in (("dcp", ".metadata"), ("hf", "model.safetensors"), ("torn", "data-0/x")):
        (tmp_path / name / file).parent.mkdir(parents=True)
        (tmp_path / name / file).touch()
    for name, reader in (
        ("steps", "CheckpointManager"),
        ("dcp", "dcp.load"),
        ("hf", "vescale-convert to-native"),
        ("torn", ""),
        ("none", ""),
    ):
        with pytest.raises(NoCheckpointError) as caught:
            read_state(tmp_path / name)
        assert caught.value.where == str(tmp_path / name) and reader in str(caught.value.todo)
    for name in ("steps", "torn", "none"):
        with pytest.raises(NoCheckpointError):
            load(tmp_path / name, _small())


def test_what_else_lies_among_the_steps(tmp_path: Path) -> None:
    """Numbers in another form are no steps, files no obstacle; of a linked step only the link is removed."""
    save(tmp_path / "archive", _small())
    root = tmp_path / "run"
    for name in (".hidden", "step-5", "step-00000001.bak", "step-000000002"):
        (root / name).mkdir(parents=True)
    save(root / "step-000000002", _small(), overwrite=True)
    (root / "step-00000003").write_text("a file")
    (root / "step-00000004").symlink_to(tmp_path / "archive")
    manager = CheckpointManager(root, retention=1)
    assert manager.steps() == [4]

    manager.save(5, _small())
    manager.save(6, _small())

    assert manager.steps() == [6] and verify(tmp_path / "archive").ok
    assert {".hidden", "step-5", "step-00000001.bak", "step-000000002"} < set(os.listdir(root))


_SETS = """
import sys
from vescale_fsdp.checkpoint import read_state, save
names = [f"{a}{b}" for a in "abcd" for b in "xyz"]
save(sys.argv[1], {"s": {frozenset(names[i::5]) for i in range(5)} | {1, None, (2, "a")}})
print(read_state(sys.argv[1]).manifest.structure.digest.hex())
"""


@pytest.mark.part("formats")
def test_sets_have_one_order(tmp_path: Path) -> None:
    """Ranks are processes that hash texts in their own ways; the same sets are the same structure on all."""
    digests = set()
    for seed in ("1", "2"):
        command = [sys.executable, "-c", _SETS, str(tmp_path / seed)]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        digests.add(run_command(command, check=True, env=environment).stdout)
    assert len(digests) == 1


def test_users_data_as_it_was(tmp_path: Path) -> None:
    """What is stored beside the state is that of the call too, whatever becomes of it behind training."""
    metadata = {"seen": [1]}
    handle = async_save(tmp_path / "c", _small(), metadata=metadata)
    metadata["seen"].append(2)
    handle.wait()
    assert read_state(tmp_path / "c").metadata == {"seen": [1]}
    with pytest.raises(CheckpointError, match="`metadata`"):
        async_save(tmp_path / "d", _small(), metadata={"seen": object()}).wait()


def test_arguments_with_a_slip(tmp_path: Path) -> None:
    """A pattern for nothing, a way to verify that there is not, and half a step are told instead of taken."""
    save(tmp_path / "c", _small())
    state = {"a": torch.zeros(5, 6), "b": torch.zeros(7), "step": 0}
    with pytest.raises(CheckpointError, check=lambda error: error.got == "'model/*'"):
        load(tmp_path / "c", state, include=["a", "model/*"])
    assert not state["a"].any()
    load(tmp_path / "c", state, include=["a", "*a*"])
    load(tmp_path / "c", state, include="model/*", strict=False)
    assert state["a"].any() and not state["b"].any()
    with pytest.raises(ArgumentError, check=lambda error: str(error.got) == "True"):
        load(tmp_path / "c", state, verify=True)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, check=lambda error: error.got == "1.5"):
        CheckpointManager(tmp_path / "run").save(1.5, _small())  # type: ignore[arg-type]


def test_one_tensor_under_either_spelling(tmp_path: Path) -> None:
    """The converter's names are found too, unless several tensors, or a name of its own, have the same."""
    state = {"m": {"a.b": torch.tensor(1), "c/d": torch.tensor(2)}, "x": {"y.z": torch.tensor(3)}}
    save(
        tmp_path / "c",
        {**state, "x.y": {"z": torch.tensor(4)}, "m.e": torch.tensor(5), "m2": {"m.e": torch.tensor(6)}},
    )
    reader = read_state(tmp_path / "c")
    found = {name: int(reader[name].read()) for name in ("m.a.b", "m/a.b", "m.c/d", "m.e", "m2.m.e")}
    assert found == {"m.a.b": 1, "m/a.b": 1, "m.c/d": 2, "m.e": 5, "m2.m.e": 6}
    for pattern in ("m/a*", "m.a*"):
        wanted = {"m": {"a.b": torch.tensor(0), "c/d": torch.tensor(0)}}
        report = load(tmp_path / "c", wanted, include=pattern)
        assert {name: int(t) for name, t in wanted["m"].items()} == {"a.b": 1, "c/d": 0}, report
    assert "x.y.z" not in reader and "x/y.z" in reader and list(reader).count("m.a.b") == 1
