"""torch tensors and arrays of the core over the same memory: numpy arrays on the host, DeviceArrays on a GPU."""

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
from commlib_torch._function_transforms import explain
from commlib_torch.devices import array_over, device_name, device_of, is_known, tensor_over

Array = npt.NDArray[Any]
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the core's name of a dtype, such as "float32" or "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def check_dense(tensor: torch.Tensor) -> None:
    """Raise UsageError unless `tensor` is a dense tensor with values, on any device."""
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
    """Raise UsageError unless `tensor` is dense and on the host."""
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
    """Return the core's array with the values of `tensor`: over its memory if it is contiguous.

    On a GPU it is a DeviceArray, ordered after torch's current stream. Raises UsageError as `check` does, for dtypes
    that the core does not support, and for a second GPU.
    """
    return core_array(pack(tensor))


def core_array(tensor: torch.Tensor) -> Any:
    """Convert a tensor that `pack` returned to the core's array, as `read` does."""
    device = device_of(tensor)
    return array_of(tensor) if device is None else array_over(tensor, device)


def array_of(tensor: torch.Tensor) -> Array:
    """Convert a dense, detached tensor to a numpy array, as `to_array` does."""
    if not tensor.is_cpu:
        raise UsageError(f"tensors on device {tensor.device} are not supported here: call .cpu() first")
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and (explained := explain(error, "verbs")) is not error:
            raise explained from error
        raise UsageError(f"no array over a tensor of {tensor.dtype}: {error}") from error


def to_tensor(array: Any) -> torch.Tensor:
    """Return a tensor with the shape, strides and memory of an array, which it keeps alive. Nothing is copied.

    The array is a numpy array, a DeviceArray or an array of a registered device.
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


def pack(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` detached if its memory is contiguous and literal (no lazy conj or neg), otherwise a copy."""
    check(tensor)
    try:
        packed = tensor.detach()
    except RuntimeError as error:
        raise explain(error, "verbs") from error
    if packed.is_contiguous() and not packed.is_conj() and not packed.is_neg():  # every verb runs this
        return packed
    return packed.resolve_conj().resolve_neg().contiguous()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` detached if it is contiguous and literal on the host, otherwise a packed copy on the host.

    A copy from a GPU follows the current stream, and the host waits for it.
    """
    check_dense(tensor)
    try:
        here = tensor.detach() if tensor.is_cpu else tensor.detach().cpu()
    except RuntimeError as error:
        raise explain(error, "verbs") from error
    return here.resolve_conj().resolve_neg().contiguous()


def host_array(tensor: torch.Tensor) -> Array:
    """Return a host array with the values of a tensor: over its memory if it is contiguous on the host."""
    return array_of(to_host(tensor))


def to_device_of(array: Array, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the values of a host array, on the device of `like`."""
    return to_tensor(array).to(like.device)


def allocate_like(array: Any) -> Any:
    """Allocate an array like another one; on a GPU it is torch's memory."""
    if type(array) is not DeviceArray:
        return np.empty_like(array)
    like = to_tensor(array)
    return array_over(torch.empty_like(like, memory_format=torch.contiguous_format), array.device)


def device_kind(tensors: Sequence[torch.Tensor]) -> str:
    """Return "cpu" or the device's name. Raises UsageError if some tensors are on the host and some on a GPU."""
    kinds = {device_name(tensor) for tensor in tensors}
    if len(kinds) > 1:
        places = ", ".join(str(tensor.device) for tensor in tensors)
        raise UsageError(f"the tensors of one group must all be on the host or all on GPUs, got {places}")
    return kinds.pop() if kinds else "cpu"
