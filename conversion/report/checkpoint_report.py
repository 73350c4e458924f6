"""Make the page of `vescale-convert report`: first its contents as plain values, with one entry per tensor.

Each tensor is read once, a few MiB at a time. A tensor that is far larger than its stored bytes is sampled,
since a stride of zero can repeat one item for terabytes. The summary of a sampled tensor contains the number of values
that were read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from vescale_fsdp.conversion.diff import Views, matched_views
from vescale_fsdp.conversion.engine.copying import Progress, no_progress
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.stored_tensor import StoredTensor, is_inflated
from vescale_fsdp.conversion.engine.tensor_view import SourceView, TensorView, read_range
from vescale_fsdp.conversion.report.run_steps import RunSteps
from vescale_fsdp.conversion.report.tensor_values import ValueDistance, ValueSummary, values_of
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.model_shapes import natural_key
from vescale_fsdp.layout.pictures import distinct_layouts, layout_svg, layout_title

_PIECE_BYTES = 4 * 2**20  # 4 MiB, read at a time from each checkpoint
_SAMPLED_PIECES = 4  # number of pieces that are read from a sampled tensor
_MOST_LAYOUTS = 24  # maximum number of pictures; an SVG document takes some 20 kB
_VALUE_CHARS = 200  # maximum length of a value's text; the rest is cut off


def checkpoint_report(
    source: Source,
    against: Source | None = None,
    *,
    steps: Sequence[Source] = (),
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Compute the contents of a page, as plain values that can be written as JSON.

    Args:
        source: the checkpoint that the page describes.
        against: another checkpoint, to compare values with; None for no comparison.
        steps: steps of the source's run, ascending, that are read to compare each with each: see `urls_of_steps`. By
            default, fingerprints that saves have recorded are compared, and no other step is read.
        progress: called with the number of bytes read since the last call.

    Raises:
        CorruptCheckpointError: if a file is damaged.
    """
    files = FileNumbers()
    left, right = _pairs(source, against)
    run = RunSteps(source, steps)
    tensors = []
    for name in sorted(source.tensors, key=natural_key):
        key = left[name]
        other = right.get(key)
        view = SourceView(source, name, name)
        stored = source.tensors[name]
        is_sampled = is_inflated(stored.info.nbytes, stored.stored_nbytes)
        summary, distance = _measure(view, other, progress, is_sampled=is_sampled)
        tensors.append(
            {
                "name": name,
                "dtype": stored.info.dtype.name,
                "shape": list(stored.info.shape),
                "bytes": stored.info.nbytes,
                "held": holders_of(stored, files),
                "stats": summary,
                **({"diff": distance} if against is not None else {}),
                **run.measure(name, progress),
            }
        )
    values = {
        name: f"{source.values[name]()!r:.{_VALUE_CHARS}}" for name in sorted(source.values, key=natural_key)
    }
    compare, histories = run.versions()
    by_name = dict(zip(source.tensors, histories, strict=True))
    for row in tensors if compare is not None else ():
        row["history"] = by_name[row["name"]]
    return {
        "kind": source.kind,
        "url": source.url,
        "facts": dict(source.facts),
        "ties": source.ties,
        "tensors": tensors,
        "values": values,
        "files": files.names,
        "layouts": pictures_of(source.layouts),
        "history": [
            {
                "step": r.step,
                "bytes": r.num_bytes,
                "seconds": r.seconds,
                "metric": r.metric,
                "pinned": r.pinned,
            }
            for r in run.records
        ],
        "compare": compare,
        **({} if against is None else _against(against, left, right)),
    }


def _pairs(source: Source, against: Source | None) -> tuple[dict[str, tuple[str, str]], Views]:
    """Match the tensors of both checkpoints by key; a tensor has the same key in both.

    Returns:
        The key of each tensor of ``source``, by name; and the tensors of ``against``, by key.
    """
    if against is None:  # nothing to match: any distinct keys will do
        return {name: ("other", name) for name in source.tensors}, {}
    left, right = matched_views(source, against)
    return {next(view.sources())[1]: key for key, view in left.items()}, right


def _against(against: Source, left: dict[str, tuple[str, str]], right: Views) -> dict[str, Any]:
    """Make the page's entries about the other checkpoint: its URL, and its tensors that the source lacks."""
    mine = set(left.values())
    return {
        "against": against.url,
        "only_there": sorted((key[1] for key in right if key not in mine), key=natural_key),
    }


