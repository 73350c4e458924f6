"""Names of dtypes in manifests, and their types in safetensors files.

A manifest has torch's names of dtypes, without the prefix: ``"bfloat16"``. The table of names, widths and stored types
is `vescale_fsdp.layout.dtypes`. A dtype that is newer than that table is stored as integers.

torch is imported only where a torch dtype is needed: reading a manifest needs only names and widths.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.layout.dtypes import DType, known_dtype

if TYPE_CHECKING:
    import torch

# torch has few kernels for wide unsigned integers, and no integers of 16 bytes.
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


@cache
def _torch_dtypes() -> dict[str, torch.dtype]:
    """Every dtype of this torch by name."""
    import torch

    dtypes = (value for value in vars(torch).values() if isinstance(value, torch.dtype))
    return {str(dtype).removeprefix("torch."): dtype for dtype in dtypes}


@cache
def _torch_names() -> dict[torch.dtype, str]:
    return {dtype: name for name, dtype in _torch_dtypes().items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The manifest's name of a dtype: ``torch.bfloat16`` is ``"bfloat16"``."""
    return _torch_names()[dtype]


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a manifest's name.

    Raises:
        CheckpointError: if this version of torch has no such dtype.
    """
    dtypes = _torch_dtypes()
    if name in dtypes:
        return dtypes[name]
    raise CheckpointError(
        "The checkpoint has a dtype that this version of torch lacks.",
        expected="a dtype of torch, such as 'float32'",
        got=repr(name),
        todo="read it with a torch that has the dtype",
    )


@cache
def stored_dtype(name: str) -> DType:
    """How a dtype is stored: as the table says, or as integers of its width if it is newer than the table.

    Raises:
        CheckpointError: if neither the table nor this version of torch has the dtype.
    """
    return known_dtype(name) or DType(None, name, 8 * dtype_named(name).itemsize, "int")


def is_numpy_dtype(name: str) -> bool:
    """Whether numpy and torch both have a dtype of this name; names with a byte order are of numpy alone."""
    known = known_dtype(name)
    return known is not None and known.is_numpy and known.name == name


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor's memory as bytes, 1D; the tensor must be contiguous and not lazily conjugated or negated."""
    # Not view(-1): one element of a column is contiguous but keeps the column's stride, which view(uint8) refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(dtype_named("uint8"))


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values, contiguous in CPU memory; a view of the tensor where possible, else a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    # Under its carrier dtype: torch has no copy kernels for some dtypes.
    return plain.view(carrier_of(plain.dtype)).cpu().contiguous().view(plain.dtype)


def carrier_of(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same width that every copy kernel supports, which leaves the bits unchanged."""
    return dtype_named(_CARRIERS[dtype.itemsize])
