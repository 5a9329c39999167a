"""Stage: the Protocols between a pipeline and a framework. The runner moves values and knows nothing of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from commlib.devices.protocol import Device
from commlib.dtypes import Array


class Values(NamedTuple):
    """Go from one stage to another: tensors of a framework, None where there is no gradient.

    note: what else the other side has to know of them, such as their names. It is sent when it changes.
    """

    tensors: Sequence[Any]
    note: str = ""


ByStage = Mapping[int, Values]
"""What comes from, or goes to, each stage that this one is linked to."""


class Stage(Protocol):
    """Compute one stage of a model on microbatches. It keeps what its backward needs, by microbatch.

    `final`: the last gradients of this step are about to be made, so those of a weight are complete once they are.
    """

    def forward(self, microbatch: int, inputs: ByStage) -> ByStage:
        """Return what goes to later stages. A stage without sources has its part of the batch already."""
        ...

    def backward(self, microbatch: int, gradients: ByStage, *, final: bool) -> ByStage:
        """Add to the gradients of the weights, and return those of the inputs, given those of the outputs.

        A stage without targets begins with its loss.
        """
        ...

    def backward_input(self, microbatch: int, gradients: ByStage) -> ByStage:
        """Return the gradients of the inputs, and keep what `backward_weight` needs."""
        ...

    def backward_weight(self, microbatch: int, *, final: bool) -> None:
        """Add to the gradients of the weights: the other part of a backward."""
        ...

    def reduce(self) -> None:
        """Gradients of this stage are complete: start to reduce them over its replicas."""
        ...

    def step(self) -> None:
        """Update the weights from the gradients since the last time, in schedules that do so by themselves."""
        ...

    def use(self, version: int) -> None:
        """Compute with the weights after so many updates from now on, in schedules that update them."""
        ...


class Tensors(Protocol):
    """Turn a framework's tensors into arrays and back, without a copy where they are there already."""

    @property
    def device(self) -> Device | None:
        """The core's device of the tensors of this rank; None for the host."""
        ...

    def array(self, value: Any) -> Array:
        """Return the elements of a tensor on the host, to be copied from."""
        ...

    def read(self, value: Any) -> Any:
        """Return the elements of a tensor where they are: a DeviceArray of `device`, or an array of the host."""
        ...

    def wants_gradient(self, value: Any) -> bool:
        """Return whether whoever gets this has to send back a gradient of it."""
        ...

    def tensor(self, array: Any, *, wants_gradient: bool) -> Any:
        """Return a tensor over an array's memory, which stays until the microbatch is done."""
        ...

    def memory(self, value: Any) -> Any:
        """Return the memory of a tensor that `tensor` made, for `is_kept` and `move`; None if that is its own."""
        ...

    def is_kept(self, memory: Any) -> bool:
        """Return whether a tensor still has this memory, or part of it."""
        ...

    def move(self, memory: Any) -> None:
        """Give the tensors that have it memory of their own, with the same values: it is about to be another's."""
        ...
