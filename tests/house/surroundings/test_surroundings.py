"""Every public function under odd surroundings does what it does in plain ones, or refuses with an error of ours."""

from __future__ import annotations

import ast
import errno
import inspect
import json
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import Pipe
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn

import pytest
import torch

from tests.house.docs.public_names import PUBLIC, is_ours
from tests.house.surroundings.recipes import GROUP, SOLO, Recipe, describe
from tests.house.test_names import FILES, ROOT
from tests.support.distributed import run_ranks
from tests.support.processes import run_command
from vescale_fsdp.checkpoint import async_save, verify

Surroundings = Callable[[], AbstractContextManager[Any]]


@contextmanager
def _default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


MODES: dict[str, Surroundings] = {
    "default device meta": lambda: _default_device("meta"),
    "default device cpu": lambda: _default_device("cpu"),
    "torch.device": lambda: torch.device("meta"),
    "default dtype float64": lambda: _default_dtype(torch.float64),
    "default dtype bfloat16": lambda: _default_dtype(torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "deterministic": _deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


# Where torch itself does something else.
TORCHS_OWN = {
    ("loaders", "default device meta"): "a DataLoader draws its seed on the default device",
    ("loaders", "torch.device"): "likewise",
    ("switches", "autocast"): "the forward computes in bfloat16",
    ("steps_in_backward", "autocast"): "likewise",
    ("steps_in_backward", "default dtype float64"): "AdamW counts steps in the default dtype",
}
# Public names that no recipe calls: the beginning of the name, and why.
NOT_CALLED = {
    "vescale_fsdp.elastic.ElasticJob": "several processes: tests/vescale_fsdp/elastic",
    "vescale_fsdp.elastic.Membership": "likewise",
    "vescale_fsdp.elastic.StoreMembership": "likewise",
    "vescale_fsdp.elastic.Quorum": "names of hosts alone: tests/vescale_fsdp/elastic",
    "vescale_fsdp.transfer.joint_ranks": "several jobs: tests/vescale_fsdp/transfer/test_joint_ranks.py",
    "vescale_fsdp.transfer.JointRanks": "likewise",
    "vescale_fsdp.conversion.HuggingFace": "several ranks: tests/conversion/formats/huggingface/test_form.py",
    "vescale_fsdp.FSDPModule.set_custom": "collectives of the user's: tests/vescale_fsdp/runtime/setup",
    "vescale_fsdp.FSDPModule.set_separate": "makes a group: tests/vescale_fsdp/runtime/test_switches.py",
    "vescale_fsdp.FSDPModule.set_allocate": "a GPU's memory",
    "vescale_fsdp.FSDPModule.set_symm_mem": "a GPU's memory",
    "vescale_fsdp.FSDPModule.set_post_optim_event": "a GPU's event",
    "vescale_fsdp.FSDPModule.set_manual": "tests/vescale_fsdp/runtime/test_fsdp2_surface.py",
    "vescale_fsdp.FSDPModule.finalize_backward": "likewise",
    "vescale_fsdp.FSDPModule.set_reduce_scatter_divide_factor": "deprecated: it calls another one",
    "vescale_fsdp.RaggedDTensor": "the parts of a tensor that recipes do not ask for are arithmetic on integers",
    "vescale_fsdp.checkpoint.dcp.Ragged": "torch.distributed.checkpoint calls the parts that it needs",
    "vescale_fsdp.checkpoint.RamTier": "the manager calls the parts that it needs",
    "vescale_fsdp.checkpoint.BeforeDeadline": "numbers alone, as all policies: tests/checkpoint/steps",
    "vescale_fsdp.checkpoint.BestOf": "likewise",
    "vescale_fsdp.checkpoint.EveryMinutes": "likewise",
    "vescale_fsdp.checkpoint.OnSignal": "likewise",
    "vescale_fsdp.checkpoint.SavePolicy": "likewise",
    "vescale_fsdp.conversion": "no tensors of torch's, but for formats of torch's: tests/conversion",
    "vescale_fsdp.transfer.StateDescription": "integers and names alone: tests/vescale_fsdp/transfer/test_plan.py",
    "vescale_fsdp.transfer.TransferPlan": "likewise",
    "vescale_fsdp.optim.": "what a step does not call checks a state: tests/vescale_fsdp/optim/test_state_dict.py",
    "vescale_fsdp.quantize.BlockCodec": "abstract",
    "vescale_fsdp.checkpoint.data.Reshardable": "a protocol",
}


def _outcome(recipe: Recipe, folder: Path, surroundings: AbstractContextManager[Any]) -> Any:
    """What a user sees of a call; of an error, its class."""
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    call = recipe(folder)
    try:
        with surroundings:
            found = call()
        return describe(_evaluated(found))
    except Exception as error:  # noqa: BLE001  compared with what is allowed
        return f"{type(error).__name__}: {error}"


def _evaluated(value: Any) -> Any:
    return _evaluated(value()) if callable(value) and not isinstance(value, torch.nn.Module) else value


def _differences(folder: Path, recipes: tuple[Recipe, ...], odd: dict[str, Surroundings]) -> list[str]:
    found = []
    for recipe in recipes:
        plain = _outcome(recipe, folder / recipe.__name__ / "plain", nullcontext())
        assert not isinstance(plain, str), (recipe.__name__, plain)
        for name, surroundings in odd.items():
            got = _outcome(recipe, folder / recipe.__name__ / name, surroundings())
            if got != plain and (recipe.__name__, name) not in TORCHS_OWN:
                found.append(
                    f"{recipe.__name__} under {name}: {got if isinstance(got, str) else 'another result'}"
                )
    return found


def _modes(folder: Path) -> list[str]:
    return _differences(folder, SOLO + GROUP, MODES)


@pytest.mark.part("numerics")
def test_modes_of_torch(tmp_path: Path) -> None:
    """Another default device or dtype, no gradients, inference, determinism, autocast: the same values."""
    (found,) = run_ranks(1, _modes, tmp_path)
    assert not found, "\n".join(found)


def _functions() -> dict[str, CodeType]:
    """Public functions and methods of ours that are not of the layouts, which are integers and names alone."""
    found: dict[str, CodeType] = {}
    for full, value in PUBLIC.items():
        if not is_ours(value):
            continue
        if isinstance(value, FunctionType):
            found[full] = inspect.unwrap(value).__code__
        for kind in reversed(value.__mro__) if isinstance(value, type) else ():
            for name, member in vars(kind).items() if kind.__module__.startswith("vescale_fsdp") else ():
                raw = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
                if name.startswith("_") or not isinstance(raw, FunctionType):
                    continue
                code = inspect.unwrap(raw).__code__
                if code.co_filename.startswith("<"):
                    continue
                found[f"{full}.{name}"] = code
    return {name: code for name, code in found.items() if "/layout/" not in code.co_filename}


def _called(folder: Path) -> list[str]:
    wanted, seen = set(_functions().values()), set[CodeType]()

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code in wanted:
            seen.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        for recipe in SOLO + GROUP:
            _outcome(recipe, folder / recipe.__name__, nullcontext())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return [name for name, code in _functions().items() if code in seen]


def test_every_public_function_is_called(tmp_path: Path) -> None:
    """By a recipe, or there is a reason; no reason is left for what is called, or gone."""
    (called,) = run_ranks(1, _called, tmp_path)
    left = [name for name in _functions() if name not in called]
    assert called
    assert [name for name in left if not name.startswith(tuple(NOT_CALLED))] == []
    assert [start for start in NOT_CALLED if not any(name.startswith(start) for name in left)] == []


_FACTORIES = frozenset(
    (
        *(
            "arange",
            "as_tensor",
            "asarray",
            "empty",
            "empty_permuted",
            "empty_strided",
            "eye",
            "full",
            "linspace",
        ),
        *(
            "logspace",
            "normal",
            "ones",
            "rand",
            "randint",
            "randn",
            "randperm",
            "range",
            "scalar_tensor",
            "tensor",
        ),
        "zeros",
    )
)


def test_factories_name_device_and_dtype() -> None:
    """The user's defaults do not decide where our tensors are, nor what they hold."""
    found, count = [], 0
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=attr)) if (
                    attr in _FACTORIES
                ):
                    pass
                case _:
                    continue
            count += 1
            named = {keyword.arg for keyword in node.keywords}
            if not {"device", "dtype"} <= named and "out" not in named:
                found.append(f"{file.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert count > 50
    assert found == []


def _no_links(*args: object, **kwargs: object) -> NoReturn:
    raise OSError(errno.EPERM, "this file system has no hard links")


def _as_torchrun() -> None:
    numbers = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update({**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})


def _no_room() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))


