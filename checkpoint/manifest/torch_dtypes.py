"""Names of dtypes in manifests, and their types in safetensors files.

A manifest has torch's names of dtypes without the prefix ``torch.``, such as ``"bfloat16"``. The table of names, widths
and stored types is `vescale_fsdp.layout.dtypes`. A dtype that this table lacks is stored as integers.

torch is imported only inside functions that need a torch dtype: reading a manifest needs only names and widths.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.layout.dtypes import DType, known_dtype

if TYPE_CHECKING:
    import torch

# Item size -> carrier dtype, see `carrier_of`. Signed, because torch has few kernels for wide unsigned integers;
# complex128, because torch has no integers of 16 bytes.
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


@cache
def _torch_dtypes() -> dict[str, torch.dtype]:
    """Return every dtype of the installed torch by name."""
    import torch

    dtypes = (value for value in vars(torch).values() if isinstance(value, torch.dtype))
    return {str(dtype).removeprefix("torch."): dtype for dtype in dtypes}


@cache
def _torch_names() -> dict[torch.dtype, str]:
    return {dtype: name for name, dtype in _torch_dtypes().items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the manifest's name of a dtype, such as ``"bfloat16"`` for ``torch.bfloat16``."""
    return _torch_names()[dtype]


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype for a name of the manifest.

    Raises:
        CheckpointError: if the installed torch has no dtype of that name.
    """
    dtypes = _torch_dtypes()
    if name in dtypes:
        return dtypes[name]
    raise CheckpointError(
        "The checkpoint has a dtype that this version of torch lacks.",
        expected="a dtype of torch, such as 'float32'",
        got=repr(name),
        todo="read the checkpoint with a version of torch that has the dtype",
    )


@cache
def stored_dtype(name: str) -> DType:
    """Return how a dtype is stored: the table's entry, or integers of the same width if the table lacks the dtype.

    Raises:
        CheckpointError: if neither the table nor this version of torch has the dtype.
    """
    return known_dtype(name) or DType(None, name, 8 * dtype_named(name).itemsize, "int")


def is_numpy_dtype(name: str) -> bool:
    """Return whether numpy and torch both have a dtype of this name. Names with a byte order, as ">f4", are numpy's."""
    known = known_dtype(name)
    return known is not None and known.is_numpy and known.name == name


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 1D uint8 view of a tensor, which must be contiguous and not lazily conjugated or negated."""
    # Not view(-1): a one-element slice of a column is contiguous, but view(uint8) refuses the column's stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(dtype_named("uint8"))


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values, contiguous in CPU memory: a view of the tensor if possible, else a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg()  # lazily conjugated memory does not have the values
    # Copied under a carrier dtype, because torch has no copy kernels for some dtypes.
    return plain.view(carrier_of(plain.dtype)).cpu().contiguous().view(plain.dtype)


def carrier_of(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of the same width that all copy kernels support, for copies that leave the bits unchanged."""
    return dtype_named(_CARRIERS[dtype.itemsize])
