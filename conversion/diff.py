"""Compare the names, shapes, types and values of two checkpoints, each of any supported format."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from vescale_fsdp.checkpoint.state.model_names import unwrapped_names
from vescale_fsdp.conversion.engine.carried_state import find_model, model_state
from vescale_fsdp.conversion.engine.copying import Progress, no_progress
from vescale_fsdp.conversion.engine.source import Source, check_source
from vescale_fsdp.conversion.engine.stored_tensor import MOST_GROWTH, UNCHECKED_BYTES, is_inflated
from vescale_fsdp.conversion.engine.tensor_view import (
    SourceView,
    TensorView,
    pieces_of,
    repeated_dims,
    without_repeats,
)
from vescale_fsdp.conversion.formats.huggingface.class_names import in_memory
from vescale_fsdp.conversion.formats.huggingface.repository import NAMES_OF_FILES, config_class, own_config
from vescale_fsdp.conversion.formats.huggingface.tied_weights import tied_aliases_of
from vescale_fsdp.conversion.quantization.float_codes import cast_array
from vescale_fsdp.errors import ConversionError, counted, format_bytes, option, some
from vescale_fsdp.layout.dtypes import DType, dtype_from_torch
from vescale_fsdp.layout.model_shapes import natural_key

_READ_BYTES = 4 * 2**20  # 4 MiB per side
_MOST = sys.float_info.max  # JSON has no infinity
_BLOCK_ITEMS = 2**16  # items that are float64 at the same time
# Keys are ("model", name in the model) or ("other", full name).
Views = dict[tuple[str, str], TensorView]
_F64 = dtype_from_torch("float64")  # all other float types convert to it without rounding


class _Tolerance(NamedTuple):
    """The arguments of `diff` that define when two values are equal."""

    rtol: float
    atol: float
    ignore_dtype: bool

    @property
    def is_bitwise(self) -> bool:
        """Whether values are compared byte by byte instead of as numbers."""
        return not (self.rtol or self.atol or self.ignore_dtype)


@dataclass(frozen=True)
class Distance:
    """How far apart the values of two tensors are, over all pairs of values whose difference is finite.

    Args:
        largest: the largest ``|a - b|``.
        largest_relative: the largest ``|a - b| / |b|`` of pairs in which b is not 0; None if there are none.
        norm: the square root of the sum of all ``|a - b| ** 2``.
        not_finite: the number of other pairs, such as a NaN and a number. Two NaNs, or two equal infinities, are equal.
    """

    largest: float
    largest_relative: float | None
    norm: float
    not_finite: int = 0

    def __str__(self) -> str:
        relative = "" if self.largest_relative is None else f" (relative: {self.largest_relative:.3g})"
        not_finite = f"; {self.not_finite} differences are not finite" if self.not_finite else ""
        return f"by up to {self.largest:.3g}{relative}, norm of the difference {self.norm:.3g}{not_finite}"


@dataclass(frozen=True)
class Difference:
    """One difference between two checkpoints; ``kind`` is only_a, only_b, shape, dtype or value.

    ``distance`` is None unless the values of two tensors differ. Quantized codes have none: their values depend on
    their scales.

    Examples:
        >>> Difference("w", "shape", "(4,) and (5,)").to_json()["kind"]
        'shape'
    """

    name: str
    kind: str
    text: str
    distance: Distance | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the difference as JSON values; with the fields of its distance under "distance", if it has one."""
        found = {"name": self.name, "kind": self.kind, "text": self.text}
        return found if self.distance is None else {**found, "distance": asdict(self.distance)}


