"""AdamW whose two moments are 8-bit codes with one scale per block: 2.03 bytes of state per parameter.

The codes of a moment are a uint8 tensor with the parameter's placements. Its scales are an fp32 tensor with one value
per block, cut between the same blocks as the parameter. If a rank boundary cuts a block, the constructor raises.
Otherwise a step needs no communication, and its result has the same bits on 1 and on N ranks.

State is 8-bit if the parameter is 2-D or above, has at least ``min_8bit_numel`` elements over all ranks, and is in a
group without ``state_bits=32``. All other state is fp32. The size of a rank's piece does not matter, since precision
would then depend on the number of ranks. The arithmetic is torchao's: decode, update both moments in fp32, step the
parameter with the unrounded moments, encode.

If the gradient of an element is NaN or infinite, this element of the parameter becomes NaN, as in AdamW. The other
elements of its block do not: the element's moments are stored as 0, so that the block's scale stays finite.

Codes use the dynamic 8-bit map of block-wise optimizers (Dettmers et al., arXiv 2110.02861): 256 values in [-1, 1]. The
map has seven decades. Decade i has 2^i points per sign (2^(i+1) in the unsigned map): the midpoints of equal steps over
[0.1, 1], times 10^(i - 6). The values 0 and 1 are added. So steps are fine for small values and coarse for large ones.
First moments use the signed map, second moments the unsigned map. A block is stored as one fp32 scale, its largest
magnitude, and one code per element: the index of the map's value that is nearest to element / scale. Tables and
rounding have the same bits as torchao's (a test compares them). torchao itself is not used: it does not support a short
last block, and its import loads kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from vescale_fsdp.dtensor.piece_map import (
    contiguous_pieces_of,
    local_grad,
    local_tensor,
    name_of,
    zeros_sharded_with,
)
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import numel_of
from vescale_fsdp.layout.granularity import Element, Flat, Granularity, Tiles
from vescale_fsdp.lazy import set_module
from vescale_fsdp.optim.structured_optimizer import AdamWOptions, BatchedOptimizer, check_rates
from vescale_fsdp.quantize.codec import BlockGrid, grid_of
from vescale_fsdp.torch_modes import CompiledFunction
from vescale_fsdp.torch_private import foreach_copy_

MAP_NAME = "dynamic8"
"""The map's name in checkpoints. The table is computed, never stored."""

_DECADES = 7  # of the published map, and of torchao's
_LEAST_SCALE = 1e-12  # scale of a block of zeros, as in torchao: avoids a division by zero


