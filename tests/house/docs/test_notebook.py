"""The tutorial runs from start to end, as the notebook that its page gives."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tools.docs.notebook import NOTEBOOK, PAGE, is_up_to_date, run
from vescale_fsdp.checkpoint import load, read_state

_RUN = r"step (\d+) on \d ranks: loss (\S+)"


def _printed(book: dict[str, Any]) -> str:
    outputs = (out for cell in book["cells"] for out in cell.get("outputs", []))
    return "".join("".join(out.get("text", "")) for out in outputs)


def test_the_notebook_has_the_cells_of_the_page_and_their_outputs() -> None:
    """`make notebook` has been run since the page was changed; another source, or outputs of another one, is seen."""
    book, page = json.loads(NOTEBOOK.read_text()), PAGE.read_text()
    assert is_up_to_date(book, page)
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(
        cell["outputs"] for cell in code if not "".join(cell["source"]).startswith("!vescale-convert report")
    )
    assert "step 80 on 3 ranks" in _printed(book)

    changed = copy.deepcopy(book)
    changed["cells"][-2]["source"] = ["print(1)\n"]
    assert not is_up_to_date(changed, page)
    assert not is_up_to_date(book, page.replace("train.py 100 50", "train.py 100 60"))
    assert not is_up_to_date({**book, "metadata": {}}, page)


def test_stored_outputs_are_ours_alone() -> None:
    """No path of a machine, no time, no warning, no progress bar."""
    text = json.dumps([cell.get("outputs", []) for cell in json.loads(NOTEBOOK.read_text())["cells"]])
    assert not re.findall(r"/(?:home|root|tmp|usr|work|var)/|it/s|\d%\||[Ww]arning|stderr", text)


@pytest.mark.part("pages")
def test_the_tutorial_trains_as_one_process_does(tmp_path: Path) -> None:
    """Train, kill, go on with three, look, export, load: prints what the page says and the notebook stores."""
    book = run(PAGE.read_text(), tmp_path)
    printed = _printed(book)

    assert "killed, as planned" in printed
    assert "step 40 on 2 ranks" in printed and "step 100" not in printed
    assert "went from step 40 to 80 on 3 ranks" in printed
    assert "0 problems" in printed
    assert {"layout.svg", "report.html"} <= {file.name for file in tmp_path.iterdir()}
    assert "def read(self" in printed
    found = {int(step): float(loss) for step, loss in re.findall(_RUN, printed)}
    from_60 = _plain_losses(60, 80, saved=tmp_path / "run/step-00000060")
    _assert_losses(found, _plain_losses(0, 60) | from_60)
    kept = read_state(tmp_path / "run/step-00000080")
    steps = [kept[name].read().item() for name in kept.names() if name.endswith(".step")]
    assert len(steps) > 10 and set(steps) == {80}
    stored = _printed(json.loads(NOTEBOOK.read_text()))
    assert _without_numbers(stored) == _without_numbers(printed), "make notebook"


def _without_numbers(printed: str) -> str:
    """The lines but for numbers, ids, widths of columns, and what the model writes."""
    before, _, _ = printed.partition("def read(self")
    return re.sub(r"[0-9a-f]{16,}|\d[\d.,]*(e-?\d+)?|-{2,}| +", " ", before)


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
