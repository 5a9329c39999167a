"""Call: give verbs arrays to read from and to write to, and make tensors of what comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from commlib.tensor_verbs import Bridge, TensorWork, VerbMaker
from commlib_torch._bridge import core_array, packed, read, room, to_tensor
from commlib_torch.devices import in_order

Work = TensorWork


class InPlace:
    """A tensor that an operation writes to: `array` is its memory, or stands in for it until `finish`.

    stage: makes the stand-in. array: makes the core's array over that.
    """

    __slots__ = ("_staged", "_tensor", "array")

    def __init__(
        self,
        tensor: Tensor,
        stage: Callable[[Tensor], Tensor] = packed,
        array: Callable[[Tensor], Any] = core_array,
    ) -> None:
        self._tensor = tensor
        self._staged = stage(tensor)
        self.array = array(self._staged)

    def finish(self, *_: Any) -> Tensor:
        """Return the tensor, with the values of `array`."""
        tensor, staged = self._tensor, self._staged
        if staged.data_ptr() != tensor.data_ptr() or staged.device != tensor.device:
            with torch.no_grad():
                tensor.copy_(staged)
        elif not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)  # autograd did not see the write
        return tensor


BRIDGE = Bridge(Tensor, read, to_tensor, room, in_order)


def verb_maker(module: str) -> VerbMaker:
    """Return what makes the verbs that stand in a module."""
    return VerbMaker(module, "Tensor")
