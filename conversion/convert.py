"""`convert` reads a checkpoint and writes it in another format. Every ``to-...`` command calls it.

Functions import the modules that only some conversions need (casts, key rules, adapters), because importing all of
them takes longer than a small conversion.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

from vescale_fsdp.checkpoint.state.gc_pause import gc_paused
from vescale_fsdp.conversion.convert_options import ConvertOptions
from vescale_fsdp.conversion.engine.carried_state import (
    CarriedState,
    model_state,
    whole_state,
    with_optimizer_form,
)
from vescale_fsdp.conversion.engine.copying import CopyLimits, Progress, no_progress
from vescale_fsdp.conversion.engine.plan import OutputPlan, Written
from vescale_fsdp.conversion.engine.run_plan import Outcome, run_plan
from vescale_fsdp.conversion.engine.source import Source, check_source
from vescale_fsdp.conversion.engine.stored_tensor import MOST_GROWTH, UNCHECKED_BYTES, is_inflated
from vescale_fsdp.conversion.engine.tensor_view import TensorView, repeated_dims, without_repeats
from vescale_fsdp.conversion.formats.huggingface.class_check import (
    ClassCheck,
    check_planned,
    check_written,
    missing_tensors,
)
from vescale_fsdp.conversion.formats.huggingface.repository import (
    NAMES_OF_FILES,
    Assets,
    config_class,
    own_config,
    own_settings,
)
from vescale_fsdp.conversion.formats.table import TARGETS
from vescale_fsdp.conversion.quantization.names import find_quantized
from vescale_fsdp.errors import ConversionError, as_pattern, counted, format_bytes, option, some

if TYPE_CHECKING:
    from vescale_fsdp.conversion.formats.huggingface.tied_weights import Compare

# A warning for native targets on several ranks.
_ORDER_LOST = (
    "safetensors files do not keep the order of a model's parameters: a start on several ranks may have to move "
    "pieces between them, which only costs time"
)

_CHECKED_BY = {"table": "shipped table", "class": "class itself"}  # `ClassCheck.how` -> words of the text
_MOST = 20  # names per line of the text

Join = Callable[[Sequence[tuple[Source, CarriedState]]], tuple[CarriedState, Sequence[str]]]
"""Returns one state for several sources and their states; and names outside it that include and exclude may match."""

# Kinds of sources whose folders may contain config.json and tokenizer files.
_WITH_SETTINGS = ("hf", "bin", "shards", "deepspeed", "ranks")


@dataclass(frozen=True)
class ConvertReport:
    """The result of a conversion or a dry run. ``str(report)`` gives the lines that the command prints.

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
    tied: dict[str, str]  # alias of a tied weight -> name under which its bytes are stored
    casts: dict[str, tuple[str, str]]  # name -> (type before, type after)
    uncast: tuple[str, ...]  # codes and scales of quantized weights, which keep their types
    left_assets: tuple[str, ...]  # files in the assets folder that are not copied
    warnings: tuple[str, ...]
    dry_run: bool
    part: tuple[int, int]  # index of this process's share of the files, and how many shares there are
    check: ClassCheck | None = None  # None without a model class, or if another part publishes the result
    others: tuple[
        Source, ...
    ] = ()  # the inputs of an average or a combination after the first, which is `source`

    @property
    def dropped_optimizer(self) -> int:
        """Number of the source's optimizer entries that are not in the result."""
        return len(set(self.state.dropped).intersection(self.state.model.optimizer))

    @property
    def dropped_others(self) -> tuple[str, ...]:
        """Names of the source's entries outside the optimizer that are not in the result."""
        optimizer = set(self.state.model.optimizer)
        return tuple(name for name in self.state.dropped if name not in optimizer)

    def __str__(self) -> str:
        verb = "would write" if self.dry_run else "wrote"
        model = self.state.model
        prefixes = ", ".join(f"{prefix}." for prefix in model.candidates) or model.prefix or "(root)"
        tensors = counted(len(self.state.views), "tensor")
        lines = [
            f"source: {self.source.kind} at {self.source.url}, model prefix {prefixes}",
            *(f"source: {source.kind} at {source.url}" for source in self.others),
            f"{verb} {tensors}, {format_bytes(self.plan.tensor_nbytes)}, to {self.target}",
            f"files: {len(self.plan.files)} with tensors, {len(self.plan.closing)} others",
        ]
        index, count = self.part
        if count > 1:
            mine = self.plan.files[index::count]  # the same division as in `run_plan`
            names = some((file.name for file in mine), _MOST)
            lines.append(f"part {index} of {count}, counted from 0: {names}")
        if self.outcome.published and not self.outcome.written:
            lines.append("nothing left to do: the result exists already")
        elif self.outcome.kept:
            lines.append(f"kept from the interrupted run: {len(self.outcome.kept)} files")
        if not self.outcome.published and not self.dry_run:
            lines.append("not published yet: other parts are not complete")
        if self.check is not None and self.check.how != "not checked":
            # The memory budget is that of the copy; the child runs after it.
            child = (
                f", in a child process of {format_bytes(self.check.child_bytes)}"
                if self.check.child_bytes
                else ""
            )
            by = f"by the {_CHECKED_BY[self.check.how]}{child}"
            lines.append(f"checked: {self.check.class_name} loads it ({by})")
        if self.dropped_optimizer:
            lines.append(f"dropped: {self.dropped_optimizer} optimizer entries")
        if self.dropped_others:
            lines.append(f"dropped: {some(_by_container(self), _MOST)}")
        lines += [f"tied: {alias} (stored as {kept})" for alias, kept in self.tied.items()]
        if self.uncast:
            lines.append(f"not cast, since quantized or a scale: {some(self.uncast, _MOST)}")
        if self.left_assets:
            lines.append(
                f"files not copied ({option('include_asset', 'PATTERN')} does): {some(self.left_assets, _MOST)}"
            )
        casts: dict[tuple[str, str], list[str]] = {}
        for name, types in self.casts.items():
            casts.setdefault(types, []).append(name)
        lines += [f"cast from {old} to {new}: {some(names)}" for (old, new), names in casts.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        verb = "would write" if self.dry_run else "wrote"
        return f"ConvertReport({verb} {counted(len(self.state.views), 'tensor')} of {self.source.url} to {self.target})"

    def _repr_html_(self) -> str:
        """Return the text, as a notebook shows it."""
        return f"<pre>{escape(str(self))}</pre>"

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, as ``--json`` prints it."""
        return {
            "source": {
                "kind": self.source.kind,
                "url": self.source.url,
                "model_prefix": self.state.model.prefix,
            },
            "other_sources": [{"kind": source.kind, "url": source.url} for source in self.others],
            "target": {"kind": self.plan.kind, "url": self.target},
            "written": not self.dry_run,
            "published": self.outcome.published,
            "total_bytes": self.plan.tensor_nbytes,
            "files": [{"file": file.name, "bytes": file.nbytes} for file in self.plan.files],
            "kept_files": list(self.outcome.kept),
            "closing_files": [file.name for file in self.plan.closing],
            "dropped": {"optimizer_entries": self.dropped_optimizer, "others": list(self.dropped_others)},
            "tied": [{"name": alias, "stored_as": kept} for alias, kept in self.tied.items()],
            "casts": [{"name": n, "from": a, "to": b} for n, (a, b) in self.casts.items()],
            "uncast": list(self.uncast),
            "left_assets": list(self.left_assets),
            "warnings": list(self.warnings),
            "check": None if self.check is None else self.check.to_json(),
        }


def _by_container(report: ConvertReport) -> list[str]:
    """List the dropped entries, one text per container: a trainer may store a hundred counters and random states."""
    containers: dict[str, list[str]] = {}
    for name in report.dropped_others:
        root, *inner = map(str, report.source.path(name))
        # An entry at the root or in the model's container gets a text of its own.
        is_in_model = not inner or report.state.model.prefix.startswith(f"{root}.")
        containers.setdefault(name if is_in_model else root, []).append(name)
    return [
        names[0] if len(names) == 1 else f"{container} ({len(names)} entries)"
        for container, names in containers.items()
    ]


def convert(
    source: Source,
    target: str | os.PathLike[str],
    kind: str,
    options: ConvertOptions | None = None,
    *,
    progress: Progress = no_progress,
    announce: Progress = no_progress,
) -> ConvertReport:
    """Write ``source`` to ``target`` in another format.

    Args:
        source: an opened checkpoint; opened with ``checks_files=False``, it may lack the files of tensors that are not
            written.
        target: local path or fsspec URL.
        kind: ``"native"``, ``"dcp"``, ``"zarr"``, ``"hf"``, ``"adapter"`` or ``"torch"``.
        options: None for the defaults.
        progress: called with bytes written since the last call, from several threads.
        announce: called once, before the first write, with the total number of tensor bytes.

    Raises:
        ArgumentError: if ``source`` is not an opened checkpoint, such as a path.
        ConversionError: if the target is refused, the format cannot store the state, or the model class that
            config.json names does not load the resulting Hugging Face folder. No file has its final name then.
        CorruptCheckpointError: if the source is damaged. If it lacks a file that is needed, nothing has been written.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.conversion import open_source
        >>> torch.save({"w": torch.ones(4)}, "in.pt")
        >>> report = convert(open_source("in.pt"), "as_dcp", "dcp")
        >>> len(report.state.views), open_source("as_dcp").kind
        (1, 'dcp')
    """
    check_source(source, "convert(open_source(path), target, kind)")
    return convert_joined([source], None, target, kind, options, progress=progress, announce=announce)


def convert_joined(
    sources: Sequence[Source],
    join: Join | None,
    target: str | os.PathLike[str],
    kind: str,
    options: ConvertOptions | None,
    *,
    requested: Mapping[str, object] | None = None,
    progress: Progress,
    announce: Progress,
) -> ConvertReport:
    """Write one source, or what ``join`` makes of several sources, to ``target``. Arguments and errors: see `convert`.

    Args:
        sources: the first one determines the settings files and the structure of the result.
        join: None for one source.
        requested: as in `run_plan`, in addition to the options.
    """
    options, target = options or ConvertOptions(), os.fspath(target)
    source, *others = sources
    with gc_paused():  # scanning the objects of a large plan takes seconds
        for each in sources:
            _check_is_whole(each, kind, options)
        report = plan_conversion(source, target, kind, options, others=others, join=join)
        checks: list[ClassCheck] = []  # only the latest check; a list, so that `require` can replace it

        def require(check: ClassCheck | None) -> None:
            """Raise if the model class does not load the result; keep the check for the report."""
            if check is not None:
                check.require(target, is_required=options.require_check)
                checks[:] = [check]

        def check_files(read: Written) -> None:
            report.plan.when_written(read)
            require(check_written(report.plan, read, find_quantized))

        # A check by the class itself takes a slow child process. `check_files` runs it for the written files. A dry
        # run writes no files, so it runs here. Otherwise it runs here only if the shipped table finds problems, so
        # that an error comes before any data is copied.
        require(check_planned(report.plan, find_quantized, asks="always" if options.dry_run else "doubt"))
        outcome = run_plan(
            replace(report.plan, when_written=check_files),
            sources,
            target,
            limits=_limits_of(options, report.state),
            overwrite=options.overwrite,
            resume=options.resume,
            dry_run=options.dry_run,
            part=options.part,
            requested={**options.asked(), **(requested or {})},
            progress=progress,
            announce=announce,
        )
        # Another part or an earlier run has published the result, so `check_files` was not called.
        if outcome.published and not checks:
            require(check_planned(report.plan, find_quantized))
    # Overflows are known only after the copy, and what the class ignores only after its check.
    warnings = (*report.warnings, *_overflows(report.state), *_ignored(checks))
    return replace(report, outcome=outcome, check=checks[0] if checks else None, warnings=warnings)


def _limits_of(options: ConvertOptions, state: CarriedState) -> CopyLimits:
    """Return the limits for memory and threads; memory for decoded chunks and for encoded blocks is in the budget."""
    limits = options.limits
    scratch_buffers = max((view.scratch_buffers for view in state.views.values()), default=0)
    if scratch_buffers > limits.scratch_buffers:
        limits = replace(limits, scratch_buffers=scratch_buffers)
    if options.merge is not None:
        limits = replace(limits, threads=1)  # each thread of a merge would hold a whole matrix
    # Each thread needs memory for the largest chunk of any tensor that the plan reads.
    stored = (each for view in state.views.values() for each in view.sources())
    nbytes, name = max(((source.decoded.get(name, 0), name) for source, name in stored), default=(0, ""))
    if nbytes:
        limits = limits.decoding(name, nbytes)
    return limits.caching() if options.quantize else limits


def _overflows(state: CarriedState) -> list[str]:
    """Return a warning if casts of this run turned finite values into infinities, else an empty list."""
    overflows = [
        f"{name} ({count} of {view.info.numel} as {view.info.dtype.name})"
        for name, view in state.views.items()
        if (count := view.overflows)
    ]
    return [f"finite values are infinite in their new type: {some(overflows)}"] if overflows else []


def _ignored(checks: Iterable[ClassCheck]) -> list[str]:
    """Return a warning if the class in config.json ignores tensors of the result, else an empty list."""
    return [
        f"{check.class_name} of config.json ignores tensors of the result: {some(check.extra, 6)}"
        for check in checks
        if check.extra
    ]


def plan_conversion(
    source: Source,
    target: str,
    kind: str,
    options: ConvertOptions,
    is_equal: Compare | None = None,
    *,
    others: Sequence[Source] = (),
    join: Join | None = None,
) -> ConvertReport:
    """Plan what `convert` writes. Reads metadata and small tensors, and compares tensors that config.json ties.

    Args:
        source, target, kind, options: as for `convert`.
        is_equal: compares two tied tensors; by default their bytes are read and compared.
        others: further sources.
        join: makes one state of those of all sources; None for one source.

    Returns:
        A report without an outcome and without a check.

    Raises:
        ConversionError: if the target or an option is refused, or the format cannot store the state.
        CorruptCheckpointError: if a tensor that is read for the plan is damaged, or a file of a chosen tensor is
            missing.
    """
    if kind not in TARGETS:
        raise ConversionError(
            "This target is not known.", expected=tuple(TARGETS), got=kind, todo="choose one"
        )
    assets = _assets_for(source, kind, options)
    states = _states_after_rules((source, *others), kind, options, assets)
    state, unmatched = join(states) if join is not None else (states[0][1], ())
    warnings = [*dict.fromkeys(each for one in (source, *others) for each in one.warnings), *state.warnings]
    described = sorted(source.file_metadata.keys() - {"format"})  # the writer adds "format" itself
    changes_tensors = any((options.dequantize, options.quantize, options.rules, options.merge, join))
    # Other formats have no __metadata__, and it may describe tensors that this conversion changes.
    if described and (kind != "hf" or changes_tensors):
        state = replace(state, file_metadata={})
        warnings.append(f"__metadata__ of safetensors files is dropped: {some(described)}")
    if TARGETS[kind].keeps_metadata and join is None:
        state = replace(state, metadata=source.metadata)
    elif any(each.metadata is not None for each in (source, *others)):
        warnings.append("the metadata that was passed to `save` is dropped")
    # After the rules, because config.json ties weights by their names in the result.
    state, tied, tie_warnings = _with_ties(state, kind, options, source, assets, is_equal)
    warnings += tie_warnings
    state = _newly_quantized(state, options, assets, source)
    quantized = _quantized_names(state, options, kind, assets, source)
    # Only now, because ties and scales can only be found among all names.
    state = state.filtered(options.include, options.exclude, unmatched)
    _check_names([*state.views, *state.values])
    for each in (source, *others):
        each.check_files(name for view in state.views.values() for of, name in view.sources() if of is each)
    _check_growth(state, source, keeps_repeats=TARGETS[kind].keeps_repeats)
    state, casts = _with_casts(state, kind, options, assets, quantized)
    if options.merge is not None:  # which has cast to wider types before
        stored = {name: tensor.info.dtype.name for name, tensor in source.tensors.items()}
        now = {name: view.info.dtype.name for name, view in state.views.items()}
        casts |= {n: (stored[n], now[n]) for n in now if n in stored and stored[n] != now[n]}
    if kind == "hf":  # after the casts: config.json must name the types that are written
        infos = [view.info for view in state.views.values()]
        if not quantized:
            assets.match_dtype(infos)
        elif options.dequantize is not None or options.quantize:
            assets.correct_dtype(infos, quantized)
        if not options.no_assets:
            warnings += assets.disagreements(infos, quantized)
    # These sources are safetensors files. With one rank, no parts of tensors move between ranks.
    if kind == "native" and source.kind in ("hf", "safetensors", "shards") and options.ranks > 1:
        warnings.append(_ORDER_LOST)
    uncast = (name for name in state.views if name in quantized and name not in casts)
    return ConvertReport(
        source=source,
        target=target,
        plan=TARGETS[kind].plan(state, options, assets, target.rpartition("/")[2]),
        state=state,
        outcome=Outcome(),
        tied=tied,
        casts=casts,
        uncast=tuple(uncast) if options.dtype else (),
        left_assets=assets.left if kind == "hf" else (),
        warnings=tuple(warnings),
        dry_run=options.dry_run,
        part=options.part,
        others=tuple(others),
    )


def _states_after_rules(
    sources: Sequence[Source], kind: str, options: ConvertOptions, assets: Assets
) -> list[tuple[Source, CarriedState]]:
    """Return each source with its state after dequantization, a merge, and key rules or the names of its class."""
    states = [(source, _state_for(kind, source, options)) for source in sources]
    # The settings files are those of the first source. Others have quantization settings and sizes of their own.
    own = [assets, *(Assets(None) if own_config(source.store) else assets for source in sources[1:])]
    is_quantized = [True] * len(states)
    if len(states) > 1 and options.dequantize is not None:
        found = [
            bool(
                find_quantized([state.views[name].info for name in state.is_model], _config(settings, source))
            )
            for (source, state), settings in zip(states, own, strict=True)
        ]
        is_quantized = found if any(found) else is_quantized  # `_dequantized` refuses to do nothing
    changed = []
    for (source, state), settings, dequantizes in zip(states, own, is_quantized, strict=True):
        chosen = options if dequantizes else replace(options, dequantize=None)
        state = _dequantized(state, chosen, settings, source)
        state = _merged(state, kind, chosen, settings, source)
        changed.append((source, _with_rules(state, kind, chosen, settings, source)))
    return changed


def _assets_for(source: Source, kind: str, options: ConvertOptions) -> Assets:
    """Return the settings files to copy into a Hugging Face folder: from ``assets``, else the source's own."""
    url = options.assets or None
    if url is None and not options.no_assets and kind == "hf" and source.kind in _WITH_SETTINGS:
        own = own_settings(source.store)
        url = None if own is None else own.where
    # None for an adapter: it needs only adapter_config.json, which `adapter_state` and `plan_adapter` read.
    return Assets(None if kind == "adapter" else url, options.include_asset)


def _config(assets: Assets, source: Source) -> dict[str, Any]:
    """Return the config.json that is copied, else the source's own; empty if there is none."""
    return assets.config if assets.config is not None else own_config(source.store)


def _state_for(kind: str, source: Source, options: ConvertOptions) -> CarriedState:
    """Return the source's entries that the target stores, under the target's names."""
    if kind == "adapter":
        from vescale_fsdp.conversion.formats.peft import adapter_state

        return adapter_state(source, options.model_prefix, options.adapter_name, options.assets)
    if kind == "hf":
        _check_is_model(source)
        return model_state(source, options.model_prefix)

    state = whole_state(source, options.model_prefix, options.prefix)
    return with_optimizer_form(state, options.optimizer)


def _dequantized(
    state: CarriedState, options: ConvertOptions, assets: Assets, source: Source
) -> CarriedState:
    """Dequantize weights if requested, and remove the quantization from config.json."""
    if options.dequantize is None:
        return state
    from vescale_fsdp.conversion.engine.casting import float_type
    from vescale_fsdp.conversion.quantization.dequantize import dequantized

    dtype = float_type(options.dequantize)
    state = dequantized(state, _config(assets, source), dtype)
    assets.set_weights_dtype(dtype.name)
    assets.set_quantization(None)
    return state


def _merged(
    state: CarriedState, kind: str, options: ConvertOptions, assets: Assets, source: Source
) -> CarriedState:
    """Merge an adapter into the weights if requested."""
    if options.merge is None:
        return state
    from vescale_fsdp.conversion.formats.detect import open_source
    from vescale_fsdp.conversion.formats.peft import PeftConfig, require_adapter
    from vescale_fsdp.conversion.merge_adapter import merged_state

    # peft names weights as the model in memory does. Files may have other names, so rules rename them first.
    if source.kind == "hf":
        state = _with_rules(state, kind, replace(options, rules_to="ours"), assets, source)
    if options.dtype:  # peft merges in the dtype in which the base is loaded
        from vescale_fsdp.conversion.engine.casting import CastRules

        rules, config = CastRules.parse(options.dtype), _config(assets, source)

        def widened(views: Sequence[TensorView]) -> list[TensorView]:
            codes = () if options.dequantize else find_quantized([view.info for view in views], config)
            wider = rules.apply_wider(views)
            return [
                view if view.info.name in codes else cast for view, cast in zip(views, wider, strict=True)
            ]

        state = state.with_model_views(widened)
    require_adapter(options.merge)  # before opening, since its error lists the files of the folder
    adapter = open_source(options.merge, kind="adapter")
    peft_config = PeftConfig.read(adapter.store, "pass the folder that peft saved", merges=True)
    return merged_state(state, adapter, peft_config, _config(assets, source))


def _with_rules(
    state: CarriedState, kind: str, options: ConvertOptions, assets: Assets, source: Source
) -> CarriedState:
    """Rename and reshape tensors by key rules if requested, else as the class in config.json does."""
    if options.rules is None:
        return _with_names_of_class(state, kind, options, assets, source)
    from vescale_fsdp.conversion.rules.apply_to_state import state_with_rules
    from vescale_fsdp.conversion.rules.rule_file import load_rules

    return state_with_rules(
        state,
        load_rules(options.rules),
        _config(assets, source),
        to_hf=kind == "hf" if options.rules_to is None else options.rules_to == "hf",
        on_disagreement=options.on_disagreement,
    )


def _with_names_of_class(
    state: CarriedState, kind: str, options: ConvertOptions, assets: Assets, source: Source
) -> CarriedState:
    """Give the model the names of the class in config.json: in files for a Hugging Face folder, else in memory."""
    config = _config(assets, source)
    class_name = config_class(config)
    if class_name is None or kind == "adapter" or state.model.candidates:
        return state
    from vescale_fsdp.conversion.formats.huggingface.class_names import in_files, in_memory

    infos = [view.info for name, view in state.views.items() if name in state.is_model]
    # The class converts weights, not the codes and scales of a quantized release.
    if options.dequantize is None and find_quantized(infos, config):
        return state
    to_files = kind == "hf" if options.rules_to is None else options.rules_to == "hf"
    # A merge has converted the base to the names in memory.
    is_of_files = source.kind in NAMES_OF_FILES and not (to_files and options.merge is not None)
    if to_files == is_of_files:
        return state
    if to_files:
        return in_files(state, config, class_name)
    named = in_memory(state, config, class_name, source.url)
    if not named.unknown:
        return named.state
    warning = f"tensors keep their names in files, since {class_name} could not be asked: {named.unknown}"
    return replace(named.state, warnings=(*named.state.warnings, warning))


def _with_ties(
    state: CarriedState,
    kind: str,
    options: ConvertOptions,
    source: Source,
    assets: Assets,
    is_equal: Compare | None,
) -> tuple[CarriedState, dict[str, str], Sequence[str]]:
    """Drop aliases of tied weights, or store them, as the target requires.

    Returns:
        The state; alias -> stored name of the same weight; warnings about ties.
    """
    # An adapter has no tied weights. Without config.json, nothing says which weights are tied.
    if kind == "adapter" or (kind == "hf" and assets.config is None):
        return state, {}, ()
    from vescale_fsdp.conversion.formats.huggingface.tied_weights import (
        find_ties,
        tied_aliases,
        tied_aliases_of,
    )

    if kind == "hf":
        tied, warnings, differing = find_ties(state.views, assets.settings, is_equal)
        if differing:
            # Untying in config.json keeps both values. It unties all weights, so every name must then be stored.
            state = state.with_aliases(tied_aliases(assets.settings, state.views))
            assets.untie()
            tied, _, differing = find_ties(state.views, assets.settings, is_equal)
            if differing:  # some classes tie weights whatever config.json says
                alias, kept = next(iter(differing.items()))
                raise ConversionError(
                    "The class that config.json names ties weights that differ.",
                    expected=f"{alias} with the bytes of {kept}",
                    got="other bytes; tie_word_embeddings: false does not untie them",
                    where=str(config_class(assets.settings)),
                    todo=f"leave one out, such as {option('exclude', as_pattern(alias))}, or pass "
                    "the config.json of the right class",
                )
        return state.without(tied), tied, warnings
    # Other formats store every name, so the aliases that a Hugging Face source does not store are added again.
    in_memory = options.rules is None and options.rules_to != "hf"
    aliases, warnings_of_class = tied_aliases_of(source, state.views, in_memory=in_memory)
    return state.with_aliases(aliases), {}, warnings_of_class


def _newly_quantized(
    state: CarriedState, options: ConvertOptions, assets: Assets, source: Source
) -> CarriedState:
    """Quantize weights if requested, and describe the quantization in config.json."""
    if not options.quantize:
        return state
    from vescale_fsdp.conversion.quantization.quantize import newly_quantized

    config, limits = assets.settings or _config(assets, source), _limits_of(options, state)
    state, settings = newly_quantized(state, options.quantize, config, limits.cached_bytes)
    assets.set_quantization(settings)
    return state


def _quantized_names(
    state: CarriedState, options: ConvertOptions, kind: str, assets: Assets, source: Source
) -> frozenset[str]:
    """Return the names of codes and scales, which casts leave unchanged; empty if no later step uses them."""
    has_config = assets.config is not None
    if not options.dtype and not (kind == "hf" and has_config):
        return frozenset()
    infos = [view.info for name, view in state.views.items() if name in state.is_model]
    return find_quantized(infos, assets.settings if has_config else _config(assets, source))


def _with_casts(
    state: CarriedState, kind: str, options: ConvertOptions, assets: Assets, quantized: frozenset[str]
) -> tuple[CarriedState, dict[str, tuple[str, str]]]:
    """Cast floats if requested, and name the default type in config.json.

    Returns:
        The state, and name -> (type before, type after) of each tensor that was cast.
    """
    if not options.dtype:
        return state, {}
    from vescale_fsdp.conversion.engine.casting import CastRules

    casts = CastRules.parse(options.dtype)
    cast = state.with_model_views(lambda views: casts.apply(views, quantized))
    if kind == "hf" and casts.default is not None:
        assets.set_weights_dtype(casts.default.name)
    types = {name: (state.views[name].info.dtype, view.info.dtype) for name, view in cast.views.items()}
    return cast, {name: (old.name, new.name) for name, (old, new) in types.items() if old != new}


def _check_is_model(source: Source) -> None:
    """Raise if the source is an adapter, which is not a model without its base."""
    if source.kind == "adapter":
        raise ConversionError(
            "This is an adapter, not a model.",
            expected="a checkpoint of a model",
            got="a folder of peft",
            where=source.url,
            todo=f"merge it into its base: {option('merge', source.url)}; or copy it: {option('adapter', True)} with "
            f"{option('assets', source.url)}",
        )


def _check_is_whole(source: Source, kind: str, options: ConvertOptions) -> None:
    """Raise if a Hugging Face folder lacks tensors that its class needs. For ``hf``, the result is checked instead."""
    is_chosen = options.include or options.exclude or options.rules
    if kind in ("hf", "adapter") or source.kind not in NAMES_OF_FILES or is_chosen:
        return
    infos = {name: tensor.info for name, tensor in source.tensors.items()}
    class_name, missing = missing_tensors(infos, own_config(source.store))
    if missing:
        raise ConversionError(
            "The folder does not have all tensors of its model.",
            expected=f"the tensors of {class_name}, which config.json names",
            got=some(missing, 6),
            where=source.url,
            todo=f"copy the folder again from where it was made; or pass "
            f"{option('include', '*')} to write what is there",
        )


def _check_names(names: Sequence[str]) -> None:
    """Raise for names that cannot be encoded as UTF-8, which plans, journals and most formats require."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair, which a pickle may contain
            raise ConversionError(
                "A name is not valid text.",
                expected="names of whole Unicode characters",
                got=f"{name!r:.200}: {error.reason}",
                todo=f"leave it out with {option('exclude')}, or rename it in the source",
            ) from error


def _check_growth(state: CarriedState, source: Source, *, keeps_repeats: bool) -> None:
    """Raise if the result would be far larger than the bytes that the source stores.

    A hostile file of a kilobyte can describe a tensor of terabytes: by strides that repeat one item, or chunks that
    are not stored.

    Args:
        keeps_repeats: whether the target stores an item once that strides of 0 repeat.
    """

    def written_bytes(view: TensorView) -> int:
        return (without_repeats(view, repeated_dims(view)) if keeps_repeats else view).info.nbytes

    sizes = {name: written_bytes(view) for name, view in state.views.items()}
    total = sum(sizes.values())
    if not is_inflated(total, 0):
        return  # below the limit for which stored bytes do not matter
    # The bytes of tensors that are not converted count too: moments that are all zeros are no reason to refuse a
    # checkpoint whose weights are stored.
    inputs = {id(each): each for view in state.views.values() for each, _ in view.sources()}
    stored_nbytes = sum(each.stored_nbytes for each in inputs.values())
    if not is_inflated(total, stored_nbytes):
        return

    def stored_of(name: str) -> int:
        return sum(each.tensors[part].stored_nbytes for each, part in state.views[name].sources())

    worst = max(sizes, key=lambda name: sizes[name] - stored_of(name))  # the tensor to leave out
    raise ConversionError(
        "The source stores far fewer values than the result would have.",
        expected=f"at most {MOST_GROWTH} times the bytes that are stored, or {format_bytes(UNCHECKED_BYTES)}",
        got=f"{format_bytes(total)} of {format_bytes(stored_nbytes)}; {worst} alone would take "
        f"{format_bytes(sizes[worst])}, of which {format_bytes(stored_of(worst))} are stored",
        where=source.url,
        todo=f"leave it out: {option('exclude', as_pattern(worst))}; "
        "torch.save's format has what strides repeat (tensor.expand) once",
    )
