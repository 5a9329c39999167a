"""One call of a verb on tensors: at once, on the progress thread, or wherever an adapter runs its host function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.horovod import running
from commlib.tensor_verbs.work import TensorWork

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Bridge(Generic[T]):
    """Turn the tensors of a framework into arrays and back.

    tensor: their class. read: an array with a tensor's values, contiguous; it is only read. new: the tensor over an
    array that the core made. room: a new array like another one, for a result; None is numpy's. in_order: within it the
    core works on devices in the order of the streams that the framework has there now.
    """

    tensor: type[T]
    read: Callable[[T], Array]
    new: Callable[[Any], T]
    room: Callable[[Array], Array] | None = None
    in_order: Callable[[], AbstractContextManager[Any]] = nullcontext


class Result(Protocol):
    """Hold what comes back from a verb, and how it becomes what the user gets."""

    def finish(self, bridge: Bridge[Any], answer: Any) -> Any:
        """Return it for the answer of the core."""
        ...


class Place(Result, Protocol):
    """A tensor that a verb writes to: `array` is its memory, or stands in for it until `finish`."""

    @property
    def array(self) -> Array: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    make: Callable[[Bridge[Any], Any], Any]

    def finish(self, bridge: Bridge[Any], answer: Any) -> Any:
        return self.make(bridge, answer)


SAME = _Kind(lambda bridge, answer: bridge.new(answer))
"""A tensor of the shape and dtype of the last input."""
ROWS = _Kind(lambda bridge, answer: bridge.new(answer))
"""A tensor of the dtype of the last input, with another number of rows."""
RECEIVED = _Kind(lambda bridge, answer: (bridge.new(answer[0]), bridge.new(answer[1])))
"""Two tensors: rows like those of the first input, and int64 how many came from each rank."""
NOTHING = _Kind(lambda bridge, answer: None)
"""None."""
OBJECT = _Kind(lambda bridge, answer: answer)
"""What is no tensor, as it is."""


class Startable(Protocol[R]):
    """A verb with its arguments, ready to run."""

    def run(self) -> R:
        """Run it and wait."""
        ...

    def start(self) -> TensorWork[R]:
        """Start it."""
        ...


class Call(Generic[R]):
    """A verb with its tensors.

    `host` gets the communicator's verb, or its `_async` twin, and an array for each of `inputs`; it calls the verb.
    """

    __slots__ = ("bridge", "comm", "host", "inputs", "result", "verb")

    def __init__(
        self,
        bridge: Bridge[Any],
        comm: Communicator | None,
        verb: str,
        host: Callable[..., Any],
        inputs: tuple[Any, ...],
        result: Result,
    ) -> None:
        self.bridge, self.comm, self.verb = bridge, comm or running(), verb
        self.host, self.inputs, self.result = host, inputs, result

    def run(self) -> R:
        """Call the verb and wait."""
        bridge = self.bridge
        arrays = [*map(bridge.read, self.inputs)]
        with bridge.in_order():
            answer = self.host(getattr(self.comm, self.verb), *arrays)
        finished: R = self.result.finish(bridge, answer)
        return finished

    def start(self) -> TensorWork[R]:
        """Call the verb's `_async` twin."""
        bridge, result = self.bridge, self.result
        arrays = [*map(bridge.read, self.inputs)]
        with bridge.in_order():
            work = self.host(getattr(self.comm, f"{self.verb}_async"), *arrays)
        return TensorWork(work, lambda answer: result.finish(bridge, answer), bridge.in_order)
