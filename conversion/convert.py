"""The one call behind every ``to-...`` command: source in, files of another format out.

What only some conversions need (a target's planner, key rules, ties) is imported when one of them runs: a
small conversion takes less time than the imports of them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vescale_fsdp.checkpoint.formats.huggingface.class_check import ClassCheck, check_planned, check_written
from vescale_fsdp.checkpoint.formats.huggingface.repository import (
    Assets,
    config_class,
    own_config,
    own_settings,
)
from vescale_fsdp.checkpoint.formats.huggingface.tied_weights import (
    Compare,
    absent_names,
    find_tied_twins,
    left_out_by,
)
from vescale_fsdp.checkpoint.moves.carried_state import CarriedState, model_state, whole_state
from vescale_fsdp.checkpoint.moves.copying import CopyLimits, Progress
from vescale_fsdp.checkpoint.moves.plan import OutputPlan, Written
from vescale_fsdp.checkpoint.moves.run_plan import Outcome, run_plan
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.stored_tensor import MOST_GROWTH, UNCHECKED_BYTES, is_inflated
from vescale_fsdp.checkpoint.moves.tensor_view import TensorView, repeated_dims, without_repeats
from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.conversion.checks.byte_sizes import format_bytes
from vescale_fsdp.conversion.convert_options import ConvertOptions
from vescale_fsdp.conversion.formats.table import TARGETS
from vescale_fsdp.conversion.state.quantized_weights import find_quantized
from vescale_fsdp.errors import ConversionError, some

_ORDER_LOST = (
    "safetensors files do not keep the order of a model's parameters: a start on several ranks may have to move "
    "pieces between them, which only costs time"
)


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did, or would do.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.conversion import open_source
        >>> torch.save({"w": torch.ones(4)}, "in2.pt")
        >>> report = convert(open_source("in2.pt"), "as_zarr", "zarr")
        >>> report.dropped_optimizer, report.warnings
        (0, ())
    """

    source: Source
    target: str
    plan: OutputPlan
    state: CarriedState
    outcome: Outcome
    tied: dict[str, str]  # name left out -> name that holds its bytes
    casts: dict[str, tuple[str, str]]  # name -> (type before, type after)
    uncast: tuple[str, ...]  # codes and scales of quantised weights, which keep their types
    left_assets: tuple[str, ...]  # files beside the settings that do not go along
    warnings: tuple[str, ...]
    dry_run: bool
    part: tuple[int, int]  # index of this process's share of the files, and how many shares there are
    check: ClassCheck | None = (
        None  # of a Hugging Face folder; None if another part publishes it, or did before
    )

    @property
    def dropped_optimizer(self) -> int:
        """Optimizer entries of the source that are not in the result."""
        return len(set(self.state.left_out).intersection(self.state.model.optimizer))

    @property
    def dropped_others(self) -> tuple[str, ...]:
        """Other entries of the source that are not in the result."""
        optimizer = set(self.state.model.optimizer)
        return tuple(name for name in self.state.left_out if name not in optimizer)

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``--json``."""
        return {
            "source": {
                "kind": self.source.kind,
                "url": self.source.url,
                "model_prefix": self.state.model.prefix,
            },
            "target": {"kind": self.plan.kind, "url": self.target},
            "written": not self.dry_run,
            "published": self.outcome.published,
            "total_bytes": self.plan.tensor_nbytes,
            "files": [{"file": file.name, "bytes": file.nbytes} for file in self.plan.files],
            "kept_files": list(self.outcome.kept),
            "closing_files": [file.name for file in self.plan.closing],
            "dropped": {"optimizer_entries": self.dropped_optimizer, "others": list(self.dropped_others)},
            "tied": [{"left_out": twin, "same_as": kept} for twin, kept in self.tied.items()],
            "casts": [{"name": n, "from": a, "to": b} for n, (a, b) in self.casts.items()],
            "uncast": list(self.uncast),
            "left_assets": list(self.left_assets),
            "warnings": list(self.warnings),
            "check": None if self.check is None else self.check.to_json(),
        }


def convert(
    source: Source,
    target: str | os.PathLike[str],
    kind: str,
    options: ConvertOptions | None = None,
    *,
    progress: Progress = lambda _: None,
    announce: Callable[[int], None] = lambda _: None,
) -> ConvertReport:
    """Write ``source`` to ``target`` in another format.

    Args:
        source: an opened checkpoint.
        target: local path or fsspec URL.
        kind: ``"native"``, ``"dcp"``, ``"zarr"``, ``"hf"``, ``"adapter"`` or ``"torch"``.
        options: defaults throughout if None.
        progress: called with bytes written since the last call, from several threads.
        announce: called once, before the first byte, with how many bytes of tensors there will be.

    Raises:
        ConversionError: if the target is refused, the state cannot be expressed in the format, or the class that a
            Hugging Face folder's config.json names does not take the result. Nothing has its final name then.
        CorruptCheckpointError: if the source turns out damaged.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.conversion import open_source
        >>> torch.save({"w": torch.ones(4)}, "in.pt")
        >>> report = convert(open_source("in.pt"), "as_dcp", "dcp")
        >>> len(report.state.views), open_source("as_dcp").kind
        (1, 'dcp')
    """
    chosen, target = options or ConvertOptions(), os.fspath(target)
    if chosen.merge is not None:  # one matrix at a time
        chosen = replace(chosen, threads=1)
    with gc_paused():
        report = plan_conversion(source, target, kind, chosen)
        limits = _limits_of(chosen, source, report.state)
        checked: list[ClassCheck] = []

        def keep(check: ClassCheck | None) -> None:
            if check is not None:
                check.require(target, is_required=chosen.require_check)
                checked[:] = [check]

        def check_files(read: Written) -> None:
            report.plan.when_written(read)
            keep(check_written(report.plan, read, find_quantized))

        keep(check_planned(report.plan, find_quantized, asks="always" if chosen.dry_run else "doubt"))
        outcome = run_plan(
            replace(report.plan, when_written=check_files),
            source,
            target,
            limits=limits,
            overwrite=chosen.overwrite,
            resume=chosen.resume,
            dry_run=chosen.dry_run,
            part=chosen.part,
            requested=chosen.asked(),
            progress=progress,
            announce=announce,
        )
        if outcome.published and not checked:  # by another part, or by a run before this one
            keep(check_planned(report.plan, find_quantized))
    warnings = (*report.warnings, *_overflows(report.state))
    return replace(report, outcome=outcome, check=checked[0] if checked else None, warnings=warnings)


def _overflows(state: CarriedState) -> list[str]:
    """Values too large for the types that this run rounded them to, by casts, dequantisation or a merge."""
    found = [
        f"{name} ({lost} of {view.info.numel} as {view.info.dtype.name})"
        for name, view in state.views.items()
        if (lost := view.overflows)
    ]
    return [f"finite values are infinite in their new type: {some(found)}"] if found else []


def _limits_of(options: ConvertOptions, source: Source, state: CarriedState) -> CopyLimits:
    """Memory and threads; chunks that are decoded whole count towards the budget."""
    if not source.decoded:
        return options.limits
    names = (name for view in state.views.values() for _, name in view.sources())
    nbytes, name = max(((source.decoded.get(name, 0), name) for name in names), default=(0, ""))
    return options.limits.decoding(name, nbytes)


def _own_assets(source: Source, kind: str) -> str | None:
    """A folder that has a model's settings takes them along into a Hugging Face folder without being asked."""
    has_some = kind == "hf" and source.kind in ("hf", "bin", "shards", "deepspeed", "ranks")
    found = own_settings(source.store) if has_some else None
    return None if found is None else found.where


