"""DeviceCall: a compiled call on device arrays, in the order of its group and of the callers' streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from commlib.collectives.device.staging_queue import OnWait, Run, StagingQueue
from commlib.devices.protocol import DeviceEvent, Stream
from commlib.runtime.compiled_call import CompiledCall
from commlib.runtime.progress import Progress
from commlib.runtime.work import DeviceWork, Work
from commlib.transport.base import WaitHook

_Given = tuple[Any, Stream, DeviceEvent | None]
"""An array, its caller's stream, and the event when it is ready; None: queue the call on the caller's stream."""


def _never() -> bool:
    return False


class DeviceCall(CompiledCall):
    """Run `run` after the earlier work of the caller's stream, and make that stream wait for the result.

    A blocking call and `Work.wait` return when all ranks' data has arrived and the copy into the result is queued.
    """

    __slots__ = ("_blocks", "_on_wait", "_only_queues", "_run", "_station")

    def __init__(
        self,
        progress: Progress,
        text: str,
        station: StagingQueue,
        run: Run,
        *,
        blocks: bool = False,
        only_queues: Callable[[], bool] = _never,
        on_wait: WaitHook | None = None,
    ) -> None:
        """`blocks`: the call blocks inside MPI, so it runs on the progress thread: nothing can interrupt it.

        only_queues: returns whether the call only queues work, as far as is known. Then a blocking call queues it on
        the caller's stream, which saves four events. on_wait: the wait hook for such a call.
        """
        super().__init__(progress, text)
        self._station, self._run, self._blocks = station, run, blocks
        self._only_queues, self._on_wait = only_queues, on_wait

    def now(self, x: Any, target: Any) -> Any:
        device = self._station.device
        stream = device.current()
        if self._only_queues():
            return super().now((x, stream, None), target)[0]
        given = x, stream, stream.record()
        if self._blocks:
            value, done = self._progress.run_uninterrupted(self.text, partial(self.perform, given, target))
        else:
            value, done = super().now(given, target)
        device.current().wait(done)
        return value

    def start(self, x: Any, target: Any, *, value: Any = None, deliver: Callable[[Any], Any] | None = None) -> Work:
        device = self._station.device
        stream = device.current()
        given = x, stream, stream.record()
        work = DeviceWork(self.text, device)

        def run() -> Any:
            got, work.event = self.perform(given, target)
            return value if deliver is None else deliver(got)

        return self._progress.start(self.text, run, work=work)

    def run_in(self, x: Any, target: Any, on_wait: OnWait) -> Any:
        """Run it within another call of the same staging queue."""
        return self._run(x, target, on_wait)

    def perform(self, x: _Given, target: Any) -> tuple[Any, DeviceEvent | None]:
        array, stream, ready = x
        if ready is None:
            assert self._on_wait is not None
            return self._station.run_on_stream(stream, self._run, array, target, self._on_wait), None
        return self._station.run(self.text, self._run, array, ready, target)
