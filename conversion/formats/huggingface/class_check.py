"""Check whether the class in config.json loads a repository: names, shapes, ties and quantization, never values.

What the class misses or refuses is a problem. What it ignores is reported: ``from_pretrained`` loads such a repository.

    table          the shipped table of common classes       imports nothing
    class          ``from_pretrained`` on the meta device    runs in a child process (`model_class`)
    not checked    neither has an answer                     `ClassCheck.reason` says why

If the table rejects the tensors, the class checks them too, since a class loads more names than it writes (those of
transformers 4 and of its base model). Without transformers, the table's rejection is final.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from vescale_fsdp.conversion.engine.plan import OutputPlan, Written
from vescale_fsdp.conversion.engine.stored_tensor import TensorInfo
from vescale_fsdp.conversion.formats.huggingface.model_class import ask_child, class_asked_before, known_class
from vescale_fsdp.conversion.formats.huggingface.repository import (
    CONFIG_FILE,
    QUANTIZATION_KEYS,
    config_class,
)
from vescale_fsdp.errors import ConversionError, option, some
from vescale_fsdp.layout.foreign_json import parse_json
from vescale_fsdp.layout.safetensors_header import read_header

Asks = Literal["always", "doubt", "never"]
"""When the class itself checks the tensors, in a child process. "always": unless the table accepts them. "doubt": only
if the table rejects them. "never": no child process."""
_ADAPTED = ".base_layer."  # part of the name that peft gives to a weight with an adapter
FindQuantized = Callable[[Iterable[TensorInfo], Mapping[str, Any]], Collection[str]]
"""Returns the names of quantized codes and of scales among tensors, given their config.json."""


@dataclass(frozen=True)
class ClassCheck:
    """The result of the check whether a class loads a repository.

    Args:
        how: what the answer comes from: the shipped table or the class itself; or that there is no answer.
        class_name: the class in config.json; None if there is none.
        problems: one text for each tensor that the class would miss or refuse.
        extra: one text for each tensor that the class would ignore, such as a head that another class has.
        reason: why there is no answer; empty if there is one.
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
    extra: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``--json``."""
        return asdict(self)

    def require(self, where: str, *, is_required: bool) -> None:
        """Refuse a repository that the class does not load.

        Args:
            where: the repository, for messages.
            is_required: whether to refuse a repository that could not be checked, too.

        Raises:
            ConversionError: if the repository is refused.
        """
        self._require_no_adapter(where)
        if self.problems:
            raise ConversionError(
                "The class that config.json names does not load the result."
                if self.class_name
                else "No class of transformers loads the result.",
                expected=f"the tensors of {self.class_name or 'a model'}",
                got=some([*self.problems, *self.extra], 6),
                where=where,
                todo=f"pass the model's own config.json with {option('assets')}, rename tensors "
                f"with {option('rules')}, or choose them with {option('exclude')} and {option('include')}; "
                f"{option('no_assets', True)} writes tensors without a config.json, unchecked. "
                "Nothing was published",
            )
        if is_required and self.how == "not checked":
            raise ConversionError(
                "It could not be checked whether a model class loads the result.",
                expected="a class of the shipped table, or of an installed transformers (with accelerate)",
                got=self.reason,
                where=where,
                todo="install what is missing, pass a config.json that names a class, or leave out "
                f"{option('require_check')}",
            )

    def _require_no_adapter(self, where: str) -> None:
        """Raise if the result has the names that peft gives to a base with an adapter."""
        adapted = [text for text in (*self.problems, *self.extra) if _ADAPTED in text]
        if self.problems and adapted:
            raise ConversionError(
                "The checkpoint has a base model with an adapter, which no model class loads.",
                expected=f"the tensors of {self.class_name or 'a model'}, without those of an adapter",
                got=some(adapted, 3),
                where=where,
                todo=f"write the adapter with {option('adapter', True)} and the folder of its adapter_config.json as "
                f"{option('assets')}, then merge it into the base's repository with {option('merge', 'ADAPTER')}; or "
                f"choose tensors with {option('exclude')} and {option('include')}, or write all, unchecked, with "
                f"{option('no_assets', True)}. Nothing was published",
            )


def check_planned(
    plan: OutputPlan, find_quantized: FindQuantized, *, asks: Asks = "always"
) -> ClassCheck | None:
    """Check the planned tensors of a target.

    Returns None for a target other than Hugging Face's, or if only the class could answer and ``asks`` excludes it.
    """
    tensors = (items.view.info for file in plan.files for items in file.items())
    infos = {info.name: info for info in tensors}
    return _check(plan, infos, find_quantized, asks)


def check_written(plan: OutputPlan, read: Written, find_quantized: FindQuantized) -> ClassCheck | None:
    """Check the tensors in the headers of written files; returns None for a target other than Hugging Face's."""
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
            "not checked",
            problems=tuple(f"unexpected: {name}" for name in infos if _ADAPTED in name),
            # save_pretrained of a config alone writes none; that of a model does. Inference engines need the entry too.
            reason=f"{CONFIG_FILE} names no class of transformers: add "
            '"architectures": ["LlamaForCausalLM"] or the like',
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
    if not is_declared:  # neither the table nor descriptions of classes include quantized weights
        shapes = {name: info.shape for name, info in infos.items()}
        if (by_table := known_class(config, class_name)) is not None:
            known = _with_extra("table", class_name, by_table.problems(shapes))
        elif (by_class := class_asked_before(config, class_name)) is not None:
            known = _with_extra("class", class_name, by_class.problems(shapes))
    if known is None and asks != "always":
        return None
    # A tensor that the table does not know may have an older name, which the class knows.
    if known is not None and (asks == "never" or not (known.problems or (known.extra and asks == "always"))):
        return known
    answer = _ask_class(infos, config, class_name)
    # If the class gives no answer, the rejection by the table remains.
    return answer if known is None or answer.how == "class" else known