@lru_cache(maxsize=16)  # one entry per device and map
def dynamic_map(signed: bool, device: torch.device) -> torch.Tensor:
    """Return the 256 values of the dynamic 8-bit map in ascending order, fp32: code i stands for entry i."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        points = torch.linspace(
            0.1, 1, 2 ** (decade if signed else decade + 1) + 1, dtype=torch.float32, device="cpu"
        )
        middles = (10.0 ** (decade - _DECADES + 1) * ((points[:-1] + points[1:]) / 2)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@lru_cache(maxsize=16)  # one entry per device and map
def _thresholds(signed: bool, device: torch.device) -> torch.Tensor:
    """Compute the 255 thresholds between codes: entry i is the least fp32 number that is rounded to code i + 1.

    As in torchao, a number x between entries a < b of the map is rounded up if ``x - a >= (b - a) * 0.5`` in fp32. This
    is monotone in x, so one comparison with the least such x gives the same code. The search for the least x starts at
    the midpoint of a and b, and moves by one fp32 number at a time.
    """
    table = dynamic_map(signed, torch.device("cpu"))
    low, high = table[:-1], table[1:]
    up, down = torch.tensor([torch.inf, -torch.inf], dtype=torch.float32, device="cpu")

    def rounds_up(x: torch.Tensor) -> torch.Tensor:
        """Return whether each x is rounded to the higher of its two entries."""
        return x - low >= (high - low) * 0.5

    x = (low + high) / 2  # due to rounding, the least x may be some fp32 numbers above or below
    while not rounds_up(x).all():
        x = torch.where(rounds_up(x), x, torch.nextafter(x, up))
    while rounds_up(torch.nextafter(x, down)).any():
        below = torch.nextafter(x, down)
        x = torch.where(rounds_up(below), below, x)
    return x.to(device)


_LAST_BIN = 127 << 7  # of 1
_NUM_BINS = 1 << 15  # per sign


@lru_cache(maxsize=16)  # one entry per device and map
def _bins(signed: bool, device: torch.device) -> torch.Tensor:
    """Compute a table from which one look-up gives the code of a number in [-1, 1].

    A bin has all numbers of one sign whose fp32 bits have the same upper half: the 65,536 numbers between neighbors of
    7 mantissa bits. Bins are so narrow that no bin has two thresholds. Let ``rank`` be the rank of a number in its bin,
    in ascending order. If the bin's least number has code c, and the first number with code c + 1 has rank t, the entry
    is ``(c << 16) + 0x10000 - t``; without a threshold it is ``c << 16``. So ``(entry + rank) >> 16`` is the code.

    Returns:
        int32 [bins], indexed by the upper half of a number's bits. The unsigned map has no bins of negative numbers.
    """
    thresholds = _thresholds(signed, torch.device("cpu"))
    # Numbers beyond [-1, 1] and NaN get the codes of the ends: compiled look-ups do not check that indices are in
    # bounds, so all upper halves are in the table.
    uppers = torch.arange(_NUM_BINS, dtype=torch.int32, device="cpu").clamp(max=_LAST_BIN) << 16
    tables = []
    for sign in (1.0, -1.0) if signed else (1.0,):
        by_magnitude = [sign * (uppers | lower).view(torch.float32) for lower in (0, 0xFFFF)]
        least, most = by_magnitude if sign > 0 else by_magnitude[::-1]
        code, last_code = (
            torch.bucketize(each, thresholds, out_int32=True, right=True) for each in (least, most)
        )
        assert (last_code - code <= 1).all()
        lower = thresholds[code.clamp(max=254)].view(torch.int32) & 0xFFFF
        rank = lower if sign > 0 else 0xFFFF - lower
        tables.append((code << 16) + torch.where(last_code > code, 0x10000 - rank, 0))
    return torch.cat(tables).to(device)


class DynamicMap(NamedTuple):
    """The tables of a map on a device. Compiled code takes them as arguments, since it cannot use a cache."""

    values: torch.Tensor  # 1D [256], of `dynamic_map`
    bins: torch.Tensor  # 1D [bins], of `_bins`

    @staticmethod
    def of(signed: bool, device: torch.device) -> DynamicMap:
        """Return the tables of the signed or unsigned map."""
        return DynamicMap(dynamic_map(signed, device), _bins(signed, device))


def _look_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return ``table[index]`` for an int32 index without negative numbers."""
    # `table[index]` compiles to more operations: it converts the index to int64, and adds to negative numbers.
    return F.embedding(index, table[:, None]).squeeze(-1)


