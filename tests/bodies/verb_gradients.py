"""Gradients of the ordered verbs: the cases of both adapters, and their oracle in numpy.

A verb is linear: the results of all ranks, one after another, are a matrix times the inputs of all ranks. The oracle
builds this matrix in one process, from the verb's definition, and so has the gradients of any loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A call of a verb. shape: of a rank's input, by rank and size. call: (adapter, input, ranks, zeros) -> result.

    meaning: the results of all ranks from the inputs of all ranks, in numpy.
    """

    shape: Callable[[int, int], tuple[int, ...]]
    call: Callable[[Any, Any, Any, Callable[[tuple[int, ...]], Any]], Any]
    meaning: Callable[[list[Array]], list[Array]]


def counts(size: int) -> list[int]:
    """Rows of each rank, uneven, some without any."""
    return [(2 * rank + 1) % 4 for rank in range(size)]


def splits(rank: int, size: int) -> list[int]:
    return [(rank + 2 * peer + 1) % 3 for peer in range(size)]


def everyone(make: Callable[[list[Array]], Array]) -> Callable[[list[Array]], list[Array]]:
    """All ranks get the same."""
    return lambda xs: [make(xs)] * len(xs)


def cut(x: Array, rows: list[int]) -> list[Array]:
    return np.split(x, np.cumsum(rows)[:-1])


def shared_evenly(x: Array, size: int) -> list[Array]:
    return [np.asarray(part) for part in np.array_split(x, size)]


def exchanged(xs: list[Array]) -> list[Array]:
    size = len(xs)
    sent = [cut(x, splits(rank, size)) for rank, x in enumerate(xs)]
    return [np.concatenate([sent[peer][rank] for peer in range(size)]) for rank in range(size)]


def transposed(xs: list[Array]) -> list[Array]:
    size = len(xs)
    return [np.concatenate([np.split(x, size)[rank] for x in xs]) for rank in range(size)]


