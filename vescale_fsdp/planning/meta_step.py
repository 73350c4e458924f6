"""A training step on the meta device: activations and gradients of each module, and the arithmetic. No values, no GPU.

The model runs forward and backward on tensors without data. A dispatch mode sees each operator and each storage, as an
allocator would. Attention is not computed: it saves what flash attention saves (query, key, value, output, and one fp32
number per row), whatever kernel the device has.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from vescale_fsdp.errors import ArgumentError
from vescale_fsdp.planning.step_memory import Window
from vescale_fsdp.torch_modes import TorchDispatchMode, outside_modes, without_autocast
from vescale_fsdp.torch_private import pytree, storage_id

_ATTENTION = "vescale_plan"  # the name under which transformers looks up the formula


@dataclass(frozen=True)
class MetaStep:
    """A measured step.

    Attributes:
        windows: memory of the modules, in order.
        operators: (arithmetic operations, bytes read and written) of an operator -> how often it runs.
    """

    windows: tuple[Window, ...]
    operators: Mapping[tuple[int, int], int]

    def scaled(self, factor: float) -> MetaStep:
        """Return a step with a multiple of the activations and of the work; gradients stay as large."""
        windows = tuple(
            replace(
                each,
                peak_bytes=int((each.peak_bytes - each.kept_bytes) * factor) + each.kept_bytes,
                written_peak_bytes=int(each.written_peak_bytes * factor),
                end_bytes=int(each.end_bytes * factor),
            )
            for each in self.windows
        )
        work = Counter[tuple[int, int]]()
        for (flops, nbytes), count in self.operators.items():
            work[int(flops * factor), int(nbytes * factor)] += count
        return MetaStep(windows, work)

    @property
    def flops(self) -> int:
        """Arithmetic operations of matrix products, convolutions and attention."""
        return sum(flops * count for (flops, _), count in self.operators.items())

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Return the least time of all operators: each takes as long as its arithmetic, and as its memory traffic."""
        return sum(
            max(flops / flops_per_s, nbytes / bytes_per_s) * count
            for (flops, nbytes), count in self.operators.items()
        )


