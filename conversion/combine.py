"""`average` and `combine`: write a checkpoint that is computed from several checkpoints, in bounded memory.

    average([step_300, step_200, step_100], "averaged", "hf")
    combine({"base": base, "tuned": tuned}, "base + 0.7 * (tuned - base)", "merged", "hf")

Both are conversions: inputs are read in any format, after key rules or the names of each input's class, and the result
is written in any format, with all options of `convert`. Only the floats of the models are computed. Names, order,
types, settings files and tensors that are copied come from the first input.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from vescale_fsdp.checkpoint.state.model_names import unwrapped_names
from vescale_fsdp.conversion.convert import ConvertReport, convert_joined
from vescale_fsdp.conversion.convert_options import ConvertOptions
from vescale_fsdp.conversion.engine.carried_state import CarriedState
from vescale_fsdp.conversion.engine.combined_view import CombinedView, Scratch, Step
from vescale_fsdp.conversion.engine.copying import Progress, no_progress
from vescale_fsdp.conversion.engine.journal import EXPRESSION
from vescale_fsdp.conversion.engine.source import Source, check_source
from vescale_fsdp.conversion.engine.tensor_view import TensorView
from vescale_fsdp.conversion.expressions import parse_expression
from vescale_fsdp.conversion.formats.huggingface.tied_weights import equal_bytes, tied_aliases_of
from vescale_fsdp.conversion.quantization.names import find_quantized
from vescale_fsdp.errors import ConversionError, as_pattern, option, some
from vescale_fsdp.layout.dtypes import dtype_from_torch

_COMPUTE_DTYPES = ("float32", "float64")


def combine(
    sources: Mapping[str, Source],
    expression: str,
    target: str | os.PathLike[str],
    kind: str,
    options: ConvertOptions | None = None,
    *,
    compute_dtype: str | None = None,
    copy: Sequence[str] = (),
    progress: Progress = no_progress,
    announce: Progress = no_progress,
) -> ConvertReport:
    """Write a model whose weights are a linear combination of the weights of several models.

    Each float tensor is computed as Python computes the expression, with every input converted to ``compute_dtype``:
    operators by precedence and from left to right, one rounding per operation, and one rounding to the type of the
    result. Numbers among themselves are computed in float64 before. The bits are those of torch on a CPU. All other
    tensors (integers, bools, complex numbers) must be equal in all inputs, and are copied. Only models are written:
    optimizer state, step counts and all other entries of the inputs are dropped.

    Args:
        sources: name in the expression -> opened checkpoint. The first one determines the names, their order, the types
            and the settings files of the result.
        expression: names, numbers, ``+ - * /`` and parentheses. At least one factor of each product is a number, the
            divisor of each quotient is a number, and a number is not added to a checkpoint.
        target, kind, options, progress, announce: as for `convert`. ``dtype`` is the type of the result.
        compute_dtype: ``"float32"`` or ``"float64"``; None for float32, and for float64 where an input is float64.
        copy: name patterns of tensors in the result to copy from the first input. Other inputs need not have them.

    Raises:
        ArgumentError: if a source is not an opened checkpoint, such as a path.
        ConversionError: if the expression is not valid, if an input lacks a tensor or has it in another shape, if a
            tensor is quantized, or is not a float and differs between inputs; and as for `convert`.
        CorruptCheckpointError: if a source is damaged.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.conversion import open_source
        >>> torch.save({"w": torch.ones(2)}, "base.pt"), torch.save({"w": torch.tensor([3.0, 5.0])}, "tuned.pt")
        (None, None)
        >>> inputs = {"base": open_source("base.pt"), "tuned": open_source("tuned.pt")}
        >>> report = combine(inputs, "base + 0.5 * (tuned - base)", "between.pt", "torch")
        >>> torch.load("between.pt")["w"]
        tensor([2., 3.])
    """
    for source in sources.values():
        check_source(source, "combine({'a': open_source(path)}, ..)")
    steps = parse_expression(expression, tuple(sources))
    options = options or ConvertOptions()
    combination = Combination(
        steps, compute_dtype, tuple(copy), tuple(options.include), tuple(options.exclude)
    )
    return convert_joined(
        list(sources.values()),
        combination.join,
        target,
        kind,
        options,
        requested={EXPRESSION: expression, "compute_dtype": compute_dtype, "copy": list(copy)},
        progress=progress,
        announce=announce,
    )


def average(
    sources: Sequence[Source],
    target: str | os.PathLike[str],
    kind: str,
    options: ConvertOptions | None = None,
    *,
    compute_dtype: str | None = None,
    copy: Sequence[str] = (),
    progress: Progress = no_progress,
    announce: Progress = no_progress,
) -> ConvertReport:
    """Write a model whose weights are the means of the weights of several models: ``(a + b + c) / 3`` in `combine`.

    The sums are computed in the order of ``sources``. Arguments and errors are those of `combine`.

    Raises:
        ArgumentError: if a source is not an opened checkpoint, such as a path.
        ConversionError: if there are fewer than two sources; and as for `combine`.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.conversion import open_source
        >>> for step in (1, 2, 3):
        ...     torch.save({"w": torch.full((2,), float(step))}, f"{step}.pt")
        >>> report = average([open_source(f"{step}.pt") for step in (1, 2, 3)], "mean.pt", "torch")
        >>> torch.load("mean.pt")["w"]
        tensor([2., 2.])
    """
    if len(sources) < 2:
        raise ConversionError(
            "An average needs at least two checkpoints.",
            expected="two checkpoints, or more",
            got=len(sources),
            todo="pass more checkpoints, or several steps of a run: vescale-convert average RUN OUT --last 5",
        )
    names = [f"input_{number}" for number in range(len(sources))]
    return combine(
        dict(zip(names, sources, strict=True)),
        f"({' + '.join(names)}) / {len(names)}",
        target,
        kind,
        options,
        compute_dtype=compute_dtype,
        copy=copy,
        progress=progress,
        announce=announce,
    )


@dataclass(frozen=True)
class Combination:
    """How the tensors of a result are computed from those of several inputs.

    Args:
        steps: the program for each float tensor; see `CombinedView`.
        compute_dtype: the type of all operations; None for float32, and for float64 where an input is float64.
        copied: name patterns of tensors that are copied from the first input.
        include, exclude: as in `ConvertOptions`; tensors that are not written need not match.

    Raises:
        ConversionError: if the type is not float32 or float64.
    """

    steps: tuple[Step, ...]
    compute_dtype: str | None = None
    copied: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    scratch: Scratch = field(default_factory=Scratch, repr=False)

    def __post_init__(self) -> None:
        if self.compute_dtype not in (None, *_COMPUTE_DTYPES):
            raise ConversionError(
                "Weights cannot be combined in this type.",
                expected=" or ".join(_COMPUTE_DTYPES),
                got=self.compute_dtype,
                todo=f"leave out {option('compute_dtype')}",
            )

    def join(self, states: Sequence[tuple[Source, CarriedState]]) -> tuple[CarriedState, Sequence[str]]:
        """Return the state of the result, and names of tensors that only other inputs than the first have.

        Raises:
            ConversionError: if the inputs do not have the same tensors, or some of these cannot be computed.
            CorruptCheckpointError: if a tensor that is compared is damaged.
        """
        inputs = [_Input.of(source, state) for source, state in states]
        shorts = {short for each in inputs for short in each.names}
        first, *others = inputs = [each.with_tied_names(shorts) for each in inputs]
        if self.copied:
            first.state.filtered(self.copied, ())  # raises if a pattern matches no name
        for each in inputs:
            self._check_floats(each)
        made: dict[str, tuple[TensorView, str]] = {}
        for short, name in first.names.items():
            if any(fnmatchcase(name, pattern) for pattern in self.copied):
                continue
            problem = self._problem(short, first, others)
            if problem is None and first.view(short).info.dtype.kind == "float":
                made[name] = self._view([each.view(short) for each in inputs]), name
            elif problem is not None and self._is_written(name):
                raise problem
        unmatched = {
            first.name(short): each for each in others for short in each.names if short not in first.names
        }
        if extra := [name for name in unmatched if self._is_written(name)]:
            raise ConversionError(
                "The first input lacks tensors of another input.",
                expected=f"all tensors of {unmatched[extra[0]].source.url}",
                got=f"none named {some(extra, 6)}",
                where=first.source.url,
                todo=f"leave them out with {option('exclude', as_pattern(extra[0]))}, or pass the other input first",
            )
        state = first.state.with_replaced(
            made, made.keys(), tuple(dict.fromkeys(each for one in others for each in one.state.warnings))
        )
        return state.restricted_to(state.is_model), [*unmatched]

    def _is_written(self, name: str) -> bool:
        """Return whether a tensor is in the result, by its name."""
        is_included = not self.include or any(fnmatchcase(name, pattern) for pattern in self.include)
        return is_included and not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def _check_floats(self, each: _Input) -> None:
        """Raise if weights of an input are quantized: codes and scales cannot be summed."""
        quantized = find_quantized([each.view(short).info for short in each.names], None)
        # With wrappers removed and tied names added, a view may have another name than its entry in the state.
        names = [name for name in each.state.is_model if name in quantized and self._is_written(name)]
        if names:
            raise ConversionError(
                "Quantized weights cannot be combined.",
                expected="floats of at least 16 bits",
                got=f"codes and scales: {some(sorted(names))}",
                where=each.source.url,
                todo=f"pass {option('dequantize', 'bf16')}, which converts the quantized weights of every input",
            )

    def _problem(self, short: str, first: _Input, others: Sequence[_Input]) -> ConversionError | None:
        """Return the error for a tensor that cannot be combined; None if it can, or is equal in all inputs."""
        info, name = first.view(short).info, first.names[short]
        take_first = f"take them from the first input with {option('copy', as_pattern(name))}"
        for each in others:
            if short not in each.names:
                missing = [first.names[one] for one in first.names if one not in each.names]
                return ConversionError(
                    "An input lacks tensors of the first input.",
                    expected=f"all tensors of {first.source.url}",
                    got=f"none named {some(filter(self._is_written, missing), 6)}",
                    where=each.source.url,
                    todo=f"pass checkpoints of the same model; or {take_first}, or leave them out with "
                    f"{option('exclude', as_pattern(name))}",
                )
            other = each.view(short)
            if other.info.shape != info.shape:
                return ConversionError(
                    "A tensor has different shapes in two inputs.",
                    expected=f"{name} of shape {info.shape}, as in {first.source.url}",
                    got=other.info.shape,
                    where=each.source.url,
                    todo=f"pass checkpoints of the same model, with {option('rules')} if their layouts differ; or "
                    f"{take_first}",
                )
            if {info.dtype.kind, other.info.dtype.kind} != {"float"} and not equal_bytes(
                first.view(short), other
            ):
                return ConversionError(
                    "A tensor that is not of floats differs between two inputs.",
                    expected=f"{name} ({info.dtype.name}) with the same bytes in all inputs",
                    got=f"other bytes ({other.info.dtype.name}) than in {first.source.url}",
                    where=each.source.url,
                    todo=f"if it is a counter, such as of batches, {take_first}; or leave it out with "
                    f"{option('exclude', as_pattern(name))}",
                )
        return None

    def _view(self, views: Sequence[TensorView]) -> TensorView:
        """Return the combination of the tensors of all inputs."""
        is_wide = any(view.info.dtype.name == "float64" for view in views)
        compute_dtype = dtype_from_torch(self.compute_dtype or ("float64" if is_wide else "float32"))
        return CombinedView(tuple(views), self.steps, compute_dtype, views[0].info.dtype, self.scratch)


@dataclass(frozen=True)
class _Input:
    """One input.

    Args:
        names: name in the model, without wrappers -> name in ``state``.
    """

    source: Source
    state: CarriedState
    names: Mapping[str, str]

    @classmethod
    def of(cls, source: Source, state: CarriedState) -> _Input:
        """Return an input with the names of its model's tensors."""
        names = {name: short for name, short in state.model.names.items() if name in state.views}
        if not state.model.candidates:  # several models have their full names, which are matched unchanged
            counters = {name for name in names if not state.views[name].info.shape}
            names = unwrapped_names(names, counters, source.url)
        return cls(source, state, {short: name for name, short in names.items()})

    def with_tied_names(self, wanted: Set[str]) -> _Input:
        """Return the input with those of the wanted names that its folder does not store because they are tied."""
        missing = wanted - self.names.keys()
        # The class is asked only if needed, which is slow.
        aliases = tied_aliases_of(self.source, list(self.names))[0] if missing else {}
        added = {alias: self.names[kept] for alias, kept in aliases.items() if alias in missing}
        return _Input.of(self.source, self.state.with_aliases(added)) if added else self

    def view(self, short: str) -> TensorView:
        """Return a tensor by its name in the model."""
        return self.state.views[self.names[short]]

    def name(self, short: str) -> str:
        """Return the name that a tensor of this name in the model has in the state, or would have."""
        known, name = next(iter(self.names.items()))
        return self.names.get(short, f"{name.removesuffix(known)}{short}" if name.endswith(known) else short)
