"""The staging buffer: asked for once, filled exactly, pinned where tensors come from a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vescale_fsdp.checkpoint import CheckpointManager, load
from vescale_fsdp.checkpoint.state.host_copies import Stager


def _tensors(size: int) -> list[torch.Tensor]:
    return [
        torch.arange(float(size)),
        torch.arange(float(size)).reshape(2, -1).t(),
        torch.full((size,), 1.5, dtype=torch.bfloat16),
        torch.full((3,), 2.0).to(torch.float8_e4m3fn),
        torch.arange(size % 16, dtype=torch.uint8).view(torch.uint4),  # which torch cannot copy
        torch.empty(0),
        torch.tensor(True),
    ]


def _values(tensor: torch.Tensor) -> Any:
    return (tensor.view(torch.uint8) if tensor.dtype is torch.uint4 else tensor).tolist()


def test_memory_is_asked_for_once() -> None:
    """Equal and smaller states copy into the memory of the first; a larger one asks for more, the old given back."""
    asked: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        assert not stager._views and not stager._buffer.numel()  # nothing holds the old memory
        return torch.full((num_bytes,), 7, dtype=torch.uint8)

    stager = Stager(allocate)
    for size in (100, 100, 50, 200, 100):
        tensors = _tensors(size)
        staged, _ = stager.stage(tensors)
        for tensor, copy in zip(tensors, staged, strict=True):
            assert (tensor.shape, tensor.dtype) == (copy.shape, copy.dtype) and copy.is_contiguous()
            assert _values(tensor) == _values(copy)
            assert not tensor.numel() or tensor.data_ptr() != copy.data_ptr()
    assert len(asked) == 2 and asked == [448 + 448 + 256 + 3 * 64, 832 + 832 + 448 + 3 * 64]


def test_equal_shapes_of_other_dtypes() -> None:
    """What is kept from call to call fits the dtypes as well; a failed allocation leaves nothing of it behind."""

    def allocate(num_bytes: int) -> torch.Tensor:
        if num_bytes > 1 << 10:
            raise MemoryError(f"no {num_bytes} bytes")
        return torch.zeros(num_bytes, dtype=torch.uint8)

    stager = Stager(allocate)
    for dtype in (torch.float32, torch.int32, torch.float32):
        assert stager.stage([torch.ones(5, dtype=dtype)])[0][0].dtype == dtype
    with pytest.raises(MemoryError):
        stager.stage([torch.ones(1 << 10)])
    assert stager.stage([torch.full((5,), 3.0)])[0][0].tolist() == [3.0] * 5


@pytest.mark.gpu
def test_a_gpu_state_is_staged_in_pinned_memory(tmp_path: Any) -> None:
    """Values are those of the call, although the GPU goes on at once; the buffer is pinned."""
    state = {"w": torch.arange(1 << 22, device="cuda", dtype=torch.float32), "b": torch.ones(7)}
    expected = {name: value.cpu().clone() for name, value in state.items()}
    manager = CheckpointManager(tmp_path, asynchronous=True)
    manager.save(1, state)
    state["w"].zero_()
    state["b"].zero_()
    manager.wait()
    assert manager._async is not None and manager._async._stager._buffer.is_pinned()
    load(tmp_path / "step-00000001", state)
    for name, value in expected.items():
        assert torch.equal(value, state[name].cpu())
