"""Negotiation: for any order of requests, all ranks launch the same operations in the same order."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.coordinator.negotiation import RESTART, Failure, JoinEnd, Launch, Negotiation, RequestList, Restart
from commlib.coordinator.op_request import OpRequest


def request(name, verb="allreduce", shape=(2,), dtype="float32", repeats=True, **options):
    return OpRequest(verb, name, ((dtype, shape),), tuple(options.items()), repeats)


JOIN = OpRequest("join", "join", repeats=False)


class Ranks:
    """All ranks of a group, with a perfect network."""

    def __init__(self, size, capacity=4096):
        self.ranks = [Negotiation(rank, range(size), capacity=capacity) for rank in range(size)]

    def submit(self, rank, *requests):
        for each in requests:
            self.ranks[rank].submit(each)

    def cycle(self, expired=None) -> list[Any]:
        """Run one cycle; return the responses, which all ranks must have alike."""
        announcements = [each.announce() for each in self.ranks]
        (self.width,) = {each.width for each in announcements}
        common = -1
        for each in announcements:
            common &= each.bits
        self.gathered = any(each.requests for each in announcements)
        everyone: list[RequestList] = []
        if self.gathered or expired is not None:
            waits = [tuple(each.waiting) if expired else () for each in self.ranks]
            given_up = [tuple((expired or {}).get(rank, ())) for rank in range(len(announcements))]
            everyone = [
                RequestList(*each)
                for each in zip([each.requests for each in announcements], given_up, waits, strict=True)
            ]
        bits = [bit for bit in range(self.width) if common >> bit & 1]
        responses = [each.agree(bits, everyone) for each in self.ranks]
        seen = [[(type(v), v.request.name, *v[1:]) for v in each] for each in responses]
        assert all(each == seen[0] for each in seen)
        return responses[0]

    def launched(self, **options):
        responses = self.cycle(**options)
        assert all(isinstance(response, Launch) for response in responses), responses
        return [response.request.name for response in responses]


def test_an_operation_is_launched_after_the_last_request():
    ranks = Ranks(3)
    ranks.submit(0, request("a"))
    ranks.submit(2, request("a"))
    assert ranks.launched() == []
    assert ranks.ranks[0].waiting and not ranks.ranks[1].waiting
    ranks.submit(1, request("a"))
    assert ranks.launched() == ["a"]
    assert not ranks.ranks[0].waiting


def test_an_agreed_name_costs_a_bit():
    ranks = Ranks(2)
    for again in range(3):
        for rank in range(2):
            assert not ranks.ranks[rank].has_unannounced
            ranks.submit(rank, request("a"))
            assert ranks.ranks[rank].has_unannounced
        assert ranks.launched() == ["a"]
        assert ranks.gathered == (again == 0)


def test_a_bit_waits_for_the_other_ranks():
    ranks = Ranks(2)
    for rank in range(2):
        ranks.submit(rank, request("a"))
    ranks.cycle()
    ranks.submit(0, request("a"))
    assert ranks.launched() == [] == ranks.launched()
    assert not ranks.ranks[0].has_unannounced  # it was announced once, which is enough
    ranks.submit(1, request("a"))
    assert ranks.launched() == ["a"]


def test_names_without_repetition_get_no_bit():
    ranks = Ranks(2)
    for rank in range(2):
        ranks.submit(rank, request("once", repeats=False))
    assert ranks.launched() == ["once"]
    assert ranks.launched() == [] and ranks.width == 0


def test_a_changed_request_is_negotiated_again():
    ranks = Ranks(2)
    for rank in range(2):
        ranks.submit(rank, request("a"))
    ranks.cycle()
    ranks.submit(0, request("a"))  # by its bit
    ranks.submit(1, request("a", shape=(3,)))  # in full
    assert ranks.launched() == []
    assert ranks.ranks[0].has_unannounced  # its bit is invalid
    (response,) = ranks.cycle()
    assert isinstance(response, Failure)
    assert response.reason == "the ranks disagree: shape is (2,) on rank 0 but (3,) on rank 1"
    for rank in range(2):  # usable: the same change on all ranks
        ranks.submit(rank, request("a", shape=(3,)))
    assert ranks.launched() == ["a"]


@pytest.mark.parametrize(
    "other, expected",
    [
        ({"verb": "allgather"}, "verb is allreduce on ranks 0, 2 but allgather on rank 1"),
        ({"dtype": "int64"}, "dtype is float32 on ranks 0, 2 but int64 on rank 1"),
        ({"shape": ()}, "shape is (2,) on ranks 0, 2 but () on rank 1"),
        ({"shape": (None, 2)}, "shape is (2,) on ranks 0, 2 but (any, 2) on rank 1"),
        ({"op": "max"}, "op is sum on ranks 0, 2 but max on rank 1"),
        ({"scale": 0.5}, "scale is 1.0 on ranks 0, 2 but 0.5 on rank 1"),
        ({"scale": 0.5, "op": "max"}, "op is sum on ranks 0, 2 but max on rank 1; scale is 1.0"),
    ],
)
def test_a_difference_is_named_with_values_and_ranks(other, expected):
    ranks = Ranks(3)
    usual = {"op": "sum", "scale": 1.0}
    for rank in range(3):
        ranks.submit(rank, request("x", **{**usual, **(other if rank == 1 else {})}), request("y"))
    responses = ranks.cycle()
    assert [type(response) for response in responses] == [Failure, Launch]
    assert expected in responses[0].reason


def test_names_of_ranks_are_those_of_the_members():
    both = [Negotiation(rank, [3, 7]) for rank in range(2)]
    for rank, each in enumerate(both):
        each.submit(request("x", shape=(rank,)))
    lists = [RequestList(each.announce().requests) for each in both]
    (response,) = both[0].agree([], lists)
    assert isinstance(response, Failure)
    assert response.reason == "the ranks disagree: shape is (0,) on rank 3 but (1,) on rank 7"


def test_a_pending_name_may_not_be_requested_again():
    ranks = Ranks(1)
    ranks.submit(0, request("x"))
    with pytest.raises(ValueError, match="allgather 'x': an operation of this name is in flight already"):
        ranks.submit(0, request("x", verb="allgather"))
    assert ranks.launched() == ["x"]
    ranks.submit(0, request("x"))


def test_an_evicted_name_is_announced_in_full_again():
    ranks = Ranks(2, capacity=2)
    for name in ("a", "b"):
        for rank in range(2):
            ranks.submit(rank, request(name))
    assert ranks.launched() == ["a", "b"]
    ranks.submit(0, request("a"))  # a bit, which is about to be given to c
    for rank in range(2):
        ranks.submit(rank, request("c"))
    assert ranks.launched() == ["c"]
    ranks.submit(1, request("a"))
    assert ranks.launched() == ["a"]
    assert ranks.width == 2  # c has a's bit, and not one more


def test_joined_ranks_count_as_requesting_everything():
    ranks = Ranks(3)
    for rank in range(3):
        ranks.submit(rank, request("known"))
    ranks.cycle()
    ranks.submit(0, request("early"))
    ranks.submit(1, request("early"))
    assert ranks.launched() == []
    ranks.submit(2, JOIN)
    assert [(v.request.name, v.joined) for v in ranks.cycle()] == [("early", {2})]
    for rank in range(2):
        ranks.submit(rank, request("known"), request("new"))
    assert [(v.request.name, v.joined) for v in ranks.cycle()] == [("known", {2}), ("new", {2})]
    for rank, root in ((0, 2), (1, 2)):
        ranks.submit(rank, request("from it", root=root))
    (response,) = ranks.cycle()
    assert response.reason == "its root, rank 2, has joined and has no data"
    ranks.submit(1, JOIN)
    assert ranks.cycle() == []
    ranks.submit(0, JOIN)
    (response,) = ranks.cycle()
    assert isinstance(response, JoinEnd) and response.last == 0
    for rank in range(3):  # and negotiation continues
        ranks.submit(rank, request("known"))
    assert [(v.request.name, v.joined) for v in ranks.cycle()] == [("known", frozenset())]


def test_ranks_that_join_at_once_launch_nothing():
    ranks = Ranks(2)
    for rank in range(2):
        ranks.submit(rank, request("known"))
    ranks.cycle()
    for rank in range(2):
        ranks.submit(rank, JOIN)
    (response,) = ranks.cycle()
    assert isinstance(response, JoinEnd) and response.last == 1


@pytest.mark.parametrize("known", [False, True])
def test_an_abandoned_operation_fails_on_all_ranks(known):
    ranks = Ranks(3)
    if known:
        for rank in range(3):
            ranks.submit(rank, request("x"))
        ranks.cycle()
    ranks.submit(0, request("x"))
    ranks.submit(1, request("x"))
    ranks.submit(2, request("other"))
    assert ranks.launched() == []
    (response,) = ranks.cycle(expired={0: ["x"]})
    assert response.late and response.reason == "not submitted by rank 2; rank 2 waits for 'other'"
    assert [list(each.waiting) for each in ranks.ranks] == [[], [], ["other"]]
    for rank in range(3):
        ranks.submit(rank, request("x"))
    assert ranks.launched() == ["x"]


def test_a_request_in_the_last_cycle_is_not_abandoned():
    ranks = Ranks(2)
    ranks.submit(0, request("x"))
    ranks.cycle()
    ranks.submit(1, request("x"))
    assert ranks.launched(expired={0: ["x"]}) == ["x"]


def test_operations_waiting_for_a_restarting_rank_are_abandoned():
    """Ranks waited for a rank that had returned to its last commit alone, in full requests and by bits."""
    ranks = Ranks(3)
    for rank in range(3):
        ranks.submit(rank, request("known"))
    ranks.cycle()
    ranks.submit(0, request("known"))
    ranks.submit(1, request("new"))
    ranks.submit(2, request("abandoned"))
    assert ranks.launched() == []
    ranks.submit(2, request("not yet told"), RESTART)
    assert ranks.cycle() == [Restart(RESTART, (2,), complete=False)]
    assert [list(each.waiting) for each in ranks.ranks] == [[], [], ["elastic.run"]]
    ranks.submit(0, request("known"))  # bits alone, again in each cycle until all restart
    assert ranks.cycle() == [Restart(RESTART, (2,), complete=False)] and not ranks.gathered
    assert not ranks.ranks[0].waiting
    ranks.submit(0, JOIN)
    ranks.submit(1, request("new", repeats=False))
    ranks.cycle()
    assert not ranks.ranks[0].waiting and not ranks.ranks[1].waiting and not ranks.ranks[0].announced
    for rank in range(3):  # a request of all ranks needs no restart
        ranks.submit(rank, request("known"))
    assert [type(response) for response in ranks.cycle()] == [Launch, Restart]
    ranks.submit(0, request("known"), RESTART)
    assert ranks.cycle() == [Restart(RESTART, (0, 2), complete=False)]
    ranks.submit(2, request("known"))
    ranks.submit(1, request("abandoned"), RESTART)
    assert ranks.cycle() == [Restart(RESTART, (0, 1, 2), complete=True)]
    assert not any(each.waiting or each.announced or each.has_unannounced for each in ranks.ranks)
    for name in ("known", "abandoned", "new"):  # as if there had been no request
        for rank in range(3):
            assert ranks.launched() == []
            ranks.submit(rank, request(name))
        assert ranks.launched() == [name]


def test_requests_during_a_restart_are_abandoned():
    """A rank may not have seen the restart yet; its own restart stays, and is announced in the next cycle."""
    both = [Negotiation(rank, range(2)) for rank in range(2)]
    for each in both:
        each.submit(request("known"))
    lists = [RequestList(each.announce().requests) for each in both]
    for each in both:
        each.agree([], lists)
    both[1].submit(RESTART)
    lists = [RequestList(each.announce().requests) for each in both]
    for request_ in (request("known"), request("x"), RESTART):
        both[0].submit(request_)
    assert [each.agree([], lists) for each in both] == [[Restart(RESTART, (1,), complete=False)]] * 2
    assert list(both[0].waiting) == ["elastic.run"] and both[0].has_unannounced
    announcements = [each.announce() for each in both]
    assert [each.bits for each in announcements] == [0, 0] and announcements[0].requests == (RESTART,)
    lists = [RequestList(each.requests) for each in announcements]
    assert [each.agree([], lists) for each in both] == [[Restart(RESTART, (0, 1), complete=True)]] * 2


def test_a_restart_cancels_joins():
    """A rank that had joined has data again."""
    ranks = Ranks(3)
    ranks.submit(0, JOIN)
    assert ranks.cycle() == []
    ranks.submit(1, RESTART)
    ranks.cycle()
    assert not ranks.ranks[0].waiting
    for rank in (0, 2):
        ranks.submit(rank, RESTART)
    (response,) = ranks.cycle()
    assert response.complete
    ranks.submit(1, request("x"))
    ranks.submit(2, request("x"))
    assert ranks.launched() == []  # not without rank 0
    ranks.submit(0, request("x"))
    assert ranks.launched() == ["x"]


def test_an_abandoned_restart_fails_no_more_operations():
    ranks = Ranks(2)
    ranks.submit(1, RESTART)
    ranks.cycle()
    (response,) = ranks.cycle(expired={1: ["elastic.run"]})
    assert response.late and response.reason == "not submitted by rank 0; rank 0 waits for nothing"
    ranks.submit(0, request("x"))
    assert ranks.launched() == []
    ranks.submit(1, request("x"))
    assert ranks.launched() == ["x"]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 4), capacity=st.sampled_from([1, 3, 1000]))
def test_restarts_at_any_time_keep_ranks_consistent(seed, size, capacity):
    """Ranks make independent requests and restart; afterwards all launch the same operations."""
    rng = random.Random(seed)
    ranks = Ranks(size, capacity)
    for _ in range(5):
        remaining = set(range(size))
        while remaining:
            for rank in range(size):
                waiting = ranks.ranks[rank].waiting
                for name in "abcde":
                    if rank in remaining and name not in waiting and rng.random() < 0.3:
                        ranks.submit(rank, request(name, shape=(rng.choice([1, 1, 1, 2]),)))
                if rank in remaining and rng.random() < 0.2:
                    ranks.submit(rank, RESTART)
                    remaining.discard(rank)
            ranks.cycle()
        assert not any(each.waiting or each.announced or each.has_unannounced for each in ranks.ranks)
        for name in "abc":
            for rank in range(size):
                ranks.submit(rank, request(name))
        launched = ranks.launched() + ranks.launched()  # once more if a name had to be announced in full
        assert sorted(launched) == ["a", "b", "c"]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32), size=st.integers(1, 5), capacity=st.sampled_from([1, 3, 1000]), names=st.integers(1, 20)
)
def test_any_order_gives_the_same_launches(seed, size, capacity, names):
    """Each rank requests every name three times, in its own order, as soon as it can; shapes change."""
    rng = random.Random(seed)
    ranks = Ranks(size, capacity)
    plan = [(name, again) for again in range(3) for name in range(names)]
    shapes = {(name, again): rng.randrange(1, 3) for name, again in plan}
    repeats = {name: rng.random() < 0.8 for name in range(names)}
    remaining = [rng.sample(range(names), names) for _ in range(size)]
    turns = [dict.fromkeys(range(names), 0) for _ in range(size)]
    counts = dict.fromkeys(map(str, range(names)), 0)
    for _ in range(100 * names * size):
        for rank in range(size):
            for name in list(remaining[rank]):
                again = turns[rank][name]
                if str(name) not in ranks.ranks[rank].waiting and rng.random() < 0.5:
                    ranks.submit(rank, request(str(name), shape=(shapes[name, again],), repeats=repeats[name]))
                    turns[rank][name] += 1
                    if turns[rank][name] == 3:
                        remaining[rank].remove(name)
                    else:
                        rng.shuffle(remaining[rank])
        for launched in ranks.launched():
            counts[launched] += 1
        if not any(remaining) and not any(each.waiting for each in ranks.ranks):
            break
    assert set(counts.values()) == {3}