def _without_links() -> None:
    os.link = _no_links


# What a forked child does before the call.
CHILDREN: dict[str, Callable[[], object]] = {
    "a forked child": lambda: None,
    "torchrun's variables": _as_torchrun,
    "a file system without hard links": _without_links,
    "no room on the disk": _no_room,
    **({"another user": lambda: os.setuid(65534)} if os.getuid() == 0 else {}),
}


# Where a call may also end in an error that says why.
REFUSED = {
    "no room on the disk": ("OSError", "CheckpointError", "ConversionError"),
}


@contextmanager
def _after(prepare: Callable[[], object]) -> Iterator[None]:
    prepare()
    yield


def _in_child(recipe: Recipe, folder: Path, prepare: Callable[[], object]) -> Any:
    """What a call gives in a forked child, which must come to an end."""
    ours, theirs = Pipe(duplex=False)
    process = os.fork()
    if process == 0:
        theirs.send_bytes(pickle.dumps(_outcome(recipe, folder, _after(prepare))))
        os._exit(0)
    theirs.close()
    try:
        return pickle.loads(ours.recv_bytes()) if ours.poll(60) else "hangs"
    except EOFError:
        return "the child died"
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _in_thread(recipe: Recipe, folder: Path) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(_outcome(recipe, folder, nullcontext())))
    thread.start()
    thread.join(60)
    return found[0] if found else "hangs"


