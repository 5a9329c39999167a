"""Call functions of the host that take arrays of devices, too: on tensors of a GPU without the host's memory.

A function gets DeviceArrays where all its tensors are on one device, else numpy's arrays of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.devices.array import DeviceArray
from commlib_tensorflow._bridge import to_array, to_tensor
from commlib_tensorflow._graph import Spec, call, call_in_order, call_there, ordered, result_empty
from commlib_tensorflow._placement import Place, fits, place_of
from commlib_tensorflow.devices import array_over, device_of, tensors_over, types, working

Function = Callable[..., Sequence[Any]]


def call_on_device(
    function: Function, inputs: Sequence[Any], outputs: Sequence[Spec], *, host: int | None = None, what: str = ""
) -> list[Any]:
    """Return what `call` does, of a function that takes and returns arrays of the host or of a device.

    host: the number of the first input that the function takes from the host in any case; None if there is none. what:
    for errors; then it does what `call_in_order` does.
    """
    count = len(inputs) if host is None else host
    if tf.executing_eagerly():
        if not types():
            return call(function, inputs, outputs)
        return _run(function, inputs, count)
    place = None
    if (what or ordered()) and fits([*(tensor.dtype for tensor in inputs), *(spec.dtype for spec in outputs)]):
        place = place_of(inputs[:count])
    if place is None:
        return call_in_order(what, function, inputs, outputs) if what else call(function, inputs, outputs)
    return call_there(place.where, lambda *tensors: _run(function, tensors, count), inputs, outputs, what)


def _run(function: Function, tensors: Sequence[Any], count: int) -> list[Any]:
    """Call a function on eager tensors, of which those from number `count` on are for the host."""
    devices = {device_of(tensor) for tensor in tensors[:count]}
    device = devices.pop() if len(devices) == 1 else None
    if device is None:
        return [to_tensor(array) for array in function(*map(to_array, tensors))]
    with working(device):
        arrays = [array_over(tensor, device) for tensor in tensors[:count]]
        return tensors_of(function(*arrays, *map(to_array, tensors[count:])))


def call_at(
    place: Place | None,
    what: str,
    function: Function,
    inputs: Sequence[Any],
    outputs: Sequence[Spec],
    *,
    host: Container[int] = (),
) -> list[Any]:
    """Return what `call_in_order` does, of a function that gets arrays of the device of a place.

    place: None for the host. host: the numbers of inputs that it gets as the host's all the same. In a graph nothing
    may be of int32 (see `fits`).
    """
    if place is None:
        return call_in_order(what, function, inputs, outputs)

    def there(*tensors: Any) -> list[Any]:
        with working(place.device):
            arrays = [to_array(x) if number in host else array_of(x) for number, x in enumerate(tensors)]
            return tensors_of(function(*arrays))

    return call_there(place.where, there, inputs, outputs, what)


def array_of(tensor: Any) -> Any:
    """Return an array over an eager tensor, of the device that has it."""
    device = device_of(tensor)
    return to_array(tensor) if device is None else array_over(tensor, device)


def tensors_of(made: Sequence[Any]) -> list[Any]:
    """Return tensors over new arrays, of the host or of one device, whose work the host waits for."""
    there = iter(tensors_over([array for array in made if type(array) is not np.ndarray]))
    return [to_tensor(array) if type(array) is np.ndarray else next(there) for array in made]


def room(array: Any) -> Any:
    """Return memory for a result like an array, where that is."""
    if type(array) is DeviceArray:
        return array.empty(array.shape, array.dtype)
    return result_empty(array.shape, array.dtype)


def copied(array: Any) -> Any:
    """Return a copy of an array in such memory."""
    if type(array) is DeviceArray:
        return array.copy()
    copy = result_empty(array.shape, array.dtype)
    copy[...] = array
    return copy
