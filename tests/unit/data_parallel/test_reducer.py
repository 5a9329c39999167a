"""GradientReducer on arrays, over ranks that are threads: what every framework gets, without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from commlib.communicator import Communicator
from commlib.data_parallel.array_values import ArrayValues
from commlib.data_parallel.options import Gradient, Options
from commlib.data_parallel.reducer import GradientReducer
from commlib.data_parallel.reducer_ranks import OrderedRanks
from commlib.errors import MismatchError, UsageError
from tests.bodies import loopback

SHAPES = {"a": (5,), "b": (3, 4), "c": (), "d": (40, 10)}
GRADIENTS = [Gradient(name, shape, "float64") for name, shape in SHAPES.items()]
TINY = 128 / 2**20
ONE_NODE, TWO_NODES = [0, 0], [0, 1]


def gradient(rank: int, index: int, step: int = 0) -> np.ndarray:
    """Small integers with exact means over up to 4 ranks."""
    shape = GRADIENTS[index].shape
    return np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7 + 12 * rank + index + step, np.float64)


def mean(size: int, index: int, step: int = 0, used_by: Sequence[int] | None = None) -> np.ndarray:
    ranks = range(size) if used_by is None else used_by
    total = sum((gradient(rank, index, step) for rank in ranks), np.zeros(GRADIENTS[index].shape))
    return np.asarray(total / size)


def reducer_of(comm: Communicator, gradients: Sequence[Gradient] = GRADIENTS, **options: Any) -> Any:
    """Return (a reducer with small buckets, its gradient values)."""
    more = {name: options.pop(name) for name in ("groups", "sparse", "order") if name in options}
    axes = options.pop("axes", None)
    values = ArrayValues(gradients)
    options = {"bucket_cap_mib": TINY, "first_bucket_mib": TINY, "overlap": True, **options}
    return GradientReducer(OrderedRanks(comm, axes), gradients, values, Options(**options), **more), values


def backward(reducer: Any, values: Any, given: dict[int, np.ndarray], **end: Any) -> list[np.ndarray | None]:
    """Run a backward with these gradients in the given order; return all results."""
    reducer.begin()
    for index, array in given.items():
        values.give(index, array)
        reducer.ready(index)
    reducer.end(**end)
    return [values.result(index) for index in range(len(reducer.gradients))]


def run(nodes: Sequence[int], rank: Callable[[Communicator], Any]) -> list[Any]:
    return loopback.run(len(nodes), rank, nodes=nodes)


@pytest.mark.parametrize("nodes", [[0], ONE_NODE, TWO_NODES, [0, 0, 1, 1], [0, 0, 0]])
@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"groups": [[0, 3]]}, {"bucket_cap_mib": 1.0}])
def test_reducers_give_means_over_all_ranks(nodes: Sequence[int], options: dict[str, Any]) -> None:
    def rank(comm: Communicator) -> None:
        reducer, values = reducer_of(comm, **options)
        for step in range(4):  # the buckets are created again after the first step
            results = backward(reducer, values, {i: gradient(comm.rank, i, step) for i in (1, 3, 0, 2)})
            for index, result in enumerate(results):
                np.testing.assert_array_equal(result, mean(comm.size, index, step))
            reducer.stepped()
            reducer.cleared()
        assert reducer.statistics.reductions == reducer.report.step == 4

    run(nodes, rank)


def test_buckets_are_launched_during_backward_in_the_learned_order() -> None:
    def rank(comm: Communicator) -> None:
        reducer, values = reducer_of(comm)
        assert [bucket.parameters[0] for bucket in reducer.buckets] == [3, 2, 1, 0]
        early = []
        for step in range(3):
            before = reducer.statistics.early_launches
            backward(reducer, values, {i: gradient(comm.rank, i, step) for i in (1, 3, 0, 2)})
            early.append(reducer.statistics.early_launches - before)
            assert reducer.order_is_settled
        assert [i for bucket in reducer.buckets for i in bucket.parameters if i < 4] == [1, 3, 0, 2]
        assert early[1:] == [len(reducer.buckets) - 1] * 2  # the last one has the flags

    run(TWO_NODES, rank)


def test_rank_0_sets_a_given_order() -> None:
    def rank(comm: Communicator) -> None:
        reducer, _ = reducer_of(comm, order=[0, 1, 2, 3] if comm.rank == 0 else [3, 2, 1, 0])
        assert reducer.order_is_settled
        assert [i for bucket in reducer.buckets for i in bucket.parameters if i < 4] == [0, 1, 2, 3]

    run(ONE_NODE, rank)


def test_a_step_without_gradients_reduces_nothing() -> None:
    """An optimizer whose parameters are all frozen raised KeyError in its first step."""

    def rank(comm: Communicator) -> None:
        reducer, _ = reducer_of(comm, [])
        for _ in range(2):
            reducer.synchronize()
            reducer.stepped()
            reducer.cleared()
        assert reducer.contribute_nothing() is None

    run(ONE_NODE, rank)


@pytest.mark.parametrize("nodes", [ONE_NODE, TWO_NODES])
def test_a_gradient_of_some_ranks_is_averaged(nodes: Sequence[int]) -> None:
    """The other ranks count as zeros and get the result; a gradient on no rank has no result."""

    def rank(comm: Communicator) -> None:
        reducer, values = reducer_of(comm)
        for step in range(2):
            given = {i: gradient(comm.rank, i, step) for i in ([0, 1] if comm.rank == 0 else [0])}
            results = backward(reducer, values, given)
            np.testing.assert_array_equal(results[0], mean(2, 0, step))
            np.testing.assert_array_equal(results[1], mean(2, 1, step, [0]))
            assert results[2] is results[3] is None

    run(nodes, rank)


@pytest.mark.parametrize("nodes", [ONE_NODE, TWO_NODES, [0, 0, 1, 1]])
def test_ranks_must_have_the_same_gradients_if_required(nodes: Sequence[int]) -> None:
    def rank(comm: Communicator) -> None:
        reducer, values = reducer_of(comm)
        every = {i: gradient(comm.rank, i) for i in range(3)}
        for _ in range(2):  # the last one is on no rank, which ranks agree on once
            assert backward(reducer, values, every, strict=True)[3] is None
        odd = {i: every[i] for i in ((0, 2) if comm.rank == comm.size - 1 else (0, 1, 2))}
        with pytest.raises(
            MismatchError, match=rf"gradient of b is None on ranks \[{comm.size - 1}\], but not on ranks"
        ):
            backward(reducer, values, odd, strict=True)
        values.forget_all()
        np.testing.assert_array_equal(backward(reducer, values, every, strict=True)[1], mean(comm.size, 1))

    run(nodes, rank)


def test_ranks_with_different_parameters_are_an_error() -> None:
    def rank(comm: Communicator) -> None:
        mine = [*GRADIENTS[:3], Gradient("d", (40, 10 + comm.rank), "float64")]
        with pytest.raises(
            MismatchError, match=r"'d: float64\[40, 10\]' on rank 0 but 'd: float64\[40, 11\]' on rank 1"
        ):
            reducer_of(comm, mine)

    run(ONE_NODE, rank)


def test_each_bucket_can_have_an_axis() -> None:
    """Experts' gradients are averaged over the ranks that hold the same experts, and scaled as if over all."""
    gradients = [
        Gradient("router", (5,), "float64"),
        Gradient("expert", (4,), "float64", axis="edp", scale=0.5),
        Gradient("dense", (3,), "float64"),
        Gradient("last", (6,), "float64", axis="edp", scale=0.5),
    ]

    def rank(comm: Communicator) -> None:
        edp = comm.split(comm.rank % 2)
        assert edp is not None
        # In reverse order an expert's bucket is the last one: flags get a bucket of their own.
        for order in (None, [3, 2, 0, 1]):
            reducer, values = reducer_of(comm, gradients, axes={"edp": edp}, order=order)
            assert {bucket.axis for bucket in reducer.buckets} == {"", "edp"}
            for step in range(3):
                given = {i: np.full(g.shape, 8.0 * comm.rank + step) for i, g in enumerate(gradients)}
                if comm.rank == 3:
                    del given[3]
                results: Any = backward(reducer, values, given)
                everyone = sum(8.0 * r + step for r in range(4)) / 4
                same = [r for r in range(4) if r % 2 == comm.rank % 2]
                experts = sum(8.0 * r + step for r in same) / 4
                last = sum(8.0 * r + step for r in same if r != 3) / 4
                assert [set(result) for result in results] == [{everyone}, {experts}, {everyone}, {last}]

    loopback.run(4, rank)


