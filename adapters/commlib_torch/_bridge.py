"""torch tensors and numpy arrays over the same memory: the core speaks numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from commlib.errors import UsageError

Array = npt.NDArray[Any]
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name under which the core knows a dtype, such as "float32" or "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def check_dense(tensor: torch.Tensor) -> None:
    """Raise UsageError unless `tensor` is a dense tensor with values, wherever they are."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"expected a torch tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise UsageError(f"tensors of layout {tensor.layout} are not supported: call .to_dense() first")
    if tensor.is_meta:
        raise UsageError("a tensor on device meta has no values: move it to a real device first")


def check(tensor: torch.Tensor) -> None:
    """Raise UsageError unless the core can reach the memory of `tensor`."""
    if isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.layout is torch.strided:
        return
    check_dense(tensor)
    if tensor.device.type != "cpu":
        raise UsageError(f"tensors on device {tensor.device} are not supported yet: call .cpu() first")


def to_array(tensor: torch.Tensor) -> Array:
    """Return a numpy array with the shape, strides and memory of a CPU tensor. Nothing is copied.

    bfloat16 becomes ml_dtypes.bfloat16. Raises UsageError for other devices, sparse layouts and dtypes without a
    numpy counterpart.
    """
    check(tensor)
    return array_of(tensor.detach())


def array_of(tensor: torch.Tensor) -> Array:
    """Return what `to_array` does for a dense CPU tensor that is detached."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError) as error:
        raise UsageError(f"no array over a tensor of {tensor.dtype}: {error}") from error


def to_tensor(array: Array) -> torch.Tensor:
    """Return a tensor with the shape, strides and memory of a numpy array, which it keeps alive. Nothing is copied."""
    array = np.asarray(array)
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` itself, detached, if its memory is contiguous and literal, else a copy that is."""
    check(tensor)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` itself, detached, if it is contiguous and literal on the host, else a copy that is.

    From a GPU it is copied behind what the current stream still computes, and this waits for that.
    """
    check_dense(tensor)
    here = tensor.detach() if tensor.is_cpu else tensor.detach().cpu()
    return here.resolve_conj().resolve_neg().contiguous()


def device_kind(tensors: Sequence[torch.Tensor]) -> str:
    """Return "cpu" or "gpu". Raises UsageError where some tensors are on the host and some on a GPU."""
    kinds = {"cpu" if tensor.is_cpu else "gpu" for tensor in tensors}
    if len(kinds) > 1:
        where = ", ".join(str(tensor.device) for tensor in tensors)
        raise UsageError(f"the tensors of one group must be all on the host or all on GPUs, got {where}")
    return kinds.pop() if kinds else "cpu"
