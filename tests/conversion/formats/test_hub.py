"""hf:// paths and --push, against a small Hub on loopback that huggingface_hub's own client talks to."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save

from tests.support.distributed import run_ranks
from tests.support.hub_server import Hub, running_hub
from tests.support.processes import run_command
from vescale_fsdp.checkpoint import load
from vescale_fsdp.checkpoint import save as save_checkpoint
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import CheckpointError

CONFIG = json.dumps({"model_type": "unknown-here", "tie_word_embeddings": False}).encode()
OLD, NEW = ({"w": torch.full((300, 400), value), "b": torch.ones(3)} for value in (1.0, 2.0))


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A Hub with two revisions of a public model, and a private one."""
    with running_hub() as hub:
        hub.add(
            "org/model",
            {"config.json": CONFIG, "model.safetensors": save(NEW), "sub/x.safetensors": save(OLD)},
        )
        hub.add("org/model", {"config.json": CONFIG, "model.safetensors": save(OLD)}, revision="v1")
        hub.add("org/secret", {"config.json": CONFIG, "model.safetensors": save(NEW)})
        hub.private["org/secret"] = "hf_key"
        yield hub


def _run(hub: Hub, folder: Path, *arguments: str, code: str = "", **variables: str) -> CompletedProcess[str]:
    """Run vescale-convert or code in a process of its own: the client reads the endpoint once, when it is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_DISABLE_XET": "1",
        **variables,
    }
    command = ["-c", code] if code else ["-m", "vescale_fsdp.conversion", *arguments]
    return run_command([sys.executable, *command], cwd=folder, env=environment, timeout_s=120)


LOAD = """
import torch
from vescale_fsdp.checkpoint import load
state = {"w": torch.zeros(300, 400), "b": torch.zeros(3)}
load(PATH, state)
print(float(state["w"].max()), float(state["w"].min()), float(state["b"].sum()))
"""


def test_load_reads_a_revision_and_a_folder(hub: Hub, tmp_path: Path) -> None:
    """The head, a named revision and a folder have their own values; one commit is named in all requests for files."""
    for path, value in (("hf://org/model", 2.0), ("hf://org/model@v1", 1.0)):
        done = _run(hub, tmp_path, code=LOAD.replace("PATH", repr(path)))
        assert done.stdout.split() == [str(value), str(value), "3.0"], done.stderr
    files = [path for _, path, _ in hub.requests if "/resolve/" in path]
    assert files and all(len(path.split("/")[4]) == 40 for path in files)


def test_inspect_reads_headers_only(hub: Hub, tmp_path: Path) -> None:
    """Of 16 MiB only the header is read, by ranges; nothing is in the cache afterwards."""
    hub.requests.clear()
    hub.add("org/model", {"model.safetensors": save({"w": torch.zeros(4 << 20)})})
    done = _run(hub, tmp_path, "inspect", "hf://org/model", "--json")
    found = json.loads(done.stdout)
    assert [tensor["name"] for tensor in found["tensors"]] == ["w"] and "@" in found["url"]
    spans = [span for _, path, span in hub.requests if path.endswith("model.safetensors")]
    assert spans and all(span is not None for span in spans)
    sizes = [int(last) - int(first) for first, last in (str(span)[6:].split("-") for span in spans)]
    assert sum(sizes) < 1 << 20
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_push_uploads_what_was_written(hub: Hub, tmp_path: Path) -> None:
    """The repository is made, and has the bytes of the folder; what was pushed is read again by its id."""
    arguments = ["to-hf", "hf://org/model@v1", "out", "--assets", "hf://org/model", "--push", "org/new"]
    done = _run(hub, tmp_path, *arguments, HF_TOKEN="hf_key")
    assert done.returncode == 0, done.stderr
    assert "pushed: " in done.stdout
    pushed = hub.repositories["org/new"]["main"]
    assert {"config.json", "model.safetensors"} <= set(pushed)
    for name, data in pushed.items():
        if name != ".gitattributes":
            assert data == (tmp_path / "out" / name).read_bytes(), name
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], OLD["w"])
    again = _run(hub, tmp_path, "diff", "hf://org/new", "hf://org/model@v1")
    assert again.returncode == 0 and "0 differences" in again.stdout, again.stdout + again.stderr


@pytest.mark.parametrize("bad", ["my model", "org/my/model", "model", "org/model--x@v1", "hf://org/"])
def test_a_bad_id_is_refused_before_anything_is_written(bad: str, hub: Hub, tmp_path: Path) -> None:
    """Neither is the source read, nor the Hub asked."""
    done = _run(hub, tmp_path, "to-hf", "nowhere", "out", "--push", bad, HF_TOKEN="hf_key")
    assert done.returncode == 1 and "org/model@branch" in done.stderr
    assert f"--push {bad}" in done.stderr and not (tmp_path / "out").exists() and not hub.requests


def test_a_second_push_leaves_no_weights_of_the_first(hub: Hub, tmp_path: Path) -> None:
    """One file, then several: transformers would load the old file if it were still there. Other files stay."""
    others = ("sub/model.safetensors", "models/x/weights.safetensors", "model_b/adapter_model.safetensors")
    hub.add(
        "org/new",
        {"model.safetensors": save(NEW), "README.md": b"mine", **dict.fromkeys(others, save(NEW))},
    )
    arguments = ["to-hf", "hf://org/model@v1", "out", "--max-shard-size", "100kB", "--push", "org/new"]
    done = _run(hub, tmp_path, *arguments, HF_TOKEN="hf_key")
    assert done.returncode == 0, done.stderr
    pushed = hub.repositories["org/new"]["main"]
    assert "model.safetensors" not in pushed and "model.safetensors.index.json" in pushed
    assert pushed["README.md"] == b"mine" and pushed.keys() >= set(others)


def test_a_push_of_a_model_removes_an_adapter(hub: Hub, tmp_path: Path) -> None:
    """With an adapter's config next to the weights, transformers would load the base that the config names."""
    old = ("adapter_config.json", "adapter_model.bin", "diffusion_pytorch_model.safetensors")
    kept = ("sub/adapter_config.json", "notes/adapter_model.bin")
    hub.add("org/new", dict.fromkeys((*old, *kept), b"{}"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter_config.json").write_bytes(b"{}")  # of an adapter that the model replaces
    arguments = ["to-hf", "hf://org/model@v1", "out", "--overwrite", "--push", "org/new"]
    done = _run(hub, tmp_path, *arguments, HF_TOKEN="hf_key")
    assert done.returncode == 0, done.stderr
    assert not {*old} & {path.name for path in (tmp_path / "out").iterdir()}
    pushed = hub.repositories["org/new"]["main"]
    assert {*kept, "config.json", "model.safetensors"} == pushed.keys() - {".gitattributes"}


def test_a_push_of_an_adapter_keeps_the_model(hub: Hub, tmp_path: Path) -> None:
    """An adapter may be stored next to its base, whose weights the commit does not replace."""
    base = {"config.json": CONFIG, "model.safetensors": save(NEW), "pytorch_model.bin": b"x"}
    hub.add("org/new", {**base, "adapter_model.bin": b"old"})
    module = "base_model.model.layers.0.q_proj"
    parts = {
        f"{module}.lora_A.default.weight": torch.ones(2, 3),
        f"{module}.lora_B.default.weight": torch.ones(4, 2),
    }
    torch.save({"model": parts}, tmp_path / "run.pt")
    (tmp_path / "settings").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (tmp_path / "settings" / "adapter_config.json").write_text(json.dumps(config))
    arguments = ["to-hf", "run.pt", "out", "--adapter", "--assets", "settings", "--push", "org/new"]
    done = _run(hub, tmp_path, *arguments, HF_TOKEN="hf_key")
    assert done.returncode == 0, done.stderr
    pushed = hub.repositories["org/new"]["main"]
    assert {name: pushed[name] for name in base} == base
    assert {"adapter_config.json", "adapter_model.safetensors"} == pushed.keys() - {*base, ".gitattributes"}


def test_tokens_and_errors(hub: Hub, tmp_path: Path) -> None:
    """A private repository needs its token; unknown ids and revisions are refused at once, with what to do."""
    assert _run(hub, tmp_path, "inspect", "hf://org/secret", HF_TOKEN="hf_key").returncode == 0
    hub.requests.clear()
    for path in ("hf://org/secret", "hf://org/nothing", "hf://org/model@v7"):
        done = _run(hub, tmp_path, "inspect", path)
        assert done.returncode == 1 and "HF_TOKEN" in done.stderr, done.stderr
    assert len(hub.requests) < 20  # not tried again and again
    for path in ("hf://gpt2", "hf://org"):
        for offline in ("0", "1"):
            done = _run(hub, tmp_path, "inspect", path, HF_HUB_OFFLINE=offline)
            assert done.returncode == 1 and "owner" in done.stderr, done.stderr
    done = _run(hub, tmp_path, "inspect", "org/model")
    assert done.returncode == 1 and "hf://org/model" in done.stderr
    done = _run(
        hub, tmp_path, code="from vescale_fsdp.checkpoint import save; save('hf://org/model', {'a': 1})"
    )
    assert done.returncode == 1 and "--push" in done.stderr


def test_offline_reads_the_cache(hub: Hub, tmp_path: Path) -> None:
    """Without a network: what was downloaded is read without a request; what was not is refused."""
    download = "from huggingface_hub import snapshot_download; snapshot_download('org/model', revision='v1')"
    assert _run(hub, tmp_path, code=download).returncode == 0
    hub.requests.clear()
    done = _run(hub, tmp_path, code=LOAD.replace("PATH", "'hf://org/model@v1'"), HF_HUB_OFFLINE="1")
    assert done.stdout.split() == ["1.0", "1.0", "3.0"], done.stderr
    done = _run(hub, tmp_path, "inspect", "hf://org/model", HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "HF_HUB_OFFLINE" in done.stderr, done.stderr
    assert hub.requests == []


@pytest.mark.parametrize("revision", ["refs/pr/3", "feature/x"])
def test_revisions_with_slashes(hub: Hub, tmp_path: Path, revision: str) -> None:
    """A pull request's reference as it is, and a branch with %2F: both with a network and from the cache."""
    hub.add(
        "org/model",
        {"config.json": CONFIG, "model.safetensors": save({**OLD, "b": torch.zeros(3)})},
        revision=revision,
    )
    url = f"hf://org/model@{revision if revision.startswith('refs/') else revision.replace('/', '%2F')}"
    code = LOAD.replace("PATH", repr(url))
    done = _run(hub, tmp_path, code=code, HF_HUB_OFFLINE="1")
    named = done.stderr.replace(url, "").split()
    assert done.returncode == 1 and {"org/model", "--revision", revision} <= {*named}, done.stderr
    done = _run(hub, tmp_path, code=code)
    assert done.stdout.split() == ["1.0", "1.0", "0.0"], done.stderr
    download = f"from huggingface_hub import snapshot_download; snapshot_download('org/model', revision={revision!r})"
    assert _run(hub, tmp_path, code=download).returncode == 0
    hub.requests.clear()
    done = _run(hub, tmp_path, code=code, HF_HUB_OFFLINE="1")
    assert done.stdout.split() == ["1.0", "1.0", "0.0"] and hub.requests == [], done.stderr


def _loads_of_two_commits(folder: Path) -> None:
    """A branch that moves between the questions of two ranks: each has resolved another commit."""
    save_checkpoint(folder, {"w": torch.ones(4)})
    storage, state = LocalStorage(str(folder)), {"w": torch.zeros(4)}
    storage.revision = f"commit of rank {dist.get_rank()}"
    with pytest.raises(CheckpointError):
        load(storage, state)
    assert state["w"].sum() == 0
    storage.revision = "one commit"
    load(storage, state)
    assert state["w"].sum() == 4


def test_ranks_read_one_commit(tmp_path: Path) -> None:
    """Different commits are an error on every rank, before anything is loaded."""
    run_ranks(2, _loads_of_two_commits, tmp_path / "saved")
