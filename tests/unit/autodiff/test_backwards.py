"""The backward of every verb is the transposed matrix of the whole collective, found by trying all unit vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.autodiff import HOROVOD, TRANSPOSED, Rules, VerbCall, apply, find_rule
from commlib.errors import UsageError
from tests.bodies.loopback import run

Case = Callable[[int, int], tuple[VerbCall | None, tuple[int, ...] | None]]
"""(rank, size) -> what that rank calls, or None; the shape of its array, or None."""


def splits(rank: int, size: int) -> tuple[int, ...]:
    return tuple((rank + 2 * peer + 1) % 3 for peer in range(size))


def uneven(size: int) -> tuple[int, ...]:
    return tuple((2 * rank + 1) % 4 for rank in range(size))


def pair(rank: int, size: int) -> tuple[VerbCall | None, tuple[int, ...] | None]:
    """Rank 0 sends to the last one."""
    if rank == 0 and size > 1:
        return VerbCall("send", peer=size - 1, tag=3), (2, 3)
    return (VerbCall("recv", peer=0, tag=3, shape=(2, 3), dtype="float64") if rank == size - 1 > 0 else None), None


def around(rank: int, size: int) -> tuple[VerbCall, tuple[int, ...]]:
    """Each rank sends rank + 1 numbers to the next one."""
    before = (rank - 1) % size
    call = VerbCall("send_recv", peer=(rank + 1) % size, source=before, shape=(before + 1,), dtype="float64")
    return call, (rank + 1,)


CASES: dict[str, Case] = {
    "all_reduce sum": lambda rank, size: (VerbCall("all_reduce"), (2, 2)),
    "all_reduce mean": lambda rank, size: (VerbCall("all_reduce", "mean"), (3,)),
    "all_reduce 0-d": lambda rank, size: (VerbCall("all_reduce"), ()),
    "reduce_scatter sum": lambda rank, size: (VerbCall("reduce_scatter"), (2 * size,)),
    "reduce_scatter mean, uneven": lambda rank, size: (VerbCall("reduce_scatter", "mean"), (size + 1, 2)),
    "reduce_scatter of one row": lambda rank, size: (VerbCall("reduce_scatter"), (1, 2)),
    "reduce_scatter_v": lambda rank, size: (VerbCall("reduce_scatter_v", rows=uneven(size)), (sum(uneven(size)), 2)),
    "reduce_scatter_v mean": lambda rank, size: (
        VerbCall("reduce_scatter_v", "mean", rows=uneven(size)),
        (sum(uneven(size)),),
    ),
    "scan": lambda rank, size: (VerbCall("scan"), (2,)),
    "exscan": lambda rank, size: (VerbCall("exscan"), (2, 1)) if size > 1 else (None, None),
    "all_gather": lambda rank, size: (VerbCall("all_gather"), (2, 2)),
    "all_gather 0-d": lambda rank, size: (VerbCall("all_gather"), ()),
    "all_gather_v": lambda rank, size: (VerbCall("all_gather_v"), ((rank + 1) % 3, 2)),
    "all_gather_v of equal rows": lambda rank, size: (VerbCall("all_gather_v"), (2,)),
    "reduce sum": lambda rank, size: (VerbCall("reduce", root=size - 1), (3,)),
    "reduce mean": lambda rank, size: (VerbCall("reduce", "mean", root=size // 2), (1, 2)),
    "broadcast": lambda rank, size: (VerbCall("broadcast", root=size - 1), (3,)),
    "broadcast to nothing": lambda rank, size: (
        VerbCall("broadcast", root=0, shape=(2,), dtype="float64"),
        None if rank else (2,),
    ),
    "gather": lambda rank, size: (VerbCall("gather", root=size - 1), (2,)),
    "gather 0-d": lambda rank, size: (VerbCall("gather"), ()),
    "scatter": lambda rank, size: (VerbCall("scatter", root=size - 1), (size, 2) if rank == size - 1 else None),
    "scatter of ignored arrays": lambda rank, size: (VerbCall("scatter"), (size * 2,)),
    "all_to_all": lambda rank, size: (VerbCall("all_to_all"), (size * 2,)),
    "all_to_all_v": lambda rank, size: (
        VerbCall("all_to_all_v", rows=splits(rank, size)),
        (sum(splits(rank, size)), 2),
    ),
    "send and recv": pair,
    "send_recv": around,
    "all_reduce, scaled": lambda rank, size: (VerbCall("all_reduce", factor=0.5), (2,)),
}


def matrix(comm: Any, call: VerbCall | None, shape: tuple[int, ...] | None, rules: Rules = TRANSPOSED) -> Any:
    """Return (the matrix of the collective that `call` is a part of, the backward, the shape of this rank's result).

    The columns are the results of all ranks for each unit vector of the arrays of all ranks.
    """
    shapes = comm.all_gather_object(shape)
    columns, back, own = [], None, None
    for owner, owned in enumerate(shapes):
        for element in range(0 if owned is None else int(np.prod(owned))):
            x: Any = None if shape is None else np.zeros(shape)
            if owner == comm.rank:
                x.reshape(-1)[element] = 1
            result = None
            if call is not None:
                result, back = apply(comm, call, x, rules)
                own = None if result is None else result.shape
            parts = comm.all_gather_object(None if result is None else result.reshape(-1))
            columns.append(np.concatenate([part for part in parts if part is not None] or [np.zeros(0)]))
    return np.array(columns).T, back, own


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_backward_is_the_transposed_map(name: str, size: int) -> None:
    def check(comm: Any) -> None:
        call, shape = CASES[name](comm.rank, size)
        forward, back, own = matrix(comm, call, shape)
        backward, again, returned = matrix(comm, back, own)
        assert returned == shape
        np.testing.assert_allclose(backward, forward.T, atol=1e-15)
        twice, _, _ = matrix(comm, again, shape)  # a backward has a backward: the verb itself
        np.testing.assert_allclose(twice, forward, atol=1e-15)

    run(size, check, nodes=[rank // 2 for rank in range(size)])


def ratio(verb: str, size: int) -> float:
    return {"all_gather": 1 / size, "all_gather_v": 1 / size, "broadcast": 1 / size}.get(
        verb, size if verb.startswith("reduce_scatter") else 1
    )


@pytest.mark.parametrize("name", CASES)
def test_horovods_convention_differs_by_a_scale(name: str) -> None:
    """The adapters' tests compare these with Horovod's own operations by name."""
    size = 3

    def check(comm: Any) -> None:
        call, shape = CASES[name](comm.rank, size)
        forward, back, own = matrix(comm, call, shape, HOROVOD)
        backward, _, _ = matrix(comm, back, own)
        verb = name.split()[0].rstrip(",")
        np.testing.assert_allclose(backward, ratio(verb, size) * forward.T, atol=1e-15)

    run(size, check)


@settings(max_examples=20, deadline=None)
@given(name=st.sampled_from(sorted(CASES)), size=st.integers(1, 5), nodes=st.integers(1, 3), seed=st.integers(0, 99))
def test_inner_products_agree(name: str, size: int, nodes: int, seed: int) -> None:
    """The sum over ranks of <y, V x> equals the sum of <V^T y, x>, for x and y of small integers."""

    def check(comm: Any) -> None:
        random = np.random.default_rng([seed, comm.rank])
        call, shape = CASES[name](comm.rank, size)
        x = None if shape is None else random.integers(-9, 10, shape).astype(float)
        left = right = 0.0
        if call is not None:
            result, back = apply(comm, call, x)
            y = None if result is None else random.integers(-9, 10, result.shape).astype(float)
            gradient, _ = apply(comm, back, y)
            assert (gradient is None) == (x is None)
            left = 0.0 if result is None or y is None else float((y * result).sum())
            right = 0.0 if x is None else float((gradient * x).sum())
        both = comm.all_reduce(np.array([left, right]))
        assert both[0] == pytest.approx(both[1], abs=1e-9)

    run(size, check, nodes=[rank // nodes for rank in range(size)])


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16, "complex64"])
def test_backwards_keep_dtypes_and_leave_inputs_alone(dtype: Any) -> None:
    def check(comm: Any) -> None:
        for name in ("reduce_scatter mean, uneven", "broadcast", "all_gather_v", "reduce mean"):
            call, shape = CASES[name](comm.rank, comm.size)
            assert call is not None and shape is not None
            x = np.ones(shape, dtype)
            result, back = apply(comm, call, x)
            assert (x == 1).all()
            if result is not None:
                assert result.dtype == x.dtype
                gradient, _ = apply(comm, back, seed_gradient := np.full_like(result, 2))
                assert (seed_gradient == 2).all()
            else:
                gradient, _ = apply(comm, back, None)
            assert gradient.dtype == x.dtype and gradient.shape == shape

    run(2, check)


LINEAR = {"scan": "sum has"}


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter", "reduce_scatter_v", "reduce", "scan"])
@pytest.mark.parametrize("op", ["min", "max", "prod"])
def test_nonlinear_operations_are_refused_before_anything_is_sent(verb: str, op: Any) -> None:
    def check(comm: Any) -> None:
        if comm.rank == 0:
            with pytest.raises(
                UsageError,
                match=f"{verb} with op '{op}' has no backward: only {LINEAR.get(verb, 'sum and mean have')} one",
            ):
                apply(comm, VerbCall(verb, op), np.ones(2))
        comm.barrier()

    run(2, check)


def test_wrong_calls() -> None:
    def check(comm: Any) -> None:
        for call, x, message in (
            (VerbCall("barrier"), None, "barrier has no backward"),
            (VerbCall("all_gather", rows=(2, 3)), np.ones(4), "x has 4 rows, expected"),
            (VerbCall("reduce_scatter", rows=(2, 3)), np.ones(4), r"x has 4 rows, expected 5: rows=\(2, 3\)"),
            (VerbCall("recv", peer=1 - comm.rank), None, r"recv, rank \d: pass an array, or shape= and dtype="),
            (VerbCall("all_reduce"), None, "all_reduce"),
            (VerbCall("broadcast", root=comm.rank, shape=(2,), dtype="float32"), None, "broadcast"),
        ):
            with pytest.raises(UsageError, match=message):
                apply(comm, call, x)
        comm.barrier()

    run(2, check)


def test_every_rule_runs_a_verb_that_has_a_rule() -> None:
    for rules in (TRANSPOSED, HOROVOD):
        assert rules.keys() == TRANSPOSED.keys()
        for (verb, op), rule in rules.items():
            back = find_rule(rule.verb, rule.op, rules)
            assert back.verb in (verb, verb.removesuffix("_v")), (verb, op)
    assert find_rule("reduce_scatter", "mean").factor(4) == 0.25
    assert replace(find_rule("all_gather"), power=2).factor(3) == 9
