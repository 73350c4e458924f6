"""Ties of every family of transformers that can be built small: nothing of a model is missing in what a folder becomes.

A sample of each mechanism is in `tests/conversion/formats/huggingface/test_tied_weights.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tests.support.rule_cases import convert_in_parts
from tests.support.tiny_families import family_classes, tiny_model
from vescale_fsdp.checkpoint import load
from vescale_fsdp.conversion import diff, open_source
from vescale_fsdp.conversion.formats.huggingface.class_child import answer
from vescale_fsdp.conversion.formats.huggingface.tied_weights import tied_aliases_of

FAMILIES = family_classes()


def _tied(model: PreTrainedModel) -> list[list[str]]:
    """Names that are one tensor."""
    groups: dict[tuple[int, torch.Size], list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.numel():
            groups.setdefault((tensor.data_ptr(), tensor.shape), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _in_file(model: PreTrainedModel, name: str) -> str:
    """What transformers calls a weight in a file."""
    return next(iter(revert_weight_conversion(model, {name: model.state_dict()[name]})))


@pytest.mark.parametrize("ties", [None, True, False])
def test_what_a_class_ties_is_known(ties: bool | None, tmp_path: Path) -> None:
    """In all settings, and no more than that: under the names of the folder, and under the model's where they differ
    for what is left out alone, since nothing in such a folder says by whom it was written."""
    built = tied = 0
    for family in FAMILIES:
        model = tiny_model(family, **({} if ties is None else {"tie_word_embeddings": ties}))
        if model is None:
            continue
        model.save_pretrained(tmp_path / family)
        source = open_source(str(tmp_path / family))
        twins, unsaid = tied_aliases_of(source, source.tensors)
        own = _tied(model)
        groups = [{_in_file(model, name) for name in names} for names in own]
        lacking = {name for names in groups for name in names if name not in source.tensors}
        assert all(names & source.tensors.keys() for names in groups), family
        assert unsaid or lacking <= twins.keys(), (family, lacking - twins.keys())
        known = [names.union(theirs) for names, theirs in zip(groups, own, strict=True)]
        assert all(any({twin, kept} <= names for names in known) for twin, kept in twins.items()), (
            family,
            twins,
        )
        built, tied = built + 1, tied + bool(lacking)
        shutil.rmtree(tmp_path / family)
    assert built > 250 and (tied > 100) is (ties is not False)


def test_a_class_takes_what_it_says_of_itself() -> None:
    """Under its names in memory and in files, with the names that it ties and without: what the check of a result takes
    for a yes, from_pretrained takes."""
    built = 0
    for family in FAMILIES:
        model = tiny_model(family)
        if model is None:
            continue
        config = {key: value for key, value in model.config.to_dict().items() if key != "dtype"}
        said = answer({"class": family, "config": config})
        for form in said["forms"]:
            for left_out in ((), said["ties"]):
                tensors = {name: (shape, "float32") for name, shape in form.items() if name not in left_out}
                found = answer({"class": family, "config": config, "tensors": tensors})
                assert found == {"problems": []}, family
        built += 1
    assert built > 250


def _states(folder: Path, wanted: dict[str, torch.Tensor]) -> list[tuple[str, dict[str, Any]]]:
    """What every format holds of a folder, loaded as its users do."""
    found = []
    for kind in ("native", "dcp", "torch", "zarr"):
        out = folder.with_name(f"{kind}.pt")
        convert_in_parts(folder, out, kind)
        state: dict[str, Any] = {name: torch.zeros_like(value) for name, value in wanted.items()}
        if kind == "dcp":
            dcp.load(state, checkpoint_id=out, no_dist=True)
        elif kind == "torch":
            state = torch.load(out, weights_only=True)
        else:
            load(out, state)
        assert diff(open_source(str(out)), open_source(str(folder)))[0] == ()
        found.append((kind, state))
    state = {name: torch.zeros_like(value) for name, value in wanted.items()}
    load(folder, state)
    return [*found, ("load", state)]


def test_no_name_is_missing_anywhere(tmp_path: Path) -> None:
    """Of families whose files have the model's own names: every name, bit for bit, in every format, but those that the
    class computes and keeps out of files."""
    checked = 0
    for family in FAMILIES:
        model = tiny_model(family)
        if model is None or not _tied(model):
            continue
        computed = model._keys_to_ignore_on_save or ()
        wanted = {name: value.detach() for name, value in model.state_dict().items() if name not in computed}
        if any(_in_file(model, name) != name for name in wanted):
            continue
        model.save_pretrained(tmp_path / family / "hf")
        for kind, state in _states(tmp_path / family / "hf", wanted):
            assert state.keys() == wanted.keys(), (family, kind)
            assert all(torch.equal(value, wanted[name]) for name, value in state.items()), (family, kind)
        shutil.rmtree(tmp_path / family)
        checked += 1
    assert checked > 60
