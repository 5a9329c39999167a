"""Stage: the protocols between a pipeline and a framework. The runner moves values without inspecting them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from commlib.devices.protocol import Device
from commlib.dtypes import Array


class StageValues(NamedTuple):
    """Tensors of a framework that go from one stage to another, None where there is no gradient.

    note: further facts for the receiver, such as their names. It is sent when it changes.
    """

    tensors: Sequence[Any]
    note: str = ""


ByStage = Mapping[int, StageValues]
"""The values from, or for, each stage that this one is linked to."""


class Stage(Protocol):
    """One stage of a model, run on microbatches. It keeps the data for its backward, by microbatch.

    `final`: this call computes the last gradients of the step, so the gradient of each weight is complete afterwards.
    """

    def forward(self, microbatch: int, inputs: ByStage) -> ByStage:
        """Return the values for later stages. A stage without sources already has its part of the batch."""
        ...

    def backward(self, microbatch: int, gradients: ByStage, *, final: bool) -> ByStage:
        """Add to the gradients of the weights, and return the gradients of the inputs, given those of the outputs.

        A stage without targets begins with its loss.
        """
        ...

    def backward_input(self, microbatch: int, gradients: ByStage) -> ByStage:
        """Return the gradients of the inputs, and keep the data for `backward_weight`."""
        ...

    def backward_weight(self, microbatch: int, *, final: bool) -> None:
        """Add to the gradients of the weights: the second part of a backward."""
        ...

    def reduce(self) -> None:
        """Start to reduce the gradients of this stage over its replicas; they are complete."""
        ...

    def step(self) -> None:
        """Update the weights from the gradients since the last update, in schedules with STEPs."""
        ...

    def use(self, version: int) -> None:
        """Compute with the weights after `version` updates from now on, in schedules with STEPs."""
        ...


class Tensors(Protocol):
    """Conversion between a framework's tensors and arrays, without a copy if possible."""

    @property
    def device(self) -> Device | None:
        """The core's device for the tensors of this rank; None for the host."""
        ...

    def array(self, value: Any) -> Array:
        """Return the elements of a tensor on the host, to be copied from."""
        ...

    def read(self, value: Any) -> Any:
        """Return the elements of a tensor without moving them: a DeviceArray of `device`, or a host array."""
        ...

    def wants_gradient(self, value: Any) -> bool:
        """Return whether the receiver of this tensor must send its gradient back."""
        ...

    def tensor(self, array: Any, *, wants_gradient: bool) -> Any:
        """Return a tensor over an array's memory, which stays valid until the microbatch is finished."""
        ...

    def memory(self, value: Any) -> Any:
        """Return the memory of a tensor that `tensor` made, for `is_used` and `move`; None if it is separate."""
        ...

    def is_used(self, memory: Any) -> bool:
        """Return whether a tensor still uses this memory, or part of it."""
        ...

    def move(self, memory: Any) -> None:
        """Move the tensors that use this memory to new memory, with the same values: it is about to be reused."""
        ...
