"""Plans of every verb: bound once, run repeatedly on the current contents of their arrays."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.config.settings import Config
from commlib.errors import UsageError
from tests.bodies.loopback import run
from tests.oracles.oracle import assert_same

LAYOUTS = [[0], [0, 0], [0, 1, 2], [0, 0, 1, 1]]
layouts = pytest.mark.parametrize("nodes", LAYOUTS, ids=lambda nodes: "".join(map(str, nodes)))


def _splits(comm, rank):
    return [(rank + 2 * other) % 3 for other in range(comm.size)]


def _uneven(comm):
    return [rank % 3 for rank in range(comm.size)]


# verb -> (the shape of x on a rank, the other arguments)
VERBS = {
    "all_reduce": (lambda comm: (5, 2), lambda comm: ("max",)),
    "reduce": (lambda comm: (3, 2), lambda comm: ("sum", comm.size - 1)),
    "reduce_scatter": (lambda comm: (7, 2), lambda comm: ("sum",)),
    "reduce_scatter_v": (lambda comm: (sum(_uneven(comm)), 2), lambda comm: (_uneven(comm), "sum")),
    "scan": (lambda comm: (4,), lambda comm: ("sum",)),
    "exscan": (lambda comm: (4,), lambda comm: ("sum",)),
    "broadcast": (lambda comm: (6,), lambda comm: (comm.size - 1,)),
    "all_gather": (lambda comm: (3, 2), lambda comm: ()),
    "all_gather_v": (lambda comm: (comm.rank, 2), lambda comm: ()),
    "gather": (lambda comm: (3,), lambda comm: (0,)),
    "scatter": (lambda comm: (2 * comm.size, 3), lambda comm: (0,)),
    "all_to_all": (lambda comm: (2 * comm.size, 3), lambda comm: ()),
    "all_to_all_v": (lambda comm: (sum(_splits(comm, comm.rank)), 2), lambda comm: (_splits(comm, comm.rank),)),
}


@layouts
@pytest.mark.parametrize("verb", VERBS)
def test_a_plan_matches_its_verb(nodes, verb):
    def check(comm):
        shape, arguments = (make(comm) for make in VERBS[verb])
        x = np.zeros(shape)
        plan = getattr(comm, f"plan_{verb}")(x, *arguments)
        for step in range(4):
            fresh = np.random.default_rng((comm.rank, step)).integers(0, 9, shape).astype(float)
            x[...] = fresh
            expected = getattr(comm, verb)(fresh.copy(), *arguments)
            x[...] = fresh
            got = plan() if step % 2 else plan.start().wait()
            for mine, its in zip(_flat(got), _flat(expected), strict=True):
                assert_same(mine, its)
        assert verb in repr(plan)

    run(len(nodes), check, nodes=nodes, config=Config(timeout=20))


def _flat(result):
    parts = result if isinstance(result, tuple) else (result,)
    return [part for part in parts if part is not None]


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["node", "messages"])
def test_plans_may_be_bound_before_the_first_call(nodes):
    """On a group without a board yet, and mixed with calls of the same kind."""

    def check(comm):
        group = comm.split(0)
        x, out = np.ones(3), np.zeros(3)
        plan = group.plan_all_reduce(x, out=out)
        for step in range(5):
            x[:] = step + comm.rank
            assert plan() is out and (out == 2 * step + 1).all()
            assert (group.all_reduce(x) == 2 * step + 1).all()
        again = group.plan_all_reduce(x, out=out)
        x[:] = 5
        assert again.start().wait() is out and (out == 10).all()

    run(2, check, nodes=nodes, config=Config(timeout=20))


def test_unsupported_plans_are_refused():
    def check(comm):
        x = np.zeros((4, 6))
        for call in (
            lambda: comm.plan_all_to_all(x[:, ::2]),
            lambda: comm.plan_broadcast(x[:, 1:]),
            lambda: comm.plan_all_gather(np.zeros(2), out=np.zeros((4, 2))[:, 0]),
        ):
            with pytest.raises(UsageError, match=r"plan_\w+: x and out must be contiguous"):
                call()
        with pytest.raises(UsageError, match="plan_all_reduce: x and out overlap"):
            comm.plan_all_reduce(x[:3], out=x[1:])
        with pytest.raises(UsageError, match=r"not a multiple of 2"):
            comm.plan_all_to_all(np.zeros(3))

    run(2, check)
