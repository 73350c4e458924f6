"""The results of `vescale-convert inspect` and `ls`: the contents of a checkpoint, or of a run, as a table or as JSON.

Reads metadata only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from shlex import quote
from typing import Any

from vescale_fsdp.checkpoint.manifest.file_names import parse_step_name
from vescale_fsdp.checkpoint.steps.retention import StepRecord, read_records
from vescale_fsdp.checkpoint.steps.step_folders import list_steps
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.conversion.engine.carried_state import find_model
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.errors import ConversionError, format_bytes
from vescale_fsdp.layout.model_shapes import natural_key

_MOST_CHARS = 100  # longer lists are shortened in the table; the JSON has them in full


def describe(source: Source) -> dict[str, Any]:
    """Describe a source as plain values that can be written as JSON; reads no tensor data.

    The entry ``values`` maps names to values. They are None in formats that store them outside the metadata, and texts
    if JSON has no such type.
    """
    try:
        model = find_model(source)
        prefix = None if model.candidates else model.prefix  # candidates: the containers of several models
        models = [f"{candidate}." for candidate in model.candidates] or [model.prefix]
    except ConversionError:  # no model was found; the contents are described nevertheless
        prefix, models = None, []
    kinds = Counter(tensor.info.dtype.name for tensor in source.tensors.values())
    return {
        "kind": source.kind,
        "url": source.url,
        "step": step[0] if (step := parse_step_name(source.url.rpartition("/")[2])) else None,
        "metadata": source.metadata,
        "model_prefix": prefix,
        "models": models,
        "tensor_bytes": source.nbytes,
        "stored_bytes": sum(tensor.stored_nbytes for tensor in source.tensors.values()),
        "dtypes": dict(sorted(kinds.items())),
        "fingerprint": source.recorded and source.recorded.digest,
        "facts": dict(source.facts),
        "unsupported": list(source.unsupported),
        "tensors": [
            {
                "name": name,
                "dtype": source.tensors[name].info.dtype.name,
                "shape": list(source.tensors[name].info.shape),
                "bytes": source.tensors[name].info.nbytes,
                "sums": source.sums.get(name),
                "chunks": len(source.tensors[name].chunks),
                "files": len({chunk.extent.file for chunk in source.tensors[name].chunks}),
            }
            for name in sorted(source.tensors, key=natural_key)
        ],
        "values": {name: _plain(source, name) for name in sorted(source.values, key=natural_key)},
    }


def _plain(source: Source, name: str) -> object:
    """Return a value for JSON, with lists of any values as they are; None if it is not part of the metadata."""
    if source.kind != "native":
        return None
    value = source.values[name]()
    return value if isinstance(value, bool | int | float | str | list | tuple | None) else repr(value)


def describe_run(url: str) -> list[dict[str, Any]]:
    """Describe the steps of a run's folder, ascending; reads manifests only.

    The entry ``state`` is "committed", "pinned", "abandoned" by a rollback, "damaged", or "incomplete": the step has no
    manifest, so a save of it is running or was interrupted. "damaged" is a manifest that cannot be read, for the reason
    in the entry ``damage``; damage of the data is found by `verify` alone.

    Raises:
        ConversionError: if the folder has no steps.
        StorageError: if the folder's bucket does not exist.
    """
    root = open_storage(url)
    records = {record.step: record for record in read_records(root)}
    steps = [step for step, _ in list_steps(root)]
    if not steps:
        root.check_bucket()
        raise ConversionError(
            "This folder has no steps to list.",
            expected="the folder of a run, with folders step-00000000 and so on, which CheckpointManager writes",
            got="no such folders",
            where=url,
            todo="pass the folder that CheckpointManager got, or print one checkpoint: vescale-convert inspect SRC",
        )
    found = []
    for step in steps:
        record = records.get(step, StepRecord(step))
        states = {"damaged": record.damage, "abandoned": record.abandoned, "pinned": record.pinned}
        states |= {"committed": step in records, "incomplete": True}
        found.append(
            {
                "step": step,
                "bytes": record.num_bytes,
                "unix_s": record.unix_s,
                "seconds": record.seconds,
                "metric": record.metric,
                "state": next(state for state, holds in states.items() if holds),
                "damage": record.damage,
            }
        )
    return found


def format_run(url: str, steps: list[dict[str, Any]], now_s: float) -> str:
    """Format the result of `describe_run` as a table, the reasons of damage, and the command that reads a step's data.

    Args:
        url: the run folder.
        now_s: the time for the age of each step, in seconds since 1970.
    """
    rows = [("step", "bytes", "age", "saved in", "metric", "state")]
    for step in steps:
        rows.append(
            (
                f"{step['step']:,}",
                "-" if step["bytes"] is None else format_bytes(step["bytes"]),
                "-" if step["unix_s"] is None else _age(now_s - step["unix_s"]),
                "-" if step["seconds"] is None else f"{step['seconds']:.3g} s",
                "-" if step["metric"] is None else f"{step['metric']:.6g}",
                step["state"],
            )
        )
    # The first line of an error is its problem.
    damaged = [f"step {step['step']}: {step['damage'].splitlines()[0]}" for step in steps if step["damage"]]
    unread = f"Data is not read: vescale-convert verify {quote(url)} --step N checks a step."
    return "\n".join([*_table(rows), *damaged, unread])


def _age(seconds: float) -> str:
    """Return an age in the largest unit of which there are at least two; "0 s" if clocks differ."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def draw(source: Source, number: int | None = None) -> str:
    """Draw the layout of one group as an SVG picture.

    Args:
        number: the index of the layout; None for the largest.

    Raises:
        ConversionError: if there is no such layout.
    """
    from vescale_fsdp.layout.pictures import layout_svg, layout_title

    layouts = source.layouts
    if not layouts or (number is not None and number >= len(layouts)):
        raise ConversionError(
            "There is no such layout to draw.",
            expected="a native checkpoint of sharded groups" if not layouts else f"0 to {len(layouts) - 1}",
            got=f"{len(layouts)} layouts in a {source.kind} checkpoint",
            where=source.url,
            todo="choose another layout, or convert the checkpoint first: vescale-convert to-native SRC OUT --ranks N",
        )
    chosen = number if number is not None else max(range(len(layouts)), key=lambda i: layouts[i].numel)
    return layout_svg(layouts[chosen], layout_title(layouts[chosen]))


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows of text as lines with columns, the first one as a heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _short(value: object) -> str:
    """Return the text of a value; of a long list or mapping, the number of its items or keys and the first of them."""
    text = repr(value)
    if not isinstance(value, list | tuple | dict) or len(text) <= _MOST_CHARS:
        return text
    kind = "names" if all(isinstance(item, str) for item in value) else "items"
    start, chars = list[str](), 0
    for item in map(str, value):
        chars += len(item) + 2
        if chars > _MOST_CHARS:
            break
        start.append(item)
    return f"{len(value)} {kind}: {', '.join([*start, '..'])}"