CASES: dict[str, Case] = {
    "all_reduce": Case(
        lambda rank, size: (2, 3),
        lambda ct, x, comm, zeros: ct.all_reduce(x, ranks=comm),
        everyone(lambda xs: np.sum(xs, 0)),
    ),
    "all_reduce mean": Case(
        lambda rank, size: (3,),
        lambda ct, x, comm, zeros: ct.all_reduce(x, "mean", ranks=comm),
        everyone(lambda xs: np.mean(xs, 0)),
    ),
    "all_reduce of a number": Case(
        lambda rank, size: (),
        lambda ct, x, comm, zeros: ct.all_reduce(x, ranks=comm),
        everyone(lambda xs: np.sum(xs, 0)),
    ),
    "all_reduce by a ring": Case(
        lambda rank, size: (5,),
        lambda ct, x, comm, zeros: ct.all_reduce(x, algorithm="ring", ranks=comm),
        everyone(lambda xs: np.sum(xs, 0)),
    ),
    "reduce_scatter": Case(
        lambda rank, size: (2 * size, 2),
        lambda ct, x, comm, zeros: ct.reduce_scatter(x, ranks=comm),
        lambda xs: shared_evenly(np.sum(xs, 0), len(xs)),
    ),
    "reduce_scatter mean, uneven": Case(
        lambda rank, size: (size + 1, 2),
        lambda ct, x, comm, zeros: ct.reduce_scatter(x, "mean", ranks=comm),
        lambda xs: shared_evenly(np.mean(xs, 0), len(xs)),
    ),
    "reduce_scatter_v": Case(
        lambda rank, size: (sum(counts(size)), 2),
        lambda ct, x, comm, zeros: ct.reduce_scatter_v(x, counts(comm.size), ranks=comm),
        lambda xs: cut(np.sum(xs, 0), counts(len(xs))),
    ),
    "reduce_scatter_v mean": Case(
        lambda rank, size: (sum(counts(size)),),
        lambda ct, x, comm, zeros: ct.reduce_scatter_v(x, counts(comm.size), "mean", ranks=comm),
        lambda xs: cut(np.mean(xs, 0), counts(len(xs))),
    ),
    "scan": Case(
        lambda rank, size: (2, 2),
        lambda ct, x, comm, zeros: ct.scan(x, ranks=comm),
        lambda xs: list(np.cumsum(xs, 0)),
    ),
    "broadcast": Case(
        lambda rank, size: (3,),
        lambda ct, x, comm, zeros: ct.broadcast(x, root=comm.size - 1, ranks=comm),
        everyone(lambda xs: xs[-1]),
    ),
    "all_gather": Case(
        lambda rank, size: (2, 2),
        lambda ct, x, comm, zeros: ct.all_gather(x, ranks=comm),
        everyone(np.concatenate),
    ),
    "all_gather of numbers": Case(
        lambda rank, size: (),
        lambda ct, x, comm, zeros: ct.all_gather(x, ranks=comm),
        everyone(np.array),
    ),
    "all_gather_v": Case(
        lambda rank, size: ((rank + 1) % 3, 2),
        lambda ct, x, comm, zeros: ct.all_gather_v(x, ranks=comm),
        everyone(np.concatenate),
    ),
    "scatter": Case(
        lambda rank, size: (2 * size, 2),
        lambda ct, x, comm, zeros: ct.scatter(x, comm.size - 1, ranks=comm),
        lambda xs: shared_evenly(xs[-1], len(xs)),
    ),
    "scatter of ignored tensors": Case(
        lambda rank, size: (size, 2) if rank == 0 else (3,),
        lambda ct, x, comm, zeros: ct.scatter(x, ranks=comm),
        lambda xs: shared_evenly(xs[0], len(xs)),
    ),
    "all_to_all": Case(
        lambda rank, size: (2 * size, 2),
        lambda ct, x, comm, zeros: ct.all_to_all(x, ranks=comm),
        transposed,
    ),
    "all_to_all_v": Case(
        lambda rank, size: (sum(splits(rank, size)), 2),
        lambda ct, x, comm, zeros: ct.all_to_all_v(x, splits(comm.rank, comm.size), ranks=comm)[0],
        exchanged,
    ),
    "send_recv": Case(
        lambda rank, size: (rank + 1,),
        lambda ct, x, comm, zeros: ct.send_recv(
            x, (comm.rank + 1) % comm.size, zeros(((comm.rank - 1) % comm.size + 1,)), (comm.rank - 1) % comm.size,
            7, ranks=comm,
        ),
        lambda xs: [xs[rank - 1] for rank in range(len(xs))],
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """The expected values of one rank: its input, its weights of the loss, its result, and both gradients."""

    x: Array
    weights: Array
    result: Array
    gradient: Array
    second: Array


def expected(case: Case, rank: int, size: int) -> Expected:
    """Return a rank's expected values.

    The loss of a rank is the sum of weights * result**2; `gradient` is that of the sum of all losses. `second` is the
    gradient of the sum of all squares of all gradients.
    """
    random = np.random.default_rng([size, len(CASES)])
    xs = [random.standard_normal(case.shape(peer, size)) for peer in range(size)]
    matrix = matrix_of(case.meaning, xs)
    results = case.meaning(xs)
    weights = [random.standard_normal(result.shape) for result in results]
    hessian = 2 * matrix.T @ np.diag(flat(weights)) @ matrix
    gradient = hessian @ flat(xs)
    second = 2 * hessian @ gradient
    return Expected(
        xs[rank], weights[rank], results[rank], part(gradient, xs, rank), part(second, xs, rank)
    )  # fmt: skip


def matrix_of(meaning: Callable[[list[Array]], list[Array]], xs: list[Array]) -> Array:
    columns = []
    for peer, x in enumerate(xs):
        for element in range(x.size):
            units = [np.zeros_like(one) for one in xs]
            units[peer].reshape(-1)[element] = 1
            columns.append(flat(meaning(units)))
    return np.array(columns).T


def flat(arrays: list[Array]) -> Array:
    return np.concatenate([array.reshape(-1) for array in arrays])


def part(values: Array, xs: list[Array], rank: int) -> Array:
    start = sum(x.size for x in xs[:rank])
    return values[start : start + xs[rank].size].reshape(xs[rank].shape)


def check(case: Case, comm: Any, differentiate: Callable[[Array, Array], tuple[Any, Any, Any]]) -> None:
    """Compare the result, gradient and second gradient from `differentiate` with the oracle's."""
    correct = expected(case, comm.rank, comm.size)
    result, gradient, second = differentiate(correct.x, correct.weights)
    for actual, right in ((result, correct.result), (gradient, correct.gradient), (second, correct.second)):
        assert actual.shape == right.shape and actual.dtype == right.dtype
        np.testing.assert_allclose(actual, right, rtol=1e-12, atol=1e-12)


def slopes(comm: Any, loss: Callable[[Array], float], x: Array, step: float = 1e-4) -> Array:
    """Return finite differences, across all ranks, of the sum of their losses with respect to this rank's input."""
    differences = np.zeros(x.size)
    for rank, size in enumerate(comm.all_gather_object(x.size)):
        for element in range(size):
            sums = []
            for sign in (1, -1):
                moved = x.copy()
                if comm.rank == rank:
                    moved.reshape(-1)[element] += sign * step
                sums.append(float(comm.all_reduce(np.array([loss(moved)]))[0]))
            if comm.rank == rank:
                differences[element] = (sums[0] - sums[1]) / (2 * step)
    return differences.reshape(x.shape)
