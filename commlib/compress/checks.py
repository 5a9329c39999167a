"""Check the arrays of codecs before compiled code accesses their memory; format the names of codecs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from commlib.devices.array import DeviceArray
from commlib.devices.arrays import device_of
from commlib.errors import UsageError
from commlib.kernels.protocol import Kernels

_FLOAT32, _UINT8 = np.dtype(np.float32), np.dtype(np.uint8)


Checked = tuple[Kernels, Any, Any]
"""The kernels for the checked arrays, the residual before and the residual after; None without residuals."""


def _check(array: Any, what: str, dtype: Any, *, written: bool) -> None:
    if type(array) is DeviceArray:
        if array.dtype != dtype or array.ndim != 1:
            raise UsageError(f"{what} must be a 1-D {dtype} array, not {array.dtype} of shape {array.shape}")
        return
    flags = array.flags
    if array.dtype != dtype or array.ndim != 1 or not flags.c_contiguous or (written and not flags.writeable):
        access = "writable" if written else "contiguous"
        raise UsageError(
            f"{what} must be a {access} 1-D {dtype} array, not {array.dtype} of shape {array.shape} with strides "
            f"{array.strides}{'' if flags.writeable else ', read-only'}: pass numpy.ravel(x) as {dtype}"
        )


def _check_room(payload: Any, needed: int, count: int) -> None:
    if len(payload) < needed:
        raise UsageError(
            f"the payload of {count} elements takes {needed} bytes, but only {len(payload)} were given: "
            "allocate codec.payload_bytes(count)"
        )


def _kernels(*arrays: Any) -> Kernels:
    device = device_of(arrays[0])
    for other in arrays[1:]:
        if device_of(other) is not device:
            raise UsageError(f"a codec works on one device, but got arrays on {device.name} and on another device")
    return device.kernels  # type: ignore[no-any-return]


def check_encode(x: Any, payload: Any, needed: int, residual: tuple[Any, Any] | None) -> Checked:
    """Return the kernels of these arrays' device, and the residuals. Raises UsageError for invalid arrays."""
    _check(x, "x", _FLOAT32, written=False)
    _check(payload, "payload", _UINT8, written=True)
    _check_room(payload, needed, len(x))
    if residual is None:
        return _kernels(x, payload), None, None
    before, after = residual
    _check(before, "the residual before", _FLOAT32, written=False)
    _check(after, "the residual after", _FLOAT32, written=True)
    if not len(before) == len(after) == len(x):
        raise UsageError(
            f"residuals must have the length of x, {len(x)} elements, but have {len(before)} and {len(after)}"
        )
    return _kernels(x, payload, before, after), before, after


def check_decode(payload: Any, out: Any, needed: int) -> Kernels:
    """Return the kernels to decode a payload into `out`. Raises UsageError for invalid arrays."""
    _check(payload, "payload", _UINT8, written=False)
    _check(out, "out", _FLOAT32, written=True)
    _check_room(payload, needed, len(out))
    return _kernels(payload, out)


def check_block(block: int, what: str = "block") -> None:
    """Raise UsageError if `block` is not a valid block length."""
    if block < 8 or block % 8 or block > 1 << 20:
        raise UsageError(f"{what} must be a multiple of 8 elements from 8 to 2^20, not {block}")


def describe_codec(name: str, codec: Any) -> str:
    """Return the name of a codec with its options that differ from their defaults."""
    changed = [
        f"{field.name}={getattr(codec, field.name)}"
        for field in fields(codec)
        if field.name not in ("dtype", "format", "bits") and getattr(codec, field.name) != field.default
    ]
    return name + (":" + ",".join(changed) if changed else "")


def describe_scheme(name: str, scheme: Any, kind: Any) -> str:
    """Return the name of a codec's scheme: the codec's name with the scheme's options that are not defaults.

    Feedback counts as default if it is the codec's choice, explicit or not.
    """
    changed = [
        f"{field.name}={getattr(scheme, field.name)}".lower()
        for field in fields(kind)
        if field.name != "codec"
        and getattr(scheme, field.name) != field.default
        and not (field.name == "feedback" and scheme.feedback == scheme.codec.feedback)
    ]
    return ("," if ":" in name else ":").join([name, ",".join(changed)]) if changed else name
