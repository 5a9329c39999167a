"""Scaled gradients: gradients of rows that were multiplied by gates, and of the gates, on the host or a device."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.devices.array import DeviceArray
from commlib.kernels.host.rows import multiply_rows


def scale_gradients(gradient: Any, rows: Any, gates: Any) -> Any:
    """Multiply the gradient of rows times gates by the gates, in place, and return the gradient of the gates (float32).

    gradient, rows: [number, width], all on the host or all on one device. Device work is queued on the current stream.
    """
    if type(gradient) is not DeviceArray:
        products = np.empty_like(gates)
        multiply_rows(gradient, rows, gates, gradient, products)
        return products
    width, result = gradient.shape[1], gradient.empty((len(gates),), np.float32)
    flat, others = gradient.reshape(-1), rows.reshape(-1)
    gradient.device.kernels.multiply_rows(flat, others, gates, width, flat, result)
    return result
