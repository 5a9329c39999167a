"""Devices: where torch has tensors and streams, as the core sees them. The host and CUDA are known here.

A tensor on a GPU is read and written where it is. What torch has queued on its current stream comes before what the
core then does with it, and what torch queues there later comes after: see `in_order`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from commlib.devices.array import DeviceArray
from commlib.devices.cuda import foreign, process
from commlib.devices.protocol import Device, Stream
from commlib.dtypes import name_of, numpy_dtype


class Kind(Protocol):
    """Find torch's tensors and streams on one kind of device of the core."""

    @property
    def name(self) -> str:
        """That of the core's device."""
        ...

    def device_of(self, tensor: Tensor) -> Device | None:
        """Return the device that has a tensor; None if it is memory of the host after all. Raises UsageError."""
        ...

    def used(self) -> Device | None:
        """Return the device that this process has used before, if any, and torch too."""
        ...

    def stream(self, device: Device) -> Stream:
        """Return the stream on which torch works now, in this thread."""
        ...

    def lend(self, array: DeviceArray) -> Any:
        """Return an object over the bytes of an array, to which the tensors that `tensor` makes of it refer."""
        ...

    def tensor(self, lent: Any) -> Tensor:
        """Return a 1-D tensor (uint8) over what `lend` returned, which may not be empty."""
        ...


class _Lent:
    """Memory of a GPU, as torch takes it from anybody."""

    def __init__(self, array: DeviceArray) -> None:
        self.__cuda_array_interface__ = {
            "shape": (array.nbytes,), "typestr": "|u1", "data": (array.address, False), "version": 3, "strides": None,
        }  # fmt: skip
        self.index = array.device.index
        self._owner = array.owner


class Cuda:
    """See `Kind`."""

    name = "cuda"

    def device_of(self, tensor: Tensor) -> Device:
        return process.device(tensor.device.index)

    def used(self) -> Device | None:
        found = process.used()
        return found if found is not None and torch.cuda.is_initialized() else None

    def stream(self, device: Any) -> Stream:
        stream: Stream = device.existing(torch.cuda.current_stream(device.index).cuda_stream)
        return stream

    def lend(self, array: DeviceArray) -> Any:
        return _Lent(array)

    def tensor(self, lent: Any) -> Tensor:
        return torch.as_tensor(lent, device=torch.device("cuda", lent.index))


# By torch's name of a type of devices, such as "cuda".
_KINDS: dict[str, Kind] = {}
_BY_NAME: dict[str, Kind] = {}


def register(where: str, kind: Kind) -> Callable[[], None]:
    """Let tensors on devices that torch calls `where` be on one of the core's; return what ends that."""
    before = _BY_NAME.get(kind.name)
    _KINDS[where] = _BY_NAME[kind.name] = kind

    def end() -> None:
        del _KINDS[where], _BY_NAME[kind.name]
        if before is not None:
            _BY_NAME[kind.name] = before

    return end


register("cuda", Cuda())
# Tensors that are given to the core's own verbs, too, are in order with torch's stream.
foreign.register_stream(Tensor, lambda tensor: torch.cuda.current_stream(tensor.device).cuda_stream)


def is_known(tensor: Tensor) -> bool:
    """Return whether the core can reach the memory of a tensor."""
    return tensor.is_cpu or tensor.device.type in _KINDS


def device_of(tensor: Tensor) -> Device | None:
    """Return the core's device that has a tensor; None if it is on the host. Raises UsageError for a second GPU."""
    if tensor.is_cpu and "cpu" not in _KINDS:  # in each call: this is the quickest question
        return None
    kind = _KINDS.get(tensor.device.type)
    return None if kind is None else kind.device_of(tensor)


def where(tensor: Tensor) -> str:
    """Return the name of the core's device that has a tensor, "cpu" for the host."""
    device = device_of(tensor)
    return "cpu" if device is None else device.name


def array_over(tensor: Tensor, device: Device) -> DeviceArray:
    """Return the core's array over a detached tensor of a device, contiguous and literal. Raises UsageError."""
    kind = numpy_dtype(str(tensor.dtype).removeprefix("torch."))
    stream = _BY_NAME[device.name].stream(device)
    return DeviceArray(device, tensor.data_ptr(), tuple(tensor.shape), kind, tensor, stream)


def tensor_over(array: DeviceArray) -> Tensor:
    """Return a tensor over the memory of an array, which it keeps: the very tensor if the array was made of it."""
    owner = array.owner
    if isinstance(owner, Tensor) and (owner.data_ptr(), tuple(owner.shape)) == (array.address, array.shape):
        return owner
    return made_of(lend(array), array)


def lend(array: DeviceArray) -> Any:
    """Return an object over the memory of an array, to which tensors that are made of it refer."""
    return _BY_NAME[array.device.name].lend(array)


def made_of(lent: Any, like: DeviceArray) -> Tensor:
    """Return a tensor over what was lent, of the shape and dtype of the array that was."""
    dtype, kind = getattr(torch, name_of(like.dtype)), _BY_NAME[like.device.name]
    if like.nbytes == 0:
        return torch.empty(like.shape, dtype=dtype, device=next(at for at, known in _KINDS.items() if known is kind))
    return kind.tensor(lent).view(dtype).view(like.shape)


_NOTHING = nullcontext()


def in_order() -> AbstractContextManager[Any]:
    """Make torch's current streams those of the core's devices, within a `with`.

    Only on devices that this process has used: see `Kind.used`.
    """
    stack: ExitStack | None = None
    for kind in _KINDS.values():
        if (device := kind.used()) is not None:
            stack = ExitStack() if stack is None else stack
            stack.enter_context(device.using(kind.stream(device)))
    return _NOTHING if stack is None else stack


class Following:
    """Let the stream that comes to a place wait for the one that came before, if that is another one.

    Parts of a model may run on several streams of torch: their gradients meet in one bucket.
    """

    def __init__(self) -> None:
        self._before: dict[Any, Stream] = {}

    def __call__(self) -> None:
        """Let the current streams of the core's devices wait."""
        for kind in _KINDS.values():
            if (device := kind.used()) is not None:
                here, before = device.current(), self._before.get(device)
                if before is not None and before != here:
                    here.wait(before.record())
                self._before[device] = here