def measure_step(
    model: nn.Module,
    batch: Any,
    modules: Collection[str],
    *,
    dtype: torch.dtype,
    recomputed: Collection[str] = (),
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> MetaStep:
    """Run a copy of a model forward and backward on the meta device.

    Args:
        model: on the meta device.
        batch: arguments of the forward, on the meta device: a tuple, a dict of keyword arguments, or one tensor.
        modules: names of the modules that get windows of their own.
        dtype: dtype of the gathered weights.
        recomputed: names of the modules whose activations are recomputed in the backward.
        loss: computes the loss from the model's output; None: the output's first number, or the sum of its tensors.

    Raises:
        ArgumentError: if the model cannot run without values.
    """
    # The caller's modes are not those of the training.
    with outside_modes(), without_autocast(), torch.enable_grad():
        return _measured(model, batch, modules, dtype, recomputed, loss)


def _measured(
    model: nn.Module,
    batch: Any,
    modules: Collection[str],
    dtype: torch.dtype,
    recomputed: Collection[str],
    loss: Callable[[Any], torch.Tensor] | None,
) -> MetaStep:
    on_meta = copy.deepcopy(model).to("meta")
    for param in on_meta.parameters():
        if param.is_floating_point():
            param.data = param.data.to(dtype)
    meter = _Meter()
    attention = _Attention(meter)
    for inner in map(on_meta.get_submodule, models_of_transformers(on_meta)):
        transformers = sys.modules["transformers"]
        transformers.AttentionInterface.register(_ATTENTION, attention.of_transformers)
        cast(Any, inner).set_attn_implementation(_ATTENTION)
        if recomputed:  # it would append to a cache of keys and values again
            cast(Any, inner).config.get_text_config(decoder=True).use_cache = False
    for name in modules:
        meter.watch(on_meta.get_submodule(name), name)
    for name in recomputed:
        block = on_meta.get_submodule(name)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    for param in on_meta.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(meter.keep)
    args, kwargs = (
        (batch, {})
        if isinstance(batch, tuple)
        else ((), batch)
        if isinstance(batch, Mapping)
        else ((batch,), {})
    )
    try:
        with ExitStack() as stack:
            stack.enter_context(attention)
            stack.enter_context(meter)
            output = on_meta(*args, **kwargs)
            value = loss(output) if loss is not None else _loss_of(output)
            del output
            meter.enter("", is_backward=True)
            value.backward()
            meter.close()
    except Exception as error:  # any class: the forward is the user's code
        raise ArgumentError(
            "The model cannot run on the meta device, so its activations cannot be measured.",
            expected="a forward and a loss that do not depend on values",
            got=f"{type(error).__name__}: {error}",
            where=type(model).__name__,
            todo="pass a loss or a batch that the model accepts, or batch=None to plan without activations"
            # Some models look for infinities in fp16.
            + ("; or compute in bf16, for which more models can run there" if dtype == torch.float16 else ""),
        ) from error
    return MetaStep(tuple(meter.windows), dict(meter.operators))


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model is a `PreTrainedModel` of transformers."""
    transformers = sys.modules.get("transformers")  # not imported: then the model is none of its
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def models_of_transformers(model: nn.Module) -> list[str]:
    """Return the names of the outermost models of transformers: "" for the model itself, or those that it wraps.

    A model of peft wraps one, for example.
    """
    found: list[str] = []
    for name, module in model.named_modules():  # outer modules come first
        outer = tuple(f"{each}." if each else "" for each in found)
        if is_of_transformers(module) and not f"{name}.".startswith(outer):
            found.append(name)
    return found


def _loss_of(output: Any) -> torch.Tensor:
    """Return the first number among the outputs, or the sum of all outputs."""
    tensors = [
        each for each in pytree.tree_leaves(output) if isinstance(each, torch.Tensor) and each.requires_grad
    ]
    numbers = [each for each in tensors if each.ndim == 0]
    return numbers[0] if numbers else torch.stack([each.sum() for each in tensors]).sum()


class StorageMeter(TorchDispatchMode):
    """Counts the bytes of the storages that operators create.

    Attributes:
        peak: the most bytes at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        # Keyed by address. A freed storage is removed, because a new one may get its address.
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._given: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # storages that were there before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        for tensor in given:
            self._note_given(tensor)
        result = _result_of(func, args, kwargs or {})
        made = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
        for tensor in made:
            self._see(tensor)
        if not func.is_view and made:
            self._ran(func, args, kwargs or {}, result, [*given, *made])
        return result

    def _note_given(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        if key not in self._alive and key not in self._given:
            self._given[key] = weakref.ref(storage, lambda ref: self._given.pop(key))

    def _see(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        nbytes = storage.nbytes()
        if key in self._alive or key in self._given:
            return

        def gone(ref: object) -> None:
            del self._alive[key]
            self._live -= nbytes

        self._alive[key] = weakref.ref(storage, gone)
        self._live += nbytes
        self._grown()

    def _grown(self) -> None:
        self.peak = max(self.peak, self._live)

    def _ran(self, func: Any, args: Any, kwargs: Any, result: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Called for each operator but views, with all its tensors."""


def _result_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator; a grouped product of any dtype as in bf16, the only one that torch has on the meta device."""
    if func.name() != "aten::_grouped_mm" or not args[0].is_meta:
        return func(*args, **kwargs)
    as_bf16 = [each.to(torch.bfloat16) for each in args[:2]]  # not counted: the mode is off here
    return func(*as_bf16, *args[2:], **kwargs | {"out_dtype": None}).to(args[0].dtype)


class _Meter(StorageMeter):
    """Counts the bytes of all storages, by window, and the work of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.windows: list[Window] = []
        self.operators: Counter[tuple[int, int]] = Counter()
        self._kept_bytes = 0
        self._kept: list[torch.Tensor] = []  # unsharded gradients of this window
        self._open: list[str] = [""]  # modules whose forward runs, outermost first
        self._name, self._is_backward = "", False  # of this window
        self._bare_peak = self._kept_at_peak = 0

    def _ran(self, func: Any, args: Any, kwargs: Any, result: Any, tensors: Sequence[torch.Tensor]) -> None:
        self.count(_flops_of(func, args, kwargs, result), tensors)

    def count(self, flops: int, tensors: Sequence[torch.Tensor]) -> None:
        """Count an operator that reads or writes these tensors, each once."""
        nbytes = {
            (storage_id(each), each.storage_offset()): each.numel() * each.element_size() for each in tensors
        }
        self.operators[flops, sum(nbytes.values())] += 1

    def _grown(self) -> None:
        # Kept gradients are alive, too.
        if self._live > self.peak:
            self.peak, self._kept_at_peak = self._live, self._kept_bytes
        self._bare_peak = max(self._bare_peak, self._live - self._kept_bytes)

    def keep(self, param: torch.Tensor) -> None:
        """Keep a parameter's gradient until the window ends."""
        assert param.grad is not None
        self._kept_bytes += param.grad.numel() * param.grad.element_size()
        self._kept.append(param.grad)
        param.grad = None

    # -- windows --------------------------------------------------------------------------------------

    def watch(self, module: nn.Module, name: str) -> None:
        """Give a module windows of its own."""

        def begin(*unused: Any) -> None:
            if not self._is_backward:  # else it is recomputed
                self._open.append(name)
                self.enter(name, is_backward=False)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if self._is_backward:
                return
            self._open.pop()
            self.enter(self._open[-1], is_backward=False)
            for tensor in pytree.tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda grad: self.enter(name, is_backward=True))

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

    def enter(self, name: str, *, is_backward: bool) -> None:
        """End the window and begin another one, unless it is this one."""
        if (name, is_backward) != (self._name, self._is_backward):
            self.close()
            self._begin(name, is_backward=is_backward)

    def close(self) -> None:
        """End the window, and free its gradients."""
        grad_bytes, self._kept_bytes = self._kept_bytes, 0
        self._kept.clear()
        self.windows.append(
            Window(
                self._name,
                self._is_backward,
                self.peak,
                self._kept_at_peak,
                self._bare_peak,
                grad_bytes,
                self._live,
            )
        )

    def _begin(self, name: str, *, is_backward: bool) -> None:
        self._name, self._is_backward = name, is_backward
        self.peak = self._bare_peak = self._live
        self._kept_at_peak = 0


def _flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the arithmetic operations of an operator, 0 unless it multiplies matrices."""
    if func.name() == "aten::_grouped_mm":
        # Each row of one side meets one matrix: forward [rows, k] x [experts, k, n], weights [m, rows] x [rows, n].
        left, right = args[:2]
        return 2 * left.shape[0] * left.shape[1] * right.shape[-1]
    formula = flop_registry.get(func.overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


# -- attention ----------------------------------------------------------------------------------------


class _Attention(TorchFunctionMode):
    """Replaces scaled dot product attention by what flash attention allocates and computes."""

    def __init__(self, meter: _Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._of_torch(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _of_torch(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **unused: Any,
    ) -> torch.Tensor:
        return self._flash(query, key, value, is_causal=is_causal)

    def of_transformers(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        *,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, None]:
        """The formula as an attention function of transformers, which returns [batch, queries, heads, dim]."""
        if is_causal is None:
            is_causal = bool(vars(module).get("is_causal", True))
        result = self._flash(query, key, value, is_causal=is_causal, window=sliding_window)
        return result.transpose(1, 2), None

    def _flash(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the output [batch, heads, queries, dim] of inputs with the same order of dims."""
        batch, heads, num_queries, dim = query.shape
        num_keys = min(key.shape[-2], window or key.shape[-2])
        is_halved = is_causal and num_keys == num_queries  # half of all pairs are masked
        flops = 2 * batch * heads * num_queries * num_keys * (dim + value.shape[-1]) // (1 + is_halved)
        result: torch.Tensor = _Flash.apply(self._meter, flops, query, key, value)  # type: ignore[no-untyped-call]
        return result


class _Flash(torch.autograd.Function):
    """Allocates what flash attention allocates, and counts its work."""

    @staticmethod
    def forward(
        ctx: Any, meter: _Meter, flops: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        batch, heads, num_queries, _ = query.shape
        # The kernel writes [batch, queries, heads, dim].
        output = query.new_empty(batch, num_queries, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(batch, heads, num_queries, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.meter, ctx.flops = meter, flops
        meter.count(flops, [query, key, value, output])
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, output, _ = ctx.saved_tensors
        result = tuple(torch.empty_like(each) for each in (query, key, value))
        # Five products instead of two: the scores are computed again.
        ctx.meter.count(ctx.flops * 5 // 2, [query, key, value, output, *grads, *result])
        return None, None, *result