def plan_conversion(
    source: Source, target: str, kind: str, options: ConvertOptions, is_equal: Compare | None = None
) -> ConvertReport:
    """What `convert` would write, from metadata; arguments as there.

    Args:
        is_equal: whether two tensors that the settings tie have the same bytes; by default they are read.
    """
    if kind not in TARGETS:
        raise ConversionError(
            "This target is not known.", expected=tuple(TARGETS), got=kind, todo="choose one"
        )
    own = None if options.no_assets else _own_assets(source, kind)
    assets = Assets(options.assets or own if kind != "adapter" else None, options.include_asset)
    state = _state_for(kind, source, options)
    if options.dequantize is not None:
        state = _dequantized(state, options.dequantize, assets, source)
    if options.merge is not None:
        if options.rules is not None and source.kind == "hf":
            # An adapter has the names that the model has in memory.
            state = _with_rules(state, kind, replace(options, rules_to="ours"), _settings(assets, source))
        state = _merged(state, options.merge, _settings(assets, source))
    if options.rules is not None:
        state = _with_rules(state, kind, options, _settings(assets, source))
    warnings = [*source.warnings, *state.warnings]
    described = sorted(source.file_metadata.keys() - {"format"})
    if described and (kind != "hf" or _changes_tensors(options)):
        state = replace(state, file_metadata={})
        warnings.append(f"__metadata__ of safetensors files is left out: {some(described)}")
    state, tied, unlike_config = _with_ties(state, kind, source, assets, is_equal)
    warnings += unlike_config
    if options.quantize:
        state = _newly_quantized(state, options.quantize, assets, source)
    changed: dict[str, tuple[str, str]] = {}
    uncast: tuple[str, ...] = ()
    has_config = kind == "hf" and assets.config is not None
    quantized = _find_quantized(state, assets, source) if options.dtype or has_config else frozenset()
    state = state.filtered(options.include, options.exclude)
    _require_text([*state.views, *state.values])
    _require_stored(state, source, keeps_repeats=TARGETS[kind].keeps_repeats)
    if options.dtype:
        state, changed = _with_casts(state, options.dtype, assets if kind == "hf" else None, quantized)
        uncast = tuple(name for name in state.views if name in quantized and name not in changed)
    if kind == "hf" and (options.dequantize is not None or options.quantize):
        assets.name_dtype_held([view.info for view in state.views.values()], quantized)
    if kind == "hf" and not options.no_assets:
        warnings += assets.disagreements([view.info for view in state.views.values()], quantized)
    if kind == "native" and source.kind in ("hf", "safetensors", "shards") and options.ranks > 1:
        warnings.append(_ORDER_LOST)
    plan = TARGETS[kind].plan(state, options, assets, target.rpartition("/")[2])
    left = assets.left if kind == "hf" else ()
    return ConvertReport(
        source,
        target,
        plan,
        state,
        Outcome(),
        tied,
        changed,
        uncast,
        left,
        tuple(warnings),
        options.dry_run,
        options.part,
    )


