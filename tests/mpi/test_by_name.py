"""Gradients in arrays, reduced by name: buckets, joins, compression, and steps that fail half-way."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from commlib import horovod as hvd
from commlib.data_parallel.options import Gradient, Options
from commlib.dtypes import NUMPY
from commlib.errors import MismatchError
from commlib.named_gradients.gradients import CallSpec, GradientCall, NamedGradients

NAMES = ["a", "b", "c"]
SHAPES: list[tuple[int, ...]] = [(5,), (40, 20), ()]
KINDS = tuple(Gradient(name, shape, "float32") for name, shape in zip(NAMES, SHAPES, strict=True))
TINY = 64 / 2**20

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _running(comm: Any) -> None:
    hvd.init()


@pytest.fixture
def name() -> str:
    return f"gradients of test {next(_numbers)}"


def gradient(rank: int, index: int, step: int = 0) -> np.ndarray:
    count = int(np.prod(SHAPES[index], dtype=int))
    return np.asarray((np.arange(count) % 5).reshape(SHAPES[index]) + 8 * rank + step, np.float32)


def mean(comm: Any, index: int, step: int = 0, ranks: Any = None) -> np.ndarray:
    present = range(comm.size) if ranks is None else ranks
    return np.asarray(sum(gradient(rank, index, step) for rank in present) / comm.size)


def create(name: str, present: tuple[int, ...] = (0, 1, 2), *, strict: bool = False, **options: Any) -> Any:
    """Return a reducer of gradients with small buckets, and a function that calls it once."""
    options = {"bucket_cap_mib": TINY, "first_bucket_mib": TINY, "overlap": True, **options}
    gradients = NamedGradients(name, Options(**options), 0, None)
    return gradients, GradientCall(gradients, CallSpec(NAMES, present, (), [2, 1, 0], 1, strict))


def reduce(
    comm: Any, run: Any, step: int = 0, present: tuple[int, ...] = (0, 1, 2), wire: str = "float32"
) -> dict[int, Any]:
    """Pass gradients in two parts, as the nodes of a graph do, in the dtype that is transmitted."""
    arrays = {i: gradient(comm.rank, i, step).astype(NUMPY[wire]) for i in present}
    run.give(present[2:], [arrays[i] for i in present[2:]], KINDS)
    run.give(present[:2], [arrays[i] for i in present[:2]])
    return dict(run.end([]))


def check(comm: Any, results: dict[int, Any], step: int = 0, ranks: Any = None) -> None:
    for index, result in results.items():
        np.testing.assert_allclose(result, mean(comm, index, step, ranks), rtol=1e-6)


def test_means_of_all_ranks(comm: Any, name: str) -> None:
    gradients, run = create(name)
    for step in range(4):
        results = reduce(comm, run, step)
        assert sorted(results) == [0, 1, 2]
        check(comm, results, step)
    assert len(gradients.reducers) == 1
    assert gradients.statistics.reductions == gradients.report.step == 4
    assert len(gradients.reducers[0].buckets) > 1
    # In a bucket on a node with several ranks nothing is copied out.
    assert all(result.ctypes.data % 64 == 0 for result in results.values())


def test_a_rank_may_join_before_its_first_step_and_return(comm: Any, name: str) -> None:
    """What the others have created meanwhile lacks this rank, so all ranks create it again."""
    gradients, run = create(name)
    for step in range(comm.rank):
        check(comm, reduce(comm, run, step), step, [rank for rank in range(comm.size) if rank > step])
    hvd.start_join(blocking=True).wait()
    for step in range(2):
        check(comm, reduce(comm, run, step), step)
    assert len(gradients.reducers) == 1


@pytest.mark.parametrize("compression", ["none", "bf16", "int8", "topk:ratio=0.999", "powersgd:rank=4"])
def test_ranks_that_join_at_different_times(comm: Any, name: str, compression: str) -> None:
    """Also with compressed gradients: a joined rank takes part and keeps its compression state."""
    gradients, run = create(name, compression=compression, within_node=True)
    wire = gradients.options_here().wire_dtype("float32")
    for turn in range(2):
        for step in range(comm.rank + 1):
            present = [rank for rank in range(comm.size) if rank >= step]
            for index, result in reduce(comm, run, step, wire=wire).items():
                expected = mean(comm, index, step, present)
                scale = np.abs(expected).max()
                assert np.abs(result.astype(np.float32) - expected).max() <= 0.35 * scale, (turn, step, index)
                bits = hvd.allgather_object(result.tobytes(), f"{name} bits")
                assert len(set(bits)) == 1
        hvd.start_join(blocking=True).wait()


def test_sets_with_the_same_name_have_separate_compression_state(comm: Any, name: str) -> None:
    results = []
    for _ in range(2):
        _, run = create(name, compression="int4", within_node=True)
        results.append([reduce(comm, run, step)[1].copy() for step in range(3)])
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.ranks(min=2)
def test_a_resumed_run_gives_the_same_bits(comm: Any, name: str) -> None:
    _, run = create(name, compression="sign", within_node=True)
    expected = [reduce(comm, run, step)[1].copy() for step in range(6)][3:]
    stopped, run = create(f"{name} stopped", compression="sign", within_node=True)
    for step in range(3):
        reduce(comm, run, step)
    resumed, run = create(f"{name} again", compression="sign", within_node=True)
    resumed.load_compression_state(stopped.compression_state())
    np.testing.assert_array_equal([reduce(comm, run, step)[1].copy() for step in range(3, 6)], expected)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("strict", [False, True])
def test_a_gradient_missing_on_one_rank(comm: Any, name: str, strict: bool) -> None:
    present = (0, 2) if comm.rank == 1 else (0, 1, 2)
    _, run = create(name, present, strict=strict)
    if strict:
        with pytest.raises(MismatchError, match=r"gradient of b is None on ranks \[1\], but not on ranks \[0"):
            reduce(comm, run, 0, present)
    else:
        results = reduce(comm, run, 0, present)
        others = [rank for rank in range(comm.size) if rank != 1]
        np.testing.assert_allclose(results[1], mean(comm, 1, 0, others), rtol=1e-6)
    _, run = create(f"{name} whole", strict=strict)
    check(comm, reduce(comm, run))


@pytest.mark.ranks(min=2)
def test_a_step_that_fails_half_way_fails_on_all_ranks(comm: Any, name: str) -> None:
    """The others silently used zeros for its gradients. They wait for it, so its next step ends the failed one."""
    _, run = create(name)
    check(comm, reduce(comm, run))
    if comm.rank == 0:
        run.give([2], [gradient(0, 2, 1)], KINDS)  # and then something raised
    else:
        with pytest.raises(MismatchError, match=r"an exception ended the backward of ranks \[0\]"):
            reduce(comm, run, 1)
    check(comm, reduce(comm, run, 2), 2)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("where", ["before the first step", "between steps", "half-way"])
def test_an_elastic_run_recovers_when_one_rank_raises(comm: Any, name: str, where: str) -> None:
    """The others waited for its gradients for ever. What it began must not mix with what they begin again."""
    _, run = create(name)
    state = hvd.elastic.ObjectState(step=0)
    calls: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> str:
        calls.append(state.step)
        while state.step < 4:
            if comm.rank == comm.size - 1 and len(calls) == 1 and (state.step == 2 or where == "before the first step"):
                if where == "half-way":
                    run.give([2], [gradient(comm.rank, 2, 100)], KINDS)
                raise MismatchError("made up")
            check(comm, reduce(comm, run, state.step), state.step)
            state.step += 1
            if state.step == 1:
                state.commit()
        return "done"

    assert train(state) == "done"
    assert calls == [0, 0 if where == "before the first step" else 1]


@pytest.mark.ranks(min=2)
def test_different_gradients_are_an_error(comm: Any, name: str) -> None:
    _, run = create(name)
    odd = (*KINDS[:2], Gradient("c", (comm.rank,), "float32"))
    with pytest.raises(
        MismatchError, match=r"entry \d+ is 'c: float32\[0\]' on rank 0 but 'c: float32\[1\]' on rank 1"
    ):
        run.begin(odd, eager=False)


def test_threads_and_other_operations_in_between(comm: Any, name: str) -> None:
    """Ranks may request other operations at different points of a step."""
    _, run = create(name)
    for step in range(3):
        others = []
        for place in range(3):
            if place == (comm.rank + step) % 3:
                x = np.full(3, comm.rank + 1.0)
                others.append(hvd.start_allreduce([x], [np.empty(3)], f"{name} beside", op=hvd.Sum))
            if place == 0:
                run.give([2], [gradient(comm.rank, 2, step)], KINDS)
            if place == 1:
                run.give([0, 1], [gradient(comm.rank, i, step) for i in (0, 1)])
        check(comm, dict(run.end([])), step)
        assert others[0].wait()[0].tolist() == [sum(range(1, comm.size + 1))] * 3
