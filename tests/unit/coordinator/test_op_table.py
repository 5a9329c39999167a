"""OpTable: each submitted operation is in one place until it is finished."""

from __future__ import annotations

import pytest

from commlib.coordinator.launched_op import LaunchedOp
from commlib.coordinator.negotiation import Launch, Negotiation
from commlib.coordinator.op_request import OpRequest
from commlib.coordinator.op_table import OpTable
from commlib.coordinator.pending_op import PendingOp
from commlib.errors import UsageError


class Driver:
    """A coordinator without cycles."""

    def __init__(self):
        self.failed = {}

    def drive(self, until):
        """Make no progress."""

    def wake(self):
        """Make no progress."""


def table():
    return OpTable("group", Negotiation(0, [0, 1]))


def op(name):
    return PendingOp(Driver(), OpRequest("allreduce", name, (("float32", (2,)),)), (), (), None)


def test_an_operation_waits_until_it_is_finished():
    ops, a, b = table(), op("a"), op("b")
    ops.add(a)
    ops.add(b)
    assert ops.unfinished() == [a, b] and [name for name, _, _ in ops.waiting()] == ["a", "b"]
    ops.running.append(LaunchedOp(Launch(a.request), a))
    ops.flight.append(a.request)
    assert ops.requests() == ([a.request], [b.request])
    del ops.pending["a"]
    assert [has for _, _, has in ops.launched()] == [False]
    a.finish()
    assert ops.requests() == ([], [b.request]) and [has for _, _, has in ops.launched()] == [True]


def test_a_name_in_use_is_refused_but_a_generated_name_is_held_back():
    ops = table()
    ops.add(op("a"))
    with pytest.raises(UsageError, match=r"group: .*'a'.*in flight already"):
        ops.add(op("a"))
    name = ops.unnamed.next_name("allreduce")
    first, second = op(name), op(name)
    ops.add(first)
    ops.add(second)
    assert ops.pending[name] is first and second in ops.unfinished()


def test_clear_returns_every_operation_once():
    ops, a, b = table(), op("a"), op("b")
    ops.add(a)
    ops.add(b)
    ops.running = [LaunchedOp(Launch(a.request), a), LaunchedOp(Launch(OpRequest("allreduce", "c")), None)]
    assert ops.clear(running=True) == [a, b] and not ops.unfinished()
    ops.pending["b"] = b
    assert ops.clear() == [b]


def test_an_interrupted_submission_leaves_nothing():
    """A signal handler raised after the negotiation had the request: its name stayed in use."""

    class Interrupted(Negotiation):
        """Raises once it has a request."""

        def submit(self, request):
            super().submit(request)
            raise KeyboardInterrupt

    negotiation = Interrupted(0, [0, 1])
    ops = OpTable("group", negotiation)
    with pytest.raises(KeyboardInterrupt):
        ops.add(op("a"))
    assert not ops.unfinished() and not negotiation.waiting
