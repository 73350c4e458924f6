"""peft adapters: reading and writing of a peft folder, the adapter's config, and names of tensors.

A peft folder is what peft's ``save_pretrained`` writes::

    adapter_model.safetensors    the matrices
    adapter_config.json          rank, alpha, and the base model

Names of tensors differ between the state of a training run, which may contain several adapters, and a peft folder::

    in training   base_model.model.h.0.q.lora_A.default.weight          ..q.modules_to_save.default.weight
    in a folder   base_model.model.h.0.q.lora_A.weight                  ..q.weight
    of the base   h.0.q.base_layer.weight                               ..q.original_module.weight

Names of a folder may lack peft's prefix, ``base_model.model.``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_store
from vescale_fsdp.conversion.engine.carried_state import CarriedState, model_state
from vescale_fsdp.conversion.engine.plan import ClosingFile, FilePlan, FixedBytes, OutputPlan, whole
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.tensor_view import RenamedView, TensorView
from vescale_fsdp.conversion.formats.huggingface.plan import make_header
from vescale_fsdp.conversion.formats.huggingface.read import read_tensors
from vescale_fsdp.conversion.formats.huggingface.repository import ADAPTER_CONFIG, refuse_pointers
from vescale_fsdp.errors import ConversionError, option, some
from vescale_fsdp.layout.foreign_json import parse_json

ROOT = "base_model.model."
_PARTS = r"lora_\w+|ia3_l|trainable_tokens_delta|modules_to_save"
# Submodules into which peft moves a base module; nested if several parameters of a module have LoRA.
_WRAPPERS = re.compile(r"(\.(base_layer|original_module))+(?=\.)")
# Parts whose first values are those of the base, or are computed from them.
_OF_BASE = ("modules_to_save", "lora_magnitude_vector", "trainable_tokens_delta")
# [^.]+, because an adapter is a submodule, whose name cannot contain dots.
_TRAINED = re.compile(rf"(?P<module>.+)\.(?P<part>{_PARTS})\.(?P<adapter>[^.]+)(?P<rest>\..+)?")


class TrainedName(NamedTuple):
    """The adapter that a tensor of a training run's state belongs to, and the tensor's name in a peft folder."""

    adapter: str
    in_folder: str


def trained_names(names: Iterable[str]) -> dict[str, TrainedName]:
    """Return the adapter and the name in a peft folder of each adapter tensor, by its name in training.

    Names in the folder have peft's prefix, also if peft did not wrap the model (transformers' ``add_adapter``).
    """
    trained = {}
    for name in names:
        match = _TRAINED.fullmatch(name)
        if match is None:
            continue
        part, rest = match["part"], match["rest"] or ""
        # In a folder, tensors of `modules_to_save` have the module's own name, and magnitudes have no `.weight`.
        ends = {"modules_to_save": rest, "lora_magnitude_vector": ".lora_magnitude_vector"}
        short = match["module"].removeprefix(ROOT) + ends.get(part, f".{part}{rest}")
        trained[name] = TrainedName(match["adapter"], ROOT + short)
    return trained


def trained_biases(names: Iterable[str], adapter: Collection[str], which: str) -> dict[str, str]:
    """Return the base model's biases that were trained with an adapter: name in training -> name in a peft folder.

    Args:
        names: the names of all tensors.
        adapter: the names of the adapter's tensors.
        which: the ``bias`` of the adapter's config: ``none``, ``all`` or ``lora_only``.
    """
    if which == "none":
        return {}
    modules = {match["module"] for match in map(_TRAINED.fullmatch, adapter) if match}
    biases = {}
    for name in names:
        # If an adapter wraps the module, peft stores the module's bias under base_layer.
        module = name.removesuffix(".bias").removesuffix(".base_layer")
        if name.endswith("bias") and name not in adapter and (which == "all" or module in modules):
            biases[name] = ROOT + name.removeprefix(ROOT)
    return biases


def one_adapter(
    trained: Mapping[str, TrainedName],
    adapter: str | None,
    where: str,
    *,
    chosen_by: Callable[[str], str] = lambda name: option("adapter_name", name),
) -> dict[str, str]:
    """Return the tensors of one adapter: name in training -> name in a peft folder.

    Args:
        trained: the tensors of all adapters, by name in training.
        adapter: name of the adapter; None if there is only one.
        where: the source, for errors.
        chosen_by: returns how the user chooses an adapter, for errors.

    Raises:
        ConversionError: if there is no such adapter, or if there are several and no name is given.
    """
    adapters = sorted({name.adapter for name in trained.values()})
    if not adapters:
        raise ConversionError(
            "There is no such adapter.",
            expected="tensors such as q_proj.lora_A.default.weight",
            got=adapter or "a state without an adapter",
            where=where,
            todo="write the whole model instead, or pass another source",
        )
    if adapter is None and len(adapters) == 1:
        adapter = adapters[0]
    if adapter not in adapters:
        raise ConversionError(
            "The source contains several adapters." if adapter is None else "There is no such adapter.",
            expected=f"one of {some(adapters, 8)}",
            got=adapter or some(adapters, 8),
            where=where,
            todo=f"pass {chosen_by(adapters[0])}",
        )
    return {name: each.in_folder for name, each in trained.items() if each.adapter == adapter}


def names_in_training(
    live: Collection[str], stored: Collection[str], adapter: str | None, where: str, *, is_folder: bool
) -> dict[str, str]:
    """Map names in a peft folder to the names of the model that trains the adapter.

    Args:
        live: tensor names of the model.
        stored: tensor names of the checkpoint.
        adapter: name of the adapter in the model; None if there is only one.
        where: the checkpoint, for errors.
        is_folder: whether the checkpoint is known to be a peft folder, whose names may lack peft's prefix.

    Returns:
        Name in the folder -> name in the model, of all tensors of the adapter, and of the base's tensors in the folder,
        such as trained biases. Empty if the checkpoint has no adapter with names of a folder.

    Raises:
        ConversionError: if the model has several adapters and none is chosen, or ``adapter`` does not apply.
    """
    trained = trained_names(live)
    given = {ROOT + name.removeprefix(ROOT) if is_folder else name: name for name in stored}
    # A training checkpoint already has the live names, so names that occur on both sides do not count as peft's.
    if {name.in_folder for name in trained.values()}.isdisjoint(given.keys() - trained.keys()):
        if adapter is not None:
            raise ConversionError(
                "The checkpoint has no adapter to load under another name.",
                expected="a folder that peft saved, and a model with its adapter",
                got=f"{some(stored, 2)} for a model with {some(trained, 2) if trained else 'no adapter'}",
                where=where,
                todo="leave out adapter_name",
            )
        return {}
    chosen_by = "source=SourceOptions(adapter_name={!r})".format
    names = one_adapter(trained, adapter, "the state to be filled", chosen_by=chosen_by)
    of_base = {ROOT + name.removeprefix(ROOT): name for name in live if name not in trained}
    in_training = {given[in_folder]: name for in_folder, name in of_base.items() if in_folder in given}
    return in_training | {given.get(in_folder, in_folder): name for name, in_folder in names.items()}


def names_over_base(live: Collection[str], stored: Collection[str]) -> tuple[dict[str, str], frozenset[str]]:
    """Map the names of a peft model's base weights to those of a checkpoint of the base model alone.

    A copy of a module that is trained whole (``modules_to_save``) starts with the values of the base's module.

    Args:
        live: tensor names of the peft model.
        stored: tensor names of the checkpoint's model.

    Returns:
        (name of a base weight in the peft model -> name in the checkpoint, without names that both have; names in the
        peft model that a base lacks, and whose first values do not depend on the base). Both are empty if no name is
        translated, if the model has no adapter, or if the checkpoint has one.
    """
    trained, of_base, own = trained_names(live), {}, set()
    if not trained or trained_names(stored):
        return {}, frozenset()
    for name in live:
        plain = name
        if name in trained:
            match = _TRAINED.fullmatch(name)
            assert match is not None
            if match["part"] == "modules_to_save":
                plain = f"{match['module']}{match['rest'] or ''}"
            elif match["part"] not in _OF_BASE:
                own.add(name)
        plain = _WRAPPERS.sub("", plain.removeprefix(ROOT))
        if plain != name and plain in stored and name not in stored:
            of_base[name] = plain
    return of_base, frozenset(own) if of_base else frozenset()


_TYPES = ("LORA", "IA3")  # that can be merged
# That can be exported: their tensors have the names above.
_EXPORTED_TYPES = (*_TYPES, "TRAINABLE_TOKENS")
# Settings that change how an adapter is merged, or the base weights, in ways that this converter does not implement.
_OTHER_MERGES = (
    "use_bdlora",
    "use_qalora",
    "arrow_config",
    "alora_invocation_tokens",
    "velora_config",
    "monteclora_config",
    "kasa_config",
    "eva_config",
    "corda_config",
    "loftq_config",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "megatron_config",
)
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal")  # other values change the base before training


@dataclass(frozen=True)
class PeftConfig:
    """The settings of an adapter that a merge or an export needs.

    Args:
        kind: ``LORA``, ``IA3`` or ``TRAINABLE_TOKENS``.
        rank, alpha: LoRA's rank and alpha for all modules that match no pattern.
        rank_patterns, alpha_patterns: regular expression for the end of a module's name -> rank or alpha.
        is_rank_stabilized: whether alpha is divided by the square root of the rank instead of the rank (rslora).
        is_dora: whether rows have trained magnitudes (DoRA).
        biases: which biases of the base were also trained: ``none``, ``all`` or ``lora_only``.
        has_parameters: whether parameters of several matrices, such as fused experts, have LoRA: the ranks of their
            matrices follow each other.
    """

    kind: str
    rank: int = 0
    alpha: float = 0.0
    rank_patterns: Mapping[str, int] = field(default_factory=dict)
    alpha_patterns: Mapping[str, float] = field(default_factory=dict)
    is_rank_stabilized: bool = False
    is_dora: bool = False
    biases: str = "none"
    has_parameters: bool = False

    @classmethod
    def read(cls, store: Storage, todo: str, *, merges: bool) -> PeftConfig:
        """Read the adapter_config.json of a folder.

        Args:
            store: the folder.
            todo: what the user can do, for the error if the folder has no such file.
            merges: whether the adapter is to be merged; an export is a copy of its tensors.

        Raises:
            ConversionError: if there is no such file, or this kind of adapter cannot be merged or exported.
        """
        where = f"{store.where}/{ADAPTER_CONFIG}"
        if store.size(ADAPTER_CONFIG) is None:
            raise ConversionError(
                "There is no adapter_config.json.",
                expected=f"a file {ADAPTER_CONFIG}, which contains rank and alpha",
                got="no such file",
                where=store.where,
                todo=todo,
            )
        try:
            data = parse_json(store.read(ADAPTER_CONFIG), is_text=True)
            (_check_mergeable if merges else _check_exported)(data, where)
            # `or`, because IA3 has no rank and alpha, and settings may be null.
            return cls(
                data["peft_type"],
                int(data.get("r") or 0),
                float(data.get("lora_alpha") or 0),
                {str(k): int(v) for k, v in (data.get("rank_pattern") or {}).items()},
                {str(k): float(v) for k, v in (data.get("alpha_pattern") or {}).items()},
                bool(data.get("use_rslora")),
                bool(data.get("use_dora")),
                str(data.get("bias") or "none"),
                bool(data.get("target_parameters")),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # the JSON may have any structure
            refuse_pointers(store, [ADAPTER_CONFIG], error)  # a pointer of git-lfs is no JSON either
            raise ConversionError(
                "An adapter_config.json cannot be read.",
                expected="JSON as peft's save_pretrained writes it",
                got=f"{type(error).__name__}: {error}",
                where=where,
                todo="copy the file again from where it was made",
            ) from error

    def rank_of(self, module: str) -> int:
        """Return the rank of LoRA in a module."""
        return _of_pattern(self.rank_patterns, module, self.rank)

    def scaling_of(self, module: str) -> float:
        """Return the factor by which the product of a module's two LoRA matrices is multiplied."""
        rank, alpha = self.rank_of(module), _of_pattern(self.alpha_patterns, module, self.alpha)
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a module's name, or ``default``."""
    # The regular expression is peft's.
    return next((v for key, v in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _check_exported(data: Mapping[str, Any], where: str) -> None:
    """Raise ConversionError if the names of this kind of adapter are not known."""
    if data["peft_type"] not in _EXPORTED_TYPES:
        raise ConversionError(
            "This kind of adapter cannot be exported here.",
            expected=" or ".join(_EXPORTED_TYPES),
            got=f"peft_type {data['peft_type']}",
            where=where,
            todo="save it with peft itself, on a model that is not sharded: model.save_pretrained(FOLDER)",
        )


def _check_mergeable(data: Mapping[str, Any], where: str) -> None:
    """Raise ConversionError if the converter cannot merge this kind of adapter."""
    start = data.get("init_lora_weights")
    other = next((f"{key} {data[key]!r:.60}" for key in _OTHER_MERGES if data.get(key)), None)
    if data["peft_type"] not in _TYPES:
        other = f"peft_type {data['peft_type']}"
    elif start not in _PLAIN_STARTS:
        other = f"init_lora_weights {start!r}, which changed the base before training"
    if other is not None:
        raise ConversionError(
            "This kind of adapter cannot be merged here.",
            expected="LoRA (rslora, DoRA, patterns of rank and alpha) or IA3",
            got=other,
            where=where,
            todo="merge it with peft itself: PeftModel.from_pretrained(base, adapter).merge_and_unload()",
        )


ADAPTER_FILE = "adapter_model.safetensors"


def open_adapter(store: Storage) -> Source:
    """Open a folder that peft's ``save_pretrained`` wrote.

    Raises:
        CorruptCheckpointError: if the file of matrices is damaged.
    """
    tensors, metadata = read_tensors(store, ADAPTER_FILE)
    return Source("adapter", store, tensors, facts={"metadata": json.dumps(metadata)})


def require_adapter(url: str) -> None:
    """Check that a path is a peft folder.

    Raises:
        ConversionError: if the path is not a peft folder. The error lists the files in it.
    """
    store = open_store(url)
    if store.size(ADAPTER_FILE) is None:
        raise ConversionError(
            "There is no adapter to merge.",
            expected=f"a folder that peft saved, with {ADAPTER_FILE} and {ADAPTER_CONFIG}",
            got=some(store.list_files()),
            where=url,
            todo="pass BASE, ADAPTER and OUT in this order; if ADAPTER is a training checkpoint, write its adapter "
            f"first: {option('adapter', True)}",
        )


def adapter_state(
    source: Source, model_prefix: str | None, adapter_name: str | None, assets: str | None
) -> CarriedState:
    """Return the tensors of one adapter, without the base, under the names of a peft folder.

    Args:
        source: the state of a training run, or a peft folder.
        model_prefix: prefix of the model's names in the source; None to detect it.
        adapter_name: the adapter; None if there is only one.
        assets: folder or URL with the adapter's adapter_config.json.

    Raises:
        ConversionError: if there is no such adapter, or several and no name is given; if there is no
            adapter_config.json, or it belongs to another adapter.
    """
    state = model_state(source, model_prefix)
    config = PeftConfig.read(
        _settings(assets), f"pass the folder that has it with {option('assets')}", merges=False
    )
    if source.kind != "adapter":
        names = one_adapter(trained_names(state.views), adapter_name, source.url)
        names |= trained_biases(state.views, names, config.biases)
        names = _without_tied(names, state.views)
        renamed = {
            in_folder: (RenamedView(state.views[name], in_folder), name) for name, in_folder in names.items()
        }
        state = state.with_replaced(renamed, set(state.views))
    _check_ranks(state.views, config, str(assets))
    return state


def _without_tied(names: dict[str, str], views: Mapping[str, TensorView]) -> dict[str, str]:
    """Leave out further names of one tensor: the trained rows of tied weights, which peft stores once."""
    first = {views[name].sameness: name for name in reversed(names)}
    return {name: in_folder for name, in_folder in names.items() if first[views[name].sameness] == name}


def _settings(assets: str | None) -> Storage:
    """Return the folder of the adapter's config, which the user must pass as ``assets``."""
    if assets is None:
        raise ConversionError(
            "An adapter needs its adapter_config.json.",
            expected="a folder with the adapter_config.json of the training run",
            got="no folder",
            todo=f"write it with peft_config.save_pretrained(folder), and pass "
            f"{option('assets', 'folder')}: it contains alpha, "
            "which the tensors do not show",
        )
    return open_store(assets)


def plan_adapter(state: CarriedState, assets: str | None) -> OutputPlan:
    """Return the plan of the two files of a peft folder."""
    store = _settings(assets)
    views = {view.info.name: view for view in state.views.values()}
    header = make_header(view.info for view in views.values())
    file = FilePlan(ADAPTER_FILE, (FixedBytes(header.data), *(whole(views[name]) for name in header.offsets)))
    closing = ClosingFile(ADAPTER_CONFIG, lambda: store.read_pieces(ADAPTER_CONFIG))
    return OutputPlan("adapter", (file,), (closing,), is_stale=lambda name: name.startswith("adapter_model."))


def _check_ranks(views: Mapping[str, TensorView], config: PeftConfig, where: str) -> None:
    """Raise if the config's ranks differ from those of the matrices.

    Such a config belongs to another adapter, so its alpha, which the matrices do not show, would also be wrong.
    """
    for name, view in views.items():
        module, part, _ = name.partition(".lora_A.")
        rank = config.rank_of(module.removeprefix(ROOT))
        ranks = [rank, config.rank, *config.rank_patterns.values()] if config.has_parameters else []
        is_several = any(view.info.shape[0] % each == 0 for each in ranks if each)
        if part and view.info.shape[0] != rank and not is_several:
            raise ConversionError(
                "The adapter_config.json belongs to another adapter.",
                expected=f"rank {view.info.shape[0]}, as {name} has",
                got=f"rank {rank}",
                where=where,
                todo="pass the folder with this adapter's own adapter_config.json",
            )
