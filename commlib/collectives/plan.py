"""A prepared operation: checked once, run as often as wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlib.group.operation import Operation
from commlib.node.call import NodeCollective
from commlib.runtime.progress import Progress
from commlib.runtime.work import Work


class Plan:
    """A collective on fixed memory. Every rank of the group runs its plan as often as the others.

    `plan()` runs it now and returns the result array, `plan.start()` starts it and returns a Work.
    """

    __slots__ = ("_begin", "_now", "_progress", "_run", "_value", "text")

    def __init__(self, progress: Progress, operation: Operation, now: Callable[[], Any], value: Any) -> None:
        """`now` runs it in this thread, `operation` within the queue, on arrays that they keep alive.

        Its result is always `value`.
        """
        self.text = operation.text
        self._progress, self._run, self._now, self._value = progress, operation.run, now, value
        self._begin: Callable[[], bool] | None = None

    @classmethod
    def on_node(cls, progress: Progress, call: NodeCollective, value: Any, source: Any) -> Plan:
        """Return the plan of a compiled call that is bound to `source` and `value`."""
        call = call.holding((source, value))
        run_call = call.running_on((source, value))

        def run() -> Any:
            run_call()
            return value

        plan = cls(progress, Operation(call.text, run), call, value)
        if call.can_begin:
            plan._begin = call.begin
        return plan

    def __repr__(self) -> str:
        return f"<Plan {self.text}>"

    def __call__(self) -> Any:
        """Run it now, after everything that was launched before, and return its result."""
        self._now()
        return self._value

    def start(self) -> Work:
        """Start it, to run after everything that was launched before."""
        if self._begin is not None:
            return self._progress.begin(self.text, self._begin, self._run, self._value)
        return self._progress.start(self.text, self._run)
