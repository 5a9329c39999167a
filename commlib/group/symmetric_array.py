"""Symmetric arrays: create arrays in symmetric memory, which all ranks of a node map."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from typing import Any

from commlib.buffers.views import address_of
from commlib.devices.arrays import device_named
from commlib.devices.host import HOST
from commlib.devices.protocol import Device, UnreachableMemoryError
from commlib.dtypes import name_of, numpy_dtype
from commlib.errors import UsageError
from commlib.group.arguments import integer
from commlib.group.group import Group
from commlib.group.operation import Operation

log = logging.getLogger("commlib")


def empty(group: Group, shape: int | Sequence[int], dtype: Any, device: Device | str) -> Operation:
    """Return the operation that creates a zeroed array on all ranks. Raises UsageError for a bad shape or device.

    device: a device, or its kind: "host" or "cuda".
    """
    place: Device = device_named("" if device == "host" else device, "empty") if isinstance(device, str) else device
    kind = numpy_dtype(dtype)
    lengths = shape if isinstance(shape, Sequence) else (shape,)
    dimensions = tuple(integer("empty", "a length of the shape", length) for length in lengths)
    if min(dimensions, default=0) < 0:
        raise UsageError(f"empty: shape {dimensions} has a negative length")
    if math.prod(length or 1 for length in dimensions) * kind.itemsize > sys.maxsize:
        raise UsageError(f"empty: shape {dimensions} of {name_of(kind)} exceeds the address space")
    nbytes = math.prod(dimensions) * kind.itemsize

    def run() -> Any:
        if place is not HOST and not group.config.device_ipc:
            return None
        try:
            memory = group.symmetric_on(place).allocate(nbytes)
        except UnreachableMemoryError as error:
            level = logging.WARNING if group.rank == 0 else logging.DEBUG
            log.log(level, "%s: %s: each rank uses private memory instead: %s", group.name, text, str(error))
            return None
        return place.at(address_of(memory), dimensions, kind, memory)

    def finish(value: Any) -> Any:
        return _private_zeros(place, dimensions, kind) if value is None else value

    text = f"empty of shape {dimensions} {name_of(kind)}"
    if place is not HOST:
        text += f" on {place.name}" + ", private to each rank" * (not group.config.device_ipc)
    return Operation(text, run, finish=finish, must_match=True)


def _private_zeros(place: Device, shape: tuple[int, ...], kind: Any) -> Any:
    """Return a zeroed array in private memory of this rank."""
    array = place.empty(shape, kind)
    place.kernels.fill(place.wrap(array, "empty").reshape(-1), 0)
    return array
