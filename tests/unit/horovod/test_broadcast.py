"""Packs hold tensors that travel together in a broadcast, and the walk visits nested state."""

from __future__ import annotations

import itertools
import pickle
from collections import OrderedDict, namedtuple
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.errors import UsageError
from commlib.horovod.broadcast import NamedRanks, broadcast_pack, name_values, plan_packs
from commlib.horovod.pytree import LeafPlaceholder, map_leaves, put_back, take_out
from tests.bodies.loopback import run

Pair = namedtuple("Pair", "a b")


@given(st.lists(st.integers(0, 12)), st.integers(1, 12))
def test_packs_keep_order_and_limit(sizes, limit):
    packs = list(plan_packs(sizes, limit))
    assert [number for pack in packs for number in pack] == list(range(len(sizes)))
    for pack in packs:
        assert len(pack) == 1 or sum(sizes[number] for number in pack) <= limit
    for pack, after in itertools.pairwise(packs):  # and no pack is sent before it is full
        assert sum(sizes[number] for number in [*pack, after[0]]) > limit


def test_packs_match_examples():
    assert list(plan_packs([3, 3, 3, 20, 1], 8)) == [[0, 1], [2], [3], [4]]
    assert list(plan_packs([0, 0, 0], 8)) == [[0, 1, 2]] and list(plan_packs([], 8)) == []


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("count", [1, 5])
def test_all_ranks_get_the_roots_pack(root, count):
    def make(rank):
        return [
            np.full((2, 3), rank + 0.5, np.float32),
            np.array(rank),
            np.full(3, rank, ml_dtypes.bfloat16),
            np.zeros((0, 4)),
            np.array([rank % 2 == 0, True]),
        ][:count]

    def check(comm):
        arrays = make(comm.rank)
        broadcast_pack(arrays, root, comm)
        return [array.tobytes() for array in arrays]

    expected = [array.tobytes() for array in make(root)]
    assert run(3, check) == [expected] * 3


def test_tensors_have_names():
    pairs = [("w", 1), ("b", 2)]
    assert name_values("call", dict(pairs)) == name_values("call", iter(pairs)) == pairs
    assert name_values("call", (x for x in (5, 6))) == [("tensor 0", 5), ("tensor 1", 6)]
    for wrong, text in ((3, "int 3"), ([("a", 1, 2)], r"a tuple of 3 values")):
        with pytest.raises(UsageError, match=rf"call: expected .*, got {text}"):
            name_values("call", cast("Any", wrong))


def test_named_ranks_need_init():
    with pytest.raises(UsageError, match="not initialised"):
        NamedRanks("broadcast", None)


STATE: dict[str, Any] = {
    "state": {0: {"m": 1.5, "step": 2}, 1: {}},
    "groups": [{"lr": 0.5, "betas": (0.25, 3)}],
    "none": None,
}


def test_map_leaves_visits_every_leaf():
    seen = []

    def see(leaf):
        seen.append(leaf)
        return leaf

    assert map_leaves(STATE, see) == STATE
    assert seen == [1.5, 2, 0.5, 0.25, 3, None]
    doubled = map_leaves(STATE, lambda leaf: leaf and 2 * leaf)
    assert doubled["groups"] == [{"lr": 1.0, "betas": (0.5, 6)}] and doubled["state"] == {
        0: {"m": 3.0, "step": 4},
        1: {},
    }
    for whole in (Pair(1, 2), OrderedDict(a=1)):  # they cannot be built from an iterable
        assert map_leaves([whole], lambda leaf: ("leaf", leaf)) == [("leaf", whole)]


def test_leaves_are_extracted_and_replaced():
    structure, leaves = take_out(STATE, float)
    assert leaves == [1.5, 0.5, 0.25]
    assert (
        structure["groups"] == [{"lr": LeafPlaceholder(), "betas": (LeafPlaceholder(), 3)}]
        and STATE["groups"][0]["lr"] == 0.5
    )
    again = put_back(pickle.loads(pickle.dumps(structure)), (x for x in leaves))
    assert again == STATE
    for wrong in (leaves[:2], [*leaves, 1.0]):
        with pytest.raises(ValueError, match=f"{len(wrong)} leaves for 3 holes"):
            put_back(structure, wrong)