def _processes(folder: Path) -> list[str]:
    """Differences between the plain call and that of a thread or child; ends with a save under way."""
    torch.set_num_threads(1)
    odd = []
    for recipe in SOLO:
        plain = _outcome(recipe, folder / recipe.__name__ / "plain", nullcontext())
        found = {
            name: _in_child(recipe, folder / recipe.__name__ / name, do) for name, do in CHILDREN.items()
        }
        found["a thread"] = _in_thread(recipe, folder / recipe.__name__ / "thread")
        for name, errors in REFUSED.items():  # with nothing half done, as is looked at below
            if isinstance(found[name], str) and found[name].startswith(errors):
                del found[name]
        odd += [
            f"{recipe.__name__} in {name}: {str(got)[:300]}" for name, got in found.items() if got != plain
        ]
    for manifest in folder.rglob("manifest.json"):
        # In the zarr form, the manifest is in a folder inside of the checkpoint.
        inside = manifest.parent.name == "vescale-checkpoint"
        if not verify(manifest.parent.parent if inside else manifest.parent).ok:
            odd.append(f"{manifest} is damaged")
    async_save(folder / "last", {"w": torch.arange(9.0)})
    return odd


@pytest.mark.part("faults")
def test_threads_children_and_the_end() -> None:
    """A thread, a forked child, torchrun's variables without a group, no hard links, no room, another user, the end."""
    with tempfile.TemporaryDirectory() as name:  # pytest's folders are closed to others
        Path(name).chmod(0o755)
        _check_processes(Path(name))


def _check_processes(folder: Path) -> None:
    done = run_command(
        [sys.executable, "-m", "tests.house.surroundings.test_surroundings", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout_s=240,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found, "\n".join(found)
    assert verify(folder / "last").ok


if __name__ == "__main__":
    print(json.dumps(_processes(Path(sys.argv[1]))))
