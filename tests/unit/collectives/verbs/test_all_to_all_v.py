"""all_to_all_v on ranks as threads: on a node, by messages, with and without known counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from commlib.config.settings import Config
from commlib.errors import MismatchError, UsageError
from commlib.kernels.fields import uneven_exchange
from tests.bodies import uneven_all_to_all as cases
from tests.bodies.loopback import run

LAYOUTS = [[0], [0, 0], [0, 1], [0, 0, 0], [0, 1, 1], [0, 0, 1, 1]]
layouts = pytest.mark.parametrize("nodes", LAYOUTS, ids=lambda nodes: "".join(map(str, nodes)))


@layouts
@pytest.mark.parametrize("reads", [True, False])
@settings(max_examples=6, deadline=None)
@given(case=cases.cases(2000))
def test_all_paths_match_numpy(nodes, reads, case):
    """With slots of 1 KiB, ordinary arrays that are not read directly go through in many windows."""
    run(
        len(nodes),
        lambda comm: cases.check(comm, case),
        nodes=nodes,
        config=Config(timeout=20, slot_kib=1, peer_reads=reads),
    )


@layouts
@settings(max_examples=5, deadline=None)
@given(case=cases.cases(2000))
def test_a_result_of_the_wrong_size_raises_on_its_rank_alone(nodes, case):
    def check(comm):
        for odd in range(comm.size):
            cases.check_misfit(comm, case, odd)
            assert (comm.all_reduce(np.ones(3)) == comm.size).all()

    run(len(nodes), check, nodes=nodes, config=Config(timeout=20, slot_kib=1))


@pytest.mark.parametrize("count", [1, 3000, 100_000])
@pytest.mark.parametrize("symmetric", ["", "x", "out"])
@pytest.mark.parametrize("reads", [True, False])
def test_mismatched_counts_raise_on_the_ranks_involved(count, symmetric, reads):
    """Rank 0 expects one row too many from rank 1; rank 2 is not involved, and gets its data."""

    def check(comm):
        counts = [count] * 3
        x, out = comm.empty(3 * count), comm.empty(3 * count + 1)
        x, out = x if "x" in symmetric else x.copy(), out if "out" in symmetric else out.copy()
        x[:] = comm.rank + 1
        for _ in range(3):
            takes = [count, count + (comm.rank == 0), count]
            if comm.rank < 2:
                with pytest.raises(MismatchError) as caught:
                    comm.all_to_all_v(x, counts, takes=takes, out=out[: sum(takes)])
                assert f"rank 1 sent {count} row" in str(caught.value)
                assert f"to rank 0, which expected {count + 1}" in str(caught.value)
            else:
                received, _ = comm.all_to_all_v(x, counts, takes=takes, out=out[: 3 * count])
                assert (received == np.repeat([1, 2, 3], count)).all()
            received, _ = comm.all_to_all_v(x, counts, takes=counts)
            assert (received == np.repeat([1, 2, 3], count)).all()

    run(3, check, config=Config(timeout=20, peer_reads=reads))


@pytest.mark.parametrize("wrong", [-1, 1, 5000])
def test_with_messages_the_receiver_raises(wrong):
    """The other ranks get their data, and the group stays in step."""

    def check(comm):
        x = np.arange(30.0)
        for _ in range(3):
            takes = [10, 10 + wrong * (comm.rank == 0), 10]
            if comm.rank == 0:
                with pytest.raises(MismatchError, match=rf"rank 1 sent .*rows to rank 0, which expected {10 + wrong}"):
                    comm.all_to_all_v(x, [10] * 3, takes=takes)
            else:
                received, _ = comm.all_to_all_v(x, [10] * 3, takes=takes)
                assert (received == np.tile(x[10 * comm.rank :][:10], 3)).all()
            assert (comm.all_reduce(np.ones(3)) == 3).all()

    run(3, check, nodes=[0, 1, 2], config=Config(timeout=20))


@layouts
def test_known_and_unknown_counts_can_be_mixed(nodes):
    def check(comm):
        takes = None if comm.rank == 0 else [1] * comm.size
        for _ in range(2):
            with pytest.raises(MismatchError, match="counted"):
                comm.all_to_all_v(np.ones(comm.size), [1] * comm.size, takes=takes)
            assert (comm.all_reduce(np.ones(3)) == comm.size).all()

    if len(nodes) > 1:
        run(len(nodes), check, nodes=nodes, config=Config(timeout=20))


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]])
def test_an_error_of_one_rank_is_raised_on_it_alone(nodes):
    """Then nothing is sent, not even in a repeated call."""

    def check(comm):
        x, one = np.ones((4, 2)), [2, 2]
        for _ in range(2):
            for arguments, message in (
                (([2, 1], None, None), "add up to 4"),
                (([2, 2, 0], None, None), "2 lengths"),
                (([5, -1], one, None), "none negative"),
                (([2.0, 2.0], one, None), "an integer"),
                ((one, [2, 2.0], None), "an integer"),
                ((one, [2], None), "takes"),
                ((one, [3, -1], None), "none negative"),
                ((one, [2 + (comm.rank == 0), 2 + (comm.rank == 1)], None), "keeps 2 rows by splits, but 3 by takes"),
                ((one, one, np.ones((3, 2))), "out has shape"),
                ((one, one, np.ones((4, 3))), "out has shape"),
                ((one, None, np.ones((4, 3))), "out has shape"),
                ((one, None, np.ones((4, 2), np.float32)), "float32"),
            ):
                splits, takes, out = arguments
                with pytest.raises(UsageError, match=message):
                    comm.all_to_all_v(x, splits, takes=takes, out=out)
            comm.all_to_all_v(x, one, takes=one)
            comm.all_to_all_v(x, one)
        with pytest.raises(UsageError, match="0-dimensional"):
            comm.all_to_all_v(np.array(1.0), [1, 0])

    run(2, check, nodes=nodes)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]])
def test_results_may_overlap_or_be_non_contiguous(nodes):
    def check(comm):
        for _ in range(2):
            memory = np.arange(9.0)
            received, _ = comm.all_to_all_v(memory[:8], [4, 4], takes=[4, 4], out=memory[1:])
            expected = np.tile(np.arange(4.0) + 4 * comm.rank, 2)
            assert (received == expected).all() and (memory[1:] == expected).all()
            wide = np.zeros((8, 2))
            comm.all_to_all_v(np.arange(8.0), [4, 4], takes=[4, 4], out=wide[:, 1])
            assert (wide[:, 1] == expected).all() and not wide[:, 0].any()
        with pytest.raises(UsageError, match="contiguous"):
            comm.plan_all_to_all_v(np.arange(8.0), [4, 4], takes=[4, 4], out=wide[:, 1])

    run(2, check, nodes=nodes)


def test_rows_may_be_numpy_numbers():
    def check(comm):
        counts = np.array([1, 2])
        received, lengths = comm.all_to_all_v(np.arange(3), counts)
        assert lengths.tolist() == [counts[comm.rank]] * 2
        for _ in range(2):
            received, _ = comm.all_to_all_v(np.arange(3), counts, takes=lengths)
            assert len(received) == lengths.sum()

    run(2, check)


def test_the_first_call_creates_the_board():
    """The first call creates it; a failed call leaves the group usable."""

    def check(comm):
        group = comm.split(0)
        with pytest.raises(MismatchError, match="which expected 2"):
            group.all_to_all_v(np.ones(2), [1, 1], takes=[1, 2] if comm.rank == 0 else [1, 1])
        assert group.all_to_all_v(np.ones(2), [1, 1])[1].tolist() == [1, 1]
        with pytest.raises(MismatchError, match="call number 3;"):
            group.all_reduce(np.ones(1 + comm.rank))

    run(2, check)


def test_notes_fit_behind_the_slots_of_many_ranks():
    assert uneven_exchange.note_bytes(2) == 128
    run(8, lambda comm: comm.all_to_all_v(np.ones(8 * 300), [300] * 8), config=Config(timeout=20, slot_kib=1))
