"""Compiled calls: run a call that was checked and prepared. Only here do calls enter their group's launch order.

A blocking call runs in its caller's thread when nothing is queued, else after the queued operations. An asynchronous
call starts in its caller's thread if possible, and is queued otherwise: see `progress`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

from commlib.errors import CommlibError
from commlib.kernels.machine_code import HAS_BUILTINS
from commlib.runtime.claims import mark_claiming
from commlib.runtime.gate import Gate, gate_plan
from commlib.runtime.progress import RECORDED, Progress
from commlib.runtime.work import Work


def leave_to_python(address: int, source: int, target: int) -> int:
    """Return the status that makes `CompiledCall` continue in Python: the step of calls without a compiled function."""
    return 1


class CompiledCall:
    """One kind of call, ready to run any number of times on arrays of that dtype and shape.

    It holds no array: its caller passes the arrays, which stay alive until it has run, even in the queue.
    `_step(_address, id(x), id(target))` is a compiled function that runs the call and returns 0 if it has finished it.
    Then a small call runs no more Python than the code of `now`.
    """

    __slots__ = ("_acquire", "_address", "_note", "_progress", "_release", "_step", "can_begin", "text")

    def __init__(self, progress: Progress, text: str) -> None:
        self.text = text
        self.can_begin = False  # whether `begin` may be called
        self._progress = progress
        self._acquire, self._release = progress.running.acquire, progress.running.release
        self._note = progress.flight.append
        self._step: Callable[[int, int, int], int] = leave_to_python
        self._address = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.text}>"

    @mark_claiming
    def now(self, x: Any, target: Any) -> Any:
        """Run the call in this thread, after all earlier launches, and return its value, usually `target`."""
        try:
            if self._acquire(False):
                if not self._progress.pending:
                    self._note(self.text)
                    value = target
                    if status := self._step(self._address, id(x), id(target)):
                        value = self._go_on(status, x, target)
                    self._release()
                    return value
                if self._progress.pending == RECORDED:
                    value = self._run_recorded(x, target)
                    self._release()
                    return value
                self._release()
        except BaseException as error:
            self._progress.break_off(self.text, error)
            raise
        return self._progress.run_queued(self.text, partial(self.perform, x, target), x)

    @mark_claiming
    def start(self, x: Any, target: Any, *, value: Any = None, deliver: Callable[[Any], Any] | None = None) -> Work:
        """Start the call, after all earlier launches.

        Its result is `value`, or `deliver` applied to the value of the call.
        """

        def run() -> Any:
            result = self.perform(x, target)
            return value if deliver is None else deliver(result)

        if self.can_begin and deliver is None:
            progress = self._progress
            try:
                if self._acquire(False):
                    if not progress.pending:
                        self._note(self.text)
                        ended = self.begin(x, target)
                        work = Work.ended(self.text, value) if ended else progress.add_started(self.text, run)
                        self._release()
                        return work
                    if progress.pending == RECORDED:
                        work = self._begin_recorded(x, target, value, run)
                        self._release()
                        return work
                    self._release()
            except CommlibError as error:
                progress.break_off(self.text, error)
                return progress.failed(self.text, error)
            except BaseException as error:
                progress.break_off(self.text, error)
                raise
            progress.refuse_nested(self.text)
        return self._progress.start(self.text, run, x)

    @property
    def kernel(self) -> int:
        """The address of the function that `_step` calls; 0 if the step is not a compiled function."""
        return 0

    @property
    def gate(self) -> Gate:
        """The gate of its group."""
        return self._progress.gate

    @property
    def address(self) -> int:
        """The address that its compiled functions take; 0 if it has none."""
        return self._address

    @mark_claiming
    def resume(self, status: int, x: Any, target: Any) -> Any:
        """Continue the call after a status other than 0. Compiled code has taken the lock (see `kernels.host.gate`)."""
        try:
            value = self._go_on(status, x, target)
            self._release()
            return value
        except BaseException as error:
            self._progress.break_off(self.text, error)
            raise
        finally:
            self._progress.gate.resumed()

    @property
    def settled(self) -> CompiledCall:
        """A cheaper replacement for later calls, if the first call has made one; else this object."""
        return self

    def bind(self, x: Any, target: Any, *, value: Any = None, deliver: Callable[[Any], Any] | None = None) -> Plan:
        """Return a plan of this call on fixed arrays. Its result is `value`, or `deliver` of the call's value."""
        return Plan(self, x, target, value, deliver)

    def perform(self, x: Any, target: Any) -> Any:
        """Run the operation in its turn, and return its value."""
        raise NotImplementedError

    def begin(self, x: Any, target: Any) -> bool:
        """Do the part that other ranks wait for; return whether that was the whole call, so `perform` is not needed."""
        raise NotImplementedError

    def _go_on(self, status: int, x: Any, target: Any) -> Any:
        """Finish the rest of a call after `_step`, and return its value."""
        progress = self._progress
        before, progress.busy = progress.busy, get_ident()  # like `refuse_others`, three times faster
        try:
            return self.perform(x, target)
        except BaseException as error:
            progress.raised = error
            raise
        finally:
            progress.busy = before

    def _run_recorded(self, x: Any, target: Any) -> Any:
        """Run the call in this thread, as `_step` and `_go_on` together do, and record its times."""
        self._note(self.text)
        journal = self._progress.journal
        try:
            with self._progress.refuse_others():
                return journal.run(journal.open(self.text, x), partial(self.perform, x, target))
        except BaseException as error:
            self._progress.raised = error
            raise

    def _begin_recorded(self, x: Any, target: Any, value: Any, run: Callable[[], Any]) -> Work:
        """Start the call in this thread, and record its times."""
        self._note(self.text)
        journal = self._progress.journal
        record, begin = journal.open(self.text, x), partial(self.begin, x, target)
        ended = begin() if record is None else journal.begin(record, begin)
        return Work.ended(self.text, value) if ended else self._progress.add_started(self.text, run, record)


