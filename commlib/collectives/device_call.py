"""DeviceCall: a compiled call on arrays of a device, in the order of its group and in that of the callers' streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from commlib.collectives.station import OnWait, Run, Station
from commlib.runtime.compiled import Compiled
from commlib.runtime.device_work import DeviceWork
from commlib.runtime.progress import Progress
from commlib.runtime.work import Work


class DeviceCall(Compiled):
    """Run `run` after the earlier work of the caller's stream, and let that stream wait for it.

    A blocking call returns when all ranks' data is there and on its way into the result; so does `Work.wait`.
    """

    __slots__ = ("_blocks", "_run", "_station")

    def __init__(self, progress: Progress, text: str, station: Station, run: Run, *, blocks: bool = False) -> None:
        """`blocks`: it blocks in MPI, which nothing can interrupt, so it runs on the progress thread."""
        super().__init__(progress, text)
        self._station, self._run, self._blocks = station, run, blocks

    def now(self, x: Any, target: Any) -> Any:
        device = self._station.device
        given = x, device.current().record()
        if self._blocks:
            value, done = self._progress.run_through(self.text, partial(self.perform, given, target))
        else:
            value, done = super().now(given, target)
        device.current().wait(done)
        return value

    def start(self, x: Any, target: Any, *, value: Any = None, deliver: Callable[[Any], Any] | None = None) -> Work:
        device = self._station.device
        given = x, device.current().record()
        work = DeviceWork(self.text, device)

        def run() -> Any:
            got, work.event = self.perform(given, target)
            return value if deliver is None else deliver(got)

        return self._progress.start(self.text, run, work=work)

    def run_in(self, x: Any, target: Any, on_wait: OnWait) -> Any:
        """Do the same within another call of its station."""
        return self._run(x, target, on_wait)

    def perform(self, x: Any, target: Any) -> Any:
        array, ready = x
        return self._station.run(self.text, self._run, array, ready, target)