class LeftOut(NamedTuple):
    """The entries of one side that were not compared.

    Attributes:
        side: "a" or "b".
        reason: why they were not compared.
        num_tensors: number of tensors.
        num_values: number of other values.
        groups: prefix of names -> number of these entries.
    """

    side: str
    reason: str
    num_tensors: int
    num_values: int
    groups: dict[str, int]

    def __str__(self) -> str:
        kinds = ((self.num_tensors, "tensor"), (self.num_values, "other value"))
        left_out = " and ".join(counted(count, kind) for count, kind in kinds if count)
        groups = some([f"{prefix} ({count})" for prefix, count in self.groups.items()])
        return f"not compared: {left_out} of {self.side.upper()}, because {self.reason}: {groups}"


class Comparison(NamedTuple):
    """The result of `compare`: all differences, the number of tensors of both sides, and what was not compared."""

    differences: tuple[Difference, ...]
    num_compared: int
    left_out: tuple[LeftOut, ...]


def diff(
    a: Source,
    b: Source,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    ignore_dtype: bool = False,
    model_only: bool = False,
    model_prefix: str | None = None,
    recorded: bool = False,
    progress: Progress = no_progress,
) -> tuple[tuple[Difference, ...], int]:
    """Return all differences, and the number of tensors that both sides have.

    Tensors of models are matched by their names without the model's prefix. All other tensors and values are matched
    by full name. They are ignored if one checkpoint contains only a model, as a Hugging Face folder does;
    `vescale-convert diff` prints how many.

    Args:
        a, b: opened checkpoints.
        rtol, atol: floats are equal if ``|a - b| <= atol + rtol * |b|``. If both are 0, bytes are compared.
        ignore_dtype: compare floats of different dtypes by value.
        model_only: compare only the models.
        model_prefix: the prefix of the model's names; ignored for a side that has no such names. None to detect it.
        recorded: do not read tensors of which both saves have recorded equal byte sums (`fingerprint`). Damage to the
            files is not noticed then.
        progress: called with bytes read since the last call.

    Raises:
        ArgumentError: if a side is not an opened checkpoint, such as a path.
        ConversionError: if neither side has a tensor, or no tensor has the prefix.
        CorruptCheckpointError: if a file is damaged.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.conversion import open_source
        >>> torch.save({"w": torch.ones(4)}, "a.pt"), torch.save({"w": torch.tensor([1, 1, 1, 2.0])}, "b.pt")
        (None, None)
        >>> differences, compared = diff(open_source("a.pt"), open_source("b.pt"))
        >>> differences[0].text, compared
        ('1 of 4 values differ, by up to 1 (relative: 0.5), norm of the difference 1', 1)
    """
    found = compare(
        a,
        b,
        rtol=rtol,
        atol=atol,
        ignore_dtype=ignore_dtype,
        model_only=model_only,
        model_prefix=model_prefix,
        recorded=recorded,
        progress=progress,
    )
    return found.differences, found.num_compared


def compare(
    a: Source,
    b: Source,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    ignore_dtype: bool = False,
    model_only: bool = False,
    model_prefix: str | None = None,
    recorded: bool = False,
    progress: Progress = no_progress,
) -> Comparison:
    """Compare two checkpoints; arguments and errors are those of `diff`."""
    for side in (a, b):
        check_source(side, "diff(open_source(path), open_source(other_path))")
    tolerance = _Tolerance(rtol, atol, ignore_dtype)
    left, right = matched_views(a, b, model_prefix)
    has_others = [s.values or any(key[0] == "other" for key in v) for s, v in ((a, left), (b, right))]
    # If one side is a model alone, every other entry of the other side would be reported as a difference.
    compares_all = not model_only and all(has_others)
    left_out: list[LeftOut] = []
    if not compares_all:
        for number, (source, views) in enumerate(((a, left), (b, right))):
            reason = "only models are compared" if model_only else f"{'BA'[number]} contains only a model"
            left_out += _left_out("ab"[number], reason, source, views)
        left, right = ({k: v for k, v in side.items() if k[0] == "model"} for side in (left, right))
    differences: list[Difference] = []
    # "model" sorts before "other", and layer 2 before layer 10.
    for key in sorted({*left, *right}, key=lambda key: (key[0], natural_key(key[1]))):
        if key not in right:
            differences.append(Difference(key[1], "only_a", f"only in {a.url}"))
        elif key not in left:
            differences.append(Difference(key[1], "only_b", f"only in {b.url}"))
        elif not (recorded and _have_equal_sums(left[key], right[key])):
            differences += _compare(key[1], left[key], right[key], tolerance, progress)
    if compares_all:
        differences += _compare_values(a, b)
    if {a.kind, b.kind} <= {"hf", "safetensors"}:  # no other format has __metadata__ to compare
        differences += _compare_metadata(a, b)
    return Comparison(tuple(differences), len(left.keys() & right.keys()), tuple(left_out))


