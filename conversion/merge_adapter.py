"""Merge an adapter into base weights, one matrix at a time, with the same arithmetic as peft's ``merge_and_unload``.

    LoRA    W + (B A) * scaling          embeddings: the transpose of the product
    DoRA    m / |S| * S, per row         where S = W + (B A) * scaling
    IA3     W * l                        and the bias times l if l scales the layer's output

The product of whole matrices differs in the last bits from products of their parts. Each weight is therefore computed
as a whole, and kept until another weight is read: memory contains one matrix and its change. A conversion that merges
uses one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from vescale_fsdp.conversion.engine.carried_state import CarriedState
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.stored_tensor import TensorInfo
from vescale_fsdp.conversion.engine.tensor_view import RenamedView, SourceView, TensorView
from vescale_fsdp.conversion.formats.huggingface.model_class import orientation_of_class
from vescale_fsdp.conversion.formats.huggingface.repository import config_class
from vescale_fsdp.conversion.formats.huggingface.tied_weights import tied_aliases
from vescale_fsdp.conversion.formats.peft import ROOT, PeftConfig
from vescale_fsdp.errors import ConversionError, option, some
from vescale_fsdp.layout.geometry import Box, whole_box

if TYPE_CHECKING:
    import numpy as np
    import torch

# The end of a tensor's name -> its letter in the formulas above. "Ae" and "Be" belong to embeddings; "b" is a bias.
_PARTS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "Ae",
    ".lora_embedding_B": "Be",
    ".lora_magnitude_vector": "m",
    ".lora_magnitude_vector.weight": "m",
    ".lora_B.bias": "b",
    ".ia3_l": "l",
}


def merged_state(
    base: CarriedState, adapter: Source, config: PeftConfig, model_config: Mapping[str, Any]
) -> CarriedState:
    """Return the base with the adapter merged into its weights.

    If the adapter changes a tied weight, the weight's other names become separate tensors with the old values, as in
    the model that was trained.

    Args:
        model_config: the base's config.json. The model class that it names determines which weights are tied, and
            which are stored as [in, out].

    Raises:
        ConversionError: if the base lacks a weight that the adapter changes, or shapes do not match.
    """
    parts, whole_weights = _by_module(adapter)
    changed = [*(f"{module}.weight" for module in parts), *whole_weights]
    aliases = tied_aliases(model_config, base.views)
    changed_tensors = {aliases.get(name, name) for name in changed}
    base = base.with_aliases({name: kept for name, kept in aliases.items() if kept in changed_tensors})
    merge = _Merge(base.views, config, model_config, adapter.url)
    merge.find_root(changed)
    # Whole weights first: a LoRA may apply to an embedding that the adapter also stores whole.
    for name, view in whole_weights.items():
        merge.replace(name, view)
    for module, module_parts in parts.items():
        merge.add(module, module_parts)
    return base.with_replaced(merge.merged, set(merge.merged))


def _by_module(adapter: Source) -> tuple[dict[str, dict[str, TensorView]], dict[str, TensorView]]:
    """Split an adapter's tensors; returns module -> letter -> tensor, and the base's name -> whole weight."""
    parts: dict[str, dict[str, TensorView]] = {}
    whole_weights: dict[str, TensorView] = {}
    for name in adapter.tensors:
        short, view = name.removeprefix(ROOT), SourceView(adapter, name, name)
        end = next((end for end in _PARTS if short.endswith(end)), None)
        if end is not None:
            parts.setdefault(short.removesuffix(end), {})[_PARTS[end]] = view
        # Parts that `_PARTS` lacks: without this error they would be regarded as whole weights.
        elif "lora_" in short or "ia3_" in short or "token_adapter" in short:
            raise _no_fit(f"parts such as {', '.join(_PARTS)}", name, adapter.url, _BY_PEFT)
        else:
            # In peft, the weight of a wrapped layer is in `base_layer`.
            whole_weights[short.replace(".base_layer.", ".")] = view
    if not parts and not whole_weights:
        raise _no_fit("tensors of an adapter", "none", adapter.url, _COPY_AGAIN)
    return parts, whole_weights


_BASE = "pass the base that the adapter was trained on (base_model_name_or_path in its adapter_config.json)"
_BY_PEFT = "merge it with peft itself: PeftModel.from_pretrained(base, adapter).merge_and_unload()"
_COPY_AGAIN = "copy the adapter again from where it was made"


def _no_fit(expected: str, got: object, where: str, todo: str = _BASE) -> ConversionError:
    """Return the error for an adapter that cannot be merged into the base."""
    return ConversionError(
        "The adapter does not fit the base.", expected=expected, got=got, where=where, todo=todo
    )


@dataclass
class _Latest:
    """The merged matrix that was computed last, and the view that it belongs to."""

    view: MergedView | None = None
    raw: np.ndarray | None = None


@dataclass(frozen=True, eq=False)  # eq=False: a dict cannot be hashed
class MergedView(TensorView):
    """A merged weight, which is computed as a whole from whole tensors.

    Args:
        inputs: the base's weight, and the parts of the adapter.
        compute: computes the new weight from the inputs; may write into the first input.
        recipe: text that identifies the computation, for `identity`.
        latest: shared by all views of a merge, so that memory contains only one matrix.
        lost: name -> number of finite values that became infinite in the base's type.
    """

    inputs: tuple[TensorView, ...]
    compute: Callable[..., torch.Tensor]
    recipe: str
    latest: _Latest = field(repr=False)
    lost: dict[str, int] = field(default_factory=dict, repr=False)

    @property
    def info(self) -> TensorInfo:
        return self.inputs[0].info

    def read_into(self, box: Box, out: np.ndarray) -> None:
        from vescale_fsdp.checkpoint.manifest.torch_dtypes import carrier_of  # imports torch

        if self.latest.view is not self:  # a matrix is read box by box, but computed once
            self.latest.view = self.latest.raw = None  # frees the last matrix before the next one is computed
            tensors = [_read(view) for view in self.inputs]
            before = int(tensors[0].isinf().sum())  # counted now, since `compute` may write into the tensor
            weight = self.compute(*tensors).to(tensors[0].dtype).contiguous()
            if (lost := int(weight.isinf().sum()) - before) > 0:
                self.lost[self.info.name] = lost
            self.latest.raw = weight.view(carrier_of(weight.dtype)).numpy()
            self.latest.view = self
        assert self.latest.raw is not None
        out[...] = self.latest.raw[box.slices()]

    @property
    def operands(self) -> tuple[TensorView, ...]:
        return self.inputs

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        for view in self.inputs:
            yield from view.parts(whole_box(view.info.shape))  # any box needs all inputs

    def over(self, leaf: Callable[[SourceView], TensorView]) -> TensorView:
        return self.inputs[0].over(leaf)

    @property
    def overflows(self) -> int:
        return sum(self.lost.values()) + super().overflows

    def identity(self) -> str:
        return f"{self.recipe} of {', '.join(view.identity() for view in self.inputs)}"


def _read(view: TensorView) -> torch.Tensor:
    """Read a whole tensor."""
    import torch

    raw = torch.from_numpy(view.read(whole_box(view.info.shape)))
    return raw.view(getattr(torch, view.info.dtype.required_torch_name))


@dataclass
class _Merge:
    """A merge in progress.

    Attributes:
        merged: name of a weight -> (the merged tensor, the same name), as `CarriedState.with_replaced` needs it.
        root: the prefix of the adapter's module names that the base's names lack; usually empty.
    """

    base: Mapping[str, TensorView]
    config: PeftConfig
    model_config: Mapping[str, Any]
    where: str
    merged: dict[str, tuple[TensorView, str]] = field(default_factory=dict)
    latest: _Latest = field(default_factory=_Latest)
    root: str = ""

    def find_root(self, names: list[str]) -> None:
        """Set `root`. A base saved without its head lacks the inner model's name: ``h.0``, not ``transformer.h.0``.

        Args:
            names: names of the weights that the adapter changes.

        Raises:
            ConversionError: if the base lacks one of the names.
        """
        first = {name.partition(".")[0] for name in names}
        # A prefix is removed only if all names share their first part, and the base has none of the full names.
        if len(first) == 1 and not any(name in self.base for name in names):
            self.root = f"{first.pop()}."
        missing = [name for name in names if name.removeprefix(self.root) not in self.base]
        if missing:
            todo = (
                f"{_BASE}; if its files have other names than the model in memory, with {option('rules', 'FILE')}: key "
                "rules from the names in the files (hf) to those in memory (ours)"
            )
            expected = f"a base with {missing[0]} (a tied weight is stored under one name)"
            raise _no_fit(expected, "none", self.where, todo)

    def add(self, module: str, parts: Mapping[str, TensorView]) -> None:
        """Merge the adapter's parts of one module into its weight, and its bias if the adapter changes that."""
        name = f"{module}.weight".removeprefix(self.root)
        base = self._current(name)
        if base.info.dtype.kind != "float" or len(base.info.shape) != 2:  # quantized, or a convolution
            got = f"{name}: {base.info.dtype.name} {base.info.shape}"
            todo = f"if the base is quantized, pass {option('dequantize', 'bf16')}; else {_BY_PEFT}"
            raise _no_fit("matrices of floats", got, self.where, todo)
        bias = f"{module}.bias".removeprefix(self.root)
        if "l" in parts:
            self._add_ia3(module, name, bias, parts["l"])
            return
        suffix = "e" if "Ae" in parts else ""  # an embedding, for which the product is transposed
        is_complete = {f"A{suffix}", f"B{suffix}"} <= parts.keys()
        if not is_complete or (self.config.is_dora != ("m" in parts)):
            expected = "A, B and magnitudes" if self.config.is_dora else "A and B"
            raise _no_fit(expected, f"{module}: {some(parts)}", self.where, _COPY_AGAIN)
        a, b, scaling = parts[f"A{suffix}"], parts[f"B{suffix}"], self.config.scaling_of(module)
        is_transposed = bool(suffix) or self._is_transposed(
            module, base.info.shape, b.info.shape[:1], a.info.shape[1:]
        )
        rows, cols = reversed(base.info.shape) if is_transposed else base.info.shape
        rank = self.config.rank_of(module)
        if (a.info.shape, b.info.shape) != ((rank, cols), (rows, rank)):
            got = f"{module}: {a.info.shape} and {b.info.shape} for {base.info.shape}"
            raise _no_fit(f"matrices {(rank, cols)} and {(rows, rank)}", got, self.where)
        magnitudes = (parts["m"],) if "m" in parts else ()
        compute = partial(_with_lora, scaling=scaling, is_transposed=is_transposed, is_embedding=bool(suffix))
        self._set(name, (base, a, b, *magnitudes), compute, f"LoRA {scaling!r} {is_transposed} {suffix}")
        if "b" in parts:
            if bias not in self.base:
                raise _no_fit(f"a base with {bias}, as the adapter has a bias", "none", self.where)
            inputs = (self._current(bias), parts["b"])
            self._set(bias, inputs, partial(_with_bias, scaling=scaling), f"bias {scaling!r}")

    def _is_transposed(
        self, module: str, shape: tuple[int, ...], rows: tuple[int, ...], cols: tuple[int, ...]
    ) -> bool:
        """Return whether a weight is stored as [in, out], as by Conv1D, instead of [out, in], as by Linear.

        The shapes of the adapter's parts decide; for a square weight, the model's class does. ``fan_in_fan_out`` in the
        adapter's config is not used, because it describes only one module.

        Args:
            shape: the weight's shape.
            rows, cols: the weight's number of rows and columns according to the adapter, as (number,) or, if unknown,
                ().

        Raises:
            ConversionError: if the weight is square and its class is not known.
        """
        if shape[0] != shape[1]:
            is_plain = rows in ((), shape[:1]) and cols in ((), shape[1:])
            return not is_plain and rows in ((), shape[1:]) and cols in ((), shape[:1])
        class_name = config_class(self.model_config)
        known = None if class_name is None else orientation_of_class(self.model_config, class_name, module)
        if known is None:
            raise ConversionError(
                "It is not known whether a square weight is [out, in] (Linear) or [in, out] (Conv1D).",
                expected="a config.json that names a class of transformers, and transformers installed",
                got=f"{module} of shape {shape}, "
                + (f"class {class_name}" if class_name else "no class in a config.json"),
                where=self.where,
                todo=f"pass the base's config.json with {option('assets')}, and add "
                '"architectures": ["LlamaForCausalLM"] or the like if it names no class; or, if the class is the '
                "repository's own code, merge with peft itself: "
                "PeftModel.from_pretrained(base, adapter).merge_and_unload()",
            )
        return known

    def _add_ia3(self, module: str, name: str, bias: str, scales: TensorView) -> None:
        """Multiply a weight by IA3's factors; also its bias, if the factors scale the layer's output."""
        shape, factors = self._current(name).info.shape, scales.info.shape
        if len(factors) != 2 or 1 not in factors or max(factors) not in shape:
            raise _no_fit(f"factors {(shape[0], 1)} or {(1, shape[1])}", f"{name}: {factors}", self.where)
        scales_input = factors[0] == 1  # [1, in] scales the layer's input, [out, 1] its output
        rows, cols = ((), factors[1:]) if scales_input else (factors[:1], ())
        is_transposed = self._is_transposed(module, shape, rows, cols)
        compute = partial(_with_ia3, is_transposed=is_transposed)
        self._set(name, (self._current(name), scales), compute, f"IA3 {is_transposed}")
        if not scales_input and bias in self.base:
            self._set(bias, (self._current(bias), scales), _with_ia3_bias, "IA3 bias")

    def _current(self, name: str) -> TensorView:
        """Return a weight with the changes that were merged so far."""
        return self.merged[name][0] if name in self.merged else self.base[name]

    def _set(
        self, name: str, inputs: tuple[TensorView, ...], compute: Callable[..., torch.Tensor], recipe: str
    ) -> None:
        self.merged[name] = (MergedView(inputs, compute, recipe, self.latest), name)

    def replace(self, name: str, view: TensorView) -> None:
        """Replace a weight of the base by a weight that was trained as a whole (peft's ``modules_to_save``)."""
        name = name.removeprefix(self.root)
        old = self.base[name].info
        if view.info.shape != old.shape:
            raise _no_fit(f"{name} of shape {old.shape}", view.info.shape, self.where)
        from vescale_fsdp.conversion.engine.casting import CastView  # imported late: few merges cast

        cast = view if view.info.dtype == old.dtype else CastView(view, old.dtype)
        self.merged[name] = (RenamedView(cast, name), name)


