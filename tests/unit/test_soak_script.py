"""The soak draws the same calls on all ranks, and covers everything."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from commlib.communicator import Communicator
from commlib.dtypes import DTYPES
from commlib.schedule import algorithms, verbs
from tests.oracles.oracle import REDUCIBLE
from tests.soak.calls import MAKERS
from tests.soak.script import WEIGHTS, Script, splits, teams


def draw(count, *, seed=1, thread=0, size=4, novelty=0.02):
    return list(islice(Script(seed, thread, teams(size), novelty), count))


def test_draws_depend_only_on_seed_and_thread():
    assert draw(500) == draw(500)
    assert draw(500) != draw(500, seed=2) and draw(500) != draw(500, thread=1)


def test_kinds_of_calls_repeat_except_with_novelty():
    few, many = (Counter((step.team, step.verb, step.kind) for step in draw(10_000, novelty=n)) for n in (0, 1))
    assert len(few) < 2500 < 5000 < len(many)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_teams_of_one_split_share_no_rank(size):
    for split in splits(size).values():
        ranks = [rank for team in split for rank in team]
        assert all(split) and len(set(ranks)) == len(ranks) and set(ranks) <= set(range(size))
    assert draw(300, size=size)  # whatever the size


def test_four_ranks_have_teams_that_overlap_in_part():
    members = {team.members for team in teams(4)}
    assert {(0, 1, 2), (2, 3), (3, 2, 1, 0), (0, 2), (1, 3)} <= members


def test_every_verb_dtype_operation_and_algorithm_is_drawn():
    steps = draw(20_000, novelty=1)
    assert Counter(step.verb for step in steps).keys() == WEIGHTS.keys() == MAKERS.keys()
    reductions = [step for step in steps if step.verb == "all_reduce"]
    assert {(step.kind.dtype, step.kind.op) for step in reductions} == set(REDUCIBLE)
    assert {step.kind.dtype for step in steps if step.verb == "message"} == set(DTYPES)
    for verb in set(verbs()) & WEIGHTS.keys() - {"barrier"}:
        assert {step.kind.algorithm for step in steps if step.verb == verb} >= {"auto", *algorithms(verb)}


def test_every_verb_that_moves_data_is_in_the_soak():
    """A new verb must be added there."""
    twins = {name.removesuffix("_async") for name in dir(Communicator) if name.endswith("_async")}
    assert twins - {"send", "recv"} <= WEIGHTS.keys()