class Accumulating(ArrayValues):
    """Gradients to which each backward adds, as in PyTorch."""

    accumulates = True

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        super().__init__(gradients)
        self.sums: dict[int, np.ndarray] = {}

    def add(self, reducer: Any, index: int, array: np.ndarray) -> None:
        reducer.before(index)
        self.sums[index] = array + self.sums.get(index, 0)

    def exists(self, index: int) -> bool:
        return index in self.sums

    def put(self, index: int) -> None:
        self.give(index, self.sums[index])
        super().put(index)

    def take(self, index: int) -> None:
        super().take(index)
        self.sums[index] = self.result(index).copy()

    def scale(self, index: int, factor: float) -> None:
        self.sums[index] = self.sums[index] * factor


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("clears", [False, True])
def test_reduced_gradients_count_once_along_every_axis(op: str, clears: bool) -> None:
    """A gradient reduced over some ranks only was scaled again when later passes added to it."""
    scale = 0.5 if op == "mean" else 1.0
    gradients = [Gradient("dense", (3,), "float64"), Gradient("expert", (4,), "float64", axis="edp", scale=scale)]

    def rank(comm: Communicator) -> None:
        edp = comm.split(comm.rank % 2)
        values = Accumulating(gradients)
        reducer = GradientReducer(OrderedRanks(comm, {"edp": edp}), gradients, values, Options(op=op))
        same = [r for r in range(4) if r % 2 == comm.rank % 2]
        since = 0
        for step in range(4):
            reducer.begin()
            there = [0, 1] if step != 2 else [0]  # gradients of earlier passes are reduced again, too
            for index in there:
                values.add(reducer, index, np.full(gradients[index].shape, 8.0 * comm.rank + step))
                reducer.ready(index)
            reducer.end()
            divisor = 4 if op == "mean" else 1
            steps = range(since, step + 1)
            dense = sum(8.0 * r + s for r in range(4) for s in steps) / divisor
            expert = sum(8.0 * r + s for r in same for s in steps if s != 2) / divisor
            assert [set(values.sums[0]), set(values.sums[1])] == [{dense}, {expert}]
            if clears and step == 0:
                reducer.cleared()
                values.sums.clear()
                since = 1

    loopback.run(4, rank)