def _left_out(side: str, reason: str, source: Source, views: Views) -> Iterator[LeftOut]:
    """Yield the entries of a side that are not part of its model, if it has any."""
    tensors = [name for kind, name in views if kind == "other"]
    if tensors or source.values:
        groups = {prefix: len(names) for prefix, names in by_prefix([*tensors, *source.values]).items()}
        yield LeftOut(side, reason, len(tensors), len(source.values), groups)


def by_prefix(names: Iterable[str]) -> dict[str, list[str]]:
    """Group dotted names by their first key, under the keys that all names of a group have in common.

    Examples:
        >>> by_prefix(["app.optim.lr", "app.optim.w", "step"])
        {'app.optim.*': ['app.optim.lr', 'app.optim.w'], 'step': ['step']}
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition(".")[0], []).append(name)
    found = {}
    for group in groups.values():
        keys = [name.split(".") for name in group]
        levels = list(zip(*keys, strict=False))
        depth = next((level for level, row in enumerate(levels) if len({*row}) > 1), len(levels))
        found[group[0] if len(group) == 1 else ".".join([*keys[0][:depth], "*"])] = group
    return found


def format_comparison(found: Comparison, most: int | None, how_to_list_all: str = "") -> str:
    """Format a comparison as lines: first the counts, then names of one side by prefix, then all other differences.

    Args:
        most: largest number of lines about other differences; None to print all differences one by one.
        how_to_list_all: end of the line that counts the rest of the other differences.
    """
    differences = found.differences
    lines = [
        f"{counted(found.num_compared, 'tensor')} compared, {counted(len(differences), 'difference')}",
        *map(str, found.left_out),
    ]
    if most is not None:
        for kind in ("only_a", "only_b"):
            of_kind = [each for each in differences if each.kind == kind]
            texts = {each.name: each.text for each in of_kind}
            # A tensor of the model and another one may have the same name.
            for prefix, names in by_prefix(each.name for each in of_kind).items():
                count = f" ({len(names)})" if len(names) > 1 else ""
                lines.append(f"{kind:<7} {prefix}{count}: {texts[names[0]]}")
        differences = tuple(each for each in differences if each.kind not in ("only_a", "only_b"))
    lines += [f"{each.kind:<7} {each.name}: {each.text}" for each in differences[:most]]
    if most is not None and (more := len(differences) - most) > 0:
        lines.append(f"and {counted(more, 'more difference')} of tensors and values{how_to_list_all}")
    return "\n".join(lines)


def matched_views(a: Source, b: Source, model_prefix: str | None = None) -> tuple[Views, Views]:
    """Return the tensors of ``a`` and ``b``, under keys that are equal for the same tensor.

    Raises:
        ConversionError: if neither side has a tensor, or no tensor has the prefix.
    """
    start = f"{model_prefix.rstrip('.')}." if model_prefix else ""
    if not a.tensors and not b.tensors:
        raise ConversionError(
            "Neither side contains a tensor.",
            expected="two checkpoints with tensors",
            got=f"{a.url} and {b.url}",
            todo="list their contents with: vescale-convert inspect",
        )
    # One side may lack the prefix, such as a Hugging Face folder, but not both.
    if not any(name.startswith(start) for source in (a, b) for name in source.tensors):
        raise ConversionError(
            "No tensor has the model's prefix.",
            expected=f"names that begin with {start} on one side at least",
            got=f"names such as {some([*a.tensors, *b.tensors], 3)}",
            todo=f"leave out {option('model_prefix')}, or list the names with: vescale-convert inspect",
        )
    left, right = _views(a, model_prefix), _views(b, model_prefix)
    left, right = _with_names_of(b, right, a, left), _with_names_of(a, left, b, right)
    _add_aliases(a, left, right)
    _add_aliases(b, right, left)
    return left, right


def _compare_metadata(a: Source, b: Source) -> Iterator[Difference]:
    """Return differences of the ``__metadata__`` of safetensors files, which loaders of quantized tensors may read."""
    # "format" names the framework ("pt"), and every writer sets it.
    left, right = (
        {f"__metadata__ {k}": v for k, v in s.file_metadata.items() if k != "format"} for s in (a, b)
    )
    for name in sorted({*left, *right}):
        yield from _compare_value(name, left, right, a, b)


def _compare_values(a: Source, b: Source) -> Iterator[Difference]:
    """Return differences between values that are not tensors."""
    for name in sorted({*a.values, *b.values}, key=natural_key):
        left, right = ({name: s.values[name]()} if name in s.values else {} for s in (a, b))
        yield from _compare_value(name, left, right, a, b)


def _compare_value(
    name: str, left: Mapping[str, Any], right: Mapping[str, Any], a: Source, b: Source
) -> Iterator[Difference]:
    """Return the difference between two values, if any; a side without the value lacks the key."""
    if name not in right:
        yield Difference(name, "only_a", f"only in {a.url}")
    elif name not in left:
        yield Difference(name, "only_b", f"only in {b.url}")
    elif not _is_same(left[name], right[name]):
        yield Difference(name, "value", f"{left[name]!r} and {right[name]!r}")


def _is_same(left: Any, right: Any) -> bool:
    """Return whether two values that are not tensors are equal; NaN equals NaN, as in tensors."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_is_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        # Not ==: in lists it treats a NaN as equal only to the same object.
        return type(left) is type(right) and len(left) == len(right) and all(map(_is_same, left, right))
    return bool(left == right or (left != left and right != right))  # only NaN differs from itself