class Plan:
    """A collective on fixed memory. Every rank of the group runs its plan equally often.

    `plan()` runs it now and returns its result, `plan.start()` starts it and returns a Work. `plan.run` is the function
    that `plan()` calls: for programs that run it often, a call of it saves a tenth of a microsecond. The first run of a
    group's first collective may replace it.
    """

    __slots__ = ("_bound", "_compiled", "_deliver", "_value", "run")

    def __init__(
        self,
        compiled: CompiledCall,
        x: Any,
        target: Any,
        value: Any,
        deliver: Callable[[Any], Any] | None,
        kernel: int = 0,
    ) -> None:
        """kernel: the address of a compiled function that takes the call's address, and runs it; 0: there is none."""
        self._compiled, self._bound, self._value, self._deliver = compiled, (x, target), value, deliver
        self.run: Callable[[], Any]
        if kernel and deliver is None and HAS_BUILTINS:
            self.run = gate_plan(compiled.gate, compiled, kernel, x, target, value)
        else:
            self.run = partial(_run_in_python, compiled, x, target, value, deliver)

    def __repr__(self) -> str:
        return f"<Plan {self.text}>"

    @property
    def text(self) -> str:
        """The text of its call."""
        return self._compiled.text

    def __call__(self) -> Any:
        """Run the plan now, after all earlier launches, and return its result."""
        value = self.run()
        if self._compiled.settled is not self._compiled:
            self._settle()
        return value

    def start(self) -> Work:
        """Start the plan; it runs after all earlier launches."""
        if self._compiled.settled is not self._compiled:
            self._settle()
        return self._compiled.start(*self._bound, value=self._value, deliver=self._deliver)

    def _settle(self) -> None:
        bound = self._compiled.settled.bind(*self._bound, value=self._value, deliver=self._deliver)
        self._compiled, self.run = bound._compiled, bound.run


def _run_in_python(
    compiled: CompiledCall, x: Any, target: Any, value: Any, deliver: Callable[[Any], Any] | None
) -> Any:
    result = compiled.now(x, target)
    return value if deliver is None else deliver(result)


class Task(CompiledCall):
    """An operation that runs once, given as a function."""

    __slots__ = ("_run",)

    def __init__(self, progress: Progress, text: str, run: Callable[[], Any]) -> None:
        super().__init__(progress, text)
        self._run = run

    def perform(self, x: Any, target: Any) -> Any:
        return self._run()