def test_gradients_on_an_axis_cannot_be_sparse() -> None:
    """Rows were gathered from all ranks, also from those with other experts."""
    gradients = [Gradient("dense", (3,), "float64"), Gradient("table", (6, 2), "float64", axis="edp", scale=0.5)]

    def rank(comm: Communicator) -> None:
        axes = {"edp": comm.split(comm.rank)}
        with pytest.raises(UsageError, match=r"table.*'edp'.*leave compression out"):
            reducer_of(comm, gradients, axes=axes, compression=Named())
        reducer, values = reducer_of(comm, gradients, axes=axes)
        reducer.begin()
        if comm.rank == 0:
            values.give_rows(1, np.array([0, 3]), np.ones((2, 2)))
            reducer.ready(1)
        with pytest.raises(UsageError, match=r"table.*'edp'.*sparse_as_dense"):  # on all ranks
            reducer.end()

    run(ONE_NODE, rank)


class Named:
    """A user's compressor."""

    def compress(self, tensor: Any) -> Any:
        return tensor, None

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        return tensor


@pytest.mark.parametrize("nodes", [[0], ONE_NODE, TWO_NODES, [0, 0, 0], [0, 0, 1, 1]])
def test_sharded_training_matches_one_process(nodes: Sequence[int]) -> None:
    """Each rank updates its parts by SGD with momentum only for those; the parameters are those of one
    process."""

    def rank(comm: Communicator) -> None:
        reducer, values = reducer_of(comm, shard=True)
        shards = reducer.shards
        start = [gradient(9, index) for index in range(4)]
        whole = [array.copy() for array in start]
        momenta: list[np.ndarray] = [np.zeros_like(array) for array in whole]
        mine = [np.zeros(len(shards.own(bucket))) for bucket in range(len(reducer.buckets))]
        for bucket in range(len(reducer.buckets)):
            for piece in shards.pieces(bucket):
                count = piece.stop - piece.start
                values_of = start[piece.parameter].reshape(-1)[piece.first : piece.first + count]
                shards.own(bucket)[piece.start : piece.stop] = values_of
        for step in range(3):
            results = backward(reducer, values, {i: gradient(comm.rank, i, step) for i in (3, 2, 1, 0)})
            assert results == [None] * 4  # no rank has them whole
            for bucket, momentum in enumerate(mine):
                momentum *= 0.5
                momentum += shards.gradients(bucket)
                shards.own(bucket)[...] -= momentum
            reducer.gather()
            reducer.stepped()
            for index in range(4):
                momenta[index] = momenta[index] * 0.5 + mean(comm.size, index, step)
                whole[index] = whole[index] - momenta[index]
            for index in (0, 1, 2, 3):
                np.testing.assert_array_equal(reducer.gathered(index), whole[index].reshape(-1))
        assert reducer.statistics.early_launches == 3 * (len(reducer.buckets) - 1)

    run(nodes, rank)