def _views(source: Source, prefix: str | None) -> Views:
    """Return views of all tensors of one side."""
    start = f"{prefix.rstrip('.')}." if prefix else ""
    # `find_model` raises for a prefix that matches nothing; here only one of the two sides needs the prefix.
    has_prefix = prefix is not None and any(name.startswith(start) for name in source.tensors)
    model = find_model(source, prefix if has_prefix else None)
    counters = {name for name in model.names if not source.info(name).shape}  # may lack DDP's prefix
    # With several models, `names` has full names, which are matched unchanged.
    names = model.names if model.candidates else unwrapped_names(model.names, counters, source.url)
    return {
        ("model", names[name]) if name in names else ("other", name): SourceView(source, name, name)
        for name in source.tensors
    }


def _with_names_of(other: Source, others: Views, source: Source, views: Views) -> Views:
    """Give a Hugging Face folder the names in memory of its class, if the other side has these names."""
    config = own_config(source.store) if source.kind in NAMES_OF_FILES else {}
    class_name = config_class(config)
    # Asking the class is slow, and not needed for classes with the same names in files.
    if class_name is None or other.kind in NAMES_OF_FILES or not others.keys() - views.keys():
        return views
    named = in_memory(model_state(source), config, class_name, source.url).state
    renamed = {key: view for key, view in views.items() if key[0] == "other"}
    renamed |= {("model", name): named.views[full] for full, name in named.model.names.items()}
    return renamed if len(renamed.keys() & others.keys()) > len(views.keys() & others.keys()) else views