def _state_for(kind: str, source: Source, options: ConvertOptions) -> CarriedState:
    """What a target takes of a source, under the names it has there."""
    if kind == "hf":
        _require_model(source)
        return model_state(source, options.model_prefix)
    if kind == "adapter":
        from vescale_fsdp.conversion.adapters.peft_folder import adapter_state

        return adapter_state(source, options.model_prefix, options.adapter_name, options.assets)
    from vescale_fsdp.conversion.state.optimizers import with_optimizer_form

    state = whole_state(source, options.model_prefix, options.prefix)
    return with_optimizer_form(state, options.optimizer)


def _with_ties(
    state: CarriedState, kind: str, source: Source, assets: Assets, is_equal: Compare | None
) -> tuple[CarriedState, dict[str, str], Sequence[str]]:
    """A state with tied weights as its target wants them; the names that are left out, with what they are tied to; and
    warnings where config.json says otherwise than the weights."""
    if kind == "hf" and assets.config is not None:
        tied, warnings, denied = find_tied_twins(state.views, assets.settings, is_equal)
        if denied:  # the class must not tie them: what it ties beside them is stored under all its names then
            state = state.with_names_of(absent_names(assets.settings, state.views))
            assets.untie()
            tied, _, still = find_tied_twins(state.views, assets.settings, is_equal)
            if still:
                twin, kept = next(iter(still.items()))
                raise ConversionError(
                    "The class that config.json names ties weights that differ.",
                    expected=f"{twin} with the bytes of {kept}",
                    got="other bytes; tie_word_embeddings: false does not untie them",
                    where=str(config_class(assets.settings)),
                    todo=f"leave one of them out, such as --exclude {twin}, or pass the config.json of the right class",
                )
        return state.without(tied), tied, warnings
    if kind in ("hf", "adapter"):
        return state, {}, ()
    twins, unsaid = left_out_by(source, state.views)
    return state.with_names_of(twins), {}, unsaid


def _changes_tensors(options: ConvertOptions) -> bool:
    """Whether the result's tensors are not those that the source's files describe."""
    return any((options.dequantize, options.quantize, options.rules, options.merge))


def _settings(assets: Assets, source: Source) -> dict[str, Any]:
    """What config.json says: the one that goes along, else the one beside the source."""
    return assets.config if assets.config is not None else own_config(source.store)


def _find_quantized(state: CarriedState, assets: Assets, source: Source) -> frozenset[str]:
    infos = [view.info for name, view in state.views.items() if name in state.is_model]
    return find_quantized(infos, assets.settings if assets.config is not None else _settings(assets, source))


def _require_model(source: Source) -> None:
    """Refuse an adapter where a model is wanted: its tensors alone are none."""
    if source.kind == "adapter":
        raise ConversionError(
            "This is an adapter, not a model.",
            expected="a checkpoint of a model",
            got="a folder of peft",
            where=source.url,
            todo="merge it: vescale-convert merge-adapter BASE ADAPTER OUT; or copy it: to-hf ADAPTER OUT --adapter "
            "--assets ADAPTER",
        )


