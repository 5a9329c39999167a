"""Call of a verb on tensors: run it and wait, start it on the progress thread, or run its host function elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.horovod import require_world
from commlib.ranks import Ranks, communicator_of
from commlib.tensor_verbs.tensor_work import TensorWork

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Bridge(Generic[T]):
    """Turn the tensors of a framework into arrays and back.

    tensor: the tensor class. read: returns a contiguous array with a tensor's values, which is only read. new: returns
    the tensor over an array that the core made. room: returns an uninitialised array like another one, for a result;
    None: numpy's. in_order: a context in which the core orders its device work after the framework's current streams.
    settle: for a framework whose streams the core cannot order: waits until the device has read the arrays of a call
    without a result, as the framework may then reuse their memory; None: not needed.
    """

    tensor: type[T]
    read: Callable[[T], Array]
    new: Callable[[Any], T]
    room: Callable[[Array], Array] | None = None
    in_order: Callable[[], AbstractContextManager[Any]] = nullcontext
    settle: Callable[[Sequence[Array]], None] | None = None


class TensorResult(Protocol):
    """The result of a verb, and its conversion to the user's type."""

    def finish(self, bridge: Bridge[Any], answer: Any) -> Any:
        """Convert the answer of the core to the user's result."""
        ...


class TargetTensor(TensorResult, Protocol):
    """A tensor that a verb writes to: `array` is its memory, or a substitute for it until `finish`."""

    @property
    def array(self) -> Array: ...


@dataclass(frozen=True, slots=True, eq=False)
class _ResultKind:
    make: Callable[[Bridge[Any], Any], Any]

    def finish(self, bridge: Bridge[Any], answer: Any) -> Any:
        return self.make(bridge, answer)


SAME = _ResultKind(lambda bridge, answer: bridge.new(answer))
"""A tensor of the shape and dtype of the last input."""
ROWS = _ResultKind(lambda bridge, answer: bridge.new(answer))
"""A tensor of the dtype of the last input, with another number of rows."""
RECEIVED = _ResultKind(lambda bridge, answer: (bridge.new(answer[0]), bridge.new(answer[1])))
"""Two tensors: rows like the first input's, and the number of rows received from each rank, int64."""
NOTHING = _ResultKind(lambda bridge, answer: None)
"""None."""
OBJECT = _ResultKind(lambda bridge, answer: answer)
"""An object that is no tensor, returned unchanged."""


@dataclass(frozen=True, slots=True, eq=False)
class ResultOrZeros:
    """A tensor, or what `zeros` returns on ranks without a result: every rank gets a gradient."""

    zeros: Callable[[], Any]

    def finish(self, bridge: Bridge[Any], answer: Any) -> Any:
        return self.zeros() if answer is None else bridge.new(answer)


def group_of(ranks: Ranks | None, verb: str) -> Communicator:
    """Return the communicator of a verb: of `ranks`, or of all ranks."""
    return require_world() if ranks is None else communicator_of(ranks, verb)


class Startable(Protocol[R]):
    """A verb with its arguments, ready to run."""

    def run(self) -> R:
        """Run it and wait."""
        ...

    def start(self) -> TensorWork[R]:
        """Start it, and return its handle."""
        ...


Options = Mapping[str, Any]
_NO_OPTIONS: Options = MappingProxyType({})


def _no_options() -> Options:
    return _NO_OPTIONS


class TensorCall(Generic[R]):
    """A verb with its tensors.

    `host` gets the communicator's verb, or its `_async` twin, and an array for each of `inputs`; it calls the verb.
    options: returns the arguments that the backward needs. operands: the tensor that the result depends on, and the
    tensor that is written, if there is one; by default the inputs.
    """

    __slots__ = ("bridge", "comm", "host", "inputs", "operands", "options", "result", "verb")

    def __init__(
        self,
        bridge: Bridge[Any],
        ranks: Ranks | None,
        verb: str,
        host: Callable[..., Any],
        inputs: tuple[Any, ...],
        result: TensorResult,
        options: Callable[[], Options] = _no_options,
        operands: tuple[Any, ...] | None = None,
    ) -> None:
        self.bridge, self.verb = bridge, verb
        self.comm = require_world() if ranks is None else communicator_of(ranks, verb)
        self.host, self.inputs, self.result = host, inputs, result
        self.options, self.operands = options, inputs if operands is None else operands

    def convert(self, values: tuple[Any, ...], to: Callable[[Any], Any]) -> list[Any]:
        """Return converted values of the call. Its errors name the verb."""
        try:
            return [*map(to, values)]
        except UsageError as error:
            place = f"{self.comm.name}: {self.verb}, rank {self.comm.rank}"
            raise UsageError(f"{place}: {error}") from error.__cause__

    def run(self, label: str = "") -> R:
        """Call the verb and wait. label: see `Communicator.labelled`."""
        bridge = self.bridge
        arrays = self.convert(self.inputs, bridge.read)
        with bridge.in_order():
            answer = self.host(getattr(self.comm.labelled(label) if label else self.comm, self.verb), *arrays)
        if answer is None and bridge.settle is not None:
            bridge.settle(arrays)
        finished: R = self.result.finish(bridge, answer)
        return finished

    def start(self) -> TensorWork[R]:
        """Call the verb's `_async` twin."""
        bridge, result = self.bridge, self.result
        arrays = self.convert(self.inputs, bridge.read)
        with bridge.in_order():
            work = self.host(getattr(self.comm, f"{self.verb}_async"), *arrays)

        def finish(answer: Any) -> R:
            if answer is None and bridge.settle is not None:
                bridge.settle(arrays)
            finished: R = result.finish(bridge, answer)
            return finished

        return TensorWork(work, finish, bridge.in_order)