def _measure(
    view: TensorView, other: TensorView | None, progress: Progress, *, is_sampled: bool
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Read a tensor and ``other`` piece by piece; returns the summary of the tensor, and its distance from ``other``.

    Both are None for quantized codes, which have no values without their scales. The distance is None without
    ``other``, or if the shapes differ.
    """
    summary, distance = ValueSummary(), ValueDistance()
    info = view.info
    comparable = other is not None and other.info.shape == info.shape
    step = _PIECE_BYTES // max(info.dtype.itemsize, other.info.dtype.itemsize if other is not None else 1)
    buffers = [
        np.empty(min(_PIECE_BYTES, each.info.nbytes), np.uint8) for each in (view, other) if each is not None
    ]
    readable = True
    for start in _starts(info.numel, step, is_sampled=is_sampled):
        stop = min(start + step, info.numel)
        values = values_of(read_range(view, start, stop, buffers[0]).view(info.dtype.raw), info.dtype)
        progress((stop - start) * info.dtype.itemsize)
        if values is None:
            readable = False
            break
        summary.add(values)
        if comparable and other is not None:
            dtype = other.info.dtype
            theirs = values_of(read_range(other, start, stop, buffers[1]).view(dtype.raw), dtype)
            # The sizes differ if one tensor is complex: a complex item is two values.
            comparable = theirs is not None and theirs.size == values.size
            if comparable and theirs is not None:
                distance.add(values, theirs)
            progress((stop - start) * dtype.itemsize)
    sampled = {"sampled": summary.numel} if is_sampled else {}
    return (summary.to_json() | sampled if readable else None), (
        distance.to_json() | sampled if readable and comparable else None
    )


def _starts(numel: int, step: int, *, is_sampled: bool) -> Sequence[int]:
    """Return the index of the first item of each piece to read; the pieces of a sample are spread evenly."""
    if not is_sampled:
        return range(0, numel, step)
    # - 1: the first piece is at the start of the tensor, and the last piece is at its end.
    return [index * (numel - step) // (_SAMPLED_PIECES - 1) for index in range(_SAMPLED_PIECES)]


_MOST_RUNS = 64  # maximum per tensor; more could not be distinguished on the page


class FileNumbers:
    """Numbers the files in the order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, name: str) -> int:
        """Return the file's number; a new file gets the next number."""
        return self._numbers.setdefault(name, len(self._numbers))

    @property
    def names(self) -> list[str]:
        """All files, in the order of their numbers."""
        return list(self._numbers)


def holders_of(tensor: StoredTensor, files: FileNumbers) -> list[list[int]]:
    """Describe which files store a tensor, as runs of equal chunks in successive files.

    Returns:
        [number of the first file, number of files, items per file] of each run, at most `_MOST_RUNS`. The number is -1
        for items that are zeros and stored in no file.
    """
    runs: list[list[int]] = []
    items: list[list[int]] = []  # [number of file, number of items]; successive boxes in one file are joined
    for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.box.offsets):
        number = files.of(chunk.extent.file) if chunk.extent.file else -1  # -1: zeros that no file stores
        if items and items[-1][0] == number:
            items[-1][1] += chunk.box.numel
        else:
            items.append([number, chunk.box.numel])
    for number, numel in items:
        last = runs[-1] if runs else None
        if last and last[2] == numel and last[0] + last[1] == number:
            last[1] += 1
        else:
            runs.append([number, 1, numel])
    return runs[:_MOST_RUNS]


def pictures_of(layouts: Sequence[GroupLayout]) -> list[dict[str, str]]:
    """Draw the distinct layouts, the largest first: a title and an SVG document of each, at most `_MOST_LAYOUTS`."""
    kinds = distinct_layouts(layouts)[:_MOST_LAYOUTS]
    titles = [layout_title(layout, count) for layout, count in kinds]
    return [
        {"title": title, "svg": layout_svg(layout, title)}
        for title, (layout, _) in zip(titles, kinds, strict=True)
    ]


_PLACE = "REPORT_DATA"  # the text in page.html that is replaced by the JSON of the report


def report_page(report: Mapping[str, Any]) -> str:
    """Return the page as one HTML document, which loads no other files.

    Args:
        report: the result of `checkpoint_report`.
    """
    files = resources.files(__package__)
    page = files.joinpath("page.html").read_text(encoding="utf-8")
    for name in ("page.css", "page.js"):
        page = page.replace(f"/* {name} */", files.joinpath(name).read_text(encoding="utf-8"))
    # "<" is escaped, since a tensor's name could contain "</script>", which ends the element.
    data = json.dumps(report, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    before, _, after = page.partition(_PLACE)
    return f"{before}{data}{after}"