def _merged(state: CarriedState, url: str, config: dict[str, Any]) -> CarriedState:
    """The state with an adapter in its weights."""
    from vescale_fsdp.conversion.adapters.merged_weights import merged_state
    from vescale_fsdp.conversion.adapters.peft_folder import PeftConfig, require_adapter
    from vescale_fsdp.conversion.formats.detect import open_source

    require_adapter(url)
    adapter = open_source(url, kind="adapter")
    peft_config = PeftConfig.read(adapter.store, "pass the folder that peft saved")
    return merged_state(state, adapter, peft_config, config)


def _dequantized(state: CarriedState, text: str, assets: Assets, source: Source) -> CarriedState:
    """The state with quantised weights as floats, and the settings told."""
    from vescale_fsdp.checkpoint.moves.casting import float_type
    from vescale_fsdp.conversion.state.quantized_weights import dequantized

    dtype = float_type(text)
    found = dequantized(state, _settings(assets, source), dtype)
    assets.set_weights_dtype(dtype.name)
    assets.set_quantization(None)
    return found


def _newly_quantized(
    state: CarriedState, schemes: Sequence[str], assets: Assets, source: Source
) -> CarriedState:
    """The state with weights as codes and scales, and the settings told."""
    from vescale_fsdp.conversion.state.newly_quantized import newly_quantized

    found, settings = newly_quantized(state, schemes, assets.settings or _settings(assets, source))
    assets.set_quantization(settings)
    return found


def _require_text(names: Sequence[str]) -> None:
    """Refuse names that have no UTF-8, which plans, journals and most formats write."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ConversionError(
                "A name is not valid text.",
                expected="names of whole Unicode characters",
                got=f"{name!r:.200}: {error.reason}",
                todo="leave it out with --exclude, or rename it in the source",
            ) from error


def _require_stored(state: CarriedState, source: Source, *, keeps_repeats: bool) -> None:
    """Refuse tensors that are far more than what the source stores of them: a file of a kilobyte can hold a tensor of
    terabytes whose strides repeat one item, and an array whose chunks are absent."""

    def written(view: TensorView) -> int:
        return (without_repeats(view, repeated_dims(view)) if keeps_repeats else view).info.nbytes

    sizes = {name: written(view) for name, view in state.views.items()}
    total = sum(sizes.values())
    if not is_inflated(total, 0):
        return  # as most are
    inputs = {(id(each), name): each for view in state.views.values() for each, name in view.sources()}
    stored = {key: each.tensors[key[1]].stored_nbytes for key, each in inputs.items()}
    if not is_inflated(total, sum(stored.values())):
        return

    def stored_of(name: str) -> int:
        return sum(stored[id(each), part] for each, part in state.views[name].sources())

    worst = max(sizes, key=lambda name: sizes[name] - stored_of(name))
    raise ConversionError(
        "The source stores far fewer values than the result would have.",
        expected=f"at most {MOST_GROWTH} times the bytes that are stored, or {format_bytes(UNCHECKED_BYTES)}",
        got=f"{format_bytes(total)} of {format_bytes(sum(stored.values()))}; {worst} alone would take "
        f"{format_bytes(sizes[worst])}, of which {format_bytes(stored_of(worst))} are stored",
        where=source.url,
        todo=f"leave it out: --exclude '{worst}'; to-torch writes what strides repeat (tensor.expand) once",
    )


def _with_casts(
    state: CarriedState, dtype: Sequence[str], assets: Assets | None, quantized: frozenset[str]
) -> tuple[CarriedState, dict[str, tuple[str, str]]]:
    """The state with floats cast, the settings told, and the types before and after."""
    from vescale_fsdp.checkpoint.moves.casting import CastRules

    casts = CastRules.parse(dtype)
    cast = state.with_model_views(lambda views: casts.apply(views, quantized))
    if assets is not None and casts.default is not None:
        assets.set_weights_dtype(casts.default.name)
    types = {name: (state.views[name].info.dtype, view.info.dtype) for name, view in cast.views.items()}
    return cast, {name: (old.name, new.name) for name, (old, new) in types.items() if old != new}


def _with_rules(
    state: CarriedState, kind: str, options: ConvertOptions, config: dict[str, Any]
) -> CarriedState:
    from vescale_fsdp.conversion.rules.apply_to_state import state_with_rules
    from vescale_fsdp.conversion.rules.rule_file import load_rules

    assert options.rules is not None
    to_hf = kind == "hf" if options.rules_to is None else options.rules_to == "hf"
    return state_with_rules(
        state, load_rules(options.rules), config, to_hf=to_hf, on_disagreement=options.on_disagreement
    )