def _add_aliases(source: Source, views: Views, others: Views) -> None:
    """Add to ``views`` the aliases that a Hugging Face folder does not store and the other side stores."""
    missing = others.keys() - views.keys()
    if not any(key[0] == "model" for key in missing):
        return  # `tied_aliases_of` may start a process that imports transformers, which is slow
    aliases, _ = tied_aliases_of(source, [name for kind, name in views if kind == "model"])
    views.update({("model", name): views["model", aliases[name]] for _, name in missing if name in aliases})


def _have_equal_sums(a: TensorView, b: TensorView) -> bool:
    """Return whether saves have recorded equal byte sums of two tensors of one shape and dtype."""
    alike = (a.info.shape, a.info.dtype) == (b.info.shape, b.info.dtype)
    return alike and a.recorded_sums is not None and a.recorded_sums == b.recorded_sums


def _compare(
    name: str, a: TensorView, b: TensorView, tolerance: _Tolerance, progress: Progress
) -> list[Difference]:
    """Compare two tensors of one name; returns at most one difference."""
    left, right = a.info, b.info
    if left.shape != right.shape:
        return [Difference(name, "shape", f"{left.shape} and {right.shape}")]
    if left.dtype != right.dtype and not tolerance.ignore_dtype:
        return [Difference(name, "dtype", f"{left.dtype.name} and {right.dtype.name}")]
    numeric = {left.dtype.kind, right.dtype.kind} == {"float"} and not tolerance.is_bitwise
    if left.dtype != right.dtype and not numeric:  # `ignore_dtype` applies to floats only
        return [Difference(name, "dtype", f"{left.dtype.name} and {right.dtype.name}")]
    a, b, repeats = _without_common_repeats(a, b)
    count, far = 0, _DistanceSum()
    # A number of items, not of bytes, so that pieces of both sides match even if the dtypes differ.
    step = _READ_BYTES // max(left.dtype.itemsize, right.dtype.itemsize)
    for p, q in zip(pieces_of(a, _READ_BYTES, step), pieces_of(b, _READ_BYTES, step), strict=True):
        x, y = p.view(left.dtype.raw), q.view(right.dtype.raw)  # integers: numpy lacks bfloat16 and float8
        progress(p.nbytes + q.nbytes)
        for start in range(0, x.size, _BLOCK_ITEMS):
            block = slice(start, start + _BLOCK_ITEMS)
            differs = x[block] != y[block]
            if left.dtype == right.dtype and not differs.any():
                continue
            pair = _distances(x[block], left.dtype, y[block], right.dtype)
            if pair is not None:
                far.add(*pair)
                differs = _beyond(*pair, tolerance) if numeric else differs
            count += int(np.count_nonzero(differs))
    if not count:
        return []
    distance, text = far.result(repeats), f"{count * repeats} of {left.numel} values differ"
    return [Difference(name, "value", text if distance is None else f"{text}, {distance}", distance)]


def _without_common_repeats(a: TensorView, b: TensorView) -> tuple[TensorView, TensorView, int]:
    """Reduce both tensors along the dims in which both repeat items (stride 0).

    Without this, a small hostile file that describes terabytes would be compared for hours.

    Returns:
        The reduced tensors, and how often each of their items occurs in the full tensors.

    Raises:
        ConversionError: if the reduced tensors are still far larger than all bytes that the sources store.
    """
    dims = sorted({*repeated_dims(a)} & {*repeated_dims(b)})
    left, right = without_repeats(a, dims), without_repeats(b, dims)
    stored = [source.stored_nbytes for view in (a, b) for source, _ in view.sources()]
    nbytes = min(left.info.nbytes, right.info.nbytes)
    if is_inflated(nbytes, max(stored)):
        raise ConversionError(
            "The sources store far fewer values than would be compared of a tensor.",
            expected=f"at most {MOST_GROWTH} times the bytes that are stored, or {format_bytes(UNCHECKED_BYTES)}",
            got=f"{format_bytes(nbytes)} of {format_bytes(max(stored))} that are stored",
            where=f"tensor {a.info.name}",
            todo="compare the stored bytes in Python, or a sample: vescale-convert report A --against B --out FILE",
        )
    return left, right, a.info.numel // max(1, left.info.numel)  # not 0, which empty tensors would divide by


