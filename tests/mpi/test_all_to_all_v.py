"""all_to_all_v between processes: counts of every kind, memory of every kind, and counts that disagree."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from commlib.communicator import Communicator
from commlib.config.settings import Config
from commlib.errors import MismatchError, PeerError, StallError
from commlib.runtime.process import Runtime
from commlib.transport.mpi import MpiTransport
from tests.bodies import uneven_all_to_all as uneven

WAYS: dict[str, dict[str, Any]] = {
    "reads": {},
    "slots": {"peer_reads": False, "slot_kib": 16},
    "messages": {"node_path": False},
}


@pytest.fixture(params=WAYS)
def group(comm, request):
    """A group of all ranks that handles ordinary arrays in one of the ways."""
    created = Communicator(
        MpiTransport(comm.native.Dup()), Runtime(Config(timeout=20, check_first=2, **WAYS[request.param]))
    )
    yield created
    comm.barrier()


@settings(max_examples=15, deadline=None)
@given(case=uneven.cases(20_000))
def test_all_ways(comm, case):
    uneven.check(comm, case)


@settings(max_examples=5, deadline=None)
@given(case=uneven.cases(20_000))
def test_a_result_of_the_wrong_size_fails_on_its_rank_only(comm, case):
    for odd in range(comm.size):
        uneven.check_misfit(comm, case, odd)


@pytest.mark.parametrize("count", [10, 5000, 200_000])
def test_changing_counts_over_many_calls(group, count):
    """Many calls with changing counts let a fast rank run ahead of a slow one."""
    rank, size = group.rank, group.size
    for step in range(20):
        counts = [[(3 * a + b + step) % 5 * count // 4 for b in range(size)] for a in range(size)]
        takes = [sent[rank] for sent in counts]
        x = np.repeat(np.arange(size) + 10.0 * rank + step, counts[rank])
        expected = np.concatenate([np.full(n, 10.0 * sender + rank + step) for sender, n in enumerate(takes)])
        received, _ = group.all_to_all_v(x, counts[rank], takes=takes if step % 2 else None)
        assert (received == expected).all()
        received, lengths = group.all_to_all_v(x, counts[rank], takes=takes, out=np.empty_like(expected))
        assert (received == expected).all() and lengths.tolist() == takes


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("count", [1, 3000, 200_000])
@pytest.mark.parametrize("wrong", [-1, 1])
def test_counts_that_do_not_agree(group, count, wrong):
    """They are detected however late; the ranks concerned get an error, and the group remains usable."""
    rank, size = group.rank, group.size
    counts = [count] * size
    for _ in range(4):
        assert group.all_to_all_v(np.full(size * count, rank), counts, takes=counts)[1].tolist() == counts
    for _ in range(2):
        takes = counts.copy()
        if rank == 0:
            takes[1] += wrong
        x = np.full(size * count, rank)
        concerned = (0, 1) if group.group.config.node_path else (0,)
        if rank in concerned:
            with pytest.raises(MismatchError, match=rf"rank 1 sent .* to rank 0, which expected {count + wrong}"):
                group.all_to_all_v(x, counts, takes=takes)
        else:
            assert (group.all_to_all_v(x, counts, takes=takes)[0] == np.repeat(np.arange(size), count)).all()
        assert (group.all_to_all_v(x, counts, takes=counts)[0] == np.repeat(np.arange(size), count)).all()
        assert (group.all_reduce(np.ones(3)) == size).all()


@pytest.mark.ranks(min=2)
def test_a_failed_work_fails_alone(comm):
    """The other works in flight are not affected."""
    size = comm.size
    x, counts = np.arange(size * 4000.0), [4000] * size
    takes = [[4000 + (comm.rank == 0 and rank == 1) for rank in range(size)], counts]
    works = [comm.all_to_all_v_async(x, counts, takes=takes[step != 2]) for step in range(5)]
    for step, work in enumerate(works):
        if step == 2 and comm.rank < 2:
            assert isinstance(work.exception(), MismatchError)
        else:
            assert (work.wait()[0] == np.tile(x[4000 * comm.rank :][:4000], size)).all()


@pytest.mark.ranks(min=2)
def test_a_late_rank_is_named(comm):
    late = Communicator(MpiTransport(comm.native.Dup()), Runtime(Config(timeout=1)))
    late.barrier()
    x, counts = np.zeros(comm.size * 50_000), [50_000] * comm.size
    if comm.rank == comm.size - 1:
        time.sleep(3)
    else:
        with pytest.raises((StallError, PeerError)) as caught:
            late.all_to_all_v(x, counts, takes=counts)
        if isinstance(caught.value, StallError):
            assert f"not arrived: rank {comm.size - 1}" in str(caught.value)
    comm.barrier()
