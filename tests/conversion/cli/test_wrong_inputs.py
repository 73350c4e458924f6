"""Wrong inputs, each told in one sentence, with what to do about it; and nothing is written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import save_file

from vescale_fsdp.checkpoint import save
from vescale_fsdp.conversion.cli.commands import cli
from vescale_fsdp.errors import VescaleError

PAGE = "<!DOCTYPE html><html><body>404: Not Found</body></html>\n" * 4
A, B = "base_model.model.up.lora_A.weight", "base_model.model.up.lora_B.weight"
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


def _adapter(path: Path, tensors: dict[str, torch.Tensor], config: object) -> None:
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (path / "adapter_config.json").write_text(text)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sound sources of all kinds, and broken ones."""
    root = tmp_path_factory.mktemp("sources")
    model = {"up.weight": torch.ones(8, 6), "norm.weight": torch.ones(6)}
    dcp.save({"model": model, "step": 3}, checkpoint_id=root / "dcp", no_dist=True)
    save(root / "native", {"model": model})
    torch.save({"model": model}, root / "a.pt")
    for name in ("hf", "page_config"):
        (root / name).mkdir()
        save_file(model, root / name / "model.safetensors", {"format": "pt"})
        (root / name / "config.json").write_text("{}" if name == "hf" else PAGE)
    pair = {A: torch.ones(2, 6), B: torch.ones(8, 2)}
    _adapter(root / "adapter", pair, LORA)
    _adapter(root / "bare", pair, None)
    _adapter(root / "page_adapter", pair, PAGE)
    _adapter(root / "untyped", pair, {"r": 2})
    _adapter(root / "prompt", pair, {"peft_type": "PROMPT_TUNING"})
    _adapter(root / "lone", {A: pair[A]}, LORA)
    _adapter(root / "rank", pair, LORA | {"r": 3})
    _adapter(root / "other", {name.replace("up", "down"): t for name, t in pair.items()}, LORA)
    _adapter(root / "long", {A: pair[A], B: torch.ones(9, 2)}, LORA)
    trained = {f"{A[:-7]}.{name}.weight": torch.ones(2, 6) for name in ("x", "y")}
    torch.save({**model, **trained}, root / "two.pt")
    for name, text in {
        "page.safetensors": PAGE,
        "page.pt": PAGE,
        "page.ckpt": PAGE,
        "rules.toml": "format = 1\n[[rule]\n",
        "old.toml": "format = 9\n",
        "table.toml": "format = 1\n[[rules]]\n",
        "prefix.toml": 'format = 1\n[[prefix]]\nhf = "a."\nours = "b."\n',
        "half.toml": 'format = 1\nkeep_others = true\n[[prefix]]\nhf = "a."\n',
        "idle.toml": 'format = 1\nkeep_others = true\n[[prefix]]\nhf = "a."\nours = "b."\n',
    }.items():
        (root / name).write_text(text)
    for name, file in {
        "page_dcp": ".metadata",
        "page_native": "manifest.json",
        "page_index": "model.safetensors.index.json",
        "page_bin": "pytorch_model.bin",
        "page_zarr": "zarr.json",
    }.items():
        (root / name).mkdir()
        (root / name / file).write_text(PAGE)
    torch.save([torch.ones(2)], root / "list.pt")
    torch.save(torch.ones(2), root / "tensor.pt")
    torch.save({"step": 3}, root / "numbers.pt")
    (root / "cut.pt").write_bytes((root / "a.pt").read_bytes()[:-100])
    (root / "lost").mkdir()
    index = {"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (root / "lost" / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "odd_config").mkdir()
    save_file(model, root / "odd_config" / "model.safetensors", {"format": "pt"})
    (root / "odd_config" / "config.json").write_text('{"architectures": 3, "tie_word_embeddings": [1]}')
    os.mkfifo(root / "pipe")
    (root / "empty").mkdir()
    (root / "text").mkdir()
    (root / "text" / "notes.txt").write_text("x")
    _empty_and_lost(root)
    _odd_headers(root)
    _odd_indices(root)
    _odd_states(root)
    return root


def _empty_and_lost(root: Path) -> None:
    """Files without bytes, settings without weights, links that lead nowhere, pipes."""
    for name in ("empty.pt", "empty.bin", "empty.safetensors"):
        (root / name).touch()
    for name in (".metadata", "manifest.json", "zarr.json", "model.safetensors", "pytorch_model.bin"):
        (root / f"empty_{name}").mkdir()
        (root / f"empty_{name}" / name).touch()
    for name in ("settings", "dangling", "circle", "piped"):
        (root / name).mkdir()
    (root / "settings" / "config.json").write_text("{}")
    (root / "dangling" / "model.safetensors").symlink_to("../blobs/1f")
    (root / "circle" / "model.safetensors").symlink_to("model.safetensors")
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "piped" / "model.safetensors")


