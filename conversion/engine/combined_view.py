"""`CombinedView`: a tensor that is computed, item by item, from tensors of several sources, such as their average.

The computation is a program in postfix order, as Python's compiler would order it:

    base + 0.7 * (tuned - base)        0  0.7  1  0  -  *  +         0 and 1 are the numbers of the inputs

All inputs are converted to one float type, in which every operation rounds once, and the result is rounded to the type
of the tensor. The bits are those of the same expression with tensors of torch on a CPU.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from vescale_fsdp.conversion.engine.stored_tensor import TensorInfo
from vescale_fsdp.conversion.engine.tensor_view import SourceView, TensorView
from vescale_fsdp.layout.dtypes import DType
from vescale_fsdp.layout.geometry import Box, round_up

if TYPE_CHECKING:
    import numpy as np

Step = int | float | str
"""One step of a program: the number of an input (int), a number (float), or an operator of `OPERATORS` or `NEGATE`."""

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
NEGATE = "negate"
_BLOCK_ITEMS = 1 << 16  # small enough for the cache


class Scratch(threading.local):
    """Memory of each thread for a view's inputs and intermediate values, since allocating it takes time."""

    buffer: np.ndarray | None = None

    def arrays(self, wanted: Sequence[tuple[int, DType]]) -> list[np.ndarray]:
        """Return an array of raw items for each (number of items, dtype), valid until the thread's next call."""
        import numpy as np

        sizes = [numel * dtype.itemsize for numel, dtype in wanted]
        offsets = [*accumulate((round_up(size, 64) for size in sizes), initial=0)]
        if self.buffer is None or self.buffer.nbytes < offsets[-1]:
            self.buffer = None  # freed before the larger one is allocated
            self.buffer = np.empty(offsets[-1], dtype=np.uint8)
        return [
            self.buffer[start : start + size].view(dtype.raw)
            for start, size, (_, dtype) in zip(
                offsets, sizes, wanted, strict=False
            )  # the last offset is the end
        ]


@dataclass(frozen=True, eq=False)  # eq=False: a dict cannot be hashed
class CombinedView(TensorView):
    """A float tensor that is computed from float tensors of the same shape. It has the name of the first input.

    Args:
        inputs: the tensors, each once.
        steps: the program.
        compute_dtype: float32 or float64, the type of all operations.
        dtype: the type of the result.
        scratch: shared by all views of a conversion.
        lost: filled by reads: box -> number of finite values in the box that the last rounding made infinite.
    """

    inputs: tuple[TensorView, ...]
    steps: tuple[Step, ...]
    compute_dtype: DType
    dtype: DType
    scratch: Scratch = field(repr=False)
    lost: dict[Box, int] = field(default_factory=dict, repr=False)

    @property
    def info(self) -> TensorInfo:
        first = self.inputs[0].info
        return TensorInfo(first.name, first.shape, self.dtype)

    def as_dtype(self, dtype: DType) -> TensorView:
        return replace(self, dtype=dtype, lost={})

    def read_into(self, box: Box, out: np.ndarray) -> None:
        import numpy as np

        from vescale_fsdp.conversion.quantization.float_codes import cast_into

        dtypes = [view.info.dtype for view in self.inputs]
        registers = min(box.numel, _BLOCK_ITEMS), self.compute_dtype
        arrays = self.scratch.arrays(
            [*((box.numel, dtype) for dtype in dtypes), *[registers] * _depth(self.steps)]
        )
        raws, stack = arrays[: len(dtypes)], arrays[len(dtypes) :]
        for view, raw in zip(self.inputs, raws, strict=True):
            view.read_into(box, raw.reshape(box.sizes))
        flat = (out if out.flags.c_contiguous else np.empty(box.sizes, dtype=out.dtype)).reshape(-1)
        number = np.dtype(self.compute_dtype.name).type
        lost = 0
        with np.errstate(over="ignore", invalid="ignore"):  # as in torch
            for start in range(0, box.numel, _BLOCK_ITEMS):
                block = slice(start, start + _BLOCK_ITEMS)

                def load(index: int, into: np.ndarray, block: slice = block) -> np.ndarray:
                    """Return a block of an input, converted where it is used, so that few values are in the cache."""
                    raw, dtype = raws[index][block], dtypes[index]
                    if dtype == self.compute_dtype:
                        return raw.view(number)
                    cast_into(raw, dtype, into.view(self.compute_dtype.raw), self.compute_dtype)
                    return into

                numel = min(_BLOCK_ITEMS, box.numel - start)
                values = _run(self.steps, load, number, [each[:numel].view(number) for each in stack])
                result = values.view(self.compute_dtype.raw)
                lost += cast_into(result, self.compute_dtype, flat[block], self.dtype)
        if not out.flags.c_contiguous:
            out[...] = flat.reshape(box.sizes)
        if lost:
            self.lost[box] = lost  # by box, so that a second read of a box is not counted again

    @property
    def operands(self) -> tuple[TensorView, ...]:
        return self.inputs

    @property
    def scratch_buffers(self) -> int:
        ratios = [view.info.dtype.itemsize / self.dtype.itemsize for view in self.inputs]
        # The bytes of all inputs at the same time, the scratch buffers of the input that is being read, and one buffer
        # for intermediate values, which take less.
        own = sum(ratios) + max(ratios) * max(view.scratch_buffers for view in self.inputs) + 1
        return math.ceil(own)

    def over(self, leaf: Callable[[SourceView], TensorView]) -> TensorView:
        return self.inputs[0].over(leaf)

    @property
    def overflows(self) -> int:
        return sum(self.lost.values()) + super().overflows

    def identity(self) -> str:
        inputs = ", ".join(view.identity() for view in self.inputs)
        return f"{self.steps} in {self.compute_dtype.name} as {self.dtype.name} of {inputs}"


def _depth(steps: Sequence[Step]) -> int:
    """Return the largest number of values that a program has at the same time."""
    changes = (0 if step == NEGATE else -1 if isinstance(step, str) else 1 for step in steps)
    return max(accumulate(changes))


def _run(
    steps: tuple[Step, ...],
    load: Callable[[int, np.ndarray], np.ndarray],
    number: Callable[[float], Any],
    registers: Sequence[np.ndarray],
) -> np.ndarray:
    """Run a program.

    Args:
        load: returns the values of an input, in the array that it is passed or in another one.
        number: returns a number in the type of operations.
        registers: memory for the values at each level of the stack.
    """
    import numpy as np

    functions = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}
    stack: list[Any] = []
    for step in steps:
        if isinstance(step, str):
            right = stack.pop()
            if step == NEGATE:
                stack.append(np.negative(right, out=registers[len(stack)]))
            else:
                left = stack.pop()
                stack.append(functions[step](left, right, out=registers[len(stack)]))
        else:
            stack.append(load(step, registers[len(stack)]) if isinstance(step, int) else number(step))
    (result,) = stack
    return result
