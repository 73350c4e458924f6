"""Which files of a repository go along with converted weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.command import vescale_convert
from tests.support.processes import run_command
from vescale_fsdp.conversion import ConvertOptions, ConvertReport, convert, open_source
from vescale_fsdp.errors import ConversionError

SETTINGS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "feature_extractor_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "README.md",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
    "USE_POLICY.md",
    "modeling_custom.py",
    "configuration_custom.py",
    "code/helper.py",
    "sentencepiece.bpe.model",
    "spiece.model",
    "source.spm",
    "qwen.tiktoken",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    "quantize_config.json",
    "tekken.json",
    "normalizer.json",
]
OTHERS = [
    "original/consolidated.00.pth",
    "original/params.json",
    "onnx/model.onnx",
    "onnx/config.json",
    "model-q4.gguf",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "training_args.bin",
    "rng_state.pth",
    "rng_state_0.pth",
    "trainer_state.json",
    "all_results.json",
    "checkpoint-100/model.safetensors",
    "checkpoint-100/config.json",
    "global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "runs/events.out.tfevents.1",
    "2_Dense/model.safetensors",
    "adapter_config.json",
    "adapter_model.bin",
    "tokenizer.pt",
    "scaler.pt",
    "latest",
    "zero_to_fp32.py.bak",
    "figures/plot.png",
]
WEIGHTS = [
    "model.safetensors",
    "pytorch_model.bin",
    "consolidated.safetensors",
    "pytorch_model-00001-of-00002.bin",
]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder with everything that people leave in one."""
    folder = tmp_path / "hf"
    for file in (*SETTINGS, *OTHERS, *WEIGHTS, ".gitattributes"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("{}" if file.endswith(".json") else file)
    save_file({"w": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _run(source: Path, out: Path, **options: object) -> tuple[set[str], ConvertReport]:
    report = convert(open_source(str(source)), str(out), "hf", ConvertOptions(**options))  # type: ignore[arg-type]
    return {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}, report


@pytest.mark.parametrize("given", [False, True])
def test_settings_go_along_and_nothing_else(repository: Path, tmp_path: Path, given: bool) -> None:
    """From the source's own folder and from --assets; what stays behind is named."""
    source = repository
    if given:
        torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
        source = tmp_path / "w.pt"
    files, report = _run(source, tmp_path / "out", assets=str(repository) if given else None)
    assert files == {*SETTINGS, "model.safetensors"}
    assert set(report.left_assets) == set(OTHERS) == set(report.to_json()["left_assets"])
    shown = vescale_convert(
        "to-hf", source, tmp_path / "again", *(("--assets", repository) if given else ())
    ).output
    assert "original/consolidated.00.pth" in shown or "checkpoint-100" in shown
    assert (tmp_path / "out" / "code" / "helper.py").read_text() == "code/helper.py"


def test_more_on_request(repository: Path, tmp_path: Path) -> None:
    """Patterns add files; one that matches none is refused, and weights of this model cannot be asked for."""
    files, report = _run(repository, tmp_path / "a", include_asset=("onnx/*", "*.gguf"))
    assert files == {*SETTINGS, "model.safetensors", "onnx/model.onnx", "onnx/config.json", "model-q4.gguf"}
    assert set(report.left_assets) == set(OTHERS) - files
    files, report = _run(repository, tmp_path / "b", include_asset=("*",))
    assert files == {*SETTINGS, *OTHERS, "model.safetensors"} and report.left_assets == ()
    for pattern in ("flax/*", "pytorch_model.bin"):
        with pytest.raises(ConversionError, check=lambda error: error.got == pattern):  # noqa: B023
            _run(repository, tmp_path / "c", include_asset=(pattern,))


def test_the_command(repository: Path, tmp_path: Path) -> None:
    """The option, and the line that names what stayed."""
    command = [sys.executable, "-m", "vescale_fsdp.conversion", "to-hf", str(repository), str(tmp_path / "o")]
    run = run_command([*command, "--include-asset", "*.gguf"], check=True)
    assert "adapter_config.json" in run.stdout
    assert (tmp_path / "o" / "model-q4.gguf").exists() and not (tmp_path / "o" / "optimizer.pt").exists()
