"""The tracker: whatever the order of gradients, ranks launch the same buckets in the same order."""

from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.data_parallel.tracker import Tracker


@st.composite
def partitions(draw: st.DrawFn) -> list[list[int]]:
    order = draw(st.permutations(range(draw(st.integers(1, 12)))))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(order) - 1)))))
    bounds = [0, *[cut for cut in cuts if cut < len(order)], len(order)]
    return [list(order[a:b]) for a, b in pairwise(bounds)]


def run_backward(tracker: Tracker, order: list[int], *, sync: bool = True, eager: bool = True) -> tuple[list[int], int]:
    """Return the launches of one backward, and how many of them were before its end."""
    tracker.begin(sync=sync, eager=eager)
    launches = [bucket for parameter in order for bucket in tracker.ready(parameter)]
    early = len(launches)
    launches += tracker.end()
    return launches, early


@given(partitions(), st.data())
def test_any_subset_in_any_order_launches_every_bucket_in_index_order(
    buckets: list[list[int]], data: st.DataObject
) -> None:
    everything = [parameter for bucket in buckets for parameter in bucket]
    tracker = Tracker(buckets)
    for _ in range(2):  # state is left clean for the next backward
        ready = data.draw(st.lists(st.sampled_from(everything), unique=True))
        launches, early = run_backward(tracker, ready, eager=data.draw(st.booleans()))
        assert launches == list(range(len(buckets)))
        assert all(set(buckets[bucket]) <= set(ready) for bucket in range(early))


def test_every_order_of_a_small_case_launches_a_bucket_as_soon_as_it_may() -> None:
    buckets = [[0, 1], [2], [3]]
    for order in permutations(range(4)):
        tracker = Tracker(buckets)
        tracker.begin()
        seen: set[int] = set()
        launched = 0
        for parameter in order:
            seen.add(parameter)
            launched += len(tracker.ready(parameter))
            complete = [set(bucket) <= seen for bucket in buckets]
            assert launched == (complete.index(False) if False in complete else 3)
        assert list(tracker.end()) == []


def test_launches_wait_for_the_end_when_not_eager() -> None:
    assert run_backward(Tracker([[0], [1]]), [0, 1], eager=False) == ([0, 1], 0)


def test_missing_parameters_were_not_ready() -> None:
    tracker = Tracker([[3, 2], [1, 0]])
    tracker.begin()
    tracker.ready(2)
    assert tracker.missing() == [3, 1, 0]


def test_no_sync_launches_nothing_and_the_next_backward_everything() -> None:
    tracker = Tracker([[0], [1]])
    assert run_backward(tracker, [0, 1], sync=False) == ([], 0)
    assert tracker.must_reduce
    assert run_backward(tracker, [1]) == ([0, 1], 0)
    assert not tracker.must_reduce


@given(st.integers(1, 5), st.lists(st.sampled_from(["backward", "local", "step", "clear"]), max_size=40))
def test_only_counts_decide_which_backward_reduces(passes: int, events: list[str]) -> None:
    """Two ranks with different graphs make the same decisions; a plain counter is the oracle."""
    trackers = Tracker([[0], [1]], passes_per_step=passes), Tracker([[0], [1]], passes_per_step=passes)
    count, fresh, dirty = 0, False, False
    for event in events:
        if event == "step":
            for tracker in trackers:
                assert tracker.must_reduce == (dirty or not fresh)
                if tracker.must_reduce:
                    tracker.begin_step()
                    assert list(tracker.end()) == [0, 1]
                tracker.stepped()
            count = 0 if dirty or not fresh else count
            fresh = dirty = False
        elif event == "clear":
            for tracker in trackers:
                tracker.cleared()
            count, fresh, dirty = 0, False, False
        else:
            count += event == "backward"
            reduces = event == "backward" and count == passes
            for tracker, order in zip(trackers, ([0, 1], [1]), strict=True):
                assert run_backward(tracker, order, sync=event == "backward")[0] == ([0, 1] if reduces else [])
            count, fresh, dirty = (0, True, False) if reduces else (count, fresh, True)


def test_a_step_without_any_backward_joins_the_others() -> None:
    tracker = Tracker([[0]])
    assert tracker.must_reduce
    run_backward(tracker, [0])
    tracker.stepped()
    assert tracker.must_reduce


def test_a_gradient_ready_twice_is_an_error() -> None:
    tracker = Tracker([[0, 1]])
    tracker.begin()
    tracker.ready(0)
    with pytest.raises(RuntimeError, match="twice"):
        tracker.ready(0)


def test_misplaced_events_are_errors() -> None:
    tracker = Tracker([[0]])
    with pytest.raises(RuntimeError, match="outside"):
        tracker.ready(0)
    with pytest.raises(RuntimeError, match="no backward"):
        tracker.end()
    tracker.begin()
    with pytest.raises(RuntimeError, match="already"):
        tracker.begin()
    with pytest.raises(RuntimeError, match="already"):
        tracker.begin_step()


def test_bad_buckets_are_refused() -> None:
    with pytest.raises(ValueError, match="one bucket only"):
        Tracker([[0], [0]])
    with pytest.raises(ValueError, match="at least 1"):
        Tracker([[0]], passes_per_step=0)


def test_clearing_drops_a_local_backward_but_not_a_reducing_one() -> None:
    tracker = Tracker([[0]], passes_per_step=2)
    tracker.begin()
    tracker.ready(0)
    tracker.cleared()
    assert not tracker.active
    run_backward(tracker, [0])
    assert tracker.begin()
    tracker.cleared()
    assert tracker.active
    assert list(tracker.end()) == [0]


def test_the_order_of_the_last_backward_is_remembered() -> None:
    tracker = Tracker([[3, 2], [1, 0]])
    run_backward(tracker, [1, 3, 0])
    assert tracker.order == [1, 3, 0]
    tracker.begin_step()
    assert tracker.order == []  # reduced without a backward


@given(partitions(), st.data())
def test_buckets_may_change_between_backwards(buckets: list[list[int]], data: st.DataObject) -> None:
    everything = sorted(parameter for bucket in buckets for parameter in bucket)
    tracker = Tracker([everything])
    order = data.draw(st.permutations(everything))
    run_backward(tracker, list(order))
    tracker.use(buckets)
    launches, early = run_backward(tracker, list(order))
    assert launches == list(range(len(buckets)))
    assert early == len(buckets)


def test_buckets_cannot_change_during_a_backward() -> None:
    tracker = Tracker([[0], [1]])
    tracker.begin()
    with pytest.raises(RuntimeError, match="in progress"):
        tracker.use([[1], [0]])
    tracker.end()
    tracker.use([[1], [0]])
    assert tracker.missing() == [1, 0]
