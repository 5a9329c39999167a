"""Arguments and results of verbs: give verbs arrays to read and write, and convert results to tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from commlib.tensor_verbs import Bridge, TensorWork, VerbMaker
from commlib_torch._bridge import allocate_like, core_array, pack, read, to_tensor
from commlib_torch.devices import use_device_streams

Work = TensorWork


class OutputTensor:
    """A tensor that an operation writes to: `array` is its memory, or a staging copy until `finish`.

    stage: makes the staging copy. array: makes the core's array over it.
    """

    __slots__ = ("_staged", "array", "tensor")

    def __init__(
        self,
        tensor: Tensor,
        stage: Callable[[Tensor], Tensor] = pack,
        array: Callable[[Tensor], Any] = core_array,
    ) -> None:
        self.tensor = tensor
        self._staged = stage(tensor)
        self.array = array(self._staged)

    def finish(self, *_: Any) -> Tensor:
        """Return the tensor with the values of `array`."""
        tensor, staged = self.tensor, self._staged
        if staged.data_ptr() != tensor.data_ptr() or staged.device != tensor.device:
            with torch.no_grad():
                tensor.copy_(staged)
        elif not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)  # autograd did not see the write
        return tensor


BRIDGE = Bridge(Tensor, read, to_tensor, allocate_like, use_device_streams)


def verb_maker(module: str) -> VerbMaker:
    """Return a factory for the verbs of a module."""
    return VerbMaker(module, "Tensor")