def _odd_headers(root: Path) -> None:
    """Single files of safetensors, each wrong in one way."""

    def tensor(start: int, stop: int, shape: object = (4,), dtype: str = "F32") -> dict[str, object]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}

    one = json.dumps(tensor(0, 16))
    headers: dict[str, object] = {
        "overlap": {"v": tensor(0, 16), "w": tensor(8, 24)},
        "below": {"w": tensor(-16, 0)},
        "vast": {"w": tensor(0, 16, (1 << 40, 1 << 40))},
        "nan": {"w": tensor(0, 16, (float("nan"),))},
        "type": {"w": tensor(0, 16, (4,), "F99")},
        "number": {"__metadata__": {"a": 3}, "w": tensor(0, 16)},
        "long": {"w": tensor(0, 32, (8,))},
        "twice": f'{{"w": {one}, "w": {one}}}',
        "letters": b"\xff\xfe{}".decode("latin-1"),
    }
    for name, header in headers.items():
        data = (header if isinstance(header, str) else json.dumps(header)).encode("latin-1")
        (root / f"{name}.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(24))
    (root / "huge.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}" + bytes(24))


def _odd_indices(root: Path) -> None:
    """Folders whose index names what is not there, and arrays of zarr that cannot be."""
    maps: dict[str, object] = {"out": {"w": "../hf/model.safetensors"}, "listed": ["w"], "numbers": {"w": 3}}
    for name, places in maps.items():
        (root / name).mkdir()
        (root / name / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    sound = {"zarr_format": 2, "shape": [8, 6], "chunks": [8, 6], "dtype": "<f4", "order": "C"}
    sound |= {"compressor": None, "filters": None, "fill_value": 0}
    for name, wrong in {
        "below_zarr": {"shape": [-8, 6]},
        "flat_zarr": {"chunks": [8]},
        "thin_zarr": {"chunks": [0, 6]},
        "untyped_zarr": {"dtype": "<q9"},
        "object_zarr": {"dtype": "|O"},
        "filled_zarr": {"fill_value": "q"},
        "vast_zarr": {"shape": [10**12, 10**12]},
    }.items():
        (root / name / "w").mkdir(parents=True)
        (root / name / ".zgroup").write_text('{"zarr_format": 2}')
        (root / name / "w" / ".zarray").write_text(json.dumps(sound | wrong))


def _odd_states(root: Path) -> None:
    """What torch.save writes and no other format holds."""
    for name, state in {
        "sparse": {"w": torch.ones(4).to_sparse()},
        "meta": {"w": torch.empty(3, device="meta")},
        "joined": {"a.b": torch.ones(2), "a": {"b": torch.ones(3)}},
        "keys": {1: torch.ones(2), "1": torch.ones(3)},
        "nothing": {},
    }.items():
        torch.save(state, root / f"{name}.pt")


# Command lines; {name} is one of the sources, {out} a new folder.
WRONG = [
    "inspect {nowhere}",
    "inspect {empty}",
    "inspect {text}",
    "inspect {dcp} --step 3",
    "inspect {list.pt}",
    "inspect {tensor.pt}",
    "to-hf {numbers.pt} {out}",
    "inspect {cut.pt}",
    "inspect {page.pt}",
    "inspect {page.ckpt}",
    "inspect {page.safetensors}",
    "inspect {page_dcp}",
    "inspect {page_native}",
    "inspect {page_index}",
    "inspect {page_bin}",
    "inspect {page_zarr}",
    "inspect {lost}",
    "inspect {dcp} --from hf",
    "inspect {hf} --from native",
    "inspect {hf} --svg {out}",
    "diff {dcp} {nowhere}",
    "diff {dcp} {text}",
    "to-hf {page_config} {out}",
    "to-hf {dcp} {out} --assets {empty}",
    "to-hf {dcp} {out} --assets {page_config}",
    "to-hf {dcp} {out} --assets {hf} --include-asset *.model",
    "to-hf {dcp} {dcp}",
    "to-hf {dcp} {dcp}/inside",
    "to-hf {dcp} {text}",
    "to-hf {dcp} {a.pt}",
    "to-torch {dcp} {text}",
    "to-torch {dcp} {pipe}",
    "to-torch {dcp} {pipe} --overwrite",
    "to-hf {dcp} {pipe}",
    "to-hf {dcp} {out} --dtype =bf16",
    "diff {dcp} {dcp} --rtol nan",
    "diff {dcp} {dcp} --model nobody",
    "to-hf {dcp} {out} --model decoder",
    "to-hf {dcp} {out} --include w*",
    "to-hf {dcp} {out} --exclude *",
    "to-hf {dcp} {out} --dtype int8",
    "to-hf {dcp} {out} --dtype down*=bf16",
    "to-hf {dcp} {out} --part 2/2",
    "to-hf {dcp} {out} --part two",
    "to-hf {dcp} {out} --max-shard-size 0",
    "to-hf {dcp} {out} --memory-budget 1KB",
    "to-native {dcp} {out} --granularity cows:3",
    "to-fsdp2 {hf} {out} --rules {nowhere}.toml",
    "to-fsdp2 {hf} {out} --rules nobody",
    "to-fsdp2 {hf} {out} --rules {rules.toml}",
    "to-fsdp2 {hf} {out} --rules {old.toml}",
    "to-fsdp2 {hf} {out} --rules {table.toml}",
    "to-fsdp2 {hf} {out} --rules {prefix.toml}",
    "to-fsdp2 {hf} {out} --rules {half.toml}",
    "to-fsdp2 {hf} {out} --rules {idle.toml}",
    "to-fsdp2 {hf} {out} --rules torchtitan-llama",
    "to-hf {hf} {out} --dequantize bf16",
    "to-hf {hf} {out} --dequantize int4",
    "to-hf {hf} {out} --quantize nf4",
    "to-hf {hf} {out} --quantize mxfp4",
    "to-hf {hf} {out} --quantize fp8-128x128",
    "to-hf {hf} {out} --quantize down*=fp8-128x128",
    "to-hf {hf} {out} --quantize up*=fp8-128x128",
    "to-hf {hf} {out} --quantize *=keep",
    "to-hf {adapter} {out}",
    "to-hf {dcp} {out} --adapter",
    "to-hf {dcp} {out} --adapter --assets {hf}",
    "to-hf {dcp} {out} --adapter --assets {adapter}",
    "to-hf {two.pt} {out} --adapter --assets {adapter}",
    "to-hf {two.pt} {out} --adapter --adapter-name z --assets {adapter}",
    "to-hf {two.pt} {out} --adapter --adapter-name x --assets {rank}",
    "merge-adapter {hf} {nowhere} {out}",
    "merge-adapter {hf} {hf} {out}",
    "merge-adapter {adapter} {hf} {out}",
    "merge-adapter {hf} {adapter} {hf}",
    "merge-adapter {hf} {bare} {out}",
    "merge-adapter {hf} {page_adapter} {out}",
    "merge-adapter {hf} {untyped} {out}",
    "merge-adapter {hf} {prompt} {out}",
    "merge-adapter {hf} {lone} {out}",
    "merge-adapter {hf} {rank} {out}",
    "merge-adapter {hf} {other} {out}",
    "merge-adapter {hf} {long} {out}",
    "average {dcp} {nowhere} {out}",
    "average {dcp} {out}",
    "average {dcp} {dcp} {dcp}/inside",
    "average {native} {dcp} {dcp} --overwrite",
    "average {hf} {dcp} {out} --last 2",
    "average {dcp} {out} --last 2",
    "average {hf} {adapter} {out}",
    "average {dcp} {two.pt} {out} --to hf",
    "average {dcp} {dcp} {out} --copy x*",
    "combine {out} a+b a={dcp} b={nowhere}",
    "combine {out} a+b a={dcp}",
    "combine {out} a+ a={dcp}",
    "combine {out} a*a a={dcp}",
    "combine {out} a {dcp}",
    "combine {dcp} a+b a={hf} b={dcp} --to hf",
    *(f"inspect {{empty.{end}}}" for end in ("pt", "bin", "safetensors")),
    *(f"inspect {{empty_{end}}}" for end in (".metadata", "manifest.json", "zarr.json")),
    *(f"inspect {{empty_{end}}}" for end in ("model.safetensors", "pytorch_model.bin")),
    "to-hf {settings} {out}",
    "inspect {dangling}",
    "inspect {circle}",
    "inspect {loop}",
    "inspect {pipe}",
    "inspect {piped}",
    *(f"inspect {{{name}.safetensors}}" for name in ("overlap", "below", "vast", "nan", "type", "number")),
    *(f"inspect {{{name}.safetensors}}" for name in ("long", "twice", "letters", "huge")),
    *(f"inspect {{{name}}}" for name in ("out", "listed", "numbers")),
    *(
        f"inspect {{{name}_zarr}}"
        for name in ("below", "flat", "thin", "untyped", "object", "filled", "vast")
    ),
    *(f"inspect {{{name}.pt}}" for name in ("sparse", "meta", "joined", "keys")),
    "to-fsdp2 {nothing.pt} {out}",
    "diff {nothing.pt} {nothing.pt}",
    "to-native {dcp} {out} --ranks 99999999",
    "to-native {dcp} {out} --ranks 65537 --dry-run",
    "to-hf {dcp} {out} --part 0/99999999",
    "to-hf {dcp} {out} --part 7/99999999999999999999",
    "plan {dcp} --shards 99999999999999999999",
    "plan {dcp} --shards ²",
    "plan {dcp} --shards 4 --unit nobody",
    "to-hf {dcp} {out} --dtype bf16 --dtype fp16",
    "to-hf {dcp} {out} --dtype up*=bf16 --dtype up*=fp16",
    "to-hf {hf} {out} --quantize fp8-128x128 --quantize mxfp4",
    "to-native {dcp} {out} --granularity rows:2 --granularity *=rows:4",
    "to-hf {dcp} {blank}",
    "inspect {blank}",
    "to-hf {dcp} {out} --assets {loop}",
    "to-hf {dcp} {out} --assets {pipe}",
    "to-fsdp2 {hf} {out} --rules {pipe}",
    "to-torch {a.pt} {a.pt} --overwrite",
    "to-fsdp2 {dcp} {a.pt}/inside",
]


class _Paths(dict[str, str]):
    """Any name under the root."""

    def __init__(self, root: Path, out: Path) -> None:
        super().__init__(out=str(out), blank=" ")
        self.root = root

    def __missing__(self, name: str) -> str:
        return str(self.root / name)


def _arguments(line: str, paths: _Paths) -> list[str]:
    found = []
    for word in line.split():
        start, brace, rest = word.partition("{")
        name, _, end = rest.partition("}")
        found.append(start + paths[name] + end if brace else word)
    return found


@pytest.mark.parametrize("line", WRONG)
def test_one_sentence_and_what_to_do(root: Path, tmp_path: Path, line: str) -> None:
    """No traceback of anybody's, nothing under the target's name, nothing changed in the sources."""
    out = tmp_path / "out"
    before = {file: file.stat().st_mtime_ns for file in root.rglob("*") if file.is_file()}
    error = CliRunner().invoke(cli, _arguments(line, _Paths(root, out)), standalone_mode=False).exception
    assert isinstance(error, (VescaleError, click.ClickException)), repr(error)
    told = str(error) if isinstance(error, VescaleError) else error.format_message()
    first, *rest = told.splitlines()
    assert first.endswith(".") and first[0].isupper() and ". " not in first and len(first) < 200, told
    if isinstance(error, VescaleError):
        assert rest and rest[-1].startswith("  what to do: "), told
    assert not out.exists()
    assert {file: file.stat().st_mtime_ns for file in root.rglob("*") if file.is_file()} == before
    assert (root / "pipe").is_fifo()


def test_the_sources_are_sound(root: Path, tmp_path: Path) -> None:
    """The control: the same command lines without what is wrong in them."""
    for line in (
        "to-hf {dcp} {out}/a --assets {hf}",
        "to-hf {two.pt} {out}/b --adapter --adapter-name x --assets {adapter}",
        "merge-adapter {hf} {adapter} {out}/c",
        "average {dcp} {native} {out}/h",
        "combine {out}/i a-b/2 a={hf} b={dcp}",
        "to-fsdp2 {hf} {out}/d --exclude up*",
        "diff {dcp} {native}",
        "to-hf {odd_config} {out}/e",
        "to-native {dcp} {out}/f --ranks 3 --granularity rows:2 --granularity norm*=element",
        "to-hf {dcp} {out}/g --dtype bf16 --dtype bf16 --dtype norm*=fp32 --part 0/1",
    ):
        arguments = _arguments(line, _Paths(root, tmp_path))
        assert CliRunner().invoke(cli, arguments, catch_exceptions=False).exit_code == 0, line
