"""Record what the product does, as JSON, and compare two records: a change that only moves code leaves them equal.

    python -m tools.snapshot OUT.json                   record the checked-out tree: half a minute on one core
    python -m tools.snapshot OUT.json --only names      one section: conversions, commands, saves, collectives or names
    python -m tools.snapshot --compare A.json B.json    print every difference; the exit code is 1 if there are any

| section | what is recorded |
|---|---|
| conversions | all sources x `TARGETS` x `VARIANTS`: a digest of each file, or the error's class and attributes |
| commands | exit code and stdout of `COMMANDS` for every source; a digest of the report's page |
| saves | a digest of each file that two ranks save, and of the tensors that a load brings back |
| collectives | calls of process groups by kind, for each of `ACTIONS` on two ranks |
| names | public names with their signatures; of classes, those of public methods too |

Only public names and the command's entry point are used, so a record does not depend on where code is. Ids of saves are
counted instead of drawn, and those of conversions, which depend on the source's path and times, come from a folder of
a fixed name (`fixed_ids`, `fixed_folder`). Dates and other ids are replaced by `VOLATILE` before digests are computed,
the folder's path by ``TMP``. Two records can be compared if machine, torch and libraries are the same.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import io
import itertools
import json
import os
import re
import secrets
import shutil
import struct
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
import zarr
from safetensors.torch import save_file
from torch.distributed.tensor import Shard, distribute_tensor

from tests.conversion.formats import test_megatron, test_orbax, zero_folders
from tests.conversion.quantization import coded_weights
from tests.house.docs.public_names import MODULES, PACKAGES
from tests.remedies.made import MODEL, adapter_folder, hf_folder, torch_file
from tests.support.checkpoint_states import erase, mixed_state, plain
from tests.support.distributed import close_pool, cpu_mesh, run_ranks
from vescale_fsdp.checkpoint import CheckpointManager, async_save, load, save
from vescale_fsdp.conversion import ConvertOptions, HuggingFace, convert, open_source
from vescale_fsdp.conversion.__main__ import main as convert_command
from vescale_fsdp.errors import CheckpointError

Json = Any
GOLDEN = Path(__file__).parents[1] / "tests" / "checkpoint" / "golden"
SECTIONS = ("conversions", "commands", "saves", "collectives", "names")
RANKS = 2

# What differs between two runs of the same code: pattern -> its replacement, in files, in paths and in texts.
VOLATILE = (
    (r'"unix_s":[\d.]+', '"unix_s":0'),  # manifest.json
    (r'"seconds":[\d.e-]+', '"seconds":0'),  # manifest.json; the history on a report's page
    (r',"checksum":"[0-9a-f]{32}"', ',"checksum":""'),  # of manifest.json, over the two above
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID"),  # torch's, in .metadata
)

TARGETS = {"to-native": "native", "to-hf": "hf", "to-fsdp2": "dcp", "to-torch": "torch", "to-zarr": "zarr"}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cast": {"dtype": ("bf16",)},
    "cast some": {"dtype": ("*norm*=fp16",)},
    "quantize": {"quantize": ("fp8-128x128",)},
    "quantize some": {"quantize": ("*up*=mxfp4",)},
    "dequantize": {"dequantize": "bf16"},
    "rules": {"rules": "RULES", "rules_to": "ours"},
    "rules back": {"rules": "RULES", "rules_to": "hf"},
    "small files": {"max_shard_bytes": 400, "ranks": 3, "granularity": ("rows:2",)},
    "nested": {"optimizer": "nested", "prefix": "net."},
    "flattened": {"optimizer": "flattened", "exclude": ("*norm*",)},
}
ALONE = ("plain", "dequantize")  # the variants of quantized releases
COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "SRC"),
    "inspect --json": ("inspect", "SRC", "--json"),
    "verify": ("verify", "SRC"),
    "verify --json": ("verify", "SRC", "--json"),
    "verify --quick": ("verify", "SRC", "--quick"),
    "diff": ("diff", "SRC", "OTHER"),
    "diff --json": ("diff", "SRC", "OTHER", "--json", "--model-only", "--ignore-dtype"),
    "report": ("report", "SRC", "--out", "PAGE"),
    "plan": ("plan", "SRC", "--shards", "2,8"),
    "plan --json": ("plan", "SRC", "--shards", "3", "--granularity", "rows:2", "--json"),
    "to-hf --dry-run": ("to-hf", "SRC", "OUT", "--dry-run"),
    "to-native --json": ("to-native", "SRC", "OUT", "--json", "--threads", "1"),
}

# For `MODEL`, for the model of `_training`, and for flax's names in the Orbax source.
RULES = """
format = 1
[[rule]]
hf = "up.weight"
ours = "core.up.kernel"
ops = [{ transpose = [1, 0] }]
[[rule]]
hf = "norm.weight"
ours = "core.norm.scale"
[[rule]]
hf = "layers.{l}.weight"
ours = "layers_{l}.kernel"
ops = [{ transpose = [1, 0] }]
[[rule]]
hf = "layers.{l}.bias"
ours = "layers_{l}.bias"
[[rule]]
hf = "embed.weight"
ours = "embed.embedding"
"""


# --- Sources


def make_sources(root: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Write all sources.

    Returns:
        name -> path, and the options that every conversion of that source gets.
    """
    makers: dict[str, Callable[[Path], object]] = {
        "dcp": lambda path: dcp.save(_training(), checkpoint_id=path, no_dist=True),
        "torch": lambda path: torch_file(path, _training()),
        "safetensors": lambda path: save_file(MODEL, path, {"format": "pt"}),
        "hf": lambda path: hf_folder(path, MODEL, model_type="none"),
        "hf of two files": _two_files,
        "hf in fp32, large": lambda path: hf_folder(path, _large()),
        "bin": _bin_folder,
        "adapter": adapter_folder,
        "zarr library": _zarr_arrays,
        "gguf": _gguf,
        "orbax": lambda path: test_orbax.write_orbax(path, 2),
        "orbax of zarr 3": lambda path: test_orbax.write_orbax(path, 3),
        "zero 1": lambda path: zero_folders.write_zero(path, zero_folders.some_state(), stage=1, ranks=2),
        "zero 3": lambda path: zero_folders.write_zero(path, zero_folders.some_state(), stage=3, ranks=2),
        "universal": lambda path: zero_folders.write_universal(path, zero_folders.some_state(), stage=1),
        "run": _run_folder,
        "two models": lambda path: torch_file(path, {"student": MODEL, "teacher": MODEL}),
        "wrapped": lambda path: torch_file(path, {"model": {f"_orig_mod.{n}": t for n, t in MODEL.items()}}),
        "optimizer alone": lambda path: torch_file(path, {"optimizer": _training()["optimizer"]}),
        "a class": lambda path: torch_file(path, {"model": MODEL, "args": Counter(a=1)}),
        "nothing": lambda path: path.mkdir(),
        "missing": lambda path: None,
        "a text": lambda path: path.write_text("no checkpoint"),
    }
    suffixes = {"torch": ".pt", "safetensors": ".safetensors", "gguf": ".gguf", "a text": ".safetensors"}
    suffixes |= dict.fromkeys(("two models", "wrapped", "optimizer alone", "a class"), ".pt")
    sources: dict[str, tuple[Path, dict[str, Any]]] = {}
    for golden in sorted(GOLDEN.iterdir()):
        name = f"golden {golden.name.split('-', 1)[1]}"  # without the version
        shutil.copytree(golden, root / name)
        sources[name] = (root / name, {})
    for name, make in makers.items():
        path = root / f"{name}{suffixes.get(name, '')}"
        make(path)
        sources[name] = (path, {})
    (root / "assets").mkdir()
    (root / "assets" / "config.json").write_text(json.dumps(test_megatron.CONFIG))
    for family in ("llama", "mixtral"):
        weights = test_megatron.megatron_weights(test_megatron.hf_weights(family), family)
        path = test_megatron.write(root / f"megatron {family}", weights, is_stacked=family == "llama")
        sources[path.name] = (path, {"assets": str(root / "assets"), "rules": f"megatron-{family}"})
    for name, path in _damaged(root, sources).items():
        sources[name] = (path, {})
    rows = coded_weights.rows()
    for name in {name.split()[0]: name for name in reversed(rows)}.values():  # the first row of each scheme
        torch.manual_seed(0)
        path = rows[name]().write(root / f"coded {name}")
        _sort_metadata(path / "model.safetensors")
        sources[path.name] = (path, {})
    return sources


