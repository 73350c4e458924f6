"""The result of `vescale-convert inspect`: a checkpoint's contents as a table or as JSON. Reads metadata only."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vescale_fsdp.checkpoint.manifest.file_names import parse_step_name
from vescale_fsdp.conversion.engine.carried_state import find_model
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.errors import ConversionError, format_bytes
from vescale_fsdp.layout.model_shapes import natural_key


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
        "model_prefix": prefix,
        "models": models,
        "tensor_bytes": source.nbytes,
        "stored_bytes": sum(tensor.stored_nbytes for tensor in source.tensors.values()),
        "dtypes": dict(sorted(kinds.items())),
        "fingerprint": source.recorded and source.recorded.digest,
        "facts": dict(source.facts),
        "left_out": list(source.omitted),
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


def draw(source: Source, number: int | None = None) -> str:
    """Draw the layout of one group as an SVG picture.

    Args:
        number: the index of the layout; None for the largest.

    Raises:
        ConversionError: if there is no such layout.
    """
    from vescale_fsdp.layout.pictures import layout_svg

    layouts = source.layouts
    if not layouts or (number is not None and number >= len(layouts)):
        raise ConversionError(
            "There is no such layout to draw.",
            expected="a native checkpoint of sharded groups" if not layouts else f"0 to {len(layouts) - 1}",
            got=f"{len(layouts)} layouts in a {source.kind} checkpoint",
            where=source.url,
            todo="choose another layout, or convert the checkpoint first: vescale-convert to-vescale SRC OUT --ranks N",
        )
    chosen = number if number is not None else max(range(len(layouts)), key=lambda i: layouts[i].numel)
    return layout_svg(layouts[chosen], f"layout {chosen} of {source.url}")


def format_description(description: dict[str, Any]) -> str:
    """Format the result of `describe` as a table."""
    rows = [("tensor", "dtype", "shape", "bytes", "chunks", "files")]
    for t in description["tensors"]:
        shape = "x".join(map(str, t["shape"])) or "scalar"
        rows.append(
            (t["name"], t["dtype"], shape, format_bytes(t["bytes"]), str(t["chunks"]), str(t["files"]))
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    total, stored = description["tensor_bytes"], description["stored_bytes"]
    # Fewer bytes are stored if a stride of 0 repeats items, or if chunks of zeros are absent.
    sizes = format_bytes(total) + (f", of which {format_bytes(stored)} are stored" if stored < total else "")
    head = {
        "kind": description["kind"],
        "where": description["url"],
        **({} if description["step"] is None else {"step": str(description["step"])}),
        "tensors": f"{len(description['tensors'])}, {sizes}",
        "dtypes": ", ".join(f"{name} x {count}" for name, count in description["dtypes"].items()) or "none",
        "model prefix": ", ".join(prefix or "(root)" for prefix in description["models"]) or "no model found",
        **({"fingerprint": description["fingerprint"]} if description["fingerprint"] else {}),
        "other values": str(len(description["values"])),
        **({"left out": ", ".join(description["left_out"])} if description["left_out"] else {}),
        **description["facts"],
    }
    width = max(map(len, head)) + 2
    top = [f"{key + ':':<{width}}{value}" for key, value in head.items()]
    values = description["values"]
    if values:
        width = max(map(len, values)) + 2
        is_read = description["kind"] == "native"  # other formats store values outside the metadata
        lines += ["", *(f"{n:<{width}}{repr(v) if is_read else '(not read)'}" for n, v in values.items())]
    return "\n".join([*top, "", *lines])
