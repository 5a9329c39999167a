"""Devices: torch's tensors and streams on the core's devices. The host and CUDA are built in.

The core reads and writes a GPU tensor in place. Its work follows the work that torch has queued on its current stream,
and precedes the work that torch queues there later: see `use_device_streams`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from commlib.devices.array import DeviceArray
from commlib.devices.cuda import foreign_arrays, process
from commlib.devices.protocol import Device, Stream
from commlib.dtypes import name_of, numpy_dtype


class DeviceBackend(Protocol):
    """Access to torch's tensors and streams on one type of the core's devices."""

    @property
    def name(self) -> str:
        """The name of the core's device."""
        ...

    def device_of(self, tensor: Tensor) -> Device | None:
        """Return the device of a tensor; None if its memory is on the host after all. Raises UsageError."""
        ...

    def used(self) -> Device | None:
        """Return the device if both this process and torch have used it before, otherwise None."""
        ...

    def stream(self, device: Device) -> Stream:
        """Return torch's current stream in this thread."""
        ...

    def lend(self, array: DeviceArray) -> Any:
        """Return an object over the bytes of an array; the tensors that `tensor` makes from it refer to it."""
        ...

    def tensor(self, lent: Any) -> Tensor:
        """Return a 1-D tensor (uint8) over the result of `lend`, which may not be empty."""
        ...


class _BorrowedMemory:
    """GPU memory with the CUDA array interface, for torch to wrap."""

    def __init__(self, array: DeviceArray) -> None:
        self.__cuda_array_interface__ = {
            "shape": (array.nbytes,), "typestr": "|u1", "data": (array.address, False), "version": 3, "strides": None,
        }  # fmt: skip
        self.index = array.device.index
        self._owner = array.owner


class Cuda:
    """See `DeviceBackend`."""

    name = "cuda"

    def device_of(self, tensor: Tensor) -> Device:
        return process.device(tensor.device.index)

    def used(self) -> Device | None:
        memory = process.find_used()
        return memory if memory is not None and torch.cuda.is_initialized() else None

    def stream(self, device: Any) -> Stream:
        stream: Stream = device.existing(torch.cuda.current_stream(device.index).cuda_stream)
        return stream

    def lend(self, array: DeviceArray) -> Any:
        return _BorrowedMemory(array)

    def tensor(self, lent: Any) -> Tensor:
        return torch.as_tensor(lent, device=torch.device("cuda", lent.index))


# By torch's name of a device type, such as "cuda".
_KINDS: dict[str, DeviceBackend] = {}
_BY_NAME: dict[str, DeviceBackend] = {}


def register(where: str, kind: DeviceBackend) -> Callable[[], None]:
    """Map torch's device type `device_name` to one of the core's devices; return a function that ends this."""
    before = _BY_NAME.get(kind.name)
    _KINDS[where] = _BY_NAME[kind.name] = kind

    def end() -> None:
        del _KINDS[where], _BY_NAME[kind.name]
        if before is not None:
            _BY_NAME[kind.name] = before

    return end


register("cuda", Cuda())
# Tensors passed to the core's own verbs are ordered with torch's stream, too.
foreign_arrays.register_stream(Tensor, lambda tensor: torch.cuda.current_stream(tensor.device).cuda_stream)


def is_known(tensor: Tensor) -> bool:
    """Return whether the core can access the memory of a tensor."""
    return tensor.is_cpu or tensor.device.type in _KINDS


def device_of(tensor: Tensor) -> Device | None:
    """Return the core's device of a tensor; None if it is on the host. Raises UsageError for a second GPU."""
    if tensor.is_cpu and "cpu" not in _KINDS:  # called in every verb: the cheapest check first
        return None
    kind = _KINDS.get(tensor.device.type)
    return None if kind is None else kind.device_of(tensor)


def device_name(tensor: Tensor) -> str:
    """Return the name of the core's device of a tensor, "cpu" for the host."""
    device = device_of(tensor)
    return "cpu" if device is None else device.name


def array_over(tensor: Tensor, device: Device) -> DeviceArray:
    """Return the core's array over a tensor that is detached, contiguous and literal. Raises UsageError."""
    kind = numpy_dtype(str(tensor.dtype).removeprefix("torch."))
    stream = _BY_NAME[device.name].stream(device)
    return DeviceArray(device, tensor.data_ptr(), tuple(tensor.shape), kind, tensor, stream)


def tensor_over(array: DeviceArray) -> Tensor:
    """Return a tensor over the memory of an array, which it keeps alive; the array's original tensor, if any."""
    owner = array.owner
    if isinstance(owner, Tensor) and (owner.data_ptr(), tuple(owner.shape)) == (array.address, array.shape):
        return owner
    return tensor_from(lend(array), array)


def lend(array: DeviceArray) -> Any:
    """Return an object over the memory of an array; tensors made from it refer to it."""
    return _BY_NAME[array.device.name].lend(array)


def tensor_from(lent: Any, like: DeviceArray) -> Tensor:
    """Return a tensor over lent memory, with the shape and dtype of the lent array."""
    dtype, kind = getattr(torch, name_of(like.dtype)), _BY_NAME[like.device.name]
    if like.nbytes == 0:
        return torch.empty(like.shape, dtype=dtype, device=next(at for at, known in _KINDS.items() if known is kind))
    return kind.tensor(lent).view(dtype).view(like.shape)


_NOTHING = nullcontext()


def use_device_streams() -> AbstractContextManager[Any]:
    """Use torch's current streams for the core's devices, within a `with`.

    Applies only to devices that this process has used: see `DeviceBackend.used`.
    """
    stack: ExitStack | None = None
    for kind in _KINDS.values():
        if (device := kind.used()) is not None:
            stack = ExitStack() if stack is None else stack
            stack.enter_context(device.using(kind.stream(device)))
    return _NOTHING if stack is None else stack


class StreamOrder:
    """Orders the streams that reach one point: the current stream waits for the previous one, if it is another.

    Parts of a model may run on several of torch's streams, with their gradients in one bucket.
    """

    def __init__(self) -> None:
        self._before: dict[Any, Stream] = {}

    def __call__(self) -> None:
        """Make the current streams of the core's devices wait."""
        for kind in _KINDS.values():
            if (device := kind.used()) is not None:
                here, before = device.current(), self._before.get(device)
                if before is not None and before != here:
                    here.wait(before.record())
                self._before[device] = here
