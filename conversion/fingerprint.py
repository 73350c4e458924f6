"""Fingerprints of checkpoints of any format, read as a stream in bounded memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from vescale_fsdp.byte_sums import pack_sums, run_sums
from vescale_fsdp.checkpoint.manifest.fingerprints import Fingerprint, TensorFingerprint
from vescale_fsdp.conversion.convert import plan_conversion
from vescale_fsdp.conversion.convert_options import ConvertOptions
from vescale_fsdp.conversion.diff import matched_views
from vescale_fsdp.conversion.engine.carried_state import whole_state
from vescale_fsdp.conversion.engine.casting import CastRules
from vescale_fsdp.conversion.engine.copying import Progress, no_progress
from vescale_fsdp.conversion.engine.source import Source, check_source
from vescale_fsdp.conversion.engine.stored_tensor import MOST_GROWTH, UNCHECKED_BYTES, is_inflated
from vescale_fsdp.conversion.engine.tensor_view import SourceView, TensorView, pieces_of
from vescale_fsdp.conversion.formats.huggingface.repository import own_config
from vescale_fsdp.conversion.quantization.names import find_quantized
from vescale_fsdp.errors import ConversionError, as_pattern, format_bytes, option

_READ_BYTES = 4 * 2**20  # 4 MiB


def fingerprint_of(
    source: Source,
    kind: str | None = None,
    options: ConvertOptions | None = None,
    *,
    recorded: bool = False,
    progress: Progress = no_progress,
) -> Fingerprint:
    """Return the fingerprints of a checkpoint's tensors, or of those that a conversion would write.

    Equal to `vescale_fsdp.checkpoint.fingerprint` of the live state with these tensors. Memory holds 8 MiB at a time,
    and what a view needs that computes its items.

    Args:
        source: an opened checkpoint.
        kind: the format whose names, shapes and dtypes the tensors get, such as ``"hf"``; None: the source's own.
        options: options of the conversion, such as ``dtype`` and ``rules``. Without ``kind``, only ``dtype``,
            ``model_prefix``, ``include`` and ``exclude`` apply.
        recorded: take the sums that a save has recorded, and read only tensors without them. Damage to the files is
            not noticed then.
        progress: called with bytes read since the last call.

    Raises:
        ArgumentError: if ``source`` is not an opened checkpoint, such as a path.
        ConversionError: if the conversion is refused, or a tensor repeats far more items than are stored.
        CorruptCheckpointError: if a file is damaged.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.checkpoint import fingerprint
        >>> from vescale_fsdp.conversion import open_source
        >>> state = {"w": torch.ones(4), "b": torch.zeros(2)}
        >>> torch.save(state, "to_fingerprint.pt")
        >>> fingerprint_of(open_source("to_fingerprint.pt")) == fingerprint(state)
        True
        >>> half = ConvertOptions(dtype=("bfloat16",))
        >>> fingerprint_of(open_source("to_fingerprint.pt"), options=half).tensors["w"].dtype
        'bfloat16'
    """
    check_source(source, "fingerprint_of(open_source(path))")
    return _fingerprint(_views_of(source, kind, options), recorded, progress)


def fingerprints_of(
    a: Source,
    b: Source,
    kind: str | None = None,
    options: ConvertOptions | None = None,
    *,
    recorded: bool = False,
    progress: Progress = no_progress,
) -> tuple[Fingerprint, Fingerprint]:
    """Return the fingerprints of two checkpoints under names that are equal for the same tensor, as in `diff`.

    If one checkpoint contains only a model, the other one's further tensors are ignored.

    Args:
        a, b: opened checkpoints.
        kind, options, recorded, progress: as for `fingerprint_of`.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.conversion import open_source
        >>> torch.save({"w": torch.ones(4)}, "fa.pt"), torch.save({"model": {"w": torch.ones(4)}}, "fb.pt")
        (None, None)
        >>> left, right = fingerprints_of(open_source("fa.pt"), open_source("fb.pt"))
        >>> left == right, left.differences(right)
        (True, ())
    """
    for side in (a, b):
        check_source(side, "fingerprints_of(open_source(path), open_source(other_path))")
    if kind is not None or options is not None:
        left, right = (_views_of(side, kind, options) for side in (a, b))
        return _fingerprint(left, recorded, progress), _fingerprint(right, recorded, progress)
    matched = matched_views(a, b)
    if not all(any(group == "other" for group, _ in side) for side in matched):
        matched = tuple({k: view for k, view in side.items() if k[0] == "model"} for side in matched)  # type: ignore[assignment]
    # "other" names are full names, so that those of a model may occur too.
    first, second = (
        {name if group == "model" else f"{group}: {name}": view for (group, name), view in side.items()}
        for side in matched
    )
    return _fingerprint(first, recorded, progress), _fingerprint(second, recorded, progress)


def _views_of(source: Source, kind: str | None, options: ConvertOptions | None) -> Mapping[str, TensorView]:
    """Return the tensors by name: those of the source, or those that a conversion would write."""
    if kind is not None:
        return plan_conversion(source, "", kind, options or ConvertOptions()).state.views
    if options is None:  # also for sources in which no model can be found
        return {name: SourceView(source, name, name) for name in source.tensors}
    state = whole_state(source, options.model_prefix).filtered(options.include, options.exclude)
    if options.dtype:
        infos = [view.info for name, view in state.views.items() if name in state.is_model]
        quantized, casts = find_quantized(infos, own_config(source.store)), CastRules.parse(options.dtype)
        state = state.with_model_views(lambda views: casts.apply(views, quantized))
    return state.views


def _fingerprint(views: Mapping[str, TensorView], recorded: bool, progress: Progress) -> Fingerprint:
    """Return the fingerprints of views by name; those of the same tensor are read once."""
    known: dict[Hashable, str] = {}
    tensors = {}
    for name, view in views.items():
        info = view.info
        sums = view.recorded_sums if recorded else None
        if sums is None:
            sums = known.get(view.sameness)
        if sums is None:
            sums = known[view.sameness] = _sums_of(view, progress)
        tensors[name] = TensorFingerprint(info.dtype.name, info.shape, sums)
    return Fingerprint(tensors)


def _sums_of(view: TensorView, progress: Progress) -> str:
    """Read a view and return its sums."""
    stored = sum(source.tensors[name].stored_nbytes for source, name in view.sources())
    if is_inflated(view.info.nbytes, stored):  # a small hostile file may describe a tensor of terabytes
        raise ConversionError(
            "The source stores far fewer values than a tensor has.",
            expected=f"at most {MOST_GROWTH} times the bytes that are stored, or {format_bytes(UNCHECKED_BYTES)}",
            got=f"{format_bytes(view.info.nbytes)} of {format_bytes(stored)} that are stored",
            where=f"tensor {view.info.name}",
            todo=f"leave it out: {option('exclude', as_pattern(view.info.name))}",
        )
    total, start = torch.zeros(2, dtype=torch.int64, device="cpu"), 0
    for piece in pieces_of(view, _READ_BYTES):
        total += run_sums(torch.from_numpy(piece), start)
        start += piece.nbytes
        progress(piece.nbytes)
    return pack_sums(total).hex()
