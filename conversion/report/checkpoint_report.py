"""What the page shows, as plain values: one entry per tensor, read once, a few MiB at a time."""

from __future__ import annotations

from typing import Any

from vescale_fsdp.checkpoint.manifest.file_names import parse_step_name
from vescale_fsdp.checkpoint.steps.retention import read_record
from vescale_fsdp.checkpoint.steps.step_folders import committed_steps
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.conversion.checks.diff import Views, matched_views
from vescale_fsdp.conversion.formats.huggingface.repository import natural_key
from vescale_fsdp.conversion.output.copying import Progress
from vescale_fsdp.conversion.report.holders import FileNumbers, holders_of, layout_to_json
from vescale_fsdp.conversion.report.value_distance import ValueDistance
from vescale_fsdp.conversion.report.value_summary import ValueSummary, values_of
from vescale_fsdp.conversion.source.source import Source
from vescale_fsdp.conversion.views.tensor_view import SourceView, TensorView, pieces_of

_PIECE_BYTES = 4 * 2**20  # 4 MiB, of either side
_MOST_STEPS = 10_000
_VALUE_CHARS = 200


def checkpoint_report(
    source: Source, against: Source | None = None, *, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """All that a page needs.

    Args:
        source: what it is about.
        against: what it is compared with.
        progress: called with bytes read since the last call.

    Raises:
        CorruptCheckpointError: if a file turns out damaged while reading.
    """
    files = FileNumbers()
    left, right = _pairs(source, against)
    tensors = []
    for name in sorted(source.tensors, key=natural_key):
        key = left[name]
        other = right.get(key)
        view = SourceView(source, name, name)
        summary, distance = _measure(view, other, progress)
        stored = source.tensors[name]
        tensors.append(
            {
                "name": name,
                "dtype": stored.info.dtype.name,
                "shape": list(stored.info.shape),
                "bytes": stored.info.nbytes,
                "held": holders_of(stored, files),
                "stats": summary,
                **({"diff": distance} if against is not None else {}),
            }
        )
    values = {
        name: f"{source.values[name]()!r:.{_VALUE_CHARS}}" for name in sorted(source.values, key=natural_key)
    }
    return {
        "kind": source.kind,
        "url": source.url,
        "facts": dict(source.facts),
        "ties": source.ties,
        "tensors": tensors,
        "values": values,
        "files": files.names,
        "layouts": [layout_to_json(layout) for layout in source.layouts],
        "history": _history(source),
        **({} if against is None else _against(against, left, right)),
    }


def _pairs(source: Source, against: Source | None) -> tuple[dict[str, tuple[str, str]], Views]:
    """The key of each tensor of the source, and the other side's tensors by key."""
    if against is None:
        return {name: ("other", name) for name in source.tensors}, {}
    left, right = matched_views(source, against)
    return {next(view.sources())[1]: key for key, view in left.items()}, right


def _against(against: Source, left: dict[str, tuple[str, str]], right: Views) -> dict[str, Any]:
    mine = set(left.values())
    return {
        "against": against.url,
        "only_there": sorted((key[1] for key in right if key not in mine), key=natural_key),
    }


def _measure(
    view: TensorView, other: TensorView | None, progress: Progress
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """A tensor's summary and its distance from another; None of what cannot be said."""
    summary, distance = ValueSummary(), ValueDistance()
    dtype = view.info.dtype
    comparable = other is not None and other.info.shape == view.info.shape
    step = _PIECE_BYTES // max(dtype.itemsize, other.info.dtype.itemsize if other is not None else 1)
    others = pieces_of(other, _PIECE_BYTES, step) if other is not None and comparable else None
    readable = True
    for piece in pieces_of(view, _PIECE_BYTES, step):
        values = values_of(piece.view(dtype.raw), dtype)
        progress(piece.nbytes)
        if values is None:
            readable = False
            break
        summary.add(values)
        if others is not None and other is not None:
            piece = next(others)
            theirs = values_of(piece.view(other.info.dtype.raw), other.info.dtype)
            comparable = theirs is not None and theirs.size == values.size
            if comparable and theirs is not None:
                distance.add(values, theirs)
            progress(piece.nbytes)
    return (summary.to_json() if readable else None), (
        distance.to_json() if readable and comparable else None
    )


def _history(source: Source) -> list[dict[str, Any]]:
    """Records of the steps beside this one, if a manager saved it."""
    root, _, folder = source.url.rstrip("/").rpartition("/")
    if source.kind != "native" or parse_step_name(folder) is None or not root:
        return []
    storage = open_storage(root)
    records = [read_record(storage, step) for step in committed_steps(storage)[-_MOST_STEPS:]]
    return [
        {"step": r.step, "bytes": r.num_bytes, "seconds": r.seconds, "metric": r.metric, "pinned": r.pinned}
        for r in records
    ]