def _distances(x: np.ndarray, a: DType, y: np.ndarray, b: DType) -> tuple[np.ndarray, np.ndarray] | None:
    """Return |p - q| and |q| of the values of two arrays of raw items, as float64.

    Differences of integers are exact before they are rounded to float64. The distance of equal values is 0, also of two
    NaNs and of two equal infinities; other distances of values that are not finite are not finite.

    Args:
        x, y: 1-D arrays of equal size.
        a, b: their dtypes: both floats, or the same dtype.

    Returns:
        Two 1-D arrays, or None for quantized codes, whose values depend on their scales.
    """
    if a.kind == "int" and a.is_numpy:
        p, q = x.view(a.name), y.view(b.name)
        # The difference of raw integers wraps around, so it is exact even where that of signed integers overflows.
        distance = np.maximum(p, q).view(a.raw) - np.minimum(p, q).view(a.raw)
        return distance.astype(np.float64), np.abs(q.astype(np.float64))
    if a.kind == "float":
        p, q = cast_array(x, a, _F64).view(np.float64), cast_array(y, b, _F64).view(np.float64)
    elif a.kind == "bool":
        p, q = x.astype(np.float64), y.astype(np.float64)
    elif a.kind == "complex":  # as pairs of floats
        p, q = (raw.view(f"f{a.itemsize // 2}").astype(np.float64) for raw in (x, y))
    else:
        return None
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf
        distance = np.where((p == q) | (np.isnan(p) & np.isnan(q)), 0.0, np.abs(p - q))
    if a.kind == "complex":
        parts, sizes = distance.reshape(-1, 2), q.reshape(-1, 2)
        return np.hypot(parts[:, 0], parts[:, 1]), np.hypot(sizes[:, 0], sizes[:, 1])
    return distance, np.abs(q)


class _DistanceSum:
    """Sums up the distances of the pairs of one tensor."""

    def __init__(self) -> None:
        self._num_pairs = self._num_not_finite = 0
        self._largest = self._norm = 0.0
        self._relative: float | None = None

    def add(self, distance: np.ndarray, size: np.ndarray) -> None:
        """Add |a - b| and |b| of some pairs; of the rest of the tensor, all pairs must be equal."""
        finite = np.isfinite(distance)
        self._num_pairs += distance.size
        self._num_not_finite += int(distance.size - np.count_nonzero(finite))
        distance, size = distance[finite], size[finite]
        largest = float(distance.max(initial=0.0))
        self._largest = max(self._largest, largest)
        if largest:  # divided by the largest distance, so that no square is infinite or rounded to 0
            self._norm = math.hypot(
                self._norm, largest * math.sqrt(float(np.square(distance / largest).sum()))
            )
        is_relative = size > 0
        if is_relative.any():
            with np.errstate(over="ignore"):
                relative = float((distance[is_relative] / size[is_relative]).max())
            self._relative = max(self._relative or 0.0, min(relative, _MOST))

    def result(self, repeats: int) -> Distance | None:
        """Return the distance of two tensors in which each pair occurs ``repeats`` times; None if none was added."""
        if not self._num_pairs:
            return None
        norm = min(self._norm * math.sqrt(repeats), _MOST)
        return Distance(self._largest, self._relative, norm, self._num_not_finite * repeats)


def _beyond(distance: np.ndarray, size: np.ndarray, tolerance: _Tolerance) -> np.ndarray:
    """Return which pairs are too far apart, given |a - b| and |b|."""
    with np.errstate(invalid="ignore"):  # 0 * inf
        # If b is infinite, so is the tolerance: a finite a would be near. A distance must therefore be finite.
        near = np.isfinite(distance) & (distance <= tolerance.atol + tolerance.rtol * size)
    return (distance != 0) & ~near
