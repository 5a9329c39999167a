"""DeviceCall: a compiled call on arrays of a device, in the order of its group and in that of the callers' streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from commlib.collectives.device.staging_queue import OnWait, Run, Station
from commlib.devices.protocol import Event, Stream
from commlib.runtime.compiled import Compiled
from commlib.runtime.device_work import DeviceWork
from commlib.runtime.progress import Progress
from commlib.runtime.work import Work
from commlib.transport.base import WaitHook

_Given = tuple[Any, Stream, Event | None]
"""An array, the stream of its caller, and when it is ready; None: the call is to be queued on that stream."""


def _never() -> bool:
    return False


class DeviceCall(Compiled):
    """Run `run` after the earlier work of the caller's stream, and let that stream wait for it.

    A blocking call returns when all ranks' data is there and on its way into the result; so does `Work.wait`.
    """

    __slots__ = ("_blocks", "_on_wait", "_only_queues", "_run", "_station")

    def __init__(
        self,
        progress: Progress,
        text: str,
        station: Station,
        run: Run,
        *,
        blocks: bool = False,
        only_queues: Callable[[], bool] = _never,
        on_wait: WaitHook | None = None,
    ) -> None:
        """`blocks`: it blocks in MPI, which nothing can interrupt, so it runs on the progress thread.

        only_queues: whether it does nothing but queue work, as far as is known: then a blocking call's goes to the
        caller's own stream, which spares four events. on_wait: watches what such a call waits for.
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
            value, done = self._progress.run_through(self.text, partial(self.perform, given, target))
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
        """Do the same within another call of its station."""
        return self._run(x, target, on_wait)

    def perform(self, x: _Given, target: Any) -> tuple[Any, Event | None]:
        array, stream, ready = x
        if ready is None:
            assert self._on_wait is not None
            return self._station.run_there(stream, self._run, array, target, self._on_wait), None
        return self._station.run(self.text, self._run, array, ready, target)
