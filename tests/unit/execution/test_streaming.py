"""The executor: programs over a transport that records, fails, or delivers late."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from commlib.execution.reduce_function import ReduceFunction
from commlib.execution.streaming import WINDOW, Region, execute
from commlib.schedule import program
from commlib.schedule.ir import EMPTY, Copy, Program, Recv, Round, Send, Span
from commlib.schedule.layout import blocks, cut, even, uneven
from commlib.transport.loopback import transports


def on_wait():
    pass


def one_rank(rounds, regions):
    return Program("test", "test", 0, 1, 0, tuple(region.layout.chunks for region in regions), tuple(rounds))


def test_copies_run_in_order_between_regions():
    first, second = Region(np.arange(4.0), even(4, 2)), Region(np.zeros(4), even(4, 2))
    copies = (Copy(Span(0, 1), Span(3, 4)), Copy(Span(3, 4), Span(1, 2)))
    execute(
        one_rank([Round(copies=copies)], [first, second]), [[first, second]], transports(1)[0], tag=1, on_wait=on_wait
    )
    assert first.array.tolist() == [0, 1, 0, 1] and second.array.tolist() == [0, 0, 0, 1]


def test_a_rank_may_send_to_itself_or_nothing():
    region = Region(np.arange(4.0), even(4, 2))
    rounds = [Round((Send(0, Span(0, 1)), Send(0, EMPTY)), (Recv(0, Span(1, 2)), Recv(0, EMPTY)))]
    execute(one_rank(rounds, [region]), [[region]], transports(1)[0], tag=1, on_wait=on_wait)
    assert region.array.tolist() == [0, 1, 0, 1]


def test_a_span_across_regions_is_an_error():
    regions = [Region(np.zeros(2), even(2, 2)), Region(np.zeros(2), even(2, 2))]
    rounds = [Round(copies=(Copy(Span(0, 2), Span(1, 3)),))]
    with pytest.raises(Exception):  # noqa: B017  # whatever it is, it must not write beyond
        execute(one_rank(rounds, regions), [regions], transports(1)[0], tag=1, on_wait=on_wait)
    assert not regions[0].array.any() and not regions[1].array.any()


def test_the_wrong_number_of_regions_is_an_error():
    region = Region(np.zeros(2), even(2, 2))
    with pytest.raises(ValueError, match="zip"):
        execute(one_rank([], [region]), [[region, region]], transports(1)[0], tag=1, on_wait=on_wait)


def all_ranks(size, function):
    failures = []

    def use(end):
        try:
            function(end)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(end,), daemon=True) for end in transports(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


def test_operands_are_ordered_by_rank_so_all_ranks_get_the_same_bits():
    terms = np.random.default_rng(0).normal(size=(5, 1000)).astype(np.float32)
    results = {}

    def use(end):
        data = terms[end.rank].copy()
        steps = program("all_reduce", "recursive_doubling", end.rank, 5)
        region = [Region(data, even(1000, chunks)) for chunks in steps.regions]
        execute(steps, [region], end, tag=3, on_wait=on_wait, reduce_op=ReduceFunction("float32", "sum"))
        results[end.rank] = data.tobytes()

    all_ranks(5, use)
    assert len(set(results.values())) == 1


def test_chunks_may_be_uneven_or_empty():
    def use(end):
        data = np.full(6, -1)
        layout = uneven([0, 5, 0, 1])
        start, stop = layout.offsets[end.rank : end.rank + 2]
        data[start:stop] = end.rank
        execute(program("all_gather", "ring", end.rank, 4), [[Region(data, layout)]], end, tag=3, on_wait=on_wait)
        assert data.tolist() == [1, 1, 1, 1, 1, 3]

    all_ranks(4, use)


class Requests:
    """A transport that counts posted requests."""

    def __init__(self, end):
        self.end, self.rank, self.size, self.made = end, end.rank, end.size, []

    def send(self, peer, tag, data):
        return self.note(self.end.send(peer, tag, data))

    def recv(self, peer, tag, into):
        return self.note(self.end.recv(peer, tag, into))

    def note(self, request):
        self.made.append(request)
        return request

    def __getattr__(self, name):
        return getattr(self.end, name)


def test_an_exception_in_the_wait_hook_cancels_posted_requests():
    end = Requests(transports(2)[0])

    def give_up():
        raise TimeoutError("enough")

    region = Region(np.zeros(4), even(4, 2))
    steps = program("all_reduce", "recursive_doubling", 0, 2)
    with pytest.raises(TimeoutError, match="enough"):
        execute(steps, [[Region(region.array, even(4, n)) for n in steps.regions]], end, tag=3, on_wait=give_up)
    assert len(end.made) == 2
    assert not any(request.withdraw() for request in end.made), "some are still posted"


@pytest.mark.parametrize("tag", [0, 7, 2**61])
def test_tags_separate_programs(tag):
    """Two programs in flight between the same ranks, in opposite orders."""

    def use(end):
        arrays = [np.full(1, 10.0 * end.rank), np.full(1, 10.0 * end.rank + 1)]

        def go(which):
            steps = program("all_reduce", "recursive_doubling", end.rank, 2)
            region = [Region(arrays[which], even(1, n)) for n in steps.regions]
            execute(steps, [region], end, tag=tag + which, on_wait=on_wait, reduce_op=ReduceFunction("float64", "sum"))

        threads = [threading.Thread(target=go, args=(which,)) for which in ((0, 1) if end.rank else (1, 0))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert [float(array[0]) for array in arrays] == [10, 12]

    all_ranks(2, use)


@pytest.mark.parametrize("number", [1, 2, 3, 9])
@pytest.mark.parametrize("name", ["ring", "halving_doubling", "direct", "recursive_doubling"])
def test_concurrent_blocks_match_one_block(name, number):
    terms = np.random.default_rng(1).integers(0, 100, size=(3, 1001)).astype(np.float32)

    def use(end):
        data = terms[end.rank].copy()
        steps = program("all_reduce", name, end.rank, 3)
        regions = [[Region(data, layout)] for layout in blocks(len(data), steps.regions[0], number)]
        execute(steps, regions, end, tag=3, on_wait=on_wait, reduce_op=ReduceFunction("float32", "sum"))
        assert (data == terms.sum(axis=0)).all()

    all_ranks(3, use)


def test_the_window_limits_running_blocks():
    """Each block needs memory for arriving data; a window of one would not overlap anything."""
    most = [0]

    class Counting:
        def __init__(self, end):
            self.end, self.rank, self.size = end, end.rank, end.size

        def send(self, peer, tag, data):
            return self.end.send(peer, tag, data)

        def recv(self, peer, tag, into):
            return self.end.recv(peer, tag, into)

        def wait_any(self, requests, on_wait):
            if self.rank == 0:
                most[0] = max(most[0], len(requests) // 2)
            return self.end.wait_any(requests, on_wait)

    def use(end):
        data = np.full(4000, float(end.rank))
        steps = program("all_reduce", "ring", end.rank, 4)
        regions = [[Region(data, layout)] for layout in blocks(len(data), 4, 20)]
        counting: Any = Counting(end)
        execute(steps, regions, counting, tag=3, on_wait=on_wait, reduce_op=ReduceFunction("float64", "sum"))
        assert (data == 6).all()

    all_ranks(4, use)
    assert 1 < most[0] <= WINDOW


def test_uneven_chunks_can_be_sliced():
    def use(end):
        layout = uneven([7, 0, 5, 100])
        data = np.zeros(112)
        start, stop = layout.slice_of(end.rank)
        data[start:stop] = end.rank + 1
        steps = program("all_gather", "ring", end.rank, 4)
        assert steps.sends_single_chunks
        execute(steps, [[Region(data, piece)] for piece in cut(layout, 3)], end, tag=3, on_wait=on_wait)
        assert data.tolist() == [1.0] * 7 + [3.0] * 5 + [4.0] * 100

    all_ranks(4, use)
    assert not program("all_gather", "bruck", 0, 4).sends_single_chunks


def test_many_operands_are_combined_at_once_and_rounded_once():
    """Half precision may travel unconverted where no partial sum does: 2048 + 1 + 1 is 2050 in float16, not 2048."""
    terms = np.array([[2048], [1], [1]], np.float16)

    def use(end):
        data = np.repeat(terms[end.rank], 6)
        steps = program("all_reduce", "direct", end.rank, 3)
        execute(
            steps, [[Region(data, even(6, 3))]], end, tag=3, on_wait=on_wait, reduce_op=ReduceFunction("float16", "sum")
        )
        assert (data == 2050).all()

    all_ranks(3, use)
