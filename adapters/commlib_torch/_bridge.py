"""torch tensors and arrays of the core over the same memory: numpy's on the host, DeviceArrays on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from commlib.devices.array import DeviceArray
from commlib.devices.registry import lookup
from commlib.errors import UsageError
from commlib_torch.devices import array_over, device_of, is_known, tensor_over, where

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
    if not is_known(tensor):
        raise UsageError(f"tensors on device {tensor.device} are not supported: call .cpu() first")


def check_host(tensor: torch.Tensor) -> None:
    """Raise UsageError unless `tensor` is dense, and on the host."""
    check_dense(tensor)
    if not tensor.is_cpu:
        raise UsageError(f"tensors on device {tensor.device} are not supported here: call .cpu() first")


def to_array(tensor: torch.Tensor) -> Array:
    """Return a numpy array with the shape, strides and memory of a CPU tensor. Nothing is copied.

    bfloat16 becomes ml_dtypes.bfloat16. Raises UsageError for other devices, sparse layouts and dtypes without a
    numpy counterpart.
    """
    check_host(tensor)
    return array_of(tensor.detach())


def read(tensor: torch.Tensor) -> Any:
    """Return the core's array with the values of `tensor`: over its memory, if that is contiguous.

    On a GPU it is a DeviceArray, in order with torch's current stream. Raises UsageError as `check` does, for dtypes
    that the core has not, and for a second GPU.
    """
    return core_array(packed(tensor))


def core_array(tensor: torch.Tensor) -> Any:
    """Return what `read` does for what `packed` returned."""
    device = device_of(tensor)
    return array_of(tensor) if device is None else array_over(tensor, device)


def array_of(tensor: torch.Tensor) -> Array:
    """Return what `to_array` does for a dense tensor that is detached."""
    if not tensor.is_cpu:
        raise UsageError(f"tensors on device {tensor.device} are not supported here: call .cpu() first")
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError) as error:
        raise UsageError(f"no array over a tensor of {tensor.dtype}: {error}") from error


def to_tensor(array: Any) -> torch.Tensor:
    """Return a tensor with the shape, strides and memory of an array, which it keeps alive. Nothing is copied.

    The array is numpy's, a DeviceArray or what a device makes.
    """
    if type(array) is not np.ndarray:
        if type(array) is DeviceArray:
            return tensor_over(array)
        if (device := lookup(array)) is not None:
            return tensor_over(device.wrap(array, "a result"))
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


def host_array(tensor: torch.Tensor) -> Array:
    """Return an array of the host with the values of a tensor: its memory, if that is contiguous and there."""
    return array_of(on_host(tensor))


def back(array: Array, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the values of an array of the host, on the device of another tensor."""
    return to_tensor(array).to(like.device)


def room(array: Any) -> Any:
    """Return a new array like another one; on a GPU it is torch's memory."""
    if type(array) is not DeviceArray:
        return np.empty_like(array)
    like = to_tensor(array)
    return array_over(torch.empty_like(like, memory_format=torch.contiguous_format), array.device)


def device_kind(tensors: Sequence[torch.Tensor]) -> str:
    """Return "cpu" or the device's name. Raises UsageError where some tensors are on the host and some on a GPU."""
    kinds = {where(tensor) for tensor in tensors}
    if len(kinds) > 1:
        places = ", ".join(str(tensor.device) for tensor in tensors)
        raise UsageError(f"the tensors of one group must be all on the host or all on GPUs, got {places}")
    return kinds.pop() if kinds else "cpu"
