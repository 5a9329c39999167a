"""Device calls: call host functions that also take device arrays on GPU tensors, without copies to host memory.

A function gets DeviceArrays if all its tensors are on one device, otherwise numpy arrays of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.devices.array import DeviceArray
from commlib_tensorflow._bridge import to_array, to_tensor
from commlib_tensorflow._host_calls import Spec, call, call_in_order, call_on_device_of, is_ordered, result_empty
from commlib_tensorflow._placement import DevicePlace, fits, place_of
from commlib_tensorflow.devices import array_over, device_of, finish_reads, tensors_over, types, use_device_stream

Function = Callable[..., Sequence[Any]]


def call_on_device(
    function: Function, inputs: Sequence[Any], outputs: Sequence[Spec], *, host: int | None = None, what: str = ""
) -> list[Any]:
    """Do the same as `call`, for a function that takes and returns arrays of the host or of a device.

    host: the number of the first input that the function always takes from the host; None if there is none. what: for
    errors; with it, this does the same as `call_in_order`.
    """
    count = len(inputs) if host is None else host
    if tf.executing_eagerly():
        if not types():
            return call(function, inputs, outputs)
        return _run(function, inputs, count)
    place = None
    if (what or is_ordered()) and fits([*(tensor.dtype for tensor in inputs), *(spec.dtype for spec in outputs)]):
        place = place_of(inputs[:count])
    if place is None:
        return call_in_order(what, function, inputs, outputs) if what else call(function, inputs, outputs)
    return call_on_device_of(place.where, lambda *tensors: _run(function, tensors, count), inputs, outputs, what)


def _run(function: Function, tensors: Sequence[Any], count: int) -> list[Any]:
    """Call a function on eager tensors; those from number `count` on are host arrays."""
    devices = {device_of(tensor) for tensor in tensors[:count]}
    device = devices.pop() if len(devices) == 1 else None
    if device is None:
        return [to_tensor(array) for array in function(*map(to_array, tensors))]
    with use_device_stream(device):
        arrays = [array_over(tensor, device) for tensor in tensors[:count]]
        return _tensors_after(arrays, function(*arrays, *map(to_array, tensors[count:])))


def call_at(
    place: DevicePlace | None,
    what: str,
    function: Function,
    inputs: Sequence[Any],
    outputs: Sequence[Spec],
    *,
    host: Container[int] = (),
) -> list[Any]:
    """Do the same as `call_in_order`, for a function that gets arrays of the device of a place.

    place: None for the host. host: the numbers of inputs that the function still gets as host arrays. In a graph no
    tensor may be int32 (see `fits`).
    """
    if place is None:
        return call_in_order(what, function, inputs, outputs)

    def there(*tensors: Any) -> list[Any]:
        with use_device_stream(place.device):
            arrays = [to_array(x) if number in host else array_of(x) for number, x in enumerate(tensors)]
            return _tensors_after(arrays, function(*arrays))

    return call_on_device_of(place.where, there, inputs, outputs, what)


def array_of(tensor: Any) -> Any:
    """Return an array over an eager tensor, on the tensor's device."""
    device = device_of(tensor)
    return to_array(tensor) if device is None else array_over(tensor, device)


def tensors_of(arrays: Sequence[Any]) -> list[Any]:
    """Return tensors over new arrays of the host or of one device. The host waits for the device's work on them."""
    there = iter(tensors_over([array for array in arrays if type(array) is not np.ndarray]))
    return [to_tensor(array) if type(array) is np.ndarray else next(there) for array in arrays]


def _tensors_after(arrays: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Return tensors over new arrays, after the device has read the arrays of the call."""
    if not any(type(array) is DeviceArray for array in results):
        finish_reads(arrays)
    return tensors_of(results)


def allocate_like(array: Any) -> Any:
    """Allocate memory for a result like an array, on the array's device."""
    if type(array) is DeviceArray:
        return array.empty(array.shape, array.dtype)
    return result_empty(array.shape, array.dtype)


def copy_array(array: Any) -> Any:
    """Return a copy of an array in such memory."""
    if type(array) is DeviceArray:
        return array.copy()
    copy = result_empty(array.shape, array.dtype)
    copy[...] = array
    return copy