def _with_extra(
    how: Literal["table", "class"], class_name: str, problems: Sequence[str], child_bytes: int = 0
) -> ClassCheck:
    """Return the result of a check, with the tensors that are only ignored apart from those that do not fit."""
    extra = tuple(text for text in problems if text.startswith("unexpected: "))
    rest = tuple(text for text in problems if text not in extra)
    return ClassCheck(how, class_name, rest, child_bytes=child_bytes, extra=extra)


def missing_tensors(
    infos: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> tuple[str | None, tuple[str, ...]]:
    """Find what a repository lacks that the class in its config.json needs; a child process runs only in doubt.

    Returns:
        The class, and one text for each missing tensor. None are found if the shipped table has no answer for the
        class, or if weights are quantized.
    """
    class_name = config_class(config)
    if class_name is None or any(config.get(key) for key in QUANTIZATION_KEYS):
        return class_name, ()
    known = known_class(config, class_name)
    shapes = {name: info.shape for name, info in infos.items()}
    problems = () if known is None else known.problems(shapes)
    missing = _missing(problems)
    if missing:
        answer = _ask_class(infos, config, class_name)
        if answer.how == "class":
            missing = _missing(answer.problems)
        elif len(missing) < len(problems):  # the class might load what is there under older names
            missing = ()
    return class_name, missing


def _missing(problems: Iterable[str]) -> tuple[str, ...]:
    return tuple(text for text in problems if text.startswith("missing: "))


def _unpaired_scales(infos: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Find FP8 codes without scales and FP8 scales without codes, by the names that transformers writes.

    Checked here, because without a GPU the quantizer of transformers accepts both, and computes wrong values.
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
    """Check tensors with the class itself, in a child process."""
    unknown = next((info for info in infos.values() if info.dtype.torch_name is None), None)
    if unknown is not None:
        reason = f"torch has no type {unknown.dtype.name} ({unknown.name})"
        return ClassCheck("not checked", class_name, reason=reason)
    tensors = {name: (info.shape, info.dtype.required_torch_name) for name, info in infos.items()}
    answer = ask_child(config, class_name, tensors)
    child_bytes = int(answer.get("peak_bytes", 0))
    if "problems" not in answer:
        return ClassCheck("not checked", class_name, reason=str(answer["unknown"]), child_bytes=child_bytes)
    return _with_extra("class", class_name, answer["problems"], child_bytes)
