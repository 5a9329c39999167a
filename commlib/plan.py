"""A prepared operation: checked once, run as often as wanted."""

from __future__ import annotations

from typing import Any

from commlib.progress import Progress
from commlib.verbs.node import NodeCall
from commlib.verbs.operation import Operation
from commlib.work import Work


class Plan:
    """A collective on fixed memory. Every rank of the group runs its plan as often as the others.

    `plan()` runs it now and returns the result array, `plan.start()` starts it and returns a Work.
    """

    __slots__ = ("_call", "_keep", "_progress", "_run", "_value", "text")

    def __init__(self, progress: Progress, operation: Operation, keep: Any) -> None:
        """Run `operation`; `keep` is kept alive."""
        self.text = operation.text
        self._progress, self._run, self._keep = progress, operation.run, keep
        self._call: NodeCall | None = None
        self._value: Any = None

    @classmethod
    def on_node(cls, progress: Progress, call: NodeCall, value: Any, keep: Any) -> Plan:
        """Return the plan of a compiled call, whose result is always `value`."""

        def run() -> Any:
            call.run()
            return value

        plan = cls(progress, Operation(call.text, run), keep)
        plan._call, plan._value = call, value
        return plan

    def __repr__(self) -> str:
        return f"<Plan {self.text}>"

    def __call__(self) -> Any:
        """Run it now, after everything that was launched before, and return its result."""
        if self._call is not None:
            self._call()
            return self._value
        return self._progress.run(self.text, self._run)

    def start(self) -> Work:
        """Start it, to run after everything that was launched before."""
        if self._call is not None and self._call.can_begin:
            return self._progress.begin(self.text, self._call.begin, self._run, self._value)
        return self._progress.start(self.text, self._run)
