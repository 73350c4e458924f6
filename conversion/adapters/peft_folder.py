"""peft's folders: an adapter alone, as a source and as a target.

adapter_model.safetensors    its matrices        adapter_config.json    rank, alpha, and what it is an adapter of
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from vescale_fsdp.checkpoint.moves.plan import ClosingFile, FilePlan, FixedBytes, OutputPlan, whole
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.tensor_view import RenamedView, TensorView
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_store
from vescale_fsdp.conversion.adapters.peft_config import ADAPTER_CONFIG, PeftConfig
from vescale_fsdp.conversion.adapters.peft_names import ROOT, one_adapter, trained_biases, trained_names
from vescale_fsdp.conversion.formats.huggingface.safetensors import make_header, read_tensors
from vescale_fsdp.conversion.state.carried_state import CarriedState, model_state
from vescale_fsdp.errors import ConversionError, some

ADAPTER_FILE = "adapter_model.safetensors"


def open_adapter(store: Storage) -> Source:
    """Open a folder that peft's ``save_pretrained`` wrote.

    Raises:
        CorruptCheckpointError: if the file is damaged.
    """
    tensors, metadata = read_tensors(store, ADAPTER_FILE)
    return Source("adapter", store, tensors, facts={"metadata": json.dumps(metadata)})


def require_adapter(url: str) -> None:
    """Refuse what is no folder of peft's where a merge wants one.

    Raises:
        ConversionError: naming what is there.
    """
    store = open_store(url)
    if store.size(ADAPTER_FILE) is None:
        raise ConversionError(
            "There is no adapter to merge.",
            expected=f"a folder that peft saved, with {ADAPTER_FILE} and {ADAPTER_CONFIG}",
            got=some(store.list_files()),
            where=url,
            todo="pass BASE, ADAPTER and OUT in this order; of a training checkpoint, write the adapter first: "
            "vescale-convert to-hf RUN OUT --adapter",
        )


def adapter_state(
    source: Source, model_prefix: str | None, adapter_name: str | None, assets: str | None
) -> CarriedState:
    """One adapter of a state of base and adapters, under the names that it has in a folder; the base stays behind.

    Args:
        assets: folder or URL with its adapter_config.json.

    Raises:
        ConversionError: if there is no adapter, or several, or no config, or it is another adapter's.
    """
    state = model_state(source, model_prefix)
    config = PeftConfig.read(_settings(assets), "pass the folder that has it with --assets")
    if source.kind != "adapter":
        found = one_adapter(trained_names(state.views), adapter_name, source.url)
        found |= trained_biases(state.views, found, config.biases)
        made = {saved: (RenamedView(state.views[name], saved), name) for name, saved in found.items()}
        state = state.with_replaced(made, set(state.views))
    _require_ranks(state.views, config, str(assets))
    return state


def _settings(assets: str | None) -> Storage:
    if assets is None:
        raise ConversionError(
            "An adapter needs its adapter_config.json.",
            expected="--assets FOLDER, with the adapter_config.json that the training began with",
            got="no --assets",
            todo="write it with: peft_config.save_pretrained(FOLDER); it says alpha, which no tensor does",
        )
    return open_store(assets)


def plan_adapter(state: CarriedState, assets: str | None) -> OutputPlan:
    """The two files of a folder."""
    store = _settings(assets)
    views = {view.info.name: view for view in state.views.values()}
    header = make_header(view.info for view in views.values())
    file = FilePlan(ADAPTER_FILE, (FixedBytes(header.data), *(whole(views[name]) for name in header.offsets)))
    closing = ClosingFile(ADAPTER_CONFIG, lambda: store.read_pieces(ADAPTER_CONFIG))
    return OutputPlan("adapter", (file,), (closing,), is_stale=lambda name: name.startswith("adapter_model."))


def _require_ranks(views: Mapping[str, TensorView], config: PeftConfig, where: str) -> None:
    """Refuse a config that gives another rank than the matrices have: its alpha would be wrong too."""
    for name, view in views.items():
        module, part, _ = name.partition(".lora_A.")
        rank = config.rank_of(module.removeprefix(ROOT))
        if part and view.info.shape[0] != rank:
            raise ConversionError(
                "The adapter_config.json is another adapter's.",
                expected=f"rank {view.info.shape[0]}, as {name} has",
                got=f"rank {rank}",
                where=where,
                todo="pass the folder with this adapter's own adapter_config.json",
            )