def _codes_of(values: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
    """Return the uint8 codes of fp32 values in [-1, 1]: one look-up, instead of a search by eight comparisons."""
    bits = values.view(torch.int32)
    entries = _look_up(bins, (bits >> 16) & (len(bins) - 1))
    if len(bins) > _NUM_BINS:  # the signed map
        bits = bits ^ (bits >> 31)  # among negative numbers, a larger magnitude has a lower rank
    return ((entries + (bits & 0xFFFF)) >> 16).to(torch.uint8)


def zero_code(signed: bool) -> int:
    """Return the code of the value 0."""
    return 127 if signed else 0  # the signed map has 127 values below 0


def encoded(tiles: torch.Tensor, map_: DynamicMap) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize blocks: one fp32 scale per block, and one code per element.

    Args:
        tiles: [bands, rows, blocks, cols] as `BlockGrid.tiled` returns them, fp32, finite.
        map_: the tables on the device of ``tiles``.

    Returns:
        uint8 codes with the shape of ``tiles``, fp32 scales [bands, blocks].
    """
    scales = tiles.abs().amax((1, 3)).clip(_LEAST_SCALE)
    return _codes_of(tiles / scales[:, None, :, None], map_.bins), scales


def decoded(codes: torch.Tensor, scales: torch.Tensor, map_: DynamicMap) -> torch.Tensor:
    """Dequantize blocks: the fp32 values of codes and scales, which have the shapes that `encoded` returns."""
    return _look_up(map_.values, codes.int()) * scales[:, None, :, None]


_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether each moment uses the signed map


@set_module("vescale_fsdp.optim")
class AdamW8bit(BatchedOptimizer):
    """AdamW with block-wise 8-bit state (arXiv 2110.02861).

    Args:
        params: parameters or param groups. A group with ``state_bits=32`` has fp32 state, which embeddings need in some
            models.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`, with its defaults.
        block: elements that share a scale: ``Flat(256)``, ``Tiles(32, 32)``, ... The last block may be short.
        min_8bit_numel: parameters with fewer elements (over all ranks) have fp32 state.
        compiled: step with functions of `torch.compile`, one per shape of block and dtype. They are compiled at the
            first step, and round differently from eager steps in the last bit. A process that cannot compile warns
            once, and steps eagerly.

    Raises:
        LayoutError: if a rank boundary cuts a block, or the arguments are not valid.

    Examples:
        >>> from vescale_fsdp import fully_shard
        >>> model = fully_shard(torch.nn.Linear(64, 64), granularity=AdamW8bit.granularity())
        >>> optimizer = AdamW8bit(model.parameters(), lr=1e-3, min_8bit_numel=4096)
        >>> model(torch.randn(2, 64)).sum().backward()
        >>> optimizer.step()
    """

    algorithm: ClassVar[str] = "adamw8bit"
    recorded: ClassVar[tuple[str, ...]] = ("state_bits", "state_block", "state_map", "min_8bit_numel")
    pickled: ClassVar[tuple[str, ...]] = ("_adamw", "_block", "_compiled")
    _compiled: bool = False  # of optimizers that were pickled without it

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block: Flat | Tiles = Flat(256),  # noqa: B008  (frozen)
        min_8bit_numel: int = 4096,
        compiled: bool = False,
    ) -> None:
        check_rates(float(lr), betas, eps, weight_decay)  # float, since a learning rate may be a tensor
        grid_of((1,), block)  # raises if `block` is neither Flat nor Tiles
        self._block = block
        self._compiled = compiled
        # As text, because every checkpoint format can store text; `parse_granularity` reads this text.
        text = f"flat:{block.numel}" if isinstance(block, Flat) else f"tiles:{block.rows}x{block.cols}"
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "state_bits": 8,
            "state_block": text,
            "state_map": MAP_NAME,
            "min_8bit_numel": min_8bit_numel,
        }
        super().__init__(params, defaults, adamw_params=None, adamw=AdamWOptions())

    @staticmethod
    def granularity(
        *,
        block: Flat | Tiles = Flat(256),  # noqa: B008  (frozen)
        min_8bit_numel: int = 4096,
    ) -> Callable[[str, Any], Granularity]:
        """Make a rule that keeps quantization blocks whole, for ``fully_shard(model, granularity=...)``.

        Args:
            block, min_8bit_numel: the same values as for the optimizer.
        """
        return lambda fqn, param: block if _is_8bit(tuple(param.shape), 8, min_8bit_numel) else Element()

    def _init_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Make the initial state of a parameter: a step count, and two moments as codes and scales or in fp32."""
        if group["state_bits"] not in (8, 32):
            raise LayoutError(
                "Optimizer state has 8 or 32 bits.",
                expected="state_bits=8 or state_bits=32",
                got=group["state_bits"],
                todo="correct state_bits of the param group",
            )
        # The step count is on the host, as in torch's AdamW, so that reading it does not wait for a device.
        state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
        if not _is_8bit(tuple(param.shape), group["state_bits"], group["min_8bit_numel"]):
            return state | {name: torch.zeros_like(param, dtype=torch.float32) for name in _MOMENTS}
        pieces = contiguous_pieces_of(param, "state_bits=32 in its param group")
        grid = grid_of(tuple(param.shape), self._block)
        numels = pieces.count_in_blocks(grid.band_numel, lambda piece: grid.scales_of(piece, name_of(param)))
        for name, signed in _MOMENTS.items():
            # Not zeros: in the signed map, code 0 stands for -1.
            state[f"{name}_codes"] = torch.full_like(param, zero_code(signed), dtype=torch.uint8)
            state[f"{name}_scales"] = zeros_sharded_with(param, pieces, grid.scales_shape, numels)
        return state

    def _step_groups(self, groups: list[dict[str, Any]]) -> None:
        # By param group, step count and device.
        self._fixed: dict[Hashable, tuple[list[DynamicMap], _Rates]] = {}
        super()._step_groups(groups)

    def _batch_numel(self, group: dict[str, Any]) -> int:
        launches = super()._batches_on
        is_launched = any(launches(param.device) for param in group["params"])
        return super()._batch_numel(group) if is_launched else _CPU_BATCH_NUMEL

    def _batches_on(self, device: torch.device) -> bool:
        # On the CPU too: the call of a compiled function takes longer than its work on a small parameter.
        return self._compiled or super()._batches_on(device)

    def _kind(self, param: torch.Tensor) -> Hashable:
        """Return the shape of a parameter's blocks, as part of the key of its batch; empty for fp32 state."""
        # Blocks are concatenated along the first dim, so all other dims of a batch must be equal. Parameters with fp32
        # state are stepped as flat elements, so their batch may have parameters of any shapes.
        stepped = self._stepped(param)
        grid = stepped.grid
        return (grid.rows, grid.scales_per_band, grid.cols) if stepped.is_8bit else ()

    def _stepped(self, param: torch.Tensor) -> _Stepped:
        """Return the parameter with its state and its grid of blocks."""
        return _Stepped(param, self.state[param], _grid_of(tuple(param.shape), self._block))

    def _step_batch(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        """Step a batch of parameters: as blocks padded with zeros if their state is 8-bit, else as flat elements."""
        batch = [self._stepped(param) for param in params]
        locals_ = [local_tensor(each.param) for each in batch]
        if not any(local.numel() for local in locals_):
            return
        values = _joined([each.laid_out(local) for each, local in zip(batch, locals_, strict=True)])
        grad = _joined([each.laid_out(local_grad(each.param)) for each in batch])
        moments = [_load(batch, name) for name in _MOMENTS]
        # The step count is equal for all parameters of a batch.
        fixed = self._fixed_of(group, batch[0].state["step"], values.device)
        if self._compiled:
            _UPDATE(values, grad, moments, fixed=fixed)
        else:
            _update(values, grad, moments, *fixed)
        if len(batch) == 1 and batch[0].is_view(locals_[0].numel()):
            return  # the update has written into the parameter and its state
        _write(batch, locals_, values)
        for name, parts in zip(_MOMENTS, moments, strict=True):
            _save(batch, name, parts)

    def _fixed_of(
        self, group: Mapping[str, Any], step: torch.Tensor, device: torch.device
    ) -> tuple[list[DynamicMap], _Rates]:
        """Return both maps on a device, and the rates of a param group. Computed once for all batches of a step."""
        key = id(group), float(step), device
        if key not in self._fixed:
            rates = _rates_of(group, step)
            maps = [DynamicMap.of(signed, device) for signed in _MOMENTS.values()]
            self._fixed[key] = maps, rates.as_tensors() if self._compiled else rates
        return self._fixed[key]


class _Rates(NamedTuple):
    """The rates of a step. Floats or fp32 tensors without dims; with the same values, both give the same rounding."""

    lr: torch.Tensor
    weight_decay: Any
    eps: Any
    weight1: Any  # of a new gradient in the average: 1 - beta1
    weight2: Any
    correction1: torch.Tensor  # of the average's bias
    correction2: torch.Tensor

    def as_tensors(self) -> _Rates:
        """Return all rates as tensors, so that compiled code is the same for all values."""
        return _Rates(
            *(
                rate.to(torch.float32)
                if isinstance(rate, torch.Tensor)
                else torch.tensor(rate, dtype=torch.float32, device="cpu")
                for rate in self
            )
        )


def _rates_of(group: Mapping[str, Any], step: torch.Tensor) -> _Rates:
    """Return the rates of a param group in a step, with a step count on the host."""
    beta1, beta2 = group["betas"]
    # As an fp32 tensor, so that a float and a tensor as learning rate give the same rounding.
    lr = group["lr"]
    home = lr.device if isinstance(lr, torch.Tensor) else "cpu"
    lr = torch.as_tensor(lr, dtype=torch.float32, device=home)
    corrections = 1 - beta1**step, 1 - beta2**step
    return _Rates(lr, group["weight_decay"], group["eps"], 1 - beta1, 1 - beta2, *corrections)


_LARGEST = torch.finfo(torch.float32).max


def _update(
    values: torch.Tensor,
    grad: torch.Tensor,
    moments: Sequence[Sequence[torch.Tensor]],
    maps: Sequence[DynamicMap],
    rates: _Rates,
) -> None:
    """Step values and their moments in place. All tensors but the scales have the shape of `_Stepped.laid_out`.

    Args:
        values, grad: of any floating-point dtype.
        moments: the tensors of both moments, as `_load` returns them.
        maps: the maps of both moments.
        rates: the rates of this step.
    """
    grad = grad.float()
    before = [
        parts[0] if len(parts) == 1 else decoded(parts[0], parts[1], map_)
        for parts, map_ in zip(moments, maps, strict=True)
    ]
    exp_avg = before[0].lerp(grad, rates.weight1)
    exp_avg_sq = before[1].lerp(grad.square(), rates.weight2)
    wide = values.float()
    decayed = wide - rates.lr * rates.weight_decay * wide
    denominator = (exp_avg_sq.sqrt() / rates.correction2.sqrt()) + rates.eps
    values.copy_(decayed - rates.lr * (exp_avg / rates.correction1) / denominator)
    for parts, map_, moment in zip(moments, maps, (exp_avg, exp_avg_sq), strict=True):
        if len(parts) == 1:
            parts[0].copy_(moment)
            continue
        # 0 for elements without a finite gradient: a NaN would make the block's scale NaN, and so the whole block.
        # Clamped, because the square of a finite gradient may be infinite.
        finite = torch.where(grad.isfinite(), moment, 0.0).clamp(-_LARGEST, _LARGEST)
        for target, values in zip(parts, encoded(finite, map_), strict=True):
            target.copy_(values)


# Maximum elements of a compiled batch on the CPU. Larger parameters are stepped alone, without copies into a batch.
_CPU_BATCH_NUMEL = 1 << 15
_UPDATE = CompiledFunction(_update, for_small=True)
_grid_of = lru_cache(maxsize=1 << 12)(grid_of)  # every step needs the grids of all parameters


class _Stepped(NamedTuple):
    """A parameter in one step, with its state and its grid of blocks."""

    param: torch.Tensor
    state: dict[str, torch.Tensor]
    grid: BlockGrid

    @property
    def is_8bit(self) -> bool:
        """Whether the parameter has 8-bit state."""
        return "exp_avg_codes" in self.state

    def laid_out(self, flat: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Reshape this rank's elements, 1-D, to blocks if the state is 8-bit; ``fill`` pads short blocks."""
        return self.grid.tiled(flat, fill) if self.is_8bit else flat

    def is_view(self, numel: int) -> bool:
        """Return whether `laid_out` returns views of tensors with this rank's ``numel`` elements."""
        return not self.is_8bit or self.grid.is_even(numel)

    def local(self, name: str) -> torch.Tensor:
        """Return this rank's part of a state tensor, 1-D."""
        return local_tensor(self.state[name], "state")


def meta_step(numels: Sequence[int], dtype: torch.dtype, *, is_8bit: bool) -> Callable[[], None]:
    """Return a function that steps pieces as one batch on the meta device, from which plans learn its temporaries.

    Args:
        numels: elements of the pieces.
        dtype: dtype of the parameters and gradients.
        is_8bit: whether the state is 8-bit.
    """
    optimizer = AdamW8bit([torch.zeros(1, dtype=torch.float32, device="cpu")])
    optimizer._fixed = {}
    group = {**optimizer.param_groups[0], "state_bits": 8 if is_8bit else 32, "min_8bit_numel": 0}
    params = [torch.empty(1, numel, dtype=dtype, device="meta") for numel in numels]
    for param in params:
        param.grad = torch.empty_like(param)
        optimizer.state[param] = optimizer._init_state(param, group)
        optimizer.state[param]["step"] += 1
        optimizer._fixed_of(group, optimizer.state[param]["step"], param.device)  # tables last for all steps
    return lambda: optimizer._step_batch(params, group)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors along the first dim; a single tensor is returned itself, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _load(batch: Sequence[_Stepped], name: str) -> list[torch.Tensor]:
    """Return a moment of all parameters of a batch, concatenated in the shape of `_Stepped.laid_out`.

    Returns:
        uint8 codes, and fp32 scales [bands, blocks per line], if the state is 8-bit; else one fp32 tensor.
    """
    if not batch[0].is_8bit:
        return [_joined([each.local(name) for each in batch])]
    fill = zero_code(_MOMENTS[name])
    codes = _joined([each.laid_out(each.local(f"{name}_codes"), fill) for each in batch])
    scales = _joined([each.local(f"{name}_scales").view(-1, each.grid.scales_per_band) for each in batch])
    return [codes, scales]


def _save(batch: Sequence[_Stepped], name: str, parts: Sequence[torch.Tensor]) -> None:
    """Copy a moment, as `_load` returns it, back into the state of the parameters."""
    if not batch[0].is_8bit:
        _write(batch, [each.local(name) for each in batch], parts[0])
        return
    codes, scales = parts
    _write(batch, [each.local(f"{name}_codes") for each in batch], codes)
    if len(batch) > 1:  # those of a single parameter are its state
        targets = [each.local(f"{name}_scales") for each in batch]
        _copy(targets, list(scales.view(-1).split([each.numel() for each in targets])))


def _write(batch: Sequence[_Stepped], targets: Sequence[torch.Tensor], laid_out: torch.Tensor) -> None:
    """Copy a result of the batch, in the shape of `_Stepped.laid_out`, into one 1-D tensor per parameter."""
    if batch[0].is_8bit:
        bands = [each.grid.bands_of(target.numel()) for each, target in zip(batch, targets, strict=True)]
        parts = [
            each.grid.untiled(tiles, target.numel())
            for each, tiles, target in zip(batch, laid_out.split(bands), targets, strict=True)
        ]
    else:
        parts = list(laid_out.split([target.numel() for target in targets]))
    _copy(targets, parts)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, on accelerators with one launch for all."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    else:
        foreach_copy_(list(targets), list(sources))


def _is_8bit(shape: tuple[int, ...], state_bits: int, min_8bit_numel: int) -> bool:
    """Return whether a parameter with this global shape has 8-bit state; vectors (norms, biases) never have."""
    return state_bits == 8 and len(shape) >= 2 and numel_of(shape) >= min_8bit_numel