def _training() -> dict[str, Any]:
    """A training state: bfloat16 weights, moments, groups, and other entries."""
    torch.manual_seed(0)
    model = {
        "up.weight": torch.randn(8, 6).bfloat16(),
        "norm.weight": torch.ones(6),
        "tied.weight": torch.randn(3, 6),
        "table": torch.arange(7),
    }
    states = {
        name: {"step": torch.tensor(3.0), "exp_avg": torch.randn_like(t), "exp_avg_sq": torch.rand_like(t)}
        for name, t in model.items()
        if t.is_floating_point()
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "fused": None, "params": list(states)}]
    model["head.weight"] = model["tied.weight"]
    optimizer = {"state": states, "param_groups": groups}
    return {"model": model, "optimizer": optimizer, "step": 7, "data": {"seen": torch.arange(3), "name": "x"}}


def _large() -> dict[str, torch.Tensor]:
    """Weights of several blocks, the last of them not whole."""
    torch.manual_seed(0)
    return {
        "up.weight": torch.randn(256, 192),
        "norm.weight": torch.ones(192),
        "embed.weight": torch.ones(9, 192),
    }


def _two_files(path: Path) -> None:
    path.mkdir()
    places = {}
    for number, (name, tensor) in enumerate(MODEL.items(), 1):
        places[name] = f"model-{number:05d}-of-{len(MODEL):05d}.safetensors"
        save_file({name: tensor}, path / places[name], {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")


def _bin_folder(path: Path) -> None:
    path.mkdir()
    torch_file(path / "pytorch_model.bin", MODEL)
    (path / "config.json").write_text("{}")


def _zarr_arrays(path: Path) -> None:
    group = zarr.create_group(path)
    for name, tensor in MODEL.items():
        array = group.create_array(name, shape=tensor.shape, dtype="float32", chunks=(3,) * tensor.ndim)
        array[...] = tensor.numpy()


def _gguf(path: Path) -> None:
    """Two tensors of plain numbers, and one setting."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    arrays: dict[str, np.ndarray[Any, Any]] = {
        "blk.0.attn_q.weight": np.arange(35, dtype=np.float32).reshape(7, 5),
        "b": np.ones(6, np.float16),
    }
    head = b"GGUF" + struct.pack("<IQQ", 3, len(arrays), 1)
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    data = b""
    for name, array in arrays.items():
        head += text(name) + struct.pack(f"<I{array.ndim}Q", array.ndim, *reversed(array.shape))
        head += struct.pack("<IQ", array.dtype.itemsize % 4 // 2, len(data))  # type 0: float32, 1: float16
        data += array.tobytes() + bytes(-array.nbytes % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def _run_folder(path: Path) -> None:
    with CheckpointManager(path) as manager:
        for step in (3, 6):
            manager.save(step, _training())


def _damaged(root: Path, sources: dict[str, tuple[Path, dict[str, Any]]]) -> dict[str, Path]:
    """Copies of sources with a flipped bit, without the last bytes, and without a file."""
    found = {}
    for name, pattern in {
        "golden native": "*.safetensors",
        "golden zarr": "*/c/0/0",
        "dcp": "*.distcp",
    }.items():
        for kind in ("flipped", "cut off", "without"):
            copy = root / f"{kind} {name}"
            shutil.copytree(sources[name][0], copy)
            file = min(copy.rglob(pattern))
            data = bytearray(file.read_bytes())
            data[-5] ^= 1
            file.write_bytes(data if kind == "flipped" else data[:-5])
            if kind == "without":
                file.unlink()
            found[copy.name] = copy
    for name in ("hf", "bin"):
        copy = root / f"cut off {name}"
        shutil.copytree(sources[name][0], copy)
        file = min((*copy.glob("*.safetensors"), *copy.glob("*.bin")))
        file.write_bytes(file.read_bytes()[:-5])
        found[copy.name] = copy
    return found


# --- Values that are equal in every run


@contextmanager
def fixed_folder() -> Iterator[Path]:
    """Make a temporary folder of always the same name: ids of converted checkpoints depend on the source's path."""
    memory = Path("/dev/shm")  # thousands of small files are synchronized: on a busy disk that takes minutes
    root = (memory if memory.is_dir() else Path(tempfile.gettempdir()).resolve()) / "vescale-snapshot"
    try:
        root.mkdir()
    except FileExistsError as error:
        raise SystemExit(
            f"{root} exists: another run uses it, or a killed one left it to be removed"
        ) from error
    try:
        yield root
    finally:
        shutil.rmtree(root)


@contextmanager
def fixed_ids() -> Iterator[None]:
    """Let `secrets.randbits`, from which ids of saves are drawn, count from 1: ids are in files' checksums too."""
    numbers = itertools.count(1)
    with patch.object(secrets, "randbits", lambda bits: next(numbers)):
        yield


def _sort_metadata(file: Path) -> None:
    """Sort the ``__metadata__`` of a safetensors file; its library writes them in another order in every process."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


class Scrubber:
    """Replaces what differs between runs: `VOLATILE`, and the paths of the temporary folder."""

    def __init__(self, root: Path) -> None:
        pairs = [(re.escape(str(root)), "TMP"), *VOLATILE]
        self._patterns = [(re.compile(pattern.encode()), by.encode()) for pattern, by in pairs]

    def data(self, data: bytes) -> bytes:
        for pattern, by in self._patterns:
            data = pattern.sub(by, data)
        return data

    def value(self, value: Json) -> Json:
        """A JSON value; other objects as their text."""
        if isinstance(value, str):
            return self.data(value.encode(errors="surrogateescape")).decode(errors="replace")
        if isinstance(value, dict):
            return {str(self.value(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value if isinstance(value, int | float | None) else self.value(str(value))

    def files(self, path: Path) -> dict[str, str]:
        """Relative path -> digest, of a file or of all files of a folder."""
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        return {
            str(self.value(str(file.relative_to(path)))): _digest(self.data(file.read_bytes()))
            for file in files
            if file.is_file()
        }

    def error(self, error: BaseException) -> dict[str, Json]:
        """Its class and its parts; of an error of a library, its text."""
        parts = ("expected", "got", "where", "todo")
        found = {part: self.value(vars(error)[part]) for part in parts if part in vars(error)}
        return {"error": type(error).__name__} | (found or {"text": self.value(str(error))})


def _digest(data: bytes) -> str:
    return f"{len(data)} {xxhash.xxh3_64_hexdigest(data)}"


# --- Conversions


def record_conversions(
    sources: dict[str, tuple[Path, dict[str, Any]]], scrubber: Scrubber, root: Path
) -> Json:
    """Every source to every target in every variant; what is written stays in memory as digests."""
    (root / "rules.toml").write_text(RULES)
    return {
        name: {
            target: {
                variant: _conversion(path, kind, _options(root, given, variant), root / "out", scrubber)
                for variant in (ALONE if name.startswith("coded ") else VARIANTS)
            }
            for target, kind in TARGETS.items()
        }
        for name, (path, given) in sources.items()
    }


def _options(root: Path, given: dict[str, Any], variant: str) -> ConvertOptions:
    chosen = dict(VARIANTS[variant])
    if chosen.get("rules") == "RULES":
        chosen["rules"] = given.get("rules", str(root / "rules.toml"))
    return ConvertOptions(assets=given.get("assets"), threads=1, **chosen)


def _conversion(path: Path, kind: str, options: ConvertOptions, out: Path, scrubber: Scrubber) -> Json:
    target = out.with_suffix(".pt") if kind == "torch" else out
    try:
        with fixed_ids():
            report = convert(open_source(str(path)), str(target), kind, options)
    except Exception as error:  # noqa: BLE001  whatever it is, it is what is recorded
        left = scrubber.files(target) if target.exists() else {}
        _remove(target)
        return scrubber.error(error) | ({"left": left} if left else {})
    found = {
        "files": scrubber.files(target),
        "warnings": scrubber.value(report.warnings),
        "dropped": [report.dropped_optimizer, scrubber.value(report.dropped_others)],
    }
    _remove(target)
    return found


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- Commands


def record_commands(sources: dict[str, tuple[Path, dict[str, Any]]], scrubber: Scrubber, root: Path) -> Json:
    """Exit code and stdout of every command; `diff` compares with the torch source."""
    found: dict[str, Json] = {"rules": _command(("rules",), scrubber)}
    for name, (path, _) in sources.items():
        words = {"SRC": path, "OTHER": sources["torch"][0], "PAGE": root / "page.html", "OUT": root / "out"}
        found[name] = {}
        for title, command in COMMANDS.items():
            answer = _command(tuple(str(words.get(word, word)) for word in command), scrubber)
            if words["PAGE"].exists():
                answer["page"] = scrubber.files(words["PAGE"])
            found[name][title] = answer
            _remove(words["PAGE"])
            _remove(words["OUT"])
    return found


def _command(arguments: tuple[str, ...], scrubber: Scrubber) -> dict[str, Json]:
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(raw, encoding="utf-8")
    code: object = 0
    words = ["vescale-convert", *arguments]
    with (
        patch.object(sys, "argv", words),
        redirect_stdout(stdout),
        redirect_stderr(io.StringIO()),
        fixed_ids(),
    ):
        try:
            convert_command()
        except SystemExit as end:
            code = end.code
        finally:
            gc.enable()  # the command ends its process, and leaves this switched off
    stdout.flush()
    return {"code": code, "stdout": scrubber.value(raw.getvalue().decode()).splitlines()}


# --- Two ranks: saves, loads, and their collectives


def _collectives() -> list[str]:
    """Names of the methods by which process groups communicate."""
    words = ("reduce", "gather", "scatter", "broadcast", "alltoall", "barrier", "send", "recv")
    return [name for name in vars(dist.ProcessGroup) if any(word in name for word in words)]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of process groups' methods by name, of all threads."""
    counts: Counter[str] = Counter()

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return method(*args, **options)

        return call

    with ExitStack() as patches:
        for name in _collectives():
            method = getattr(dist.ProcessGroup, name)
            patches.enter_context(patch.object(dist.ProcessGroup, name, counting(name, method)))
        yield counts


def _repository(folder: Path) -> HuggingFace:
    return HuggingFace(assets=str(folder.parent / "settings"))


def _async(folder: Path, state: Any) -> None:
    async_save(folder / "async", state).wait()


def _managed(folder: Path, state: Any) -> None:
    with CheckpointManager(folder / "steps", asynchronous=True) as manager:
        manager.save(1, state)
        manager.wait()
        manager.save(2, state)


def _restored(folder: Path, state: Any) -> None:
    with CheckpointManager(folder / "steps") as manager:
        erase(state)
        manager.restore(state)


def _refused(folder: Path, state: Any) -> None:
    try:
        save(folder / "native", state)
    except CheckpointError:
        return
    raise AssertionError("a save replaced a checkpoint without being asked to")


def _loaded(name: str) -> Callable[[Path, Any], object]:
    def action(folder: Path, state: Any) -> object:
        erase(state)
        return load(folder / name, state)

    return action


def _converted(folder: Path, state: Any) -> None:
    part = ConvertOptions(part=(dist.get_rank(), dist.get_world_size()), threads=1)
    convert(open_source(str(folder / "native")), str(folder / "converted"), "hf", part)


def _rank_files(folder: Path, state: Any) -> None:
    (folder / "rank files").mkdir(exist_ok=True)
    values = {
        "up.weight": distribute_tensor(torch.arange(35.0).view(7, 5), cpu_mesh(), [Shard(0)]),
        "norm.weight": distribute_tensor(torch.arange(9.0), cpu_mesh(), [Shard(0)]),
        "count": torch.tensor(3),
    }
    torch.save(values, folder / "rank files" / f"model_world_size_{RANKS}_rank_{dist.get_rank()}.pt")


ACTIONS: dict[str, Callable[[Path, Any], object]] = {
    "native": lambda folder, state: save(folder / "native", state),
    "native, taken": _refused,
    "native again": lambda folder, state: save(folder / "native", state, overwrite=True),
    "zarr": lambda folder, state: save(folder / "zarr", state, format="zarr"),
    "hf": lambda folder, state: save(folder / "hf", {"model": state["model"]}, format=_repository(folder)),
    "dcp.save": lambda folder, state: dcp.save(state, checkpoint_id=folder / "dcp"),
    "rank files": _rank_files,
    "async": _async,
    "manager": _managed,
    "load": _loaded("native"),
    "load of zarr": _loaded("zarr"),
    "load of dcp": _loaded("dcp"),
    "load of async": _loaded("async"),
    "restore": _restored,
    "convert": _converted,
}
KEPT = ("native", "zarr", "hf", "dcp", "rank files")  # folders of these that are sources of conversions


def _act(folder: Path) -> dict[str, tuple[dict[str, int], str]]:
    """Action -> how often this rank communicated, and a digest of the state's tensors afterwards."""
    found = {}
    with warnings.catch_warnings(), fixed_ids():
        warnings.simplefilter("ignore")
        for name, action in ACTIONS.items():
            state = mixed_state()
            dist.barrier()
            with counted() as counts:
                action(folder, state)
            found[name] = (dict(sorted(counts.items())), _state_digest(plain(state)))
    return found


def _state_digest(value: Any) -> str:
    """A digest of nested containers with plain tensors and numbers."""
    hasher = xxhash.xxh3_64()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            hasher.update(f"{value.dtype} {tuple(value.shape)}".encode())
            hasher.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in value.items():
                hasher.update(f"{key}:".encode())
                add(item)
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            hasher.update(repr(value).encode())

    add(value)
    return hasher.hexdigest()


# --- Public names


def record_names() -> Json:
    """Module -> public name -> signature; of a class, those of its public methods and properties too."""
    found = {}
    for package in (*PACKAGES, *MODULES):
        module = importlib.import_module(package)
        found[package] = {name: _described(getattr(module, name)) for name in sorted(module.__all__)}
    return found


def _described(value: object) -> Json:
    if not inspect.isclass(value):
        return _signature(value) if callable(value) else type(value).__name__
    members: dict[str, Json] = {}
    for each in reversed(value.__mro__):
        if each.__module__.startswith("vescale_fsdp"):
            members |= {name: _signature(member) for name, member in vars(each).items() if name[:1] != "_"}
    bases = [base.__name__ for base in value.__mro__[1:-1] if not base.__module__.startswith("vescale_fsdp")]
    return {"bases": bases, "()": _signature(value)} | members


def _signature(value: Any) -> str:
    """Without the modules of types, and without addresses."""
    if isinstance(value, staticmethod | classmethod):
        return f"{type(value).__name__}{_signature(value.__func__)}"
    if not callable(value):
        return type(value).__name__
    try:
        text = str(inspect.signature(value))
    except ValueError:  # of C code
        return "(...)"
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+([A-Za-z_]\w*)", r"\1", re.sub(r" at 0x[0-9a-f]+", "", text))


# --- The whole, and comparisons


def record(only: str | None = None) -> dict[str, Json]:
    """Record all sections, or one.

    Returns:
        section -> JSON value; the same for every run of the same tree in the same environment.
    """
    sections = SECTIONS if only is None else (only,)
    found: dict[str, Json] = {}
    if sections == ("names",):
        return {"names": record_names()}
    with fixed_folder() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scrubber = Scrubber(root)
        sources: dict[str, tuple[Path, dict[str, Any]]] = {}
        if set(sections) - {"names"}:
            (root / "ranks").mkdir()
            (root / "settings").mkdir()
            (root / "settings" / "config.json").write_text("{}")
            answers = run_ranks(RANKS, _act, root / "ranks")
            close_pool()
            found["saves"] = {path.name: scrubber.files(path) for path in sorted((root / "ranks").iterdir())}
            for action in ACTIONS:
                found["saves"][f"state after {action}"] = [answer[action][1] for answer in answers]
            found["collectives"] = {action: [answer[action][0] for answer in answers] for action in ACTIONS}
            sources |= {f"{name} of ranks": (root / "ranks" / name, {}) for name in KEPT}
        if {"conversions", "commands"} & set(sections):
            (root / "sources").mkdir()
            torch.manual_seed(0)
            with fixed_ids():
                sources |= make_sources(root / "sources")
        for file in root.rglob("*"):
            os.utime(file, (1e9, 1e9))
        if "conversions" in sections:
            found["conversions"] = record_conversions(sources, scrubber, root)
        if "commands" in sections:
            found["commands"] = record_commands(sources, scrubber, root)
        if "names" in sections:
            found["names"] = record_names()
    return {section: found[section] for section in sections}


def differences(a: Json, b: Json, where: str = "") -> list[str]:
    """Compare two records.

    Returns:
        One line for each value that differs or that only one of them has, with its place.

    Examples:
        >>> differences({"w": {"x": 1, "y": 2}}, {"w": {"x": 3}})
        ['w / x: 1 -> 3', 'w / y: only in the first']
    """
    if isinstance(a, dict) and isinstance(b, dict):
        found = []
        for key in dict.fromkeys((*a, *b)):
            place = f"{where} / {key}" if where else key
            if key in a and key in b:
                found += differences(a[key], b[key], place)
            else:
                found.append(f"{place}: only in the {'first' if key in a else 'second'}")
        return found
    return [] if a == b and type(a) is type(b) else [f"{where}: {json.dumps(a)} -> {json.dumps(b)}"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Record what the product does, or compare two records.")
    parser.add_argument("out", nargs="?", type=Path, help="the file to write")
    parser.add_argument("--only", choices=SECTIONS, help="record one section")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="compare two records")
    chosen = parser.parse_args(arguments)
    if (chosen.out is None) == (chosen.compare is None):
        parser.error("give either OUT or --compare A B")
    if chosen.compare is None:
        chosen.out.write_text(json.dumps(record(chosen.only), indent=1, sort_keys=True) + "\n")
        return 0
    found = differences(*(json.loads(file.read_text()) for file in chosen.compare))
    print("\n".join(found) or "equal")
    return 1 if found else 0


if __name__ == "__main__":
    # By its name as a module, so that ranks in other processes find its functions.
    sys.exit(importlib.import_module("tools.snapshot").main())