def _as_loaded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a part of the adapter as peft loads it: floats of 16 or 8 bits become float32."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def _with_lora(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    magnitudes: torch.Tensor | None = None,
    *,
    scaling: float,
    is_transposed: bool,
    is_embedding: bool,
) -> torch.Tensor:
    """Return the weight after a LoRA, or after DoRA if there are magnitudes. May write into ``weight``."""
    import torch

    delta = _as_loaded(b) @ _as_loaded(a)
    delta = (delta.T if is_transposed else delta) * scaling
    if magnitudes is None:
        # Only for embeddings, peft rounds the change to the weight's type before the sum.
        weight += delta.to(weight.dtype) if is_embedding else delta
        return weight
    # The same expressions as in peft, for the same rounding. ``1 *`` is peft's scaling, already in ``delta``.
    rows = (weight.T if is_transposed else weight) + 1 * (delta.T if is_transposed else delta)
    norms = torch.linalg.norm(rows, dim=1).to(rows.dtype)
    del rows  # frees the memory of one matrix
    factors = (_as_loaded(magnitudes) / norms).view(-1, 1)
    return (factors.T if is_transposed else factors) * (weight + delta)


def _with_bias(bias: torch.Tensor, change: torch.Tensor, *, scaling: float) -> torch.Tensor:
    bias += _as_loaded(change) * scaling
    return bias


def _with_ia3(weight: torch.Tensor, scales: torch.Tensor, *, is_transposed: bool) -> torch.Tensor:
    scales = _as_loaded(scales)
    return weight * (scales.T if is_transposed else scales)


def _with_ia3_bias(bias: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return bias * _as_loaded(scales).reshape(bias.shape)
