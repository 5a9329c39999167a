"""The verbs on the tensors of a framework of three lines, and the functions that users call."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from commlib.errors import UsageError
from commlib.tensor_verbs import (
    Bridge,
    OrderedVerbs,
    ReturningVerbs,
    TensorCall,
    VerbMaker,
    WritingVerbs,
    check_ordered,
    choose_root,
)
from tests.bodies.loopback import run


@dataclass
class Boxed:
    """A tensor: an array in a box."""

    array: Any

    def finish(self, bridge: Any, answer: Any) -> Boxed:
        assert answer is self.array
        return self


BRIDGE = Bridge(Boxed, lambda box: box.array, Boxed)
ORDERED = OrderedVerbs(BRIDGE)
WRITING = WritingVerbs(BRIDGE, lambda box: box)
RETURNING = ReturningVerbs(BRIDGE)
SIZE = 3

make = VerbMaker(__name__, "Boxed")
all_reduce, all_reduce_async = make(ORDERED.all_reduce)
broadcast_, broadcast_async_ = make(WRITING.broadcast_)


def box(*numbers: float) -> Boxed:
    return Boxed(np.array(numbers))


def both(call: Any) -> list[Any]:
    """Run a call twice: at once, and on the progress thread."""
    return [call.run(), call.start().wait()]


def test_each_verb_matches_the_core() -> None:
    def body(comm: Any) -> None:
        rank, size = comm.rank, comm.size
        mine, last = box(rank, 10.0), size - 1
        everyone = np.concatenate([[r, 10.0] for r in range(size)])
        for got in both(ORDERED.all_reduce(mine, "max", ranks=comm)):
            np.testing.assert_array_equal(got.array, [last, 10.0])
        for got in both(ORDERED.all_gather(mine, ranks=comm)) + both(ORDERED.all_gather_v(mine, ranks=comm)):
            np.testing.assert_array_equal(got.array, everyone)
        for got in both(ORDERED.broadcast(mine, last, ranks=comm)):
            np.testing.assert_array_equal(got.array, [last, 10.0])
        for got in both(ORDERED.reduce(mine, root=last, ranks=comm)):
            assert (got is None) == (rank != last)
        for got in both(ORDERED.gather(mine, last, ranks=comm)):
            assert (got is None) if rank != last else np.array_equal(got.array, everyone)
        whole = Boxed(np.arange(2.0 * size)) if rank == last else None
        for got in both(ORDERED.scatter(whole, last, ranks=comm)):
            np.testing.assert_array_equal(got.array, [2.0 * rank, 2.0 * rank + 1])
        for got in both(ORDERED.reduce_scatter(Boxed(np.arange(1.0 * size)), ranks=comm)):
            np.testing.assert_array_equal(got.array, [size * rank])
        for got in both(ORDERED.all_to_all(Boxed(np.full(size, rank)), ranks=comm)):
            np.testing.assert_array_equal(got.array, range(size))
        for splits in ([1] * size, Boxed(np.ones(size, int))):
            for out, rows in both(ORDERED.all_to_all_v(Boxed(np.full(size, rank)), splits, ranks=comm)):
                np.testing.assert_array_equal(out.array, range(size))
                np.testing.assert_array_equal(rows.array, [1] * size)
        np.testing.assert_array_equal(mine.array, [rank, 10.0])  # none of them wrote to it
        assert both(ORDERED.all_gather_object(rank, ranks=comm)) == [list(range(size))] * 2
        assert both(ORDERED.broadcast_object(rank, last, ranks=comm)) == [last] * 2
        assert both(ORDERED.barrier(ranks=comm)) == [None] * 2

    run(SIZE, body)


def test_messages_are_written_or_returned() -> None:
    def body(comm: Any) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        mine, like = box(comm.rank, 1.0), box(-1.0, -1.0)
        got = RETURNING.send_recv(mine, right, like, left, ranks=comm).run()
        np.testing.assert_array_equal(got.array, [left, 1.0])
        work = RETURNING.recv(like, left, 5, ranks=comm).start()
        assert ORDERED.send(mine, right, 5, ranks=comm).run() is None
        np.testing.assert_array_equal(work.wait().array, [left, 1.0])
        np.testing.assert_array_equal(like.array, [-1.0, -1.0])
        assert WRITING.send_recv(mine, right, like, left, ranks=comm).run() is like
        np.testing.assert_array_equal(like.array, [left, 1.0])
        work = WRITING.recv(like, left, 6, ranks=comm).start()
        ORDERED.send(box(7.0, 8.0), right, 6, ranks=comm).run()
        assert work.wait() is work.result() is like
        np.testing.assert_array_equal(like.array, [7.0, 8.0])

    run(SIZE, body)


def test_results_may_use_supplied_memory() -> None:
    """TensorFlow adopts memory that begins on a cache line: the verbs write their results into memory it supplies."""

    def body(comm: Any) -> None:
        given: list[Any] = []

        def room(array: Any) -> Any:
            given.append(np.empty_like(array))
            return given[-1]

        verbs = OrderedVerbs(Bridge(Boxed, lambda box: box.array, Boxed, room))
        for call in (verbs.all_reduce(box(1.0), ranks=comm), verbs.broadcast(box(1.0), ranks=comm)):
            for got in both(call):
                assert any(np.shares_memory(got.array, memory) for memory in given)

    run(SIZE, body)


def test_users_call_functions() -> None:
    def body(comm: Any) -> None:
        mine = box(1.0)
        np.testing.assert_array_equal(all_reduce(mine, ranks=comm).array, [SIZE])
        work = all_reduce_async(mine, op="mean", ranks=comm).then(lambda got: got.array + 1)
        np.testing.assert_array_equal(work.wait(), [2.0])
        assert work.done() and work.exception() is None
        assert broadcast_(mine, 0, ranks=comm) is broadcast_async_(mine, 0, ranks=comm).wait() is mine

    run(SIZE, body)


def test_functions_have_names_docstrings_and_signatures() -> None:
    assert all_reduce.__doc__ == inspect.getdoc(OrderedVerbs.all_reduce)
    assert all_reduce_async.__doc__ == "Start `all_reduce`."
    assert [f.__name__ for f in (broadcast_, broadcast_async_)] == ["broadcast_", "broadcast_async_"]
    assert str(inspect.signature(all_reduce)) == (
        "(tensor: 'Boxed', op: 'Op' = 'sum', *, algorithm: 'AlgorithmName' = 'auto', ranks: 'Ranks | None' = None) "
        "-> 'Boxed'"
    )
    assert inspect.signature(all_reduce_async).return_annotation == "Work[Boxed]"
    assert pickle.loads(pickle.dumps(all_reduce)) is all_reduce


def test_an_adapter_may_run_calls_elsewhere() -> None:
    def elsewhere(call: TensorCall[Any]) -> Any:
        return call.verb, call.inputs, call.host(lambda x, op, **options: (x, op), 5)

    verb: Any = VerbMaker(__name__, "Boxed", elsewhere).waiting(ORDERED.all_reduce)

    def body(comm: Any) -> None:
        mine: Any = object()  # it is never read
        assert verb(mine, "max", ranks=comm) == ("all_reduce", (mine,), (5, "max"))

    run(1, body)


def test_a_root_has_two_names() -> None:
    assert (choose_root(None, None), choose_root(2, None), choose_root(None, 3)) == (0, 2, 3)
    with pytest.raises(UsageError, match="two names of one argument"):
        choose_root(0, 0)
    check_ordered(None, None)
    for name, process_set in (("x", None), (None, object())):
        with pytest.raises(UsageError, match="neither name nor process_set"):
            check_ordered(name, process_set)
