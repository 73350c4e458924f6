"""Base weights with an adapter in them, computed as peft's ``merge_and_unload`` computes them, one matrix at a time.

    LoRA    W + (B A) * scaling          embeddings: the transpose of the product
    DoRA    m / |W + (B A) * scaling| per row, times that sum
    IA3     W * l                        and the bias times l where l stands behind the layer

The product of whole matrices has other last bits than that of their parts, so a matrix is made whole and kept until
another one is asked for: memory is one matrix and its change. A conversion that merges has one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from vescale_fsdp.checkpoint.formats.huggingface.model_class import orientation_of_class
from vescale_fsdp.checkpoint.formats.huggingface.repository import config_class
from vescale_fsdp.checkpoint.formats.huggingface.tied_weights import absent_names
from vescale_fsdp.checkpoint.moves.carried_state import CarriedState
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.stored_tensor import TensorInfo
from vescale_fsdp.checkpoint.moves.tensor_view import RenamedView, SourceView, TensorView
from vescale_fsdp.conversion.formats.peft import ROOT, PeftConfig
from vescale_fsdp.errors import ConversionError, some
from vescale_fsdp.layout.geometry import Box, whole_box

if TYPE_CHECKING:
    import numpy as np
    import torch

_LORA = {".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_embedding_A": "A", ".lora_embedding_B": "B"}
_LORA |= {
    ".lora_magnitude_vector": "m",
    ".lora_magnitude_vector.weight": "m",
    ".lora_B.bias": "b",
    ".ia3_l": "l",
}


def merged_state(
    base: CarriedState, adapter: Source, config: PeftConfig, model_config: Mapping[str, Any]
) -> CarriedState:
    """The base with its weights merged. A tied weight that the adapter changes is parted from its twins, which keep
    their values, as in the model that was trained.

    Args:
        model_config: the base's config.json, whose class says which weights are tied, and which are [in, out].

    Raises:
        ConversionError: if the base has no such weights, or they do not fit.
    """
    parts, others = _by_module(adapter)
    changed = {*(f"{module}.weight" for module in parts), *others}
    twins = absent_names(model_config, base.views)
    touched = {twins.get(name, name) for name in changed}
    base = base.with_names_of({name: kept for name, kept in twins.items() if kept in touched})
    merging = _Merging(base.views, config, model_config, adapter.url)
    merging.find_root([*(f"{module}.weight" for module in parts), *others])
    for (
        name,
        view,
    ) in others.items():  # what was trained whole, or goes along: embeddings under a LoRA of theirs
        merging.replace(name, view)
    for module, found in parts.items():
        merging.add(module, found)
    return base.with_replaced(merging.made, set(merging.made))


def _by_module(adapter: Source) -> tuple[dict[str, dict[str, TensorView]], dict[str, TensorView]]:
    """A module's matrices by the letters above, and whole weights by the base's names."""
    parts: dict[str, dict[str, TensorView]] = {}
    others: dict[str, TensorView] = {}
    for name in adapter.tensors:
        short, view = name.removeprefix(ROOT), SourceView(adapter, name, name)
        end = next((end for end in _LORA if short.endswith(end)), None)
        if end is not None:
            parts.setdefault(short.removesuffix(end), {})[
                _LORA[end] + ("e" if "embedding" in end else "")
            ] = view
        elif "lora_" in short or "ia3_" in short or "token_adapter" in short:
            raise _misfit(f"parts such as {', '.join(_LORA)}", name, adapter.url)
        else:
            others[short.replace(".base_layer.", ".")] = view
    if not parts and not others:
        raise _misfit("tensors of an adapter", "none", adapter.url)
    return parts, others


def _misfit(expected: str, got: object, where: str, todo: str = "") -> ConversionError:
    right = (
        "pass the base that the adapter was trained on (base_model_name_or_path in its adapter_config.json)"
    )
    return ConversionError(
        "The adapter does not fit the base.", expected=expected, got=got, where=where, todo=right + todo
    )


@dataclass
class _Latest:
    """The matrix that was made last."""

    view: MergedView | None = None
    raw: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class MergedView(TensorView):
    """A weight that is computed whole, of whole tensors.

    Args:
        inputs: the base's weight, and what changes it.
        compute: the new weight of these; it may write into the first.
        recipe: what it is computed by, for its identity.
        latest: shared by all, so that one is held.
        lost: gets, under the name, how many finite values became infinite in the base's type.
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
        if self.latest.view is not self:
            self.latest.view = self.latest.raw = None  # before the next is made
            tensors = [_read(view) for view in self.inputs]
            before = int(tensors[0].isinf().sum())  # computing may write into it
            made = self.compute(*tensors).to(tensors[0].dtype).contiguous()
            if (lost := int(made.isinf().sum()) - before) > 0:
                self.lost[self.info.name] = lost
            self.latest.raw = made.view(_raw_type(made)).numpy()
            self.latest.view = self
        assert self.latest.raw is not None
        out[...] = self.latest.raw[box.slices()]

    def sources(self) -> Iterator[tuple[Source, str]]:
        for view in self.inputs:
            yield from view.sources()

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        for view in self.inputs:
            yield from view.parts(whole_box(view.info.shape))

    def over(self, leaf: Callable[[SourceView], TensorView]) -> TensorView:
        return self.inputs[0].over(leaf)

    @property
    def overflows(self) -> int:
        return sum(self.lost.values()) + sum(view.overflows for view in self.inputs)

    def identity(self) -> str:
        return f"{self.recipe} of {', '.join(view.identity() for view in self.inputs)}"


