"""The tutorial runs from start to end, as the notebook that its page gives."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from transformers import LlamaConfig, LlamaForCausalLM

from tools.docs.notebook import NOTEBOOK, PAGE, notebook_of
from vescale_fsdp.checkpoint import load, read_state


def test_the_notebook_is_the_page() -> None:
    """`python tools/docs/notebook.py` has been run since the page was changed."""
    assert NOTEBOOK.read_text() == notebook_of(PAGE.read_text())


@pytest.mark.part("pages")
def test_the_tutorial_trains_as_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, kill, go on with three, look, export, load: with what the page says is to be seen."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(PAGE.parent.parent))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    book = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    printed = "".join(out.get("text", "") for cell in book.cells for out in cell.get("outputs", []))

    assert "killed, as planned" in printed
    assert "step 40 on 2 ranks" in printed and "step 100" not in printed
    assert "went from step 40 to 80 on 3 ranks" in printed
    assert "0 problems" in printed
    assert {"layout.svg", "report.html"} <= {file.name for file in tmp_path.iterdir()}
    assert "def read(self" in printed
    found = {
        int(step): float(loss) for step, loss in re.findall(r"step (\d+) on \d ranks: loss (\S+)", printed)
    }
    from_60 = _plain_losses(60, 80, saved=tmp_path / "run/step-00000060")
    _assert_losses(found, _plain_losses(0, 60) | from_60)
    kept = read_state(tmp_path / "run/step-00000080")
    steps = [kept[name].read().item() for name in kept.names() if name.endswith(".step")]
    assert len(steps) > 10 and set(steps) == {80}


@pytest.mark.part("pages")
def test_another_count_of_adams_steps_is_seen() -> None:
    """Negative control: training whose Adam begins at its second step prints another loss at step 20."""
    right, late = (_plain_losses(0, 20, adam_step=adam_step) for adam_step in (0, 1))
    with pytest.raises(AssertionError):
        _assert_losses(late, right)


# How far losses may be apart: a printed one has three digits. Sums in another order, or the last bit of each gradient
# drawn anew, made 4e-6 at step 20, 2e-5 at step 40, 0.0014 to 0.0033 at step 60 and 0.03 to 0.06 at step 80; so step
# 80 is compared with a run from step 60. Adam begun at its second step makes 0.0038 at step 20, 0.03 at step 40.
_APART = {20: 0.001, 40: 0.001, 60: 0.013, 80: 0.001}


def _assert_losses(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found.keys() == expected.keys()
    for step, loss in expected.items():
        assert abs(found[step] - loss) <= _APART[step], step


def _plain_losses(
    first: int, last: int, *, saved: Path | None = None, adam_step: int = 0
) -> dict[int, float]:
    """Mean losses at every 20th step of the tutorial's training in one process, not sharded, never interrupted.

    Args:
        first, last: the steps before the first one, and the last one.
        saved: a checkpoint to begin with.
        adam_step: what the optimizer believes to have done.
    """
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if saved is not None:
        load(saved, {"model": model, "optimizer": optimizer})
    for param in model.parameters() if adam_step else ():
        zeros = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.tensor(float(adam_step)), **zeros}
    losses: dict[int, float] = {}
    for step in range(first + 1, last + 1):
        draw = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - 64, (12,), generator=draw).tolist()
        batch = torch.stack([text[start : start + 64] for start in starts]).long()
        ranks = 2 if step <= 40 else 3
        for rank in range(ranks):  # as the ranks compute it
            rows = batch[rank::ranks]
            loss = model(input_ids=rows, labels=rows).loss
            (loss / ranks).backward()
            if step % 20 == 0:
                losses[step] = losses.get(step, 0.0) + loss.item() / ranks
        optimizer.step()
        optimizer.zero_grad()
    return losses