def format_description(description: dict[str, Any]) -> str:
    """Format the result of `describe` as a table."""
    rows = [("tensor", "dtype", "shape", "bytes", "chunks", "files")]
    for t in description["tensors"]:
        shape = "x".join(map(str, t["shape"])) or "scalar"
        rows.append(
            (t["name"], t["dtype"], shape, format_bytes(t["bytes"]), str(t["chunks"]), str(t["files"]))
        )
    lines = _table(rows)
    total, stored = description["tensor_bytes"], description["stored_bytes"]
    # Fewer bytes are stored if a stride of 0 repeats items, or if chunks of zeros are absent.
    sizes = format_bytes(total) + (f", of which {format_bytes(stored)} are stored" if stored < total else "")
    metadata = description["metadata"]
    # Only `load` reads a `PerRank` value, and no other format has one.
    label = "per-rank values" if description["kind"] == "native" else "not convertible"
    head = {
        "kind": description["kind"],
        "where": description["url"],
        **({} if description["step"] is None else {"step": str(description["step"])}),
        "tensors": f"{len(description['tensors'])}, {sizes}",
        "dtypes": ", ".join(f"{name} x {count}" for name, count in description["dtypes"].items()) or "none",
        "model prefix": ", ".join(prefix or "(root)" for prefix in description["models"]) or "no model found",
        **({"fingerprint": description["fingerprint"]} if description["fingerprint"] else {}),
        **({} if metadata is None else {"metadata": _short(metadata)}),
        "other values": str(len(description["values"])),
        **({label: ", ".join(description["unsupported"])} if description["unsupported"] else {}),
        **description["facts"],
    }
    width = max(map(len, head)) + 2
    top = [f"{key + ':':<{width}}{value}" for key, value in head.items()]
    values = description["values"]
    if values:
        width = max(map(len, values)) + 2
        is_read = description["kind"] == "native"  # other formats store values outside the metadata
        lines += ["", *(f"{n:<{width}}{_short(v) if is_read else '(not read)'}" for n, v in values.items())]
    return "\n".join([*top, "", *lines])
