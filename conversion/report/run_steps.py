"""The steps of a run in a report: the record of each save, and how the tensors of any two steps differ.

    what                               of which steps              what is read
    equal or not, bit for bit          the newest 500              fingerprints that saves have recorded in manifests
    norms, norm of the difference      at most 12 chosen steps     their tensors, each once

Both are bounded, since the page of a run may have 40,000 tensors and hundreds of steps: one text of versions is shared
by all tensors that changed at the same steps, and 12 steps have 66 pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, combinations_with_replacement
from shlex import quote
from typing import Any, Literal

import numpy as np
import torch

from vescale_fsdp.byte_sums import pack_sums, run_sums
from vescale_fsdp.checkpoint.manifest.file_names import manifest_file, parse_step_name, step_name
from vescale_fsdp.checkpoint.manifest.fingerprints import TensorFingerprint
from vescale_fsdp.checkpoint.native.leaves import fingerprint_in
from vescale_fsdp.checkpoint.steps.retention import StepRecord, read_step
from vescale_fsdp.checkpoint.steps.step_folders import committed_steps
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.conversion.engine.copying import Progress
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.stored_tensor import is_inflated
from vescale_fsdp.conversion.engine.tensor_view import SourceView, read_range
from vescale_fsdp.conversion.report.tensor_values import values_of
from vescale_fsdp.errors import ConversionError, VescaleError, some
from vescale_fsdp.layout.model_shapes import natural_key

_MOST_STEPS = 10_000  # maximum number of steps in the history; older steps are left out
_MOST_MARKED = 500  # maximum number of steps that are compared by fingerprints
_MOST_VERSIONS = 4_000_000  # maximum of different histories of tensors times steps: some 20 MB of the page
_MOST_READ = 12  # maximum number of steps that are read: 66 distances per tensor
_MOST_NAMES = 20  # maximum number of names of tensors that only other steps have
_PIECE_BYTES = 2**20  # 1 MiB, read at a time from each step
_BLOCK_ITEMS = 2**15  # items of each step that are float64 at the same time
_MOST = 1e308  # stands for larger numbers, since JSON has no infinity: the largest float, rounded, would be infinite
_UNKNOWN, _ABSENT = 0, 1  # marks of tensors whose fingerprint is not known, and of those that a step lacks


def run_of(source: Source) -> tuple[str, int] | None:
    """Return the folder of the run that a checkpoint is a step of, and the step; None for any other checkpoint."""
    root, _, folder = source.url.rstrip("/").rpartition("/")
    found = parse_step_name(folder)
    # A manager's checkpoints are step folders in the folder of the run.
    return (root, found[0]) if source.kind == "native" and found is not None and root else None


def urls_of_steps(source: Source, steps: Sequence[int] | Literal["all"]) -> list[str]:
    """Return the URLs of steps of the run that ``source`` is a step of, ascending.

    Args:
        steps: their numbers. "all": all steps; if there are more than `_MOST_READ`, that many at even distances.

    Raises:
        ConversionError: if the source is not a step of a run, or for steps that the run lacks, or too many steps.
    """
    run = run_of(source)
    if run is None:
        raise ConversionError(
            "This checkpoint has no other steps.",
            expected="a run's folder, or one of its steps, which a CheckpointManager saved",
            got=f"a checkpoint in the format {source.kind}",
            where=source.url,
            todo=f"make a page of this one alone: vescale-convert report {quote(source.url)} --out report.html",
        )
    root, _ = run
    storage = open_storage(root)
    found = committed_steps(storage)
    if steps == "all":
        places = np.linspace(0, len(found) - 1, min(len(found), _MOST_READ)).round()
        steps = [found[int(place)] for place in places]
    missing = sorted({*steps} - {*found})
    if missing or len({*steps}) > _MOST_READ:
        raise ConversionError(
            "These steps cannot be compared.",
            expected=f"at most {_MOST_READ} committed steps of the run",
            got=f"{len({*steps})} steps"
            + (f", of which the run lacks {missing[:_MOST_READ]}" if missing else ""),
            where=root,
            todo=f"list the steps: vescale-convert ls {quote(root)}; or compare a selection: "
            f"vescale-convert report {quote(root)} --steps all --out report.html",
        )
    return [storage.child(step_name(step)).where for step in sorted({*steps})]


@contextmanager
def removals_named(urls: Sequence[str]) -> Iterator[None]:
    """Context manager around reads of a run's steps: an error because a step is gone by now says so.

    Raises:
        ConversionError: in place of the error, if any of the URLs is no checkpoint any more.
    """
    try:
        yield
    except (VescaleError, OSError) as error:
        gone = [url for url in dict.fromkeys(urls) if manifest_file(open_storage(url)) is None]
        if not gone:
            raise
        raise ConversionError(
            "A step was removed while it was read.",
            expected="steps that stay until the page is written",
            got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            where=some(gone),
            todo="run the command again: a running job may have removed old steps, see its retention",
        ) from error


class RunSteps:
    """The steps of the run that a checkpoint is a step of; none if it is not a step of a run.

    Args:
        source: the checkpoint. Only tensors of its names are compared.
        read: opened steps of the run, ascending, for `measure`.

    Attributes:
        records: the record of each committed step, ascending.
    """

    def __init__(self, source: Source, read: Sequence[Source] = ()) -> None:
        self.records: list[StepRecord] = []
        self._read = list(read)
        self._chosen = [found[1] for each in read if (found := run_of(each)) is not None]
        self._places = {name: place for place, name in enumerate(source.tensors)}
        self._elsewhere: set[str] = set()
        run = run_of(source)
        storage = None if run is None else open_storage(run[0])
        steps = [] if storage is None else committed_steps(storage)[-_MOST_STEPS:]
        self._steps = sorted({*steps[-_MOST_MARKED:], *self._chosen})
        # [step, tensor]: 160 MB for 40,000 tensors in 500 steps
        self._marks = np.full((len(self._steps), len(self._places)), _UNKNOWN, np.uint64)
        for step in steps:
            assert storage is not None  # it has these steps
            record, manifest = read_step(storage, step)
            self.records.append(record)
            if manifest is not None and manifest.sums is not None and step in self._steps:
                recorded = fingerprint_in(manifest, manifest.sums).tensors
                row = self._row(step)
                row[:] = _ABSENT
                for name in recorded.keys() & self._places.keys():
                    row[self._places[name]] = _mark(recorded[name])
                self._elsewhere |= recorded.keys() - self._places.keys()
        for opened in self._read:
            self._elsewhere |= opened.tensors.keys() - self._places.keys()

    def measure(self, name: str, progress: Progress) -> dict[str, Any]:
        """Read a tensor of all steps in ``read``, piece by piece.

        Returns:
            An empty dict if no step is read, or the tensor is compressed. Else "norms", its norm in each step, and
            "far", the norm of the difference for each pair of steps, (0, 1), (0, 2) and so on. Values that are not
            finite are left out. None for codes, for a step without the tensor, and for two shapes.
        """
        held = {
            place: SourceView(step, name, name)
            for place, step in enumerate(self._read)
            if name in step.tensors
        }
        for place in range(len(self._read)):
            if place not in held:
                self._row(self._chosen[place])[self._places[name]] = _ABSENT
        stored = (view.source.tensors[name].stored_nbytes for view in held.values())
        sizes = zip((view.info.nbytes for view in held.values()), stored, strict=True)
        if not held or any(is_inflated(*each) for each in sizes):
            return {}
        squares = np.full((len(self._read), len(self._read)), np.nan)
        for shape in {view.info.shape for view in held.values()}:
            places = [place for place, view in held.items() if view.info.shape == shape]
            squares[np.ix_(places, places)], sums = _read_together([held[i] for i in places], progress)
            for place, own in zip(places, sums, strict=True):
                mark = _mark(TensorFingerprint(held[place].info.dtype.name, shape, own))
                self._row(self._chosen[place])[self._places[name]] = mark
        norms = [
            [None if np.isnan(x) else float(f"{min(x, _MOST):.4g}") for x in row] for row in np.sqrt(squares)
        ]
        pairs = combinations(range(len(norms)), 2)
        return {"norms": [row[i] for i, row in enumerate(norms)], "far": [norms[i][j] for i, j in pairs]}

    def _row(self, step: int) -> np.ndarray:
        """Return the marks of a step, one per tensor."""
        return self._marks[self._steps.index(step)]

    def versions(self, most: int = _MOST_VERSIONS) -> tuple[dict[str, Any] | None, list[int]]:
        """Return in which steps each tensor is equal, where this is known.

        Args:
            most: maximum of histories times steps. Beyond it, the older steps are left out, except for those that were
                read.

        Returns:
            "steps"; "histories", which tensors have in common: for each step the place of the first step with an equal
            tensor, -1 for a step without the tensor, -2 if its fingerprint is not known; "read", the places of steps
            that were read; and "elsewhere", names of tensors that only other steps have. None if there are not two
            steps. And for each tensor of the source, in order, the place of its history.
        """
        if len(self._steps) < 2:
            return None, [0] * len(self._places)
        kept = list(range(len(self._steps)))
        while True:
            table: dict[bytes, int] = {}
            columns = self._marks[kept].T
            of_tensors = [table.setdefault(_first_equal(marks).tobytes(), len(table)) for marks in columns]
            other = [place for place in kept if self._steps[place] not in self._chosen]
            if len(table) * len(kept) <= most or not other:
                break
            older = other[: -(-len(other) // 2)]
            kept = [place for place in kept if place not in older]
        steps = [self._steps[place] for place in kept]
        compare = {
            "steps": steps,
            "histories": [np.frombuffer(places, np.int16).tolist() for places in table],
            "read": [steps.index(step) for step in self._chosen],
            "elsewhere": sorted(self._elsewhere, key=natural_key)[:_MOST_NAMES],
            "num_elsewhere": len(self._elsewhere),
        }
        return compare, of_tensors


def _mark(fingerprint: TensorFingerprint) -> int:
    """Return a 64-bit hash; two different fingerprints have the same one with probability 2**-62."""
    return hash(fingerprint) & 0xFFFF_FFFF_FFFF_FFFF | 2  # neither `_UNKNOWN` nor `_ABSENT`


def _first_equal(marks: np.ndarray) -> np.ndarray:
    """Return for each step the place of the first step with the same mark; -1 for `_ABSENT`, -2 for `_UNKNOWN`."""
    _, first, inverse = np.unique(marks, return_index=True, return_inverse=True)
    places = first[inverse].astype(np.int16)
    places[marks == _ABSENT], places[marks == _UNKNOWN] = -1, -2
    return places


def _read_together(views: Sequence[SourceView], progress: Progress) -> tuple[np.ndarray, list[str]]:
    """Read one tensor of several steps, the same piece of each step at a time.

    Args:
        views: the tensor in each step, all of one shape.

    Returns:
        The squared norms of the differences, [step, other step], with the squared norm of the tensor on the diagonal,
        and NaN where there are no values to compare; and the byte sums of each step, as hex.
    """
    squares = np.zeros((len(views), len(views)))
    totals = [torch.zeros(2, dtype=torch.int64, device="cpu") for _ in views]
    buffers = [np.empty(min(_PIECE_BYTES, view.info.nbytes), np.uint8) for view in views]
    numel, step = views[0].info.numel, _PIECE_BYTES // max(view.info.dtype.itemsize for view in views)
    for start in range(0, numel, step):
        values = []
        for view, buffer, total in zip(views, buffers, totals, strict=True):
            dtype = view.info.dtype
            raw = read_range(view, start, min(start + step, numel), buffer)
            total += run_sums(torch.from_numpy(raw), start * dtype.itemsize)
            values.append(values_of(raw.view(dtype.raw), dtype))
            progress(raw.nbytes)
        _add_squares(squares, values)
    return squares, [pack_sums(total).hex() for total in totals]


def _add_squares(squares: np.ndarray, values: Sequence[np.ndarray | None]) -> None:
    """Add the values of a piece of each step to ``squares``, as `_read_together` returns them."""
    # A complex item is two values, and codes are none: neither can be compared with real values.
    size = max(0 if each is None else each.size for each in values)
    strange = [place for place, each in enumerate(values) if each is None or each.size != size]
    squares[strange, :] = squares[:, strange] = np.nan
    usual = [place for place in range(len(values)) if place not in strange]
    for start in range(0, size, _BLOCK_ITEMS):
        wide = {i: values[i][start : start + _BLOCK_ITEMS].astype(np.float64) for i in usual}  # type: ignore[index]
        for i, j in combinations_with_replacement(usual, 2):
            with np.errstate(invalid="ignore", over="ignore"):  # infinities, and squares beyond float64
                distance = wide[i] if i == j else wide[i] - wide[j]
                total = np.dot(distance, distance)
                if not np.isfinite(total):
                    finite = distance[np.isfinite(distance)]
                    total = np.dot(finite, finite)
            squares[i, j] += total
    lower = np.tril_indices(len(values), -1)
    squares[lower] = squares.T[lower]
