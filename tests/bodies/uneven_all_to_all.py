"""all_to_all_v with counts and memory of every kind, against numpy's results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from commlib.dtypes import Array, numpy_dtype
from commlib.errors import UsageError
from tests.oracles.oracle import assert_same

MOST = 4  # ranks


@dataclass(frozen=True)
class Case:
    """Counts from each rank to each, and which ranks have their arrays and results in symmetric memory."""

    counts: tuple[tuple[int, ...], ...]
    row: tuple[int, ...] = ()
    dtype: str = "float32"
    symmetric_x: tuple[bool, ...] = (False,) * MOST
    symmetric_out: tuple[bool, ...] = (False,) * MOST

    def splits(self, comm: Any) -> list[int]:
        return list(self.counts[comm.rank][: comm.size])

    def takes(self, comm: Any) -> list[int]:
        return [sent[comm.rank] for sent in self.counts[: comm.size]]


def cases(most: int) -> st.SearchStrategy[Case]:
    """Return cases with counts up to `most`."""
    count = st.one_of(st.just(0), st.integers(0, 5), st.integers(0, most))
    four = st.tuples(*[count] * MOST)
    some = st.one_of(st.just((False,) * MOST), st.just((True,) * MOST), st.tuples(*[st.booleans()] * MOST))
    return st.builds(
        Case, st.tuples(*[four] * MOST), st.sampled_from([(), (3,), (2, 2), (0,)]),
        st.sampled_from(["float32", "bfloat16", "int8", "complex128"]), some, some,
    )  # fmt: skip


def memory(comm: Any, symmetric: Sequence[bool], rows: int, case: Case) -> Array:
    """Return an array; a symmetric one is in another place of its segment on every rank. Collective."""
    longest = max(max(sum(sent[: comm.size]) for sent in case.counts), max(map(sum, zip(*case.counts, strict=True))))
    segment = comm.empty((longest + 5 * comm.size, *case.row), case.dtype)
    first = 5 * comm.rank
    if symmetric[comm.rank]:
        return segment[first : first + rows]  # type: ignore[no-any-return]
    return np.zeros((rows, *case.row), numpy_dtype(case.dtype))


def check(comm: Any, case: Case) -> None:
    """Call it in every way."""
    splits, takes, rank = case.splits(comm), case.takes(comm), comm.rank
    x, out = memory(comm, case.symmetric_x, sum(splits), case), memory(comm, case.symmetric_out, sum(takes), case)
    sent = [_values(case, sender, sum(case.counts[sender][: comm.size])) for sender in range(comm.size)]
    starts = [sum(case.counts[sender][:rank]) for sender in range(comm.size)]
    received_parts = [sent[sender][start : start + takes[sender]] for sender, start in enumerate(starts)]
    expected = np.concatenate(received_parts)
    x[...] = sent[rank]
    attempts: list[Any] = []
    for sizes in (None, takes):
        for result in (None, out):
            options = {"takes": sizes, "out": result}
            plan = comm.plan_all_to_all_v(x, splits, **options)
            attempts += [
                (result, lambda options=options: comm.all_to_all_v(x, splits, **options)),
                (result, lambda options=options: comm.all_to_all_v_async(x, splits, **options).wait()),
                (result, plan),
                (result, lambda plan=plan: plan.start().wait()),
                (result, plan),
            ]
    for result, attempt in attempts:
        out[...] = 0
        comm.barrier()  # a fast rank may write into memory that a slow one clears
        received, lengths = attempt()
        assert result is None or received is out
        assert_same(received, expected)
        assert lengths.dtype == np.int64 and lengths.tolist() == takes
        assert_same(x, sent[rank])


def check_misfit(comm: Any, case: Case, odd: int) -> None:
    """The result of one rank has the wrong size: only this rank gets an error, after its part."""
    splits, takes = case.splits(comm), case.takes(comm)
    x, is_odd = memory(comm, case.symmetric_x, sum(splits), case), comm.rank == odd % comm.size
    out = memory(comm, case.symmetric_out, sum(takes) + is_odd, case)
    try:
        comm.all_to_all_v(x, splits, out=out)
    except UsageError as error:
        assert is_odd and f"rank {comm.rank} received {sum(takes)} rows" in str(error)
        assert f"out has {sum(takes) + 1}" in str(error)
        assert not out.astype(bool).any()
    else:
        assert not is_odd


def _values(case: Case, sender: int, rows: int) -> Array:
    shape = (rows, *case.row)
    values = np.arange(np.prod(shape, dtype=int)) % 101 + 1 + sender
    return values.reshape(shape).astype(numpy_dtype(case.dtype))