def _raw_type(tensor: torch.Tensor) -> torch.dtype:
    import torch

    types = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    return types[tensor.element_size()]


def _read(view: TensorView) -> torch.Tensor:
    """All of a tensor."""
    import torch

    info = view.info
    tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype.required_torch_name), device="cpu")
    view.read_into(whole_box(info.shape), tensor.view(_raw_type(tensor)).numpy())
    return tensor


@dataclass
class _Merging:
    """What has been merged so far."""

    base: Mapping[str, TensorView]
    config: PeftConfig
    model_config: Mapping[str, Any]
    where: str
    made: dict[str, tuple[TensorView, str]] = field(default_factory=dict)
    latest: _Latest = field(default_factory=_Latest)
    root: str = ""  # what module names begin with that the base's files leave out

    def find_root(self, names: list[str]) -> None:
        """Files of a model without its head leave out the model's own name: ``h.0`` for ``transformer.h.0``."""
        first = {name.partition(".")[0] for name in names}
        if len(first) == 1 and not any(name in self.base for name in names):
            self.root = f"{first.pop()}."
        missing = [name for name in names if name.removeprefix(self.root) not in self.base]
        if missing:
            todo = "; where its files have other names than the model in memory, with --rules transformers-.."
            expected = f"a base with {missing[0]} (one that is tied is stored under one name)"
            raise _misfit(expected, "none", self.where, todo)

    def add(self, module: str, parts: Mapping[str, TensorView]) -> None:
        """Merge what an adapter has for one module."""
        name = f"{module}.weight".removeprefix(self.root)
        base = self._now(name)
        if base.info.dtype.kind != "float" or len(base.info.shape) != 2:
            raise _misfit(
                "matrices of floats", f"{name}: {base.info.dtype.name} {base.info.shape}", self.where
            )
        bias = f"{module}.bias".removeprefix(self.root)
        if "l" in parts:
            self._add_ia3(module, name, bias, parts["l"])
            return
        ends = "e" if "Ae" in parts else ""
        lacking = [letter for letter in ("A", "B") if letter + ends not in parts]
        if lacking or (self.config.is_dora != ("m" in parts)):
            raise _misfit(
                f"A and B{' and magnitudes' * self.config.is_dora}", f"{module}: {some(parts)}", self.where
            )
        a, b, scaling = parts[f"A{ends}"], parts[f"B{ends}"], self.config.scaling_of(module)
        is_transposed = bool(ends) or self._is_transposed(
            module, base.info.shape, b.info.shape[:1], a.info.shape[1:]
        )
        rows, cols = reversed(base.info.shape) if is_transposed else base.info.shape
        rank = self.config.rank_of(module)
        if (a.info.shape, b.info.shape) != ((rank, cols), (rows, rank)):
            got = f"{module}: {a.info.shape} and {b.info.shape} for {base.info.shape}"
            raise _misfit(f"matrices {(rank, cols)} and {(rows, rank)}", got, self.where)
        magnitudes = (parts["m"],) if "m" in parts else ()
        compute = partial(_with_lora, scaling=scaling, is_transposed=is_transposed, is_embedding=bool(ends))
        self._merge(name, (base, a, b, *magnitudes), compute, f"LoRA {scaling!r} {is_transposed} {ends}")
        if "b" in parts:
            self._merge(
                bias,
                (self._bias(bias), parts["b"]),
                partial(_with_bias, scaling=scaling),
                f"bias {scaling!r}",
            )

    def _is_transposed(
        self, module: str, shape: tuple[int, ...], rows: tuple[int, ...], cols: tuple[int, ...]
    ) -> bool:
        """Whether a weight is [in, out], as Conv1D has it: by what the adapter has for its rows or columns; where the
        weight is square, by the model's class. ``fan_in_fan_out`` of the adapter's config is that of one module.

        Raises:
            ConversionError: if it is square and its class is not known.
        """
        if shape[0] != shape[1]:
            plain, turned = (
                (rows in ((), shape[:1]) and cols in ((), shape[1:])),
                (rows in ((), shape[1:]) and cols in ((), shape[:1])),
            )
            return turned and not plain
        class_name = config_class(self.model_config)
        found = None if class_name is None else orientation_of_class(self.model_config, class_name, module)
        if found is None:
            raise ConversionError(
                "It is not known whether a square weight is [out, in] (Linear) or [in, out] (Conv1D).",
                expected="a config.json that names a class of transformers, and transformers installed",
                got=f"{module} of shape {shape}, class {class_name}",
                where=self.where,
                todo="pass the base's config.json with --assets; or, if the class is the repository's own code, merge "
                "with peft itself: PeftModel.from_pretrained(base, adapter).merge_and_unload()",
            )
        return found

    def _add_ia3(self, module: str, name: str, bias: str, scales: TensorView) -> None:
        shape, factors = self._now(name).info.shape, scales.info.shape
        if len(factors) != 2 or 1 not in factors or max(factors) not in shape:
            raise _misfit(f"factors {(shape[0], 1)} or {(1, shape[1])}", f"{name}: {factors}", self.where)
        is_before = factors[0] == 1
        rows, cols = ((), factors[1:]) if is_before else (factors[:1], ())
        is_transposed = self._is_transposed(module, shape, rows, cols)
        compute = partial(_with_ia3, is_transposed=is_transposed)
        self._merge(name, (self._now(name), scales), compute, f"IA3 {is_transposed}")
        if not is_before and bias in self.base:
            self._merge(bias, (self._now(bias), scales), _with_ia3_bias, "IA3 bias")

    def _bias(self, name: str) -> TensorView:
        if name not in self.base:
            raise _misfit(f"a base with {name}, as the adapter has a bias", "none", self.where)
        return self._now(name)

    def _now(self, name: str) -> TensorView:
        """A weight of the base, or what has come in its place."""
        return self.made[name][0] if name in self.made else self.base[name]

    def _merge(
        self, name: str, inputs: tuple[TensorView, ...], compute: Callable[..., torch.Tensor], recipe: str
    ) -> None:
        self.made[name] = (MergedView(inputs, compute, recipe, self.latest), name)

    def replace(self, name: str, view: TensorView) -> None:
        """A weight that was trained whole."""
        name = name.removeprefix(self.root)
        old = self.base[name].info
        if view.info.shape != old.shape:
            raise _misfit(f"{name} of shape {old.shape}", view.info.shape, self.where)
        from vescale_fsdp.checkpoint.moves.casting import CastView

        found = view if view.info.dtype == old.dtype else CastView(view, old.dtype)
        self.made[name] = (RenamedView(found, name), name)


def _trained(tensor: torch.Tensor) -> torch.Tensor:
    """As peft loads an adapter: halves become float32."""
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
    import torch

    delta = _trained(b) @ _trained(a)
    delta = (delta.T if is_transposed else delta) * scaling
    if magnitudes is None:
        weight += delta.to(weight.dtype) if is_embedding else delta  # peft rounds twice for embeddings alone
        return weight
    rows = (weight.T if is_transposed else weight) + 1 * (delta.T if is_transposed else delta)
    norms = torch.linalg.norm(rows, dim=1).to(rows.dtype)
    del rows
    factors = (_trained(magnitudes) / norms).view(-1, 1)
    return (factors.T if is_transposed else factors) * (weight + delta)


def _with_bias(bias: torch.Tensor, change: torch.Tensor, *, scaling: float) -> torch.Tensor:
    bias += _trained(change) * scaling
    return bias


def _with_ia3(weight: torch.Tensor, scales: torch.Tensor, *, is_transposed: bool) -> torch.Tensor:
    scales = _trained(scales)
    return weight * (scales.T if is_transposed else scales)


def _with_ia3_bias(bias: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return bias * _trained(scales).reshape(bias.shape)