@pytest.mark.parametrize(
    ("nodes", "pairs"),
    [
        ([0, 0, 1, 1], "neighbours"),  # a copy on each node
        ([0, 0, 1, 1], "strangers"),  # a copy on two nodes
        ([0, 0, 0, 0], "neighbours"),
        ([0, 0, 1, 1], "single"),  # each rank has a copy
        ([0, 0, 1, 1], "all"),
    ],
)
def test_shards_are_replicated_over_a_second_axis(nodes: Sequence[int], pairs: str) -> None:
    """The parameters are those of one process: shards over one axis of ranks are averaged over the other one."""
    colors = {"neighbours": [0, 0, 1, 1], "strangers": [0, 1, 0, 1], "single": [0, 1, 2, 3], "all": [0] * 4}[pairs]

    def rank(comm: Communicator) -> None:
        axis = comm.split(colors[comm.rank])
        assert axis is not None
        reducer, values = reducer_of(comm, shard=True, shard_axis="node", axes={"node": axis})
        shards = reducer.shards
        whole = [gradient(9, index) for index in range(4)]
        for bucket in range(len(reducer.buckets)):
            assert len(shards.own(bucket)) * colors.count(colors[comm.rank]) == reducer.buckets[bucket].flags
            for piece in shards.pieces(bucket):
                flat = whole[piece.parameter].reshape(-1)
                shards.own(bucket)[piece.start : piece.stop] = flat[piece.first :][: piece.stop - piece.start]
        for step in range(3):
            given = {i: gradient(comm.rank, i, step) for i in ([3, 2, 1, 0] if comm.rank or step else [3, 1, 0])}
            assert backward(reducer, values, given) == [None] * 4
            for bucket in range(len(reducer.buckets)):
                shards.own(bucket)[...] -= shards.gradients(bucket)
            reducer.gather()
            reducer.stepped()
            for index in range(4):
                whole[index] = whole[index] - mean(4, index, step, None if step or index != 2 else [1, 2, 3])
                np.testing.assert_array_equal(reducer.gathered(index), whole[index].reshape(-1))
        assert reducer.statistics.early_launches > 0

    run(nodes, rank)


