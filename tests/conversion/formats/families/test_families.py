"""Every family of transformers: its files into live shards on two ranks, into native and DCP, and back, byte for byte.

`make test` has a family of each kind of mapping between names in files and in memory; ``FAMILIES=all`` (`make
test-families`) has all, and skips with the reason those that cannot be built here within 50 MB.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conversion.formats.families.family_round_trip import (
    check_formats,
    check_shards,
    mapping_of,
    saved,
    stored_names,
)
from tests.support.distributed import run_ranks, run_threads
from tests.support.tiny_families import families, why_not_built

# Model type -> class, one of each kind.
SAMPLE = {
    "gpt_neox": "GPTNeoXForCausalLM",  # a name
    "gemma3": "Gemma3ForConditionalGeneration",  # prefixes, and a text model that initializes a buffer of its own
    "falcon_h1": "FalconH1ForCausalLM",  # a model that initializes buffers of the modules inside
    "mixtral": "MixtralForCausalLM",  # a list of experts is one tensor in memory
    "gte": "GteModel",  # a projection in files is three tensors in memory
    "olmo_hybrid": "OlmoHybridForCausalLM",  # the other way round
    "step3p5_vision": "Step3p7VisionModel",  # rotary halves
    "marian": "MarianMTModel",  # weights that files lack
    "hyperclovax_vision_v2": "HyperCLOVAXVisionV2ForConditionalGeneration",  # a tie whose names differ
}
IS_WHOLE = os.environ.get("FAMILIES") == "all"


@pytest.mark.parametrize("family", list(families() if IS_WHOLE else SAMPLE))
def test_a_family_comes_into_memory_and_back_to_the_same_bytes(
    tmp_path: Path, family: str, record_property: Callable[[str, object], None]
) -> None:
    """`load` into shards, `to-native`, `to-fsdp2`, `to-hf` and a save from shards: names, layouts and bytes."""
    class_name = (families() if IS_WHOLE else SAMPLE)[family]
    record_property("class", class_name or "")
    if class_name is None:
        pytest.skip("a part of other families: no class can be loaded from files of its own")
    hf = tmp_path / "hf"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' own
            model = saved(class_name, hf)
    except Exception as error:
        if not IS_WHOLE:
            raise
        pytest.skip(why_not_built(class_name, error))
    record_property("mapping", mapping_of(model, hf))
    check_formats(model, hf)
    run = run_ranks if IS_WHOLE else run_threads  # processes of their own would import transformers
    run(2, check_shards, class_name, model.config, stored_names(model), hf)
    shutil.rmtree(tmp_path)  # hundreds of models
