"""Check whether the class in config.json loads a repository: names, shapes, ties and quantization, never values.

    table          the shipped table of common classes says yes                     nothing is imported
    class          the class itself, with ``from_pretrained`` on the meta device    a child process (`model_class`)
    not checked    neither can answer; `ClassCheck.reason` says why

A no of the table is confirmed by the class, which accepts more names than it writes (names of transformers 4, and of
its base model); without transformers the table's no is final.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from vescale_fsdp.checkpoint.formats.huggingface.model_class import ask_child, class_asked_before, known_class
from vescale_fsdp.checkpoint.formats.huggingface.repository import (
    CONFIG_FILE,
    QUANTIZATION_KEYS,
    config_class,
)
from vescale_fsdp.checkpoint.moves.plan import OutputPlan, Written
from vescale_fsdp.checkpoint.moves.stored_tensor import TensorInfo
from vescale_fsdp.errors import ConversionError, some
from vescale_fsdp.layout.foreign_json import parse_json
from vescale_fsdp.layout.safetensors_header import read_header

# "always": a child process asks the class itself, unless the table accepts the tensors. "doubt": only if the table
# rejects them. "never": no child process.
Asks = Literal["always", "doubt", "never"]
"""When the class itself checks the tensors, in a child process: unless the table accepts them, only to confirm that the
table rejects them, or never."""
FindQuantized = Callable[[Iterable[TensorInfo], Mapping[str, Any]], Collection[str]]
"""Names of codes and scales among tensors, given their config.json."""


@dataclass(frozen=True)
class ClassCheck:
    """Whether a class loads a repository.

    Args:
        how: where the answer comes from.
        class_name: the class in config.json; None if there is none.
        problems: tensors that the class would miss, ignore or refuse, one text each.
        reason: why there is no answer, if it is not checked.
        child_bytes: peak memory of the child process; 0 without one.

    Examples:
        >>> ClassCheck("not checked", reason="the result has no config.json").problems
        ()
    """

    how: Literal["table", "class", "not checked"]
    class_name: str | None = None
    problems: tuple[str, ...] = ()
    reason: str = ""
    child_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``--json``."""
        return asdict(self)

    def require(self, where: str, *, is_required: bool) -> None:
        """Refuse a repository that the class does not load.

        Args:
            is_required: refuse a repository that could not be checked, too.

        Raises:
            ConversionError: if it is refused.
        """
        if self.problems:
            raise ConversionError(
                "The class that config.json names does not load the result.",
                expected=f"the tensors of {self.class_name}",
                got=some(self.problems, 6),
                where=where,
                todo="pass the model's own config.json with --assets, rename tensors with --rules, or choose them with "
                "--exclude and --include; --no-assets writes tensors without a config.json, unchecked. Nothing was "
                "published",
            )
        if is_required and self.how == "not checked":
            raise ConversionError(
                "It could not be checked whether a model class loads the result.",
                expected="a class of the shipped table, or of an installed transformers (with accelerate)",
                got=self.reason,
                where=where,
                todo="install what is missing, pass a config.json that names a class, or go without --require-check",
            )


def check_planned(
    plan: OutputPlan, find_quantized: FindQuantized, *, asks: Asks = "always"
) -> ClassCheck | None:
    """Check a plan; None for a target without a class, or if only the class could answer and ``asks`` forbids it."""
    infos = {items.view.info.name: items.view.info for file in plan.files for _, items in file.tensors}
    return _check(plan, infos, find_quantized, asks)


def check_written(plan: OutputPlan, read: Written, find_quantized: FindQuantized) -> ClassCheck | None:
    """Check written files by their headers; None for a target without a class."""
    infos: dict[str, TensorInfo] = {}
    for file in plan.files if plan.kind == "hf" else ():
        entries, _ = read_header(partial(read, file.name), file.nbytes, file.name)
        infos |= {name: TensorInfo(name, entry.shape, entry.dtype) for name, entry in entries.items()}
    return _check(plan, infos, find_quantized)


def _check(
    plan: OutputPlan, infos: Mapping[str, TensorInfo], find_quantized: FindQuantized, asks: Asks = "always"
) -> ClassCheck | None:
    if plan.kind == "adapter":
        return ClassCheck("not checked", reason="an adapter alone: peft loads it with its base model")
    if plan.kind != "hf":
        return None
    pieces = next((file.pieces for file in plan.closing if file.name == CONFIG_FILE), None)
    if pieces is None:
        return ClassCheck("not checked", reason=f"the result has no {CONFIG_FILE}")
    config: Mapping[str, Any] = parse_json(b"".join(pieces()))
    class_name = config_class(config)
    if class_name is None:
        return ClassCheck(
            "not checked", reason=f"{CONFIG_FILE} names no class of transformers (architectures)"
        )
    quantized = find_quantized(infos.values(), config)
    is_declared = any(config.get(key) for key in QUANTIZATION_KEYS)
    if is_declared != bool(quantized):
        weights = f"{min(quantized)} is quantized" if quantized else "no weight is quantized"
        has = "a" if is_declared else "no"
        problem = f"quantization: {weights}, and config.json has {has} {QUANTIZATION_KEYS[0]}"
        return ClassCheck("table", class_name, (problem,))
    if is_declared and (unpaired := _unpaired_scales(infos, config)):
        return ClassCheck("table", class_name, unpaired)
    known: ClassCheck | None = None
    if not is_declared:  # neither the table nor earlier answers describe quantized weights
        shapes = {name: info.shape for name, info in infos.items()}
        if (by_table := known_class(config, class_name)) is not None:
            known = ClassCheck("table", class_name, by_table.problems(shapes))
        elif (by_class := class_asked_before(config, class_name)) is not None:
            known = ClassCheck("class", class_name, by_class.problems(shapes))
    if known is None and asks != "always":
        return None
    if known is not None and (asks == "never" or not known.problems):
        return known
    answer = _ask_class(infos, config, class_name)
    return answer if known is None or answer.how == "class" else known


def _unpaired_scales(infos: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Problems of FP8 weights: codes without scales, or scales without codes, under the names that transformers writes.

    Without a GPU, the quantizer of transformers accepts codes without scales, or scales without codes, and computes
    wrong values.
    """
    settings = config.get(QUANTIZATION_KEYS[0])
    if not isinstance(settings, dict) or settings.get("quant_method") != "fp8":
        return ()
    scales = {name for name in infos if name.endswith("_scale_inv")}
    if not scales:
        return ()
    is_code = {name: info.dtype.kind == "quantized" for name, info in infos.items()}
    codes = {f"{name}_scale_inv" for name in infos if is_code[name] and name not in scales}
    missing = (f"missing: {name}" for name in sorted(codes - scales))
    return (*missing, *(f"unexpected: {name}" for name in sorted(scales - codes)))


def _ask_class(infos: Mapping[str, TensorInfo], config: Mapping[str, Any], class_name: str) -> ClassCheck:
    unknown = next((info for info in infos.values() if info.dtype.torch_name is None), None)
    if unknown is not None:
        reason = f"torch has no type {unknown.dtype.name} ({unknown.name})"
        return ClassCheck("not checked", class_name, reason=reason)
    tensors = {name: (info.shape, info.dtype.required_torch_name) for name, info in infos.items()}
    answer = ask_child(config, class_name, tensors)
    child_bytes = int(answer.get("peak_bytes", 0))
    if "problems" not in answer:
        return ClassCheck("not checked", class_name, reason=str(answer["unknown"]), child_bytes=child_bytes)
    return ClassCheck("class", class_name, tuple(answer["problems"]), child_bytes=child_bytes)