def test_each_axis_is_sharded_and_scaled() -> None:
    """A scale of sharded gradients was ignored."""
    gradients = [
        Gradient("dense", (8,), "float64"),
        Gradient("expert", (8,), "float64", axis="edp", scale=0.5),
    ]

    def rank(comm: Communicator) -> None:
        edp, node = comm.split_all([(comm.rank % 2, 0, ""), (comm.rank // 4, 0, "")])
        for shard_axis, parts in (("", 4), ("node", 2)):
            reducer, values = reducer_of(
                comm, gradients, axes={"edp": edp, "node": node}, shard=True, shard_axis=shard_axis
            )
            backward(reducer, values, {i: np.full(8, 8.0 * comm.rank) for i in range(2)})
            dense, expert = 8 * 3.5, 0.5 * 8 * (3 + comm.rank % 2)
            for bucket in reducer.buckets:
                if bucket.flags:
                    assert len(reducer.shards.own(bucket.index)) == bucket.flags // (parts * (1 if bucket.axis else 2))
                for piece in reducer.shards.pieces(bucket.index):
                    part = reducer.shards.gradients(bucket.index)[piece.start : piece.stop]
                    assert set(part) == {expert if piece.parameter else dense}

    loopback.run(8, rank, nodes=[0] * 4 + [1] * 4)


def test_an_uneven_axis_cannot_hold_the_shards() -> None:
    def rank(comm: Communicator) -> None:
        axes = {"node": comm.split(int(comm.rank > 0))}
        with pytest.raises(UsageError, match=r"over axis 'node': it has 1 of the ranks \[0, 1, 2\] in one place and 2"):
            reducer_of(comm, shard=True, shard_axis="node", axes=axes)

    loopback.run(3, rank)


def test_gradients_that_are_not_sharded_have_no_shards() -> None:
    def rank(comm: Communicator) -> None:
        reducer, _ = reducer_of(comm)
        for use in (lambda: reducer.shards, reducer.gather, lambda: reducer.gathered(0)):
            with pytest.raises(UsageError, match="gradients are not sharded"):
                use()

    run(ONE_NODE, rank)


def test_half_precision_on_the_wire_does_not_exclude_sharding() -> None:
    """Between nodes of several ranks, the cast was replaced by a codec, which sharding excludes."""

    def rank(comm: Communicator) -> None:
        narrow = [replace(one, dtype="float32") for one in GRADIENTS]
        reducer, values = reducer_of(comm, narrow, shard=True, compression="fp16")
        backward(reducer, values, {i: gradient(comm.rank, i) for i in range(4)})
        for bucket in range(len(reducer.buckets)):
            for piece in reducer.shards.pieces(bucket):
                expected = mean(4, piece.parameter).reshape(-1)[piece.first :][: piece.stop - piece.start]
                part = reducer.shards.gradients(bucket)[piece.start : piece.stop]
                assert part.dtype == np.float16
                np.testing.assert_array_equal(part, expected)

    run([0, 0, 1, 1], rank)


def test_parts_cover_all_parameters_once() -> None:
    def rank(comm: Communicator) -> Any:
        reducer, _ = reducer_of(comm, shard=True)
        return [piece for bucket in range(len(reducer.buckets)) for piece in reducer.shards.pieces(bucket)]

    covered = {index: np.zeros(np.prod(shape, dtype=int), int) for index, shape in enumerate(SHAPES.values())}
    for pieces in loopback.run(3, rank):
        for piece in pieces:
            covered[piece.parameter][piece.first : piece.first + piece.stop - piece.start] += 1
    assert all((count == 1).all() for count in covered.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overlap": "x"}, "overlap is 'x', expected True, False or None"),
        ({"overlap": 2}, "overlap is 2, expected True, False or None"),
        ({"sparse_as_dense": "yes"}, "sparse_as_dense is 'yes', expected True or False"),
        ({"sparse_as_dense": None}, "sparse_as_dense is None, expected True or False"),
        ({"within_node": 1.0}, "compress_within_node is 1.0, expected True or False"),
        ({"shard": "no"}, "shard is 'no', expected True or False"),
        ({"op": "maen"}, r"op must be one of mean, sum, got 'maen'; did you mean 'mean'\?"),
        ({"passes_per_step": "2"}, "backward_passes_per_step must be a whole number, at least 1, got '2'"),
        ({"passes_per_step": 1.5}, "backward_passes_per_step must be a whole number, at least 1, got 1.5"),
        ({"predivide": "2"}, "gradient_predivide_factor must be a positive number, got '2'"),
        ({"bucket_cap_mib": "25"}, "bucket_cap_mib must be a positive number, got '25'"),
        ({"first_bucket_mib": float("nan")}, "first_bucket_mib must be a positive number, got nan"),
    ],
)
def test_options_of_other_types_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Options(**options)


@pytest.mark.parametrize("value", [True, np.True_, 1])
def test_flags_may_be_numbers(value: Any) -> None:
    options = Options(overlap=value, sparse_as_dense=value, passes_per_step=value)
    assert options.lines() == Options(overlap=True, sparse_as_dense=True).lines()


def test_options_that_sharding_excludes_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be compressed"):
        Options(shard=True, compression="int8")
    with pytest.raises(UsageError, match="shard_axis='node' needs shard=True"):
        Options(shard_axis="node")

    def rank(comm: Communicator) -> None:
        reducer, _ = reducer_of(comm, shard=True)
        with pytest.raises(UsageError, match="join"):
            reducer.contribute_nothing()

    run(ONE_NODE, rank)


def test_a_sparse_gradient_detected_late_cannot_be_sharded() -> None:
    def rank(comm: Communicator) -> None:
        reducer, values = reducer_of(comm, [GRADIENTS[0], Gradient("table", (6, 2), "float64")], shard=True)
        reducer.begin()
        if comm.rank == 1:
            values.give_rows(1, np.array([1]), np.ones((1, 2)))
            reducer.ready(1)
        with pytest.raises(UsageError, match="buckets are sharded: pass sparse_as_dense=True"):
            reducer.end()

    run(ONE_NODE, rank)


def test_earlier_results_do_not_change() -> None:
    def rank(comm: Communicator) -> None:
        reducer, values = reducer_of(comm)
        results_ = []
        for step in range(4):
            results_.append(backward(reducer, values, {i: gradient(comm.rank, i, step) for i in range(4)}))
            for before, results in enumerate(results_):
                for index, result in enumerate(results):
                    np.testing.assert_array_equal(result, mean(2, index, before))

    run(ONE_NODE, rank)


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_sparse_gradients_are_reduced_by_rows(op: str) -> None:
    """Sparse gradients travel as rows; ranks detect them in the first step, or declare them before."""

    def rank(comm: Communicator) -> None:
        gradients = [GRADIENTS[0], Gradient("table", (6, 2), "float64")]
        for sparse in ([], [1]):
            reducer, values = reducer_of(comm, gradients, sparse=sparse, op=op)
            for step in range(3):
                reducer.begin()
                values.give(0, gradient(comm.rank, 0, step))
                reducer.ready(0)
                if comm.rank == 0 or step:
                    values.give_rows(1, np.array([comm.rank, 3]), np.full((2, 2), 4.0 * comm.rank + step))
                    reducer.ready(1)
                reducer.end()
                numbers, rows = values.rows_result(1)
                ranks = range(comm.size) if step else [0]
                assert numbers.tolist() == [number for r in ranks for number in (r, 3)]
                scale = comm.size if op == "mean" else 1
                assert rows[:, 0].tolist() == [(4.0 * r + step) / scale for r in ranks for _ in range(2)]
                values.result(0)

    run(ONE_NODE, rank)


def test_a_joined_rank_adds_nothing() -> None:
    def rank(comm: Communicator) -> None:
        reducer, values = reducer_of(comm)
        for step in range(comm.rank + 1):
            results = backward(reducer, values, {i: gradient(comm.rank, i, step) for i in range(4)})
            there = [r for r in range(comm.size) if r >= step]
            np.testing.assert_array_equal(results[3], mean(comm.size, 3, step, there))
        assert reducer.contribute_nothing() == comm.size - 1 - comm.rank

    loopback.run(3, rank)


def test_a_joined_rank_undoes_a_reduction_that_is_not_finite() -> None:
    """It counted the step that all others skipped, so later ones were compressed differently."""

    def rank(comm: Communicator) -> Any:
        narrow = [replace(one, dtype="float32") for one in GRADIENTS]
        reducer, values = reducer_of(comm, narrow, compression="dgc", within_node=True)
        for value in (1.0, 2.0, np.inf) if comm.rank == 0 else (1.0, 2.0):
            backward(reducer, values, {i: np.full(one.shape, value, np.float32) for i, one in enumerate(narrow)})
            if np.isfinite(value):
                reducer.stepped()
            reducer.cleared()
        reducer.contribute_nothing()
        return {name: int(state["step"]) for name, state in reducer.compression.state().items()}

    first, second = run(TWO_NODES, rank)
    assert first == second != {}


@pytest.mark.parametrize("overlap", [True, False])
def test_an_abandoned_backward_raises_on_the_other_ranks(overlap: bool) -> None:
    """They took its finished buckets for gradients. A joined rank does not take part."""

    def rank(comm: Communicator) -> None:
        reducer, values = reducer_of(comm, overlap=overlap)
        backward(reducer, values, {i: gradient(comm.rank, i) for i in range(4)})
        if comm.rank == 2:
            assert reducer.contribute_nothing() == 2
            return
        reducer.begin()
        for index in (3, 2) if comm.rank else range(4):
            values.give(index, gradient(comm.rank, index))
            reducer.ready(index)
        if comm.rank:
            reducer.cleared()
        else:
            with pytest.raises(MismatchError, match=r"ended the backward of ranks \[1\].*this is rank 0 of 3"):
                reducer.end()
            reducer.cleared()
        values.forget_all()
        results = backward(reducer, values, {i: gradient(comm.rank, i, 1) for i in range(4)})
        np.testing.assert_array_equal(results[3], mean(3, 3, 1, [0, 1]))
        reducer.contribute_nothing()

    loopback.run(3, rank)


def test_gradients_accumulate_over_passes() -> None:
    """With `no_sync`, and with several passes per step, a reduction has the latest gradients."""

    def rank(comm: Communicator) -> None:
        reducer, values = reducer_of(comm, passes_per_step=2)
        for index in (0, 1):
            reducer.begin()
            values.give(index, gradient(comm.rank, index))
            reducer.ready(index)
            reducer.end()
        np.testing.assert_array_equal(values.result(0), mean(2, 0))  # given in the pass that did not reduce
        np.testing.assert_array_equal(values.result(1), mean(2, 1))

    run(ONE_NODE, rank)
