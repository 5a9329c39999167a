"""Nested state goes into a file and comes back, bit by bit, without code in it."""

from __future__ import annotations

import io
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from commlib.checkpoint import generators, packed_state
from commlib.checkpoint.packed_state import PackedTensor
from commlib.errors import UsageError


def round_trip(state: Any) -> Any:
    file = io.BytesIO()
    packed_state.write(file, state, "state")
    file.seek(0)
    return packed_state.read(file)


PLAIN = {
    "a": [1, 2.5, None, True, "text"],
    3: (-0.0, float("inf"), 10**30, ()),
    "nested": {"empty": {}, "list": [[], [(1,)]]},
}


def test_plain_values_survive() -> None:
    back = round_trip(PLAIN)
    assert back == PLAIN
    assert [type(key) for key in back] == [str, int, str]
    assert str(back[3][0]) == "-0.0"


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "complex64", ml_dtypes.bfloat16, "float16"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2, 0, 5)])
def test_arrays_survive(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.asarray(np.random.default_rng(0).normal(size=shape) * 9).astype(dtype)
    for one in (array, array.T):
        back = round_trip({"x": one})["x"].array()
        assert (back.dtype, back.shape, back.tobytes()) == (one.dtype, one.shape, one.tobytes())


def test_different_states_have_different_digests() -> None:
    states = [{"x": np.zeros(2)}, {"x": np.zeros(2, np.float32)}, {"x": np.zeros((2, 1))}, {"y": np.zeros(2)}, {"x": 0}]
    states += [{"x": np.array([0, -0.0])}, {"x": [0]}, {"x": (0,)}, {"x": np.zeros(0)}]
    digests = [packed_state.digest(state, "state") for state in states]
    assert len(set(digests)) == len(states)
    assert (
        packed_state.digest({"x": np.zeros(2)}, "state")
        == packed_state.digest({"x": PackedTensor.of(np.zeros(2))}, "other")
        == digests[0]
    )


def test_unsupported_values_are_named() -> None:
    with pytest.raises(UsageError, match=r"checkpoint: model\['a'\]\[1\] is a set: expected tensors"):
        packed_state.digest({"a": [0, {1}]}, "model")
    with pytest.raises(UsageError, match=r"model has the key \(1, 2\): expected strings and integers"):
        packed_state.digest({(1, 2): 0}, "model")


def test_generators_continue_from_their_state() -> None:
    state = round_trip(generators.state())
    drawn = random.random(), np.random.normal(), np.random.normal()
    generators.load(state)
    assert (random.random(), np.random.normal(), np.random.normal()) == drawn
