"""Does the class that config.json names take the result? Names, shapes, ties and quantisation, never values.

    table          the shipped table of common classes says yes                     nothing is imported
    class          the class itself, by what `from_pretrained` says of tensors      a child process, when the writers
                   on the meta device                                              have ended (`model_class`)
    not checked    neither can say; the reason is

A no of the table is confirmed by the class, which takes more names than it writes (those of before version 5, of its
base model); without transformers it stands.
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

Asks = Literal["always", "doubt", "never"]
"""When the class itself is asked, which takes a child process: where the table does not say yes, to confirm a no of the
table, or not at all."""
FindQuantized = Callable[[Iterable[TensorInfo], Mapping[str, Any]], Collection[str]]
"""Names of codes and scales among tensors, given their config.json."""


@dataclass(frozen=True)
class ClassCheck:
    """Whether a class takes a result.

    Args:
        how: who said so.
        class_name: the class in config.json; None if there is none.
        problems: what the class would miss, ignore or refuse, one text each.
        reason: why nobody could say, if it is not checked.
        child_bytes: peak memory of the child process that was asked, 0 if none was.

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
        """Refuse a result that the class does not take.

        Args:
            is_required: refuse one that could not be checked, too.

        Raises:
            ConversionError: in these two cases.
        """
        if self.problems:
            raise ConversionError(
                "The class that config.json names does not take the result.",
                expected=f"what {self.class_name} loads",
                got=some(self.problems, 6),
                where=where,
                todo="pass the model's own config.json with --assets, rename with --rules, or change which tensors go "
                "along with --exclude and --include; --no-assets writes tensors without a config.json, unchecked. "
                "Nothing has its final name",
            )
        if is_required and self.how == "not checked":
            raise ConversionError(
                "It could not be checked whether a model class takes the result.",
                expected="a class that the shipped table knows, or that transformers (with accelerate) makes",
                got=self.reason,
                where=where,
                todo="install what is missing, pass a config.json that names a class, or go without --require-check",
            )


def check_planned(
    plan: OutputPlan, find_quantized: FindQuantized, *, asks: Asks = "always"
) -> ClassCheck | None:
    """Whether the class takes what a plan says; None for a target without a class, or if the class had to be asked and
    is not.
    """
    infos = {items.view.info.name: items.view.info for file in plan.files for _, items in file.tensors}
    return _check(plan, infos, find_quantized, asks)


def check_written(plan: OutputPlan, read: Written, find_quantized: FindQuantized) -> ClassCheck | None:
    """Whether the class takes what is in the files, by their headers; None for a target without a class."""
    infos: dict[str, TensorInfo] = {}
    for file in plan.files if plan.kind == "hf" else ():
        entries, _ = read_header(partial(read, file.name), file.nbytes, file.name)
        infos |= {name: TensorInfo(name, entry.shape, entry.dtype) for name, entry in entries.items()}
    return _check(plan, infos, find_quantized)


def _check(
    plan: OutputPlan, infos: Mapping[str, TensorInfo], find_quantized: FindQuantized, asks: Asks = "always"
) -> ClassCheck | None:
    if plan.kind == "adapter":
        return ClassCheck("not checked", reason="an adapter alone: peft takes it beside its base")
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
    says_so = any(config.get(key) for key in QUANTIZATION_KEYS)
    if says_so != bool(quantized):
        found = f"{min(quantized)} is quantised" if quantized else "no weight is quantised"
        problem = (
            f"quantisation: {found}, and config.json has {'a' if says_so else 'no'} {QUANTIZATION_KEYS[0]}"
        )
        return ClassCheck("table", class_name, (problem,))
    if says_so and (unpaired := _unpaired_scales(infos, config)):
        return ClassCheck("table", class_name, unpaired)
    before: ClassCheck | None = None
    sources: tuple[tuple[Literal["table", "class"], Any], ...] = (
        ("table", known_class),
        ("class", class_asked_before),
    )
    for how, ask in sources:
        if before is None and not says_so and (known := ask(config, class_name)) is not None:
            shapes = {name: info.shape for name, info in infos.items()}
            before = ClassCheck(how, class_name, known.problems(shapes))
    if before is None and asks != "always":
        return None
    if before is not None and (asks == "never" or not before.problems):
        return before
    by_class = _ask_class(infos, config, class_name)
    return by_class if before is None or by_class.how == "class" else before


def _unpaired_scales(infos: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Of FP8 under the names that transformers writes, codes without scales and the reverse. Where there is no GPU, its
    quantiser takes the one without the other, and the values are wrong."""
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
    strange = next((info for info in infos.values() if info.dtype.torch_name is None), None)
    if strange is not None:
        return ClassCheck(
            "not checked", class_name, reason=f"torch has no type {strange.dtype.name} ({strange.name})"
        )
    tensors = {name: (info.shape, info.dtype.required_torch_name) for name, info in infos.items()}
    found = ask_child(config, class_name, tensors)
    child_bytes = int(found.get("peak_bytes", 0))
    if "problems" not in found:
        return ClassCheck("not checked", class_name, reason=str(found["unknown"]), child_bytes=child_bytes)
    return ClassCheck("class", class_name, tuple(found["problems"]), child_bytes=child_bytes)
