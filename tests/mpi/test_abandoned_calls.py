"""Abandoned calls: a surviving rank's abandoned data does not reach the others, which got 1001 instead of an error.

The data was published before the interrupt. Later ranks took it for the call's own, for every verb.
"""

from __future__ import annotations

import numpy as np
import pytest

from commlib.errors import PeerError
from tests.mpi.test_interrupted import Meanwhile

pytestmark = [pytest.mark.ranks(min=2), pytest.mark.any_ranks]


def symmetric(count):
    def make(group):
        x = group.empty(count)

        def call(value):
            x[:] = value
            return group.all_reduce(x, out=x)

        return call

    return make


def plan(group):
    x = np.zeros(5000)
    run = group.plan_all_reduce(x)

    def call(value):
        x[:] = value
        return run()

    return call


def on(count, run):
    return lambda group: lambda value: run(group, np.full(count * group.size, value))


CALLS = {
    "all_reduce": on(1, lambda c, x: c.all_reduce(x)),
    "large all_reduce": on(150_000, lambda c, x: c.all_reduce(x)),
    "symmetric": symmetric(5000),
    "all_to_all_v": on(2, lambda c, x: c.all_to_all_v(x, [2] * c.size)),
    "object": lambda group: group.broadcast_object,
    "small symmetric": symmetric(3),
    "plan": plan,
    "begun": on(1, lambda c, x: c.all_reduce_async(x).wait()),
    "reduce_scatter": on(2, lambda c, x: c.reduce_scatter(x)),
    "reduce": on(2, lambda c, x: c.reduce(x, root=1)),
    "broadcast": on(2000, lambda c, x: c.broadcast(x)),
    "all_gather": on(2, lambda c, x: c.all_gather(x)),
    "large all_gather": on(150_000, lambda c, x: c.all_gather(x)),
    "all_gather_v": on(2, lambda c, x: c.all_gather_v(x[c.rank :])),
    "gather": on(2, lambda c, x: c.gather(x, root=1)),
    "scatter": on(2, lambda c, x: c.scatter(x)),
    "all_to_all": on(2, lambda c, x: c.all_to_all(x)),
    "large all_to_all_v": on(150_000, lambda c, x: c.all_to_all_v(x, [150_000] * c.size)),
    "scan": on(2, lambda c, x: c.scan(x)),
    "barrier": lambda group: lambda value: group.barrier(),
    "objects": lambda group: group.all_gather_object,
}


@pytest.mark.parametrize("name", CALLS)
def test_an_abandoned_call_does_not_affect_the_others(comm, name):
    group = comm.split(0)
    call = CALLS[name](group)
    for _ in range(3):
        call(1.0)
    comm.barrier()
    if comm.rank == 0:
        Meanwhile(comm).interrupt(group, lambda: call(1000.0))
    else:
        comm.barrier()
        with pytest.raises(PeerError, match=r"rank 0 has given up this group .*ended half-way by Alarm"):
            call(1.0)
    comm.barrier()


def test_a_call_that_ended_before_the_interrupt_is_correct_on_all_ranks(comm):
    """The others may notice its end late: they must not wait for it again."""
    group = comm.split(0)
    for _ in range(200):
        assert (group.all_reduce(np.ones(3)) == comm.size).all()
    if comm.rank == 0:
        Meanwhile(comm).interrupt(group, group.barrier)
    else:
        comm.barrier()
    comm.barrier()
