"""One verb on tensors: what the core is called with, and how its answer becomes tensors again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from commlib import horovod as core
from commlib.communicator import Communicator
from commlib_torch._bridge import Array, packed, to_array, to_tensor

R = TypeVar("R")


class Work(Generic[R]):
    """What the `_async` verbs return: an operation that runs on the progress thread.

    The tensors it was started with must not be touched until it is done.
    """

    def __init__(self, work: Any, finish: Callable[[Any], R]) -> None:
        self._work = work
        self._finish = finish
        self._result: list[R] = []

    def done(self) -> bool:
        """Return whether it has ended, well or not. Never blocks."""
        return bool(self._work.done())

    def wait(self, timeout: float | None = None) -> R:
        """Block until it has ended, at most `timeout` seconds, and return its result.

        Raises what the operation raised; StallError if the time is up (the operation goes on).
        """
        value = self._work.wait(timeout)
        if not self._result:
            self._result.append(self._finish(value))
        return self._result[0]

    def result(self) -> R:
        """Return the result, waiting for it as long as it takes. Raises what the operation raised."""
        return self.wait()

    def exception(self) -> BaseException | None:
        """Return what the operation raised, or None; waits until it has ended."""
        error: BaseException | None = self._work.exception()
        return error


class Call(Generic[R]):
    """A verb of the core with its arguments. `finish` makes of the core's answer what the user gets."""

    def __init__(
        self, comm: Communicator | None, verb: str, finish: Callable[[Any], R], *arguments: Any, **options: Any
    ) -> None:
        self._comm = comm or core.running()
        self._verb, self._finish = verb, finish
        self._arguments, self._options = arguments, options

    def run(self) -> R:
        """Call the verb and wait."""
        return self._finish(getattr(self._comm, self._verb)(*self._arguments, **self._options))

    def start(self) -> Work[R]:
        """Call the verb's `_async` twin."""
        work = getattr(self._comm, f"{self._verb}_async")(*self._arguments, **self._options)
        return Work(work, self._finish)


def read(tensor: Tensor) -> Array:
    """Return an array with the values of `tensor`: its memory, if that is contiguous."""
    return to_array(packed(tensor))


class InPlace:
    """A tensor that an operation writes to: `array` is its memory, or stands in for it until `finish`.

    `stage` makes the stand-in: `packed`, or `on_host` where the tensor may be on a GPU.
    """

    def __init__(self, tensor: Tensor, stage: Callable[[Tensor], Tensor] = packed) -> None:
        self._tensor = tensor
        self._staged = stage(tensor)
        self.array = to_array(self._staged)

    def finish(self, _: Any) -> Tensor:
        """Return the tensor, with the values of `array`."""
        tensor, staged = self._tensor, self._staged
        if staged.data_ptr() != tensor.data_ptr() or staged.device != tensor.device:
            with torch.no_grad():
                tensor.copy_(staged)
        elif not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)  # autograd did not see the write
        return tensor


def new(array: Any) -> Tensor:
    """Return the tensor over an array that the core made."""
    return to_tensor(array)


def new_or_none(array: Any) -> Tensor | None:
    """Return the tensor over an array that the core made on the root, None elsewhere."""
    return None if array is None else to_tensor(array)


def as_is(value: R) -> R:
    """Return what the core returned."""
    return value
