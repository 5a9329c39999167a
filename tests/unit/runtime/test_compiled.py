"""Compiled calls: a call within a call, by a signal handler for example, is refused at every point."""

from __future__ import annotations

import itertools
import threading
from functools import partial

import numpy as np
import pytest

from commlib.buffers.views import address_of
from commlib.errors import UsageError
from commlib.kernels import machine_code
from commlib.runtime.compiled_call import CompiledCall, Plan
from commlib.runtime.progress import Progress


class Interrupted(CompiledCall):
    """A call with another call inside: in its compiled step, or after the step has returned to Python."""

    def __init__(self, progress, meanwhile, *, in_step):
        super().__init__(progress, "interrupted")
        self.can_begin = True
        self._meanwhile = meanwhile
        self._step = partial(self._run_step, in_step)

    def _run_step(self, in_step, *_):
        if in_step:
            self._meanwhile()
        return 0 if in_step else 1

    def perform(self, x, target):
        self._meanwhile()
        return "value"

    def begin(self, x, target):
        self._meanwhile()
        return True

    def plan(self):
        """Return a plan whose kernel leaves the call to Python: `all_equal` returns 1 for no numbers."""
        self._table = np.zeros(4, np.int64)
        self._table[:3] = 0, 0, address_of(self._table)
        self._address = address_of(self._table)
        return Plan(self, None, "value", "value", None, machine_code.address("node.all_equal"))


class Other(CompiledCall):
    def perform(self, x, target):
        return target

    def begin(self, x, target):
        return True


WAYS = {
    "now": lambda call: call.now(None, "value"),
    "start": lambda call: call.start(None, "value", value="value").wait(),
    "plan of no step": lambda call: call.bind(None, "value", value="value")(),
}


@pytest.mark.parametrize(
    ("way", "in_step"),
    [
        *itertools.product(WAYS, [True, False]),
        ("plan", False),  # the builtin of a plan runs no Python in its compiled step
    ],
)
def test_a_call_within_a_call_is_refused(way, in_step):
    """In the compiled step no flag marks a running call: the inner call waited for ever for the interrupted one."""
    progress = Progress()
    other = Other(progress, "other")
    begun = Other(progress, "begun")
    begun.can_begin = True
    calls = [
        lambda: other.now(None, None),
        lambda: other.bind(None, None)(),
        lambda: begun.start(None, None).wait(),
    ]
    refused = []

    def meanwhile():
        for call in calls:
            with pytest.raises(UsageError, match="in the middle of another call of the same group"):
                call()
            refused.append(call)

    call = Interrupted(progress, meanwhile, in_step=in_step)
    assert (call.plan()() if way == "plan" else WAYS[way](call)) == "value"
    assert refused == calls
    assert other.now(None, "after") == "after"
    assert not progress.pending


def test_a_call_of_another_group_or_thread_within_a_call_is_not_refused():
    mine, others = Progress(), Progress()
    values = []
    threads: list[threading.Thread] = []

    def meanwhile():
        values.append(Other(others, "of another group").now(None, 1))
        thread = threading.Thread(target=lambda: values.append(Other(mine, "of another thread").now(None, 2)))
        thread.start()
        threads.append(thread)

    assert Interrupted(mine, meanwhile, in_step=True).now(None, "value") == "value"
    threads[0].join(10)
    assert values == [1, 2]


def test_an_exception_before_python_can_continue_a_call_is_not_a_lost_lock_unnoticed():
    """A signal handler may raise at the first instruction of the Python function, which then never gives it back."""
    seen = []
    progress = Progress(lambda text, error: seen.append((text, type(error))))
    call = Interrupted(progress, lambda: None, in_step=False)

    def interrupted(*_):
        raise KeyboardInterrupt

    call.resume = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        call.plan()()
    assert Other(progress, "other").now(None, "after") == "after"  # as after any interrupted call; its group has failed
    assert seen == [("a call", KeyboardInterrupt)]
