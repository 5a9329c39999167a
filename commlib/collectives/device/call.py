"""DeviceCall: a compiled call on device arrays, in the order of its group and of the callers' streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from commlib.collectives.context import PathContext
from commlib.collectives.paths import PathChoice
from commlib.devices.protocol import DeviceEvent, Stream
from commlib.runtime.compiled_call import CompiledCall
from commlib.runtime.work import DeviceWork, Work

_Given = tuple[Any, Stream, DeviceEvent | None]
"""An array, its caller's stream, and the event when it is ready; None: queue the call on the caller's stream."""


class InnerCall(Protocol):
    """The part of a device call that runs within its staging queue's order, on this thread's current stream."""

    def perform(self, x: Any, target: Any) -> Any:
        """Run the call and return its value."""
        ...


class DeviceCall(CompiledCall):
    """Run a call after the earlier work of the caller's stream, and make that stream wait for the result.

    A blocking call and `Work.wait` return when all ranks' data has arrived and the copy into the result is queued.
    """

    __slots__ = ("_blocks", "_choices", "_context", "_inner", "_only_queues")

    def __init__(
        self,
        context: PathContext,
        text: str,
        inner: InnerCall | None = None,
        *,
        choices: Sequence[PathChoice] = (),
    ) -> None:
        """inner: the call; None: the first of `choices` that opens. The first call of all ranks opens it."""
        super().__init__(context.group.progress, text)
        self._context, self._inner, self._choices = context, inner, choices
        # It blocks inside MPI, so it runs on the progress thread: nothing can interrupt it.
        self._blocks = bool(choices) and any("native" in (one.path.name, one.call.algorithm) for one in choices)
        # Then a blocking call queues its work on the caller's stream, which saves four events.
        self._only_queues = False
        if choices and choices[0].path.is_open(context):
            self._choose(choices[0])

    def now(self, x: Any, target: Any) -> Any:
        device = self._context.device
        stream = device.current()
        if self._only_queues:
            return super().now((x, stream, None), target)[0]
        given = x, stream, stream.record()
        if self._blocks:
            value, done = self._progress.run_uninterrupted(self.text, partial(self.perform, given, target))
        else:
            value, done = super().now(given, target)
        device.current().wait(done)
        return value

    def start(self, x: Any, target: Any, *, value: Any = None, deliver: Callable[[Any], Any] | None = None) -> Work:
        device = self._context.device
        stream = device.current()
        given = x, stream, stream.record()
        work = DeviceWork(self.text, device)

        def run() -> Any:
            got, work.event = self.perform(given, target)
            return value if deliver is None else deliver(got)

        return self._progress.start(self.text, run, work=work)

    def perform(self, x: _Given, target: Any) -> tuple[Any, DeviceEvent | None]:
        array, stream, ready = x
        run = self._open if self._inner is None else self._inner.perform
        if ready is None:
            return self._context.queue.run_on_stream(stream, run, array, target), None
        return self._context.queue.run(self.text, run, array, ready, target)

    def _open(self, x: Any, target: Any) -> Any:
        """Run the call by the first path that is available on all ranks, and keep to that."""
        for choice in self._choices:
            if choice.path.open(self._context, self.text):
                return self._choose(choice).perform(x, target)
        refused = self._choices[-1]
        raise refused.error(refused.path.refusal(self._context, refused.verb, refused.call))

    def _choose(self, choice: PathChoice) -> InnerCall:
        self._inner = choice.compile(self._context)
        self._only_queues = choice.path.only_queues
        return self._inner
